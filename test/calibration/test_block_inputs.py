"""Capture of block inputs: replaying them gives the model's own hidden states, and odd models are refused."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from tiny_moe_models import tiny_moe_model
from torch import nn

from autoround_fp8.calibration.block_inputs import capture_block_inputs, run_block
from autoround_fp8.errors import NumericsError, UnsupportedModelError
from autoround_fp8.models.skeleton import find_blocks

CPU = torch.device("cpu")


def capture(model: Any, batches: list[torch.Tensor]) -> tuple[list[Any], Any]:
    blocks = [model.get_submodule(name) for name in find_blocks(model, model.config)]
    with torch.no_grad():
        return blocks, capture_block_inputs(model, blocks, batches, CPU, nullcontext)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_replay_equals_the_models_own_blocks(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    batches = [torch.randint(4, 128, (2, 20)), torch.randint(4, 128, (1, 11))]
    blocks, calls = capture(model, batches)
    for number, batch in enumerate(batches):
        outputs: list[torch.Tensor] = []
        hooks = [
            block.register_forward_hook(
                lambda m, a, out, to=outputs: to.append(out[0] if isinstance(out, tuple) else out)
            )
            for block in blocks
        ]
        with torch.no_grad():
            model(input_ids=batch, use_cache=False)
        for hook in hooks:
            hook.remove()
        for index, block in enumerate(blocks):
            with torch.no_grad():
                calls.hidden_states[number] = run_block(block, calls.inputs(number, index), CPU)
            assert torch.equal(calls.hidden_states[number], outputs[index])


def test_outputs_take_the_place_of_the_hidden_states() -> None:
    model = tiny_model(dtype=torch.float32)
    _, calls = capture(model, [torch.randint(4, 128, (2, 20)), torch.randint(4, 128, (1, 11))])
    places = [kept.data_ptr() for kept in calls.hidden_states]
    outputs = [torch.randn_like(calls.hidden_states[0]), torch.randn_like(calls.hidden_states[1]).double()]
    calls.advance(outputs)
    for kept, output in zip(calls.hidden_states, outputs, strict=True):
        assert torch.equal(kept, output)
        assert kept.dtype == output.dtype
    assert calls.hidden_states[0].data_ptr() == places[0] != outputs[0].data_ptr()
    assert calls.hidden_states[1] is outputs[1]


def test_hidden_states_share_no_memory_with_other_arguments() -> None:
    """Some models hand the embeddings to every block: they must not change with the hidden states."""
    model = tiny_model(dtype=torch.float32)
    embedded: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: embedded.append(out))
    _, calls = capture(model, [torch.randint(4, 128, (2, 20))])
    assert torch.equal(calls.hidden_states[0], embedded[-1])
    assert calls.hidden_states[0].data_ptr() != embedded[-1].data_ptr()


def test_equal_masks_and_rotary_tables_are_kept_once() -> None:
    model = tiny_model("gemma3_text", dtype=torch.float32)
    _, calls = capture(model, [torch.randint(4, 128, (2, 20)) for _ in range(3)])
    kept = {
        id(tensor)
        for batch in calls.calls
        for _, kwargs in batch
        for value in kwargs.values()
        for tensor in (value if isinstance(value, tuple) else (value,))
        if isinstance(tensor, torch.Tensor)
    }
    # One sliding mask, position ids, and cos and sin of two rotary types, whatever the number of batches and blocks.
    assert len(kept) <= 8


class NestedBlock(nn.Module):
    def forward(self, hidden_states: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        factor, (offset,) = extra["pair"]
        return hidden_states * factor + offset


class NestedModel(nn.Module):
    """Its blocks are given a dict that holds a tuple and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 8)
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, extra={"pair": (torch.full((8,), 3.0), [torch.full((8,), 2.0)]), "word": "x"})
        return hidden


