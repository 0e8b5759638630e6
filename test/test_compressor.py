"""The block-by-block run must be the whole model's forward, whatever the batching; odd weights do no harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, PAD, VOCAB_SIZE, save_tiny_model, tiny_model, tiny_tokenizer
from tiny_moe_models import dead_experts_model
from transformers import AutoModelForCausalLM

from autoround_fp8.calibration.dataset import make_batches
from autoround_fp8.compressor import CompressionResult
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import NumericsError
from autoround_fp8.export import MemorySink
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import compress, export_run, prepare
from autoround_fp8.records import LayerReport, QuantizedLinear
from autoround_fp8.tuning.input_ranges import UNSEEN


def rows(count: int = 3, length: int = 20, seed: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator) for _ in range(count)]


def compressed(folder: Any, dataset: Any, **settings: Any) -> tuple[dict[str, QuantizedLinear], CompressionResult, Any]:
    config = QuantizeConfig(dataset=dataset, device="cpu", **{"calibration_dtype": "float32", **settings})
    run = prepare(config, open_model(folder))
    sink = MemorySink()
    return sink.layers, compress(run, sink), run


def last_hidden_states(model: Any, container: str, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the last decoder layer returns in the whole model's own forward."""
    seen: list[torch.Tensor] = []

    def hook(_module: Any, _args: Any, out: Any) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    handle = model.get_submodule(container)[-1].register_forward_hook(hook)
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch, use_cache=False)
    handle.remove()
    return seen


def same_batches(run: Any) -> list[torch.Tensor]:
    return make_batches(run.data.samples, run.config.batch_size)


def assert_same_scales(one: dict[str, QuantizedLinear], other: dict[str, QuantizedLinear], rtol: float) -> None:
    assert one.keys() == other.keys()
    for fqn, layer in one.items():
        torch.testing.assert_close(layer.input_scale, other[fqn].input_scale, rtol=rtol, atol=0.0)
        assert torch.equal(layer.weight_scale, other[fqn].weight_scale), fqn


def assert_same_amax(one: CompressionResult, other: CompressionResult, rel: float) -> None:
    for block, twin in zip(one.blocks, other.blocks, strict=True):
        for layer, other_layer in zip(block.layers, twin.layers, strict=True):
            assert layer.input_amax == pytest.approx(other_layer.input_amax, rel=rel), layer.fqn
            assert layer.num_tokens == other_layer.num_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_the_whole_model(tmp_path: Path, family: str, dtype: str) -> None:
    save_tiny_model(tmp_path, family, with_tokenizer=False)
    mixed = [*rows(3, 20), *rows(2, 11, seed=8)]
    _, result, run = compressed(tmp_path, mixed, batch_size=2, calibration_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    expected = last_hidden_states(model, run.plan.skeleton.container_name, same_batches(run))
    assert len(expected) == len(result.hidden_states) == 3
    for ours, whole in zip(result.hidden_states, expected, strict=True):
        assert ours.dtype == getattr(torch, dtype)
        assert torch.equal(ours, whole)


def spoil_pad_row(folder: Path, value: float = 10.0) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][PAD] = 0.0
    tensors["model.embed_tokens.weight"][PAD, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})


def padded(samples: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    width = max(len(s) for s in samples)
    ids = torch.full((len(samples), width), PAD)
    mask = torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        where = slice(width - len(sample), width) if side == "left" else slice(0, len(sample))
        ids[i, where], mask[i, where] = sample, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "opt"])
def test_batch_size_does_not_change_scales(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, with_tokenizer=False)
    data = [*rows(3, 12), *rows(2, 7, seed=9)]
    layers, result, _ = compressed(tmp_path, data, batch_size=1)
    for batch_size in (2, 3):
        others, other, _ = compressed(tmp_path, data, batch_size=batch_size)
        assert_same_amax(result, other, 1e-5)
        assert_same_scales(layers, others, 2**-7)  # scales are rounded to bfloat16: at most one step apart


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_padding_never_counts(tmp_path: Path, side: str, batch_size: int) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    spoil_pad_row(tmp_path)
    data = [rows(1, 12)[0], rows(1, 7, seed=9)[0], rows(1, 12, seed=10)[0]]
    layers, result, _ = compressed(tmp_path, data, batch_size=1)
    others, other, run = compressed(tmp_path, [padded(data, side)], batch_size=batch_size)
    assert sorted(len(s) for s in run.data.samples) == [7, 12, 12]
    assert_same_amax(result, other, 1e-5)
    assert_same_scales(layers, others, 2**-7)


