"""The nouns that cross folders: plain frozen dataclasses, no behaviour beyond shape checks.

Read `compressor.py` for how they flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """One quantised linear layer: what tuning makes, formats write and tests compare.

    Attributes:
        fqn: Module name in the source checkpoint, without `.weight`.
        weight: FP8 codes `[out_features, in_features]`, `torch.float8_e4m3fn`.
        weight_scale: Dequantisation multiplier, float32 `[out_features, 1]` (per channel) or `[1]` (per tensor).
        input_scale: Dequantisation multiplier of the static input quantisation, float32 `[1]`; None if each token gets
            its own on the fly.
        bias: `[out_features]` in the source dtype, or None.
    """

    fqn: str
    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CacheScales:
    """The scales by which engines code the keys and values of one attention in an FP8 cache.

    Attributes:
        fqn: Name of the attention module in the source checkpoint.
        k_scale: Dequantisation multiplier of the keys as they are cached, float32 `[1]`.
        v_scale: The same of the values.
    """

    fqn: str
    k_scale: torch.Tensor
    v_scale: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """What one decoder block is called with for one batch of samples.

    Attributes:
        block: Its number, for messages.
        hidden_states: `[batch, tokens, hidden]`; samples in a batch all have the same length, so nothing is padding.
        args: Further positional arguments of the block, after the hidden states.
        kwargs: Keyword arguments (masks, rotary tables, positions ...), this block's own.
    """

    block: int
    hidden_states: torch.Tensor
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What happened to one linear layer.

    Attributes:
        fqn: Module name in the source checkpoint.
        shape: `(out_features, in_features)`.
        weight_sqnr_db: Signal to quantisation noise ratio of the weight in dB (inf for an exact layer).
        input_amax: Largest absolute input value seen in calibration, probes included, in the model's units.
        input_scale: The exported input scale, None if there is none.
        num_tokens: Calibration tokens that reached the layer; probe tokens do not count.
        num_peak_tokens: Tokens, also of probes, with a value of at least half of `input_amax`; 16 = 16 or more.
        source: Where the input range came from (`tuning/input_ranges.py`).
        algorithm: What its weight was quantised by: the one asked for, or what it fell back to.
    """

    fqn: str
    shape: tuple[int, int]
    weight_sqnr_db: float
    input_amax: float
    input_scale: float | None
    num_tokens: int
    num_peak_tokens: int
    source: str = "observed"
    algorithm: str = "rtn"


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What was seen of the keys and values that one attention puts into its cache.

    Attributes:
        fqn: Name of the attention module in the source checkpoint.
        k_amax: Largest absolute key as it is cached, after norm and rotary embedding, probes included.
        v_amax: Largest absolute value, probes included.
        k_scale: The exported scale of the keys.
        v_scale: The exported scale of the values.
        k_peak_tokens: Tokens, also of probes, whose key has a value of at least half of `k_amax`; 16 = 16 or more.
        v_peak_tokens: The same of the values.
        num_tokens: Calibration tokens that were seen; probe tokens do not count.
    """

    fqn: str
    k_amax: float
    v_amax: float
    k_scale: float
    v_scale: float
    k_peak_tokens: int
    v_peak_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """How gradient tuning of one block went.

    Attributes:
        losses: Step -> relative error of the block's output on batches that no gradient came from; 0 is the start.
        best_step: The step that was kept.
    """

    losses: dict[int, float]
    best_step: int


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    """What happened to one decoder block, or to the output layer: seconds, peak memory in bytes, layers, tuning if any.

    `expert_tokens`: experts module -> calibration tokens that each of its experts saw. `cache`: the scales of its KV
    cache, None if there are none.
    """

    fqn: str
    seconds: float
    peak_memory_bytes: int
    layers: tuple[LayerReport, ...]
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    tuning: TuningReport | None = None
    cache: CacheReport | None = None
