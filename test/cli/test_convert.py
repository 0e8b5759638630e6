"""`auto-round convert`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model

from autoround_fp8.cli.main import main
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import export_run, prepare

ROWS = torch.randint(4, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("convert")
    source = open_model(save_tiny_model(base / "source", with_tokenizer=False))
    config = QuantizeConfig(dataset=ROWS, device="cpu", algorithm="rtn")
    return export_run(prepare(config, source), base / "export").folder


def test_what_is_exact_and_what_is_not(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(export), "--format", "llm_compressor,fake", "--output_dir", str(out)]) == 0
    exact, rounded = capsys.readouterr().out.splitlines()
    as_they_were = "layers as they were"
    assert exact == f"{out / 'llm_compressor'}: fp8_static -> llm_compressor, codes and scales of 14 {as_they_were}"
    start = f"{out / 'fake'}: fp8_static -> fake, codes and scales of 0 {as_they_were}; NOT exact: 14 layers"
    assert rounded.startswith(start)


def test_what_cannot_be(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(export), "--format", "fp8", "--output_dir", str(tmp_path / "out")]) == 2
    assert "one static scale per matrix" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), "--format", "fp8", "--output_dir", str(tmp_path / "out")]) == 1
    with pytest.raises(SystemExit):
        main(["convert", str(export), "--format", "fp8"])
