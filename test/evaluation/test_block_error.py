"""Errors block by block: zero for an equal pair, in the right block, and as plain transformers computes them."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from make_block_fp8 import make_block_fp8
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model, tiny_tokenizer
from tiny_moe_models import save_tiny_moe_model, tiny_moe_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from autoround_fp8.autoround import AutoRound
from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.evaluation import block_error
from autoround_fp8.evaluation.block_error import BlockError, block_errors, format_block_errors, trace_blocks
from autoround_fp8.evaluation.compare import compare_checkpoints
from autoround_fp8.evaluation.logits import LogitStream
from autoround_fp8.inference.load import load_model

TOKENS = torch.randint(4, 100, (2, 24), generator=torch.Generator().manual_seed(0))
SIZE = {"nsamples": 2, "seqlen": 24}


def errors_of(reference, candidate, tokens=TOKENS):
    return block_errors(LogitStream(candidate), trace_blocks(LogitStream(reference), [tokens]))


@torch.no_grad()
def _disturb(module: nn.Module, factor: float = 0.1) -> None:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.add_(noise.to(parameter) * factor * parameter.abs().mean())


@torch.no_grad()
def _recomputed(reference, candidate, tokens) -> list[tuple[float, float]]:
    """Both errors of every Llama block, layer by layer with the model's own parts, no hooks."""
    positions = torch.arange(tokens.shape[1])[None]
    expected = actual = reference.model.embed_tokens(tokens)
    tables = reference.model.rotary_emb(expected, positions)
    found = []
    for original, block in zip(reference.model.layers, candidate.model.layers, strict=True):
        # No mask: the attention itself is causal then.
        actual, own, after = (
            layer(x, attention_mask=None, position_ids=positions, position_embeddings=tables)
            for layer, x in ((block, actual), (block, expected), (original, expected))
        )
        relative = [(h - after).double().norm(dim=-1) ** 2 / after.double().norm(dim=-1) ** 2 for h in (actual, own)]
        found.append(tuple(float(values.mean()) for values in relative))
        expected = after
    return found


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", dtype=torch.float32, num_hidden_layers=4)


