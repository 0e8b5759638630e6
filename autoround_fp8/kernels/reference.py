"""The float32 oracle: how a W8A8-FP8 linear is defined. Shared by the compressor's simulation and inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from autoround_fp8.kernels.base import LinearProblem
from autoround_fp8.numerics.fp8 import decode_fp8, quantize_fp8, token_scale
from autoround_fp8.records import QuantizedLinear


def reference_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Quantises the input to FP8, multiplies codes with codes in float32, rescales, adds the bias.

    Args:
        x: `[..., in]`, any float dtype.
        weight: FP8 codes `[out, in]`.
        weight_scale: Float32 `[out, 1]` or `[1]`.
        input_scale: Float32 `[1]`; None = each token gets its own, see `token_scale`.
        bias: `[out]` or None.

    Returns:
        `[..., out]` in x's dtype.
    """
    scale = token_scale(x) if input_scale is None else input_scale
    y = F.linear(decode_fp8(quantize_fp8(x, scale)), decode_fp8(weight))
    y = y * (scale * weight_scale.reshape(-1))
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def simulated_forward(
    layers: Sequence[QuantizedLinear], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a Linear under the reference kernel: of its one quantised layer, or of several joined by rows."""
    moved = [
        (
            layer.weight.to(device),
            layer.weight_scale.to(device),
            None if layer.input_scale is None else layer.input_scale.to(device),
            None if layer.bias is None else layer.bias.to(device),
        )
        for layer in layers
    ]
    if len(moved) == 1:
        return lambda x: reference_linear(x, *moved[0])
    return lambda x: torch.cat([reference_linear(x, *layer) for layer in moved], dim=-1)


class ReferenceKernel:
    """The oracle as a kernel; runs anywhere."""

    name = "reference"

    def unsupported_reason(self, problem: LinearProblem) -> str | None:
        """Always None: the oracle computes every layer."""
        return None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """`reference_linear`."""
        return reference_linear(x, weight, weight_scale, input_scale, bias)
