"""The FP8 linear as a module: it refuses to run half loaded, keeps its dtypes, and saturates."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from autoround_fp8 import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.kernels.cpu import CpuKernel
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.numerics.fp8 import dequantize_fp8, quantize_fp8
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, parse_scheme
from autoround_fp8.tuning.rtn import absmax_scale

PER_CHANNEL, PER_TENSOR = parse_scheme("FP8_STATIC"), parse_scheme("FP8_STATIC_TENSOR")


def quantized(scheme: QuantizationScheme = PER_CHANNEL, bias: float | None = 100.0) -> QuantizedLinear:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    scale = absmax_scale(weight, scheme)
    codes = quantize_fp8(weight, scale)
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


def test_a_layer_that_was_never_loaded_refuses_off_meta_too() -> None:
    layer = WeightFP8ActFP8StaticQuantLinear(10, 6, name="x.y", device="cpu")
    with pytest.raises(CheckpointError, match=r"'x\.y\.weight_scale' holds a scale that is NaN"):
        layer(inputs(1))
    with pytest.raises(CheckpointError, match=r"'a\.b\.weight"):
        module().to_empty(device="meta")(inputs(1))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused(code: int) -> None:
    layer = quantized()
    layer.weight.view(torch.uint8)[3, 4] = code
    with pytest.raises(CheckpointError, match=r"'a\.b\.weight' holds NaN codes"):
        module(layer)(inputs(1))


def test_loading_a_state_dict_in_place_is_noticed() -> None:
    layer = module()
    layer(inputs(1))
    layer.load_state_dict({**layer.state_dict(), "input_scale": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="input_scale"):
        layer(inputs(1))


def test_a_scale_replaced_behind_the_module_s_back_is_noticed() -> None:
    layer = module()
    layer(inputs(1))
    layer._parameters["weight_scale"] = nn.Parameter(torch.full((6, 1), math.nan), requires_grad=False)
    with pytest.raises(CheckpointError, match="weight_scale"):
        layer(inputs(1))


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight", torch.zeros(6, 10), r"dtype of 'a\.b\.weight' \(torch\.float32\)"),
        ("weight", torch.zeros(10, 6).to(torch.float8_e4m3fn), r"shape of 'a\.b\.weight' \[10, 6\] must be \[6, 10\]"),
        ("weight_scale", torch.ones(6, 1).half(), r"dtype of 'a\.b\.weight_scale'"),
        (
            "weight_scale",
            torch.ones(5, 1),
            r"shape of 'a\.b\.weight_scale' \[5, 1\] must be \[6, 1\] or \[6\] or \[1\]",
        ),
        ("input_scale", torch.ones(6), r"shape of 'a\.b\.input_scale'"),
    ],
)
def test_tensors_of_another_layer_are_refused(leaf: str, value: torch.Tensor, message: str) -> None:
    layer = module()
    setattr(layer, leaf, nn.Parameter(value, requires_grad=False))
    with pytest.raises(CheckpointError, match=message):
        layer(inputs(1))


def test_the_tensors_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = module()
    checks = []
    check = layer._check_tensors
    monkeypatch.setattr(layer, "_check_tensors", lambda: checks.append(check()))
    for _ in range(5):
        layer(inputs(1))
    assert len(checks) == 1


def test_parameters_that_a_loader_marked_trainable_still_run() -> None:
    # transformers wraps every floating point tensor it loads as a parameter that requires a gradient.
    layer = module(kernel=CpuKernel())
    for leaf in ("weight", "weight_scale", "input_scale", "bias"):
        setattr(layer, leaf, nn.Parameter(getattr(layer, leaf).detach(), requires_grad=True))
    for num_tokens in (1, 20):
        assert not layer(inputs(num_tokens)).requires_grad


def test_a_bias_is_never_dropped() -> None:
    layer = WeightFP8ActFP8StaticQuantLinear.from_quantized_linear(quantized(bias=100.0), scheme=PER_CHANNEL)
    assert layer.bias.dtype == torch.bfloat16
    assert layer(inputs(4)).mean().item() == pytest.approx(100, abs=5)


def test_16_bit_schemes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bits \(16\) of layer 'a' must be 8"):
        WeightFP8ActFP8StaticQuantLinear(10, 6, scheme=UNQUANTIZED, name="a")


def test_transformers_does_not_initialise_it_again() -> None:
    model = tiny_model(dtype=torch.float32)
    layer = module()
    model.model.layers[0].mlp.gate_proj = layer
    before = {name: t.detach().float().clone() for name, t in layer.state_dict().items()}
    model.initialize_weights()
    model.apply(model._init_weights)
    assert all(torch.equal(t.float(), before[name]) for name, t in layer.state_dict().items())


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_a_model_copy_shares_its_kernel_and_runs(num_tokens: int) -> None:
    layer = module(kernel=CpuKernel())
    expected = layer(inputs(num_tokens))
    twin = copy.deepcopy(layer)
    assert twin.kernel is layer.kernel
    assert torch.equal(twin(inputs(num_tokens)), expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(inputs(num_tokens)), expected)


DYNAMIC = parse_scheme("FP8_DYNAMIC")


def test_dynamic_inputs_have_no_stored_scale() -> None:
    layer = dataclasses.replace(quantized(), input_scale=None)
    found = module(layer, scheme=DYNAMIC)
    assert set(found.state_dict()) == {"weight", "weight_scale", "bias"}
    assert "inputs dynamic" in str(found)
    x = inputs(2, 3) * 1e4
    assert torch.equal(found(x), reference_linear(x, layer.weight, layer.weight_scale, None, layer.bias))
    assert torch.equal(copy.deepcopy(found).half().float()(x), found(x))


def test_a_dynamic_layer_that_was_never_loaded_refuses_to_run() -> None:
    empty = WeightFP8ActFP8StaticQuantLinear(10, 6, scheme=DYNAMIC, name="a.b")
    with pytest.raises(CheckpointError, match=r"'a\.b\.weight' was never loaded"):
        empty(inputs(2))


def test_a_static_layer_does_not_become_dynamic_by_losing_its_scale() -> None:
    layer = module()
    layer.input_scale = None
    with pytest.raises(CheckpointError, match=r"'a\.b\.input_scale' was never loaded"):
        layer(inputs(2))
