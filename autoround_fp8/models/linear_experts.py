"""Fused experts as one Linear per expert and projection, with a dispatch that is safe on every device.

transformers 5 keeps all experts of a layer in one 3-D parameter. `LinearExperts` takes the place of such a module: the
same call, the same numbers as the library's `grouped_mm`, but each expert is made of Linears that can be filled,
observed, quantised and swapped one by one. The dispatch sorts and searches; it has no data-dependent assert.
Read `name_map.py` for which tensors an expert is read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoround_fp8.errors import NumericsError, UnsupportedModelError
from autoround_fp8.models.families import REFUSED_EXPERTS, SCORED_EXPERTS

FUSED_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout:
    """How a fused experts module stores its weights.

    Attributes:
        num_experts: Entries of the first dimension.
        hidden_size: Inputs of the first projection, outputs of the last.
        intermediate_size: Inputs of the last projection.
        has_gate: Whether gate and up are one `gate_up_proj`; else there is only `up_proj`.
        has_bias: Whether the projections have biases.
        is_transposed: Whether the weights are `[E, in, out]` instead of `[E, out, in]`.
        is_concatenated: Whether the gate's rows come first, then up's; else they alternate.
        is_scored: Whether the module is given every token for every expert, multiplied by its routing score.
        dtype: dtype of the weights.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    is_scored: bool
    dtype: torch.dtype

    @property
    def can_be_quantized(self) -> bool:
        """Whether engines take such experts in FP8: without biases, gate and up apart."""
        return self.is_concatenated and not self.has_bias

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of one expert's projections, as they are quantised."""
        return ("gate_proj", "up_proj", "down_proj") if self.has_gate else ("up_proj", "down_proj")

    @property
    def first_linear(self) -> str:
        """Name of the fused first Linear of an expert."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    def linear_of(self, projection: str) -> str:
        """Name of the Linear that holds a projection."""
        return "down_proj" if projection == "down_proj" else self.first_linear

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """`(out_features, in_features)` of the Linear that holds a projection, by the Linear's name."""
        outputs, inputs = self.shape_of("down_proj" if linear == "down_proj" else "up_proj")
        return (2 * outputs, inputs) if linear == "gate_up_proj" else (outputs, inputs)

    def rows_of(self, projection: str) -> tuple[int, int] | None:
        """The projection's rows (first, end) in the Linear that holds it; None = all, or every second one."""
        if projection == "down_proj" or not self.has_gate or not self.is_concatenated:
            return None
        size = self.intermediate_size
        return (0, size) if projection == "gate_proj" else (size, 2 * size)

    def shape_of(self, projection: str) -> tuple[int, int]:
        """`(out_features, in_features)` of a projection."""
        if projection == "down_proj":
            return (self.hidden_size, self.intermediate_size)
        return (self.intermediate_size, self.hidden_size)


def experts_layout(module: nn.Module) -> ExpertsLayout | None:
    """How a module stores its experts, or None if it holds no fused experts.

    Raises:
        UnsupportedModelError: If it does, in a form that is not known here.
    """
    kind = type(module).__name__
    if kind in REFUSED_EXPERTS:
        raise UnsupportedModelError(f"experts of class {kind!r} are not supported: {REFUSED_EXPERTS[kind]}")
    is_scored = kind in SCORED_EXPERTS
    # transformers' decorator for experts leaves this attribute, and nothing else does.
    if not hasattr(module, "is_concatenated") and not is_scored:
        return None
    has_gate = getattr(module, "has_gate", True)
    is_transposed = getattr(module, "is_transposed", is_scored)
    down: Any = module._parameters.get("down_proj")
    first: Any = module._parameters.get("gate_up_proj" if has_gate else "up_proj")
    if down is None or first is None or down.ndim != 3 or first.ndim != 3:
        raise UnsupportedModelError(f"experts of class {kind!r} have no 3-D gate_up_proj (or up_proj) and down_proj")
    num_experts, hidden_size, intermediate_size = down.shape
    if is_transposed:
        hidden_size, intermediate_size = intermediate_size, hidden_size
    outputs = (2 if has_gate else 1) * intermediate_size
    expected = (num_experts, hidden_size, outputs) if is_transposed else (num_experts, outputs, hidden_size)
    if tuple(first.shape) != expected:
        raise UnsupportedModelError(
            f"experts of class {kind!r}: the first projection is {list(first.shape)}, expected {list(expected)}"
        )
    return ExpertsLayout(
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        has_gate=has_gate,
        has_bias=getattr(module, "has_bias", False),
        is_transposed=is_transposed,
        is_concatenated=getattr(module, "is_concatenated", True),
        is_scored=is_scored,
        dtype=down.dtype,
    )


