"""What is wrong or odd about the tensors of a checkpoint, by themselves and against its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoround_fp8.formats.base import EXPERT_NAME
from autoround_fp8.formats.kv_cache import CACHE_SCALE, is_static_fp8_cache
from autoround_fp8.inspection.contents import NATIVE_FP8, NO_LABEL, Contents, Matrix, Scale
from autoround_fp8.models.families import FUSED_GROUPS, NEVER_QUANTIZED
from autoround_fp8.numerics.granularity import PER_CHANNEL

# Engines take differences below this for equal.
_TOLERANCE = 1e-5
OUTPUT_LAYERS = ("lm_head", "embed_out")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found.

    Attributes:
        is_fault: Whether it makes the checkpoint broken; otherwise it is only odd.
        what: What it is.
        names: Tensors, layers or sentences it is about.
    """

    is_fault: bool
    what: str
    names: tuple[str, ...]


def find_all(contents: Contents) -> tuple[Finding, ...]:
    """Everything wrong or odd; faults first."""
    found = [
        *_damage(contents),
        *_scale_faults(contents),
        *_config_faults(contents),
        *_expert_faults(contents),
        *_cache_findings(contents),
        *_oddities(contents),
    ]
    return tuple(sorted((f for f in found if f.names), key=lambda f: not f.is_fault))


def is_router(name: str) -> bool:
    """Whether a layer is a router or gate, which engines keep in 16 bit."""
    return NEVER_QUANTIZED.search(name) is not None and name.rpartition(".")[2] not in OUTPUT_LAYERS


def fused_groups(contents: Contents) -> list[list[Matrix]]:
    """The layers that engines fuse, where at least two of a group are there: q/k/v, gate/up, also of each expert."""
    by_name = {matrix.name: matrix for matrix in contents.matrices}
    groups = []
    for name in by_name:
        parent, _, leaf = name.rpartition(".")
        for group in FUSED_GROUPS:
            if leaf == group[0]:
                members = [by_name[other] for g in group if (other := f"{parent}.{g}") in by_name]
                if len(members) > 1:
                    groups.append(members)
    return groups


def has_one_value(scales: Iterable[Scale | None]) -> bool:
    """Whether scales, where there are any, are the same to engines."""
    present = [scale for scale in scales if scale is not None]
    return not present or max(s.high for s in present) - min(s.low for s in present) <= _TOLERANCE * present[0].high


