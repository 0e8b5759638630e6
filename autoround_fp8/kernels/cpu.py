"""CPU kernel: FP8 weights stay FP8 in memory and are decoded for each product by integer arithmetic.

torch's own FP8 casts are scalar on a CPU; the same bits come out of a few vectorised integer passes. The product runs
in bfloat16 where the CPU has it, in float32 elsewhere (codes are exact in both). Never `torch._scaled_mm`: on a CPU it
is an emulation.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from autoround_fp8.device import has_fast_bfloat16
from autoround_fp8.kernels.base import LinearProblem
from autoround_fp8.numerics.fp8 import FP8_MAX

# An E4M3 code shifted into a bfloat16's bits has the right mantissa and an exponent that is too small by 120.
_EXPONENT_SHIFT = 2.0**120
_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_STEPS = 2.0**9


def decode_fp8(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of E4M3FN codes (subnormals included, NaN codes not) in bfloat16 or float32, exactly.

    Args:
        codes: `float8_e4m3fn`, contiguous, any shape.
        dtype: torch.bfloat16 or torch.float32.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    values = bits.bitwise_left_shift_(4).bitwise_and_(-0x7810).view(torch.bfloat16)  # mask 0x87f0
    return values.to(dtype, copy=True).mul_(_EXPONENT_SHIFT)


def round_to_fp8_values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values that `quantize_fp8(x, scale)` codes, in float32, without the slow cast there and back.

    Args:
        x: Any float dtype and shape.
        scale: Float32 `[1]`.

    Returns:
        Float32 of x's shape, bit-equal to `quantize_fp8(x, scale).float()`; NaN stays NaN.
    """
    y = x.float() / scale
    y.clamp_(-FP8_MAX, FP8_MAX)
    small = (y * _SUBNORMAL_STEPS).round_().mul_(1.0 / _SUBNORMAL_STEPS)
    bits = y.view(torch.int32)
    # Round half to even at bit 20, where E4M3's mantissa ends.
    tie = bits.bitwise_right_shift(20).bitwise_and_(1).add_(0x7FFFF)
    rounded = (bits + tie).bitwise_and_(-0x100000).view(torch.float32)
    return torch.where(y.abs() < _SMALLEST_NORMAL, small, rounded)


class CpuKernel:
    """Decodes the weight, multiplies, rescales; see the module docstring."""

    name = "cpu"

    def unsupported_reason(self, problem: LinearProblem) -> str | None:
        """Anything but a CPU is refused."""
        return None if problem.device.type == "cpu" else f"the layer is on {problem.device}, not on a CPU"

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes the layer; shapes as of `reference_linear`."""
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and has_fast_bfloat16(x.device) else torch.float32
        y = F.linear(round_to_fp8_values(x, input_scale).to(dtype), decode_fp8(weight, dtype)).float()
        y *= input_scale * weight_scale.reshape(-1)
        if bias is not None:
            y += bias
        return y.to(x.dtype)
