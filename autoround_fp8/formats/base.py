"""What every checkpoint format offers, and what a parsed quantization block tells the loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, matches_layer


@dataclass(frozen=True, kw_only=True)
class ParsedQuantization:
    """What config.json says about quantisation.

    Attributes:
        format: The format's name.
        scheme: Scheme of the Linears in the blocks that nothing else names.
        exceptions: Exact layer name or regular expression -> its scheme.
        block_prefixes: Names of the block lists; Linears elsewhere are quantised only if an exception says so.
    """

    format: str
    scheme: QuantizationScheme
    exceptions: Mapping[str, QuantizationScheme]
    block_prefixes: tuple[str, ...]

    def resolve(self, fqn: str) -> QuantizationScheme:
        """The scheme of the Linear with this checkpoint name."""
        if fqn in self.exceptions:
            return self.exceptions[fqn]
        for pattern, scheme in self.exceptions.items():
            # Intel's exporter writes `.*k_proj.*`: a regular expression, where a user's `*` stands for part of a name.
            if matches_layer(f"(?:{pattern})" if ".*" in pattern else pattern, fqn):
                return scheme
        inside = any(fqn.startswith(prefix + ".") for prefix in self.block_prefixes)
        return self.scheme if inside else UNQUANTIZED


class CheckpointFormat(Protocol):
    """One format: which tensors a quantised linear becomes, and how config.json describes them."""

    name: str
    aliases: tuple[str, ...]

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Refuses, before work, schemes the format's consumers cannot load (ConfigError)."""

    def planned_tensors(self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme) -> list[PlannedTensor]:
        """The tensors a linear of this shape `(out, in)` is written as (its bias is copied from the source)."""

    def encode(self, linear: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors of one quantised linear, by name on disk."""

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """The inverse of `encode`, bit for bit; CheckpointError if a tensor is not as the format says."""

    def quantization_config(
        self, scheme: QuantizationScheme, exceptions: Mapping[str, QuantizationScheme], block_prefixes: Sequence[str]
    ) -> dict[str, Any]:
        """The block for config.json."""

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """What a config.json block says, or None if it is not of this format."""
