"""What a run decides before any weight is read: which layers, which schemes, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model, tiny_model

from autoround_fp8.autoround import parse_names
from autoround_fp8.checkpoint.source_format import open_source
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.table import get_format
from autoround_fp8.model_source import open_model
from autoround_fp8.models.skeleton import build_skeleton
from autoround_fp8.pipeline import export_run, prepare
from autoround_fp8.plan import QuantizationPlan, calibration_dtype, make_plan
from autoround_fp8.schemes import UNQUANTIZED, parse_layer_config

ROWS = torch.arange(4, 36).reshape(2, 16)
ALL_LEAVES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def plan_of(model: Any, ignore: str = "", layer_config: Any = None) -> QuantizationPlan:
    source = open_model(model)
    config = QuantizeConfig(ignore_layers=parse_names(ignore), layer_config=parse_layer_config(layer_config))
    skeleton = build_skeleton(source.config, source.tensors.entries, torch.float32)
    return make_plan(config, skeleton, source.tensors, get_format("fp8_static"))


def leaves(plan: QuantizationPlan, block: int) -> set[str]:
    return {x.fqn.rpartition(".")[2] for x in plan.quantized if x.fqn.startswith(f"model.layers.{block}.")}


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    # A command line run earlier in the process may have kept the messages to itself.
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def test_everything_in_the_blocks_and_nothing_else() -> None:
    plan = plan_of(tiny_model())
    assert leaves(plan, 0) == leaves(plan, 1) == ALL_LEAVES
    assert len(plan.quantized) == 14
    assert plan.exceptions == {}
    assert plan.layout.tensors["lm_head.weight"].dtype == "BF16"
    assert plan.layout.tensors["model.layers.0.mlp.up_proj.weight"].dtype == "F8_E4M3"


def test_ignoring_one_of_a_fused_group_widens_to_the_group(warnings_of: pytest.LogCaptureFixture) -> None:
    plan = plan_of(tiny_model(), "k_proj")
    assert leaves(plan, 0) == ALL_LEAVES - {"q_proj", "k_proj", "v_proj"}
    assert {fqn.rpartition(".")[2] for fqn in plan.exceptions} == {"q_proj", "k_proj", "v_proj"}
    assert set(map(str, plan.exceptions.values())) == {str(UNQUANTIZED)}
    assert "model.layers.0.self_attn.q_proj stays in 16 bit too" in warnings_of.text
    assert "model.layers.1.self_attn.v_proj stays in 16 bit too" in warnings_of.text


def test_ignoring_up_proj_keeps_gate_proj_too(warnings_of: pytest.LogCaptureFixture) -> None:
    plan = plan_of(tiny_model(), "layers.1.mlp.up_proj")
    assert leaves(plan, 0) == ALL_LEAVES
    assert leaves(plan, 1) == ALL_LEAVES - {"gate_proj", "up_proj"}
    assert "model.layers.1.mlp.gate_proj" in warnings_of.text


def test_layers_1_is_not_layers_10(warnings_of: pytest.LogCaptureFixture) -> None:
    plan = plan_of(tiny_model("llama", num_hidden_layers=11), "layers.1")
    assert leaves(plan, 1) == set()
    assert leaves(plan, 10) == ALL_LEAVES
    assert all(fqn.startswith("model.layers.1.") for fqn in plan.exceptions)
    assert not warnings_of.records


@pytest.mark.parametrize("pattern", ["mlp.gate", "q_pro", "ayers.0"])
def test_patterns_match_whole_name_parts_only(pattern: str, warnings_of: pytest.LogCaptureFixture) -> None:
    assert len(plan_of(tiny_model(), pattern).quantized) == 14
    assert pattern in warnings_of.text


def test_a_pattern_with_a_typing_error_is_named(warnings_of: pytest.LogCaptureFixture) -> None:
    plan = plan_of(tiny_model(), "no_such,o_proj", {"dwn_proj": "FP8_STATIC_TENSOR"})
    assert leaves(plan, 0) == ALL_LEAVES - {"o_proj"}
    unused = [r.getMessage() for r in warnings_of.records if "names no layer" in r.getMessage()]
    assert len(unused) == 2
    assert "'no_such'" in unused[0]
    assert "'dwn_proj'" in unused[1]


def test_a_pattern_outside_the_blocks_is_no_typing_error(warnings_of: pytest.LogCaptureFixture) -> None:
    assert len(plan_of(tiny_model(), "lm_head,embed_tokens,input_layernorm").quantized) == 14
    assert not warnings_of.records


@pytest.mark.parametrize("entry", ["lm_head", ".*head", ".*"])
def test_layer_config_asks_for_the_output_layer_by_its_very_name_only(entry: str) -> None:
    plan = plan_of(tiny_model(), layer_config={entry: "FP8_STATIC_TENSOR"})
    assert (plan.output_layer is not None) == (entry == "lm_head")
    if plan.output_layer is not None:
        assert plan.output_layer in plan.quantized
        assert plan.output_layer in plan.linears
        assert plan.output_layer.scheme.group_size == 0
        assert plan.layout.tensors["lm_head.weight"].dtype == "F8_E4M3"


@pytest.mark.parametrize("pattern", ["self_attn,mlp", "model.layers", "layers.*", r".*proj$"])
def test_nothing_left_to_quantise_is_an_error(pattern: str) -> None:
    with pytest.raises(ConfigError, match="nothing would be quantised: none of the 14"):
        plan_of(tiny_model(), pattern)


def test_layer_config_gives_one_layer_another_scheme() -> None:
    plan = plan_of(tiny_model(), layer_config={"down_proj": "FP8_STATIC_TENSOR"})
    assert set(plan.exceptions) == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert {scheme.group_size for scheme in plan.exceptions.values()} == {0}
    # For Intel's loader fp8_static repeats a scale per matrix.
    assert plan.layout.tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (64,)
    assert plan.layout.tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (128,)


def test_layer_config_16_bit_is_the_same_as_ignoring() -> None:
    plan = plan_of(tiny_model(), layer_config={"down_proj": {"bits": 16}})
    assert plan.exceptions == plan_of(tiny_model(), "down_proj").exceptions


def test_an_ignored_layer_stays_ignored_whatever_layer_config_says() -> None:
    plan = plan_of(tiny_model(), "down_proj", {"model.layers.0.mlp.down_proj": "FP8_STATIC"})
    assert leaves(plan, 0) == ALL_LEAVES - {"down_proj"}


def test_an_exact_name_beats_a_pattern() -> None:
    exact = "model.layers.0.mlp.down_proj"
    plan = plan_of(tiny_model(), layer_config={exact: "FP8_STATIC", "down_proj": "FP8_STATIC_TENSOR"})
    assert set(plan.exceptions) == {"model.layers.1.mlp.down_proj"}


def test_different_schemes_in_a_fused_group_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"q_proj.*k_proj.*v_proj different schemes"):
        plan_of(tiny_model(), layer_config={"v_proj": "FP8_STATIC_TENSOR"})
    assert len(plan_of(tiny_model(), layer_config={r"(q|k|v)_proj$": "FP8_STATIC_TENSOR"}).exceptions) == 6


def test_groups_are_planned_for_every_fused_layer() -> None:
    groups = {x.fqn.rpartition(".")[2]: len(x.group) for x in plan_of(tiny_model()).quantized}
    assert groups == {
        "q_proj": 3,
        "k_proj": 3,
        "v_proj": 3,
        "o_proj": 1,
        "gate_proj": 2,
        "up_proj": 2,
        "down_proj": 1,
    }


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_a_quantised_source_is_refused_by_name(tmp_path: Path, method: str) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    set_config(tmp_path, quantization_config={"quant_method": method})
    with pytest.raises(ConfigError, match=f"already quantised .*{method}"):
        prepare(QuantizeConfig(dataset=ROWS, device="cpu"), open_model(tmp_path))


@pytest.mark.parametrize("block", [{"bits": 4}, "gptq"])
def test_a_quantised_source_without_a_method_is_refused_too(block: Any) -> None:
    source = open_model(tiny_model())
    with pytest.raises(ConfigError, match="already quantised"):
        open_source(source.tensors, {"quantization_config": block}, torch.bfloat16)
    with pytest.raises(ConfigError, match="already quantised"):
        open_source(source.tensors, {"text_config": {"quantization_config": block}}, torch.bfloat16)


def exported(tmp_path: Path) -> Path:
    run = prepare(QuantizeConfig(dataset=ROWS, device="cpu"), open_model(tiny_model()))
    return export_run(run, tmp_path / "out").folder


def test_an_own_export_is_refused_as_a_source(tmp_path: Path) -> None:
    out = exported(tmp_path)
    with pytest.raises(ConfigError, match=r"already quantised .*auto-round"):
        prepare(QuantizeConfig(dataset=ROWS, device="cpu"), open_model(out))


def test_an_fp8_tensor_without_a_config_is_refused(tmp_path: Path) -> None:
    out = exported(tmp_path)
    raw = json.loads((out / "config.json").read_text())
    del raw["quantization_config"]
    (out / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.\d.*weight' is F8_E4M3, but config.json has no quant"):
        prepare(QuantizeConfig(dataset=ROWS, device="cpu"), open_model(out))


def test_a_scale_left_in_the_source_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    path = tmp_path / "model.safetensors"
    stray = "model.layers.0.mlp.up_proj.input_scale"
    save_file({**load_file(path), stray: torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"already has a tensor '{stray}'"):
        plan_of(tmp_path)


def test_an_integer_weight_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**load_file(path), name: torch.ones(128, 64, dtype=torch.int8)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"'{name}' is I8"):
        plan_of(tmp_path)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    path = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**load_file(path), name: torch.ones(128, 32)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[128, 32\], the model expects \[128, 64\]"):
        plan_of(tmp_path)


def test_calibration_dtype_is_the_stored_one_where_it_is_fast() -> None:
    auto = QuantizeConfig()
    assert calibration_dtype(auto, torch.bfloat16, True) == torch.bfloat16
    assert calibration_dtype(auto, torch.bfloat16, False) == torch.float32
    assert calibration_dtype(QuantizeConfig(calibration_dtype="float16"), torch.bfloat16, False) == torch.float16


def test_names_of_the_checkpoint_are_used_where_transformers_renames() -> None:
    # gpt_neox keeps its blocks under another name and fuses q, k and v on disk: one layer, one scale, its own group.
    plan = plan_of(tiny_model("gpt_neox"))
    assert all(x.fqn.startswith("gpt_neox.layers.") for x in plan.quantized)
    assert {len(x.group) for x in plan.quantized} == {1}
