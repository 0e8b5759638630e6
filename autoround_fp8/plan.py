"""The plan of a run: every decision and every check that needs no weights, made before any work.

Read `compressor.py` for how a plan is carried out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoround_fp8.checkpoint.layout import ExportLayout, PlannedTensor, parse_size, plan_layout
from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.formats.base import CheckpointFormat, SchemeTable
from autoround_fp8.formats.kv_cache import planned_cache_scales
from autoround_fp8.layer_plan import LayerPlanner, LinearPlan, output_layer
from autoround_fp8.models.attention import cached_attentions
from autoround_fp8.models.skeleton import Skeleton
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, SchemeResolver, matches_layer

logger = logging.getLogger(__name__)

# With less of the linear layers' weights in FP8, a checkpoint is hardly a quantised one.
_LEAST_FP8_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class PlannedExport:
    """One checkpoint that a run writes.

    Attributes:
        format: Its format.
        layout: Where each of its tensors goes.
        quantization_config: The block for its config.json, None if it has none.
        exceptions: Its name, or regular expression for all experts of a layer -> scheme, of the linears in the blocks
            that differ from the default scheme and of other matrices that stay as they are.
        names: Layer's name in the source -> its name here, where that is another (experts).
    """

    format: CheckpointFormat
    layout: ExportLayout
    quantization_config: Mapping[str, Any] | None
    exceptions: Mapping[str, QuantizationScheme]
    names: Mapping[str, str]

    def name_of(self, fqn: str) -> str:
        """The name here of a layer of the source."""
        return self.names.get(fqn, fqn)

    @property
    def ignored(self) -> list[str]:
        """The exceptions that stay in 16 bit."""
        return sorted(fqn for fqn, scheme in self.exceptions.items() if not scheme.is_quantized)


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """What a run will do.

    Attributes:
        skeleton: The model on meta.
        blocks: Per decoder block, its linear layers, quantised or not.
        output_layer: The output layer, if it is quantised.
        exports: What is written, one per format.
        cached_attentions: Checkpoint name of each block's attention, if the KV cache gets scales; else empty.
    """

    skeleton: Skeleton
    blocks: tuple[tuple[LinearPlan, ...], ...]
    exports: tuple[PlannedExport, ...]
    cached_attentions: tuple[str, ...] = ()
    output_layer: LinearPlan | None = None

    @property
    def layout(self) -> ExportLayout:
        """Where each tensor of the first export goes."""
        return self.exports[0].layout

    @property
    def exceptions(self) -> Mapping[str, QuantizationScheme]:
        """Those of the first export."""
        return self.exports[0].exceptions

    @property
    def linears(self) -> list[LinearPlan]:
        """The layers in the blocks, and the output layer if it is quantised."""
        return [linear for part in (*self.blocks, _present(self.output_layer)) for linear in part]

    @property
    def quantized(self) -> list[LinearPlan]:
        """All layers that get FP8 codes."""
        return [linear for linear in self.linears if linear.scheme.is_quantized]

    @property
    def needs_calibration(self) -> bool:
        """Whether any layer's input scale, or a scale of the KV cache, is to be measured."""
        return bool(self.cached_attentions) or any(not linear.scheme.act_dynamic for linear in self.quantized)


