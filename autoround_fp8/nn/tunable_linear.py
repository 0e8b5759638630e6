"""A quantised weight whose codes and scale can still move, and an input quantiser that lets gradients through.

The rounding offsets live in local FP8 steps, not in units of the scale: FP8's steps grow with the value, and half a
unit of the scale is less than a step for most weights. Read `tuning/signround.py` for who moves them.
"""

from __future__ import annotations

from typing import Any

import torch

from autoround_fp8.numerics.fp8 import FP8_DTYPE, FP8_MAX, fp8_step, round_to_fp8, round_up_to_bfloat16

# How far inside its rounding cell a weight may be at the start, in local steps: offset 0 then means the codes given.
_INSIDE = 0.49


class TunableWeight:
    """One layer's weight: `scale * factor * round(weight / (scale * factor) + offset * step)`.

    Args:
        weight: The original, `[out, in]`.
        codes: What it was quantised to, `float8_e4m3fn` `[out, in]`: where tuning starts.
        scale: Float32 `[out, 1]` or `[1]`.
        generator: Of the places that weights get whose codes are not the nearest ones.
    """

    def __init__(
        self, weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, generator: torch.Generator | None = None
    ):
        start = codes.float()
        up, down = fp8_step(start), fp8_step(start * (1.0 - 2.0**-5))  # below a power of two the steps are half as long
        low = start - _INSIDE * torch.where(start > 0, down, up)
        high = start + _INSIDE * torch.where(start < 0, down, up)
        self._base = weight.float() / scale
        # Error compensation moves codes off the nearest ones. Put at the edge of their cells, all these would go back
        # at the first step, and put in the middle all would move at one later step: so they are spread over the cell.
        is_outside = (self._base < low) | (self._base > high)
        spread = torch.rand(start.shape, generator=generator).to(start.device)
        self._base = torch.where(is_outside, low + (high - low) * spread, self._base)
        self._steps = fp8_step(self._base)
        self._scale = scale
        self.offset = torch.zeros_like(self._base)

    def scale(self, factor: torch.Tensor) -> torch.Tensor:
        """The scale, float32 `[out, 1]` or `[1]`, bfloat16-representable; `factor` has the same shape."""
        return round_up_to_bfloat16(self._scale * factor)

    def rounded(self, factor: torch.Tensor) -> torch.Tensor:
        """The values of the present codes, float32 `[out, in]`, in units of the scale."""
        return round_to_fp8(self._shifted(factor).clamp_(-FP8_MAX, FP8_MAX))

    def codes(self, factor: torch.Tensor) -> torch.Tensor:
        """The present codes, `float8_e4m3fn` `[out, in]`."""
        return self._shifted(factor).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)

    def factor_gradient(self, grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Gradient of the factor from that of the dequantised weight `[out, in]`; rounding counts as the identity."""
        unrounded = self._shifted(factor)
        error = round_to_fp8(unrounded.clamp(-FP8_MAX, FP8_MAX)).sub_(unrounded).mul_(grad)
        total = error.sum(dim=1, keepdim=True) if self._scale.ndim == 2 else error.sum().reshape(1)
        return total * self._scale

    def _shifted(self, factor: torch.Tensor) -> torch.Tensor:
        # The rounding error of the scale to bfloat16 is part of what the codes have to make up for.
        return torch.addcmul(self._base * (self._scale / self.scale(factor)), self.offset, self._steps)


class _QuantizeInput(torch.autograd.Function):
    """Quantises to FP8 and back; the gradient passes unchanged, also to the scale as if rounding were the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        quantized = round_to_fp8((x.float() / scale).clamp_(-FP8_MAX, FP8_MAX)).mul_(scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, quantized, scale)
        return quantized

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.needs_input_grad[1]:
            return grads[0], None
        x, quantized, scale = ctx.saved_tensors
        return grads[0], ((quantized - x).float() * grads[0]).sum().reshape(1) / scale


def quantize_input(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Static input quantisation with a gradient that passes straight through.

    Args:
        x: `[..., in]`, any float dtype.
        scale: Float32 `[1]`, wide enough that nothing saturates (a saturated value gets a gradient too).

    Returns:
        `x` rounded to the values that FP8 codes stand for with this scale, in x's dtype.
    """
    quantized: torch.Tensor = _QuantizeInput.apply(x, scale)
    return quantized
