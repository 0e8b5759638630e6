"""What happens to each linear layer of a block: its scheme, and with which others it shares its scales.

Experts count as linear layers here, one per expert and projection. Read `plan.py` for the plan of a whole run.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.models.families import MIN_FEATURES, NEVER_QUANTIZED, fused_group
from autoround_fp8.models.name_map import ExpertsSource
from autoround_fp8.models.skeleton import Skeleton, shares_tied_weight
from autoround_fp8.numerics.granularity import PER_CHANNEL, PER_TENSOR
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, SchemeResolver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """One linear layer of a block.

    Attributes:
        module: Name in the model of the Linear that computes it, once the block's experts are Linears.
        fqn: Name in the checkpoint, without `.weight`; differs from `module` where transformers renames.
        shape: `(out_features, in_features)`.
        scheme: How it is quantised; 16 bits = not at all.
        group: Modules that share its input scale, its own included.
        rows: Its rows (first, end) in the module's weight, None = all: an expert's gate and up are one module.
        fused: Checkpoint names of the layers that engines fuse it with, itself included; where weights have one scale
            per tensor, these share it.
        experts: Name of the experts module it belongs to, "" for other layers.
        siblings: For an expert's layer, the modules that do the same in the layer's other experts, its own included.
    """

    module: str
    fqn: str
    shape: tuple[int, int]
    scheme: QuantizationScheme
    group: tuple[str, ...]
    rows: tuple[int, int] | None = None
    fused: tuple[str, ...] = ()
    experts: str = ""
    siblings: tuple[str, ...] = ()


class LayerPlanner:
    """Plans the linear layers of one block after the other.

    Args:
        skeleton: The model.
        source: Its tensors.
        resolver: The user's wishes.
        shared_expert_scale: Whether all experts of a layer share one input scale per projection.
        kept: Says of a layer's name whether the checkpoint format needs it in 16 bit.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        source: TensorSource,
        resolver: SchemeResolver,
        *,
        shared_expert_scale: bool = True,
        kept: Callable[[str], bool] = lambda fqn: False,
    ):
        self._skeleton = skeleton
        self._source = source
        self._resolver = resolver
        self._shared_expert_scale = shared_expert_scale
        self._kept = kept
        # In a checkpoint with FP8 weights, a weight in 16 bit was left so by its makers.
        self._only_native_fp8 = any(entry.is_native_fp8 for entry in source.entries.values())

    def plan_block(self, name: str) -> tuple[LinearPlan, ...]:
        """The layers of a block, quantised or not.

        Raises:
            ConfigError: If layers that engines fuse get different schemes.
            CheckpointError: If a weight is not what its layer needs.
            UnsupportedModelError: If a layer cannot be mapped to one source tensor.
        """
        plans = self._plan_linears(name)
        for source in self._skeleton.experts_in(name).values():
            plans += self._plan_experts(source)
        return tuple(plans)

    def plan_output_layer(self) -> LinearPlan:
        """The output layer, to be quantised.

        Raises:
            ConfigError: If it is tied to the embedding, or is to stay in 16 bit as well.
            CheckpointError: If its weight is not what it needs.
            UnsupportedModelError: If there is none that could be quantised.
        """
        name, module = output_layer(self._skeleton)
        if module is not None and shares_tied_weight(self._skeleton.model, f"{name}.weight"):
            raise ConfigError(
                f"the output layer {name!r} cannot be FP8 (quant_lm_head): its weight is tied to the input embedding, "
                "which stays in 16 bit; leave out quant_lm_head, or first save the model with an output weight of its "
                "own and tie_word_embeddings false"
            )
        tensor = self._skeleton.sources.get(f"{name}.weight")
        if type(module) is not nn.Linear or tensor is None or min(module.weight.shape) < MIN_FEATURES:
            raise UnsupportedModelError(
                f"{type(self._skeleton.model).__name__} has no output layer that could be FP8 (quant_lm_head): it must "
                f"be a plain Linear with at least {MIN_FEATURES} inputs and outputs"
            )
        fqn, shape = tensor.removesuffix(".weight"), (module.out_features, module.in_features)
        scheme = self._resolver.resolve(fqn, alias=name)
        if not scheme.is_quantized:
            raise ConfigError(
                f"the output layer {fqn!r} is asked for in FP8 (quant_lm_head) and, by ignore_layers, layer_config or "
                "the scheme, in 16 bit; drop one of them"
            )
        self._check_weight(tensor, shape)
        return LinearPlan(module=name, fqn=fqn, shape=shape, scheme=scheme, group=(name,), fused=(fqn,))

    def _plan_linears(self, name: str) -> list[LinearPlan]:
        linears: dict[str, tuple[str, nn.Linear]] = {}
        for module_name, module in self._skeleton.model.get_submodule(name).named_modules(prefix=name):
            if isinstance(module, nn.Linear):
                tensor = self._skeleton.sources.get(f"{module_name}.weight")
                if tensor is None or not tensor.endswith(".weight"):
                    raise UnsupportedModelError(
                        f"the weight of {module_name!r} has no tensor of its own in the checkpoint"
                    )
                linears[module_name] = (tensor.removesuffix(".weight"), module)
        schemes = {fqn: self._scheme_of(module_name, fqn, module) for module_name, (fqn, module) in linears.items()}
        plans = []
        for module_name, (fqn, module) in linears.items():
            members = _fused_members(module_name, linears)
            fused = tuple(linears[member][0] for member in members)
            plans.append(
                LinearPlan(
                    module=module_name,
                    fqn=fqn,
                    shape=(module.out_features, module.in_features),
                    scheme=_agree(fqn, fused, schemes),
                    group=members,
                    fused=fused,
                )
            )
        return plans

    def _plan_experts(self, source: ExpertsSource) -> list[LinearPlan]:
        layout = source.layout
        schemes = {fqn: self._scheme_of_expert(source, key, fqn) for key, fqn in source.names.items()}
        self._check_fused_tensors(source, schemes)
        _report_mixed(source, schemes)
        siblings = {
            projection: tuple(f"{source.module}.{e}.{layout.linear_of(projection)}" for e in range(layout.num_experts))
            for projection in layout.projections
        }
        plans = []
        for (expert, projection), fqn in source.names.items():
            together = [p for p in layout.projections if layout.linear_of(p) == layout.linear_of(projection)]
            fused = tuple(source.names[expert, p] for p in together)
            module = siblings[projection][expert]
            plans.append(
                LinearPlan(
                    module=module,
                    fqn=fqn,
                    shape=layout.shape_of(projection),
                    scheme=_agree(fqn, fused, schemes),
                    group=siblings[projection] if self._shared_expert_scale else (module,),
                    rows=layout.rows_of(projection),
                    fused=fused,
                    experts=source.module,
                    siblings=siblings[projection],
                )
            )
        return plans

    def _scheme_of(self, module_name: str, fqn: str, module: nn.Linear) -> QuantizationScheme:
        scheme = self._resolver.resolve(fqn, alias=module_name)
        keep = (
            type(module) is not nn.Linear
            or min(module.in_features, module.out_features) < MIN_FEATURES
            or NEVER_QUANTIZED.search(fqn) is not None
            or NEVER_QUANTIZED.search(module_name) is not None
            or shares_tied_weight(self._skeleton.model, f"{module_name}.weight")
        )
        if keep or self._kept(fqn) or not scheme.is_quantized or self._is_left_alone(f"{fqn}.weight"):
            return UNQUANTIZED
        self._check_weight(f"{fqn}.weight", (module.out_features, module.in_features))
        return scheme

    def _scheme_of_expert(self, source: ExpertsSource, key: tuple[int, str], fqn: str) -> QuantizationScheme:
        default = self._resolver.default
        if default.is_quantized and not default.act_dynamic:
            # Engines accept static inputs for experts only with one weight scale per tensor.
            default = dataclasses.replace(default, group_size=PER_TENSOR)
        scheme = self._resolver.resolve(fqn, default, alias=f"{source.module}.{key[0]}.{key[1]}")
        tensor = source.weight_tensor(*key)
        too_small = min(source.layout.hidden_size, source.layout.intermediate_size) < MIN_FEATURES
        if too_small or not source.layout.can_be_quantized or not scheme.is_quantized or self._is_left_alone(tensor):
            return UNQUANTIZED
        if not source.is_fused:
            self._check_weight(tensor, source.layout.shape_of(key[1]))
        return scheme

    def _is_left_alone(self, tensor: str) -> bool:
        return self._only_native_fp8 and not self._source.entries[tensor].is_native_fp8

    def _check_weight(self, tensor: str, shape: tuple[int, int]) -> None:
        entry = self._source.entries[tensor]
        if entry.shape != shape:
            raise CheckpointError(f"tensor {tensor!r} has shape {list(entry.shape)}, the model expects {list(shape)}")
        if entry.dtype not in ("BF16", "F16", "F32"):
            raise CheckpointError(f"tensor {tensor!r} is {entry.dtype}; weights must be BF16, F16 or F32")

    def _check_fused_tensors(self, source: ExpertsSource, schemes: Mapping[str, QuantizationScheme]) -> None:
        """Experts that are one tensor in the checkpoint: its shape, and that they are rewritten all or not at all."""
        layout = source.layout
        for leaf, tensor in source.fused.items():
            projection = leaf.removesuffix("_bias")
            outputs, inputs = layout.linear_shape(projection)
            matrix = (inputs, outputs) if layout.is_transposed else (outputs, inputs)
            expected = (layout.num_experts, *((outputs,) if leaf != projection else matrix))
            found = self._source.entries[tensor].shape
            if found != expected:
                raise CheckpointError(f"tensor {tensor!r} has shape {list(found)}, the model expects {list(expected)}")
        if source.is_fused:
            _check_all_or_none(source, schemes)