def make_plan(
    config: QuantizeConfig, skeleton: Skeleton, source: TensorSource, *formats: CheckpointFormat
) -> QuantizationPlan:
    """Decides what happens to every layer and tensor.

    Raises:
        ConfigError: If nothing would be quantised, fused layers disagree, or a format cannot hold a scheme or scales.
        CheckpointError: If a weight is not what its layer needs, or a source tensor would be lost.
        UnsupportedModelError: If a layer cannot be mapped to one source tensor, or the KV cache cannot have scales.
    """
    attentions = _cached_attentions(config, skeleton, formats)
    resolver = SchemeResolver(config.scheme, config.layer_config, config.ignore_layers)
    planner = LayerPlanner(
        skeleton,
        source,
        resolver,
        shared_expert_scale=config.moe_input_scale == "shared",
        kept=lambda fqn: any(f.keeps(fqn) for f in formats),
    )
    blocks = tuple(planner.plan_block(name) for name in skeleton.block_names)
    output = _planned_output(config, skeleton, formats, planner)
    linears = [linear for part in (*blocks, _present(output)) for linear in part]
    quantized = {linear.fqn: linear for linear in linears if linear.scheme.is_quantized}
    _check_patterns(resolver, skeleton, config.layer_config, list(quantized.values()))
    _report_unused(skeleton)
    _report_kept(formats, linears)
    if not quantized:
        raise ConfigError(
            f"nothing would be quantised: none of the {len(linears)} linear layers in the blocks is left to do"
        )
    consumed = _consumed_tensors(skeleton, quantized)
    copied = _copied_tensors(source, consumed)
    schemes = {x.fqn: x.scheme for x in linears}
    prefixes = block_prefixes(skeleton, blocks)
    for fqn in _copied_matrices(copied, skeleton, prefixes, quantized):
        schemes.setdefault(fqn, UNQUANTIZED)
    table = SchemeTable(
        default=config.scheme,
        schemes=schemes,
        also_kept=_kept_besides(skeleton, linears),
        block_prefixes=tuple(prefixes),
        has_cache_scales=bool(attentions),
        output_names=() if output is None else tuple(dict.fromkeys((output.fqn, output.module))),
    )
    exports = []
    for checkpoint_format in formats:
        checkpoint_format.validate({linear.fqn: linear.scheme for linear in linears})
        names = _changed_names(checkpoint_format, skeleton)
        made = _made_tensors(checkpoint_format, skeleton, source, quantized, attentions, consumed)
        tensors = _renamed([*made, *copied], names)
        own_table = replace(table, schemes={names.get(fqn, fqn): scheme for fqn, scheme in schemes.items()})
        exports.append(
            PlannedExport(
                format=checkpoint_format,
                layout=plan_layout(tensors, source.entries, consumed, parse_size(config.max_shard_size)),
                quantization_config=_described(checkpoint_format, own_table, linears, names),
                exceptions=own_table.entries(lambda scheme: scheme != config.scheme),
                names=names,
            )
        )
    return QuantizationPlan(
        skeleton=skeleton,
        blocks=blocks,
        exports=tuple(exports),
        cached_attentions=attentions,
        output_layer=output,
    )


def _present(linear: LinearPlan | None) -> list[LinearPlan]:
    return [] if linear is None else [linear]


def _planned_output(
    config: QuantizeConfig, skeleton: Skeleton, formats: Sequence[CheckpointFormat], planner: LayerPlanner
) -> LinearPlan | None:
    """The output layer, if quant_lm_head or a layer_config entry with its very name asks for it in FP8."""
    name, _ = output_layer(skeleton)
    names = {name, skeleton.sources.get(f"{name}.weight", name).removesuffix(".weight")}
    named = any(config.layer_config[entry].is_quantized for entry in names & config.layer_config.keys())
    if not config.quant_lm_head and not named:
        return None
    for checkpoint_format in formats:
        if not checkpoint_format.has_output_layer:
            raise ConfigError(
                f"format {checkpoint_format.name!r} has no FP8 output layer (quant_lm_head): engines that read it take "
                f"{name!r} for 16 bit; choose format llm_compressor or fp8_static, or leave out quant_lm_head"
            )
    return planner.plan_output_layer()


def _cached_attentions(
    config: QuantizeConfig, skeleton: Skeleton, formats: Sequence[CheckpointFormat]
) -> tuple[str, ...]:
    if config.static_kv_dtype is None:
        return ()
    for checkpoint_format in formats:
        if not checkpoint_format.has_cache_scales:
            raise ConfigError(
                f"format {checkpoint_format.name!r} holds no KV-cache scales, which static_kv_dtype "
                f"{config.static_kv_dtype!r} asks for; choose format llm_compressor, or leave out static_kv_dtype"
            )
    return cached_attentions(skeleton)


