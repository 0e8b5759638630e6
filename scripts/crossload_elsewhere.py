"""The part of `crossload.py` that other environments run: load exports, or write one, without this package.

It needs transformers and, by the command, Intel's auto-round, compressed-tensors or llm-compressor. What it found goes
into files that `crossload.py` reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import traceback
from pathlib import Path
from typing import Any

import torch

KEY_LISTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors")


def load_and_run(model_dir: Path, ids: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what transformers reported of loading, and the logits `[rows, tokens, vocabulary]`.

    `as_is` are the logits as the consumer computes them in a float32 model; `float32` those after its FP8 linears,
    which in Intel's package compute in bfloat16 by default, were told to use float32 as well.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, device_map="cpu", output_loading_info=True
    )
    model.eval()
    found = {name: sorted(str(key) for key in info.get(name) or ()) for name in KEY_LISTS}
    with torch.no_grad():
        as_is = model(input_ids=ids).logits.float()
        for module in model.modules():
            if type(module).__name__ == "WeightFP8ActFP8StaticQuantLinear":
                module.dtype = torch.float32
        float32 = model(input_ids=ids).logits.float()
    return {"keys": {name: keys for name, keys in found.items() if keys}}, {"as_is": as_is, "float32": float32}


def load_all(jobs: list[dict[str, str]], ids: torch.Tensor, package: str) -> None:
    """Load each job's `model_dir` and write `result`.json and, if it loads, `result`.pt."""
    # transformers finds the package by the config's quant_method; its absence must not pass for a refusal.
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not installed in this environment")
    for job in jobs:
        result = Path(job["result"])
        try:
            report, logits = load_and_run(Path(job["model_dir"]), ids)
            torch.save(logits, result.with_suffix(".pt"))
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError) as e:
            frame = traceback.extract_tb(e.__traceback__)[-1]
            place = f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
            report = {"error": f"{type(e).__name__} at {place}: {str(e).splitlines()[0][:300]}"}
        result.with_suffix(".json").write_text(json.dumps(report))


def write_with_intel(model: str, texts: Path, output_dir: str) -> None:
    """Let Intel's auto-round write a static FP8 export."""
    from auto_round import AutoRound

    settings = {"nsamples": 8, "seqlen": 32, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    AutoRound(model, scheme="FP8_STATIC", dataset=str(texts), **settings).quantize_and_save(output_dir, "auto_round")


def write_with_llmcompressor(model: str, texts: Path, output_dir: str) -> None:
    """Let llm-compressor write a static FP8 export (weights and inputs per tensor)."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer(row["text"], truncation=True, max_length=32) for row in json.loads(texts.read_text())]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    oneshot(
        model=loaded,
        dataset=Dataset.from_list([dict(row) for row in rows]),
        recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
        num_calibration_samples=8,
        max_seq_length=32,
    )
    loaded.save_pretrained(output_dir, save_compressed=True)
    tokenizer.save_pretrained(output_dir)


def main(argv: list[str] | None = None) -> None:
    """Run one command; `crossload.py` writes the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser("load", help="load exports")
    load.add_argument("jobs", type=Path, help="JSON list of {model_dir, result}")
    load.add_argument("ids", type=Path, help=".pt file with token ids [rows, tokens]")
    load.add_argument("package", help="what transformers loads the exports with")
    for name in ("intel", "llmcompressor"):
        write = commands.add_parser(name, help="write an export")
        write.add_argument("model")
        write.add_argument("texts", type=Path, help="JSON list of {text}")
        write.add_argument("output_dir")
    args = parser.parse_args(argv)
    if args.command == "load":
        load_all(json.loads(args.jobs.read_text()), torch.load(args.ids, weights_only=True), args.package)
    else:
        write = write_with_intel if args.command == "intel" else write_with_llmcompressor
        write(args.model, args.texts, args.output_dir)


if __name__ == "__main__":
    main()
