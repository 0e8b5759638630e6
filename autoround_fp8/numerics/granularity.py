"""Which elements of a tensor share one scale, and what shape the scales then have.

`group_size` follows AutoRound: -1 means one scale per output channel (of inputs: per token), 0 means one scale for the
tensor.
"""

from __future__ import annotations

import torch

PER_CHANNEL = -1
PER_TENSOR = 0
PER_TOKEN = -1


def weight_amax(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Largest absolute values of a weight.

    Args:
        weight: `[out_features, in_features]`, any float dtype but FP8 (FP8 lacks reductions).
        group_size: -1 (per channel) or 0 (per tensor).

    Returns:
        Float32 `[out_features, 1]` for -1, `[1]` for 0.

    Raises:
        ValueError: For any other group size.
    """
    if group_size == PER_CHANNEL:
        low, high = torch.aminmax(weight, dim=1, keepdim=True)
    elif group_size == PER_TENSOR:
        low, high = (value.reshape(1) for value in torch.aminmax(weight))
    else:
        raise ValueError(f"group_size ({group_size}) must be -1 (per channel) or 0 (per tensor)")
    return torch.maximum(low.abs(), high.abs()).float()