@torch.no_grad()
def test_nested_arguments_are_replayed_kept_once_and_released() -> None:
    model = NestedModel()
    batches = [torch.randint(4, 128, (2, 8)), torch.randint(4, 128, (1, 5))]
    calls = capture_block_inputs(model, list(model.blocks), batches, CPU, nullcontext)
    for number, batch in enumerate(batches):
        for index in range(2):
            calls.hidden_states[number] = run_block(model.blocks[index], calls.inputs(number, index), CPU)
        assert torch.equal(calls.hidden_states[number], model(batch, use_cache=False))
    extras = [kwargs["extra"] for batch_calls in calls.calls for _, kwargs in batch_calls]
    kept = {id(tensor): tensor for extra in extras for tensor in (extra["pair"][0], extra["pair"][1][0])}
    assert len(kept) == 2
    references = [weakref.ref(tensor) for tensor in kept.values()]
    del extras, kept
    for batch_calls in calls.calls:
        batch_calls[:] = [((), {})] * 2  # as the run does after a block
    assert [reference() for reference in references] == [None] * 2


def test_state_handed_from_block_to_block_is_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    inner = model.model
    first = inner.layers[0]
    own_forward = first.forward
    first.forward = lambda *args, **kwargs: (own_forward(*args, **kwargs), torch.zeros(1))
    inner.forward = lambda input_ids, **kwargs: _chained(inner, input_ids)
    with pytest.raises(UnsupportedModelError, match="block 1"):
        capture(model, [torch.randint(4, 128, (1, 8))])


def _chained(inner: Any, ids: torch.Tensor) -> None:
    hidden = inner.embed_tokens(ids)
    tables = inner.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    hidden, state = inner.layers[0](hidden, position_embeddings=tables, attention_mask=None)
    inner.layers[1](hidden, position_embeddings=tables, attention_mask=None, state=state)


def test_a_block_called_twice_is_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    inner = model.model
    inner.forward = lambda input_ids, **kwargs: _looped(inner, input_ids)
    with pytest.raises(UnsupportedModelError, match="more than once"):
        capture(model, [torch.randint(4, 128, (1, 8))])


def _looped(inner: Any, ids: torch.Tensor) -> None:
    hidden = inner.embed_tokens(ids)
    tables = inner.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    for _ in range(2):
        hidden = inner.layers[0](hidden, position_embeddings=tables, attention_mask=None)


def test_a_block_that_cannot_run_is_named_with_the_cause() -> None:
    model = tiny_moe_model("mixtral", num_experts_per_tok=9)
    cause = r"decoder block 0 \(MixtralDecoderLayer\) cannot be run: RuntimeError: selected index k out of range"
    with pytest.raises(UnsupportedModelError, match=cause):
        capture(model, [torch.randint(4, 128, (1, 8))])


def test_a_failure_in_front_of_the_blocks_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match="in front of its decoder blocks cannot be run: IndexError"):
        capture(tiny_model("llama", dtype=torch.float32), [torch.tensor([[4, 9999]])])


def test_a_failure_between_blocks_says_after_which() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    inner = model.model

    def forward(input_ids: torch.Tensor, **_kwargs: Any) -> None:
        hidden = inner.embed_tokens(input_ids)
        tables = inner.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        inner.layers[0](hidden, position_embeddings=tables, attention_mask=None)
        raise KeyError("cache")

    inner.forward = forward
    with pytest.raises(UnsupportedModelError, match=r"after decoder block 0 \(LlamaDecoderLayer\) .*KeyError: 'cache'"):
        capture(model, [torch.randint(4, 128, (1, 8))])


def failing_run(error: BaseException) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    blocks, calls = capture(model, [torch.randint(4, 128, (1, 8))])

    def forward(*_args: Any, **_kwargs: Any) -> None:
        raise error

    blocks[1].mlp.forward = forward
    run_block(blocks[1], calls.inputs(0, 1), CPU)


@pytest.mark.parametrize("error", [RuntimeError("no\nsecond line"), AssertionError("no"), ZeroDivisionError("no")])
def test_run_block_names_the_block_and_the_cause(error: Exception) -> None:
    expected = rf"^decoder block 1 \(LlamaDecoderLayer\) cannot be run: {type(error).__name__}: no$"
    with pytest.raises(UnsupportedModelError, match=expected) as raised:
        failing_run(error)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        NumericsError("ours"),
        KeyboardInterrupt(),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_our_errors_interrupts_and_lack_of_memory_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        failing_run(error)
    assert raised.value is error
