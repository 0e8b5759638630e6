"""The searched scale is never worse than the largest value's, never smaller, and readable as bfloat16."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.numerics.fp8 import amax_to_scale, dequantize_fp8, quantize_fp8
from autoround_fp8.schemes import QuantizationScheme
from autoround_fp8.tuning import scale_search
from autoround_fp8.tuning.rtn import absmax_scale
from autoround_fp8.tuning.scale_search import search_input_scale, search_scale

CHANNEL, TENSOR = QuantizationScheme(), QuantizationScheme(group_size=0)


def weight(rows: int = 40, columns: int = 300, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


def errors(w: torch.Tensor, scale: torch.Tensor, cost: torch.Tensor | None = None) -> torch.Tensor:
    squares = (dequantize_fp8(quantize_fp8(w, scale), scale) - w).square()
    return (squares if cost is None else squares * cost).sum(1)


def test_every_row_gets_its_best_scale() -> None:
    w = weight()
    scale, plain = search_scale(w, CHANNEL), absmax_scale(w, CHANNEL)
    assert scale.shape == (40, 1)
    assert bool((scale >= plain).all())
    assert bool((scale < 2.02 * plain).all())
    assert torch.equal(scale, scale.bfloat16().float())
    assert bool((errors(w, scale) <= errors(w, plain)).all())
    assert float(errors(w, scale).sum()) < 0.97 * float(errors(w, plain).sum())


def test_rows_do_not_depend_on_each_other_or_on_strips() -> None:
    w = weight(rows=2000, columns=300)  # several strips
    assert torch.equal(search_scale(w, CHANNEL)[1500:1510], search_scale(w[1500:1510], CHANNEL))


def test_column_weights_decide() -> None:
    w = weight()
    cost = torch.zeros(300)
    cost[:10] = 1.0
    weighted, plain = search_scale(w, CHANNEL, cost), search_scale(w, CHANNEL)
    assert not torch.equal(weighted, plain)
    assert bool((errors(w, weighted, cost) <= errors(w, plain, cost) + 1e-12).all())


def test_one_scale_for_a_tensor_and_for_fused_ones() -> None:
    gate, up = weight(seed=1), 3.0 * weight(seed=2)
    alone, together = search_scale(gate, TENSOR), search_scale(gate, TENSOR, fused=[gate, up])
    assert alone.shape == together.shape == (1,)
    assert torch.equal(together, search_scale(up, TENSOR, fused=[gate, up]))
    assert float(together) >= float(absmax_scale(gate, TENSOR, [up]))
    total = errors(gate, together).sum() + errors(up, together).sum()
    plain = absmax_scale(gate, TENSOR, [up])
    assert float(total) <= float(errors(gate, plain).sum() + errors(up, plain).sum())


@pytest.mark.parametrize("scheme", [CHANNEL, TENSOR])
def test_zeros_and_tiny_values(scheme: QuantizationScheme) -> None:
    w = torch.zeros(3, 5)
    w[1] = 1e-38
    scale = search_scale(w, scheme)
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())


def test_16_bit_weights_are_searched_in_float32() -> None:
    w = weight().bfloat16()
    assert torch.equal(search_scale(w, CHANNEL), search_scale(w.float(), CHANNEL))


def test_without_numba_the_search_is_coarser_but_no_worse_than_the_largest_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = weight()
    fine, tensor = search_scale(w, CHANNEL), search_scale(w, TENSOR)
    monkeypatch.setattr(scale_search, "compiled_loops", lambda device: None)
    coarse = search_scale(w, CHANNEL)
    assert bool((errors(w, coarse) <= errors(w, absmax_scale(w, CHANNEL))).all())
    assert float(errors(w, coarse).sum()) > float(errors(w, fine).sum())
    assert torch.equal(search_scale(w, TENSOR), tensor)


def input_error(x: torch.Tensor, costs: torch.Tensor, scale: torch.Tensor) -> float:
    errors = (dequantize_fp8(quantize_fp8(x, scale), scale) - x).square() @ costs
    return float((errors / (x.square() @ costs)).double().sum())


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_input_scale_leaves_the_least_error_of_its_octave(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(scale_search, "compiled_loops", lambda device: None)
    x, costs = weight(rows=100, columns=64), torch.linspace(0.1, 1.0, 64)
    x[::2, 3] = 300.0  # constant, and most of the error unless it falls on a value of FP8
    other, other_costs = weight(rows=30, columns=20, seed=1), torch.linspace(1.0, 0.1, 20)
    smallest = amax_to_scale(torch.tensor([640.0]))
    found = search_input_scale(smallest, [(x, costs), (other, other_costs)])
    assert found.shape == (1,)
    assert torch.equal(found, found.bfloat16().float())
    assert float(smallest) <= float(found) < 2 * float(smallest)

    def total(scale: torch.Tensor) -> float:
        return input_error(x, costs, scale) + input_error(other, other_costs, scale)

    bits = smallest.view(torch.int32)
    octave = [(bits + (step << 19)).view(torch.float32) for step in range(16)]
    assert total(found) <= 1.0001 * min(total(scale) for scale in octave)
    assert total(found) < total(smallest)


def test_inputs_too_small_for_a_scale_are_counted_as_lost() -> None:
    smallest = amax_to_scale(torch.tensor([1000.0]))
    x = torch.full((50, 8), 0.9 * float(smallest) * 2.0**-9)  # rounds to the smallest code, or, further up, to nothing
    assert torch.equal(search_input_scale(smallest, [(x, torch.ones(8))]), smallest)


def test_large_tokens_count_no_more_than_others_and_zeros_not_at_all() -> None:
    x, smallest = weight(rows=64, columns=32), amax_to_scale(torch.tensor([9.0]))
    found = search_input_scale(smallest, [(x, torch.ones(32))])
    uneven = torch.cat([x[:40] * 2.0**-3, x[40:], torch.zeros(5, 32)])  # powers of two: the same roundings
    assert torch.equal(search_input_scale(smallest, [(uneven, torch.ones(32))]), found)
    assert torch.equal(search_input_scale(smallest, [(torch.zeros(5, 32), torch.ones(32))]), smallest)


def test_16_bit_inputs_are_searched_in_float32() -> None:
    x, costs, smallest = weight().bfloat16(), torch.ones(300), amax_to_scale(torch.tensor([9.0]))
    assert torch.equal(search_input_scale(smallest, [(x, costs)]), search_input_scale(smallest, [(x.float(), costs)]))
