"""Do the real consumers load our exports, and do we load theirs? Logits compared, each tool in its own environment.

Tiny random models are quantised here and loaded by Intel's auto-round (--intel_python) and by transformers with
compressed-tensors (--ct_python); what Intel's and llm-compressor (--llmcompressor_python) write of tiny models, and
exports given by --foreign, are loaded here and compared with `file_simulation.py`. Whatever is not as `expectation`
says is a failure, also a tensor that transformers reports as missing or unexpected, and a word of `auto-round inspect`
that differs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from file_simulation import largest_layer_error, run, simulate
from torch import nn

# The tiny models are those of the tests.
sys.path.append(str(Path(__file__).parents[1] / "test"))
ELSEWHERE = Path(__file__).with_name("crossload_elsewhere.py")

INTEL, CT = "Intel AutoRound", "transformers"
PACKAGES = {INTEL: "auto_round", CT: "compressed_tensors"}
DENSE, MOE = ("llama", "qwen2"), ("qwen3_moe", "mixtral", "deepseek_v3")

# Name -> format, further settings, consumer.
EXPORTS: dict[str, tuple[str, dict[str, str], str]] = {
    "fp8_static": ("fp8_static", {}, INTEL),
    "fp8_static tensor": ("fp8_static", {"scheme": "FP8_STATIC_TENSOR"}, INTEL),
    "llm_compressor": ("llm_compressor", {}, CT),
    "llm_compressor dynamic": ("llm_compressor", {"scheme": "FP8_DYNAMIC"}, CT),
    "fp8": ("fp8", {}, CT),
}

# How a consumer takes an export: as we do; experts from dequantised weights, with inputs that are not rounded; not.
SAME, PLAIN_EXPERTS, NOT = "same", "experts with plain inputs", "not"

# Right loaders differ by float32 rounding: 1e-6 of the largest logit here, of which this is 100 times. Rounding to
# bfloat16 would be 4e-3.
TIGHT = 1e-4
# That noise moves an input across a rounding step now and then, and with it a whole row: by these bounds on how many
# rows, and on all of them together (relative), it can be told from another loader.
MIN_TIGHT_ROWS = 0.75
MAX_RELATIVE = 0.1
# Intel's linears compute in bfloat16. That moves many inputs across a step, as it does in our model in bfloat16: how
# far off theirs may be, in units of how far ours is.
MAX_BF16_RATIO = 1.5
# Against a simulation of the file: a layer with the same input, relative; logits of deep models.
MAX_LAYER_ERROR = 1e-5
MAX_NOISE_RATIO = 1.5

ROWS, TOKENS = 24, 6
TEXT = "Rivers carve valleys over many years, and a loaf needs flour, water, salt and time."


def expectation(kind: str, export: str) -> tuple[str, str]:
    """How the consumer of an export takes it, and why if not as we do (auto-round 0.16.1, transformers 5.24).

    Where: transformers/integrations/compressed_tensors.py, line 55.
    """
    if export == "fp8":
        return NOT, "transformers reads block scales only under this label, and takes codes for values"
    if export.startswith("llm_compressor") and kind in MOE:
        return PLAIN_EXPERTS, "transformers dequantises experts into one tensor (CompressedTensorsDequantize)"
    return SAME, ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Logits against what they should be: the largest difference, over the largest logit in `relative_max`.

    Attributes:
        largest: Largest absolute difference.
        median: The same of the median row.
        tight_rows: Share of rows that differ by at most `TIGHT` times the largest logit.
        relative: Norm of the difference over the norm of the logits.
    """

    largest: float
    median: float
    tight_rows: float
    relative: float

    @property
    def is_rounding(self) -> bool:
        """Whether it is what rounding in float32 makes of equal models."""
        return self.tight_rows >= MIN_TIGHT_ROWS and self.relative <= MAX_RELATIVE

    def __str__(self) -> str:
        return f"max {self.largest:.1e}, median row {self.median:.1e}, {self.tight_rows:.0%} of rows tight"


