"""The README.md of an export: it says what was done, names the licence, and never takes the place of a user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model

from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import ConfigError
from autoround_fp8.formats.table import FORMATS
from autoround_fp8.model_card import model_card
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import export_run, prepare
from autoround_fp8.schemes import parse_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
SOURCE_CARD = "---\nlanguage:\n- en\nlicense: apache-2.0\nlicense_link: https://x/y\n---\n# The original\n"
MINIMAL = {"model": "org/m", "version": "1", "format": "llm_compressor"}


def export(source: Path, out: Path, **settings: Any) -> tuple[Path, str]:
    config = QuantizeConfig(**{"dataset": ROWS, "device": "cpu", "algorithm": "rtn", **settings})
    folder = export_run(prepare(config, open_model(source)), out).folder
    return folder, (folder / "README.md").read_text()


def test_the_card_says_what_was_done(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    (source / "README.md").write_text(SOURCE_CARD)
    (source / "LICENSE").write_bytes(b"mine\r\n")
    folder, card = export(source, tmp_path / "out", ignore_layers=("k_proj",))
    assert card.startswith("---\nlicense: apache-2.0\nlicense_link: https://x/y\n---\n\n# tiny in FP8\n")
    assert "Quantised from `tiny` by" in card
    assert "| weights | FP8 E4M3, one scale per output channel |" in card
    assert "| inputs | FP8 E4M3, one calibrated scale per layer |" in card
    assert "| algorithm | rtn |" in card
    assert "3 samples, 48 tokens, from 3 of 3 records" in card
    assert "| layers in FP8 | 8 |" in card
    assert "`model.layers.0.self_attn.k_proj`" in card
    assert " dB in the mean, " in card
    assert "vLLM does not" in card
    assert "[README.source.md](README.source.md)" in card
    assert (folder / "README.source.md").read_text() == SOURCE_CARD
    assert (folder / "LICENSE").read_bytes() == b"mine\r\n"
    assert {"README.md", "README.source.md"} <= {path.name for path in folder.iterdir()}


def test_dynamic_inputs_and_tuning_are_named(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    settings = {"format": "llm_compressor", "scheme": parse_scheme("FP8_DYNAMIC")}
    _, card = export(source, tmp_path / "dynamic", **settings)
    assert "one scale per token, made on the fly" in card
    assert "calibration" not in card
    _, card = export(source, tmp_path / "tuned", iters=2)
    assert "| algorithm | rtn, then 2 steps of gradient tuning |" in card


def test_each_format_has_a_card_of_its_own(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    formats = "llm_compressor,fp8,fake"
    config = QuantizeConfig(
        dataset=ROWS, device="cpu", algorithm="rtn", format=formats, scheme=parse_scheme("FP8_STATIC_TENSOR")
    )
    folders = export_run(prepare(config, open_model(source)), tmp_path / "out").folders
    cards = {name: (folder / "README.md").read_text() for name, folder in folders.items()}
    assert all(f"format `{name}`" in card for name, card in cards.items())
    assert all("vllm serve DIR" in card for card in cards.values())
    assert "| inputs |" not in cards["fake"]


def test_two_runs_give_the_same_card(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    assert export(source, tmp_path / "one")[1] == export(source, tmp_path / "two")[1]


def test_a_users_own_file_is_never_replaced(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"README\.md"):
            export(source, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_an_earlier_exports_card_is_replaced_when_asked(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    export(source, tmp_path / "out")
    _, card = export(source, tmp_path / "out", overwrite=True, ignore_layers=("k_proj",))
    assert "k_proj" in card


@pytest.mark.parametrize("checkpoint_format", FORMATS, ids=lambda f: f.name)
def test_a_report_of_the_least_is_enough(checkpoint_format: Any) -> None:
    card = model_card({**MINIMAL, "format": checkpoint_format.name})
    assert card.startswith("---\nbase_model: org/m\n---\n\n# m in FP8\n")
    assert "README.source.md" not in card


@pytest.mark.parametrize("source_card", ["", "no metadata", "---\nlicense: x\n", "---\nlanguage: en\n---\n"])
def test_a_card_without_a_licence_gives_none(source_card: str) -> None:
    assert not model_card({**MINIMAL, "model": "/some/folder/m"}, source_card).startswith("---")
