"""`measured_process.py`: costs of real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from measured_process import run_measured


def test_cost_covers_time_and_memory(tmp_path: Path):
    code = "import time; x = b'x' * (400 << 20); time.sleep(0.3); print('done')"
    cost = run_measured([sys.executable, "-c", code], tmp_path / "logs" / "log")
    assert cost.wall_s >= 0.3
    assert cost.peak_rss_mib > 400
    assert (tmp_path / "logs" / "log").read_text() == "done\n"


def test_failure_names_command_and_log(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"exit code \(3\) must be 0 for: .*SystemExit.*; see .*log"):
        run_measured([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
