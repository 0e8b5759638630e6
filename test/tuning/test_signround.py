"""Gradient tuning of a block lowers its output error on other data, keeps its start where it cannot, and repeats."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.nn import functional as F

from autoround_fp8.config import SignRoundSettings
from autoround_fp8.errors import NumericsError
from autoround_fp8.kernels.reference import simulated_forward
from autoround_fp8.numerics.fp8 import amax_to_scale, quantize_fp8
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.tuning.signround import Forward, TunableLayer, tune_block

FEATURES = 64


class TwoLayers:
    """A block with a residual connection around two Linears, on correlated inputs of two sizes."""

    def __init__(self, num_batches: int = 8, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        mixing = torch.randn(FEATURES, FEATURES, generator=generator) * torch.logspace(0, -1.5, FEATURES)
        self.weights = {name: torch.randn(FEATURES, FEATURES, generator=generator) for name in ("a", "b")}
        self.inputs = [torch.randn(4, 64, FEATURES, generator=generator) @ mixing for _ in range(num_batches)]
        self.inputs[0][0, 0] *= 20.0  # a massive activation
        self.calls: list[tuple[int, bool]] = []
        self.references = [self.run({}, b) for b in range(num_batches)]
        self.calls.clear()

    def run(self, forwards: Mapping[str, Forward], batch: int) -> torch.Tensor:
        self.calls.append((batch, torch.is_grad_enabled()))
        x = self.inputs[batch]
        plain = {name: lambda y, w=weight: F.linear(y, w) for name, weight in self.weights.items()}
        linears = {**plain, **forwards}
        return x + linears["b"](torch.tanh(linears["a"](x)))

    def layers(self, headroom: float = 1.0) -> list[TunableLayer]:
        found = []
        for name, weight in self.weights.items():
            amax = 1.0 if name == "b" else max(float(x.abs().max()) for x in self.inputs)
            scale = amax_to_scale(weight.abs().amax(dim=1, keepdim=True))
            start = QuantizedLinear(
                fqn=name,
                weight=quantize_fp8(weight, scale),
                weight_scale=scale,
                input_scale=amax_to_scale(torch.tensor([amax * headroom])),
            )
            found.append(
                TunableLayer(
                    start=start, weight=weight, module=name, scale_group=name, input_group=name, headroom=headroom
                )
            )
        return found

    def error(self, layers: tuple[QuantizedLinear, ...] | list[QuantizedLinear], batches: range) -> float:
        forwards = {layer.fqn: simulated_forward([layer], torch.device("cpu")) for layer in layers}
        ratios = []
        for b in batches:
            error = (self.run(forwards, b) - self.references[b]).square().sum(-1)
            ratios.append((error / self.references[b].square().sum(-1)).mean())
        return float(torch.stack(ratios).mean())


def settings(iters: int = 40, **changes: object) -> SignRoundSettings:
    return SignRoundSettings(**{"iters": iters, "lr": 0.1 / max(iters, 1), "minmax_lr": 0.0, **changes})


@pytest.mark.parametrize("minmax_lr", [0.0, 0.0001])
def test_it_lowers_the_error_on_data_it_has_not_seen(minmax_lr: float) -> None:
    block, other = TwoLayers(16), TwoLayers(16)
    generator = torch.Generator().manual_seed(9)
    other.inputs = [x[:, torch.randperm(64, generator=generator)] * 0.9 for x in other.inputs]
    other.references = [other.run({}, b) for b in range(16)]
    starts = block.layers(headroom=2.0)
    layers, report = tune_block(starts, block.run, block.references, settings(minmax_lr=minmax_lr))
    assert report.best_step > 0
    assert report.losses[report.best_step] == min(report.losses.values()) < 0.95 * report.losses[0]
    before, after = other.error([t.start for t in starts], range(16)), other.error(layers, range(16))
    assert after < 0.97 * before


def test_the_losses_are_those_of_the_exported_layers() -> None:
    block = TwoLayers(4)  # too few to hold any out
    starts = block.layers()
    layers, report = tune_block(starts, block.run, block.references, settings())
    assert sorted(report.losses) == [0, 8, 16, 24, 32, 40]
    assert report.losses[0] == pytest.approx(block.error([t.start for t in starts], range(4)), rel=1e-6)
    assert report.losses[report.best_step] == pytest.approx(block.error(layers, range(4)), rel=1e-6)


def test_held_out_batches_give_no_gradient_and_are_all_that_is_measured() -> None:
    block = TwoLayers(16)
    tune_block(block.layers(), block.run, block.references, settings())
    with_gradient = {batch for batch, has_gradient in block.calls if has_gradient}
    measured = {batch for batch, has_gradient in block.calls if not has_gradient}
    assert len(measured) == 2
    assert measured | with_gradient == set(range(16))
    assert not measured & with_gradient


def test_a_start_that_cannot_be_improved_is_kept() -> None:
    block = TwoLayers(8)
    starts = block.layers()
    layers, report = tune_block(starts, block.run, block.references, settings(lr=1.0, iters=5))
    assert report.best_step == 0
    for layer, tunable in zip(layers, starts, strict=True):
        assert torch.equal(layer.weight.view(torch.uint8), tunable.start.weight.view(torch.uint8))
        assert torch.equal(layer.weight_scale, tunable.start.weight_scale)
        assert torch.equal(layer.input_scale, tunable.start.input_scale)
    last, report = tune_block(starts, block.run, block.references, settings(lr=1.0, iters=5, keep_best=False))
    assert report.best_step == 5
    assert not torch.equal(last[0].weight.view(torch.uint8), starts[0].start.weight.view(torch.uint8))


def test_scales_that_are_shared_stay_shared_and_what_was_observed_still_fits() -> None:
    block = TwoLayers(8)
    starts = [TunableLayer(**{**vars(t), "input_group": "both", "headroom": 2.0}) for t in block.layers(2.0)]
    shared = starts[0].start.input_scale
    starts = [
        TunableLayer(**{**vars(t), "start": QuantizedLinear(**{**vars(t.start), "input_scale": shared})})
        for t in starts
    ]
    layers, _ = tune_block(starts, block.run, block.references, settings(minmax_lr=0.5, keep_best=False))
    assert torch.equal(layers[0].input_scale, layers[1].input_scale)
    assert not torch.equal(layers[0].input_scale, shared)
    assert float(layers[0].input_scale) >= float(shared) / 2
    for layer in layers:
        for scale in (layer.weight_scale, layer.input_scale):
            assert torch.equal(scale, scale.to(torch.bfloat16).float())


def test_the_same_seed_gives_the_same_codes_and_another_seed_others() -> None:
    found = [
        tune_block(TwoLayers(8).layers(), TwoLayers(8).run, TwoLayers(8).references, settings(seed=seed, iters=10))[0]
        for seed in (1, 1, 2)
    ]
    codes = [torch.cat([layer.weight.view(torch.uint8) for layer in layers]) for layers in found]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


def test_a_layer_that_no_token_reaches_keeps_its_codes() -> None:
    block = TwoLayers(8)
    starts = block.layers()
    unused = TunableLayer(**{**vars(starts[0]), "module": "c", "scale_group": "c", "input_group": "c"})
    layers, _ = tune_block([*starts, unused], block.run, block.references, settings(minmax_lr=0.1, keep_best=False))
    assert torch.equal(layers[2].weight.view(torch.uint8), unused.start.weight.view(torch.uint8))
    assert torch.equal(layers[2].weight_scale, unused.start.weight_scale)


def test_an_error_that_is_not_finite_stops_and_names_a_layer() -> None:
    block = TwoLayers(4)
    block.references[2] = block.references[2] * float("nan")
    with pytest.raises(NumericsError, match="'a' is not finite"):
        tune_block(block.layers(), block.run, block.references, settings())
