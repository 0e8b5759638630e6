"""Command lines of the two tools that the benches compare, for the same static W8A8-FP8 work."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

# The peer's own search for weight scales changes nothing in this scheme's export but takes half as long again.
PEER_ROUNDING_ARGS = "--disable_opt_rtn"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to quantise, and with how much text: `nsamples` samples of `seqlen` tokens."""

    model: str
    nsamples: int
    seqlen: int


def our_command(python: str, work: Workload, dataset: Path, output_dir: Path, options: str) -> list[str]:
    """Return the command line of this package; `options` is written as in a shell."""
    shared = _shared_options(work, dataset, output_dir)
    return [python, "-m", "autoround_fp8", *shared, "--format", "fp8_static", *shlex.split(options)]


def peer_command(python: str, work: Workload, dataset: Path, output_dir: Path, options: str) -> list[str]:
    """Return the command line of Intel's auto-round; `options` is written as in a shell and must hold `--iters`."""
    shared = _shared_options(work, dataset, output_dir)
    scheme = ["--scheme", "FP8_STATIC", "--format", "auto_round"]
    return [python, "-m", "auto_round", *shared, *scheme, *shlex.split(options)]


def _shared_options(work: Workload, dataset: Path, output_dir: Path) -> list[str]:
    options = ["--model", work.model, "--dataset", str(dataset), "--output_dir", str(output_dir)]
    return [*options, "--nsamples", str(work.nsamples), "--seqlen", str(work.seqlen)]
