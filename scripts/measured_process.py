"""Run a command as a whole process and say what it cost: wall time, CPU time, peak resident memory."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ProcessCost:
    """What one whole process cost: seconds of wall and CPU time, and peak resident memory in MiB.

    `load_before` is the machine's one-minute load average at the start: near 0 or the times mean little.
    """

    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    load_before: float

    def __str__(self) -> str:
        return (
            f"{self.wall_s:.1f} s wall, {self.cpu_s:.1f} s CPU, {self.peak_rss_mib:.0f} MiB, "
            f"load before {self.load_before:.1f}"
        )


def offline_environment() -> dict[str, str]:
    """Return this process's environment, with hubs switched off and Python's output unbuffered."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run_measured(command: list[str], log_path: Path) -> ProcessCost:
    """Run a command to its end and return its cost, children included.

    The peak is the kernel's `ru_maxrss` of the process. It starts from the resident size of the process that launched
    it, so a caller loads models only after its measurements.

    Raises:
        RuntimeError: if the command fails; the message names its log.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        load_before = os.getloadavg()[0]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=offline_environment())
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"exit code ({process.returncode}) must be 0 for: {shlex.join(command)}; see {log_path}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return ProcessCost(wall_s=wall_s, cpu_s=cpu_s, peak_rss_mib=usage.ru_maxrss / 1024, load_before=load_before)
