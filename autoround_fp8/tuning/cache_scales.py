"""From the ranges of keys and values to the scales of a KV cache."""

from __future__ import annotations

import torch

from autoround_fp8.nn.observers import InputRange
from autoround_fp8.numerics.fp8 import amax_to_scale
from autoround_fp8.records import CacheReport, CacheScales


def make_cache_scales(
    fqn: str, key: InputRange, value: InputRange, headroom: float = 1.0
) -> tuple[CacheScales, CacheReport]:
    """The scales of one attention's cache, and what they were made of.

    Args:
        fqn: Name of the attention module in the source checkpoint.
        key: What was seen of its keys as they are cached.
        value: What was seen of its values.
        headroom: Factor on both ranges.
    """
    k_scale, v_scale = (amax_to_scale(torch.tensor([headroom * seen.amax])) for seen in (key, value))
    report = CacheReport(
        fqn=fqn,
        k_amax=key.amax,
        v_amax=value.amax,
        k_scale=float(k_scale),
        v_scale=float(v_scale),
        k_peak_tokens=key.num_peak_tokens,
        v_peak_tokens=value.num_peak_tokens,
        num_tokens=key.num_tokens,
    )
    return CacheScales(fqn=fqn, k_scale=k_scale, v_scale=v_scale), report
