"""The compiled loops against the plain torch ones, which `test_cpu.py` holds against torch's own casts."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autoround_fp8.kernels.cpu import CpuKernel, TorchLoops, choose_loops
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.numerics.fp8 import FP8_DTYPE, quantize_fp8, sqnr_db

pytest.importorskip("numba")
compiled = pytest.importorskip("autoround_fp8.numerics.compiled")
numba_loops = pytest.importorskip("autoround_fp8.kernels.numba_loops")

LOOPS = numba_loops.NumbaLoops()
DTYPES = [torch.float32, torch.bfloat16]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous().view(torch.int32)


def finite_codes() -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    return codes[(codes & 0x7F) != 0x7F]


def random_codes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return quantize_fp8(torch.randn(*shape, generator=generator) * 40, torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_decoded_exactly(dtype: torch.dtype) -> None:
    codes = finite_codes()
    out = torch.empty(len(codes), dtype=dtype)
    LOOPS.decode_into(codes.view(torch.int8), out)
    assert torch.equal(bits(out), bits(codes.view(FP8_DTYPE)))


@pytest.mark.parametrize("loops", [LOOPS, TorchLoops()])
def test_decoding_does_not_depend_on_flush_to_zero(loops: object) -> None:
    codes = finite_codes()
    out = torch.empty(len(codes))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        loops.decode_into(codes.view(torch.int8), out)  # type: ignore[attr-defined]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(out), bits(codes.view(FP8_DTYPE)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0371, 2.0**-126, 3.0, 77.7])
def test_rounding_is_bit_equal_to_the_cast(scale: float, dtype: torch.dtype) -> None:
    values = finite_codes().view(FP8_DTYPE).float().unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])  # codes, and the ties between them
    infinity = torch.tensor(math.inf)
    x = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)]) * scale
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(20_000, generator=generator) * torch.logspace(-8, 4, 20_000) * scale
    special = torch.tensor([0.0, -0.0, 1e4, -1e4, math.inf, -math.inf, 1e-45, -1e-38, 3e38])
    x = torch.cat([x, random, special])
    found = LOOPS.round_to_fp8_values(x, torch.tensor([scale]), dtype)
    assert found.dtype == dtype
    assert torch.equal(bits(found), bits(quantize_fp8(x, torch.tensor([scale]))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    strange = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for loops in (LOOPS, TorchLoops()):
        assert torch.isnan(loops.round_to_fp8_values(strange, torch.ones(1), dtype)).all()


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (37, 53), (64, 128)])
def test_the_fused_product_is_the_product(num_tokens: int, out: int, inner: int) -> None:
    codes = random_codes(out, inner)
    x = random_codes(num_tokens, inner).float()
    found = LOOPS.product(x, codes.view(torch.int8))
    assert found.shape == (num_tokens, out)
    assert sqnr_db((x.double() @ codes.double().t()), found) > 120


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9])
def test_nan_in_one_token_reaches_all_of_its_outputs_and_no_others(num_tokens: int) -> None:
    codes = random_codes(5, 16)
    x = torch.ones(num_tokens, 16)
    x[-1, 3] = math.nan
    found = CpuKernel(use_numba=True).linear(x, codes, torch.ones(1), torch.ones(1), None)
    assert torch.isnan(found[-1]).all()
    assert torch.isfinite(found[:-1]).all()


@pytest.fixture
def many_small_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_GRAIN", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.usefixtures("many_small_threads")
@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_threads_cover_every_row(num_tokens: int) -> None:
    codes, x = random_codes(37, 53), random_codes(num_tokens, 53).float()
    arguments = (x, codes, torch.rand(37, 1) + 0.5, torch.ones(1), torch.randn(37))
    assert sqnr_db(reference_linear(*arguments), CpuKernel(use_numba=True).linear(*arguments)) > 110


@pytest.mark.usefixtures("many_small_threads")
def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    kernel = CpuKernel(use_numba=True)
    codes = random_codes(64, 64)
    inputs = [torch.full((2, 64), float(i)) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: kernel.linear(x, codes, torch.ones(1), torch.ones(1), None), inputs * 4))
    for i, y in enumerate(found):
        assert torch.allclose(y, reference_linear(inputs[i % 8], codes, torch.ones(1), torch.ones(1), None), rtol=1e-5)


def test_numba_is_chosen_where_it_is() -> None:
    assert isinstance(choose_loops(), numba_loops.NumbaLoops)
    assert isinstance(choose_loops(use_numba=False), TorchLoops)
