"""Native FP8 checkpoints (DeepSeek-V3, Qwen3-FP8) as a source of ordinary 16-bit tensors.

Pairs and checks weights and scales from the headers alone; values are dequantised strip by strip when asked for. What
a checkpoint's own bytes are is in `reader.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from autoround_fp8.checkpoint.reader import DTYPE_NAMES, TensorEntry, TensorSource, join_chunks, tensor_bytes
from autoround_fp8.errors import CheckpointError, ConfigError, NumericsError
from autoround_fp8.numerics.fp8 import FP8_DTYPE, decode_fp8

logger = logging.getLogger(__name__)

# Settings of a quantization_config that list the layers which are not FP8.
_PLAIN_LISTS = ("modules_to_not_convert", "ignored_layers")
# `X.weight` -> `X.weight_scale_inv`, `experts.down_proj` -> `experts.down_proj_scale_inv`; multipliers, both of them.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_MODEL_DTYPES = ("BF16", "F16", "F32")
_STRIP_ROWS = 128
# Of float32 values; larger strips leave the cache and are slower.
_STRIP_BYTES = 2 * 1024 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scale:
    """A weight's scale tensor.

    Attributes:
        name: Its name.
        block: Rows and columns of the weight that one scale covers.
        grid: Scales per matrix, `(ceil(N / rows), ceil(K / columns))`.
        by_expert: Whether its first dimension is the weight's, so that one expert's part can be read alone.
    """

    name: str
    block: tuple[int, int]
    grid: tuple[int, int]
    by_expert: bool


def is_native_fp8(raw_config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are FP8 and inputs are quantised on the fly: `quant_method: fp8`."""
    block = _quantization_block(raw_config)
    if not isinstance(block, Mapping) or block.get("quant_method") != "fp8":
        return False
    return block.get("activation_scheme") in (None, "dynamic")


def _quantization_block(raw_config: Mapping[str, Any]) -> Any:
    text_config = raw_config.get("text_config")
    nested = text_config.get("quantization_config") if isinstance(text_config, Mapping) else None
    return raw_config.get("quantization_config") or nested


def open_source(source: TensorSource, raw_config: Mapping[str, Any], dtype: torch.dtype) -> TensorSource:
    """Makes a checkpoint's tensors available in 16 or 32 bit, whatever they are stored as.

    Args:
        source: The checkpoint's tensors.
        raw_config: Contents of its config.json.
        dtype: What FP8 weights are dequantised to: bfloat16, float16 or float32.

    Returns:
        `source` itself if nothing in it is FP8, else a `BlockFp8Source`.

    Raises:
        ConfigError: If the model is quantised in another way than native FP8 with dynamic activations.
        CheckpointError: For an FP8 tensor without a quantization_config, and where `BlockFp8Source` raises it.
    """
    block = _quantization_block(raw_config)
    if not block:
        for entry in source.entries.values():
            if entry.dtype.startswith("F8"):
                raise CheckpointError(
                    f"tensor {entry.name!r} is {entry.dtype}, but config.json has no quantization_config"
                )
        return source
    method = block.get("quant_method", "unknown") if isinstance(block, Mapping) else "unknown"
    if not is_native_fp8(raw_config):
        activations = block.get("activation_scheme") if isinstance(block, Mapping) else None
        found = f"quant_method {method!r}" + (f", activation_scheme {activations!r}" if method == "fp8" else "")
        raise ConfigError(f"the model is already quantised ({found}); start from its 16-bit original")
    native = BlockFp8Source(source, _block_size(block), dtype)
    _warn_of_listed(native, block)
    return native if native.fp8_weights else source


