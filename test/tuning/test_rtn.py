"""Round to nearest: scales by granularity, nearest codes, hard rows."""

import pytest
import torch

from autoround_fp8.numerics.fp8 import dequantize_fp8, quantize_fp8, sqnr_db
from autoround_fp8.schemes import PRESETS
from autoround_fp8.tuning.rtn import absmax_scale


def quantize_weight(weight: torch.Tensor, preset: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale = absmax_scale(weight, PRESETS[preset])
    return quantize_fp8(weight, scale), scale


@pytest.mark.parametrize(("preset", "scale_shape"), [("FP8_STATIC", (6, 1)), ("FP8_STATIC_TENSOR", (1,))])
def test_scale_shape_and_error(preset: str, scale_shape: tuple[int, ...]) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_weight(weight, preset)
    assert codes.dtype == torch.float8_e4m3fn
    assert tuple(scale.shape) == scale_shape
    # 3 mantissa bits: uniform relative rounding error gives about 31.7 dB for Gaussian rows.
    assert 30.5 < sqnr_db(weight, dequantize_fp8(codes, scale)) < 33.0


def test_every_code_is_the_nearest_one() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_weight(weight, "FP8_STATIC")
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]
    best = (weight.unsqueeze(-1) - every * scale.unsqueeze(-1)).abs().amin(-1)
    chosen = (weight - dequantize_fp8(codes, scale)).abs()
    assert torch.allclose(chosen, best, rtol=1e-5, atol=1e-9)


def test_zero_and_subnormal_rows_stay_finite() -> None:
    weight = torch.zeros(3, 16)
    weight[1] = 1e-38
    weight[2, 3] = -10.0
    codes, scale = quantize_weight(weight, "FP8_STATIC")
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    back = dequantize_fp8(codes, scale)
    assert bool((back[0] == 0).all())
    assert back[2, 3] == pytest.approx(-10.0, rel=1 / 16)


def test_fused_weights_share_the_largest_scale_per_tensor_only() -> None:
    gate, up = torch.ones(2, 4), torch.full((3, 4), 5.0)
    assert torch.equal(
        absmax_scale(gate, PRESETS["FP8_STATIC_TENSOR"], [gate, up]), absmax_scale(up, PRESETS["FP8_STATIC_TENSOR"])
    )
    assert torch.equal(absmax_scale(gate, PRESETS["FP8_STATIC"], [up]), absmax_scale(gate, PRESETS["FP8_STATIC"]))
