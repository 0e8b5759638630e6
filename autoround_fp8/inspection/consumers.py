"""Which facts of a checkpoint stop whom from loading it; the table of them is `consumer_rules.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoround_fp8.formats.base import EXPERT_NAME, is_latent_attention
from autoround_fp8.inspection import consumer_rules as rules
from autoround_fp8.inspection.checks import OUTPUT_LAYERS, Finding, fused_groups, has_one_value
from autoround_fp8.inspection.consumer_rules import CONSUMERS, NO_READER, RULES, UNKNOWN
from autoround_fp8.inspection.contents import Contents, Matrix
from autoround_fp8.schemes import matches_layer

# Of the families that vLLM has, those whose output layer is given no quantization.
_PLAIN_OUTPUT_LAYER = frozenset(
    ["bloom", "falcon_h1", "gpt_oss", "jamba", "mamba", "mamba2", "opt", "plamo3", "qwen3_next", "step3_text", "zamba2"]
)

# Keys of compressed-tensors' QuantizationArgs (0.19).
_ARGS_KEYS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
        "observer",
        "observer_kwargs",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Whether a consumer can load the checkpoint: `reasons` against it, none if it can.

    `is_known` is False if nothing is known of how this consumer reads the label.
    """

    consumer: str
    reasons: tuple[str, ...]
    is_known: bool = True


def readings(contents: Contents, findings: tuple[Finding, ...]) -> tuple[Reading, ...]:
    """What each consumer makes of the checkpoint."""
    facts = set(_facts(contents, findings))
    found = []
    for consumer in CONSUMERS:
        reason = NO_READER[contents.label].get(consumer)
        reasons = [] if reason is None else [reason]
        reasons += [
            rule.reason
            for rule in RULES
            if rule.fact in facts and consumer in rule.consumers and (not rule.labels or contents.label in rule.labels)
        ]
        known = bool(reasons) or consumer not in UNKNOWN.get(contents.label, ())
        found.append(Reading(consumer=consumer, reasons=tuple(reasons), is_known=known))
    return tuple(found)


def _facts(contents: Contents, findings: tuple[Finding, ...]) -> Iterator[str]:
    """The facts that rules ask for."""
    if any(finding.is_fault for finding in findings):
        yield rules.BROKEN
    fp8 = [matrix for matrix in contents.matrices if matrix.is_fp8 and matrix.weight_scale is not None]
    yield from _shape_facts(fp8)
    yield from _cache_facts(contents)
    if any(matrix.dtype != "F8_E4M3" for matrix in fp8):
        yield rules.E5M2
    yield from _output_facts(contents, [matrix.name for matrix in fp8 if matrix.leaf in OUTPUT_LAYERS])
    if any(is_latent_attention(matrix.name) for matrix in fp8):
        yield rules.LATENT_ATTENTION
    block = contents.block_size
    if block is not None and any(m.shape[-2] % block[0] or m.shape[-1] % block[1] for m in fp8 if len(m.shape) > 1):
        yield rules.PARTIAL_BLOCKS
    if any(set(args) - _ARGS_KEYS for args in _group_args(contents)):
        yield rules.OTHER_KEYS
    yield from _expert_facts(contents)
    groups = [group for group in fused_groups(contents) if any(matrix.is_fp8 for matrix in group)]
    if any(not all(matrix.is_fp8 for matrix in group) for group in groups):
        yield rules.FUSED_SPLIT
    elif any(len({_kind(matrix) for matrix in group}) > 1 for group in groups):
        yield rules.FUSED_SCHEMES
    experts = [group for group in groups if EXPERT_NAME.fullmatch(group[0].name)]
    if any(not has_one_value(matrix.input_scale for matrix in group) for group in experts):
        yield rules.EXPERT_INPUTS_DIFFER


