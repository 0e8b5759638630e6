"""Which layers had better stay in 16 bit: how much harm each does alone, and what the KL is without the worst.

A walk over the blocks on a few calibration tokens, before the real one; nothing is written. What it chooses is then
ignored like what the user names in `ignore_layers`.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from autoround_fp8.block_quantizer import BlockQuantizer, BlockStatistics, InputScales
from autoround_fp8.block_walk import BlockWalk, simulated_forwards
from autoround_fp8.calibration.block_inputs import run_block
from autoround_fp8.calibration.dataset import make_batches
from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.device import release_memory
from autoround_fp8.errors import ConfigError, NumericsError
from autoround_fp8.layer_plan import LinearPlan
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.nn.observers import AbsMaxObserver
from autoround_fp8.numerics.token_kl import kl_per_token, piece_length
from autoround_fp8.plan import QuantizationPlan
from autoround_fp8.records import QuantizedLinear

logger = logging.getLogger(__name__)

# Calibration tokens that harm and KL are measured on, and from how many samples if there are as many.
MAX_TOKENS = 2048
_MIN_SAMPLES = 8
# Measurements of the KL with some layers kept.
MAX_ROUNDS = 4

Stream = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerGroup:
    """Layers that engines fuse, so that all or none of them are quantised: q/k/v, gate/up, all experts of a layer.

    Two groups are never equal: each serves as a key of what was measured.

    Attributes:
        block: Number of the block they are in.
        linears: The layers.
    """

    block: int
    linears: tuple[LinearPlan, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What to ignore to keep them: the layers, or the module of the experts."""
        first = self.linears[0]
        return (first.experts,) if first.experts else tuple(linear.fqn for linear in self.linears)

    @property
    def num_weights(self) -> int:
        """Weights in all of them: about the bytes that it costs to keep them."""
        return sum(linear.shape[0] * linear.shape[1] for linear in self.linears)


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """What was measured and what is to stay in 16 bit.

    Attributes:
        harms: Every group -> harm of quantising it alone, the most harmful first.
        kept: The groups that stay.
        rounds: Number of groups kept -> KL to the original in nats per token, as measured; the first is 0.
        num_tokens: Calibration tokens that all this was measured on.
    """

    harms: Mapping[LayerGroup, float]
    kept: tuple[LayerGroup, ...]
    rounds: Mapping[int, float]
    num_tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        """What to ignore to keep the groups."""
        return tuple(name for group in self.kept for name in group.names)

    @property
    def kl_before(self) -> float:
        """KL with every group quantised."""
        return self.rounds[0]

    @property
    def kl_after(self) -> float:
        """KL with the groups kept."""
        return self.rounds[len(self.kept)]

    def to_report(self, bytes_added: int) -> dict[str, Any]:
        """The same as JSON values; `bytes_added` is what the kept layers add to the export."""
        return {
            "tokens": self.num_tokens,
            "kept": list(self.names),
            "bytes_added": bytes_added,
            "kl_before": self.kl_before,
            "kl_after": self.kl_after,
            "rounds": [{"kept": count, "kl": kl} for count, kl in self.rounds.items()],
            "harms": [
                {"layers": list(group.names), "weights": group.num_weights, "harm": harm}
                for group, harm in self.harms.items()
            ],
        }


def layer_groups(plan: QuantizationPlan) -> tuple[LayerGroup, ...]:
    """The quantised layers of a plan, those that engines fuse together."""
    groups: dict[tuple[int, str], list[LinearPlan]] = {}
    for block, linears in enumerate(plan.blocks):
        for linear in linears:
            if linear.scheme.is_quantized:
                # Engines have one way of computing for all experts of a layer, their down projections included.
                groups.setdefault((block, linear.experts or linear.fused[0]), []).append(linear)
    return tuple(LayerGroup(block=key[0], linears=tuple(linears)) for key, linears in groups.items())


def check_keep_layers(keep_layers: int, plan: QuantizationPlan) -> None:
    """Refuses to keep so many layers that none is left.

    Raises:
        ConfigError: Naming both numbers.
    """
    count = len(layer_groups(plan))
    if keep_layers >= count:
        raise ConfigError(
            f"keep_layers ({keep_layers}) must be less than the layers there are to quantise ({count}, what engines "
            "fuse counting as one): nothing would be quantised"
        )


