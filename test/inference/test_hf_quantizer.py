"""`from_pretrained` of `fp8_static` exports: the model that `load_quantized_model` gives, or a clear error."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from tiny_moe_models import save_tiny_moe_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoRoundConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
)
from transformers.distributed import DistributedConfig

from autoround_fp8 import WeightFP8ActFP8StaticQuantLinear, load_quantized_model
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.inference.hf_quantizer import Fp8StaticQuantizer, Reserved, refuse_offloading
from autoround_fp8.model_source import open_model
from autoround_fp8.models.linear_experts import LinearExperts
from autoround_fp8.pipeline import export_run, prepare
from autoround_fp8.schemes import parse_layer_config, preset_name_to_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
Q_PROJ = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.5.up_proj"


def export(model: Any, out: Path, **settings: Any) -> Path:
    return export_run(prepare(QuantizeConfig(dataset=ROWS, device="cpu", **settings), open_model(model)), out).folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def dense(base: Path) -> Path:
    return export(tiny_model("qwen2", dtype=torch.bfloat16), base / "dense")


@pytest.fixture(scope="module")
def moe(base: Path) -> Path:
    return export(save_tiny_moe_model(base / "moe-source", "qwen3_moe"), base / "moe")


def change_tensor(folder: Path, out: Path, name: str, tensor: torch.Tensor | None) -> Path:
    shutil.copytree(folder, out)
    tensors = {**load_file(out / "model.safetensors"), name: tensor}
    save_file({k: v for k, v in tensors.items() if v is not None}, out / "model.safetensors", {"format": "pt"})
    return out


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits


def fp8_layers(model: Any) -> list[WeightFP8ActFP8StaticQuantLinear]:
    return [module for module in model.modules() if isinstance(module, WeightFP8ActFP8StaticQuantLinear)]


def assert_same_model(folder: Path, model: Any, **settings: Any) -> None:
    ours = load_quantized_model(folder, **settings)
    assert torch.equal(logits(model), logits(ours))
    assert isinstance(model.hf_quantizer, Fp8StaticQuantizer)
    assert len(fp8_layers(model)) == len(fp8_layers(ours)) > 0
    for one, other in zip(fp8_layers(model), fp8_layers(ours), strict=True):
        assert one.name == other.name
        assert one.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
    assert not any(isinstance(module, Reserved) for module in model.modules())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not model.training


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_dense(tmp_path: Path, family: str, tied: bool) -> None:
    out = export(tiny_model(family, tie_word_embeddings=tied), tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert_same_model(out, model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert not any(info.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "phimoe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_experts(tmp_path: Path, family: str) -> None:
    out = export(save_tiny_moe_model(tmp_path / "source", family), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert_same_model(out, model)
    assert any(isinstance(module, LinearExperts) for module in model.modules())
    assert any("experts" in layer.name for layer in fp8_layers(model)) == (family != "gpt_oss")


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"dtype": "auto"}, "bfloat16"),
        ({"dtype": torch.float32}, "float32"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": torch.bfloat16, "device_map": "cpu"}, "bfloat16"),
        ({"device_map": "auto", "low_cpu_mem_usage": True}, "bfloat16"),
        ({"device_map": {"": "cpu"}, "dtype": "float32", "attn_implementation": "eager"}, "float32"),
    ],
)
def test_loading_arguments(dense: Path, moe: Path, arguments: dict[str, Any], dtype: str) -> None:
    for folder in (dense, moe):
        model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
        assert model.dtype == getattr(torch, dtype)
        ours = load_quantized_model(folder, dtype=dtype)
        ours.set_attn_implementation(arguments.get("attn_implementation", "sdpa"))
        assert torch.equal(logits(model), logits(ours))


def test_unexpected_arguments_are_transformers_business(dense: Path) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        AutoModelForCausalLM.from_pretrained(dense, no_such_argument=1)
    assert AutoModelForCausalLM.from_pretrained(dense, use_cache=False).config.use_cache is False


def test_schemes_per_layer_and_per_matrix(tmp_path: Path) -> None:
    config = parse_layer_config({"down_proj": "FP8_STATIC", r"layers\.1\.self_attn": {"bits": 16}})
    scheme = preset_name_to_scheme("FP8_STATIC_TENSOR")
    out = export(tiny_model(), tmp_path / "out", scheme=scheme, layer_config=config)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["has_one_weight_scale"] is True
    model = AutoModelForCausalLM.from_pretrained(out)
    assert_same_model(out, model)
    assert type(model.get_submodule("model.layers.1.self_attn.o_proj")) is torch.nn.Linear


def test_a_sharded_checkpoint_and_a_named_class(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", "llama")
    out = export(source, tmp_path / "out", max_shard_size="60KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert_same_model(out, LlamaForCausalLM.from_pretrained(out))


def test_a_config_object_and_intels_config_class_may_be_given(dense: Path) -> None:
    config = AutoConfig.from_pretrained(dense)
    assert_same_model(dense, AutoModelForCausalLM.from_pretrained(dense, config=config))
    with pytest.warns(UserWarning, match="quantization_config"):
        model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=AutoRoundConfig(backend="auto"))
    assert_same_model(dense, model)
    block = json.loads((dense / "config.json").read_text())["quantization_config"]
    assert model.config.quantization_config.to_dict() == block


def test_generation_is_that_of_our_loader(dense: Path, moe: Path) -> None:
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB_SIZE + 5}
    for folder in (dense, moe):
        model, ours = AutoModelForCausalLM.from_pretrained(folder), load_quantized_model(folder)
        out = model.generate(ROWS, **settings)
        assert out.shape == (3, 21)
        assert torch.equal(out, ours.generate(ROWS, **settings))


def test_without_a_head_the_base_model_loads_but_is_not_saved(dense: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(dense)
    ours = load_quantized_model(dense)
    with torch.no_grad():
        assert torch.equal(model(ROWS).last_hidden_state, ours.model(ROWS).last_hidden_state)
    with pytest.raises(ConfigError, match=r"no place for 1 tensors of its checkpoint, first 'lm_head\.weight'"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_copies_run_alike(moe: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize(
    "name", [f"{Q_PROJ}.weight", f"{Q_PROJ}.weight_scale", f"{Q_PROJ}.input_scale", f"{Q_PROJ}.bias"]
)
def test_a_missing_tensor_is_named(dense: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        AutoModelForCausalLM.from_pretrained(change_tensor(dense, tmp_path / "out", name, None))


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_an_unquantised_tensor_is_never_made_up(dense: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors .*first '{name}'"):
        AutoModelForCausalLM.from_pretrained(change_tensor(dense, tmp_path / "out", name, None))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("weight", "first up_proj of expert 5"),
        ("weight_scale", r"experts\.5\.up_proj\.weight_scale' is missing"),
        ("input_scale", r"experts\.5\.up_proj\.input_scale' is missing"),
    ],
)
def test_an_expert_is_never_made_up(moe: Path, tmp_path: Path, leaf: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(change_tensor(moe, tmp_path / "out", f"{EXPERT}.{leaf}", None))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{Q_PROJ}.weight", torch.zeros(64, 64, dtype=torch.bfloat16), "config.json says this layer is FP8"),
        (f"{Q_PROJ}.weight", torch.zeros(32, 64).to(torch.float8_e4m3fn), r"q_proj\.weight' has shape \[32, 64\]"),
        (f"{Q_PROJ}.weight_scale", torch.full((64,), torch.nan), r"weight_scale' holds a scale that is NaN"),
        ("lm_head.weight", torch.zeros(VOCAB_SIZE, 64).to(torch.float8_e4m3fn), r"'lm_head\.weight' is FP8, but"),
        ("lm_head.weight_scale", torch.ones(1), "belongs to no quantised layer"),
    ],
)
def test_contradictions_are_refused(dense: Path, tmp_path: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(change_tensor(dense, tmp_path / "out", name, tensor))


def test_an_unquantised_tensor_of_another_shape_is_named(dense: Path, tmp_path: Path) -> None:
    out = change_tensor(dense, tmp_path / "out", "model.norm.weight", torch.ones(63, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[63\], the model expects \[64\]"):
        AutoModelForCausalLM.from_pretrained(out)


def test_offloading_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"would be offloaded \(disk\)"):
        AutoModelForCausalLM.from_pretrained(dense, device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"'model\.layers\.1' would be offloaded \(cpu\)"):
        refuse_offloading({"model.layers.0": 0, "model.layers.1": "cpu"})
    for fine in ({}, {"": "cpu"}, {"model.layers.0": 0, "model.layers.1": torch.device("cuda", 1)}):
        refuse_offloading(fine)


def test_tensor_parallelism_is_refused(dense: Path) -> None:
    config = AutoConfig.from_pretrained(dense)
    config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(ConfigError, match="not split over processes"):
        AutoModelForCausalLM.from_pretrained(dense, config=config)


def test_a_state_dict_is_refused(dense: Path) -> None:
    with pytest.raises(ConfigError, match="not from a state_dict"):
        Qwen2ForCausalLM.from_pretrained(
            None, config=AutoConfig.from_pretrained(dense), state_dict=load_file(dense / "model.safetensors")
        )


def test_withheld_modules_count_in_a_device_map(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {}
    after = Fp8StaticQuantizer._process_model_after_weight_loading

    def spy(self: Any, model: Any, **kwargs: Any) -> None:
        sizes.update({n: m.space.numel() for n, m in model.named_modules() if isinstance(m, Reserved)})
        after(self, model, **kwargs)

    monkeypatch.setattr(Fp8StaticQuantizer, "_process_model_after_weight_loading", spy)
    model = AutoModelForCausalLM.from_pretrained(moe)
    held = {
        n: sum(p.numel() for k, p in model.get_submodule(n).named_parameters() if k.endswith("weight")) for n in sizes
    }
    assert sizes == held
    assert len(sizes) == 2 * (4 + 1)


def test_nothing_is_reported_as_new_or_unused(moe: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.INFO, "autoround_fp8"):
        AutoModelForCausalLM.from_pretrained(moe)
    assert not [record for record in caplog.records if record.name.startswith("transformers")]
    assert "FP8 linears" in caplog.text
