"""Who fails for which facts of a checkpoint, and why: literal tables of what each consumer was seen to do.

Seen with vLLM 0.33, SGLang 0.5.23, transformers 5.24 with compressed-tensors 0.19, Intel's auto-round 0.16.1.
`consumers.py` finds the facts; `scripts/crossload_vllm.py` asks vLLM itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoround_fp8.inspection.contents import NATIVE_FP8, NO_LABEL, OTHER_LABEL

VLLM, SGLANG, TRANSFORMERS, INTEL, THIS = "vLLM", "SGLang", "transformers", "Intel AutoRound", "autoround_fp8"
CONSUMERS = (VLLM, SGLANG, TRANSFORMERS, INTEL, THIS)

# Label -> consumer -> why it cannot read it; one that is not named here can.
NO_READER: dict[str, dict[str, str]] = {
    NO_LABEL: {},
    NATIVE_FP8: {},
    "fp8_static": {
        # layers/quantization/inc/inc.py:102
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
UNKNOWN: dict[str, tuple[str, ...]] = {
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
MIXTRAL_NAMES = "experts named w1, w2, w3"
GPT_OSS_EXPERTS = "FP8 experts of gpt_oss"
LATENT_ATTENTION = "q_a_proj, kv_a_proj_with_mqa or kv_b_proj is FP8"
FUSED_SPLIT = "of q/k/v or gate/up only some are FP8"
FUSED_SCHEMES = "q/k/v or gate/up have different kinds of scales"
EXPERT_SCHEMES = "the matrices of the experts of a layer are not quantised alike"
GRANITE_W1 = "FP8 experts of granitemoe called w1, w2, w3"
GRANITE_GATE = "FP8 experts of granitemoe called gate_proj, up_proj, down_proj"
E5M2 = "FP8 codes that are not E4M3"
OUTPUT_LAYER = "the output layer is FP8"
UNNAMED_OUTPUT_LAYER = "the output layer is FP8, but no config group names it"
FAMILY_OUTPUT_LAYER = "the output layer is FP8, of a family whose class in vLLM builds it without the quantization"
CACHE_SCHEME = "a KV cache that is not symmetric FP8 with a scale per tensor or head"
OLD_CACHE_NAMES = "KV-cache scales called output_scale"
ONE_BY_ONE = "scales of shape [1, 1] outside experts"
FLAT = "scales of shape [out]"
SCALARS = "scales of shape []"
COLUMNS = "scales of shape [out, 1]"
SINGLES = "a weight scale of one value for a matrix"
CHANNELS = "weight scales per channel"
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
        source: Where vLLM 0.33.0 does it, if it is among them: file of vllm/model_executor and line.
    """

    fact: str
    labels: tuple[str, ...] = ()
    consumers: tuple[str, ...]
    reason: str
    source: str = ""


_CT, _FP8, _INTEL_LABEL = "llm_compressor", "fp8", "fp8_static"
_CT_FILES = "layers/quantization/compressed_tensors/"

