"""`dataset_spec.py`: the `--dataset` text and the shares of its data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoround_fp8.calibration.dataset_spec import DatasetSpec, assign_shares, parse_dataset_spec
from autoround_fp8.errors import ConfigError


def test_documented_combination_parses():
    text = "a.jsonl:num=256,mbpp:num=128:split=train:concat,x.json:apply_chat_template:system_prompt=Be brief."
    assert parse_dataset_spec(text) == (
        DatasetSpec(name="a.jsonl", num=256),
        DatasetSpec(name="mbpp", num=128, split="train", concat=True),
        DatasetSpec(name="x.json", apply_chat_template=True, system_prompt="Be brief."),
    )


def test_plain_name_and_spaces_around_entries():
    assert parse_dataset_spec("NeelNanda/pile-10k") == (DatasetSpec(name="NeelNanda/pile-10k"),)
    assert [spec.name for spec in parse_dataset_spec("a.jsonl, b.jsonl")] == ["a.jsonl", "b.jsonl"]


def test_quoted_value_keeps_commas_and_colons():
    (spec, other) = parse_dataset_spec('x.json:system_prompt="Answer: yes, or no":num=3,y.json')
    assert spec == DatasetSpec(name="x.json", num=3, system_prompt="Answer: yes, or no")
    assert other.name == "y.json"


def test_apostrophe_in_unquoted_value_is_a_character():
    (spec, other) = parse_dataset_spec("x.json:system_prompt=You're kind,y's.json")
    assert (spec.system_prompt, other.name) == ("You're kind", "y's.json")


@pytest.mark.parametrize(("value", "expected"), [("concat", True), ("concat=true", True), ("concat=False", False)])
def test_switch_with_and_without_value(value: str, expected: bool):
    assert parse_dataset_spec(f"a.txt:{value}")[0].concat is expected


def test_existing_file_with_separators_in_its_name_is_one_data_set(tmp_path: Path):
    path = tmp_path / "a,b:c.txt"
    path.write_text("hello")
    assert parse_dataset_spec(str(path)) == (DatasetSpec(name=str(path)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.txt:nums=3", r"unknown option 'nums'.*num=.*split=.*concat.*apply_chat_template.*system_prompt="),
        ("a.txt:num=0", r"num \('0'\).*at least 1"),
        ("a.txt:num=-3", r"num \('-3'\)"),
        ("a.txt:num=many", r"num \('many'\) of data set 'a.txt'"),
        ("a.txt:num", "option num of data set 'a.txt' needs a value"),
        ("a.txt:concat=maybe", "'maybe' is neither true nor false"),
        ("a.txt,,b.txt", "entry without a name"),
        ("", "entry without a name"),
        (":num=3", "entry without a name"),
    ],
)
def test_bad_text_is_refused_with_the_way_out(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_dataset_spec(text)


def test_shares_are_even_and_num_overrides():
    specs = tuple(DatasetSpec(name=name) for name in "abc")
    assert assign_shares(specs, 8) == [3, 3, 2]
    assert assign_shares((DatasetSpec(name="n", num=5), *specs[:2]), 8) == [5, 2, 1]
    assert assign_shares((DatasetSpec(name="n", num=300),), 8) == [300]


def test_nothing_left_for_a_data_set_is_an_error():
    with pytest.raises(ConfigError, match=r"nsamples \(8\) leaves 0 samples for 1 data sets without num= \(b\)"):
        assign_shares((DatasetSpec(name="a", num=8), DatasetSpec(name="b")), 8)
