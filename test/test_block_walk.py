"""The parts of a model one after the other: each computes what it does in the whole model, and is gone afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from transformers import AutoModelForCausalLM

from autoround_fp8.block_walk import BlockWalk
from autoround_fp8.calibration.block_inputs import run_block
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.models.skeleton import Skeleton, build_skeleton, load_config

CPU = torch.device("cpu")
TOKENS = torch.randint(4, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(5))
TIED = [(name, {"tie_word_embeddings": True}) for name in ("qwen3", "gemma3_text", "opt")]


def opened(folder: Path) -> tuple[Skeleton, BlockWalk]:
    reader = CheckpointReader(folder)
    skeleton = build_skeleton(load_config(folder)[1], reader.entries, torch.float32)
    return skeleton, BlockWalk(skeleton, reader, CPU)


def walked(skeleton: Skeleton, walk: BlockWalk) -> torch.Tensor:
    """Logits `[tokens, vocab]` of all tokens, part by part."""
    calls = walk.capture([TOKENS])
    for index, name in enumerate(skeleton.block_names):
        with walk.filled(name):
            calls.hidden_states = [run_block(skeleton.blocks[index], calls.inputs(0, index), CPU)]
    with walk.output_layers(calls.num_outputs) as logits:
        return torch.cat([logits(sample) for sample in calls.hidden_states[0]])


def expected_logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=TOKENS, use_cache=False).logits.flatten(0, 1)


@torch.no_grad()
@pytest.mark.parametrize(("family", "overrides"), [*((name, {}) for name in FAMILIES), *TIED])
def test_the_parts_give_the_logits_of_the_whole(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, family, with_tokenizer=False, dtype=torch.float32, **overrides)
    torch.testing.assert_close(walked(*opened(tmp_path)), expected_logits(tmp_path), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", [name for name in MOE_FAMILIES if name != "deepseek_v32"])
def test_experts_give_the_logits_of_the_whole(tmp_path: Path, family: str) -> None:
    save_tiny_moe_model(tmp_path, family, with_tokenizer=False, dtype=torch.float32)
    torch.testing.assert_close(walked(*opened(tmp_path)), expected_logits(tmp_path), rtol=1e-4, atol=1e-4)


def test_the_output_layers_need_no_embedding_and_leave_nothing_behind(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    skeleton, walk = opened(tmp_path)
    calls = walk.capture([TOKENS])
    with walk.output_layers(calls.num_outputs) as logits:
        assert logits(torch.ones(3, 64)).shape == (3, VOCAB_SIZE)
        assert skeleton.model.get_input_embeddings().weight.is_meta
        assert not skeleton.model.lm_head.weight.is_meta
        assert all(parameter.is_meta for block in skeleton.blocks for parameter in block.parameters())
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_the_last_norm_runs_without_the_output_layers_weight(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, with_tokenizer=False, dtype=torch.float32, tie_word_embeddings=False)
    skeleton, walk = opened(tmp_path)
    hidden, seen = torch.randn(3, 64), []
    output = skeleton.model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        with walk.last_norm(None) as run:
            assert output.weight.is_meta
            run(hidden)
        with walk.output_layers(None) as logits:
            logits(hidden)
    hook.remove()
    assert torch.equal(*seen)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_a_block_is_released_also_after_an_error(tmp_path: Path) -> None:
    save_tiny_moe_model(tmp_path, "mixtral", with_tokenizer=False)
    skeleton, walk = opened(tmp_path)
    before = [name for name, _ in skeleton.model.named_modules()]

    def fail() -> None:
        with walk.filled("model.layers.1"):
            assert not any(parameter.is_meta for parameter in skeleton.blocks[1].parameters())
            assert "model.layers.1.mlp.experts.7.down_proj" in dict(skeleton.model.named_modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [name for name, _ in skeleton.model.named_modules()] == before
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
