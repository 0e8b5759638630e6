"""The layers that do the most harm stay in 16 bit, whole fused groups of them; harm and KL are those of real models."""

from __future__ import annotations

import dataclasses
import json
import logging
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from tiny_moe_models import dead_experts_model, save_tiny_moe_model, tiny_moe_model

from autoround_fp8 import mixed_precision
from autoround_fp8.calibration.dataset import make_batches
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import ConfigError, NumericsError
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.inference.load import load_quantized_model
from autoround_fp8.mixed_precision import MAX_ROUNDS, MAX_TOKENS, layer_groups, pick_samples, search_count
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import PreparedRun, export_run, keep_harmful_layers, prepare

ROWS = torch.randint(4, VOCAB_SIZE, (4, 24), generator=torch.Generator().manual_seed(3))
HARMFUL = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")


def prepared(model: Any, **settings: Any) -> PreparedRun:
    # Without probes, the ranges of an export are those that were measured with.
    base = {"dataset": ROWS, "device": "cpu", "batch_size": 2, "algorithm": "mse", "range_probes": False}
    base["calibration_dtype"] = "float32"
    return prepare(QuantizeConfig(**{**base, **settings}), open_model(model))


def mixed(model: Any, **settings: Any) -> tuple[PreparedRun, dict[str, Any]]:
    run = keep_harmful_layers(prepared(model, **settings))
    assert run.mixed_precision is not None
    return run, json.loads(json.dumps(run.mixed_precision))


@torch.no_grad()
def with_harmful_mlp(model: Any) -> Any:
    """Gives a row of the second layer's up_proj one huge weight, which takes all precision from a scale per tensor.

    The same row of gate_proj is zero, so that the row's output is zero too: in 16 bit it changes nothing.
    """
    model.model.layers[1].mlp.gate_proj.weight[5] = 0.0
    model.model.layers[1].mlp.up_proj.weight[5, 7] = 3e4
    return model


