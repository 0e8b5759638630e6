"""`fake`: an ordinary 16-bit checkpoint of the rounded weights, which everything loads; inputs are not quantised.

For measuring what the weights' rounding alone costs, or with tools that know no FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.base import ParsedQuantization, SchemeTable
from autoround_fp8.numerics.fp8 import dequantize_fp8
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme, validate_scheme


class FakeFormat:
    """Dequantised weights in the source's dtype; see the module docstring."""

    name = "fake"
    aliases: tuple[str, ...] = ()
    has_channel_scales = True
    splits_fused_experts = False
    names_experts_by_projection = False
    writes_config_file = False
    has_cache_scales = False
    has_output_layer = True

    def keeps(self, fqn: str) -> bool:
        """No layer must stay as it is."""
        return False

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Accepts every scheme this package makes."""
        for fqn, scheme in schemes.items():
            validate_scheme(scheme, f"layer {fqn!r}")

    def planned_tensors(
        self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme, dtype: str
    ) -> list[PlannedTensor]:
        """The weight, as in the source."""
        return [PlannedTensor(name=f"{fqn}.weight", dtype=dtype, shape=shape)]

    def encode(self, linear: QuantizedLinear, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weight, code times scale in float32, rounded once."""
        return {f"{linear.fqn}.weight": dequantize_fp8(linear.weight, linear.weight_scale).to(dtype)}

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """There is nothing to decode: such a checkpoint is a plain one."""
        raise CheckpointError(f"{fqn!r} of a 'fake' checkpoint has no FP8 codes")

    def quantization_config(self, table: SchemeTable) -> dict[str, Any] | None:
        """None: to every loader this is a 16-bit model."""
        return None

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """Always None."""
        return None
