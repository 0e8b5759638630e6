"""`reader.py`: every kind of damage is named before work, and every dtype is read bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from autoround_fp8.checkpoint import reader
from autoround_fp8.checkpoint.reader import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    InMemorySource,
    TensorEntry,
    TensorSource,
    join_chunks,
)
from autoround_fp8.errors import CheckpointError


def write_raw(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def entry(start: int, end: int, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern at all: NaN, infinity, subnormals."""
    count = int(torch.tensor(shape).prod()) * dtype.itemsize if shape else dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_is_read_as_safetensors_reads_it(tmp_path: Path, name: str):
    tensors = {f"t{i}": random_bits(DTYPES[name], shape) for i, shape in enumerate([(3, 5), (), (1,), (2, 0, 3)])}
    save_file(tensors, tmp_path / SINGLE_FILE)
    mine, theirs = CheckpointReader(tmp_path), load_file(tmp_path / SINGLE_FILE)
    assert set(mine.entries) == set(theirs) == set(mine.names)
    for key, expected in theirs.items():
        read = mine.read(key)
        assert mine.entries[key].dtype == name
        assert read.dtype == expected.dtype
        assert read.shape == expected.shape
        assert bits(read) == bits(expected) == bits(tensors[key])


def test_chunks_joined_are_the_bytes_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "_COPY_BYTES", 64)
    tensor = random_bits(torch.bfloat16, (7, 11))
    save_file({"a": tensor, "b": tensor + 0}, tmp_path / SINGLE_FILE)
    source = CheckpointReader(tmp_path)
    pieces = [bytes(chunk) for chunk in source.chunks("a")]
    assert [len(p) for p in pieces] == [64, 64, 26]
    assert list(b"".join(pieces)) == bits(tensor)
    assert bits(source.read("a")) == bits(tensor)


def test_read_gives_fresh_memory(tmp_path: Path):
    save_file({"a": torch.ones(4)}, tmp_path / SINGLE_FILE)
    source = CheckpointReader(tmp_path)
    source.read("a").zero_()
    assert source.read("a").tolist() == [1.0] * 4


def test_two_shards_with_index(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "x-2.safetensors")
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    source = CheckpointReader(tmp_path)
    assert source.read("b").tolist() == [1.0] * 3
    assert source.entries["a"].file == tmp_path / "x-1.safetensors"