def _made_tensors(
    checkpoint_format: CheckpointFormat,
    skeleton: Skeleton,
    source: TensorSource,
    quantized: Mapping[str, LinearPlan],
    attentions: Sequence[str],
    consumed: set[str],
) -> list[PlannedTensor]:
    """The tensors that quantised layers become, and the scales of the KV cache."""
    made = [tensor for fqn in attentions for tensor in planned_cache_scales(fqn)]
    for fqn, linear in quantized.items():
        experts, tensor = skeleton.experts.get(linear.experts), f"{fqn}.weight"
        if experts is not None and experts.is_fused:
            tensor = experts.tensor_names()[0]
            if not checkpoint_format.splits_fused_experts:
                raise UnsupportedModelError(
                    f"the experts of {linear.experts!r} are one tensor in the checkpoint, which format "
                    f"{checkpoint_format.name!r} does not take apart; choose another format, or ignore the experts"
                )
        dtype = source.entries[tensor].dtype
        made += checkpoint_format.planned_tensors(fqn, linear.shape, linear.scheme, dtype)
    clash = sorted(({tensor.name for tensor in made} - consumed) & set(source.entries))
    if clash:
        raise CheckpointError(f"the source already has a tensor {clash[0]!r}, which the export would replace")
    return made


def _changed_names(checkpoint_format: CheckpointFormat, skeleton: Skeleton) -> dict[str, str]:
    by_projection = checkpoint_format.names_experts_by_projection
    sources = skeleton.experts.values()
    return {fqn: name for source in sources for fqn, name in source.renamed(by_projection=by_projection).items()}


def _renamed(tensors: Sequence[PlannedTensor], names: Mapping[str, str]) -> list[PlannedTensor]:
    parts = ((tensor, *tensor.name.rpartition(".")) for tensor in tensors)
    return [replace(t, name=f"{names[fqn]}.{part}") if fqn in names else t for t, fqn, _, part in parts]


def _copied_tensors(source: TensorSource, consumed: set[str]) -> list[PlannedTensor]:
    return [
        PlannedTensor(name=e.name, dtype=e.dtype, shape=e.shape, source=e.name)
        for e in source.entries.values()
        if e.name not in consumed
    ]


def _consumed_tensors(skeleton: Skeleton, quantized: Mapping[str, LinearPlan]) -> set[str]:
    """Source tensors that quantised layers replace: their weights, or the tensor with all experts of a layer."""
    consumed = set()
    for fqn, linear in quantized.items():
        experts = skeleton.experts.get(linear.experts)
        if experts is not None and experts.is_fused:
            consumed.update(experts.tensor_names())
        else:
            consumed.add(f"{fqn}.weight")
    return consumed


def _described(
    checkpoint_format: CheckpointFormat, table: SchemeTable, linears: Sequence[LinearPlan], names: Mapping[str, str]
) -> dict[str, Any] | None:
    """The config that is written, after reading it as a loader does: it must say of every layer what the plan says."""
    block = checkpoint_format.quantization_config(table)
    if block is None:
        return None
    parsed = checkpoint_format.parse(block)
    assert parsed is not None
    wanted = {names.get(linear.fqn, linear.fqn): linear.scheme for linear in linears}
    # Not by the model's names in the blocks: only formats for transformers need those.
    modules = {linear.module for linear in linears}
    wanted |= {name: UNQUANTIZED for name in table.also_kept if name not in modules}
    for fqn, scheme in wanted.items():
        if parsed.resolve(fqn) != scheme:
            raise UnsupportedModelError(
                f"the config of format {checkpoint_format.name!r} cannot describe layer {fqn!r}: another entry of it "
                "names that layer too"
            )
    return block


def _kept_besides(skeleton: Skeleton, linears: Sequence[LinearPlan]) -> tuple[str, ...]:
    """Linears outside the blocks (output layer, other towers), and the model's names of kept ones in the blocks.

    Both names of the former: engines know the checkpoint's, transformers its own.
    """
    names = []
    planned = {linear.module for linear in linears}
    for name, module in skeleton.model.named_modules():
        inside = name.startswith(f"{skeleton.container_name}.") or name in planned
        if isinstance(module, nn.Linear) and not inside:
            names += [skeleton.sources.get(f"{name}.weight", name).removesuffix(".weight"), name]
    fqns = {linear.fqn for linear in linears}
    names += [x.module for x in linears if not x.scheme.is_quantized and not x.experts and x.module not in fqns]
    return tuple(dict.fromkeys(names))