@torch.no_grad()
def with_harmful_experts(model: Any) -> Any:
    """The same in each expert of the second layer."""
    weight = model.model.layers[1].mlp.experts.gate_up_proj
    weight[:, 5] = 0.0
    weight[:, weight.shape[1] // 2 + 5, 7] = 3e4
    return model


def test_groups_are_what_engines_fuse() -> None:
    names = [group.names for group in layer_groups(prepared(tiny_model()).plan)]
    layer = "model.layers.0."
    assert len(names) == 8
    assert names[:4] == [
        tuple(f"{layer}self_attn.{leaf}_proj" for leaf in "qkv"),
        (f"{layer}self_attn.o_proj",),
        (f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        (f"{layer}mlp.down_proj",),
    ]


def test_all_experts_of_a_layer_are_one_group() -> None:
    groups = layer_groups(prepared(tiny_moe_model("qwen2_moe")).plan)
    second = {group.names: len(group.linears) for group in groups if group.block == 1}
    assert second.pop(("model.layers.1.mlp.experts",)) == 3 * 8
    shared = "model.layers.1.mlp.shared_expert."
    assert second.keys() >= {(f"{shared}gate_proj", f"{shared}up_proj"), (f"{shared}down_proj",)}


def test_layers_that_are_ignored_anyway_are_no_group() -> None:
    groups = layer_groups(prepared(tiny_model(), ignore_layers=("layers.0", "down_proj")).plan)
    assert [group.names[0].removeprefix("model.layers.1.") for group in groups] == [
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
    ]


def test_the_harmful_layer_is_kept_with_what_engines_fuse_it_with() -> None:
    run, report = mixed(with_harmful_mlp(tiny_model()), scheme=tensor_scheme(), keep_layers=1)
    assert tuple(report["kept"]) == HARMFUL
    assert {x.fqn for block in run.plan.blocks for x in block if not x.scheme.is_quantized} == set(HARMFUL)
    assert report["harms"][0]["layers"] == list(HARMFUL)
    assert report["harms"][0]["harm"] > 20 * report["harms"][1]["harm"]
    assert report["kl_after"] < report["kl_before"] / 5


def test_harmful_experts_are_kept_all_together() -> None:
    run, report = mixed(with_harmful_experts(tiny_moe_model("mixtral")), keep_layers=1)
    assert report["kept"] == ["model.layers.1.mlp.experts"]
    kept = [x for block in run.plan.blocks for x in block if not x.scheme.is_quantized and x.experts]
    assert {x.experts for x in kept} == {"model.layers.1.mlp.experts"}
    assert len(kept) == 24
    assert report["kl_after"] < report["kl_before"] / 5


def tensor_scheme() -> Any:
    from autoround_fp8.schemes import parse_scheme

    return parse_scheme("FP8_STATIC_TENSOR")


@pytest.mark.parametrize("family", ["dense", "mixtral", "qwen3_moe", "granitemoe"])
def test_kept_layers_are_exported_as_ignored_and_reload(tmp_path: Path, family: str) -> None:
    source = tmp_path / "source"
    if family == "dense":
        save_tiny_model(source, with_tokenizer=False, dtype=torch.float32)
    else:
        save_tiny_moe_model(source, family, with_tokenizer=False, dtype=torch.float32)
    plain = export_run(prepared(source), tmp_path / "plain").report
    summary = export_run(prepared(source, keep_layers=2), tmp_path / "out")
    found = summary.report["mixed_precision"]
    assert "mixed_precision" not in plain
    assert len(found["harms"]) == (8 if family == "dense" else 6)
    assert set(found["kept"]) == {name for entry in found["harms"][:2] for name in entry["layers"]}
    everything, others = (fp8_modules(tmp_path / name) for name in ("plain", "out"))
    below = tuple(f"{name}." for name in found["kept"])
    assert others == {name for name in everything if not f"{name}.".startswith(below)} < everything
    assert len(summary.report["ignored"]) > len(plain["ignored"])
    assert found["bytes_added"] == summary.report["totals"]["export_bytes"] - plain["totals"]["export_bytes"] > 0
    # Rounded as in the measurement, and all calibration tokens were measured on: the very same KL.
    original = open_reference(source)
    for folder, expected in ((tmp_path / "plain", found["kl_before"]), (tmp_path / "out", found["kl_after"])):
        model = load_quantized_model(folder, dtype="float32", kernel="reference")
        assert kl(original, model) == pytest.approx(expected, rel=5e-3)


def fp8_modules(folder: Path) -> set[str]:
    model = load_quantized_model(folder, kernel="reference")
    return {name for name, m in model.named_modules() if isinstance(m, WeightFP8ActFP8StaticQuantLinear)}


def open_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def kl(original: Any, model: Any) -> float:
    log_p, log_q = (m(input_ids=ROWS).logits.double().log_softmax(-1) for m in (original, model))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@torch.no_grad()
def test_harm_is_the_error_of_the_block_with_one_group_alone(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", with_tokenizer=False, dtype=torch.float32)
    _, report = mixed(source, keep_layers=1)
    expected = block_outputs(open_reference(source), 0)
    for leaf in ("o_proj", "down_proj"):  # in the first block, whose input nothing has changed
        others = ("layers.1", *(name for name in LEAVES if name != leaf))
        folder = export_run(prepared(source, ignore_layers=others), tmp_path / leaf).folder
        alone = block_outputs(load_quantized_model(folder, dtype="float32", kernel="reference"), 0)
        error = ((alone - expected).square().sum(-1) / expected.square().sum(-1)).mean()
        harm = next(e["harm"] for e in report["harms"] if e["layers"][0].endswith(f"layers.0.{SCOPES[leaf]}.{leaf}"))
        assert harm == pytest.approx(float(error), rel=1e-3)


LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCOPES = {"o_proj": "self_attn", "down_proj": "mlp"}


def block_outputs(model: Any, index: int) -> torch.Tensor:
    seen: list[Any] = []
    handle = model.model.layers[index].register_forward_hook(lambda _module, _args, output: seen.append(output))
    model(input_ids=ROWS, use_cache=False)
    handle.remove()
    return seen[0][0] if isinstance(seen[0], tuple) else seen[0]


def test_a_target_that_is_met_keeps_nothing() -> None:
    before = prepared(tiny_model(), target_kl=100.0)
    run = keep_harmful_layers(before)
    assert run.mixed_precision is not None
    assert run.mixed_precision["kept"] == []
    assert run.mixed_precision["bytes_added"] == 0
    assert run.mixed_precision["kl_after"] == run.mixed_precision["kl_before"] <= 100.0
    assert [x.fqn for x in run.plan.quantized] == [x.fqn for x in before.plan.quantized]


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_target_is_reached_as_measured(tmp_path: Path, share: float) -> None:
    source = save_tiny_model(tmp_path / "source", with_tokenizer=False, dtype=torch.float32)
    _, all_quantized = mixed(source, target_kl=100.0)
    target = share * all_quantized["kl_before"]
    summary = export_run(prepared(source, target_kl=target), tmp_path / "out")
    found = summary.report["mixed_precision"]
    assert found["kl_after"] <= target < found["kl_before"]
    assert len(found["kept"]) > 0
    assert len(found["rounds"]) <= 1 + MAX_ROUNDS
    model = load_quantized_model(tmp_path / "out", dtype="float32", kernel="reference")
    assert kl(open_reference(source), model) == pytest.approx(found["kl_after"], rel=1e-3)


def test_a_target_asks_for_the_small_layer_first() -> None:
    _, report = mixed(with_harmful_mlp(tiny_model()), scheme=tensor_scheme(), target_kl=2e-4)
    assert tuple(report["kept"][:2]) == HARMFUL
    per_weight = {tuple(e["layers"]): e["harm"] / e["weights"] for e in report["harms"]}
    names = sorted(per_weight, key=per_weight.__getitem__, reverse=True)
    assert report["kept"] == [n for group in names for n in group][: len(report["kept"])]


def test_a_target_out_of_reach_is_a_warning_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, report = mixed(tiny_model(), target_kl=1e-9)
    assert report["kl_after"] > 1e-9
    assert report["kl_after"] < report["kl_before"]
    [line] = [r.getMessage() for r in caplog.records if "target_kl" in r.getMessage()]
    assert "1e-09" in line
    assert f"{report['kl_after']:g}" in line


def test_two_runs_measure_the_same() -> None:
    model = tiny_moe_model("qwen3_moe")
    one, other = (mixed(model, target_kl=1e-4)[1] for _ in range(2))
    assert one["kept"]
    assert one == other


def test_nothing_is_measured_unless_asked() -> None:
    run = prepared(tiny_model())
    assert keep_harmful_layers(run) is run


@pytest.mark.parametrize("count", [8, 9, 1000])
def test_keeping_every_layer_is_refused_before_the_work(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"keep_layers \({count}\) must be less than .* \(8, .*nothing would be"):
        prepared(tiny_model(), keep_layers=count)


def test_all_layers_but_one_may_be_kept() -> None:
    run, report = mixed(tiny_model(), keep_layers=7)
    [last] = layer_groups(run.plan)
    assert list(last.names) == report["harms"][-1]["layers"]


def test_experts_without_tokens_do_not_stop_the_measurement() -> None:
    _, report = mixed(dead_experts_model(), keep_layers=1)
    assert 0.0 < report["kl_after"] < 1.0


@torch.no_grad()
def test_nan_logits_stop_the_run() -> None:
    model = tiny_model(dtype=torch.float32)
    model.lm_head.weight.fill_(3e38)
    with pytest.raises(NumericsError, match="logits hold NaN or infinity"):
        mixed(model, keep_layers=1)


@pytest.mark.parametrize(
    ("lengths", "count", "length"),
    [
        ([2048] * 128, 8, 256),
        ([64] * 128, 32, 64),
        ([4096] * 2, 2, 1024),
        ([10, 3], 2, 10),
        ([5000], 1, 2048),
        ([1] * 5000, 2048, 1),
    ],
)
def test_samples_are_few_and_from_everywhere(lengths: list[int], count: int, length: int) -> None:
    samples = [torch.full((n,), i) for i, n in enumerate(lengths)]
    picked = pick_samples(samples)
    assert len(picked) == count
    assert max(len(sample) for sample in picked) == length
    assert sum(len(sample) for sample in picked) <= MAX_TOKENS
    numbers = [int(sample[0]) for sample in picked]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] >= len(lengths) * (1 - 1 / count) - 1


def counted(function: Any) -> tuple[Any, list[int]]:
    calls: list[int] = []

    def measure(count: int) -> float:
        calls.append(count)
        return function(count)

    return measure, calls


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("target", [0.9, 0.5, 0.1, 0.03])
def test_the_search_reaches_targets_on_curves_of_any_shape(power: float, target: float) -> None:
    harms = [1 / (i + 1) for i in range(200)]
    left = [1 - kept / sum(harms) for kept in accumulate(harms, initial=0.0)]
    measure, calls = counted(lambda count: left[count] ** power)
    count, measured = search_count(harms, target, measure)
    assert measured[count] == left[count] ** power <= target
    assert list(measured) == calls
    assert len(calls) == len(set(calls)) <= 1 + MAX_ROUNDS
    fewest = next(n for n, share in enumerate(left) if share**power <= target)
    # Half of the distance to the target in the last try is the worst that the search gives away.
    assert left[fewest] ** power - left[count] ** power <= target / 2 + 0.02


def test_the_search_is_exact_where_harm_predicts_the_kl() -> None:
    harms = [4.0, 3.0, 2.0, 1.0]
    measure, calls = counted(lambda count: 1.0 - sum(harms[:count]) / 10)
    assert search_count(harms, 0.35, measure)[0] == 2
    assert calls == [0, 2, 1]


@pytest.mark.parametrize("harms", [[1.0], [0.0, 0.0, 0.0], [1.0] * 50])
def test_a_search_in_vain_ends_with_the_most_that_was_tried(harms: list[float]) -> None:
    measure, calls = counted(lambda count: 1.0)
    count, measured = search_count(harms, 0.5, measure)
    assert count == max(calls) == max(measured)
    assert len(calls) <= 1 + MAX_ROUNDS


def test_rounds_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "MAX_ROUNDS", 1)
    _, report = mixed(tiny_model(), target_kl=1e-4)
    assert report["rounds"][0]["kept"] == 0
    assert len(report["rounds"]) == 2


def test_the_plan_leaves_the_skeleton_empty() -> None:
    run, _ = mixed(tiny_model(), keep_layers=2)
    assert all(parameter.is_meta for parameter in run.plan.skeleton.model.parameters())
    assert dataclasses.asdict(run.config)["keep_layers"] == 2
    assert len(make_batches(pick_samples(run.data.samples), 2)) == 2
