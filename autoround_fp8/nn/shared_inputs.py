"""Which layers are given the same tensor, and samples of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from autoround_fp8.nn.observers import inputs_watched


class SharedInputs:
    """Hands every input of several layers on once, under the name of the first of the layers that are given it.

    Args:
        takers: Functions of that name and the input `[..., in]`; none is called with zero tokens.
    """

    def __init__(self, *takers: Callable[[str, torch.Tensor], None]) -> None:
        self._takers = takers
        self._owners: dict[str, str] = {}
        self._last: tuple[torch.Tensor, str] | None = None

    def owner(self, name: str) -> str:
        """The layer under whose name the inputs of `name` were handed on; itself if no token reached it."""
        return self._owners.get(name, name)

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Takes one input `[..., in]` of the layer `name`."""
        if x.numel() == 0:
            return
        if self._last is not None and self._last[0] is x and self._owners.get(name, self._last[1]) == self._last[1]:
            self._owners[name] = self._last[1]
            return
        if self._owners.setdefault(name, name) != name:
            raise RuntimeError(f"{name!r} shares its input with {self._owners[name]!r} in some calls only")
        for take in self._takers:
            take(name, x)
        self._last = (x, name)

    @contextmanager
    def attached(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observes the given layers for the duration of the context; without takers there is nothing to do."""
        if not self._takers:
            yield
            return
        try:
            with inputs_watched(modules, self.observe):
                yield
        finally:
            self._last = None


class InputSamples:
    """Some of the tokens of each input.

    Args:
        strides: The inputs -> one of how many tokens is kept; always a sequence's first, which may be like no other.
    """

    def __init__(self, strides: Mapping[str, int]) -> None:
        self._strides = strides
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Takes an input `[..., tokens, in]`."""
        rows = x.detach()[..., :: self._strides[name], :].reshape(-1, x.shape[-1])
        self._rows.setdefault(name, []).append(rows.clone())

    def get(self, name: str) -> torch.Tensor | None:
        """What was kept of a layer's inputs, `[tokens, in]` in their dtype; None without any."""
        rows = self._rows.get(name)
        return None if rows is None else torch.cat(rows)

    def clear(self) -> None:
        """Forgets everything."""
        self._rows.clear()
