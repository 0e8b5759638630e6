"""Every place where an FP8 linear can stand is found once, says what it is, and takes what is put there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, save_tiny_model
from tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from torch import nn

from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.inference.slots import LinearSlot, linear_slots
from autoround_fp8.models.skeleton import Skeleton, build_skeleton, load_config

NUM_EXPERTS = 8


def opened(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> tuple[Skeleton, dict[str, LinearSlot]]:
    save = save_tiny_moe_model if family in MOE_FAMILIES else save_tiny_model
    save(folder, family, with_tokenizer=False)
    _, config = load_config(folder)
    skeleton = build_skeleton(config, CheckpointReader(folder).entries, dtype)
    skeleton.linearize()
    slots = list(linear_slots(skeleton))
    assert len({slot.fqn for slot in slots}) == len(slots)
    return skeleton, {slot.fqn: slot for slot in slots}


@pytest.mark.parametrize("family", [*MOE_FAMILIES, *FAMILIES])
def test_every_linear_with_a_tensor_and_every_projection_of_every_expert(tmp_path: Path, family: str) -> None:
    skeleton, slots = opened(tmp_path, family, torch.bfloat16)
    entries = CheckpointReader(tmp_path).entries
    experts = {fqn for source in skeleton.experts.values() for fqn in source.names.values()}
    per_expert = 2 if family == "nemotron_h" else 3
    assert len(experts) == len(skeleton.experts) * NUM_EXPERTS * per_expert
    assert bool(experts) == (family in MOE_FAMILIES)
    linears = {
        skeleton.sources[f"{name}.weight"].removesuffix(".weight")
        for name, module in skeleton.model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" in skeleton.sources
    }
    assert slots.keys() == experts | linears
    assert not experts & linears
    for fqn, slot in slots.items():
        assert slot.dtype == torch.bfloat16
        if fqn in linears or family not in ("granitemoe", "llama4_text", "gemma4_text", "gpt_oss"):
            assert slot.tensor == f"{fqn}.weight"
            assert entries[slot.tensor].shape == slot.shape
        else:
            assert len(entries[slot.tensor].shape) == 3
            assert slot.shape == ((64, 48) if fqn.endswith(("down_proj", "w2")) else (48, 64))


@pytest.mark.parametrize(
    ("family", "with_bias", "without"),
    [
        ("gpt_oss", "model.layers.0.mlp.experts.3.up_proj", "lm_head"),
        ("phimoe", "model.layers.0.self_attn.q_proj", "model.layers.0.block_sparse_moe.experts.3.w1"),
        ("qwen2_moe", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.experts.3.up_proj"),
        ("opt", "model.decoder.layers.0.fc1", "lm_head"),
    ],
)
def test_which_layers_have_a_bias(tmp_path: Path, family: str, with_bias: str, without: str) -> None:
    _, slots = opened(tmp_path, family)
    assert slots[with_bias].has_bias
    assert without not in slots or not slots[without].has_bias


@pytest.mark.parametrize(
    ("family", "fqn", "place"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2", "model.layers.1.mlp.experts.3.down_proj"),
        ("mixtral", "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        ("nemotron_h", "backbone.layers.4.mixer.experts.7.up_proj", "model.layers.4.mixer.experts.7.up_proj"),
        ("llama4_text", "model.layers.1.feed_forward.experts.0.down_proj", None),
        ("gpt_neox", "gpt_neox.layers.0.mlp.dense_h_to_4h", None),
    ],
)
def test_what_is_put_stands_at_the_layers_place(tmp_path: Path, family: str, fqn: str, place: str | None) -> None:
    skeleton, slots = opened(tmp_path, family)
    module = nn.Identity()
    slots[fqn].put(module)
    found = [name for name, candidate in skeleton.model.named_modules() if candidate is module]
    assert found == [place or fqn]


def test_gate_and_up_take_the_joined_ones_place(tmp_path: Path) -> None:
    skeleton, slots = opened(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.5"
    expert = skeleton.model.get_submodule(name)
    put = {leaf: nn.Identity() for leaf in ("up_proj", "gate_proj", "down_proj")}
    for leaf, module in put.items():
        slots[f"{name}.{leaf}"].put(module)
    assert dict(expert.named_children()) == put
    others = skeleton.model.get_submodule("model.layers.1.mlp.experts.4")
    assert sorted(child for child, _ in others.named_children()) == ["down_proj", "gate_up_proj"]


def test_a_tied_head_has_no_slot(tmp_path: Path) -> None:
    save_tiny_moe_model(tmp_path, "olmoe", with_tokenizer=False, tie_word_embeddings=True)
    _, config = load_config(tmp_path)
    skeleton = build_skeleton(config, CheckpointReader(tmp_path).entries, torch.float32)
    skeleton.linearize()
    assert "lm_head" not in {slot.fqn for slot in linear_slots(skeleton)}
    assert "model.layers.0.mlp.gate" not in {slot.fqn for slot in linear_slots(skeleton)}  # a router is no Linear