def difference(wanted: torch.Tensor, found: torch.Tensor) -> Difference:
    """Compare logits `[rows, tokens, vocabulary]`; NaN counts as infinitely far."""
    if wanted.shape != found.shape:
        raise ValueError(f"shape {tuple(found.shape)} of the logits must be {tuple(wanted.shape)}")
    off = (wanted - found).nan_to_num(nan=torch.inf)
    rows = off.abs().flatten(1).amax(1)
    return Difference(
        largest=float(rows.max()),
        median=float(rows.median()),
        tight_rows=float((rows <= TIGHT * wanted.abs().max()).float().mean()),
        relative=float(off.norm() / wanted.norm()),
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the result.

    Attributes:
        kind: Of model.
        export: What was written.
        consumer: Who loaded it.
        found: What came of it.
        faults: What should have been otherwise.
    """

    kind: str
    export: str
    consumer: str
    found: str
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "FAILED" if self.faults else "ok"
        return f"{verdict:7}{self.kind} | {self.export} | {self.consumer} | {'; '.join([self.found, *self.faults])}"


def make_models(work_dir: Path) -> dict[str, Path]:
    """Save the tiny source models; return them by kind."""
    from tiny_models import save_tiny_model
    from tiny_moe_models import save_tiny_moe_model

    folders = {kind: work_dir / kind / "source" for kind in (*DENSE, *MOE)}
    for kind, folder in folders.items():
        (save_tiny_model if kind in DENSE else save_tiny_moe_model)(folder, kind)
    return folders


def token_ids(model_dir: Path) -> torch.Tensor:
    """Return random token ids `[ROWS, TOKENS]`: short rows, so that a moved rounding step stays among few tokens."""
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    return torch.randint(4, vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def load_here(export: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load an export with this package."""
    from autoround_fp8 import load_quantized_model

    model: nn.Module = load_quantized_model(export, dtype=dtype)
    return model


def write_export(source: Path, name: str, output_dir: Path) -> None:
    """Quantise a tiny model with this package."""
    from autoround_fp8 import AutoRound

    label, settings, _ = EXPORTS[name]
    AutoRound(str(source), dataset=token_ids(source), **settings).quantize_and_save(str(output_dir), format=label)


def run_elsewhere(python: str, *arguments: str | Path) -> None:
    """Run `crossload_elsewhere.py` with another python; RuntimeError with the end of its output if that fails."""
    done = subprocess.run([python, ELSEWHERE, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python} {ELSEWHERE.name} {arguments[0]} failed:\n{done.stderr[-2000:]}")


def judge(kind: str, name: str, folder: Path, report: Mapping[str, Any], ids: torch.Tensor) -> Outcome:
    """Say whether what a consumer made of an export is what `expectation` says."""
    _, _, consumer = EXPORTS[name]
    wanted, reason = expectation(kind, name)
    faults, found = [], report.get("error") or ""
    keys = {what: list(names) for what, names in report.get("keys", {}).items()}
    if wanted == PLAIN_EXPERTS:
        # The scales that it has no use for; all other tensors must be in use.
        unused = re.compile(r".*\.experts\.\d+\.\w+\.input_scale")
        keys["unexpected_keys"] = [key for key in keys.get("unexpected_keys", ()) if not unused.fullmatch(key)]
    told = [f"{what}: {len(names)}, first {names[0]}" for what, names in keys.items() if names]
    has_loaded = not found and not told
    if wanted == NOT:
        found = f"not loaded ({reason}): {found or '; '.join(told)}"
        if has_loaded:
            faults.append("it was expected not to load")
    elif not has_loaded:
        faults += [*([found] if found else []), *told]
        found = "not loaded"
    else:
        logits = torch.load(folder / "result.pt", weights_only=True)
        ours = run(load_here(folder / "export"), ids)
        target = ours if wanted == SAME else run(simulate(folder / "export", folder / "simulated")[0], ids)
        off = difference(target, logits["float32"])
        found = f"{off}{f' to {wanted} ({reason})' if reason else ''}"
        if not off.is_rounding:
            faults.append("the logits differ by more than rounding")
        as_is = difference(target, logits["as_is"]).relative
        if as_is > MAX_RELATIVE / 100:
            ratio = as_is / difference(ours, run(load_here(folder / "export", torch.bfloat16), ids)).relative
            found += f"; as it comes, in bfloat16: {ratio:.2f} of what bfloat16 does to ours"
            if not ratio <= MAX_BF16_RATIO:
                faults.append("that is more than bfloat16 explains")
    return Outcome(kind=kind, export=name, consumer=consumer, found=found, faults=faults)


def inspection_fault(export: Path, consumer: str, wanted: str) -> list[str]:
    """Return what `auto-round inspect` says wrongly of who can load an export."""
    from autoround_fp8.inspection.report import inspect_checkpoint

    reading = next(r for r in inspect_checkpoint(export).readings if r.consumer == consumer)
    if (wanted == SAME) == (reading.is_known and not reading.reasons):
        return []
    return [f"inspect says otherwise: {reading.reasons or 'it can load it'}"]


def check_ours(sources: Mapping[str, Path], work_dir: Path, pythons: Mapping[str, str]) -> Iterator[Outcome]:
    """Quantise every kind in every way, and have each export loaded by its consumer."""
    ids = token_ids(next(iter(sources.values())))
    torch.save(ids, work_dir / "ids.pt")
    for consumer, python in pythons.items():
        folders = {
            (kind, name): work_dir / kind / name.replace(" ", "_")
            for kind in sources
            for name, (_, _, reader) in EXPORTS.items()
            if reader == consumer
        }
        for (kind, name), folder in folders.items():
            write_export(sources[kind], name, folder / "export")
        jobs = [{"model_dir": str(f / "export"), "result": str(f / "result")} for f in folders.values()]
        (work_dir / "jobs.json").write_text(json.dumps(jobs))
        run_elsewhere(python, "load", work_dir / "jobs.json", work_dir / "ids.pt", PACKAGES[consumer])
        for (kind, name), folder in folders.items():
            outcome = judge(kind, name, folder, json.loads((folder / "result.json").read_text()), ids)
            outcome.faults.extend(inspection_fault(folder / "export", consumer, expectation(kind, name)[0]))
            yield outcome


def check_foreign(kind: str, export: Path, writer: str, work_dir: Path) -> Outcome:
    """Load another tool's export here and compare with a simulation of the file."""
    ids = token_ids(export)
    simulation, layers = simulate(export, work_dir / "simulated")
    model = load_here(export)
    layer_error = largest_layer_error(model, simulation, layers, ids)
    faults = [] if layer_error <= MAX_LAYER_ERROR else ["a layer computes something else"]
    wanted = run(simulation, ids)
    off = difference(wanted, run(model, ids))
    found = f"{off}; {len(layers)} FP8 layers, largest error {layer_error:.1e}"
    if not off.is_rounding:
        # In deep models so many roundings move that only another simulation, in float64, tells how far they lead.
        noise = difference(wanted, run(simulation.double(), ids))
        found += f"; relative {off.relative:.3f}, of a simulation in float64 {noise.relative:.3f}"
        if off.relative > MAX_NOISE_RATIO * noise.relative:
            faults.append("the logits differ by more than rounding")
    return Outcome(kind=kind, export=writer, consumer="autoround_fp8", found=found, faults=faults)


def check_theirs(
    sources: Mapping[str, Path], work_dir: Path, writers: Mapping[str, str], foreign: list[Path]
) -> Iterator[Outcome]:
    """Load here what other tools write of the dense models, and further exports."""
    texts = work_dir / "texts.json"
    texts.write_text(json.dumps([{"text": f"{i} {TEXT}"} for i in range(32)]))
    for writer, python in writers.items():
        for kind in DENSE:
            folder = work_dir / kind / writer
            run_elsewhere(python, writer, sources[kind], texts, folder)
            export = next(folder.rglob("config.json")).parent  # Intel's nests its files one folder deeper
            yield check_foreign(kind, export, f"written by {writer}", work_dir)
    for export in foreign:
        yield check_foreign(export.name, export, "given", work_dir)


def main(argv: list[str] | None = None) -> int:
    """Print one line per comparison; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", type=Path, required=True, help="new folder for models and exports")
    parser.add_argument("--intel_python", help="python with transformers and Intel's auto-round")
    parser.add_argument("--ct_python", help="python with transformers and compressed-tensors")
    parser.add_argument("--llmcompressor_python", help="python with llm-compressor")
    parser.add_argument("--foreign", type=Path, nargs="*", default=[], help="exports of dense models by other tools")
    args = parser.parse_args(argv)
    readers = {name: python for name, python in ((INTEL, args.intel_python), (CT, args.ct_python)) if python}
    tools = (("intel", args.intel_python), ("llmcompressor", args.llmcompressor_python))
    writers = {name: python for name, python in tools if python}
    if not readers and not writers and not args.foreign:
        parser.error("nothing to do: give --intel_python, --ct_python, --llmcompressor_python or --foreign")
    args.work_dir.mkdir(parents=True)
    sources = make_models(args.work_dir)
    failed = 0
    for outcomes in (
        check_ours(sources, args.work_dir, readers),
        check_theirs(sources, args.work_dir, writers, args.foreign),
    ):
        for outcome in outcomes:
            print(outcome, flush=True)
            failed += bool(outcome.faults)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
