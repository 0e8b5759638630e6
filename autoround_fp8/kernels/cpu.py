"""CPU kernel: FP8 weights stay FP8 in memory and are decoded for each product by integer arithmetic.

torch's own FP8 casts are scalar on a CPU; the same bits come out of a few vectorised passes, written twice: in plain
torch here, and in `numba_loops.py`, faster, where Numba is installed. Never `torch._scaled_mm`: on a CPU it is an
emulation.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from autoround_fp8.device import has_fast_bfloat16
from autoround_fp8.kernels.base import LinearProblem
from autoround_fp8.numerics.fp8 import FP8_MAX, token_scale

logger = logging.getLogger(__name__)

# Elements handled at a time by the torch loops: the temporaries stay in the cache, and torch runs each pass on one
# thread. Its threads would meet after every pass, hundreds of times per layer: seconds per layer on a busy machine.
_STRIP = 1 << 15
# Weight elements decoded at a time: bounds the scratch memory (64 MiB of float32), e.g. for an lm_head.
_SLAB = 1 << 24
# An E4M3 code shifted into the bits of a half (bfloat16) has the right mantissa and an exponent too small by 8 (120).
_HALF_SHIFT = 2.0**8
_BFLOAT16_SHIFT = 2.0**120


def decode_fp8(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of E4M3FN codes, exactly (subnormals and signed zeros too; NaN codes give 480).

    Args:
        codes: `float8_e4m3fn`, any shape.
        dtype: torch.bfloat16 or torch.float32.
    """
    out = torch.empty(codes.shape, dtype=dtype)
    TorchLoops().decode_into(codes.contiguous().view(torch.int8), out)
    return out


