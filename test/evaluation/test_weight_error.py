"""SQNR of FP8 weights from the files alone, against the numerics module as oracle."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.errors import CheckpointError
from autoround_fp8.evaluation import weight_error
from autoround_fp8.evaluation.weight_error import weight_sqnr
from autoround_fp8.numerics.fp8 import amax_to_scale, dequantize_fp8, quantize_fp8, sqnr_db

WEIGHT = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def _reader(folder, **tensors):
    folder.mkdir()
    save_file(
        {name.replace("__", "."): tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return CheckpointReader(folder)


@pytest.mark.parametrize("shape", [(48,), (48, 1), (1,), (1, 1), ()])
def test_every_scale_shape(tmp_path, shape, monkeypatch):
    monkeypatch.setattr(weight_error, "_STRIP_ELEMENTS", 7 * 32)  # strips that do not divide the rows
    per_channel = shape[:1] == (48,)
    amax = WEIGHT.float().abs().amax(dim=1, keepdim=True) if per_channel else WEIGHT.float().abs().amax()
    scale = amax_to_scale(amax)
    codes = quantize_fp8(WEIGHT, scale)
    reference = _reader(tmp_path / "a", x__weight=WEIGHT, x__norm=torch.ones(3))
    candidate = _reader(tmp_path / "b", x__weight=codes, x__weight_scale=scale.reshape(shape), x__norm=torch.ones(3))
    found, unmatched = weight_sqnr(reference, candidate)
    assert found == {"x": pytest.approx(sqnr_db(WEIGHT, dequantize_fp8(codes, scale)), abs=1e-3)}
    assert unmatched == ()


def test_equal_zero_and_plain_weights(tmp_path):
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    zero = torch.zeros(4, 4, dtype=torch.bfloat16)
    quantized = _reader(tmp_path / "q", x__weight=codes, x__weight_scale=one)
    assert weight_sqnr(quantized, quantized)[0] == {"x": math.inf}
    assert weight_sqnr(_reader(tmp_path / "zero", x__weight=zero), quantized)[0] == {"x": -math.inf}
    assert weight_sqnr(quantized, _reader(tmp_path / "plain", x__weight=zero)) == ({}, ())


def test_layers_without_counterpart_are_named(tmp_path, caplog):
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    candidate = _reader(tmp_path / "b", x__weight=codes, x__weight_scale=torch.ones(1))
    assert weight_sqnr(_reader(tmp_path / "a", y__weight=WEIGHT), candidate) == ({}, ("x",))
    assert "1 FP8 layers have no weight in the reference, first x" in caplog.text


@pytest.mark.parametrize(("one", "other"), [("w1", "gate_proj"), ("down_proj", "w2")])
def test_an_experts_projection_is_the_same_by_either_name(tmp_path, one, other):
    weight = torch.ones(4, 4)
    plain, quantized = {}, {}
    for folder in ("x.experts.3", "x"):  # only of experts
        plain[f"{folder}.{one}.weight"] = weight.clone()
        quantized[f"{folder}.{other}.weight"] = weight.to(torch.float8_e4m3fn)
        quantized[f"{folder}.{other}.weight_scale"] = torch.ones(1)
    reference, candidate = _reader(tmp_path / "a", **plain), _reader(tmp_path / "b", **quantized)
    assert weight_sqnr(reference, candidate) == ({f"x.experts.3.{other}": math.inf}, (f"x.{other}",))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "'x.weight_scale' is missing"),
        ({"x__weight_scale": torch.ones(3)}, r"'x.weight_scale' has shape \[3\]"),
        ({"x__weight_scale": torch.ones(4, 4)}, r"has shape \[4, 4\]"),
    ],
)
def test_bad_scales(tmp_path, tensors, message):
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    reference = _reader(tmp_path / "a", x__weight=torch.ones(4, 4))
    with pytest.raises(CheckpointError, match=message):
        weight_sqnr(reference, _reader(tmp_path / "b", x__weight=codes, **tensors))


def test_another_weight_shape(tmp_path):
    candidate = _reader(
        tmp_path / "b", x__weight=torch.ones(4, 4).to(torch.float8_e4m3fn), x__weight_scale=torch.ones(1)
    )
    with pytest.raises(CheckpointError, match=r"'x.weight' is \[4, 4\], in the reference \[48, 32\]"):
        weight_sqnr(_reader(tmp_path / "a", x__weight=WEIGHT), candidate)
