"""`families.py`: the tables match whole names only."""

from __future__ import annotations

import pytest

from autoround_fp8.models.families import FUSED_GROUPS, NEVER_QUANTIZED, fused_group


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("k_proj", ("q_proj", "k_proj", "v_proj")),
        ("up_proj", ("gate_proj", "up_proj")),
        ("w3", ("w1", "w3")),
        ("down_proj", None),
        ("w2", None),
        ("o_proj", None),
        ("qkv_proj", None),
        ("", None),
    ],
)
def test_fused_group(name: str, group: tuple[str, ...] | None):
    assert fused_group(name) == group


def test_no_name_is_in_two_groups():
    names = [name for group in FUSED_GROUPS for name in group]
    assert len(names) == len(set(names))
    assert all(len(group) > 1 for group in FUSED_GROUPS)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head",
        "embed_out",
        "model.layers.0.mlp.gate",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.router.proj",
        "model.layers.0.feed_forward.router",
    ],
)
def test_routers_and_heads_stay_in_16_bit(name: str):
    assert NEVER_QUANTIZED.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.experts.3.gate_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.shared_expert.up_proj",
        "model.layers.0.self_attn.q_proj",
        "my_lm_head_like.proj",
    ],
)
def test_ordinary_layers_are_not_caught(name: str):
    assert not NEVER_QUANTIZED.search(name)
