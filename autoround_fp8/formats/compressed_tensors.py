"""`llm_compressor`: compressed-tensors' "float-quantized" layout, which vLLM, SGLang and transformers load.

A linear: `X.weight` float8_e4m3fn `[out, in]`, `X.weight_scale` float32 `[out, 1]`/`[1]` and, with static inputs,
`X.input_scale` float32 `[1]`. config.json groups layers by scheme; what stays in 16 bit is listed under `ignore`.
Scales of the KV cache are in `kv_cache.py`.
Source: compressed-tensors 0.19, quantization/quant_config.py and quant_scheme.py; vLLM 0.33,
quantization/compressed_tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.base import (
    EXPERT_NAME,
    ParsedQuantization,
    SchemeTable,
    check_experts,
    is_latent_attention,
    is_pattern,
)
from autoround_fp8.formats.fp8_tensors import decode_fp8_linear, encode_fp8, planned_fp8
from autoround_fp8.formats.kv_cache import KV_CACHE_SCHEME
from autoround_fp8.models.families import EXPERT_PROJECTIONS
from autoround_fp8.numerics.granularity import PER_CHANNEL, PER_TENSOR, PER_TOKEN
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, matches_layer, validate_scheme

_METHOD = "compressed-tensors"
_FORMAT = "float-quantized"
_ALL_LINEARS = "Linear"


class CompressedTensorsFormat:
    """The layout of llm-compressor's FP8 checkpoints; see the module docstring."""

    name = "llm_compressor"
    aliases: tuple[str, ...] = ("compressed-tensors", "compressed_tensors", "llm-compressor")
    has_channel_scales = True
    splits_fused_experts = True
    names_experts_by_projection = False
    writes_config_file = False
    has_cache_scales = True
    has_output_layer = True

    def keeps(self, fqn: str) -> bool:
        """The matrices of latent attention that engines join or take apart."""
        return is_latent_attention(fqn)

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Accepts every scheme this package makes, but for experts only what engines run for them."""
        for fqn, scheme in schemes.items():
            validate_scheme(scheme, f"layer {fqn!r}")
        check_experts(self.name, schemes)

    def planned_tensors(
        self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme, dtype: str
    ) -> list[PlannedTensor]:
        """Weight, weight scale and, with static inputs, input scale of one linear `(out, in)`."""
        return planned_fp8(fqn, shape, scheme, channel_shape=(shape[0], 1))

    def encode(self, linear: QuantizedLinear, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors by name, in the shapes they have in memory."""
        return encode_fp8(linear)

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """As `decode_fp8_linear`."""
        return decode_fp8_linear(fqn, scheme, tensors)

    def quantization_config(self, table: SchemeTable) -> dict[str, Any]:
        """The `quantization_config` block."""
        kept = table.entries(lambda scheme: not scheme.is_quantized)
        return {
            "quant_method": _METHOD,
            "format": _FORMAT,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": {
                    "targets": targets,
                    "weights": _weight_args(scheme),
                    "input_activations": _input_args(scheme),
                    "output_activations": None,
                    "format": _FORMAT,
                }
                for number, (scheme, targets) in enumerate(_groups(table))
            },
            "ignore": [*(_ignored(entry) for entry in kept), *table.also_kept],
            "kv_cache_scheme": dict(KV_CACHE_SCHEME) if table.has_cache_scales else None,
        }

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """Reads such a block, ours or llm-compressor's.

        Raises:
            CheckpointError: If it is compressed-tensors, but not FP8 weights with FP8 inputs.
        """
        if block.get("quant_method") != _METHOD:
            return None
        for key in ("sparsity_config", "transform_config"):
            if block.get(key):
                raise CheckpointError(f"{key} of the compressed-tensors config is not supported")
        groups = block.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError("the compressed-tensors config has no config_groups")
        ignored = [str(entry) for entry in block.get("ignore") or ()]
        names = {entry: UNQUANTIZED for entry in ignored if not entry.startswith("re:")}
        ignored_patterns = [(entry, UNQUANTIZED) for entry in ignored if entry.startswith("re:")]
        patterns, default = list(ignored_patterns), UNQUANTIZED
        for group_name, group in groups.items():
            scheme = _parse_group(group_name, group, block.get("format"))
            for target in group.get("targets") or ():
                if target == _ALL_LINEARS:
                    default = scheme
                elif target.startswith("re:"):
                    patterns.append((target, scheme))
                elif not any(matches_layer(pattern, target) for pattern, _ in ignored_patterns):
                    names.setdefault(target, scheme)  # what is ignored, by name or pattern, stays so
        return ParsedQuantization(
            format=self.name,
            names=names,
            patterns=tuple(patterns),
            default=default,
            kv_cache_scheme=block.get("kv_cache_scheme") or None,
        )


