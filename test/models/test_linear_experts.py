"""`linear_experts.py`: experts made of Linears give the library's numbers, and refuse what the library would not see.

The oracle is transformers' own fused module under its default implementation, `grouped_mm`.
"""

from __future__ import annotations

import copy
import re
import tempfile
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_moe_models import MOE_FAMILIES, tiny_moe_model
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from autoround_fp8.checkpoint.materialize import fill_module, require_filled
from autoround_fp8.errors import NumericsError, UnsupportedModelError
from autoround_fp8.model_source import open_model
from autoround_fp8.models.families import REFUSED_EXPERTS
from autoround_fp8.models.linear_experts import (
    Expert,
    ExpertsLayout,
    LinearExperts,
    experts_layout,
    find_experts,
    linearized,
)
from autoround_fp8.models.skeleton import build_skeleton

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOP_K = 2
ROUTED = [family for family in MOE_FAMILIES if family != "llama4_text"]


@cache
def made(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, LinearExperts, ExpertsLayout]:
    """A fused module of the last layer with experts, and its twin filled from the checkpoint's tensors."""
    model = tiny_moe_model(family, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        source = open_model(folder)
        skeleton = build_skeleton(source.config, source.tensors.entries, dtype)
        name = list(skeleton.experts)[-1]
        skeleton.linearize()
        experts = skeleton.model.get_submodule(name)
        fill_module(experts, name, source.tensors, skeleton.recipes(), CPU)
    require_filled(experts, name)
    fused = model.get_submodule(name)
    if family != "llama4_text":
        assert fused.config._experts_implementation == "grouped_mm"
    return fused, experts, skeleton.experts[name].layout


def routing(layout: ExpertsLayout, num_tokens: int, dtype: torch.dtype, among: Any = None) -> tuple[torch.Tensor, ...]:
    """Random tokens, `TOP_K` different experts each (of those `among`), and weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, layout.hidden_size, generator=generator).to(dtype)
    experts = torch.tensor(list(range(layout.num_experts) if among is None else among))
    count = min(TOP_K, len(experts))
    order = torch.rand(num_tokens, len(experts), generator=generator).argsort(dim=-1)[:, :count]
    weights = torch.rand(num_tokens, count, generator=generator).to(dtype)
    return hidden, experts[order], weights


def scored(layout: ExpertsLayout, num_tokens: int, dtype: torch.dtype, among: Any = None) -> torch.Tensor:
    """The same for experts that are given every token: zero unless routed."""
    hidden, ids, weights = routing(layout, num_tokens, torch.float32, among)
    scores = torch.zeros(num_tokens, layout.num_experts).scatter(1, ids, weights)
    return (scores.t()[:, :, None] * hidden).reshape(-1, layout.hidden_size).to(dtype)


def inputs(layout: ExpertsLayout, num_tokens: int, dtype: torch.dtype, among: Any = None) -> tuple[torch.Tensor, ...]:
    if layout.is_scored:
        return (scored(layout, num_tokens, dtype, among),)
    return routing(layout, num_tokens, dtype, among)


def assert_same(family: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == expected.dtype
    if family == "llama4_text" and out.dtype == torch.float32:
        # The library multiplies all tokens with each expert, zeros included: other blocks, another order of the sum.
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    elif family == "gpt_oss" and out.dtype == torch.float32:
        # The library's weights are stored the other way round: another order of the sum.
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", list(MOE_FAMILIES))
@torch.no_grad()
def test_every_family_equals_the_librarys_module(family: str, dtype: torch.dtype) -> None:
    fused, experts, layout = made(family, dtype)
    for num_tokens in (1, 3, 40):
        args = inputs(layout, num_tokens, dtype)
        before = [arg.clone() for arg in args]
        out = experts(*args)
        assert float(out.abs().max()) > 0.01
        assert_same(family, out, fused(*args))
        assert all(torch.equal(one, other) for one, other in zip(args, before, strict=True))


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h", "gpt_oss"])
@torch.no_grad()
def test_float32_weights_of_a_16_bit_models_router(family: str) -> None:
    fused, experts, layout = made(family, torch.bfloat16)
    hidden, ids, weights = routing(layout, 40, torch.bfloat16)
    weights = weights.float() + 2**-12
    out = experts(hidden, ids, weights)
    assert out.dtype == torch.bfloat16
    assert_same(family, out, fused(hidden, ids, weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("among", [[0], [7], [0, 7], [3, 4, 6]])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text", "nemotron_h"])
@torch.no_grad()
def test_experts_without_tokens(family: str, among: list[int], dtype: torch.dtype) -> None:
    fused, experts, layout = made(family, dtype)
    args = inputs(layout, 20, dtype, among)
    called = []
    handles = [
        expert.register_forward_pre_hook(lambda _m, args, name=name: called.append((int(name), len(args[0]))))
        for name, expert in experts.named_children()
    ]
    out = experts(*args)
    for handle in handles:
        handle.remove()
    assert_same(family, out, fused(*args))
    assert [index for index, _ in called] == among  # in order, each once, and nothing for the others
    assert sum(count for _, count in called) == 20 * min(TOP_K, len(among))


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
@torch.no_grad()
def test_no_tokens_at_all(family: str) -> None:
    _, experts, layout = made(family)
    args = inputs(layout, 0, torch.float32)
    assert experts(*args).shape == (0, layout.hidden_size)


@torch.no_grad()
def test_tokens_that_no_expert_wants_come_back_as_zeros() -> None:
    _, experts, layout = made("llama4_text")
    assert not experts(torch.zeros(layout.num_experts * 3, layout.hidden_size)).any()


@torch.no_grad()
def test_one_expert_twice_for_a_token_counts_twice() -> None:
    fused, experts, layout = made("qwen3_moe")
    hidden, _, weights = routing(layout, 9, torch.float32)
    ids = torch.full((9, 2), 5)
    assert torch.equal(experts(hidden, ids, weights), fused(hidden, ids, weights))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_ids_of_any_integer_dtype_and_arguments_by_name(dtype: torch.dtype) -> None:
    fused, experts, layout = made("gpt_oss")
    hidden, ids, weights = routing(layout, 12, torch.float32)
    expected = fused(hidden, ids, weights)
    assert_same("gpt_oss", experts(hidden, ids.to(dtype), weights), expected)
    assert_same("gpt_oss", experts(hidden, router_indices=ids.to(dtype), routing_weights=weights), expected)


@pytest.mark.parametrize("bad", [-1, 8, 11])
@pytest.mark.parametrize("place", [(0, 0), (6, 1)])
@torch.no_grad()
def test_a_bad_expert_id_is_named(bad: int, place: tuple[int, int]) -> None:
    _, experts, layout = made("mixtral")
    hidden, ids, weights = routing(layout, 7, torch.float32)
    ids[place] = bad
    message = rf"router of 'model\.layers\.1\.mlp\.experts' chose expert {bad}; there are 8, numbered from 0"
    with pytest.raises(NumericsError, match=message):
        experts(hidden, ids, weights)


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_names_and_shapes_of_the_parameters(family: str) -> None:
    _, experts, layout = made(family)
    first = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    width = layout.intermediate_size
    rows = width if family == "nemotron_h" else 2 * width
    shapes = {f"{first}.weight": (rows, 64), "down_proj.weight": (64, width)}
    if family == "gpt_oss":
        shapes |= {f"{first}.bias": (rows,), "down_proj.bias": (64,)}
    found = {name: tuple(tensor.shape) for name, tensor in experts.state_dict().items()}
    assert found == {f"{i}.{leaf}": shape for i in range(8) for leaf, shape in shapes.items()}
    assert not any(parameter.requires_grad for parameter in experts.parameters())
    assert not experts.training


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text", "nemotron_h"])
@torch.no_grad()
def test_a_deep_copy_is_equal_and_apart(family: str) -> None:
    _, experts, layout = made(family)
    args = inputs(layout, 10, torch.float32)
    expected = experts(*args)
    twin = copy.deepcopy(experts)
    assert torch.equal(twin(*args), expected)
    for parameter in twin.parameters():
        parameter.mul_(2)
    assert not torch.equal(twin(*args), expected)
    assert torch.equal(experts(*args), expected)


@torch.no_grad()
def test_gate_and_up_can_be_put_one_by_one() -> None:
    _, experts, layout = made("qwen3_moe")
    args = routing(layout, 10, torch.float32)
    expected = experts(*args)
    twin = copy.deepcopy(experts)
    for index in range(layout.num_experts):
        expert = twin.get_submodule(str(index))
        assert isinstance(expert, Expert)
        joined = expert.get_submodule("gate_up_proj").weight
        for projection in ("up_proj", "gate_proj"):
            first, end = layout.rows_of(projection)
            part = nn.Linear(layout.hidden_size, layout.intermediate_size, bias=False)
            part.weight.copy_(joined[first:end])
            expert.put(projection, part)
        assert sorted(name for name, _ in expert.named_children()) == ["down_proj", "gate_proj", "up_proj"]
        assert [name for name, _ in expert.named_children()][-1] == "down_proj"
    torch.testing.assert_close(twin(*args), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_projection_that_is_put_is_the_one_that_runs() -> None:
    for family, projections in (("nemotron_h", ("up_proj", "down_proj")), ("mixtral", ("down_proj",))):
        _, experts, layout = made(family)
        twin = copy.deepcopy(experts)
        for projection in projections:
            zero = nn.Linear(*layout.shape_of(projection)[::-1], bias=False)
            zero.weight.zero_()
            for index in range(layout.num_experts):
                twin.get_submodule(str(index)).put(projection, zero)
        assert not twin(*routing(layout, 10, torch.float32)).any()


def hollow(family: str) -> Any:
    with torch.device("meta"):
        return tiny_moe_model(family)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gemma4_text", "llama4_text"])
def test_the_fused_modules_are_put_back(family: str, fails: bool) -> None:
    model = hollow(family)
    layouts = find_experts(model)
    before = list(model.named_modules())
    names = list(model.state_dict())
    try:
        with linearized(model, layouts):
            assert {type(model.get_submodule(name)) for name in layouts} == {LinearExperts}
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    after = list(model.named_modules())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(one is other for (_, one), (_, other) in zip(after, before, strict=True))
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_layouts_are_found_in_every_layer_with_experts(family: str) -> None:
    layouts = find_experts(hollow(family))
    count = {"qwen2_moe": 1, "deepseek_v2": 1, "deepseek_v32": 1, "glm4_moe": 1, "dots1": 1}.get(family, 2)
    assert len(layouts) == count
    for layout in layouts.values():
        assert (layout.num_experts, layout.hidden_size, layout.intermediate_size) == (8, 64, 48)
        assert layout.has_gate == (family != "nemotron_h")
        assert layout.has_bias == (family == "gpt_oss")
        assert layout.is_transposed == (family in ("gpt_oss", "llama4_text"))
        assert layout.is_scored == (family == "llama4_text")
        assert layout.can_be_quantized == (family != "gpt_oss")


class Parent(nn.Module):
    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


@pytest.mark.parametrize("name", list(REFUSED_EXPERTS))
def test_experts_of_a_form_that_is_not_known_are_refused_by_name(name: str) -> None:
    strange = type(name, (nn.Module,), {})()
    with pytest.raises(UnsupportedModelError, match=re.escape(f"{name!r} are not supported: {REFUSED_EXPERTS[name]}")):
        find_experts(Parent(mlp=strange))


class Stacked(nn.Module):
    """Not the library's: one 3-D parameter and no decorator."""

    def __init__(self, leaf: str = "gate_up_proj"):
        super().__init__()
        self.register_parameter(leaf, nn.Parameter(torch.zeros(4, 8, 8)))


@pytest.mark.parametrize("leaf", ["gate_up_proj", "weight"])
def test_stacked_experts_without_the_decorator_are_refused(leaf: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"'mlp\.experts' \(Stacked\) keeps experts in '{leaf}'"):
        find_experts(Parent(mlp=Parent(experts=Stacked(leaf))))


def test_other_3d_parameters_are_no_experts() -> None:
    assert find_experts(Parent(conv=nn.Conv1d(4, 4, 3), table=Stacked())) == {}


def decorated(**options: Any) -> nn.Module:
    """A module of the library's kind with four experts of width 8, made by its decorator."""

    class TinyExperts(nn.Module):
        def __init__(self, config: Any):
            super().__init__()
            self.num_experts = 4
            torch.manual_seed(0)
            self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 16) * 0.2, requires_grad=False)
            self.down_proj = nn.Parameter(torch.randn(4, 16, 8) * 0.2, requires_grad=False)
            self.act_fn = ACT2FN["silu"]
            self.post_expert_norm = nn.RMSNorm(16)

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            raise NotImplementedError

    config = SimpleNamespace(_experts_implementation="grouped_mm")
    return use_experts_implementation(**options)(TinyExperts)(config)


