"""Every fault and oddity, planted one by one in a sound checkpoint, is found and named; sound ones have none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from autoround_fp8.inspection.checks import Finding, find_all, is_router
from autoround_fp8.inspection.contents import read_contents

LAYER = "model.layers.0."
Q, K, UP, DOWN = (f"{LAYER}{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"))
EXPERT = f"{LAYER}mlp.experts.3."
KINDS = [
    *("dense", "moe", "fake", "block", "moe_block", "fp8_static", "llm_compressor", "dynamic", "fp8"),
    *("moe_fp8_static", "moe_llm_compressor", "moe_fp8", "moe_dynamic"),
]


def faults_of(folder: Path) -> dict[str, Finding]:
    return {finding.what: finding for finding in find_all(read_contents(folder))}


@pytest.mark.parametrize("kind", KINDS)
def test_what_this_package_makes_is_sound(made: Callable[[str], Path], kind: str) -> None:
    assert find_all(read_contents(made(kind))) == ()


def as_intel_writes(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("_scale"):
            tensors[name] = tensors[name].bfloat16()
    del config["quantization_config"]["act_group_size"]
    config["quantization_config"]["autoround_version"] = "0.16.1"


def as_llm_compressor_writes(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("_scale"):
            tensors[name] = tensors[name].bfloat16()
    config["quantization_config"] |= {"ignore": ["re:.*lm_head"], "version": "0.12.2", "sparsity_config": {}}


@pytest.mark.parametrize(
    ("kind", "change"), [("fp8_static", as_intel_writes), ("llm_compressor", as_llm_compressor_writes)]
)
def test_what_others_write_is_sound(planted: Any, kind: str, change: Any) -> None:
    folder = planted(kind, change)
    assert read_contents(folder).label == kind
    assert find_all(read_contents(folder)) == ()


def removed(*names: str) -> Any:
    return lambda tensors, _: [tensors.pop(name) for name in names]


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda tensors, _: tensors.update({name: make(tensors[name])})


def first_is(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


def with_nan_code(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8).clone()
    codes[1, 2] = 0xFF
    return codes.view(torch.float8_e4m3fn)


def ignoring_nothing(_tensors: Any, config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"] = []


def ignoring_q(_tensors: Any, config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].append(Q)


def without_block(_tensors: Any, config: dict[str, Any]) -> None:
    del config["quantization_config"]


def saying_per_matrix(_tensors: Any, config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"


def without_an_expert(tensors: dict[str, torch.Tensor], _config: Any) -> None:
    for part in ("weight", "weight_scale", "input_scale"):
        del tensors[f"model.layers.0.mlp.experts.3.up_proj.{part}"]


FAULTS = [
    ("fp8_static", removed(f"{Q}.weight_scale"), "FP8 weights without a scale", f"{Q}.weight"),
    ("block", removed(f"{Q}.weight_scale_inv"), "FP8 weights without a scale", f"{Q}.weight"),
    ("fp8", removed(f"{Q}.input_scale"), "missing input scales", f"{Q}.input_scale"),
    ("moe_fp8", without_an_expert, "missing experts", "model.layers.0.mlp.experts.3.up_proj"),
    ("llm_compressor", without_block, "FP8 weights, but no quantization_config", f"{Q}.weight"),
    *(
        (
            kind,
            replaced(f"{Q}.{part}", first_is(value)),
            "scales that are NaN, infinite, zero or negative",
            f"{Q}.{part}",
        )
        for kind, part in (("fp8_static", "weight_scale"), ("fp8", "input_scale"), ("block", "weight_scale_inv"))
        for value in (math.nan, math.inf, 0.0, -1e-3)
    ),
    (
        "fp8_static",
        replaced(f"{Q}.weight_scale", lambda t: t[:-1]),
        "scales of a wrong shape",
        f"{Q}.weight [64, 64] with [63]",
    ),
    ("fp8", replaced(f"{Q}.input_scale", lambda t: t.repeat(2)), "scales of a wrong shape", f"{Q}.input_scale [2]"),
    (
        "block",
        replaced(f"{Q}.weight_scale_inv", lambda t: t[:1]),
        "scales of a wrong shape",
        f"{Q}.weight [64, 64] with [1, 2]",
    ),
    (
        "llm_compressor",
        saying_per_matrix,
        "weight scales of another size than config.json says",
        f"{Q}.weight_scale [64, 1] instead of 1",
    ),
    ("fp8_static", replaced(f"{Q}.weight", with_nan_code), "FP8 weights with NaN codes", f"{Q}.weight"),
    ("block", replaced(f"{Q}.weight", with_nan_code), "FP8 weights with NaN codes", f"{Q}.weight"),
    ("dense", replaced(f"{Q}.weight", first_is(math.inf)), "tensors with NaN or infinity", f"{Q}.weight"),
    ("fp8", replaced("model.norm.weight", first_is(math.nan)), "tensors with NaN or infinity", "model.norm.weight"),
    (
        "llm_compressor",
        replaced(f"{Q}.weight", lambda t: t.to(torch.bfloat16)),
        "not FP8, and config.json does not say so",
        f"{Q}.weight",
    ),
    ("llm_compressor", ignoring_nothing, "not FP8, and config.json does not say so", "lm_head.weight"),
    (
        "moe_llm_compressor",
        ignoring_nothing,
        "not FP8, and config.json does not say so",
        f"{LAYER}mlp.gate.weight",
    ),
    ("llm_compressor", ignoring_q, "FP8 weights that config.json ignores", f"{Q}.weight"),
    (
        "dynamic",
        lambda tensors, _: tensors.update({f"{Q}.input_scale": torch.ones(1)}),
        "input scales, but config.json says inputs are dynamic",
        f"{Q}.input_scale",
    ),
    ("fp8_static", removed(f"{Q}.weight"), "scales without an FP8 weight", f"{Q}.weight_scale"),
    (
        "moe_fp8",
        lambda tensors, _: tensors.update({f"{LAYER}mlp.gate.weight_scale": torch.ones(1)}),
        "routers with a scale, which engines keep in 16 bit",
        f"{LAYER}mlp.gate.weight_scale",
    ),
    (
        "moe_fp8",
        replaced(f"{LAYER}mlp.gate.weight", lambda t: t.to(torch.float8_e4m3fn)),
        "routers with a scale, which engines keep in 16 bit",
        f"{LAYER}mlp.gate.weight",
    ),
]


@pytest.mark.parametrize(("kind", "change", "what", "name"), FAULTS)
def test_a_planted_fault_is_named(planted: Any, kind: str, change: Any, what: str, name: str) -> None:
    found = faults_of(planted(kind, change))
    assert found[what].is_fault
    assert any(other.partition(" (")[0] == name for other in found[what].names)


ODDITIES = [
    (
        "fp8_static",
        f"{Q}.input_scale",
        "fused layers with different input scales: engines take the largest",
        "q_proj/k",
    ),
    ("llm_compressor", f"{UP}.input_scale", "fused layers with different input scales", "mlp.gate_proj/up_proj"),
    ("moe_fp8", f"{EXPERT}up_proj.input_scale", "fused layers with different input scales", "3.gate_proj/up_proj"),
    ("fp8", f"{K}.weight_scale", "fused layers with different weight scales per matrix", "q_proj/k_proj/v_proj"),
]


@pytest.mark.parametrize(("kind", "tensor", "what", "name"), ODDITIES)
def test_a_planted_oddity_is_no_fault(planted: Any, kind: str, tensor: str, what: str, name: str) -> None:
    (finding,) = find_all(read_contents(planted(kind, replaced(tensor, lambda t: t * 2))))
    assert not finding.is_fault
    assert finding.what.startswith(what)
    assert len(finding.names) == 1
    assert name in finding.names[0]


def test_a_partly_quantised_group_is_odd(planted: Any) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(torch.bfloat16)
        del tensors[f"{Q}.weight_scale"], tensors[f"{Q}.input_scale"]
        config["quantization_config"]["ignore"].append(Q)

    (finding,) = find_all(read_contents(planted("llm_compressor", change)))
    assert not finding.is_fault
    assert finding.what == "only part of what engines fuse is FP8"
    assert finding.names == (f"{LAYER}self_attn.q_proj/k_proj/v_proj",)


@pytest.mark.parametrize("tied", [False, True])
def test_an_fp8_output_layer_is_odd_where_it_is_tied(planted: Any, tied: bool) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors |= {"lm_head.weight_scale": torch.ones(128, 1), "lm_head.input_scale": torch.ones(1)}
        config["quantization_config"]["ignore"].remove("lm_head")
        config["tie_word_embeddings"] = tied

    found = find_all(read_contents(planted("llm_compressor", change)))
    assert [(f.is_fault, f.names) for f in found] == ([(False, ("lm_head.weight",))] if tied else [])


def test_per_matrix_scales_of_scales_per_channel_may_differ(planted: Any) -> None:
    assert find_all(read_contents(planted("fp8_static", replaced(f"{K}.weight_scale", lambda t: t * 2)))) == ()


@pytest.mark.parametrize("shape", [(), (1, 1), (1,)])
def test_scales_of_one_value_have_many_shapes(planted: Any, shape: tuple[int, ...]) -> None:
    assert find_all(read_contents(planted("fp8", replaced(f"{DOWN}.weight_scale", lambda t: t.reshape(shape))))) == ()


def sharded(folder: Path) -> dict[str, str]:
    """Splits the checkpoint in two and gives it an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"{1 + (i % 2)}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in ("1.safetensors", "2.safetensors"):
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_an_index_of_absent_tensors_and_files(planted: Any) -> None:
    folder = planted("fp8_static", lambda *_: None)
    weight_map = sharded(folder)
    assert find_all(read_contents(folder)) == ()
    index = {**weight_map, "gone": "1.safetensors", "away": "3.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (finding,) = find_all(read_contents(folder))
    assert finding.is_fault
    assert finding.what == "damaged files"
    first, second = finding.names
    assert "shard '3.safetensors'" in first
    assert "tensor 'gone'" in second


def test_a_file_cut_short_leaves_the_rest_to_be_checked(planted: Any) -> None:
    folder = planted("fp8_static", replaced(f"{DOWN}.weight_scale", first_is(math.nan)))
    weight_map = sharded(folder)
    path = folder / ("1.safetensors" if weight_map[f"{DOWN}.weight_scale"] == "2.safetensors" else "2.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    found = faults_of(folder)
    assert "cut short" in found["damaged files"].names[0]
    assert len(found["damaged files"].names) == 1


def test_routers_are_told_from_gate_projections() -> None:
    assert is_router("model.layers.0.mlp.gate")
    assert is_router("model.layers.0.mlp.shared_expert_gate")
    assert not is_router("model.layers.0.mlp.gate_proj")
    assert not is_router("lm_head")
