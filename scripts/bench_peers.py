"""Compare this package with Intel's AutoRound, side by side, on the same static W8A8-FP8 work.

The peer rounds a bfloat16 model to nearest; this package does what `--our_args` says (nothing: its own default;
`--our_args "--algorithm rtn"`: the same method). Both get the same calibration texts (Wikipedia; each text is a little
longer than the sequence length, so that neither side drops or packs any).

Whole processes are measured, in alternation: wall time, CPU time, peak resident memory. Both exports are then judged by
one independent simulation (export_judge.py: plain transformers in float32, neither tool's code): KL divergence from the
original on held-out Wikipedia text. For several modes, models and texts, with standard errors: bench_accuracy.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_text
from measured_process import ProcessCost, run_measured
from passages import cut_windows, load_tokenizer, write_calibration_files
from quantise_commands import PEER_ROUNDING_ARGS, Workload, our_command, peer_command

if TYPE_CHECKING:
    from export_judge import WindowScore

SIDES = ("peer", "ours")


@dataclass(frozen=True, kw_only=True)
class ExportQuality:
    """How far an export is from the original on the held-out tokens (KL in nats per token, original || export)."""

    kl: float
    top1_agreement: float
    perplexity: float
    original_perplexity: float
    num_tokens: int
    num_quantised: int


# --- the work: the same texts for both sides ---------------------------------------------------------------------


def prepare_texts(args: argparse.Namespace) -> tuple[list[Path], list[list[int]]]:
    """Write one calibration file per draw, and return the files with the held-out windows of token ids."""
    tokenizer = load_tokenizer(args.model)
    articles = demo_text.read_wikipedia(args.data_dir or demo_text.find_data_dir())
    draws, held_out = demo_text.split_articles(articles, args.draws)
    files = write_calibration_files(draws, tokenizer, args.work_dir / "text", args.seqlen, args.nsamples)
    windows = cut_windows(held_out, tokenizer, args.seqlen, args.held_out_windows)
    return files, [window.ids for window in windows]


# --- whole processes ---------------------------------------------------------------------------------------------


def build_command(side: str, args: argparse.Namespace, dataset: Path, output_dir: Path) -> list[str]:
    """Return the command line of one side for one calibration file."""
    work = Workload(model=args.model, nsamples=args.nsamples, seqlen=args.seqlen)
    if side == "ours":
        return our_command(args.our_python, work, dataset, output_dir, f"--iters 0 {args.our_args}")
    return peer_command(args.peer_python, work, dataset, output_dir, f"--iters 0 {args.peer_args}")


def export_folder(args: argparse.Namespace, side: str, draw: int) -> Path:
    """Return where `side` writes its export of calibration draw `draw`."""
    return Path(args.work_dir) / f"{side}-{draw}"


def run_side(args: argparse.Namespace, side: str, draw: int, dataset: Path) -> ProcessCost:
    """Export once with `side`, replacing an earlier export of that draw, and say what it cost."""
    folder = export_folder(args, side, draw)
    shutil.rmtree(folder, ignore_errors=True)
    cost = run_measured(build_command(side, args, dataset, folder), args.work_dir / "logs" / f"{side}-{draw}.log")
    print(f"{side} draw {draw}: {cost}", flush=True)
    return cost


def measure_pairs(args: argparse.Namespace, datasets: list[Path]) -> dict[str, list[ProcessCost]]:
    """Run the sides in alternation, `--pairs` times each; pair i calibrates with draw i modulo the number of draws."""
    costs: dict[str, list[ProcessCost]] = {side: [] for side in args.sides}
    for pair in range(args.pairs):
        draw = pair % len(datasets)
        for side in args.sides:
            costs[side].append(run_side(args, side, draw, datasets[draw]))
    return costs


# --- one judge for both exports ----------------------------------------------------------------------------------


def summarise(scores: list[WindowScore], num_quantised: int) -> ExportQuality:
    """Average an export's scores over all tokens."""
    num_tokens = sum(score.num_tokens for score in scores)
    num_targets = num_tokens - len(scores)
    return ExportQuality(
        kl=sum(score.kl_sum for score in scores) / num_tokens,
        top1_agreement=sum(score.num_agreeing for score in scores) / num_tokens,
        perplexity=math.exp(sum(score.loss_sum for score in scores) / num_targets),
        original_perplexity=math.exp(sum(score.original_loss_sum for score in scores) / num_targets),
        num_tokens=num_tokens,
        num_quantised=num_quantised,
    )


