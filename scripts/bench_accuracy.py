"""Accuracy and cost of this package's modes on real models, next to Intel's auto-round: the tables of the README.

For every calibration draw (Wikipedia articles) each mode quantises the model in a process of its own, with Intel's
rounding to nearest (`--scheme FP8_STATIC --iters 0`) before them if `--peer_python` is given. All exports are then
judged by export_judge.py on the same windows of texts that are not the calibration's: Wikipedia articles of other
topics, news, and on request Python code. KLs are kept window by window, so that differences have a standard error over
documents.

    python scripts/bench_accuracy.py --model MODEL --work_dir /tmp/accuracy --peer_python INTEL_ENV/bin/python
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_text
from accuracy_tables import PEER, AccuracyRow, CostRow, TextKls, accuracy_rows, cost_rows, format_accuracy, format_costs
from measured_process import ProcessCost, run_measured
from passages import SPARE_TOKENS, Window, cut_windows, join_articles, load_tokenizer, write_calibration_files
from peer_tuning_time import TuningTime, time_first_blocks
from quantise_commands import PEER_ROUNDING_ARGS, Workload, our_command, peer_command

# Mode -> options of this package's command line.
MODES = {
    "rtn": "--algorithm rtn",
    "mse": "--algorithm mse",
    "gptq": "--algorithm gptq",
    "signround": "--algorithm mse --iters 60 --batch_size 4",
}
DEFAULT_MODES = ("rtn", "mse", "gptq")
PEER_TUNING_ARGS = "--iters 200"
TEXTS = ("wikipedia", "news", "python")
DEFAULT_TEXTS = ("wikipedia", "news")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model with its own folder, calibration files (one per draw) and held-out windows by text."""

    name: str
    folder: Path
    work: Workload
    datasets: list[Path]
    windows: dict[str, list[Window]]


# --- texts -------------------------------------------------------------------------------------------------------


def prepare_subject(model: str, args: argparse.Namespace) -> Subject:
    """Write a model's calibration files and cut its held-out windows."""
    name = Path(model).resolve().name
    folder = args.work_dir / name
    tokenizer = load_tokenizer(model)
    data_dir = args.data_dir or demo_text.find_data_dir()
    draws, other_topics = demo_text.split_articles(demo_text.read_wikipedia(data_dir), args.draws)
    held_out = {
        "wikipedia": lambda: other_topics,
        # News articles are shorter than a window.
        "news": lambda: join_articles(demo_text.read_news(data_dir), tokenizer, args.seqlen + SPARE_TOKENS),
        "python": demo_text.read_python_source,
    }
    return Subject(
        name=name,
        folder=folder,
        work=Workload(model=model, nsamples=args.nsamples, seqlen=args.seqlen),
        datasets=write_calibration_files(draws, tokenizer, folder / "text", args.seqlen, args.nsamples),
        windows={
            text: cut_windows(held_out[text](), tokenizer, args.seqlen, args.held_out_windows) for text in args.texts
        },
    )


# --- whole processes ---------------------------------------------------------------------------------------------


def export_folder(subject: Subject, export: str, draw: int) -> Path:
    """Return where an export of one calibration draw goes."""
    return subject.folder / f"draw-{draw}" / export


def build_command(subject: Subject, export: str, draw: int, args: argparse.Namespace) -> list[str]:
    """Return the command line that makes an export."""
    dataset, folder = subject.datasets[draw], export_folder(subject, export, draw)
    if export == PEER:
        return peer_command(args.peer_python, subject.work, dataset, folder, f"--iters 0 {args.peer_args}")
    return our_command(args.our_python, subject.work, dataset, folder, args.exports[export])


def obtain_export(subject: Subject, export: str, draw: int, args: argparse.Namespace) -> ProcessCost:
    """Make an export and return its cost; with `--reuse`, an earlier one of the same settings is kept with its cost."""
    folder = export_folder(subject, export, draw)
    record_path = folder.parent / f"{export}.json"
    command = build_command(subject, export, draw, args)
    text_hash = hashlib.sha256(subject.datasets[draw].read_bytes()).hexdigest()
    settings = {"command": command, "calibration_sha256": text_hash}
    if args.reuse and record_path.is_file():
        record = json.loads(record_path.read_text(encoding="utf-8"))
        if record["settings"] == settings and any(folder.rglob("*.safetensors")):
            cost = ProcessCost(**record["cost"])
            print(f"{subject.name} draw {draw} {export}: reused, had taken {cost}", flush=True)
            return cost
    record_path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    cost = run_measured(command, folder.parent / f"{export}.log")
    write_json(record_path, {"settings": settings, "cost": asdict(cost)})
    print(f"{subject.name} draw {draw} {export}: {cost}", flush=True)
    return cost


