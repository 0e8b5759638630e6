"""A model split at its output layer gives the same logits as in one forward."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.evaluation.logits import LogitStream

TOKENS = torch.randint(4, 100, (2, 24), generator=torch.Generator().manual_seed(0))


# gemma2 and gemma3 cap their logits, opt and gpt_neox name their modules differently.
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "opt", "gpt_neox", "phi3"])
def test_pieces_equal_one_forward(family):
    model = tiny_model(family, dtype=torch.float32)
    with torch.no_grad():
        expected = model(TOKENS).logits
    stream = LogitStream(model)
    hidden = stream.hidden_states(TOKENS)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected)  # nothing is left behind
    stream.release_blocks()
    for row in range(2):
        pieces = [stream.logits(hidden[row, start : start + 7]) for start in range(0, 24, 7)]
        # Matrix products of other shapes may round differently in the last bit.
        torch.testing.assert_close(torch.cat(pieces), expected[row], rtol=1e-5, atol=1e-5)


def test_released_blocks_are_gone():
    model = tiny_model("qwen3")
    stream = LogitStream(model)
    stream.hidden_states(TOKENS)
    before = sum(p.numel() for p in model.parameters())
    stream.release_blocks()
    left = sum(p.numel() for p in model.parameters())
    assert left == 2 * 128 * 64 + 64  # embedding, output layer, last norm
    assert left < before
    assert stream.blocks == {}


def test_blocks_are_named_in_order():
    model = tiny_model("gpt_neox")
    stream = LogitStream(model)
    assert list(stream.blocks.items()) == [(f"gpt_neox.layers.{i}", model.gpt_neox.layers[i]) for i in range(2)]
    assert stream.hidden_size == 64


def test_logits_are_float32_in_a_16_bit_model():
    stream = LogitStream(tiny_model("llama"))
    hidden = stream.hidden_states(TOKENS)
    assert hidden.dtype == torch.bfloat16
    assert stream.logits(hidden[0]).dtype == torch.float32


def test_a_decoder_that_is_not_run_is_refused(monkeypatch):
    model = tiny_model("llama")
    stream = LogitStream(model)
    monkeypatch.setattr(model, "forward", lambda **kwargs: None)
    with pytest.raises(UnsupportedModelError, match="ran 0 times"):
        stream.hidden_states(TOKENS)
