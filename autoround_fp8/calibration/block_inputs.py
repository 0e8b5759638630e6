"""What every decoder block is called with: found by running the model's own forward over stubbed blocks, then replayed.

Masks, rotary tables and positions are the model's own, per block, so no family needs code here. Samples of a batch have
equal lengths (see `dataset.py`), so there is no padding to keep apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoround_fp8.device import is_out_of_memory
from autoround_fp8.errors import AutoRoundError, UnsupportedModelError, cause_line
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.records import BlockInputs

# What code that is not ours raises when it cannot compute.
_FORWARD_FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
)


class _Stop(Exception):
    """Ends the model's forward once the last block was reached."""


class _Carry:
    """Stands for what a block returns beside its hidden states; a later block that is given one depends on it."""


@dataclass
class CapturedCalls:
    """The calls of all blocks for all batches.

    Attributes:
        hidden_states: Per batch, what the first block is given, `[batch, tokens, hidden]`, in host memory.
        calls: Per batch, per block: further positional arguments and keyword arguments.
        num_outputs: How many values a block returns; None = its hidden states alone, in no tuple.
    """

    hidden_states: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)
    num_outputs: int | None = None

    def inputs(self, batch: int, block: int) -> BlockInputs:
        """The call of one block for one batch, with the batch's current hidden states."""
        args, kwargs = self.calls[batch][block]
        return BlockInputs(block=block, hidden_states=self.hidden_states[batch], args=args, kwargs=kwargs)

    def advance(self, outputs: Sequence[torch.Tensor]) -> None:
        """Makes a block's outputs, one per batch, the next block's hidden states.

        They are copied to where those are: what lives longest stays in one place, so that free memory does not end up
        in pieces between, which would let the process grow from block to block.
        """
        for batch, output in enumerate(outputs):
            kept = self.hidden_states[batch]
            if (kept.shape, kept.dtype) == (output.shape, output.dtype):
                kept.copy_(output)
            else:
                self.hidden_states[batch] = output


def run_block(block: nn.Module, inputs: BlockInputs, device: torch.device) -> torch.Tensor:
    """Runs a block; returns its hidden states `[batch, tokens, hidden]` in host memory.

    Raises:
        UnsupportedModelError: If the block's own code fails, naming the block and the cause.
    """
    hidden_states = inputs.hidden_states.to(device)
    with _forward_of(lambda: _block_text(inputs.block, block)):
        out = block(hidden_states, *inputs.args, **inputs.kwargs)
    return (out[0] if isinstance(out, (tuple, list)) else out).cpu()


def capture_block_inputs(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Sequence[torch.Tensor],
    device: torch.device,
    with_first_block: Callable[[], Any],
) -> CapturedCalls:
    """Records the inputs of every block by the model's own forward.

    Args:
        model: The model; everything in front of the blocks is filled, the blocks may be on meta.
        blocks: Its decoder blocks, in order.
        batches: Token ids `[batch, tokens]`, no padding.
        device: Where the model runs.
        with_first_block: Context manager factory during which the first block is filled.

    Raises:
        UnsupportedModelError: If blocks are skipped, called twice, or hand over more than the hidden states, or if the
            model's own code fails, naming where and the cause.
    """
    captured = CapturedCalls()
    interned: dict[Any, torch.Tensor] = {}
    for batch in batches:
        ids = batch.to(device)
        if not captured.calls:
            # How many values a block returns decides how the model unpacks them, so the first block runs for real, once
            # and on a few tokens.
            first = _run_stubbed(model, blocks[:1], ids[:1, :8], None)
            args, kwargs = first[0]
            with with_first_block(), _forward_of(lambda: _block_text(0, blocks[0])):
                out = blocks[0](*args, **kwargs)
            captured.num_outputs = len(out) if isinstance(out, (tuple, list)) else None
        calls = _run_stubbed(model, blocks, ids, captured.num_outputs)
        _check_calls(calls, len(blocks))
        hidden_states, _ = _split(*calls[0])
        captured.hidden_states.append(hidden_states.to("cpu", copy=True))  # a later block may be given the same
        captured.calls.append([_intern(_split(*call)[1], interned) for call in calls])
    return captured


def _run_stubbed(
    model: nn.Module, blocks: Sequence[nn.Module], ids: torch.Tensor, num_outputs: int | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def stub(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index in calls:
                raise UnsupportedModelError(
                    f"decoder block {index} is called more than once in a forward; not supported"
                )
            calls[index] = (args, kwargs)
            if index == len(blocks) - 1:
                raise _Stop
            hidden_states, _ = _split(args, kwargs)
            if num_outputs is None:
                return hidden_states
            return (hidden_states, *(_Carry() for _ in range(num_outputs - 1)))

        return forward

    def place() -> str:
        if not calls:
            return "the part of the model in front of its decoder blocks"
        last = max(calls)
        return f"the part of the model after {_block_text(last, blocks[last])}"

    try:
        with _forward_of(place), swapped_forwards({block: stub(i) for i, block in enumerate(blocks)}):
            model(input_ids=ids, use_cache=False)
    except _Stop:
        pass
    return [calls[i] for i in sorted(calls)]


@contextmanager
def _forward_of(what: Callable[[], str]) -> Iterator[None]:
    """Turns errors of code that is not ours into one sentence; out of memory is no fault of the model, and stays."""
    try:
        yield
    except AutoRoundError:
        raise
    except _FORWARD_FAULTS as e:
        if is_out_of_memory(e):
            raise
        raise UnsupportedModelError(f"{what()} cannot be run: {cause_line(e)}") from e


def _block_text(index: int, block: nn.Module) -> str:
    return f"decoder block {index} ({type(block).__name__})"


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[tuple[Any, ...], dict[str, Any]]]:
    if args:
        return args[0], (args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), ((), rest)


def _check_calls(calls: list[tuple[tuple[Any, ...], dict[str, Any]]], num_blocks: int) -> None:
    if len(calls) != num_blocks:
        raise UnsupportedModelError(f"the model's forward reached {len(calls)} of its {num_blocks} decoder blocks")
    for index, (args, kwargs) in enumerate(calls):
        values = [*enumerate(args), *kwargs.items()]
        carried = [name for name, value in values if isinstance(value, _Carry)]
        if carried:
            raise UnsupportedModelError(
                f"decoder block {index} is given another block's output as argument {carried[0]!r}; not supported"
            )


def _intern(value: Any, known: dict[Any, torch.Tensor]) -> Any:
    """Replaces tensors, also nested ones, by equal ones seen before, so that masks and rotary tables are kept once."""
    if isinstance(value, torch.Tensor):
        data = torch.view_as_real(value) if value.is_complex() else value
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        key = (value.dtype, tuple(value.shape), hashlib.sha256(raw.data).digest())
        return known.setdefault(key, value.detach())
    if isinstance(value, dict):
        return {k: _intern(v, known) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_intern(v, known) for v in value)
    return value
