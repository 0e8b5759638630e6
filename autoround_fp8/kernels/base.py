"""The question a kernel is asked, and what it offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from autoround_fp8.schemes import QuantizationScheme


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """One linear layer to be computed.

    Attributes:
        device: Where the layer is.
        dtype: dtype of activations and bias.
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        scheme: How the layer is quantised.
        name: Its name, for messages.
    """

    device: torch.device
    dtype: torch.dtype
    in_features: int
    out_features: int
    scheme: QuantizationScheme
    name: str


class Kernel(Protocol):
    """One way to compute `quantise(x) @ weight.T`, rescaled, plus bias."""

    name: str

    def unsupported_reason(self, problem: LinearProblem) -> str | None:
        """Why the kernel cannot compute this layer, or None if it can."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes the layer; shapes as of `reference_linear`."""
