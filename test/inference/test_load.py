"""Loading an export: damaged or contradictory checkpoints are refused by name, good ones load without surprises."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from tiny_moe_models import save_tiny_moe_model
from transformers import AutoModelForCausalLM

from autoround_fp8 import AutoRound, WeightFP8ActFP8StaticQuantLinear, load_quantized_model
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.inference.load import load_model
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import export_run, prepare
from autoround_fp8.schemes import parse_layer_config

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
UP = "model.layers.0.mlp.up_proj"


def export(model: Any, out: Path, **settings: Any) -> Path:
    config = QuantizeConfig(dataset=ROWS, device="cpu", **settings)
    return export_run(prepare(config, open_model(model)), out).folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_model("qwen2", dtype=torch.bfloat16), tmp_path_factory.mktemp("made") / "out")


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    merged = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({k: v for k, v in merged.items() if v is not None}, path, metadata={"format": "pt"})


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    change_tensors(folder, **{name.replace(".", "__"): tensor})


def change_block(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(fields)
    path.write_text(json.dumps(config))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits


@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale", "weight", "bias"])
def test_a_missing_tensor_is_named(out: Path, leaf: str) -> None:
    name = f"model.layers.0.self_attn.q_proj.{leaf}"
    change_tensor(out, name, None)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_quantized_model(out)


@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_scale_is_named(out: Path, leaf: str, value: float) -> None:
    scale = load_file(out / "model.safetensors")[f"{UP}.{leaf}"]
    scale[-1] = value
    change_tensor(out, f"{UP}.{leaf}", scale)
    with pytest.raises(CheckpointError, match=rf"up_proj\.{leaf}' holds a scale that is NaN, infinite, zero"):
        load_quantized_model(out)


@pytest.mark.parametrize("count", [1, 127, 129])
def test_a_wrong_number_of_scales_is_named(out: Path, count: int) -> None:
    change_tensor(out, f"{UP}.weight_scale", torch.ones(count))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale' is .*expected 128"):
        load_quantized_model(out)


def test_a_weight_of_another_shape_is_named(out: Path) -> None:
    change_tensor(out, f"{UP}.weight", torch.zeros(128, 32).to(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' has shape \[128, 32\], the model expects \[128, 64\]"):
        load_quantized_model(out)


def test_an_fp8_weight_that_is_said_to_be_16_bit_is_refused(out: Path) -> None:
    change_block(out, extra_config={UP: {"bits": 16, "data_type": "float", "act_bits": 16}})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' is FP8, but config\.json says"):
        load_quantized_model(out)


def test_a_16_bit_weight_that_is_said_to_be_fp8_is_refused(out: Path) -> None:
    change_tensor(out, f"{UP}.weight", torch.zeros(128, 64, dtype=torch.bfloat16))
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight' is torch\.bfloat16; config\.json says this layer is FP8"
    ):
        load_quantized_model(out)


@pytest.mark.parametrize("name", ["lm_head.weight_scale", "model.layers.7.mlp.up_proj.input_scale"])
def test_a_stray_scale_is_refused(out: Path, name: str) -> None:
    change_tensor(out, name, torch.ones(1))
    with pytest.raises(CheckpointError, match=rf"'{name}' belongs to no quantised layer"):
        load_quantized_model(out)


def test_a_plain_model_is_no_quantised_one(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    with pytest.raises(CheckpointError, match="is not quantised"):
        load_quantized_model(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_another_method_is_refused_by_name(out: Path, method: str) -> None:
    change_block(out, quant_method=method)
    with pytest.raises(CheckpointError, match=f"'{method}'.*this package loads fp8_static"):
        load_quantized_model(out)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, "bfloat16"), ("float32", "float32"), ("torch.float16", "float16")]
)
def test_a_plain_model_loads_as_transformers_does(tmp_path: Path, dtype: str | None, expected: str) -> None:
    save_tiny_model(tmp_path, "gemma3_text", with_tokenizer=False, tie_word_embeddings=True)
    model = load_model(tmp_path, dtype=dtype)
    twin = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, expected)).eval()
    assert model.dtype == getattr(torch, expected)
    assert torch.equal(logits(model), logits(twin))


def test_load_model_knows_a_quantised_one(out: Path) -> None:
    assert torch.equal(logits(load_model(out)), logits(load_quantized_model(out)))


def fp8_layers(model: Any) -> list[WeightFP8ActFP8StaticQuantLinear]:
    return [module for module in model.modules() if isinstance(module, WeightFP8ActFP8StaticQuantLinear)]


@pytest.mark.parametrize("dtype", [torch.float32, "float16", "torch.bfloat16", None])
def test_any_dtype_leaves_codes_and_scales_alone(out: Path, dtype: Any) -> None:
    model = load_quantized_model(out, dtype=dtype)
    wanted = model.lm_head.weight.dtype
    assert str(wanted) == f"torch.{str(dtype or 'bfloat16').removeprefix('torch.')}"
    assert logits(model).dtype == wanted
    assert len(fp8_layers(model)) == 14
    for layer in fp8_layers(model):
        assert (layer.weight.dtype, layer.input_scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert layer.bias is None or layer.bias.dtype == wanted


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "nonsense", torch.float64])
def test_a_dtype_that_makes_no_sense_is_refused(out: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load_quantized_model(out, dtype=dtype)


def test_half_after_loading(out: Path) -> None:
    model = load_quantized_model(out).half()
    assert logits(model).dtype == torch.float16
    assert {layer.weight.dtype for layer in fp8_layers(model)} == {torch.float8_e4m3fn}


def test_a_deep_copy_is_equal_and_apart(out: Path) -> None:
    model = load_quantized_model(out, dtype="float32")
    twin = copy.deepcopy(model)
    assert torch.equal(logits(model), logits(twin))
    fp8_layers(twin)[0].weight_scale.mul_(2)
    assert not torch.equal(logits(model), logits(twin))
    assert torch.equal(logits(model), logits(load_quantized_model(out, dtype="float32")))


def test_the_bias_is_kept_in_the_sources_values(out: Path) -> None:
    source = tiny_model("qwen2").state_dict()
    model = load_quantized_model(out)
    for leaf in ("q_proj", "k_proj", "v_proj"):
        bias = model.get_submodule(f"model.layers.1.self_attn.{leaf}").bias
        assert torch.equal(bias, source[f"model.layers.1.self_attn.{leaf}.bias"])


def test_a_scale_a_hundred_times_too_large_changes_the_logits(out: Path) -> None:
    before = logits(load_quantized_model(out, dtype="float32"))
    change_tensor(out, f"{UP}.weight_scale", load_file(out / "model.safetensors")[f"{UP}.weight_scale"] * 100)
    after = logits(load_quantized_model(out, dtype="float32"))
    assert (after - before).abs().max() > 0.1 * before.abs().max()


def test_kernels_agree_in_float32(out: Path) -> None:
    one, two = (logits(load_quantized_model(out, dtype="float32", kernel=kernel)) for kernel in ("cpu", "reference"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="kernel 'no_such'"):
        load_quantized_model(out, kernel="no_such")


def test_mixed_schemes_load(tmp_path: Path) -> None:
    config = parse_layer_config({"down_proj": "FP8_STATIC_TENSOR", r"layers\.1\.self_attn": {"bits": 16}})
    model = load_quantized_model(export(tiny_model(), tmp_path / "out", layer_config=config))
    assert model.get_submodule("model.layers.1.mlp.down_proj").weight_scale.shape == (1,)
    assert model.get_submodule("model.layers.1.mlp.up_proj").weight_scale.shape == (128, 1)
    assert type(model.get_submodule("model.layers.1.self_attn.o_proj")) is torch.nn.Linear
    assert len(fp8_layers(model)) == 10
    assert torch.isfinite(logits(model)).all()


def test_generation_works_with_a_cache(out: Path) -> None:
    model = load_quantized_model(out, dtype="float32")
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB_SIZE + 5}
    cached, plain = (model.generate(ROWS, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape == (3, 21)


def test_nothing_is_left_to_train_and_nothing_on_meta(out: Path) -> None:
    model = load_quantized_model(out)
    assert not model.training
    assert not any(tensor.device.type == "meta" for tensor in [*model.parameters(), *model.buffers()])


def test_plain_experts_cannot_be_saved_wrongly(tmp_path: Path) -> None:
    experts = load_model(save_tiny_moe_model(tmp_path / "moe", "qwen3_moe"))
    with pytest.raises(ConfigError, match="one Linear each; copy its folder"):
        experts.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_plain_model_can_be_saved(tmp_path: Path) -> None:
    load_model(save_tiny_model(tmp_path / "plain")).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load_model(tmp_path / "saved")), logits(load_model(tmp_path / "plain")))


def test_a_model_quantised_in_memory_cannot_be_saved_wrongly(tmp_path: Path) -> None:
    model, _ = AutoRound(tiny_model(), dataset=ROWS, nsamples=3, seqlen=16).quantize()
    with pytest.raises(ConfigError, match="use save_quantized"):
        model.save_pretrained(tmp_path / "saved")
