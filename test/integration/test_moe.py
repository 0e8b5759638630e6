"""Mixture-of-experts models from end to end: the streamed run, the export and the reloaded model are one model.

Every family of `tiny_moe_models`, from 16-bit and from native FP8 sources; faults C1, C4, C14, D1, D5, D7, D8, H1, I5.
"""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from make_block_fp8 import make_block_fp8
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE
from tiny_moe_models import FP8_FAMILIES, MOE_FAMILIES, dead_experts_model, save_tiny_moe_model, tiny_moe_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from autoround_fp8.calibration.dataset import make_batches
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.compressor import CompressionResult
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, NumericsError, UnsupportedModelError
from autoround_fp8.export import MemorySink
from autoround_fp8.formats.table import parse_quantization
from autoround_fp8.inference.load import load_model, load_quantized_model
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import PreparedRun, compress, export_run, prepare
from autoround_fp8.schemes import matches_layer, parse_scheme
from autoround_fp8.tuning.input_ranges import UNSEEN

pytestmark = pytest.mark.integration

ROWS = torch.randint(4, VOCAB_SIZE, (4, 20), generator=torch.Generator().manual_seed(7))
TOP_K = {"llama4_text": 1}
BLOCK = 128


def prepared(folder: Any, **settings: Any) -> PreparedRun:
    defaults = {"dataset": ROWS, "device": "cpu", "calibration_dtype": "bfloat16", "batch_size": 2, "act_headroom": 1.0}
    return prepare(QuantizeConfig(**{**defaults, **settings}), open_model(folder))


def compressed(folder: Any, **settings: Any) -> tuple[MemorySink, CompressionResult, PreparedRun]:
    run, sink = prepared(folder, **settings), MemorySink()
    return sink, compress(run, sink), run


@torch.no_grad()
def last_hidden_states(model: Any, run: PreparedRun) -> list[torch.Tensor]:
    """What the last decoder layer returns in the whole model's own forward."""
    seen: list[torch.Tensor] = []
    container = model.get_submodule(run.plan.skeleton.container_name)
    handle = container[-1].register_forward_hook(
        lambda _m, _args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    for batch in make_batches(run.data.samples, run.config.batch_size):
        model(input_ids=batch, use_cache=False)
    handle.remove()
    return seen


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=ROWS, use_cache=False).logits


