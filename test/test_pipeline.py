"""From a folder or a model in memory to a finished export: what is in it, and that nothing is left when a run fails."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model, tiny_model, tiny_tokenizer
from tiny_moe_models import tiny_moe_model
from transformers import AutoConfig, AutoModelForCausalLM

from autoround_fp8 import pipeline
from autoround_fp8.autoround import parse_names
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError, NumericsError
from autoround_fp8.export import MemorySink
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.model_source import load_tokenizer, open_model
from autoround_fp8.numerics.fp8 import dequantize_fp8
from autoround_fp8.pipeline import compress, export_run, prepare, ranges_on_few_tokens
from autoround_fp8.records import BlockReport, CacheReport

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))


def prepared(model: Any, tokenizer: Any = None, **settings: Any) -> Any:
    trust = settings.get("trust_remote_code", False)
    config = QuantizeConfig(**{"dataset": ROWS, "device": "cpu", "batch_size": 2, **settings})
    return prepare(config, open_model(model, tokenizer, trust_remote_code=trust), tokenizer)


def export(model: Any, out: Path, tokenizer: Any = None, **settings: Any) -> Path:
    return export_run(prepared(model, tokenizer, **settings), out).folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = read_tensors(one), read_tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert raw_bytes(tensor) == raw_bytes(second[name]), name


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits


@pytest.mark.parametrize("shards", ["5GB", "60KB"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma3_text"])
def test_the_export_holds_exactly_what_was_made(tmp_path: Path, family: str, shards: str) -> None:
    source = save_tiny_model(tmp_path / "source", family)
    run = prepared(source, max_shard_size=shards)
    sink = MemorySink()
    compress(run, sink)
    out = export_run(run, tmp_path / "out").folder
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shards == "60KB")
    model = load_quantized_model(out, kernel="reference")
    found = {m.name: m for m in model.modules() if isinstance(m, WeightFP8ActFP8StaticQuantLinear)}
    assert found.keys() == sink.layers.keys()
    for fqn, layer in sink.layers.items():
        assert raw_bytes(found[fqn].weight) == raw_bytes(layer.weight)
        assert torch.equal(found[fqn].weight_scale, layer.weight_scale)
        assert torch.equal(found[fqn].input_scale, layer.input_scale)
        assert torch.equal(found[fqn].weight_dequantized(), dequantize_fp8(layer.weight, layer.weight_scale))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reloads_near_its_original(tmp_path: Path, family: str) -> None:
    source = save_tiny_model(tmp_path / "source", family, dtype=torch.float32)
    out = export(source, tmp_path / "out")
    expected, found = logits(tiny_model(family, dtype=torch.float32)), logits(load_quantized_model(out))
    assert found.shape == expected.shape
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.98


def test_config_json_is_the_source_plus_one_block(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    path = source / "config.json"
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5, "original_max_position_embeddings": 128}
    raw = {**json.loads(path.read_text()), "my_field": {"deep": [1, "ä"]}, "rope_parameters": rope}
    path.write_text(json.dumps(raw))
    config = json.loads((export(source, tmp_path / "out") / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == raw
    assert list(config) == list(raw)
    assert block["packing_format"] == "auto_round:fp8_static"
    assert json.loads((tmp_path / "out" / "quantization_config.json").read_text()) == block


SIDE_FILES = {
    "generation_config.json": b'{"do_sample": false, "temperature": 0.6}\n',  # transformers refuses to save this
    "chat_template.jinja": b"{{ messages[0] }}",
    "LICENSE": b"mine\r\n",
    "preprocessor_config.json": b'{"size": 4 }',
    "parser.json": b"{not json",
    "vocab.bpe.txt": b"\xff\x00\xfe",
}


def test_side_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    for name, content in SIDE_FILES.items():
        (source / name).write_bytes(content)
    out = export(source, tmp_path / "out")
    for name in (*SIDE_FILES, "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name


def test_old_weights_and_old_quantisation_files_stay_behind(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    old = ["pytorch_model.bin", "pytorch_model.bin.index.json", "x.gguf", "quantization_config.json"]
    for name in old:
        (source / name).write_bytes(b"{}")
    (source / "onnx").mkdir()
    out = export(source, tmp_path / "out")
    assert not {p.name for p in out.iterdir()} & {*old[:3], "onnx"}
    assert (out / "quantization_config.json").read_bytes() != b"{}"


@pytest.mark.parametrize("trust", [False, True])
def test_code_is_copied_only_when_it_is_trusted(tmp_path: Path, trust: bool) -> None:
    source = save_tiny_model(tmp_path / "source")
    (source / "modeling_x.py").write_text("raise SystemExit\n")
    out = export(source, tmp_path / "out", trust_remote_code=trust)
    assert (out / "modeling_x.py").exists() == trust


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {}), ("qwen2", {}), ("gemma2", {"tie_word_embeddings": True}), ("gpt_neox", {}), ("opt", {})],
)
def test_keys_are_the_source_plus_scales_and_the_rest_is_untouched(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    source = save_tiny_model(tmp_path / "source", family, **overrides)
    run = prepared(source)
    before, after = read_tensors(source), read_tensors(export_run(run, tmp_path / "out").folder)
    quantized = [linear.fqn for linear in run.plan.quantized]
    scales = {f"{fqn}.{leaf}" for fqn in quantized for leaf in ("weight_scale", "input_scale")}
    assert after.keys() == before.keys() | scales
    assert not any("inv_freq" in name for name in after)
    for name in before.keys() - {f"{fqn}.weight" for fqn in quantized}:
        assert before[name].dtype == after[name].dtype
        assert raw_bytes(before[name]) == raw_bytes(after[name]), name
    for fqn in quantized:
        assert after[f"{fqn}.weight"].dtype == torch.float8_e4m3fn
        assert after[f"{fqn}.weight_scale"].shape == (after[f"{fqn}.weight"].shape[0],)
        assert after[f"{fqn}.input_scale"].shape == (1,)
        assert {after[f"{fqn}.{s}"].dtype for s in ("weight_scale", "input_scale")} == {torch.float32}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_tied_head_is_not_written_and_is_tied_again(tmp_path: Path, family: str) -> None:
    source = save_tiny_model(tmp_path / "source", family, tie_word_embeddings=True)
    out = export(source, tmp_path / "out")
    assert "lm_head.weight" not in read_tensors(out)
    model = load_quantized_model(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tiny_model(family, tie_word_embeddings=True).lm_head.weight)


def head_of_its_own(model: Any) -> Any:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    return model


# The first is not tied, the second is, if its config does not say.
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("way", ["folder", "memory"])
def test_an_untied_head_is_kept(tmp_path: Path, family: str, way: str) -> None:
    model = head_of_its_own(tiny_model(family, tie_word_embeddings=True))
    model.config.tie_word_embeddings = False
    if way == "folder":
        model.save_pretrained(tmp_path / "source")
    out = export(tmp_path / "source" if way == "folder" else model, tmp_path / "out")
    assert AutoConfig.from_pretrained(out).tie_word_embeddings is False
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert not torch.equal(embedding, head)
    for load in (load_quantized_model, AutoModelForCausalLM.from_pretrained):
        reloaded = load(out)
        assert torch.equal(reloaded.model.embed_tokens.weight, embedding)
        assert torch.equal(reloaded.lm_head.weight, head)


def test_a_head_of_its_own_is_kept_whatever_the_config_says(tmp_path: Path) -> None:
    model = head_of_its_own(tiny_model(tie_word_embeddings=True))
    assert model.config.tie_word_embeddings
    out = export(model, tmp_path / "out")
    assert torch.equal(read_tensors(out)["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(load_quantized_model(out).lm_head.weight, model.lm_head.weight)


def test_a_flag_that_says_untied_gives_a_model_in_memory_both_tensors(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.config.tie_word_embeddings = False
    tensors = read_tensors(export(model, tmp_path / "out"))
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_nothing_in_shards_is_lost_if_the_config_says_nothing_of_tying(tmp_path: Path, family: str) -> None:
    source = save_tiny_model(tmp_path / "source", family, max_shard_size="60KB")
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (source / "config.json").write_text(json.dumps(config))
    run = prepared(source, max_shard_size="60KB")
    before, after = read_tensors(source), read_tensors(export_run(run, tmp_path / "out").folder)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    scales = {f"{x.fqn}.{leaf}" for x in run.plan.quantized for leaf in ("weight_scale", "input_scale")}
    assert after.keys() == before.keys() | scales
    assert torch.equal(load_quantized_model(tmp_path / "out").lm_head.weight, before["lm_head.weight"])


def test_weights_that_are_not_contiguous_are_saved(tmp_path: Path) -> None:
    model = tiny_model()
    plain = export(model, tmp_path / "plain")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert not model.model.layers[1].mlp.up_proj.weight.is_contiguous()
    assert_same_tensors(plain, export(model, tmp_path / "strided"))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {}), ("qwen2", {}), ("gemma3_text", {"tie_word_embeddings": True}), ("gpt_neox", {}), ("opt", {})],
)
def test_a_model_in_memory_gives_the_same_tensors_as_its_folder(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    source = save_tiny_model(tmp_path / "source", family, **overrides)
    from_path = export(source, tmp_path / "one")
    model = tiny_model(family, **overrides)
    assert not model.name_or_path
    # The folder's own, as transformers may load a tokenizer as another class than it was saved from.
    from_memory = export(model, tmp_path / "two", load_tokenizer(open_model(source)))
    assert_same_tensors(from_path, from_memory)
    assert torch.equal(logits(load_quantized_model(from_path)), logits(load_quantized_model(from_memory)))


def test_a_model_in_memory_brings_its_tokenizer_if_it_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    caplog.set_level(logging.INFO)
    with_one = export(tiny_model(), tmp_path / "one", tiny_tokenizer())
    expected = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert expected <= {p.name for p in with_one.iterdir()}
    assert "so none is exported" not in caplog.text
    without = export(tiny_model(), tmp_path / "two")
    assert not (without / "tokenizer.json").exists()
    assert "no tokenizer was given with the model in memory, so none is exported" in caplog.text


def test_an_invalid_generation_config_in_memory_is_saved_as_it_is(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.6
    saved = json.loads((export(model, tmp_path / "out") / "generation_config.json").read_text())
    assert saved["temperature"] == 0.6
    assert saved.get("do_sample", False) is False


class Stopped(Exception):
    """Raised by the tests in the middle of a run."""


def stop(*_args: Any, **_kwargs: Any) -> None:
    raise Stopped


@pytest.mark.parametrize("target", ["make_report", "mean_sqnr_db"])
def test_a_failure_late_in_the_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    run = prepared(save_tiny_model(tmp_path / "source"))
    monkeypatch.setattr(pipeline, target, stop)
    with pytest.raises(Stopped):
        export_run(run, tmp_path / "deep" / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_failure_between_two_blocks_leaves_the_users_files_only(tmp_path: Path) -> None:
    run = prepared(save_tiny_model(tmp_path / "source"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    with pytest.raises(Stopped):
        export_run(run, out, on_block=stop)
    assert [p.name for p in out.iterdir()] == ["notes.md"]
    assert (export_run(run, out).folder / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: no")]
)
def test_a_lack_of_memory_names_what_to_make_smaller(tmp_path: Path, error: Exception) -> None:
    def forward(*_args: Any, **_kwargs: Any) -> None:
        raise error

    run = prepared(save_tiny_model(tmp_path / "source"))
    run.plan.skeleton.model.model.layers[1].mlp.forward = forward
    with pytest.raises(ConfigError, match=f"out of memory on cpu with batch_size 2 and seqlen 2048; .*{error}"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_weight_leaves_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.nan
    with pytest.raises(NumericsError, match=r"model\.layers\.1\.mlp\.down_proj"):
        export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_earlier_export(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    out = export(source, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(Stopped):
        export_run(prepared(source, overwrite=True), out, on_block=stop)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_an_existing_export_is_replaced_only_when_asked(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    out = export(source, tmp_path / "out", max_shard_size="60KB")
    (out / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        export(source, out)
    export(source, out, overwrite=True)
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert (out / "notes.md").read_text() == "mine"
    assert_same_tensors(out, export(source, tmp_path / "fresh"))


@pytest.mark.parametrize("name", ["source", "."])
def test_the_source_is_never_the_target(tmp_path: Path, name: str) -> None:
    source = save_tiny_model(tmp_path / "source")
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    with pytest.raises(ConfigError, match="must not be or contain the source"):
        export(source, tmp_path / name, overwrite=True)
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_another_checkpoint_in_the_target_is_never_replaced(tmp_path: Path) -> None:
    source, other = save_tiny_model(tmp_path / "source"), save_tiny_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="which this program did not write"):
        export(source, other, overwrite=True)


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    one, two = export(source, tmp_path / "one"), export(source, tmp_path / "two")
    for name in {p.name for p in one.iterdir()} - {"quantization_report.json"}:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("iters", [0, 2])
def test_inference_mode_makes_no_difference(tmp_path: Path, iters: int) -> None:
    source = save_tiny_model(tmp_path / "source")
    settings = {"iters": iters, "lr": 0.2, "not_use_best_mse": True}
    with torch.inference_mode():
        wrapped = export(source, tmp_path / "wrapped", **settings)
        in_memory = export(tiny_model(), tmp_path / "in_memory", tiny_tokenizer(), **settings)
    plain = export(source, tmp_path / "plain", **settings)
    assert_same_tensors(plain, wrapped)
    assert_same_tensors(plain, in_memory)


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    run = prepared(source, ignore_layers=parse_names("down_proj"))
    summary = export_run(run, tmp_path / "out")
    report = json.loads((summary.folder / "quantization_report.json").read_text())
    assert report["ignored"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert report["calibration"]["tokens"] == ROWS.numel()
    assert report["calibration"]["probe_tokens"] == 512
    assert report["ranges_on_few_tokens"] == []
    assert len([layer for block in report["blocks"] for layer in block["layers"]]) == 12
    assert report["totals"]["export_bytes"] == (summary.folder / "model.safetensors").stat().st_size
    assert set(report["files"]) == {p.name for p in summary.folder.iterdir()}


@pytest.mark.parametrize(("family", "share"), [("gpt_oss", 14), ("qwen3_moe", None)])
def test_a_model_that_stays_mostly_in_16_bit_is_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, family: str, share: int | None
) -> None:
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    prepared(tiny_moe_model(family))
    told = [message for message in caplog.messages if message.startswith("only ")]
    expected = f"only {share} % of the weights of linear layers become FP8; among those that stay in 16 bit is "
    assert [message.startswith(expected) and "experts" in message for message in told] == [True] * (share is not None)


def test_ranges_that_hang_on_few_tokens_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.model.embed_tokens.weight.data[:, 3] = 0.0
    model.model.embed_tokens.weight.data[ROWS[1, 5], 3] = 100.0
    times = int(torch.eq(ROWS, ROWS[1, 5]).sum())
    assert times < 4
    with caplog.at_level("INFO", logger="autoround_fp8"):
        summary = export_run(prepared(model, range_probes=False), tmp_path / "out")
    layers = {layer["fqn"]: layer for block in summary.report["blocks"] for layer in block["layers"]}
    named = summary.report["ranges_on_few_tokens"]
    assert named == sorted((n for n, v in layers.items() if v["num_peak_tokens"] < 4), key=named.index)
    counts = [layers[name]["num_peak_tokens"] for name in named]
    assert counts == sorted(counts)
    assert layers["model.layers.0.self_attn.q_proj"]["num_peak_tokens"] == times
    assert "model.layers.0.self_attn.q_proj" in named
    (line,) = [message for message in caplog.messages if "hang on fewer than 4 tokens" in message]
    assert line.startswith(f"{len(named)} ranges of inputs or caches hang")
    assert named[0] in line


def test_scales_of_a_cache_that_hang_on_few_tokens_are_named() -> None:
    def block(index: int, k_peak_tokens: int, v_peak_tokens: int) -> BlockReport:
        fields = {"k_amax": 1.0, "v_amax": 1.0, "k_scale": 0.1, "v_scale": 0.1, "num_tokens": 9}
        cache = CacheReport(fqn=f"{index}.attn", k_peak_tokens=k_peak_tokens, v_peak_tokens=v_peak_tokens, **fields)
        return BlockReport(fqn=str(index), seconds=0.0, peak_memory_bytes=0, layers=(), cache=cache)

    assert ranges_on_few_tokens([block(0, 3, 4), block(1, 16, 1)]) == ["1.attn.v_scale", "0.attn.k_scale"]


def test_files_are_safetensors_of_transformers_kind(tmp_path: Path) -> None:
    out = export(save_tiny_model(tmp_path / "source"), tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_source_cut_short_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source")
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
