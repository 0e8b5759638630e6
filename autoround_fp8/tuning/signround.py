"""Tunes the rounding of one block's weights by the sign of the gradient of the block's output error.

The method is SignRound's (Cheng et al., 2023, arXiv:2309.05516), with offsets in local FP8 steps, tokens that count by
their relative error (a few tokens with massive activations would be all there is), and a start that another algorithm
has chosen. The best step is picked on batches that no gradient came from, the start being one of the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from autoround_fp8.config import SignRoundSettings
from autoround_fp8.errors import NumericsError
from autoround_fp8.kernels.reference import simulated_forward
from autoround_fp8.nn.tunable_linear import TunableWeight, quantize_input
from autoround_fp8.numerics.fp8 import round_up_to_bfloat16
from autoround_fp8.records import QuantizedLinear, TuningReport

Forward = Callable[[torch.Tensor], torch.Tensor]
# Runs the block on one batch with some of its Linears, by module name, computed otherwise; its output `[..., hidden]`.
RunBlock = Callable[[Mapping[str, Forward], int], torch.Tensor]

# How far a weight scale may move from where it started.
_WEIGHT_FACTORS = (0.75, 1.5)
# How often, beside the start, the block is measured on the held-out batches.
_MEASUREMENTS = 5
# Of how many batches one is held out; with fewer batches than this, all are used for both.
_HELD_OUT_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class TunableLayer:
    """One layer to tune.

    Attributes:
        start: What it was quantised to.
        weight: Its original weight, `[out, in]`.
        module: Linear that computes it; several layers of one module are its rows, in order.
        scale_group: Layers with the same one share their weight scale.
        input_group: Layers with the same one share their input scale.
        headroom: By what the input scale may shrink: what was observed must still fit.
    """

    start: QuantizedLinear
    weight: torch.Tensor
    module: str
    scale_group: str
    input_group: str
    headroom: float = 1.0


def tune_block(
    layers: Sequence[TunableLayer], run_block: RunBlock, references: Sequence[torch.Tensor], settings: SignRoundSettings
) -> tuple[tuple[QuantizedLinear, ...], TuningReport]:
    """Tunes all layers of a block together.

    Args:
        layers: The block's layers, at least one.
        run_block: Runs the block on a batch.
        references: Per batch, the output that the block should have.
        settings: How.

    Returns:
        The tuned layers in the order given, and how it went.

    Raises:
        NumericsError: If the error of the block's output is not finite.
    """
    tuning = _Tuning(layers, settings)
    order, held_out = _split(len(references), settings.seed)
    measured_at = {round(settings.iters * (i + 1) / _MEASUREMENTS) for i in range(_MEASUREMENTS)} - {0}

    @torch.no_grad()
    def measure() -> tuple[float, tuple[QuantizedLinear, ...]]:
        present = tuning.layers()
        parts: dict[str, list[QuantizedLinear]] = {}
        for tunable, layer in zip(layers, present, strict=True):
            parts.setdefault(tunable.module, []).append(layer)
        forwards = {module: simulated_forward(those, layers[0].weight.device) for module, those in parts.items()}
        losses = [float(_relative_error(run_block(forwards, b), references[b])) for b in held_out]
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise NumericsError(f"the output error of the block of {layers[0].start.fqn!r} is not finite in tuning")
        return loss, present

    best_loss, best_layers = measure()
    losses, best_step = {0: best_loss}, 0
    for step in range(settings.iters):
        batches = [order[(step * settings.batches_per_step + i) % len(order)] for i in range(settings.batches_per_step)]
        tuning.step(run_block, {b: references[b] for b in batches}, 1.0 - step / settings.iters)
        if step + 1 in measured_at:
            loss, present = measure()
            losses[step + 1] = loss
            if loss < best_loss or not settings.keep_best:
                best_loss, best_layers, best_step = loss, present, step + 1
    return best_layers, TuningReport(losses=losses, best_step=best_step)


class _Tuning:
    """The offsets and factors of a block's layers."""

    def __init__(self, layers: Sequence[TunableLayer], settings: SignRoundSettings):
        self._layers = layers
        self._settings = settings
        device = layers[0].weight.device
        starts = [(t, t.start.weight.to(device), t.start.weight_scale.to(device)) for t in layers]
        generator = torch.Generator().manual_seed(settings.seed)
        self._weights = [TunableWeight(t.weight, codes, scale, generator) for t, codes, scale in starts]
        self._factors: dict[str, torch.Tensor] = {}
        self._input_factors: dict[str, torch.Tensor] = {}
        self._floors: dict[str, float] = {}
        self._input_scales: dict[str, torch.Tensor] = {}
        for t, _, scale in starts:
            assert t.start.input_scale is not None, "dynamic inputs are refused before any work"
            self._input_scales[t.input_group] = t.start.input_scale.to(device)
            self._factors.setdefault(t.scale_group, torch.ones_like(scale))
            self._input_factors.setdefault(t.input_group, torch.ones(1, device=device))
            self._floors[t.input_group] = 1.0 / t.headroom

    def layers(self) -> tuple[QuantizedLinear, ...]:
        """The layers as they are now; tensors on the CPU."""
        found = []
        for t, weight in zip(self._layers, self._weights, strict=True):
            factor = self._factors[t.scale_group]
            scale = round_up_to_bfloat16(self._input_scales[t.input_group] * self._input_factors[t.input_group])
            found.append(
                replace(
                    t.start,
                    weight=weight.codes(factor).cpu(),
                    weight_scale=weight.scale(factor).cpu(),
                    input_scale=scale.cpu(),
                )
            )
        return tuple(found)

    def step(self, run_block: RunBlock, references: Mapping[int, torch.Tensor], decay: float) -> None:
        """One step along the sign of the gradient over the given batches."""
        leaves, input_scales = self._leaves(), self._tuned_input_scales()
        forwards = {module: self._forward(module, leaf, input_scales) for module, leaf in leaves.items()}
        with torch.enable_grad():
            for batch, reference in references.items():
                _relative_error(run_block(forwards, batch), reference).backward()
        with torch.no_grad():
            self._move(leaves, input_scales, decay)

    def _leaves(self) -> dict[str, torch.Tensor]:
        """Module -> its present dequantised weight: what gradients are taken of. Rounding passes them on unchanged."""
        rows: dict[str, list[torch.Tensor]] = {}
        for t, weight in zip(self._layers, self._weights, strict=True):
            factor = self._factors[t.scale_group]
            rows.setdefault(t.module, []).append(weight.rounded(factor).mul_(weight.scale(factor)))
        return {
            module: (parts[0] if len(parts) == 1 else torch.cat(parts)).requires_grad_()
            for module, parts in rows.items()
        }

    def _tuned_input_scales(self) -> dict[str, torch.Tensor]:
        is_tuned = self._settings.minmax_lr > 0.0
        return {
            name: round_up_to_bfloat16(scale * self._input_factors[name]).requires_grad_(is_tuned)
            for name, scale in self._input_scales.items()
        }

    def _forward(self, module: str, leaf: torch.Tensor, input_scales: Mapping[str, torch.Tensor]) -> Forward:
        own = [t for t in self._layers if t.module == module]
        scale = input_scales[own[0].input_group]
        biases = [t.start.bias.to(leaf.device) for t in own if t.start.bias is not None]
        bias = torch.cat(biases).float() if biases else None

        def forward(x: torch.Tensor) -> torch.Tensor:
            inputs = quantize_input(x, scale)
            return F.linear(inputs, leaf.to(x.dtype), None if bias is None else bias.to(x.dtype))

        return forward

    def _move(self, leaves: Mapping[str, torch.Tensor], input_scales: Mapping[str, torch.Tensor], decay: float) -> None:
        lr, minmax_lr = self._settings.lr * decay, self._settings.minmax_lr * decay
        factor_gradients: dict[str, torch.Tensor] = {}
        first_row = dict.fromkeys(leaves, 0)
        for t, weight in zip(self._layers, self._weights, strict=True):
            grad, start = leaves[t.module].grad, first_row[t.module]
            first_row[t.module] = start + t.weight.shape[0]
            if grad is None:  # an expert that no token of these batches reached
                continue
            own = grad[start : start + t.weight.shape[0]]
            if minmax_lr > 0.0:
                found = weight.factor_gradient(own, self._factors[t.scale_group])
                known = factor_gradients.get(t.scale_group)
                factor_gradients[t.scale_group] = found if known is None else known + found
            # The step of a weight is positive, so the sign of its offset's gradient is that of its own.
            weight.offset.sub_(torch.sign(own), alpha=lr).clamp_(-0.5, 0.5)
        for name, gradient in factor_gradients.items():
            self._factors[name].sub_(torch.sign(gradient), alpha=minmax_lr).clamp_(*_WEIGHT_FACTORS)
        for name, scale in input_scales.items():
            if scale.grad is not None:
                factor = self._input_factors[name]
                factor.sub_(torch.sign(scale.grad), alpha=minmax_lr).clamp_(self._floors[name], 2.0)


def _split(num_batches: int, seed: int) -> tuple[list[int], list[int]]:
    """The order in which batches are used, and those held out to measure on."""
    order = torch.randperm(num_batches, generator=torch.Generator().manual_seed(seed)).tolist()
    if num_batches < _HELD_OUT_EVERY:
        return order, sorted(order)
    count = num_batches // _HELD_OUT_EVERY
    return order[count:], sorted(order[:count])


def _relative_error(output: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the squared error of a token's output relative to its squared size; float32 scalar."""
    reference = reference.to(output.device).float()
    error = (output.float() - reference).square().sum(dim=-1)
    size = reference.square().sum(dim=-1)
    # A token of next to no output would otherwise count more than all others.
    smallest = (size.mean() * 1e-6).clamp_min(torch.finfo(torch.float32).tiny)
    return (error / torch.maximum(size, smallest)).mean()
