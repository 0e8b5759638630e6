"""The places of a model where an FP8 linear can stand: its Linears, and every projection of every expert.

Read `load.py` for what is put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from autoround_fp8.models.linear_experts import Expert
from autoround_fp8.models.skeleton import Skeleton


@dataclass(frozen=True, kw_only=True)
class LinearSlot:
    """One linear layer of the model.

    Attributes:
        fqn: Its name in the checkpoint, without `.weight`.
        module: Its name in the model.
        shape: `(out_features, in_features)`.
        dtype: dtype the model computes in there.
        has_bias: Whether it has a bias.
        tensor: The tensor that holds its weight, unless it is FP8.
        put: Puts a module in its place.
    """

    fqn: str
    module: str
    shape: tuple[int, int]
    dtype: torch.dtype
    has_bias: bool
    tensor: str
    put: Callable[[nn.Module], None]


def linear_slots(skeleton: Skeleton) -> Iterator[LinearSlot]:
    """Every linear layer of a model whose experts are Linears already (`Skeleton.linearize`)."""
    model = skeleton.model
    for name, module in list(model.named_modules()):
        tensor = skeleton.sources.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and tensor is not None:
            yield LinearSlot(
                fqn=tensor.removesuffix(".weight"),
                module=name,
                shape=(module.out_features, module.in_features),
                dtype=module.weight.dtype,
                has_bias=module.bias is not None,
                tensor=tensor,
                put=partial(model.set_submodule, name),
            )
    for source in skeleton.experts.values():
        for (index, projection), fqn in source.names.items():
            expert = model.get_submodule(f"{source.module}.{index}")
            assert isinstance(expert, Expert)
            yield LinearSlot(
                fqn=fqn,
                module=f"{source.module}.{index}.{projection}",
                shape=source.layout.shape_of(projection),
                dtype=source.layout.dtype,
                has_bias=source.layout.has_bias,
                tensor=source.weight_tensor(index, projection),
                put=partial(expert.put, projection),
            )
