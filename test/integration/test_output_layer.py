"""An FP8 output layer from the switch to the reloaded model: its range, its codes, who is refused, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM

from autoround_fp8.autoround import AutoRound
from autoround_fp8.block_walk import BlockWalk, simulated_forwards
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.convert import convert_checkpoint
from autoround_fp8.errors import ConfigError
from autoround_fp8.export import MemorySink
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.model_source import open_model
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.pipeline import PreparedRun, compress, export_run, prepare

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
ROWS = torch.randint(4, VOCAB_SIZE, (5, 16), generator=torch.Generator().manual_seed(7))
OUTPUTS = {"llama": "lm_head", "gpt_neox": "embed_out"}


@pytest.fixture(scope="module", params=OUTPUTS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("output") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("output") / "llama", "llama")


def prepared(source: Any, **settings: Any) -> PreparedRun:
    # One sample per forward, so that matrix products have the same shapes wherever they are computed.
    base = {"dataset": ROWS, "device": "cpu", "calibration_dtype": "float32", "batch_size": 1, "quant_lm_head": True}
    return prepare(QuantizeConfig(**{**base, **settings}), open_model(source))


@torch.no_grad()
def logits(model: Any, rows: Iterable[torch.Tensor] = ROWS) -> torch.Tensor:
    return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


@torch.no_grad()
def largest_output_input(model: Any) -> float:
    seen: list[float] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(float(args[0].abs().max()))
    )
    logits(model)
    hook.remove()
    return max(seen)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"algorithm": "rtn"}, {"iters": 4, "lr": 0.1}], ids=str)
def test_reloaded_logits_are_the_simulations_bit_for_bit(
    source: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run = prepared(source, enable_quanted_input=True, **settings)
    sink = MemorySink()
    result = compress(run, sink)
    assert run.plan.output_layer is not None
    walk = BlockWalk(run.plan.skeleton, run.source.tensors, CPU)
    simulated = simulated_forwards(run.plan.skeleton.model, [run.plan.output_layer], sink.layers, CPU)
    with walk.output_layers(None) as logits_of, swapped_forwards(simulated):
        expected = torch.cat([logits_of(sample) for batch in result.hidden_states for sample in batch])
    folder = export_run(run, tmp_path / "out").folder
    model = load_quantized_model(folder, dtype="float32", kernel="reference")
    assert torch.equal(logits(model, run.data.samples), expected)


@pytest.mark.parametrize("quantized_inputs", [False, True])
def test_its_range_is_that_of_the_last_norm_on_the_stream_it_is_fed_by(
    source: Path, tmp_path: Path, quantized_inputs: bool
) -> None:
    summary = export_run(prepared(source, enable_quanted_input=quantized_inputs, range_probes=False), tmp_path / "out")
    block = summary.report["blocks"][-1]
    (layer,) = block["layers"]
    assert block["fqn"] == layer["fqn"] == OUTPUTS[source.name]
    assert (layer["algorithm"], layer["num_tokens"], layer["source"]) == ("gptq", ROWS.numel(), "observed")
    if quantized_inputs:
        model = load_quantized_model(summary.folder, dtype="float32", kernel="reference")
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert layer["input_amax"] == pytest.approx(largest_output_input(model), rel=1e-5)
    smallest = 2.0 * layer["input_amax"] / 448
    assert smallest <= layer["input_scale"] < 2.0 * smallest * (1 + 2**-7)  # searched within the octave


def test_probes_widen_its_range(llama: Path) -> None:
    amaxes = [
        compress(prepared(llama, range_probes=probes), MemorySink()).blocks[-1].layers[0].input_amax
        for probes in (False, True)
    ]
    assert amaxes[1] > amaxes[0]


def test_a_float32_run_takes_its_weight_in_the_dtype_of_the_source(llama: Path) -> None:
    run = prepared(llama)
    module = BlockWalk(run.plan.skeleton, run.source.tensors, CPU).output_module()
    assert run.dtype == torch.float32
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(module.weight, CheckpointReader(llama).read("lm_head.weight"))


@pytest.mark.parametrize("format", ["fp8_static", "llm_compressor"])
def test_in_memory_and_on_disk_and_back(source: Path, tmp_path: Path, format: str) -> None:
    rounder = AutoRound(str(source), dataset=ROWS, device_map="cpu", format=format, quant_lm_head=True)
    model, schemes = rounder.quantize()
    assert not schemes[OUTPUTS[source.name]]["act_dynamic"]
    folder = rounder.save_quantized(tmp_path / "out")
    again = load_quantized_model(folder)
    assert isinstance(again.get_output_embeddings(), WeightFP8ActFP8StaticQuantLinear)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_quantized_model(tmp_path / "again")), logits(model))
    if format == "fp8_static":
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def test_conversions_keep_it_where_the_format_has_it(source: Path, tmp_path: Path) -> None:
    settings = {"scheme": "FP8_STATIC_TENSOR", "dataset": ROWS, "device_map": "cpu", "quant_lm_head": True}
    rounder = AutoRound(str(source), format="llm_compressor", **settings)
    model, folder = rounder.quantize_and_save(tmp_path / "out")
    result = convert_checkpoint(folder, tmp_path / "static", format="fp8_static")
    assert result.dequantized == {"fp8_static": ()}
    assert torch.equal(logits(load_quantized_model(tmp_path / "static")), logits(model))
    result = convert_checkpoint(folder, tmp_path / "fp8", format="fp8")
    assert result.dequantized == {"fp8": (OUTPUTS[source.name],)}
    assert not isinstance(
        load_quantized_model(tmp_path / "fp8").get_output_embeddings(), WeightFP8ActFP8StaticQuantLinear
    )


def test_the_embedding_stays_as_it_was(llama: Path, tmp_path: Path) -> None:
    folder = export_run(prepared(llama), tmp_path / "out").folder
    one, other = (CheckpointReader(f).read("model.embed_tokens.weight") for f in (llama, folder))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        ({"tie_word_embeddings": True}, {}, r"'lm_head' cannot be FP8 \(quant_lm_head\): its weight is tied"),
        ({}, {"ignore_layers": ("lm_head",)}, "'lm_head' is asked for in FP8 .* and, by ignore_layers"),
        ({}, {"format": "fp8"}, "'fp8' has no FP8 output layer"),
    ],
)
def test_what_cannot_be_is_refused_before_work(
    overrides: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tiny_model("llama", **overrides), **settings)