def test_the_pad_embedding_changes_nothing(tmp_path: Path) -> None:
    data = [padded([rows(1, 12)[0], rows(1, 7, seed=9)[0]], "left")]
    save_tiny_model(tmp_path, with_tokenizer=False)
    before, _, _ = compressed(tmp_path, data)
    spoil_pad_row(tmp_path)
    after, _, _ = compressed(tmp_path, data)
    assert_same_scales(before, after, 0.0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("qwen2", {}),
        ("gemma3_text", {}),
        ("gemma2", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("phi3", {}),
        ("olmo2", {}),
        ("gpt_neox", {}),
        ("opt", {}),
    ],
)
def test_quantised_inputs_are_the_reloaded_model(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    source = save_tiny_model(tmp_path / "source", family, dtype=torch.float32, with_tokenizer=False, **overrides)
    config = QuantizeConfig(
        dataset=rows(4), batch_size=2, device="cpu", calibration_dtype="float32", enable_quanted_input=True
    )
    run = prepare(config, open_model(source))
    result = compress(run, MemorySink())
    export_run(run, tmp_path / "out")
    model = load_quantized_model(tmp_path / "out", dtype="float32", kernel="reference")
    expected = last_hidden_states(model, run.plan.skeleton.container_name, same_batches(run))
    for ours, reloaded in zip(result.hidden_states, expected, strict=True):
        assert torch.equal(ours, reloaded)


def test_quantised_inputs_change_later_blocks_only(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    _, original, _ = compressed(tmp_path, rows())
    _, quantized, _ = compressed(tmp_path, rows(), enable_quanted_input=True)
    amax = [[[layer.input_amax for layer in b.layers] for b in r.blocks] for r in (original, quantized)]
    assert amax[0][0] == amax[1][0]
    assert amax[0][1] != amax[1][1]


def change(folder: Path, name: str, function: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = function(tensors[name].clone())
    save_file(tensors, path, metadata={"format": "pt"})


def with_value(value: float) -> Any:
    def function(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return function


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_nan_weight_stops_the_run_and_is_named(tmp_path: Path, name: str, value: float) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    change(tmp_path, name, with_value(value))
    with pytest.raises(NumericsError, match=name.replace(".", r"\.")):
        compressed(tmp_path, rows())


def test_overflowing_activations_stop_the_run_and_name_the_layer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    for name in ("gate_proj", "up_proj"):
        change(tmp_path, f"model.layers.0.mlp.{name}.weight", lambda w: torch.full_like(w, 3e4).copysign(w))
    with pytest.raises(NumericsError, match=r"model\.layers\.\d\.\w+"):
        compressed(tmp_path, rows(), calibration_dtype="float16")


def test_fused_layers_share_the_input_scale(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    layers, _, _ = compressed(tmp_path, rows())
    for block in (0, 1):
        attention, mlp = f"model.layers.{block}.self_attn.", f"model.layers.{block}.mlp."
        for members in ([attention + n for n in ("q_proj", "k_proj", "v_proj")], [mlp + "gate_proj", mlp + "up_proj"]):
            assert len({float(layers[m].input_scale) for m in members}) == 1
        assert float(layers[mlp + "down_proj"].input_scale) != float(layers[mlp + "up_proj"].input_scale)


def test_every_layer_is_reported_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    layers, result, run = compressed(tmp_path, rows())
    reported = [layer.fqn for block in result.blocks for layer in block.layers]
    assert reported == list(layers) == [linear.fqn for linear in run.plan.quantized]
    assert len(reported) == 14
    assert {layer.num_tokens for block in result.blocks for layer in block.layers} == {60}
    assert all(20 < layer.weight_sqnr_db < 45 for block in result.blocks for layer in block.layers)


def zero_row(weight: torch.Tensor) -> torch.Tensor:
    weight[3] = 0.0
    return weight


def subnormal_row(weight: torch.Tensor) -> torch.Tensor:
    weight[3] = 1e-38
    return weight


@pytest.mark.parametrize("function", [zero_row, subnormal_row, torch.zeros_like])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"])
def test_degenerate_rows_give_finite_scales(tmp_path: Path, name: str, function: Any) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    change(tmp_path, f"{name}.weight", function)
    layers, _, _ = compressed(tmp_path, rows())
    for layer in layers.values():
        for scale in (layer.weight_scale, layer.input_scale):
            assert torch.isfinite(scale).all()
            assert (scale >= 2**-126).all()
    codes = layers[name].weight.float()
    assert torch.isfinite(codes).all()
    assert (codes[3] == 0).all() or function is subnormal_row


def test_a_layer_that_sees_only_zeros_gets_a_finite_scale(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    change(tmp_path, "model.layers.0.mlp.up_proj.weight", torch.zeros_like)
    layers, _, _ = compressed(tmp_path, rows())
    assert float(layers["model.layers.0.mlp.down_proj"].input_scale) == 2**-126


def test_the_largest_negative_value_decides_the_scale(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    one_side = torch.tensor(2)
    name = "model.layers.0.mlp.up_proj"
    change(tmp_path, f"{name}.weight", lambda w: w.clamp(-0.1, 0.1).index_fill_(1, one_side, -10))
    layers, _, _ = compressed(tmp_path, rows(), algorithm="rtn")
    layer = layers["model.layers.0.mlp.up_proj"]
    assert (layer.weight_scale >= 10 / 448).all()
    assert (layer.weight_scale <= 10 / 448 * (1 + 2**-7)).all()


def test_weights_are_coded_from_their_stored_values_in_any_calibration_dtype(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    one, _, _ = compressed(tmp_path, rows(), calibration_dtype="float32", algorithm="mse")
    other, _, _ = compressed(tmp_path, rows(), calibration_dtype="bfloat16", algorithm="mse")
    for fqn, layer in one.items():
        assert torch.equal(layer.weight.view(torch.uint8), other[fqn].weight.view(torch.uint8))


def test_the_skeleton_is_left_empty(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, with_tokenizer=False)
    _, _, run = compressed(tmp_path, rows())
    assert {p.device.type for p in run.plan.skeleton.model.parameters()} == {"meta"}


def test_a_model_in_memory_is_left_as_it_is() -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compressed(model, rows())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


RARE = 101


@pytest.fixture
def with_sink(tmp_path: Path) -> Path:
    """A model in which one special token, which no data has, is 50 times as large as all others."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] = 0.0
        model.model.embed_tokens.weight[RARE, 5] = 50.0
        model.model.layers[0].input_layernorm.weight[5] = 50.0
    model.save_pretrained(tmp_path / "sink")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"w{RARE}"]})
    tokenizer.save_pretrained(tmp_path / "sink")
    return tmp_path / "sink"


def layers_of(result: CompressionResult) -> dict[str, LayerReport]:
    return {layer.fqn: layer for block in result.blocks for layer in block.layers}


@pytest.mark.parametrize("enable_quanted_input", [False, True])
def test_probes_find_a_sink_that_the_data_never_show(with_sink: Path, enable_quanted_input: bool) -> None:
    data = [row[row != RARE][:18] for row in rows(10)]
    settings = {"algorithm": "gptq", "act_headroom": 1.0, "enable_quanted_input": enable_quanted_input}
    plain, without, _ = compressed(with_sink, data, range_probes=False, **settings)
    probed, result, run = compressed(with_sink, data, **settings)
    assert sum(batch.numel() for batch in run.probes) == 512
    name = "model.layers.0.self_attn.q_proj"
    assert layers_of(result)[name].input_amax > 20 * layers_of(without)[name].input_amax
    assert float(probed[name].input_scale) > 20 * float(plain[name].input_scale)
    for fqn, layer in layers_of(result).items():
        other = layers_of(without)[fqn]
        assert layer.input_amax >= other.input_amax or (enable_quanted_input and ".1." in fqn)
        assert layer.num_tokens == other.num_tokens == 180
        assert layer.algorithm == other.algorithm == "gptq"
    assert [len(batch) for batch in result.hidden_states] == [len(batch) for batch in same_batches(run)]


def test_probes_count_for_nothing_but_ranges(with_sink: Path) -> None:
    plain, without, _ = compressed(with_sink, rows(10), range_probes=False, algorithm="gptq")
    probed, result, run = compressed(with_sink, rows(10), algorithm="gptq")
    assert any(layer.input_scale > plain[fqn].input_scale for fqn, layer in probed.items())
    for fqn, layer in plain.items():  # equal codes: equal second moments
        assert torch.equal(layer.weight.view(torch.uint8), probed[fqn].weight.view(torch.uint8)), fqn
        assert torch.equal(layer.weight_scale, probed[fqn].weight_scale), fqn
    assert len(result.hidden_states) == len(without.hidden_states)
    for one, other in zip(result.hidden_states, without.hidden_states, strict=True):
        assert torch.equal(one, other)
    again, _, _ = compressed(with_sink, rows(10), algorithm="gptq")
    assert_same_scales(probed, again, 0.0)
    assert run.data.num_tokens == 200


@pytest.mark.parametrize("mode", ["shared", "per_expert"])
def test_an_expert_that_only_probes_reached_is_still_unseen(mode: str) -> None:
    model = dead_experts_model()
    model.model.embed_tokens.weight.data[RARE, 0] = -50.0
    data = [row[row != RARE][:18] for row in rows()]
    layers, result, _ = compressed(model, data, moe_input_scale=mode, act_headroom=1.0)
    reports = layers_of(result)
    assert [list(block.expert_tokens.values()) for block in result.blocks] == [[[54, 54, 0, 0]]] * 2
    for leaf in ("gate_proj", "down_proj"):
        experts = [f"model.layers.0.mlp.experts.{i}.{leaf}" for i in range(4)]
        assert [reports[name].num_tokens for name in experts] == [54, 54, 0, 0]
        assert [reports[name].source for name in experts[2:]] == [UNSEEN] * 2
        largest = max(reports[name].input_amax for name in experts)
        assert all(reports[name].input_amax > 0 for name in experts[2:])
        assert all(float(layers[name].input_scale) >= largest / 448 for name in experts[2:])
    with pytest.raises(NumericsError, match="2 of 4 experts saw no calibration token"):
        compressed(model, data, moe_input_scale=mode, unseen_experts="error")


def test_probes_can_be_switched_off(with_sink: Path) -> None:
    _, _, run = compressed(with_sink, rows(), range_probes=False)
    assert run.probes == ()
