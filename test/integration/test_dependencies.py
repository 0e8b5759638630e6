"""What this package asks of its dependencies: nothing removed or deprecated, versions that do as it expects."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from tiny_models import VOCAB_SIZE
from tiny_moe_models import save_tiny_moe_model
from transformers import AutoModelForCausalLM

from autoround_fp8 import AutoRound

ROOT = Path(__file__).parents[2]
ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
IMPORT_ALL = """
import importlib, pkgutil, warnings
import autoround_fp8
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for module in pkgutil.walk_packages(autoround_fp8.__path__, "autoround_fp8."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
own = [str(warning.message) for warning in found if "autoround_fp8" in warning.filename]
assert not own, own
"""


def test_every_module_can_be_imported_without_a_warning_about_it() -> None:
    pytest.importorskip("lm_eval")
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_and_a_load_use_nothing_deprecated(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    source = save_tiny_moe_model(tmp_path / "source", "qwen3_moe")
    _, folder = AutoRound(source, dataset=ROWS, device_map="cpu").quantize_and_save(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(folder).generate(ROWS, max_new_tokens=2, do_sample=False)
    assert "deprecat" not in caplog.text.lower()
    assert [str(warning.message) for warning in recwarn if "autoround_fp8" in warning.filename] == []


def test_the_range_of_transformers_is_what_was_tried() -> None:
    # Before 5.13 routers return their logits alone.
    (text,) = re.findall(r'"transformers(>=[^"]*)"', (ROOT / "setup.py").read_text())
    allowed = SpecifierSet(text)
    assert transformers.__version__ in allowed
    assert not {"4.57.0", "5.12.0", "6.0.0"} & set(allowed.filter(["4.57.0", "5.12.0", "6.0.0"]))
