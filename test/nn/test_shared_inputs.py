"""Inputs of several layers are handed on once, and samples of them hold what is rare."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoround_fp8.nn.shared_inputs import InputSamples, SharedInputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.down = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(input=torch.relu(self.q(x) + self.k(x)))


@torch.no_grad()
def test_layers_with_one_input_share_it() -> None:
    block, seen = Block(), []
    shared = SharedInputs(lambda name, x: seen.append((name, len(x))), lambda name, x: seen.append(("again", len(x))))
    with shared.attached(dict(block.named_children())):
        for size in (4, 7):
            block(torch.ones(size, 6))
    block(torch.ones(50, 6))  # after the context nothing is seen
    assert seen == [(name, size) for size in (4, 7) for name in ("q", "again", "down", "again")]
    assert [shared.owner(name) for name in ("q", "k", "down", "other")] == ["q", "q", "down", "other"]


def test_no_tokens_are_not_handed_on() -> None:
    seen: list[str] = []
    shared = SharedInputs(lambda name, x: seen.append(name))
    shared.observe("expert", torch.empty(0, 6))
    assert seen == []
    assert shared.owner("expert") == "expert"


def test_an_input_shared_in_some_calls_only_is_an_error() -> None:
    shared = SharedInputs(lambda name, x: None)
    x, y = torch.ones(4, 6), torch.ones(4, 6)
    shared.observe("a", x)
    shared.observe("b", x)
    with pytest.raises(RuntimeError, match="'b' shares its input with 'a' in some calls only"):
        shared.observe("b", y)


def test_without_takers_nothing_is_watched() -> None:
    block = Block()
    with SharedInputs().attached(dict(block.named_children())):
        assert not block.q._forward_pre_hooks


@pytest.mark.parametrize("length", [1, 5, 8, 9])
def test_samples_hold_the_first_token_of_every_sequence(length: int) -> None:
    x = torch.arange(3.0 * length * 2).reshape(3, length, 2)
    samples = InputSamples({"q": 4})
    samples.add("q", x)
    samples.add("q", x + 100)
    rows = samples.get("q")
    assert rows.shape == (6 * -(-length // 4), 2)
    assert all(bool((rows == first).all(1).any()) for first in torch.cat([x[:, 0], x[:, 0] + 100]))
    assert samples.get("down") is None
    samples.clear()
    assert samples.get("q") is None


def test_samples_do_not_follow_later_changes() -> None:
    x = torch.ones(4, 6)
    samples = InputSamples({"q": 1})
    samples.add("q", x)
    x.zero_()
    assert torch.equal(samples.get("q"), torch.ones(4, 6))
