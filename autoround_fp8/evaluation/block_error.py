"""In which decoder blocks a quantised model departs from its original.

The reference leaves behind what its blocks computed for a few hundred tokens; the candidate then runs them twice, once
as it is and once with every block fed by the reference. Read `compare.py` for the use.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.evaluation.logits import LogitStream

logger = logging.getLogger(__name__)

# All blocks' outputs for these tokens are kept: 37 MB in float32 for SmolLM2-135M, 0.3 GB for an 8B model of 32 GB.
_MAX_TOKENS = 512
_MAX_TOKENS_PER_DOCUMENT = 128


@dataclass(frozen=True, kw_only=True)
class BlockError:
    """How far one block's output is from the reference's.

    Both errors are the mean over tokens of the token's own `|h - h_ref|² / |h_ref|²`. A ratio of sums over tokens would
    show only the few whose states are thousands of times larger than all others, such as the first one of a document.

    Attributes:
        name: Module name of the block.
        stream_error: Of the candidate as it runs: what all blocks up to this one have added.
        own_error: Of the candidate's block when it is fed the reference's input: what this block adds. Keys and values
            that it takes over from another block are the candidate's, made from the reference's input there.
    """

    name: str
    stream_error: float
    own_error: float

    @property
    def stream_sqnr_db(self) -> float:
        """The stream error as a signal to noise ratio: `10 log10(1 / error)`, inf where there is no error."""
        return _db(self.stream_error)

    @property
    def own_sqnr_db(self) -> float:
        """The same of the block's own error."""
        return _db(self.own_error)

    def to_dict(self) -> dict[str, Any]:
        """Both errors, as ratios and in dB."""
        return {
            "name": self.name,
            "stream_error": self.stream_error,
            "stream_sqnr_db": self.stream_sqnr_db,
            "own_error": self.own_error,
            "own_sqnr_db": self.own_sqnr_db,
        }


@dataclass(frozen=True, kw_only=True)
class BlockTrace:
    """What the blocks of the reference computed.

    Attributes:
        names: Module names of the blocks.
        hidden_size: Width of a token's state.
        batches: Token ids, `[batch, tokens]` each.
        hidden_states: Per batch: the first block's input and every block's output, in host memory.
    """

    names: tuple[str, ...]
    hidden_size: int
    batches: list[torch.Tensor]
    hidden_states: list[list[torch.Tensor]]


