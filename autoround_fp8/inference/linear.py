"""`WeightFP8ActFP8StaticQuantLinear`: a linear layer with FP8 weights and FP8 inputs, static or dynamic.

Read `load.py` for how a model gets these, `kernels/` for what computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.kernels.base import Kernel
from autoround_fp8.kernels.reference import ReferenceKernel
from autoround_fp8.numerics.fp8 import FP8_DTYPE, dequantize_fp8
from autoround_fp8.numerics.granularity import PER_CHANNEL
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme, validate_scheme


class WeightFP8ActFP8StaticQuantLinear(nn.Module):
    """A linear layer `[..., in] -> [..., out]` that holds its weight as FP8 codes.

    Its state has `weight` (float8_e4m3fn `[out, in]`), `weight_scale` (float32 `[out, 1]` or `[1]`), `input_scale`
    (float32 `[1]`; None in a layer with dynamic inputs, whose tokens get their scales on the fly) and, if any, `bias`
    (`[out]`). Codes and scales keep their dtypes whatever the module is cast to.
    Tensors start on the meta device; a layer whose tensors were not loaded refuses to run.

    Args:
        in_features: Size of the last input dimension.
        out_features: Size of the last output dimension.
        bias: Whether there is a bias.
        scheme: How the layer is quantised.
        kernel: What computes it; by default the float32 reference.
        name: Its name, for messages.
        device: Where the (not yet loaded) tensors are.
        dtype: dtype of the bias.

    Raises:
        ConfigError: If the scheme is not W8A8 FP8.
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
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        self.scheme = scheme or QuantizationScheme()
        validate_scheme(self.scheme, f"layer {name!r}")
        if not self.scheme.is_quantized:
            raise ConfigError(f"bits ({self.scheme.bits}) of layer {name!r} must be 8 for an FP8 linear; use nn.Linear")
        self.in_features = in_features
        self.out_features = out_features
        self.kernel = kernel or ReferenceKernel()
        self.name = name
        scale_shape = (out_features, 1) if self.scheme.group_size == PER_CHANNEL else (1,)
        # NaN until loaded, so that a layer which nobody filled is noticed off the meta device too.
        self.weight = _frozen(torch.full((out_features, in_features), math.nan, device=device).to(FP8_DTYPE))
        self.weight_scale = _frozen(torch.full(scale_shape, math.nan, device=device))
        self.input_scale = None if self.scheme.act_dynamic else _frozen(torch.full((1,), math.nan, device=device))
        self.bias = _frozen(torch.full((out_features,), math.nan, device=device, dtype=dtype)) if bias else None
        self._checked: tuple[torch.Tensor, torch.Tensor | None, int, int, int, int] | None = None

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
            layer: The layer, with its bias if it has one here.
            scheme: How it is quantised.
            kernel: What computes it.
            has_bias: Whether there is a bias that `layer` lacks; it stays on meta, to be loaded.
            dtype: dtype of the bias.
            device: Where the tensors go.
        """
        out_features, in_features = layer.weight.shape
        module = cls(
            in_features,
            out_features,
            bias=has_bias or layer.bias is not None,
            scheme=scheme,
            kernel=kernel,
            name=layer.fqn,
            dtype=dtype,
        )
        module.weight = _frozen(layer.weight.to(device))
        module.weight_scale = _frozen(layer.weight_scale.float().to(device))
        assert (layer.input_scale is None) == scheme.act_dynamic, layer.fqn
        if layer.input_scale is not None:
            module.input_scale = _frozen(layer.input_scale.float().to(device))
        if layer.bias is not None:
            module.bias = _frozen(layer.bias.to(device=device, dtype=dtype))
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layer in the input's dtype, `[..., in] -> [..., out]`.

        Raises:
            CheckpointError: If a tensor was never loaded, its shape or dtype is wrong, a scale is NaN, infinite, zero
                or negative, or a code is NaN.
        """
        # Values are looked at once, and again only after a tensor was replaced or written to: no host sync per call.
        if not self._is_checked():
            self._check_tensors()
            self._checked = self._fingerprint()
        with torch.no_grad():
            return self.kernel.linear(x, self.weight, self.weight_scale, self.input_scale, self.bias)

    def weight_dequantized(self) -> torch.Tensor:
        """The weight as float32 `[out, in]`."""
        return dequantize_fp8(self.weight, self.weight_scale)

    def extra_repr(self) -> str:
        """Shape, scheme and kernel for `print(model)`."""
        scales = "per channel" if self.scheme.group_size == PER_CHANNEL else "per tensor"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight scales {scales}, inputs {'dynamic' if self.scheme.act_dynamic else 'static'}, "
            f"kernel={self.kernel.name}"
        )

    def _fingerprint(self) -> tuple[torch.Tensor, torch.Tensor | None, int, int, int, int]:
        # The scales themselves, not their ids, which are used again after a tensor died; a weight is too large to keep.
        weight, weight_scale, input_scale = self.weight, self.weight_scale, self.input_scale
        return (
            weight_scale,
            input_scale,
            id(weight),
            _version(weight),
            _version(weight_scale),
            _version(input_scale),
        )

    def _is_checked(self) -> bool:
        if self._checked is None or self.weight.is_meta:
            return False
        now = self._fingerprint()
        return now[0] is self._checked[0] and now[1] is self._checked[1] and now[2:] == self._checked[2:]

    def _check_tensors(self) -> None:
        shapes = {
            "weight": ((self.out_features, self.in_features),),
            "weight_scale": ((self.out_features, 1), (self.out_features,), (1,)),
            "input_scale": ((1,),),
            "bias": ((self.out_features,),),
        }
        for leaf, accepted in shapes.items():
            tensor = getattr(self, leaf)
            if tensor is None and (leaf == "bias" or self.scheme.act_dynamic):
                continue
            if tensor is None or tensor.is_meta:
                raise CheckpointError(f"'{self.name}.{leaf}' was never loaded, so the layer cannot run")
            if tuple(tensor.shape) not in accepted:
                raise CheckpointError(
                    f"shape of '{self.name}.{leaf}' {list(tensor.shape)} must be "
                    f"{' or '.join(str(list(shape)) for shape in accepted)}; load a checkpoint written for this model"
                )
            expected = {"weight": FP8_DTYPE, "bias": tensor.dtype}.get(leaf, torch.float32)
            if tensor.dtype != expected:
                raise CheckpointError(f"dtype of '{self.name}.{leaf}' ({tensor.dtype}) must be {expected}")
        for leaf in ("weight_scale", "input_scale"):
            scale = getattr(self, leaf)
            if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise CheckpointError(f"'{self.name}.{leaf}' holds a scale that is NaN, infinite, zero or negative")
        if has_nan_codes(self.weight):
            raise CheckpointError(f"'{self.name}.weight' holds NaN codes: it was never loaded, or the file is damaged")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.bias:
                return fn(tensor)
            # A cast (half(), to(dtype)) must not touch codes or scales; a move of device must go through. What `fn` is
            # shows on an empty tensor, without a cast of the whole weight.
            probe = fn(tensor.detach().flatten()[:0])
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        self._checked = None
        return super()._apply(keep_dtype, recurse)


def has_nan_codes(codes: torch.Tensor) -> bool:
    """Whether an E4M3FN tensor holds a NaN, `0x7f` or `0xff`, found without a cast to float."""
    magnitudes = codes.detach().view(torch.uint8).bitwise_and(0x7F)
    return magnitudes.numel() > 0 and int(magnitudes.max()) == 0x7F


def _version(tensor: torch.Tensor | None) -> int:
    # A tensor made in inference mode counts no writes.
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
