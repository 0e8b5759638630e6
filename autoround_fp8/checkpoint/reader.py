"""Header-only checkpoint reader: knows every tensor's place without opening more than the headers.

Tensors are read one at a time with ordinary reads; nothing is memory-mapped, so no page of a file stays resident.
Read `writer.py` for the other direction.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from autoround_fp8.errors import CheckpointError

# safetensors' names of dtypes; https://github.com/huggingface/safetensors (README, "Format").
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# safetensors' own limit; a larger length field means a damaged or hostile file.
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 500_000_000
_COPY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: dtype by safetensors' name, shape, and its byte range in `file` (None: in memory).

    `dtype` is what the tensor is handed out as; `stored_dtype` is the one on disk where that is another ("": the same).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    start: int = 0
    end: int = 0
    stored_dtype: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes, as handed out."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_native_fp8(self) -> bool:
        """Whether the checkpoint stores FP8 codes that are handed out as dequantised values."""
        return self.stored_dtype.startswith("F8")

    def part_shape(self, index: int | None) -> tuple[int, ...]:
        """Shape of one entry of the first dimension, or of the whole tensor without an index.

        Raises:
            CheckpointError: If the tensor has no such entry.
        """
        if index is None:
            return self.shape
        if not self.shape or not 0 <= index < self.shape[0]:
            raise CheckpointError(f"tensor {self.name!r} of shape {list(self.shape)} has no entry {index}")
        return self.shape[1:]


class TensorSource(Protocol):
    """Anything with named tensors: a checkpoint folder, or a model in memory."""

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor's dtype and shape, by name."""

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors as stored, in bytes."""

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor itself in its entry's dtype, or one entry of its first dimension (`[E, N, K]` -> `[N, K]`)."""

    def chunks(self, name: str, index: int | None = None) -> Iterator[memoryview]:
        """The bytes of the same in order, in pieces of whole elements; a piece is valid until the next is asked for."""


class CheckpointReader:
    """All safetensors of a checkpoint folder, checked against their headers and index.

    Args:
        folder: Directory with `model.safetensors`, or shards and their index.
        faults: Where to list what is wrong with single files and tensors, which are then left out; None = the first
            is raised.

    Raises:
        CheckpointError: If the folder holds no safetensors, or a header, an index entry or a file size is not right;
            the message names the file or tensor.
    """

    def __init__(self, folder: str | Path, faults: list[str] | None = None):
        self.folder = Path(folder)
        self._faults = faults
        if not self.folder.is_dir():
            raise CheckpointError(f"model folder {str(folder)!r} does not exist")
        weight_map = _read_index(self.folder)
        self._entries: dict[str, TensorEntry] = {}
        unread = set()
        for file in sorted(set(weight_map.values())) if weight_map is not None else [_single_file(self.folder)]:
            try:
                self._add(file)
            except CheckpointError as e:
                self._report(e)
                unread.add(file)
        for name, file in (weight_map or {}).items():
            found = self._entries.get(name)
            if file not in unread and (found is None or found.file != self.folder / file):
                text = f"{INDEX_FILE} says tensor {name!r} is in {file!r}, but it is not there"
                self._report(CheckpointError(text))
        if not self._entries:
            raise CheckpointError(f"{str(folder)!r} holds no tensors{f': {faults[0]}' if faults else ''}")

    def _add(self, file: str) -> None:
        if not (self.folder / file).is_file():
            raise CheckpointError(f"shard {file!r} named by {INDEX_FILE} is missing from {self.folder}")
        for entry in read_header(self.folder / file):
            other = self._entries.setdefault(entry.name, entry)
            if other is not entry:
                text = f"tensor {entry.name!r} is in two files: {other.file} and {file}"
                self._report(CheckpointError(text))

    def _report(self, error: CheckpointError) -> None:
        if self._faults is None:
            raise error
        self._faults.append(str(error))

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor's place, by name."""
        return self._entries

    @property
    def names(self) -> list[str]:
        """Tensor names, in file order."""
        return list(self._entries)

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Reads one tensor, or one entry of its first dimension, into fresh memory.

        Raises:
            CheckpointError: If there is no such tensor or entry, or its bytes cannot be read.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"tensor {name!r} is missing from {self.folder}")
        return join_chunks(self.chunks(name, index), DTYPES[entry.dtype], entry.part_shape(index))

    def chunks(self, name: str, index: int | None = None) -> Iterator[memoryview]:
        """Yields the bytes of one tensor, or of one entry of its first dimension, in order, at most 16 MB at a time."""
        entry = self._entries[name]
        assert entry.file is not None
        left = math.prod(entry.part_shape(index)) * DTYPES[entry.dtype].itemsize
        buffer = memoryview(bytearray(min(left, _COPY_BYTES)))
        try:
            with open(entry.file, "rb", buffering=0) as file:
                file.seek(entry.start + (index or 0) * left)
                while left:
                    wanted = filled = min(left, len(buffer))
                    while filled:
                        # A short read is legal; a piece must still hold whole elements.
                        count = file.readinto(buffer[wanted - filled : wanted])
                        if not count:
                            raise CheckpointError(f"{entry.file} ends inside tensor {name!r}; the file was cut short")
                        filled -= count
                    left -= wanted
                    yield buffer[:wanted]
        except OSError as e:
            raise CheckpointError(f"cannot read tensor {name!r} from {entry.file}: {e}") from e


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is made when it is needed: its dtype, its shape, and what makes it (on any device)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


