"""`crossload.py` and `crossload_elsewhere.py`: what counts as a failure; with other tools' pythons, the comparisons."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import crossload
import pytest
import torch
from crossload import (
    CT,
    DENSE,
    EXPORTS,
    INTEL,
    MOE,
    NOT,
    SAME,
    Difference,
    check_foreign,
    difference,
    expectation,
    inspection_fault,
    judge,
    load_here,
    main,
    run_elsewhere,
    token_ids,
    write_export,
)
from crossload_elsewhere import load_all
from file_simulation import run, simulate
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from tiny_moe_models import save_tiny_moe_model
from transformers import AutoModelForCausalLM

# Environment variable -> option of the script.
PYTHONS = {
    "AUTOROUND_FP8_INTEL_PYTHON": "--intel_python",
    "AUTOROUND_FP8_CT_PYTHON": "--ct_python",
    "AUTOROUND_FP8_LLMCOMPRESSOR_PYTHON": "--llmcompressor_python",
}
LOGITS = torch.randn(8, 5, 40, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports, each in a folder `export` of its own."""
    base = tmp_path_factory.mktemp("crossload")
    sources = {
        "llama": save_tiny_model(base / "llama", "llama"),
        "qwen3_moe": save_tiny_moe_model(base / "qwen3_moe", "qwen3_moe"),
    }
    made = {"llama fp8_static": "fp8_static", "llama llm_compressor": "llm_compressor", "llama fp8": "fp8"}
    made |= {"qwen3_moe llm_compressor": "llm_compressor", "qwen3_moe fp8_static": "fp8_static"}
    for folder, name in made.items():
        write_export(sources[folder.split()[0]], name, base / folder / "export")
    return {folder: base / folder for folder in made} | sources


def result(folder: Path, factor: float = 1.0, as_is: float = 1.0) -> torch.Tensor:
    """Write the logits that a consumer would have got; returns the ids."""
    ids = token_ids(folder / "export")
    logits = run(load_here(folder / "export"), ids)
    torch.save({"float32": logits * factor, "as_is": logits * as_is}, folder / "result.pt")
    return ids


def test_float_noise_and_single_rows_are_rounding_and_nothing_else_is():
    assert difference(LOGITS, LOGITS) == Difference(largest=0, median=0, tight_rows=1, relative=0)
    assert difference(LOGITS, LOGITS * (1 + 1e-6)).is_rounding
    one_row = LOGITS.clone()
    one_row[3, 4] *= 1.1
    assert difference(LOGITS, one_row).is_rounding
    assert difference(LOGITS, one_row).tight_rows == 7 / 8
    one_row[3] = -one_row[3]
    assert not difference(LOGITS, one_row).is_rounding
    assert not difference(LOGITS, LOGITS * 1.001).is_rounding
    assert not difference(LOGITS, torch.full_like(LOGITS, torch.nan)).is_rounding
    with pytest.raises(ValueError, match=r"shape \(8, 5, 39\) of the logits must be \(8, 5, 40\)"):
        difference(LOGITS, LOGITS[..., 1:])


@pytest.mark.parametrize("kind", [*DENSE, *MOE])
@pytest.mark.parametrize("name", EXPORTS)
def test_whatever_is_not_as_we_load_it_has_a_reason(kind: str, name: str):
    wanted, reason = expectation(kind, name)
    assert (wanted == SAME) == (reason == "")
    assert wanted == SAME or kind in MOE or name == "fp8"


def test_equal_logits_are_right_and_others_a_fault(folders: dict[str, Path]):
    folder = folders["llama fp8_static"]
    outcome = judge("llama", "fp8_static", folder, {"keys": {}}, result(folder))
    assert not outcome.faults
    assert str(outcome).startswith("ok     llama | fp8_static | Intel AutoRound | max 0.0e+00")
    outcome = judge("llama", "fp8_static", folder, {"keys": {}}, result(folder, factor=1.01))
    assert outcome.faults == ["the logits differ by more than rounding"]
    assert str(outcome).startswith("FAILED")
    outcome = judge("llama", "fp8_static", folder, {"keys": {}}, result(folder, as_is=1.5))
    assert outcome.faults == ["that is more than bfloat16 explains"]


def test_equal_logits_do_not_excuse_tensors_left_unread(folders: dict[str, Path]):
    folder = folders["llama fp8_static"]
    ids = result(folder)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        outcome = judge("llama", "fp8_static", folder, {"keys": {what: ["a.b", "a.c"]}}, ids)
        assert outcome.faults == [f"{what}: 2, first a.b"]
    assert judge("llama", "fp8_static", folder, {"error": "ValueError at x.py:3: no"}, ids).faults == [
        "ValueError at x.py:3: no"
    ]


