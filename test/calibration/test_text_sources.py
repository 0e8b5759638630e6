"""`text_sources.py`: local files of all accepted kinds, and what is wrong with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoround_fp8.calibration.text_sources import is_local, read_file_rows
from autoround_fp8.errors import ConfigError, DataError


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def rows(name: str, **options: Any) -> list[Any]:
    return list(read_file_rows(name, **options))


def test_txt_gives_one_row_per_line(tmp_path: Path):
    assert rows(written(tmp_path / "a.txt", "one\ntwo \n\nthree")) == ["one", "two ", "", "three"]


def test_jsonl_keeps_unicode_line_separators_inside_strings(tmp_path: Path):
    name = written(tmp_path / "a.jsonl", '{"text": "a\u2028b"}\r\n\n"plain"\n')
    assert rows(name) == [{"text": "a\u2028b"}, None, "plain"]


def test_json_list_and_object(tmp_path: Path):
    assert rows(written(tmp_path / "a.json", '["x", {"text": "y"}]')) == ["x", {"text": "y"}]
    assert rows(written(tmp_path / "b.json", '{"text": ["x", "y"]}')) == [{"text": ["x", "y"]}]


def test_json_file_of_one_object_per_line(tmp_path: Path):
    assert rows(written(tmp_path / "a.json", '{"text": "x"}\n{"text": "y"}\n')) == [{"text": "x"}, {"text": "y"}]


def test_byte_order_mark_is_not_text(tmp_path: Path):
    assert rows(written(tmp_path / "a.txt", "\ufeffone")) == ["one"]
    assert rows(written(tmp_path / "a.json", '\ufeff["one"]')) == ["one"]


def test_n5_parquet_with_odd_metadata_reads(tmp_path: Path):
    features = {"info": {"features": {"text": {"dtype": "string", "_type": "KindOfTheFuture"}}}}
    table = pa.table({"text": ["one", None], "id": [1, 2]}).replace_schema_metadata(
        {"huggingface": json.dumps(features), "pandas": "{broken"}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows(str(tmp_path / "a.parquet")) == [{"text": "one"}, {"text": None}]


def test_parquet_without_known_columns_still_gives_their_names(tmp_path: Path):
    pq.write_table(pa.table({"foo": ["one"]}), tmp_path / "a.parquet")
    assert rows(str(tmp_path / "a.parquet")) == [{"foo": "one"}]


def test_folder_reads_its_data_files_by_name(tmp_path: Path):
    written(tmp_path / "b.txt", "two")
    written(tmp_path / "a.jsonl", '"one"')
    written(tmp_path / "README.md", "no data")
    assert rows(str(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", r"a\.jsonl' is empty \(0 bytes\)"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', r"line 2 of data file .*a\.jsonl' is not valid JSON"),
        ("a.json", "[1, 2", r"a\.json' is not valid JSON"),
        ("a.json", "5", "holds a single int"),
        ("a.csv", "text\nx", r"ends with '\.csv'; accepted are \.json, \.jsonl, \.txt, \.parquet"),
        ("a.parquet", "no parquet", r"a\.parquet' is not a readable parquet file"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, name: str, text: str, message: str):
    with pytest.raises(DataError, match=message):
        rows(written(tmp_path / name, text))


def test_missing_file_binary_file_and_empty_folder(tmp_path: Path):
    with pytest.raises(DataError, match=r"no\.jsonl' does not exist"):
        rows(str(tmp_path / "no.jsonl"))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"a\.txt' is not UTF-8"):
        rows(str(tmp_path / "a.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data file"):
        rows(str(tmp_path / "empty"))


def test_options_of_hub_data_sets_are_refused(tmp_path: Path):
    name = written(tmp_path / "a.txt", "one")
    assert rows(name, split="train") == ["one"]
    with pytest.raises(ConfigError, match="split=test does not apply"):
        rows(name, split="test")
    with pytest.raises(ConfigError, match="config=en does not apply"):
        rows(name, config="en")


def test_is_local_tells_paths_from_hub_names(tmp_path: Path):
    assert all(is_local(name) for name in ("a.jsonl", "no/such.parquet", "./x", "/x/y", "~/x", str(tmp_path)))
    assert not any(is_local(name) for name in ("NeelNanda/pile-10k", "mbpp", "builtin"))
