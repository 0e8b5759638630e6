"""Reads a checkpoint folder tensor by tensor: its matrices, their scales, and what in it is damaged.

No model is built. Read `checks.py` for what is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoround_fp8.checkpoint.reader import DTYPES, CheckpointReader, TensorEntry, read_json
from autoround_fp8.checkpoint.source_format import is_native_fp8
from autoround_fp8.checkpoint.writer import CONFIG_FILE
from autoround_fp8.errors import AutoRoundError, CheckpointError
from autoround_fp8.formats.base import ParsedQuantization
from autoround_fp8.formats.kv_cache import CACHE_SCALE
from autoround_fp8.formats.table import parse_quantization

# Label -> quant_method of config.json; the formats' own names where this package writes the format too.
NO_LABEL, NATIVE_FP8, OTHER_LABEL = "none", "fp8 (native, dynamic)", "other"

_SCALE_SUFFIX = re.compile(r"(_scale_inv|_scale)$")
_INPUT_SCALE = ".input_scale"
_NOT_LINEAR = re.compile(r"(^|\.)(\w*embed(ding)?s?(_\w+)?|wte|wpe|relative_attention_bias)$")
_LARGEST_CONFIG = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale tensor.

    Attributes:
        name: Its name.
        dtype: safetensors' name of its dtype.
        shape: Its shape.
        low: Its smallest value.
        high: Its largest value.
        is_sound: Whether all values are finite and positive.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    is_sound: bool


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight of two dimensions, or the experts of a layer in one tensor of three.

    Attributes:
        name: Checkpoint name, without `.weight`.
        tensor: Name of its tensor.
        dtype: safetensors' name of its dtype.
        shape: Its shape.
        weight_scale: Its scale, if it has one.
        input_scale: The scale of its inputs, if that is stored.
    """

    name: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    weight_scale: Scale | None
    input_scale: Scale | None

    @property
    def is_fp8(self) -> bool:
        """Whether its values are FP8 codes."""
        return self.dtype.startswith("F8")

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_linear(self) -> bool:
        """Whether it is one matrix that is no embedding, going by its name."""
        return len(self.shape) == 2 and self.tensor.endswith(".weight") and not _NOT_LINEAR.search(self.name)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that is in a checkpoint.

    Attributes:
        folder: Where it is.
        config: Its config.json.
        label: Name of the format that config.json calls it, or one of the labels of this module.
        parsed: What config.json says of every layer, if it is a format that this package reads.
        parse_error: Why it could not be understood, or "".
        entries: Every tensor.
        matrices: Those with weights.
        stray_scales: Scales whose matrix is not there or not FP8.
        cache_scales: Scales of the KV cache.
        file_faults: What is wrong with files and index.
        not_finite: Tensors that hold NaN, infinity or NaN codes.
    """

    folder: Path
    config: Mapping[str, Any]
    label: str
    parsed: ParsedQuantization | None
    parse_error: str
    entries: Mapping[str, TensorEntry]
    matrices: tuple[Matrix, ...]
    stray_scales: tuple[Scale, ...]
    cache_scales: tuple[Scale, ...]
    file_faults: tuple[str, ...]
    not_finite: tuple[str, ...]

    @property
    def block(self) -> Mapping[str, Any]:
        """The quantization_config, empty if there is none."""
        return _quantization_block(self.config)

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share a weight scale, if config.json says so."""
        size = self.block.get("weight_block_size")
        return (int(size[0]), int(size[1])) if isinstance(size, list) and len(size) == 2 else None


