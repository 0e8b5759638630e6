"""Which module of a block is its attention, how the checkpoint calls it, and which models have no usual KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, save_tiny_model, tiny_config
from tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from torch import nn

from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.model_source import open_model
from autoround_fp8.models.attention import cached_attentions
from autoround_fp8.models.skeleton import Skeleton, build_skeleton

OTHER_NAMES = {"gpt_neox": "gpt_neox.layers.{}.attention", "opt": "model.decoder.layers.{}.self_attn"}
NOT_CACHING = {
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "deepseek_v32": "latent attention",
    "qwen3_next": "block 'model.layers.0' is of type 'linear_attention'",
    "nemotron_h": "block 'model.layers.0' is of type 'linear_attention'",
}


def skeleton_of(folder: Path, family: str) -> Skeleton:
    save = save_tiny_model if family in FAMILIES else save_tiny_moe_model
    source = open_model(save(folder, family, with_tokenizer=False))
    return build_skeleton(source.config, source.tensors.entries, torch.float32)


@pytest.mark.parametrize("family", [*FAMILIES, *(family for family in MOE_FAMILIES if family not in NOT_CACHING)])
def test_every_block_has_one_attention(tmp_path: Path, family: str) -> None:
    skeleton = skeleton_of(tmp_path / "tiny", family)
    name = OTHER_NAMES.get(family, "model.layers.{}.self_attn")
    assert cached_attentions(skeleton) == tuple(name.format(i) for i in range(len(skeleton.block_names)))


@pytest.mark.parametrize(("family", "reason"), NOT_CACHING.items())
def test_models_without_a_usual_cache_are_refused_with_the_reason(tmp_path: Path, family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        cached_attentions(skeleton_of(tmp_path / "tiny", family))


def test_blocks_that_share_a_cache_are_refused(tmp_path: Path) -> None:
    skeleton = skeleton_of(tmp_path / "tiny", "llama")
    skeleton.model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModelError, match="the last 1 blocks of model_type 'llama' use the KV cache of"):
        cached_attentions(skeleton)


def test_an_attention_that_cannot_be_told_is_refused_by_its_block(tmp_path: Path) -> None:
    skeleton = skeleton_of(tmp_path / "tiny", "llama")
    with torch.device("meta"):
        other = type(skeleton.blocks[1].self_attn)(tiny_config("llama"), 1)
    skeleton.blocks[1].cross_attn = other
    with pytest.raises(UnsupportedModelError, match=r"block 'model.layers.1' has 2 modules that may be its attention"):
        cached_attentions(skeleton)
    skeleton.blocks[0].self_attn = nn.Identity()
    with pytest.raises(UnsupportedModelError, match=r"block 'model.layers.0' has 0 modules"):
        cached_attentions(skeleton)


def test_scales_are_called_as_the_checkpoint_calls_the_attention(tmp_path: Path) -> None:
    skeleton = skeleton_of(tmp_path / "tiny", "llama")
    renamed = {name: tensor.replace("model.", "text.", 1) for name, tensor in skeleton.sources.items()}
    assert cached_attentions(replace(skeleton, sources=renamed))[1] == "text.layers.1.self_attn"
    with pytest.raises(UnsupportedModelError, match=r"how it calls 'model.layers.0.self_attn'"):
        cached_attentions(replace(skeleton, sources={}))
