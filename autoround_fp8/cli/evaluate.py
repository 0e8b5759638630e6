"""`auto-round eval` and `auto-round compare`: their options, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoround_fp8.errors import ConfigError

if TYPE_CHECKING:
    from autoround_fp8.evaluation.tasks import ResolvedTasks


def add_eval_parser(subparsers: Any) -> None:
    """Adds the `eval` command."""
    parser = subparsers.add_parser(
        "eval",
        help="score a checkpoint on lm-eval tasks",
        description="Score a checkpoint, quantised or plain, with lm-eval.",
    )
    parser.add_argument("model", metavar="DIR", help="checkpoint folder or hub id")
    group = parser.add_argument_group("tasks")
    group.add_argument("--tasks", "--task", required=True, help="names, patterns, YAML files or folders, comma list")
    group.add_argument("--include_path", help="folder with further task files")
    group.add_argument("--limit", type=float, help="documents per task, or a fraction below 1 (all)")
    group.add_argument("--num_fewshot", type=int, help="examples in the prompt (as the task says)")
    group = parser.add_argument_group("model")
    group.add_argument("--eval_bs", "--batch_size", default="8", help="sequences per forward, or auto on a GPU (8)")
    group.add_argument("--device", "--device_map", "--devices", default="auto", help="cpu, cuda, 0, auto (default)")
    group.add_argument("--kernel", default="auto", help="kernel of the FP8 layers (auto)")
    group.add_argument("--dtype", default="auto", help="dtype of all that is not FP8 (auto: the checkpoint's)")
    group.add_argument(
        "--trust_remote_code", action="store_true", help="run code from the model's folder (default: no)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output_path", metavar="FILE.json", help="write all results there")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and details")


def add_compare_parser(subparsers: Any) -> None:
    """Adds the `compare` command."""
    parser = subparsers.add_parser(
        "compare",
        help="measure how far a checkpoint is from its original",
        description="KL, top-1 agreement, perplexity, size, and errors of weights and blocks of DIR against REF.",
    )
    parser.add_argument("reference", metavar="REF", help="folder or hub id of the original")
    parser.add_argument("candidate", metavar="DIR", help="folder or hub id of the quantised checkpoint")
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", default="builtin", help="builtin, a file, a hub name, or several with options")
    group.add_argument("--nsamples", "--nsample", type=int, default=16, help="documents (16)")
    group.add_argument("--seqlen", "--seq_len", type=int, default=512, help="tokens per document (512)")
    group.add_argument("--seed", type=int, default=1234, help="which documents; not calibration's 42 (1234)")
    group.add_argument("--batch_size", "--bs", type=int, default=4, help="documents per forward (4)")
    group = parser.add_argument_group("model")
    group.add_argument("--device", "--device_map", "--devices", default="auto", help="cpu, cuda, 0, auto (default)")
    group.add_argument("--dtype", default="float32", help="dtype both models run in (float32)")
    group.add_argument("--kernel", default="reference", help="kernel of the FP8 layers (reference)")
    group.add_argument("--trust_remote_code", action="store_true", help="run code from the folders (default: no)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the report there")
    group.add_argument("--per_block", action="store_true", help="print every block, not only the worst three (no)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and details")


def run_eval(args: argparse.Namespace) -> int:
    """Scores one checkpoint; device, folder and tasks are checked before it is loaded. Returns the exit code."""
    from autoround_fp8.checkpoint.locate import locate_checkpoint
    from autoround_fp8.device import resolve_device
    from autoround_fp8.evaluation.tasks import resolve_tasks

    resolve_device(args.device)
    target = output_file(args.output_path, "output_path")
    folder = locate_checkpoint(args.model)
    tasks = resolve_tasks(args.tasks.split(","), args.include_path)
    results = evaluate_folder(folder, tasks, args)
    if target is not None:
        target.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


def evaluate_folder(
    folder: str | Path, tasks: ResolvedTasks | Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Runs tasks on a checkpoint folder and prints the table.

    Args:
        folder: The checkpoint.
        tasks: Resolved tasks, or their names.
        args: Options of `eval`; those of the other commands' evaluation part are a subset.

    Returns:
        lm-eval's results.
    """
    from autoround_fp8.evaluation.tasks import format_results, run_tasks

    options = vars(args)
    dtype = options.get("dtype", "auto")
    results = run_tasks(
        folder,
        None,
        tasks,
        include_path=args.include_path,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        batch_size=args.eval_bs,
        device=args.device,
        dtype=None if dtype == "auto" else dtype,
        kernel=options.get("kernel", "auto"),
        trust_remote_code=args.trust_remote_code,
    )
    print(format_results(results))
    return results


def run_compare(args: argparse.Namespace) -> int:
    """Compares two checkpoints. Returns the exit code."""
    from autoround_fp8.evaluation.compare import compare_checkpoints
    from autoround_fp8.evaluation.comparison_report import format_comparison

    target = output_file(args.json, "json")
    report = compare_checkpoints(
        args.reference,
        args.candidate,
        dataset=args.dataset,
        nsamples=args.nsamples,
        seqlen=args.seqlen,
        seed=args.seed,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        kernel=args.kernel,
        trust_remote_code=args.trust_remote_code,
    )
    print(format_comparison(report, per_block=args.per_block))
    if target is not None:
        target.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 0


def output_file(word: str | None, option: str) -> Path | None:
    """Where a report goes; refused before the work if it cannot be written there."""
    if word is None:
        return None
    path = Path(word).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        what = (
            "is a folder; name a file in it" if path.is_dir() else f"is in a folder that does not exist ({path.parent})"
        )
        raise ConfigError(f"{option} {word!r} {what}")
    return path
