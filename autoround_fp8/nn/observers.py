"""Watches what reaches linear layers: the largest absolute inputs and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autoround_fp8.errors import NumericsError

# Tokens whose own largest value is kept; `num_peak_tokens` ends there.
_NUM_LARGEST = 16


@dataclass
class InputRange:
    """What one linear layer has seen.

    Attributes:
        amax: Largest absolute value; 0 before any token.
        num_tokens: Tokens that count (see `AbsMaxObserver.attached`).
        largest: Largest absolute value of a token, of the 16 tokens where it is largest, in falling order.
    """

    amax: float = 0.0
    num_tokens: int = 0
    largest: list[float] = field(default_factory=list)

    @property
    def num_peak_tokens(self) -> int:
        """How many tokens reach half of `amax`; 16 stands for 16 or more."""
        return sum(value >= self.amax / 2 for value in self.largest)


class AbsMaxObserver:
    """Records the input range of several layers; layers that are given the same tensor share the work.

    Calls with zero tokens change nothing.
    """

    def __init__(self) -> None:
        self.ranges: dict[str, InputRange] = {}
        self._last: tuple[torch.Tensor, int, list[float]] | None = None

    def observe(self, name: str, x: torch.Tensor, *, is_counted: bool = True, what: str = "input") -> None:
        """Takes one input `[..., in_features]` of the layer `name` into account.

        Args:
            name: The layer.
            x: Its input.
            is_counted: Whether its tokens count in `num_tokens`; they always do in the range.
            what: What `x` is to the layer, for messages.

        Raises:
            NumericsError: If the input holds NaN or infinity, naming the layer.
        """
        seen = self.ranges.setdefault(name, InputRange())
        if x.numel() == 0:
            return
        # Inference tensors have no version, so a change in place could not be seen: their range is always computed.
        version = None if x.is_inference() else x._version
        if version is not None and self._last is not None and self._last[0] is x and self._last[1] == version:
            largest = self._last[2]
        else:
            largest = _largest_tokens(x)
            self._last = None if version is None else (x, version, largest)
        if not largest[0] <= torch.finfo(torch.float32).max:
            where = "during calibration" if is_counted else "in a range probe (--disable_range_probes leaves them out)"
            raise NumericsError(f"the {what} of {name!r} holds NaN or infinity {where}")
        seen.amax = max(seen.amax, largest[0])
        seen.largest = sorted(seen.largest + largest, reverse=True)[:_NUM_LARGEST]
        seen.num_tokens += x.numel() // x.shape[-1] if is_counted else 0

    @contextmanager
    def attached(self, modules: Mapping[str, nn.Module], *, is_counted: bool = True) -> Iterator[None]:
        """Observes the given layers for the duration of the context; arguments as of `observe`."""
        try:
            with inputs_watched(modules, partial(self.observe, is_counted=is_counted)):
                yield
        finally:
            self._last = None


def _largest_tokens(x: torch.Tensor) -> list[float]:
    """Largest absolute value of a token, of the tokens where it is largest, in falling order; NaN comes first."""
    # Two passes: aminmax along a dimension, the infinity norm and abs().amax() take two to ten times as long.
    by_token = torch.maximum(x.amax(dim=-1), -x.amin(dim=-1)).reshape(-1)
    return by_token.topk(min(_NUM_LARGEST, by_token.numel())).values.tolist()


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
