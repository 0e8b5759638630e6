"""Weight scales by least squared error instead of by the largest value alone.

FP8 is a floating point format: multiplying a scale by two changes no rounding but that of the smallest values. So one
octave above the scale that just holds the largest value has every rounding there is, and nothing saturates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoround_fp8.numerics.fp8 import amax_to_scale, round_to_four_bits, round_up_to_bfloat16
from autoround_fp8.numerics.granularity import PER_TENSOR, weight_amax
from autoround_fp8.schemes import QuantizationScheme

STEPS_PER_OCTAVE = 16
# Rows are searched in strips of about this many elements, so that the temporaries stay in the cache.
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
        candidates = _candidates(amax_to_scale(amax))
        totals = [
            sum(float(_row_errors(w, scale.expand(w.shape[0], 1), column_weights).sum()) for w in together)
            for scale in candidates
        ]
        return candidates[totals.index(min(totals))]
    candidates = _candidates(amax_to_scale(weight_amax(weight, scheme.group_size)))
    errors = torch.stack([_row_errors(weight, scale, column_weights) for scale in candidates])
    best = errors.argmin(dim=0)
    return torch.stack(candidates).gather(0, best[None, :, None]).squeeze(0)


def _candidates(smallest: torch.Tensor) -> list[torch.Tensor]:
    return [round_up_to_bfloat16(smallest * 2.0 ** (step / STEPS_PER_OCTAVE)) for step in range(STEPS_PER_OCTAVE)]


def _row_errors(weight: torch.Tensor, scale: torch.Tensor, column_weights: torch.Tensor | None) -> torch.Tensor:
    """Squared error of each row, float64 `[out]`: squares of a scale may leave float32."""
    errors = torch.empty(weight.shape[0], dtype=torch.float64, device=weight.device)
    length = max(1, _STRIP_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], length):
        rows, steps = weight[start : start + length].float(), scale[start : start + length]
        values = rows / steps
        # No value is beyond FP8's largest, and errors of subnormals are below a thousandth of a scale.
        error = round_to_four_bits(values).sub_(values).square_()
        total = error.sum(1) if column_weights is None else error @ column_weights
        errors[start : start + length] = total.double() * steps.squeeze(1).double().square()
    return errors
