"""Paired comparisons of two exports on the same windows, with standard errors over documents.

Values come as one list per calibration draw with one number per window. Windows of one document are not independent,
and neither are draws judged on the same windows: draws are averaged, and errors are those of a mean over documents.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its standard error."""

    value: float
    standard_error: float


def standard_error_over(documents: Sequence[int], values: Sequence[float]) -> float:
    """Return the standard error of the mean of `values`; those of the same document may depend on each other.

    With one value per document this is the standard deviation over the square root of the count.

    Raises:
        ValueError: if there are fewer than two documents.
    """
    mean = statistics.fmean(values)
    totals: dict[int, float] = {}
    for document, value in zip(documents, values, strict=True):
        totals[document] = totals.get(document, 0.0) + value - mean
    count = len(totals)
    if count < 2:
        raise ValueError(f"number of documents ({count}) must be at least 2 for a standard error")
    return math.sqrt(count / (count - 1) * sum(total**2 for total in totals.values())) / len(values)


def paired_difference(
    documents: Sequence[int], values: Sequence[Sequence[float]], base: Sequence[Sequence[float]]
) -> Estimate:
    """Return the mean of `values - base` over draws and windows."""
    differences = _mean_over_draws(
        [[v - b for v, b in zip(*draw, strict=True)] for draw in zip(values, base, strict=True)]
    )
    return Estimate(value=statistics.fmean(differences), standard_error=standard_error_over(documents, differences))


def paired_ratio(
    documents: Sequence[int], values: Sequence[Sequence[float]], base: Sequence[Sequence[float]]
) -> Estimate:
    """Return the mean over draws of mean(values) / mean(base), with the error of its linearisation over windows."""
    ratios, residuals = [], []
    for value_draw, base_draw in zip(values, base, strict=True):
        base_mean = statistics.fmean(base_draw)
        ratio = statistics.fmean(value_draw) / base_mean
        ratios.append(ratio)
        residuals.append([(v - ratio * b) / base_mean for v, b in zip(value_draw, base_draw, strict=True)])
    error = standard_error_over(documents, _mean_over_draws(residuals))
    return Estimate(value=statistics.fmean(ratios), standard_error=error)


def is_no_worse(difference: Estimate) -> bool:
    """Return whether a paired difference is at most two of its standard errors above zero."""
    return difference.value <= 2 * difference.standard_error


def _mean_over_draws(draws: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(window) for window in zip(*draws, strict=True)]