def obtain_exports(subject: Subject, args: argparse.Namespace) -> dict[str, list[ProcessCost]]:
    """Make every export of every draw, the peer and our modes in turn, and return the costs by export."""
    costs: dict[str, list[ProcessCost]] = {export: [] for export in args.exports}
    for draw in range(args.draws):
        for export in args.exports:
            costs[export].append(obtain_export(subject, export, draw, args))
    return costs


def time_tuned_peer(subject: Subject, args: argparse.Namespace) -> TuningTime | None:
    """Time the first blocks of the peer's gradient tuning on the first draw, if asked for."""
    if not args.peer_tuned_blocks:
        return None
    # The process is stopped before it writes anything there.
    folder = subject.folder / "peer-tuned"
    command = peer_command(args.peer_python, subject.work, subject.datasets[0], folder, PEER_TUNING_ARGS)
    tuning = time_first_blocks(command, subject.folder / "peer-tuned.log", args.peer_tuned_blocks)
    seconds = ", ".join(f"{s:.1f}" for s in tuning.block_s)
    print(
        f"{subject.name} peer tuned: {tuning.setup_s:.1f} s before the first block, then {seconds} s per block; "
        f"all {tuning.num_blocks} blocks would take {tuning.whole_s:.0f} s",
        flush=True,
    )
    return tuning


# --- the judge and the report ------------------------------------------------------------------------------------


def judge_subject(subject: Subject, args: argparse.Namespace) -> dict[str, TextKls]:
    """Judge every export of a model on every text."""
    # Only now: what this process holds counts as the peak memory of the processes that it starts.
    from export_judge import judge_exports

    todo = [(export, draw) for draw in range(args.draws) for export in args.exports]
    folders = [export_folder(subject, export, draw) for export, draw in todo]
    ids = [window.ids for windows in subject.windows.values() for window in windows]
    texts = {
        text: TextKls(documents=[window.document for window in windows], kls={export: [] for export in args.exports})
        for text, windows in subject.windows.items()
    }
    judged = judge_exports(subject.work.model, folders, ids)
    for (export, draw), (_, num_quantised, scores) in zip(todo, judged, strict=True):
        rest = iter(scores)
        for kls in texts.values():
            kls.kls[export].append([next(rest).kl for _ in kls.documents])
        means = ", ".join(f"{text} {sum(kls.kls[export][-1]) / len(kls.documents):.5f}" for text, kls in texts.items())
        print(f"{subject.name} draw {draw} {export}: {num_quantised} layers, KL on {means}", flush=True)
    return texts


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """Everything that was measured on one model."""

    model: str
    costs: dict[str, list[ProcessCost]]
    tuning: TuningTime | None
    texts: dict[str, TextKls]

    def accuracy(self) -> dict[str, list[AccuracyRow]]:
        """Return the rows of the accuracy table by text."""
        return {text: accuracy_rows(kls) for text, kls in self.texts.items()}

    def cost(self) -> list[CostRow]:
        """Return the rows of the cost table."""
        return cost_rows(self.costs, None if self.tuning is None else self.tuning.whole_s)

    def to_dict(self) -> dict[str, Any]:
        """Return what goes into accuracy.json."""
        tuning = None if self.tuning is None else asdict(self.tuning) | {"whole_s": self.tuning.whole_s}
        return {
            "runs": {export: [asdict(cost) for cost in runs] for export, runs in self.costs.items()},
            "peer_tuned": tuning,
            "texts": {text: asdict(kls) for text, kls in self.texts.items()},
            "accuracy": {
                text: [asdict(row) | {"verdict": row.verdict} for row in rows] for text, rows in self.accuracy().items()
            },
            "cost": [asdict(row) for row in self.cost()],
        }


def write_results(results: list[ModelResult], args: argparse.Namespace) -> None:
    """Write accuracy.json for the models judged so far."""
    settings = {name: value if isinstance(value, dict) else str(value) for name, value in vars(args).items()}
    models = {result.model: result.to_dict() for result in results}
    write_json(
        args.work_dir / "accuracy.json",
        {"settings": settings, "num_cpus": len(os.sched_getaffinity(0)), "models": models},
    )


