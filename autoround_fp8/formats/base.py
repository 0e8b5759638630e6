"""What every checkpoint format offers, what it is told about an export, and what it tells the loader."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import ConfigError
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme, matches_layer

# `model.layers.3.mlp.experts.7.up_proj`: the experts of a layer, an expert, its projection.
EXPERT_NAME = re.compile(r"(.*\.experts)\.\d+\.(\w+)")

# Attention matrices that engines do not run as plain linears: kv_b_proj is taken apart, the other two are joined.
_LATENT_ATTENTION = re.compile(r"(^|\.)(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)$")


@dataclass(frozen=True, kw_only=True)
class SchemeTable:
    """The scheme of every matrix of an export: what a format describes in config.json.

    Attributes:
        default: Scheme of the Linears in the blocks that nothing else names.
        schemes: Checkpoint name -> scheme of every matrix in the blocks, and of those that the model does not have.
        also_kept: Further Linears that stay in 16 bit: those outside the blocks, and the names that transformers has
            for kept ones where it calls them otherwise.
        block_prefixes: Checkpoint names of the block lists (`model.layers`).
        has_cache_scales: Whether there are scales of the KV cache.
        output_names: The checkpoint's name of the output layer, one of `schemes`, and transformers' name, if that is
            quantised.
    """

    default: QuantizationScheme
    schemes: Mapping[str, QuantizationScheme]
    also_kept: tuple[str, ...]
    block_prefixes: tuple[str, ...]
    has_cache_scales: bool = False
    output_names: tuple[str, ...] = ()

    def entries(self, wanted: Callable[[QuantizationScheme], bool]) -> dict[str, QuantizationScheme]:
        """The matrices with certain schemes; where the experts of a layer are all alike, as one regular expression."""
        alike: dict[str, QuantizationScheme | None] = {}
        leaves: dict[str, set[str]] = {}
        for fqn, scheme in self.schemes.items():
            if match := EXPERT_NAME.fullmatch(fqn):
                leaves.setdefault(match[1], set()).add(match[2])
                if alike.setdefault(match[1], scheme) != scheme:
                    alike[match[1]] = None
        found = {}
        for fqn, scheme in self.schemes.items():
            if wanted(scheme):
                match = EXPERT_NAME.fullmatch(fqn)
                if match and alike[match[1]] is not None:
                    found[rf"{re.escape(match[1])}\.\d+\.({'|'.join(sorted(leaves[match[1]]))})$"] = scheme
                else:
                    found[fqn] = scheme
        return found


def is_pattern(entry: str) -> bool:
    """Whether an entry of a `SchemeTable` is a regular expression; no name has a backslash."""
    return "\\" in entry


@dataclass(frozen=True, kw_only=True)
class ParsedQuantization:
    """What config.json says about quantisation.

    Attributes:
        format: The format's name.
        names: Exact layer name -> its scheme.
        patterns: Patterns as of `matches_layer` with their schemes; the first that matches counts.
        default: Scheme of the Linears that nothing names.
        kv_cache_scheme: How the KV cache is quantised, in compressed-tensors' words; None = not at all.
    """

    format: str
    names: Mapping[str, QuantizationScheme]
    patterns: tuple[tuple[str, QuantizationScheme], ...]
    default: QuantizationScheme
    kv_cache_scheme: Mapping[str, Any] | None = None

    def resolve(self, fqn: str) -> QuantizationScheme:
        """The scheme of the Linear with this checkpoint name."""
        if fqn in self.names:
            return self.names[fqn]
        return next((scheme for pattern, scheme in self.patterns if matches_layer(pattern, fqn)), self.default)


class CheckpointFormat(Protocol):
    """One format: which tensors a quantised linear becomes, and how config.json describes them.

    Attributes:
        name: Its name.
        aliases: Other names that users know it by.
        has_channel_scales: Whether weights may have a scale per output channel.
        splits_fused_experts: Whether experts that are one tensor in the source become one per expert.
        names_experts_by_projection: Whether experts are called gate_proj, up_proj, down_proj in every family; else as
            the family's own checkpoints have it (Mixtral: w1, w3, w2).
        writes_config_file: Whether its consumers also read a quantization_config.json.
        has_cache_scales: Whether its consumers read scales of the KV cache.
        has_output_layer: Whether one of its consumers reads an FP8 output layer.
    """

    name: str
    aliases: tuple[str, ...]
    has_channel_scales: bool
    splits_fused_experts: bool
    names_experts_by_projection: bool
    writes_config_file: bool
    has_cache_scales: bool
    has_output_layer: bool

    def keeps(self, fqn: str) -> bool:
        """Whether the format's consumers need this layer in 16 bit."""

    def validate(self, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Refuses, before work, schemes the format's consumers cannot load (ConfigError)."""

    def planned_tensors(
        self, fqn: str, shape: tuple[int, int], scheme: QuantizationScheme, dtype: str
    ) -> list[PlannedTensor]:
        """The tensors a linear `(out, in)` of this source dtype is written as (its bias is copied from the source)."""

    def encode(self, linear: QuantizedLinear, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors of one quantised linear, by name on disk; `dtype` is what was planned for its weight."""

    def decode(self, fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
        """The inverse of `encode`, bit for bit; CheckpointError if a tensor is not as the format says."""

    def quantization_config(self, table: SchemeTable) -> dict[str, Any] | None:
        """The block for config.json, or None if there is none."""

    def parse(self, block: Mapping[str, Any]) -> ParsedQuantization | None:
        """What a config.json block says, or None if it is not of this format."""


def is_latent_attention(fqn: str) -> bool:
    """Whether a layer is one of those that engines treat in their own way in multi-head latent attention (DeepSeek)."""
    return _LATENT_ATTENTION.search(fqn) is not None


def check_experts(format_name: str, schemes: Mapping[str, QuantizationScheme]) -> None:
    """Checks that all experts of a layer have one scheme, and one that engines run for experts.

    Raises:
        ConfigError: Naming the layer.
    """
    first: dict[str, tuple[str, QuantizationScheme]] = {}
    for fqn, scheme in schemes.items():
        match = EXPERT_NAME.fullmatch(fqn)
        if not match:
            continue
        name, other = first.setdefault(match[1], (fqn, scheme))
        if scheme != other:
            raise ConfigError(
                f"format {format_name!r}: {fqn!r} and {name!r} have different schemes, but engines run the experts of "
                "a layer as one; give them the same scheme, or ignore all of them"
            )
        if scheme.is_quantized and scheme.act_dynamic == (scheme.group_size == 0):
            asked, accepted = ("per matrix", "per channel") if scheme.act_dynamic else ("per channel", "per matrix")
            inputs = "dynamic" if scheme.act_dynamic else "static"
            raise ConfigError(
                f"format {format_name!r}: expert {fqn!r} would have a weight scale {asked}, but with {inputs} inputs "
                f"engines run experts only with one {accepted}"
            )
