"""Inspects a checkpoint and writes down what was found, for people and as JSON values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoround_fp8.formats.base import EXPERT_NAME
from autoround_fp8.inspection.checks import Finding, find_all
from autoround_fp8.inspection.consumers import Reading, readings
from autoround_fp8.inspection.contents import Contents, Matrix, Scale, read_contents
from autoround_fp8.numerics.granularity import PER_TENSOR

_SHOWN_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """Layers that are alike: the same last name, dtype and scales.

    Attributes:
        leaf: Last part of their names; with `experts.` in front for those of experts.
        scheme: How they are quantised, in words.
        dtype: safetensors' name of the dtype of their values.
        count: How many there are.
    """

    leaf: str
    scheme: str
    dtype: str
    count: int


@dataclass(frozen=True, kw_only=True)
class ScaleRange:
    """The smallest and the largest value of one kind of scales, and whose they are; `dtypes` are counts."""

    kind: str
    count: int
    low: float
    low_name: str
    high: float
    high_name: str
    dtypes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All about a checkpoint.

    Attributes:
        folder: Where it is.
        label: What its config.json calls it.
        layers: Its matrices by type.
        bytes_by_dtype: dtype -> bytes of all tensors of it.
        ranges: Of weight scales, of input scales and of KV-cache scales.
        findings: What is broken or odd.
        readings: Who can load it.
    """

    folder: Path
    label: str
    layers: tuple[LayerType, ...]
    bytes_by_dtype: dict[str, int]
    ranges: tuple[ScaleRange, ...]
    findings: tuple[Finding, ...]
    readings: tuple[Reading, ...]

    @property
    def is_broken(self) -> bool:
        """Whether anything found is a fault."""
        return any(finding.is_fault for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "folder": str(self.folder),
            "label": self.label,
            "is_broken": self.is_broken,
            "layers": [asdict(layer) for layer in self.layers],
            "bytes_by_dtype": self.bytes_by_dtype,
            "scale_ranges": [{k: _json_number(v) for k, v in asdict(r).items()} for r in self.ranges],
            "findings": [{**asdict(finding), "names": list(finding.names)} for finding in self.findings],
            "consumers": [
                {"name": r.consumer, "can_load": not r.reasons if r.is_known else None, "reasons": list(r.reasons)}
                for r in self.readings
            ],
        }


def inspect_checkpoint(folder: str | Path) -> Inspection:
    """Inspects a checkpoint folder, whoever made it; each tensor is read once, in pieces.

    Raises:
        CheckpointError: If there is nothing to read: no folder, no readable config.json, no tensors.
    """
    contents = read_contents(folder)
    findings = find_all(contents)
    sizes: Counter[str] = Counter()
    for entry in contents.entries.values():
        sizes[entry.dtype] += entry.num_bytes
    return Inspection(
        folder=contents.folder,
        label=contents.label,
        layers=_layer_types(contents),
        bytes_by_dtype=dict(sizes.most_common()),
        ranges=tuple(_scale_range(kind, scales) for kind, scales in _scales_by_kind(contents).items() if scales),
        findings=findings,
        readings=readings(contents, findings),
    )


def format_inspection(inspection: Inspection) -> str:
    """The report as lines of text."""
    total = sum(inspection.bytes_by_dtype.values())
    sizes = ", ".join(f"{dtype} {size / 1e6:.1f} MB" for dtype, size in inspection.bytes_by_dtype.items())
    lines = [f"{inspection.folder}: quantization {inspection.label}, {total / 1e6:.1f} MB ({sizes})", ""]
    lines += _table([("layers", "", "values", "scheme")] + [_row(layer) for layer in inspection.layers])
    if inspection.ranges:
        lines += [
            "",
            *_table([("scales", "", "smallest", "", "largest", "")] + [_range_row(r) for r in inspection.ranges]),
        ]
    lines.append("")
    for reading in inspection.readings:
        answer = "no" if reading.reasons else "yes" if reading.is_known else "not known"
        lines.append(f"{reading.consumer}: {answer}{': ' if reading.reasons else ''}{'; '.join(reading.reasons)}")
    lines.append("")
    for finding in inspection.findings:
        shown = ", ".join(finding.names[:_SHOWN_NAMES]) + (", ..." if len(finding.names) > _SHOWN_NAMES else "")
        lines.append(f"{'FAULT' if finding.is_fault else 'odd'}: {finding.what} ({len(finding.names)}): {shown}")
    lines.append("broken" if inspection.is_broken else "sound")
    return "\n".join(lines)


def _scales_by_kind(contents: Contents) -> dict[str, list[Scale]]:
    fp8 = [matrix for matrix in contents.matrices if matrix.is_fp8]
    return {
        "weight scales": [m.weight_scale for m in fp8 if m.weight_scale is not None],
        "input scales": [m.input_scale for m in fp8 if m.input_scale is not None],
        "KV-cache scales": list(contents.cache_scales),
    }


def _scale_range(kind: str, scales: Sequence[Scale]) -> ScaleRange:
    # NaN would be neither the smallest nor the largest; it is a fault of its own.
    numbers = [scale for scale in scales if not math.isnan(scale.low)] or list(scales)
    lowest, highest = min(numbers, key=lambda s: s.low), max(numbers, key=lambda s: s.high)
    return ScaleRange(
        kind=kind,
        count=len(scales),
        low=lowest.low,
        low_name=lowest.name,
        high=highest.high,
        high_name=highest.name,
        dtypes=dict(Counter(scale.dtype for scale in scales)),
    )


def _layer_types(contents: Contents) -> tuple[LayerType, ...]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for matrix in contents.matrices:
        leaf = f"experts.{matrix.leaf}" if EXPERT_NAME.fullmatch(matrix.name) else matrix.leaf
        counts[leaf, _scheme(matrix, contents), matrix.dtype] += 1
    return tuple(
        LayerType(leaf=leaf, scheme=scheme, dtype=dtype, count=count)
        for (leaf, scheme, dtype), count in sorted(counts.items())
    )


def _scheme(matrix: Matrix, contents: Contents) -> str:
    if not matrix.is_fp8:
        return "not quantised"
    scale = matrix.weight_scale
    if scale is None:
        return "FP8, no scale"
    says_one = contents.parsed is not None and contents.parsed.resolve(matrix.name).group_size == PER_TENSOR
    if math.prod(scale.shape) == math.prod(matrix.shape[:-2]) or (says_one and scale.low == scale.high):
        weight = "per matrix"
    elif contents.block_size is not None:
        weight = "per block of {} x {}".format(*contents.block_size)
    elif math.prod(scale.shape) == math.prod(matrix.shape[:-1]):
        weight = "per channel"
    else:
        weight = "of no known kind"
    return f"FP8, weight scale {weight}, inputs {'static' if matrix.input_scale is not None else 'dynamic'}"


def _row(layer: LayerType) -> tuple[str, ...]:
    return (layer.leaf, str(layer.count), layer.dtype, layer.scheme)


def _range_row(r: ScaleRange) -> tuple[str, ...]:
    return (f"{r.kind} ({', '.join(r.dtypes)})", str(r.count), f"{r.low:.3e}", r.low_name, f"{r.high:.3e}", r.high_name)


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _json_number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