@pytest.mark.parametrize("cut", [1, 16, 30])
def test_truncated_file_is_named(tmp_path: Path, cut: int):
    save_file({"a": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    raw = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(raw[:-cut])
    with pytest.raises(CheckpointError, match=f"{SINGLE_FILE}.*cut short"):
        CheckpointReader(tmp_path)


def test_file_cut_after_opening_is_noticed_when_read(tmp_path: Path):
    save_file({"a": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    source = CheckpointReader(tmp_path)
    with open(tmp_path / SINGLE_FILE, "r+b") as file:
        file.truncate(source.entries["a"].end - 3)
    with pytest.raises(CheckpointError, match="ends inside tensor 'a'"):
        source.read("a")


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, (2**63).to_bytes(8, "little") + b"{}"])
def test_bad_header_length(tmp_path: Path, content: bytes):
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        CheckpointReader(tmp_path)


def test_header_above_the_limit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "_MAX_HEADER_BYTES", 10)
    save_file({"a": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        ([1], b"", "not a JSON object"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"\0" * 6, "'b' overlap others or leave a gap"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, b"\0" * 4, "overlap"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12, "'b' overlap others or leave a gap"),
        ({"a": entry(4, 8)}, b"\0" * 8, "leave a gap"),
        ({"a": entry(0, 4)}, b"\0" * 9, "cut short or damaged"),
        ({"a": entry(0, 4, "F4_X")}, b"\0" * 4, "dtype 'F4_X', which is not supported"),
        ({"a": entry(0, 4, ["F32"])}, b"\0" * 4, "which is not supported"),
        ({"a": entry(0, 4, "F32", (2,))}, b"\0" * 4, "needs 8 bytes, its offsets give 4"),
        ({"a": entry(0, 4, "F32", (-1,))}, b"\0" * 4, "bad shape"),
        ({"a": entry(0, 4, "F32", (True,))}, b"\0" * 4, "bad shape"),
        ({"a": entry(4, 0)}, b"", "needs 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4, "no proper dtype, shape and data_offsets"),
        ({"a": 3}, b"", "no proper dtype, shape and data_offsets"),
    ],
)
def test_damaged_header_names_file_and_reason(tmp_path: Path, header: Any, data: bytes, message: str):
    write_raw(tmp_path / SINGLE_FILE, header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        CheckpointReader(tmp_path)
    assert SINGLE_FILE in str(error.value)


def test_one_tensor_in_two_files(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "2.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(CheckpointError, match=r"'a' is in two files: .*1\.safetensors and 2\.safetensors"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "x.bin", 3, None])
def test_index_must_not_reach_outside(tmp_path: Path, file: Any):
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    inner = tmp_path / "model"
    inner.mkdir()
    write_index(inner, {"a": file})
    with pytest.raises(CheckpointError, match=r"only \*\.safetensors in the same folder are read"):
        CheckpointReader(inner)


def test_missing_shard_is_named(tmp_path: Path):
    write_index(tmp_path, {"a": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"shard 'model-00002-of-00002\.safetensors' .*missing"):
        CheckpointReader(tmp_path)


def test_index_that_disagrees_with_the_shard(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"says tensor 'b' is in '1\.safetensors'"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_broken_index(tmp_path: Path, text: str):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        CheckpointReader(tmp_path)


def test_faults_are_listed_and_the_rest_is_read(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    (tmp_path / "3.safetensors").write_bytes(b"cut")
    where = {"a": "1", "x": "2", "y": "3", "z": "4"}
    write_index(tmp_path, {name: f"{file}.safetensors" for name, file in where.items()})
    faults: list[str] = []
    assert CheckpointReader(tmp_path, faults).read("a").tolist() == [0.0, 0.0]
    expected = ("'a' is in two files", "3.safetensors is not a safetensors file", "shard '4.safetensors'", "tensor 'x'")
    assert len(faults) == len(expected)
    assert all(text in fault for text, fault in zip(expected, faults, strict=True))


def test_nothing_left_to_read_is_raised_also_with_a_list_of_faults(tmp_path: Path):
    write_index(tmp_path, {"a": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"holds no tensors: shard '1\.safetensors'"):
        CheckpointReader(tmp_path, [])


def test_pickle_only_gives_a_way_out_and_is_not_opened(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        CheckpointReader(tmp_path)


def test_no_weights_shards_without_index_and_no_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no safetensors weights"):
        CheckpointReader(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"but no {INDEX_FILE}"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointReader(tmp_path / "nowhere")


def test_file_without_tensors_and_unknown_name(tmp_path: Path):
    write_raw(tmp_path / SINGLE_FILE, {}, b"")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        CheckpointReader(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="'b' is missing"):
        CheckpointReader(tmp_path).read("b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_memory_source_gives_c_order_of_non_contiguous_tensors(dtype: torch.dtype):
    base = random_bits(dtype, (6, 4))
    views = {"transposed": base.t(), "strided": base[::2, 1:3], "scalar": base[0, 0]}
    source = InMemorySource(views)
    for name, view in views.items():
        assert source.entries[name].shape == tuple(view.shape)
        expected = bits(view.contiguous())
        assert list(b"".join(bytes(c) for c in source.chunks(name))) == expected
        assert bits(source.read(name)) == expected


def test_memory_source_takes_parameters():
    source = InMemorySource({"p": torch.nn.Parameter(torch.ones(2, 3))})
    assert not source.read("p").requires_grad
    assert len(next(source.chunks("p"))) == 24


@pytest.fixture(params=["disk", "memory"])
def fused(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, torch.Tensor], TensorSource]:
    tensors = {
        "before": random_bits(torch.uint8, (5,)),
        "experts": random_bits(torch.bfloat16, (4, 3, 6)),
        "codes": random_bits(torch.float8_e4m3fn, (4, 3, 6)),
        "vector": random_bits(torch.float32, (7,)),
        "scalar": random_bits(torch.int64, ()),
        "empty": random_bits(torch.float32, (2, 0)),
    }
    if request.param == "memory":
        return tensors, InMemorySource(tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    return tensors, CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["experts", "codes", "vector", "empty"])
def test_one_entry_of_the_first_dimension(fused: tuple[dict[str, torch.Tensor], TensorSource], name: str):
    tensors, source = fused
    for index, right in enumerate(tensors[name]):
        read = source.read(name, index)
        assert (read.dtype, read.shape) == (right.dtype, right.shape)
        assert bits(read) == bits(right) == list(b"".join(bytes(c) for c in source.chunks(name, index)))


def test_one_entry_reads_only_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "_COPY_BYTES", 16)
    tensor = random_bits(torch.bfloat16, (4, 3, 6))
    save_file({"experts": tensor}, tmp_path / SINGLE_FILE)
    source = CheckpointReader(tmp_path)
    assert [len(chunk) for chunk in source.chunks("experts", 2)] == [16, 16, 4]
    # The bytes after entry 2 are gone, and it is still read.
    with open(tmp_path / SINGLE_FILE, "r+b") as file:
        file.truncate(source.entries["experts"].start + 3 * 36)
    assert bits(source.read("experts", 2)) == bits(tensor[2])
    with pytest.raises(CheckpointError, match="ends inside tensor 'experts'"):
        source.read("experts", 3)


@pytest.mark.parametrize(("name", "index"), [("experts", 4), ("experts", -1), ("scalar", 0), ("empty", 2)])
def test_an_entry_that_is_not_there(fused: tuple[dict[str, torch.Tensor], TensorSource], name: str, index: int):
    _, source = fused
    for read in (lambda: source.read(name, index), lambda: list(source.chunks(name, index))):
        with pytest.raises(CheckpointError, match=rf"tensor '{name}' of shape .* has no entry {index}"):
            read()


def test_stored_bytes(fused: tuple[dict[str, torch.Tensor], TensorSource]):
    tensors, source = fused
    assert source.stored_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_an_entry_knows_what_it_was_stored_as():
    plain = TensorEntry(name="w", dtype="F8_E4M3", shape=(2, 3))
    assert not plain.is_native_fp8
    native = TensorEntry(name="w", dtype="BF16", shape=(2, 3), stored_dtype="F8_E4M3")
    assert native.is_native_fp8
    assert native.num_bytes == 12


def test_chunks_of_any_size_are_joined():
    pieces = [memoryview(b"\x01\x00"), memoryview(b"\x02\x00\x03\x00")]
    assert join_chunks(pieces, torch.int16, (3,)).tolist() == [1, 2, 3]