def trace_blocks(reference: LogitStream, batches: Sequence[torch.Tensor]) -> BlockTrace:
    """Runs the reference on the beginnings of the first documents: at most 128 tokens of each and 512 in all.

    Args:
        reference: The original, with its blocks.
        batches: Token ids of the documents, `[batch, tokens]` each.

    Raises:
        UnsupportedModelError: If a forward does not run every block once.
    """
    chosen: list[torch.Tensor] = []
    left = _MAX_TOKENS
    for batch in batches:
        # Blocks are causal: the beginning of a document is computed as in the whole one.
        beginnings = batch[:, :_MAX_TOKENS_PER_DOCUMENT]
        beginnings = beginnings[: left // beginnings.shape[1]]
        if len(beginnings):
            chosen.append(beginnings)
            left -= beginnings.numel()
    return BlockTrace(
        names=tuple(reference.blocks),
        hidden_size=reference.hidden_size,
        batches=chosen,
        hidden_states=[_all_hidden_states(reference, tokens) for tokens in chosen],
    )


def block_errors(candidate: LogitStream, trace: BlockTrace) -> tuple[BlockError, ...]:
    """Measures every block of the candidate against the reference's trace.

    Returns:
        The errors in the blocks' order; none, with a warning, if the blocks differ in number or width.
    """
    shapes = (len(trace.names), trace.hidden_size), (len(candidate.blocks), candidate.hidden_size)
    if shapes[0] != shapes[1]:
        logger.warning(
            "not compared block by block: %d blocks of width %d in the reference, %d of width %d in the candidate",
            *shapes[0],
            *shapes[1],
        )
        return ()
    batches = zip(trace.batches, trace.hidden_states, strict=True)
    sums = torch.stack([_error_sums(candidate, tokens, expected) for tokens, expected in batches]).sum(dim=0)
    # What a block returns may be several states per token; all count the same.
    num_states = sum(expected[0][..., 0].numel() for expected in trace.hidden_states)
    stream, own = (sums / num_states).tolist()
    return tuple(
        BlockError(name=name, stream_error=of_stream, own_error=of_own)
        for name, of_stream, of_own in zip(trace.names, stream[1:], own[1:], strict=True)
    )


def format_block_errors(errors: Sequence[BlockError], num_worst: int | None = None) -> list[str]:
    """One line per block under a line of headings.

    Args:
        errors: Of all blocks.
        num_worst: Only so many, those that add the most first; None for all in the model's order.
    """
    shown = list(errors) if num_worst is None else sorted(errors, key=lambda e: -e.own_error)[:num_worst]
    rows = [(e.name, *(f"{v:.2e} ({_db(v):6.2f} dB)" for v in (e.stream_error, e.own_error))) for e in shown]
    table = [("block", "stream error (SQNR)", "own error (SQNR)"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _all_hidden_states(reference: LogitStream, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The first block's input and every block's output for `[batch, tokens]`, in host memory."""
    seen: list[torch.Tensor] = []

    def keep(_index: int, hidden: torch.Tensor) -> None:
        seen.append(hidden.to("cpu", copy=True))  # the next block may change it in place

    with _watched(reference.blocks, keep):
        reference.hidden_states(tokens)
    if len(seen) != len(reference.blocks) + 1:
        raise UnsupportedModelError(
            f"cannot compare block by block: {len(seen)} hidden states seen in one forward of {len(reference.blocks)} "
            "decoder blocks, of which each must run once"
        )
    return seen


def _error_sums(candidate: LogitStream, tokens: torch.Tensor, expected: list[torch.Tensor]) -> torch.Tensor:
    """Sums over tokens of the relative errors in the stream and of each block's own, `[2, blocks + 1]`."""
    sums = torch.zeros(2, len(expected), dtype=torch.float64)

    def measure(index: int, hidden: torch.Tensor) -> None:
        sums[0, index] = _error_sum(hidden, expected[index])

    # Blocks are not called again one by one: some hand on keys and values, which another call would overwrite.
    def measure_and_correct(index: int, hidden: torch.Tensor) -> torch.Tensor:
        sums[1, index] = _error_sum(hidden, expected[index])
        return expected[index].to(hidden.device, copy=True)

    for see in (measure, measure_and_correct):
        with _watched(candidate.blocks, see):
            candidate.hidden_states(tokens)
    return sums


@contextmanager
def _watched(
    blocks: Mapping[str, nn.Module], see: Callable[[int, torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Shows what runs through the blocks, for the duration of the context.

    Args:
        blocks: The decoder blocks, in order.
        see: Called with 0 and the first block's input, then with `i` and the output of block `i - 1`; a tensor that it
            returns takes the place of these hidden states.
    """

    def before(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            new = see(0, args[0])
            return None if new is None else ((new, *args[1:]), kwargs)
        new = see(0, kwargs["hidden_states"])
        return None if new is None else (args, {**kwargs, "hidden_states": new})

    def after(index: int) -> Callable[..., Any]:
        def hook(_block: nn.Module, _args: Any, output: Any) -> Any:
            if isinstance(output, (tuple, list)):
                new = see(index, output[0])
                return None if new is None else type(output)((new, *output[1:]))
            return see(index, output)

        return hook

    modules = list(blocks.values())
    handles = [modules[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles.extend(block.register_forward_hook(after(index)) for index, block in enumerate(modules, start=1))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _error_sum(hidden: torch.Tensor, expected: torch.Tensor) -> float:
    """Sum over tokens of the relative squared error; the last dimension is a token's state."""
    expected = expected.to(hidden.device).double()
    noise = (hidden.double() - expected).square().sum(dim=-1)
    signal = expected.square().sum(dim=-1)
    return float(torch.where(noise == 0.0, 0.0, noise / signal).sum())


def _db(error: float) -> float:
    return -10.0 * math.log10(error) if error != 0.0 else math.inf
