"""The run, block by block. READ THIS FIRST.

A block is filled from disk, its inputs observed, its weights coded, the result handed to a sink, and the block
released; only one block is in memory at a time. `plan.py` decided everything beforehand; `records.py` has the nouns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from autoround_fp8.block_quantizer import BlockQuantizer, BlockStatistics
from autoround_fp8.block_walk import BlockWalk, simulated_forwards
from autoround_fp8.calibration.block_inputs import CapturedCalls, run_block
from autoround_fp8.calibration.kv_cache import CacheObserver
from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.device import peak_memory_bytes, release_memory
from autoround_fp8.layer_plan import LinearPlan
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.nn.observers import AbsMaxObserver
from autoround_fp8.plan import QuantizationPlan
from autoround_fp8.records import BlockInputs, BlockReport, CacheReport, CacheScales, LayerReport, QuantizedLinear

# Peak memory may grow by this factor before free pieces go back to the system, which costs a new page for each again.
_GROWTH = 1.08


class LinearSink(Protocol):
    """Takes each quantised layer as soon as it is made."""

    def put(self, linear: QuantizedLinear) -> None:
        """Takes one layer; its tensors are on the CPU."""

    def put_cache_scales(self, scales: CacheScales) -> None:
        """Takes the KV-cache scales of one block."""


@dataclass(frozen=True, kw_only=True)
class CompressionResult:
    """What a run leaves behind beside the layers: the reports, and the last block's outputs per batch."""

    blocks: tuple[BlockReport, ...]
    hidden_states: list[torch.Tensor]


