"""`base.py`: how an export is summarised, which scheme a parsed block gives each layer, and what experts may have."""

from __future__ import annotations

import dataclasses

import pytest

from autoround_fp8.errors import ConfigError
from autoround_fp8.formats.base import ParsedQuantization, SchemeTable, check_experts, is_latent_attention, is_pattern
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme

CHANNEL, TENSOR = QuantizationScheme(), QuantizationScheme(group_size=0)
DYNAMIC = QuantizationScheme(act_group_size=-1, act_dynamic=True)


def parsed(**exceptions: QuantizationScheme) -> ParsedQuantization:
    patterns = (*exceptions.items(), (r"re:model\.layers\.", CHANNEL))
    return ParsedQuantization(format="f", names=exceptions, patterns=patterns, default=UNQUANTIZED)


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


def test_the_first_pattern_counts_and_then_the_default():
    quantization = ParsedQuantization(
        format="f", names={}, patterns=(("re:.*proj", TENSOR), ("re:.*q_proj", CHANNEL)), default=DYNAMIC
    )
    assert quantization.resolve("a.q_proj") == TENSOR
    assert quantization.resolve("a.other") == DYNAMIC


def expert(layer: int, number: int, leaf: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{leaf}"


def table(schemes: dict[str, QuantizationScheme]) -> SchemeTable:
    return SchemeTable(default=CHANNEL, schemes=schemes, also_kept=("lm_head",), block_prefixes=("model.layers",))


def test_alike_experts_of_a_layer_become_one_pattern_that_names_all_of_them_and_no_others():
    schemes = {expert(0, number, leaf): TENSOR for number in range(12) for leaf in ("w1", "w2")}
    schemes |= {expert(1, number, "w1"): TENSOR if number else UNQUANTIZED for number in range(3)}
    schemes |= {"model.layers.0.mlp.shared_experts.w1": UNQUANTIZED}
    entries = table(schemes).entries(lambda scheme: scheme != CHANNEL)
    pattern = next(entry for entry in entries if is_pattern(entry))
    assert entries[pattern] == TENSOR
    assert {e: s for e, s in entries.items() if e != pattern} == {
        expert(1, 0, "w1"): UNQUANTIZED,
        expert(1, 1, "w1"): TENSOR,
        expert(1, 2, "w1"): TENSOR,
        "model.layers.0.mlp.shared_experts.w1": UNQUANTIZED,
    }
    quantization = ParsedQuantization(format="f", names={}, patterns=((pattern, TENSOR),), default=CHANNEL)
    for fqn in schemes:
        assert (quantization.resolve(fqn) == TENSOR) == fqn.startswith("model.layers.0.mlp.experts.")
    assert table(schemes).entries(lambda scheme: scheme == CHANNEL) == {}


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        ("model.layers.0.self_attn.q_a_proj", True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", True),
        ("model.layers.0.self_attn.kv_b_proj", True),
        ("model.layers.0.self_attn.q_b_proj", False),
        ("model.layers.0.self_attn.q_proj", False),
        ("model.layers.0.self_attn.kv_b_proj.lora", False),
    ],
)
def test_latent_attention_is_known_by_name(fqn: str, expected: bool):
    assert is_latent_attention(fqn) is expected


@pytest.mark.parametrize("scheme", [TENSOR, DYNAMIC, UNQUANTIZED])
def test_experts_that_engines_run(scheme: QuantizationScheme):
    check_experts("f", {expert(0, 0, "w1"): scheme, expert(0, 1, "w1"): scheme, "a.q_proj": CHANNEL})


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (CHANNEL, "a weight scale per channel, but with static inputs engines run experts only with one per matrix"),
        (
            QuantizationScheme(group_size=0, act_group_size=-1, act_dynamic=True),
            "a weight scale per matrix, but with dynamic inputs engines run experts only with one per channel",
        ),
    ],
)
def test_experts_that_engines_refuse(scheme: QuantizationScheme, message: str):
    with pytest.raises(ConfigError, match=f"format 'f': expert '{expert(3, 0, 'w1')}' would have {message}"):
        check_experts("f", {expert(3, 0, "w1"): scheme})


@pytest.mark.parametrize("other", [UNQUANTIZED, DYNAMIC])
def test_experts_of_a_layer_must_be_alike(other: QuantizationScheme):
    with pytest.raises(ConfigError, match=r"experts\.1\.w1' and .*experts\.0\.w1' have different schemes"):
        check_experts("f", {expert(0, 0, "w1"): TENSOR, expert(0, 1, "w1"): other})
    check_experts("f", {expert(0, 0, "w1"): TENSOR, expert(1, 1, "w1"): other})
