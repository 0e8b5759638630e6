"""Who can load a checkpoint, and why not: literal tables of what each consumer was seen to do with which facts.

Seen with vLLM 0.33, SGLang 0.5.23, transformers 5.24 with compressed-tensors 0.19, Intel's auto-round 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoround_fp8.formats.base import EXPERT_NAME, is_latent_attention
from autoround_fp8.inspection.checks import OUTPUT_LAYERS, Finding, fused_groups, has_one_value
from autoround_fp8.inspection.contents import NATIVE_FP8, NO_LABEL, OTHER_LABEL, Contents, Matrix
from autoround_fp8.schemes import matches_layer

VLLM, SGLANG, TRANSFORMERS, INTEL, THIS = "vLLM", "SGLang", "transformers", "Intel AutoRound", "autoround_fp8"
CONSUMERS = (VLLM, SGLANG, TRANSFORMERS, INTEL, THIS)

# Label -> consumer -> why it cannot read it; one that is not named here can.
_NO_READER: dict[str, dict[str, str]] = {
    NO_LABEL: {},
    NATIVE_FP8: {},
    "fp8_static": {
        VLLM: "refuses the label auto-round with packing_format auto_round:fp8_static; convert it to llm_compressor",
        TRANSFORMERS: "leaves the label to Intel's auto-round package; without that it does not load",
    },
    "llm_compressor": {INTEL: "its FP8 loader reads its own label only; convert it to fp8_static"},
    "fp8": {
        TRANSFORMERS: "its fp8 reader wants block scales (weight_scale_inv); convert it to llm_compressor",
        INTEL: "its FP8 loader reads its own label only; convert it to fp8_static",
    },
    OTHER_LABEL: {THIS: "config.json has a quantization it does not read"},
}

# Label -> who was never tried with it.
_UNKNOWN: dict[str, tuple[str, ...]] = {
    "fp8_static": (SGLANG,),
    NATIVE_FP8: (INTEL,),
    OTHER_LABEL: (VLLM, SGLANG, TRANSFORMERS, INTEL),
}

# Facts about the contents, named as the rules below name them.
BROKEN = "broken"
EXPERTS = "experts are FP8"
STATIC_CHANNEL_EXPERTS = "experts with a weight scale per channel and a static input scale"
DYNAMIC_MATRIX_EXPERTS = "experts with one weight scale per matrix and dynamic inputs"
EXPERT_INPUTS_DIFFER = "gate and up of an expert have different input scales"
GPT_OSS_EXPERTS = "FP8 experts of gpt_oss"
LATENT_ATTENTION = "q_a_proj, kv_a_proj_with_mqa or kv_b_proj is FP8"
FUSED_SPLIT = "of q/k/v or gate/up only some are FP8"
ONE_BY_ONE = "scales of shape [1, 1]"
SCALARS = "scales of shape []"
COLUMNS = "scales of shape [out, 1]"
CHANNELS = "weight scales per channel"
OUTPUT_LAYER = "the output layer is FP8"
UNNAMED_OUTPUT_LAYER = "the output layer is FP8, and config_groups do not name it"
FAMILY_OUTPUT_LAYER = "the output layer is FP8, of a family whose class in vLLM builds it without the quantization"
PARTIAL_BLOCKS = "matrices that are not whole blocks"
OTHER_KEYS = "further keys in weights or input_activations of config_groups"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a fact means under some labels.

    Attributes:
        fact: The fact.
        labels: Labels under which it counts; empty = all.
        consumers: Who fails for it.
        reason: What happens.
    """

    fact: str
    labels: tuple[str, ...] = ()
    consumers: tuple[str, ...]
    reason: str


_CT, _FP8, _INTEL_LABEL = "llm_compressor", "fp8", "fp8_static"

