"""Settings are checked when they are made, and appear in the report as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import ConfigError
from autoround_fp8.schemes import parse_layer_config, parse_scheme


@pytest.mark.parametrize("name", ["nsamples", "seqlen", "batch_size", "gradient_accumulate_steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
def test_counts_must_be_whole_and_positive(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \({value!r}\)".replace("(-", r"(\-")):
        QuantizeConfig(**{name: value})


@pytest.mark.parametrize("iters", [-1, None, 2.5, True])
def test_steps_must_be_a_whole_number(iters: Any) -> None:
    with pytest.raises(ConfigError, match=r"iters .* must be a whole number of at least 0"):
        QuantizeConfig(iters=iters)


def test_gradient_tuning_without_steps_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="'signround' is gradient tuning, but iters is 0"):
        QuantizeConfig(algorithm="signround")
    assert QuantizeConfig(algorithm="signround", iters=3).tuning is not None


def test_tuning_follows_from_the_steps() -> None:
    assert QuantizeConfig().tuning is None
    tuning = QuantizeConfig(iters=50, seed=3).tuning
    assert tuning is not None
    assert (tuning.iters, tuning.lr, tuning.minmax_lr, tuning.seed, tuning.keep_best) == (50, 0.01, 0.0, 3, True)
    other = QuantizeConfig(iters=50, lr=0.1, minmax_lr=0.0, not_use_best_mse=True, gradient_accumulate_steps=2).tuning
    assert other is not None
    assert (other.lr, other.minmax_lr, other.keep_best, other.batches_per_step) == (0.1, 0.0, False, 2)


@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("iters", [0, 5])
def test_quantised_inputs_are_the_default_of_tuning_only(wish: bool | None, iters: int) -> None:
    found = QuantizeConfig(iters=iters, enable_quanted_input=wish).quantized_inputs
    assert found == (iters > 0 if wish is None else wish)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algorithm", "awq"),
        ("lr", -0.5),
        ("minmax_lr", "x"),
        ("calibration_dtype", "float8"),
        ("seed", -1),
        ("seed", "42"),
    ],
)
def test_other_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{value}"):
        QuantizeConfig(**{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, "2", True, None])
def test_keep_layers_is_a_count(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"keep_layers \({value!r}\) must be a whole number of at least 0"):
        QuantizeConfig(keep_layers=value)


@pytest.mark.parametrize("value", [0, -0.1, float("nan"), float("inf"), "0.01", True])
def test_target_kl_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"target_kl .* must be a number above 0"):
        QuantizeConfig(target_kl=value)


def test_only_one_may_say_how_many_layers_stay() -> None:
    with pytest.raises(ConfigError, match=r"keep_layers \(2\) and target_kl \(0.01\).*give one"):
        QuantizeConfig(keep_layers=2, target_kl=0.01)


def test_an_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="ignore_layer"):
        QuantizeConfig(ignore_layer="lm_head")  # type: ignore[call-arg]


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantizeConfig().nsamples = 1  # type: ignore[misc]


def test_two_configs_share_no_defaults() -> None:
    one, two = QuantizeConfig(), QuantizeConfig()
    assert one.scheme is not two.scheme
    assert one.layer_config is not two.layer_config


def test_the_report_holds_every_setting_as_json() -> None:
    config = QuantizeConfig(
        scheme=parse_scheme("FP8_STATIC_TENSOR"),
        layer_config=parse_layer_config({"down_proj": "FP8_STATIC"}),
        ignore_layers=("o_proj",),
        dataset=["text"],
        seed=3,
    )
    report = json.loads(json.dumps(config.to_report()))
    assert report.keys() == {field.name for field in dataclasses.fields(QuantizeConfig)}
    assert report["dataset"] == "<list>"
    assert report["scheme"]["group_size"] == 0
    assert report["layer_config"]["down_proj"]["group_size"] == -1
    assert (report["ignore_layers"], report["seed"]) == (["o_proj"], 3)
    assert QuantizeConfig(dataset="a.jsonl").to_report()["dataset"] == "a.jsonl"