def output_layer(skeleton: Skeleton) -> tuple[str, nn.Module | None]:
    """Name in the model of its output layer, and the layer; "" and None if it has none."""
    output = skeleton.model.get_output_embeddings()
    found = ((name, module) for name, module in skeleton.model.named_modules() if module is output)
    return next(found, ("", None))


def _check_all_or_none(source: ExpertsSource, schemes: Mapping[str, QuantizationScheme]) -> None:
    kept = [fqn for fqn, scheme in schemes.items() if not scheme.is_quantized]
    if kept and len(kept) != len(schemes):
        raise ConfigError(
            f"only some experts of {source.module!r} would stay in 16 bit ({kept[0]!r} ...), but the checkpoint has "
            "them in one tensor: ignore all of them or none"
        )


def _report_mixed(source: ExpertsSource, schemes: Mapping[str, QuantizationScheme]) -> None:
    """Says it once per layer if engines will not load a layer's experts as they are asked for."""
    found = {(scheme.is_quantized, scheme.group_size, scheme.act_dynamic) for scheme in schemes.values()}
    if len(found) > 1:
        logger.warning("the experts of %s get different schemes; engines fuse a layer's experts", source.module)
    elif (True, PER_CHANNEL, False) in found:
        logger.warning(
            "the experts of %s get a scale per channel; with static inputs engines take only one per tensor",
            source.module,
        )


def _fused_members(module_name: str, present: Mapping[str, object]) -> tuple[str, ...]:
    parent, _, leaf = module_name.rpartition(".")
    names = fused_group(leaf) or (leaf,)
    return tuple(f"{parent}.{n}" for n in names if f"{parent}.{n}" in present)


def _agree(fqn: str, fused: tuple[str, ...], schemes: Mapping[str, QuantizationScheme]) -> QuantizationScheme:
    """One scheme for layers that engines fuse: all stay in 16 bit if one must; differing FP8 schemes are refused."""
    own = schemes[fqn]
    kept = [name for name in fused if not schemes[name].is_quantized]
    if kept:
        if own.is_quantized:
            logger.warning("%s stays in 16 bit too: engines fuse it with %s", fqn, ", ".join(kept))
        return UNQUANTIZED
    if any(schemes[name] != own for name in fused):
        raise ConfigError(
            f"layer_config gives {', '.join(fused)} different schemes, but engines fuse them; give them the same one"
        )
    return own
