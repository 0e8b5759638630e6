"""What is read from a checkpoint of each kind, and that it takes no more memory than one piece of a tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from autoround_fp8.checkpoint import reader
from autoround_fp8.errors import CheckpointError
from autoround_fp8.inspection import contents as module
from autoround_fp8.inspection.contents import read_contents

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "label", "num_fp8"),
    [
        ("dense", "none", 0),
        ("fake", "none", 0),
        ("fp8_static", "fp8_static", 14),
        ("llm_compressor", "llm_compressor", 14),
        ("dynamic", "llm_compressor", 14),
        ("fp8", "fp8", 14),
        ("block", "fp8 (native, dynamic)", 14),
    ],
)
def test_each_kind_is_known(made: Callable[[str], Path], kind: str, label: str, num_fp8: int) -> None:
    found = read_contents(made(kind))
    assert found.label == label
    fp8 = [matrix for matrix in found.matrices if matrix.is_fp8]
    assert len(fp8) == num_fp8
    assert all(matrix.weight_scale is not None for matrix in fp8)
    static = kind not in ("dynamic", "block")
    assert all((matrix.input_scale is not None) == static for matrix in fp8)
    assert found.file_faults == found.not_finite == found.stray_scales == ()


def test_scales_are_read_as_they_are(made: Callable[[str], Path]) -> None:
    folder = made("llm_compressor")
    tensor = load_file(folder / "model.safetensors")[f"{Q}.weight_scale"]
    (matrix,) = (m for m in read_contents(folder).matrices if m.name == Q)
    scale = matrix.weight_scale
    assert scale is not None
    assert (scale.low, scale.high) == (float(tensor.min()), float(tensor.max()))
    assert scale.shape == tuple(tensor.shape)
    assert scale.dtype == "F32"
    assert scale.is_sound


def test_exponents_under_their_old_name_are_powers_of_two(planted: Any) -> None:
    def change(tensors: dict[str, torch.Tensor], _config: Any) -> None:
        tensors[f"{Q}.weight_scale_inv"] = torch.full_like(tensors[f"{Q}.weight_scale_inv"], 120, dtype=torch.uint8)

    (matrix,) = (m for m in read_contents(planted("block", change)).matrices if m.name == Q)
    assert matrix.weight_scale is not None
    assert matrix.weight_scale.low == matrix.weight_scale.high == 2.0**-7


def test_embeddings_and_norms_are_no_linears(made: Callable[[str], Path]) -> None:
    found = {m.name: m for m in read_contents(made("dense")).matrices}
    assert not found["model.embed_tokens"].is_linear
    assert found[Q].is_linear
    assert "model.norm" not in found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.wte", False),
        ("gpt_neox.embed_in", False),
        ("model.decoder.embed_positions", False),
        ("transformer.word_embeddings", False),
        ("visual.patch_embed.proj", True),
        ("lm_head", True),
    ],
)
def test_what_a_linear_is_goes_by_its_name(name: str, expected: bool) -> None:
    matrix = module.Matrix(
        name=name, tensor=f"{name}.weight", dtype="BF16", shape=(4, 4), weight_scale=None, input_scale=None
    )
    assert matrix.is_linear == expected


def test_a_parameter_called_scale_is_no_scale(planted: Any) -> None:
    folder = planted("fp8_static", lambda tensors, _: tensors.update({"logit_scale": torch.zeros(1)}))
    assert read_contents(folder).stray_scales == ()


def test_cache_scales_are_no_strays(planted: Any) -> None:
    name = "model.layers.0.self_attn.k_scale"
    found = read_contents(planted("fp8", lambda tensors, _: tensors.update({name: torch.ones(1)})))
    assert [scale.name for scale in found.cache_scales] == [name]
    assert found.stray_scales == ()


def test_large_tensors_are_read_in_pieces(made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_COPY_BYTES", 64)
    sizes: list[int] = []
    frombuffer = torch.frombuffer

    def counting(chunk: Any, *, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(len(chunk))
        return frombuffer(chunk, dtype=dtype)

    monkeypatch.setattr(torch, "frombuffer", counting)
    assert read_contents(made("fp8_static")).not_finite == ()
    assert max(sizes) == 64
    assert len(sizes) > 100


def test_an_unknown_quantization_is_no_failure(planted: Any) -> None:
    folder = planted("dense", lambda _, config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}))
    found = read_contents(folder)
    assert found.label == "other"
    assert "'gptq'" in found.parse_error


@pytest.mark.parametrize("block", [{"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}}, 7])
def test_a_senseless_quantization_is_no_failure(planted: Any, block: Any) -> None:
    found = read_contents(planted("dense", lambda _, config: config.update(quantization_config=block)))
    assert found.label in ("other", "none")


def test_nothing_to_read_is_an_error(tmp_path: Path, made: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_contents(tmp_path / "gone")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_contents(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_contents(tmp_path)
