"""Exports of tiny models, and changes to them that vLLM fails for, each with what `auto-round inspect` says of it then.

The kinds of exports are those of `inspection/conftest.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB_SIZE

from autoround_fp8.config import QuantizeConfig
from autoround_fp8.formats.table import default_scheme, get_formats
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import export_run, prepare
from autoround_fp8.schemes import parse_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))

Tensors = dict[str, torch.Tensor]

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
EXPERT = "model.layers.0.mlp.experts.3"
CACHE = "model.layers.0.self_attn"
FAULTS = "the checkpoint has faults"


def write_export(source: Path, folder: Path, name: str, scheme: str | None, cache: str | None) -> None:
    """Rounds a model to nearest; None = the format's default scheme, no scales of the KV cache."""
    config = QuantizeConfig(
        dataset=ROWS,
        device="cpu",
        algorithm="rtn",
        format=name,
        scheme=default_scheme(get_formats(name)) if scheme is None else parse_scheme(scheme),
        static_kv_dtype=cache,
    )
    export_run(prepare(config, open_model(source)), folder)


def shaped(name: str, *shape: int) -> Any:
    return lambda tensors, _: tensors.update({name: tensors[name].reshape(shape)})


def doubled(name: str) -> Any:
    return lambda tensors, _: tensors.update({name: tensors[name] * 2})


def without(*names: str) -> Any:
    return lambda tensors, _: [tensors.pop(name) for name in names]


def cache(**changes: Any) -> Any:
    return lambda _, config: config["quantization_config"]["kv_cache_scheme"].update(changes)


def another_key(_tensors: Tensors, config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["clip"] = 1.0


def kept_q(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(torch.bfloat16)
    del tensors[f"{Q}.weight_scale"], tensors[f"{Q}.input_scale"]
    block = config["quantization_config"]
    block["ignore" if "ignore" in block else "ignored_layers"].append(Q)


def kept_down_of_experts(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if "layers.1.mlp.experts." in name and ".down_proj." in name]:
        if name.endswith("_scale"):
            del tensors[name]
        else:
            tensors[name] = tensors[name].to(torch.bfloat16)
    config["quantization_config"]["ignore"].append(r"re:model\.layers\.1\.mlp\.experts\.\d+\.down_proj$")


def k_of_another_scheme(tensors: Tensors, config: dict[str, Any]) -> None:
    groups = config["quantization_config"]["config_groups"]
    names = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    groups["group_1"]["weights"]["strategy"] = "tensor"
    groups["group_0"]["targets"], groups["group_1"]["targets"] = [n for n in names if n != K], [K]
    tensors[f"{K}.weight_scale"] = tensors[f"{K}.weight_scale"].max().reshape(1)


def fp8_output_layer(tensors: Tensors, config: dict[str, Any]) -> None:
    weight = tensors["lm_head.weight"].float()
    scale = weight.abs().amax(1, keepdim=True) / 448
    tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale
    tensors["lm_head.input_scale"] = torch.ones(1)
    config["quantization_config"]["ignore"] = []


def e5m2_codes(tensors: Tensors, _config: Any) -> None:
    tensors[f"{O_PROJ}.weight"] = tensors[f"{O_PROJ}.weight"].float().to(torch.float8_e5m2)


def old_cache_names(tensors: Tensors, _config: Any) -> None:
    for part in "kv":
        tensors[f"{CACHE}.{part}_proj.output_scale"] = tensors.pop(f"{CACHE}.{part}_scale")


# Kind of export, what is changed, what is said; None = vLLM loads it all the same.
DAMAGE: dict[str, tuple[str, Any, str | None]] = {
    "scalar scale": ("llm_compressor", shaped(f"{Q}.input_scale"), None),
    "[1, 1]": ("llm_compressor", shaped(f"{Q}.input_scale", 1, 1), "rejects scales of shape [1, 1]"),
    "[1, 1] under fp8": ("fp8", shaped(f"{Q}.weight_scale", 1, 1), "rejects scales of shape [1, 1]"),
    "[1, 1] of an expert": ("moe_llm_compressor", shaped(f"{EXPERT}.down_proj.input_scale", 1, 1), None),
    "[out]": ("llm_compressor", shaped(f"{Q}.weight_scale", 64), "rejects scales of shape [out]"),
    "[out] of an expert": ("moe_dynamic", shaped(f"{EXPERT}.down_proj.weight_scale", 64), "scales of shape [out]"),
    "no input scale": ("llm_compressor", without(f"{Q}.input_scale"), FAULTS),
    "no weight": ("llm_compressor", without(f"{O_PROJ}.weight"), FAULTS),
    "no expert": (
        "moe_llm_compressor",
        without(*(f"{EXPERT}.up_proj.{part}" for part in ("weight", "weight_scale", "input_scale"))),
        FAULTS,
    ),
    "stray scale": (
        "llm_compressor",
        lambda tensors, _: tensors.update({"model.norm.input_scale": torch.ones(1)}),
        FAULTS,
    ),
    "gate and up": ("moe_llm_compressor", doubled(f"{EXPERT}.up_proj.input_scale"), "same input scale (ValueError)"),
    "gate and up under fp8": ("moe_fp8", doubled(f"{EXPERT}.gate_proj.input_scale"), "the last one read counts"),
    "q in 16 bit": ("llm_compressor", kept_q, "must all be FP8"),
    "q in 16 bit under fp8": ("fp8", kept_q, "must all be FP8"),
    "k of another scheme": ("llm_compressor", k_of_another_scheme, "by the scheme of the first"),
    "down in 16 bit": ("moe_llm_compressor", kept_down_of_experts, "must all have the same scheme"),
    "another key": ("llm_compressor", another_key, "ValidationError"),
    "output layer": ("llm_compressor", fp8_output_layer, "takes the output layer for 16 bit"),
    "E5M2": ("llm_compressor", e5m2_codes, "as E4M3 only"),
    "cache of 4 bits": ("cache", cache(num_bits=4), "NotImplementedError"),
    "asymmetric cache": ("cache", cache(symmetric=False), "NotImplementedError"),
    "cache by channel": ("cache", cache(strategy="channel"), "NotImplementedError"),
    "old names": ("cache", old_cache_names, "k_scale and v_scale only"),
}
