"""`peer_tuning_time.py` on a stand-in that writes the same progress bar."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from peer_tuning_time import TuningTime, read_progress, time_first_blocks

UPDATE = "\rQuantizing model.layers.{0}:   3%|▎         | {0}/30 [00:08<04:03,  8.41s/it]"


def tuning_command(num_blocks: int, ending: str) -> list[str]:
    """A process that needs 0.3 s for each of some blocks, and then does something else."""
    loop = f"for i in range({num_blocks}):\n    print({UPDATE!r}.format(i), end='')\n    time.sleep(0.3)\n"
    return [sys.executable, "-X", "utf8", "-c", f"import time\n{loop}{ending}"]


def test_progress_is_the_last_update_of_the_blocks_bar():
    loading = "\rLoading weights: 100%|###| 272/272 [00:00<00:00, 7525.40it/s]\r  0%|          | 0/30 [00:00<?, ?it/s]"
    assert read_progress(loading) is None
    assert read_progress(loading + UPDATE.format(0) + "\nloss\n" + UPDATE.format(12)) == (12, 30)


def test_the_process_is_stopped_after_the_blocks(tmp_path: Path):
    marker = tmp_path / "ran_on"
    command = tuning_command(3, f"time.sleep(60)\nopen({str(marker)!r}, 'w')")
    tuning = time_first_blocks(command, tmp_path / "log", 2)
    assert tuning.num_blocks == 30
    assert len(tuning.block_s) == 2
    assert all(0 < seconds < 5 for seconds in tuning.block_s)
    assert not marker.exists()


def test_the_whole_is_extrapolated():
    assert TuningTime(setup_s=5.0, block_s=[1.0, 2.0], num_blocks=30).whole_s == 50.0


def test_a_process_that_ends_too_early_is_an_error(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"(?s)blocks done \(1\) must reach 5 .*exit code 3.*log"):
        time_first_blocks(tuning_command(2, "raise SystemExit(3)"), tmp_path / "log", 5)
