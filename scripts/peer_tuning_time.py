"""How long Intel's auto-round would take to tune a whole model, from its first few blocks.

Its progress bar counts finished blocks; the process is stopped once enough of them are done.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from measured_process import offline_environment

# One update of the bar: "Quantizing model.layers.3:  10%|#   | 3/30 [00:25<03:57,  8.80s/it]".
_PROGRESS = re.compile(r"Quantizing \S+:\s+\d+%\|[^|]*\| (\d+)/(\d+) ")
POLL_S = 0.1
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class TuningTime:
    """Seconds before the first block and of each timed block, and how many blocks there are in all."""

    setup_s: float
    block_s: list[float]
    num_blocks: int

    @property
    def whole_s(self) -> float:
        """Extrapolated seconds of the whole run but its export, so rather too few."""
        return self.setup_s + self.num_blocks * sum(self.block_s) / len(self.block_s)


def read_progress(log: str) -> tuple[int, int] | None:
    """Return how many blocks are done, and of how many, by the last update in a log; None before the first block."""
    updates = _PROGRESS.findall(log)
    return (int(updates[-1][0]), int(updates[-1][1])) if updates else None


def time_first_blocks(command: list[str], log_path: Path, num_timed: int) -> TuningTime:
    """Run a tuning command until `num_timed` blocks are done, then stop it.

    Raises:
        RuntimeError: if the command ends by itself before that; the message names its log.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    num_blocks = 0
    seen_s: list[float] = []  # when 0, 1, ... blocks were done
    with log_path.open("wb") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=offline_environment())
        try:
            while len(seen_s) <= num_timed:
                time.sleep(POLL_S)
                has_ended = process.poll() is not None  # asked before the log is read, so that all of it is seen
                progress = read_progress(log_path.read_text(encoding="utf-8", errors="replace"))
                if progress is not None:
                    num_done, num_blocks = progress
                    now_s = time.perf_counter() - start
                    seen_s += [now_s] * (num_done + 1 - len(seen_s))
                if has_ended and len(seen_s) <= num_timed:
                    raise RuntimeError(
                        f"blocks done ({max(0, len(seen_s) - 1)}) must reach {num_timed} before the end "
                        f"(exit code {process.returncode}) of: {shlex.join(command)}; see {log_path}"
                    )
        finally:
            _stop(process)
    block_s = [after - before for before, after in itertools.pairwise(seen_s[: num_timed + 1])]
    return TuningTime(setup_s=seen_s[0], block_s=block_s, num_blocks=num_blocks)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
