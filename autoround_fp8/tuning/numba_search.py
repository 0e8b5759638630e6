"""The scale search's inner loop, compiled by Numba: seven times as fast per weight and scale as a few torch passes.

`scale_search.py` imports this module only where Numba is installed, and has the same in plain torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autoround_fp8.numerics.compiled import Threads, compiled

_F32 = np.float32
# Rows are taken to float32 in strips of about this many elements.
_STRIP_ELEMENTS = 1 << 22

_threads = Threads()


@compiled()
def _rounding_error(value: Any) -> Any:
    """`round_to_fp8(value) - value`; without fast-math flags, which would make it 0.

    Four significant bits (Dekker, 1971), or, for FP8's subnormals, multiples of 2^-9, the last bit of 1.5 * 2^14.
    """
    scaled = _F32(value * _F32(2.0**20 + 1.0))
    normal = _F32(scaled - _F32(scaled - value))
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
