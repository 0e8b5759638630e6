"""FP8 scales, codes and the error measure. Faults E1, E2, E5, E11."""

import math

import pytest
import torch

from autoround_fp8.numerics.fp8 import (
    FP8_DTYPE,
    SMALLEST_SCALE,
    amax_to_scale,
    decode_fp8,
    dequantize_fp8,
    fp8_step,
    quantize_fp8,
    round_to_four_bits,
    round_to_fp8,
    round_up_to_bfloat16,
    sqnr_db,
    strip_rows,
    token_scale,
    weight_sqnr_db,
)
from autoround_fp8.numerics.granularity import PER_CHANNEL, weight_amax


def round_trip(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = amax_to_scale(weight_amax(weight, PER_CHANNEL))
    codes = quantize_fp8(weight, scale)
    return scale, codes, dequantize_fp8(codes, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_row_gives_a_finite_scale_zero_codes_and_exact_zeros(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 16).to(dtype)
    weight[3] = 0
    scale, codes, back = round_trip(weight)
    assert scale[3].item() == SMALLEST_SCALE
    assert codes[3].view(torch.uint8).eq(0).all()
    assert back[3].eq(0).all()
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("value", [1e-38, 1e-40, 1e-45])
def test_subnormal_row_stays_finite(value: float) -> None:
    scale, codes, back = round_trip(torch.full((1, 8), value))
    assert scale.item() >= SMALLEST_SCALE
    assert torch.isfinite(codes.float()).all()
    assert torch.isfinite(back).all()


def test_one_giant_outlier_keeps_its_value_and_everything_else_is_finite() -> None:
    weight = torch.randn(2, 64)
    weight[0, 7] = 1e30
    _, _, back = round_trip(weight)
    assert back[0, 7].item() == pytest.approx(1e30, rel=0.01)
    assert torch.isfinite(back).all()


def test_largest_finite_float32_gives_a_finite_scale_and_code() -> None:
    scale, codes, _ = round_trip(torch.tensor([[torch.finfo(torch.float32).max, 1.0]]))
    assert torch.isfinite(scale).all()
    assert torch.isfinite(codes.float()).all()


def test_negative_side_sets_the_range() -> None:
    weight = torch.linspace(-10, 1, 32).reshape(1, 32)
    scale, codes, back = round_trip(weight)
    assert scale.item() >= 10 / 448
    assert codes.float().min().item() == -448
    assert back[0, 0].item() == pytest.approx(-10, rel=2**-7)  # the scale was rounded up by at most one bfloat16 step


def test_scales_are_bfloat16_representable_and_never_rounded_down() -> None:
    amax = torch.logspace(-40, 38, 4000, dtype=torch.float64).float()
    scale = amax_to_scale(amax)
    assert torch.equal(scale.bfloat16().float(), scale)
    assert bool((scale >= amax / 448).all())
    assert bool((scale <= torch.clamp_min(amax / 448, SMALLEST_SCALE) * (1 + 2**-7)).all())


def test_rounding_up_never_saturates_the_largest_value() -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 1) * torch.logspace(-20, 20, 512).reshape(-1, 1)
    scale = amax_to_scale(weight_amax(weight, PER_CHANNEL))
    assert bool((weight.abs() / scale <= 448).all())


def test_round_up_keeps_representable_values() -> None:
    x = torch.tensor([1.0, 0.5, 1.0078125, 2.0**-126, 3.0e38]).bfloat16().float()
    assert torch.equal(round_up_to_bfloat16(x), x)
    assert round_up_to_bfloat16(torch.tensor([1.0 + 2**-20])).item() == 1.0 + 2**-7


def test_round_up_of_a_transposed_tensor() -> None:
    x = torch.rand(3, 5) + 1
    assert torch.equal(round_up_to_bfloat16(x.t()), round_up_to_bfloat16(x).t())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_amax_that_is_no_range_raises(bad: float) -> None:
    with pytest.raises(ValueError, match="amax must be finite"):
        amax_to_scale(torch.tensor([1.0, bad]))


def test_values_beyond_the_range_saturate_and_nan_stays_nan() -> None:
    codes = quantize_fp8(torch.tensor([1e4, -1e4, math.inf, -math.inf, math.nan]), torch.tensor([1.0])).float()
    assert codes[:4].tolist() == [448, -448, 448, -448]
    assert math.isnan(codes[4].item())


def test_ties_round_to_even_and_subnormals_are_kept() -> None:
    # E4M3 steps: 1/8 above 1, 2^-9 below 2^-6.
    values = torch.tensor([1.0625, 1.1875, 2.0**-10, 1.5 * 2**-9, 2.0**-9, -0.0])
    expected = torch.tensor([1.0, 1.25, 0.0, 2.0**-8, 2.0**-9, -0.0])
    codes = quantize_fp8(values, torch.tensor([1.0]))
    assert torch.equal(codes.view(torch.uint8), expected.to(FP8_DTYPE).view(torch.uint8))


def test_quantisation_divides_by_the_scale() -> None:
    # A product with the rounded reciprocal of 3 misses some of these ties.
    x = torch.arange(1, 4000).float()
    scale = torch.tensor([3.0])
    assert torch.equal(quantize_fp8(x, scale).float(), (x / 3).clamp(max=448).to(FP8_DTYPE).float())


def test_every_code_survives_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE)
    finite = ~torch.isnan(codes.float())
    back = quantize_fp8(dequantize_fp8(codes, torch.tensor([0.5])), torch.tensor([0.5]))
    assert torch.equal(back.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


@pytest.mark.parametrize("flush", [False, True])
def test_decoding_gives_what_torch_gives_for_every_code(flush: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE)
    right = codes.float()
    torch.set_flush_denormal(flush)
    try:
        values = decode_fp8(codes)
    finally:
        torch.set_flush_denormal(False)
    is_nan = torch.isnan(right)
    assert is_nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(torch.isnan(values), is_nan)
    # Bits, so that -0 counts too.
    assert torch.equal(values[~is_nan].view(torch.int32), right[~is_nan].view(torch.int32))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_decoding_finds_one_nan_among_many(code: int) -> None:
    codes = torch.randint(0, 127, (64, 65), dtype=torch.uint8)
    codes[63, 64] = code
    values = decode_fp8(codes.view(FP8_DTYPE))
    assert torch.isnan(values).nonzero().tolist() == [[63, 64]]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 5)])
