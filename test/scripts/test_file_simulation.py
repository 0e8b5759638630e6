"""`file_simulation.py`: what it computes equals, in plain loops, what the file's numbers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from file_simulation import dequantised_copy, largest_layer_error, rounded, run, simulate
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

from autoround_fp8 import AutoRound

IDS = torch.randint(4, VOCAB_SIZE, (3, 5), generator=torch.Generator().manual_seed(0))
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("simulated")
    source = save_tiny_model(base / "source", "qwen2")
    settings = {"fp8_static": {}, "llm_compressor": {"scheme": "FP8_DYNAMIC"}}
    for name, words in settings.items():
        AutoRound(str(source), dataset=IDS, **words).quantize_and_save(str(base / name), format=name)
    return {name: base / name for name in settings}


def test_inputs_round_to_the_nearest_e4m3_number_of_their_scale_and_saturate():
    x = torch.tensor([[0.5, 17.0, 449.0, -1000.0]])
    assert rounded(x, torch.tensor(1.0)).tolist() == [[0.5, 16.0, 448.0, -448.0]]
    assert rounded(x, torch.tensor(2.0)).tolist() == [[0.5, 16.0, 448.0, -896.0]]
    tokens = rounded(torch.tensor([[1.0, 448.0], [1.0, 0.5]]), None)  # each token in units of its own largest / 448
    assert tokens[0].tolist() == [1.0, 448.0]
    torch.testing.assert_close(tokens[1], torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("name", ["fp8_static", "llm_compressor"])
def test_a_layer_computes_code_times_scale_times_rounded_input(tmp_path: Path, exports: dict[str, Path], name: str):
    tensors = load_file(exports[name] / "model.safetensors")
    simulation, layers = simulate(exports[name], tmp_path / "copy")
    assert len(layers) == 14
    assert "lm_head" not in layers
    x = torch.randn(2, 64)
    stored = tensors.get(f"{LAYER}.input_scale")
    found = simulation.get_submodule(LAYER)(x)
    codes, scales = tensors[f"{LAYER}.weight"].float(), tensors[f"{LAYER}.weight_scale"].flatten()
    for token in range(2):
        scale = x[token].abs().max() / 448 if stored is None else stored[0]
        row = (x[token] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        for out in (0, 77):
            torch.testing.assert_close(found[token, out], (codes[out] * scales[out] * row).sum(), rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "copy").exists()


def test_the_copy_is_an_ordinary_checkpoint(tmp_path: Path, exports: dict[str, Path]):
    scales = dequantised_copy(exports["fp8_static"], tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    tensors = load_file(exports["fp8_static"] / "model.safetensors")
    weight = tensors[f"{LAYER}.weight"].float() * tensors[f"{LAYER}.weight_scale"].reshape(-1, 1)
    assert torch.equal(model.get_submodule(LAYER).weight, weight)
    assert scales[LAYER] == tensors[f"{LAYER}.input_scale"]


def test_a_layer_that_computes_something_else_shows(tmp_path: Path, exports: dict[str, Path]):
    simulation, layers = simulate(exports["fp8_static"], tmp_path / "one")
    model, _ = simulate(exports["fp8_static"], tmp_path / "two")
    assert largest_layer_error(model, simulation, layers, IDS) == 0
    with torch.no_grad():
        model.get_submodule(LAYER).weight.mul_(1.01)
    assert largest_layer_error(model, simulation, layers, IDS) == pytest.approx(0.01, rel=1e-2)
    assert run(model, IDS).shape == (3, 5, VOCAB_SIZE)


def test_a_tensor_without_a_home_is_an_error(tmp_path: Path, exports: dict[str, Path]):
    source = exports["fp8_static"]
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.layers.9.odd.weight": torch.ones(2, 2)}, tmp_path / "odd" / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not fit: \['model\.layers\.9\.odd\.weight'\]"):
        simulate(tmp_path / "odd", tmp_path / "copy")
