"""Round to nearest: the scale from the largest absolute weight, each weight to the nearest code."""

from __future__ import annotations

import torch

from autoround_fp8.numerics.fp8 import amax_to_scale, quantize_fp8
from autoround_fp8.numerics.granularity import weight_amax
from autoround_fp8.schemes import QuantizationScheme


def quantize_weight(weight: torch.Tensor, scheme: QuantizationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises one weight.

    Args:
        weight: `[out, in]`, finite, any float dtype of 16 bits or more.
        scheme: Its `group_size` says which weights share a scale.

    Returns:
        Codes `[out, in]` float8_e4m3fn, and scales `[out, 1]` or `[1]` float32.
    """
    scale = amax_to_scale(weight_amax(weight, scheme.group_size))
    return quantize_fp8(weight, scale), scale
