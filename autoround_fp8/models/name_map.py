"""Which checkpoint tensors each parameter is read from, by transformers' own renaming rules.

Most parameters are one tensor each. Experts are read one by one, from a tensor per expert and projection or from a
slice of a fused tensor, so that nothing but the block at work has to be in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoround_fp8.checkpoint.materialize import TensorPart
from autoround_fp8.errors import CheckpointError, UnsupportedModelError
from autoround_fp8.models.families import EXPERT_PROJECTIONS, FUSED_EXPERT_FOLDERS
from autoround_fp8.models.linear_experts import FUSED_PARAMETERS, ExpertsLayout

# Not str.isdigit, which is true of superscripts and other scripts' digits too.
_EXPERT_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, kw_only=True)
class ExpertsSource:
    """Where one layer's experts are in the checkpoint.

    Attributes:
        module: Name of the experts module in the model.
        layout: How the model stores them.
        names: (expert, projection) -> name of that Linear in the export, without `.weight`.
        fused: Fused parameter's name (`gate_up_proj`, `down_proj_bias` ...) -> tensor with all experts; empty if the
            checkpoint has one tensor per expert and projection, which is then `names` plus `.weight`.
        family_leaves: Projection -> what the family's own checkpoints call it (`w1`), if transformers says so.
    """

    module: str
    layout: ExpertsLayout
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    family_leaves: dict[str, str] = field(default_factory=dict)

    @property
    def is_fused(self) -> bool:
        """Whether all experts of the layer are in one tensor per projection."""
        return bool(self.fused)

    def tensor_names(self) -> list[str]:
        """All tensors the experts are read from."""
        return list(self.fused.values()) or [f"{name}.weight" for name in self.names.values()]

    def weight_tensor(self, expert: int, projection: str) -> str:
        """The tensor that a projection's weight is in."""
        if self.is_fused:
            return self.fused[self.layout.linear_of(projection)]
        return f"{self.names[expert, projection]}.weight"

    def renamed(self, *, by_projection: bool) -> dict[str, str]:
        """Name of a Linear -> its name by projection (`X.gate_proj`) or as the family has it, where that is another."""
        found = {}
        for (_, projection), name in self.names.items():
            folder, _, leaf = name.rpartition(".")
            wanted = projection if by_projection else self.family_leaves.get(projection, leaf)
            if wanted != leaf:
                found[name] = f"{folder}.{wanted}"
        return found

    def recipes(self) -> dict[str, tuple[TensorPart, ...]]:
        """Parameter name of the layer's `LinearExperts` -> the parts its rows are read from."""
        layout = self.layout
        found: dict[str, tuple[TensorPart, ...]] = {}
        for expert in range(layout.num_experts):
            for linear in (layout.first_linear, "down_proj"):
                base = f"{self.module}.{expert}.{linear}"
                if self.is_fused:
                    found[f"{base}.weight"] = (
                        TensorPart(name=self.fused[linear], index=expert, transposed=layout.is_transposed),
                    )
                    if layout.has_bias:
                        found[f"{base}.bias"] = (TensorPart(name=self.fused[f"{linear}_bias"], index=expert),)
                else:
                    parts = [p for p in layout.projections if layout.linear_of(p) == linear]
                    found[f"{base}.weight"] = tuple(
                        TensorPart(name=f"{self.names[expert, part]}.weight") for part in parts
                    )
        return found


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """The whole map.

    Attributes:
        sources: Parameter or buffer name in the model -> tensor name; experts are not among them.
        experts: Module name -> where its experts are.
        unused: Tensors that belong to nothing in the model (multi-token prediction layers, old rotary tables).
    """

    sources: dict[str, str]
    experts: dict[str, ExpertsSource]
    unused: tuple[str, ...]


