"""KL against torch's own, its edge, and that a piece of logits stays small."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from autoround_fp8.numerics.token_kl import kl_per_token, piece_length


def test_kl_is_that_of_torch() -> None:
    p, q = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    expected = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl_per_token(p, q), expected)
    assert (kl_per_token(p, p) == 0).all()


def test_entries_without_probability_count_nothing() -> None:
    log_p = torch.tensor([[0.0, -math.inf], [math.log(0.5), math.log(0.5)]])
    log_q = torch.tensor([[0.0, -math.inf], [0.0, -math.inf]])
    assert kl_per_token(log_p, log_q).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("side", [0, 1])
def test_nan_is_not_lost(side: int) -> None:
    pair = torch.zeros(2, 1, 3).log_softmax(-1)
    pair[side, 0, 1] = math.nan
    assert kl_per_token(pair[0], pair[1]).isnan().all()


@pytest.mark.parametrize("vocab_size", [128, 49_152, 262_144, 2**30])
def test_pieces_stay_small(vocab_size: int) -> None:
    assert piece_length(vocab_size) >= 1
    assert piece_length(vocab_size) * vocab_size * 4 <= max(2**26, vocab_size * 4)
