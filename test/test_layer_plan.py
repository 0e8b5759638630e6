"""What each linear layer of an MoE block gets, in the plan and in the exported folder: faults C5, C7, C10, C11, F8."""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from make_block_fp8 import make_block_fp8
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, tiny_model
from tiny_moe_models import FP8_FAMILIES, MOE_FAMILIES, save_tiny_moe_model, tiny_moe_model
from transformers import AutoConfig, AutoModelForCausalLM

from autoround_fp8.autoround import parse_names
from autoround_fp8.checkpoint.reader import CheckpointReader, InMemorySource
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.export import MemorySink
from autoround_fp8.formats.base import ParsedQuantization
from autoround_fp8.formats.table import get_format, parse_quantization
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.layer_plan import LayerPlanner, LinearPlan
from autoround_fp8.model_source import open_model
from autoround_fp8.models.skeleton import Skeleton, build_skeleton
from autoround_fp8.numerics.granularity import PER_CHANNEL, PER_TENSOR
from autoround_fp8.pipeline import compress, export_run, prepare
from autoround_fp8.plan import QuantizationPlan, make_plan
from autoround_fp8.schemes import UNQUANTIZED, SchemeResolver, matches_layer, parse_layer_config, parse_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (4, 24), generator=torch.Generator().manual_seed(5))
NUM_EXPERTS = 8
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
FIRST = ("gate_proj", "up_proj", "w1", "w3")
# Matrices that stay in 16 bit, by the last layer that has them; every family has one router per MoE layer.
ROUTERS = {
    "mixtral": "model.layers.1.block_sparse_moe.gate",
    "minimax_m2": "model.layers.1.block_sparse_moe.gate",
    "phimoe": "model.layers.1.block_sparse_moe.gate",
    "granitemoe": "model.layers.1.block_sparse_moe.router.layer",
    "deepseek_v3": "model.layers.2.mlp.gate",
    "gpt_oss": "model.layers.1.mlp.router",
    "llama4_text": "model.layers.2.feed_forward.router",
    "gemma4_text": "model.layers.1.router.proj",
    "nemotron_h": "backbone.layers.4.mixer.gate",
}
OTHERS = {
    "qwen2_moe": "model.layers.1.mlp.shared_expert_gate",
    "qwen3_next": "model.layers.1.mlp.shared_expert_gate",
    "deepseek_v32": "model.layers.0.self_attn.indexer.weights_proj",
    "gpt_oss": "model.layers.1.mlp.experts",
}


def plan_of(model: Any, ignore: str = "", layer_config: Any = None, **settings: Any) -> QuantizationPlan:
    source = open_model(model)
    config = QuantizeConfig(
        ignore_layers=parse_names(ignore), layer_config=parse_layer_config(layer_config), **settings
    )
    skeleton = build_skeleton(source.config, source.tensors.entries, torch.float32)
    return make_plan(config, skeleton, source.tensors, get_format("fp8_static"))


@cache
def model_of(family: str) -> Any:
    return tiny_moe_model(family)


def schemes_of(plan: QuantizationPlan) -> dict[str, int | None]:
    """Checkpoint name -> granularity of the weight, None = 16 bit."""
    return {x.fqn: x.scheme.group_size if x.scheme.is_quantized else None for block in plan.blocks for x in block}


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    # A command line run earlier in the process may have kept the messages to itself.
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def planned(family: str, block: int, *, shared: bool = True, scheme: str = "FP8_STATIC") -> dict[str, LinearPlan]:
    source = open_model(model_of(family))
    skeleton: Skeleton = build_skeleton(source.config, source.tensors.entries, torch.float32)
    planner = LayerPlanner(skeleton, source.tensors, SchemeResolver(parse_scheme(scheme)), shared_expert_scale=shared)
    return {linear.fqn: linear for linear in planner.plan_block(skeleton.block_names[block])}


def planned_output(model: Any, scheme: str = "FP8_STATIC") -> LinearPlan:
    source = open_model(model)
    skeleton: Skeleton = build_skeleton(source.config, source.tensors.entries, torch.float32)
    return LayerPlanner(skeleton, source.tensors, SchemeResolver(parse_scheme(scheme))).plan_output_layer()