def find_experts(model: nn.Module, prefix: str = "") -> dict[str, ExpertsLayout]:
    """Module name -> layout of every fused experts module.

    Raises:
        UnsupportedModelError: If a module holds experts in a form that is not known here.
    """
    found = {}
    for name, module in model.named_modules(prefix=prefix):
        layout = experts_layout(module)
        if layout is not None:
            found[name] = layout
            continue
        odd = [leaf for leaf, p in module._parameters.items() if p is not None and p.ndim == 3]
        if odd and "expert" in f"{name}.{type(module).__name__}".lower():
            raise UnsupportedModelError(
                f"{name!r} ({type(module).__name__}) keeps experts in {odd[0]!r} in a form that is not supported yet"
            )
    return found


class Expert(nn.Module):
    """One expert: its first projection (gate and up as one matrix, or as two), its activation, its last projection.

    Args:
        layout: Shapes of its projections.
        shell: The module it was cut from: its activation is used, none of its weights.
    """

    def __init__(self, layout: ExpertsLayout, shell: nn.Module):
        super().__init__()
        self._layout = layout
        self._shell = (shell,)  # a tuple, so that it is no submodule
        outputs = (2 if layout.has_gate else 1) * layout.intermediate_size
        options: Any = {"bias": layout.has_bias, "device": "meta", "dtype": layout.dtype}
        self.add_module(layout.first_linear, nn.Linear(layout.hidden_size, outputs, **options))
        self.down_proj: nn.Module = nn.Linear(layout.intermediate_size, layout.hidden_size, **options)
        self.requires_grad_(False)

    def put(self, projection: str, module: nn.Module) -> None:
        """Puts another module in a projection's place; gate and up each get one of their own.

        Args:
            projection: `gate_proj`, `up_proj` or `down_proj`.
            module: Computes `[tokens, in] -> [tokens, out]`.
        """
        self._modules[projection] = module
        if "gate_up_proj" in self._modules and {"gate_proj", "up_proj"} <= self._modules.keys():
            del self._modules["gate_up_proj"]
        self._modules["down_proj"] = self._modules.pop("down_proj")  # last, as the data flows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, without the routing weight."""
        modules: Any = self._modules
        if self._layout.has_bias:
            # The library rounds the product before it adds the bias; never quantised, so no hook is missed.
            first, last = modules[self._layout.first_linear], modules["down_proj"]
            return F.linear(self._activate(F.linear(x, first.weight) + first.bias), last.weight) + last.bias
        if not self._layout.has_gate:
            return self.down_proj(self._activate(modules["up_proj"](x)))
        if "gate_up_proj" in modules:
            gate_up = modules["gate_up_proj"](x)
        else:
            gate_up = torch.cat([modules["gate_proj"](x), modules["up_proj"](x)], dim=-1)
        return self.down_proj(self._activate(gate_up))

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        """Between the projections, as the module it was cut from does it."""
        shell: Any = self._shell[0]
        if not self._layout.has_gate:
            return shell.act_fn(x)
        if hasattr(shell, "_apply_gate"):
            return shell._apply_gate(x)
        gate, up = x.chunk(2, dim=-1)
        return up * shell.act_fn(gate)


