"""Compare this package with Intel's AutoRound, side by side, on the same static W8A8-FP8 work.

The peer rounds a bfloat16 model to nearest; this package does what `--our_args` says (nothing: its own default;
`--our_args "--algorithm rtn"`: the same method). Both get the same calibration texts (Wikipedia; each text is a little
longer than the sequence length, so that neither side drops or packs any).

Whole processes are measured, in alternation: wall time, CPU time, peak resident memory. Both exports are then judged by
one independent simulation, written here in plain transformers float32 with neither tool's code: KL divergence from the
original on held-out Wikipedia text.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_text

if TYPE_CHECKING:
    import torch
    from torch import nn

FP8_MAX = 448.0
SIDES = ("peer", "ours")
# A few tokens over: cutting and re-encoding a text can lose one where two pieces of a word merge.
SPARE_TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class ProcessCost:
    """What one whole process cost: seconds of wall and CPU time, and peak resident memory in MiB.

    `load_before` is the machine's one-minute load average at the start: near 0 or the times mean little.
    """

    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    load_before: float


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


def cut_passages(articles: list[str], tokenizer: Any, num_tokens: int, count: int) -> list[str]:
    """Take `count` passages of `num_tokens` tokens, the first of every article, then the second of every article, ...

    Raises:
        ValueError: if the articles do not hold that much text.
    """
    encoded = [tokenizer(article, add_special_tokens=False)["input_ids"] for article in articles]
    passages: list[str] = []
    for start in range(0, max(map(len, encoded)) - num_tokens + 1, num_tokens):
        for ids in encoded:
            if len(ids) < start + num_tokens:
                continue
            passage = tokenizer.decode(ids[start : start + num_tokens])
            # Whitespace at the ends is stripped by some readers: strip it here, for both.
            passage = passage.strip()
            if len(tokenizer(passage)["input_ids"]) >= num_tokens - SPARE_TOKENS:
                passages.append(passage)
            if len(passages) == count:
                return passages
    raise ValueError(f"number of passages ({len(passages)}) must reach {count}; give fewer draws or a shorter --seqlen")


def prepare_texts(args: argparse.Namespace) -> tuple[list[Path], list[list[int]]]:
    """Write one calibration file per draw, and return the files with the held-out windows of token ids."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # whole articles are longer than the model's context, on purpose
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    articles = demo_text.read_wikipedia(args.data_dir or demo_text.find_data_dir())
    draws, held_out = demo_text.split_articles(articles, args.draws)
    files = []
    for index, texts in enumerate(draws):
        path = args.work_dir / "text" / f"calibration-{index}.jsonl"
        demo_text.write_jsonl(path, cut_passages(texts, tokenizer, args.seqlen + SPARE_TOKENS, args.nsamples))
        files.append(path)
    windows = cut_passages(held_out, tokenizer, args.seqlen + SPARE_TOKENS, args.held_out_windows)
    return files, [tokenizer(window)["input_ids"][: args.seqlen] for window in windows]


# --- whole processes ---------------------------------------------------------------------------------------------


def build_command(side: str, args: argparse.Namespace, dataset: Path, output_dir: Path) -> list[str]:
    """Return the command line of one side for one calibration file."""
    shared = ["--model", args.model, "--dataset", str(dataset), "--output_dir", str(output_dir), "--iters", "0"]
    shared += ["--nsamples", str(args.nsamples), "--seqlen", str(args.seqlen)]
    if side == "ours":
        return [args.our_python, "-m", "autoround_fp8", *shared, "--format", "fp8_static", *shlex.split(args.our_args)]
    peer_only = ["--scheme", "FP8_STATIC", "--format", "auto_round", *shlex.split(args.peer_args)]
    return [args.peer_python, "-m", "auto_round", *shared, *peer_only]