def scale_shapes(matrix: Matrix, block_size: tuple[int, int] | None) -> set[tuple[int, ...]]:
    """The shapes that the weight scale of a matrix may have."""
    lead, (rows, columns) = matrix.shape[:-2], matrix.shape[-2:]
    shapes = {(*lead, rows), (*lead, rows, 1), lead, (*lead, 1), (*lead, 1, 1)}
    if block_size is not None:
        # One block is also one scale, and nothing else is.
        grid = (*lead, -(-rows // block_size[0]), -(-columns // block_size[1]))
        shapes = {grid, *(shape for shape in shapes if math.prod(shape) == math.prod(grid) == math.prod(lead))}
    return shapes


def _damage(contents: Contents) -> Iterator[Finding]:
    yield Finding(is_fault=True, what="damaged files", names=contents.file_faults)
    codes = tuple(name for name in contents.not_finite if contents.entries[name].dtype.startswith("F8"))
    yield Finding(is_fault=True, what="FP8 weights with NaN codes", names=codes)
    others = tuple(name for name in contents.not_finite if name not in codes)
    yield Finding(is_fault=True, what="tensors with NaN or infinity", names=others)
    if contents.parse_error:
        yield Finding(is_fault=False, what="quantization not understood", names=(contents.parse_error,))


def _scale_faults(contents: Contents) -> Iterator[Finding]:
    fp8 = [matrix for matrix in contents.matrices if matrix.is_fp8]
    missing = tuple(matrix.tensor for matrix in fp8 if matrix.weight_scale is None)
    yield Finding(is_fault=True, what="FP8 weights without a scale", names=missing)
    if contents.label == NO_LABEL:
        unlabelled = tuple(matrix.tensor for matrix in fp8)
        yield Finding(is_fault=True, what="FP8 weights, but no quantization_config", names=unlabelled)
    misshapen = []
    for matrix in fp8:
        scale = matrix.weight_scale
        if len(matrix.shape) < 2 or (
            scale is not None and scale.shape not in scale_shapes(matrix, contents.block_size)
        ):
            shape = None if scale is None else list(scale.shape)
            misshapen.append(f"{matrix.tensor} {list(matrix.shape)} with {shape}")
        if matrix.input_scale is not None and math.prod(matrix.input_scale.shape) != 1:
            misshapen.append(f"{matrix.input_scale.name} {list(matrix.input_scale.shape)}")
    yield Finding(is_fault=True, what="scales of a wrong shape", names=tuple(misshapen))
    scales = [s for m in fp8 for s in (m.weight_scale, m.input_scale) if s is not None]
    unsound = tuple(f"{s.name} ({s.low:.3g} to {s.high:.3g})" for s in scales if not s.is_sound)
    yield Finding(is_fault=True, what="scales that are NaN, infinite, zero or negative", names=unsound)
    by_router = tuple(s.name for s in contents.stray_scales if is_router(s.name.rpartition(".")[0]))
    quantised = tuple(m.tensor for m in fp8 if is_router(m.name) and not EXPERT_NAME.fullmatch(m.name))
    what = "routers with a scale, which engines keep in 16 bit"
    yield Finding(is_fault=True, what=what, names=(*quantised, *by_router))
    strays = tuple(s.name for s in contents.stray_scales if s.name not in by_router)
    yield Finding(is_fault=True, what="scales without an FP8 weight", names=strays)


def _config_faults(contents: Contents) -> Iterator[Finding]:
    """Where config.json says something else than the tensors are."""
    parsed = contents.parsed
    if parsed is None:
        return
    plain, ignored, sizes, absent, needless = [], [], [], [], []
    for matrix in contents.matrices:
        scheme = parsed.resolve(matrix.name)
        if not matrix.is_fp8:
            if scheme.is_quantized and matrix.is_linear:
                plain.append(matrix.tensor)
        elif not scheme.is_quantized:
            ignored.append(matrix.tensor)
        else:
            scale = matrix.weight_scale
            wanted = matrix.shape[0] if scheme.group_size == PER_CHANNEL else 1
            # In fp8_static a scale per matrix is repeated for every channel.
            is_repeated = contents.label == "fp8_static" and scale is not None and scale.low == scale.high
            if scale is not None and math.prod(scale.shape) != wanted and not (wanted == 1 and is_repeated):
                sizes.append(f"{scale.name} {list(scale.shape)} instead of {wanted}")
            if matrix.input_scale is None and not scheme.act_dynamic:
                absent.append(f"{matrix.name}.input_scale")
            if matrix.input_scale is not None and scheme.act_dynamic:
                needless.append(matrix.input_scale.name)
    yield Finding(is_fault=True, what="not FP8, and config.json does not say so", names=tuple(plain))
    yield Finding(is_fault=True, what="FP8 weights that config.json ignores", names=tuple(ignored))
    yield Finding(is_fault=True, what="weight scales of another size than config.json says", names=tuple(sizes))
    yield Finding(is_fault=True, what="missing input scales", names=tuple(absent))
    yield Finding(is_fault=True, what="input scales, but config.json says inputs are dynamic", names=tuple(needless))


def _expert_faults(contents: Contents) -> Iterator[Finding]:
    """Experts that are not whole: engines leave the place of what is missing as it is, with no word."""
    found: dict[str, set[tuple[int, str]]] = {}
    for matrix in contents.matrices:
        if match := EXPERT_NAME.fullmatch(matrix.name):
            number = int(matrix.name[len(match[1]) + 1 :].partition(".")[0])
            found.setdefault(match[1], set()).add((number, match[2]))
    missing = [
        f"{folder}.{number}.{leaf}"
        for folder, experts in found.items()
        for number in range(max(number for number, _ in experts) + 1)
        for leaf in sorted({leaf for _, leaf in experts})
        if (number, leaf) not in experts
    ]
    yield Finding(is_fault=True, what="missing experts", names=tuple(missing))


def _cache_findings(contents: Contents) -> Iterator[Finding]:
    """What is wrong or odd about the scales of the KV cache; to have them is neither."""
    scales, scheme = contents.cache_scales, contents.block.get("kv_cache_scheme")
    unsound = tuple(f"{s.name} ({s.low:.3g} to {s.high:.3g})" for s in scales if not s.is_sound)
    yield Finding(is_fault=True, what="KV-cache scales that are NaN, infinite, zero or negative", names=unsound)
    several: tuple[str, ...] = ()
    if isinstance(scheme, Mapping) and is_static_fp8_cache(scheme):
        several = tuple(f"{s.name} {list(s.shape)}" for s in scales if math.prod(s.shape) != 1)
    yield Finding(is_fault=True, what="KV-cache scales of a wrong shape", names=several)
    parts: dict[str, set[str]] = {}
    for scale in scales:
        owner = CACHE_SCALE.sub("", scale.name)
        parts.setdefault(owner, set()).add(scale.name[len(owner) + 1])  # k or v
    alone = tuple(owner for owner, found in parts.items() if len(found) == 1)
    yield Finding(is_fault=True, what="KV-cache scales for keys or values only", names=alone)
    if contents.label == "llm_compressor" and scales and not scheme:
        what = "KV-cache scales, but no kv_cache_scheme in config.json: engines do not use them"
        yield Finding(is_fault=False, what=what, names=tuple(s.name for s in scales))
    if contents.label == "llm_compressor" and scheme and not scales:
        what = "a kv_cache_scheme in config.json, but no KV-cache scales: engines take 1"
        yield Finding(is_fault=False, what=what, names=("kv_cache_scheme",))


def _oddities(contents: Contents) -> Iterator[Finding]:
    groups = [group for group in fused_groups(contents) if any(m.is_fp8 for m in group)]
    split = [g for g in groups if not all(m.is_fp8 for m in g)]
    inputs = [g for g in groups if g not in split and not has_one_value(m.input_scale for m in g)]
    weights = [
        g
        for g in groups
        if g not in split
        and contents.label != NATIVE_FP8
        and all(m.weight_scale is not None and math.prod(m.weight_scale.shape) == 1 for m in g)
        and not has_one_value(m.weight_scale for m in g)
    ]
    yield Finding(is_fault=False, what="only part of what engines fuse is FP8", names=_joined(split))
    what = "fused layers with different input scales: engines take the largest"
    yield Finding(is_fault=False, what=what, names=_joined(inputs))
    what = "fused layers with different weight scales per matrix: engines round again by the largest"
    yield Finding(is_fault=False, what=what, names=_joined(weights))
    if contents.config.get("tie_word_embeddings"):
        output = tuple(m.tensor for m in contents.matrices if m.is_fp8 and m.leaf in OUTPUT_LAYERS)
        what = "FP8 output layers, but config.json ties them to the embedding: loaders use that"
        yield Finding(is_fault=False, what=what, names=output)


def _joined(groups: Sequence[Sequence[Matrix]]) -> tuple[str, ...]:
    return tuple(f"{group[0].name.rpartition('.')[0]}.{'/'.join(m.leaf for m in group)}" for group in groups)
