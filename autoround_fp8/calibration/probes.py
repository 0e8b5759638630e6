"""Short token sequences that widen the input ranges, beside the calibration samples.

The largest inputs of a layer come from rare tokens: the first one of a sequence, on which attention rests, and, later
on, digits, code and the like. A few samples show few of them. So most probes start with another token each: special
ones, line ends, digits, punctuation, and a spread of the vocabulary; some are pieces of a text of odd kinds.
What probes show counts for nothing but ranges (see `compressor.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from autoround_fp8.calibration.record_encoder import tokenize

# Together at most 512 tokens, 3% of a run over 32 x 512. Starts are short: what matters in them is the first token.
_NUM_STARTS, _START_LENGTH = 96, 4
_NUM_PIECES, _PIECE_LENGTH = 4, 32
# Some vocabularies have thousands of special tokens, nearly all of them unused.
_MAX_SPECIAL = 24

_START_TEXTS = ["\n", "\n\n", " ", "  ", "\t", *"0123456789", *".,:;!?-'\"()[]{}<>/\\=#*_|", "The", " the", "I", " a"]

_PASSAGE = """On 3 March 2004 at 09:45, 1,250,000 of them (62.5%) were sold for $7.99; in the 1980s only 300.

def f(x, y=None):
    return [i ** 2 for i in range(10)]

{"id": 7, "url": "https://www.example.org/a_b?c=1&d=%20", "ok": true}
| 1 | 2.50 | -0.7 |
* one, two, or three; $x^2 + y_1 \\leq 0$ <b>NO!</b>
\u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d 10\u00a0km/h = 0xFF"""


def make_probes(
    tokenizer: Any, *, vocab_size: int, seed: int, max_positions: int | None = None, padding_id: int | None = None
) -> tuple[torch.Tensor, ...]:
    """The probe batches of a model; the same arguments give the same ones.

    Args:
        tokenizer: A Hugging Face tokenizer, which is not changed; None: all ids are spread over the vocabulary.
        vocab_size: Rows of the model's input embedding; no id is as large, nor outside the tokenizer's vocabulary.
        seed: Decides which ids stand for the vocabulary.
        max_positions: Most positions the model can take.
        padding_id: An id that never is an input; the tokenizer's padding token is left out as well.

    Returns:
        int64 `[sequences, tokens]` each, never padded; none if the vocabulary has nothing but padding.
    """
    num_ids, padding = vocab_size, {padding_id}
    named: list[int] = []
    passage: list[int] = []
    if tokenizer is not None:
        num_ids = min(num_ids, len(tokenizer))
        padding |= {tokenizer.pad_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
        *texts, passage = (ids.tolist() for ids in tokenize([*_START_TEXTS, _PASSAGE], tokenizer, False))
        named = list(dict.fromkeys([*_special_ids(tokenizer), *(token for ids in texts for token in ids)]))

    def usable(ids: list[int]) -> list[int]:
        return [token for token in ids if token < num_ids and token not in padding]

    vocabulary = usable(list(range(num_ids)))
    if not vocabulary:
        return ()
    spread = _spread(vocabulary, _NUM_STARTS * _START_LENGTH, seed)
    batches = (_starts(usable(named), spread), _pieces(usable(passage), max_positions or _PIECE_LENGTH))
    return tuple(batch[:, :max_positions].contiguous() for batch in batches if batch.numel())


def _starts(named: list[int], spread: list[int]) -> torch.Tensor:
    """`[sequences, tokens]`: named tokens, then others, come first; all named ones once more behind them."""
    count = _NUM_STARTS - min(len(named), _NUM_STARTS)
    ids = (named[:_NUM_STARTS] + spread[:count] + named + spread[count:])[: _NUM_STARTS * _START_LENGTH]
    return torch.tensor(ids).reshape(_START_LENGTH, _NUM_STARTS).t()


def _pieces(passage: list[int], max_positions: int) -> torch.Tensor:
    length = min(_PIECE_LENGTH, max_positions)
    count = min(len(passage) // length, _NUM_PIECES)
    return torch.tensor(passage[: count * length], dtype=torch.int64).reshape(count, length)


def _special_ids(tokenizer: Any) -> list[int]:
    """Ids of special tokens: the named ones (BOS ...), then those of the chat template, then some of the others."""
    # transformers' backend for mistral-common is the one tokenizer without added tokens.
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    template = str(tokenizer.chat_template)
    in_template = [token for text, token in sorted(added.items(), key=lambda item: item[1]) if text in template]
    ids = list(dict.fromkeys([*tokenizer.all_special_ids, *in_template]))[:_MAX_SPECIAL]
    others = sorted(set(added.values()) - set(ids))
    room = _MAX_SPECIAL - len(ids)
    return ids + others[:: max(1, -(-len(others) // room))][:room] if room else ids


def _spread(vocabulary: list[int], count: int, seed: int) -> list[int]:
    """Ids from all of the vocabulary, one from each of `count` parts of equal size, in random order."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)
    order = torch.randperm(count, generator=generator)
    places = (where * len(vocabulary) / count).long().clamp(max=len(vocabulary) - 1)
    return [vocabulary[place] for place in places[order].tolist()]
