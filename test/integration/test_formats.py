"""Every format from end to end: what the run made is what the files hold, what is loaded, and what a third party reads.

The third party is a plain transformers model of the source that computes its layers from the file's tensors alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model
from tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from transformers import AutoModelForCausalLM

from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import AutoRoundError, CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.export import MemorySink
from autoround_fp8.formats.table import default_scheme, get_formats, parse_quantization
from autoround_fp8.inference.load import load_model, load_quantized_model
from autoround_fp8.model_source import open_model
from autoround_fp8.numerics.fp8 import dequantize_fp8
from autoround_fp8.pipeline import ExportSummary, PreparedRun, compress, export_run, prepare
from autoround_fp8.schemes import parse_layer_config, parse_scheme

pytestmark = pytest.mark.integration

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))
FP8_FORMATS = ("fp8_static", "llm_compressor", "fp8")

# Name -> family, settings of the source, settings of the run.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {}, {}),
    "biased": ("qwen2", {}, {}),
    "tied": ("gemma3_text", {"tie_word_embeddings": True}, {}),
    "renamed": ("gpt_neox", {}, {}),
    "fused_on_disk": ("phi3", {}, {}),
    "sharded": ("llama", {}, {"max_shard_size": "60KB"}),
    "ignored": ("qwen3", {}, {"ignore_layers": ("layers.1.mlp", "k_proj")}),
    "mixed": ("qwen3", {}, {"layer_config": {"down_proj": "FP8_STATIC_TENSOR", "q_proj|k_proj|v_proj": {"bits": 16}}}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "fused": ("granitemoe", {}, {}),
    "kept_experts": ("gpt_oss", {}, {}),
    "head": ("llama", {}, {"quant_lm_head": True}),
    "biased_head": ("phimoe", {}, {"quant_lm_head": True}),
    "renamed_head": ("gpt_neox", {}, {"quant_lm_head": True, "max_shard_size": "60KB"}),
    "mixed_head": ("qwen3", {}, {"layer_config": {"lm_head": "FP8_STATIC_TENSOR"}}),
    "ignored_experts": ("qwen2_moe", {}, {"ignore_layers": ("layers.1.mlp.experts",)}),
    "ignored_renamed": ("minimax_m2", {}, {"ignore_layers": ("layers.1.block_sparse_moe.experts",)}),
}


HEADS = {"head": "lm_head", "biased_head": "lm_head", "renamed_head": "embed_out", "mixed_head": "lm_head"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def source_of(base: Path, case: str) -> Path:
    family, overrides, _ = CASES[case]
    folder = base / f"source-{case}"
    if not folder.exists():
        save = save_tiny_moe_model if family in MOE_FAMILIES else save_tiny_model
        save(folder, family, with_tokenizer=False, **overrides)
    return folder


def prepared(source: Any, formats: str, scheme: str | None = None, **settings: Any) -> PreparedRun:
    settings["layer_config"] = parse_layer_config(settings.get("layer_config"))
    config = QuantizeConfig(
        **{"dataset": ROWS, "device": "cpu", "batch_size": 2, "algorithm": "rtn", **settings},
        scheme=default_scheme(get_formats(formats)) if scheme is None else parse_scheme(scheme),
        format=formats,
    )
    return prepare(config, open_model(source))


def exported(base: Path, case: str, formats: str, scheme: str | None = None) -> tuple[PreparedRun, ExportSummary]:
    return _exported(base, case, formats, scheme)


@cache
def _exported(base: Path, case: str, formats: str, scheme: str | None) -> tuple[PreparedRun, ExportSummary]:
    run = prepared(source_of(base, case), formats, scheme, **CASES[case][2])
    return run, export_run(run, base / f"{case}-{formats}-{scheme}".replace(",", "+"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder)
    return {name: reader.read(name) for name in reader.names}


def block_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS, use_cache=False).logits


COMBINATIONS = [
    *(
        (case, name, None)
        for case in CASES
        for name in FP8_FORMATS
        if name != "fp8" or (case != "mixed" and case not in HEADS)
    ),
    *((case, "llm_compressor", "FP8_DYNAMIC") for case in CASES if not case.startswith("mixed")),
    ("dense", "llm_compressor", "FP8_STATIC_TENSOR"),
    ("qwen3_moe", "llm_compressor", "FP8_STATIC_TENSOR"),
]


@pytest.mark.parametrize(("case", "name", "scheme"), COMBINATIONS)
def test_files_hold_what_the_run_made_bit_for_bit(base: Path, case: str, name: str, scheme: str | None) -> None:
    run, summary = exported(base, case, name, scheme)
    sink = MemorySink()
    compress(run, sink)
    tensors = tensors_of(summary.folder)
    checkpoint_format, parsed = parse_quantization(block_of(summary.folder))
    assert checkpoint_format.name == name
    layers = {run.plan.exports[0].name_of(fqn): layer for fqn, layer in sink.layers.items()}
    for fqn, layer in layers.items():
        found = checkpoint_format.decode(fqn, parsed.resolve(fqn), tensors)
        assert torch.equal(found.weight.view(torch.uint8), layer.weight.view(torch.uint8)), fqn
        assert torch.equal(found.weight_scale, layer.weight_scale), fqn
        assert (found.input_scale is None) == (layer.input_scale is None) == (scheme == "FP8_DYNAMIC")
        assert found.input_scale is None or torch.equal(found.input_scale, layer.input_scale), fqn
    scaled = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    assert scaled == layers.keys()


@pytest.mark.parametrize(("case", "name", "scheme"), COMBINATIONS)
def test_the_config_says_of_every_matrix_whether_it_is_fp8(
    base: Path, case: str, name: str, scheme: str | None
) -> None:
    _, summary = exported(base, case, name, scheme)
    tensors = tensors_of(summary.folder)
    block = block_of(summary.folder)
    parsed = parse_quantization(block)[1]
    embeddings = re.compile(r"embed_(tokens|in)\.weight$")
    for tensor_name, tensor in tensors.items():
        if tensor.ndim >= 2 and not tensor_name.endswith("_scale") and not embeddings.search(tensor_name):
            stem = tensor_name.removesuffix(".weight")
            if stem == tensor_name:  # a bare parameter stands for the module it is in
                stem = stem.rpartition(".")[0]
            assert parsed.resolve(stem).is_quantized == (tensor.dtype == torch.float8_e4m3fn), tensor_name
    output = HEADS.get(case, "lm_head")
    assert parsed.resolve(output).is_quantized == (case in HEADS)
    listed = {"llm_compressor": "ignore", "fp8": "ignored_layers", "fp8_static": "extra_config"}[name]
    # fp8_static quantises nothing outside the blocks but what it names.
    assert (output in block.get(listed, ())) == ((case in HEADS) == (name == "fp8_static"))


@pytest.mark.parametrize(("case", "name", "scheme"), COMBINATIONS)
def test_scales_are_as_documented(base: Path, case: str, name: str, scheme: str | None) -> None:
    run, summary = exported(base, case, name, scheme)
    tensors = tensors_of(summary.folder)
    scales = {key: tensor for key, tensor in tensors.items() if key.endswith("_scale")}
    for key, scale in scales.items():
        assert scale.dtype == torch.float32
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), key
        assert torch.equal(scale, scale.bfloat16().float()), key
    name_of = run.plan.exports[0].name_of
    for linear in run.plan.quantized:
        fqn, rows = name_of(linear.fqn), linear.shape[0]
        per_channel = (rows, 1) if name == "llm_compressor" else (rows,)
        # For Intel's loader fp8_static repeats a scale per matrix.
        shape = per_channel if linear.scheme.group_size == -1 or name == "fp8_static" else (1,)
        weight_scale = scales.pop(f"{fqn}.weight_scale")
        assert weight_scale.shape == shape
        assert linear.scheme.group_size == -1 or len(weight_scale.unique()) == 1
        if not linear.scheme.act_dynamic:
            assert scales.pop(f"{fqn}.input_scale").shape == (1,)
            for other in linear.fused:  # q/k/v, gate/up
                assert torch.equal(tensors[f"{name_of(other)}.input_scale"], tensors[f"{fqn}.input_scale"])
    assert scales == {}


def strategies(block: dict[str, Any], fqn: str) -> tuple[str, str]:
    """Of weights and inputs, by compressed-tensors' own rule: a name comes before a pattern, that before the class."""
    ranks = {}
    for group in block["config_groups"].values():
        for target in group["targets"]:
            is_pattern = target.startswith("re:") and re.match(target[3:], fqn) is not None
            if target == fqn or is_pattern or target == "Linear":
                ranks[0 if target == fqn else 1 if is_pattern else 2] = group
    group = ranks[min(ranks)]
    return group["weights"]["strategy"], group["input_activations"]["strategy"]


