"""The layout of an export, decided before work starts: which tensor goes into which shard at which byte.

Because every name, dtype and shape is known up front, headers, index and the space needed are known too, and the writer
can put a tensor in its place the moment it is ready. Read `writer.py` next.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoround_fp8.checkpoint.reader import DTYPES, SINGLE_FILE
from autoround_fp8.errors import CheckpointError, ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """One tensor of the export.

    Attributes:
        name: Name in the exported file.
        dtype: safetensors' name of the dtype.
        shape: Shape on disk.
        source: Source tensor to copy byte for byte, or None if the tensor is made during the run.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: its name, its complete header (length prefix included), and where each tensor starts and ends."""

    file: str
    header: bytes
    ranges: Mapping[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return max((end for _, end in self.ranges.values()), default=len(self.header))


@dataclass(frozen=True, kw_only=True)
class ExportLayout:
    """All shards of an export.

    Attributes:
        tensors: What is exported, by name.
        shards: The files, in order.
    """

    tensors: Mapping[str, PlannedTensor]
    shards: tuple[Shard, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes, headers included."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def is_sharded(self) -> bool:
        """Whether an index file belongs to the export."""
        return len(self.shards) > 1

    def index(self) -> dict[str, Any]:
        """The contents of `model.safetensors.index.json`."""
        weight_map = {name: shard.file for shard in self.shards for name in shard.ranges}
        total = sum(tensor.num_bytes for tensor in self.tensors.values())
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `5GB`, `500MB`, `2GiB` or a plain number.

    Raises:
        ConfigError: If it is no size or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"size {text!r} is not understood; write for instance 5GB or 500MB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"size {text!r} must be more than 0 bytes")
    return size


def plan_layout(
    tensors: Iterable[PlannedTensor], source_names: Iterable[str], consumed: Iterable[str], max_shard_bytes: int
) -> ExportLayout:
    """Lays all tensors out into shards, after checking that nothing of the source is forgotten.

    Args:
        tensors: Every tensor of the export.
        source_names: Every tensor of the source.
        consumed: Source tensors that are rewritten into others of the export, or used up by that.
        max_shard_bytes: Largest shard; a tensor that is larger alone gets a shard of its own.

    Raises:
        CheckpointError: If a source tensor is neither copied nor consumed, or a name is planned twice.
    """
    planned: dict[str, PlannedTensor] = {}
    for tensor in tensors:
        if tensor.name in planned:
            raise CheckpointError(f"tensor {tensor.name!r} would be written twice")
        planned[tensor.name] = tensor
    copied = {tensor.source for tensor in planned.values() if tensor.source is not None}
    forgotten = sorted(set(source_names) - copied - set(consumed))
    if forgotten:
        raise CheckpointError(f"{len(forgotten)} source tensors would be lost, first {forgotten[0]!r}")
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for name in sorted(planned, key=natural_key):
        if groups[-1] and filled + planned[name].num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(planned[name])
        filled += planned[name].num_bytes
    if len(groups) == 1:
        names = [SINGLE_FILE]
    else:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return ExportLayout(tensors=planned, shards=tuple(_lay_out(n, g) for n, g in zip(names, groups, strict=True)))


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _lay_out(file: str, tensors: list[PlannedTensor]) -> Shard:
    # Wide dtypes first, as safetensors' own writer does, so that every tensor starts at a multiple of its item size.
    tensors = sorted(tensors, key=lambda t: (-DTYPES[t.dtype].itemsize, natural_key(t.name)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    ranges = {}
    for tensor in tensors:
        start, end = header[tensor.name]["data_offsets"]
        ranges[tensor.name] = (len(raw) + start, len(raw) + end)
    return Shard(file=file, header=raw, ranges=ranges)
