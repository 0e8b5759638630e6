"""Tiny checkpoints of every kind, made once; tests get copies to plant faults in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_damage import write_export
from make_block_fp8 import make_block_fp8
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from tiny_moe_models import save_tiny_moe_model

BLOCK = (32, 32)

# Kind -> model, format, scheme.
EXPORTS: dict[str, tuple[str, str, str | None]] = {
    "fp8_static": ("dense", "fp8_static", None),
    "llm_compressor": ("dense", "llm_compressor", None),
    "dynamic": ("dense", "llm_compressor", "FP8_DYNAMIC"),
    "fp8": ("dense", "fp8", None),
    "fake": ("dense", "fake", None),
    "moe_fp8_static": ("moe", "fp8_static", None),
    "moe_llm_compressor": ("moe", "llm_compressor", None),
    "moe_fp8": ("moe", "fp8", None),
    "moe_dynamic": ("moe", "llm_compressor", "FP8_DYNAMIC"),
    "cache": ("dense", "llm_compressor", None),
    "moe_cache": ("moe", "llm_compressor", None),
}

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], None]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind -> its folder, which is not to be changed."""
    base = tmp_path_factory.mktemp("inspection")

    def folder_of(kind: str) -> Path:
        folder = base / kind
        if folder.exists():
            return folder
        if kind == "dense":
            save_tiny_model(folder, "qwen3", with_tokenizer=False)
        elif kind == "moe":
            save_tiny_moe_model(folder, "qwen3_moe", with_tokenizer=False)
        elif kind in ("block", "moe_block"):
            make_block_fp8(folder_of(kind.replace("block", "").strip("_") or "dense"), folder, block=BLOCK)
        else:
            model, name, scheme = EXPORTS[kind]
            write_export(folder_of(model), folder, name, scheme, "fp8" if kind.endswith("cache") else None)
        return folder

    return folder_of


@pytest.fixture
def planted(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Change], Path]:
    """Kind and what to change in its tensors and config.json -> a folder that is so changed."""

    def plant(kind: str, change: Change) -> Path:
        folder = Path(shutil.copytree(made(kind), tmp_path / "planted"))
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        change(tensors, config)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return plant
