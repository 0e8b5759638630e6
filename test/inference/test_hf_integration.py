"""The entries in transformers' registry: there in every import order, cheap, and for nothing but `fp8_static`."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, GPTQConfig
from transformers.quantizers import auto
from transformers.quantizers.quantizer_auto_round import AutoRoundQuantizer
from transformers.quantizers.quantizer_gptq import GptqHfQuantizer
from transformers.utils.quantization_config import AutoRoundConfig

from autoround_fp8.formats.fp8_static import _PACKING_FORMAT
from autoround_fp8.inference import hf_integration
from autoround_fp8.inference.hf_integration import register_quantizer
from autoround_fp8.inference.hf_quantizer import Fp8StaticQuantizer
from autoround_fp8.inference.hf_saving import CheckpointQuantization

OURS = {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8, "group_size": 0}
INT4 = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}
OLD = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
IS_OURS = (
    "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m, AUTO_QUANTIZATION_CONFIG_MAPPING as c; "
    "home = 'autoround_fp8.inference.hf_integration'; "
    "assert (m['auto-round'].__module__, c['auto-round'].__module__) == (home, home); "
)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    run("import autoround_fp8, sys; assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()")


@pytest.mark.parametrize("before", ["", "import transformers", "import transformers.quantizers.auto", "import torch"])
def test_the_entries_are_there_in_every_import_order(before: str) -> None:
    check = "import transformers.quantizers.auto as a, inspect; assert 'AutoHfQuantizer' in inspect.getsource(a)"
    run(f"{before}\nimport autoround_fp8\n{IS_OURS}\n{check}")


def test_nothing_is_taken_over_without_an_import_of_this_package() -> None:
    run(
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m\n"
        "assert m['auto-round'].__name__ == 'AutoRoundQuantizer'"
    )


def test_registering_again_changes_nothing() -> None:
    before = auto.AUTO_QUANTIZER_MAPPING["auto-round"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["auto-round"]
    register_quantizer()
    after = auto.AUTO_QUANTIZER_MAPPING["auto-round"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["auto-round"]
    assert before == after
    assert sum(type(finder).__module__ == hf_integration.__name__ for finder in sys.meta_path) <= 1


def test_a_registry_of_another_make_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = ModuleType(hf_integration.REGISTRY)
    stranger.AUTO_QUANTIZER_MAPPING = {"gptq": GptqHfQuantizer}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, hf_integration.REGISTRY, stranger)
    register_quantizer()
    assert stranger.AUTO_QUANTIZER_MAPPING.keys() == {"gptq"}


@pytest.mark.parametrize("block", [INT4, OLD])
def test_other_packing_formats_go_to_transformers(block: dict) -> None:
    config = auto.AutoQuantizationConfig.from_dict(dict(block))
    assert type(config) is AutoRoundConfig
    assert config.to_dict() == AutoRoundConfig.from_dict(dict(block)).to_dict()
    quantizer = auto.AutoHfQuantizer.from_config(config, pre_quantized=True)
    assert type(quantizer) is AutoRoundQuantizer
    assert quantizer.quantization_config is config
    with pytest.raises(ValueError, match="pre-quantized"):
        auto.AutoHfQuantizer.from_config(config, pre_quantized=False)


def test_what_was_registered_before_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Intels(AutoRoundQuantizer):
        pass

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "auto-round", Intels)
    register_quantizer()
    assert type(auto.AutoHfQuantizer.from_config(dict(INT4))) is Intels
    assert type(auto.AutoHfQuantizer.from_config(dict(OURS))) is Fp8StaticQuantizer


def test_other_methods_are_untouched() -> None:
    assert auto.AUTO_QUANTIZER_MAPPING["gptq"] is GptqHfQuantizer
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["gptq"] is GPTQConfig


def test_ours_comes_to_our_quantizer() -> None:
    assert hf_integration._PACKING_FORMAT == _PACKING_FORMAT == OURS["packing_format"]
    config = auto.AutoQuantizationConfig.from_dict(OURS)
    assert type(config) is CheckpointQuantization
    quantizer = auto.AutoHfQuantizer.from_config(config)
    assert type(quantizer) is Fp8StaticQuantizer
    assert not quantizer.is_trainable


def test_entries_are_what_from_pretrained_looks_up(tmp_path) -> None:
    from tiny_models import tiny_model

    model = tiny_model()
    model.config.quantization_config = dict(INT4)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="requires auto-round library"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
