"""Who can load what: the label first, then single facts, each planted in a checkpoint that could be loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_damage import DAMAGE, EXPERT, Q, another_key, doubled, kept_q, shaped

from autoround_fp8.inspection.checks import find_all
from autoround_fp8.inspection.consumer_rules import CONSUMERS, INTEL, SGLANG, THIS, TRANSFORMERS, VLLM
from autoround_fp8.inspection.consumers import readings
from autoround_fp8.inspection.contents import read_contents


def readings_of(folder: Path) -> dict[str, str]:
    """Consumer -> "yes", "?", or the reasons."""
    contents = read_contents(folder)
    found = readings(contents, find_all(contents))
    assert tuple(reading.consumer for reading in found) == CONSUMERS
    return {r.consumer: "; ".join(r.reasons) or ("yes" if r.is_known else "?") for r in found}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dense", (True, True, True, True, True)),
        ("fake", (True, True, True, True, True)),
        ("fp8_static", (False, None, False, True, True)),
        ("moe_fp8_static", (False, None, False, True, True)),
        ("llm_compressor", (True, True, True, False, True)),
        ("dynamic", (True, True, True, False, True)),
        ("moe_llm_compressor", (True, True, False, False, True)),
        ("moe_dynamic", (True, True, False, False, True)),
        ("fp8", (True, True, False, False, True)),
        ("moe_fp8", (True, True, False, False, True)),
        ("block", (True, True, True, None, True)),
        ("cache", (True, True, True, False, True)),
        ("moe_cache", (True, True, False, False, True)),
    ],
)
def test_who_reads_what_is_written(made: Callable[[str], Path], kind: str, expected: tuple[bool | None, ...]) -> None:
    words = readings_of(made(kind)).values()
    assert tuple({"yes": True, "?": None}.get(word, False) for word in words) == expected


def per_channel_experts(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in list(tensors):
        if ".experts." in name and name.endswith(".weight_scale"):
            rows = tensors[name.removesuffix("_scale")].shape[0]
            tensors[name] = tensors[name].expand(rows).reshape(-1, 1).clone()
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["strategy"] = "channel"


def per_matrix_dynamic(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in list(tensors):
        if name.endswith(".weight_scale"):
            tensors[name] = tensors[name].max().reshape(1)
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["strategy"] = "tensor"


def renamed(old: str, new: str) -> Any:
    def change(tensors: dict[str, torch.Tensor], _config: Any) -> None:
        for name in [name for name in tensors if f".{old}." in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def one_value(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"][:1]
    config["quantization_config"]["extra_config"] = {Q: {"group_size": 0}}


def gpt_oss(_tensors: Any, config: dict[str, Any]) -> None:
    config["model_type"] = "gpt_oss"


def fp8_output(*targets: str, model_type: str = "qwen3") -> Any:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        weight = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = weight.to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.ones(len(weight), 1) if targets else torch.ones(1)
        tensors["lm_head.input_scale"] = torch.ones(1)
        block = config["quantization_config"]
        block.get("ignore", block.get("ignored_layers")).remove("lm_head")
        config["model_type"] = model_type
        if targets:
            block["config_groups"]["group_0"]["targets"] = list(targets)

    return change


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        (
            "llm_compressor",
            fp8_output("Linear"),
            {VLLM: "unless a target", SGLANG: "unless a target", TRANSFORMERS: "yes"},
        ),
        ("llm_compressor", fp8_output("lm_head", "Linear"), {VLLM: "yes", SGLANG: "yes", TRANSFORMERS: "yes"}),
        (
            "llm_compressor",
            fp8_output("lm_head", "Linear", model_type="qwen3_next"),
            {VLLM: "of this family in 16 bit only", SGLANG: "yes"},
        ),
        ("fp8", fp8_output(), {VLLM: "for 16 bit under this label", SGLANG: "under this label"}),
        (
            "moe_llm_compressor",
            per_channel_experts,
            {VLLM: "only with one weight scale per matrix", SGLANG: "one weight scale per matrix", THIS: "yes"},
        ),
        (
            "moe_dynamic",
            per_matrix_dynamic,
            {VLLM: "only with a weight scale per channel", SGLANG: "per channel", THIS: "yes"},
        ),
        (
            "moe_llm_compressor",
            doubled(f"{EXPERT}.up_proj.input_scale"),
            {VLLM: "need the same input scale", SGLANG: "yes"},
        ),
        ("moe_fp8", doubled(f"{EXPERT}.gate_proj.input_scale"), {VLLM: "need the same input scale", THIS: "yes"}),
        ("moe_fp8", gpt_oss, {VLLM: "no FP8 experts for gpt_oss", SGLANG: "gpt_oss"}),
        (
            "llm_compressor",
            renamed("o_proj", "kv_b_proj"),
            {VLLM: "kv_b_proj", SGLANG: "kv_b_proj", TRANSFORMERS: "yes"},
        ),
        ("llm_compressor", kept_q, {VLLM: "must all be FP8", SGLANG: "must all be FP8", TRANSFORMERS: "yes"}),
        ("llm_compressor", shaped(f"{Q}.input_scale"), {TRANSFORMERS: "rejects scales of shape []", VLLM: "yes"}),
        (
            "llm_compressor",
            shaped(f"{Q}.input_scale", 1, 1),
            {TRANSFORMERS: "of shape [1, 1]", VLLM: "of shape [1, 1]", SGLANG: "yes"},
        ),
        ("fp8_static", shaped(f"{Q}.weight_scale", 64, 1), {INTEL: "they must be [out]", THIS: "yes"}),
        ("fp8_static", one_value, {INTEL: "scales per channel only", THIS: "yes"}),
        ("moe_fp8_static", renamed("gate_proj", "w1"), {INTEL: "knows Mixtral's experts as gate_proj", THIS: "yes"}),
        ("llm_compressor", another_key, {VLLM: "ValidationError", TRANSFORMERS: "yes"}),
        (
            "block",
            lambda tensors, _: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"][:40]}),
            {TRANSFORMERS: "guesses the block size", VLLM: "yes"},
        ),
        (
            "fp8_static",
            lambda tensors, _: tensors.pop(f"{Q}.weight_scale"),
            dict.fromkeys(CONSUMERS, "the checkpoint has faults"),
        ),
        (
            "dense",
            lambda _, config: config.update(quantization_config={"quant_method": "awq"}),
            {THIS: "quantization it does not read", VLLM: "?", INTEL: "?"},
        ),
    ],
)
def test_a_fact_stops_those_who_fail_for_it(planted: Any, kind: str, change: Any, expected: dict[str, str]) -> None:
    found = readings_of(planted(kind, change))
    for consumer, text in expected.items():
        assert text in found[consumer], consumer
        assert (found[consumer] == "yes") == (text == "yes")


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_stops_vllm_for_one_reason(planted: Any, what: str) -> None:
    kind, change, reason = DAMAGE[what]
    found = readings_of(planted(kind, change))[VLLM]
    assert (reason or "yes") in found
    # A missing tensor also makes a layer unlike those it is fused with.
    assert ";" not in found or "faults" in found


@pytest.mark.parametrize(("leaf", "stopped", "other"), [("w1", VLLM, SGLANG), ("gate_proj", SGLANG, VLLM)])
def test_engines_call_the_experts_of_granitemoe_differently(planted: Any, leaf: str, stopped: str, other: str) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["model_type"] = "granitemoe"
        renamed("gate_proj", leaf)(tensors, config)

    found = readings_of(planted("moe_fp8", change))
    assert "experts of granitemoe" in found[stopped]
    assert "granitemoe" not in found[other]


def test_per_channel_scales_under_a_label_without_them(planted: Any) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
        }

    assert "one weight scale per matrix" in readings_of(planted("llm_compressor", change))[VLLM]
