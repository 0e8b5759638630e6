"""Scales by least squared error instead of by the largest value alone.

FP8 is a floating point format: multiplying a scale by two changes no rounding but that of the smallest values. So one
octave above the scale that just holds the largest value has every rounding there is, and nothing saturates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoround_fp8.numerics.fp8 import amax_to_scale, round_to_fp8
from autoround_fp8.numerics.granularity import PER_TENSOR, weight_amax
from autoround_fp8.schemes import QuantizationScheme
from autoround_fp8.tuning.loops import compiled_loops

# Every bfloat16 value of an octave: 16 of them leave 4 % more squared error of a row, the smallest alone 22 %.
_ALL_STEPS = 128
# Where one more step gains nothing (the rows of a tensor average out), or costs too much (on a CPU without Numba).
_FEW_STEPS = 16
# Plain torch searches rows in strips of about this many elements, so that the temporaries stay in the cache.
_STRIP_ELEMENTS = 1 << 17


def search_scale(
    weight: torch.Tensor,
    scheme: QuantizationScheme,
    column_weights: torch.Tensor | None = None,
    fused: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The scale, or one per row, whose rounding to nearest leaves the least squared error.

    Args:
        weight: `[out, in]`, finite, any float dtype of 16 bits or more.
        scheme: Its `group_size` says which weights share a scale.
        column_weights: What an error in each column costs, float32 `[in]`, >= 0; None = the same everywhere.
        fused: Weights that share one scale per tensor with this one (itself may be among them).

    Returns:
        Float32 `[out, 1]` or `[1]`, bfloat16-representable; never smaller than round to nearest takes.
    """
    if scheme.group_size == PER_TENSOR:
        together = list(fused) or [weight]
        amax = torch.stack([weight_amax(w, PER_TENSOR) for w in together]).amax(dim=0)
        scales = _candidates(amax_to_scale(amax)[None], _FEW_STEPS)
        totals = [_errors(w, scales.expand(w.shape[0], -1), column_weights).sum(0) for w in together]
        return scales[0, torch.stack(totals).sum(0).argmin()].reshape(1)
    is_slow = weight.device.type == "cpu" and compiled_loops(weight.device) is None
    steps = _FEW_STEPS if is_slow else _ALL_STEPS
    scales = _candidates(amax_to_scale(weight_amax(weight, scheme.group_size)), steps)
    return scales.gather(1, _errors(weight, scales, column_weights).argmin(dim=1, keepdim=True))


def search_input_scale(smallest: torch.Tensor, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The static scale, within an octave, of least squared error of what layers make of their inputs.

    Each token's error counts relative to that token: a few tokens' inputs are a thousand times larger than others'. And
    these are nearly constant: whether they fall on an FP8 value or between two is worth some choice.

    Args:
        smallest: Float32 `[1]`, bfloat16-representable: holds the largest input.
        inputs: Per distinct input, tokens of it `[tokens, in]`, and what an error in each column costs, float32 `[in]`:
            the sum of squares of that column of the weights.

    Returns:
        Float32 `[1]`, bfloat16-representable, at least `smallest` and below twice that.
    """
    scales = _candidates(smallest[None], _FEW_STEPS)
    total = torch.zeros(_FEW_STEPS, dtype=torch.float64)
    for rows, costs in inputs:
        errors = _errors(rows, scales.to(rows.device).expand(rows.shape[0], -1), costs)
        sizes = (rows.float().square() @ costs).double()
        total += (errors[sizes > 0] / sizes[sizes > 0, None]).sum(0).cpu()
    return scales[0, total.argmin()].reshape(1)


def _candidates(smallest: torch.Tensor, steps: int) -> torch.Tensor:
    """`[rows, steps]` bfloat16 values from `smallest [rows, 1]`, itself one, up to twice that."""
    distance = (1 << 16) * (_ALL_STEPS // steps)
    offsets = torch.arange(0, steps * distance, distance, dtype=torch.int32, device=smallest.device)
    return (smallest.view(torch.int32) + offsets).view(torch.float32)


def _errors(weight: torch.Tensor, scales: torch.Tensor, column_weights: torch.Tensor | None) -> torch.Tensor:
    """Squared error of each row under each of its scales, float64 `[out, steps]`: their squares may leave float32."""
    costs = torch.ones(weight.shape[1], device=weight.device) if column_weights is None else column_weights
    compiled = compiled_loops(weight.device)
    errors = (_row_errors if compiled is None else compiled.row_errors)(weight, scales, costs)
    return errors.double() * scales.double().square()


def _row_errors(weight: torch.Tensor, scales: torch.Tensor, column_weights: torch.Tensor) -> torch.Tensor:
    """What `numba_loops.row_errors` computes."""
    errors = torch.empty(scales.shape, device=weight.device)
    length = max(1, _STRIP_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], length):
        rows = weight[start : start + length].float()
        for step in range(scales.shape[1]):
            values = rows / scales[start : start + length, step : step + 1]
            errors[start : start + length, step] = round_to_fp8(values).sub_(values).square_() @ column_weights
    return errors
