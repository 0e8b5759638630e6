"""The Python face: its arguments, and that its ways to the same checkpoint give the same checkpoint."""

from __future__ import annotations

import inspect
import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model, tiny_tokenizer
from tiny_moe_models import save_tiny_moe_model, tiny_moe_model

from autoround_fp8 import AutoRound, QuantizationScheme, WeightFP8ActFP8StaticQuantLinear, load_quantized_model
from autoround_fp8.autoround import parse_names
from autoround_fp8.errors import AutoRoundError, ConfigError

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
SETTINGS: dict[str, Any] = {"dataset": ROWS, "nsamples": 3, "seqlen": 16, "batch_size": 2, "device_map": "cpu"}


def rounder(model: Any, **settings: Any) -> AutoRound:
    return AutoRound(model, **{**SETTINGS, **settings})


def assert_same_export(one: str | Path, other: str | Path) -> None:
    first, second = load_file(Path(one) / "model.safetensors"), load_file(Path(other) / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
    for name in ("config.json", "quantization_config.json"):
        assert (Path(one) / name).read_bytes() == (Path(other) / name).read_bytes()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits


@pytest.mark.parametrize(
    "keyword", ["ignore_layer", "fp_layers", "nsample", "group_sise", "enable_minmax_tuning", "amp"]
)
def test_an_unknown_keyword_is_a_type_error(keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        rounder(tiny_model(), **{keyword: 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iters": -1}, "iters"),
        ({"scheme": "W4A16"}, "W4A16"),
        ({"scheme": {"bits": 4}}, r"bits \(4\)"),
        ({"scheme": {"group_size": 128}}, r"group_size \(128\)"),
        ({"scheme": {"act_dynamic": True}}, "act_dynamic"),
        ({"scheme": {"bit": 8}}, "unknown scheme field 'bit'"),
        ({"layer_config": {"down_proj": {"bits": 4}}}, "down_proj.*bits"),
        ({"nsamples": 0}, "nsamples"),
        ({"seqlen": 0}, "seqlen"),
        ({"batch_size": 0}, "batch_size"),
        ({"format": "gguf"}, "gguf"),
    ],
)
def test_a_bad_argument_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rounder("no/such/folder/is/ever/opened", **settings)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "0,1"])
def test_a_bad_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        rounder(tiny_model(), device_map=device).quantize()


def test_a_missing_model_is_named() -> None:
    with pytest.raises(AutoRoundError, match="no_such_model_here"):
        rounder("./no_such_model_here")


def test_argument_names_are_those_of_autoround() -> None:
    names = list(inspect.signature(AutoRound).parameters)
    assert names[:6] == ["model", "tokenizer", "scheme", "layer_config", "dataset", "iters"]
    assert {"seqlen", "nsamples", "batch_size", "device_map", "seed", "ignore_layers", "format"} <= set(names)


def test_a_quoted_scheme_name_and_a_scheme_object_are_understood() -> None:
    for scheme in ("'fp8_static'", QuantizationScheme(), {"bits": 8, "data_type": "fp"}):
        assert rounder(tiny_model(), scheme=scheme).config.scheme == QuantizationScheme()


@pytest.mark.parametrize("names", ["q_proj, k_proj,,", ["q_proj", " k_proj"], ("q_proj", "k_proj")])
def test_names_come_as_a_comma_list_or_a_sequence(names: Any) -> None:
    assert parse_names(names) == ("q_proj", "k_proj")
    assert parse_names(None) == parse_names("") == ()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma3_text", "qwen3_moe"])
def test_quantize_then_save_equals_quantize_and_save(tmp_path: Path, family: str) -> None:
    source = (save_tiny_moe_model if family == "qwen3_moe" else save_tiny_model)(tmp_path / "source", family)
    together = rounder(source)
    reloaded, one = together.quantize_and_save(tmp_path / "one")
    apart = rounder(source)
    model, _ = apart.quantize()
    two = apart.save_quantized(tmp_path / "two")
    assert_same_export(one, two)
    assert torch.equal(logits(model), logits(reloaded))
    assert torch.equal(logits(model), logits(load_quantized_model(two)))