def map_names(model: Any, tensor_names: Iterable[str], layouts: Mapping[str, ExpertsLayout]) -> NameMap:
    """Maps the model's parameters and buffers to checkpoint tensors.

    Args:
        model: The model, experts still fused.
        tensor_names: Tensor names of the checkpoint, without scales.
        layouts: Module name -> layout of its fused experts modules.

    Raises:
        UnsupportedModelError: If a parameter would have to be computed from several tensors.
        CheckpointError: If a parameter or an expert has no tensor, or two tensors claim one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings: Any = [t for t in transforms if not isinstance(t, WeightConverter)]
    builder = _Builder(model, layouts)
    # Single experts, which an export of fused ones has: transformers drops a prefix only from names it knows.
    known = {**state, **dict.fromkeys(_single_experts(layouts), True)}

    def rename(name: str) -> tuple[str, str | None]:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, known)

    for name in sorted(tensor_names):
        target, pattern = rename(name)
        if builder.add_expert(name, target, pattern):
            continue
        if pattern is not None and target in state:
            raise UnsupportedModelError(
                f"parameter {target!r} is made from several tensors ({name!r} ...); not supported yet"
            )
        builder.add_plain(name, target, known=target in state)
    return builder.finish(state, rename)


# Tensor -> the parameter it is of, and the pattern of the several tensors that make it, if it is one of those.
_Rename = Callable[[str], tuple[str, str | None]]


class _Builder:
    """Collects the map tensor by tensor."""

    def __init__(self, model: Any, layouts: Mapping[str, ExpertsLayout]):
        self._model = model
        self._layouts = layouts
        self._sources: dict[str, str] = {}
        self._unused: list[str] = []
        self._names: dict[str, dict[tuple[int, str], str]] = {module: {} for module in layouts}
        self._fused: dict[str, dict[str, str]] = {module: {} for module in layouts}

    def add_plain(self, name: str, target: str, *, known: bool) -> None:
        if not known:
            self._unused.append(name)
        elif target in self._sources:
            raise CheckpointError(f"tensors {self._sources[target]!r} and {name!r} both belong to parameter {target!r}")
        else:
            self._sources[target] = name

    def add_expert(self, name: str, target: str, pattern: str | None) -> bool:
        """Takes a tensor of an expert, or of all experts of a layer; says whether it is one."""
        module, _, leaf = target.rpartition(".")
        if pattern is not None and module in self._layouts and leaf in FUSED_PARAMETERS:
            return self._add_single(name, module)
        if pattern is None and module in self._layouts and leaf.removesuffix("_bias") in FUSED_PARAMETERS:
            return self._add_fused(name, module, leaf)
        parts = target.rsplit(".", 3)  # <experts module>.<number>.<projection>.weight: what an export of ours has
        if pattern is not None or len(parts) != 4 or parts[0] not in self._layouts or parts[3] != "weight":
            return False
        is_expert = _EXPERT_NUMBER.fullmatch(parts[1]) is not None and parts[2] in EXPERT_PROJECTIONS
        return is_expert and self._add_single(name, parts[0])

    def _add_single(self, name: str, module: str) -> bool:
        number, _, leaf = name.removesuffix(".weight").rpartition(".")
        number = number.rpartition(".")[2]
        projection = EXPERT_PROJECTIONS.get(leaf)
        if not name.endswith(".weight") or projection is None or not _EXPERT_NUMBER.fullmatch(number):
            raise UnsupportedModelError(f"tensor {name!r} is an expert's, but its name says not which part of it")
        key = (int(number), projection)
        if key in self._names[module]:
            raise CheckpointError(
                f"tensors '{self._names[module][key]}.weight' and {name!r} both belong to expert {key[0]} of {module!r}"
            )
        self._names[module][key] = name.removesuffix(".weight")
        return True

    def _add_fused(self, name: str, module: str, leaf: str) -> bool:
        if leaf in self._fused[module]:
            raise CheckpointError(
                f"tensors {self._fused[module][leaf]!r} and {name!r} both belong to parameter '{module}.{leaf}'"
            )
        self._fused[module][leaf] = name
        return True

    def finish(self, state: Mapping[str, Any], rename: _Rename) -> NameMap:
        model = self._model
        experts = {
            module: _with_family_leaves(self._finish_experts(module, layout), rename)
            for module, layout in self._layouts.items()
        }
        held = tuple(f"{module}." for module in self._layouts)
        tied = {**model.all_tied_weights_keys, **{v: k for k, v in model.all_tied_weights_keys.items()}}
        missing = [
            n
            for n in state
            if n not in self._sources and tied.get(n) not in self._sources and not _is_expert_parameter(n, held)
        ]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, first {missing[0]!r}"
            )
        return NameMap(sources=self._sources, experts=experts, unused=tuple(self._unused))

    def _finish_experts(self, module: str, layout: ExpertsLayout) -> ExpertsSource:
        names, fused = self._names[module], self._fused[module]
        wanted = [(e, p) for e in range(layout.num_experts) for p in layout.projections]
        if fused:
            linears = (layout.first_linear, "down_proj")
            needed = [*linears, *(f"{linear}_bias" for linear in linears if layout.has_bias)]
            lacking = [leaf for leaf in needed if leaf not in fused]
            if lacking or names:
                what = f"'{module}.{lacking[0]}'" if lacking else "one tensor per expert and fused ones at once"
                raise CheckpointError(f"the experts of {module!r} are incomplete or given twice: {what}")
            return ExpertsSource(module=module, layout=layout, names=_names_of_fused(fused, layout), fused=fused)
        if not layout.can_be_quantized:
            raise CheckpointError(f"the checkpoint lacks the fused experts tensors of {module!r}")
        lacking_experts = [key for key in wanted if key not in names]
        if lacking_experts:
            expert, projection = lacking_experts[0]
            raise CheckpointError(
                f"the checkpoint lacks {len(lacking_experts)} expert tensors of {module!r}, first {projection} of "
                f"expert {expert}"
            )
        extra = sorted(set(names) - set(wanted))
        if extra:
            raise CheckpointError(
                f"tensor '{names[extra[0]]}.weight' is of expert {extra[0][0]}, but {module!r} has "
                f"{layout.num_experts} experts"
            )
        return ExpertsSource(module=module, layout=layout, names={key: names[key] for key in wanted})


def _is_expert_parameter(name: str, held: tuple[str, ...]) -> bool:
    return name.startswith(held) and name.rpartition(".")[2].removesuffix("_bias") in FUSED_PARAMETERS


def _names_of_fused(fused: Mapping[str, str], layout: ExpertsLayout) -> dict[tuple[int, str], str]:
    tensor = fused["down_proj"]
    # `model.layers.0.mlp.experts.down_proj` -> `model.layers.0.mlp.experts`
    folder = next(
        (tensor.removesuffix(tail) + name for tail, name in FUSED_EXPERT_FOLDERS.items() if tensor.endswith(tail)),
        tensor[: tensor.rfind("experts") + len("experts")],
    )
    return {(e, p): f"{folder}.{e}.{p}" for e in range(layout.num_experts) for p in layout.projections}


def _with_family_leaves(source: ExpertsSource, rename: _Rename) -> ExpertsSource:
    """The same, with the names that transformers, which has rules for the family's own ones only, would read."""
    found = {}
    for projection in source.layout.projections:
        folder = source.names[0, projection].rpartition(".")[0]
        for leaf in (leaf for leaf, other in EXPERT_PROJECTIONS.items() if other == projection):
            target, pattern = rename(f"{folder}.{leaf}.weight")
            if pattern is not None and target.rpartition(".")[0] == source.module:
                found[projection] = leaf
    return replace(source, family_leaves=found)


def _single_experts(layouts: Mapping[str, ExpertsLayout]) -> list[str]:
    return [
        f"{module}.{expert}.{projection}.weight"
        for module, layout in layouts.items()
        for expert in range(layout.num_experts)
        for projection in layout.projections
    ]
