"""`fp8_tensors.py`: the tensors of an FP8 linear; what is refused when they are read is in `test_fp8_static.py`."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.checkpoint.reader import DTYPE_NAMES
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.fp8_tensors import decode_fp8_linear, encode_fp8, planned_fp8
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme

SCHEMES = [
    QuantizationScheme(group_size=group_size, act_group_size=-1 if dynamic else 0, act_dynamic=dynamic)
    for group_size in (-1, 0)
    for dynamic in (False, True)
]


def linear(scheme: QuantizationScheme) -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear(
        fqn="a.b",
        weight=torch.randint(0, 127, (3, 4), dtype=torch.uint8).view(torch.float8_e4m3fn),
        weight_scale=torch.rand((3, 1) if scheme.group_size == -1 else (1,)) + 0.01,
        input_scale=None if scheme.act_dynamic else torch.tensor([0.037]),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_planned_is_encoded_and_decoded_bit_for_bit(scheme: QuantizationScheme):
    before = linear(scheme)
    tensors = encode_fp8(before)
    planned = {p.name: (p.dtype, p.shape) for p in planned_fp8("a.b", (3, 4), scheme, (3, 1))}
    assert planned == {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    after = decode_fp8_linear("a.b", scheme, tensors)
    assert torch.equal(after.weight.view(torch.uint8), before.weight.view(torch.uint8))
    assert torch.equal(after.weight_scale, before.weight_scale)
    if scheme.act_dynamic:
        assert after.input_scale is before.input_scale is None
        assert set(tensors) == {"a.b.weight", "a.b.weight_scale"}
    else:
        assert after.input_scale is not None
        assert before.input_scale is not None
        assert torch.equal(after.input_scale, before.input_scale)


def test_the_shape_of_channel_scales_is_the_formats():
    shapes = [planned_fp8("a", (3, 4), SCHEMES[0], shape)[1].shape for shape in ((3,), (3, 1))]
    assert shapes == [(3,), (3, 1)]
    assert planned_fp8("a", (3, 4), SCHEMES[2], (3,))[1].shape == (1,)


def test_a_stored_input_scale_of_dynamic_inputs_is_refused():
    tensors = {**encode_fp8(linear(SCHEMES[1])), "a.b.input_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"'a\.b\.input_scale' is there, but .* dynamic"):
        decode_fp8_linear("a.b", SCHEMES[1], tensors)
