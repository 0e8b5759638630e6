"""`table.py`: formats are found by name, alias and config block; everything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.table import FORMATS, get_format, parse_quantization
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme


def test_every_name_and_alias_finds_its_format_and_none_is_shared():
    words = [word for f in FORMATS for word in (f.name, *f.aliases)]
    assert len(words) == len(set(words))
    for candidate in FORMATS:
        for word in (candidate.name, *candidate.aliases):
            assert get_format(word) is get_format(f" {word.upper()} ") is candidate


@pytest.mark.parametrize("name", ["", "gguf", "fp8", "auto_gptq", "fp8_static,auto_round"])
def test_unknown_format_names_value_and_choices(name: str):
    with pytest.raises(ConfigError, match=r"is not supported; choose from fp8_static") as error:
        get_format(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("index", range(len(FORMATS)))
def test_each_format_recognises_its_own_block_and_only_that(index: int):
    own = FORMATS[index]
    block = own.quantization_config(QuantizationScheme(), {"model.layers.0.k_proj": UNQUANTIZED}, ["model.layers"])
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