RULES: tuple[Rule, ...] = (
    Rule(fact=BROKEN, consumers=CONSUMERS, reason="the checkpoint has faults"),
    Rule(
        fact=STATIC_CHANNEL_EXPERTS,
        labels=(_CT,),
        consumers=(VLLM, SGLANG),
        reason="runs experts with static inputs only with one weight scale per matrix (assertion)",
        source=_CT_FILES + "compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py:75",
    ),
    Rule(
        fact=DYNAMIC_MATRIX_EXPERTS,
        labels=(_CT,),
        consumers=(VLLM, SGLANG),
        reason="runs experts with dynamic inputs only with a weight scale per channel",
        source=_CT_FILES + "compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py:75",
    ),
    Rule(
        fact=EXPERT_INPUTS_DIFFER,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="gate and up of an expert need the same input scale (ValueError)",
        source="layers/fused_moe/routed_experts.py:852",
    ),
    Rule(
        fact=EXPERT_INPUTS_DIFFER,
        labels=(_FP8,),
        consumers=(VLLM,),
        reason="gate and up of an expert need the same input scale: the last one read counts for both",
        source="layers/fused_moe/routed_experts.py:639",
    ),
    Rule(
        fact=EXPERT_SCHEMES,
        labels=(_CT, _FP8),
        consumers=(VLLM,),
        reason="runs the experts of a layer as one, which must all have the same scheme (ValueError)",
        source=_CT_FILES + "compressed_tensors_moe/compressed_tensors_moe.py:53",
    ),
    Rule(
        fact=GRANITE_W1,
        labels=(_CT, _FP8),
        consumers=(VLLM,),
        reason="reads single experts of granitemoe as gate_proj, up_proj, down_proj and leaves others out",
        source="models/granitemoe.py:106",
    ),
    Rule(
        fact=GRANITE_GATE,
        labels=(_CT, _FP8),
        consumers=(SGLANG,),
        reason="reads single experts of granitemoe as w1, w3, w2",
    ),
    Rule(
        fact=GPT_OSS_EXPERTS,
        consumers=(VLLM, SGLANG, TRANSFORMERS, INTEL),
        reason="has no FP8 experts for gpt_oss",
        source="models/gpt_oss.py:1343",
    ),
    Rule(
        fact=EXPERTS,
        labels=(_CT,),
        consumers=(TRANSFORMERS,),
        reason="loads experts, but dequantises them into one tensor and does not round their inputs",
    ),
    Rule(
        fact=MIXTRAL_NAMES,
        labels=(_INTEL_LABEL,),
        consumers=(INTEL,),
        reason="knows Mixtral's experts as gate_proj, up_proj, down_proj only, and leaves w1, w2, w3 unread: NaN; "
        "convert it to fp8_static again",
    ),
    Rule(
        fact=LATENT_ATTENTION,
        labels=(_CT, _FP8),
        consumers=(VLLM, SGLANG),
        reason="joins or takes apart q_a_proj, kv_a_proj_with_mqa, kv_b_proj, which must stay in 16 bit",
        source="layers/attention/mla_attention.py:408",
    ),
    Rule(
        fact=FUSED_SPLIT,
        labels=(_CT, _FP8),
        consumers=(VLLM, SGLANG),
        reason="fuses q/k/v and gate/up, which must all be FP8 or all be ignored",
        source=_CT_FILES + "utils.py:67",
    ),
    Rule(
        fact=FUSED_SCHEMES,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="reads all of q/k/v and of gate/up by the scheme of the first, so they must have the same",
        source=_CT_FILES + "utils.py:176",
    ),
    Rule(
        fact=E5M2,
        labels=(_CT, _FP8),
        consumers=(VLLM,),
        reason="holds FP8 weights as E4M3 only",
        source="layers/quantization/utils/fp8_utils.py:1376",
    ),
    Rule(
        fact=UNNAMED_OUTPUT_LAYER,
        labels=(_CT,),
        consumers=(VLLM, SGLANG),
        reason="takes the output layer for 16 bit unless a target of config_groups names it (ValueError in vLLM)",
        source=_CT_FILES + "compressed_tensors.py:186",
    ),
    Rule(
        fact=OUTPUT_LAYER,
        labels=(_FP8, NATIVE_FP8),
        consumers=(VLLM, SGLANG),
        reason="takes the output layer for 16 bit under this label",
        source="layers/quantization/fp8.py:180",
    ),
    Rule(
        fact=FAMILY_OUTPUT_LAYER,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="has the output layer of this family in 16 bit only",
        source="models/qwen3_next.py:851",
    ),
    Rule(
        fact=CACHE_SCHEME,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="quantises a KV cache only in symmetric FP8, by tensor or head (NotImplementedError)",
        source=_CT_FILES + "compressed_tensors.py:1121",
    ),
    Rule(
        fact=OLD_CACHE_NAMES,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="knows KV-cache scales as k_scale and v_scale only (AttributeError)",
        source="layers/quantization/base_config.py:249",
    ),
    Rule(
        fact=ONE_BY_ONE,
        labels=(_CT,),
        consumers=(VLLM, TRANSFORMERS),
        reason="rejects scales of shape [1, 1]",
        source="parameter.py:299",
    ),
    Rule(
        fact=ONE_BY_ONE,
        labels=(_FP8,),
        consumers=(VLLM,),
        reason="rejects scales of shape [1, 1]",
        source="parameter.py:299",
    ),
    Rule(
        fact=FLAT,
        labels=(_CT,),
        consumers=(VLLM,),
        reason="rejects scales of shape [out], which must be [out, 1]",
        source="parameter.py:150",
    ),
    Rule(fact=SCALARS, labels=(_CT,), consumers=(TRANSFORMERS,), reason="rejects scales of shape []"),
    Rule(
        fact=COLUMNS,
        labels=(_INTEL_LABEL,),
        consumers=(INTEL,),
        reason="loads scales of shape [out, 1], but cannot compute with them; they must be [out]",
    ),
    Rule(
        fact=SINGLES,
        labels=(_INTEL_LABEL,),
        consumers=(INTEL,),
        reason="loads scales per channel only; quantise again, which repeats a scale per matrix for every channel",
    ),
    Rule(
        fact=CHANNELS,
        labels=(_FP8,),
        consumers=(VLLM, SGLANG),
        reason="this label has one weight scale per matrix",
        source="layers/quantization/fp8.py:320",
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
        source=_CT_FILES + "compressed_tensors.py:333",
    ),
)
