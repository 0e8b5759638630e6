"""`fp8.py`: one scheme only, layers that stay as they are by name, and blocks of other tools."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoround_fp8.errors import ConfigError
from autoround_fp8.formats.base import SchemeTable
from autoround_fp8.formats.fp8 import Fp8Format
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme

FORMAT = Fp8Format()
TENSOR = QuantizationScheme(group_size=0)
Q, EXPERT = "model.layers.0.q_proj", "model.layers.0.mlp.experts.{}.up_proj"


def block_of(schemes: dict[str, QuantizationScheme]) -> dict[str, Any]:
    table = SchemeTable(default=TENSOR, schemes=schemes, also_kept=("lm_head",), block_prefixes=("model.layers",))
    return FORMAT.quantization_config(table)


def test_the_block_names_what_stays_and_of_experts_the_module():
    experts = {EXPERT.format(number): UNQUANTIZED for number in range(9)}
    block = block_of({Q: TENSOR, "model.layers.0.mlp.gate": UNQUANTIZED, **experts})
    assert block == {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["model.layers.0.mlp.gate", "model.layers.0.mlp.experts", "lm_head"],
    }
    parsed = FORMAT.parse(block)
    assert parsed is not None
    assert parsed.resolve(Q) == parsed.resolve("model.layers.0.mlp.gate_proj") == TENSOR
    assert parsed.resolve("model.layers.1.mlp.experts.0.up_proj") == TENSOR
    for fqn in (*experts, "lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts"):
        assert parsed.resolve(fqn) == UNQUANTIZED, fqn


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_blocks_of_other_tools(key: str):
    parsed = FORMAT.parse({"quant_method": "fp8", "activation_scheme": "static", key: ["a.gate"]})
    assert parsed is not None
    assert parsed.resolve("a.gate") == parsed.resolve("lm_head") == UNQUANTIZED
    assert parsed.resolve(Q) == TENSOR


@pytest.mark.parametrize("scheme", ["dynamic", None])
def test_dynamic_fp8_is_a_native_checkpoint_and_not_this_format(scheme: str | None):
    assert FORMAT.parse({"quant_method": "fp8", "activation_scheme": scheme}) is None


@pytest.mark.parametrize(
    "scheme", [QuantizationScheme(), QuantizationScheme(group_size=0, act_group_size=-1, act_dynamic=True)]
)
def test_other_schemes_are_refused_by_layer(scheme: QuantizationScheme):
    FORMAT.validate({"a": TENSOR, "b": UNQUANTIZED})
    with pytest.raises(ConfigError, match=r"'fp8' holds one static scale per matrix .*FP8_STATIC_TENSOR.* 'b'"):
        FORMAT.validate({"a": TENSOR, "b": scheme})


def test_some_experts_of_a_layer_in_16_bit_are_refused():
    with pytest.raises(ConfigError, match="different schemes"):
        FORMAT.validate({EXPERT.format(0): TENSOR, EXPERT.format(1): UNQUANTIZED})


def test_tensors_have_one_scale_each():
    layer = QuantizedLinear(
        fqn="a", weight=torch.ones(3, 2).to(torch.float8_e4m3fn), weight_scale=torch.ones(1), input_scale=torch.ones(1)
    )
    encoded = FORMAT.encode(layer, torch.float8_e4m3fn)
    planned = FORMAT.planned_tensors("a", (3, 2), TENSOR, "BF16")
    assert {name: tuple(tensor.shape) for name, tensor in encoded.items()} == {p.name: p.shape for p in planned}
    assert torch.equal(FORMAT.decode("a", TENSOR, encoded).weight_scale, torch.ones(1))


def test_latent_attention_stays_in_16_bit():
    assert FORMAT.keeps("model.layers.0.self_attn.q_a_proj")
    assert not FORMAT.keeps(Q)
