"""The compiled search measures the same errors as the plain torch one."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.numerics.fp8 import dequantize_fp8, quantize_fp8
from autoround_fp8.tuning import scale_search

pytest.importorskip("numba")
numba_search = pytest.importorskip("autoround_fp8.tuning.numba_search")


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
    found = numba_search.row_errors(weight, scales, costs)
    torch.testing.assert_close(found, scale_search._row_errors(weight, scales, costs), rtol=1e-3, atol=1e-6)
    last = scales[:, -1:]
    lost = (dequantize_fp8(quantize_fp8(weight, last), last) - weight.float()).div(last).square() @ costs
    torch.testing.assert_close(found[:, -1], lost, rtol=2e-2, atol=1e-3)


def test_strips_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales, costs = problem(301, 64, 128, torch.bfloat16)
    whole = numba_search.row_errors(weight, scales, costs)
    monkeypatch.setattr(numba_search, "_STRIP_ELEMENTS", 64 * 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(numba_search.row_errors(weight, scales, costs), whole)
    assert torch.equal(numba_search.row_errors(weight.t().contiguous().t(), scales, costs), whole)
