"""Sums of products of layer inputs, `X^T X`: what error compensation needs to know of the calibration data."""

from __future__ import annotations

from collections.abc import Mapping

import torch


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
    """The second moments of several inputs.

    Args:
        strides: The inputs -> how many tokens of them count for one: each product of a wide input costs as much as its
            layer, and beyond some number per feature they change little.
    """

    def __init__(self, strides: Mapping[str, int]) -> None:
        self._strides = strides
        self._moments: dict[str, SecondMoment] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Takes one input `[..., in]` into account; names that are not to be summed change nothing."""
        if name in self._strides:
            rows = x.reshape(-1, x.shape[-1])
            self._moments.setdefault(name, SecondMoment(x.shape[-1])).add(rows[:: self._strides[name]])

    def get(self, name: str) -> SecondMoment | None:
        """The moment of an input, None if no token of it came."""
        return self._moments.get(name)