def run_measured(command: list[str], log_path: Path) -> ProcessCost:
    """Run a command to its end and return its cost, children included.

    The peak is the kernel's `ru_maxrss` of the process. It starts from the resident size of the process that launched
    it, so everything here that loads a model comes after the measurements.

    Raises:
        RuntimeError: if the command fails; the message names its log.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log_path.open("wb") as log:
        load_before = os.getloadavg()[0]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"exit code ({process.returncode}) must be 0 for: {shlex.join(command)}; see {log_path}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return ProcessCost(wall_s=wall_s, cpu_s=cpu_s, peak_rss_mib=usage.ru_maxrss / 1024, load_before=load_before)


def export_folder(args: argparse.Namespace, side: str, draw: int) -> Path:
    """Return where `side` writes its export of calibration draw `draw`."""
    return Path(args.work_dir) / f"{side}-{draw}"


def run_side(args: argparse.Namespace, side: str, draw: int, dataset: Path) -> ProcessCost:
    """Export once with `side`, replacing an earlier export of that draw, and say what it cost."""
    folder = export_folder(args, side, draw)
    shutil.rmtree(folder, ignore_errors=True)
    cost = run_measured(build_command(side, args, dataset, folder), args.work_dir / "logs" / f"{side}-{draw}.log")
    print(
        f"{side} draw {draw}: {cost.wall_s:.1f} s wall, {cost.cpu_s:.1f} s CPU, {cost.peak_rss_mib:.0f} MiB, "
        f"load before {cost.load_before:.1f}",
        flush=True,
    )
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


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of an export; the peer nests its files one folder deeper, so the search is recursive.

    Raises:
        FileNotFoundError: if there is no safetensors file.
    """
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def fake_quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round float32 `x` to E4M3 in units of a per-tensor `scale`; what is out of range saturates at 448."""
    import torch

    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def simulate_linear(
    linear: nn.Module, codes: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor
) -> None:
    """Make a float32 Linear compute what the export means.

    Args:
        linear: the layer, changed in place.
        codes: E4M3 weight `[out, in]`.
        weight_scale: a multiplier of shape `[out]`, `[out, 1]`, `[1]` or `[]`, any float dtype.
        input_scale: one multiplier.
    """
    linear.weight.data = codes.float() * weight_scale.float().reshape(-1, 1)
    scale = input_scale.float().reshape(())
    linear.register_forward_pre_hook(lambda _, inputs: (fake_quantise(inputs[0], scale), *inputs[1:]))


def load_float32(model: str) -> nn.Module:
    """Load the original in float32, ready to evaluate."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def load_simulated(args: argparse.Namespace, folder: Path) -> tuple[nn.Module, int]:
    """Return the original in float32 with an export's tensors in it, and how many Linears the export quantises.

    Raises:
        ValueError: if the export quantises nothing, or leaves a quantised layer without a static input scale.
    """
    import torch

    model, tensors = load_float32(args.model), read_export(folder)
    fqns = [name.removesuffix(".weight") for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn]
    missing = [fqn for fqn in fqns for name in ("weight_scale", "input_scale") if f"{fqn}.{name}" not in tensors]
    if not fqns or missing:
        raise ValueError(
            f"{folder}: quantised layers ({len(fqns)}) must all have static scales; missing: {missing[:3]}"
        )
    for fqn in fqns:
        simulate_linear(
            model.get_submodule(fqn),
            tensors.pop(f"{fqn}.weight"),
            tensors.pop(f"{fqn}.weight_scale"),
            tensors.pop(f"{fqn}.input_scale"),
        )
    # What is left is unquantised; loading it too would show a tensor that an export has spoilt.
    unexpected = model.load_state_dict(tensors, strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"{folder}: tensors the model does not have: {unexpected[:3]}")
    return model, len(fqns)


def judge_export(args: argparse.Namespace, folder: Path, windows: list[list[int]]) -> ExportQuality:
    """Compare an export with the original, window by window, in float32."""
    import torch

    original = load_float32(args.model)
    export, num_quantised = load_simulated(args, folder)
    sums = torch.zeros(4, dtype=torch.float64)
    num_tokens = num_targets = 0
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            log_p, log_q = (model(input_ids=ids).logits[0].log_softmax(-1) for model in (original, export))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).sum()
            agreement = (log_p.argmax(-1) == log_q.argmax(-1)).sum()
            targets = ids[0, 1:, None]
            losses = [-log_x[:-1].gather(-1, targets).sum() for log_x in (log_q, log_p)]
            sums += torch.stack([kl, agreement.float(), *losses]).double()
            num_tokens += len(window)
            num_targets += len(window) - 1
    return ExportQuality(
        kl=float(sums[0]) / num_tokens,
        top1_agreement=float(sums[1]) / num_tokens,
        perplexity=float((sums[2] / num_targets).exp()),
        original_perplexity=float((sums[3] / num_targets).exp()),
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
    for side, draw in todo:
        quality = judge_export(args, export_folder(args, side, draw), windows)
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
    # The peer's own search for weight scales changes nothing in this scheme's export but takes half as long again.
    add("--peer_args", default="--disable_opt_rtn", help="more options for the peer (--disable_opt_rtn)")
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
