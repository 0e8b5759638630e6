"""vLLM's own code loads what is exported, and fails for what `inspect` says it fails for.

Needs VLLM_SOURCE, the folder that vLLM 0.33's wheel is unpacked in, and VLLM_PACKAGES, one with what else it imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import crossload_vllm
import pytest
from export_damage import DAMAGE, write_export
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, save_tiny_model
from tiny_moe_models import save_tiny_moe_model

from autoround_fp8.inspection.consumer_rules import VLLM
from autoround_fp8.inspection.report import inspect_checkpoint

needs_vllm = pytest.mark.skipif(
    "VLLM_SOURCE" not in os.environ, reason="set VLLM_SOURCE (and VLLM_PACKAGES) to the folders with vLLM's Python code"
)

# Family -> fields of config.json that vLLM needs and transformers does not write.
VLLM_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "qwen3_moe": {},
    "mixtral": {},
    "granitemoe": {},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "gpt_neox": {},
    "deepseek_v3": {"topk_method": "noaux_tc"},
}
KINDS: dict[str, tuple[str, str | None, str | None]] = {
    "fp8_static": ("fp8_static", None, None),
    "llm_compressor": ("llm_compressor", None, None),
    "tensor": ("llm_compressor", "FP8_STATIC_TENSOR", None),
    "dynamic": ("llm_compressor", "FP8_DYNAMIC", None),
    "cache": ("llm_compressor", None, "fp8"),
    "fp8": ("fp8", None, None),
}


def export(base: Path, family: str, kind: str) -> Path:
    source, target = base / family, base / f"{family}-{kind}"
    if not source.exists():
        save = save_tiny_model if family in FAMILIES else save_tiny_moe_model
        save(source, family, with_tokenizer=False)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **VLLM_FAMILIES[family]}))
    name, scheme, cache = KINDS[kind]
    write_export(source, target, name, scheme, cache)
    return target


def planted(export_dir: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    tensors = load_file(export_dir / "model.safetensors")
    config = json.loads((export_dir / "config.json").read_text())
    change(tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def answers(folders: list[Path]) -> dict[str, str]:
    """Folder's name -> what vLLM answers."""
    packages = os.environ.get("VLLM_PACKAGES")
    command = [sys.executable, crossload_vllm.__file__, "--vllm_source", os.environ["VLLM_SOURCE"]]
    command += [] if packages is None else ["--vllm_packages", packages]
    done = subprocess.run([*command, *map(str, folders)], capture_output=True, text=True, timeout=900, check=False)
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("/"))
    assert len(found) == len(folders), done.stderr[-3000:]
    return {Path(folder).name: answer for folder, answer in found.items()}


def inspected(folder: Path) -> bool:
    """Whether `inspect` says that vLLM loads it."""
    return next(not r.reasons for r in inspect_checkpoint(folder).readings if r.consumer == VLLM)


@needs_vllm
@pytest.mark.slow
def test_vllm_loads_what_is_exported(tmp_path: Path) -> None:
    pairs = [(f, k) for f in VLLM_FAMILIES for k in KINDS if (f, k) != ("deepseek_v3", "cache")]
    folders = [export(tmp_path, family, kind) for family, kind in pairs]
    found = answers(folders)
    wanted = {folder.name: not folder.name.endswith("fp8_static") for folder in folders}
    assert {name: answer.startswith("yes") for name, answer in found.items()} == wanted, found
    assert {folder.name: inspected(folder) for folder in folders} == wanted


@needs_vllm
@pytest.mark.slow
def test_vllm_fails_for_what_inspect_names(tmp_path: Path) -> None:
    exports: dict[str, Path] = {}
    folders = {}
    for what, (kind, change, _) in DAMAGE.items():
        family = "qwen3_moe" if kind.startswith("moe") else "qwen3"
        if kind not in exports:
            exports[kind] = export(tmp_path / "exports", family, kind.removeprefix("moe_"))
        folders[what] = planted(exports[kind], tmp_path / f"damaged-{len(folders)}", change)
    found = answers(list(folders.values()))
    for what, folder in folders.items():
        answer = found[folder.name]
        assert answer.startswith("yes") == inspected(folder) == (DAMAGE[what][2] is None), (what, answer)


def test_an_empty_module_has_every_name() -> None:
    finder = crossload_vllm._EmptyFinder(("absent_package",))
    assert finder.find_spec("absent_package.part") is not None
    assert finder.find_spec("present") is None
    module = finder.create_module(finder.find_spec("absent_package"))
    assert issubclass(module.Anything, object)
    assert module.Anything is module.Anything
    with pytest.raises(AttributeError):
        module.__other__  # noqa: B018
