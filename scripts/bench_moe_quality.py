"""How much FP8 costs an upcycled Mixtral, next to the dense model it was made from: KL on held-out Wikipedia text.

Makes a Mixtral from a dense Llama-style model and its native block-FP8 twin (hidden 576 = 4.5 blocks), quantises all
three with the same calibration text, and compares each export with its own original: the twin's is the twin itself,
dequantised. Prints the KL of each, and both ratios to the one they are measured against.

    python scripts/bench_moe_quality.py --model demo/SmolLM2-135M-Instruct --work_dir /tmp/moe
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo_text
from make_block_fp8 import make_block_fp8

SCRIPTS = Path(__file__).parent


def run_tool(*arguments: object) -> None:
    """Run a Python command; its output is shown only if it fails.

    Raises:
        RuntimeError: If it fails, with the end of what it printed.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"exit code ({done.returncode}) must be 0: {' '.join(command)}\n{done.stderr[-2000:]}")


def write_texts(work_dir: Path, data_dir: Path) -> tuple[Path, Path]:
    """Write the calibration and the held-out articles; return both files."""
    draws, held_out = demo_text.split_articles(demo_text.read_wikipedia(data_dir), 1)
    files = work_dir / "calibration.jsonl", work_dir / "held_out.jsonl"
    for path, texts in zip(files, (draws[0], held_out), strict=True):
        demo_text.write_jsonl(path, texts)
    return files


def measure(source: Path, texts: tuple[Path, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Quantise one model and compare it with itself; return the comparison's report."""
    export, report = args.work_dir / f"{source.name}-fp8_static", args.work_dir / f"{source.name}.json"
    shutil.rmtree(export, ignore_errors=True)
    shared = ["--nsamples", args.nsamples, "--seqlen", args.seqlen, "--dataset", texts[0]]
    run_tool("-m", "autoround_fp8", "--model", source, "--output_dir", export, *shared, *args.our_args.split())
    tokens = ["--nsamples", args.held_out_windows, "--seqlen", args.seqlen, "--dataset", texts[1]]
    run_tool("-m", "autoround_fp8", "compare", source, export, *tokens, "--json", report)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    print(f"{source.name}: KL {found['kl_mean']:.5f}, top-1 {found['top1_agreement']:.4f}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """Make the models that are missing, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="dense Llama-style bf16 folder")
    parser.add_argument("--work_dir", type=Path, required=True, help="where models, exports and results go")
    parser.add_argument("--data_dir", type=Path, help="gensim's test data; by default of the installed gensim")
    parser.add_argument("--nsamples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--held_out_windows", type=int, default=8, help="samples of --seqlen tokens to compare on")
    parser.add_argument("--our_args", default="", help="further options of the quantising runs")
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    texts = write_texts(args.work_dir, args.data_dir or demo_text.find_data_dir())
    mixture, twin = args.work_dir / "upcycled", args.work_dir / "upcycled-block_fp8"
    if not (mixture / "config.json").is_file():
        run_tool(SCRIPTS / "make_upcycled_moe.py", args.model, mixture)
    if not (twin / "config.json").is_file():
        make_block_fp8(mixture, twin)
    kl = {
        name: measure(path, texts, args)["kl_mean"]
        for name, path in zip(("dense", "mixture", "twin"), (args.model, mixture, twin), strict=True)
    }
    result = {"kl": kl, "mixture_to_dense": kl["mixture"] / kl["dense"], "twin_to_mixture": kl["twin"] / kl["mixture"]}
    print(f"mixture / dense {result['mixture_to_dense']:.3f}, twin / mixture {result['twin_to_mixture']:.3f}")
    (args.work_dir / "moe_quality.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