def print_tables(results: list[ModelResult], args: argparse.Namespace) -> None:
    """Print both tables in Markdown, with what they were measured on."""
    labels = {
        export: "Intel auto-round, RTN" if export == PEER else f"{export}: `{options}`"
        for export, options in args.exports.items()
    }
    accuracy = [(r.model, text, rows) for r in results for text, rows in r.accuracy().items()]
    print(
        f"\nCalibration: {args.draws} draws of {args.nsamples} x {args.seqlen} tokens of Wikipedia. KL to the original "
        f"in float32 on {args.held_out_windows} x {args.seqlen} held-out tokens per text. Ratios are means over draws, "
        "± their paired standard error over documents.\n"
    )
    print(format_accuracy(accuracy, labels))
    print("\nWhole processes, medians over the draws; ratios are means over the draws.\n")
    print(format_costs([(r.model, r.cost()) for r in results], labels))
    for r in results:
        if r.tuning is not None:
            print(
                f"\nIntel tuned, {r.model}: `{PEER_TUNING_ARGS}`, {len(r.tuning.block_s)} of {r.tuning.num_blocks} "
                f"blocks timed, {r.tuning.whole_s:.0f} s extrapolated for all."
            )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# --- the command line --------------------------------------------------------------------------------------------


def choose_exports(args: argparse.Namespace, modes: dict[str, str]) -> dict[str, str]:
    """Return name -> options of every export in the order they are made; the peer comes first.

    Raises:
        ValueError: if a mode is unknown, written without its options, or has the peer's name.
    """
    table = dict(modes)
    chosen = list(args.modes)
    for word in args.mode:
        name, equals, options = word.partition("=")
        if not equals or not name or name == PEER or "/" in name:
            raise ValueError(f'--mode {word!r} must be NAME="--options", with a name that is not {PEER!r}')
        table[name] = options
        chosen.append(name)
    unknown = [name for name in chosen if name not in table]
    if unknown:
        raise ValueError(f"--modes {unknown[0]!r} must be one of {', '.join(table)}, or come with --mode")
    peer = {PEER: args.peer_args} if args.peer_python else {}
    return peer | {name: table[name] for name in chosen}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", nargs="+", required=True, help="bfloat16 model folders, e.g. written by make_demo_model.py")
    add("--work_dir", type=Path, required=True, help="folder for texts, exports, logs and accuracy.json")
    add("--modes", nargs="+", default=list(DEFAULT_MODES), help=f"of {', '.join(MODES)} ({' '.join(DEFAULT_MODES)})")
    add("--mode", action="append", default=[], metavar='NAME="--options"', help="one more mode; may be repeated")
    add("--texts", nargs="+", choices=TEXTS, default=list(DEFAULT_TEXTS), help=f"held out ({' '.join(DEFAULT_TEXTS)})")
    add("--draws", type=int, default=3, help="number of calibration draws (3)")
    add("--nsamples", type=int, default=32, help="calibration texts per draw (32)")
    add("--seqlen", type=int, default=512, help="tokens per text and per window (512)")
    add("--held_out_windows", type=int, default=12, help="windows of --seqlen tokens per held-out text (12)")
    add("--data_dir", type=Path, help="gensim's test_data folder; default: found in this environment")
    add("--reuse", action="store_true", help="keep exports that an earlier call made with the same settings")
    add("--our_python", default=sys.executable, help="python of an environment with autoround_fp8 (this one)")
    add("--peer_python", help="python of an environment with Intel's auto-round; without it only our modes run")
    add("--peer_args", default=PEER_ROUNDING_ARGS, help=f"more options of its rounding ({PEER_ROUNDING_ARGS})")
    add("--peer_tuned_blocks", type=int, default=0, help="blocks of its default tuning to time and extrapolate (0)")
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read and check the command line; `exports` holds the options of every export by its name."""
    parser = build_parser()
    args = parser.parse_args(argv)
    # With one window there is no standard error.
    least = {"draws": 1, "nsamples": 1, "seqlen": 1, "held_out_windows": 2, "peer_tuned_blocks": 0}
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            parser.error(f"--{name} ({getattr(args, name)}) must be at least {minimum}")
    if args.peer_tuned_blocks and not args.peer_python:
        parser.error("--peer_tuned_blocks needs --peer_python")
    names = [Path(model).resolve().name for model in args.model]
    if len(set(names)) < len(names):
        parser.error(f"--model folders must differ in their last part: {' '.join(names)}")
    try:
        args.exports = choose_exports(args, MODES)
    except ValueError as e:
        parser.error(str(e))
    return args


def main(argv: list[str] | None = None) -> int:
    """Make all exports of all models, then judge them; write accuracy.json and print the tables."""
    args = parse_arguments(argv)
    results: list[ModelResult] = []
    try:
        subjects = [prepare_subject(model, args) for model in args.model]
        measured = [(subject, obtain_exports(subject, args), time_tuned_peer(subject, args)) for subject in subjects]
        for subject, costs, tuning in measured:
            texts = judge_subject(subject, args)
            results.append(ModelResult(model=subject.name, costs=costs, tuning=tuning, texts=texts))
            write_results(results, args)
    except (OSError, RuntimeError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print_tables(results, args)
    print(f"\nwritten: {args.work_dir / 'accuracy.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