class BlockFp8Source:
    """The tensors of a native FP8 checkpoint, its FP8 weights dequantised and their scales hidden.

    A weight `[N, K]` (or `[E, N, K]`: fused experts) of F8_E4M3 codes has its scales in a tensor of the same name plus
    `_scale_inv` or `_scale`: `[ceil(N / rows), ceil(K / columns)]` with a block size; without it one, or one per row.

    Args:
        source: The checkpoint's tensors. Nothing but their entries is looked at here.
        block_size: Rows and columns that share a scale, `weight_block_size` of the config; None if it has none.
        dtype: What the weights are handed out as: bfloat16, float16 or float32.

    Raises:
        CheckpointError: Naming the tensor, if an FP8 weight has no scale or two, a scale has no weight or a wrong
            dtype or shape, or an FP8 tensor is neither.
        ConfigError: If `dtype` is another one.
    """

    def __init__(self, source: TensorSource, block_size: tuple[int, int] | None, dtype: torch.dtype):
        if DTYPE_NAMES.get(dtype) not in _MODEL_DTYPES:
            raise ConfigError(f"FP8 weights can be read as {', '.join(_MODEL_DTYPES)}, not as {dtype}")
        self._source = source
        self._dtype = dtype
        self._scales = _pair_scales(source.entries, block_size)
        hidden = {scale.name for scale in self._scales.values()}
        self._entries: dict[str, TensorEntry] = {}
        for name, entry in source.entries.items():
            if name in self._scales:
                entry = dataclasses.replace(entry, dtype=DTYPE_NAMES[dtype], stored_dtype=entry.dtype)
            if name not in hidden:
                self._entries[name] = entry

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor but the scales, by name; FP8 weights with the dtype they are handed out as."""
        return self._entries

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors as stored, scales included, in bytes."""
        return self._source.stored_bytes

    @property
    def fp8_weights(self) -> tuple[str, ...]:
        """Names of the weights that are stored as FP8."""
        return tuple(self._scales)

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Reads one tensor, or one entry of its first dimension; float32 maths and one cast for FP8 weights.

        Raises:
            CheckpointError: If there is no such tensor or entry, or its bytes cannot be read.
            NumericsError: Naming the tensor, if a scale is not finite and positive, a weight holds a NaN code, or a
                value does not fit the dtype.
        """
        if name not in self._scales:
            return self._source.read(name, index)
        return join_chunks(self.chunks(name, index), self._dtype, self._entries[name].part_shape(index))

    def chunks(self, name: str, index: int | None = None) -> Iterator[memoryview]:
        """Yields the bytes of the same in order; an FP8 weight in strips of up to 128 rows and 2 MB.

        Raises:
            CheckpointError: As `read`.
            NumericsError: As `read`.
        """
        if name not in self._scales:
            yield from self._source.chunks(name, index)
            return
        entry = self._entries[name]
        if math.prod(entry.part_shape(index)) == 0:
            return
        scale = self._scales[name]
        matrix_rows, columns = entry.shape[-2:]
        is_fused = len(entry.shape) == 3
        grid = self._read_grid(entry, index if is_fused else None)
        row = 0 if is_fused or index is None else index
        for codes in _strips(self._source.chunks(name, index), columns):
            values = decode_fp8(codes.view(FP8_DTYPE))
            rows = torch.arange(row, row + len(values))
            grid_rows = rows // matrix_rows * scale.grid[0] + rows % matrix_rows // scale.block[0]
            _multiply(values, grid[grid_rows], scale.block[1])
            yield tensor_bytes(self._checked(name, values))
            row += len(values)

    def _read_grid(self, entry: TensorEntry, index: int | None) -> torch.Tensor:
        """The scales of a weight or of one expert, float32, `[matrices * grid rows, grid columns]`."""
        scale = self._scales[entry.name]
        values = self._source.read(scale.name, index if scale.by_expert else None)
        if values.dtype == torch.uint8:
            # Exponents, under the name that old safetensors had for them: 2**(code - 127), 255 is NaN.
            values = values.view(torch.float8_e8m0fnu)
        values = values.float()
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise NumericsError(f"scale {scale.name!r} holds values that are not finite and positive")
        matrices = math.prod(entry.shape[:-2]) if index is None else 1
        # One scale for all experts stands for one each.
        return values.reshape(-1, scale.grid[1]).expand(matrices * scale.grid[0], -1)

    def _checked(self, name: str, values: torch.Tensor) -> torch.Tensor:
        cast = values.to(self._dtype)
        # The extremes show NaN and infinity alike, in one pass.
        if not bool(torch.isfinite(torch.stack(torch.aminmax(cast))).all()):
            if bool(torch.isnan(values).any()):
                raise NumericsError(f"tensor {name!r} holds NaN codes; the checkpoint is damaged")
            raise NumericsError(
                f"tensor {name!r} times its scale {self._scales[name].name!r} does not fit {DTYPE_NAMES[self._dtype]}"
            )
        return cast


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    size = config.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ConfigError(
            f"weight_block_size of the model's quantization_config must be two positive ints, got {size!r}"
        )
    return size[0], size[1]


def _warn_of_listed(source: BlockFp8Source, config: Mapping[str, Any]) -> None:
    """Says so, once, if config.json calls a layer plain whose weight is FP8 with a scale; the tensors are believed."""
    for key in _PLAIN_LISTS:
        value = config.get(key)
        listed = {name for name in value if isinstance(name, str)} if isinstance(value, list | tuple) else set()
        for tensor in source.fp8_weights if listed else ():
            parts = tensor.removesuffix(".weight").split(".")
            # As transformers reads the list: a layer, a module around it, or the end of its name.
            names = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
            names |= {".".join(parts[start:]) for start in range(len(parts))}
            if names & listed:
                logger.warning(
                    "config.json lists %r in %s, but tensor %r is stored as FP8 with a scale; it is dequantised",
                    min(names & listed),
                    key,
                    tensor,
                )
                return


def _pair_scales(entries: Mapping[str, TensorEntry], block_size: tuple[int, int] | None) -> dict[str, _Scale]:
    """Finds the scale of every FP8 weight, by the weight's name."""
    fp8 = {name for name, entry in entries.items() if entry.dtype.startswith("F8")}
    scales: dict[str, _Scale] = {}
    used = set()
    for name, entry in entries.items():
        if name not in fp8 or _weight_of(name) in fp8:
            continue
        if entry.dtype == "F8_E8M0":
            raise CheckpointError(f"tensor {name!r} is F8_E8M0, but no FP8 weight belongs to it")
        if entry.dtype != "F8_E4M3":
            raise CheckpointError(f"tensor {name!r} is {entry.dtype}; only F8_E4M3 weights can be dequantised")
        found = [name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in entries]
        if not found:
            raise CheckpointError(f"tensor {name!r} is F8_E4M3, but there is no scale {name + _SCALE_SUFFIXES[0]!r}")
        if len(found) > 1:
            raise CheckpointError(f"tensor {name!r} has two scales: {found[0]!r} and {found[1]!r}")
        scales[name] = _check_scale(entry, entries[found[0]], block_size)
        used.add(found[0])
    for name in entries:
        weight = _weight_of(name)
        if weight is None or name in used:
            continue
        # A parameter may be called `logit_scale`: only certain names, or one beside its matrix, are left-over scales.
        is_scale = name.endswith(("_scale_inv", ".weight_scale"))
        if is_scale or (weight in entries and len(entries[weight].shape) > 1):
            raise CheckpointError(f"scale {name!r} has no FP8 weight {weight!r}")
    return scales


