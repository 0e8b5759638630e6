"""Scales of a KV cache: amax / 448 with room, rounded up to bfloat16."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.nn.observers import InputRange
from autoround_fp8.tuning.cache_scales import make_cache_scales

KEY = InputRange(amax=448.0, num_tokens=7, largest=[448.0, 224.0, 223.0])
VALUE = InputRange(amax=3.0, num_tokens=7, largest=[3.0, 1.0])


@pytest.mark.parametrize(("headroom", "k", "v"), [(1.0, 448.0, 3.0), (2.0, 896.0, 6.0), (4.0, 1792.0, 12.0)])
def test_headroom_widens_both_ranges(headroom: float, k: float, v: float) -> None:
    scales, report = make_cache_scales("m.attn", KEY, VALUE, headroom)
    assert float(scales.k_scale) == k / 448
    assert v / 448 <= float(scales.v_scale) <= v / 448 * (1 + 2**-7)
    assert torch.equal(scales.v_scale, scales.v_scale.bfloat16().float())
    assert (scales.k_scale.shape, scales.k_scale.dtype) == ((1,), torch.float32)
    assert (report.k_amax, report.v_amax, report.num_tokens) == (448.0, 3.0, 7)
    assert (report.k_scale, report.v_scale) == (float(scales.k_scale), float(scales.v_scale))
    assert (report.k_peak_tokens, report.v_peak_tokens) == (2, 1)
    assert report.fqn == scales.fqn == "m.attn"


def test_values_that_are_all_zero_have_a_finite_scale() -> None:
    scales, _ = make_cache_scales("m.attn", KEY, InputRange(num_tokens=7))
    assert float(scales.v_scale) == 2.0**-126