def choose_kept_layers(
    config: QuantizeConfig,
    plan: QuantizationPlan,
    source: TensorSource,
    samples: Sequence[torch.Tensor],
    device: torch.device,
) -> MixedPrecision:
    """Measures, and decides by `keep_layers` or `target_kl`; missing the target is a warning.

    Args:
        config: The settings; one of the two is given.
        plan: What would be quantised.
        source: The checkpoint's tensors.
        samples: Calibration samples, `[tokens]` each.
        device: Where the blocks run.
    """
    # Error compensation fitted to so few tokens would look better on them than it is.
    algorithm = "rtn" if config.algorithm == "rtn" else "mse"
    quantizer = BlockQuantizer(algorithm, act_headroom=config.act_headroom)
    batches = make_batches(pick_samples(samples), config.batch_size)
    meter = HarmMeter(plan, source, batches, device=device, quantizer=quantizer)
    logger.info("measuring the harm of each of %d layers on %d tokens", len(layer_groups(plan)), meter.num_tokens)
    harms = meter.measure_harms()
    target = config.target_kl
    if target is None:
        order, count = list(harms), config.keep_layers
        rounds = {0: meter.kl(()), count: meter.kl(order[:count])}
    else:
        # The same harm is undone by fewer bytes where a layer is small.
        order = sorted(harms, key=lambda group: harms[group] / group.num_weights, reverse=True)
        count, rounds = search_count([harms[group] for group in order], target, lambda n: meter.kl(order[:n]))
        if rounds[count] > target:
            logger.warning(
                "target_kl (%g) was not reached: the KL is %g with %d of %d layers in 16 bit, the best of %d tries; "
                "keep_layers can keep more",
                target,
                rounds[count],
                count,
                len(order),
                len(rounds),
            )
    return MixedPrecision(harms=harms, kept=tuple(order[:count]), rounds=rounds, num_tokens=meter.num_tokens)


def search_count(
    harms: Sequence[float], target: float, measure: Callable[[int], float]
) -> tuple[int, dict[int, float]]:
    """How many of the first groups to keep so that the KL is at most `target`, in a few measurements.

    Between two measured counts the KL is taken to fall as the harm of the groups that are kept in addition grows.

    Args:
        harms: Harm of each group, in the order in which they are kept.
        target: KL to reach.
        measure: Number of groups kept -> KL.

    Returns:
        The least number found to reach it, or the largest that was tried; and everything that was measured.
    """
    measured = {0: measure(0)}
    if measured[0] <= target:
        return 0, measured
    kept_harm = list(accumulate(harms, initial=0.0))
    low, high = 0, len(harms)  # with all of them kept there is no harm left
    for rounds_left in range(MAX_ROUNDS, 0, -1):
        if high - low < 2:
            break
        # When nothing has reached it so far, the last try had better be too careful.
        aim = target / 2 if rounds_left == 1 and high not in measured else target
        share = (measured[low] - aim) / (measured[low] - measured.get(high, 0.0))
        wanted = kept_harm[low] + share * (kept_harm[high] - kept_harm[low])
        count = min(max(bisect_left(kept_harm, wanted), low + 1), high - 1)
        measured[count] = measure(count)
        if measured[count] <= target:
            high = count
        else:
            low = count
    return (high if high in measured else low), measured


