"""`fp8_static.py`: the bytes on disk, the block in config.json, and reading Intel's own checkpoints."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import SchemeTable
from autoround_fp8.formats.fp8_static import Fp8StaticFormat
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import UNQUANTIZED, QuantizationScheme

FORMAT = Fp8StaticFormat()
FP8 = torch.float8_e4m3fn
CHANNEL, TENSOR = QuantizationScheme(group_size=-1), QuantizationScheme(group_size=0)
SCHEMES = [CHANNEL, TENSOR]
FQN = "model.layers.3.mlp.up_proj"
# The block of a checkpoint made by auto-round 0.16.1, with a regular expression among the exceptions.
INTEL_BLOCK: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:fp8_static",
    "autoround_version": "0.16.1",
    "bits": 8,
    "data_type": "fp",
    "group_size": -1,
    "sym": True,
    "act_bits": 8,
    "act_data_type": "fp",
    "act_group_size": 0,
    "act_sym": True,
    "act_dynamic": False,
    "activation_scheme": "static",
    "fmt": "e4m3",
    "iters": 0,
    "block_name_to_quantize": "model.layers",
    "extra_config": {
        ".*\\.mlp\\.gate$": {"bits": 16, "data_type": "float", "act_bits": 16, "act_data_type": "float"},
        "model.layers.1.self_attn.k_proj": {"group_size": 0},
    },
}


def linear(scheme: QuantizationScheme, out: int = 3) -> QuantizedLinear:
    torch.manual_seed(0)
    shape = (out, 1) if scheme.group_size == -1 else (1,)
    return QuantizedLinear(
        fqn=FQN,
        weight=torch.randint(0, 127, (out, 4), dtype=torch.uint8).view(torch.float8_e4m3fn),
        weight_scale=torch.rand(shape) + 0.01,
        input_scale=torch.tensor([0.037]),
    )


def with_part(scheme: QuantizationScheme, part: str, tensor: torch.Tensor) -> QuantizedLinear:
    return FORMAT.decode(FQN, scheme, {**FORMAT.encode(linear(scheme), FP8), f"{FQN}.{part}": tensor})


def block_of(
    default: QuantizationScheme, schemes: dict[str, QuantizationScheme], prefixes: list[str]
) -> dict[str, Any]:
    table = SchemeTable(default=default, schemes=schemes, also_kept=("lm_head",), block_prefixes=tuple(prefixes))
    return FORMAT.quantization_config(table)


def parse(block: dict[str, Any]) -> Any:
    parsed = FORMAT.parse(json.loads(json.dumps(block)))
    assert parsed is not None
    return parsed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_is_the_inverse_of_encode_bit_for_bit(scheme: QuantizationScheme):
    before = linear(scheme)
    after = FORMAT.decode(FQN, scheme, FORMAT.encode(before, FP8))
    assert after.fqn == before.fqn
    assert torch.equal(after.weight.view(torch.uint8), before.weight.view(torch.uint8))
    for name in ("weight_scale", "input_scale"):
        a, b = getattr(after, name), getattr(before, name)
        assert a.shape == b.shape
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_the_three_tensors_are_written_in_intels_shapes(scheme: QuantizationScheme):
    tensors = FORMAT.encode(linear(scheme), FP8)
    found = {name.removeprefix(FQN + "."): (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    assert found == {
        "weight": (torch.float8_e4m3fn, (3, 4)),
        "weight_scale": (torch.float32, (3,)),
        "input_scale": (torch.float32, (1,)),
    }


def test_a_scale_per_matrix_is_repeated_for_intels_loader_and_must_be_one_value():
    layer = linear(TENSOR)
    tensors = FORMAT.encode(layer, FP8)
    assert torch.equal(tensors[f"{FQN}.weight_scale"], layer.weight_scale.repeat(3))
    tensors[f"{FQN}.weight_scale"][1] *= 2
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale' must hold one value for all channels"):
        FORMAT.decode(FQN, TENSOR, tensors)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("out", [1, 3])
def test_planned_tensors_are_what_encode_makes(scheme: QuantizationScheme, out: int):
    from autoround_fp8.checkpoint.reader import DTYPE_NAMES

    planned = {p.name: (p.dtype, p.shape, p.source) for p in FORMAT.planned_tensors(FQN, (out, 4), scheme, "BF16")}
    encoded = FORMAT.encode(linear(scheme, out), FP8).items()
    assert planned == {name: (DTYPE_NAMES[t.dtype], tuple(t.shape), None) for name, t in encoded}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["input_scale", "weight_scale"])
def test_per_tensor_scales_are_read_in_other_shapes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype, part: str):
    stored = torch.full(shape, 0.3, dtype=dtype)
    scale = getattr(with_part(TENSOR, part, stored), part)
    assert scale.shape == (1,)
    assert scale.dtype == torch.float32
    assert scale.item() == stored.float().item()


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_channel_scales_are_read_in_other_shapes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype):
    stored = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
    scale = with_part(CHANNEL, "weight_scale", stored.reshape(shape)).weight_scale
    assert scale.shape == (3, 1)
    assert torch.equal(scale.flatten(), stored.float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -0.1])
@pytest.mark.parametrize("part", ["input_scale", "weight_scale"])
def test_scales_that_are_not_finite_and_positive_are_named(bad: float, part: str):
    scale = torch.full((3,) if part == "weight_scale" else (1,), 0.5)
    scale[-1] = bad
    with pytest.raises(
        CheckpointError, match=rf"up_proj\.{part}' holds a scale that is NaN, infinite, zero or negative"
    ):
        with_part(CHANNEL, part, scale)


@pytest.mark.parametrize(
    ("scheme", "part", "tensor"),
    [
        (CHANNEL, "weight_scale", torch.ones(1)),
        (CHANNEL, "weight_scale", torch.ones(4)),
        (TENSOR, "weight_scale", torch.ones(2)),
        (TENSOR, "input_scale", torch.ones(2)),
        (TENSOR, "input_scale", torch.ones(0)),
        (TENSOR, "input_scale", torch.ones(1, dtype=torch.int32)),
        (TENSOR, "weight_scale", torch.ones(1).to(torch.float8_e8m0fnu)),
    ],
)
def test_scales_of_wrong_size_or_kind_are_named(scheme: QuantizationScheme, part: str, tensor: torch.Tensor):
    with pytest.raises(CheckpointError, match=rf"up_proj\.{part}' is torch\..*, expected \d float values"):
        with_part(scheme, part, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.uint8])
def test_weight_that_is_not_e4m3_is_refused(dtype: torch.dtype):
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' is torch\..*config\.json says this layer is FP8"):
        with_part(TENSOR, "weight", torch.ones(3, 4).to(dtype))


@pytest.mark.parametrize("part", ["weight", "weight_scale", "input_scale"])
def test_missing_tensor_is_named(part: str):
    tensors = FORMAT.encode(linear(CHANNEL), FP8)
    del tensors[f"{FQN}.{part}"]
    with pytest.raises(CheckpointError, match=rf"up_proj\.{part}' is missing"):
        FORMAT.decode(FQN, CHANNEL, tensors)


@pytest.mark.parametrize("default", SCHEMES)
@pytest.mark.parametrize("prefixes", [["model.layers"], ["model.decoder.layers", "model.extra"]])
def test_parse_of_our_block_resolves_every_layer(default: QuantizationScheme, prefixes: list[str]):
    first = prefixes[0]
    exceptions = {f"{first}.{i}.mlp.up_proj": s for i, s in enumerate([CHANNEL, TENSOR, UNQUANTIZED])}
    parsed = parse(block_of(default, exceptions, prefixes))
    assert parsed.format == "fp8_static"
    for fqn, scheme in exceptions.items():
        assert parsed.resolve(fqn) == scheme
    for prefix in prefixes:
        assert parsed.resolve(f"{prefix}.10.mlp.up_proj") == default
    assert parsed.resolve("lm_head") == UNQUANTIZED
    assert parsed.resolve(f"{first}_other.0.q_proj") == UNQUANTIZED


def test_our_block_field_for_field():
    exceptions = {"model.layers.0.mlp.gate": UNQUANTIZED, "model.layers.0.mlp.up_proj": TENSOR}
    block = block_of(CHANNEL, exceptions, ["model.layers"])
    ours = {k: v for k, v in INTEL_BLOCK.items() if k not in ("autoround_version", "iters", "extra_config")}
    assert {k: block[k] for k in ours} == ours
    assert block["extra_config"] == {
        "model.layers.0.mlp.gate": {"act_bits": 16, "act_data_type": "float", "bits": 16, "data_type": "float"},
        "model.layers.0.mlp.up_proj": {"has_one_weight_scale": True},
    }
    assert "has_one_weight_scale" not in block
    of_tensors = block_of(TENSOR, {"model.layers.0.mlp.up_proj": CHANNEL}, ["model.layers"])
    assert (of_tensors["group_size"], of_tensors["has_one_weight_scale"]) == (-1, True)
    assert of_tensors["extra_config"] == {"model.layers.0.mlp.up_proj": {"has_one_weight_scale": False}}
    assert "extra_config" not in block_of(CHANNEL, {}, ["model.layers"])


def test_intels_block_with_a_regular_expression():
    parsed = parse(INTEL_BLOCK)
    assert parsed.resolve("model.layers.0.mlp.up_proj") == CHANNEL
    assert parsed.resolve("model.layers.0.mlp.gate") == UNQUANTIZED
    assert parsed.resolve("model.layers.0.mlp.gate_proj") == CHANNEL
    assert parsed.resolve("model.layers.1.self_attn.k_proj") == TENSOR
    assert parsed.resolve("model.layers.11.self_attn.k_proj") == CHANNEL
    assert parsed.resolve("lm_head") == UNQUANTIZED


def test_exact_names_come_before_patterns_and_may_lie_outside_the_blocks():
    extra = {r".*up_proj.*": {"bits": 16}, "model.layers.0.up_proj": {"group_size": 0}, "lm_head": {"bits": 8}}
    parsed = parse({**INTEL_BLOCK, "extra_config": extra})
    assert parsed.resolve("model.layers.0.mlp.up_proj") == UNQUANTIZED
    assert parsed.resolve("model.layers.0.up_proj") == TENSOR
    assert parsed.resolve("model.layers.1.up_proj") == UNQUANTIZED
    assert parsed.resolve("lm_head") == CHANNEL


@pytest.mark.parametrize("prefixes", [None, "", "model.layers", ["model.layers"], "model.layers , other"])
def test_block_prefixes_in_every_written_form(prefixes: Any):
    parsed = parse({**INTEL_BLOCK, "block_name_to_quantize": prefixes})
    assert parsed.resolve("model.layers.0.q_proj").is_quantized
    assert parsed.resolve("other.0.q_proj").is_quantized == (prefixes == "model.layers , other")


def test_missing_and_null_fields_take_the_defaults():
    names = ("quant_method", "packing_format", "bits")
    minimal = {name: INTEL_BLOCK[name] for name in names} | {"extra_config": None, "act_dynamic": None}
    assert parse(minimal).resolve("model.layers.0.q_proj") == CHANNEL


@pytest.mark.parametrize(
    ("field", "value"),
    [("act_dynamic", True), ("bits", 4), ("group_size", 128), ("act_bits", 16), ("data_type", "int"), ("sym", False)],
)
def test_schemes_this_package_cannot_run_are_refused_by_field(field: str, value: Any):
    with pytest.raises(ConfigError, match=rf"{field} \({re.escape(repr(value))}\) of quantization_config"):
        parse({**INTEL_BLOCK, field: value})
    with pytest.raises(ConfigError, match=rf"{field} \({re.escape(repr(value))}\) of .*k_proj"):
        parse({**INTEL_BLOCK, "extra_config": {"model.layers.1.k_proj": {field: value}}})


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        {"quant_method": "fp8", "packing_format": "auto_round:fp8_static"},
    ],
)
def test_blocks_of_other_formats_are_not_ours(block: dict[str, Any]):
    assert FORMAT.parse(block) is None


def test_validate_names_the_layer():
    FORMAT.validate({"a": CHANNEL, "b": TENSOR})
    with pytest.raises(ConfigError, match=r"'fp8_static' holds static input scales only, but the inputs of 'b'"):
        FORMAT.validate({"a": CHANNEL, "b": QuantizationScheme(act_group_size=-1, act_dynamic=True)})
    with pytest.raises(ConfigError, match=r"group_size \(128\) of layer 'b'"):
        FORMAT.validate({"a": CHANNEL, "b": QuantizationScheme(group_size=128)})
