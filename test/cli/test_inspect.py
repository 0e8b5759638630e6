"""`auto-round inspect`: its exit codes and where its report goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from autoround_fp8.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("inspect") / "m", with_tokenizer=False)


def test_a_sound_checkpoint(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert main(["inspect", str(model), "--json", str(out)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("sound")
    assert json.loads(out.read_text())["label"] == "none"


def test_a_broken_checkpoint_is_exit_code_1(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    assert main(["inspect", str(tmp_path)]) == 1
    assert "FAULT: tensors with NaN or infinity (1): model.norm.weight" in capsys.readouterr().out


def test_what_cannot_be_inspected(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "gone")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["inspect", str(model), "--json", str(tmp_path / "no" / "r.json")]) == 2
    assert "json" in capsys.readouterr().err
