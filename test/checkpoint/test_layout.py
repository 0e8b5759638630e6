"""`layout.py`: sizes, sharding, alignment and the promise that no source tensor is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoround_fp8.checkpoint.layout import PlannedTensor, natural_key, parse_size, plan_layout
from autoround_fp8.errors import CheckpointError, ConfigError

BIG = 10**12


def planned(name: str, count: int = 4, dtype: str = "F32", source: str | None = None) -> PlannedTensor:
    return PlannedTensor(name=name, dtype=dtype, shape=(count,), source=source)


def layout(tensors: list[PlannedTensor], limit: int = BIG, source: Any = (), consumed: Any = ()) -> Any:
    return plan_layout(tensors, source, consumed, limit)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("50kb", 50_000),
        ("2GiB", 2**31),
        (" 1.5 MiB ", 3 * 2**19),
        ("12", 12),
        (7, 7),
        ("3B", 3),
    ],
)
def test_parse_size(text: str | int, expected: int):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "5 G B", "1e9", "0", "0.1B", "five", "5GB!"])
def test_parse_size_refuses_and_names_the_value(text: str):
    with pytest.raises(ConfigError, match="size") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


def test_single_shard_has_no_index_and_the_plain_name():
    result = layout([planned("a"), planned("b")])
    assert [s.file for s in result.shards] == ["model.safetensors"]
    assert not result.is_sharded


def test_shards_respect_the_limit_and_keep_order():
    result = layout([planned(f"layers.{i}.w", 4) for i in range(12)], limit=48)
    assert [len(s.ranges) for s in result.shards] == [3, 3, 3, 3]
    assert [s.file for s in result.shards][::3] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 4)]
    assert list(result.shards[0].ranges) == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert list(result.shards[3].ranges) == ["layers.9.w", "layers.10.w", "layers.11.w"]


def test_tensor_larger_than_the_limit_gets_its_own_shard():
    result = layout([planned("a", 1), planned("b", 100), planned("c", 1)], limit=16)
    assert [list(s.ranges) for s in result.shards] == [["a"], ["b"], ["c"]]


def test_exactly_full_shard_is_not_split():
    assert len(layout([planned("a", 2), planned("b", 2)], limit=16).shards) == 1


def test_forgotten_source_tensor_is_refused_by_name():
    tensors = [planned("a", source="a"), planned("b.weight")]
    assert layout(tensors, source=["a", "b.weight"], consumed=["b.weight"]).tensors.keys() == {"a", "b.weight"}
    with pytest.raises(CheckpointError, match=r"1 source tensors would be lost, first 'mtp\.w'"):
        layout(tensors, source=["a", "b.weight", "mtp.w"], consumed=["b.weight"])


def test_same_name_in_the_export_does_not_count_as_copied():
    with pytest.raises(CheckpointError, match="would be lost, first 'a'"):
        layout([planned("a")], source=["a"])


def test_name_planned_twice_is_refused():
    with pytest.raises(CheckpointError, match="'a' would be written twice"):
        layout([planned("a"), planned("a", 2)])


def test_every_tensor_is_aligned_and_ranges_tile_the_file():
    tensors = [planned("a", 3, "F8_E4M3"), planned("b", 3, "BF16"), planned("c", 1, "F32"), planned("d", 1, "I64")]
    (shard,) = layout(tensors).shards
    sizes = {"a": 1, "b": 2, "c": 4, "d": 8}
    position = len(shard.header)
    assert position % 8 == 0
    for name, (start, end) in shard.ranges.items():
        assert start == position
        assert start % sizes[name] == 0
        position = end
    assert position == shard.num_bytes


def test_header_text_is_what_the_ranges_say():
    (shard,) = layout([planned("ü.weight", 3, "F8_E4M3"), planned("s", 1)]).shards
    length = int.from_bytes(shard.header[:8], "little")
    header = json.loads(shard.header[8:])
    assert len(shard.header) == 8 + length
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, fields in header.items():
        start, end = fields["data_offsets"]
        assert shard.ranges[name] == (8 + length + start, 8 + length + end)


def test_empty_and_scalar_tensors():
    tensors = [
        PlannedTensor(name="empty", dtype="F32", shape=(0, 4)),
        PlannedTensor(name="scalar", dtype="F32", shape=()),
    ]
    result = layout(tensors)
    assert {n: t.num_bytes for n, t in result.tensors.items()} == {"empty": 0, "scalar": 4}
    assert result.num_bytes == len(result.shards[0].header) + 4


def test_index_names_every_tensor_and_counts_only_data():
    result = layout([planned(f"t{i}", 4) for i in range(5)], limit=32)
    index = result.index()
    assert index["metadata"] == {"total_size": 5 * 16}
    assert index["weight_map"] == {n: s.file for s in result.shards for n in s.ranges}
    assert len(index["weight_map"]) == 5
    assert result.num_bytes == 5 * 16 + sum(len(s.header) for s in result.shards)


def test_natural_order():
    names = ["layers.10.a", "layers.2.b", "layers.2.a", "layers.1", "layers.02.a", "norm", "0.w"]
    assert sorted(names, key=natural_key)[:3] == ["0.w", "layers.1", "layers.2.a"]
    assert sorted(names, key=natural_key)[-2:] == ["layers.10.a", "norm"]
