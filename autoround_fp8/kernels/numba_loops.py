"""The CPU kernel's inner loops, compiled by Numba: FP8 decode, input rounding, and a product for few tokens.

`cpu.py` imports this module only where Numba is installed and has the same loops in plain torch.

Numba types `int32 op int32` as int64, hence the many `_I32(...)`: without them the loops do not vectorise to 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autoround_fp8.numerics.compiled import Threads, compiled
from autoround_fp8.numerics.fp8 import FP8_MAX

_I32 = np.int32
_F32 = np.float32
_MAX = _F32(FP8_MAX)


@compiled()
def _float_bits(value: Any) -> Any:
    # Numba can only reinterpret a variable with a single definition, so both casts are functions of their own.
    x = _F32(value)
    return x.view(_I32)


@compiled()
def _bits_float(bits: Any) -> Any:
    x = _I32(bits)
    return x.view(_F32)


@compiled("contract")
def _decode(code: Any) -> Any:
    """The float32 value of an E4M3FN code given as int8 (NaN codes give 480); no float32 subnormal is ever touched.

    With exponent field e and mantissa m, `value` = (1 + m/8) 2^(e-7) is right for e > 0, and `2 value - 2^-6` is right
    for e = 0; where one of them is wrong it is the larger one. Multiplying the bits by 2^120 would be shorter, but some
    CPUs take a slow path for each subnormal then, and flush-to-zero mode would drop these codes.
    """
    u = _I32(code)
    value = _bits_float(_I32(_I32(_I32(u & _I32(0x7F)) << _I32(20)) + _I32(120 << 23)))
    smallest = min(value, _F32(_F32(value * _F32(2.0)) - _F32(2.0**-6)))
    # The int8 was sign-extended, so its sign is already bit 31.
    return _bits_float(_I32(_float_bits(smallest) | _I32(u & _I32(-0x80000000))))


@compiled()
def _round_to_fp8(value: Any, scale: Any) -> Any:
    """`quantize_fp8(value, scale)` as a float32, bit for bit; see `cpu.round_to_fp8_values` for the method."""
    q = _F32(value / scale)
    low = _MAX if q > _MAX else q
    y = -_MAX if low < -_MAX else low  # NaN compares false and stays
    bits = _float_bits(y)
    exponent = _I32(bits & _I32(0x7F800000))
    magic = _bits_float(_I32(max(exponent, _I32(121 << 23)) + _I32(20 << 23)))
    magnitude = _bits_float(_I32(bits & _I32(0x7FFFFFFF)))
    rounded = _F32(_F32(magnitude + magic) - magic)
    return _bits_float(_I32(_float_bits(rounded) | _I32(bits & _I32(-0x80000000))))


@compiled()
def _decode_float32(codes: Any, out: Any) -> None:
    for i in range(codes.size):
        out[i] = _decode(codes[i])


@compiled()
def _decode_bfloat16(codes: Any, out: Any) -> None:
    for i in range(codes.size):
        out[i] = np.int16(_float_bits(_decode(codes[i])) >> _I32(16))


@compiled()
def _round_float32(x: Any, scale: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = _round_to_fp8(x[i], scale)


@compiled()
def _round_bfloat16(x: Any, scale: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = np.int16(_float_bits(_round_to_fp8(x[i], scale)) >> _I32(16))


@compiled("reassoc", "contract")
def _product(x: Any, codes: Any, out: Any) -> None:
    """`out[row, token] = decode(codes) @ x.T` for one token, or tokens in fours. Sums are reordered, NaN stays NaN."""
    num_rows, num_columns = codes.shape
    if x.shape[0] == 1:
        for row in range(num_rows):
            total = _F32(0.0)
            for k in range(num_columns):
                total += _decode(codes[row, k]) * x[0, k]
            out[row, 0] = total
        return
    for row in range(num_rows):
        for t in range(0, x.shape[0], 4):
            a = b = c = d = _F32(0.0)
            for k in range(num_columns):
                weight = _decode(codes[row, k])
                a += weight * x[t, k]
                b += weight * x[t + 1, k]
                c += weight * x[t + 2, k]
                d += weight * x[t + 3, k]
            out[row, t] = a
            out[row, t + 1] = b
            out[row, t + 2] = c
            out[row, t + 3] = d


class NumbaLoops:
    """The loops behind the interface `cpu.Loops`, spread over as many threads as torch may use."""

    # Measured: up to 8 tokens the fused product beats decoding and a BLAS product, at every shape tried.
    max_fused_tokens = 8

    def __init__(self) -> None:
        self._threads = Threads()

    def decode_into(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values of the int8 `codes` into `out`, bfloat16 or float32; both contiguous, same size."""
        loop, target = (
            (_decode_bfloat16, out.view(torch.int16)) if out.dtype == torch.bfloat16 else (_decode_float32, out)
        )
        source_array, target_array = codes.view(-1).numpy(), target.view(-1).numpy()
        self._threads.split(lambda a, b: loop(source_array[a:b], target_array[a:b]), codes.numel(), codes.numel())

    def round_to_fp8_values(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `cpu.round_to_fp8_values`."""
        out = torch.empty(x.shape, dtype=dtype)
        loop, target = (_round_bfloat16, out.view(torch.int16)) if dtype == torch.bfloat16 else (_round_float32, out)
        source_array, target_array = x.float().contiguous().view(-1).numpy(), target.view(-1).numpy()
        step = _F32(scale.item())
        self._threads.split(lambda a, b: loop(source_array[a:b], step, target_array[a:b]), x.numel(), x.numel())
        return out

    def product(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """`x @ decode(codes).T` without writing the decoded weight.

        Args:
            x: Float32 `[tokens, in]`, contiguous.
            codes: int8 `[out, in]`, contiguous.

        Returns:
            Float32 `[tokens, out]`, not contiguous.
        """
        num_tokens = x.shape[0]
        if num_tokens > 1 and num_tokens % 4:
            x = torch.nn.functional.pad(x, (0, 0, 0, -num_tokens % 4))
        out = torch.empty(codes.shape[0], x.shape[0])
        x_array, codes_array, out_array = x.numpy(), codes.numpy(), out.numpy()
        work = codes.numel() * -(-num_tokens // 4)
        self._threads.split(lambda a, b: _product(x_array, codes_array[a:b], out_array[a:b]), codes.shape[0], work)
        return out[:, :num_tokens].t()
