"""Round to nearest: the scale from the largest absolute weight, each weight to the nearest code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoround_fp8.numerics.fp8 import amax_to_scale, quantize_fp8
from autoround_fp8.numerics.granularity import PER_TENSOR, weight_amax
from autoround_fp8.schemes import QuantizationScheme


def quantize_weight(
    weight: torch.Tensor, scheme: QuantizationScheme, fused: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises one weight.

    Args:
        weight: `[out, in]`, finite, any float dtype of 16 bits or more.
        scheme: Its `group_size` says which weights share a scale.
        fused: Weights of the layers that engines fuse with this one: a scale per tensor is then one for all of them,
            since engines would round to the largest one again.

    Returns:
        Codes `[out, in]` float8_e4m3fn, and scales `[out, 1]` or `[1]` float32.
    """
    amax = weight_amax(weight, scheme.group_size)
    if scheme.group_size == PER_TENSOR:
        for other in fused:
            amax = torch.maximum(amax, weight_amax(other, PER_TENSOR))
    scale = amax_to_scale(amax)
    return quantize_fp8(weight, scale), scale
