"""The quantiser that transformers' `from_pretrained` uses for `fp8_static` checkpoints.

transformers loads what is not quantised. FP8 linears and experts are withheld from it, as their names, shapes and
classes are not those it knows; then they are read by the code that `load_quantized_model` uses. Read
`hf_integration.py` for how transformers gets to know this class, `hf_saving.py` for how such a model is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoround_fp8.checkpoint.materialize import fill_module, require_filled
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.table import parse_quantization
from autoround_fp8.inference.hf_saving import CheckpointQuantization, Fp8Saver, make_savable
from autoround_fp8.inference.load import SCALES, load_quantized_linears
from autoround_fp8.models.skeleton import Skeleton, map_skeleton


class Reserved(nn.Module):
    """Stands for a withheld module while transformers loads the rest, and shows which device it shall be on.

    Args:
        num_bytes: Size of the module's tensors, which an automatic device map needs to know.
    """

    def __init__(self, num_bytes: int):
        super().__init__()
        # Not persistent, so that transformers neither looks for it in the checkpoint nor misses it.
        self.register_buffer("space", torch.empty(num_bytes, dtype=torch.uint8, device="meta"), persistent=False)


class Fp8StaticQuantizer(Fp8Saver):
    """Loads and saves `fp8_static` checkpoints for transformers.

    Args:
        quantization_config: The checkpoint's, or an `AutoRoundConfig` that the user's loading arguments made of it.
    """

    def __init__(self, quantization_config: Any, **kwargs: Any):
        if not isinstance(quantization_config, CheckpointQuantization):
            fields = quantization_config.to_dict()
            fields.pop("backend", None)  # which of Intel's kernels to use
            quantization_config = CheckpointQuantization(fields)
        super().__init__(quantization_config, **kwargs)
        self._format, self._parsed = parse_quantization(quantization_config.block)

    def _process_model_before_weight_loading(
        self, model: Any, *, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise ConfigError("an fp8_static model is loaded from safetensors in a folder, not from a state_dict")
        if vars(model.config).get("distributed_config") is not None:
            raise ConfigError("FP8 linears are not split over processes; load without distributed_config and tp_plan")
        self._reader = CheckpointReader(Path(checkpoint_files[0]).parent)
        names = [name for name in self._reader.names if not name.endswith(SCALES)]
        # Raises if a tensor of the model is missing, which transformers would only warn of.
        self._skeleton = map_skeleton(model, model.config, names)
        self._check_shapes(model)
        self._withheld = {name: model.get_submodule(name) for name in self._names_to_withhold(self._skeleton)}
        for name, module in self._withheld.items():
            model.set_submodule(name, Reserved(self._num_bytes(name, module)))
        # Whatever is withheld is in the checkpoint and not in the model; the pattern matches every name.
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {""}

    def _check_shapes(self, model: Any) -> None:
        # transformers before 5.24 does not, in a model with a quantiser.
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for parameter, name in self._skeleton.sources.items():
            found, expected = self._reader.entries[name].shape, shapes[parameter]
            if found != expected:
                raise CheckpointError(f"tensor {name!r} has shape {list(found)}, the model expects {list(expected)}")

    def _names_to_withhold(self, skeleton: Skeleton) -> list[str]:
        linears = [
            name
            for name, module in skeleton.model.named_modules()
            if isinstance(module, nn.Linear) and self._is_quantized(skeleton.sources.get(f"{name}.weight", ""))
        ]
        return [*linears, *skeleton.experts]

    def _is_quantized(self, tensor: str) -> bool:
        return bool(tensor) and self._parsed.resolve(tensor.removesuffix(".weight")).is_quantized

    def _num_bytes(self, name: str, module: nn.Module) -> int:
        experts = self._skeleton.experts.get(name)
        is_fp8 = experts is None or any(self._is_quantized(fqn) for fqn in experts.names.values())
        return sum(p.numel() * (1 if is_fp8 else p.element_size()) for p in module.parameters())

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        model._keys_to_ignore_on_load_unexpected = self._ignored
        refuse_offloading(model.__dict__.get("hf_device_map") or {})
        devices = {}
        for name, module in self._withheld.items():
            devices[name] = model.get_submodule(name).space.device
            model.set_submodule(name, module)
        skeleton, reader = self._skeleton, self._reader
        skeleton.linearize()
        load_quantized_linears(
            skeleton, reader, self._format, self._parsed, kernel="auto", device_of=partial(_device_of, devices)
        )
        recipes = skeleton.recipes()
        for name, device in devices.items():
            fill_module(model.get_submodule(name), name, reader, recipes, device)
        require_filled(model, "the model")
        # Loading is over; the model keeps its quantiser.
        del self._skeleton, self._reader, self._withheld, self._ignored
        make_savable(skeleton, reader, self)


def refuse_offloading(device_map: Mapping[str, Any]) -> None:
    """Refuses a device map by which weights would wait elsewhere until they are needed.

    Raises:
        ConfigError: Naming the first such module.
    """
    devices = {name: str(device) for name, device in device_map.items()}
    waiting = {"disk"} if set(devices.values()) <= {"cpu", "disk"} else {"cpu", "disk"}
    for name, device in devices.items():
        if device in waiting:
            raise ConfigError(
                f"module {name!r} would be offloaded ({device}), which FP8 linears do not support; give a device_map "
                "without offloading"
            )


def _device_of(devices: Mapping[str, torch.device], name: str) -> torch.device:
    """The device of the withheld module that a module is, or is in."""
    while name not in devices:
        name = name.rpartition(".")[0]
    return devices[name]
