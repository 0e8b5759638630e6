"""`compressed_tensors.py`: groups and ignore list as engines match them, and reading llm-compressor's own configs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import SchemeTable
from autoround_fp8.formats.compressed_tensors import CompressedTensorsFormat
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme

STATIC_PER_TENSOR = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}

FORMAT = CompressedTensorsFormat()
CHANNEL, TENSOR = QuantizationScheme(), QuantizationScheme(group_size=0)
DYNAMIC = QuantizationScheme(act_group_size=-1, act_dynamic=True)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
EXPERTS = [f"model.layers.0.mlp.experts.{e}.{leaf}" for e in range(11) for leaf in ("down_proj", "up_proj")]

# As llm-compressor 0.8 writes them (defaults of compressed-tensors' schemas included).
LLM_COMPRESSOR: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "input_activations": STATIC_PER_TENSOR,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": STATIC_PER_TENSOR,
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": ["re:.*mlp.gate$", "lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}


def block_of(schemes: dict[str, QuantizationScheme], default: QuantizationScheme = CHANNEL) -> dict[str, Any]:
    table = SchemeTable(default=default, schemes=schemes, also_kept=("lm_head",), block_prefixes=("model.layers",))
    return FORMAT.quantization_config(table)


def parse(block: dict[str, Any]) -> Any:
    parsed = FORMAT.parse(json.loads(json.dumps(block)))
    assert parsed is not None
    return parsed


def targets(block: dict[str, Any]) -> list[list[str]]:
    return [group["targets"] for group in block["config_groups"].values()]


def changed(part: str, **fields: Any) -> dict[str, Any]:
    block = json.loads(json.dumps(LLM_COMPRESSOR))
    group = block["config_groups"]["group_0"]
    (group if part == "group" else group.get(part, block)).update(fields)
    return block


def test_the_block_of_a_dense_model_field_for_field():
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    assert block_of({Q: CHANNEL, DOWN: UNQUANTIZED}) == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**arguments, "strategy": "channel"},
                "input_activations": {**arguments, "strategy": "tensor"},
                "output_activations": None,
                "format": "float-quantized",
            }
        },
        "ignore": [DOWN, "lm_head"],
        "kv_cache_scheme": None,
    }


def test_dynamic_inputs_are_said_to_be_per_token():
    group = block_of({Q: DYNAMIC}, DYNAMIC)["config_groups"]["group_0"]
    assert (group["input_activations"]["dynamic"], group["input_activations"]["strategy"]) == (True, "token")
    assert (group["weights"]["dynamic"], group["weights"]["strategy"]) == (False, "channel")


def test_experts_of_another_scheme_are_one_pattern_for_all_layers():
    later = {name.replace("layers.0", "layers.7"): TENSOR for name in EXPERTS}
    block = block_of({Q: CHANNEL, **dict.fromkeys(EXPERTS, TENSOR), **later})
    assert targets(block) == [["Linear"], [r"re:.*\.experts\.\d+\.(down_proj|gate_proj|up_proj|w1|w2|w3)$"]]
    parsed = parse(block)
    assert {parsed.resolve(name).group_size for name in (*EXPERTS, *later)} == {0}
    assert parsed.resolve("model.layers.0.mlp.shared_experts.down_proj") == CHANNEL


def test_experts_with_the_scheme_of_the_other_layers_need_no_group():
    assert targets(block_of({Q: TENSOR, **dict.fromkeys(EXPERTS, TENSOR)}, TENSOR)) == [["Linear"]]


def test_experts_that_stay_in_16_bit_are_ignored_by_a_pattern_that_wins_over_the_groups():
    other = {name.replace("layers.0", "layers.1"): TENSOR for name in EXPERTS}
    parsed = parse(block := block_of({Q: CHANNEL, **dict.fromkeys(EXPERTS, UNQUANTIZED), **other}))
    assert block["ignore"][0] == r"re:model\.layers\.0\.mlp\.experts\.\d+\.(down_proj|up_proj)$"
    assert {parsed.resolve(name).bits for name in EXPERTS} == {16}
    assert {parsed.resolve(name).bits for name in other} == {8}


def test_fused_experts_are_ignored_by_every_name_engines_ask_for():
    parsed = parse(block_of({Q: CHANNEL, "model.layers.0.mlp.experts": UNQUANTIZED}))
    for name in ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.0.gate_proj"):
        assert not parsed.resolve(name).is_quantized
    assert parsed.resolve("model.layers.0.mlp.experts_other").is_quantized


def test_several_schemes_of_plain_layers_are_named_one_by_one():
    # The class `Linear` beside them would win for layers that engines fuse.
    schemes = {Q: CHANNEL, DOWN: TENSOR, **dict.fromkeys(EXPERTS, TENSOR)}
    block = block_of(schemes)
    assert targets(block) == [[Q], [DOWN], [r"re:.*\.experts\.\d+\.(down_proj|gate_proj|up_proj|w1|w2|w3)$"]]
    parsed = parse(block)
    for fqn, scheme in schemes.items():
        assert parsed.resolve(fqn) == scheme
    assert parsed.resolve("lm_head") == parsed.resolve("unnamed") == UNQUANTIZED


@pytest.mark.parametrize("scheme", [CHANNEL, TENSOR, DYNAMIC])
@pytest.mark.parametrize("default", [CHANNEL, TENSOR, DYNAMIC, UNQUANTIZED])
def test_parse_is_the_inverse(default: QuantizationScheme, scheme: QuantizationScheme):
    schemes = {Q: default, DOWN: scheme, "model.layers.1.mlp.gate": UNQUANTIZED}
    schemes |= dict.fromkeys(EXPERTS, scheme)
    schemes |= {name.replace("layers.0", "layers.2"): CHANNEL for name in EXPERTS}
    parsed = parse(block_of(schemes, default))
    for fqn, expected in (schemes | {"lm_head": UNQUANTIZED}).items():
        assert parsed.resolve(fqn) == expected, fqn


def test_llm_compressors_static_block():
    parsed = parse(LLM_COMPRESSOR)
    assert parsed.format == "llm_compressor"
    assert parsed.resolve(Q) == TENSOR
    assert parsed.resolve("model.layers.3.mlp.gate") == parsed.resolve("lm_head") == UNQUANTIZED
    assert parsed.resolve("model.layers.3.mlp.gate_proj") == TENSOR


def test_llm_compressors_dynamic_block():
    block = changed("input_activations", dynamic=True, strategy="token", observer=None)
    block["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    assert parse(block).resolve(Q) == DYNAMIC


def test_an_ignored_name_wins_over_a_target_of_the_same_name():
    block = changed("group", targets=[Q, DOWN, "re:.*o_proj"])
    block["ignore"] = [Q, "re:.*down_proj"]
    parsed = parse(block)
    assert [parsed.resolve(name).is_quantized for name in (Q, DOWN, "a.o_proj", "a.up_proj")] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("group", {"format": "pack-quantized"}, "format 'pack-quantized' of 'group_0' is not supported"),
        ("group", {"input_activations": None}, "does not quantise both weights and inputs"),
        ("weights", {"num_bits": 4}, r"num_bits \(4\) of weights in config group 'group_0' must be 8"),
        ("weights", {"type": "int"}, r"type \('int'\) of weights"),
        ("weights", {"strategy": "block"}, r"strategy \('block'\) of weights"),
        ("input_activations", {"symmetric": False}, r"symmetric \(False\) of input_activations"),
        ("input_activations", {"strategy": "token"}, r"strategy \('token'\) of input_activations.*dynamic = False"),
        ("input_activations", {"dynamic": True}, r"strategy \('tensor'\) of input_activations.*dynamic = True"),
        ("block", {"config_groups": {}}, "no config_groups"),
        ("block", {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        ("block", {"transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
    ],
)
def test_what_this_package_cannot_run_is_refused_by_name(part: str, fields: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        FORMAT.parse(changed(part, **fields))


def test_other_methods_are_not_ours():
    assert FORMAT.parse({**LLM_COMPRESSOR, "quant_method": "fp8"}) is None


def test_per_channel_experts_with_static_inputs_are_refused():
    FORMAT.validate({Q: CHANNEL, **dict.fromkeys(EXPERTS, TENSOR)})
    with pytest.raises(ConfigError, match=r"'llm_compressor': expert .*experts\.0\.down_proj' would have a weight"):
        FORMAT.validate(dict.fromkeys(EXPERTS, CHANNEL))


def test_scales_per_channel_keep_their_column():
    layer = QuantizedLinear(
        fqn="a", weight=torch.ones(3, 2).to(torch.float8_e4m3fn), weight_scale=torch.ones(3, 1), input_scale=None
    )
    assert FORMAT.encode(layer, torch.float8_e4m3fn)["a.weight_scale"].shape == (3, 1)
    assert FORMAT.planned_tensors("a", (3, 2), DYNAMIC, "BF16")[1].shape == (3, 1)


def test_latent_attention_stays_in_16_bit():
    assert FORMAT.keeps("model.layers.0.self_attn.kv_b_proj")
    assert not FORMAT.keeps(Q)


def test_the_scheme_of_the_kv_cache_is_read_as_it_is():
    assert parse(LLM_COMPRESSOR).kv_cache_scheme is None
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    assert parse({**LLM_COMPRESSOR, "kv_cache_scheme": scheme}).kv_cache_scheme == scheme


def test_cache_scales_are_announced():
    table = SchemeTable(
        default=CHANNEL, schemes={Q: CHANNEL}, also_kept=(), block_prefixes=("model.layers",), has_cache_scales=True
    )
    block = FORMAT.quantization_config(table)
    assert block["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor",
    }
    assert parse(block).kv_cache_scheme == block["kv_cache_scheme"]
