"""`auto-round inspect`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autoround_fp8.cli.evaluate import output_file


def add_inspect_parser(subparsers: Any) -> None:
    """Adds the `inspect` command."""
    parser = subparsers.add_parser(
        "inspect",
        help="say what a checkpoint holds, whether it is sound, and who can load it",
        description="Read every tensor of a checkpoint, quantised or plain, and check it; exit code 1 if it is broken.",
    )
    parser.add_argument("model", metavar="DIR", help="checkpoint folder or hub id")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and details")


def run_inspect(args: argparse.Namespace) -> int:
    """Inspects one checkpoint. Returns the exit code."""
    from autoround_fp8.checkpoint.locate import locate_checkpoint
    from autoround_fp8.inspection.report import format_inspection, inspect_checkpoint

    target = output_file(args.json, "json")
    inspection = inspect_checkpoint(locate_checkpoint(args.model))
    print(format_inspection(inspection))
    if target is not None:
        target.write_text(json.dumps(inspection.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 1 if inspection.is_broken else 0
