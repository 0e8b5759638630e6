"""Lets transformers' own `from_pretrained` load `fp8_static` checkpoints, once this package was imported.

transformers has one quantiser for all of Intel's `auto-round` checkpoints, and it needs Intel's package. Its two
registry entries are replaced by ones that take `fp8_static` out and hand everything else to what was there before.
Importing this file imports nothing heavy. Read `hf_quantizer.py` for how such a checkpoint is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

REGISTRY = "transformers.quantizers.auto"
_METHOD = "auto-round"
_PACKING_FORMAT = "auto_round:fp8_static"


def register_quantizer() -> None:
    """Adds the entries: at once if transformers' registry is imported already, else as soon as it is.

    Harmless if called again.
    """
    if REGISTRY in sys.modules:
        _take_over(sys.modules[REGISTRY])
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


class _RegistryFinder(MetaPathFinder):
    """Finds transformers' registry where Python would, but with a loader that adds the entries."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _RegistryLoader(spec.loader.name, spec.loader.path)
        return spec


class _RegistryLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _take_over(module)


def _take_over(registry: Any) -> None:
    configs = registry.__dict__.get("AUTO_QUANTIZATION_CONFIG_MAPPING", {})
    quantizers = registry.__dict__.get("AUTO_QUANTIZER_MAPPING", {})
    # A transformers without them is none that this package was made for; its import must not fail.
    if _METHOD in configs and configs[_METHOD].__module__ != __name__:
        configs[_METHOD] = _config_entry(configs[_METHOD])
    if _METHOD in quantizers and quantizers[_METHOD].__module__ != __name__:
        quantizers[_METHOD] = _quantizer_entry(quantizers[_METHOD])


def _config_entry(before: Any) -> Any:
    class AutoRoundConfigEntry(before):
        """Makes the config object of an `auto-round` checkpoint of any kind."""

        @classmethod
        def from_dict(cls, config_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            if config_dict.get("packing_format") != _PACKING_FORMAT:
                return before.from_dict(config_dict, *args, **kwargs)
            from autoround_fp8.inference.hf_saving import CheckpointQuantization

            return CheckpointQuantization.from_dict(config_dict, *args, **kwargs)

    return AutoRoundConfigEntry


def _quantizer_entry(before: Any) -> Any:
    class AutoRoundQuantizerEntry(before):
        """Makes the quantiser of an `auto-round` checkpoint of any kind."""

        # What it returns is no instance of this class, so nothing is initialised twice.
        def __new__(cls, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
            if vars(quantization_config).get("packing_format") != _PACKING_FORMAT:
                return before(quantization_config, *args, **kwargs)
            from autoround_fp8.inference.hf_quantizer import Fp8StaticQuantizer

            return Fp8StaticQuantizer(quantization_config, *args, **kwargs)

    return AutoRoundQuantizerEntry
