"""A conversion is, tensor by tensor and word by word of its config, what the run would have written in that format."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from make_block_fp8 import make_block_fp8
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model
from tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model

from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.convert import convert_checkpoint
from autoround_fp8.errors import AutoRoundError, CheckpointError, ConfigError
from autoround_fp8.inference.load import load_model
from autoround_fp8.inspection.report import inspect_checkpoint
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import ExportSummary, export_run, prepare
from autoround_fp8.schemes import parse_layer_config, parse_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
Q = "model.layers.0.self_attn.q_proj"

# Name -> family, settings.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "channel": ("qwen3", {"format": "fp8_static,llm_compressor", "ignore_layers": ("layers.1.mlp",)}),
    "tensor": ("qwen2", {"format": "fp8_static,llm_compressor,fp8,fake", "scheme": parse_scheme("FP8_STATIC_TENSOR")}),
    "mixed": (
        "qwen3",
        {
            "format": "fp8_static,llm_compressor",
            "layer_config": parse_layer_config({"down_proj": "FP8_STATIC_TENSOR", "o_proj": {"bits": 16}}),
        },
    ),
    "tied": ("gemma3_text", {"format": "fp8_static,llm_compressor"}),
    "sharded": ("llama", {"format": "fp8_static,llm_compressor", "max_shard_size": "60KB"}),
    "head": ("gpt_neox", {"format": "fp8_static,llm_compressor", "quant_lm_head": True}),
    "mixed_head": (
        "llama",
        {"format": "fp8_static,llm_compressor", "layer_config": parse_layer_config({"lm_head": "FP8_STATIC_TENSOR"})},
    ),
    "experts": ("qwen3_moe", {"format": "fp8_static,llm_compressor", "moe_input_scale": "per_expert"}),
    "tensor_experts": (
        "mixtral",
        {"format": "llm_compressor,fp8,fake,fp8_static", "scheme": parse_scheme("FP8_STATIC_TENSOR")},
    ),
    "fused_experts": ("granitemoe", {"format": "fp8_static,llm_compressor"}),
    "ignored_experts": ("phimoe", {"format": "fp8_static,llm_compressor", "ignore_layers": ("layers.1.mlp.experts",)}),
    "dynamic": ("qwen3", {"format": "llm_compressor", "scheme": parse_scheme("FP8_DYNAMIC")}),
}
PAIRS = [
    (run, one, other)
    for run, (_, settings) in RUNS.items()
    for one in settings["format"].split(",")
    for other in settings["format"].split(",")
    if one != "fake"
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


@cache
def exported(base: Path, run: str) -> ExportSummary:
    family, settings = RUNS[run]
    save = save_tiny_moe_model if family in MOE_FAMILIES else save_tiny_model
    source = save(base / f"source-{run}", family)
    config = QuantizeConfig(**{"dataset": ROWS, "device": "cpu", "algorithm": "rtn", **settings})
    return export_run(prepare(config, open_model(source)), base / run)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder)
    return {name: reader.read(name) for name in reader.names}


def assert_same(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert tensor.shape == second[name].shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8)), name
    assert (one / "config.json").read_text() == (other / "config.json").read_text()


@pytest.mark.parametrize(("run", "one", "other"), PAIRS)
def test_it_is_what_the_run_would_have_written(base: Path, tmp_path: Path, run: str, one: str, other: str) -> None:
    folders = exported(base, run).folders
    shard = RUNS[run][1].get("max_shard_size", "5GB")
    conversion = convert_checkpoint(folders[one], tmp_path / "out", format=other, max_shard_size=shard)
    assert conversion.converted_from == one
    assert_same(conversion.summary.folder, folders[other])
    assert len(conversion.dequantized[other]) == (len(conversion.layers) if other == "fake" else 0)
    assert inspect_checkpoint(conversion.summary.folder).findings == ()


def test_several_formats_at_once(base: Path, tmp_path: Path) -> None:
    folders = exported(base, "tensor").folders
    summary = convert_checkpoint(folders["fp8"], tmp_path / "out", format="fake,llm_compressor").summary
    assert list(summary.folders) == ["fake", "llm_compressor"]
    for name, folder in summary.folders.items():
        assert folder == tmp_path / "out" / name
        assert_same(folder, folders[name])


def old_names(tensors: dict[str, torch.Tensor], block: dict[str, Any]) -> None:
    """As exports of before had it: Mixtral's own names of experts."""
    leaves = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name in list(tensors):
        tensors[re.sub("|".join(leaves), lambda match: leaves[match[0]], name)] = tensors.pop(name)
    block["extra_config"] = json.loads(
        json.dumps(block["extra_config"]).replace("down_proj|gate_proj|up_proj", "w1|w2|w3")
    )


