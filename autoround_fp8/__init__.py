"""AutoRound-style calibration and export of static W8A8-FP8 checkpoints.

`AutoRound` quantises, `load_quantized_model` reloads; read `compressor.py` for how it works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoround_fp8.evaluation.lm_eval_registration import register_lm_eval_backend
from autoround_fp8.inference.hf_integration import register_quantizer
from autoround_fp8.version import __version__

if TYPE_CHECKING:
    from autoround_fp8.autoround import AutoRound
    from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
    from autoround_fp8.inference.load import load_quantized_model
    from autoround_fp8.schemes import QuantizationScheme

__all__ = [
    "AutoRound",
    "QuantizationScheme",
    "WeightFP8ActFP8StaticQuantLinear",
    "__version__",
    "load_quantized_model",
]

_HOMES = {
    "AutoRound": "autoround_fp8.autoround",
    "QuantizationScheme": "autoround_fp8.schemes",
    "WeightFP8ActFP8StaticQuantLinear": "autoround_fp8.inference.linear",
    "load_quantized_model": "autoround_fp8.inference.load",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `auto-round --help` must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


# lm-eval has no plug-in loading, so its users import this package to get model="autoround_fp8".
register_lm_eval_backend()
# The same for transformers: AutoModelForCausalLM.from_pretrained then loads fp8_static exports.
register_quantizer()
