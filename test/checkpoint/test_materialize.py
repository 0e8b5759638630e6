"""`materialize.py`: what reaches a module is right in shape, dtype and value, and goes away again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoround_fp8.checkpoint import materialize, reader
from autoround_fp8.checkpoint.reader import CheckpointReader, InMemorySource
from autoround_fp8.errors import CheckpointError, NumericsError

CPU = torch.device("cpu")


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.inner = nn.Linear(4, 3, dtype=dtype)
        self.head = nn.Linear(4, 3, bias=False, dtype=dtype)
        self.register_buffer("kept", torch.zeros(2, dtype=dtype))
        self.register_buffer("computed", torch.zeros(2), persistent=False)


def toy(dtype: torch.dtype = torch.float32) -> Toy:
    with torch.device("meta"):
        return Toy(dtype)


def weights(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = {"inner.weight": torch.randn(3, 4), "inner.bias": torch.randn(3), "head.weight": torch.randn(3, 4)}
    return {**base, "kept": torch.randn(2), **{name.replace("__", "."): value for name, value in changed.items()}}


def fill(model: nn.Module, tensors: dict[str, torch.Tensor], **names: str) -> None:
    mapping = {name: name for name in tensors} | names
    materialize.fill_module(model, "", InMemorySource(tensors), mapping, CPU)


def read(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    return materialize.read_checked(InMemorySource({"t": tensor}), "t", shape or tuple(tensor.shape), dtype)


def test_fill_loads_parameters_and_persistent_buffers_under_mapped_names():
    model, tensors = toy(), weights()
    renamed = {f"old.{name}": value for name, value in tensors.items()}
    materialize.fill_module(model, "", InMemorySource(renamed), {name: f"old.{name}" for name in tensors}, CPU)
    for name, value in tensors.items():
        assert torch.equal(model.state_dict()[name], value)
    assert not model.inner.weight.requires_grad
    assert model.computed.device.type == "meta"


def test_fill_with_prefix_touches_only_that_part():
    model, tensors = toy(), weights()
    materialize.fill_module(model.inner, "inner", InMemorySource(tensors), {n: n for n in tensors}, CPU)
    assert torch.equal(model.inner.weight, tensors["inner.weight"])
    assert model.head.weight.device.type == "meta"
    materialize.require_filled(model.inner, "block 'inner'")
    with pytest.raises(CheckpointError, match=r"tensor 'inner\.weight' of the model|'head\.weight' of the model"):
        materialize.require_filled(model, "the model")


def test_filled_tensors_are_not_read_again():
    model = toy()
    fill(model, weights())
    before = model.inner.weight
    fill(model, weights(inner__weight=torch.zeros(3, 4)))
    assert model.inner.weight is before


def test_wrong_shape_names_tensor_and_both_shapes():
    with pytest.raises(CheckpointError, match=r"'inner\.weight' has shape \[4, 3\], the model expects \[3, 4\]"):
        fill(toy(), weights(inner__weight=torch.zeros(4, 3)))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e8m0fnu, torch.float32),
        (torch.int32, torch.bfloat16),
        (torch.uint8, torch.float32),
        (torch.bool, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_fp8_or_integers_never_become_16_bit_silently(stored: torch.dtype, expected: torch.dtype):
    with pytest.raises(CheckpointError, match=f"the model expects {str(expected).removeprefix('torch.')}"):
        read(torch.zeros(4).to(stored), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_name_the_tensor(dtype: torch.dtype, bad: float):
    tensor = torch.zeros(3, 4, dtype=dtype)
    tensor[2, 3] = bad
    with pytest.raises(NumericsError, match=r"'head\.weight' holds NaN or infinity"):
        fill(toy(dtype), weights(**{"inner__weight": torch.zeros(3, 4), "head__weight": tensor}))


def test_same_dtype_is_read_bit_for_bit():
    for dtype in (torch.float8_e4m3fn, torch.int64, torch.bfloat16, torch.bool):
        tensor = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
        result = read(tensor, dtype)
        assert result.dtype == dtype
        assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("expected", [torch.bfloat16, torch.float16, torch.float32])
def test_conversion_in_pieces_equals_conversion_in_one(
    stored: torch.dtype, expected: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    from safetensors.torch import save_file

    monkeypatch.setattr(reader, "_COPY_BYTES", 64)
    torch.manual_seed(1)
    tensor = torch.randn(37, 11).mul(100).to(stored)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    result = materialize.read_checked(CheckpointReader(tmp_path), "t", (37, 11), expected)
    assert torch.equal(result, tensor.to(expected))


def test_scalars_and_empty_tensors():
    assert read(torch.tensor(2.5), torch.float32).item() == 2.5
    assert read(torch.zeros(0, 4), torch.bfloat16).shape == (0, 4)


def test_result_shares_no_memory_with_the_source():
    source = torch.ones(4)
    read(source, torch.float32).zero_()
    assert source.tolist() == [1.0] * 4


def test_release_puts_everything_read_from_disk_back_to_meta():
    model = toy(torch.bfloat16)
    fill(model, {name: value.bfloat16() for name, value in weights().items()})
    model.computed = torch.ones(2)
    materialize.release_module(model)
    for tensor in model.state_dict().values():
        assert tensor.device.type == "meta"
        assert tensor.dtype == torch.bfloat16
    assert model.computed.tolist() == [1.0, 1.0]
    fill(model, {name: value.bfloat16() for name, value in weights().items()})
    assert torch.equal(model.inner.weight, weights()["inner.weight"].bfloat16())


@pytest.mark.parametrize("on_disk", ["inner.weight", "head.weight"])
def test_tied_parameters_share_whichever_is_on_disk(on_disk: str):
    model, tensors = toy(), weights()
    other = {"inner.weight": "head.weight", "head.weight": "inner.weight"}[on_disk]
    del tensors[other]
    fill(model, tensors)
    materialize.tie_filled(model, {"head.weight": "inner.weight"})
    assert model.head.weight is model.inner.weight
    assert torch.equal(model.head.weight, tensors[on_disk])


def test_both_on_disk_stay_apart():
    model = toy()
    fill(model, weights())
    materialize.tie_filled(model, {"head.weight": "inner.weight"})
    assert not torch.equal(model.head.weight, model.inner.weight)


def test_computed_buffers_are_those_of_an_ordinary_model():
    from tiny_models import tiny_config
    from transformers import AutoModelForCausalLM

    config = tiny_config("gemma3_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    materialize.fill_computed_buffers(model, CPU)
    expected = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
        assert buffer.dtype == expected[name].dtype
