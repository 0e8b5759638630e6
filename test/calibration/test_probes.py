"""Probes start with every token that is special, never with padding, and never leave the vocabulary."""

from __future__ import annotations

import pytest
import torch
from tiny_models import BOS, EOS, PAD, UNK, VOCAB_SIZE, tiny_tokenizer

from autoround_fp8.calibration.probes import make_probes
from autoround_fp8.calibration.record_encoder import tokenize


def ids_of(batches: tuple[torch.Tensor, ...]) -> set[int]:
    return {token for batch in batches for token in batch.flatten().tolist()}


def test_special_tokens_line_ends_digits_and_signs_come_first() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w100", "w101"]})
    starts, pieces = make_probes(tokenizer, vocab_size=VOCAB_SIZE, seed=1)
    assert starts.dtype == pieces.dtype == torch.int64
    assert (starts.shape, pieces.shape) == ((96, 4), (4, 32))
    first = starts[:, 0].tolist()
    signs = [int(ids[0]) for ids in tokenize([*"0123456789", *".,:;!?()"], tokenizer, add_special_tokens=False)]
    assert {BOS, EOS, UNK, 100, 101, *signs} <= set(first)
    assert first[:3] == [BOS, EOS, UNK]
    assert {BOS, EOS, UNK, 100, 101, *signs} <= set(starts[:, 1:].flatten().tolist())


def test_padding_is_left_out_unless_it_is_also_eos() -> None:
    tokenizer = tiny_tokenizer()
    assert PAD not in ids_of(make_probes(tokenizer, vocab_size=VOCAB_SIZE, seed=1))
    assert 77 not in ids_of(make_probes(tokenizer, vocab_size=VOCAB_SIZE, seed=1, padding_id=77))
    assert 77 not in ids_of(make_probes(None, vocab_size=VOCAB_SIZE, seed=1, padding_id=77))
    tokenizer.pad_token = tokenizer.eos_token
    assert EOS in ids_of(make_probes(tokenizer, vocab_size=VOCAB_SIZE, seed=1))


def test_the_same_arguments_give_the_same_probes_and_another_seed_others() -> None:
    def probes(seed: int) -> list[list[int]]:
        return torch.cat([b.flatten() for b in make_probes(tiny_tokenizer(), vocab_size=100, seed=seed)]).tolist()

    assert probes(3) == probes(3) != probes(4)
    before = torch.random.get_rng_state()
    probes(5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 50, VOCAB_SIZE, 1000, 262_144])
def test_no_id_is_outside_either_vocabulary(vocab_size: int) -> None:
    without = make_probes(None, vocab_size=vocab_size, seed=1)
    assert [batch.shape for batch in without] == [(96, 4)]
    assert max(ids_of(without)) < vocab_size
    having = make_probes(tiny_tokenizer(), vocab_size=vocab_size, seed=1)
    assert max(ids_of(having), default=-1) < min(vocab_size, VOCAB_SIZE)
    assert (having == ()) == (vocab_size == 1)  # id 0 is padding


def test_the_spread_reaches_all_of_a_large_vocabulary() -> None:
    (starts,) = make_probes(None, vocab_size=262_144, seed=1)
    for ids in (starts, starts[:, 0]):
        per_eighth = torch.histc(ids.float(), 8, 0, 262_144)
        assert per_eighth.min() >= ids.numel() / 8 / 2.5
    assert len(ids_of((starts,))) == starts.numel()


@pytest.mark.parametrize("max_positions", [1, 2, 3, 5, 31, 32, 1000])
def test_probes_fit_into_the_models_positions(max_positions: int) -> None:
    batches = make_probes(tiny_tokenizer(), vocab_size=VOCAB_SIZE, seed=1, max_positions=max_positions)
    assert [batch.shape for batch in batches] == [(96, min(4, max_positions)), (4, min(32, max_positions))]


def test_of_thousands_of_special_tokens_those_of_the_chat_template_stay() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ '<|turn4000|>' }}")
    tokenizer.add_special_tokens({"additional_special_tokens": []})
    tokenizer.add_tokens([f"<|turn{i}|>" for i in range(5000)], special_tokens=True)
    (starts, _) = make_probes(tokenizer, vocab_size=10_000, seed=1)
    first = starts[:, 0].tolist()
    assert tokenizer.convert_tokens_to_ids("<|turn4000|>") == first[3]
    assert [first.index(token) for token in (BOS, EOS, UNK)] == [0, 1, 2]
    assert sum(token >= VOCAB_SIZE for token in first[:24]) > 15
    signs = [int(ids[0]) for ids in tokenize([*"0123456789"], tokenizer, add_special_tokens=False)]
    assert set(signs) <= set(first)


def test_the_tokenizer_stays_as_it_was() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    make_probes(tokenizer, vocab_size=VOCAB_SIZE, seed=1)
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5
