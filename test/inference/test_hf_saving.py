"""`save_pretrained` of a loaded FP8 model: the same checkpoint again, or a refusal that names what would be lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from tiny_moe_models import save_tiny_moe_model
from torch import nn
from transformers import AutoModelForCausalLM

from autoround_fp8 import load_quantized_model
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import ConfigError
from autoround_fp8.inference.hf_saving import CheckpointQuantization, Piece, StoredTensor
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import export_run, prepare
from autoround_fp8.schemes import parse_layer_config, preset_name_to_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
LOADERS = {"ours": load_quantized_model, "transformers": AutoModelForCausalLM.from_pretrained}


def export(model: Any, out: Path, **settings: Any) -> Path:
    return export_run(prepare(QuantizeConfig(dataset=ROWS, device="cpu", **settings), open_model(model)), out).folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits


def block_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def assert_same_tensors(folder: Path, source: Path) -> None:
    one, other = CheckpointReader(folder), CheckpointReader(source)
    assert set(one.names) == set(other.names)
    for name in one.names:
        assert (one.entries[name].dtype, one.entries[name].shape) == (
            other.entries[name].dtype,
            other.entries[name].shape,
        ), name
        a, b = (reader.read(name).reshape(-1).view(torch.uint8) for reader in (one, other))
        assert torch.equal(a, b), name


def assert_same_checkpoint(folder: Path, source: Path) -> None:
    assert_same_tensors(folder, source)
    assert block_of(folder) == block_of(source)
    expected = logits(load_quantized_model(source))
    assert torch.equal(logits(load_quantized_model(folder)), expected)
    if block_of(source)["quant_method"] == "auto-round":
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), expected)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_model("qwen2", dtype=torch.bfloat16), tmp_path_factory.mktemp("saving") / "dense")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("gemma3_text", True)])
def test_dense(tmp_path: Path, family: str, tied: bool, loader: str) -> None:
    out = export(tiny_model(family, tie_word_embeddings=tied), tmp_path / "out")
    LOADERS[loader](out).save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", out)


# What is on disk otherwise than in memory: renamed experts, a float32 router bias, fused experts in 16 bit.
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_experts(tmp_path: Path, family: str, loader: str) -> None:
    out = export(save_tiny_moe_model(tmp_path / "source", family), tmp_path / "out")
    LOADERS[loader](out).save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    assert_same_checkpoint(tmp_path / "saved", out)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text", "mixtral"])
def test_experts_in_16_bit(tmp_path: Path, family: str) -> None:
    source = save_tiny_moe_model(tmp_path / "source", family)
    out = export(source, tmp_path / "out", layer_config=parse_layer_config({"experts": {"bits": 16}}))
    for name, load in LOADERS.items():
        load(out).save_pretrained(tmp_path / name)
        assert_same_checkpoint(tmp_path / name, out)


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "llm_compressor"},
        {"format": "fp8", "scheme": "FP8_STATIC_TENSOR"},
        {"format": "llm_compressor", "scheme": "FP8_DYNAMIC"},
        {"scheme": "FP8_STATIC_TENSOR"},
    ],
)
def test_every_format_that_our_loader_reads(tmp_path: Path, settings: dict[str, str]) -> None:
    scheme = preset_name_to_scheme(settings.get("scheme", "FP8_STATIC"))
    out = export(tiny_model(), tmp_path / "out", **{**settings, "scheme": scheme})
    load_quantized_model(out).save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", out)


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_scales_keep_the_shape_and_dtype_of_other_writers(dense: Path, tmp_path: Path, shape: list[int]) -> None:
    tensors = load_file(dense / "model.safetensors")
    for name in [name for name in tensors if name.endswith("input_scale")]:
        tensors[name] = tensors[name].bfloat16().reshape(shape)
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_bytes((dense / "config.json").read_bytes())
    load_quantized_model(other).save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", other)


def test_a_sharded_save_and_a_second_one(dense: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense, device_map="cpu")
    model.save_pretrained(tmp_path / "one", max_shard_size="40KB")
    assert len(list((tmp_path / "one").glob("model-*.safetensors"))) > 2
    assert_same_checkpoint(tmp_path / "one", dense)
    load_quantized_model(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert_same_checkpoint(tmp_path / "two", dense)
    copy.deepcopy(model).save_pretrained(tmp_path / "three")
    assert_same_checkpoint(tmp_path / "three", dense)


def test_both_of_two_tied_tensors_are_written_if_both_were_there(tmp_path: Path) -> None:
    out = export(tiny_model(tie_word_embeddings=True), tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for name, load in LOADERS.items():
        load(out).save_pretrained(tmp_path / name)
        assert_same_checkpoint(tmp_path / name, out)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_wider_dtype_saves_the_checkpoints_tensors(dense: Path, tmp_path: Path, loader: str) -> None:
    model = LOADERS[loader](dense, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(tmp_path / "saved", dense)
    # The config names the dtype that the model had, so the saved one runs as it did.
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    for load in LOADERS.values():
        assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_dtype_that_rounded_is_refused(dense: Path, tmp_path: Path, loader: str) -> None:
    model = LOADERS[loader](dense, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"tensor '.*' is torch\.bfloat16 in the checkpoint, torch\.float16 with"):
        model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").iterdir())


def test_a_value_that_the_stored_dtype_cannot_hold_is_refused(dense: Path, tmp_path: Path) -> None:
    model = load_quantized_model(dense, dtype=torch.float32)
    model.model.norm.weight += 1e-5
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is torch\.bfloat16 in the checkpoint"):
        model.save_pretrained(tmp_path / "saved")


def test_a_changed_value_is_saved(dense: Path, tmp_path: Path) -> None:
    model = load_quantized_model(dense)
    model.model.norm.weight *= 2
    model.save_pretrained(tmp_path / "saved")
    saved, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", dense))
    assert torch.equal(saved["model.norm.weight"], source["model.norm.weight"] * 2)
    assert torch.equal(logits(load_quantized_model(tmp_path / "saved")), logits(model))


def test_a_replaced_module_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    model = load_quantized_model(dense)
    model.model.norm = nn.Identity()
    with pytest.raises(ConfigError, match=r"no longer has 'model\.norm\.weight'"):
        model.save_pretrained(tmp_path / "saved")
    model.model.norm = nn.LayerNorm(32)
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' has shape \[64\] in the checkpoint, \[32\] in the"):
        model.save_pretrained(tmp_path / "saved")


def test_a_tensor_that_the_model_has_no_place_for_is_not_lost(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    tensors = load_file(dense / "model.safetensors")
    tensors["mtp.proj.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((dense / "config.json").read_bytes())
    for load in LOADERS.values():
        model = load(out)
        with pytest.raises(ConfigError, match=r"no place for 1 tensors .*'mtp\.proj\.weight'.*copy its folder"):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_quantised_model_is_saved_from_a_folder_with_more_in_it(dense: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save_tiny_model(saved, "llama", max_shard_size="40KB")  # an older, unrelated model
    load_quantized_model(dense).save_pretrained(saved, max_shard_size="40KB")
    assert block_of(saved) == block_of(dense)
    assert torch.equal(logits(load_quantized_model(saved)), logits(load_quantized_model(dense)))


def test_the_block_is_carried_along_untouched() -> None:
    block = {"quant_method": "auto-round", "packing_format": "x", "extra_config": {"a": {"bits": 16}}}
    config, unused = CheckpointQuantization.from_dict(block, return_unused_kwargs=True, other=1)
    assert unused == {"other": 1}
    config.to_dict()["extra_config"]["a"]["bits"] = 4
    block["extra_config"]["a"]["bits"] = 2  # type: ignore[index]
    assert config.to_dict()["extra_config"] == {"a": {"bits": 16}}


def test_pieces_make_up_a_stacked_transposed_tensor() -> None:
    state = {f"e{i}": torch.randn(4, 3) for i in range(2)}
    pieces = tuple(Piece(parameter=f"e{i}", index=i, transposed=True) for i in range(2))
    stored = StoredTensor(name="x", dtype=torch.float32, shape=(2, 3, 4), pieces=pieces)
    assert torch.equal(stored.restored(state), torch.stack([state["e0"].t(), state["e1"].t()]))
    up = StoredTensor(name="up", dtype=torch.float32, shape=(2, 3), pieces=(Piece(parameter="e0", rows=(1, 2)),))
    assert torch.equal(up.restored(state), state["e0"][2:])