@pytest.fixture
def disturbed():
    """The same model with a change in the last linear of the third block."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=4)
    _disturb(model.model.layers[2].mlp.down_proj)
    return model


def test_an_equal_pair_has_no_error_at_all(plain_checkpoint):
    report = compare_checkpoints(plain_checkpoint, plain_checkpoint, **SIZE)
    assert [error.name for error in report.block_errors] == ["model.layers.0", "model.layers.1"]
    assert all(error.stream_error == error.own_error == 0.0 for error in report.block_errors)
    assert all(error.stream_sqnr_db == error.own_sqnr_db == math.inf for error in report.block_errors)


def test_an_error_shows_where_it_arises(llama, disturbed):
    errors = errors_of(llama, disturbed)
    assert [error.own_error > 0.0 for error in errors] == [False, False, True, False]
    assert [error.stream_error > 0.0 for error in errors] == [False, False, True, True]
    assert errors[2].own_error == errors[2].stream_error


def test_another_embedding_is_no_blocks_own_error(llama):
    other = tiny_model("llama", dtype=torch.float32, num_hidden_layers=4)
    _disturb(other.model.embed_tokens)
    errors = errors_of(llama, other)
    assert all(error.own_error == 0.0 and error.stream_error > 0.0 for error in errors)


def test_equals_plain_transformers(llama, disturbed):
    for index in (0, 1, 3):
        _disturb(disturbed.model.layers[index], 0.03)
    errors = errors_of(llama, disturbed)
    expected = _recomputed(llama, disturbed, TOKENS)
    assert [(e.stream_error, e.own_error) for e in errors] == [pytest.approx(pair, rel=1e-4) for pair in expected]
    assert len({error.own_error for error in errors}) == 4


def test_an_export_equals_a_recomputation(tmp_path):
    source = save_tiny_model(tmp_path / "source", "llama", num_hidden_layers=3)
    AutoRound(str(source), nsamples=2, seqlen=32).quantize_and_save(tmp_path / "fp8")
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    candidate = load_model(tmp_path / "fp8", dtype=torch.float32, kernel="reference")
    expected = _recomputed(reference, candidate, TOKENS)
    # Float32 rounding moves a few inputs across a step of FP8.
    errors = [(e.stream_error, e.own_error) for e in errors_of(reference, candidate)]
    assert errors == [pytest.approx(pair, rel=1e-2) for pair in expected]
    assert all(0.0 < own < 0.1 for _, own in errors)


BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB_SIZE}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}


# bloom's blocks return tuples, gpt_neox and opt name them differently, gemma4's last two use the keys of the first two.
@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("gemma2", dtype=torch.float32),
        lambda: tiny_model("gemma3_text", dtype=torch.float32),
        lambda: tiny_model("gpt_neox", dtype=torch.float32),
        lambda: tiny_model("opt", dtype=torch.float32),
        lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **BLOOM), dtype=torch.float32).eval(),
        lambda: tiny_moe_model("mixtral", dtype=torch.float32),
        lambda: tiny_moe_model("deepseek_v3", dtype=torch.float32),
        lambda: tiny_moe_model("nemotron_h", dtype=torch.float32),
        lambda: tiny_moe_model("gemma4_text", dtype=torch.float32, **SHARED_KEYS),
    ],
    ids=["gemma2", "gemma3", "gpt_neox", "opt", "bloom", "mixtral", "deepseek_v3", "nemotron_h", "gemma4"],
)
def test_families(make):
    reference, candidate = make(), make()
    candidate.load_state_dict(reference.state_dict())
    assert all(e.stream_error == e.own_error == 0.0 for e in errors_of(reference, candidate))
    blocks = list(LogitStream(candidate).blocks.values())
    _disturb(blocks[-1])
    *others, last = errors_of(reference, candidate)
    assert all(e.stream_error == e.own_error == 0.0 for e in others)
    assert last.own_error == last.stream_error > 0.0


def test_a_native_fp8_reference(tmp_path):
    save_tiny_moe_model(tmp_path / "source", "mixtral")
    make_block_fp8(tmp_path / "source", tmp_path / "native")
    tiny_tokenizer().save_pretrained(tmp_path / "native")
    AutoRound(str(tmp_path / "native"), nsamples=2, seqlen=32).quantize_and_save(tmp_path / "fp8")
    errors = compare_checkpoints(tmp_path / "native", tmp_path / "fp8", **SIZE).block_errors
    assert len(errors) == 2
    assert all(0.0 < error.own_error < 0.1 for error in errors)


def test_a_composite_reference(tmp_path):
    text = tiny_model("gemma3_text").config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 120, "boi_token_index": 121, "eoi_token_index": 122}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, **tokens)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    AutoRound(str(tmp_path / "source"), nsamples=2, seqlen=32).quantize_and_save(tmp_path / "fp8")
    errors = compare_checkpoints(tmp_path / "source", tmp_path / "fp8", **SIZE).block_errors
    assert len(errors) == 6
    assert all(".layers." in error.name and 0.0 < error.own_error < 0.1 for error in errors)


def test_blocks_of_another_number_or_width_are_left_out(llama, caplog):
    caplog.set_level(logging.WARNING)
    assert errors_of(llama, tiny_model("llama", dtype=torch.float32)) == ()
    assert "4 blocks of width 64 in the reference, 2 of width 64 in the candidate" in caplog.text
    assert errors_of(llama, tiny_model("llama", dtype=torch.float32, num_hidden_layers=4, hidden_size=32)) == ()


def test_one_token_of_huge_states_does_not_hide_the_others():
    expected = torch.ones(4, 8)
    expected[0] = 1e6
    hidden = expected.clone()
    hidden[1:] *= 1.1
    assert block_error._error_sum(hidden, expected) == pytest.approx(3 * 0.01, rel=1e-5)


def test_states_of_zero():
    assert block_error._error_sum(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0
    assert block_error._error_sum(torch.ones(1, 3), torch.zeros(1, 3)) == math.inf


@pytest.mark.parametrize(
    ("shapes", "kept"),
    [
        ([(2, 24)], [(2, 24)]),
        ([(4, 200), (4, 200)], [(4, 128)]),
        ([(1, 2000), (3, 100), (1, 90), (1, 80)], [(1, 128), (3, 100), (1, 80)]),
        ([(64, 20)], [(25, 20)]),
    ],
)
def test_a_bounded_number_of_tokens_is_kept(shapes, kept, llama):
    model = tiny_model("llama", dtype=torch.float32)
    trace = trace_blocks(LogitStream(model), [torch.full(shape, 7) for shape in shapes])
    assert [tuple(tokens.shape) for tokens in trace.batches] == kept
    for tokens, states in zip(trace.batches, trace.hidden_states, strict=True):
        assert [tuple(state.shape) for state in states] == [(*tokens.shape, 64)] * 3


def test_documents_are_weighted_by_their_tokens(llama, disturbed):
    halves = [TOKENS[:1], TOKENS[1:, :8]]
    stream, other = LogitStream(llama), LogitStream(disturbed)
    both, first, second = (block_errors(other, trace_blocks(stream, b)) for b in (halves, halves[:1], halves[1:]))
    assert both[3].stream_error == pytest.approx((24 * first[3].stream_error + 8 * second[3].stream_error) / 32)


def test_nothing_is_left_behind(llama, disturbed):
    with torch.no_grad():
        before = disturbed(TOKENS).logits
        errors_of(llama, disturbed)
        assert torch.equal(disturbed(TOKENS).logits, before)
    blocks = LogitStream(disturbed).blocks.values()
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_a_block_that_runs_twice_is_refused():
    model = tiny_model("llama", dtype=torch.float32)
    layers = model.model.layers
    layers[1] = layers[0]
    with pytest.raises(UnsupportedModelError, match="6 hidden states seen in one forward of 2 decoder blocks"):
        trace_blocks(LogitStream(model), [TOKENS])


@pytest.mark.parametrize(("error", "db"), [(0.01, 20.0), (1.0, 0.0), (0.0, math.inf), (math.inf, -math.inf)])
def test_sqnr_is_positive_for_small_errors(error, db):
    fields = BlockError(name="b", stream_error=error, own_error=1.0).to_dict()
    assert fields == {
        "name": "b",
        "stream_error": error,
        "stream_sqnr_db": pytest.approx(db),
        "own_error": 1.0,
        "own_sqnr_db": 0.0,
    }


def test_table_shows_the_worst_or_all():
    errors = [BlockError(name=f"b.{i}", stream_error=0.1 * i, own_error=own) for i, own in enumerate((0.1, 0.0, 0.3))]
    heading, *lines = format_block_errors(errors)
    assert heading.split("  ")[0] == "block"
    assert [line.split()[0] for line in lines] == ["b.0", "b.1", "b.2"]
    assert lines[0].split() == ["b.0", "0.00e+00", "(", "inf", "dB)", "1.00e-01", "(", "10.00", "dB)"]
    assert [line.split()[0] for line in format_block_errors(errors, 2)[1:]] == ["b.2", "b.0"]
