"""The registry entry: both import orders, missing and old versions."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from autoround_fp8.errors import ConfigError
from autoround_fp8.evaluation import lm_eval_registration
from autoround_fp8.evaluation.lm_eval_registration import register_lm_eval_backend, require_lm_eval

REGISTER = "from autoround_fp8.evaluation.lm_eval_registration import register_lm_eval_backend as r; assert r() and r()"
CHECK = (
    "from lm_eval.api.registry import get_model, model_registry as m; "
    "assert 'hf' in m and 'vllm' in m and 'autoround_fp8' in m, list(m); assert m.origin('autoround_fp8') is None; "
)


@pytest.mark.parametrize("before", ["", "import lm_eval", "import lm_eval.api.registry", "import lm_eval.models"])
def test_other_models_stay_known_in_every_import_order(before):
    code = f"{before}\n{REGISTER}\n{CHECK}"
    if not before:
        code += "\nimport sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_importing_the_package_registers_the_model():
    run = subprocess.run([sys.executable, "-c", f"import autoround_fp8\n{CHECK}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_entry_becomes_the_class():
    register_lm_eval_backend()
    from lm_eval.api.registry import get_model

    from autoround_fp8.evaluation.lm_eval_backend import AutoRoundFP8LM

    assert get_model("autoround_fp8") is AutoRoundFP8LM
    assert register_lm_eval_backend()  # again, now that the placeholder is the class


def _installed(monkeypatch, version: str | None) -> None:
    def answer(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(lm_eval_registration.importlib.metadata, "version", answer)


@pytest.mark.parametrize(
    ("version", "message"), [(None, "not installed: pip install"), ("0.4.3", r"0\.4\.3 is too old.*>=0\.4\.12")]
)
def test_missing_or_old_lm_eval_is_one_sentence(monkeypatch, version, message):
    _installed(monkeypatch, version)
    assert not register_lm_eval_backend()
    with pytest.raises(ConfigError, match=message):
        require_lm_eval()


def test_newer_lm_eval_is_a_warning(monkeypatch, caplog):
    _installed(monkeypatch, "0.6.0")
    require_lm_eval()
    assert "0.6.0 is newer" in caplog.text


def test_a_broken_lm_eval_does_not_break_the_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    assert not register_lm_eval_backend()
