"""`autoround-fp8-lm-eval` is lm-eval's command line with one more model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from autoround_fp8.evaluation import lm_eval_cli

# Without the index of lm-eval's own tasks, which takes ten seconds to read.
RUN = """
import sys
from lm_eval.tasks import TaskManager
TaskManager.__init__.__defaults__ = (None, None, False, None)
from autoround_fp8.evaluation.lm_eval_cli import main
sys.exit(main())
"""


def test_arguments_are_lm_evals(fp8_checkpoint, task_folder, tmp_path):
    command = [sys.executable, "-c", RUN, "run", "--model", "autoround_fp8"]
    command += ["--model_args", f"pretrained={fp8_checkpoint},dtype=float32,kernel=reference", "--tasks", "tiny_choice"]
    command += ["--include_path", str(task_folder), "--limit", "2", "--output_path", str(tmp_path), "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, env=_offline_env(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "14 x WeightFP8ActFP8StaticQuantLinear (FP8)" in run.stderr
    (file,) = tmp_path.rglob("results_*.json")
    assert 0.0 <= json.loads(file.read_text())["results"]["tiny_choice"]["acc,none"] <= 1.0


def test_errors_are_one_sentence(monkeypatch, capsys):
    def missing(name):
        raise lm_eval_cli.ConfigError("evaluation needs the package lm_eval")

    monkeypatch.setattr(lm_eval_cli, "require_lm_eval", lambda: missing("lm_eval"))
    assert lm_eval_cli.main() == 2
    assert capsys.readouterr().err == "autoround-fp8-lm-eval: error: evaluation needs the package lm_eval\n"


def test_help_is_lm_evals(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["autoround-fp8-lm-eval", "run", "--help"])
    # The command configures logging of a process of its own.
    for name in ("lm_eval", "autoround_fp8"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.NullHandler()])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    with pytest.raises(SystemExit) as stop:
        lm_eval_cli.main()
    assert stop.value.code == 0
    assert "--model_args" in capsys.readouterr().out


def _offline_env(folder):
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