def read_contents(folder: str | Path) -> Contents:
    """Reads every tensor of a checkpoint once, one piece of at most 16 MB at a time.

    Raises:
        CheckpointError: If there is nothing to read: no folder, no readable config.json, no tensors.
    """
    path = Path(folder)
    faults: list[str] = []
    reader = CheckpointReader(path, faults)
    config = read_json(path / CONFIG_FILE, _LARGEST_CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG_FILE} is not a JSON object")
    label, parsed, parse_error = _label(config)
    not_finite, scales = [], {}
    for name, entry in reader.entries.items():
        try:
            if _is_scale(name, reader.entries):
                scales[name] = _read_scale(reader, entry)
            elif not _is_finite(reader, entry):
                not_finite.append(name)
        except CheckpointError as e:
            faults.append(str(e))
    matrices = tuple(_matrix(entry, scales) for entry in reader.entries.values() if _is_matrix(entry, scales))
    used = {scale.name for m in matrices if m.is_fp8 for scale in (m.weight_scale, m.input_scale) if scale is not None}
    return Contents(
        folder=path,
        config=config,
        label=label,
        parsed=parsed,
        parse_error=parse_error,
        entries=reader.entries,
        matrices=matrices,
        stray_scales=tuple(s for name, s in scales.items() if name not in used and not CACHE_SCALE.search(name)),
        cache_scales=tuple(scale for name, scale in scales.items() if CACHE_SCALE.search(name)),
        file_faults=tuple(faults),
        not_finite=tuple(not_finite),
    )


def _quantization_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text_config = config.get("text_config")
    nested = text_config.get("quantization_config") if isinstance(text_config, Mapping) else None
    block = config.get("quantization_config") or nested
    return block if isinstance(block, Mapping) else {}


def _label(config: Mapping[str, Any]) -> tuple[str, ParsedQuantization | None, str]:
    block = _quantization_block(config)
    if not block:
        return NO_LABEL, None, ""
    if is_native_fp8(config):
        return NATIVE_FP8, None, ""
    try:
        checkpoint_format, parsed = parse_quantization(block)
    except (AutoRoundError, AttributeError, TypeError, ValueError) as e:
        return OTHER_LABEL, None, str(e)
    return checkpoint_format.name, parsed, ""


def _is_scale(name: str, entries: Mapping[str, TensorEntry]) -> bool:
    """A parameter may be called `logit_scale`: certain names are scales, others if they lie beside a matrix."""
    if name.endswith((_INPUT_SCALE, ".weight_scale", "_scale_inv")) or CACHE_SCALE.search(name):
        return True
    owner = entries.get(_SCALE_SUFFIX.sub("", name))
    return owner is not None and owner.name != name and len(owner.shape) > 1


def _is_matrix(entry: TensorEntry, scales: Mapping[str, Scale]) -> bool:
    if entry.name in scales:
        return False
    return len(entry.shape) == 2 or entry.dtype.startswith("F8") or (len(entry.shape) == 3 and "experts" in entry.name)


def _matrix(entry: TensorEntry, scales: Mapping[str, Scale]) -> Matrix:
    name = entry.name.removesuffix(".weight")
    weight_scale = next((scales[s] for s in (entry.name + "_scale_inv", entry.name + "_scale") if s in scales), None)
    return Matrix(
        name=name,
        tensor=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        weight_scale=weight_scale,
        input_scale=scales.get(name + _INPUT_SCALE),
    )


def _read_scale(reader: CheckpointReader, entry: TensorEntry) -> Scale:
    tensor = reader.read(entry.name)
    if tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu)  # as old safetensors stored them
    values = tensor.float().flatten()
    low, high = (float(v) for v in torch.aminmax(values)) if len(values) else (float("nan"), float("nan"))
    return Scale(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        low=low,
        high=high,
        is_sound=bool((torch.isfinite(values) & (values > 0)).all()),
    )


def _is_finite(reader: CheckpointReader, entry: TensorEntry) -> bool:
    """Whether a tensor holds neither NaN nor infinity; an E4M3 code of all ones but the sign is NaN."""
    dtype = DTYPES[entry.dtype]
    if not dtype.is_floating_point:
        return True
    for chunk in reader.chunks(entry.name):
        piece = torch.frombuffer(chunk, dtype=dtype)
        if dtype == torch.float8_e4m3fn:
            if bool((piece.view(torch.uint8) & 0x7F == 0x7F).any()):
                return False
        elif not bool(torch.isfinite(piece if dtype.itemsize > 1 else piece.float()).all()):
            return False
    return True
