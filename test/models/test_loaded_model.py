"""A model that is loaded already gives the tensors of its checkpoint: fused experts, native FP8, offloaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from make_block_fp8 import quantize_blocks
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from tiny_moe_models import save_tiny_moe_model, tiny_moe_model
from transformers import AutoModelForCausalLM

from autoround_fp8.autoround import AutoRound
from autoround_fp8.checkpoint.reader import InMemorySource
from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.model_source import open_model
from autoround_fp8.models.loaded_model import loaded_tensors
from autoround_fp8.models.skeleton import build_model

ROWS = torch.arange(4, 84).reshape(4, 20)


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def plain_model(model: Any) -> Any:
    return build_model(type(model.config).from_dict(model.config.to_dict()), torch.bfloat16)


def assert_same(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert found.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.read(name).float(), tensor.float()), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss", "llama4_text"])
def test_names_and_values_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    save_tiny_moe_model(tmp_path, family)
    found = open_model(loaded(tmp_path)).tensors
    assert_same(found, load_file(tmp_path / "model.safetensors"))


def test_a_model_never_saved_gets_the_names_it_would_have(tmp_path: Path) -> None:
    model = tiny_moe_model("mixtral")
    model.save_pretrained(tmp_path)
    assert_same(open_model(model).tensors, load_file(tmp_path / "model.safetensors"))


def test_experts_are_cut_out_only_when_read() -> None:
    model = tiny_moe_model("qwen3_moe")
    tensors = loaded_tensors(model, plain_model(model))
    fused = model.model.layers[0].mlp.experts.gate_up_proj
    up = tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    assert up.load().data_ptr() == fused[3, fused.shape[1] // 2 :].data_ptr()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_offloaded_to_disk_are_found(tmp_path: Path, family: str) -> None:
    save = save_tiny_model if family == "qwen3" else save_tiny_moe_model
    save(tmp_path / "model", family)
    layers = {f"model.layers.{i}": "disk" for i in range(2)}
    device_map = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        **layers,
    }
    model = loaded(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    assert_same(open_model(model).tensors, load_file(tmp_path / "model" / "model.safetensors"))


def test_a_weight_on_meta_that_nobody_has_is_refused_by_name() -> None:
    model = tiny_moe_model("qwen3_moe")
    model.model.layers[1].mlp.experts.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.1\.mlp\.experts\.\w+' is on the meta device"):
        open_model(model)


def as_fp8_modules(model: Any) -> Any:
    """Replaces Linears and experts of layer 1 by transformers' FP8 modules, with the same weights in FP8 blocks."""
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

    layer = model.model.layers[1]
    linear = layer.self_attn.q_proj
    module = FP8Linear(linear.in_features, linear.out_features, block_size=(128, 128))
    codes, scales = quantize_blocks(linear.weight, (128, 128), "F32")
    module.weight, module.weight_scale_inv = (torch.nn.Parameter(t, requires_grad=False) for t in (codes, scales))
    layer.self_attn.q_proj = module
    fused = layer.mlp.experts
    experts = FP8Experts(model.config, block_size=(128, 128))
    for leaf in ("gate_up_proj", "down_proj"):
        parts = [quantize_blocks(matrix, (128, 128), "F32") for matrix in getattr(fused, leaf)]
        for name, index in ((leaf, 0), (f"{leaf}_scale_inv", 1)):
            stacked = torch.stack([part[index] for part in parts])
            setattr(experts, name, torch.nn.Parameter(stacked, requires_grad=False))
    layer.mlp.experts = experts
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model.config.quantization_config = block
    return model


def test_fp8_modules_are_dequantised_and_left_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}
    model = as_fp8_modules(tiny_moe_model("qwen3_moe", **sizes))
    experts = model.model.layers[1].mlp.experts
    before = {name: (tensor, tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    tensors = open_model(model).tensors
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert tensors.entries[name].is_native_fp8
    scale = experts.gate_up_proj_scale_inv[2][1:].repeat_interleave(128, 1)
    expected = experts.gate_up_proj[2][128:].float() * scale
    assert torch.equal(tensors.read(name), expected.bfloat16())
    assert not [n for n in tensors.entries if "scale_inv" in n]
    AutoRound(model, dataset=ROWS, seqlen=20).quantize_and_save(tmp_path / "out")
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert all(after[n] is tensor and after[n]._version == version for n, (tensor, version) in before.items())
    assert model.model.layers[1].mlp.experts is experts


def test_fp8_scales_that_do_not_split_are_refused() -> None:
    model = as_fp8_modules(tiny_moe_model("qwen3_moe", hidden_size=256, moe_intermediate_size=64))
    with pytest.raises(UnsupportedModelError, match="do not say which are the gate's"):
        open_model(model)


def test_the_source_serves_lazy_tensors_in_pieces() -> None:
    model = tiny_moe_model("mixtral")
    source = InMemorySource(loaded_tensors(model, plain_model(model)))
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    raw = b"".join(source.chunks(name))
    assert len(raw) == source.entries[name].num_bytes
    assert raw == source.read(name).view(torch.uint8).numpy().tobytes()
