"""Tensors of KV-cache scales, under both names that checkpoints have for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.kv_cache import (
    CACHE_SCALE,
    KV_CACHE_SCHEME,
    decode_cache_scales,
    encode_cache_scales,
    is_static_fp8_cache,
    planned_cache_scales,
)
from autoround_fp8.records import CacheScales

FQN = "model.layers.0.self_attn"
SCALES = CacheScales(fqn=FQN, k_scale=torch.tensor([0.5]), v_scale=torch.tensor([0.25]))


def test_what_is_planned_is_what_is_written_and_read() -> None:
    tensors = encode_cache_scales(SCALES)
    assert {t.name: (t.dtype, t.shape) for t in planned_cache_scales(FQN)} == dict.fromkeys(tensors, ("F32", (1,)))
    assert list(tensors) == [f"{FQN}.k_scale", f"{FQN}.v_scale"]
    assert all(CACHE_SCALE.search(name) for name in tensors)
    found = decode_cache_scales(FQN, tensors)
    assert (found.fqn, found.k_scale, found.v_scale) == (FQN, SCALES.k_scale, SCALES.v_scale)


def test_older_names_and_shapes_are_read() -> None:
    found = decode_cache_scales(
        FQN,
        {
            f"{FQN}.k_proj.output_scale": torch.tensor(0.5, dtype=torch.bfloat16),
            f"{FQN}.v_proj.output_scale": torch.tensor([[0.25]]),
        },
    )
    assert torch.equal(found.k_scale, SCALES.k_scale)
    assert torch.equal(found.v_scale, SCALES.v_scale)


@pytest.mark.parametrize("value", [torch.zeros(1), torch.tensor([torch.nan]), torch.ones(2), torch.tensor([torch.inf])])
def test_a_scale_that_is_no_positive_number_is_named(value: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=f"{FQN}.v_scale' must be one positive number"):
        decode_cache_scales(FQN, {**encode_cache_scales(SCALES), f"{FQN}.v_scale": value})


def test_a_missing_scale_is_named() -> None:
    with pytest.raises(CheckpointError, match=f"{FQN}.k_scale' is missing"):
        decode_cache_scales(FQN, {f"{FQN}.v_scale": torch.ones(1)})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"observer": "minmax", "group_size": None}, True),
        ({"num_bits": 4}, False),
        ({"type": "int"}, False),
        ({"dynamic": True}, False),
        ({"strategy": "attn_head"}, False),
    ],
)
def test_which_schemes_mean_these_scales(changes: dict[str, Any], expected: bool) -> None:
    assert is_static_fp8_cache({**KV_CACHE_SCHEME, **changes}) == expected