def test_layers_that_were_chosen_to_stay_are_not_chosen_again_by_save_quantized(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    _, one = rounder(source, keep_layers=2).quantize_and_save(tmp_path / "one")
    apart = rounder(source, keep_layers=2)
    _, schemes = apart.quantize()
    two = apart.save_quantized(tmp_path / "two", max_shard_size="5GB")
    assert_same_export(one, two)
    reports = [json.loads((Path(out) / "quantization_report.json").read_text()) for out in (one, two)]
    assert reports[0]["mixed_precision"] == reports[1]["mixed_precision"]
    kept = {fqn for fqn, scheme in schemes.items() if scheme["bits"] == 16}
    assert kept == set(reports[0]["mixed_precision"]["kept"]) == set(reports[0]["ignored"])
    assert len(kept) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantised_model_is_the_reloaded_one_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    auto_round = rounder(tiny_model("qwen2", dtype=dtype, tie_word_embeddings=True), tokenizer=tiny_tokenizer())
    model, schemes = auto_round.quantize()
    reloaded = load_quantized_model(auto_round.save_quantized(tmp_path / "out"))
    assert len(schemes) == 14
    assert schemes["model.layers.0.mlp.up_proj"]["data_type"] == "fp"
    assert model.state_dict().keys() == reloaded.state_dict().keys()
    for name, tensor in model.state_dict().items():
        other = reloaded.state_dict()[name]
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
    assert torch.equal(logits(model), logits(reloaded))


def test_ignored_layers_stay_linear_in_both() -> None:
    model, schemes = rounder(tiny_model(), ignore_layers="down_proj").quantize()
    kinds = {name.rpartition(".")[2]: type(module) for name, module in model.named_modules()}
    assert kinds["down_proj"] is torch.nn.Linear
    assert kinds["up_proj"] is WeightFP8ActFP8StaticQuantLinear
    assert schemes["model.layers.0.mlp.down_proj"]["bits"] == 16


def test_save_quantized_before_quantize_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize\(\)"):
        rounder(tiny_model()).save_quantized(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_save_options_reach_the_writer(tmp_path: Path) -> None:
    auto_round = rounder(tiny_model())
    auto_round.quantize()
    out = Path(auto_round.save_quantized(tmp_path / "out", "auto_round", max_shard_size="60KB"))
    assert (out / "model.safetensors.index.json").exists()
    with pytest.raises(ConfigError, match="overwrite"):
        auto_round.save_quantized(out)
    auto_round.save_quantized(out, overwrite=True)
    assert (out / "model.safetensors").exists()


def test_the_target_is_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text("a file")
    auto_round = rounder(tiny_model())
    monkeypatch.setattr("autoround_fp8.autoround.prepare", None)
    with pytest.raises(ConfigError, match="is a file"):
        auto_round.quantize_and_save(tmp_path / "out")


FRESH = """
import sys, torch
from autoround_fp8 import AutoRound
settings = dict(dataset=torch.load(sys.argv[1]), nsamples=3, seqlen=16, batch_size=2, device_map="cpu")
AutoRound(sys.argv[2], **settings).quantize_and_save(sys.argv[3])
"""


@pytest.mark.parametrize("second", ["gemma3_text", "qwen3_moe"])
def test_a_second_run_in_the_process_equals_a_fresh_one(tmp_path: Path, second: str) -> None:
    save = save_tiny_moe_model if second == "qwen3_moe" else save_tiny_model
    sources = [save_tiny_model(tmp_path / "first"), save(tmp_path / "second", second)]
    rows = tmp_path / "rows.pt"
    torch.save(ROWS, rows)
    outs = [rounder(source).quantize_and_save(tmp_path / f"here{i}")[1] for i, source in enumerate(sources)]
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-c", FRESH, str(rows), str(sources[1]), str(fresh)], check=True)
    assert_same_export(outs[1], fresh)


def test_a_run_leaves_random_states_and_logging_alone(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), torch.get_default_dtype()
    rounder(source, dataset="builtin", nsamples=2).quantize_and_save(tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert torch.get_default_dtype() == states[3]
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == (level, handlers)
    assert torch.is_grad_enabled()


def test_the_format_chooses_the_scheme_unless_the_user_did(tmp_path: Path) -> None:
    assert rounder(tiny_model()).config.scheme.group_size == -1
    assert rounder(tiny_model(), format="llm_compressor,fp8").config.scheme.group_size == 0
    model, folder = rounder(tiny_model()).quantize_and_save(tmp_path / "one", "fp8")
    assert model.model.layers[0].mlp.up_proj.weight_scale.shape == (1,)
    with pytest.raises(ConfigError, match="'fp8' holds one static scale per matrix"):
        rounder(tiny_model(), scheme="FP8_STATIC").quantize_and_save(tmp_path / "two", "fp8")
    assert json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_several_formats_of_what_was_quantised_in_memory(tmp_path: Path) -> None:
    auto_round = rounder(tiny_model())
    model, _ = auto_round.quantize()
    first = auto_round.save_quantized(tmp_path / "out", "compressed-tensors,fake")
    assert first == str(tmp_path / "out" / "llm_compressor")
    assert torch.equal(logits(model), logits(load_quantized_model(first)))
    assert (tmp_path / "out" / "fake" / "config.json").exists()


def test_a_format_that_needs_other_layers_than_were_quantised_is_refused(tmp_path: Path) -> None:
    auto_round = rounder(tiny_moe_model("deepseek_v3"))
    auto_round.quantize()
    with pytest.raises(ConfigError, match="'llm_compressor' needs other schemes or layers than quantize"):
        auto_round.save_quantized(tmp_path / "out", "llm_compressor")
    assert not (tmp_path / "out").exists()


def test_a_fake_checkpoint_is_loaded_as_a_plain_model(tmp_path: Path) -> None:
    model, folder = rounder(tiny_model()).quantize_and_save(tmp_path / "out", "fake")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not torch.equal(logits(model), logits(tiny_model()))
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())


def test_dynamic_inputs_need_no_tokenizer_and_no_data(tmp_path: Path) -> None:
    settings = {"scheme": "FP8_DYNAMIC", "format": "llm_compressor", "device_map": "cpu"}
    auto_round = AutoRound(tiny_model(), **settings)
    model, folder = auto_round.quantize_and_save(tmp_path / "out")
    assert model.model.layers[0].mlp.up_proj.input_scale is None
    report = json.loads((Path(folder) / "quantization_report.json").read_text())
    assert report["calibration"]["tokens"] == 0
    assert {layer["input_scale"] for block in report["blocks"] for layer in block["layers"]} == {None}
    in_memory, _ = AutoRound(tiny_model(), **settings).quantize()
    assert torch.equal(logits(in_memory), logits(model))
