"""A model that transformers has loaded already, as a source of tensors: nothing of it is copied, moved or run.

Its experts may be fused (`gate_up_proj`), its layers native FP8 (`FP8Linear`, `FP8Experts`), its weights on any device
or offloaded to disk by accelerate. The names are those a saved checkpoint has; an expert is cut out when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.reader import LazyTensor
from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.models.linear_experts import ExpertsLayout, find_experts
from autoround_fp8.models.name_map import ExpertsSource, map_names

_SCALE = "_scale_inv"


def loaded_tensors(model: Any, plain: Any) -> dict[str, LazyTensor]:
    """The tensors of a model, by the names that a saved checkpoint of it has.

    Args:
        model: The model as transformers loaded it.
        plain: A model of the same config on meta, without any quantisation.

    Returns:
        Name -> tensor, read when asked for; of FP8 weights also their scales (`X_scale_inv`).

    Raises:
        UnsupportedModelError: If a weight is on meta and nobody knows its value, or FP8 experts cannot be told apart.
    """
    from transformers.core_model_loading import revert_weight_conversion

    held = _held_tensors(model)
    # A weight that the config calls tied is one of its own all the same if its values differ: the model runs with them.
    tied = {name for name, other in plain.all_tied_weights_keys.items() if _is_equal(held, name, other)}
    state = {n: t for n, t in plain.state_dict().items() if n not in tied}
    is_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in held.values())
    # On meta: only the names count. A model loaded in 16 bit remembers how its checkpoint called them.
    names = revert_weight_conversion(plain if is_fp8 else model, dict(state))
    mapped = map_names(plain, names, find_experts(plain))
    found: dict[str, LazyTensor] = {}
    for parameter, name in mapped.sources.items():
        _put(found, name, held, parameter, lambda tensor: tensor)
    for source in mapped.experts.values():
        for parameter, name in source.fused.items():
            _put(found, name, held, f"{source.module}.{parameter}", lambda tensor: tensor)
        if not source.is_fused:
            _put_experts(found, held, source)
    return found


def _put(
    found: dict[str, LazyTensor],
    name: str,
    held: Mapping[str, LazyTensor],
    parameter: str,
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    if parameter not in held:
        raise UnsupportedModelError(f"the model has no {parameter!r}, which a model of its config must have")
    found[name] = _cut(held[parameter], cut)
    if parameter + _SCALE in held:
        found[name + _SCALE] = held[parameter + _SCALE]


def _put_experts(found: dict[str, LazyTensor], held: Mapping[str, LazyTensor], source: ExpertsSource) -> None:
    layout = source.layout
    for (expert, projection), fqn in source.names.items():
        parameter = f"{source.module}.{layout.linear_of(projection)}"
        if parameter not in held:
            raise UnsupportedModelError(f"the model has no {parameter!r}, which a model of its config must have")
        found[f"{fqn}.weight"] = _cut(held[parameter], _expert_cut(layout, expert, projection, layout.is_transposed))
        if parameter + _SCALE in held:
            scale = held[parameter + _SCALE]
            rows = scale.shape[1] if len(scale.shape) == 3 else 0
            # The blocks of gate and up must not overlap: then each has half of the rows.
            if projection != "down_proj" and layout.has_gate and rows % 2:
                raise UnsupportedModelError(f"the scales of {parameter!r} do not say which are the gate's")
            halves = _half(layout, projection)
            found[f"{fqn}.weight{_SCALE}"] = _cut(scale, lambda t, e=expert, h=halves: _rows(t[e], h))  # type: ignore[misc]


def _expert_cut(
    layout: ExpertsLayout, expert: int, projection: str, transposed: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    half = _half(layout, projection)
    return lambda tensor: _rows(tensor[expert].t() if transposed else tensor[expert], half)


def _half(layout: ExpertsLayout, projection: str) -> int | None:
    if projection == "down_proj" or not layout.has_gate:
        return None
    return 0 if projection == "gate_proj" else 1


def _rows(matrix: torch.Tensor, half: int | None) -> torch.Tensor:
    return matrix if half is None or matrix.ndim == 0 else matrix.chunk(2, dim=0)[half]


def _cut(tensor: LazyTensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    shape = tuple(cut(torch.empty(tensor.shape, device="meta")).shape)
    return LazyTensor(dtype=tensor.dtype, shape=shape, load=lambda: cut(tensor.load()))


def _held_tensors(model: Any) -> dict[str, LazyTensor]:
    """Every parameter and persistent buffer by its name in the model, wherever its value is."""
    found = {}
    for prefix, module in model.named_modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or leaf in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            load = _Held(tensor) if not tensor.is_meta else _offloaded(module, leaf, name)
            found[name] = LazyTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), load=load)
    return found


def _is_equal(held: Mapping[str, LazyTensor], name: str, other: str) -> bool:
    if name not in held or other not in held:
        return True
    one, two = held[name].load(), held[other].load()
    return one.data_ptr() == two.data_ptr() or (one.dtype == two.dtype and torch.equal(one, two))


class _Held:
    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self._tensor.detach()


def _offloaded(module: Any, leaf: str, name: str) -> Callable[[], torch.Tensor]:
    """Reads a weight that accelerate has put elsewhere; all experts of a layer in a row read the same one."""
    hooks = [getattr(module, "_hf_hook", None)]
    hooks += getattr(hooks[0], "hooks", ())
    for hook in hooks:
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            return lambda: weights[leaf]
    raise UnsupportedModelError(
        f"the weight {name!r} is on the meta device and was never loaded; give its folder instead"
    )
