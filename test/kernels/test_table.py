"""Which kernel a layer gets, and the reasons that are given."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.errors import ConfigError
from autoround_fp8.kernels.base import LinearProblem
from autoround_fp8.kernels.table import KERNELS, choose_kernel
from autoround_fp8.schemes import QuantizationScheme


def problem(device: str) -> LinearProblem:
    return LinearProblem(
        device=torch.device(device),
        dtype=torch.float32,
        in_features=64,
        out_features=64,
        scheme=QuantizationScheme(),
        name="model.layers.0.mlp.up_proj",
    )


def test_names_differ_and_the_oracle_is_last() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert len(set(names)) == len(names)
    assert names[-1] == "reference"
    assert "auto" not in names


def test_a_cpu_layer_gets_the_cpu_kernel() -> None:
    kernel, reasons = choose_kernel(problem("cpu"))
    assert kernel.name == "cpu"
    assert all("cpu" not in reason.partition(" ")[0] for reason in reasons)


def test_a_refusal_comes_with_its_reason() -> None:
    kernel, reasons = choose_kernel(problem("cuda:0"))
    assert len(reasons) == KERNELS.index(kernel)
    assert any(reason.startswith("cpu refused: ") and "cuda:0" in reason for reason in reasons) or kernel.name != "cpu"


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_kernel_can_be_asked_for(name: str) -> None:
    kernel, reasons = choose_kernel(problem("cpu"), name)
    assert (kernel.name, reasons) == (name, [])


def test_an_unknown_kernel_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'marlin' is unknown; choose from auto, .*reference"):
        choose_kernel(problem("cpu"), "marlin")


def test_a_kernel_that_cannot_is_refused_with_layer_and_reason() -> None:
    with pytest.raises(ConfigError, match=r"'cpu' cannot compute 'model\.layers\.0\.mlp\.up_proj': .*cuda:0"):
        choose_kernel(problem("cuda:0"), "cpu")
