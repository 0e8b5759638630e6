"""Tiny random mixture-of-experts models of many families, saved as ordinary Hugging Face folders.

Every test that needs an MoE checkpoint starts from `save_tiny_moe_model`; dense models and the tokenizer are in
`tiny_models`. Expert widths are 48, no multiple of 32 or 128, so that FP8 blocks are partial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import _COMMON, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

_EXPERT_DIM = 48

# The multi-head latent attention of DeepSeek: no head_dim, and every head has its own key.
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": _EXPERT_DIM,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GROUPED: dict[str, Any] = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True}
_QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": _EXPERT_DIM}
_LOCAL: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": _EXPERT_DIM,
}

# family -> what differs from _COMMON; the key is transformers' model_type.
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    # The first layer is dense, the second has a shared expert with its own gate.
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0]},
    "qwen3_moe": {**_QWEN, "norm_topk_prob": True},
    "qwen3_next": {
        **_QWEN,
        "shared_expert_intermediate_size": _EXPERT_DIM,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "deepseek_v2": {
        **_MLA,
        **_ROUTED,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**_MLA, **_ROUTED, **_GROUPED, "num_hidden_layers": 3},
    # index_topk is less than most sequences, so that the indexer does drop tokens.
    "deepseek_v32": {**_MLA, **_ROUTED, **_GROUPED, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 2},
    "glm4_moe": {**_ROUTED, **_GROUPED, "attention_bias": True, "use_qk_norm": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": _EXPERT_DIM},
    "dots1": {**_ROUTED, **_GROUPED},
    "minimax_m2": _LOCAL,
    "phimoe": {**_LOCAL, "attention_bias": True, "lm_head_bias": True},
    "granitemoe": {
        **_LOCAL,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "gpt_oss": {
        **_LOCAL,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    # As in the released models each token has one expert; dense and MoE layers, with and without positions.
    "llama4_text": {
        **_LOCAL,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 3,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 1, 0],
        "attention_chunk_size": 8,
    },
    # Each layer has a dense MLP beside the experts; full-attention layers use the keys as values.
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": _EXPERT_DIM,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "final_logit_softcapping": 30.0,
    },
    # Layers are Mamba2, experts, attention, plain MLP, experts; an expert has no gate: down(relu(up(x))^2).
    "nemotron_h": {
        "hybrid_override_pattern": "ME*-E",
        "num_hidden_layers": None,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _EXPERT_DIM,
        "moe_shared_expert_intermediate_size": 80,
        **_GROUPED,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
}

# Families released with block-scaled FP8 weights; not mixtral, kept for its w1/w2/w3 names.
FP8_FAMILIES: tuple[str, ...] = (
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_moe",
    "qwen3_next",
    "glm4_moe",
    "minimax_m2",
    "mixtral",
)

# Also matches the shared_expert_gate of Qwen, which should open and close too.
_ROUTERS = ("gate.weight", "router.weight", "router.proj.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")


def tiny_moe_config(family: str, **overrides: Any) -> Any:
    """The transformers config of a tiny MoE model; overrides of None remove a field."""
    fields = {**_COMMON, **MOE_FAMILIES[family], **overrides}
    return AutoConfig.for_model(family, **{k: v for k, v in fields.items() if v is not None})


def tiny_moe_model(family: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Any:
    """A tiny random MoE model in memory, in eval mode.

    Norms and biases are not all one or zero, all experts get tokens, and the experts shape the logits.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_moe_config(family, **overrides), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.03)  # more of what all tokens share unbalances routers
            elif parameter.ndim == 1 or name.endswith("_bias"):  # gpt_oss has one bias row per expert
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith(_ROUTERS):
                parameter.mul_(10.0)  # logits of about 1.5: neither uniform nor one expert for all tokens
            elif name.endswith(_EMBEDDINGS):
                parameter.mul_(10.0)  # tokens must differ more than what they share, else they take the same experts
            elif parameter.ndim == 3 and ".experts." in name:
                parameter.mul_(6.0)  # an expert's output is a product of three weights, so it fades fastest
            else:
                parameter.mul_(3.0)  # the default init is so small that every block is nearly the identity
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.05)
    return model


def save_tiny_moe_model(
    folder: Path, family: str, *, with_tokenizer: bool = True, max_shard_size: str = "5GB", **kwargs: Any
) -> Path:
    """Saves a tiny MoE model (arguments as of `tiny_moe_model`) and its tokenizer; returns the folder."""
    tiny_moe_model(family, **kwargs).save_pretrained(folder, max_shard_size=max_shard_size)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def dead_experts_model(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Any:
    """A tiny qwen3_moe of four experts, two per token, whose experts 2 and 3 get no token in any layer.

    Channel 0 of every token is so large that it alone orders the router's logits.
    """
    fields = {"num_experts": 4, "num_experts_per_tok": 2, **overrides}
    model = tiny_moe_model("qwen3_moe", seed=seed, dtype=dtype, **fields)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 50.0
        for layer in model.model.layers:
            layer.mlp.gate.weight[:, 0] = torch.tensor([1.0, 1.0, 0.5, -5.0])
    return model
