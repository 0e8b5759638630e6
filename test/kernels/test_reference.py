"""The oracle against arithmetic in float64, and against the definition of a quantised linear."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.kernels.base import LinearProblem
from autoround_fp8.kernels.reference import ReferenceKernel, reference_linear
from autoround_fp8.numerics.fp8 import dequantize_fp8, quantize_fp8, sqnr_db
from autoround_fp8.schemes import QuantizationScheme

INPUT_SCALE = torch.tensor([0.03])


def tensors(per_channel: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    scale = torch.rand((7, 1) if per_channel else (1,), generator=generator) * 0.05 + 0.01
    weight = quantize_fp8(torch.randn(7, 12, generator=generator), scale)
    return torch.randn(2, 3, 12, generator=generator), weight, scale, torch.randn(7, generator=generator)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_the_product_of_the_dequantised_values(per_channel: bool, has_bias: bool) -> None:
    x, weight, scale, bias = tensors(per_channel)
    found = reference_linear(x, weight, scale, INPUT_SCALE, bias if has_bias else None)
    values = dequantize_fp8(quantize_fp8(x, INPUT_SCALE), INPUT_SCALE).double()
    expected = values @ dequantize_fp8(weight, scale).double().t() + (bias.double() if has_bias else 0.0)
    assert found.shape == (2, 3, 7)
    assert sqnr_db(expected, found) > 120


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    x, weight, scale, bias = tensors(True)
    assert reference_linear(x.to(dtype), weight, scale, INPUT_SCALE, bias.to(dtype)).dtype == dtype


def test_exact_values_give_exact_products() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.0, 448.0]]).to(torch.float8_e4m3fn)
    x = torch.tensor([[2.0, 4.0, -8.0]])
    found = reference_linear(x, weight, torch.tensor([[0.5], [2.0]]), torch.tensor([1.0]), torch.tensor([1.0, 0.0]))
    assert found.tolist() == [[-4.0, -7152.0]]


def test_far_inputs_saturate_and_stay_finite() -> None:
    x, weight, scale, _ = tensors(True)
    far = reference_linear(x.sign() * 1e4, weight, scale, INPUT_SCALE, None)
    assert torch.equal(far, reference_linear(x.sign() * 448 * INPUT_SCALE, weight, scale, INPUT_SCALE, None))
    assert torch.isfinite(far).all()


def test_the_kernel_is_the_function_and_computes_everything() -> None:
    x, weight, scale, bias = tensors(True)
    arguments = (x, weight, scale, INPUT_SCALE, bias)
    assert torch.equal(ReferenceKernel().linear(*arguments), reference_linear(*arguments))
    for device in ("cpu", "cuda:3"):
        problem = LinearProblem(
            device=torch.device(device),
            dtype=torch.float16,
            in_features=3,
            out_features=1,
            scheme=QuantizationScheme(),
            name="a",
        )
        assert ReferenceKernel().unsupported_reason(problem) is None


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_inputs_are_as_if_every_token_came_alone_with_its_own_scale(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    _, weight, scale, bias = tensors(True)
    x = (torch.randn(*shape, weight.shape[1]) * torch.logspace(-4, 3, shape[-1])[:, None]).to(dtype)
    found = reference_linear(x, weight, scale, None, bias)
    for token, y in zip(x.reshape(-1, weight.shape[1]), found.reshape(-1, weight.shape[0]), strict=True):
        own = (token.abs().max().float() / 448).clamp_min(1 / (448 * 512)).reshape(1)
        torch.testing.assert_close(y, reference_linear(token[None], weight, scale, own, bias)[0])