def round_to_fp8_values(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values that `quantize_fp8(x, scale)` codes, without the slow cast to FP8 and back.

    `(|y| + s) - s` with `s` = 2^20 times the power of two below `|y|` rounds to 3 mantissa bits, half to even, because
    2^-3 of that power is the last bit of the sum; a floor of 2^-6 under the power gives E4M3's subnormals.

    Args:
        x: Any float dtype and shape.
        scale: Float32 `[1]`.
        dtype: torch.float32 or torch.bfloat16; both hold every code exactly.

    Returns:
        `dtype` of x's shape, contiguous, equal to `quantize_fp8(x, scale)` bit for bit; NaN stays NaN.
    """
    out = torch.empty(x.shape, dtype=dtype)
    source, target = x.contiguous().view(-1), out.view(-1)
    for begin in range(0, source.numel(), _STRIP):
        y = (source[begin : begin + _STRIP].float() / scale).clamp_(-FP8_MAX, FP8_MAX)
        exponent = y.view(torch.int32).bitwise_and(0x7F800000).clamp_min_(121 << 23)
        magic = exponent.add_(20 << 23).view(torch.float32)
        target[begin : begin + _STRIP] = y.abs().add_(magic).sub_(magic).copysign_(y)
    return out


class Loops(Protocol):
    """The inner loops of the kernel: what `TorchLoops` and `NumbaLoops` both do."""

    max_fused_tokens: int

    def decode_into(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values of FP8 codes (viewed as int8, contiguous) into `out`, bfloat16 or float32, same shape."""

    def round_to_fp8_values(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As the function of that name."""

    def product(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Float32 `x [tokens, in] @ decode(codes [out, in]).T`, for at most `max_fused_tokens` tokens."""


class TorchLoops:
    """The loops in plain torch: always there, and the yardstick of the compiled ones."""

    max_fused_tokens = 0

    def decode_into(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """See `Loops.decode_into`."""
        source, target = codes.view(-1), out.view(-1)
        for begin in range(0, source.numel(), _STRIP):
            # Sign extension fills bits 8 to 15; the mask keeps bit 15 of these as the sign.
            bits = source[begin : begin + _STRIP].to(torch.int16)
            strip = target[begin : begin + _STRIP]
            if out.dtype == torch.bfloat16:
                bits.bitwise_left_shift_(4).bitwise_and_(-0x7810)
                strip.copy_(bits.view(torch.bfloat16)).mul_(_BFLOAT16_SHIFT)
            else:
                bits.bitwise_left_shift_(7).bitwise_and_(-0x4080)
                strip.copy_(bits.view(torch.float16)).mul_(_HALF_SHIFT)

    def round_to_fp8_values(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Loops.round_to_fp8_values`."""
        return round_to_fp8_values(x, scale, dtype)

    def product(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Decodes the weight, then multiplies: nothing is fused here."""
        weight = torch.empty(codes.shape)
        self.decode_into(codes, weight)
        return torch.mm(x, weight.t())


def choose_loops(use_numba: bool | None = None) -> Loops:
    """Numba's loops if Numba can be imported, else torch's.

    Args:
        use_numba: False for torch's loops; True to fail without Numba; None to choose.

    Raises:
        ImportError: If `use_numba` is True and Numba cannot be imported.
    """
    if use_numba is False:
        return TorchLoops()
    try:
        from autoround_fp8.kernels.numba_loops import NumbaLoops
    except ImportError as e:
        if use_numba:
            raise
        logger.info("kernel cpu: Numba cannot be imported (%s), so its slower plain torch loops run", e)
        return TorchLoops()
    return NumbaLoops()


class CpuKernel:
    """Rounds the input, decodes the weight, multiplies, rescales.

    With a float32 product the result differs from the oracle's by the order of summation only (code times code is exact
    in float32). bfloat16 activations on a CPU with native bfloat16 use its product, whose sums are rounded to bfloat16
    before the scales are applied: as exact as any bfloat16 Linear.

    Args:
        use_numba: See `choose_loops`; decided at the first product.
        product_dtype: float32 or bfloat16 for the product; None = bfloat16 for bfloat16 inputs where it is native.
    """

    name = "cpu"

    def __init__(self, *, use_numba: bool | None = None, product_dtype: torch.dtype | None = None) -> None:
        self._use_numba = use_numba
        self._product_dtype = product_dtype
        self._loops: Loops | None = None

    def unsupported_reason(self, problem: LinearProblem) -> str | None:
        """Anything but a CPU is refused."""
        return None if problem.device.type == "cpu" else f"the layer is on {problem.device}, not on a CPU"

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes the layer without autograd; shapes as of `reference_linear`.

        Raises:
            ValueError: If x's last dimension is not the weight's.
        """
        out_features, in_features = weight.shape
        if x.shape[-1] != in_features:
            raise ValueError(f"last dimension of x ({x.shape[-1]}) must be in_features ({in_features})")
        if x.numel() == 0:  # an expert without tokens must not pay for decoding
            return x.new_zeros(*x.shape[:-1], out_features)
        if self._loops is None:
            self._loops = choose_loops(self._use_numba)
        tokens = x.detach().reshape(-1, in_features)
        codes = weight.detach().contiguous().view(torch.int8)
        if input_scale is None:
            # Divided here, so that the loops round to steps of one scale, 1.
            scale, rounding_scale = token_scale(tokens), torch.ones(1)
            tokens = tokens.float() / scale
        else:
            scale = rounding_scale = input_scale
        if tokens.shape[0] <= self._loops.max_fused_tokens:
            y = self._loops.product(self._loops.round_to_fp8_values(tokens, rounding_scale, torch.float32), codes)
        else:
            dtype = self._product_dtype or _product_dtype(x)
            y = _slab_product(
                self._loops, self._loops.round_to_fp8_values(tokens, rounding_scale, dtype), codes
            ).float()
        y *= (scale * weight_scale.reshape(-1)).detach()
        if bias is not None:
            y += bias.detach()
        return y.to(x.dtype).reshape(*x.shape[:-1], out_features)

    # A kernel has no state of its own: copies of a model share it, and its threads are not copied or pickled.
    def __deepcopy__(self, memo: dict[int, Any]) -> CpuKernel:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loops": None}


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == torch.bfloat16 and has_fast_bfloat16(x.device) else torch.float32


def _slab_product(loops: Loops, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`x [tokens, in] @ decode(codes [out, in]).T` in x's dtype, decoding a bounded number of rows at a time."""
    out_features, in_features = codes.shape
    num_rows = max(1, min(out_features, _SLAB // max(1, in_features)))
    y = torch.empty(x.shape[0], out_features, dtype=x.dtype)
    slab = torch.empty(num_rows, in_features, dtype=x.dtype)
    for begin in range(0, out_features, num_rows):
        rows = codes[begin : begin + num_rows]
        values = slab[: rows.shape[0]]
        loops.decode_into(rows, values)
        torch.mm(x, values.t(), out=y[:, begin : begin + num_rows])
    return y
