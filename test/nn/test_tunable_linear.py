"""A tunable weight starts at the codes it is given, and moves by whole codes; the input's gradient passes through."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.nn.tunable_linear import TunableWeight, quantize_input
from autoround_fp8.numerics.fp8 import FP8_DTYPE, FP8_MAX, amax_to_scale, decode_fp8, quantize_fp8

ALL_CODES = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 0x7F) != 0x7F].view(FP8_DTYPE)


def numbers(codes: torch.Tensor) -> torch.Tensor:
    """Codes as whole numbers in the order of their values, both zeros as 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


@pytest.mark.parametrize("shift", [-3.0, -0.5, 0.0, 0.499, 0.5, 3.0])
def test_it_starts_at_any_code_whatever_the_weight(shift: float) -> None:
    codes = ALL_CODES.reshape(2, -1)
    values = decode_fp8(codes)
    weight = values + shift * torch.maximum(values.abs() * 2.0**-4, torch.tensor(2.0**-9))
    tunable = TunableWeight(weight, codes, torch.ones(2, 1))
    start = tunable.codes(torch.ones(2, 1))
    assert torch.equal(numbers(start), numbers(codes))
    assert torch.equal(tunable.rounded(torch.ones(2, 1)), decode_fp8(start))


def test_half_a_step_reaches_the_next_code_from_the_cell_edge_and_not_from_its_middle() -> None:
    values = torch.tensor([[1.0, 1.06, 17.0, 0.002]])
    codes = quantize_fp8(values, torch.ones(1))
    tunable = TunableWeight(values, codes, torch.ones(1, 1))
    tunable.offset.fill_(0.45)
    moved = numbers(tunable.codes(torch.ones(1, 1))) - numbers(codes)
    assert moved.tolist() == [[0, 1, 1, 0]]  # 17 is half-way to 18, and 1.06 nearly to 1.125


def test_the_scale_moves_by_the_factor_and_stays_representable() -> None:
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    scale = amax_to_scale(weight.abs().amax(dim=1, keepdim=True))
    tunable = TunableWeight(weight, quantize_fp8(weight, scale), scale)
    factor = torch.tensor([[1.0], [0.8], [1.25]])
    moved = tunable.scale(factor)
    assert torch.equal(moved[0], scale[0])
    assert torch.equal(moved, moved.to(torch.bfloat16).float())
    torch.testing.assert_close(moved, scale * factor, rtol=2**-7, atol=0.0)
    # A smaller scale saturates the largest weight, and codes the rest anew.
    assert float(decode_fp8(tunable.codes(factor)[1]).abs().max()) == FP8_MAX
    restored = decode_fp8(tunable.codes(factor)) * moved
    inside = weight.abs() < moved * FP8_MAX
    assert bool(((restored - weight).abs() <= weight.abs() * 2.0**-3.5 + moved * 2.0**-9)[inside].all())


@pytest.mark.parametrize("per_row", [True, False])
def test_the_gradient_of_the_factor_is_that_of_the_dequantised_weight(per_row: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, grad = torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
    scale = amax_to_scale(weight.abs().amax(dim=1, keepdim=True) if per_row else weight.abs().amax().reshape(1))
    tunable = TunableWeight(weight, quantize_fp8(weight, scale), scale)
    found = tunable.factor_gradient(grad, torch.ones_like(scale))
    # d/df of scale * f * (u / f + (round(u / f) - u / f) held constant) at f = 1
    unrounded = tunable._shifted(torch.ones_like(scale))
    elements = grad * scale * (tunable.rounded(torch.ones_like(scale)) - unrounded)
    expected = elements.sum(dim=1, keepdim=True) if per_row else elements.sum().reshape(1)
    torch.testing.assert_close(found, expected)
    assert found.shape == scale.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_what_the_kernel_sees_and_its_gradient_passes(dtype: torch.dtype) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    scale = amax_to_scale(x.detach().abs().amax().reshape(1).float()).requires_grad_()
    quantized = quantize_input(x, scale)
    assert quantized.dtype == dtype
    expected = decode_fp8(quantize_fp8(x.detach(), scale.detach())) * scale.detach()
    assert torch.equal(quantized, expected.to(dtype))
    grad = torch.randn(5, 8, generator=torch.Generator().manual_seed(4)).to(dtype)
    quantized.backward(grad)
    assert torch.equal(x.grad, grad)
    by_hand = (((quantized - x).float() * grad.float()).sum() / scale).reshape(1).detach()
    torch.testing.assert_close(scale.grad, by_hand)


def test_no_gradient_of_the_scale_is_made_where_none_is_asked() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    quantize_input(x, torch.ones(1)).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
