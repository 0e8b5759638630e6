"""`name_map.py`: every tensor of a checkpoint is a parameter's, an expert's, or known to be unused; nothing twice."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from tiny_moe_models import MOE_FAMILIES, tiny_moe_model

from autoround_fp8.checkpoint.materialize import TensorPart, fill_module, require_filled
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.errors import CheckpointError, UnsupportedModelError
from autoround_fp8.models.linear_experts import find_experts, linearized
from autoround_fp8.models.name_map import ExpertsSource, NameMap, map_names

CPU = torch.device("cpu")
NUM_EXPERTS = 8
FUSED = ("granitemoe", "gpt_oss", "llama4_text", "gemma4_text")
# The experts of the last layer that has some: module in the model -> folder of single experts in the checkpoint.
LAST = {
    "mixtral": ("model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"),
    "minimax_m2": ("model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"),
    "phimoe": ("model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"),
    "granitemoe": ("model.layers.1.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"),
    "deepseek_v3": ("model.layers.2.mlp.experts", "model.layers.2.mlp.experts"),
    "llama4_text": ("model.layers.2.feed_forward.experts", "model.layers.2.feed_forward.experts"),
    "gemma4_text": ("model.layers.1.experts", "model.layers.1.experts"),
    "nemotron_h": ("model.layers.4.mixer.experts", "backbone.layers.4.mixer.experts"),
}
LEAVES = dict.fromkeys(("mixtral", "minimax_m2", "phimoe"), ("w1", "w3", "w2"))


def last_of(family: str) -> tuple[str, str]:
    return LAST.get(family, ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts"))


@cache
def model_of(family: str) -> Any:
    return tiny_moe_model(family)


@cache
def names_of(family: str) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        model_of(family).save_pretrained(folder)
        return tuple(CheckpointReader(folder).names)


def mapped(family: str, *more: str, without: Any = ()) -> NameMap:
    model = model_of(family)
    names = [name for name in names_of(family) if name not in without]
    return map_names(model, [*names, *more], find_experts(model))


def last_experts(family: str, *more: str, without: Any = ()) -> ExpertsSource:
    return mapped(family, *more, without=without).experts[last_of(family)[0]]


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_every_tensor_has_its_place(family: str) -> None:
    found = mapped(family)
    experts = [name for source in found.experts.values() for name in source.tensor_names()]
    plain = list(found.sources.values())
    assert sorted([*experts, *plain]) == sorted(names_of(family))
    assert found.unused == ()
    state = model_of(family).state_dict()
    assert set(found.sources) <= set(state)
    inside = tuple(f"{module}." for module in found.experts)
    assert {name for name in state if name.startswith(inside)} == set(state) - set(found.sources)
    assert set(found.experts) == set(find_experts(model_of(family)))


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_names_of_single_experts(family: str) -> None:
    source = last_experts(family)
    module, folder = last_of(family)
    gate, up, down = LEAVES.get(family, ("gate_proj", "up_proj", "down_proj"))
    leaves = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    if family == "nemotron_h":
        del leaves["gate_proj"]
    assert source.module == module
    assert source.names == {(e, p): f"{folder}.{e}.{leaf}" for e in range(NUM_EXPERTS) for p, leaf in leaves.items()}
    assert source.is_fused == (family in FUSED)


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_both_names_of_experts_are_read_and_lead_to_each_other(family: str) -> None:
    source = last_experts(family)
    folder = last_of(family)[1]
    to_projection = source.renamed(by_projection=True)
    assert source.renamed(by_projection=False) == {}
    assert bool(to_projection) == (family in LEAVES)
    if family in LEAVES:
        assert to_projection[f"{folder}.3.w1"] == f"{folder}.3.gate_proj"
        assert len(to_projection) == 3 * NUM_EXPERTS
        new = [f"{name}.weight" for name in to_projection.values()]
        read = last_experts(family, *new, without=[f"{name}.weight" for name in to_projection])
        assert read.renamed(by_projection=True) == {}
        assert read.renamed(by_projection=False) == {new: old for old, new in to_projection.items()}
        assert read.recipes().keys() == source.recipes().keys()


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [
        ("granitemoe", "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("llama4_text", "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        ("gemma4_text", "experts.gate_up_proj", "experts.down_proj"),
        ("gpt_oss", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ],
)
def test_fused_tensors(family: str, first: str, last: str) -> None:
    layer = last_of(family)[0].rpartition(".mlp")[0] or ".".join(last_of(family)[0].split(".")[:3])
    source = last_experts(family)
    expected = {"gate_up_proj": f"{layer}.{first}", "down_proj": f"{layer}.{last}"}
    if family == "gpt_oss":
        expected |= {"gate_up_proj_bias": f"{layer}.{first}_bias", "down_proj_bias": f"{layer}.{last}_bias"}
    assert source.fused == expected
    assert sorted(source.tensor_names()) == sorted(expected.values())
    for expert in (0, 7):
        assert source.weight_tensor(expert, "gate_proj") == f"{layer}.{first}"
        assert source.weight_tensor(expert, "up_proj") == f"{layer}.{first}"
        assert source.weight_tensor(expert, "down_proj") == f"{layer}.{last}"


def test_routers_and_the_rest_are_renamed_too() -> None:
    assert mapped("mixtral").sources["model.layers.0.mlp.gate.weight"] == "model.layers.0.block_sparse_moe.gate.weight"
    nemotron = mapped("nemotron_h").sources
    assert nemotron["model.layers.1.mixer.gate.weight"] == "backbone.layers.1.mixer.gate.weight"
    bias = "mixer.gate.e_score_correction_bias"
    assert nemotron[f"model.layers.1.{bias}"] == f"backbone.layers.1.{bias}"


def test_recipe_of_single_experts_joins_gate_and_up() -> None:
    recipes = last_experts("mixtral").recipes()
    folder = "model.layers.1.block_sparse_moe.experts.3"
    module = "model.layers.1.mlp.experts.3"
    assert recipes[f"{module}.gate_up_proj.weight"] == (
        TensorPart(name=f"{folder}.w1.weight"),
        TensorPart(name=f"{folder}.w3.weight"),
    )
    assert recipes[f"{module}.down_proj.weight"] == (TensorPart(name=f"{folder}.w2.weight"),)
    assert len(recipes) == 2 * NUM_EXPERTS


def test_recipe_without_a_gate() -> None:
    recipes = last_experts("nemotron_h").recipes()
    module, folder = last_of("nemotron_h")
    assert recipes[f"{module}.5.up_proj.weight"] == (TensorPart(name=f"{folder}.5.up_proj.weight"),)
    assert len(recipes) == 2 * NUM_EXPERTS


@pytest.mark.parametrize(("family", "transposed"), [("granitemoe", False), ("llama4_text", True), ("gpt_oss", True)])
def test_recipe_of_fused_experts_is_one_entry(family: str, transposed: bool) -> None:
    source = last_experts(family)
    recipes = source.recipes()
    for linear in ("gate_up_proj", "down_proj"):
        part = TensorPart(name=source.fused[linear], index=6, transposed=transposed)
        assert recipes[f"{source.module}.6.{linear}.weight"] == (part,)
        if family == "gpt_oss":  # a bias is a row: nothing to transpose
            bias = TensorPart(name=source.fused[f"{linear}_bias"], index=6)
            assert recipes[f"{source.module}.6.{linear}.bias"] == (bias,)
    assert len(recipes) == (4 if family == "gpt_oss" else 2) * NUM_EXPERTS


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_recipes_read_what_transformers_loads(family: str, tmp_path: Any) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    source = last_experts(family)
    fused = model.get_submodule(source.module)
    with linearized(model, {source.module: source.layout}):
        experts = model.get_submodule(source.module)
        fill_module(experts, source.module, CheckpointReader(tmp_path), source.recipes(), CPU)
        require_filled(experts, source.module)
    first = source.layout.first_linear
    for expert in range(NUM_EXPERTS):
        for linear in (first, "down_proj"):
            weight = getattr(fused, linear)[expert]
            expected = weight.t() if source.layout.is_transposed else weight
            assert torch.equal(experts.get_submodule(f"{expert}.{linear}").weight, expected)
            if source.layout.has_bias:
                bias = getattr(fused, f"{linear}_bias")[expert]
                assert torch.equal(experts.get_submodule(f"{expert}.{linear}").bias, bias)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight", "first up_proj of expert 5"),
        ("qwen3_moe", "model.layers.1.mlp.experts.7.down_proj.weight", "first down_proj of expert 7"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w1.weight", "first gate_proj of expert 0"),
        ("nemotron_h", "backbone.layers.4.mixer.experts.2.up_proj.weight", "first up_proj of expert 2"),
    ],
)
def test_a_missing_expert_tensor_is_named(family: str, name: str, message: str) -> None:
    module = last_of(family)[0].replace(".", r"\.")
    with pytest.raises(CheckpointError, match=rf"lacks 1 expert tensors of '{module}', {message}"):
        mapped(family, without={name})


@pytest.mark.parametrize("family", ["granitemoe", "llama4_text", "gemma4_text", "gpt_oss"])
def test_a_missing_fused_tensor_is_named(family: str) -> None:
    source = last_experts(family)
    for leaf, tensor in source.fused.items():
        with pytest.raises(CheckpointError, match=rf"'{source.module}.* incomplete or given twice: '.*\.{leaf}'"):
            mapped(family, without={tensor})


def test_a_missing_router_is_named() -> None:
    name = "model.layers.1.mlp.gate.weight"
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors of Qwen3MoeForCausalLM, first '{name}'"):
        mapped("qwen3_moe", without={name})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.8.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.8.w2.weight"),
        ("nemotron_h", "backbone.layers.1.mixer.experts.11.down_proj.weight"),
    ],
)
def test_an_expert_too_many_is_refused(family: str, name: str) -> None:
    number = name.split(".")[5]
    with pytest.raises(CheckpointError, match=rf"'{name}' is of expert {number}, but '.*experts' has 8 experts"):
        mapped(family, name)


@pytest.mark.parametrize(
    ("family", "name", "twin"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.4.up_proj.weight", "layers.1.mlp.experts.4.up_proj.weight"),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.4.w3.weight",
            "model.layers.0.mlp.experts.4.up_proj.weight",
        ),
    ],
)
def test_two_tensors_for_one_expert_are_refused(family: str, name: str, twin: str) -> None:
    with pytest.raises(CheckpointError, match=r"both belong to expert 4 of 'model\.layers\.\d\.mlp\.experts'") as error:
        mapped(family, twin)
    assert repr(name) in str(error.value)
    assert repr(twin) in str(error.value)


def test_two_fused_tensors_for_one_parameter_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"both belong to parameter 'model\.layers\.1\.experts\.down_proj'"):
        mapped("gemma4_text", "layers.1.experts.down_proj")


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("qwen3_moe", ("gate_up_proj", "down_proj"), "one tensor per expert and fused ones at once"),
        ("qwen3_moe", ("gate_up_proj",), r"'model\.layers\.1\.mlp\.experts\.down_proj'"),
        ("gemma4_text", ("3.up_proj.weight",), "one tensor per expert and fused ones at once"),
    ],
)
def test_fused_and_single_at_once_are_refused(family: str, more: tuple[str, ...], message: str) -> None:
    module = last_of(family)[0]
    with pytest.raises(CheckpointError, match=f"incomplete or given twice: {message}"):
        mapped(family, *(f"{module}.{leaf}" for leaf in more))


def test_a_family_with_single_experts_may_be_fused_on_disk() -> None:
    module = "model.layers.1.mlp.experts"
    without = last_experts("qwen3_moe").tensor_names()
    source = last_experts("qwen3_moe", f"{module}.gate_up_proj", f"{module}.down_proj", without=without)
    assert source.fused == {"gate_up_proj": f"{module}.gate_up_proj", "down_proj": f"{module}.down_proj"}
    assert source.names == last_experts("qwen3_moe").names


@pytest.mark.parametrize("family", ["granitemoe", "llama4_text", "gemma4_text"])
def test_an_exports_names_map_back(family: str) -> None:
    original = mapped(family)
    fused = [name for source in original.experts.values() for name in source.tensor_names()]
    singles = [f"{name}.weight" for source in original.experts.values() for name in source.names.values()]
    again = mapped(family, *singles, without=fused)
    assert again.sources == original.sources
    assert again.unused == ()
    for module, source in again.experts.items():
        assert not source.is_fused
        assert source.names == original.experts[module].names
        assert source.weight_tensor(2, "up_proj") == f"{source.names[2, 'up_proj']}.weight"


def test_experts_that_are_never_single_are_not_read_from_single_tensors() -> None:
    source = last_experts("gpt_oss")
    singles = [f"{name}.weight" for name in source.names.values()]
    with pytest.raises(CheckpointError, match=r"lacks the fused experts tensors of 'model\.layers\.1\.mlp\.experts'"):
        mapped("gpt_oss", *singles, without=source.tensor_names())


@pytest.mark.parametrize(
    ("family", "layer"),
    [("deepseek_v3", "model.layers.3"), ("glm4_moe", "model.layers.2"), ("qwen3_next", "mtp.layers.0")],
)
def test_multi_token_prediction_layers_are_unused(family: str, layer: str) -> None:
    extra = [
        f"{layer}.{leaf}"
        for leaf in (
            "eh_proj.weight",
            "enorm.weight",
            "hnorm.weight",
            "embed_tokens.weight",
            "shared_head.head.weight",
            "self_attn.q_a_proj.weight",
            "mlp.gate.weight",
            "mlp.gate.e_score_correction_bias",
            "mlp.experts.0.gate_proj.weight",
            "mlp.experts.8.up_proj.weight",
            "mlp.experts.1.down_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        )
    ]
    found = mapped(family, *extra)
    assert found.unused == tuple(sorted(extra))
    assert found.sources == mapped(family).sources
    assert found.experts == mapped(family).experts


def test_a_parameter_made_from_several_tensors_is_refused() -> None:
    model = model_of("qwen3_moe")
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.experts\.\w+' is made from several"):
        map_names(model, names_of("qwen3_moe"), {})


@pytest.mark.parametrize("number", ["³", "٣", "x3", "9" * 5000])
def test_an_expert_whose_number_is_no_number_is_refused(number: str) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    odd = name.replace("experts.3", f"experts.{number}")
    with pytest.raises(UnsupportedModelError, match=f"tensor '{odd}' is an expert's, but its name says not"):
        mapped("qwen3_moe", odd, without=(name,))


def test_a_single_expert_of_an_odd_number_is_unused_beside_fused_ones() -> None:
    odd = "model.layers.1.block_sparse_moe.experts.³.w1.weight"
    assert mapped("granitemoe", odd).unused == (odd,)