@pytest.mark.parametrize("other", ["fp8_static", "llm_compressor"])
def test_an_old_fp8_static_export_of_mixtral(base: Path, tmp_path: Path, other: str) -> None:
    folders = exported(base, "tensor_experts").folders
    old = rewritten(folders["fp8_static"], tmp_path / "old", old_names)
    assert CheckpointReader(old).entries["model.layers.1.block_sparse_moe.experts.7.w3.weight"].dtype == "F8_E4M3"
    out = convert_checkpoint(old, tmp_path / "out", format=other).summary.folder
    assert_same(out, folders[other])
    one, two = (load_model(folder)(input_ids=ROWS).logits for folder in (old, out))
    assert torch.equal(one, two)


def test_reports_name_layers_as_their_export_does(base: Path, tmp_path: Path) -> None:
    folders = exported(base, "ignored_experts").folders
    for one, other in (("fp8_static", "llm_compressor"), ("llm_compressor", "fp8_static")):
        out = convert_checkpoint(folders[one], tmp_path / other, format=other).summary.folder
        new, wanted = (json.loads((f / "quantization_report.json").read_text()) for f in (out, folders[other]))
        for key in ("blocks", "ranges_on_few_tokens", "ignored"):
            assert new[key] == wanted[key]


def test_report_card_and_side_files_stay(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    (source / "README.md").write_text("---\nlicense: mit\n---\noriginal")
    (source / "LICENSE").write_text("mine")
    config = QuantizeConfig(dataset=ROWS, device="cpu", algorithm="rtn")
    export = export_run(prepare(config, open_model(source)), tmp_path / "export")
    out = convert_checkpoint(export.folder, tmp_path / "out", format="llm_compressor").summary.folder
    before, after = (json.loads((f / "quantization_report.json").read_text()) for f in (export.folder, out))
    assert after["converted_from"] == "fp8_static"
    assert after["format"] == "llm_compressor"
    assert "quantization_config.json" not in after["files"]
    for key in ("blocks", "settings", "calibration", "model"):
        assert after[key] == before[key]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert "Quantised from `tiny`" in card
    assert "from format `fp8_static`" in card
    assert (out / "README.source.md").read_text().endswith("original")
    assert (out / "LICENSE").read_text() == "mine"
    assert (out / "tokenizer.json").is_file()


def rewritten(folder: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def test_a_foreign_export_is_converted_too(base: Path, tmp_path: Path) -> None:
    def as_intel_writes(tensors: dict[str, torch.Tensor], block: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("_scale"):
                tensors[name] = tensors[name].bfloat16()
        block.update(data_type="fp8", act_data_type="fp8", autoround_version="0.16.1")

    folders = exported(base, "channel").folders
    theirs = rewritten(folders["fp8_static"], tmp_path / "theirs", as_intel_writes)
    out = convert_checkpoint(theirs, tmp_path / "out", format="llm_compressor").summary.folder
    # Our scales fit bfloat16, so nothing is lost on the way.
    assert_same(out, folders["llm_compressor"])
    assert "Converted from `theirs`" in (out / "README.md").read_text()


def test_what_a_formats_readers_need_in_16_bit_is_dequantised_and_named(tmp_path: Path) -> None:
    source = save_tiny_moe_model(tmp_path / "source", "deepseek_v3", with_tokenizer=False)
    config = QuantizeConfig(dataset=ROWS, device="cpu", algorithm="rtn")
    export = export_run(prepare(config, open_model(source)), tmp_path / "export").folder
    conversion = convert_checkpoint(export, tmp_path / "out", format="llm_compressor")
    named = conversion.dequantized["llm_compressor"]
    assert {name.rpartition(".")[2] for name in named} == {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    out = conversion.summary.folder
    before, after = tensors_of(export), tensors_of(out)
    for fqn in named:
        expected = (before[f"{fqn}.weight"].float() * before[f"{fqn}.weight_scale"].reshape(-1, 1)).bfloat16()
        assert torch.equal(after[f"{fqn}.weight"], expected)
        assert f"{fqn}.weight_scale" not in after
    report = json.loads((out / "quantization_report.json").read_text())
    assert not {layer["fqn"] for block in report["blocks"] for layer in block["layers"]} & set(named)
    assert set(named) <= set(report["ignored"])
    assert inspect_checkpoint(out).findings == ()
    assert torch.isfinite(load_model(out)(input_ids=ROWS).logits).all()


@pytest.mark.parametrize(
    ("run", "one", "other", "message"),
    [
        ("channel", "fp8_static", "fp8", "cannot be converted from fp8_static as it is: .*one static scale per matrix"),
        ("experts", "llm_compressor", "fp8", "one static scale per matrix"),
        ("dynamic", "llm_compressor", "fp8_static", "holds static input scales only"),
        ("tensor", "fake", "fp8", "is not quantised, so there is nothing to convert"),
        ("channel", "fp8_static", "gguf", "format 'gguf' is not supported"),
    ],
)
def test_what_takes_a_new_quantisation_is_refused(
    base: Path, tmp_path: Path, run: str, one: str, other: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(exported(base, run).folders.get(one, base / run), tmp_path / "out", format=other)
    assert not (tmp_path / "out").exists()


def test_native_fp8_is_refused_with_a_way_out(tmp_path: Path) -> None:
    make_block_fp8(save_tiny_model(tmp_path / "source"), tmp_path / "block", block=(32, 32))
    with pytest.raises(ConfigError, match=r"native FP8.*quantise it: auto-round"):
        convert_checkpoint(tmp_path / "block", tmp_path / "out", format="llm_compressor")


def without_scale(tensors: dict[str, torch.Tensor], _block: Any) -> None:
    del tensors[f"{Q}.weight_scale"]


def ignoring_q(_tensors: Any, block: dict[str, Any]) -> None:
    block["ignore"].append(Q)


def plain(tensors: dict[str, torch.Tensor], _block: Any) -> None:
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scale, f"'{Q}.weight_scale' is missing"),
        (ignoring_q, f"'{Q}.weight' is FP8, but config.json says this layer is not quantised"),
        (plain, "no tensor is FP8"),
    ],
)
def test_a_damaged_export_leaves_nothing(base: Path, tmp_path: Path, change: Any, message: str) -> None:
    theirs = rewritten(exported(base, "channel").folders["llm_compressor"], tmp_path / "theirs", change)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(theirs, tmp_path / "out", format="fp8_static")
    assert not (tmp_path / "out").exists()


def test_the_target_is_no_source_and_nothing_of_others(base: Path, tmp_path: Path) -> None:
    folder = exported(base, "channel").folders["fp8_static"]
    with pytest.raises(ConfigError, match="must not be or contain the source"):
        convert_checkpoint(folder, folder, format="llm_compressor", overwrite=True)
    convert_checkpoint(folder, tmp_path / "out", format="llm_compressor")
    with pytest.raises(AutoRoundError, match="overwrite"):
        convert_checkpoint(folder, tmp_path / "out", format="llm_compressor")
    convert_checkpoint(folder, tmp_path / "out", format="llm_compressor", overwrite=True)
