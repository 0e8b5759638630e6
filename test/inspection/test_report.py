"""The report: layers by type, sizes, the extremes of scales, and the same as JSON and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autoround_fp8.inspection.report import LayerType, format_inspection, inspect_checkpoint

Q = "model.layers.0.self_attn.q_proj"


def types_of(folder: Path) -> dict[str, LayerType]:
    return {layer.leaf: layer for layer in inspect_checkpoint(folder).layers}


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("fp8_static", "FP8, weight scale per channel, inputs static"),
        ("dynamic", "FP8, weight scale per channel, inputs dynamic"),
        ("fp8", "FP8, weight scale per matrix, inputs static"),
        ("block", "FP8, weight scale per block of 32 x 32, inputs dynamic"),
        ("fake", "not quantised"),
    ],
)
def test_layers_are_counted_by_type(made: Callable[[str], Path], kind: str, scheme: str) -> None:
    found = types_of(made(kind))
    dtype = "BF16" if kind == "fake" else "F8_E4M3"
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert found[leaf] == LayerType(leaf=leaf, scheme=scheme, dtype=dtype, count=2)
    assert found["lm_head"] == LayerType(leaf="lm_head", scheme="not quantised", dtype="BF16", count=1)


def test_experts_are_types_of_their_own(made: Callable[[str], Path]) -> None:
    found = types_of(made("moe_llm_compressor"))
    assert found["experts.up_proj"].scheme == "FP8, weight scale per matrix, inputs static"
    assert found["experts.up_proj"].count % 8 == 0
    assert found["gate"].scheme == "not quantised"


@pytest.mark.parametrize("kind", ["dense", "fp8_static", "llm_compressor", "block"])
def test_sizes_are_those_of_the_tensors(made: Callable[[str], Path], kind: str) -> None:
    tensors = load_file(made(kind) / "model.safetensors").values()
    sizes = inspect_checkpoint(made(kind)).bytes_by_dtype
    assert sum(sizes.values()) == sum(t.numel() * t.itemsize for t in tensors)
    fp8 = sum(t.numel() for t in tensors if t.dtype == torch.float8_e4m3fn)
    assert sizes.get("F8_E4M3", 0) == fp8


def test_extremes_of_scales_are_named(planted: Any) -> None:
    def change(tensors: dict[str, torch.Tensor], _config: Any) -> None:
        tensors[f"{Q}.weight_scale"][5] = 2.0**-20
        tensors[f"{Q}.input_scale"][0] = 2.0**9

    weights, inputs = inspect_checkpoint(planted("fp8_static", change)).ranges
    assert (weights.kind, weights.count, weights.dtypes) == ("weight scales", 14, {"F32": 14})
    assert (weights.low, weights.low_name) == (2.0**-20, f"{Q}.weight_scale")
    assert (inputs.high, inputs.high_name) == (2.0**9, f"{Q}.input_scale")
    assert inputs.low < inputs.high


@pytest.mark.parametrize("kind", ["dense", "fp8_static", "llm_compressor", "dynamic", "fp8", "block", "moe_fp8"])
def test_text_and_json_say_the_same(made: Callable[[str], Path], kind: str) -> None:
    inspection = inspect_checkpoint(made(kind))
    text, data = format_inspection(inspection), json.loads(json.dumps(inspection.to_dict(), allow_nan=False))
    assert text.endswith("\nsound")
    assert not data["is_broken"]
    assert data["findings"] == []
    for consumer in data["consumers"]:
        word = {True: "yes", False: "no: ", None: "not known"}[consumer["can_load"]]
        assert f"\n{consumer['name']}: {word}" in text
    assert f"quantization {data['label']}" in text


def test_a_broken_one_is_called_broken(planted: Any) -> None:
    def change(tensors: dict[str, torch.Tensor], _config: Any) -> None:
        for index, name in enumerate(name for name in list(tensors) if name.endswith("weight_scale")):
            tensors[name].view(-1)[0] = math.nan if index else math.inf

    inspection = inspect_checkpoint(planted("fp8_static", change))
    text = format_inspection(inspection)
    assert inspection.is_broken
    assert text.endswith("\nbroken")
    assert "FAULT: scales that are NaN, infinite, zero or negative (14): " in text
    data = json.loads(json.dumps(inspection.to_dict(), allow_nan=False))
    assert data["is_broken"]
    assert len(data["findings"][0]["names"]) == 14
    assert data["scale_ranges"][0]["high"] == "inf"
