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
from autoround_fp8.errors import NumericsError
from autoround_fp8.kernels.reference import reference_linear
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.nn.observers import AbsMaxObserver, InputRange
from autoround_fp8.numerics.fp8 import amax_to_scale, dequantize_fp8, sqnr_db
from autoround_fp8.plan import LinearPlan, QuantizationPlan
from autoround_fp8.records import BlockReport, LayerReport, QuantizedLinear
from autoround_fp8.tuning.rtn import quantize_weight

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
        batches: Calibration token ids, each `[batch, tokens]`, without padding.
        device: Where the blocks run.
        quantized_inputs: Whether a block is fed by the quantised blocks before it instead of the original ones.
    """

    def __init__(
        self,
        plan: QuantizationPlan,
        source: TensorSource,
        batches: Sequence[torch.Tensor],
        *,
        device: torch.device,
        quantized_inputs: bool = False,
    ):
        self._plan = plan
        self._source = source
        self._batches = batches
        self._device = device
        self._quantized_inputs = quantized_inputs

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
                ranges, outputs = self._observe(block, linears, calls, index)
                quantized, layer_reports = self._quantize(linears, ranges)
                for layer in quantized.values():
                    sink.put(layer)
                if self._quantized_inputs:
                    outputs = self._run_quantized(block, quantized, calls, index)
            calls.hidden_states = outputs
            for batch_calls in calls.calls:
                batch_calls[index] = ((), {})  # this block's masks and tables are not needed again
            release_memory()
            report = BlockReport(
                fqn=name,
                seconds=time.perf_counter() - started,
                peak_memory_bytes=peak_memory_bytes(),
                layers=layer_reports,
            )
            reports.append(report)
            on_block(report)
        return CompressionResult(blocks=tuple(reports), hidden_states=calls.hidden_states)

    def _capture(self) -> CapturedCalls:
        """Runs the part in front of the blocks; it is in memory only for that time."""
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
        fill_module(block, name, self._source, self._plan.skeleton.sources, self._device)
        require_filled(block, f"block {name!r}")
        try:
            yield
        finally:
            release_module(block)

    def _observe(
        self, block: nn.Module, linears: Sequence[LinearPlan], calls: CapturedCalls, index: int
    ) -> tuple[dict[str, InputRange], list[torch.Tensor]]:
        observer = AbsMaxObserver()
        model = self._plan.skeleton.model
        with observer.attached({linear.module: model.get_submodule(linear.module) for linear in linears}):
            outputs = [run_block(block, calls.inputs(b, index), self._device) for b in range(len(calls.calls))]
        return observer.ranges, outputs

    def _quantize(
        self, linears: Sequence[LinearPlan], ranges: Mapping[str, InputRange]
    ) -> tuple[dict[str, QuantizedLinear], tuple[LayerReport, ...]]:
        quantized, reports = {}, []
        for linear in linears:
            seen = ranges.get(linear.module, InputRange())
            # Layers that engines fuse read one input scale, so they get the largest range among them.
            amax = max(ranges.get(name, InputRange()).amax for name in linear.group)
            if seen.num_tokens == 0:
                raise NumericsError(f"no calibration token reached layer {linear.fqn!r}, so its input range is unknown")
            module = self._plan.skeleton.model.get_submodule(linear.module)
            codes, weight_scale = quantize_weight(module.weight, linear.scheme)
            input_scale = amax_to_scale(torch.tensor([amax]))
            layer = QuantizedLinear(
                fqn=linear.fqn,
                weight=codes.cpu(),
                weight_scale=weight_scale.cpu(),
                input_scale=input_scale,
                bias=None if module.bias is None else module.bias.detach().cpu(),
            )
            quantized[linear.module] = layer
            reports.append(
                LayerReport(
                    fqn=linear.fqn,
                    shape=linear.shape,
                    weight_sqnr_db=sqnr_db(module.weight, dequantize_fp8(codes, weight_scale)),
                    input_amax=seen.amax,
                    input_scale=float(input_scale),
                    num_tokens=seen.num_tokens,
                    source="observed" if amax == seen.amax else "fused group",
                )
            )
        return quantized, tuple(reports)

    def _run_quantized(
        self, block: nn.Module, quantized: Mapping[str, QuantizedLinear], calls: CapturedCalls, index: int
    ) -> list[torch.Tensor]:
        """The block's outputs with its layers as they will be served: the same kernel as the reloaded model's."""
        model = self._plan.skeleton.model
        forwards = {
            model.get_submodule(name): simulated_forward(layer, self._device) for name, layer in quantized.items()
        }
        with swapped_forwards(forwards):
            return [run_block(block, calls.inputs(b, index), self._device) for b in range(len(calls.calls))]


def simulated_forward(layer: QuantizedLinear, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a quantised layer under the reference kernel."""
    weight, weight_scale = layer.weight.to(device), layer.weight_scale.to(device)
    input_scale = layer.input_scale.to(device)
    bias = None if layer.bias is None else layer.bias.to(device)
    return lambda x: reference_linear(x, weight, weight_scale, input_scale, bias)


def mean_sqnr_db(reports: Sequence[BlockReport]) -> float:
    """Mean weight SQNR over all layers in dB; layers without any noise do not count."""
    values = [layer.weight_sqnr_db for report in reports for layer in report.layers]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.inf