class BlockwiseCompressor:
    """Walks the decoder blocks once.

    Args:
        plan: What to do.
        source: The checkpoint's tensors.
        batches: Calibration token ids, each `[batch, tokens]`, without padding; none if no layer needs any.
        device: Where the blocks run.
        quantized_inputs: Whether a block is fed by the quantised blocks before it instead of the original ones.
        quantizer: How the layers of a block are quantised; by default rounded to nearest.
        probes: Further batches, which go through the blocks like the others, but count for input ranges only.
    """

    def __init__(
        self,
        plan: QuantizationPlan,
        source: TensorSource,
        batches: Sequence[torch.Tensor],
        *,
        device: torch.device,
        quantized_inputs: bool = False,
        quantizer: BlockQuantizer | None = None,
        probes: Sequence[torch.Tensor] = (),
    ):
        self._plan = plan
        self._source = source
        self._batches = batches
        self._device = device
        self._quantized_inputs = quantized_inputs
        self._quantizer = quantizer or BlockQuantizer()
        self._probes = probes

    @torch.inference_mode(False)  # a caller's would leave tuning without gradients
    @torch.no_grad()
    def run(self, sink: LinearSink, on_block: Callable[[BlockReport], None] = lambda report: None) -> CompressionResult:
        """Quantises every block in order.

        Args:
            sink: Receives each layer as soon as it is quantised.
            on_block: Called after each block.

        Raises:
            NumericsError: On NaN or infinity in weights or activations, naming the layer.
            CheckpointError: On a damaged tensor, naming it.
        """
        skeleton = self._plan.skeleton
        walk = BlockWalk(skeleton, self._source, self._device)
        calls = walk.capture([*self._batches, *self._probes]) if self._batches else CapturedCalls()
        # The stream of the original blocks; without tuning nothing needs it beside the one in `calls`.
        count = len(self._batches)
        originals = calls.hidden_states[:count] if self._quantizer.is_tuning else []
        reports = []
        peak = 0
        for index, name in enumerate(skeleton.block_names):
            started = time.perf_counter()
            block = skeleton.model.get_submodule(name)
            linears = [linear for linear in self._plan.blocks[index] if linear.scheme.is_quantized]
            with walk.filled(name):
                # Also experts that stay in 16 bit: how many tokens they saw is part of the report.
                watched = dict.fromkeys(name for linear in linears for name in (linear.module, *linear.siblings))
                modules = {name: skeleton.model.get_submodule(name) for name in watched}
                cache = CacheObserver(self._plan.cached_attentions[index]) if self._plan.cached_attentions else None
                run = partial(self._run_watched, block, calls, index, cache)
                statistics, outputs = self._observe(linears, modules, run, len(calls.calls))
                cache_report = None if cache is None else self._put_cache_scales(cache, index, sink)
                expert_tokens = self._quantizer.check_experts(linears, statistics.ranges)
                quantized: Iterable[tuple[QuantizedLinear, LayerReport]]
                input_scales = self._quantizer.input_scales(linears, modules, statistics)
                quantized = self._quantizer.quantize(linears, modules, statistics, input_scales)
                tuning = None
                if self._quantizer.is_tuning:
                    references = outputs[:count]
                    if self._quantized_inputs and index:
                        references = self._run(block, calls, index, range(count), originals)
                    run_block = partial(self._run_with, block, calls, index)
                    quantized, tuning = self._quantizer.tune(linears, modules, list(quantized), run_block, references)
                    originals = references
                layers, layer_reports = {}, []
                for layer, layer_report in quantized:
                    sink.put(layer)
                    layer_reports.append(layer_report)
                    if self._quantized_inputs:
                        layers[layer.fqn] = layer
                del statistics
                if self._quantized_inputs:
                    outputs = self._run_quantized(block, linears, layers, calls, index)
            calls.advance(outputs)
            del outputs
            for batch_calls in calls.calls:
                batch_calls[index] = ((), {})  # this block's masks and tables are not needed again
            # What this block freed serves the next one; only when that was not nearly enough, free pieces go back.
            if self._device.type != "cpu" or peak_memory_bytes() > _GROWTH * peak:
                release_memory()
                peak = peak_memory_bytes()
            report = BlockReport(
                fqn=name,
                seconds=time.perf_counter() - started,
                peak_memory_bytes=peak_memory_bytes(),
                layers=tuple(layer_reports),
                expert_tokens=expert_tokens,
                tuning=tuning,
                cache=cache_report,
            )
            reports.append(report)
            on_block(report)
        if self._plan.output_layer is not None:
            reports.append(self._quantize_output_layer(walk, calls, self._plan.output_layer, sink))
            on_block(reports[-1])
        return CompressionResult(blocks=tuple(reports), hidden_states=calls.hidden_states[: len(self._batches)])

    def _quantize_output_layer(
        self, walk: BlockWalk, calls: CapturedCalls, linear: LinearPlan, sink: LinearSink
    ) -> BlockReport:
        """Quantises it by what the last norm makes of the last block's outputs."""
        started = time.perf_counter()
        modules = {linear.module: self._plan.skeleton.model.get_submodule(linear.module)}
        with walk.last_norm(calls.num_outputs) as norm:

            def run(batches: range, is_counted: bool) -> list[torch.Tensor]:
                return [norm(sample) for batch in batches for sample in calls.hidden_states[batch]]

            statistics, _ = self._observe([linear], modules, run, len(calls.hidden_states))
        stored = {linear.module: walk.output_module()}
        input_scales = self._quantizer.input_scales([linear], stored, statistics)
        ((layer, report),) = self._quantizer.quantize([linear], stored, statistics, input_scales)
        sink.put(layer)
        return BlockReport(
            fqn=linear.fqn,
            seconds=time.perf_counter() - started,
            peak_memory_bytes=peak_memory_bytes(),
            layers=(report,),
        )

    def _observe(
        self,
        linears: Sequence[LinearPlan],
        modules: Mapping[str, nn.Module],
        run: Callable[[range, bool], list[torch.Tensor]],
        num_batches: int,
    ) -> tuple[BlockStatistics, list[torch.Tensor]]:
        """What layers see, and what `run` returns, when it runs batches: those that count, then the probes."""
        num_tokens = sum(batch.numel() for batch in self._batches)
        observer = AbsMaxObserver()
        statistics = self._quantizer.statistics(linears, num_tokens, observer.ranges)
        quantized = {linear.module: modules[linear.module] for linear in linears}
        count = len(self._batches)
        with observer.attached(modules), statistics.inputs.attached(quantized):
            outputs = run(range(count), True)
        with observer.attached(modules, is_counted=False):
            outputs += run(range(count, num_batches), False)
        return statistics, outputs

    def _run_watched(
        self,
        block: nn.Module,
        calls: CapturedCalls,
        index: int,
        cache: CacheObserver | None,
        batches: range,
        is_counted: bool,
    ) -> list[torch.Tensor]:
        watch = None if cache is None else partial(cache.watch, is_counted=is_counted)
        return self._run(block, calls, index, batches, watch=watch)

    def _put_cache_scales(self, cache: CacheObserver, index: int, sink: LinearSink) -> CacheReport:
        key, value = cache.ranges(self._plan.skeleton.block_names[index])
        scales, report = self._quantizer.cache_scales(self._plan.cached_attentions[index], key, value)
        sink.put_cache_scales(scales)
        return report

    def _run_quantized(
        self,
        block: nn.Module,
        linears: Sequence[LinearPlan],
        quantized: Mapping[str, QuantizedLinear],
        calls: CapturedCalls,
        index: int,
    ) -> list[torch.Tensor]:
        """The block's outputs with its layers as they will be served: the same kernel as the reloaded model's."""
        forwards = simulated_forwards(self._plan.skeleton.model, linears, quantized, self._device)
        with swapped_forwards(forwards):
            return self._run(block, calls, index, range(len(calls.calls)))

    def _run(
        self,
        block: nn.Module,
        calls: CapturedCalls,
        index: int,
        batches: range,
        hidden_states: Sequence[torch.Tensor] | None = None,
        watch: Callable[[BlockInputs], BlockInputs] | None = None,
    ) -> list[torch.Tensor]:
        """The block's outputs of some batches; `hidden_states` replace those that it is called with.

        `watch` makes a watched call of each.
        """
        inputs = [calls.inputs(b, index) for b in batches]
        if hidden_states is not None:
            inputs = [replace(one, hidden_states=other) for one, other in zip(inputs, hidden_states, strict=True)]
        return [run_block(block, one if watch is None else watch(one), self._device) for one in inputs]

    def _run_with(
        self,
        block: nn.Module,
        calls: CapturedCalls,
        index: int,
        forwards: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
        batch: int,
    ) -> torch.Tensor:
        """The block's output for one batch, with some of its Linears computed otherwise."""
        model = self._plan.skeleton.model
        with swapped_forwards({model.get_submodule(name): forward for name, forward in forwards.items()}):
            return run_block(block, calls.inputs(batch, index), self._device)


def mean_sqnr_db(reports: Sequence[BlockReport]) -> float:
    """Mean weight SQNR over all layers in dB; layers without any noise do not count."""
    values = [layer.weight_sqnr_db for report in reports for layer in report.layers]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.inf
