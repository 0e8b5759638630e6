"""From per-window KLs and process costs to the two Markdown tables of the README: accuracy, and cost.

Exports are named `peer` (Intel's auto-round, rounding to nearest) or by the mode of this package that made them.
Values come as one entry per calibration draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from measured_process import ProcessCost
from paired_statistics import Estimate, is_no_worse, paired_difference, paired_ratio

PEER = "peer"
ROUND_TO_NEAREST = "rtn"
NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class TextKls:
    """KL in nats per token on one held-out text: export -> draw -> window, and the document of every window."""

    documents: list[int]
    kls: dict[str, list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """One export on one text; a comparison is None if what it compares with was not measured, or is the row itself."""

    export: str
    kl: float
    to_peer: Estimate | None
    to_rtn: Estimate | None
    above_rtn: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the KL is at most that of our rounding to nearest plus two standard errors of the difference."""
        if self.above_rtn is None:
            return NOTHING
        return "pass" if is_no_worse(self.above_rtn) else "FAIL"


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """What one export cost: medians over the draws, and means of the ratios to the peer's run of the same draw."""

    export: str
    wall_s: float
    peak_rss_mib: float
    wall_to_peer: float | None
    peak_to_peer: float | None
    wall_to_tuned_peer: float | None


def accuracy_rows(text: TextKls) -> list[AccuracyRow]:
    """Compare every export on one text with the peer's and with our rounding to nearest."""
    rows = []
    for export, kls in text.kls.items():
        bases = {name: text.kls[name] for name in (PEER, ROUND_TO_NEAREST) if name in text.kls and name != export}
        ratios = {name: paired_ratio(text.documents, kls, base) for name, base in bases.items()}
        above = None
        if ROUND_TO_NEAREST in bases and export != PEER:
            above = paired_difference(text.documents, kls, bases[ROUND_TO_NEAREST])
        rows.append(
            AccuracyRow(
                export=export,
                kl=statistics.fmean(value for draw in kls for value in draw),
                to_peer=ratios.get(PEER),
                to_rtn=ratios.get(ROUND_TO_NEAREST),
                above_rtn=above,
            )
        )
    return rows


def cost_rows(costs: dict[str, list[ProcessCost]], tuned_peer_s: float | None) -> list[CostRow]:
    """Compare every export's cost with the peer's; `tuned_peer_s` are the seconds of the peer's gradient tuning."""
    rows = []
    for export, runs in costs.items():
        pairs = list(zip(runs, costs[PEER], strict=True)) if PEER in costs and export != PEER else []
        wall_s = statistics.median(run.wall_s for run in runs)
        rows.append(
            CostRow(
                export=export,
                wall_s=wall_s,
                peak_rss_mib=statistics.median(run.peak_rss_mib for run in runs),
                wall_to_peer=statistics.fmean(run.wall_s / peer.wall_s for run, peer in pairs) if pairs else None,
                peak_to_peer=(
                    statistics.fmean(run.peak_rss_mib / peer.peak_rss_mib for run, peer in pairs) if pairs else None
                ),
                wall_to_tuned_peer=None if tuned_peer_s is None else wall_s / tuned_peer_s,
            )
        )
    return rows


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_accuracy(sections: Sequence[tuple[str, str, list[AccuracyRow]]], labels: dict[str, str]) -> str:
    """Write the accuracy table; a section is a model, a text and its rows; `labels` describe the exports."""
    header = ("model", "held-out text", "export", "KL, nats per token", "/ Intel", "/ our rtn", "at most rtn + 2 s.e.")
    lines = []
    for model, text, rows in sections:
        for row in rows:
            cells = (f"{row.kl:.5f}", _estimate(row.to_peer), _estimate(row.to_rtn), row.verdict)
            lines.append((model, text, labels[row.export], *cells))
    return format_table(header, lines)


def format_costs(sections: Sequence[tuple[str, list[CostRow]]], labels: dict[str, str]) -> str:
    """Write the cost table; a section is a model and its rows."""
    header = ("model", "export", "wall time", "/ Intel", "/ Intel tuned", "peak memory", "/ Intel")
    lines = []
    for model, rows in sections:
        for row in rows:
            times = (f"{row.wall_s:.1f} s", _number(row.wall_to_peer), _number(row.wall_to_tuned_peer, digits=3))
            memory = (f"{row.peak_rss_mib:.0f} MiB", _number(row.peak_to_peer))
            lines.append((model, labels[row.export], *times, *memory))
    return format_table(header, lines)


def _estimate(estimate: Estimate | None) -> str:
    return NOTHING if estimate is None else f"{estimate.value:.3f} ± {estimate.standard_error:.3f}"


def _number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