@pytest.mark.parametrize(("case", "scheme"), [(c, scheme) for c, n, scheme in COMBINATIONS if n == "llm_compressor"])
def test_the_strategy_of_a_layer_is_the_shape_of_its_scales(base: Path, case: str, scheme: str | None) -> None:
    _, summary = exported(base, case, "llm_compressor", scheme)
    tensors, block = tensors_of(summary.folder), block_of(summary.folder)
    scaled = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    assert scaled
    for fqn in scaled:
        weights, inputs = strategies(block, fqn)
        rows = tensors[f"{fqn}.weight"].shape[0]
        assert tensors[f"{fqn}.weight_scale"].shape == {"channel": (rows, 1), "tensor": (1,)}[weights], fqn
        assert (inputs == "tensor") == (f"{fqn}.input_scale" in tensors), fqn
        if ".experts." in fqn and inputs == "tensor":
            assert weights == "tensor", fqn


def third_party_forward(tensors: dict[str, torch.Tensor], fqn: str, bias: Any, x: torch.Tensor) -> torch.Tensor:
    """The definition of an FP8 linear on float32 values, in the order of the reference kernel."""
    scale = tensors.get(f"{fqn}.input_scale")
    if scale is None:
        scale = (x.abs().amax(-1, keepdim=True) / 448).clamp_min(1 / (448 * 512))
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    y = torch.nn.functional.linear(codes, tensors[f"{fqn}.weight"].float())
    y = y * (scale * tensors[f"{fqn}.weight_scale"].float().reshape(-1))
    return y if bias is None else y + bias


