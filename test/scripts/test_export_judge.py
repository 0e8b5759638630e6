"""`export_judge.py`: what it makes of an export equals a copy of the model changed by hand."""

from __future__ import annotations

import copy
from pathlib import Path

import export_judge
import pytest
import torch
from export_judge import FP8_MAX, judge_exports, load_float32, run_simulated, score_window, simulate_export
from safetensors.torch import save_file
from tiny_models import save_tiny_model
from torch import nn

WINDOWS = [[1, 5, 9, 30, 77, 12, 8], [1, 100, 4, 4, 61, 90, 15]]
NORM = "model.norm.weight"


def decoder_linears(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]


def quantised(model: nn.Module, fqns: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of an export, with weight scales in all the shapes that tools write."""
    tensors = {name: t.detach().bfloat16() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for index, fqn in enumerate(fqns):
        weight = model.get_submodule(fqn).weight.detach()
        scale = [weight.abs().amax(1), weight.abs().amax(1, keepdim=True), weight.abs().max()[None]][
            index % 3
        ] / FP8_MAX
        tensors[f"{fqn}.weight"] = (weight / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
        tensors[f"{fqn}.weight_scale"] = scale.bfloat16() if index % 2 else scale
        tensors[f"{fqn}.input_scale"] = torch.tensor([0.01])
    return tensors


def save_export(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def changed_by_hand(model: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A copy with untied weights that computes what the tensors mean."""
    changed = copy.deepcopy(model)
    changed.lm_head.weight = nn.Parameter(changed.lm_head.weight.detach().clone())
    if "lm_head.weight" not in tensors:
        tensors = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    for name, parameter in changed.named_parameters():
        scale = tensors.get(f"{name}_scale", torch.ones(())).float()
        parameter.data = tensors[name].float() * (scale.reshape(-1, 1) if scale.ndim else scale)
        if f"{name}_scale" in tensors:
            layer = changed.get_submodule(name.removesuffix(".weight"))
            layer.register_forward_pre_hook(
                lambda _, x: ((x[0] / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01,)
            )
    return changed


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])  # qwen2 has biases
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_are_those_of_the_model_changed_by_hand(tmp_path: Path, family: str, is_tied: bool):
    model = load_float32(save_tiny_model(tmp_path / "m", family, tie_word_embeddings=is_tied))
    tensors = quantised(model, decoder_linears(model))
    export = simulate_export(save_export(tmp_path / "e", tensors), model)
    assert export.replaced.keys() == {f"{fqn}.weight" for fqn in decoder_linears(model)}
    ids = torch.tensor([WINDOWS[0]])
    with torch.no_grad():
        before = model(input_ids=ids).logits[0]
        found = run_simulated(model, export, ids)
        torch.testing.assert_close(found, changed_by_hand(model, tensors)(input_ids=ids).logits[0])
        assert (found - before).abs().max() > 1e-3
        assert torch.equal(model(input_ids=ids).logits[0], before)  # nothing stays behind


@pytest.mark.parametrize("change", ["norm", "embedding", "quantised head", "untied head"])
def test_what_an_export_changes_outside_the_blocks_counts(tmp_path: Path, change: str):
    model = load_float32(save_tiny_model(tmp_path / "m", "llama", tie_word_embeddings=True))
    fqns = decoder_linears(model)
    tensors = quantised(model, [*fqns, "lm_head"] if change == "quantised head" else fqns)
    if change == "norm":
        tensors[NORM] = tensors[NORM] * 2
    elif change == "embedding":
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * 2
    elif change == "untied head":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    export = simulate_export(save_export(tmp_path / "e" / "nested", tensors).parent, model)
    ids = torch.tensor([WINDOWS[0]])
    with torch.no_grad():
        expected = changed_by_hand(model, tensors)(input_ids=ids).logits[0]
        torch.testing.assert_close(run_simulated(model, export, ids), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.mlp.up_proj.input_scale": None}, "missing: .*up_proj"),
        ({"model.extra.weight": torch.ones(2)}, "does not have in this shape: .*extra"),
        ({NORM: torch.ones(3)}, "does not have in this shape: .*norm"),
    ],
)
def test_exports_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str):
    model = load_float32(save_tiny_model(tmp_path / "m", "llama"))
    tensors = quantised(model, decoder_linears(model)) | change
    folder = save_export(tmp_path / "e", {name: t for name, t in tensors.items() if t is not None})
    with pytest.raises(ValueError, match=message):
        simulate_export(folder, model)


def test_a_model_that_is_not_quantised_and_an_empty_folder_are_refused(tmp_path: Path):
    folder = save_tiny_model(tmp_path / "m", "llama")
    with pytest.raises(ValueError, match=r"quantised layers \(0\)"):
        simulate_export(folder, load_float32(folder))
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        simulate_export(tmp_path / "nothing", load_float32(folder))


def test_scores_are_the_plain_formulas():
    torch.manual_seed(0)
    num_tokens = export_judge.ROWS_AT_ONCE + 5  # a ragged last slice
    logits_p, logits_q = torch.randn(2, num_tokens, 20).unbind()
    ids = torch.randint(20, (num_tokens,))
    score = score_window(logits_p.log_softmax(-1), logits_q, ids)
    p, q = logits_p.softmax(-1).double(), logits_q.softmax(-1).double()
    assert score.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert score.num_agreeing == int((p.argmax(-1) == q.argmax(-1)).sum())
    for loss, probabilities in ((score.loss_sum, q), (score.original_loss_sum, p)):
        assert loss == pytest.approx(float(-probabilities[range(num_tokens - 1), ids[1:]].log().sum()), rel=1e-5)


def test_exports_come_in_order_whatever_is_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = save_tiny_model(tmp_path / "m", "llama")
    model = load_float32(source)
    fqns = decoder_linears(model)
    folders = [save_export(tmp_path / f"e{n}", quantised(model, fqns[:n])) for n in (3, 1, 14)]
    together = list(judge_exports(source, folders, WINDOWS))
    monkeypatch.setattr(export_judge, "HELD_EXPORT_BYTES", 1.0)
    assert list(judge_exports(source, folders, WINDOWS)) == together
    assert [(folder, count) for folder, count, _ in together] == list(zip(folders, (3, 1, 14), strict=True))
    assert all(len(scores) == len(WINDOWS) and scores[0].kl > 0 for _, _, scores in together)
    assert together[1][2][0].kl < together[2][2][0].kl
