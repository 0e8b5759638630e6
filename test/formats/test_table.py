"""`table.py`: formats are found by name, alias and config block; everything else is refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import CheckpointFormat, SchemeTable
from autoround_fp8.formats.table import (
    FORMATS,
    default_scheme,
    get_format,
    get_formats,
    normalized_formats,
    parse_quantization,
)
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme


def test_every_name_and_alias_finds_its_format_and_none_is_shared():
    words = [word for f in FORMATS for word in (f.name, *f.aliases)]
    assert len(words) == len(set(words))
    for candidate in FORMATS:
        for word in (candidate.name, *candidate.aliases):
            assert get_format(word) is get_format(f" {word.upper()} ") is candidate


@pytest.mark.parametrize("name", ["", "gguf", "fp8_dynamic", "auto_gptq", "fp8_static,auto_round"])
def test_unknown_format_names_value_and_choices(name: str):
    with pytest.raises(ConfigError, match=r"is not supported; choose from fp8_static") as error:
        get_format(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("names", "expected"),
    [("fp8", "fp8"), ("FP8, compressed-tensors ,fp8", "fp8,llm_compressor"), ("fake,auto_round", "fake,fp8_static")],
)
def test_a_list_of_formats_in_its_order_each_once(names: str, expected: str):
    assert normalized_formats(names) == expected
    assert [f.name for f in get_formats(names)] == expected.split(",")


@pytest.mark.parametrize("names", ["fp8,gguf", "fp8,", ","])
def test_a_list_with_an_unknown_format_is_refused(names: str):
    with pytest.raises(ConfigError, match="is not supported"):
        get_formats(names)


@pytest.mark.parametrize(
    ("names", "group_size"), [("fp8_static", -1), ("llm_compressor,fake", -1), ("fp8", 0), ("llm_compressor,fp8", 0)]
)
def test_the_default_scheme_is_the_finest_that_all_formats_hold(names: str, group_size: int):
    assert default_scheme(get_formats(names)) == QuantizationScheme(group_size=group_size)


def test_the_choice_of_a_coarser_scheme_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    caplog.set_level(logging.INFO)
    default_scheme(get_formats("llm_compressor,fp8"))
    assert caplog.messages == ["scheme FP8_STATIC_TENSOR: format fp8 holds one weight scale per matrix"]


WITH_BLOCK = [f for f in FORMATS if f.name != "fake"]


@pytest.mark.parametrize("own", WITH_BLOCK, ids=lambda f: f.name)
def test_each_format_recognises_its_own_block_and_only_that(own: CheckpointFormat):
    scheme = QuantizationScheme(group_size=0)
    schemes = {"model.layers.0.k_proj": UNQUANTIZED, "model.layers.0.o_proj": scheme}
    block = own.quantization_config(
        SchemeTable(default=scheme, schemes=schemes, also_kept=("lm_head",), block_prefixes=("model.layers",))
    )
    assert block is not None
    found, parsed = parse_quantization(block)
    assert found is own
    assert parsed.format == own.name
    assert [f for f in FORMATS if f.parse(block) is not None] == [own]


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    ],
)
def test_unknown_block_names_the_method_and_what_is_loaded(block: dict[str, Any]):
    with pytest.raises(CheckpointError, match="this package loads fp8_static") as error:
        parse_quantization(block)
    assert repr(block.get("quant_method")) in str(error.value)
    assert repr(block.get("packing_format")) in str(error.value)
