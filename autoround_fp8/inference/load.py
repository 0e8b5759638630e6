"""Loads a quantised checkpoint for inference: the model on meta, FP8 linears in place, tensors straight from disk.

Read `linear.py` for the layer and `kernels/table.py` for what computes it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autoround_fp8.checkpoint.locate import locate_checkpoint
from autoround_fp8.checkpoint.materialize import (
    fill_computed_buffers,
    fill_module,
    require_filled,
    tie_filled,
)
from autoround_fp8.checkpoint.reader import CheckpointReader, TensorSource, read_json
from autoround_fp8.checkpoint.source_format import is_native_fp8, open_source
from autoround_fp8.device import resolve_device
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import CheckpointFormat, ParsedQuantization
from autoround_fp8.formats.table import parse_quantization
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.inference.slots import LinearSlot, linear_slots
from autoround_fp8.kernels.base import Kernel, LinearProblem
from autoround_fp8.kernels.table import choose_kernel
from autoround_fp8.models.patches import refuse_saving
from autoround_fp8.models.skeleton import Skeleton, build_skeleton, load_config, source_dtype
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme

logger = logging.getLogger(__name__)

SCALES = (".weight_scale", ".input_scale")


def load_quantized_model(
    path: str | Path,
    *,
    device: str | int | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    kernel: str = "auto",
    trust_remote_code: bool = False,
) -> Any:
    """Loads an FP8 checkpoint as a transformers model whose quantised Linears hold FP8 codes.

    Args:
        path: Checkpoint folder.
        device: cpu, cuda, a GPU number or auto.
        dtype: dtype of everything that is not FP8, and of the activations; None = the checkpoint's.
        kernel: Kernel name, or "auto" for the fastest one that can run.
        trust_remote_code: Whether code from the folder may run.

    Returns:
        The model in eval mode. Its `save_pretrained` writes the same tensors again, in the checkpoint's dtypes, and
        refuses a model that holds them rounded to another dtype. Its KV cache is not FP8: scales for that are left
        alone.

    Raises:
        CheckpointError: If the checkpoint is not quantised, damaged, or its tensors do not agree with its config.
        ConfigError: If the device or kernel cannot be used.
    """
    target = resolve_device(device)
    folder = locate_checkpoint(path)
    raw_config, config = load_config(folder, trust_remote_code=trust_remote_code)
    block = raw_config.get("quantization_config")
    if not block:
        raise CheckpointError(f"{str(folder)!r} is not quantised: its config.json has no quantization_config")
    checkpoint_format, parsed = parse_quantization(block)
    if parsed.kv_cache_scheme is not None:
        logger.info("the checkpoint has KV-cache scales, which this package does not apply: its cache is not FP8")
    reader = CheckpointReader(folder)
    model_dtype = _model_dtype(dtype, raw_config)
    names = [name for name in reader.names if not name.endswith(SCALES)]
    skeleton = build_skeleton(config, names, model_dtype, trust_remote_code=trust_remote_code)
    model = skeleton.model
    fill_computed_buffers(model, target)
    skeleton.linearize()
    load_quantized_linears(skeleton, reader, checkpoint_format, parsed, kernel=kernel, device_of=lambda _: target)
    _fill_rest(skeleton, reader, target, f"checkpoint {str(folder)!r}")
    _set_generation_config(model, folder)
    # Imported late: it needs transformers, which takes seconds.
    from autoround_fp8.inference.hf_saving import CheckpointQuantization, Fp8Saver, make_savable

    make_savable(skeleton, reader, Fp8Saver(CheckpointQuantization(block)))
    return model


def load_model(
    path: str | Path,
    *,
    device: str | int | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    kernel: str = "auto",
    trust_remote_code: bool = False,
) -> Any:
    """Loads a checkpoint for inference: quantised by a format known here, native FP8 (dequantised), or plain 16 bit.

    Args and errors are those of `load_quantized_model`; `kernel` has no effect on a plain checkpoint.
    """
    folder = locate_checkpoint(path)
    raw_config, config = load_config(folder, trust_remote_code=trust_remote_code)
    if raw_config.get("quantization_config") and not is_native_fp8(raw_config):
        return load_quantized_model(
            folder, device=device, dtype=dtype, kernel=kernel, trust_remote_code=trust_remote_code
        )
    target = resolve_device(device)
    source = open_source(CheckpointReader(folder), raw_config, source_dtype(raw_config))
    skeleton = build_skeleton(
        config, source.entries, _model_dtype(dtype, raw_config), trust_remote_code=trust_remote_code
    )
    fill_computed_buffers(skeleton.model, target)
    skeleton.linearize()
    _fill_rest(skeleton, source, target, f"checkpoint {str(folder)!r}")
    _set_generation_config(skeleton.model, folder)
    if skeleton.experts:
        refuse_saving(skeleton.model, "its experts are one Linear each")
    return skeleton.model


def assemble_quantized_model(
    skeleton: Skeleton,
    source: TensorSource,
    layers: Mapping[str, QuantizedLinear],
    schemes: Mapping[str, QuantizationScheme],
    device: torch.device | str = "cpu",
) -> Any:
    """Puts quantised layers that are in memory into a model; everything else comes from the source.

    Args:
        skeleton: The model on meta, in the dtype it shall have.
        source: The unquantised tensors.
        layers: Checkpoint name -> quantised layer.
        schemes: Checkpoint name -> scheme, for at least the quantised layers.
        device: Where the model shall be.

    Returns:
        The model in eval mode, filled. Its `save_pretrained` is refused.
    """
    target = resolve_device(device)
    fill_computed_buffers(skeleton.model, target)
    skeleton.linearize()
    for slot in linear_slots(skeleton):
        if slot.fqn in layers:
            _swap_in(slot, layers[slot.fqn], schemes[slot.fqn], ("auto", target))
    _fill_rest(skeleton, source, target, "the model")
    refuse_saving(skeleton.model, "it was quantised in memory")
    return skeleton.model


def _swap_in(
    slot: LinearSlot, layer: QuantizedLinear, scheme: QuantizationScheme, target: tuple[str, torch.device]
) -> tuple[Kernel, list[str]]:
    kernel_name, device = target
    out_features, in_features = slot.shape
    problem = LinearProblem(
        device=device,
        dtype=slot.dtype,
        in_features=in_features,
        out_features=out_features,
        scheme=scheme,
        name=layer.fqn,
    )
    kernel, reasons = choose_kernel(problem, kernel_name)
    slot.put(
        WeightFP8ActFP8StaticQuantLinear.from_quantized_linear(
            layer, scheme=scheme, kernel=kernel, has_bias=slot.has_bias, dtype=slot.dtype, device=device
        )
    )
    return kernel, reasons


def _fill_rest(skeleton: Skeleton, source: TensorSource, device: torch.device, what: str) -> None:
    model = skeleton.model
    fill_module(model, "", source, skeleton.recipes(), device)
    tie_filled(model, model.all_tied_weights_keys)
    require_filled(model, what)


def _model_dtype(dtype: torch.dtype | str | None, raw_config: Mapping[str, Any]) -> torch.dtype:
    if dtype is None:
        return source_dtype(dict(raw_config))
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if resolved not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype {dtype!r} is not supported; use float32, bfloat16 or float16")
    return resolved


def load_quantized_linears(
    skeleton: Skeleton,
    reader: CheckpointReader,
    checkpoint_format: CheckpointFormat,
    parsed: ParsedQuantization,
    *,
    kernel: str,
    device_of: Callable[[str], torch.device],
) -> None:
    """Puts an FP8 linear, filled, wherever the checkpoint has one.

    Args:
        skeleton: The model, its experts one Linear each.
        reader: The checkpoint.
        checkpoint_format: Its format.
        parsed: What its config.json says.
        kernel: Kernel name or "auto".
        device_of: Module name -> device.

    Raises:
        CheckpointError: If config.json and the tensors do not agree.
        ConfigError: If the kernel cannot be used.
    """
    chosen: Counter[str] = Counter()
    used: set[str] = set()
    for slot in linear_slots(skeleton):
        scheme = parsed.resolve(slot.fqn)
        if not scheme.is_quantized:
            if reader.entries[slot.tensor].dtype == "F8_E4M3":
                raise CheckpointError(
                    f"tensor {slot.tensor!r} is FP8, but config.json says this layer is not quantised"
                )
            continue
        tensors = {n: reader.read(n) for n in _tensor_names(slot.fqn) if n in reader.entries}
        layer = checkpoint_format.decode(slot.fqn, scheme, tensors)
        if tuple(layer.weight.shape) != slot.shape:
            raise CheckpointError(
                f"tensor {slot.tensor!r} has shape {list(layer.weight.shape)}, the model expects {list(slot.shape)}"
            )
        used.update(tensors)
        used_kernel, reasons = _swap_in(slot, layer, scheme, (kernel, device_of(slot.module)))
        if not chosen[used_kernel.name]:
            why = "".join(f"; {reason}" for reason in reasons)
            logger.info("kernel %s from %s on%s", used_kernel.name, slot.fqn, why)
        chosen[used_kernel.name] += 1
    stray = [name for name in reader.names if name.endswith(SCALES) and name not in used]
    if stray:
        raise CheckpointError(f"tensor {stray[0]!r} belongs to no quantised layer ({len(stray)} such tensors)")
    if not chosen:
        raise CheckpointError("config.json has a quantization_config, but no layer of the model is quantised")
    logger.info("%d FP8 linears: %s", sum(chosen.values()), dict(chosen))


def _tensor_names(fqn: str) -> tuple[str, ...]:
    return (f"{fqn}.weight", f"{fqn}.weight_scale", f"{fqn}.input_scale")


def _set_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if path.is_file():
        model.generation_config = GenerationConfig.from_dict(read_json(path))
