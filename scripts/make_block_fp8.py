"""Turn a 16-bit Hugging Face folder into a native block-FP8 one, in the form DeepSeek-V3 and Qwen3-FP8 ship.

Every 2-D `*.weight` of the decoder layers becomes F8_E4M3 codes plus a `*.weight_scale_inv` (a multiplier, one per
block); embeddings, output heads, routers and norms stay as they are. For tests and demonstrations: a native FP8 model
of any size without a download.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import pad

from autoround_fp8.checkpoint.layout import parse_size
from autoround_fp8.checkpoint.reader import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    TensorEntry,
    read_json,
)
from autoround_fp8.numerics.fp8 import FP8_DTYPE, FP8_MAX, SMALLEST_SCALE, quantize_fp8, round_up_to_bfloat16

SCALE_DTYPES = ("F32", "BF16", "F8_E8M0", "U8")
DECODER_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
# Beside the routers: what these releases keep in 16 bit, the odd matrices of multi-token prediction layers included.
NEVER_FP8 = re.compile(
    r"mlp\.gate\.|router|weights_proj|shared_expert_gate|block_sparse_moe\.gate\.|embed|lm_head|shared_head|eh_proj|norm|vis(ion|ual)"
)
NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")


def block_scales(weight: torch.Tensor, block: tuple[int, int], scale_dtype: str) -> torch.Tensor:
    """Scales of a weight, `amax / 448` of each block; never rounded down.

    Args:
        weight: Float32 `[N, K]`, finite.
        block: Rows and columns that share a scale; the last blocks may be partial.
        scale_dtype: "F32", or "BF16", or "F8_E8M0" and "U8" for powers of two (U8: exponent + 127).

    Returns:
        `[ceil(N / rows), ceil(K / columns)]` of the scale dtype.
    """
    (rows, columns), (n, k) = block, weight.shape
    padded = pad(weight.abs(), (0, -k % columns, 0, -n % rows))
    amax = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
    scales = (amax / FP8_MAX).clamp_min(SMALLEST_SCALE)
    if scale_dtype == "F32":
        return scales
    if scale_dtype == "BF16":
        return round_up_to_bfloat16(scales).bfloat16()
    mantissa, exponent = torch.frexp(scales)  # scale = mantissa * 2**exponent, 0.5 <= mantissa < 1
    codes = (exponent - (mantissa == 0.5).int() + 127).to(torch.uint8)
    return codes.view(DTYPES[scale_dtype])


def quantize_blocks(
    weight: torch.Tensor, block: tuple[int, int], scale_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a weight `[N, K]`, as float8_e4m3fn of the same shape, and its scales as of `block_scales`."""
    weight = weight.float()
    scales = block_scales(weight, block, scale_dtype)
    stored = scales.view(DTYPES["F8_E8M0"]) if scale_dtype == "U8" else scales
    values = stored.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return quantize_fp8(weight, values[: weight.shape[0], : weight.shape[1]]), scales


def make_block_fp8(
    source: Path,
    target: Path,
    *,
    block: tuple[int, int] = (128, 128),
    scale_dtype: str = "F32",
    max_shard_bytes: int = 5_000_000_000,
    skip: Sequence[str] = (),
) -> None:
    """Writes the native block-FP8 twin of a 16-bit folder; one shard is in memory at a time.

    Args:
        source: Folder with config.json and safetensors.
        target: Folder to write; must be new or empty.
        block: Rows and columns that share a scale.
        scale_dtype: One of `SCALE_DTYPES`.
        max_shard_bytes: Size above which the weights are split into several files.
        skip: Regular expressions, searched in tensor names, of further weights to keep in 16 bit.

    Raises:
        FileExistsError: If the target holds files.
        ValueError: If the block is not positive, the source is quantised already, has no weight to turn into FP8, or
            one with NaN or infinity.
    """
    if min(block) < 1:
        raise ValueError(f"block {block} must be two positive numbers")
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    config = read_json(source / "config.json")
    if config.get("quantization_config"):
        raise ValueError(f"{source} is quantised already")
    reader = CheckpointReader(source)
    chosen = {name for name, entry in reader.entries.items() if _is_chosen(entry, skip)}
    if not chosen:
        raise ValueError(f"{source} has no weight to turn into FP8")
    target.mkdir(parents=True, exist_ok=True)
    shards = _plan_shards(reader, chosen, block, scale_dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, names in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = reader.read(name)
            if name in chosen:
                if not bool(torch.isfinite(tensors[name]).all()):
                    raise ValueError(f"tensor {name!r} holds NaN or infinity")
                tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensors[name], block, scale_dtype)
        save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(target / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED) and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    kept = [n.removesuffix(".weight") for n, e in reader.entries.items() if n not in chosen and _is_matrix(e)]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        # The output head has no tensor of its own where it is tied to the embedding.
        "modules_to_not_convert": list(dict.fromkeys([*kept, "lm_head"])),
    }
    _write_json(target / "config.json", config)


def _is_matrix(entry: TensorEntry) -> bool:
    return entry.name.endswith(".weight") and len(entry.shape) == 2


def _is_chosen(entry: TensorEntry, skip: Sequence[str]) -> bool:
    return (
        _is_matrix(entry)
        and entry.dtype in ("BF16", "F16", "F32")
        and DECODER_LAYER.search(entry.name) is not None
        and NEVER_FP8.search(entry.name) is None
        and not any(re.search(pattern, entry.name) for pattern in skip)
    )


def _plan_shards(
    reader: CheckpointReader, chosen: set[str], block: tuple[int, int], scale_dtype: str, max_shard_bytes: int
) -> list[list[str]]:
    """Source tensors by output file, in order; a scale goes where its weight goes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in reader.entries.items():
        added = entry.num_bytes
        if name in chosen:
            num_scales = math.prod(-(-length // part) for length, part in zip(entry.shape, block, strict=True))
            added = math.prod(entry.shape) * FP8_DTYPE.itemsize + num_scales * DTYPES[scale_dtype].itemsize
        if shards[-1] and size + added > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += added
    return shards


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and write one folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="16-bit model folder")
    parser.add_argument("target", type=Path, help="folder to write; new or empty")
    parser.add_argument("--block", type=int, nargs=2, default=(128, 128), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--scale_dtype", choices=SCALE_DTYPES, default="F32")
    parser.add_argument("--max_shard_size", default="5GB", help="such as 5GB or 500MB")
    parser.add_argument("--skip", nargs="*", default=(), metavar="REGEX", help="further weights to keep in 16 bit")
    args = parser.parse_args(argv)
    try:
        make_block_fp8(
            args.source,
            args.target,
            block=tuple(args.block),
            scale_dtype=args.scale_dtype,
            max_shard_bytes=parse_size(args.max_shard_size),
            skip=args.skip,
        )
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{args.target}: written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
