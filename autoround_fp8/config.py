"""Every setting of a run, in one frozen dataclass: the only home of defaults and of their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoround_fp8.errors import ConfigError
from autoround_fp8.schemes import QuantizationScheme

ALGORITHMS = ("rtn", "mse", "gptq")
MOE_INPUT_SCALES = ("shared", "per_expert")
UNSEEN_EXPERTS = ("max", "error")
CALIBRATION_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Settings of one quantisation run.

    Attributes:
        scheme: Scheme of layers that nothing else names.
        layer_config: Layer pattern -> scheme.
        ignore_layers: Patterns of layers that stay in 16 bit.
        dataset: Calibration data: a spec string, or Python data.
        nsamples: Calibration samples.
        seqlen: Tokens per sample.
        batch_size: Samples per forward.
        seed: Seed of the data order.
        iters: Steps of gradient tuning; 0 (none) is the only value so far.
        algorithm: How weights are rounded: "gptq" (error compensation), "mse" (scale search) or "rtn" (to nearest).
        enable_quanted_input: Whether each block is fed by the quantised blocks before it, not by the original ones.
        act_headroom: Factor on every observed input range, at least 1; powers of two cost next to nothing.
        moe_input_scale: "shared": all experts of a layer share one input scale per projection; "per_expert": own ones.
        unseen_experts: "max": an expert without calibration tokens gets the layer's largest input range; "error": stop.
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
    dataset: Any = "builtin"
    nsamples: int = 128
    seqlen: int = 2048
    batch_size: int = 8
    seed: int = 42
    iters: int = 0
    algorithm: str = "gptq"
    enable_quanted_input: bool = False
    act_headroom: float = 2.0
    moe_input_scale: str = "shared"
    unseen_experts: str = "max"
    device: str | int = "auto"
    calibration_dtype: str = "auto"
    format: str = "fp8_static"
    max_shard_size: str | int = "5GB"
    overwrite: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("nsamples", "seqlen", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} ({value!r}) must be a whole number of at least 1")
        if self.iters != 0:
            raise ConfigError(f"iters ({self.iters!r}) must be 0: this version does not tune by gradient")
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
            value = getattr(self, name)
            if value not in accepted:
                raise ConfigError(f"{name} {value!r} is unknown; choose from {', '.join(accepted)}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed ({self.seed!r}) must be a whole number of at least 0")

    def to_report(self) -> dict[str, Any]:
        """The settings as JSON values, for the report; data given as Python objects appear by their type."""
        report = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        report["scheme"] = self.scheme.to_dict()
        report["layer_config"] = {k: v.to_dict() for k, v in self.layer_config.items()}
        report["ignore_layers"] = list(self.ignore_layers)
        if not isinstance(self.dataset, str):
            report["dataset"] = f"<{type(self.dataset).__name__}>"
        return report
