"""Round to nearest: the scale from the largest absolute weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoround_fp8.numerics.fp8 import amax_to_scale
from autoround_fp8.numerics.granularity import PER_TENSOR, weight_amax
from autoround_fp8.schemes import QuantizationScheme


def absmax_scale(weight: torch.Tensor, scheme: QuantizationScheme, fused: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """The smallest scale with which no weight saturates.

    Args:
        weight: `[out, in]`, finite, any float dtype of 16 bits or more.
        scheme: Its `group_size` says which weights share a scale.
        fused: Weights of the layers that engines fuse with this one: a scale per tensor is then one for all of them,
            since engines would round to the largest one again.

    Returns:
        Float32 `[out, 1]` or `[1]`.
    """
    amax = weight_amax(weight, scheme.group_size)
    if scheme.group_size == PER_TENSOR:
        for other in fused:
            amax = torch.maximum(amax, weight_amax(other, PER_TENSOR))
    return amax_to_scale(amax)