def test_the_output_layer_is_a_layer_of_its_own() -> None:
    plan = planned_output(tiny_model("gpt_neox"), "FP8_STATIC_TENSOR")
    assert (plan.module, plan.fqn, plan.shape) == ("lm_head", "embed_out", (VOCAB_SIZE, 64))
    assert (plan.group, plan.fused) == (("lm_head",), ("embed_out",))
    assert plan.scheme == parse_scheme("FP8_STATIC_TENSOR")


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_a_tied_output_layer_is_refused_with_the_way_out(family: str) -> None:
    with pytest.raises(ConfigError, match=r"tied to the input embedding.*leave out quant_lm_head, or first save the"):
        planned_output(tiny_model(family, tie_word_embeddings=True))


def test_an_output_layer_that_is_too_small_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no output layer that could be FP8"):
        planned_output(tiny_model("llama", vocab_size=15))


@pytest.mark.parametrize("shared", [True, False])
def test_one_experts_layer_in_full(shared: bool) -> None:
    plans = planned("mixtral", 1, shared=shared)
    folder, module = "model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.experts"
    assert len([fqn for fqn in plans if fqn.startswith(folder)]) == 3 * NUM_EXPERTS
    up, down = plans[f"{folder}.5.w3"], plans[f"{folder}.5.w2"]
    first_siblings = tuple(f"{module}.{i}.gate_up_proj" for i in range(NUM_EXPERTS))
    assert up.module == down.module.replace("down_proj", "gate_up_proj") == f"{module}.5.gate_up_proj"
    assert (up.shape, down.shape) == ((48, 64), (64, 48))
    assert (plans[f"{folder}.5.w1"].rows, up.rows, down.rows) == ((0, 48), (48, 96), None)
    assert up.fused == plans[f"{folder}.5.w1"].fused == (f"{folder}.5.w1", f"{folder}.5.w3")
    assert down.fused == (f"{folder}.5.w2",)
    assert up.experts == down.experts == module
    assert up.siblings == first_siblings
    assert up.group == (first_siblings if shared else (f"{module}.5.gate_up_proj",))
    assert down.group == (down.siblings if shared else (f"{module}.5.down_proj",))
    q = plans["model.layers.1.self_attn.q_proj"]
    assert (q.experts, q.siblings, q.rows, len(q.group)) == ("", (), None, 3)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    save_tiny_moe_model(tmp_path, "nemotron_h", with_tokenizer=False)
    plan = plan_of(tmp_path)
    up = next(x for x in plan.quantized if x.fqn == "backbone.layers.1.mixer.experts.2.up_proj")
    assert up.fused == (up.fqn,)
    assert up.rows is None
    assert up.module == "model.layers.1.mixer.experts.2.up_proj"


@pytest.mark.parametrize("family", [family for family in MOE_FAMILIES if family != "nemotron_h"])
def test_experts_per_tensor_and_everything_else_per_channel(family: str) -> None:
    found = schemes_of(plan_of(model_of(family)))
    experts = {group for fqn, group in found.items() if EXPERT.fullmatch(fqn)}
    others = {group for fqn, group in found.items() if not EXPERT.fullmatch(fqn)}
    assert experts == ({None} if family == "gpt_oss" else {PER_TENSOR})
    assert PER_CHANNEL in others
    assert PER_TENSOR not in others
    for fqn, group in found.items():
        if re.search(r"\.(o_proj|shared_experts?\.\w+)$", fqn):
            assert group == PER_CHANNEL, fqn
        if "shared_expert_gate" in fqn or "weights_proj" in fqn:
            assert group is None, fqn


@pytest.mark.parametrize("scheme", ["FP8_STATIC_TENSOR", "FP8_STATIC"])
def test_one_scheme_for_all_needs_no_exceptions(scheme: str) -> None:
    plan = plan_of(model_of("mixtral"), scheme=parse_scheme(scheme))
    experts = {fqn for fqn, other in plan.exceptions.items() if other.is_quantized}
    pattern = r"model\.layers\.{}\.block_sparse_moe\.experts\.\d+\.(down_proj|gate_proj|up_proj)$"
    expected = {pattern.format(i) for i in (0, 1)} if scheme == "FP8_STATIC" else set()
    assert experts == expected


