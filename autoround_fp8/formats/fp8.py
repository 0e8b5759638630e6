"""`fp8`: the static form of `quant_method: fp8`, which vLLM and SGLang load: one scale per matrix and one per input.

A linear: `X.weight` float8_e4m3fn `[out, in]`, `X.weight_scale` and `X.input_scale` float32 `[1]`. Layers that stay in
16 bit are listed by name under `ignored_layers`. The dynamic form is native FP8: `checkpoint/source_format.py`.
Source: vLLM 0.33, quantization/fp8.py; SGLang 0.5.23, layers/quantization/fp8.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import ConfigError
from autoround_fp8.formats.base import EXPERT_NAME, ParsedQuantization, SchemeTable, check_experts, is_latent_attention
from autoround_fp8.formats.fp8_tensors import decode_fp8_linear, encode_fp8, planned_fp8
from autoround_fp8.numerics.granularity import PER_TENSOR
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, validate_scheme

_SCHEME = QuantizationScheme(group_size=PER_TENSOR)


class Fp8Format:
    """`quant_method: fp8` with static inputs; see the module docstring."""

    name = "fp8"
    aliases: tuple[str, ...] = ()
    has_channel_scales = False
    splits_fused_experts = True
    names_experts_by_projection = False
    writes_config_file = False
    has_cache_scales = False
    has_output_layer = False

    def keeps(self, fqn: str) -> bool:
        """The matrices of latent attention that engines join or take apart."""
        return is_latent_attention(fqn)

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Accepts FP8_STATIC_TENSOR only."""
        for fqn, scheme in schemes.items():
            validate_scheme(scheme, f"layer {fqn!r}")
            if scheme.is_quantized and scheme != _SCHEME:
                raise ConfigError(
                    f"format {self.name!r} holds one static scale per matrix and one per input (FP8_STATIC_TENSOR), "
                    f"which is not what {fqn!r} would have; change the scheme or use --format llm_compressor"
                )
        check_experts(self.name, schemes)

    def planned_tensors(
        self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme, dtype: str
    ) -> list[PlannedTensor]:
        """Weight, weight scale and input scale of one linear `(out, in)`."""
        return planned_fp8(fqn, shape, scheme, channel_shape=())

    def encode(self, linear: QuantizedLinear, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The three tensors by name."""
        return encode_fp8(linear)

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """As `decode_fp8_linear`."""
        return decode_fp8_linear(fqn, scheme, tensors)

    def quantization_config(self, table: SchemeTable) -> dict[str, Any]:
        """The `quantization_config` block; of experts it names the module, which engines ask for."""
        kept = [fqn for fqn, scheme in table.schemes.items() if not scheme.is_quantized]
        folders = (match[1] if (match := EXPERT_NAME.fullmatch(fqn)) else fqn for fqn in (*kept, *table.also_kept))
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": list(dict.fromkeys(folders))}

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """Reads such a block, ours or another's; engines keep the output layer in 16 bit also if it is not listed."""
        if block.get("quant_method") != "fp8" or block.get("activation_scheme") != "static":
            return None
        ignored = block.get("ignored_layers") or block.get("modules_to_not_convert") or ()
        return ParsedQuantization(
            format=self.name,
            names={str(name): UNQUANTIZED for name in (*ignored, "lm_head")},
            patterns=tuple(
                (rf"re:{re.escape(name)}\.\d+\.", UNQUANTIZED) for name in ignored if name.endswith("experts")
            ),
            default=_SCHEME,
        )
