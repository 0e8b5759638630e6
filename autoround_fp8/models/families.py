"""Literal tables about architectures: the only place where layer names are listed. Dense families need no entry.

A family with an odd layout adds a row here, never an `if` elsewhere.
"""

from __future__ import annotations

import re

# Linears that engines fuse into one matrix, so they must share one input scale, and be quantised all or not at all.
FUSED_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

# Small matrices whose output decides discrete or very sensitive things; engines keep them in 16 bit.
NEVER_QUANTIZED = re.compile(r"(^|\.)(router|gate|wg|shared_expert_gate|weights_proj|lm_head|embed_out)(\.|$)")

# model_type -> why a model with these blocks is refused.
REFUSED: dict[str, str] = {
    "gpt2": "its layers are Conv1D, not Linear, and no engine loads FP8 for them",
    "step3p5": "each layer clamps the activation of its experts by its own limit",
    "step3p7": "each layer clamps the activation of its experts by its own limit",
}

# Class of an experts module -> why it is refused: its forward or its weights are of no form that is known here.
REFUSED_EXPERTS: dict[str, str] = {
    "DbrxExperts": "all experts are rows of one matrix (w1, v1, w2) with a forward of their own",
    "InklingSharedExperts": "shared experts are a second 3-D parameter beside the routed ones",
    "JetMoeParallelExperts": "attention is made of experts too, in a form of its own",
    "LongcatFlashExperts": "some experts are identities without weights",
}

# Experts modules that are given every token times its routing score (0 if not routed), instead of ids and weights.
SCORED_EXPERTS: frozenset[str] = frozenset({"Llama4TextExperts"})

# End of a fused tensor's name in the checkpoint -> the folder of the experts cut from it, which serving engines read
# as `{folder}.{number}.gate_proj` ...; others: `experts` beside the fused tensor.
FUSED_EXPERT_FOLDERS: dict[str, str] = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts",
}

# What the last name part of an expert's tensor stands for.
EXPERT_PROJECTIONS: dict[str, str] = {
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    "down_proj": "down_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}

MIN_FEATURES = 16


def fused_group(name: str) -> tuple[str, ...] | None:
    """The names that engines fuse with this last name part (`q_proj` -> q, k, v), or None."""
    return next((group for group in FUSED_GROUPS if name in group), None)
