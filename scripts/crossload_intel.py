"""Load an `fp8_static` export with Intel's AutoRound instead of this package, and compare logits.

Run it with the python of an environment that has transformers and auto-round, not this package. With --reference it
compares with logits of the same text saved by an earlier run (of either tool's export, or of the original model).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

TEXT = "The Atlantic Ocean is the second largest of the world's oceans, after the Pacific. It separates Europe and"


def load_logits(model_dir: Path, text: str, dtype: torch.dtype, package: str) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the float32 logits `[tokens, vocabulary]` of `text`, and how often each Linear-like class occurs.

    The classes show whether the export's own FP8 linear is in use or something else took its place. `package` is what
    transformers loads the format with.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers finds the package's quantiser by the config's quant_method; its absence shall be an error here.
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not installed in this environment")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, device_map="cpu").eval()
    counts: dict[str, int] = {}
    for module in model.modules():
        name = type(module).__name__
        if "Linear" in name:
            counts[name] = counts.get(name, 0) + 1
    with torch.no_grad():
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0].float()
    return logits, counts


def describe_difference(reference: torch.Tensor, logits: torch.Tensor) -> str:
    """Return KL(reference || logits) per token, top-1 agreement and the largest difference, as one line."""
    if reference.shape != logits.shape:
        raise ValueError(f"shape ({tuple(logits.shape)}) must equal the reference's ({tuple(reference.shape)})")
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    top1 = (log_p.argmax(-1) == log_q.argmax(-1)).float().mean()
    return f"KL {kl:.6f}, top-1 {top1:.4f}, largest difference {(reference - logits).abs().max():.5f}"


def main(argv: list[str] | None = None, package: str = "auto_round", description: str | None = __doc__) -> int:
    """Load, print statistics, and save or compare."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="the export (or the original model)")
    parser.add_argument("--text", default=TEXT, help="text to feed (a sentence about the Atlantic)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute type (float32)")
    parser.add_argument("--save", type=Path, help="write the logits to this .pt file")
    parser.add_argument("--reference", type=Path, help="compare with logits saved earlier")
    args = parser.parse_args(argv)
    try:
        logits, counts = load_logits(args.model_dir, args.text, getattr(torch, args.dtype), package)
        print(f"layers: {counts}")
        print(f"logits: shape {tuple(logits.shape)}, mean {logits.mean():.5f}, standard deviation {logits.std():.5f}")
        if not torch.isfinite(logits).all():
            raise ValueError("every logit must be finite")
        if args.save is not None:
            torch.save(logits, args.save)
        if args.reference is not None:
            print(describe_difference(torch.load(args.reference, weights_only=True), logits))
    except (OSError, ValueError, ModuleNotFoundError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
