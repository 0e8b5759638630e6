"""`fp8_static`: the layout of Intel auto-round's `auto_round:fp8_static` checkpoints.

A linear: `X.weight` float8_e4m3fn `[out, in]`, `X.weight_scale` float32 `[out]`/`[1]`, `X.input_scale` float32 `[1]`.
Layers that stay in 16 bit are listed under `extra_config`.
Source: auto-round 0.16.1, export/export_to_autoround/export_to_fp8.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.base import ParsedQuantization
from autoround_fp8.numerics.fp8 import FP8_DTYPE
from autoround_fp8.numerics.granularity import PER_CHANNEL
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, validate_scheme

_PACKING_FORMAT = "auto_round:fp8_static"
_UNQUANTIZED_FIELDS = {"act_bits": 16, "act_data_type": "float", "bits": 16, "data_type": "float"}


class Fp8StaticFormat:
    """Intel auto-round's static FP8 layout; see the module docstring."""

    name = "fp8_static"
    aliases: tuple[str, ...] = ("auto_round", "auto_round:fp8_static", "auto-round", "auto-round:fp8_static")

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Accepts every scheme this package makes: per-channel or per-tensor weights, static per-tensor inputs."""
        for fqn, scheme in schemes.items():
            validate_scheme(scheme, f"layer {fqn!r}")

    def planned_tensors(self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme) -> list[PlannedTensor]:
        """Weight, weight scale and input scale of one linear `(out, in)`."""
        scale_shape = (shape[0],) if scheme.group_size == PER_CHANNEL else (1,)
        return [
            PlannedTensor(name=f"{fqn}.weight", dtype="F8_E4M3", shape=shape),
            PlannedTensor(name=f"{fqn}.weight_scale", dtype="F32", shape=scale_shape),
            PlannedTensor(name=f"{fqn}.input_scale", dtype="F32", shape=(1,)),
        ]

    def encode(self, linear: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The three tensors by name; the weight scale loses its trailing 1 (`[out, 1]` breaks Intel's forward)."""
        return {
            f"{linear.fqn}.weight": linear.weight,
            f"{linear.fqn}.weight_scale": linear.weight_scale.reshape(-1),
            f"{linear.fqn}.input_scale": linear.input_scale.reshape(1),
        }

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """Reads the three tensors back; scales may also be `[]`, `[1, 1]`, `[out, 1]`, in float32 or 16 bit.

        Raises:
            CheckpointError: If a tensor is missing, not FP8, or a scale has another size or is not finite and positive.
        """
        parts = {}
        for part in ("weight", "weight_scale", "input_scale"):
            if f"{fqn}.{part}" not in tensors:
                raise CheckpointError(f"tensor '{fqn}.{part}' is missing: config.json says this layer is quantised")
            parts[part] = tensors[f"{fqn}.{part}"]
        weight = parts["weight"]
        if weight.dtype != FP8_DTYPE:
            raise CheckpointError(f"tensor '{fqn}.weight' is {weight.dtype}; config.json says this layer is FP8")
        num_scales = weight.shape[0] if scheme.group_size == PER_CHANNEL else 1
        weight_scale = _checked_scale(f"{fqn}.weight_scale", parts["weight_scale"], num_scales)
        input_scale = _checked_scale(f"{fqn}.input_scale", parts["input_scale"], 1)
        if scheme.group_size == PER_CHANNEL:
            weight_scale = weight_scale.reshape(-1, 1)
        return QuantizedLinear(fqn=fqn, weight=weight, weight_scale=weight_scale, input_scale=input_scale)

    def quantization_config(
        self, scheme: QuantizationScheme, exceptions: Mapping[str, QuantizationScheme], block_prefixes: Sequence[str]
    ) -> dict[str, Any]:
        """The `quantization_config` block, field for field as Intel's loader reads it."""
        extra = {}
        for fqn, other in exceptions.items():
            changed = {k: v for k, v in other.items() if v != scheme[k]}
            extra[fqn] = changed if other.is_quantized else dict(_UNQUANTIZED_FIELDS)
        block: dict[str, Any] = {
            "quant_method": "auto-round",
            "packing_format": _PACKING_FORMAT,
            **scheme.to_dict(),
            "fmt": "e4m3",
            "activation_scheme": "static",
            "block_name_to_quantize": ",".join(block_prefixes),
        }
        return {**block, **({"extra_config": extra} if extra else {})}

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """Reads such a block, ours or Intel's."""
        if block.get("quant_method") != "auto-round" or block.get("packing_format") != _PACKING_FORMAT:
            return None
        names = QuantizationScheme().keys()
        scheme = QuantizationScheme.from_dict({k: block[k] for k in names if block.get(k) is not None})
        validate_scheme(scheme, "quantization_config")
        exceptions = {}
        for fqn, fields in (block.get("extra_config") or {}).items():
            if fields.get("bits", scheme.bits) >= 16:
                exceptions[fqn] = UNQUANTIZED
            else:
                exceptions[fqn] = dataclasses.replace(scheme, **{k: v for k, v in fields.items() if k in names})
                validate_scheme(exceptions[fqn], f"extra_config {fqn!r}")
        prefixes = block.get("block_name_to_quantize") or "model.layers"
        if isinstance(prefixes, str):
            prefixes = prefixes.split(",")
        return ParsedQuantization(
            format=self.name, scheme=scheme, exceptions=exceptions, block_prefixes=tuple(p.strip() for p in prefixes)
        )


def _checked_scale(name: str, scale: torch.Tensor, count: int) -> torch.Tensor:
    if scale.numel() != count or not scale.is_floating_point() or scale.dtype.itemsize == 1:
        raise CheckpointError(f"tensor {name!r} is {scale.dtype} {list(scale.shape)}, expected {count} float values")
    values = scale.float().reshape(-1)
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise CheckpointError(f"tensor {name!r} holds a scale that is NaN, infinite, zero or negative")
    return values