def pretrained(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    # A command line run earlier in the process may have kept the messages to itself.
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


@cache
def saved(base: Path, family: str) -> Path:
    return save_tiny_moe_model(base / family, family, with_tokenizer=False)


def assert_same_states(family: str, dtype: torch.dtype, ours: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    assert len(ours) == len(whole) == 2
    for one, other in zip(ours, whole, strict=True):
        assert one.dtype == other.dtype == dtype
        if family == "llama4_text" and dtype == torch.float32:
            # The library multiplies all tokens with each expert, zeros included: another order of the sum.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bfloat16") for family in MOE_FAMILIES), *((f, "float32") for f in ("mixtral", "llama4_text"))],
)
def test_streamed_blocks_are_the_whole_model(base: Path, family: str, dtype: str) -> None:
    folder = saved(base, family)
    _, result, run = compressed(folder, calibration_dtype=dtype)
    model = pretrained(folder, getattr(torch, dtype))
    assert_same_states(family, getattr(torch, dtype), result.hidden_states, last_hidden_states(model, run))
    counts = [tokens for block in result.blocks for tokens in block.expert_tokens.values()]
    assert bool(counts) == (family != "gpt_oss")
    for tokens in counts:
        assert sum(tokens) == ROWS.numel() * TOP_K.get(family, 2)
        assert sum(count > 0 for count in tokens) > len(tokens) // 2


@pytest.mark.parametrize("family", list(MOE_FAMILIES))
def test_a_plain_model_loads_as_transformers_does(base: Path, family: str) -> None:
    folder = saved(base, family)
    ours, theirs = logits(load_model(folder)), logits(pretrained(folder))
    assert torch.equal(ours, theirs)


@cache
def exported(base: Path, family: str, dtype: str) -> tuple[Path, PreparedRun]:
    run = prepared(saved(base, family), calibration_dtype=dtype, enable_quanted_input=True)
    return export_run(run, base / f"{family}-{dtype}-out").folder, run


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bfloat16") for family in MOE_FAMILIES), *((f, "float32") for f in ("qwen2_moe", "llama4_text"))],
)
def test_the_reloaded_export_is_the_simulation(base: Path, family: str, dtype: str) -> None:
    out, run = exported(base, family, dtype)
    _, result, _ = compressed(saved(base, family), calibration_dtype=dtype, enable_quanted_input=True)
    model = load_quantized_model(out, dtype=dtype, kernel="reference")
    states = last_hidden_states(model, run)
    assert len(states) == len(result.hidden_states) == 2
    for ours, reloaded in zip(result.hidden_states, states, strict=True):
        assert ours.dtype == getattr(torch, dtype)
        assert torch.equal(ours, reloaded)
    # It is quantised, and still the same model.
    whole = last_hidden_states(pretrained(saved(base, family), getattr(torch, dtype)), run)
    assert not torch.equal(states[0], whole[0])
    assert torch.nn.functional.cosine_similarity(states[0].float(), whole[0].float(), dim=-1).mean() > 0.9


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_shards_change_nothing(tmp_path: Path, base: Path, family: str) -> None:
    source = save_tiny_moe_model(tmp_path / "source", family, with_tokenizer=False, max_shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    run = prepared(source, enable_quanted_input=True, max_shard_size="40KB")
    out = export_run(run, tmp_path / "out").folder
    assert len(list(out.glob("*.safetensors"))) > 3
    whole, _ = exported(base, family, "bfloat16")
    one, other = CheckpointReader(out), CheckpointReader(whole)
    assert sorted(one.names) == sorted(other.names)
    for name in one.names:
        assert b"".join(one.chunks(name)) == b"".join(other.chunks(name))
    assert torch.equal(logits(load_quantized_model(out)), logits(load_quantized_model(whole)))


# Weights of more than one block of 128, whose last ones are partial.
SIZES = {"hidden_size": 192, "moe_intermediate_size": 160}
WIDE = {"mixtral": {"hidden_size": 192, "intermediate_size": 160}}
WIDE["minimax_m2"] = WIDE["mixtral"]


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The definition: every code times the scale of its block, in float32, rounded once."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            grid = tensors[f"{name}_scale_inv"]
            rows, columns = (torch.arange(length) // BLOCK for length in tensor.shape)
            tensor = (tensor.float() * grid[rows][:, columns].float()).bfloat16()
        found[name] = tensor
    return found


def make_twin(native: Path, target: Path) -> Path:
    """The 16-bit folder that holds what a native FP8 one means."""
    target.mkdir()
    save_file(dequantized(tensors_of(native)), target / "model.safetensors", metadata={"format": "pt"})
    raw = config_of(native)
    del raw["quantization_config"]
    (target / "config.json").write_text(json.dumps(raw))
    return target


@cache
def native(base: Path, family: str) -> tuple[Path, Path]:
    """A native FP8 folder and its 16-bit twin."""
    source = base / f"{family}-wide"
    save_tiny_moe_model(source, family, with_tokenizer=False, **WIDE.get(family, SIZES))
    folder = base / f"{family}-native"
    make_block_fp8(source, folder)
    return folder, make_twin(folder, base / f"{family}-twin")


@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_a_native_fp8_source_is_its_16_bit_twin(base: Path, family: str) -> None:
    folder, twin = native(base, family)
    stored = tensors_of(folder)
    grids = {tuple(tensor.shape) for name, tensor in stored.items() if name.endswith("_scale_inv")}
    assert (2, 2) in grids
    assert any(".experts." in name and tensor.dtype == torch.float8_e4m3fn for name, tensor in stored.items())
    _, result, run = compressed(folder)
    assert_same_states(family, torch.bfloat16, result.hidden_states, last_hidden_states(pretrained(twin), run))
    assert torch.equal(logits(load_model(folder)), logits(pretrained(twin)))


@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_the_export_of_a_native_fp8_source(base: Path, family: str) -> None:
    folder, twin = native(base, family)
    run = prepared(folder, enable_quanted_input=True)
    out = export_run(run, base / f"{family}-native-out").folder
    export_run(prepared(twin, enable_quanted_input=True), base / f"{family}-twin-out")
    made, expected = tensors_of(out), tensors_of(base / f"{family}-twin-out")
    if family != "deepseek_v32":  # there the fixture has weights_proj in FP8, which stays in 16 bit either way
        assert made.keys() == expected.keys()
    for name, tensor in made.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(bits(tensor), bits(expected[name])), name
    assert not [name for name in made if name.endswith("_scale_inv")]
    raw, before = config_of(out), config_of(folder)
    block = raw.pop("quantization_config")
    assert block["quant_method"] == "auto-round"
    assert not {"weight_block_size", "modules_to_not_convert"} & block.keys()
    assert "fp8" not in (block.get("quant_method"), raw.get("quant_method"))
    assert raw == {key: value for key, value in before.items() if key != "quantization_config"}
    _, result, _ = compressed(folder, enable_quanted_input=True)
    model = load_quantized_model(out, kernel="reference")
    for ours, reloaded in zip(result.hidden_states, last_hidden_states(model, run), strict=True):
        assert torch.equal(ours, reloaded)


# Prefix of the layer for multi-token prediction, and the layer it is made like.
MTP = {"deepseek_v3": ("model.layers.3.", "model.layers.2."), "qwen3_next": ("mtp.layers.0.", "model.layers.1.")}


def with_mtp_layer(folder: Path, family: str) -> Path:
    """Adds the multi-token prediction layer that the released models have and transformers does not load."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    extra, last = MTP[family]
    hidden = tensors["model.norm.weight"].shape[0]
    added = {extra + n.removeprefix(last): t.flip(0).clone() for n, t in tensors.items() if n.startswith(last)}
    added |= {f"{extra}{leaf}.weight": torch.rand(hidden).bfloat16() for leaf in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{extra}eh_proj.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
    added[f"{extra}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{extra}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **added}, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config_of(folder), "num_nextn_predict_layers": 1}))
    return folder


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("family", list(MTP))
def test_a_multi_token_prediction_layer_is_kept_in_16_bit(tmp_path: Path, family: str, is_native: bool) -> None:
    source = save_tiny_moe_model(tmp_path / "plain", family, with_tokenizer=False, **SIZES)
    with_mtp_layer(source, family)
    if is_native:
        make_block_fp8(source, tmp_path / "native")
        source = tmp_path / "native"
    before = tensors_of(source)
    prefix = MTP[family][0]
    extra = {name: tensor for name, tensor in dequantized(before).items() if name.startswith(prefix)}
    assert is_native == any(before[name].dtype == torch.float8_e4m3fn for name in extra)
    summary = export_run(prepared(source), tmp_path / "out")
    made = tensors_of(summary.folder)
    assert {name for name in made if name.startswith(prefix)} == extra.keys()
    for name, tensor in extra.items():
        assert made[name].dtype == tensor.dtype != torch.float8_e4m3fn
        assert torch.equal(bits(made[name]), bits(tensor)), name
    raw = config_of(summary.folder)
    assert raw["num_nextn_predict_layers"] == 1
    ignored = {name for name, fields in raw["quantization_config"]["extra_config"].items() if fields.get("bits") == 16}
    matrices = {name.removesuffix(".weight") for name, tensor in extra.items() if tensor.ndim >= 2}
    assert len(matrices) > 3 * 8
    for stem in matrices:
        assert any(matches_layer(pattern, stem) for pattern in ignored), stem
    assert torch.isfinite(logits(load_quantized_model(summary.folder))).all()
    assert any(name.startswith(f"{MTP[family][1]}mlp.experts.0.") and name.endswith("input_scale") for name in made)


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    dead_experts_model().save_pretrained(tmp_path / "dead")
    return tmp_path / "dead"


@pytest.mark.parametrize("mode", ["shared", "per_expert"])
def test_experts_without_tokens_get_the_largest_range_of_the_others(
    dead: Path, tmp_path: Path, warnings_of: pytest.LogCaptureFixture, mode: str
) -> None:
    summary = export_run(prepared(dead, moe_input_scale=mode), tmp_path / "out")
    told = [r.getMessage() for r in warnings_of.records if "saw no calibration token" in r.getMessage()]
    assert len(told) == 2
    for layer, message in enumerate(told):
        assert f"model.layers.{layer}.mlp.experts: 2 of 4 experts saw no calibration token" in message
    for block in summary.report["blocks"]:
        (tokens,) = block["expert_tokens"].values()
        assert tokens == [80, 80, 0, 0]
        experts = {layer["fqn"]: layer for layer in block["layers"] if ".experts." in layer["fqn"]}
        assert len(experts) == 12
        for fqn, layer in experts.items():
            folder, number, leaf = fqn.rsplit(".", 2)
            live = max(experts[f"{folder}.{e}.{leaf}"]["input_amax"] for e in (0, 1))
            assert (layer["source"] == UNSEEN) == (number in "23")
            assert layer["num_tokens"] == (0 if number in "23" else 80)
            if leaf == "gate_proj":
                assert layer["input_scale"] == experts[f"{folder}.{number}.up_proj"]["input_scale"]
            if number in "23" or mode == "shared":
                # A scale that live experts share is searched in the octave above what the range needs.
                assert live / 448 <= layer["input_scale"] <= live / 448 * (1 + 2**-7) * (2 if mode == "shared" else 1)
            if mode == "shared":
                assert layer["input_scale"] == experts[f"{folder}.0.{leaf}"]["input_scale"]
    made = tensors_of(summary.folder)
    scales = [tensor for name, tensor in made.items() if name.endswith(("weight_scale", "input_scale"))]
    assert len(scales) == 2 * (2 * 12 + 2 * 4)
    assert all(bool((torch.isfinite(scale) & (scale > 0)).all()) for scale in scales)


def test_dead_experts_work_when_tokens_do_come(dead: Path, tmp_path: Path) -> None:
    out = export_run(prepared(dead), tmp_path / "out").folder
    path = out / "model.safetensors"
    tensors = load_file(path)
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.gate.weight"][:, 0] = torch.tensor([-5.0, 0.5, 1.0, 1.0])
    save_file(tensors, path, metadata={"format": "pt"})
    assert torch.isfinite(logits(load_quantized_model(out))).all()


def test_unseen_experts_can_stop_the_run(dead: Path, tmp_path: Path) -> None:
    message = r"model\.layers\.0\.mlp\.experts: 2 of 4 experts saw no calibration token, first expert 2"
    with pytest.raises(NumericsError, match=message):
        export_run(prepared(dead, unseen_experts="error"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dead"]


def test_experts_that_all_see_tokens_do_not_stop_the_run(base: Path, tmp_path: Path) -> None:
    data = torch.randint(4, VOCAB_SIZE, (8, 60), generator=torch.Generator().manual_seed(1))
    summary = export_run(prepared(saved(base, "olmoe"), dataset=data, unseen_experts="error"), tmp_path / "out")
    assert all(min(tokens) > 0 for b in summary.report["blocks"] for tokens in b["expert_tokens"].values())


def test_a_layer_without_any_token_stops_the_run(base: Path, tmp_path: Path) -> None:
    run = prepared(saved(base, "qwen3_moe"))
    mlp = run.plan.skeleton.model.get_submodule("model.layers.1.mlp")
    mlp.forward = torch.zeros_like  # this instance sends nothing to its experts
    message = r"no calibration token reached any expert of the layer of 'model\.layers\.1\.mlp\.experts\.0\.gate_proj'"
    with pytest.raises(NumericsError, match=message):
        export_run(run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text", "deepseek_v3"])
def test_transformers_is_left_as_it_was(base: Path, tmp_path: Path, family: str) -> None:
    folder = saved(base, family)
    model = pretrained(folder)
    before = logits(model)
    out = export_run(prepared(folder), tmp_path / "out").folder
    quantized = load_quantized_model(out)
    first = logits(quantized)
    plain = pretrained(folder)
    assert torch.equal(logits(plain), before)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(quantized), first)
    assert not torch.equal(first, before)
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(logits(load_quantized_model(out)), first)


@pytest.mark.parametrize("family", [family for family in MOE_FAMILIES if family != "gpt_oss"])
def test_a_model_in_memory_gives_the_same_export(base: Path, tmp_path: Path, family: str) -> None:
    model = tiny_moe_model(family)
    out = export_run(prepared(model, enable_quanted_input=True), tmp_path / "out").folder
    made, expected = tensors_of(out), tensors_of(exported(base, family, "bfloat16")[0])
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        assert torch.equal(bits(tensor), bits(expected[name])), name


@pytest.mark.parametrize("way", ["folder", "memory"])
def test_equal_experts_are_all_written(tmp_path: Path, way: str) -> None:
    model = tiny_moe_model("qwen3_moe", num_experts=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj[1] = layer.mlp.experts.gate_up_proj[0]
            layer.mlp.experts.down_proj[1] = layer.mlp.experts.down_proj[0]
    model.save_pretrained(tmp_path / "source")
    run = prepared(tmp_path / "source" if way == "folder" else model, algorithm="rtn")
    made = tensors_of(export_run(run, tmp_path / "out").folder)
    experts = {name for name in tensors_of(tmp_path / "source") if ".experts." in name}
    assert len(experts) == 2 * 64 * 3
    assert experts | {f"{name}_scale" for name in experts} <= made.keys()
    for name in experts:
        if ".experts.1." in name:
            assert torch.equal(bits(made[name]), bits(made[name.replace(".experts.1.", ".experts.0.")]))
    load_quantized_model(tmp_path / "out").save_pretrained(tmp_path / "saved")
    assert tensors_of(tmp_path / "saved").keys() == made.keys()


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.5.up_proj.weight",
            r"model\.layers\.1\.mlp\.experts', first up_proj of expert 5",
        ),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.7.w2.weight",
            r"layers\.0\.mlp\.experts', first down_proj of expert 7",
        ),
        (
            "granitemoe",
            "model.layers.1.block_sparse_moe.output_linear.weight",
            r"layers\.1\.block_sparse_moe\.experts.*down_proj",
        ),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", r"'model\.layers\.0\.mlp\.gate\.weight'"),
    ],
)
def test_a_missing_tensor_is_named_before_anything_is_written(
    base: Path, tmp_path: Path, family: str, name: str, message: str
) -> None:
    source = Path(shutil.copytree(saved(base, family), tmp_path / "source"))
    tensors = tensors_of(source)
    del tensors[name]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        export_run(prepared(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("leaf", ["weight", "weight_scale", "input_scale"])
def test_a_missing_expert_tensor_of_an_export_is_named(base: Path, tmp_path: Path, leaf: str) -> None:
    out = Path(shutil.copytree(exported(base, "mixtral", "bfloat16")[0], tmp_path / "out"))
    tensors = tensors_of(out)
    del tensors[f"model.layers.1.block_sparse_moe.experts.3.up_proj.{leaf}"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    expected = "first up_proj of expert 3" if leaf == "weight" else rf"block_sparse_moe\.experts\.3\.up_proj\.{leaf}"
    with pytest.raises(CheckpointError, match=expected):
        load_quantized_model(out)


_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "num_position_embeddings": 16,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 120,
        "boi_token_index": 121,
        "eoi_token_index": 122,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 32,
        },
        "vision_config": {**_VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        "audio_config": None,
    },
    "qwen3_5_moe": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": _QWEN_VISION,
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "intermediate_size": 48,
            "intermediate_size_mlp": 128,
            "moe_layers": [0, 1],
            "attention_chunk_size": 8,
        },
        "vision_config": {
            **_VISION,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        "image_token_id": 120,
        "video_token_id": 121,
    },
}


def composite_model(model_type: str, num_vision_layers: int | None = None) -> Any:
    fields = COMPOSITES[model_type]
    if num_vision_layers is not None:
        fields = {**fields, "vision_config": {**fields["vision_config"], "num_hidden_layers": num_vision_layers}}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "qwen3_5_moe", "llama4"])
def test_only_the_language_blocks_of_a_composite_are_quantised(tmp_path: Path, model_type: str) -> None:
    model = composite_model(model_type)
    model.save_pretrained(tmp_path / "source")
    run = prepared(tmp_path / "source", enable_quanted_input=True)
    out = export_run(run, tmp_path / "out").folder
    before, made = tensors_of(tmp_path / "source"), tensors_of(out)
    quantized = {name.removesuffix(".weight") for name, t in made.items() if t.dtype == torch.float8_e4m3fn}
    assert quantized == {linear.fqn for linear in run.plan.quantized}
    assert all(name in made for name in before if not name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    assert all(".layers." in fqn and "language_model" in fqn and "vis" not in fqn for fqn in quantized)
    seen = [name for name in before if "vision" in name or "visual" in name or "multi_modal" in name]
    assert len(seen) > 20
    for name in seen:
        assert torch.equal(bits(made[name]), bits(before[name])), name
    assert {k: v for k, v in config_of(out).items() if k != "quantization_config"} == config_of(tmp_path / "source")
    prefixes = config_of(out)["quantization_config"]["block_name_to_quantize"].split(",")
    assert all(any(fqn.startswith(f"{prefix}.") for prefix in prefixes) for fqn in quantized)


@pytest.mark.parametrize("place", ["above", "nested", "nowhere"])
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5_moe"])
def test_a_composites_shards_are_complete_wherever_it_says_whether_it_is_tied(
    tmp_path: Path, model_type: str, place: str
) -> None:
    source = tmp_path / "source"
    composite_model(model_type).save_pretrained(source, max_shard_size="60KB")
    config = config_of(source)
    config.pop("tie_word_embeddings", None)
    config["text_config"].pop("tie_word_embeddings", None)
    if place != "nowhere":
        (config if place == "above" else config["text_config"])["tie_word_embeddings"] = model_type == "gemma3"
    (source / "config.json").write_text(json.dumps(config))
    run = prepared(source, max_shard_size="60KB", ignore_layers=("experts",))
    out = export_run(run, tmp_path / "out").folder
    assert len(list(out.glob("*.safetensors"))) > 3
    scales = {f"{x.fqn}.{leaf}" for x in run.plan.quantized for leaf in ("weight_scale", "input_scale")}
    assert set(CheckpointReader(out).names) == set(CheckpointReader(source).names) | scales
    assert ("lm_head.weight" in CheckpointReader(out).names) == (model_type != "gemma3")
    assert torch.isfinite(logits(load_quantized_model(out))).all()


def test_a_wildcard_does_not_reach_the_vision_tower(tmp_path: Path) -> None:
    model = composite_model("gemma3")
    model.save_pretrained(tmp_path / "source")
    settings = {"layer_config": {".*": parse_scheme("FP8_STATIC_TENSOR")}, "format": "llm_compressor"}
    plan = prepared(tmp_path / "source", **settings).plan
    assert len(plan.quantized) == 14
    assert all("language_model" in linear.fqn for linear in plan.quantized)
    parsed = parse_quantization(dict(plan.exports[0].quantization_config or {}))[1]
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    stored = {name for name, tensor in tensors_of(tmp_path / "source").items() if tensor.ndim == 2}
    names = [*linears, *(name.removesuffix(".weight") for name in stored if name.endswith(".weight"))]
    vision = [name for name in names if "vision" in name and "embed" not in name]
    assert len(vision) > 30
    assert not [name for name in vision if parsed.resolve(name).is_quantized]


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "qwen3_5_moe", "llama4"])
def test_a_composite_reloads_as_the_simulation(tmp_path: Path, model_type: str) -> None:
    composite_model(model_type).save_pretrained(tmp_path / "source")
    model = pretrained(tmp_path / "source")
    assert torch.equal(logits(load_model(tmp_path / "source")), logits(model))
    _, result, run = compressed(tmp_path / "source", enable_quanted_input=True)
    out = export_run(run, tmp_path / "out").folder
    reloaded = load_quantized_model(out, kernel="reference")
    for ours, theirs in zip(result.hidden_states, last_hidden_states(reloaded, run), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.nn.functional.cosine_similarity(logits(reloaded).float(), logits(model).float(), dim=-1).mean() > 0.8


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_a_vision_tower_of_as_many_layers_is_not_mistaken_for_the_language_model(
    tmp_path: Path, model_type: str
) -> None:
    composite_model(model_type, num_vision_layers=2).save_pretrained(tmp_path / "source")
    assert "language_model" in prepared(tmp_path / "source").plan.skeleton.container_name


def test_a_composite_without_a_language_model_class_is_refused(tmp_path: Path) -> None:
    composite_model("qwen3_vl_moe").save_pretrained(tmp_path / "source")
    with pytest.raises(UnsupportedModelError, match="no causal language model for model_type 'qwen3_vl_moe'"):
        prepared(tmp_path / "source")


def test_no_old_block_survives_inside_a_composites_config(tmp_path: Path) -> None:
    composite_model("qwen3_5_moe").save_pretrained(tmp_path / "source")
    make_block_fp8(tmp_path / "source", tmp_path / "native")
    raw = config_of(tmp_path / "native")
    raw["text_config"]["quantization_config"] = raw.pop("quantization_config")
    (tmp_path / "native" / "config.json").write_text(json.dumps(raw))
    out = export_run(prepared(tmp_path / "native"), tmp_path / "out").folder
    made = config_of(out)
    assert made["quantization_config"]["quant_method"] == "auto-round"
    assert "quantization_config" not in made["text_config"]
    assert torch.isfinite(logits(load_quantized_model(out))).all()
