"""Second moments are sums over all tokens, and cost nothing before they are of use."""

from __future__ import annotations

import pytest
import torch

from autoround_fp8.nn.second_moments import SecondMoment, SecondMoments


def inputs(*sizes: int, features: int = 6, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, features, generator=generator) for size in sizes]


@pytest.mark.parametrize("sizes", [(6,), (20,), (2, 3, 9), (5, 1, 4), (1,) * 7])
def test_the_sum_does_not_depend_on_the_pieces(sizes: tuple[int, ...]) -> None:
    pieces = inputs(*sizes)
    moment = SecondMoment(6)
    for piece in pieces:
        moment.add(piece)
    rows = torch.cat(pieces)
    assert moment.is_full_rank
    assert moment.num_tokens == sum(sizes)
    torch.testing.assert_close(moment.matrix(), rows.t() @ rows)


@pytest.mark.parametrize("features", [1, 63, 64, 65, 300, 576])
def test_the_whole_matrix_is_there_for_every_size(features: int) -> None:
    rows = torch.cat(inputs(features + 3, 40, features=features))
    moment = SecondMoment(features)
    for piece in rows.split(features + 3):
        moment.add(piece)
    torch.testing.assert_close(moment.matrix(), rows.t() @ rows, rtol=1e-4, atol=1e-4)
    assert torch.equal(moment.matrix(), moment.matrix().t())


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (6,), (4, 9)])
def test_column_weights_are_the_diagonal_for_any_number_of_tokens(sizes: tuple[int, ...]) -> None:
    pieces = inputs(*sizes)
    moment = SecondMoment(6)
    for piece in pieces:
        moment.add(piece)
    diagonal = torch.cat(pieces).square().sum(0)
    for _ in range(2):  # and the matrix, which they may be asked before or after, is no other
        torch.testing.assert_close(moment.column_weights(), diagonal / diagonal.mean())
        if moment.is_full_rank:
            torch.testing.assert_close(moment.matrix().diagonal(), diagonal)


def test_column_weights_of_zeros_are_ones() -> None:
    moment = SecondMoment(6)
    moment.add(torch.zeros(2, 6))
    assert torch.equal(moment.column_weights(), torch.ones(6))


def test_batches_16_bit_inputs_and_no_tokens() -> None:
    moment = SecondMoment(6)
    moment.add(torch.empty(0, 6))
    assert (moment.num_tokens, moment.is_full_rank) == (0, False)
    x = inputs(12)[0].bfloat16()
    moment.add(x.view(3, 4, 6))
    assert moment.matrix().dtype == torch.float32
    torch.testing.assert_close(moment.matrix(), x.float().t() @ x.float())


def test_few_tokens_are_no_moment() -> None:
    moment = SecondMoment(6)
    moment.add(inputs(5)[0])
    assert not moment.is_full_rank
    with pytest.raises(AssertionError, match="fewer tokens"):
        moment.matrix()


def test_kept_rows_do_not_follow_later_changes() -> None:
    first, second = inputs(3, 5)
    expected = torch.cat([first, second])
    expected = expected.t() @ expected
    moment = SecondMoment(6)
    moment.add(first)
    first.zero_()
    moment.add(second)
    torch.testing.assert_close(moment.matrix(), expected)


def test_only_the_named_inputs_are_summed_with_their_strides() -> None:
    moments = SecondMoments({"q": 2, "down": 1})
    (x,) = inputs(10)
    for name in ("q", "down", "gate"):
        moments.add(name, x)
    assert moments.get("q").num_tokens == 5
    assert moments.get("down").num_tokens == 10
    assert moments.get("gate") is None
    assert SecondMoments({"q": 1}).get("q") is None
    torch.testing.assert_close(moments.get("down").matrix(), x.t() @ x)