def test_layer_config_gives_one_expert_another_scheme() -> None:
    name = "model.layers.0.mlp.experts.3"
    plan = plan_of(model_of("qwen3_moe"), layer_config={name: "FP8_STATIC"})
    found = schemes_of(plan)
    assert {fqn for fqn, group in found.items() if EXPERT.fullmatch(fqn) and group == PER_CHANNEL} == {
        f"{name}.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    # The other experts of that layer can be told apart only by their names.
    named = {fqn for fqn, other in plan.exceptions.items() if other.is_quantized and "layers.0" in fqn}
    assert named == {fqn for fqn in found if fqn.startswith("model.layers.0.mlp.experts.") and name + "." not in fqn}


def test_layer_config_for_all_experts_and_all_the_rest() -> None:
    plan = plan_of(model_of("qwen3_moe"), layer_config={"experts": "FP8_STATIC", "self_attn": "FP8_STATIC_TENSOR"})
    found = schemes_of(plan)
    assert {group for fqn, group in found.items() if EXPERT.fullmatch(fqn)} == {PER_CHANNEL}
    assert {group for fqn, group in found.items() if "self_attn" in fqn} == {PER_TENSOR}
    assert {fqn for fqn, other in plan.exceptions.items() if "experts" in fqn} == set()


def test_layer_config_for_one_of_gate_and_up_is_refused() -> None:
    name = "model.layers.0.mlp.experts.3.gate_proj"
    with pytest.raises(ConfigError, match=rf"{name}.*experts\.3\.up_proj different schemes"):
        plan_of(model_of("qwen3_moe"), layer_config={name: "FP8_STATIC"})


@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts"),
        ("gemma4_text", "layers.1.experts"),
        ("granitemoe", "model.layers.1.block_sparse_moe.experts"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts"),
    ],
)
def test_one_layers_experts_can_be_ignored(family: str, pattern: str, warnings_of: pytest.LogCaptureFixture) -> None:
    plan = plan_of(model_of(family), pattern)
    found = schemes_of(plan)
    for fqn, group in found.items():
        if EXPERT.fullmatch(fqn):
            assert group == (None if ".layers.1." in fqn else PER_TENSOR)
    assert not warnings_of.records
    kept = [pattern for pattern, other in plan.exceptions.items() if not other.is_quantized]
    experts = [fqn for fqn in found if EXPERT.fullmatch(fqn) and ".layers.1." in fqn]
    export = plan.exports[0]
    for fqn in experts:
        assert any(matches_layer(pattern, export.name_of(fqn)) for pattern in kept)
    # What stays in 16 bit is copied, and called as the format calls it.
    source = open_model(model_of(family)).tensors.entries
    layer = {name for name in source if ".layers.1." in name and "expert" in name.replace("_linear", "_experts")}
    copied = {tensor.source: name for name, tensor in plan.layout.tensors.items()}
    for name in layer:
        stem, _, leaf = name.rpartition(".")
        assert copied[name] == f"{export.name_of(stem)}.{leaf}"
    assert not [n for n in plan.layout.tensors if ".layers.1." in n and "experts." in n and "scale" in n]


def test_the_models_own_name_of_experts_is_honoured_or_warned_about(warnings_of: pytest.LogCaptureFixture) -> None:
    # transformers calls mixtral's `block_sparse_moe` `mlp`: a user who prints the model will write that.
    found = schemes_of(plan_of(model_of("mixtral"), "model.layers.1.mlp.experts"))
    kept = {fqn for fqn, group in found.items() if EXPERT.fullmatch(fqn) and group is None}
    assert len(kept) == 3 * NUM_EXPERTS or "model.layers.1.mlp.experts" in warnings_of.text


def test_ignoring_one_experts_gate_keeps_its_up_too(warnings_of: pytest.LogCaptureFixture) -> None:
    name = "model.layers.0.mlp.experts.3"
    plan = plan_of(model_of("qwen3_moe"), f"{name}.gate_proj")
    kept = {fqn for fqn, group in schemes_of(plan).items() if group is None}
    assert kept == {f"{name}.gate_proj", f"{name}.up_proj"}
    assert f"{name}.up_proj stays in 16 bit too: engines fuse it with {name}.gate_proj" in warnings_of.text
    assert len(warnings_of.records) == 2
    assert "the experts of model.layers.0.mlp.experts get different schemes" in warnings_of.text
    assert plan.layout.tensors[f"{name}.up_proj.weight"].dtype == "BF16"
    assert plan.layout.tensors[f"{name}.down_proj.weight"].dtype == "F8_E4M3"


