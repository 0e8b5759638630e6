"""FP8 E4M3FN: amax -> scale -> codes -> values, and the signal-to-noise ratio.

A scale is always the multiplier that takes a code back to a value. Read `granularity.py` for which elements share a
scale.
"""

from __future__ import annotations

import math

import torch

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
# The smallest normal float32 (and bfloat16): a smaller scale would be flushed to zero by some consumers.
SMALLEST_SCALE = 2.0**-126
# Weights are worked on in strips of rows of about this many elements: float32 copies of an output layer are large.
_STRIP_ELEMENTS = 1 << 25
# vLLM's floor of the scales that it makes on the fly.
SMALLEST_TOKEN_SCALE = 1.0 / (FP8_MAX * 512.0)


def round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Rounds positive float32 values up to the next bfloat16-representable value, keeping float32.

    Some engines read scales as bfloat16. Rounding before the weights are coded makes that cast exact, and rounding up
    (not to nearest) means the largest value never saturates.

    Args:
        x: Float32, positive and finite, any shape.

    Returns:
        Float32 of the same shape.
    """
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def amax_to_scale(amax: torch.Tensor) -> torch.Tensor:
    """Turns the largest absolute value into a dequantisation scale.

    Args:
        amax: Largest absolute values, float32, any shape, finite and >= 0.

    Returns:
        Float32 scales of the same shape: `amax / 448` rounded up to a bfloat16-representable value, at least 2**-126,
        so a zero row gets a finite scale.

    Raises:
        ValueError: If an amax is NaN, infinite or negative.
    """
    amax = amax.float()
    if not bool(torch.isfinite(amax).all()) or bool((amax < 0).any()):
        raise ValueError(f"amax must be finite and not negative, got {amax.flatten()[:4].tolist()} ...")
    return round_up_to_bfloat16((amax / FP8_MAX).clamp_min(SMALLEST_SCALE))


def token_scale(x: torch.Tensor) -> torch.Tensor:
    """The scale of each token of a layer's input, made on the fly as vLLM does: its largest absolute value / 448.

    Args:
        x: `[..., in]`, any float dtype.

    Returns:
        Float32 `[..., 1]`, at least 1 / (448 * 512).
    """
    return (x.abs().amax(dim=-1, keepdim=True).float() / FP8_MAX).clamp_min_(SMALLEST_TOKEN_SCALE)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes `x` as FP8 E4M3FN, rounding to nearest even.

    Args:
        x: Values, any float dtype, any shape.
        scale: Dequantisation multiplier, float32, broadcastable to `x`.

    Returns:
        `float8_e4m3fn` of `x`'s shape. Values beyond 448 scales saturate: E4M3FN has no infinity, and a cast without
        the clamp would give NaN.
    """
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rounds to the values that FP8 E4M3FN codes stand for, half to even, without a cast to FP8 and back.

    Adding and taking away 2^20 times the power of two below `|x|` leaves three bits of its fraction; the floor of 2^-6
    under that power gives the subnormals.

    Args:
        x: Float32, any shape, within +-448.

    Returns:
        Float32 of the same shape, equal to `x.to(torch.float8_e4m3fn).float()`.
    """
    magnitude = x.abs()
    power = magnitude.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=121 << 23)
    magic = power.add_(20 << 23).view(torch.float32)
    return magnitude.add_(magic).sub_(magic).copysign_(x)


def round_to_four_bits(x: torch.Tensor) -> torch.Tensor:
    """Rounds to four significant bits, half to even, in three passes (Dekker, 1971): a cheaper `round_to_fp8`.

    Within +-448 that is FP8's rounding but for its subnormals, values below 2**-6, which stay closer to `x`.

    Args:
        x: Float32, any shape, below 2**106.

    Returns:
        Float32 of the same shape.
    """
    scaled = x * (2.0**20 + 1.0)
    return scaled - (scaled - x)


def fp8_step(x: torch.Tensor) -> torch.Tensor:
    """Distance from `|x|` to the next larger value that an FP8 E4M3FN code stands for, had it no largest value.

    Args:
        x: Float32, any shape.

    Returns:
        Float32 of the same shape: a power of two, at least 2**-9.
    """
    power = x.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=121 << 23)
    return power.sub_(3 << 23).view(torch.float32)


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """Turns FP8 E4M3FN codes into the float32 values they stand for, exactly, and on a CPU faster than `.float()`.

    A code is the float16 with the same sign and the other seven bits three places further up, times 2**8: the exponent
    biases are 7 and 15. Through float16 and not bfloat16, whose subnormals are lost under `torch.set_flush_denormal`.

    Args:
        codes: `float8_e4m3fn`, any shape.

    Returns:
        Float32 of the same shape; NaN for the codes 0x7f and 0xff.
    """
    assert codes.dtype == FP8_DTYPE
    if codes.device.type != "cpu":
        return codes.float()
    # The sign is extended into the upper byte; the mask keeps bit 15 and the seven bits 7..13.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0x3F80 - 0x8000)
    values = bits.view(torch.float16).float().mul_(2.0**8)
    # The two NaN codes come out as +-480; one pass for both extremes is cheaper than a mask of every element.
    if values.numel() and max(abs(extreme) for extreme in torch.stack(torch.aminmax(values)).tolist()) > FP8_MAX:
        values.masked_fill_(values.abs() > FP8_MAX, math.nan)
    return values


def dequantize_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Turns FP8 codes back into float32 values: value times `scale`, which is broadcastable to the codes."""
    return decode_fp8(codes) * scale


def strip_rows(weight: torch.Tensor) -> int:
    """How many rows of a weight `[out, in]` to make float32 copies of at a time; all of them but for huge ones."""
    return max(1, _STRIP_ELEMENTS // max(1, weight.shape[1]))


def weight_sqnr_db(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    """`sqnr_db` of a weight and what its codes stand for, strip by strip.

    Args:
        weight: `[out, in]`, any float dtype.
        codes: `float8_e4m3fn` of the same shape.
        scale: Float32 `[out, 1]` or `[1]`.
    """
    noise = signal = 0.0
    length = strip_rows(weight)
    scales = scale.reshape(-1, 1).expand(len(weight), 1)
    for rows, part, own in zip(*(tensor.split(length) for tensor in (weight, codes, scales)), strict=True):
        reference = rows.float()
        noise = math.hypot(noise, _norm(reference - dequantize_fp8(part, own)))
        signal = math.hypot(signal, _norm(reference))
    return _decibels(signal, noise)


def sqnr_db(reference: torch.Tensor, quantized: torch.Tensor) -> float:
    """Signal to quantisation noise ratio `10 log10(|r|^2 / |r - q|^2)` in dB; inf when both are equal, nan on NaN.

    Args:
        reference: Any shape; computed in float32.
        quantized: Same shape.
    """
    reference, quantized = reference.float(), quantized.float()
    return _decibels(_norm(reference), _norm(reference - quantized))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 20.0 * math.log10(signal / noise) if signal != 0.0 else -math.inf


def _norm(x: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x))
    if 1e-12 < norm < 1e12 or x.numel() == 0:
        return norm
    # Squares of 1e-30 or 1e30 leave float32: measure relative to the largest value.
    peak = float(x.abs().max())
    return norm if peak == 0.0 or not math.isfinite(peak) else peak * float(torch.linalg.vector_norm(x / peak))
