"""`fp8_static`: the layout of Intel auto-round's `auto_round:fp8_static` checkpoints.

A linear: `X.weight` float8_e4m3fn `[out, in]`, `X.weight_scale` float32 `[out]`, `X.input_scale` float32 `[1]`. Intel's
loader knows no scale per matrix, so that is repeated for every channel, and config.json says so for our own reader.
Layers that stay in 16 bit are listed under `extra_config`. Experts are gate_proj, up_proj, down_proj in every family.
Source: auto-round 0.16.1, export/export_to_autoround/export_to_fp8.py, inference/backend.py and
modeling/fused_moe/moe_experts_interface.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import ParsedQuantization, SchemeTable
from autoround_fp8.formats.fp8_tensors import decode_fp8_linear, encode_fp8, planned_fp8
from autoround_fp8.numerics.granularity import PER_CHANNEL, PER_TENSOR
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, validate_scheme

_PACKING_FORMAT = "auto_round:fp8_static"
# Says that all channels of a layer have the same weight scale; Intel's loader skips keys that it does not know.
_ONE_SCALE = "has_one_weight_scale"
_UNQUANTIZED_FIELDS = {"act_bits": 16, "act_data_type": "float", "bits": 16, "data_type": "float"}


class Fp8StaticFormat:
    """Intel auto-round's static FP8 layout; see the module docstring."""

    name = "fp8_static"
    aliases: tuple[str, ...] = ("auto_round", "auto_round:fp8_static", "auto-round", "auto-round:fp8_static")
    has_channel_scales = True
    splits_fused_experts = True
    names_experts_by_projection = True
    writes_config_file = True
    has_cache_scales = False
    has_output_layer = True

    def keeps(self, fqn: str) -> bool:
        """No layer must stay in 16 bit: Intel's loader runs every layer as a plain linear."""
        return False

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Accepts every static scheme this package makes."""
        for fqn, scheme in schemes.items():
            validate_scheme(scheme, f"layer {fqn!r}")
            if scheme.act_dynamic:
                raise ConfigError(
                    f"format {self.name!r} holds static input scales only, but the inputs of {fqn!r} would be dynamic; "
                    "use --format llm_compressor"
                )

    def planned_tensors(
        self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme, dtype: str
    ) -> list[PlannedTensor]:
        """Weight, weight scale and input scale of one linear `(out, in)`."""
        return planned_fp8(fqn, shape, _as_written(scheme), channel_shape=shape[:1])

    def encode(self, linear: QuantizedLinear, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The three tensors by name; the weight scale loses its trailing 1 (`[out, 1]` breaks Intel's forward)."""
        scale = linear.weight_scale.reshape(-1).expand(linear.weight.shape[0]).contiguous()
        return {**encode_fp8(linear), f"{linear.fqn}.weight_scale": scale}

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """As `decode_fp8_linear`; a scale per matrix may be repeated for every channel."""
        name = f"{fqn}.weight_scale"
        scale, weight = tensors.get(name), tensors.get(f"{fqn}.weight")
        if scale is None or weight is None:
            return decode_fp8_linear(fqn, scheme, tensors)
        if scheme.group_size == PER_TENSOR and scale.shape == weight.shape[:1]:
            if not torch.equal(scale, scale[:1].expand_as(scale)):
                raise CheckpointError(f"tensor {name!r} must hold one value for all channels, as config.json says")
            tensors = {**tensors, name: scale[:1]}
        return decode_fp8_linear(fqn, scheme, tensors)

    def quantization_config(self, table: SchemeTable) -> dict[str, Any]:
        """The `quantization_config` block, field for field as Intel's loader reads it."""
        default = _described(table.default)
        extra = {}
        for entry, scheme in table.entries(lambda scheme: scheme != table.default).items():
            changed = {k: v for k, v in _described(scheme).items() if v != default[k]}
            extra[entry] = changed if scheme.is_quantized else dict(_UNQUANTIZED_FIELDS)
        # Outside the blocks only what is named is FP8, and has to be described in full.
        extra |= {name: _described(table.schemes[table.output_names[0]]) for name in table.output_names}
        if not default[_ONE_SCALE]:
            del default[_ONE_SCALE]
        block: dict[str, Any] = {
            "quant_method": "auto-round",
            "packing_format": _PACKING_FORMAT,
            **default,
            "fmt": "e4m3",
            "activation_scheme": "static",
            "block_name_to_quantize": ",".join(table.block_prefixes),
        }
        return {**block, **({"extra_config": extra} if extra else {})}

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """Reads such a block, ours or Intel's."""
        if block.get("quant_method") != "auto-round" or block.get("packing_format") != _PACKING_FORMAT:
            return None
        scheme = _parsed_scheme(QuantizationScheme(), block)
        self._check_parsed(scheme, "quantization_config")
        names = {}
        for entry, changed in (block.get("extra_config") or {}).items():
            if changed.get("bits", scheme.bits) >= 16:
                names[entry] = UNQUANTIZED
            else:
                names[entry] = _parsed_scheme(scheme, changed)
                self._check_parsed(names[entry], f"extra_config {entry!r}")
        prefixes = block.get("block_name_to_quantize") or "model.layers"
        if isinstance(prefixes, str):
            prefixes = prefixes.split(",")
        # Intel's exporter writes `.*k_proj.*`: a regular expression, where a user's `*` stands for part of a name.
        patterns = [(f"(?:{entry})" if ".*" in entry else entry, other) for entry, other in names.items()]
        patterns += [(f"re:{re.escape(prefix.strip())}\\.", scheme) for prefix in prefixes]
        return ParsedQuantization(format=self.name, names=names, patterns=tuple(patterns), default=UNQUANTIZED)

    def _check_parsed(self, scheme: QuantizationScheme, where: str) -> None:
        validate_scheme(scheme, where)
        if scheme.is_quantized and scheme.act_dynamic:
            raise ConfigError(f"act_dynamic (True) of {where} must be False in format {self.name!r}")


def _as_written(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme as Intel's loader knows it."""
    return dataclasses.replace(scheme, group_size=PER_CHANNEL) if scheme.is_quantized else scheme


def _described(scheme: QuantizationScheme) -> dict[str, Any]:
    return {**_as_written(scheme).to_dict(), _ONE_SCALE: scheme.group_size == PER_TENSOR}


def _parsed_scheme(default: QuantizationScheme, described: Mapping[str, Any]) -> QuantizationScheme:
    """The scheme with the fields that are given; a `group_size` of 0 is what other writers may say."""
    fields = {k: v for k, v in described.items() if k in default and v is not None}
    if described.get(_ONE_SCALE) is not None:
        fields["group_size"] = PER_TENSOR if described[_ONE_SCALE] else PER_CHANNEL
    return dataclasses.replace(default, **fields)
