"""Inner loops of the scale search and of error compensation, compiled by Numba.

`scale_search.py` and `error_compensation.py` use them where Numba is installed, and have the same in plain torch, which
takes some 20 times as long on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autoround_fp8.numerics.compiled import Threads, compiled
from autoround_fp8.numerics.fp8 import FP8_MAX

_F32 = np.float32
_MAX = _F32(FP8_MAX)
# Columns that error compensation works on at a time: they stay in the cache.
_CHUNK = 256
# Rows are taken to float32 in strips of about this many elements.
_STRIP_ELEMENTS = 1 << 19

_threads = Threads()


@compiled()
def _four_bits(value: Any) -> Any:
    """`round_to_four_bits`; without fast-math flags, which would make nothing of it."""
    scaled = _F32(value * _F32(2.0**20 + 1.0))
    return _F32(scaled - _F32(scaled - value))


@compiled()
def _rounding_error(value: Any) -> Any:
    """`round_to_fp8(value) - value`: FP8's subnormals are multiples of 2^-9, the last bit of 1.5 * 2^14."""
    normal = _four_bits(value)
    subnormal = _F32(_F32(value + _F32(1.5 * 2.0**14)) - _F32(1.5 * 2.0**14))
    rounded = normal if abs(value) >= _F32(2.0**-6) else subnormal
    return _F32(rounded - value)


@compiled("reassoc", "contract")
def _sum_squares(weight: Any, inverse_scales: Any, column_weights: Any, out: Any) -> None:
    num_rows, num_columns = weight.shape
    for row in range(num_rows):
        for step in range(inverse_scales.shape[1]):
            inverse = inverse_scales[row, step]
            total = _F32(0.0)
            for k in range(num_columns):
                error = _rounding_error(_F32(weight[row, k] * inverse))
                total += _F32(_F32(error * error) * column_weights[k])
            out[row, step] = total


def row_errors(weight: torch.Tensor, scales: torch.Tensor, column_weights: torch.Tensor) -> torch.Tensor:
    """Squared error of each row under each of its scales, in squares of the scale.

    Args:
        weight: `[out, in]`, on the CPU, any float dtype.
        scales: Float32 `[out, steps]`.
        column_weights: Float32 `[in]`.

    Returns:
        Float32 `[out, steps]`.
    """
    out = torch.empty(scales.shape)
    inverse, target, costs = scales.reciprocal().numpy(), out.numpy(), column_weights.contiguous().numpy()
    length = max(1, _STRIP_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], length):
        rows = weight[start : start + length].float().contiguous().numpy()
        own, errors = inverse[start : start + length], target[start : start + length]

        def search(begin: int, end: int, rows: Any = rows, own: Any = own, errors: Any = errors) -> None:
            _sum_squares(rows[begin:end], own[begin:end], costs, errors[begin:end])

        _threads.split(search, len(rows), rows.size * scales.shape[1])
    return out


@compiled("contract")
def _compensate_rows(rest: Any, upper: Any, errors: Any) -> None:
    num_rows, num_columns = rest.shape
    for start in range(0, num_columns, _CHUNK):
        end = min(start + _CHUNK, num_columns)
        for i in range(num_rows):
            diagonal = upper[i, i]
            for c in range(start, end):
                value = rest[i, c]
                rounded = _four_bits(min(max(value, -_MAX), _MAX))
                errors[i, c] = _F32(_F32(value - rounded) / diagonal)
                rest[i, c] = rounded
            for k in range(i + 1, num_rows):
                share = upper[i, k]
                for c in range(start, end):
                    rest[k, c] -= _F32(share * errors[i, c])


def compensate_rows(rest: torch.Tensor, upper: torch.Tensor, errors: torch.Tensor) -> None:
    """Rounds rows one after the other, in place; what one loses, the rows after it make up for.

    Args:
        rest: Float32 `[rows, columns]`, contiguous, on the CPU.
        upper: Float32 `[rows, rows]`: how.
        errors: Float32 `[rows, columns]`, to be filled: what was lost, over the diagonal of `upper`.
    """
    values, shares, lost = rest.numpy(), upper.contiguous().numpy(), errors.numpy()

    def compensate(begin: int, end: int) -> None:
        _compensate_rows(values[:, begin:end], shares, lost[:, begin:end])

    _threads.split(compensate, rest.shape[1], rest.numel() * len(rest))