def test_decoding_keeps_shape_and_strides_do_not_matter(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 127, shape, dtype=torch.uint8).view(FP8_DTYPE)
    assert torch.equal(decode_fp8(codes), codes.float())
    if len(shape) > 1:
        assert torch.equal(decode_fp8(codes.transpose(0, 1)), codes.float().transpose(0, 1))


def test_gaussian_weights_reach_the_sqnr_of_a_3_bit_mantissa() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    # Relative rounding error is uniform within +-1/16 of the binade's start: about 31.5 dB, whatever the scale.
    assert 31.0 < sqnr_db(weight, round_trip(weight)[2]) < 32.5


def test_sqnr_of_known_values() -> None:
    assert sqnr_db(torch.ones(4), torch.full((4,), 0.9)) == pytest.approx(20, abs=1e-4)
    assert sqnr_db(torch.ones(4), torch.ones(4)) == math.inf
    assert sqnr_db(torch.zeros(4), torch.ones(4)) == -math.inf
    assert sqnr_db(torch.zeros(0), torch.zeros(0)) == math.inf
    assert math.isnan(sqnr_db(torch.tensor([math.nan]), torch.ones(1)))


@pytest.mark.parametrize("strip", [1, 64 * 7, 1 << 26])
def test_the_sqnr_of_a_weight_in_strips(monkeypatch: pytest.MonkeyPatch, strip: int) -> None:
    monkeypatch.setattr("autoround_fp8.numerics.fp8._STRIP_ELEMENTS", strip)
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert strip_rows(weight) == {1: 1, 64 * 7: 7}.get(strip, (1 << 26) // 64)
    for scale in (amax_to_scale(weight.abs().amax(1, keepdim=True)), amax_to_scale(weight.abs().max().reshape(1))):
        codes = quantize_fp8(weight, scale)
        expected = sqnr_db(weight, dequantize_fp8(codes, scale))
        assert weight_sqnr_db(weight, codes, scale) == pytest.approx(expected, rel=1e-6)
    assert weight_sqnr_db(torch.zeros(3, 4), quantize_fp8(torch.zeros(3, 4), torch.ones(1)), torch.ones(1)) == math.inf


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e30, 1e38])
def test_sqnr_does_not_depend_on_the_magnitude(magnitude: float) -> None:
    reference = torch.full((8,), magnitude)
    assert sqnr_db(reference, reference * 0.5) == pytest.approx(20 * math.log10(2), abs=0.01)


def test_the_step_is_the_distance_to_the_next_code() -> None:
    codes = torch.arange(0x7E, dtype=torch.uint8)  # 0 to the largest value but one
    values, following = (decode_fp8(bits.view(FP8_DTYPE)) for bits in (codes, codes + 1))
    assert torch.equal(fp8_step(values), following - values)
    assert torch.equal(fp8_step(-values), following - values)
    assert float(fp8_step(torch.tensor([448.0]))) == 32.0


def test_four_bits_are_what_fp8_has_but_for_subnormals() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20_000, generator=generator).mul_(440.0).sub_(220.0)
    x = torch.cat([x, x * 2.0**-8, torch.tensor([17.0, 19.0, -17.0, 432.0, 448.0, 0.0])])
    normal = x.abs() >= 2.0**-6
    assert torch.equal(round_to_four_bits(x)[normal], round_to_fp8(x)[normal])
    assert float((round_to_four_bits(x) - x)[~normal].abs().max()) < 2.0**-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_scale_is_its_largest_value_over_448_with_vllms_floor(dtype: torch.dtype):
    x = torch.tensor([[[448.0, -896.0, 1.0], [0.0, 0.0, 0.0]], [[1e-3, 0.0, -2e-3], [3.0, 2.0, 1.0]]]).to(dtype)
    scale = token_scale(x)
    assert scale.shape == (2, 2, 1)
    assert scale.dtype == torch.float32
    floor = torch.tensor(1.0 / (448.0 * 512.0))
    tiny = torch.maximum(x[1, 0, 2].abs().float() / 448, floor)
    assert torch.equal(scale.flatten(), torch.stack([torch.tensor(2.0), floor, tiny, torch.tensor(3.0) / 448]))