def _weight_of(name: str) -> str | None:
    """The weight that a tensor is the scale of, going by its name."""
    return next((name.removesuffix(suffix) for suffix in _SCALE_SUFFIXES if name.endswith(suffix)), None)


def _check_scale(weight: TensorEntry, scale: TensorEntry, block_size: tuple[int, int] | None) -> _Scale:
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(
            f"tensor {weight.name!r} is F8_E4M3 of shape {list(weight.shape)}; only matrices and fused experts "
            "([experts, rows, columns]) can be dequantised"
        )
    if scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"scale {scale.name!r} is {scale.dtype}; scales must be one of {', '.join(_SCALE_DTYPES)}"
        )
    lead, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    is_single = math.prod(scale.shape) == 1
    is_one_each = scale.shape in (lead, (*lead, 1), (*lead, 1, 1))
    if block_size is not None:
        block = block_size
        expected = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        is_one_block = expected[-2:] == (1, 1) and (is_one_each or (is_single and math.prod(lead) == 1))
        if scale.shape != expected and not is_one_block:
            raise CheckpointError(
                f"scale {scale.name!r} has grid {list(scale.shape)}, but {weight.name!r} of shape "
                f"{list(weight.shape)} in blocks of {list(block)} needs {list(expected)}"
            )
    elif is_single or is_one_each:
        block = (max(rows, 1), max(columns, 1))
    elif scale.shape in ((*lead, rows), (*lead, rows, 1)):
        block = (1, max(columns, 1))
    else:
        raise CheckpointError(
            f"scale {scale.name!r} has shape {list(scale.shape)}; without a weight_block_size in config.json it must "
            f"be one value or {[*lead, rows]} for {weight.name!r}"
        )
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return _Scale(name=scale.name, block=block, grid=grid, by_expert=bool(lead) and not is_single)


def _strips(chunks: Iterable[memoryview], columns: int) -> Iterator[torch.Tensor]:
    """Cuts a stream of bytes into uint8 matrices `[<= 128 rows, columns]`, each valid until the next is asked for."""
    rows = max(1, min(_STRIP_ROWS, _STRIP_BYTES // (columns * 4)))
    strip = torch.empty(rows, columns, dtype=torch.uint8)
    view = tensor_bytes(strip)
    filled = 0
    for chunk in chunks:
        position = 0
        while position < len(chunk):
            count = min(len(view) - filled, len(chunk) - position)
            view[filled : filled + count] = chunk[position : position + count]
            filled += count
            position += count
            if filled == len(view):
                yield strip
                filled = 0
    if filled:
        yield strip[: filled // columns]


def _multiply(values: torch.Tensor, scales: torch.Tensor, block_columns: int) -> None:
    """Multiplies `[rows, K]` in place by `[rows, ceil(K / block columns)]` scales, the last block maybe partial."""
    whole = values.shape[1] // block_columns
    if whole:
        values[:, : whole * block_columns].unflatten(1, (whole, block_columns)).mul_(scales[:, :whole, None])
    values[:, whole * block_columns :].mul_(scales[:, whole:])