def test_a_layer_without_v_proj_widens_to_what_it_has(warnings_of: pytest.LogCaptureFixture) -> None:
    found = schemes_of(plan_of(model_of("gemma4_text"), "k_proj"))
    kept = {fqn for fqn, group in found.items() if group is None and ".self_attn." in fqn}
    # Blocks of full attention use the keys as values.
    parts = [(0, "q_proj"), (0, "k_proj"), (0, "v_proj"), (1, "q_proj"), (1, "k_proj")]
    assert kept == {f"model.layers.{layer}.self_attn.{leaf}" for layer, leaf in parts}
    assert "model.layers.1.self_attn.q_proj stays in 16 bit too" in warnings_of.text


@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        ("granitemoe", "model.layers.0.block_sparse_moe.experts.3"),
        ("granitemoe", "gate_proj"),
        ("llama4_text", "model.layers.1.feed_forward.experts.0.up_proj"),
        ("gemma4_text", "experts.7"),
    ],
)
def test_ignoring_a_part_of_fused_experts_is_refused(family: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"only some experts of 'model\.layers\.\d.* ignore all of them or none"):
        plan_of(model_of(family), pattern)


def test_ignoring_all_experts_leaves_the_rest() -> None:
    plan = plan_of(model_of("llama4_text"), "experts")
    assert not [x for x in plan.quantized if EXPERT.fullmatch(x.fqn)]
    assert "model.layers.1.feed_forward.experts.gate_up_proj" in plan.layout.tensors
    assert len(plan.quantized) == len(plan_of(model_of("llama4_text")).quantized) - 2 * 3 * NUM_EXPERTS


