"""How much the FP8 codes of a checkpoint differ from the original weights, from the two sets of files alone.

Read `compare.py` for how much the model's predictions differ.
"""

from __future__ import annotations

import logging
import math

import torch

from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.base import EXPERT_NAME
from autoround_fp8.models.families import EXPERT_PROJECTIONS

logger = logging.getLogger(__name__)

# Rows of a weight are dequantised in strips of about this many elements (64 MB in float32).
_STRIP_ELEMENTS = 2**24


def weight_sqnr(reference: TensorSource, candidate: TensorSource) -> tuple[dict[str, float], tuple[str, ...]]:
    """Signal to quantisation noise ratio of every FP8 weight, one tensor at a time; no model is needed.

    Args:
        reference: The original; its weights may be FP8 with scales, too.
        candidate: The quantised checkpoint: `X.weight` in FP8 with `X.weight_scale` `[out]`, `[out, 1]`, `[1]` or `[]`.

    Returns:
        Layer name -> SQNR in dB (inf where the weights are equal), and the layers that the reference lacks.

    Raises:
        CheckpointError: If a scale is missing or has another shape, or a weight's shape differs.
    """
    found: dict[str, float] = {}
    unmatched = []
    weights = [name.removesuffix(".weight") for name in reference.entries if name.endswith(".weight")]
    references = {_matched_name(fqn): fqn for fqn in weights}
    for name, entry in candidate.entries.items():
        if entry.dtype != "F8_E4M3" or not name.endswith(".weight"):
            continue
        fqn = name.removesuffix(".weight")
        other = references.get(_matched_name(fqn))
        if other is None:
            unmatched.append(fqn)
            continue
        shape = reference.entries[f"{other}.weight"].shape
        if shape != entry.shape:
            raise CheckpointError(f"tensor {name!r} is {list(entry.shape)}, in the reference {list(shape)}")
        found[fqn] = _sqnr_of_layer((reference, other), (candidate, fqn))
    if unmatched:
        logger.warning("%d FP8 layers have no weight in the reference, first %s", len(unmatched), unmatched[0])
    return found, tuple(unmatched)


def _matched_name(fqn: str) -> str:
    """By projection: a family's experts may be w1 in the one checkpoint and gate_proj in the other."""
    folder, _, leaf = fqn.rpartition(".")
    return f"{folder}.{EXPERT_PROJECTIONS[leaf]}" if leaf in EXPERT_PROJECTIONS and EXPERT_NAME.fullmatch(fqn) else fqn


def _sqnr_of_layer(*sides: tuple[TensorSource, str]) -> float:
    """SQNR in dB of a layer (reference, candidate), in float32 with sums in float64, a strip of rows at a time."""
    weights = [reader.read(f"{fqn}.weight") for reader, fqn in sides]
    scales = [_weight_scale(fqn, reader) for reader, fqn in sides]
    num_rows = weights[1].shape[0]
    signal = noise = 0.0
    for start in range(0, num_rows, length := max(1, _STRIP_ELEMENTS // max(1, weights[1][0].numel()))):
        rows = slice(start, start + length)
        original, quantized = (
            weight[rows].float() * (scale[rows] if len(scale) > 1 else scale)
            for weight, scale in zip(weights, scales, strict=True)
        )
        signal += float(original.square().sum(dtype=torch.float64))
        noise += float((original - quantized).square().sum(dtype=torch.float64))
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def _weight_scale(fqn: str, reader: TensorSource) -> torch.Tensor:
    """The scale of a layer as float32 `[out, 1]` or `[1, 1]`; 1 for a weight that is not FP8."""
    weight = reader.entries[f"{fqn}.weight"]
    if weight.dtype != "F8_E4M3":
        return torch.ones(1, 1)
    name = f"{fqn}.weight_scale"
    if name not in reader.entries:
        raise CheckpointError(f"tensor {name!r} is missing, but the weight is FP8")
    shape = reader.entries[name].shape
    if shape not in ((), (1,), (1, 1), weight.shape[:1], (*weight.shape[:1], 1)):
        raise CheckpointError(
            f"tensor {name!r} has shape {list(shape)}; expected one scale, or one per row of {list(weight.shape)}"
        )
    return reader.read(name).float().reshape(-1, 1)
