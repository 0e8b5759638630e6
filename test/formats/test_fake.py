"""`fake.py`: the rounded weights as an ordinary checkpoint."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import SchemeTable
from autoround_fp8.formats.fake import FakeFormat
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme

FORMAT = FakeFormat()
LAYER = QuantizedLinear(
    fqn="a",
    weight=torch.tensor([[1.0, -448.0], [0.0, 2.0**-9]]).to(torch.float8_e4m3fn),
    weight_scale=torch.tensor([[0.1], [3.0]]),
    input_scale=torch.ones(1),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_weight_is_code_times_scale_rounded_once(dtype: torch.dtype):
    tensors = FORMAT.encode(LAYER, dtype)
    expected = torch.tensor([[0.1, -44.8], [0.0, 3.0 * 2.0**-9]])
    expected[0] = torch.tensor([1.0, -448.0]) * torch.tensor(0.1)
    assert list(tensors) == ["a.weight"]
    assert torch.equal(tensors["a.weight"], expected.to(dtype))


def test_nothing_but_the_weight_is_planned_in_the_sources_dtype():
    (planned,) = FORMAT.planned_tensors("a", (2, 2), QuantizationScheme(), "F16")
    assert (planned.name, planned.dtype, planned.shape) == ("a.weight", "F16", (2, 2))


def test_there_is_no_config_and_nothing_to_decode():
    table = SchemeTable(default=QuantizationScheme(), schemes={}, also_kept=(), block_prefixes=())
    assert FORMAT.quantization_config(table) is None
    assert FORMAT.parse({"quant_method": "fp8"}) is None
    with pytest.raises(CheckpointError, match="'a' of a 'fake' checkpoint has no FP8 codes"):
        FORMAT.decode("a", QuantizationScheme(), {})


def test_a_scheme_that_nobody_makes_is_refused():
    FORMAT.validate({"a": QuantizationScheme(act_group_size=-1, act_dynamic=True)})
    with pytest.raises(ConfigError, match=r"bits \(4\) of layer 'a'"):
        FORMAT.validate({"a": QuantizationScheme(bits=4)})
