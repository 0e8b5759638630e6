"""The plan of a run: every decision and every check that needs no weights, made before any work.

Read `compressor.py` for how a plan is carried out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoround_fp8.checkpoint.layout import ExportLayout, PlannedTensor, parse_size, plan_layout
from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.formats.base import CheckpointFormat
from autoround_fp8.models.families import MIN_FEATURES, NEVER_QUANTIZED, fused_group
from autoround_fp8.models.skeleton import Skeleton, shares_tied_weight
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme, SchemeResolver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """One linear layer of a block.

    Attributes:
        module: Module name in the model.
        fqn: Name in the checkpoint, without `.weight`; differs from `module` where transformers renames.
        shape: `(out_features, in_features)`.
        scheme: How it is quantised; 16 bits = not at all.
        group: Module names of the linears that share its input scale, itself included.
    """

    module: str
    fqn: str
    shape: tuple[int, int]
    scheme: QuantizationScheme
    group: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """What a run will do.

    Attributes:
        skeleton: The model on meta.
        blocks: Per decoder block, its linear layers, quantised or not.
        exceptions: Checkpoint name -> scheme of the linears in the blocks that differ from the default scheme.
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
    blocks = tuple(_plan_block(name, skeleton, source, resolver) for name in skeleton.block_names)
    _check_patterns(resolver, skeleton)
    linears = [linear for block in blocks for linear in block]
    quantized = {linear.fqn: linear for linear in linears if linear.scheme.is_quantized}
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
    made, consumed = {t.name for t in tensors}, {f"{fqn}.weight" for fqn in quantized}
    clash = sorted((made - consumed) & set(source.entries))
    if clash:
        raise CheckpointError(f"the source already has a tensor {clash[0]!r}, which the export would replace")
    tensors += [
        PlannedTensor(name=e.name, dtype=e.dtype, shape=e.shape, source=e.name)
        for e in source.entries.values()
        if e.name not in consumed
    ]
    return QuantizationPlan(
        skeleton=skeleton,
        blocks=blocks,
        exceptions={x.fqn: x.scheme for x in linears if x.scheme != config.scheme},
        layout=plan_layout(tensors, source.entries, consumed, parse_size(config.max_shard_size)),
    )


def check_source(raw_config: Mapping[str, Any], source: TensorSource) -> None:
    """Refuses sources that are quantised already.

    Raises:
        ConfigError: Naming the method.
        CheckpointError: For an FP8 tensor without a quantization_config.
    """
    block = raw_config.get("quantization_config") or (raw_config.get("text_config") or {}).get("quantization_config")
    if block:
        method = block.get("quant_method", "unknown") if isinstance(block, dict) else "unknown"
        raise ConfigError(f"the model is already quantised (quant_method {method!r}); start from its 16-bit original")
    for entry in source.entries.values():
        if entry.dtype.startswith("F8"):
            raise CheckpointError(f"tensor {entry.name!r} is {entry.dtype}, but config.json has no quantization_config")


def _plan_block(
    name: str, skeleton: Skeleton, source: TensorSource, resolver: SchemeResolver
) -> tuple[LinearPlan, ...]:
    block = skeleton.model.get_submodule(name)
    schemes: dict[str, tuple[str, nn.Linear, QuantizationScheme]] = {}
    for module_name, module in block.named_modules(prefix=name):
        if not isinstance(module, nn.Linear):
            continue
        tensor_name = skeleton.sources.get(f"{module_name}.weight")
        if tensor_name is None or not tensor_name.endswith(".weight"):
            raise UnsupportedModelError(f"the weight of {module_name!r} has no tensor of its own in the checkpoint")
        fqn = tensor_name.removesuffix(".weight")
        scheme = _scheme_of(fqn, module, skeleton, resolver, module_name)
        if scheme.is_quantized:
            _check_weight(source, tensor_name, module)
        schemes[module_name] = (fqn, module, scheme)
    return tuple(
        LinearPlan(
            module=module_name,
            fqn=fqn,
            shape=(module.out_features, module.in_features),
            scheme=_agree(module_name, schemes),
            group=_group_members(module_name, schemes),
        )
        for module_name, (fqn, module, _) in schemes.items()
    )


def _scheme_of(
    fqn: str, module: nn.Linear, skeleton: Skeleton, resolver: SchemeResolver, module_name: str
) -> QuantizationScheme:
    scheme = resolver.resolve(fqn)
    keep = (
        type(module) is not nn.Linear
        or min(module.in_features, module.out_features) < MIN_FEATURES
        or NEVER_QUANTIZED.search(fqn) is not None
        or NEVER_QUANTIZED.search(module_name) is not None
        or shares_tied_weight(skeleton.model, f"{module_name}.weight")
    )
    return UNQUANTIZED if keep else scheme


def _check_weight(source: TensorSource, tensor_name: str, module: nn.Linear) -> None:
    entry = source.entries[tensor_name]
    if entry.shape != (module.out_features, module.in_features):
        raise CheckpointError(
            f"tensor {tensor_name!r} has shape {list(entry.shape)}, the model expects "
            f"{[module.out_features, module.in_features]}"
        )
    if entry.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"tensor {tensor_name!r} is {entry.dtype}; weights must be BF16, F16 or F32")


def _group_members(module_name: str, present: Mapping[str, Any]) -> tuple[str, ...]:
    parent, _, leaf = module_name.rpartition(".")
    names = fused_group(leaf) or (leaf,)
    return tuple(f"{parent}.{n}" for n in names if f"{parent}.{n}" in present)


def _agree(module_name: str, schemes: Mapping[str, tuple[str, nn.Linear, QuantizationScheme]]) -> QuantizationScheme:
    """One scheme for layers that engines fuse: all stay in 16 bit if one must; differing FP8 schemes are refused."""
    members = _group_members(module_name, schemes)
    found = [schemes[m][2] for m in members]
    own = schemes[module_name][2]
    if any(not scheme.is_quantized for scheme in found):
        if own.is_quantized:
            kept = [schemes[m][0] for m in members if not schemes[m][2].is_quantized]
            logger.warning("%s stays in 16 bit too: engines fuse it with %s", schemes[module_name][0], ", ".join(kept))
        return UNQUANTIZED
    if any(scheme != own for scheme in found):
        names = ", ".join(schemes[m][0] for m in members)
        raise ConfigError(
            f"layer_config gives {names} different schemes, but engines fuse them; give them the same one"
        )
    return own


def _check_patterns(resolver: SchemeResolver, skeleton: Skeleton) -> None:
    # Modules outside the blocks, or that are no Linear, may be named too: they are left alone anyway.
    others = [name for name, _ in skeleton.model.named_modules()]
    for name in others:
        resolver.resolve(name)
    for pattern in resolver.unused_patterns():
        logger.warning("layer pattern %r names no layer of this model", pattern)


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
