"""Which elements share a scale."""

import math

import pytest
import torch

from autoround_fp8.numerics.fp8 import amax_to_scale
from autoround_fp8.numerics.granularity import PER_CHANNEL, PER_TENSOR, weight_amax

WEIGHT = torch.tensor([[-10.0, 1.0], [0.0, 0.0], [2.0, -3.0]])


def test_per_channel_is_one_column() -> None:
    amax = weight_amax(WEIGHT, PER_CHANNEL)
    assert amax.tolist() == [[10.0], [0.0], [3.0]]


def test_per_tensor_is_one_value() -> None:
    assert weight_amax(WEIGHT, PER_TENSOR).tolist() == [10.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [PER_CHANNEL, PER_TENSOR])
def test_result_is_float32_of_any_dtype_and_layout(dtype: torch.dtype, group_size: int) -> None:
    weight = torch.randn(5, 7).to(dtype)
    amax = weight_amax(weight.t().contiguous().t(), group_size)
    assert amax.dtype == torch.float32
    expected = (
        weight.float().abs().amax(dim=1, keepdim=True) if group_size == PER_CHANNEL else weight.float().abs().max()
    )
    assert torch.equal(amax, expected.reshape(amax.shape))


@pytest.mark.parametrize("group_size", [PER_CHANNEL, PER_TENSOR])
def test_nan_in_a_weight_is_seen_and_refused(group_size: int) -> None:
    weight = WEIGHT.clone()
    weight[2, 1] = math.nan
    with pytest.raises(ValueError, match="finite"):
        amax_to_scale(weight_amax(weight, group_size))


@pytest.mark.parametrize("group_size", [128, 1, -2])
def test_other_group_sizes_raise(group_size: int) -> None:
    with pytest.raises(ValueError, match=r"group_size \("):
        weight_amax(WEIGHT, group_size)