@cache
def exported(family: str, base: Path, **settings: Any) -> tuple[Path, Path, CheckpointReader]:
    source = base / family
    if not source.exists():
        save_tiny_moe_model(source, family, with_tokenizer=False)
    config = QuantizeConfig(dataset=ROWS, device="cpu", calibration_dtype="float32", **settings)
    folder = base / "-".join([family, *map(str, settings.values()), "out"])
    export_run(prepare(config, open_model(source)), folder)
    return source, folder, CheckpointReader(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def block_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def parsed(folder: Path) -> ParsedQuantization:
    return parse_quantization(block_of(folder))[1]


def stems(reader: CheckpointReader) -> dict[str, bool]:
    """Name of every layer with a matrix (fused experts: of the tensor) -> whether it has a scale."""
    return {
        name.removesuffix(".weight"): f"{name.removesuffix('.weight')}.weight_scale" in reader.entries
        for name, entry in reader.entries.items()
        if len(entry.shape) >= 2
    }


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_what_has_no_scale_is_listed_and_what_is_listed_has_none(family: str, base: Path) -> None:
    _, folder, reader = exported(family, base)
    quantization, found = parsed(folder), stems(reader)
    block = block_of(folder)
    ignored = [pattern for pattern, fields in block.get("extra_config", {}).items() if fields.get("bits") == 16]
    inside = tuple(f"{prefix}." for prefix in block["block_name_to_quantize"].split(","))
    for stem, has_scale in found.items():
        assert quantization.resolve(stem).is_quantized == has_scale, stem
        listed = any(matches_layer(pattern, stem) for pattern in ignored)
        assert listed == (not has_scale and stem.startswith(inside)), stem
    # Experts that are one tensor are listed by the tensor and, for engines that name them, one by one.
    fused = [stem.removesuffix(".down_proj") for stem in found if stem.endswith(".experts.down_proj")]
    for pattern in ignored:
        assert any(matches_layer(pattern, name) for name in [*found, *(f"{x}.0.down_proj" for x in fused)]), pattern
    assert any(found.values())


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_scales_come_with_codes_and_only_with_them(family: str, base: Path) -> None:
    _, _, reader = exported(family, base)
    for name, entry in reader.entries.items():
        stem, _, leaf = name.rpartition(".")
        if entry.dtype == "F8_E4M3":
            assert leaf == "weight"
            assert {f"{stem}.weight_scale", f"{stem}.input_scale"} <= set(reader.entries)
        if leaf in ("weight_scale", "input_scale"):
            assert entry.dtype == "F32"
            assert reader.entries[f"{stem}.weight"].dtype == "F8_E4M3"


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_routers_are_listed_by_the_checkpoints_names_and_untouched(family: str, base: Path) -> None:
    source, folder, reader = exported(family, base)
    original = CheckpointReader(source)
    router = ROUTERS.get(family, "model.layers.1.mlp.gate")
    names = [
        f"{router}.weight",
        *([f"{OTHERS[family]}.weight"] if f"{OTHERS.get(family)}.weight" in reader.names else []),
    ]
    for entry in (router, OTHERS.get(family, router)):
        assert block_of(folder)["extra_config"][entry] == {
            "act_bits": 16,
            "act_data_type": "float",
            "bits": 16,
            "data_type": "float",
        }
    biases = [name for name in original.names if name.endswith(("e_score_correction_bias", "router.bias"))]
    assert bool(biases) == (
        family in ("deepseek_v3", "deepseek_v32", "glm4_moe", "dots1", "minimax_m2", "nemotron_h", "gpt_oss")
    )
    for name in [*names, *biases]:
        assert b"".join(reader.chunks(name)) == b"".join(original.chunks(name))
        assert reader.entries[name].dtype == original.entries[name].dtype
    assert not [name for name in reader.names if name.startswith(f"{router}.") and "scale" in name.split(".")[-1]]


@pytest.mark.parametrize("family", [family for family in MOE_FAMILIES if family != "gpt_oss"])
def test_all_experts_become_fp8(family: str, base: Path) -> None:
    source, _, reader = exported(family, base)
    experts = {m[0]: m for name in reader.names if (m := EXPERT.fullmatch(name.removesuffix(".weight")))}
    layers = {m[1] for m in experts.values()}
    projections = 2 if family == "nemotron_h" else 3
    assert len(experts) == len(layers) * NUM_EXPERTS * projections
    assert {reader.entries[f"{stem}.weight"].dtype for stem in experts} == {"F8_E4M3"}
    for stem in experts:  # one scale, which fp8_static repeats for every channel
        assert reader.entries[f"{stem}.weight_scale"].shape == reader.entries[f"{stem}.weight"].shape[:1]
        assert len(reader.read(f"{stem}.weight_scale").unique()) == 1
    sizes = {True: 0, False: 0}
    for name, entry in reader.entries.items():
        if len(entry.shape) == 2 and ".layers." in name:
            sizes[entry.dtype == "F8_E4M3"] += entry.shape[0] * entry.shape[1]
    assert sizes[True] / sum(sizes.values()) > 0.9
    left = set(reader.names) & set(CheckpointReader(source).names)
    assert not [name for name in left if re.search(r"gate_up_proj|(input|output)_linear|\.experts\.down_proj$", name)]


def test_experts_with_biases_stay_whole(base: Path) -> None:
    source, _, reader = exported("gpt_oss", base)
    original = CheckpointReader(source)
    experts = [name for name in original.names if ".experts." in name]
    assert len(experts) == 8
    for name in experts:
        assert b"".join(reader.chunks(name)) == b"".join(original.chunks(name))
    assert reader.entries["model.layers.0.self_attn.q_proj.weight"].dtype == "F8_E4M3"


def expert_scales(reader: CheckpointReader, leaf: str) -> dict[str, dict[tuple[int, str], float]]:
    """Experts folder -> (expert, projection) -> scale."""
    found: dict[str, dict[tuple[int, str], float]] = {}
    for name in reader.names:
        match = EXPERT.fullmatch(name.removesuffix(f".{leaf}"))
        if match and name.endswith(leaf):
            (scale,) = reader.read(name).unique().tolist()
            found.setdefault(match[1], {})[int(match[2]), match[3]] = scale
    return found


QUANTIZED_EXPERTS = [family for family in MOE_FAMILIES if family != "gpt_oss"]


@pytest.mark.parametrize("family", QUANTIZED_EXPERTS)
def test_gate_and_up_of_an_expert_share_both_scales(family: str, base: Path) -> None:
    _, _, reader = exported(family, base)
    for leaf in ("input_scale", "weight_scale"):
        for scales in expert_scales(reader, leaf).values():
            for expert in range(NUM_EXPERTS):
                first = {scale for (e, p), scale in scales.items() if e == expert and p in FIRST}
                assert len(first) == 1
    weight_scales = next(iter(expert_scales(reader, "weight_scale").values()))
    assert len(set(weight_scales.values())) > NUM_EXPERTS  # every expert has its own, for gate and up, and for down


@pytest.mark.parametrize("family", QUANTIZED_EXPERTS)
def test_all_experts_of_a_layer_share_their_input_scales(family: str, base: Path) -> None:
    _, _, reader = exported(family, base)
    layers = expert_scales(reader, "input_scale")
    first = [{scale for (_, p), scale in scales.items() if p in FIRST} for scales in layers.values()]
    last = [{scale for (_, p), scale in scales.items() if p not in FIRST} for scales in layers.values()]
    assert [len(x) for x in first] == [len(x) for x in last] == [1] * len(layers)
    assert first != last


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe", "llama4_text", "nemotron_h"])
def test_each_expert_may_have_its_own_input_scales(family: str, base: Path) -> None:
    _, _, shared = exported(family, base, algorithm="rtn")
    _, _, reader = exported(family, base, algorithm="rtn", moe_input_scale="per_expert")
    for folder, scales in expert_scales(reader, "input_scale").items():
        for expert in range(NUM_EXPERTS):
            assert len({scale for (e, p), scale in scales.items() if e == expert and p in FIRST}) == 1
        downs = {e: scale for (e, p), scale in scales.items() if p not in FIRST}
        assert len(set(downs.values())) > NUM_EXPERTS // 2
        assert len({scale for (_, p), scale in scales.items() if p in FIRST}) > 1
        common = expert_scales(shared, "input_scale")[folder]
        assert {common[key] for key in common if key[1] not in FIRST} == {max(downs.values())}
    assert expert_scales(reader, "weight_scale") == expert_scales(shared, "weight_scale")


def test_mixed_expert_schemes_survive_the_config(tmp_path: Path) -> None:
    save_tiny_moe_model(tmp_path / "m", "qwen3_moe", with_tokenizer=False)
    run = prepare(
        QuantizeConfig(
            dataset=ROWS,
            device="cpu",
            layer_config=parse_layer_config({"model.layers.0.mlp.experts.3": "FP8_STATIC"}),
            ignore_layers=("model.layers.1.mlp.experts", "model.layers.0.mlp.experts.5.gate_proj"),
        ),
        open_model(tmp_path / "m"),
    )
    export_run(run, tmp_path / "out")
    quantization = parsed(tmp_path / "out")
    for linear in (x for block in run.plan.blocks for x in block):
        assert quantization.resolve(linear.fqn) == linear.scheme, linear.fqn
    original, reader = CheckpointReader(tmp_path / "m"), CheckpointReader(tmp_path / "out")
    kept = [name for name in original.names if "layers.1.mlp.experts" in name]
    assert len(kept) == 3 * NUM_EXPERTS
    for name in kept:
        assert b"".join(reader.chunks(name)) == b"".join(original.chunks(name))


def native(base: Path, family: str, *skip: str) -> Path:
    target = base / f"{family}-native-{len(skip)}"
    if not target.exists():
        save_tiny_moe_model(base / f"{family}-native-source-{len(skip)}", family, with_tokenizer=False)
        make_block_fp8(base / f"{family}-native-source-{len(skip)}", target, skip=skip)
    return target


@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_a_native_fp8_models_16_bit_layers_stay_so(family: str, base: Path) -> None:
    folder = native(base, family)
    stored = CheckpointReader(folder).entries
    plan = plan_of(folder)
    found = schemes_of(plan)
    assert {stored[f"{fqn}.weight"].dtype for fqn, group in found.items() if group is not None} == {"F8_E4M3"}
    # Nothing that would be quantised otherwise is stored in 16 bit here.
    assert {fqn for fqn, group in found.items() if group is not None} == {
        fqn for fqn, group in schemes_of(plan_of(model_of(family))).items() if group is not None
    }


def test_layers_that_were_spared_stay_in_16_bit(base: Path, warnings_of: pytest.LogCaptureFixture) -> None:
    skip = (r"layers\.0\.self_attn\.o_proj", r"layers\.1\.mlp\.experts\.2\.", r"layers\.1\.self_attn\.k_proj")
    plan = plan_of(native(base, "qwen3_moe", *skip))
    kept = {fqn for fqn, group in schemes_of(plan).items() if group is None}
    assert kept == {
        "model.layers.0.self_attn.o_proj",
        *(f"model.layers.1.mlp.experts.2.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")),
        *(f"model.layers.1.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")),
    }
    assert kept <= {fqn for fqn, scheme in plan.exceptions.items() if scheme == UNQUANTIZED}
    assert "model.layers.1.self_attn.q_proj stays in 16 bit too" in warnings_of.text
    assert plan.layout.tensors["model.layers.1.self_attn.q_proj.weight"].dtype == "BF16"
    assert plan.layout.tensors["model.layers.1.mlp.experts.2.up_proj.weight"].dtype == "BF16"
    assert not [name for name in plan.layout.tensors if name.endswith("_scale_inv")]