def pick_samples(samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pieces of some samples, spread over all of them, at most `MAX_TOKENS` tokens together."""
    longest = max(len(sample) for sample in samples)
    count = min(len(samples), max(_MIN_SAMPLES, MAX_TOKENS // longest))
    return [samples[i * len(samples) // count][: MAX_TOKENS // count] for i in range(count)]


class HarmMeter:
    """Measures on a few tokens what quantising some layers does.

    Args:
        plan: What would be quantised.
        source: The checkpoint's tensors.
        batches: Token ids, each `[batch, tokens]`, without padding.
        device: Where the blocks run.
        quantizer: How the layers are quantised; no algorithm that needs second moments.
    """

    def __init__(
        self,
        plan: QuantizationPlan,
        source: TensorSource,
        batches: Sequence[torch.Tensor],
        *,
        device: torch.device,
        quantizer: BlockQuantizer,
    ):
        self.num_tokens = sum(batch.numel() for batch in batches)
        self._skeleton = plan.skeleton
        self._groups = layer_groups(plan)
        self._device = device
        self._quantizer = quantizer
        self._walk = BlockWalk(plan.skeleton, source, device)
        with torch.no_grad():
            self._calls = self._walk.capture(batches)
        self._inputs = self._calls.hidden_states
        self._input_scales: InputScales = {}
        self._original: Stream = []
        self._kl_of_all = math.nan

    @torch.no_grad()
    def measure_harms(self) -> dict[LayerGroup, float]:
        """Each group's harm, the most harmful first: the relative error of its block's output with it alone quantised.

        `|h' - h|^2 / |h|^2` per token, then the mean: a few tokens have states a thousand times larger than others.

        Raises:
            NumericsError: On NaN or infinity in weights or activations, naming the layer.
        """
        harms: dict[LayerGroup, float] = {}
        original = stream = self._inputs
        for index, name in enumerate(self._skeleton.block_names):
            groups = [group for group in self._groups if group.block == index]
            with self._walk.filled(name):
                outputs = self._observe(groups, index, original)
                quantized = self._quantize(groups)
                for group in groups:
                    harms[group] = _relative_error(self._run([group], quantized, index, original), outputs)
                stream = self._run(groups, quantized, index, stream)
                original = outputs
                del quantized
            release_memory()
        self._original = original
        self._kl_of_all = self._divergence(stream)
        return dict(sorted(harms.items(), key=lambda item: item[1], reverse=True))

    @torch.no_grad()
    def kl(self, kept: Collection[LayerGroup]) -> float:
        """KL to the original in nats per token with all groups quantised but these; call `measure_harms` before.

        Raises:
            NumericsError: If the model computes NaN.
        """
        if not kept:
            return self._kl_of_all
        stream = self._inputs
        for index, name in enumerate(self._skeleton.block_names):
            groups = [group for group in self._groups if group.block == index and group not in kept]
            with self._walk.filled(name):
                stream = self._run(groups, self._quantize(groups), index, stream)
            release_memory()
        return self._divergence(stream)

    def _observe(self, groups: Sequence[LayerGroup], index: int, stream: Stream) -> Stream:
        linears, modules = self._layers(groups)
        watched = {name for linear in linears for name in (linear.module, *linear.siblings)}
        observer = AbsMaxObserver()
        statistics = self._quantizer.statistics(linears, self.num_tokens, observer.ranges)
        observed = observer.attached({name: self._skeleton.model.get_submodule(name) for name in sorted(watched)})
        with observed, statistics.inputs.attached(modules):
            outputs = self._run((), {}, index, stream)
        self._input_scales.update(self._quantizer.input_scales(linears, modules, statistics))
        return outputs

    def _quantize(self, groups: Sequence[LayerGroup]) -> dict[str, QuantizedLinear]:
        linears, modules = self._layers(groups)
        nothing_more = BlockStatistics(ranges={})
        quantized = self._quantizer.quantize(linears, modules, nothing_more, self._input_scales)
        return {layer.fqn: layer for layer, _ in quantized}

    def _layers(self, groups: Sequence[LayerGroup]) -> tuple[list[LinearPlan], dict[str, nn.Module]]:
        linears = [linear for group in groups for linear in group.linears]
        return linears, {linear.module: self._skeleton.model.get_submodule(linear.module) for linear in linears}

    def _run(
        self, groups: Sequence[LayerGroup], quantized: Mapping[str, QuantizedLinear], index: int, stream: Stream
    ) -> Stream:
        """A block's outputs with some groups quantised."""
        block = self._skeleton.blocks[index]
        linears = [linear for group in groups for linear in group.linears]
        with swapped_forwards(simulated_forwards(self._skeleton.model, linears, quantized, self._device)):
            self._calls.hidden_states = stream
            return [run_block(block, self._calls.inputs(b, index), self._device) for b in range(len(stream))]

    def _divergence(self, stream: Stream) -> float:
        """Mean KL of all tokens, from the outputs of the last block."""
        total = 0.0
        length = piece_length(self._skeleton.vocab_size)
        with self._walk.output_layers(self._calls.num_outputs) as logits:
            for batches in zip(self._original, stream, strict=True):
                for original, quantized in zip(*batches, strict=True):  # one sample
                    for pair in zip(original.split(length), quantized.split(length), strict=True):
                        log_p, log_q = (torch.log_softmax(logits(hidden), dim=-1) for hidden in pair)
                        total += float(kl_per_token(log_p, log_q).sum(dtype=torch.float64))
        if not math.isfinite(total):
            raise NumericsError(f"the model's KL on calibration tokens is {total}: its logits hold NaN or infinity")
        return total / self.num_tokens


def _relative_error(stream: Stream, reference: Stream) -> float:
    """Mean over tokens of the squared error relative to the squared norm."""
    errors = [
        (x.float() - r.float()).square().sum(-1) / r.float().square().sum(-1).clamp_min(torch.finfo().tiny)
        for x, r in zip(stream, reference, strict=True)
    ]
    return float(torch.cat([error.flatten() for error in errors]).mean(dtype=torch.float64))
