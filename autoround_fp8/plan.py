"""The plan of a run: every decision and every check that needs no weights, made before any work.

Read `compressor.py` for how a plan is carried out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoround_fp8.checkpoint.layout import ExportLayout, PlannedTensor, parse_size, plan_layout
from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.formats.base import CheckpointFormat
from autoround_fp8.layer_plan import LayerPlanner, LinearPlan
from autoround_fp8.models.skeleton import Skeleton
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, SchemeResolver, matches_layer

logger = logging.getLogger(__name__)

# `model.layers.3.mlp.experts.7.up_proj`: the experts of a layer, an expert, its projection.
_EXPERT_NAME = re.compile(r"(.*\.experts)\.\d+\.\w+")


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """What a run will do.

    Attributes:
        skeleton: The model on meta.
        blocks: Per decoder block, its linear layers, quantised or not.
        exceptions: Checkpoint name, or regular expression for all experts of a layer -> scheme, of the linears in the
            blocks that differ from the default scheme and of other matrices that stay as they are.
        layout: Where each tensor of the export goes.
    """

    skeleton: Skeleton
    blocks: tuple[tuple[LinearPlan, ...], ...]
    exceptions: Mapping[str, QuantizationScheme]
    layout: ExportLayout

    @property
    def quantized(self) -> list[LinearPlan]:
        """All layers that get FP8 codes."""
        return [linear for block in self.blocks for linear in block if linear.scheme.is_quantized]


def make_plan(
    config: QuantizeConfig, skeleton: Skeleton, source: TensorSource, checkpoint_format: CheckpointFormat
) -> QuantizationPlan:
    """Decides what happens to every layer and tensor.

    Raises:
        ConfigError: If nothing would be quantised, fused layers disagree, or the format cannot hold a scheme.
        CheckpointError: If a weight is not what its layer needs, or a source tensor would be lost.
        UnsupportedModelError: If a layer cannot be mapped to one source tensor.
    """
    resolver = SchemeResolver(config.scheme, config.layer_config, config.ignore_layers)
    planner = LayerPlanner(skeleton, source, resolver, shared_expert_scale=config.moe_input_scale == "shared")
    blocks = tuple(planner.plan_block(name) for name in skeleton.block_names)
    linears = [linear for block in blocks for linear in block]
    quantized = {linear.fqn: linear for linear in linears if linear.scheme.is_quantized}
    _check_patterns(resolver, skeleton, config.layer_config, list(quantized.values()))
    _report_unused(skeleton)
    if not quantized:
        raise ConfigError(
            f"nothing would be quantised: none of the {len(linears)} linear layers in the blocks is left to do"
        )
    checkpoint_format.validate({fqn: linear.scheme for fqn, linear in quantized.items()})
    tensors = [
        t
        for linear in quantized.values()
        for t in checkpoint_format.planned_tensors(linear.fqn, linear.shape, linear.scheme)
    ]
    made, consumed = {t.name for t in tensors}, _consumed_tensors(skeleton, quantized)
    clash = sorted((made - consumed) & set(source.entries))
    if clash:
        raise CheckpointError(f"the source already has a tensor {clash[0]!r}, which the export would replace")
    copied = [
        PlannedTensor(name=e.name, dtype=e.dtype, shape=e.shape, source=e.name)
        for e in source.entries.values()
        if e.name not in consumed
    ]
    schemes = {x.fqn: x.scheme for x in linears}
    prefixes = block_prefixes(skeleton, blocks)
    for fqn in _copied_matrices(copied, skeleton, prefixes, quantized):
        schemes.setdefault(fqn, UNQUANTIZED)
    exceptions = _summarised({fqn: scheme for fqn, scheme in schemes.items() if scheme != config.scheme}, schemes)
    _check_described(checkpoint_format, config.scheme, exceptions, prefixes, linears)
    return QuantizationPlan(
        skeleton=skeleton,
        blocks=blocks,
        exceptions=exceptions,
        layout=plan_layout([*tensors, *copied], source.entries, consumed, parse_size(config.max_shard_size)),
    )


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


def _check_described(
    checkpoint_format: CheckpointFormat,
    scheme: QuantizationScheme,
    exceptions: Mapping[str, QuantizationScheme],
    prefixes: Sequence[str],
    linears: Sequence[LinearPlan],
) -> None:
    """Reads the config that would be written as a loader does: it must say of every layer what the plan says."""
    parsed = checkpoint_format.parse(checkpoint_format.quantization_config(scheme, exceptions, prefixes))
    assert parsed is not None
    for linear in linears:
        if parsed.resolve(linear.fqn) != linear.scheme:
            raise UnsupportedModelError(
                f"the config of format {checkpoint_format.name!r} cannot describe layer {linear.fqn!r}: another entry "
                "of it names that layer too"
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


def _summarised(
    exceptions: Mapping[str, QuantizationScheme], schemes: Mapping[str, QuantizationScheme]
) -> dict[str, QuantizationScheme]:
    """Writes the exceptions for the experts of a layer as one regular expression where they are all alike."""
    members: dict[str, list[str]] = {}
    for fqn in schemes:
        match = _EXPERT_NAME.fullmatch(fqn)
        if match:
            members.setdefault(match[1], []).append(fqn)
    found: dict[str, QuantizationScheme] = {}
    for fqn, scheme in exceptions.items():
        match = _EXPERT_NAME.fullmatch(fqn)
        group = members[match[1]] if match else []
        if match and all(schemes[name] == scheme for name in group):
            leaves = sorted({name.rpartition(".")[2] for name in group})
            found[rf"{re.escape(match[1])}\.\d+\.({'|'.join(leaves)})$"] = scheme
        else:
            found[fqn] = scheme
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
