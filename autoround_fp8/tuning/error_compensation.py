"""Error compensation: rounds a weight column by column, and lets later columns make up for the error of earlier ones.

The method is GPTQ's (Frantar et al., 2022, arXiv:2210.17323), with columns in the order of their inputs' size. What
matters of the calibration data is the second moment of the layer's input; layers with one input share its factor.
Coordinate descent follows (as in QuantEase, Behdin et al., 2023, arXiv:2309.01885): compensation is greedy, so the
first columns do not know of the errors that were left in the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoround_fp8.numerics.fp8 import FP8_DTYPE, FP8_MAX, round_to_fp8

# Columns rounded before their errors are taken to the rest in one product.
_BLOCK = 128
# Of the mean of the diagonal: what is added to it, so that the factor exists.
_DAMPING = 0.003
_MAX_DAMPING = 1.0


@dataclass(frozen=True, kw_only=True)
class CompensationFactor:
    """How an error in one column is made up for in later ones.

    Attributes:
        order: Columns in the order they are rounded, `[in]`.
        moment: Damped second moment in that order, its diagonal's mean about 1, float32 `[in, in]`.
        upper: Upper Cholesky factor of its inverse, float32 `[in, in]`.
        column_weights: Diagonal of the second moment in the original order, float32 `[in]`, mean 1.
    """

    order: torch.Tensor
    moment: torch.Tensor
    upper: torch.Tensor
    column_weights: torch.Tensor


def factorise(moment: torch.Tensor) -> CompensationFactor | None:
    """Factorises a second moment `[in, in]`; None if it is too near to singular even with damping."""
    diagonal = moment.diagonal()
    mean = float(diagonal.mean())
    if not 0.0 < mean < float("inf"):
        return None
    order = torch.argsort(diagonal, descending=True)
    permuted = moment[order][:, order] / mean
    damping = _DAMPING
    while damping <= _MAX_DAMPING:
        damped = permuted.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed) and bool(torch.isfinite(upper).all()):
                return CompensationFactor(order=order, moment=damped, upper=upper, column_weights=diagonal / mean)
        damping *= 10.0
    return None


def compensate(weight: torch.Tensor, scale: torch.Tensor, factor: CompensationFactor, sweeps: int = 1) -> torch.Tensor:
    """Codes of a weight.

    Args:
        weight: `[out, in]`, finite.
        scale: Float32 `[out, 1]` or `[1]`.
        factor: Of the layer's input.
        sweeps: Passes of coordinate descent after the compensation.

    Returns:
        float8_e4m3fn `[out, in]`.
    """
    wanted = (weight.float() / scale)[:, factor.order].t().contiguous()  # a column of the weight is a row here
    values = _compensated(wanted, factor.upper)
    for _ in range(sweeps):
        _descend(values, wanted, factor.moment)
    codes = torch.empty(values.shape, dtype=FP8_DTYPE, device=weight.device)
    codes.view(torch.uint8)[factor.order] = values.to(FP8_DTYPE).view(torch.uint8)  # FP8 cannot be indexed everywhere
    return codes.t().contiguous()


def _compensated(wanted: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Rounds `[in, out]` row by row; what a row loses, the rows after it make up for. Values of codes, float32."""
    num_columns, num_rows = wanted.shape
    rest = wanted.clone()
    for start in range(0, num_columns, _BLOCK):
        end = min(start + _BLOCK, num_columns)
        inner = upper[start:end, start:end]
        diagonal = inner.diagonal().tolist()
        errors = torch.empty(end - start, num_rows, device=wanted.device)
        for i in range(end - start):
            rounded = round_to_fp8(rest[start + i].clamp(-FP8_MAX, FP8_MAX))
            torch.sub(rest[start + i], rounded, out=errors[i]).div_(diagonal[i])
            rest[start + i] = rounded
            if i + 1 < end - start:
                rest[start + i + 1 : end].addr_(inner[i, i + 1 :], errors[i], alpha=-1.0)
        if end < num_columns:
            rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1.0)
    return rest


def _descend(values: torch.Tensor, wanted: torch.Tensor, moment: torch.Tensor) -> None:
    """Gives every row of `values` `[in, out]` in turn the codes that are best while all others stay; in place.

    The error that counts is `(values - wanted)^T moment (values - wanted)`; no row's change lets it grow.
    """
    num_columns = values.shape[0]
    errors = values - wanted
    for start in range(0, num_columns, _BLOCK):
        end = min(start + _BLOCK, num_columns)
        inner = moment[start:end, start:end]
        diagonal = inner.diagonal().tolist()
        slopes = moment[start:end] @ errors
        for i in range(end - start):
            best = torch.sub(values[start + i], slopes[i], alpha=1.0 / diagonal[i]).clamp_(-FP8_MAX, FP8_MAX)
            best = round_to_fp8(best)
            change = best - values[start + i]
            values[start + i] = best
            errors[start + i] += change
            if i + 1 < end - start:
                slopes[i + 1 :].addr_(inner[i, i + 1 :], change)
