"""Each algorithm does what it says to a block's layers, and says what it fell back to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model
from tiny_moe_models import dead_experts_model, save_tiny_moe_model

from autoround_fp8.block_quantizer import BlockQuantizer
from autoround_fp8.compressor import CompressionResult
from autoround_fp8.config import ALGORITHMS, QuantizeConfig
from autoround_fp8.errors import ConfigError, NumericsError
from autoround_fp8.export import MemorySink
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import compress, prepare
from autoround_fp8.schemes import parse_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (8, 40), generator=torch.Generator().manual_seed(5))


def quantized(source: object, rows: torch.Tensor = ROWS, **settings: object) -> tuple[MemorySink, CompressionResult]:
    config = QuantizeConfig(dataset=rows, device="cpu", calibration_dtype="float32", **settings)
    sink = MemorySink()
    return sink, compress(prepare(config, open_model(source)), sink)


def algorithms_of(result: CompressionResult) -> dict[str, str]:
    return {layer.fqn: layer.algorithm for block in result.blocks for layer in block.layers}


def codes_of(sink: MemorySink, fqn: str) -> torch.Tensor:
    return sink.layers[fqn].weight.view(torch.uint8)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dense"), "qwen2", with_tokenizer=False)


def test_every_algorithm_of_the_config_runs_and_differs(dense: Path) -> None:
    steps = {"signround": {"iters": 20, "lr": 0.02, "enable_quanted_input": False, "not_use_best_mse": True}}
    found = {algorithm: quantized(dense, algorithm=algorithm, **steps.get(algorithm, {})) for algorithm in ALGORITHMS}
    name = "model.layers.1.mlp.down_proj"
    codes = [codes_of(sink, name) for sink, _ in found.values()]
    assert len(codes) == len(ALGORITHMS) == 4
    assert not any(torch.equal(one, other) for i, one in enumerate(codes) for other in codes[:i])
    for algorithm, (_, result) in found.items():
        assert set(algorithms_of(result).values()) == {"rtn+signround" if algorithm == "signround" else algorithm}
        scales = {layer.fqn: layer.input_scale for block in result.blocks for layer in block.layers}
        plain = {layer.fqn: layer.input_scale for block in found["rtn"][1].blocks for layer in block.layers}
        if algorithm in ("rtn", "signround"):
            assert scales == plain
        else:  # searched within an octave, for the layers of one input together
            assert scales != plain
            assert all(plain[fqn] <= scale < 2 * plain[fqn] for fqn, scale in scales.items())
            q, k, gate, up = (
                scales[f"model.layers.0.{n}_proj"] for n in ("self_attn.q", "self_attn.k", "mlp.gate", "mlp.up")
            )
            assert (q, gate) == (k, up)


@pytest.mark.parametrize("algorithm", ["rtn", "mse", "gptq"])
@pytest.mark.parametrize("scheme", ["FP8_STATIC", "FP8_STATIC_TENSOR"])
def test_strips_of_rows_change_nothing(
    dense: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, scheme: str
) -> None:
    whole, result = quantized(dense, algorithm=algorithm, scheme=parse_scheme(scheme))
    monkeypatch.setattr("autoround_fp8.numerics.fp8._STRIP_ELEMENTS", 64 * 10)  # 10 rows of 64, 5 of 128
    strips, other = quantized(dense, algorithm=algorithm, scheme=parse_scheme(scheme))
    for fqn, layer in whole.layers.items():
        assert torch.equal(layer.weight_scale, strips.layers[fqn].weight_scale)
        same = torch.eq(codes_of(whole, fqn), codes_of(strips, fqn)).float().mean()
        # Products of other shapes may round otherwise, which moves an error on to later columns.
        assert same > 0.99 if algorithm == "gptq" else same == 1
    for one, two in zip(result.blocks[0].layers, other.blocks[0].layers, strict=True):
        assert one.weight_sqnr_db == pytest.approx(two.weight_sqnr_db, abs=0.01)


def test_weight_error_falls_with_mse_in_every_layer(dense: Path) -> None:
    plain, searched = (quantized(dense, algorithm=name)[1] for name in ("rtn", "mse"))
    for block, other in zip(plain.blocks, searched.blocks, strict=True):
        for layer, twin in zip(block.layers, other.layers, strict=True):
            assert layer.fqn == twin.fqn
            assert twin.weight_sqnr_db >= layer.weight_sqnr_db - 1e-4


def test_too_few_tokens_fall_back_layer_by_layer(dense: Path) -> None:
    # 80 tokens: enough for 64 inputs, too few for the 128 of down_proj.
    _, result = quantized(dense, ROWS[:2], algorithm="gptq")
    for fqn, algorithm in algorithms_of(result).items():
        assert algorithm == ("mse" if fqn.endswith("down_proj") else "gptq"), fqn


def test_experts_are_compensated_by_their_own_tokens(tmp_path: Path) -> None:
    folder = save_tiny_moe_model(tmp_path, "qwen3_moe", with_tokenizer=False)
    _, result = quantized(folder, algorithm="gptq")
    algorithms = algorithms_of(result)
    for block in result.blocks:
        for layer in block.layers:
            enough = layer.num_tokens >= layer.shape[1]
            assert algorithms[layer.fqn] == ("gptq" if enough else "mse"), layer.fqn
    experts = {fqn: algorithm for fqn, algorithm in algorithms.items() if ".experts." in fqn}
    assert set(experts.values()) == {"gptq", "mse"}  # busy ones and quiet ones


def test_unseen_experts_fall_back_too() -> None:
    _, result = quantized(dead_experts_model(), algorithm="gptq")
    algorithms = algorithms_of(result)
    assert algorithms["model.layers.0.mlp.experts.3.up_proj"] == "mse"
    assert algorithms["model.layers.0.mlp.experts.0.up_proj"] == "gptq"


def test_experts_whose_moments_are_too_large_are_searched_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_moe_model(tmp_path, "qwen3_moe", with_tokenizer=False)
    monkeypatch.setattr("autoround_fp8.block_quantizer._FREE_EXPERT_BYTES", 1000)
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    with caplog.at_level("INFO", logger="autoround_fp8"):
        _, result = quantized(folder, algorithm="gptq")
    algorithms = algorithms_of(result)
    assert {a for fqn, a in algorithms.items() if ".experts." in fqn} == {"mse"}
    assert {a for fqn, a in algorithms.items() if ".experts." not in fqn} == {"gptq"}
    assert "second moments of 16 experts' inputs" in caplog.text


@pytest.mark.parametrize("headroom", [1.0, 2.0, 4.0])
def test_headroom_multiplies_every_input_scale(dense: Path, headroom: float) -> None:
    base, wide = (quantized(dense, act_headroom=factor)[0] for factor in (1.0, headroom))
    for fqn, layer in wide.layers.items():
        assert float(layer.input_scale) == headroom * float(base.layers[fqn].input_scale)
        assert torch.equal(codes_of(wide, fqn), codes_of(base, fqn))


@pytest.mark.parametrize("headroom", [0.5, -1.0, float("nan"), float("inf"), "2", True])
def test_a_headroom_that_is_none_is_refused(headroom: object) -> None:
    with pytest.raises(ConfigError, match="act_headroom"):
        QuantizeConfig(act_headroom=headroom)


def test_the_plain_quantizer_needs_no_moments_and_stops_on_request() -> None:
    assert BlockQuantizer("mse")._moment_strides([], 10) == {}
    with pytest.raises(NumericsError, match="2 of 4 experts saw no calibration token"):
        quantized(dead_experts_model(), unseen_experts="error")
