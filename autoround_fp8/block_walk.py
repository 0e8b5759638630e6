"""Brings the parts of a model to life one after the other: what is in front of the blocks, each block, what is behind.

Only one part is in memory at a time. Read `compressor.py` for the walk that quantises, `mixed_precision.py` for the one
that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autoround_fp8.calibration.block_inputs import CapturedCalls, capture_block_inputs
from autoround_fp8.checkpoint.materialize import (
    fill_computed_buffers,
    fill_module,
    release_module,
    require_filled,
    tie_filled,
)
from autoround_fp8.checkpoint.reader import DTYPES, TensorSource
from autoround_fp8.device import release_memory
from autoround_fp8.kernels.reference import simulated_forward
from autoround_fp8.layer_plan import LinearPlan
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.models.skeleton import Skeleton
from autoround_fp8.records import QuantizedLinear


class BlockWalk:
    """The parts of one model.

    Args:
        skeleton: The model on meta; on meta again after each part.
        source: The checkpoint's tensors.
        device: Where the parts run.
    """

    def __init__(self, skeleton: Skeleton, source: TensorSource, device: torch.device):
        self._skeleton = skeleton
        self._source = source
        self._device = device

    def capture(self, batches: Sequence[torch.Tensor]) -> CapturedCalls:
        """What each block is called with, found by running the part in front of the blocks.

        Args:
            batches: Token ids, each `[batch, tokens]`, without padding.
        """
        model, skeleton = self._skeleton.model, self._skeleton
        with self._filled_outside_blocks(self._name_of(model.get_output_embeddings(), "lm_head")):
            first = partial(self.filled, skeleton.block_names[0])
            return capture_block_inputs(model, skeleton.blocks, batches, self._device, first)

    @contextmanager
    def filled(self, name: str) -> Iterator[None]:
        """A block, its experts as Linears, for the duration of the context."""
        block = self._skeleton.model.get_submodule(name)
        with self._skeleton.linearized(name) as sources:
            fill_module(block, name, self._source, sources, self._device)
            require_filled(block, f"block {name!r}")
            try:
                yield
            finally:
                release_module(block)

    @contextmanager
    def output_layers(self, num_outputs: int | None) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """What is behind the blocks, last norm and output layer, for the duration of the context.

        Args:
            num_outputs: How many values a block returns; None = its hidden states alone, in no tuple.

        Yields:
            A function from outputs of the last block `[tokens, hidden]` to float32 logits `[tokens, vocab]`.
        """
        with self._behind_blocks(num_outputs, {}) as logits:
            yield logits

    @contextmanager
    def last_norm(self, num_outputs: int | None) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """The same without the output layer's weight: that layer is called, and computes nothing.

        For those who watch its inputs; what the function returns means nothing. `output_module` has the weight.
        """
        output = self._skeleton.model.get_output_embeddings()
        with self._behind_blocks(num_outputs, {output: lambda x: x[..., :1]}) as run:
            yield run

    def output_module(self) -> nn.Linear:
        """A copy of the output layer, not part of the model, with its weight in the dtype that the source has it in."""
        output = self._skeleton.model.get_output_embeddings()
        name = self._name_of(output, "lm_head")
        stored = DTYPES[self._source.entries[self._skeleton.sources[f"{name}.weight"]].dtype]
        copy = nn.Linear(output.in_features, output.out_features, output.bias is not None, device="meta", dtype=stored)
        fill_module(copy, name, self._source, self._skeleton.sources, self._device)
        require_filled(copy, f"output layer {name!r}")
        return copy

    @contextmanager
    def _behind_blocks(
        self, num_outputs: int | None, replaced: Mapping[nn.Module, Callable[..., Any]]
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """As `output_layers`; modules with another forward are not filled."""
        model = self._skeleton.model
        embedding = model.get_input_embeddings()
        width = embedding.weight.shape[1]
        left_out = [self._name_of(embedding, "embed_tokens"), *(self._name_of(m, "lm_head") for m in replaced)]
        with self._filled_outside_blocks(*left_out):

            def logits(hidden: torch.Tensor) -> torch.Tensor:
                """The model's own forward, so that scalings and soft caps are in, with its blocks passed over."""
                hidden = hidden.to(self._device).unsqueeze(0)
                tokens = hidden.shape[1]
                # No embedding is needed; without it, only the output layer's matrix is in memory.
                output = hidden if num_outputs is None else (hidden, *[None] * (num_outputs - 1))
                forwards: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(
                    self._skeleton.blocks, lambda *args, **kwargs: output
                )
                forwards |= replaced
                forwards[embedding] = lambda *args, **kwargs: hidden.new_zeros(1, tokens, width)
                dummy = torch.zeros(1, tokens, dtype=torch.int64, device=self._device)
                with swapped_forwards(forwards):
                    return model(input_ids=dummy, use_cache=False).logits[0].float()

            yield logits

    @contextmanager
    def _filled_outside_blocks(self, *left_out: str) -> Iterator[None]:
        """Everything but the blocks and embedding or output layer, unless the other is tied to that."""
        model, sources = self._skeleton.model, self._skeleton.sources
        fill_computed_buffers(model, self._device)
        inside = tuple(f"{name}." for name in (self._skeleton.container_name, *left_out))
        top = {name: tensor for name, tensor in sources.items() if not name.startswith(inside)}
        tied = {k: v for k, v in model.all_tied_weights_keys.items() if not {k, v} & top.keys()}
        if tied:  # the embedding is on disk under its tied name
            top.update({n: sources[n] for pair in tied.items() for n in pair if n in sources})
        fill_module(model, "", self._source, top, self._device)
        tie_filled(model, model.all_tied_weights_keys)
        try:
            yield
        finally:
            release_module(model)
            release_memory()

    def _name_of(self, wanted: nn.Module, default: str) -> str:
        return next((name for name, module in self._skeleton.model.named_modules() if module is wanted), default)


def simulated_forwards(
    model: nn.Module, linears: Sequence[LinearPlan], quantized: Mapping[str, QuantizedLinear], device: torch.device
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """The forwards of layers as they will be served: the same kernel as the reloaded model's.

    Args:
        model: The model they are part of.
        linears: The layers, experts' ones in the order of their rows.
        quantized: Checkpoint name -> the layer quantised.
        device: Where they run.
    """
    parts: dict[str, list[QuantizedLinear]] = {}
    for linear in linears:  # an expert's gate and up are one module
        parts.setdefault(linear.module, []).append(quantized[linear.fqn])
    return {model.get_submodule(name): simulated_forward(layers, device) for name, layers in parts.items()}
