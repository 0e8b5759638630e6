"""Times one FP8 linear on the CPU: the kernels against the oracle, plain Linears and a dequantising loader.

All variants of a row run in turns, so that a change of the machine's load hits all of them; the table shows medians and
ratios to the plain Linear in the activations' dtype (above 1: faster than it).

    python scripts/bench_linear.py --threads 2 --tokens 1 8 512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from autoround_fp8.kernels.cpu import CpuKernel
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.numerics.fp8 import amax_to_scale, quantize_fp8
from autoround_fp8.numerics.granularity import PER_CHANNEL, weight_amax

Variant = Callable[[], torch.Tensor]


def dequantizing_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """What loaders without an FP8 kernel do: casts and rescales the whole weight in each forward."""
    weight = codes.to(x.dtype) * scale.to(x.dtype)
    inputs = (x / step.to(x.dtype)).clamp(-448, 448).to(codes.dtype).to(x.dtype) * step.to(x.dtype)
    return F.linear(inputs, weight)


def make_variants(out_features: int, in_features: int, num_tokens: int, dtype: torch.dtype) -> dict[str, Variant]:
    """Name -> one forward, all with the same values; the plain Linear comes first."""
    weight = torch.randn(out_features, in_features) * 0.05
    scale = amax_to_scale(weight_amax(weight, PER_CHANNEL))
    codes, plain = quantize_fp8(weight, scale), weight.to(dtype)
    x, step = torch.randn(num_tokens, in_features).to(dtype), torch.tensor([0.01])
    compiled, fallback = CpuKernel(use_numba=None), CpuKernel(use_numba=False)
    return {
        "plain": lambda: F.linear(x, plain),
        "cpu (numba)": lambda: compiled.linear(x, codes, scale, step, None),
        "cpu (torch)": lambda: fallback.linear(x, codes, scale, step, None),
        "reference": lambda: reference_linear(x, codes, scale, step, None),
        "dequantise": lambda: dequantizing_linear(x, codes, scale, step),
    }


def measure(variants: dict[str, Variant], seconds: float) -> dict[str, float]:
    """Median milliseconds of each variant, alternated for about `seconds`, at least 3 rounds."""
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["plain"]) < 3:
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "1536x576", "4096x4096"], help="OUTxIN")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 512, 2048])
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    return parser.parse_args()


def main() -> None:
    """Prints one row per shape, dtype and number of tokens."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    header = "out x in     dtype     tokens   plain ms"
    for row, shape in enumerate(arguments.shapes):
        out_features, in_features = (int(size) for size in shape.split("x"))
        for dtype in arguments.dtypes:
            for num_tokens in arguments.tokens:
                variants = make_variants(out_features, in_features, num_tokens, getattr(torch, dtype))
                medians = measure(variants, arguments.seconds)
                others = [name for name in medians if name != "plain"]
                if not row and dtype == arguments.dtypes[0] and num_tokens == arguments.tokens[0]:
                    print(header + "".join(f"{name:>13}" for name in others), flush=True)
                ratios = "".join(f"{medians['plain'] / medians[name]:12.2f}x" for name in others)
                print(f"{shape:<13}{dtype:<10}{num_tokens:>6}{medians['plain']:11.3f}{ratios}", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