@pytest.mark.parametrize("has_norm", [False, True])
@torch.no_grad()
def test_a_norm_after_each_expert(has_norm: bool) -> None:
    fused = decorated(has_post_expert_norm=has_norm)
    layout = experts_layout(fused)
    assert layout is not None
    experts = LinearExperts(fused, layout, "experts")
    for index in range(4):
        expert = experts.get_submodule(str(index))
        expert.gate_up_proj.weight = nn.Parameter(fused.gate_up_proj[index], requires_grad=False)
        expert.down_proj.weight = nn.Parameter(fused.down_proj[index], requires_grad=False)
    assert ("post_expert_norm.weight" in experts.state_dict()) == has_norm
    args = routing(layout, 11, torch.float32)
    assert torch.equal(experts(*args), fused(*args))


def test_decorated_experts_of_an_odd_shape_are_refused() -> None:
    fused = decorated()
    fused.gate_up_proj = nn.Parameter(torch.zeros(4, 15, 16))
    with pytest.raises(UnsupportedModelError, match=r"first projection is \[4, 15, 16\], expected \[4, 16, 16\]"):
        experts_layout(fused)
    del fused.gate_up_proj
    with pytest.raises(UnsupportedModelError, match="'TinyExperts' have no 3-D gate_up_proj"):
        experts_layout(fused)
