"""How far two next-token distributions are apart, and how many of them fit into memory at a time."""

from __future__ import annotations

import math

import torch

# Logits per piece: 32 MB in float32, and four tensors of this size are alive at a time.
_PIECE_ELEMENTS = 2**23


def kl_per_token(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats of every token.

    Args:
        log_p: Log-probabilities `[tokens, vocab]`.
        log_q: The same of the other distribution.

    Returns:
        `[tokens]`; NaN where a distribution holds NaN.
    """
    # xlogy's rule: an entry whose probability underflows to 0 counts nothing, even against log q = -inf.
    terms = (log_p - log_q).mul_(log_p.exp())
    return terms.masked_fill_(log_p == -math.inf, 0.0).sum(dim=-1)


def piece_length(vocab_size: int) -> int:
    """How many tokens' logits to make at a time."""
    return max(1, _PIECE_ELEMENTS // vocab_size)
