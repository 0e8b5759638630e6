"""The compiled loops do what the plain torch ones do."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.numerics.fp8 import dequantize_fp8, quantize_fp8
from autoround_fp8.tuning import error_compensation, scale_search

pytest.importorskip("numba")
compiled = pytest.importorskip("autoround_fp8.numerics.compiled")
numba_loops = pytest.importorskip("autoround_fp8.tuning.numba_loops")


def problem(rows: int, columns: int, steps: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    smallest = weight.float().abs().amax(1, keepdim=True) / 448
    return (
        weight,
        smallest * (1 + torch.rand(rows, steps, generator=generator)),
        torch.rand(columns, generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "steps"), [(1, 1, 1), (37, 53, 5), (64, 256, 16)])
def test_errors_are_those_of_the_codes(rows: int, columns: int, steps: int, dtype: torch.dtype) -> None:
    weight, scales, costs = problem(rows, columns, steps, dtype)
    found = numba_loops.row_errors(weight, scales, costs)
    torch.testing.assert_close(found, scale_search._row_errors(weight, scales, costs), rtol=1e-3, atol=1e-6)
    last = scales[:, -1:]
    lost = (dequantize_fp8(quantize_fp8(weight, last), last) - weight.float()).div(last).square() @ costs
    torch.testing.assert_close(found[:, -1], lost, rtol=2e-2, atol=1e-3)


def test_strips_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales, costs = problem(301, 64, 128, torch.bfloat16)
    whole = numba_loops.row_errors(weight, scales, costs)
    monkeypatch.setattr(numba_loops, "_STRIP_ELEMENTS", 64 * 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(numba_loops.row_errors(weight, scales, costs), whole)
    assert torch.equal(numba_loops.row_errors(weight.t().contiguous().t(), scales, costs), whole)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 300), (32, 257), (32, 1000)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_compensated_rows_are_those_of_plain_torch(
    rows: int, columns: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(compiled, "_GRAIN", 64)
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=generator) * 100
    values[0, 0] = 1e4  # saturates, and the rows after it get what is lost
    upper = torch.randn(rows, rows, generator=generator).triu() * 0.1 + torch.eye(rows)
    found, expected = values.clone(), values.clone()
    errors, expected_errors = torch.empty(rows, columns), torch.empty(rows, columns)
    numba_loops.compensate_rows(found, upper, errors)
    error_compensation._round_rows(expected, upper, expected_errors)
    # Other roundings of the sums may move a value across the border between two codes.
    assert float((found != expected).float().mean()) < 0.02
    assert torch.equal(found[0], expected[0])
    assert float(found[0, 0]) == 448.0
    torch.testing.assert_close(errors[0], expected_errors[0])