@pytest.mark.parametrize("shape", [(48, 32), (47, 64)])
def test_an_expert_of_another_shape_is_refused_by_name(shape: tuple[int, int]) -> None:
    model = model_of("qwen3_moe")
    source = open_model(model)
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    skeleton = build_skeleton(source.config, source.tensors.entries, torch.float32)
    tensors = {n: source.tensors.read(n) for n in source.tensors.entries} | {name: torch.zeros(shape)}
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[{shape[0]}, {shape[1]}\], .* expects \[48, 64\]"):
        make_plan(QuantizeConfig(), skeleton, InMemorySource(tensors), get_format("fp8_static"))


def test_experts_per_channel_are_warned_about_once_per_layer(warnings_of: pytest.LogCaptureFixture) -> None:
    plan_of(model_of("qwen3_moe"), layer_config={"experts": "FP8_STATIC"})
    text = "get a scale per channel; with static inputs engines take only one per tensor"
    assert [record.message for record in warnings_of.records] == [
        f"the experts of model.layers.{layer}.mlp.experts {text}" for layer in range(2)
    ]


@pytest.mark.parametrize(("family", "leaf"), [("granitemoe", "output_linear.weight"), ("gpt_oss", "gate_up_proj_bias")])
@pytest.mark.parametrize("change", ["one more", "one less"])
def test_fused_experts_of_another_number_are_refused_by_the_plan(
    tmp_path: Path, family: str, leaf: str, change: str
) -> None:
    save_tiny_moe_model(tmp_path, family, with_tokenizer=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(leaf))
    tensors[name] = torch.cat([tensors[name]] * 2)[: NUM_EXPERTS + (1 if change == "one more" else -1)].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape .*, the model expects \[8, "):
        plan_of(tmp_path)


def test_an_ignored_expert_still_counts_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    config = QuantizeConfig(
        dataset=ROWS, device="cpu", ignore_layers=("experts.3",), unseen_experts="error", calibration_dtype="float32"
    )
    result = compress(prepare(config, open_model(model_of("qwen3_moe"))), MemorySink())
    for block in result.blocks:
        (tokens,) = block.expert_tokens.values()
        assert len(tokens) == NUM_EXPERTS
        assert min(tokens) > 0


def test_a_bare_matrix_beside_fp8_layers_is_listed_by_its_own_name(tmp_path: Path) -> None:
    # Jamba's `mamba` has FP8 linears and the 2-D parameter `mamba.A_log`: listing `mamba` would exclude the linears.
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": VOCAB_SIZE}
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "mamba_dt_rank": 8}
    config = AutoConfig.for_model("jamba", **sizes, **periods, **heads, use_mamba_kernels=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    run = prepare(QuantizeConfig(dataset=ROWS, device="cpu"), open_model(tmp_path / "source"))
    assert not run.plan.exceptions["model.layers.0.mamba.A_log"].is_quantized
    assert "model.layers.0.mamba" not in run.plan.exceptions
    model = load_quantized_model(export_run(run, tmp_path / "out").folder)
    assert type(model.model.layers[0].mamba.in_proj).__name__ == "WeightFP8ActFP8StaticQuantLinear"


def test_a_config_that_would_say_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoround_fp8.plan._copied_matrices", lambda *args: ["model.layers.0.self_attn"])
    with pytest.raises(UnsupportedModelError, match=r"cannot describe layer 'model\.layers\.0\.self_attn\.q_proj'"):
        plan_of(model_of("qwen3_moe"))


def test_tensors_without_a_place_are_reported(tmp_path: Path, warnings_of: pytest.LogCaptureFixture) -> None:
    save_tiny_moe_model(tmp_path, "qwen3_moe", with_tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    plan_of(tmp_path)
    assert "33 tensors belong to no part of Qwen3MoeForCausalLM, first model.layers.1." in warnings_of.text


def test_fp8_wanted_where_it_never_happens_is_reported(warnings_of: pytest.LogCaptureFixture) -> None:
    plan_of(model_of("qwen3_moe"), layer_config={"mlp.gate": "FP8_STATIC", "q_proj": "FP8_STATIC"})
    assert [r.message for r in warnings_of.records] == [
        "layer_config entry 'mlp.gate' asks for FP8, but names only layers that stay in 16 bit"
    ]
