"""The FP8 linear as a module: it refuses to run half loaded, keeps its dtypes, and saturates."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from autoround_fp8 import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.numerics.fp8 import dequantize_fp8
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme, parse_scheme
from autoround_fp8.tuning.rtn import quantize_weight

PER_CHANNEL, PER_TENSOR = parse_scheme("FP8_STATIC"), parse_scheme("FP8_STATIC_TENSOR")


def quantized(scheme: QuantizationScheme = PER_CHANNEL, bias: float | None = 100.0) -> QuantizedLinear:
    codes, scale = quantize_weight(torch.randn(6, 10, generator=torch.Generator().manual_seed(0)), scheme)
    return QuantizedLinear(
        fqn="a.b",
        weight=codes,
        weight_scale=scale,
        input_scale=torch.tensor([0.01]),
        bias=None if bias is None else torch.full((6,), bias),
    )


def module(layer: QuantizedLinear | None = None, **settings: Any) -> WeightFP8ActFP8StaticQuantLinear:
    layer = layer or quantized()
    settings = {"scheme": PER_CHANNEL, "has_bias": layer.bias is not None, "dtype": torch.float32, **settings}
    return WeightFP8ActFP8StaticQuantLinear.from_quantized_linear(layer, **settings)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, 10, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("scheme", [PER_CHANNEL, PER_TENSOR])
@pytest.mark.parametrize("bias", [None, 100.0])
def test_it_computes_the_reference(scheme: QuantizationScheme, bias: float | None) -> None:
    layer = quantized(scheme, bias)
    found = module(layer, scheme=scheme)(inputs(2, 3))
    expected = reference_linear(inputs(2, 3), layer.weight, layer.weight_scale, layer.input_scale, layer.bias)
    assert torch.equal(found, expected)


def test_the_state_has_the_documented_names_shapes_and_dtypes() -> None:
    state = {name: (tuple(t.shape), t.dtype) for name, t in module().state_dict().items()}
    assert state == {
        "weight": ((6, 10), torch.float8_e4m3fn),
        "weight_scale": ((6, 1), torch.float32),
        "input_scale": ((1,), torch.float32),
        "bias": ((6,), torch.float32),
    }
    assert not any(p.requires_grad for p in module().parameters())


def test_a_layer_that_was_never_loaded_refuses_to_run() -> None:
    layer = WeightFP8ActFP8StaticQuantLinear(10, 6, bias=True, name="x.y")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    with pytest.raises(CheckpointError, match=r"'x\.y\.weight' was never loaded"):
        layer(inputs(1))


def test_a_missing_bias_refuses_too() -> None:
    layer = module(quantized(bias=None), has_bias=True)
    with pytest.raises(CheckpointError, match=r"'a\.b\.bias' was never loaded"):
        layer(inputs(1))


@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("way", ["write", "replace"])
def test_a_bad_scale_refuses_even_after_a_good_call(leaf: str, value: float, way: str) -> None:
    layer = module()
    layer(inputs(1))
    bad = torch.full_like(getattr(layer, leaf), value)
    if way == "write":
        with torch.no_grad():
            getattr(layer, leaf).copy_(bad)
    else:
        setattr(layer, leaf, nn.Parameter(bad, requires_grad=False))
    with pytest.raises(CheckpointError, match=rf"'a\.b\.{leaf}' holds a scale"):
        layer(inputs(1))


def casts() -> dict[str, Any]:
    return {
        "half": lambda m: m.half(),
        "float": lambda m: m.float(),
        "bfloat16": lambda m: m.bfloat16(),
        "double": lambda m: m.double(),
        "to_dtype": lambda m: m.to(torch.float16),
        "to_device_and_dtype": lambda m: m.to("cpu", torch.bfloat16),
        "in_a_sequential": lambda m: nn.Sequential(m).half()[0],
        "deepcopy": copy.deepcopy,
    }


@pytest.mark.parametrize("name", casts())
def test_casts_keep_codes_and_scales(name: str) -> None:
    before = module()
    layer = casts()[name](module())
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.weight.view(torch.uint8), before.weight.view(torch.uint8))
    for leaf in ("weight_scale", "input_scale"):
        assert getattr(layer, leaf).dtype == torch.float32
        assert torch.equal(getattr(layer, leaf), getattr(before, leaf))
    x = inputs(2, dtype=layer.bias.dtype)
    assert layer(x).dtype == x.dtype
    torch.testing.assert_close(layer(x).float(), before(x.float()), rtol=1e-2, atol=1e-2)


def test_moving_to_meta_and_back_is_noticed() -> None:
    layer = module()
    layer(inputs(1))
    with pytest.raises(CheckpointError, match="never loaded"):
        layer.to("meta")(inputs(1))


def test_far_inputs_saturate() -> None:
    layer = module()
    far = layer(inputs(4).sign() * 1e4)
    assert torch.isfinite(far).all()
    assert torch.equal(far, layer(inputs(4).sign() * 4.48))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens_are_no_problem(shape: tuple[int, ...]) -> None:
    assert module()(inputs(*shape)).shape == (*shape, 6)


def test_inference_mode_works() -> None:
    with torch.inference_mode():
        layer = module()
        assert torch.equal(layer(inputs(2)), layer(inputs(2)))
    assert torch.equal(module()(inputs(2)), layer(inputs(2)))


def test_the_weight_can_be_had_back() -> None:
    layer = quantized()
    assert torch.equal(module(layer).weight_dequantized(), dequantize_fp8(layer.weight, layer.weight_scale))


def test_a_state_dict_goes_round() -> None:
    one, two = module(), module(quantized(bias=1.0))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(inputs(3)), two(inputs(3)))


@pytest.mark.parametrize("fields", [{"bits": 4}, {"group_size": 128}, {"act_dynamic": True}])
def test_other_schemes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        WeightFP8ActFP8StaticQuantLinear(10, 6, scheme=QuantizationScheme(**fields), name="a")


def test_print_says_what_it_is() -> None:
    text = repr(module())
    for part in ("in_features=10", "out_features=6", "bias=True", "per channel", "kernel=reference"):
        assert part in text
    assert "per tensor" in repr(module(quantized(PER_TENSOR), scheme=PER_TENSOR))
