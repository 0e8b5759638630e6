"""Scales of an FP8 KV cache: their tensors, `X.k_scale` and `X.v_scale`, float32 `[1]`, of an attention `X`.

Older llm-compressor exports call them `X.k_proj.output_scale` and `X.v_proj.output_scale`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import PlannedTensor
from autoround_fp8.errors import CheckpointError
from autoround_fp8.records import CacheScales

CACHE_SCALE = re.compile(r"\.(k_scale|v_scale|k_proj\.output_scale|v_proj\.output_scale)$")

# How compressed-tensors describes such a cache in config.json.
KV_CACHE_SCHEME: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "dynamic": False,
    "strategy": "tensor",
}


def is_static_fp8_cache(scheme: Mapping[str, Any]) -> bool:
    """Whether a kv_cache_scheme of config.json means these scales."""
    return all(scheme.get(key, value) == value for key, value in KV_CACHE_SCHEME.items())


def planned_cache_scales(fqn: str) -> list[PlannedTensor]:
    """The tensors that the cache of an attention adds to an export."""
    return [PlannedTensor(name=f"{fqn}.{part}_scale", dtype="F32", shape=(1,)) for part in "kv"]


def encode_cache_scales(scales: CacheScales) -> dict[str, torch.Tensor]:
    """The same tensors, by name."""
    return {f"{scales.fqn}.k_scale": scales.k_scale, f"{scales.fqn}.v_scale": scales.v_scale}


def cache_scale_names(fqn: str) -> dict[str, tuple[str, str]]:
    """ "k" and "v" -> how a checkpoint may call that scale of an attention."""
    return {part: (f"{fqn}.{part}_scale", f"{fqn}.{part}_proj.output_scale") for part in "kv"}


def decode_cache_scales(fqn: str, tensors: Mapping[str, torch.Tensor]) -> CacheScales:
    """The scales of an attention among the tensors of a checkpoint, under either name.

    Raises:
        CheckpointError: If one is missing or is not a single positive number, naming it.
    """
    found = {}
    for part, names in cache_scale_names(fqn).items():
        name = next((name for name in names if name in tensors), None)
        if name is None:
            raise CheckpointError(f"tensor {names[0]!r} is missing, but config.json has a kv_cache_scheme")
        scale = tensors[name].float().reshape(-1)
        if scale.numel() != 1 or not 0 < float(scale) < float("inf"):
            raise CheckpointError(f"KV-cache scale {name!r} must be one positive number, got {scale[:4].tolist()}")
        found[part] = scale
    return CacheScales(fqn=fqn, k_scale=found["k"], v_scale=found["v"])