def third_party(source: Path, export: Path) -> torch.Tensor:
    """Logits of the source in transformers, every layer that has scales in the export computed from there."""
    tensors = tensors_of(export)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    count = 0
    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            assert isinstance(module, torch.nn.Linear)
            module.forward = partial(third_party_forward, tensors, name, module.bias)
            count += 1
    assert count == sum(name.endswith(".weight_scale") for name in tensors) > 0
    return logits(model)


THIRD_PARTY = ("qwen2", "qwen3", "llama", "phi3")
DENSE = [(case, name, scheme) for case, name, scheme in COMBINATIONS if CASES[case][0] in THIRD_PARTY]


@pytest.mark.parametrize(("case", "name", "scheme"), DENSE)
def test_a_third_party_reads_the_same_model(base: Path, case: str, name: str, scheme: str | None) -> None:
    _, summary = exported(base, case, name, scheme)
    ours = logits(load_quantized_model(summary.folder, dtype="float32", kernel="reference"))
    assert torch.equal(ours, third_party(source_of(base, case), summary.folder))


@pytest.mark.parametrize(("case", "name", "scheme"), COMBINATIONS)
def test_the_reloaded_model_is_near_its_original(base: Path, case: str, name: str, scheme: str | None) -> None:
    _, summary = exported(base, case, name, scheme)
    original, found = logits(load_model(source_of(base, case))), logits(load_quantized_model(summary.folder))
    assert torch.nn.functional.cosine_similarity(original.flatten().float(), found.flatten().float(), dim=0) > 0.9
    assert not torch.equal(original, found)


