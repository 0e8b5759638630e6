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
}

MIN_FEATURES = 16


def fused_group(name: str) -> tuple[str, ...] | None:
    """The names that engines fuse with this last name part (`q_proj` -> q, k, v), or None."""
    return next((group for group in FUSED_GROUPS if name in group), None)
