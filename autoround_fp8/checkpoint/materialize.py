"""Brings parts of a meta model to life from a tensor source, and puts them back to meta.

Knows modules and tensors, not architectures: names come from the skeleton's map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autoround_fp8.checkpoint.reader import DTYPES, TensorSource
from autoround_fp8.errors import CheckpointError, NumericsError


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A tensor of the source or a piece of it, that is some rows of a parameter.

    Attributes:
        name: The tensor.
        index: Which entry of its first dimension (an expert's number in a fused tensor); None = all of it.
        transposed: Whether it is stored as `[in, out]`.
    """

    name: str
    index: int | None = None
    transposed: bool = False


def fill_module(
    module: nn.Module,
    prefix: str,
    source: TensorSource,
    names: Mapping[str, str | tuple[TensorPart, ...]],
    device: torch.device,
) -> None:
    """Loads every parameter and persistent buffer below `module`, each in the dtype it already has on meta.

    Args:
        module: The module to fill; what is no longer on meta stays.
        prefix: Its name in the model, "" for the whole model.
        source: Where the tensors are.
        names: Parameter name in the model -> tensor name in the source, or the parts whose rows it consists of. Those
            without one stay on meta (tied ones).
        device: Where to put the tensors.

    Raises:
        CheckpointError: If a tensor's shape is not the parameter's, or it is FP8 where 16 bit is expected.
        NumericsError: If a tensor holds NaN or infinity.
    """
    for owner_name, owner in module.named_modules(prefix=prefix):
        slots = {**owner._parameters, **owner._buffers}
        for leaf, current in slots.items():
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            if current is None or current.device.type != "meta" or name not in names:
                continue
            wanted = names[name]
            if isinstance(wanted, str):
                tensor = read_checked(source, wanted, tuple(current.shape), current.dtype)
            else:
                tensor = _read_parts(source, wanted, tuple(current.shape), current.dtype)
            assign(owner, leaf, tensor.to(device))


def read_checked(
    source: TensorSource, part: str | TensorPart, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Reads a tensor, or a part of one, and converts it to the dtype a module expects, after checking shape and values.

    Raises:
        CheckpointError: On a wrong shape or an FP8 or integer tensor where another dtype is expected.
        NumericsError: On NaN or infinity.
    """
    part = TensorPart(name=part) if isinstance(part, str) else part
    name, entry = part.name, source.entries[part.name]
    found = entry.shape if part.index is None else entry.shape[1:]
    shape = shape[::-1] if part.transposed else shape
    if found != shape:
        raise CheckpointError(f"tensor {name!r} has shape {list(found)}, the model expects {list(shape)}")
    stored = DTYPES[entry.dtype]
    if stored != dtype and (stored.itemsize == 1 or not stored.is_floating_point or dtype.itemsize == 1):
        raise CheckpointError(
            f"tensor {name!r} is {entry.dtype}, the model expects {str(dtype).removeprefix('torch.')}"
        )
    tensor = torch.empty(shape, dtype=dtype)
    flat, position = tensor.view(-1), 0
    # In pieces, so that a conversion never holds the tensor twice.
    for chunk in source.chunks(name, part.index):
        piece = torch.frombuffer(chunk, dtype=stored)
        # The largest and smallest value show NaN and infinity alike, in one pass.
        checked = torch.aminmax(piece) if stored.is_floating_point and stored.itemsize > 1 else ()
        if not all(bool(torch.isfinite(value)) for value in checked):
            raise NumericsError(f"tensor {name!r} holds NaN or infinity; the checkpoint is damaged")
        flat[position : position + piece.numel()] = piece
        position += piece.numel()
    return tensor.t().contiguous() if part.transposed else tensor


def _read_parts(
    source: TensorSource, parts: tuple[TensorPart, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if len(parts) == 1:
        return read_checked(source, parts[0], shape, dtype)
    tensor, rows = torch.empty(shape, dtype=dtype), shape[0] // len(parts)
    for number, part in enumerate(parts):
        tensor[number * rows : (number + 1) * rows] = read_checked(source, part, (rows, *shape[1:]), dtype)
    return tensor


def assign(owner: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    """Sets a parameter or buffer of a module to a tensor, keeping its kind."""
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def fill_computed_buffers(model: nn.Module, device: torch.device) -> None:
    """Computes non-persistent buffers (rotary tables, embedding scales) the way transformers does: by `_init_weights`.

    Call it before any weight is loaded: `_init_weights` may also write to parameters of the same module.
    """
    for module in model.modules():
        buffers = {
            n: b for n, b in module._buffers.items() if n in module._non_persistent_buffers_set and b is not None
        }
        if not any(buffer.device.type == "meta" for buffer in buffers.values()):
            continue
        for name, buffer in buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        model._init_weights(module)  # type: ignore[operator]


def release_module(module: nn.Module) -> None:
    """Puts every parameter and persistent buffer below `module` back to meta, freeing its memory."""
    for owner in module.modules():
        for leaf, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and leaf not in owner._non_persistent_buffers_set:
                assign(owner, leaf, torch.empty_like(tensor, device="meta"))


def tie_filled(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Ties parameters that are still on meta to their filled twins.

    Args:
        model: The model.
        tied: Parameter name -> name of the parameter it shares; either of the two may be the one in the checkpoint.
    """
    for first, second in tied.items():
        slots = []
        for name in (first, second):
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            slots.append((owner, leaf, owner._parameters[leaf]))
        (a, a_leaf, a_value), (b, b_leaf, b_value) = slots
        assert a_value is not None
        assert b_value is not None
        if a_value.device.type == "meta" and b_value.device.type != "meta":
            a._parameters[a_leaf] = b_value
        elif b_value.device.type == "meta" and a_value.device.type != "meta":
            b._parameters[b_leaf] = a_value


def require_filled(module: nn.Module, what: str) -> None:
    """Checks that nothing below a module is left on meta.

    Raises:
        CheckpointError: Naming `what` and the first tensor.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type == "meta":
            raise CheckpointError(f"tensor {name!r} of {what} was not loaded")
