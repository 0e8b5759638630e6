"""Peak memory and time of quantising synthetic DeepSeek-V3 checkpoints (native block-FP8) of several depths.

For each depth: makes the checkpoint, quantises it in a process of its own, and prints its peak resident memory above
that of a process that only imports the package and Numba's compiled loops (125 MB of it), next to the bound: three
blocks in bfloat16, the embeddings and 200 MB. `--limit_gb` sets an address-space limit (RLIMIT_AS) for the quantising
process.

    python scripts/bench_moe_memory.py --work_dir /tmp/dsv3 --layers 8 32
    python scripts/bench_moe_memory.py --work_dir /tmp/dsv3 --layers 54 --limit_gb 3.5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from make_deepseek_v3 import main as make_deepseek_v3

from autoround_fp8.checkpoint.reader import CheckpointReader

IMPORTS = (
    "import torch, autoround_fp8.pipeline, autoround_fp8.inference.load, transformers.models.auto.modeling_auto; "
    "from autoround_fp8.tuning.numba_loops import row_errors; "
    "row_errors(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))"
)


def run_measured(command: list[str], limit_bytes: int | None = None) -> int:
    """Run a command; return its peak resident memory in bytes.

    Raises:
        RuntimeError: If it fails, with the end of what it printed.
    """

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, preexec_fn=limit
    )
    assert process.stderr is not None
    errors = process.stderr.read()  # until the process closes it, at its end
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"exit code ({process.returncode}) must be 0:\n{errors.decode()[-2000:]}")
    return usage.ru_maxrss * 1024


def bytes_of(reader: CheckpointReader, marker: str) -> int:
    """Bytes in bfloat16 of all weights whose names have `marker` in them."""
    entries = [e for e in reader.entries.values() if marker in e.name and not e.name.endswith("_scale_inv")]
    return sum(2 * e.num_bytes if e.dtype == "F8_E4M3" else e.num_bytes for e in entries)


def measure(layers: int, args: argparse.Namespace, baseline: int) -> dict[str, Any]:
    """Quantise one depth and return the numbers."""
    source, export = args.work_dir / f"source-{layers}", args.work_dir / f"export-{layers}"
    if not (source / "config.json").is_file():
        make_deepseek_v3([str(source), "--layers", str(layers), *args.make_args.split()])
    shutil.rmtree(export, ignore_errors=True)
    command = [sys.executable, "-m", "autoround_fp8", "--model", str(source), "--output_dir", str(export)]
    command += ["--nsamples", str(args.nsamples), "--seqlen", str(args.seqlen), "--batch_size", str(args.nsamples)]
    peak = run_measured(command, int(args.limit_gb * 1e9) if args.limit_gb else None)
    report = json.loads((export / "quantization_report.json").read_text(encoding="utf-8"))
    seconds = [block["seconds"] for block in report["blocks"]]
    reader = CheckpointReader(source)
    bound = 3 * bytes_of(reader, f"model.layers.{layers - 1}.") + 200_000_000
    bound += bytes_of(reader, "embed_tokens") + bytes_of(reader, "lm_head")
    result = {
        "layers": layers,
        "source_bytes": reader.stored_bytes,
        "peak_above_imports_bytes": peak - baseline,
        "bound_bytes": bound,
        "seconds_per_moe_block": sum(seconds[1:]) / len(seconds[1:]),
        "seconds": report["totals"]["seconds"],
    }
    print(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in result.items()), flush=True)
    if not args.keep:
        shutil.rmtree(export)
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure every depth and compare the first with the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", type=Path, required=True, help="where checkpoints and results go")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--nsamples", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--limit_gb", type=float, help="address-space limit of the quantising process, 10^9 bytes")
    parser.add_argument("--make_args", default="", help="further options of make_deepseek_v3.py")
    parser.add_argument("--keep", action="store_true", help="keep the exports")
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    baseline = run_measured([sys.executable, "-c", IMPORTS])
    print(f"after imports {baseline:,} bytes")
    results = [measure(layers, args, baseline) for layers in args.layers]
    if len(results) > 1:
        ratio = results[-1]["peak_above_imports_bytes"] / results[0]["peak_above_imports_bytes"]
        print(f"peak of {args.layers[-1]} layers / {args.layers[0]} layers: {ratio:.3f}")
    (args.work_dir / "moe_memory.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