@pytest.mark.parametrize("name", ["llm_compressor", "fp8"])
def test_latent_attention_stays_in_16_bit_where_engines_need_it(base: Path, name: str) -> None:
    run, _ = exported(base, "deepseek_v3", name)
    leaves = {linear.fqn.rpartition(".")[2] for linear in run.plan.quantized}
    assert not leaves & {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    assert {"q_b_proj", "o_proj", "gate_proj"} <= leaves
    other, _ = exported(base, "deepseek_v3", "fp8_static")
    assert {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"} <= {x.fqn.rpartition(".")[2] for x in other.plan.quantized}


# Files of others.


def rewritten(folder: Path, target: Path, block: dict[str, Any], **dtypes: Any) -> Path:
    """The export again with other scale shapes or dtypes and another config block."""
    target.mkdir()
    tensors = tensors_of(folder)
    for name, tensor in tensors.items():
        for leaf, change in dtypes.items():
            if name.endswith(f".{leaf}"):
                tensors[name] = change(tensor).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return target


def test_intels_own_checkpoint(base: Path, tmp_path: Path) -> None:
    _, summary = exported(base, "biased", "fp8_static")
    block = {
        **{k: v for k, v in block_of(summary.folder).items() if k not in ("act_group_size", "extra_config")},
        "autoround_version": "0.16.1",
        "iters": 0,
    }
    theirs = rewritten(
        summary.folder, tmp_path / "intel", block, weight_scale=torch.Tensor.bfloat16, input_scale=torch.Tensor.bfloat16
    )
    assert load_file(theirs / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    # Our scales are representable in bfloat16, so the two files mean the same.
    ours = logits(load_quantized_model(summary.folder, dtype="float32", kernel="reference"))
    assert torch.equal(logits(load_quantized_model(theirs, dtype="float32", kernel="reference")), ours)
    assert torch.equal(third_party(source_of(base, "biased"), theirs), ours)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_llm_compressors_per_tensor_checkpoint(base: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    _, summary = exported(base, "dense", "llm_compressor", "FP8_STATIC_TENSOR")
    block = {**block_of(summary.folder), "version": "0.12.2", "sparsity_config": {}, "ignore": ["re:.*lm_head"]}
    reshape = partial(torch.reshape, shape=shape)
    theirs = rewritten(summary.folder, tmp_path / "theirs", block, weight_scale=reshape, input_scale=reshape)
    ours = logits(load_quantized_model(summary.folder, dtype="float32", kernel="reference"))
    assert torch.equal(logits(load_quantized_model(theirs, dtype="float32", kernel="reference")), ours)


def test_one_per_tensor_file_serves_all_labels(base: Path, tmp_path: Path) -> None:
    _, summary = exported(base, "dense", "fp8")
    expected = logits(load_quantized_model(summary.folder, dtype="float32", kernel="reference"))
    for name in ("fp8_static", "llm_compressor"):
        block = prepared(source_of(base, "dense"), name, "FP8_STATIC_TENSOR").plan.exports[0].quantization_config
        theirs = rewritten(summary.folder, tmp_path / name, dict(block or {}))
        assert torch.equal(logits(load_quantized_model(theirs, dtype="float32", kernel="reference")), expected)


# Dynamic inputs.


def test_dynamic_inputs_need_no_data_and_no_forward(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", None)
    run = prepared(source_of(base, "dense"), "llm_compressor", "FP8_DYNAMIC", dataset="/no/such/file.jsonl")
    sink = MemorySink()
    result = compress(run, sink)
    assert len(sink.layers) == 14
    assert result.hidden_states == []
    assert {layer.source for block in result.blocks for layer in block.layers} == {"made on the fly"}


@pytest.mark.parametrize(("algorithm", "used"), [("rtn", "rtn"), ("mse", "mse"), ("gptq", "mse")])
def test_dynamic_inputs_and_algorithms(base: Path, algorithm: str, used: str) -> None:
    run = prepared(source_of(base, "qwen3_moe"), "llm_compressor", "FP8_DYNAMIC", algorithm=algorithm)
    result = compress(run, MemorySink())
    assert {layer.algorithm for block in result.blocks for layer in block.layers} == {used}


def test_dynamic_inputs_need_data_to_tell_the_harmful_layers_only(base: Path, tmp_path: Path) -> None:
    run = prepared(source_of(base, "dense"), "llm_compressor", "FP8_DYNAMIC", keep_layers=1)
    assert len(run.data.samples) == len(ROWS)
    assert run.probes == ()
    summary = export_run(run, tmp_path / "out")
    kept = summary.report["mixed_precision"]["kept"]
    parsed = parse_quantization(block_of(summary.folder))[1]
    assert kept
    assert not any(parsed.resolve(name).is_quantized for name in kept)
    assert summary.report["mixed_precision"]["kl_after"] < summary.report["mixed_precision"]["kl_before"]
    layers = [layer for block in summary.report["blocks"] for layer in block["layers"]]
    assert len(layers) == 14 - len(kept)
    assert {layer["num_tokens"] for layer in layers} == {0}


def test_layers_are_kept_in_every_format(base: Path, tmp_path: Path) -> None:
    run = prepared(source_of(base, "dense"), "fp8,llm_compressor,fake", keep_layers=2)
    summary = export_run(run, tmp_path / "out")
    kept = summary.report["mixed_precision"]["kept"]
    source = tensors_of(source_of(base, "dense"))
    for folder in summary.folders.values():
        tensors = tensors_of(folder)
        assert kept
        assert all(torch.equal(tensors[f"{name}.weight"], source[f"{name}.weight"]) for name in kept)


def test_every_format_holds_what_was_tuned(base: Path, tmp_path: Path) -> None:
    run = prepared(source_of(base, "dense"), "llm_compressor,fp8_static", iters=4, minmax_lr=0.01, lr=0.1)
    sink = MemorySink()
    compress(run, sink)
    for name, folder in export_run(run, tmp_path / "out").folders.items():
        checkpoint_format, parsed = parse_quantization(block_of(folder))
        assert checkpoint_format.name == name
        tensors = tensors_of(folder)
        for fqn, layer in sink.layers.items():
            found = checkpoint_format.decode(fqn, parsed.resolve(fqn), tensors)
            assert torch.equal(found.weight.view(torch.uint8), layer.weight.view(torch.uint8)), fqn
            assert torch.equal(found.input_scale, layer.input_scale), fqn
        scales = {f"{fqn}.{leaf}" for fqn in sink.layers for leaf in ("weight_scale", "input_scale")}
        assert tensors.keys() == tensors_of(source_of(base, "dense")).keys() | scales


def test_static_and_dynamic_layers_in_one_model(base: Path, tmp_path: Path) -> None:
    settings = {"layer_config": {"mlp": "FP8_DYNAMIC"}, "enable_quanted_input": True}
    run = prepared(source_of(base, "dense"), "llm_compressor", **settings)
    summary = export_run(run, tmp_path / "out")
    scaled = {name for name in tensors_of(summary.folder) if name.endswith(".input_scale")}
    assert len(scaled) == 8
    assert all(".self_attn." in name for name in scaled)
    ours = logits(load_quantized_model(summary.folder, dtype="float32", kernel="reference"))
    assert torch.equal(ours, third_party(source_of(base, "dense"), summary.folder))


@pytest.mark.parametrize("case", ["dense", "qwen3_moe"])
def test_kernels_agree_on_dynamic_inputs(base: Path, case: str) -> None:
    _, summary = exported(base, case, "llm_compressor", "FP8_DYNAMIC")
    one, two = (logits(load_quantized_model(summary.folder, dtype="float32", kernel=k)) for k in ("cpu", "reference"))
    torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


# What is refused before work.


@pytest.mark.parametrize(
    ("case", "name", "scheme", "settings", "message"),
    [
        ("dense", "fp8_static", "FP8_DYNAMIC", {}, "'fp8_static' holds static input scales only"),
        (
            "dense",
            "llm_compressor",
            "FP8_DYNAMIC",
            {"iters": 5},
            r"iters \(5\) must be 0 where inputs are dynamic, as those of 'model\.layers\.0",
        ),
        (
            "dense",
            "llm_compressor",
            "FP8_STATIC",
            {"iters": 5, "layer_config": {"down_proj": "FP8_DYNAMIC"}},
            r"those of 'model\.layers\.0\.mlp\.down_proj'",
        ),
        ("dense", "llm_compressor,fp8", None, {"quant_lm_head": True}, "'fp8' has no FP8 output layer"),
        ("dense", "fp8", "FP8_STATIC", {}, "'fp8' holds one static scale per matrix"),
        ("dense", "llm_compressor,fp8", "FP8_STATIC", {}, "'fp8' holds one static scale per matrix"),
        (
            "qwen3_moe",
            "llm_compressor",
            None,
            {"layer_config": {"experts": "FP8_STATIC"}},
            "a weight scale per channel",
        ),
        ("qwen3_moe", "llm_compressor", None, {"ignore_layers": ("experts.3",)}, "have different schemes"),
        ("fused", "fake", None, {}, "are one tensor in the checkpoint"),
    ],
)
def test_what_consumers_cannot_load_is_refused_before_work(
    base: Path, case: str, name: str, scheme: str | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        prepared(source_of(base, case), name, scheme, **settings)


# Plain checkpoints of rounded weights.


@pytest.mark.parametrize(
    "case", ["dense", "tied", "biased", "sharded", "ignored", "qwen3_moe", "mixtral", "mixed", "head", "biased_head"]
)
def test_a_fake_checkpoint_is_a_plain_one_of_the_rounded_weights(base: Path, case: str) -> None:
    run, summary = exported(base, case, "fake")
    sink = MemorySink()
    compress(run, sink)
    before, after = tensors_of(source_of(base, case)), tensors_of(summary.folder)
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}
    for name, tensor in after.items():
        layer = sink.layers.get(name.removesuffix(".weight"))
        expected = before[name] if layer is None else dequantize_fp8(layer.weight, layer.weight_scale).bfloat16()
        assert torch.equal(tensor, expected), name
    assert "quantization_config" not in json.loads((summary.folder / "config.json").read_text())
    assert summary.report["activations"] == "not quantised"
    theirs = AutoModelForCausalLM.from_pretrained(summary.folder, dtype=torch.bfloat16).eval()
    assert torch.equal(logits(load_model(summary.folder)), logits(theirs))
    with pytest.raises(CheckpointError, match="is not quantised"):
        load_quantized_model(summary.folder)


# Several formats at once.


def test_several_formats_come_from_one_set_of_codes(base: Path) -> None:
    _, summary = exported(base, "dense", "fp8_static,llm_compressor,fake")
    assert [folder.name for folder in summary.folders.values()] == ["fp8_static", "llm_compressor", "fake"]
    assert summary.folder == summary.folders["fp8_static"]
    one, other = tensors_of(summary.folders["fp8_static"]), tensors_of(summary.folders["llm_compressor"])
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8).flatten(), other[name].view(torch.uint8).flatten()), name
    assert other["model.layers.0.mlp.up_proj.weight_scale"].shape == (128, 1)
    models = [load_model(folder, dtype="float32", kernel="reference") for folder in summary.folders.values()]
    first, second, fake = (logits(model) for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, fake)
    _, alone = exported(base, "dense", "llm_compressor")
    for name, tensor in tensors_of(alone.folder).items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
    for name, folder in summary.folders.items():
        report = json.loads((folder / "quantization_report.json").read_text())
        assert report["format"] == name
        assert set(report["files"]) == {path.name for path in folder.iterdir()}
        assert (folder / "quantization_config.json").exists() == (name == "fp8_static")


def leaves_of(names: Iterable[str]) -> set[str]:
    return {match[1] for match in (re.search(r"\.experts\.\d+\.(\w+)", name) for name in names) if match}


@pytest.mark.parametrize("case", ["mixtral", "biased_head", "ignored_renamed"])
def test_each_format_has_its_readers_names_of_experts(base: Path, case: str) -> None:
    """mixtral, phimoe, minimax_m2: Intel's loader knows gate_proj, up_proj, down_proj, vLLM w1, w3, w2."""
    run, summary = exported(base, case, "llm_compressor,fp8_static")
    own, intels = (tensors_of(folder) for folder in summary.folders.values())
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    assert leaves_of(tensors_of(source_of(base, case))) == leaves_of(own) == names.keys()
    assert leaves_of(intels) == set(names.values())
    expected = {re.sub(r"(\.experts\.\d+\.)(w\d)", lambda m: m[1] + names[m[2]], key): t for key, t in own.items()}
    assert intels.keys() == expected.keys()
    for key, tensor in expected.items():
        scale = intels[key].reshape(-1)
        scale = scale[:1] if key.endswith("weight_scale") and tensor.numel() == 1 else scale
        assert torch.equal(scale.view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
    models = [load_model(folder, dtype="float32", kernel="reference") for folder in summary.folders.values()]
    assert torch.equal(*map(logits, models))
    for export, folder in zip(run.plan.exports, summary.folders.values(), strict=True):
        report = json.loads((folder / "quantization_report.json").read_text())
        layers = {layer["fqn"] for block in report["blocks"] for layer in block["layers"]}
        assert {f"{fqn}.weight" for fqn in layers} <= tensors_of(folder).keys()
        assert report["ignored"] == export.ignored
        kept = set(re.findall(r"w\d|\w+_proj", " ".join(name for name in report["ignored"] if "experts" in name)))
        assert kept == (leaves_of(tensors_of(folder)) if case == "ignored_renamed" else set())


@pytest.mark.parametrize("case", ["dense", "sharded", "qwen3_moe"])
def test_labels_of_the_same_tensors_share_the_files(base: Path, case: str) -> None:
    run, summary = exported(base, case, "fp8,llm_compressor,fp8_static")
    assert run.config.scheme.group_size == 0
    first, second, third = ({p.name: p for p in f.glob("*.safetensors")} for f in summary.folders.values())
    assert (len(first) > 1) == (case == "sharded")
    assert second.keys() == first.keys()
    assert all(second[name].samefile(path) for name, path in first.items())
    assert not any(path.samefile(third[name]) for name, path in first.items() if name in third)
    # For Intel's loader a scale per matrix is repeated; all else is the same.
    repeated = tensors_of(summary.folders["fp8_static"])
    for name, tensor in tensors_of(summary.folders["fp8"]).items():
        once = repeated[name][:1] if name.endswith("weight_scale") else repeated[name]
        assert torch.equal(once.view(torch.uint8), tensor.view(torch.uint8)), name
    results = [
        logits(load_quantized_model(folder, dtype="float32", kernel="reference")) for folder in summary.folders.values()
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_engines_needs_count_for_all_formats_of_a_run(base: Path) -> None:
    run, summary = exported(base, "deepseek_v3", "fp8_static,llm_compressor")
    assert not [x.fqn for x in run.plan.quantized if x.fqn.endswith("kv_b_proj")]
    for folder in summary.folders.values():
        assert torch.isfinite(logits(load_quantized_model(folder))).all()


def test_a_failure_leaves_nothing_of_any_format(base: Path, tmp_path: Path) -> None:
    def stop(*_args: Any) -> None:
        raise AutoRoundError("stopped")

    run = prepared(source_of(base, "dense"), "fp8,llm_compressor,fake")
    with pytest.raises(AutoRoundError, match="stopped"):
        export_run(run, tmp_path / "deep" / "out", stop)
    assert list(tmp_path.iterdir()) == []


def test_an_export_in_the_way_of_any_format_is_found_before_work(base: Path, tmp_path: Path) -> None:
    source = source_of(base, "dense")
    export_run(prepared(source, "fp8_static,llm_compressor"), tmp_path / "out")
    run = prepared(source, "fake,llm_compressor")
    with pytest.raises(ConfigError, match=r"llm_compressor' already holds an export"):
        export_run(run, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["fp8_static", "llm_compressor"]
    again = export_run(prepared(source, "fake,llm_compressor", overwrite=True), tmp_path / "out")
    assert torch.isfinite(logits(load_model(again.folders["llm_compressor"]))).all()
