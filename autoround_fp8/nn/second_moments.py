"""Sums of products of layer inputs, `X^T X`: what error compensation needs to know of the calibration data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from autoround_fp8.nn.observers import inputs_watched


class SecondMoment:
    """`sum over tokens of x^T x` of one input, float32 `[in, in]`.

    The first tokens are kept as they are: an input that sees fewer tokens than it has features never costs a matrix.

    Args:
        num_features: Size of the last input dimension.
    """

    def __init__(self, num_features: int):
        self.num_features = num_features
        self.num_tokens = 0
        self._rows: list[torch.Tensor] = []
        self._total: torch.Tensor | None = None

    @property
    def is_full_rank(self) -> bool:
        """Whether there were at least as many tokens as features."""
        return self.num_tokens >= self.num_features

    def add(self, x: torch.Tensor) -> None:
        """Takes inputs `[..., in]` into account; none changes nothing."""
        rows = x.detach().reshape(-1, x.shape[-1])
        self.num_tokens += rows.shape[0]
        if self._total is None and self.is_full_rank:
            self._total = torch.zeros(self.num_features, self.num_features, device=rows.device)
            for kept in self._rows:
                _add_products(self._total, kept)
            self._rows = []
        rows = rows.float()
        if self._total is None:
            self._rows.append(rows.clone())
        else:
            _add_products(self._total, rows)

    def column_weights(self) -> torch.Tensor:
        """What an error in each column of a weight costs: the diagonal of the sum, float32 `[in]`, divided by its mean.

        There for any number of tokens; all ones if every input was 0.
        """
        if self._total is not None:
            diagonal = self._total.diagonal().clone()
        else:
            diagonal = torch.stack([kept.square().sum(0) for kept in self._rows]).sum(0)
        mean = float(diagonal.mean())
        return diagonal.div_(mean) if mean > 0.0 else torch.ones_like(diagonal)

    def matrix(self) -> torch.Tensor:
        """The sum, float32 `[in, in]`; only for an input of full rank."""
        assert self._total is not None, "fewer tokens than features"
        self._total.triu_()
        return self._total.add_(self._total.triu(1).t())


def _add_products(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds `rows^T rows` to the upper triangle of `total`; below, what is there afterwards means nothing.

    In strips of columns, each as long as its part of the triangle: little more than half of the work.
    """
    num_features = total.shape[0]
    width = -(-num_features // 256) * 64  # a quarter of all, in multiples of what matrix products are fast for
    for start in range(0, num_features, width):
        end = min(start + width, num_features)
        total[:end, start:end].addmm_(rows[:, :end].t(), rows[:, start:end])


class SecondMoments:
    """Collects the second moments of several layers; layers that are given the same tensor share one.

    Args:
        strides: Layer -> how many tokens of its input count for one: each product of a wide input costs as much as its
            layer, and beyond some number per feature they change little. 1 for layers not named.
    """

    def __init__(self, strides: Mapping[str, int] | None = None) -> None:
        self._strides = strides or {}
        self._moments: dict[str, SecondMoment] = {}
        self._owners: dict[str, str] = {}
        self._last: tuple[torch.Tensor, str] | None = None

    def owner(self, name: str) -> str | None:
        """Name of the layer under whose name the moment of `name` is kept; None for a layer without any token."""
        return self._owners.get(name)

    def get(self, name: str) -> SecondMoment | None:
        """The moment of a layer's input, None if no token reached it."""
        owner = self._owners.get(name)
        return None if owner is None else self._moments[owner]

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Takes one input `[..., in]` of the layer `name` into account."""
        if x.numel() == 0:
            return
        if self._last is not None and self._last[0] is x and self._owners.get(name, self._last[1]) == self._last[1]:
            self._owners[name] = self._last[1]
            return
        if self._owners.setdefault(name, name) != name:
            raise RuntimeError(f"{name!r} shares its input with {self._owners[name]!r} in some calls only")
        rows = x.reshape(-1, x.shape[-1])
        self._moments.setdefault(name, SecondMoment(x.shape[-1])).add(rows[:: self._strides.get(name, 1)])
        self._last = (x, name)

    @contextmanager
    def attached(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observes the given layers for the duration of the context."""
        try:
            with inputs_watched(modules, self.observe):
                yield
        finally:
            self._last = None