class InMemorySource:
    """The tensors of a model in memory, under the names a saved checkpoint would use.

    Args:
        tensors: Name -> tensor, on any device but meta, or what makes it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | LazyTensor]):
        self._tensors = tensors
        self._entries = {
            name: TensorEntry(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor's dtype and shape, by name."""
        return self._entries

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor, or one entry of its first dimension, on the CPU; never written to by this package.

        Raises:
            CheckpointError: If the tensor has no such entry.
        """
        self._entries[name].part_shape(index)
        held = self._tensors[name]
        tensor = held.load() if isinstance(held, LazyTensor) else held
        return (tensor if index is None else tensor[index]).detach().cpu().contiguous()

    def chunks(self, name: str, index: int | None = None) -> Iterator[memoryview]:
        """The same as bytes, in one piece; none for an empty tensor."""
        data = tensor_bytes(self.read(name, index))
        if len(data):
            yield data


def join_chunks(chunks: Iterable[memoryview], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Joins the bytes of a tensor, which must be as many as its dtype and shape need, in fresh memory."""
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    view = data.numpy().data
    position = 0
    for chunk in chunks:
        view[position : position + len(chunk)] = chunk
        position += len(chunk)
    return data.view(dtype).reshape(shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, in C order whatever its strides; FP8 too, which numpy has no form of."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_json(path: Path, max_bytes: int = _MAX_INDEX_BYTES) -> Any:
    """Parses a JSON file of a checkpoint.

    Raises:
        CheckpointError: Naming the file, if it is missing, too large, or not JSON.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; more than {max_bytes} cannot be right")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}") from e


def read_header(path: Path) -> list[TensorEntry]:
    """Reads and checks one safetensors header.

    Returns:
        Its tensors, in the order of their bytes.

    Raises:
        CheckpointError: Naming the file, if the header is damaged, a dtype is unknown, the byte ranges leave gaps or
            overlap, or the file is shorter or longer than they say.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} is not a safetensors file or was cut short: its header says {length} bytes"
                )
            raw = file.read(length)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"the header of {path} is not valid JSON: {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {path} is not a JSON object")
    header.pop("__metadata__", None)
    entries = [_header_entry(path, name, fields, 8 + length) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = 8 + length
    for entry in entries:
        if entry.start != position:
            raise CheckpointError(f"{path}: the bytes of tensor {entry.name!r} overlap others or leave a gap")
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{path} has {size} bytes, but its header describes {position}; the file was cut short or damaged"
        )
    return entries


def _header_entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    try:
        dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{where} has no proper dtype, shape and data_offsets") from e
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {dtype!r}, which is not supported; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in [*shape, start, end]):
        raise CheckpointError(f"{where} has a bad shape ({shape!r}) or offsets ({start!r}, {end!r})")
    entry = TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), file=path, start=data_start + start, end=data_start + end
    )
    if end - start != entry.num_bytes:
        raise CheckpointError(f"{where}: {dtype} {shape} needs {entry.num_bytes} bytes, its offsets give {end - start}")
    return entry


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for name, file in weight_map.items():
        # A plain file name only: an index must not reach outside its folder.
        if not isinstance(file, str) or not re.fullmatch(r"[\w.\-]+\.safetensors", file):
            raise CheckpointError(
                f"{path} names {file!r} for tensor {name!r}; only *.safetensors in the same folder are read"
            )
    return weight_map


def _single_file(folder: Path) -> str:
    if (folder / SINGLE_FILE).is_file():
        return SINGLE_FILE
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} holds only pickle weights ({pickles[0]}), which can run code when read; convert them once with "
            "transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(NEW_FOLDER)"
        )
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        raise CheckpointError(f"{folder} has {len(shards)} safetensors files ({shards[0]} ...) but no {INDEX_FILE}")
    raise CheckpointError(f"{folder} holds no safetensors weights")