def judge_draws(
    args: argparse.Namespace, datasets: list[Path], windows: list[list[int]]
) -> dict[str, list[ExportQuality]]:
    """Judge every side's export of every draw; an export that is not there yet is made first."""
    todo = [(side, draw) for draw in range(len(datasets)) for side in args.sides]
    for side, draw in todo:
        if not any(export_folder(args, side, draw).rglob("*.safetensors")):
            run_side(args, side, draw, datasets[draw])
    qualities: dict[str, list[ExportQuality]] = {side: [] for side in args.sides}
    # Only now: what this process holds counts as the peak memory of the processes that it starts.
    from export_judge import judge_exports

    judged = judge_exports(args.model, [export_folder(args, side, draw) for side, draw in todo], windows)
    for (side, draw), (_, num_quantised, scores) in zip(todo, judged, strict=True):
        quality = summarise(scores, num_quantised)
        print(f"{side} draw {draw}: KL {quality.kl:.5f}, top-1 {quality.top1_agreement:.4f}", flush=True)
        qualities[side].append(quality)
    return qualities


# --- the report --------------------------------------------------------------------------------------------------


def build_rows(costs: dict[str, list[ProcessCost]], qualities: dict[str, list[ExportQuality]]) -> list[dict[str, Any]]:
    """Return one row per measured quantity: each side's values and median, and ours / peer pair by pair."""
    measured: list[tuple[str, dict[str, list[float]]]] = []
    for field in ("wall_s", "cpu_s", "peak_rss_mib"):
        measured.append((field, {side: [getattr(cost, field) for cost in costs[side]] for side in costs}))
    for field in ("kl", "top1_agreement", "perplexity"):
        measured.append((field, {side: [getattr(q, field) for q in qualities[side]] for side in qualities}))
    rows = []
    for field, values in measured:
        if not any(values.values()):
            continue
        row: dict[str, Any] = {"quantity": field}
        for side, numbers in values.items():
            row[side] = numbers
            row[f"{side}_median"] = statistics.median(numbers)
        if set(values) == set(SIDES):
            ratios = [ours / peer for ours, peer in zip(values["ours"], values["peer"], strict=True)]
            row |= {"ratio": ratios, "ratio_median": statistics.median(ratios)}
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print medians, and the ratio ours / peer with its values pair by pair."""
    print(f"\n{'quantity':<16}{'peer':>12}{'ours':>12}{'ours/peer':>12}   each pair")
    for row in rows:
        cells = [f"{row[name]:>12.4f}" if name in row else f"{'-':>12}" for name in ("peer_median", "ours_median")]
        ratio = f"{row['ratio_median']:>12.3f}" if "ratio_median" in row else f"{'-':>12}"
        print(f"{row['quantity']:<16}{''.join(cells)}{ratio}   {' '.join(f'{x:.3f}' for x in row.get('ratio', []))}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="bfloat16 model folder, e.g. one written by make_demo_model.py")
    add("--peer_python", help="python of an environment with Intel's auto-round installed")
    add("--our_python", default=sys.executable, help="python of an environment with autoround_fp8 (this one)")
    add("--work_dir", type=Path, required=True, help="folder for texts, exports, logs and results.json")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="who runs (both, alternating in this order)")
    add("--draws", type=int, default=3, help="number of calibration draws (3)")
    add("--pairs", type=int, default=3, help="number of timed runs of each side (3)")
    add("--nsamples", type=int, default=32, help="calibration texts per draw (32)")
    add("--seqlen", type=int, default=512, help="tokens per text (512)")
    add("--held_out_windows", type=int, default=8, help="held-out windows of --seqlen tokens for the KL (8)")
    add("--data_dir", type=Path, help="gensim's test_data folder; default: found in this environment")
    add(
        "--skip_time", action="store_true", help="measure no time; exports already in --work_dir are judged as they are"
    )
    add("--skip_kl", action="store_true", help="judge no export")
    add("--peer_args", default=PEER_ROUNDING_ARGS, help=f"more options for the peer ({PEER_ROUNDING_ARGS})")
    add("--our_args", default="", help="more options for this package")
    args = parser.parse_args(argv)
    if "peer" in args.sides and not args.peer_python:
        parser.error("--peer_python is needed unless --sides ours")
    for name in ("draws", "pairs", "nsamples", "seqlen", "held_out_windows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} ({getattr(args, name)}) must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, print a table and write results.json."""
    args = parse_arguments(argv)
    try:
        datasets, windows = prepare_texts(args)
        costs = {} if args.skip_time else measure_pairs(args, datasets)
        qualities = {} if args.skip_kl else judge_draws(args, datasets, windows)
    except (OSError, RuntimeError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    rows = build_rows(costs, qualities)
    print_table(rows)
    results = {
        "settings": {name: str(value) for name, value in vars(args).items()},
        "num_cpus": len(os.sched_getaffinity(0)),
        "rows": rows,
        "runs": {side: [asdict(cost) for cost in values] for side, values in costs.items()},
        "quality": {side: [asdict(quality) for quality in values] for side, values in qualities.items()},
    }
    path = args.work_dir / "results.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
