"""Time of one mixture-of-experts block: growth with the number of experts, and calibration next to plain inference.

1. Quantises synthetic DeepSeek-V3 checkpoints (native block-FP8) with 8 to 64 experts and fits a line through the
   seconds per MoE block (the fastest block of several runs): reading, calibration, quantising and writing together.
2. Runs a mixture-of-experts layer of transformers on the same tokens, as it is (`grouped_mm`) and as calibration runs
   it (one Linear per expert, inputs observed), in alternation, and prints the ratio of the fastest runs.

    python scripts/bench_moe_time.py --work_dir /tmp/moe_time
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make_deepseek_v3 import main as make_deepseek_v3

from autoround_fp8.checkpoint.materialize import fill_module
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.model_source import open_model
from autoround_fp8.models.skeleton import build_skeleton
from autoround_fp8.nn.observers import AbsMaxObserver
from autoround_fp8.pipeline import export_run, prepare


def seconds_per_block(num_experts: int, args: argparse.Namespace) -> float:
    """Seconds of the fastest MoE block of one run."""
    source, export = args.work_dir / f"experts-{num_experts}", args.work_dir / "export"
    if not (source / "config.json").is_file():
        make_deepseek_v3([str(source), "--layers", str(args.blocks + 1), "--experts", str(num_experts)])
    shutil.rmtree(export, ignore_errors=True)
    config = QuantizeConfig(nsamples=args.nsamples, seqlen=args.seqlen, batch_size=args.nsamples)
    summary = export_run(prepare(config, open_model(source)), export)
    return min(block["seconds"] for block in summary.report["blocks"][1:])


def fit_line(xs: list[float], ys: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and R^2 of the least-squares line."""
    x, y = torch.tensor(xs, dtype=torch.float64), torch.tensor(ys, dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    intercept = y.mean() - slope * x.mean()
    residual = (y - slope * x - intercept).square().sum() / (y - y.mean()).square().sum()
    return float(slope), float(intercept), 1.0 - float(residual)


def fastest(functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Seconds of the fastest run of each function, alternated."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


@torch.no_grad()
def calibration_to_inference(args: argparse.Namespace) -> float:
    """Seconds of the observed per-expert forward over those of the library's fused one, on the same tokens."""
    source = open_model(args.work_dir / "experts-64")
    skeletons = [build_skeleton(source.config, source.tensors.entries, torch.float32) for _ in range(2)]
    name, cpu = "model.layers.1.mlp", torch.device("cpu")
    ours, fused = (skeleton.model.get_submodule(name) for skeleton in skeletons)
    with skeletons[0].linearized(name) as recipes:
        fill_module(ours, name, source.tensors, recipes, cpu)
        for parameter in ("gate.weight", "gate.e_score_correction_bias"):
            owner, leaf = fused.gate, parameter.removeprefix("gate.")
            value = ours.gate.get_parameter(leaf) if leaf == "weight" else ours.gate.get_buffer(leaf)
            (owner._parameters if leaf == "weight" else owner._buffers)[leaf] = value
        fused.shared_experts = ours.shared_experts
        experts = [ours.experts.get_submodule(str(e)) for e in range(fused.experts.down_proj.shape[0])]
        for leaf in ("gate_up_proj", "down_proj"):
            stacked = torch.stack([getattr(expert, leaf).weight for expert in experts])
            fused.experts._parameters[leaf] = torch.nn.Parameter(stacked, requires_grad=False)
        x = torch.randn(args.nsamples, args.seqlen, source.config.hidden_size)
        # Equal bit for bit on one thread; more of them cut an activation's vector loops at other places.
        torch.testing.assert_close(ours(x), fused(x), rtol=1e-4, atol=1e-5)
        observer = AbsMaxObserver()
        linears = {n: m for n, m in ours.named_modules() if isinstance(m, torch.nn.Linear)}
        with observer.attached(linears):
            times = fastest([lambda: ours(x), lambda: fused(x)], args.rounds)
    print(f"one MoE layer, {x.shape[0] * x.shape[1]} tokens: calibration {times[0]:.3f} s, library {times[1]:.3f} s")
    return times[0] / times[1]


def main(argv: list[str] | None = None) -> int:
    """Run both parts, print and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", type=Path, required=True, help="where checkpoints and results go")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64])
    parser.add_argument("--blocks", type=int, default=4, help="MoE blocks per checkpoint")
    parser.add_argument("--nsamples", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="runs of everything, alternated; the fastest count")
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    seconds = dict.fromkeys(args.experts, float("inf"))
    for _ in range(args.rounds):
        for num_experts in args.experts:
            seconds[num_experts] = min(seconds[num_experts], seconds_per_block(num_experts, args))
    for num_experts, fastest_block in seconds.items():
        print(f"{num_experts} experts: {fastest_block:.3f} s per block")
    slope, intercept, r_squared = fit_line([float(n) for n in seconds], list(seconds.values()))
    print(f"{1000 * slope:.1f} ms per expert, {intercept:.3f} s besides, R^2 {r_squared:.4f}")
    ratio = calibration_to_inference(args)
    print(f"calibration / library: {ratio:.2f}")
    result = {"seconds_per_block": seconds, "r_squared": r_squared, "calibration_to_library": ratio}
    (args.work_dir / "moe_time.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
