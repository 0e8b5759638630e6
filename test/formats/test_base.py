"""`base.py`: which scheme a parsed block gives each layer."""

from __future__ import annotations

import dataclasses

import pytest

from autoround_fp8.formats.base import ParsedQuantization
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme

CHANNEL, TENSOR = QuantizationScheme(), QuantizationScheme(group_size=0)


def parsed(**exceptions: QuantizationScheme) -> ParsedQuantization:
    return ParsedQuantization(format="f", scheme=CHANNEL, exceptions=exceptions, block_prefixes=("model.layers",))


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        ("model.layers.0.q_proj", CHANNEL),
        ("model.layers2.0.q_proj", UNQUANTIZED),
        ("model.layers", UNQUANTIZED),
        ("vision.model.layers.0.q_proj", UNQUANTIZED),
        ("lm_head", UNQUANTIZED),
    ],
)
def test_only_whole_prefixes_are_inside_the_blocks(fqn: str, expected: QuantizationScheme):
    assert parsed().resolve(fqn) == expected


def test_plain_names_match_whole_segments():
    quantization = parsed(**{"layers.1": UNQUANTIZED})
    assert quantization.resolve("model.layers.1.q_proj") == UNQUANTIZED
    assert quantization.resolve("model.layers.10.q_proj") == CHANNEL


def test_exact_name_wins_over_an_earlier_pattern():
    quantization = parsed(**{"q_proj": UNQUANTIZED, "model.layers.0.q_proj": TENSOR})
    assert quantization.resolve("model.layers.0.q_proj") == TENSOR
    assert quantization.resolve("model.layers.1.q_proj") == UNQUANTIZED


def test_exception_reaches_outside_the_blocks():
    assert parsed(lm_head=TENSOR).resolve("lm_head") == TENSOR


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed().format = "other"  # type: ignore[misc]
