"""Opening a model: what is refused, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from tiny_moe_models import save_tiny_moe_model

from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import AutoRoundError, ConfigError, UnsupportedModelError
from autoround_fp8.inference.load import load_model, load_quantized_model
from autoround_fp8.model_source import load_tokenizer, open_model
from autoround_fp8.pipeline import export_run, prepare

ROWS = torch.randint(4, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(3))


def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = tiny_model()
    with pytest.raises(UnsupportedModelError, match="meta"):
        open_model(model)


@pytest.mark.parametrize("model", [None, 3, {"a": 1}, torch.nn.Linear(2, 2)])
def test_something_that_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=f"got {type(model).__name__}"):
        open_model(model)


def test_a_model_that_this_package_made_is_refused(tmp_path: Path) -> None:
    message = "by autoround_fp8 .*'{}' is a {}.* give the original model or its folder"
    quantized = load_quantized_model(
        export_run(
            prepare(QuantizeConfig(dataset=ROWS, device="cpu"), open_model(tiny_model())), tmp_path / "out"
        ).folder
    )
    name = r"model\.layers\.0\.self_attn\.q_proj"
    with pytest.raises(ConfigError, match=message.format(name, "WeightFP8ActFP8StaticQuantLinear")):
        open_model(quantized)
    experts = load_model(save_tiny_moe_model(tmp_path / "moe", "qwen3_moe"))
    with pytest.raises(ConfigError, match=message.format(r"model\.layers\.0\.mlp\.experts", "LinearExperts")):
        open_model(experts)


def test_loading_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(open_model(save_tiny_model(tmp_path / "bare", with_tokenizer=False))) is None
    source = open_model(save_tiny_model(tmp_path / "source"))
    assert load_tokenizer(source).vocab_size == VOCAB_SIZE
    (tmp_path / "source" / "tokenizer.json").write_text("{broken")
    with pytest.raises(AutoRoundError, match="the tokenizer of"):
        load_tokenizer(source)
