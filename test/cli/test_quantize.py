"""`auto-round quantize`: every option reaches the run, mistakes are found early, the result is a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model

from autoround_fp8 import load_quantized_model, model_source
from autoround_fp8.cli.main import build_parser, main
from autoround_fp8.cli.quantize import config_from_args, progress
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import ConfigError
from autoround_fp8.records import BlockReport, LayerReport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("cli_quantize") / "model"))


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["quantize", "m", *words])


def test_without_options_the_defaults_are_those_of_the_config() -> None:
    assert config_from_args(parse()) == QuantizeConfig()


ODD_VALUES: list[tuple[list[str], str, Any]] = [
    (["--dataset", "a.jsonl"], "dataset", "a.jsonl"),
    (["--seqlen", "17"], "seqlen", 17),
    (["--seq_len", "17"], "seqlen", 17),
    (["--nsamples", "3"], "nsamples", 3),
    (["--batch_size", "5"], "batch_size", 5),
    (["--train_bs", "5"], "batch_size", 5),
    (["--bs", "5"], "batch_size", 5),
    (["--seed", "9"], "seed", 9),
    (["--calibration_dtype", "float16"], "calibration_dtype", "float16"),
    (["--device", "cpu"], "device", "cpu"),
    (["--device_map", "cpu"], "device", "cpu"),
    (["--trust_remote_code"], "trust_remote_code", True),
    (["--format", "auto_round"], "format", "fp8_static"),
    (["--format", "fp8, compressed-tensors"], "format", "fp8,llm_compressor"),
    (["--max_shard_size", "1MB"], "max_shard_size", "1MB"),
    (["--overwrite"], "overwrite", True),
    (["--ignore_layers", "o_proj, down_proj"], "ignore_layers", ("o_proj", "down_proj")),
    (["--fp_layers", "o_proj"], "ignore_layers", ("o_proj",)),
    (["--quant_lm_head"], "quant_lm_head", True),
    (["--keep_layers", "3"], "keep_layers", 3),
    (["--target_kl", "0.01"], "target_kl", 0.01),
    (["--enable_quanted_input"], "enable_quanted_input", True),
    (["--disable_quanted_input"], "enable_quanted_input", False),
    (["--disable_range_probes"], "range_probes", False),
    (["--algorithm", "mse"], "algorithm", "mse"),
    (["--iters", "7"], "iters", 7),
    (["--lr", "0.3"], "lr", 0.3),
    (["--minmax_lr", "0.3"], "minmax_lr", 0.3),
    (["--gradient_accumulate_steps", "3"], "gradient_accumulate_steps", 3),
    (["--not_use_best_mse"], "not_use_best_mse", True),
    (["--act_headroom", "1.5"], "act_headroom", 1.5),
    (["--moe_input_scale", "per_expert"], "moe_input_scale", "per_expert"),
    (["--unseen_experts", "error"], "unseen_experts", "error"),
    (["--static_kv_dtype", "fp8"], "static_kv_dtype", "fp8"),
]


@pytest.mark.parametrize(("words", "name", "value"), ODD_VALUES)
def test_every_option_reaches_the_config(words: list[str], name: str, value: Any) -> None:
    assert getattr(config_from_args(parse(*words)), name) == value


def test_no_setting_is_left_without_an_option_that_was_tried() -> None:
    # These two have a test of their own.
    tried = {name for _, name, _ in ODD_VALUES} | {"scheme", "layer_config"}
    assert tried == {field.name for field in dataclasses.fields(QuantizeConfig)}


def test_schemes_reach_the_config() -> None:
    assert config_from_args(parse("--scheme", "'fp8_static_tensor'")).scheme.group_size == 0
    assert config_from_args(parse("--group_size", "0")).scheme.group_size == 0
    assert config_from_args(parse("--scheme", "FP8_DYNAMIC")).scheme.act_dynamic
    assert config_from_args(parse("--format", "fp8")).scheme.group_size == 0
    assert config_from_args(parse("--format", "fp8", "--scheme", "FP8_STATIC")).scheme.group_size == -1
    config = config_from_args(parse("--layer_config", '{"down_proj": "FP8_STATIC_TENSOR"}'))
    assert config.layer_config["down_proj"].group_size == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bits", "4"], r"bits \(4\)"),
        (["--group_size", "128"], r"group_size \(128\)"),
        (["--act_bits", "16"], r"act_bits \(16\)"),
        (["--data_type", "int"], "data_type"),
        (["--scheme", "W4A16"], "W4A16"),
        (["--scheme", "FP8_DYNAMIC", "--disable_act_dynamic"], "--disable_act_dynamic contradicts"),
        (["--iters", "-1"], "iters"),
        (["--algorithm", "awq"], "awq"),
        (["--nsamples", "0"], "nsamples"),
        (["--keep_layers", "-1"], "keep_layers"),
        (["--target_kl", "0"], "target_kl"),
        (["--target_kl", "0.1", "--keep_layers", "1"], "give one of them"),
        (["--format", "gguf"], "gguf"),
        (["--layer_config", "{broken"], "not valid JSON"),
        (["--layer_config", "no/such/file.json"], "neither JSON text nor a readable file"),
    ],
)
def test_a_bad_value_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_args(parse(*words))


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and the one line of a run that fails before any work."""
    code = main(list(words))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("auto-round: error: ")
    return code, captured.err


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    out = str(tmp_path / "out")
    (tmp_path / "file").write_text("x")
    for words, code, message in [
        ([], 2, "no model is given"),
        ([model], 2, "no target is given"),
        ([model, "--model", "other", "--output_dir", out], 2, "two models"),
        (["./no_such_folder", "--output_dir", out], 1, "no_such_folder"),
        ([str(tmp_path), "--output_dir", out], 1, "config.json"),
        ([model, "--output_dir", out, "--bits", "4"], 2, "bits (4)"),
        ([model, "--output_dir", out, "--iters", "-1"], 2, "iters (-1)"),
        ([model, "--output_dir", out, "--device", "cuda:77"], 2, "cuda:77"),
        ([model, "--output_dir", out, "--device", "0,1"], 2, "several devices"),
        ([model, "--output_dir", model], 2, "source model"),
        ([model, "--output_dir", str(tmp_path / "file")], 2, "is a file"),
        ([model, "--output_dir", out, "--max_shard_size", "big"], 2, "big"),
    ]:
        found, line = failure(capsys, *words)
        assert message in line, words
        assert found == code, words
    assert not Path(out).exists()