def _shape_facts(fp8: list[Matrix]) -> Iterator[str]:
    scales = [(m, scale.shape) for m in fp8 for scale in (m.weight_scale, m.input_scale) if scale is not None]
    shapes = {shape for _, shape in scales}
    if () in shapes:
        yield rules.SCALARS
    if any(shape == (1, 1) and not EXPERT_NAME.fullmatch(m.name) for m, shape in scales):
        yield rules.ONE_BY_ONE
    if any(len(shape) == 1 and shape[0] > 1 for shape in shapes):
        yield rules.FLAT
    if any(len(shape) == 2 and shape[0] > 1 and shape[1] == 1 for shape in shapes):
        yield rules.COLUMNS
    if any(not _has_one_scale(matrix) for matrix in fp8):
        yield rules.CHANNELS
    if any(_has_one_scale(matrix) and matrix.shape[0] > 1 for matrix in fp8):
        yield rules.SINGLES


def _output_facts(contents: Contents, names: list[str]) -> Iterator[str]:
    if not names:
        return
    yield rules.OUTPUT_LAYER
    if contents.config.get("model_type") in _PLAIN_OUTPUT_LAYER:
        yield rules.FAMILY_OUTPUT_LAYER
    targets = [target for group in _groups(contents) for target in group.get("targets") or ()]
    if not any(matches_layer(target, name) for name in names for target in targets):
        yield rules.UNNAMED_OUTPUT_LAYER


def _cache_facts(contents: Contents) -> Iterator[str]:
    scheme = contents.block.get("kv_cache_scheme")
    if scheme and (
        any(scheme.get(key) != value for key, value in (("num_bits", 8), ("type", "float"), ("symmetric", True)))
        or scheme.get("strategy") not in ("tensor", "attn_head")
    ):
        yield rules.CACHE_SCHEME
    if any(scale.name.endswith("output_scale") for scale in contents.cache_scales):
        yield rules.OLD_CACHE_NAMES


def _expert_facts(contents: Contents) -> Iterator[str]:
    layers: dict[str, list[Matrix]] = {}
    for matrix in contents.matrices:
        if match := EXPERT_NAME.fullmatch(matrix.name):
            layers.setdefault(match[1], []).append(matrix)
    experts = [matrix for layer in layers.values() for matrix in layer if matrix.is_fp8]
    if not experts:
        return
    yield rules.EXPERTS
    if any(matrix.leaf in ("w1", "w2", "w3") for matrix in experts):
        yield rules.MIXTRAL_NAMES
    if any(len({_kind(matrix) for matrix in layer}) > 1 for layer in layers.values()):
        yield rules.EXPERT_SCHEMES
    if contents.config.get("model_type") == "gpt_oss":
        yield rules.GPT_OSS_EXPERTS
    if contents.config.get("model_type") == "granitemoe":
        yield rules.GRANITE_W1 if any(matrix.leaf == "w1" for matrix in experts) else rules.GRANITE_GATE
    experts = [matrix for matrix in experts if matrix.weight_scale is not None]
    if any(matrix.input_scale is not None and not _has_one_scale(matrix) for matrix in experts):
        yield rules.STATIC_CHANNEL_EXPERTS
    if any(matrix.input_scale is None and _has_one_scale(matrix) for matrix in experts):
        yield rules.DYNAMIC_MATRIX_EXPERTS


def _kind(matrix: Matrix) -> tuple[bool, bool, bool]:
    """What engines call its scheme: whether it is FP8, has one weight scale, and an input scale."""
    return matrix.is_fp8, matrix.is_fp8 and _has_one_scale(matrix), matrix.input_scale is not None


def _has_one_scale(matrix: Matrix) -> bool:
    return matrix.weight_scale is not None and math.prod(matrix.weight_scale.shape) == 1


def _groups(contents: Contents) -> list[Mapping[str, Any]]:
    return list((contents.block.get("config_groups") or {}).values())


def _group_args(contents: Contents) -> Iterator[Mapping[str, Any]]:
    for group in _groups(contents):
        for part in ("weights", "input_activations"):
            if isinstance(group.get(part), dict):
                yield group[part]
