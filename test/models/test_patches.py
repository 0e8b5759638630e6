"""`patches.py`: swapped forwards run on instances only, with hooks, and are always undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from autoround_fp8.errors import ConfigError
from autoround_fp8.models.patches import refuse_saving, swapped_forwards

X = torch.ones(1, 2)


def constant(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.full_like(x, value)


def test_swapped_inside_and_undone_after():
    layer = nn.Identity()
    with swapped_forwards({layer: constant(7)}):
        assert layer(X).tolist() == [[7.0, 7.0]]
    assert torch.equal(layer(X), X)
    assert "forward" not in layer.__dict__


def test_undone_after_an_error():
    layers = [nn.Identity(), nn.Identity()]
    with pytest.raises(ZeroDivisionError), swapped_forwards({layer: constant(7) for layer in layers}):
        raise ZeroDivisionError
    assert all("forward" not in layer.__dict__ for layer in layers)


def test_undone_when_the_swapped_forward_fails():
    def broken(_x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    layer = nn.Identity()
    with pytest.raises(RuntimeError, match="broken"), swapped_forwards({layer: broken}):
        layer(X)
    assert torch.equal(layer(X), X)


def test_class_and_other_instances_are_untouched():
    layer, other, before = nn.Identity(), nn.Identity(), nn.Identity.forward
    with swapped_forwards({layer: constant(7)}):
        assert torch.equal(other(X), X)
        assert torch.equal(nn.Identity()(X), X)
        assert nn.Identity.forward is before
    assert nn.Identity.forward is before


def test_hooks_still_run():
    layer, seen = nn.Identity(), []
    layer.register_forward_hook(lambda _m, _a, out: seen.append(out.tolist()))
    with swapped_forwards({layer: constant(7)}):
        layer(X)
    assert seen == [[[7.0, 7.0]]]


def test_nested_swaps_come_undone_in_order():
    layer = nn.Identity()
    with swapped_forwards({layer: constant(1)}):
        with swapped_forwards({layer: constant(2)}):
            assert layer(X)[0, 0] == 2
        assert layer(X)[0, 0] == 1
    assert torch.equal(layer(X), X)


def test_forward_set_on_the_instance_before_comes_back():
    layer, own = nn.Identity(), constant(5)
    layer.__dict__["forward"] = own
    with swapped_forwards({layer: constant(7)}):
        assert layer(X)[0, 0] == 7
    assert layer.__dict__["forward"] is own


def test_saving_is_refused_on_the_instance_and_its_copies_only(tmp_path: Path):
    model = tiny_model()
    refuse_saving(model, "it is only a test")
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ConfigError, match="only a test; copy its folder, or use save_quantized"):
            one.save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()
    tiny_model().save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "config.json").is_file()