def _report_kept(formats: Sequence[CheckpointFormat], linears: Sequence[LinearPlan]) -> None:
    for checkpoint_format in formats:
        kept = [linear.fqn for linear in linears if checkpoint_format.keeps(linear.fqn)]
        if kept:
            logger.info(
                "%d layers stay in 16 bit, as engines that read format %s need them: %s",
                len(kept),
                checkpoint_format.name,
                ", ".join(sorted({fqn.rpartition(".")[2] for fqn in kept})),
            )


def _report_unused(skeleton: Skeleton) -> None:
    if not skeleton.unused:
        return
    logger.warning(
        "%d tensors belong to no part of %s, first %s; they are copied, in 16 bit",
        len(skeleton.unused),
        type(skeleton.model).__name__,
        skeleton.unused[0],
    )


def report_fp8_share(plan: QuantizationPlan) -> None:
    """Warns if most of what could be FP8 stays in 16 bit."""
    sizes = {True: 0, False: 0}
    for linear in plan.linears:
        sizes[linear.scheme.is_quantized] += math.prod(linear.shape)
    share = sizes[True] / sum(sizes.values())
    if share < _LEAST_FP8_SHARE:
        largest = max((x for x in plan.linears if not x.scheme.is_quantized), key=lambda x: math.prod(x.shape))
        logger.warning(
            "only %.0f %% of the weights of linear layers become FP8; among those that stay in 16 bit is %s",
            100 * share,
            largest.fqn,
        )


def _copied_matrices(
    copied: Sequence[PlannedTensor], skeleton: Skeleton, prefixes: Sequence[str], quantized: Mapping[str, LinearPlan]
) -> list[str]:
    """Names of what stays in 16 bit although it is a matrix: routers, fused experts, layers the model does not have."""
    unused = set(skeleton.unused)
    inside = tuple(f"{prefix}." for prefix in prefixes)
    found = []
    for tensor in copied:
        if len(tensor.shape) >= 2 and (tensor.name.startswith(inside) or tensor.name in unused):
            stem = tensor.name.removesuffix(".weight")
            owner = tensor.name.rpartition(".")[0]
            # A parameter without a module of its own stands for the module it is in, unless that has FP8 layers too.
            bare = stem == tensor.name and not any(fqn.startswith(f"{owner}.") for fqn in quantized)
            found.append(owner if bare else stem)
    return found


def _check_patterns(
    resolver: SchemeResolver,
    skeleton: Skeleton,
    layer_config: Mapping[str, QuantizationScheme],
    quantized: Sequence[LinearPlan],
) -> None:
    # Modules outside the blocks, or that are no Linear, may be named too: they are left alone anyway.
    others = [name for name, _ in skeleton.model.named_modules()]
    for name in others:
        resolver.resolve(name)
    for pattern in resolver.unused_patterns():
        logger.warning("layer pattern %r names no layer of this model", pattern)
    names = [name for linear in quantized for name in (linear.fqn, linear.module)]
    for pattern in set(layer_config) - set(resolver.unused_patterns()):
        if layer_config[pattern].is_quantized and not any(matches_layer(pattern, name) for name in names):
            logger.warning("layer_config entry %r asks for FP8, but names only layers that stay in 16 bit", pattern)


def calibration_dtype(config: QuantizeConfig, stored: torch.dtype, fast_bfloat16: bool) -> torch.dtype:
    """The dtype of the calibration forward.

    With "auto" a 16-bit model is run in float32 where the device only emulates 16-bit products: several times faster
    there, and at least as exact. The weights are quantised from their stored values either way.
    """
    if config.calibration_dtype != "auto":
        return getattr(torch, config.calibration_dtype)
    return stored if fast_bfloat16 else torch.float32


def block_prefixes(skeleton: Skeleton, blocks: Sequence[Sequence[LinearPlan]]) -> list[str]:
    """The name of the block list in the checkpoint, as formats want it (`model.layers`)."""
    container = skeleton.container_name
    first = next((linear for block in blocks for linear in block), None)
    if first is None or first.module == first.fqn:
        return [container]
    # The checkpoint names the list otherwise: cut the layer's own part off its name there.
    tail = first.module.removeprefix(container)
    return [first.fqn.removesuffix(tail)] if first.fqn.endswith(tail) else [container]
