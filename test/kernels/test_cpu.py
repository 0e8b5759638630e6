"""The CPU kernel's bit tricks against torch's own casts, and its products against the oracle."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from autoround_fp8.device import has_fast_bfloat16
from autoround_fp8.kernels import cpu
from autoround_fp8.kernels.base import LinearProblem
from autoround_fp8.kernels.cpu import CpuKernel, TorchLoops, choose_loops, decode_fp8, round_to_fp8_values
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.numerics.fp8 import quantize_fp8, sqnr_db
from autoround_fp8.schemes import QuantizationScheme

ONE = torch.ones(1)


def all_codes() -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    return codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_decoded_exactly(dtype: torch.dtype) -> None:
    codes = all_codes()
    assert len(codes) == 254
    values = decode_fp8(codes, dtype)
    assert values.dtype == dtype
    assert torch.equal(bits(values.float()), bits(codes.float()))  # bits: minus zero counts too


def test_decoding_leaves_the_codes_alone() -> None:
    codes = all_codes()
    decode_fp8(codes, torch.bfloat16)
    assert torch.equal(codes.view(torch.uint8), all_codes().view(torch.uint8))


def grid() -> torch.Tensor:
    """Every FP8 value, every tie between two of them, and the float32 neighbours of all."""
    values = all_codes().float().unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    infinity = torch.tensor(math.inf)
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])


def special() -> torch.Tensor:
    values = [0.0, 448.0, 464.0, 465.0, 1e4, 3e38, math.inf, 1e-45, 1e-38, 2.0**-10, 2.0**-9, 2.0**-6, 2.0**-7]
    return torch.tensor(values + [-value for value in values])


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0123, 2.0**-126, 77.7])
@pytest.mark.parametrize("source", [grid, special])
def test_rounding_is_bit_equal_to_the_cast(source: object, scale: float) -> None:
    x = source() * (scale if source is grid else 1.0)  # type: ignore[operator]
    found, expected = round_to_fp8_values(x, torch.tensor([scale])), quantize_fp8(x, torch.tensor([scale])).float()
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_rounding_is_bit_equal_on_random_values(dtype: torch.dtype, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(20_000, generator=generator) * spread).to(dtype)
    before = x.clone()
    scale = torch.tensor([0.0371])
    assert torch.equal(bits(round_to_fp8_values(x, scale)), bits(quantize_fp8(x, scale).float()))
    assert torch.equal(x, before)


def test_nan_stays_nan() -> None:
    assert torch.isnan(round_to_fp8_values(torch.tensor([math.nan, -math.nan]), ONE)).all()


def problem_tensors(out: int, inner: int, tensors: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out * 1000 + inner)
    weight = quantize_fp8(torch.randn(out, inner, generator=generator), torch.tensor([0.01]))
    weight_scale = torch.rand((out, 1) if tensors else (1,), generator=generator) * 0.1 + 0.01
    return weight, weight_scale, torch.randn(out, generator=generator)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("per_channel", [0, 1])
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (7, 13), (64, 64), (129, 257), (31, 128)])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0,)])
def test_products_equal_the_oracle(
    out: int, inner: int, per_channel: int, has_bias: bool, shape: tuple[int, ...]
) -> None:
    weight, weight_scale, bias = problem_tensors(out, inner, per_channel)
    x = torch.randn(*shape, inner, generator=torch.Generator().manual_seed(1))
    arguments = (x, weight, weight_scale, torch.tensor([0.02]), bias if has_bias else None)
    found, expected = CpuKernel().linear(*arguments), reference_linear(*arguments)
    assert found.shape == expected.shape == (*shape, out)
    assert found.dtype == torch.float32
    assert sqnr_db(expected, found) > 90


def test_inputs_need_not_be_contiguous() -> None:
    weight, weight_scale, _ = problem_tensors(9, 14, 1)
    wide = torch.randn(6, 28, generator=torch.Generator().manual_seed(2))
    arguments = (weight, weight_scale, torch.tensor([0.02]), None)
    for x in (wide[:, ::2], wide.t()[:14].t(), wide[::2, 3:17]):
        assert not x.is_contiguous()
        assert sqnr_db(reference_linear(x, *arguments), CpuKernel().linear(x, *arguments)) > 90


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 40), (torch.float16, 60)])
def test_16_bit_inputs_give_16_bit_outputs(dtype: torch.dtype, bound: float) -> None:
    weight, weight_scale, bias = problem_tensors(33, 65, 1)
    x = torch.randn(4, 65, generator=torch.Generator().manual_seed(3)).to(dtype)
    arguments = (x, weight, weight_scale, torch.tensor([0.02]), bias.to(dtype))
    found = CpuKernel().linear(*arguments)
    assert found.dtype == dtype
    assert sqnr_db(reference_linear(*arguments), found) > bound


def test_the_bfloat16_product_is_close_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_fast_bfloat16", lambda device: True)
    weight, weight_scale, _ = problem_tensors(33, 64, 1)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments = (x, weight, weight_scale, torch.tensor([0.02]), None)
    assert sqnr_db(reference_linear(*arguments), CpuKernel().linear(*arguments)) > 35


def test_inputs_out_of_range_saturate() -> None:
    weight, weight_scale, _ = problem_tensors(8, 16, 1)
    arguments = (weight, weight_scale, torch.tensor([0.002]), None)
    far, edge = torch.full((1, 16), 1e4), torch.full((1, 16), 0.896)
    assert torch.equal(CpuKernel().linear(far, *arguments), CpuKernel().linear(edge, *arguments))


@pytest.mark.parametrize("use_numba", [False, None])
@pytest.mark.parametrize("product_dtype", [torch.float32, torch.bfloat16])
def test_a_weight_larger_than_one_slab(
    use_numba: bool | None, product_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_SLAB", 300)
    monkeypatch.setattr(cpu, "_STRIP", 64)
    weight, weight_scale, bias = problem_tensors(37, 53, 1)
    x = torch.randn(12, 53, generator=torch.Generator().manual_seed(3))
    arguments = (x, weight, weight_scale, torch.tensor([0.02]), bias)
    found = CpuKernel(use_numba=use_numba, product_dtype=product_dtype).linear(*arguments)
    assert sqnr_db(reference_linear(*arguments), found) > (90 if product_dtype == torch.float32 else 35)


@pytest.mark.parametrize("use_numba", [False, None])
def test_tensors_that_require_gradients_are_read_without_them(use_numba: bool | None) -> None:
    weight, weight_scale, bias = problem_tensors(8, 16, 1)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    scale = torch.tensor([0.02])
    expected = reference_linear(x, weight, weight_scale, scale, bias)
    weight_scale.requires_grad_()
    found = CpuKernel(use_numba=use_numba).linear(x, weight, weight_scale, scale, bias.requires_grad_())
    assert not found.requires_grad
    assert sqnr_db(expected.detach(), found) > 90


def test_an_input_of_the_wrong_width_is_refused() -> None:
    weight, weight_scale, _ = problem_tensors(8, 16, 1)
    for num_tokens in (1, 3, 50):
        with pytest.raises(ValueError, match=r"x \(15\) must be in_features \(16\)"):
            CpuKernel().linear(torch.ones(num_tokens, 15), weight, weight_scale, ONE, None)


def test_numba_that_cannot_be_imported_is_replaced_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autoround_fp8.kernels.numba_loops", None)
    assert isinstance(choose_loops(), TorchLoops)
    with pytest.raises(ImportError):
        choose_loops(use_numba=True)


def test_only_a_cpu_is_accepted() -> None:
    fields = {"dtype": torch.float32, "in_features": 4, "out_features": 4, "scheme": QuantizationScheme(), "name": "a"}
    assert CpuKernel().unsupported_reason(LinearProblem(device=torch.device("cpu"), **fields)) is None
    reason = CpuKernel().unsupported_reason(LinearProblem(device=torch.device("cuda:0"), **fields))
    assert reason is not None
    assert "cuda:0" in reason
    assert isinstance(has_fast_bfloat16(torch.device("cpu")), bool)


@pytest.mark.parametrize("use_numba", [False, None])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_inputs_match_the_oracle(use_numba: bool | None, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x = (torch.randn(1, tokens, 70) * torch.logspace(-5, 4, tokens)[:, None]).to(dtype)
    x[0, 0] = 0.0  # a token of zeros has a scale, too
    weight = quantize_fp8(torch.randn(33, 70), torch.tensor([0.01]))
    scale, bias = torch.rand(33, 1) + 0.1, torch.randn(33).to(dtype)
    kernel = CpuKernel(use_numba=use_numba, product_dtype=torch.float32)
    found = kernel.linear(x, weight, scale, None, bias)
    expected = reference_linear(x, weight, scale, None, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found[0, 0], bias)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