RULES: tuple[Rule, ...] = (
    Rule(fact=BROKEN, consumers=CONSUMERS, reason="the checkpoint has faults"),
    Rule(
        fact=STATIC_CHANNEL_EXPERTS,
        labels=(_CT,),
        consumers=(VLLM, SGLANG),
        reason="runs experts with static inputs only with one weight scale per matrix (assertion)",
    ),
    Rule(
        fact=DYNAMIC_MATRIX_EXPERTS,
        labels=(_CT,),
        consumers=(VLLM, SGLANG),
        reason="runs experts with dynamic inputs only with a weight scale per channel",
    ),
    Rule(
        fact=EXPERT_INPUTS_DIFFER,
        labels=(_CT, _FP8),
        consumers=(VLLM,),
        reason="gate and up of an expert need the same input scale (ValueError)",
    ),
    Rule(fact=GPT_OSS_EXPERTS, consumers=(VLLM, SGLANG, TRANSFORMERS, INTEL), reason="has no FP8 experts for gpt_oss"),
    Rule(
        fact=EXPERTS,
        labels=(_CT,),
        consumers=(TRANSFORMERS,),
        reason="holds experts as one tensor, for which compressed-tensors has no linears",
    ),
    Rule(
        fact=LATENT_ATTENTION,
        labels=(_CT, _FP8),
        consumers=(VLLM, SGLANG),
        reason="joins or takes apart q_a_proj, kv_a_proj_with_mqa, kv_b_proj, which must stay in 16 bit",
    ),
    Rule(
        fact=FUSED_SPLIT,
        labels=(_CT, _FP8),
        consumers=(VLLM, SGLANG),
        reason="fuses q/k/v and gate/up, which must all be FP8 or all be ignored",
    ),
    Rule(
        fact=ONE_BY_ONE,
        labels=(_CT,),
        consumers=(VLLM, TRANSFORMERS),
        reason="rejects scales of shape [1, 1]",
    ),
    Rule(fact=SCALARS, labels=(_CT,), consumers=(TRANSFORMERS,), reason="rejects scales of shape []"),
    Rule(
        fact=COLUMNS,
        labels=(_INTEL_LABEL,),
        consumers=(INTEL,),
        reason="loads scales of shape [out, 1], but cannot compute with them; they must be [out]",
    ),
    Rule(
        fact=CHANNELS,
        labels=(_FP8,),
        consumers=(VLLM, SGLANG),
        reason="this label has one weight scale per matrix",
    ),
    Rule(
        fact=OUTPUT_LAYER,
        labels=(_FP8, NATIVE_FP8),
        consumers=(VLLM, SGLANG),
        reason="takes the output layer for 16 bit under this label",
    ),
    Rule(
        fact=UNNAMED_OUTPUT_LAYER,
        labels=(_CT,),
        consumers=(VLLM, SGLANG),
        reason="takes the output layer for FP8 only if a target of config_groups names it: it is no Linear there",
    ),
    Rule(
        fact=FAMILY_OUTPUT_LAYER,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="has the output layer of this family in 16 bit only",
    ),
    Rule(
        fact=PARTIAL_BLOCKS,
        labels=(NATIVE_FP8,),
        consumers=(TRANSFORMERS,),
        reason="guesses the block size from the scales: wrong for a matrix that is not whole blocks",
    ),
    Rule(
        fact=OTHER_KEYS,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="refuses unknown keys in config_groups (ValidationError)",
    ),
)

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
        reason = _NO_READER[contents.label].get(consumer)
        reasons = [] if reason is None else [reason]
        reasons += [
            rule.reason
            for rule in RULES
            if rule.fact in facts and consumer in rule.consumers and (not rule.labels or contents.label in rule.labels)
        ]
        known = bool(reasons) or consumer not in _UNKNOWN.get(contents.label, ())
        found.append(Reading(consumer=consumer, reasons=tuple(reasons), is_known=known))
    return tuple(found)


def _facts(contents: Contents, findings: tuple[Finding, ...]) -> Iterator[str]:
    """The facts that rules ask for."""
    if any(finding.is_fault for finding in findings):
        yield BROKEN
    fp8 = [matrix for matrix in contents.matrices if matrix.is_fp8 and matrix.weight_scale is not None]
    shapes = {scale.shape for m in fp8 for scale in (m.weight_scale, m.input_scale) if scale is not None}
    if () in shapes:
        yield SCALARS
    if (1, 1) in shapes:
        yield ONE_BY_ONE
    if any(len(shape) == 2 and shape[0] > 1 and shape[1] == 1 for shape in shapes):
        yield COLUMNS
    if any(not _has_one_scale(matrix) for matrix in fp8):
        yield CHANNELS
    if any(is_latent_attention(matrix.name) for matrix in fp8):
        yield LATENT_ATTENTION
    output = [matrix.name for matrix in fp8 if matrix.leaf in OUTPUT_LAYERS]
    if output:
        yield OUTPUT_LAYER
        if contents.config.get("model_type") in _PLAIN_OUTPUT_LAYER:
            yield FAMILY_OUTPUT_LAYER
        if not any(matches_layer(target, name) for name in output for target in _targets(contents)):
            yield UNNAMED_OUTPUT_LAYER
    block = contents.block_size
    if block is not None and any(m.shape[-2] % block[0] or m.shape[-1] % block[1] for m in fp8 if len(m.shape) > 1):
        yield PARTIAL_BLOCKS
    if any(set(args) - _ARGS_KEYS for args in _group_args(contents)):
        yield OTHER_KEYS
    yield from _expert_facts(contents, [matrix for matrix in fp8 if EXPERT_NAME.fullmatch(matrix.name)])
    groups = [group for group in fused_groups(contents) if any(matrix.is_fp8 for matrix in group)]
    if any(not all(matrix.is_fp8 for matrix in group) for group in groups):
        yield FUSED_SPLIT
    experts = [group for group in groups if EXPERT_NAME.fullmatch(group[0].name)]
    if any(not has_one_value(matrix.input_scale for matrix in group) for group in experts):
        yield EXPERT_INPUTS_DIFFER


def _expert_facts(contents: Contents, experts: list[Matrix]) -> Iterator[str]:
    if not experts:
        return
    yield EXPERTS
    if contents.config.get("model_type") == "gpt_oss":
        yield GPT_OSS_EXPERTS
    if any(matrix.input_scale is not None and not _has_one_scale(matrix) for matrix in experts):
        yield STATIC_CHANNEL_EXPERTS
    if any(matrix.input_scale is None and _has_one_scale(matrix) for matrix in experts):
        yield DYNAMIC_MATRIX_EXPERTS


def _has_one_scale(matrix: Matrix) -> bool:
    return matrix.weight_scale is not None and math.prod(matrix.weight_scale.shape) == 1


def _targets(contents: Contents) -> Iterator[str]:
    for group in (contents.block.get("config_groups") or {}).values():
        yield from group.get("targets") or ()


def _group_args(contents: Contents) -> Iterator[dict[str, object]]:
    for group in (contents.block.get("config_groups") or {}).values():
        for part in ("weights", "input_activations"):
            if isinstance(group.get(part), dict):
                yield group[part]