def _groups(table: SchemeTable) -> list[tuple[QuantizationScheme, list[str]]]:
    """The schemes in use, each with its targets."""
    quantized = table.entries(lambda scheme: scheme.is_quantized)
    dense = {fqn: s for fqn, s in table.schemes.items() if s.is_quantized and not EXPERT_NAME.fullmatch(fqn)}
    experts = {entry: s for entry, s in quantized.items() if entry not in dense}
    dense_schemes, expert_schemes = _distinct(dense), _distinct(experts)
    if len(dense_schemes) > 1:
        # vLLM asks for the class `Linear` before it takes a fused layer's name apart: name every layer instead.
        groups = [(s, [fqn for fqn, other in dense.items() if other == s]) for s in dense_schemes]
        for _, targets in groups:
            targets += [name for name in table.output_names[1:] if table.output_names[0] in targets]
    else:
        # In vLLM and SGLang an output layer is no `Linear`.
        groups = [(scheme, [*table.output_names, _ALL_LINEARS]) for scheme in dense_schemes]
    covered = dense_schemes if len(dense_schemes) == 1 else []
    for scheme in expert_schemes:
        if scheme in covered:
            continue
        if len(expert_schemes) == 1:
            # Experts that stay in 16 bit are ignored by name, so one pattern does for all layers.
            # Under all names: vLLM, where it runs transformers' own model, asks for gate_proj though the file has w1.
            targets = [rf"re:.*\.experts\.\d+\.({'|'.join(sorted(EXPERT_PROJECTIONS))})$"]
        else:
            targets = [f"re:{e}" if is_pattern(e) else e for e, other in experts.items() if other == scheme]
        groups.append((scheme, targets))
    return groups


def _distinct(schemes: Mapping[str, QuantizationScheme]) -> list[QuantizationScheme]:
    found: list[QuantizationScheme] = []
    for scheme in schemes.values():
        if scheme not in found:
            found.append(scheme)
    return found


def _ignored(entry: str) -> str:
    if is_pattern(entry):
        return f"re:{entry}"
    # Experts that are one tensor: engines ask for the name of a single one.
    return rf"re:{re.escape(entry)}(\..*)?$" if entry.endswith(".experts") else entry


def _weight_args(scheme: QuantizationScheme) -> dict[str, Any]:
    strategy = "channel" if scheme.group_size == PER_CHANNEL else "tensor"
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}


def _input_args(scheme: QuantizationScheme) -> dict[str, Any]:
    strategy = "token" if scheme.act_dynamic else "tensor"
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": scheme.act_dynamic, "strategy": strategy}


def _parse_group(name: str, group: Any, whole_format: Any) -> QuantizationScheme:
    group = group if isinstance(group, Mapping) else {}
    layout = group.get("format") or whole_format
    if layout != _FORMAT:
        raise CheckpointError(
            f"compressed-tensors format {layout!r} of {name!r} is not supported; this package loads {_FORMAT!r}"
        )
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        raise CheckpointError(f"config group {name!r} does not quantise both weights and inputs, which is needed here")
    for part, arguments in (("weights", weights), ("input_activations", inputs)):
        wanted = {"num_bits": 8, "type": "float", "symmetric": True}
        for key, value in wanted.items():
            if arguments.get(key, value) != value:
                raise CheckpointError(
                    f"{key} ({arguments[key]!r}) of {part} in config group {name!r} must be {value!r}"
                )
    group_sizes = {"channel": PER_CHANNEL, "tensor": PER_TENSOR}
    if weights.get("strategy") not in group_sizes:
        raise CheckpointError(
            f"strategy ({weights.get('strategy')!r}) of weights in config group {name!r} must be 'channel' or 'tensor'"
        )
    is_dynamic = bool(inputs.get("dynamic"))
    if inputs.get("strategy") != ("token" if is_dynamic else "tensor"):
        raise CheckpointError(
            f"strategy ({inputs.get('strategy')!r}) of input_activations in config group {name!r} with dynamic = "
            f"{is_dynamic} is not supported; inputs are static per tensor or dynamic per token"
        )
    return QuantizationScheme(
        group_size=group_sizes[weights["strategy"]],
        act_group_size=PER_TOKEN if is_dynamic else PER_TENSOR,
        act_dynamic=is_dynamic,
    )