@pytest.mark.parametrize("content", [None, "", '{"text": ""}\n{"text": null}\n'])
def test_missing_or_empty_data_are_named_in_the_last_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "no.jsonl").write_text(content)
    assert main([model, "--output_dir", str(tmp_path / "out"), "--dataset", str(tmp_path / "no.jsonl")]) in (1, 2)
    assert "no.jsonl" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_run_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    (tmp_path / "data.txt").write_text("hello world, this is a text\n" * 20)
    out = tmp_path / "out"
    words = [model, "--output_dir", str(out), "--dataset", str(tmp_path / "data.txt"), "--nsamples", "4"]
    assert main([*words, "--seqlen", "32", "--batch_size", "2", "--device", "cpu", "--ignore_layers", "o_proj"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(str(out))
    assert "mean weight SQNR" in captured.out
    assert "12 layers in 2 blocks to FP8, 2 kept in 16 bit" in captured.err
    assert "1/2 model.layers.0" in captured.err
    settings = json.loads((out / "quantization_report.json").read_text())["settings"]
    assert (settings["nsamples"], settings["seqlen"], settings["ignore_layers"]) == (4, 32, ["o_proj"])
    logits = load_quantized_model(out)(input_ids=torch.tensor([[1, 5, 9]])).logits
    assert torch.isfinite(logits).all()
    assert main([*words, "--device", "cpu"]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_collected_again_after_a_run_that_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, was_enabled: bool
) -> None:
    if not was_enabled:
        gc.disable()
    try:
        assert main([model, "--output_dir", str(tmp_path / "out"), "--dataset", str(tmp_path / "none.json")]) != 0
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
        gc.unfreeze()
    assert "none.json" in capsys.readouterr().err


def test_unknown_tasks_are_found_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(model_source, "open_model", None)
    code = main([model, "--output_dir", str(tmp_path / "out"), "--tasks", "no_such_task_at_all"])
    assert code != 0
    assert "no_such_task_at_all" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def report(name: str, *sqnr: float) -> BlockReport:
    layers = tuple(
        LayerReport(
            fqn=f"{name}.l{i}",
            shape=(1, 1),
            weight_sqnr_db=value,
            input_amax=1.0,
            input_scale=1.0,
            num_tokens=1,
            num_peak_tokens=1,
        )
        for i, value in enumerate(sqnr)
    )
    return BlockReport(fqn=name, seconds=0.1, peak_memory_bytes=10**6, layers=layers)


def test_progress_names_the_worst_layer(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    caplog.set_level(logging.INFO, logger="autoround_fp8")
    show = progress(2)
    show(report("layers.0", 30.0, 20.0))
    show(report("layers.1"))
    lines = [record.getMessage() for record in caplog.records]
    assert "1/2 layers.0" in lines[0]
    assert "worst l1 20.0 dB" in lines[0]
    assert lines[0].endswith(" s left")
    assert "nothing to do" in lines[1]


def test_several_formats_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    words = [model, "--output_dir", str(tmp_path / "out"), "--device", "cpu", "--nsamples", "2", "--seqlen", "16"]
    assert main([*words, "--format", "llm_compressor,fp8", "--algorithm", "rtn"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{tmp_path / 'out' / 'llm_compressor'}, {tmp_path / 'out' / 'fp8'}: ")
    assert "scheme FP8_STATIC_TENSOR: format fp8 holds one weight scale per matrix" in captured.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["fp8", "llm_compressor"]
    assert main([*words, "--format", "fp8_static", "--scheme", "FP8_DYNAMIC"]) == 2
    assert "use --format llm_compressor" in capsys.readouterr().err


def test_dynamic_inputs_say_what_has_no_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    words = [model, "--output_dir", str(tmp_path / "out"), "--device", "cpu", "--format", "llm_compressor"]
    assert main([*words, "--scheme", "FP8_DYNAMIC", "--dataset", "no/such/file.txt"]) == 0
    told = capsys.readouterr().err
    assert "dataset has no effect: dynamic inputs need no calibration data" in told
    assert "algorithm mse, not gptq, which needs calibration data" in told
