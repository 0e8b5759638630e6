"""KV-cache scales from the option to the export and back: written, described, inspected, loaded over, converted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model
from tiny_moe_models import save_tiny_moe_model

from autoround_fp8.autoround import AutoRound
from autoround_fp8.convert import convert_checkpoint
from autoround_fp8.errors import AutoRoundError, CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.formats.kv_cache import KV_CACHE_SCHEME
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.inspection.report import format_inspection, inspect_checkpoint

ROWS = torch.randint(4, VOCAB_SIZE, (4, 24), generator=torch.Generator().manual_seed(11))
NAMES = [f"model.layers.{i}.self_attn.{part}_scale" for i in range(2) for part in "kv"]


def rounder(folder: Path, **settings: Any) -> AutoRound:
    base = {"dataset": ROWS, "device_map": "cpu", "algorithm": "rtn", "static_kv_dtype": "fp8"}
    return AutoRound(str(folder), **{**base, **settings})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("kv") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def export(source: Path) -> Path:
    return Path(rounder(source).quantize_and_save(source.parent / "export", format="llm_compressor")[1])


@pytest.fixture
def changed(export: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any], dict[str, Any]], Any]], Path]:
    """What to change in tensors and quantization_config -> a folder that is so changed."""

    def change(function: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Path:
        tensors, config = load_file(export / "model.safetensors"), json.loads((export / "config.json").read_text())
        function(tensors, config["quantization_config"])
        (tmp_path / "changed").mkdir()
        save_file(tensors, tmp_path / "changed" / "model.safetensors")
        (tmp_path / "changed" / "config.json").write_text(json.dumps(config))
        return tmp_path / "changed"

    return change


def test_the_export_differs_by_its_scales_alone(source: Path, export: Path, tmp_path: Path) -> None:
    plain = Path(rounder(source, static_kv_dtype=None).quantize_and_save(tmp_path / "o", format="llm_compressor")[1])
    tensors, without = load_file(export / "model.safetensors"), load_file(plain / "model.safetensors")
    assert sorted(tensors.keys() - without.keys()) == sorted(NAMES)
    assert all(torch.equal(tensors[n].view(torch.uint8), without[n].view(torch.uint8)) for n in without)
    assert len({float(tensors[name]) for name in NAMES}) > 1
    assert all(tensors[name].dtype == torch.float32 and tensors[name].shape == (1,) for name in NAMES)
    block, old = (json.loads((f / "config.json").read_text())["quantization_config"] for f in (export, plain))
    assert block == {**old, "kv_cache_scheme": dict(KV_CACHE_SCHEME)}


def test_report_and_card_have_them(export: Path) -> None:
    tensors = load_file(export / "model.safetensors")
    report = json.loads((export / "quantization_report.json").read_text())
    assert report["settings"]["static_kv_dtype"] == "fp8"
    for block in report["blocks"]:
        cache = block["cache"]
        assert cache["fqn"] == f"{block['fqn']}.self_attn"
        assert cache["k_scale"] == float(tensors[f"{cache['fqn']}.k_scale"])
        assert cache["v_scale"] == float(tensors[f"{cache['fqn']}.v_scale"])
        assert cache["num_tokens"] == ROWS.numel()
        assert cache["k_amax"] > 0
    assert (
        "| KV cache | calibrated FP8 E4M3 scales, one for keys and one for values, in 2 blocks |"
        in (export / "README.md").read_text().splitlines()
    )


def test_the_same_run_writes_the_same_bytes(source: Path, export: Path, tmp_path: Path) -> None:
    again = Path(rounder(source).quantize_and_save(tmp_path / "o", format="llm_compressor")[1])
    assert (again / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()


def test_what_quantize_made_can_be_saved(source: Path, export: Path, tmp_path: Path) -> None:
    auto = rounder(source, format="llm_compressor", static_kv_dtype="float8_e4m3fn")
    auto.quantize()
    saved = Path(auto.save_quantized(tmp_path / "o"))
    assert (saved / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()


def test_layers_that_are_kept_change_no_scale_of_the_cache(source: Path, export: Path, tmp_path: Path) -> None:
    kept = rounder(source, keep_layers=1).quantize_and_save(tmp_path / "o", format="llm_compressor")[1]
    one, other = load_file(Path(kept) / "model.safetensors"), load_file(export / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in NAMES)


def test_dynamic_inputs_take_calibration_data_for_it(source: Path, tmp_path: Path) -> None:
    auto = rounder(source, scheme="FP8_DYNAMIC", algorithm="gptq")
    folder = Path(auto.quantize_and_save(tmp_path / "o", format="llm_compressor")[1])
    assert set(NAMES) <= load_file(folder / "model.safetensors").keys()
    assert json.loads((folder / "quantization_report.json").read_text())["calibration"]["samples"] == len(ROWS)
    assert not inspect_checkpoint(folder).findings


def test_loading_leaves_them_alone_and_says_so(
    export: Path, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    plain = Path(rounder(source, static_kv_dtype=None).quantize_and_save(tmp_path / "o", format="llm_compressor")[1])
    with caplog.at_level(logging.INFO), torch.no_grad():
        expected = load_quantized_model(plain)(input_ids=ROWS).logits
        assert "KV-cache" not in caplog.text
        assert torch.equal(load_quantized_model(export)(input_ids=ROWS).logits, expected)
    records = [r for r in caplog.records if "KV-cache scales, which this package does not apply" in r.getMessage()]
    assert [record.levelno for record in records] == [logging.INFO]


@pytest.mark.parametrize("names", ["fp8_static", "fp8", "fake", "llm_compressor,fp8"])
def test_formats_that_cannot_hold_them_refuse_before_work(source: Path, tmp_path: Path, names: str) -> None:
    wrong = next(name for name in names.split(",") if name != "llm_compressor")
    scheme = None if "fp8" in names.split(",") else "FP8_STATIC"
    with pytest.raises(ConfigError, match=f"format '{wrong}' holds no KV-cache scales, which static_kv_dtype 'fp8'"):
        rounder(source, scheme=scheme).quantize_and_save(tmp_path / "o", format=names)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("value", ["int8", "fp8_e5m2", "", "FP8", 8, torch.float8_e4m3fn])
def test_other_dtypes_are_named(source: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"static_kv_dtype .* is not supported; choose from fp8, float8_e4m3fn"):
        rounder(source, static_kv_dtype=value)


def test_latent_attention_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_tiny_moe_model(tmp_path / "tiny", "deepseek_v3")
    with pytest.raises(UnsupportedModelError, match=r"latent attention.*engines drop every KV-cache scale"):
        rounder(folder).quantize_and_save(tmp_path / "o", format="llm_compressor")
    assert not (tmp_path / "o").exists()


def test_inspection_shows_them_and_finds_nothing_odd(export: Path) -> None:
    inspection = inspect_checkpoint(export)
    assert inspection.findings == ()
    shown = next(r for r in inspection.ranges if r.kind == "KV-cache scales")
    tensors = load_file(export / "model.safetensors")
    assert (shown.count, shown.dtypes) == (len(NAMES), {"F32": len(NAMES)})
    assert (shown.low, shown.high) == (min(float(tensors[n]) for n in NAMES), max(float(tensors[n]) for n in NAMES))
    assert "KV-cache scales (F32)" in format_inspection(inspection)


def drop(names: list[str], tensors: dict[str, Any], _block: dict[str, Any]) -> None:
    for name in names:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "what", "is_fault"),
    [
        (lambda t, _: t.update({NAMES[0]: torch.zeros(1)}), "NaN, infinite, zero or negative", True),
        (lambda t, _: t.update({NAMES[0]: torch.ones(2)}), "KV-cache scales of a wrong shape", True),
        (partial(drop, NAMES[:1]), "for keys or values only", True),
        (partial(drop, NAMES), "no KV-cache scales: engines take 1", False),
        (lambda _, b: b.update(kv_cache_scheme=None), "no kv_cache_scheme in config.json", False),
    ],
)
def test_what_is_wrong_with_them_is_found(changed: Any, change: Any, what: str, is_fault: bool) -> None:
    findings = inspect_checkpoint(changed(change)).findings
    assert [what in finding.what for finding in findings] == [True]
    assert findings[0].is_fault == is_fault


def test_conversion_to_the_same_format_keeps_them(export: Path, tmp_path: Path) -> None:
    folder = convert_checkpoint(export, tmp_path / "o", format="llm_compressor").summary.folder
    assert (folder / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()
    assert (folder / "config.json").read_bytes() == (export / "config.json").read_bytes()
    old, new = (json.loads((f / "quantization_report.json").read_text()) for f in (export, folder))
    assert [block["cache"] for block in new["blocks"]] == [block["cache"] for block in old["blocks"]]
    assert "| KV cache |" in (folder / "README.md").read_text()


def test_conversion_reads_older_names(changed: Any, export: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, Any], _block: dict[str, Any]) -> None:
        for name in NAMES:
            owner, leaf = name.rsplit(".", 1)
            tensors[f"{owner}.{leaf[0]}_proj.output_scale"] = tensors.pop(name)

    folder = convert_checkpoint(changed(rename), tmp_path / "o", format="llm_compressor").summary.folder
    one, other = load_file(folder / "model.safetensors"), load_file(export / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in NAMES)


@pytest.mark.parametrize("names", ["fp8_static", "llm_compressor,fake"])
def test_conversion_to_formats_without_them_is_refused(export: Path, tmp_path: Path, names: str) -> None:
    wrong = next(name for name in names.split(",") if name != "llm_compressor")
    with pytest.raises(ConfigError, match=f"has KV-cache scales, which format '{wrong}' does not hold"):
        convert_checkpoint(export, tmp_path / "o", format=names)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (partial(drop, NAMES[1:2]), CheckpointError, "v_scale' is missing, but config.json has a kv_cache_scheme"),
        (lambda _, b: b["kv_cache_scheme"].update(num_bits=4), ConfigError, "is not one static FP8 scale each"),
    ],
)
def test_scales_that_cannot_be_converted_are_named(
    changed: Any, tmp_path: Path, change: Any, error: type[AutoRoundError], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert_checkpoint(changed(change), tmp_path / "o", format="llm_compressor")
    assert not (tmp_path / "o").exists()
