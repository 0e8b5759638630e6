"""The kernels, fastest first, as a literal table. A new kernel is one file and one line here."""

from __future__ import annotations

from autoround_fp8.errors import ConfigError
from autoround_fp8.kernels.base import Kernel, LinearProblem
from autoround_fp8.kernels.cpu import CpuKernel
from autoround_fp8.kernels.reference import ReferenceKernel

KERNELS: tuple[Kernel, ...] = (CpuKernel(), ReferenceKernel())


def choose_kernel(problem: LinearProblem, requested: str = "auto") -> tuple[Kernel, list[str]]:
    """The first kernel that can compute a layer, or the requested one.

    Returns:
        The kernel, and why each faster one was refused.

    Raises:
        ConfigError: If the requested kernel does not exist or cannot compute the layer.
    """
    if requested != "auto":
        named = next((kernel for kernel in KERNELS if kernel.name == requested), None)
        if named is None:
            raise ConfigError(
                f"kernel {requested!r} is unknown; choose from auto, {', '.join(k.name for k in KERNELS)}"
            )
        reason = named.unsupported_reason(problem)
        if reason is not None:
            raise ConfigError(f"kernel {requested!r} cannot compute {problem.name!r}: {reason}; use --kernel auto")
        return named, []
    refused: list[str] = []
    for kernel in KERNELS:
        reason = kernel.unsupported_reason(problem)
        if reason is None:
            return kernel, refused
        refused.append(f"{kernel.name} refused: {reason}")
    raise AssertionError("the reference kernel computes every layer")
