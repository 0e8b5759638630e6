"""Every setting of a run, in one frozen dataclass: the only home of defaults and of their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoround_fp8.errors import ConfigError
from autoround_fp8.schemes import QuantizationScheme

ALGORITHMS = ("rtn", "mse", "gptq", "signround")
MOE_INPUT_SCALES = ("shared", "per_expert")
UNSEEN_EXPERTS = ("max", "error")
KV_DTYPES = ("fp8", "float8_e4m3fn")
CALIBRATION_DTYPES = ("auto", "float32", "bfloat16", "float16")

# Whole numbers -> the least that makes sense.
_COUNTS = {
    "nsamples": 1,
    "seqlen": 1,
    "batch_size": 1,
    "gradient_accumulate_steps": 1,
    "iters": 0,
    "seed": 0,
    "keep_layers": 0,
}
# Default lr times iters. SmolLM2, block 5, 60 steps: output error 0.80 of `mse`'s before; block 3: 0.67 of `rtn`'s.
_TOTAL_MOVE = 0.5


@dataclass(frozen=True, kw_only=True)
class SignRoundSettings:
    """How to tune a block's rounding by gradients (`tuning/signround.py`).

    Attributes:
        iters: Steps per block.
        lr: First step of the rounding offsets, in local FP8 steps; it falls to 0 linearly.
        minmax_lr: First step of the factors on the scales; 0 leaves the scales as they are.
        batches_per_step: Batches whose gradients add up before a step.
        keep_best: Whether the best measured step is kept instead of the last.
        seed: Seed of the order of the batches.
    """

    iters: int
    lr: float
    minmax_lr: float
    batches_per_step: int = 1
    keep_best: bool = True
    seed: int = 42


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Settings of one quantisation run.

    Attributes:
        scheme: Scheme of layers that nothing else names.
        layer_config: Layer pattern -> scheme.
        ignore_layers: Patterns of layers that stay in 16 bit.
        quant_lm_head: Whether the output layer is FP8 too.
        dataset: Calibration data: a spec string, or Python data.
        nsamples: Calibration samples.
        seqlen: Tokens per sample.
        batch_size: Samples per forward.
        seed: Seed of the data order.
        iters: Steps of gradient tuning per block, after `algorithm`; 0 = none.
        lr: First step of the tuned rounding offsets, in local FP8 steps; None = 1 / (2 iters).
        minmax_lr: First step of the tuned factors on the scales; 0 = the scales stay.
        gradient_accumulate_steps: Batches whose gradients add up before a tuning step.
        not_use_best_mse: Whether the last tuning step is kept, not the one with the least error.
        algorithm: How weights are rounded: "gptq" (error compensation), "mse" (scale search), "rtn" (to nearest), or
            "signround": gradient tuning alone, from "rtn".
        enable_quanted_input: Whether each block is fed by the quantised blocks before it, not by the original ones;
            None = if there is gradient tuning.
        range_probes: Whether short sequences of special and spread tokens widen the input ranges beside the data.
        act_headroom: Factor on every observed input range, at least 1; powers of two cost next to nothing.
        moe_input_scale: "shared": all experts of a layer share one input scale per projection; "per_expert": own ones.
        unseen_experts: "max": an expert without calibration tokens gets the layer's largest input range; "error": stop.
        keep_layers: How many of the most harmful layers stay in 16 bit; what engines fuse counts as one.
        target_kl: KL to the original, on calibration tokens, to be reached with as few bytes in 16 bit as it takes.
        static_kv_dtype: "fp8" = a scale for the keys and one for the values of each block's KV cache; None = none.
        device: Device word: cpu, cuda, a GPU number, auto.
        calibration_dtype: dtype of the calibration forward; auto = the model's, or float32 where 16 bit is emulated.
        format: Name of the checkpoint format, or of several, comma list.
        max_shard_size: Largest shard, such as 5GB.
        overwrite: Whether an earlier export in the target may be replaced.
        trust_remote_code: Whether code from the model's folder may run.
    """

    scheme: QuantizationScheme = field(default_factory=QuantizationScheme)
    layer_config: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    ignore_layers: tuple[str, ...] = ()
    quant_lm_head: bool = False
    dataset: Any = "builtin"
    nsamples: int = 128
    seqlen: int = 2048
    batch_size: int = 8
    seed: int = 42
    iters: int = 0
    lr: float | None = None
    minmax_lr: float = 0.0
    gradient_accumulate_steps: int = 1
    not_use_best_mse: bool = False
    algorithm: str = "gptq"
    enable_quanted_input: bool | None = None
    range_probes: bool = True
    act_headroom: float = 2.0
    moe_input_scale: str = "shared"
    unseen_experts: str = "max"
    keep_layers: int = 0
    target_kl: float | None = None
    static_kv_dtype: str | None = None
    device: str | int = "auto"
    calibration_dtype: str = "auto"
    format: str = "fp8_static"
    max_shard_size: str | int = "5GB"
    overwrite: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        values = vars(self)
        for name in _COUNTS:
            value, least = values[name], _COUNTS[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} ({value!r}) must be a whole number of at least {least}")
        if self.algorithm == "signround" and self.iters == 0:
            raise ConfigError("algorithm 'signround' is gradient tuning, but iters is 0; set iters, such as 200")
        for name in ("lr", "minmax_lr"):
            value = values[name]
            if not (name == "lr" and value is None) and not (isinstance(value, (int, float)) and 0.0 <= value <= 1.0):
                raise ConfigError(f"{name} ({value!r}) must be a number from 0 to 1")
        headroom = self.act_headroom
        if not isinstance(headroom, (int, float)) or isinstance(headroom, bool) or not 1.0 <= headroom <= 64.0:
            raise ConfigError(f"act_headroom ({headroom!r}) must be a number from 1 to 64")
        choices = {
            "algorithm": ALGORITHMS,
            "moe_input_scale": MOE_INPUT_SCALES,
            "unseen_experts": UNSEEN_EXPERTS,
            "calibration_dtype": CALIBRATION_DTYPES,
        }
        for name, accepted in choices.items():
            value = values[name]
            if value not in accepted:
                raise ConfigError(f"{name} {value!r} is unknown; choose from {', '.join(accepted)}")
        if self.static_kv_dtype is not None and self.static_kv_dtype not in KV_DTYPES:
            raise ConfigError(
                f"static_kv_dtype {self.static_kv_dtype!r} is not supported; choose from {', '.join(KV_DTYPES)}"
            )
        self._check_target_kl()

    def _check_target_kl(self) -> None:
        target = self.target_kl
        if target is None:
            return
        if not isinstance(target, (int, float)) or isinstance(target, bool) or not 0.0 < target < math.inf:
            raise ConfigError(f"target_kl ({target!r}) must be a number above 0")
        if self.keep_layers:
            raise ConfigError(
                f"keep_layers ({self.keep_layers}) and target_kl ({target}) both say how many layers stay in 16 bit; "
                "give one of them"
            )

    @property
    def measures_harm(self) -> bool:
        """Whether it is to be measured which layers had better stay in 16 bit."""
        return self.keep_layers > 0 or self.target_kl is not None

    @property
    def quantized_inputs(self) -> bool:
        """Whether each block is fed by the quantised blocks before it."""
        return self.iters > 0 if self.enable_quanted_input is None else self.enable_quanted_input

    @property
    def tuning(self) -> SignRoundSettings | None:
        """How to tune by gradients; None = not at all."""
        if self.iters == 0:
            return None
        return SignRoundSettings(
            iters=self.iters,
            lr=_TOTAL_MOVE / self.iters if self.lr is None else self.lr,
            minmax_lr=self.minmax_lr,
            batches_per_step=self.gradient_accumulate_steps,
            keep_best=not self.not_use_best_mse,
            seed=self.seed,
        )

    def to_report(self) -> dict[str, Any]:
        """The settings as JSON values, for the report; data given as Python objects appear by their type."""
        report = dict(vars(self))
        report["scheme"] = self.scheme.to_dict()
        report["layer_config"] = {k: v.to_dict() for k, v in self.layer_config.items()}
        report["ignore_layers"] = list(self.ignore_layers)
        if not isinstance(self.dataset, str):
            report["dataset"] = f"<{type(self.dataset).__name__}>"
        return report
