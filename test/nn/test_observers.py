"""`observers.py`: ranges come from real tokens only, both signs count, and shared work is never stale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoround_fp8.errors import NumericsError
from autoround_fp8.nn import observers
from autoround_fp8.nn.observers import AbsMaxObserver, InputRange


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors whose range was really computed."""
    seen: list[torch.Tensor] = []
    real = observers._largest_tokens

    def counting(x: torch.Tensor) -> list[float]:
        seen.append(x)
        return real(x)

    monkeypatch.setattr(observers, "_largest_tokens", counting)
    return seen


def observed(*inputs: torch.Tensor) -> InputRange:
    observer = AbsMaxObserver()
    for x in inputs:
        observer.observe("layer", x)
    return observer.ranges["layer"]


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_zero_tokens_change_nothing(shape: tuple[int, ...]):
    assert observed(torch.empty(shape)) == InputRange(amax=0.0, num_tokens=0, largest=[])
    assert observed(torch.full((2, 64), 3.0), torch.empty(shape)) == InputRange(
        amax=3.0, num_tokens=2, largest=[3.0] * 2
    )
    assert observed(torch.empty(shape), torch.full((2, 64), 3.0)) == InputRange(
        amax=3.0, num_tokens=2, largest=[3.0] * 2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_negative_side_counts(dtype: torch.dtype):
    assert observed(torch.tensor([[-10.0, 1.0]], dtype=dtype)).amax == 10.0
    assert observed(torch.full((3, 4), -2.0, dtype=dtype)).amax == 2.0
    assert observed(torch.zeros(3, 4, dtype=dtype)).amax == 0.0


def test_largest_value_and_all_tokens_over_calls():
    calls = [torch.full((2, 3, 4), 1.0), torch.full((5, 4), -7.0), torch.full((4,), 2.0)]
    assert observed(*calls) == InputRange(amax=7.0, num_tokens=6 + 5 + 1, largest=[7.0] * 5 + [2.0] + [1.0] * 6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_name_the_layer(bad: float, dtype: torch.dtype):
    x = torch.ones(2, 4, dtype=dtype)
    x[1, 2] = bad
    with pytest.raises(NumericsError, match=r"input of 'model\.layers\.0\.q_proj' holds NaN or infinity"):
        AbsMaxObserver().observe("model.layers.0.q_proj", x)


def test_bad_input_leaves_the_range_as_it_was():
    observer = AbsMaxObserver()
    observer.observe("a", torch.ones(2, 4))
    with pytest.raises(NumericsError):
        observer.observe("a", torch.full((2, 4), float("nan")))
    assert observer.ranges["a"] == InputRange(amax=1.0, num_tokens=2, largest=[1.0] * 2)


def test_shared_tensor_is_reduced_once_and_recorded_for_each_layer(reductions: list[torch.Tensor]):
    observer, x = AbsMaxObserver(), torch.full((3, 4), -5.0)
    for name in ("q", "k", "v"):
        observer.observe(name, x)
    assert len(reductions) == 1
    assert observer.ranges == {name: InputRange(amax=5.0, num_tokens=3, largest=[5.0] * 3) for name in ("q", "k", "v")}


def test_change_in_place_is_seen(reductions: list[torch.Tensor]):
    observer, x = AbsMaxObserver(), torch.ones(3, 4)
    observer.observe("a", x)
    x.mul_(4)
    observer.observe("b", x)
    assert len(reductions) == 2
    assert observer.ranges["b"].amax == 4.0


def test_change_through_a_view_is_seen():
    observer, x = AbsMaxObserver(), torch.ones(3, 4)
    observer.observe("a", x)
    x[0].fill_(9)
    observer.observe("b", x)
    assert observer.ranges["b"].amax == 9.0


def test_equal_but_different_tensors_are_not_confused():
    observer, x = AbsMaxObserver(), torch.ones(3, 4)
    observer.observe("a", x)
    observer.observe("b", x[:1] * 3)
    observer.observe("a", x)
    assert observer.ranges["b"] == InputRange(amax=3.0, num_tokens=1, largest=[3.0] * 1)
    assert observer.ranges["a"] == InputRange(amax=1.0, num_tokens=6, largest=[1.0] * 6)


def test_inference_tensors_are_observed_and_never_stale():
    observer = AbsMaxObserver()
    with torch.inference_mode():
        x = torch.ones(3, 4)
        observer.observe("a", x)
        x.mul_(4)
        observer.observe("b", x)
    assert [observer.ranges[name].amax for name in "ab"] == [1.0, 4.0]


@torch.no_grad()
def test_attached_hooks_watch_and_go_away_again():
    layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)})
    observer = AbsMaxObserver()
    with observer.attached(dict(layers.items())):
        layers["b"](layers["a"](torch.full((3, 4), 2.0)))
    layers["a"](torch.full((3, 4), 100.0))
    assert observer.ranges["a"] == InputRange(amax=2.0, num_tokens=3, largest=[2.0] * 3)
    assert observer.ranges["b"].num_tokens == 3
    assert not any(layer._forward_pre_hooks for layer in layers.values())
    assert observer._last is None


