"""What a comparison of two checkpoints found, as JSON values and as a printed table.

Read `compare.py` for how it is measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoround_fp8.evaluation.block_error import BlockError, format_block_errors

_NUM_WORST_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """What `compare_checkpoints` found. A scored token is one that has a successor in its document.

    Attributes:
        reference: The original, as the user named it.
        candidate: The checkpoint compared with it.
        dtype: dtype both models ran in.
        kernel: Kernel asked for.
        num_documents: Samples.
        num_tokens: Scored tokens.
        data_sha256: Over all token ids: equal for equal data.
        kl_mean: KL(reference || candidate) per scored token, in nats.
        kl_stderr: Its standard error over documents; None for a single document.
        kl_max: KL of the worst token, in nats.
        document_kl: Mean KL per scored token of each document, in nats: two candidates can be compared pair by pair.
        top1_agreement: Share of scored tokens for which both models predict the same token.
        reference_perplexity: exp of the mean negative log-likelihood of the next token.
        candidate_perplexity: The same of the candidate.
        reference_bytes: Size of the tensor files.
        candidate_bytes: The same of the candidate.
        weight_sqnr_db: Layer -> SQNR of its dequantised weight in dB, for every FP8 layer; inf where it is exact.
        unmatched_layers: FP8 layers whose weight the reference does not have under the same name.
        block_errors: In which decoder blocks the candidate's hidden states depart from the reference's, in their order;
            empty if the two models' blocks differ in number or width.
        seconds: Duration of the whole comparison.
        peak_memory_bytes: Peak resident memory of this process.
    """

    reference: str
    candidate: str
    dtype: str
    kernel: str
    num_documents: int
    num_tokens: int
    data_sha256: str
    kl_mean: float
    kl_stderr: float | None
    kl_max: float
    document_kl: tuple[float, ...]
    top1_agreement: float
    reference_perplexity: float
    candidate_perplexity: float
    reference_bytes: int
    candidate_bytes: int
    weight_sqnr_db: Mapping[str, float]
    unmatched_layers: tuple[str, ...]
    block_errors: tuple[BlockError, ...]
    seconds: float
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; numbers that JSON cannot hold (an infinite SQNR or perplexity) become None."""
        fields = {**dataclasses.asdict(self), "weight_sqnr_db": dict(self.weight_sqnr_db)}
        fields["unmatched_layers"] = list(self.unmatched_layers)
        fields["document_kl"] = list(self.document_kl)
        fields["block_errors"] = [error.to_dict() for error in self.block_errors]
        return {key: _json_value(value) for key, value in fields.items()}


def format_comparison(report: ComparisonReport, *, per_block: bool = False) -> str:
    """A short table of a comparison, with the five worst weights and the three worst blocks, or all blocks."""
    kl = f"{report.kl_mean:.6f}" + (f" ± {report.kl_stderr:.6f}" if report.kl_stderr is not None else "")
    run = f"{report.dtype}, {report.kernel} kernel"
    sizes = (report.reference_bytes, report.candidate_bytes)
    rows = [
        ("reference", report.reference),
        ("candidate", report.candidate),
        ("scored tokens", f"{report.num_tokens} in {report.num_documents} documents, {run}"),
        ("KL per token", f"{kl} nats (worst {report.kl_max:.4f})"),
        ("same top-1", f"{100 * report.top1_agreement:.2f} %"),
        ("perplexity", f"{report.reference_perplexity:.4f} -> {report.candidate_perplexity:.4f}"),
        ("tensor files", f"{sizes[0] / 1e6:.1f} MB -> {sizes[1] / 1e6:.1f} MB ({100 * sizes[1] / sizes[0]:.1f} %)"),
        ("FP8 layers", str(len(report.weight_sqnr_db) + len(report.unmatched_layers))),
    ]
    if report.weight_sqnr_db:
        values = report.weight_sqnr_db.values()
        rows.append(("weight SQNR", f"mean {sum(values) / len(values):.2f} dB, lowest:"))
        worst = sorted(report.weight_sqnr_db.items(), key=lambda item: item[1])[:5]
        rows.extend(("", f"{value:6.2f} dB  {fqn}") for fqn, value in worst)
    if report.block_errors:
        heading = "all blocks" if per_block else "those that add most"
        rows.append(("blocks", f"{heading}; mean over tokens of |h - h_ref|² / |h_ref|²"))
        lines = format_block_errors(report.block_errors, None if per_block else _NUM_WORST_BLOCKS)
        rows.extend(("", line) for line in lines)
    rows.append(("took", f"{report.seconds:.1f} s, peak memory {report.peak_memory_bytes / 1e6:.0f} MB"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}  {text}" for label, text in rows)


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
