"""What every kernel of the table must offer: one contract, run against the oracle."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re

import pytest
import torch

from autoround_fp8.kernels.base import Kernel, LinearProblem
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.kernels.table import KERNELS
from autoround_fp8.numerics.fp8 import quantize_fp8, sqnr_db
from autoround_fp8.schemes import QuantizationScheme

PROBLEM = LinearProblem(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    in_features=53,
    out_features=37,
    scheme=QuantizationScheme(),
    name="a",
)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def arguments(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    weight = quantize_fp8(torch.randn(37, 53, generator=generator), torch.tensor([0.01]))
    x = torch.randn(*shape, 53, generator=generator).to(dtype)
    bias = torch.full((37,), 100.0, dtype=dtype)
    return x, weight, torch.rand(37, 1, generator=generator) * 0.02 + 0.01, torch.tensor([0.02]), bias


@every_kernel
def test_names_are_what_a_user_can_type(kernel: Kernel) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name)


@every_kernel
def test_signatures_are_the_protocol_s(kernel: Kernel) -> None:
    for method in ("linear", "unsupported_reason"):
        assert list(inspect.signature(getattr(kernel, method)).parameters) == [
            name for name in inspect.signature(getattr(Kernel, method)).parameters if name != "self"
        ]


@every_kernel
@pytest.mark.parametrize(
    ("dtype", "bound"),
    # float32 sums of exact products in another order; 16 bit outputs are rounded once or twice.
    [(torch.float32, 90), (torch.bfloat16, 40), (torch.float16, 60)],
)
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (70,)])
def test_it_equals_the_oracle(kernel: Kernel, dtype: torch.dtype, bound: float, shape: tuple[int, ...]) -> None:
    if kernel.unsupported_reason(PROBLEM) is not None:
        pytest.skip(str(kernel.unsupported_reason(PROBLEM)))
    found, expected = kernel.linear(*arguments(dtype, *shape)), reference_linear(*arguments(dtype, *shape))
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert sqnr_db(expected, found) > bound


@every_kernel
def test_it_can_be_copied_and_pickled_after_use(kernel: Kernel) -> None:
    if kernel.unsupported_reason(PROBLEM) is None:
        kernel.linear(*arguments(torch.float32, 1))
    for twin in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert twin.name == kernel.name
        assert twin.unsupported_reason(PROBLEM) == kernel.unsupported_reason(PROBLEM)


def test_a_problem_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROBLEM.name = "b"  # type: ignore[misc]
