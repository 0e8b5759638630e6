"""The tensors of one FP8 linear, as all FP8 formats have them: codes, weight scale, with static inputs an input scale.

The formats differ in the shape that a weight scale per channel has on disk: `[out]` or `[out, 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import CheckpointError
from autoround_fp8.numerics.fp8 import FP8_DTYPE
from autoround_fp8.numerics.granularity import PER_CHANNEL
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme


def planned_fp8(
    fqn: str, shape: tuple[int, int], scheme: QuantizationScheme, channel_shape: tuple[int, ...]
) -> list[PlannedTensor]:
    """Weight, weight scale and input scale of one linear.

    Args:
        fqn: Its name.
        shape: `(out, in)`.
        scheme: How it is quantised.
        channel_shape: Shape of a weight scale per channel on disk.
    """
    scale_shape = channel_shape if scheme.group_size == PER_CHANNEL else (1,)
    planned = [
        PlannedTensor(name=f"{fqn}.weight", dtype="F8_E4M3", shape=shape),
        PlannedTensor(name=f"{fqn}.weight_scale", dtype="F32", shape=scale_shape),
    ]
    if not scheme.act_dynamic:
        planned.append(PlannedTensor(name=f"{fqn}.input_scale", dtype="F32", shape=(1,)))
    return planned


def encode_fp8(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """The tensors by name, scales in the shapes they have in memory."""
    tensors = {f"{linear.fqn}.weight": linear.weight, f"{linear.fqn}.weight_scale": linear.weight_scale}
    if linear.input_scale is not None:
        tensors[f"{linear.fqn}.input_scale"] = linear.input_scale
    return tensors


def decode_fp8_linear(fqn: str, scheme: QuantizationScheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedLinear:
    """Reads them back; scales may be `[]`, `[1]`, `[1, 1]`, `[out]`, `[out, 1]`, in float32 or 16 bit.

    Raises:
        CheckpointError: If a tensor is missing, not FP8, or a scale has another size or is not finite and positive, or
            there is an input scale where inputs get theirs on the fly.
    """
    parts = {}
    for part in ("weight", "weight_scale", *(() if scheme.act_dynamic else ("input_scale",))):
        if f"{fqn}.{part}" not in tensors:
            raise CheckpointError(f"tensor '{fqn}.{part}' is missing: config.json says this layer is quantised")
        parts[part] = tensors[f"{fqn}.{part}"]
    if scheme.act_dynamic and f"{fqn}.input_scale" in tensors:
        raise CheckpointError(f"tensor '{fqn}.input_scale' is there, but config.json says its inputs are dynamic")
    weight = parts["weight"]
    if weight.dtype != FP8_DTYPE:
        raise CheckpointError(f"tensor '{fqn}.weight' is {weight.dtype}; config.json says this layer is FP8")
    per_channel = scheme.group_size == PER_CHANNEL
    weight_scale = _checked_scale(f"{fqn}.weight_scale", parts["weight_scale"], weight.shape[0] if per_channel else 1)
    return QuantizedLinear(
        fqn=fqn,
        weight=weight,
        weight_scale=weight_scale.reshape(-1, 1) if per_channel else weight_scale,
        input_scale=_checked_scale(f"{fqn}.input_scale", parts["input_scale"], 1) if "input_scale" in parts else None,
    )


def _checked_scale(name: str, scale: torch.Tensor, count: int) -> torch.Tensor:
    if scale.numel() != count or not scale.is_floating_point() or scale.dtype.itemsize == 1:
        raise CheckpointError(f"tensor {name!r} is {scale.dtype} {list(scale.shape)}, expected {count} float values")
    values = scale.float().reshape(-1)
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise CheckpointError(f"tensor {name!r} holds a scale that is NaN, infinite, zero or negative")
    return values
