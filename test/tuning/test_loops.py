"""Compiled loops are for the CPU, where Numba is; until they are needed nothing of Numba is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autoround_fp8.tuning import loops


def test_they_are_for_the_cpu_alone() -> None:
    numba_loops = pytest.importorskip("autoround_fp8.tuning.numba_loops")
    assert loops.compiled_loops(torch.device("cpu")) is numba_loops
    assert loops.compiled_loops(torch.device("meta")) is None


def test_without_numba_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autoround_fp8.tuning.numba_loops", None)
    monkeypatch.delattr("autoround_fp8.tuning.numba_loops", raising=False)
    loops._compiled.cache_clear()
    try:
        assert loops.compiled_loops(torch.device("cpu")) is None
    finally:
        loops._compiled.cache_clear()


def test_importing_the_pipeline_does_not_import_numba() -> None:
    code = "import sys, autoround_fp8.pipeline; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