def test_a_refusal_that_does_not_come_is_a_fault(folders: dict[str, Path]):
    folder = folders["llama fp8"]
    assert expectation("llama", "fp8")[0] == NOT
    outcome = judge("llama", "fp8", folder, {"keys": {"unexpected_keys": ["a"]}}, result(folder))
    assert not outcome.faults
    assert "unexpected_keys: 1, first a" in outcome.found
    outcome = judge("llama", "fp8", folder, {"keys": {}}, result(folder))
    assert outcome.faults == ["it was expected not to load"]


def test_plain_experts_are_those_of_a_simulation_and_may_leave_their_input_scales(folders: dict[str, Path]):
    folder = folders["qwen3_moe llm_compressor"]
    keys = {"unexpected_keys": ["model.layers.0.mlp.experts.3.up_proj.input_scale"]}
    ids = result(folder)
    # Our own loader rounds the inputs of experts.
    outcome = judge("qwen3_moe", "llm_compressor", folder, {"keys": keys}, ids)
    assert outcome.faults == ["the logits differ by more than rounding"]
    plain = run(simulate(folder / "export", folder / "copy")[0], ids)
    torch.save({"float32": plain, "as_is": plain}, folder / "result.pt")
    assert not judge("qwen3_moe", "llm_compressor", folder, {"keys": keys}, ids).faults
    keys["unexpected_keys"].append("model.layers.0.mlp.experts.3.up_proj.weight_scale")
    assert judge("qwen3_moe", "llm_compressor", folder, {"keys": keys}, ids).faults == [
        "unexpected_keys: 1, first model.layers.0.mlp.experts.3.up_proj.weight_scale"
    ]


def test_inspect_must_agree(folders: dict[str, Path]):
    assert inspection_fault(folders["qwen3_moe fp8_static"] / "export", INTEL, SAME) == []
    assert "inspect says otherwise" in inspection_fault(folders["llama fp8"] / "export", CT, SAME)[0]
    assert "it can load it" in inspection_fault(folders["llama llm_compressor"] / "export", CT, NOT)[0]


def test_other_environments_are_told_apart_from_refusals(tmp_path: Path, folders: dict[str, Path]):
    ids = token_ids(folders["llama"])
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        load_all([], ids, "no_such_package")
    with pytest.raises(RuntimeError, match=r"crossload_elsewhere\.py load failed"):
        run_elsewhere(sys.executable, "load", tmp_path / "no.json", tmp_path / "no.pt", "torch")


def test_loading_elsewhere_reports_keys_errors_and_logits(tmp_path: Path, folders: dict[str, Path]):
    source, ids = folders["llama"], token_ids(folders["llama"])
    lacking, broken = tmp_path / "lacking", tmp_path / "broken"
    for folder in (lacking, broken):
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors: dict[str, Any] = load_file(source / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, lacking / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, broken / "model.safetensors")
    jobs = [{"model_dir": str(f), "result": str(tmp_path / f"{f.name}_result")} for f in (source, lacking, broken)]
    load_all(jobs, ids, "transformers")
    whole, partly, failed = (json.loads(Path(f"{job['result']}.json").read_text()) for job in jobs)
    assert whole == {"keys": {}}
    assert partly == {"keys": {"missing_keys": ["model.norm.weight"]}}
    assert failed["error"].startswith("RuntimeError at ")
    logits = torch.load(f"{jobs[0]['result']}.pt")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(logits["float32"], run(model, ids))
    assert torch.equal(logits["as_is"], logits["float32"])


def test_a_foreign_export_must_be_what_its_file_says(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    export = folders["llama llm_compressor"] / "export"
    outcome = check_foreign("llama", export, "given", tmp_path)
    assert not outcome.faults
    assert "14 FP8 layers" in outcome.found
    other = folders["llama fp8"] / "export"
    monkeypatch.setattr(crossload, "load_here", lambda _: load_here(other))
    assert check_foreign("llama", export, "given", tmp_path).faults[0] == "a layer computes something else"


def test_nothing_to_do_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--work_dir", str(tmp_path / "w")])
    assert "nothing to do" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("variable", PYTHONS)
def test_the_consumers_of_other_environments(tmp_path: Path, variable: str, capsys: pytest.CaptureFixture[str]):
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no python with that package: scripts/crossload.py")
    failed = main(["--work_dir", str(tmp_path / "w"), PYTHONS[variable], python])
    printed = capsys.readouterr().out
    assert not failed, printed
    assert printed.count("\n") == {"intel": 12, "ct": 15, "llmcompressor": 2}[PYTHONS[variable][2:].split("_")[0]]
