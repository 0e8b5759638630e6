"""Which range a layer's input scale is made from, and how that is reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoround_fp8.errors import NumericsError
from autoround_fp8.nn.observers import InputRange
from autoround_fp8.tuning.input_ranges import GROUP, OBSERVED, SHARED, UNSEEN, input_amax

EXPERTS = ("experts.0.down_proj", "experts.1.down_proj", "experts.2.down_proj")


def seen(*amax: float | None) -> dict[str, InputRange]:
    """Ranges of the first experts; None = hooked, but no token came."""
    ranges = [InputRange() if value is None else InputRange(amax=value, num_tokens=7) for value in amax]
    return dict(zip(EXPERTS, ranges, strict=False))


def of(expert: int, ranges: dict[str, InputRange], group: Sequence[str] = EXPERTS) -> tuple[float, str]:
    return input_amax("layers.0.experts.down_proj", EXPERTS[expert], group, EXPERTS, ranges)


def test_a_layer_of_its_own_gets_what_it_saw() -> None:
    ranges = {"o_proj": InputRange(amax=3.0, num_tokens=5), "q_proj": InputRange(amax=9.0, num_tokens=5)}
    assert input_amax("m.o_proj", "o_proj", ("o_proj",), (), ranges) == (3.0, OBSERVED)


def test_fused_layers_get_the_largest_of_the_group() -> None:
    ranges = {name: InputRange(amax=amax, num_tokens=5) for name, amax in (("q", 3.0), ("k", 4.0), ("v", 4.0))}
    found = [input_amax(f"m.{name}", name, ("q", "k", "v"), (), ranges) for name in "qkv"]
    assert found == [(4.0, GROUP), (4.0, OBSERVED), (4.0, OBSERVED)]


def test_a_member_of_the_group_that_stays_in_16_bit_does_not_count() -> None:
    assert input_amax("m.q", "q", ("q", "k"), (), {"q": InputRange(amax=2.0, num_tokens=1)}) == (2.0, OBSERVED)


def test_experts_share_the_largest_of_the_layer() -> None:
    ranges = seen(1.0, 5.0, 2.0)
    assert [of(i, ranges) for i in range(3)] == [(5.0, SHARED), (5.0, OBSERVED), (5.0, SHARED)]


def test_experts_on_their_own_get_their_own() -> None:
    ranges = seen(1.0, 5.0, 2.0)
    assert [of(i, ranges, EXPERTS[i : i + 1]) for i in range(3)] == [(1.0, OBSERVED), (5.0, OBSERVED), (2.0, OBSERVED)]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranges", [seen(1.0, 5.0, None), seen(1.0, 5.0)])
def test_an_unseen_expert_gets_the_largest_of_the_layer(ranges: dict[str, InputRange], shared: bool) -> None:
    assert of(2, ranges, EXPERTS if shared else EXPERTS[2:]) == (5.0, UNSEEN)


def test_an_expert_that_saw_only_zeros_is_no_unseen_one() -> None:
    ranges = seen(0.0, 5.0, None)
    assert of(0, ranges, EXPERTS[:1]) == (0.0, OBSERVED)
    assert of(2, ranges) == (5.0, UNSEEN)


@pytest.mark.parametrize("ranges", [{}, seen(None, None, None), seen(None)])
def test_a_layer_whose_experts_all_saw_nothing_is_named(ranges: dict[str, InputRange]) -> None:
    message = r"no calibration token reached any expert of the layer of 'layers\.0\.experts\.down_proj'"
    with pytest.raises(NumericsError, match=message):
        of(1, ranges)


@pytest.mark.parametrize("ranges", [{}, {"o": InputRange()}, {"o": InputRange(), "p": InputRange(2.0, 3)}])
def test_a_layer_that_saw_nothing_is_named_whatever_its_group_saw(ranges: dict[str, InputRange]) -> None:
    with pytest.raises(NumericsError, match=r"no calibration token reached layer 'm\.o'"):
        input_amax("m.o", "o", ("o", "p"), (), ranges)
