"""Load exports with vLLM's own config parsing, model classes and weight loaders on a CPU, and compare.

Nothing is computed: vLLM's compiled kernels are not needed, only the Python code of its wheel, unpacked to a folder,
and the packages it imports (`pip install --no-deps --target`, compressed-tensors in the version that it asks
for). Those of `ABSENT` are not needed to load weights. For each export: the model is built from config.json, every
tensor is loaded (KeyError, ValueError, AssertionError where vLLM wants something else), every parameter must have come
from the file, each FP8 layer must hold the file's codes and scales, and vLLM's work after loading must pass.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

# Packages of vLLM that have nothing to do with weights, replaced by empty ones where they are not installed.
ABSENT = ("llguidance", "openai_harmony", "uvloop", "xgrammar")


class _EmptyModule(ModuleType):
    """A module in which every name is an empty class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return self.__dict__[name]


class _EmptyFinder:
    """Finds the packages it is told to, and all in them, as empty modules."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        found = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def start_vllm(source: Path, packages: Path | None) -> str:
    """Make vLLM importable from its unpacked wheel as if on a CPU platform, and return its version."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    sys.path[:0] = [str(folder) for folder in (packages, source) if folder is not None]
    missing = [name for name in ABSENT if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_EmptyFinder(missing))  # type: ignore[arg-type]
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8,
    )
    from vllm.model_executor.models import registry

    _custom_ops.scaled_fp8_quant = _scaled_fp8_quant  # the compiled one is not there
    torch.cpu._is_avx512_supported = lambda: True  # a CPU without it may check an FP8 cache too
    for methods in (compressed_tensors_moe_w8a8_fp8, fp8):  # no kernel that is made for experts runs on every CPU
        methods.select_fp8_moe_backend = lambda **_: (None, object)
        methods.convert_to_fp8_moe_kernel_format = _as_loaded
        methods.make_fp8_moe_quant_config = methods.make_fp8_moe_kernel = _nothing
    unquantized.UnquantizedFusedMoEMethod.process_weights_after_loading = lambda *_: None
    registry._run_in_subprocess = lambda inspect: inspect()  # a new process would not know the changes made here
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    return str(vllm.__version__)


def _scaled_fp8_quant(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _as_loaded(*, w13: Any, w2: Any, w13_scale: Any, w2_scale: Any, **_: Any) -> tuple[Any, Any, Any, Any]:
    return w13, w2, w13_scale, w2_scale


def _nothing(**_: Any) -> Any:
    return object()


def load(folder: Path) -> str:
    """Load one export and return what was loaded; whatever vLLM raises, and ValueError if a parameter is wrong."""
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    load_config = LoadConfig(use_tqdm_on_load=False)
    config = VllmConfig(model_config=model_config, load_config=load_config, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(config)
        loader = DefaultModelLoader(load_config)
        loader.enable_weights_track = True  # by default only for models that are not quantised
        loader.load_weights(model, model_config)
        count = compare(model, folder)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    return f"{count} tensors of FP8 layers, {type(config.quant_config).__name__}"


def compare(model: Any, folder: Path) -> int:
    """Check the codes and scales that FP8 layers hold against the file; return how many tensors of it they hold."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    if hasattr(model, "hf_to_vllm_mapper"):
        tensors = model.hf_to_vllm_mapper.get_rename_mapper().apply_dict(tensors)
    wanted = {name for name in tensors if name.endswith((".weight_scale", ".input_scale", ".k_scale", ".v_scale"))}
    wanted |= {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    held: set[str] = set()
    for name, parameter in model.named_parameters():
        for names, part in _parts(model, name, parameter, tensors):
            absent = [n for n in names if n not in tensors]
            if absent:
                raise ValueError(f"{name!r} must come from {absent[0]!r}, which the file does not have")
            values = torch.cat([tensors[n].reshape(tensors[n].shape or (1,)) for n in names])
            # A matrix that the file has fused has one scale there; vLLM leaves the places for further ones as they are.
            part = part.flatten()[: values.numel()].reshape(values.shape)
            if not torch.equal(part.float(), values.float()):
                raise ValueError(f"{name!r} must hold {names} of the file")
            held.update(names)
    if held != wanted:
        odd = sorted(held ^ wanted)
        raise ValueError(
            f"{len(odd)} tensors are FP8 or scales in the file or in the loaded model only, first {odd[0]!r}"
        )
    return len(held)


def _parts(
    model: Any, name: str, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> list[tuple[list[str], torch.Tensor]]:
    """Names in the file -> the part of a parameter that they shall be; of layers that are not FP8 nothing."""
    owner, _, kind = name.rpartition(".")
    module = model.get_submodule(owner)
    if kind in ("k_scale", "v_scale"):
        wanted = f"{owner.removesuffix('.attn')}.{kind}"
        return [([wanted], parameter)] if wanted in tensors else []
    if kind.startswith(("w13_", "w2_")):
        if getattr(module, "w13_weight_scale", None) is None:
            return []
        folder = owner.removesuffix(".routed_experts")
        leaves = [module.ckpt_gate_proj_name, module.ckpt_up_proj_name]
        leaves = leaves if kind.startswith("w13_") else [module.ckpt_down_proj_name]
        kind = kind.partition("_")[2]
        # One input scale stands for gate and up, which must both be it.
        groups = [[leaf] for leaf in leaves] if kind == "input_scale" else [leaves]
        return [
            ([f"{folder}.{e}.{leaf}.{kind}" for leaf in group], part)
            for group in groups
            for e, part in enumerate(parameter)
        ]
    if getattr(module, "weight_scale", None) is None or kind not in ("weight", "weight_scale", "input_scale"):
        return []
    parent, _, leaf = owner.rpartition(".")
    leaves = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    return [([f"{parent}.{leaf}.{kind}".lstrip(".") for leaf in leaves], parameter)]


def main(argv: list[str] | None = None) -> int:
    """Load each export; 1 if one does not load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path, help="export folders")
    parser.add_argument("--vllm_source", type=Path, required=True, help="the folder with vLLM's unpacked wheel")
    parser.add_argument("--vllm_packages", type=Path, help="a folder with packages that vLLM imports (none)")
    args = parser.parse_args(argv)
    print(f"vLLM {start_vllm(args.vllm_source, args.vllm_packages)}", flush=True)
    failed = False
    for folder in args.exports:
        try:
            print(f"{folder}: yes: {load(folder)}", flush=True)
        except Exception as e:  # whatever vLLM raises is its answer
            failed = True
            print(f"{folder}: no: {type(e).__name__}: {str(e).strip().splitlines()[:4]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
