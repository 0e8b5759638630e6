"""The run, block by block. READ THIS FIRST.

A block is filled from disk, its inputs observed, its weights coded, the result handed to a sink, and the block
released; only one block is in memory at a time. `plan.py` decided everything beforehand; `records.py` has the nouns.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from autoround_fp8.block_quantizer import BlockQuantizer, BlockStatistics
from autoround_fp8.calibration.block_inputs import CapturedCalls, capture_block_inputs, run_block
from autoround_fp8.checkpoint.materialize import (
    fill_computed_buffers,
    fill_module,
    release_module,
    require_filled,
    tie_filled,
)
from autoround_fp8.checkpoint.reader import TensorSource
from autoround_fp8.device import peak_memory_bytes, release_memory
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.layer_plan import LinearPlan
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.nn.observers import AbsMaxObserver
from autoround_fp8.nn.second_moments import SecondMoments
from autoround_fp8.plan import QuantizationPlan
from autoround_fp8.records import BlockReport, QuantizedLinear

logger = logging.getLogger(__name__)


class LinearSink(Protocol):
    """Takes each quantised layer as soon as it is made."""

    def put(self, linear: QuantizedLinear) -> None:
        """Takes one layer; its tensors are on the CPU."""


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
    ):
        self._plan = plan
        self._source = source
        self._batches = batches
        self._device = device
        self._quantized_inputs = quantized_inputs
        self._quantizer = quantizer or BlockQuantizer()

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
        calls = self._capture()
        reports = []
        for index, name in enumerate(skeleton.block_names):
            started = time.perf_counter()
            block = skeleton.model.get_submodule(name)
            linears = [linear for linear in self._plan.blocks[index] if linear.scheme.is_quantized]
            with self._filled(block, name):
                # Also experts that stay in 16 bit: how many tokens they saw is part of the report.
                watched = dict.fromkeys(name for linear in linears for name in (linear.module, *linear.siblings))
                modules = {name: skeleton.model.get_submodule(name) for name in watched}
                statistics, outputs = self._observe(block, linears, modules, calls, index)
                expert_tokens = self._quantizer.check_experts(linears, statistics.ranges)
                quantized, layer_reports = {}, []
                for layer, layer_report in self._quantizer.quantize(linears, modules, statistics):
                    sink.put(layer)
                    layer_reports.append(layer_report)
                    if self._quantized_inputs:
                        quantized[layer.fqn] = layer
                del statistics
                if self._quantized_inputs:
                    outputs = self._run_quantized(block, linears, quantized, calls, index)
            calls.hidden_states = outputs
            for batch_calls in calls.calls:
                batch_calls[index] = ((), {})  # this block's masks and tables are not needed again
            release_memory()
            report = BlockReport(
                fqn=name,
                seconds=time.perf_counter() - started,
                peak_memory_bytes=peak_memory_bytes(),
                layers=tuple(layer_reports),
                expert_tokens=expert_tokens,
            )
            reports.append(report)
            on_block(report)
        return CompressionResult(blocks=tuple(reports), hidden_states=calls.hidden_states)

    def _capture(self) -> CapturedCalls:
        """Runs the part in front of the blocks; it is in memory only for that time."""
        if not self._batches:
            return CapturedCalls()
        skeleton = self._plan.skeleton
        model = skeleton.model
        fill_computed_buffers(model, self._device)
        inside = (skeleton.container_name + ".", self._output_embedding_name() + ".")
        top = {name: tensor for name, tensor in skeleton.sources.items() if not name.startswith(inside)}
        tied = {k: v for k, v in model.all_tied_weights_keys.items() if not {k, v} & top.keys()}
        if tied:  # the embedding is on disk under its tied name
            top.update({n: skeleton.sources[n] for pair in tied.items() for n in pair if n in skeleton.sources})
        fill_module(model, "", self._source, top, self._device)
        tie_filled(model, model.all_tied_weights_keys)
        try:
            first = skeleton.block_names[0]
            return capture_block_inputs(
                model,
                skeleton.blocks,
                self._batches,
                self._device,
                partial(self._filled, model.get_submodule(first), first),
            )
        finally:
            release_module(model)
            release_memory()

    def _output_embedding_name(self) -> str:
        model = self._plan.skeleton.model
        head = model.get_output_embeddings()
        return next((name for name, module in model.named_modules() if module is head), "lm_head")

    @contextmanager
    def _filled(self, block: nn.Module, name: str) -> Iterator[None]:
        with self._plan.skeleton.linearized(name) as sources:
            fill_module(block, name, self._source, sources, self._device)
            require_filled(block, f"block {name!r}")
            try:
                yield
            finally:
                release_module(block)

    def _observe(
        self,
        block: nn.Module,
        linears: Sequence[LinearPlan],
        modules: Mapping[str, nn.Module],
        calls: CapturedCalls,
        index: int,
    ) -> tuple[BlockStatistics, list[torch.Tensor]]:
        num_tokens = sum(batch.numel() for batch in self._batches)
        observer = AbsMaxObserver()
        moments = SecondMoments(self._quantizer.moment_strides(linears, num_tokens))
        with_moments = {name: modules[name] for name in self._quantizer.modules_with_moments(linears)}
        with observer.attached(modules), moments.attached(with_moments):
            outputs = [run_block(block, calls.inputs(b, index), self._device) for b in range(len(calls.calls))]
        return BlockStatistics(ranges=observer.ranges, moments=moments), outputs

    def _run_quantized(
        self,
        block: nn.Module,
        linears: Sequence[LinearPlan],
        quantized: Mapping[str, QuantizedLinear],
        calls: CapturedCalls,
        index: int,
    ) -> list[torch.Tensor]:
        """The block's outputs with its layers as they will be served: the same kernel as the reloaded model's."""
        parts: dict[str, list[QuantizedLinear]] = {}
        for linear in linears:  # an expert's gate and up come in the order of their rows
            parts.setdefault(linear.module, []).append(quantized[linear.fqn])
        model = self._plan.skeleton.model
        forwards = {
            model.get_submodule(name): simulated_forward(layers, self._device) for name, layers in parts.items()
        }
        with swapped_forwards(forwards):
            return [run_block(block, calls.inputs(b, index), self._device) for b in range(len(calls.calls))]


def simulated_forward(
    layers: Sequence[QuantizedLinear], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a Linear under the reference kernel: of its one quantised layer, or of several joined by rows."""
    moved = [
        (
            layer.weight.to(device),
            layer.weight_scale.to(device),
            None if layer.input_scale is None else layer.input_scale.to(device),
            None if layer.bias is None else layer.bias.to(device),
        )
        for layer in layers
    ]
    if len(moved) == 1:
        return lambda x: reference_linear(x, *moved[0])
    return lambda x: torch.cat([reference_linear(x, *layer) for layer in moved], dim=-1)


def mean_sqnr_db(reports: Sequence[BlockReport]) -> float:
    """Mean weight SQNR over all layers in dB; layers without any noise do not count."""
    values = [layer.weight_sqnr_db for report in reports for layer in report.layers]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.inf
