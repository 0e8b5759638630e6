"""Is any mode worse than rounding to nearest, and what do few calibration tokens cost? For any model, dense or MoE.

Quantises each model by every mode with the same calibration text, once more by the default from 2 x 128 tokens, and
compares all exports with the original on the same held-out documents. A mode fails if its KL is more than two paired
standard errors (over documents) above round to nearest.

    python scripts/bench_modes.py --model MODEL ... --work_dir /tmp/modes
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import demo_text
from bench_moe_quality import run_tool, write_texts
from paired_statistics import is_no_worse, paired_difference

BASE, DEFAULT, FEW = "rtn", "gptq", "few tokens"
MODES = {
    BASE: ["--algorithm", "rtn"],
    "mse": ["--algorithm", "mse"],
    DEFAULT: ["--algorithm", "gptq"],
    FEW: ["--algorithm", "gptq", "--nsamples", "2", "--seqlen", "128"],
}


def measure(source: Path, mode: str, texts: tuple[Path, Path], args: argparse.Namespace) -> list[float]:
    """Quantise one model by one mode; return the KL of each held-out document in nats per token."""
    folder = args.work_dir / source.name / mode.replace(" ", "-")
    report = folder.with_suffix(".json")
    shutil.rmtree(folder, ignore_errors=True)
    shared = ["--nsamples", args.nsamples, "--seqlen", args.seqlen, "--dataset", texts[0]]
    run_tool("-m", "autoround_fp8", "--model", source, "--output_dir", folder, *shared, *MODES[mode])
    tokens = ["--nsamples", args.held_out_windows, "--seqlen", args.seqlen, "--dataset", texts[1]]
    run_tool("-m", "autoround_fp8", "compare", source, folder, *tokens, "--json", report)
    shutil.rmtree(folder)
    kls: list[float] = json.loads(report.read_text(encoding="utf-8"))["document_kl"]
    return kls


def verdicts(kls: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | bool]]:
    """Per mode its mean KL, its difference to round to nearest with standard error, and whether it is no worse."""
    found: dict[str, dict[str, float | bool]] = {}
    for mode, values in kls.items():
        difference = paired_difference(range(len(values)), [values], [kls[BASE]])
        found[mode] = {
            "kl": sum(values) / len(values),
            "difference": difference.value,
            "standard_error": difference.standard_error,
            "is_no_worse": is_no_worse(difference),
        }
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write modes.json; exit code 1 if a mode that sees all the text is worse than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="model folders with a tokenizer")
    parser.add_argument("--work_dir", type=Path, required=True, help="where texts, exports and modes.json go")
    parser.add_argument("--data_dir", type=Path, help="gensim's test data; by default of the installed gensim")
    parser.add_argument("--nsamples", type=int, default=32, help="calibration samples (32)")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens per sample and held-out document (512)")
    parser.add_argument("--held_out_windows", type=int, default=12, help="held-out documents (12)")
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    texts = write_texts(args.work_dir, args.data_dir or demo_text.find_data_dir())
    result = {}
    for model in args.model:
        found = verdicts({mode: measure(model, mode, texts, args) for mode in MODES})
        for mode, row in found.items():
            text = f"{row['difference']:+.6f} ± {row['standard_error']:.6f}"
            word = "no worse" if row["is_no_worse"] else "WORSE"
            print(f"{model.name} {mode}: KL {row['kl']:.6f}, to {BASE} {text}: {word}", flush=True)
        few = found[FEW]["kl"] / found[DEFAULT]["kl"]
        print(f"{model.name} {FEW} / {DEFAULT}: {few:.3f}", flush=True)
        result[model.name] = {"modes": found, "few_tokens_ratio": few}
    (args.work_dir / "modes.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    failed = any(not row["is_no_worse"] for r in result.values() for m, row in r["modes"].items() if m != FEW)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