def test_input_given_by_keyword_is_observed():
    layer, observer = nn.Linear(4, 4), AbsMaxObserver()
    with observer.attached({"a": layer}):
        layer(input=torch.full((3, 4), 2.0))
    assert observer.ranges["a"] == InputRange(amax=2.0, num_tokens=3, largest=[2.0] * 3)


def test_hooks_go_away_after_an_error():
    layer, observer = nn.Linear(4, 4), AbsMaxObserver()
    with pytest.raises(NumericsError, match="'a'"), observer.attached({"a": layer}):
        layer(torch.full((3, 4), float("nan")))
    assert not layer._forward_pre_hooks


def test_layer_that_was_never_called_has_no_range():
    observer = AbsMaxObserver()
    with observer.attached({"a": nn.Linear(4, 4)}):
        pass
    assert observer.ranges == {}


def token_maxima(*values: float) -> torch.Tensor:
    """Inputs `[tokens, 3]` whose largest absolute values are the given ones, of either sign."""
    return torch.tensor([[0.1, value * (-1) ** i, -0.2] for i, value in enumerate(values)])


def test_peak_tokens_are_those_that_reach_half_of_the_range():
    seen = observed(token_maxima(1.0, 8.0, 3.9), token_maxima(4.0, 4.1, 2.0))
    assert seen == InputRange(amax=8.0, num_tokens=6, largest=pytest.approx([8.0, 4.1, 4.0, 3.9, 2.0, 1.0]))
    assert seen.num_peak_tokens == 3


def test_a_later_peak_takes_earlier_tokens_out():
    seen = observed(token_maxima(*[5.0] * 10), token_maxima(100.0))
    assert (seen.amax, seen.num_peak_tokens) == (100.0, 1)


def test_peak_tokens_are_counted_up_to_sixteen():
    for count in (15, 16, 17, 1000):
        calls = [token_maxima(*[6.0] * (count // 2), 1.0), token_maxima(*[7.0] * (count - count // 2))]
        seen = observed(*calls)
        assert seen.num_peak_tokens == min(count, 16)
        assert len(seen.largest) == 16
    assert InputRange().num_peak_tokens == 0


def test_the_largest_tokens_do_not_depend_on_how_they_are_cut():
    values = torch.randn(100, 7, generator=torch.Generator().manual_seed(1))
    whole = observed(values)
    expected = values.abs().amax(dim=-1).sort(descending=True).values[:16].tolist()
    assert whole.largest == expected
    for size in (1, 7, 33):
        assert observed(*values.split(size)) == whole


def test_uncounted_tokens_widen_the_range_and_nothing_else():
    layer, observer = nn.Linear(4, 4), AbsMaxObserver()
    with observer.attached({"a": layer}):
        layer(torch.full((3, 4), 2.0))
    with observer.attached({"a": layer}, is_counted=False):
        layer(torch.full((5, 4), 6.0))
    assert observer.ranges["a"] == InputRange(amax=6.0, num_tokens=3, largest=[6.0] * 5 + [2.0] * 3)
    with pytest.raises(NumericsError, match=r"'a' holds NaN or infinity in a range probe \(--disable_range_probes"):
        observer.observe("a", torch.full((1, 4), float("inf")), is_counted=False)
