"""`auto-round eval` and `auto-round compare`: options reach the work, errors come before it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model

from autoround_fp8.autoround import AutoRound
from autoround_fp8.cli.evaluate import add_compare_parser, add_eval_parser, evaluate_folder, run_compare, run_eval
from autoround_fp8.errors import CheckpointError, ConfigError

TASK = """
task: cli_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli_models")
    save_tiny_model(folder / "plain", "llama")
    AutoRound(str(folder / "plain"), nsamples=2, seqlen=32).quantize_and_save(folder / "fp8")
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli_tasks")
    rows = [{"question": f"q{i}:", "answer": i % 2} for i in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "choice.yaml").write_text(TASK.replace("DATA", str(folder / "data.jsonl")))
    return folder


def _parse(words) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(dest="command")
    add_eval_parser(subparsers)
    add_compare_parser(subparsers)
    return parser.parse_args([str(word) for word in words])


def test_eval_prints_a_table_and_writes_json(models, tasks, tmp_path, capsys):
    file = tmp_path / "results.json"
    words = ["eval", models / "fp8", "--tasks", "cli_choice", "--include_path", tasks, "--limit", "3", "--eval_bs", "2"]
    words += ["--device", "cpu", "--kernel", "reference", "--dtype", "float32", "--output_path", file]
    assert run_eval(_parse(words)) == 0
    assert "cli_choice" in capsys.readouterr().out
    results = json.loads(file.read_text())
    assert results["n-samples"]["cli_choice"]["effective"] == 3
    assert results["config"]["batch_size"] == 2
    assert results["config"]["model_dtype"] == "torch.float32"
    assert results["autoround_fp8"]["linears"].startswith("14 x WeightFP8ActFP8StaticQuantLinear (FP8)")


def test_compare_prints_a_table_and_writes_json(models, tmp_path, capsys):
    file = tmp_path / "report.json"
    words = ["compare", models / "plain", models / "fp8", "--nsamples", "2", "--seqlen", "24", "--json", file]
    words += ["--device", "cpu", "--batch_size", "1", "--seed", "7", "--dtype", "bfloat16", "--kernel", "auto"]
    assert run_compare(_parse(words)) == 0
    printed = capsys.readouterr().out
    assert "KL per token" in printed
    assert "those that add most" in printed
    report = json.loads(file.read_text())
    assert (report["num_documents"], report["dtype"], report["kernel"]) == (2, "bfloat16", "auto")
    assert len(report["weight_sqnr_db"]) == 14
    assert [entry["name"] for entry in report["block_errors"]] == ["model.layers.0", "model.layers.1"]


def test_compare_prints_every_block_on_request(models, capsys):
    words = ["compare", models / "plain", models / "fp8", "--nsamples", "1", "--seqlen", "16", "--device", "cpu"]
    assert run_compare(_parse([*words, "--per_block"])) == 0
    printed = capsys.readouterr().out
    assert "all blocks" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.lstrip().startswith("model.layers.")] == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_defaults():
    args = _parse(["compare", "a", "b"])
    assert (args.dataset, args.nsamples, args.seqlen, args.seed, args.batch_size) == ("builtin", 16, 512, 1234, 4)
    assert (args.dtype, args.kernel, args.trust_remote_code) == ("float32", "reference", False)
    assert args.per_block is False
    args = _parse(["eval", "a", "--tasks", "t"])
    assert (args.device, args.kernel, args.dtype, args.trust_remote_code) == ("auto", "auto", "auto", False)


def test_eval_takes_the_options_of_quantize(models, tasks, capsys):
    """The quantize command has fewer options; what it lacks takes its default."""
    args = argparse.Namespace(include_path=str(tasks), limit=2, num_fewshot=None, eval_bs=1, device="cpu")
    args.trust_remote_code = False
    results = evaluate_folder(models / "fp8", ["cli_choice"], args)
    assert results["n-samples"]["cli_choice"]["effective"] == 2
    assert "cli_choice" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["eval", "/no/such/dir", "--tasks", "t"], ["compare", "/no/such/dir", "/no/such/dir"]]
)
def test_missing_path(command):
    args = _parse([*command, "--device", "cpu"])
    with pytest.raises(CheckpointError, match="'/no/such/dir' does not exist"):
        (run_eval if command[0] == "eval" else run_compare)(args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_missing_gpu(models):
    with pytest.raises(ConfigError, match="0 CUDA devices here; use --device cpu"):
        run_eval(_parse(["eval", models / "fp8", "--tasks", "t", "--device", "0"]))
    with pytest.raises(ConfigError, match="0 CUDA devices here; use --device cpu"):
        run_compare(_parse(["compare", models / "plain", models / "fp8", "--device", "0"]))


def test_report_file_is_checked_before_work(models, tmp_path):
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        run_compare(_parse(["compare", models / "plain", models / "fp8", "--json", tmp_path]))
    with pytest.raises(ConfigError, match="in a folder that does not exist"):
        run_eval(_parse(["eval", models / "fp8", "--tasks", "t", "--output_path", tmp_path / "no" / "r.json"]))


def test_tasks_are_required(capsys):
    with pytest.raises(SystemExit) as stop:
        _parse(["eval", "dir"])
    assert stop.value.code == 2
    assert "--tasks" in capsys.readouterr().err
