"""`WeightFP8ActFP8StaticQuantLinear`: a linear layer with FP8 weights and static FP8 inputs.

Read `load.py` for how a model gets these, `kernels/` for what computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoround_fp8.errors import CheckpointError
from autoround_fp8.kernels.base import Kernel
from autoround_fp8.kernels.reference import ReferenceKernel
from autoround_fp8.numerics.fp8 import FP8_DTYPE, dequantize_fp8
from autoround_fp8.numerics.granularity import PER_CHANNEL
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme, validate_scheme


class WeightFP8ActFP8StaticQuantLinear(nn.Module):
    """A linear layer `[..., in] -> [..., out]` that holds its weight as FP8 codes.

    Its state has `weight` (float8_e4m3fn `[out, in]`), `weight_scale` (float32 `[out, 1]` or `[1]`), `input_scale`
    (float32 `[1]`) and, if any, `bias` (`[out]`). Codes and scales keep their dtypes whatever the module is cast to.
    Tensors start on the meta device; a layer whose tensors were not loaded refuses to run.

    Args:
        in_features: Size of the last input dimension.
        out_features: Size of the last output dimension.
        bias: Whether there is a bias.
        scheme: How the layer is quantised.
        kernel: What computes it; by default the float32 reference.
        name: Its name, for messages.
        dtype: dtype of the bias.

    Raises:
        ConfigError: If the scheme is not static W8A8 FP8.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scheme: QuantizationScheme | None = None,
        kernel: Kernel | None = None,
        name: str = "",
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        self.scheme = scheme or QuantizationScheme()
        validate_scheme(self.scheme, f"layer {name!r}")
        self.in_features = in_features
        self.out_features = out_features
        self.kernel = kernel or ReferenceKernel()
        self.name = name
        scale_shape = (out_features, 1) if self.scheme.group_size == PER_CHANNEL else (1,)
        self.weight = _meta_parameter((out_features, in_features), FP8_DTYPE)
        self.weight_scale = _meta_parameter(scale_shape, torch.float32)
        self.input_scale = _meta_parameter((1,), torch.float32)
        self.bias = _meta_parameter((out_features,), dtype) if bias else None
        self._checked: tuple[int, int] | None = None

    @classmethod
    def from_quantized_linear(
        cls,
        layer: QuantizedLinear,
        *,
        scheme: QuantizationScheme,
        kernel: Kernel | None = None,
        has_bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> WeightFP8ActFP8StaticQuantLinear:
        """Builds the module from a layer's codes and scales.

        Args:
            layer: The layer; its bias is used if it has one, else a bias stays on meta to be loaded.
            scheme: How it is quantised.
            kernel: What computes it.
            has_bias: Whether the layer has a bias.
            dtype: dtype of the bias.
            device: Where the tensors go.
        """
        out_features, in_features = layer.weight.shape
        module = cls(
            in_features, out_features, bias=has_bias, scheme=scheme, kernel=kernel, name=layer.fqn, dtype=dtype
        )
        module.weight = nn.Parameter(layer.weight.to(device), requires_grad=False)
        module.weight_scale = nn.Parameter(layer.weight_scale.float().to(device), requires_grad=False)
        module.input_scale = nn.Parameter(layer.input_scale.float().to(device), requires_grad=False)
        if has_bias and layer.bias is not None:
            module.bias = nn.Parameter(layer.bias.to(device=device, dtype=dtype), requires_grad=False)
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layer in the input's dtype, `[..., in] -> [..., out]`.

        Raises:
            CheckpointError: If a tensor was never loaded, or a scale is NaN, infinite, zero or negative.
        """
        # Scales are looked at once, and again only after they were replaced or written to: no host sync per call.
        stamp = (id(self.weight_scale) ^ id(self.input_scale), self.weight_scale._version + self.input_scale._version)
        if self._checked != stamp:
            self._check_tensors()
            self._checked = stamp
        return self.kernel.linear(x, self.weight, self.weight_scale, self.input_scale, self.bias)

    def weight_dequantized(self) -> torch.Tensor:
        """The weight as float32 `[out, in]`."""
        return dequantize_fp8(self.weight, self.weight_scale)

    def extra_repr(self) -> str:
        """Shape, scheme and kernel for `print(model)`."""
        scales = "per channel" if self.scheme.group_size == PER_CHANNEL else "per tensor"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight scales {scales}, kernel={self.kernel.name}"
        )

    def _check_tensors(self) -> None:
        for leaf in ("weight", "weight_scale", "input_scale", "bias"):
            tensor = getattr(self, leaf)
            if tensor is not None and tensor.device.type == "meta":
                raise CheckpointError(f"'{self.name}.{leaf}' was never loaded, so the layer cannot run")
        for leaf in ("weight_scale", "input_scale"):
            scale = getattr(self, leaf)
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise CheckpointError(f"'{self.name}.{leaf}' holds a scale that is NaN, infinite, zero or negative")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if tensor is self.bias or moved.dtype == tensor.dtype:
                return moved
            # A cast (half(), to(dtype)) must not touch codes or scales; a move of device must go through.
            return tensor.to(moved.device)

        self._checked = None
        return super()._apply(keep_dtype, recurse)


def _meta_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