class LinearExperts(nn.Module):
    """All experts of a layer, named by their number: stands in for the library's fused module.

    Args:
        shell: The fused module; it keeps its activation and norm, its weights are not used.
        layout: How it stores its weights.
        name: Its name, for messages.
    """

    def __init__(self, shell: nn.Module, layout: ExpertsLayout, name: str):
        super().__init__()
        self._layout = layout
        self._name = name
        for index in range(layout.num_experts):
            self.add_module(str(index), Expert(layout, shell))
        self._norm: Any = None
        if getattr(shell, "has_post_expert_norm", False):
            self.post_expert_norm = self._norm = shell.post_expert_norm
        self.eval()

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Runs each token through its experts and adds them up by their routing weights.

        Args:
            hidden_states: `[tokens, hidden]`; for scored experts `[experts * tokens, hidden]`.
            routing: Expert ids `[tokens, k]` and weights `[tokens, k]`; nothing for scored experts.
            named: The same two by whatever names the model calls them, in this order.

        Returns:
            `[tokens, hidden]`, or `[experts * tokens, hidden]` without the sum for scored experts.

        Raises:
            NumericsError: If an expert id is out of range, naming it.
        """
        if self._layout.is_scored:
            return self._run_scored(hidden_states)
        top_k_index, top_k_weights = (*routing, *named.values())
        num_tokens, num_slots = top_k_index.shape
        order, offsets = self._group(top_k_index.reshape(-1))
        slots: torch.Tensor | None = None
        for index in range(self._layout.num_experts):
            chosen = order[offsets[index] : offsets[index + 1]]
            if chosen.numel() == 0:
                continue
            out = self._modules[str(index)](hidden_states[chosen // num_slots])  # type: ignore[misc]
            if slots is None:
                slots = out.new_empty((num_tokens * num_slots, out.shape[-1]))
            slots[chosen] = out
        if slots is None:
            return torch.zeros_like(hidden_states)
        if self._norm is not None:
            slots = self._norm(slots)
        weighted = slots * top_k_weights.reshape(-1, 1)
        return weighted.view(num_tokens, num_slots, -1).sum(dim=1).to(hidden_states.dtype)

    def _group(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Slot numbers sorted by expert, and where each expert's begin; one wait for the device."""
        count = self._layout.num_experts
        in_order, order = torch.sort(ids, stable=True)
        edges = torch.arange(count + 1, device=ids.device, dtype=in_order.dtype)
        offsets = torch.searchsorted(in_order, edges).tolist()
        if offsets[0] != 0 or offsets[-1] != ids.numel():
            bad = int(in_order[0] if offsets[0] != 0 else in_order[-1])
            raise NumericsError(f"the router of {self._name!r} chose expert {bad}; there are {count}, numbered from 0")
        return order, offsets

    def _run_scored(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # A token that is not routed to an expert comes with score 0, so its row is exactly 0, and stays 0.
        count = self._layout.num_experts
        num_tokens = hidden_states.shape[0] // count
        routed = hidden_states.ne(0).any(dim=-1).nonzero().squeeze(1)
        edges = torch.arange(count + 1, device=routed.device) * num_tokens
        offsets = torch.searchsorted(routed, edges).tolist()
        out = torch.zeros_like(hidden_states)
        for index in range(count):
            chosen = routed[offsets[index] : offsets[index + 1]]
            if chosen.numel():
                out[chosen] = self._modules[str(index)](hidden_states[chosen])  # type: ignore[misc]
        return out


@contextmanager
def linearized(model: nn.Module, layouts: dict[str, ExpertsLayout]) -> Iterator[None]:
    """Replaces fused experts modules by `LinearExperts` on meta, and puts the fused ones back at the end.

    Args:
        model: The model.
        layouts: Module name -> layout of the modules to replace.
    """
    fused = {name: model.get_submodule(name) for name in layouts}
    try:
        linearize(model, layouts)
        yield
    finally:
        for name, module in fused.items():
            model.set_submodule(name, module)


def linearize(model: nn.Module, layouts: dict[str, ExpertsLayout]) -> None:
    """Replaces fused experts modules by `LinearExperts` on meta, for good."""
    for name, layout in layouts.items():
        model.set_submodule(name, LinearExperts(model.get_submodule(name), layout, name))
