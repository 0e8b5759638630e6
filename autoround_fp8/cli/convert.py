"""`auto-round convert`: its options, and what it prints."""

from __future__ import annotations

import argparse
from typing import Any


def add_convert_parser(subparsers: Any) -> None:
    """Adds the `convert` command."""
    parser = subparsers.add_parser(
        "convert",
        help="write an FP8 checkpoint in another format, without calibration",
        description="Write an FP8 checkpoint in another format from its own codes and scales.",
    )
    parser.add_argument("model", metavar="DIR", help="checkpoint folder or hub id")
    parser.add_argument(
        "--format", "--formats", required=True, help="fp8_static, llm_compressor, fp8, fake; or several"
    )
    parser.add_argument("--output_dir", required=True, help="target folder")
    parser.add_argument("--max_shard_size", default="5GB", help="largest shard (5GB)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier export of this program in the target"
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code from the model's folder (default: no)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and details")


def run_convert(args: argparse.Namespace) -> int:
    """Converts one checkpoint. Returns the exit code."""
    from autoround_fp8.convert import convert_checkpoint

    conversion = convert_checkpoint(
        args.model,
        args.output_dir,
        format=args.format,
        max_shard_size=args.max_shard_size,
        overwrite=args.overwrite,
        trust_remote_code=args.trust_remote_code,
    )
    for name, folder in conversion.summary.folders.items():
        rounded = conversion.dequantized[name]
        exact = f"codes and scales of {len(conversion.layers) - len(rounded)} layers as they were"
        shown = ", ".join(rounded[:3]) + (", ..." if len(rounded) > 3 else "")
        note = f"; NOT exact: {len(rounded)} layers rounded to 16 bit ({shown})" if rounded else ""
        print(f"{folder}: {conversion.converted_from} -> {name}, {exact}{note}")
    return 0
