"""Every algorithm, alone and with gradient tuning: what is tuned, written and reloaded is one model, every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model
from tiny_moe_models import save_tiny_moe_model

from autoround_fp8.autoround import AutoRound
from autoround_fp8.calibration.dataset import make_batches
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.export import MemorySink
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import compress, export_run, prepare

ROWS = torch.randint(4, VOCAB_SIZE, (10, 40), generator=torch.Generator().manual_seed(11))
SETTINGS: dict[str, dict[str, Any]] = {
    "rtn": {"algorithm": "rtn"},
    "mse": {"algorithm": "mse"},
    "gptq": {"algorithm": "gptq"},
    "signround": {"algorithm": "signround", "iters": 6, "minmax_lr": 0.01, "not_use_best_mse": True},
    "mse+signround": {"algorithm": "mse", "iters": 6},
    "gptq+signround": {"algorithm": "gptq", "iters": 6, "gradient_accumulate_steps": 2, "not_use_best_mse": True},
}


def config(**settings: Any) -> QuantizeConfig:
    base = {"dataset": ROWS, "device": "cpu", "calibration_dtype": "float32", "batch_size": 1}
    return QuantizeConfig(**{**base, "enable_quanted_input": True, **settings})


def source_of(folder: Path, family: str) -> Path:
    if family in ("qwen3_moe", "granitemoe"):
        return save_tiny_moe_model(folder, family, with_tokenizer=False)
    return save_tiny_model(folder, family, dtype=torch.float32, with_tokenizer=False)


def last_hidden_states(model: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch, use_cache=False)
    handle.remove()
    return seen


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe", "granitemoe"])
def test_tuned_exported_and_reloaded_are_one_model(tmp_path: Path, family: str, name: str) -> None:
    run = prepare(config(**SETTINGS[name]), open_model(source_of(tmp_path / "source", family)))
    result = compress(run, MemorySink())
    export_run(run, tmp_path / "out")
    model = load_quantized_model(tmp_path / "out", dtype="float32", kernel="reference")
    expected = last_hidden_states(model, make_batches(run.data.samples, 1))
    assert len(expected) == len(result.hidden_states) == len(ROWS)
    for ours, reloaded in zip(result.hidden_states, expected, strict=True):
        assert torch.equal(ours, reloaded)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_settings_write_the_same_bytes(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path / "source", "qwen3_moe")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        export_run(prepare(config(**SETTINGS[name]), open_model(source)), folder)
    one, two = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    reports = [json.loads(files.pop("quantization_report.json")) for files in (one, two)]
    assert one == two
    for report in reports:
        report["totals"] = {k: v for k, v in report["totals"].items() if k not in ("seconds", "peak_memory_bytes")}
        for block in report["blocks"]:
            del block["seconds"], block["peak_memory_bytes"]
    assert reports[0] == reports[1]
    losses = [block["tuning"] and block["tuning"]["losses"] for block in reports[0]["blocks"]]
    assert all(losses) if "signround" in name else not any(losses)


def test_tuning_changes_codes_and_the_report_says_where(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama")
    plain, tuned = MemorySink(), MemorySink()
    compress(prepare(config(algorithm="mse"), open_model(source)), plain)
    result = compress(prepare(config(algorithm="mse", iters=6, not_use_best_mse=True), open_model(source)), tuned)
    for block in result.blocks:
        assert block.tuning is not None
        assert block.tuning.best_step == 6
        for layer in block.layers:
            assert layer.algorithm == "mse+signround"
            codes = (sink.layers[layer.fqn].weight.view(torch.uint8) for sink in (plain, tuned))
            assert not torch.equal(*codes)


def test_python_and_quantize_take_the_same_settings(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "llama")
    auto_round = AutoRound(source, dataset=ROWS, iters=4, algorithm="mse", device_map="cpu", batch_size=2)
    model, _ = auto_round.quantize()
    reloaded = load_quantized_model(auto_round.save_quantized(tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ROWS[:2]).logits, reloaded(input_ids=ROWS[:2]).logits)
