"""Error compensation lowers the error of the output, and is plain rounding where inputs are independent."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.numerics.fp8 import FP8_DTYPE, dequantize_fp8, quantize_fp8
from autoround_fp8.schemes import QuantizationScheme
from autoround_fp8.tuning.error_compensation import compensate, factorise
from autoround_fp8.tuning.rtn import absmax_scale


def correlated(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features // 4, features, generator=generator)
    noise = torch.randn(tokens, features, generator=generator)
    return torch.randn(tokens, features // 4, generator=generator) @ mixing + 0.3 * noise


def made(rows: int = 24, features: int = 200, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    return weight, absmax_scale(weight, QuantizationScheme()), correlated(1000, features)


def output_error(x: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    return float((x @ (dequantize_fp8(codes, scale) - weight).t()).square().sum())


@pytest.mark.parametrize("features", [100, 128, 200, 300])  # less than, equal to and more than a block of columns
def test_the_output_error_falls(features: int) -> None:
    weight, scale, x = made(features=features)
    factor = factorise(x.t() @ x)
    assert factor is not None
    codes = compensate(weight, scale, factor)
    assert codes.dtype == FP8_DTYPE
    assert codes.shape == weight.shape
    nearest = output_error(x, weight, quantize_fp8(weight, scale), scale)
    assert output_error(x, weight, codes, scale) < 0.6 * nearest


def test_it_is_column_by_column_elimination() -> None:
    weight, scale, x = made(rows=5, features=150)
    moment = x.t() @ x
    factor = factorise(moment)
    assert factor is not None
    # The textbook form: round a column, solve for the others exactly, without blocks or Cholesky factors.
    order = torch.argsort(moment.diagonal(), descending=True)
    damped = (moment / moment.diagonal().mean()).double()
    damped.diagonal().add_(0.03)
    inverse, rest = torch.linalg.inv(damped[order][:, order]), (weight / scale).double()[:, order]
    expected = torch.empty(5, 150)
    for i in range(150):
        expected[:, order[i]] = rest[:, i].float().clamp(-448, 448).to(FP8_DTYPE).float()
        error = (rest[:, i] - expected[:, order[i]]) / inverse[0, 0]
        rest[:, i:] -= error[:, None] * inverse[0]
        inverse = (inverse - torch.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    assert (compensate(weight, scale, factor).float() == expected).double().mean() > 0.99


def test_independent_inputs_leave_nearest_rounding() -> None:
    weight, scale, _ = made()
    factor = factorise(torch.diag(torch.rand(200) + 0.5))
    assert factor is not None
    assert torch.equal(
        compensate(weight, scale, factor).view(torch.uint8), quantize_fp8(weight, scale).view(torch.uint8)
    )


def test_rows_and_scale_forms() -> None:
    weight, scale, x = made()
    factor = factorise(x.t() @ x)
    assert factor is not None
    one = torch.tensor([float(scale.max())])
    by_row = compensate(weight, one.expand(24, 1), factor).view(torch.uint8)
    assert torch.equal(compensate(weight, one, factor).view(torch.uint8), by_row)


def test_dead_and_repeated_inputs_are_damped() -> None:
    weight, scale, x = made()
    x[:, 7] = 0.0
    x[:, 9] = x[:, 10]
    factor = factorise(x.t() @ x)
    assert factor is not None
    codes = compensate(weight, scale, factor)
    assert bool(torch.isfinite(codes.float()).all())


@pytest.mark.parametrize("moment", [torch.zeros(8, 8), torch.full((8, 8), torch.nan), -torch.eye(8)])
def test_no_factor_without_a_second_moment(moment: torch.Tensor) -> None:
    assert factorise(moment) is None
