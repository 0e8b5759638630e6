"""Watches what reaches linear layers: the largest absolute input and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoround_fp8.errors import NumericsError


@dataclass
class InputRange:
    """What one linear layer has seen: largest absolute value (0 before any token) and number of tokens."""

    amax: float = 0.0
    num_tokens: int = 0


class AbsMaxObserver:
    """Records the input range of several layers; layers that are given the same tensor share the work.

    Calls with zero tokens change nothing.
    """

    def __init__(self) -> None:
        self.ranges: dict[str, InputRange] = {}
        self._last: tuple[torch.Tensor, int, float] | None = None

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Takes one input `[..., in_features]` of the layer `name` into account.

        Raises:
            NumericsError: If the input holds NaN or infinity, naming the layer.
        """
        seen = self.ranges.setdefault(name, InputRange())
        if x.numel() == 0:
            return
        # Inference tensors have no version, so a change in place could not be seen: their range is always computed.
        version = None if x.is_inference() else x._version
        if version is not None and self._last is not None and self._last[0] is x and self._last[1] == version:
            amax = self._last[2]
        else:
            low, high = torch.aminmax(x)
            amax = float(torch.maximum(low.abs(), high.abs()))
            self._last = None if version is None else (x, version, amax)
        if not amax <= torch.finfo(torch.float32).max:
            raise NumericsError(f"the input of {name!r} holds NaN or infinity during calibration")
        seen.amax = max(seen.amax, amax)
        seen.num_tokens += x.numel() // x.shape[-1]

    @contextmanager
    def attached(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observes the given layers for the duration of the context."""
        try:
            with inputs_watched(modules, self.observe):
                yield
        finally:
            self._last = None


@contextmanager
def inputs_watched(modules: Mapping[str, nn.Module], observe: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Calls `observe(name, input)` before every call of the given layers, for the duration of the context."""

    def hook(name: str) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            observe(name, args[0] if args else kwargs["input"])

        return before

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
