"""The lm-eval model: BOS, context length, devices, what is really evaluated."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BOS, EVALUATION_TEXTS, save_tiny_model, tiny_model, tiny_tokenizer
from tokenizers import processors

from autoround_fp8.autoround import AutoRound
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.evaluation.lm_eval_backend import AutoRoundFP8LM, bos_rule, describe_linears
from autoround_fp8.evaluation.lm_eval_registration import register_lm_eval_backend
from autoround_fp8.evaluation.tasks import resolve_tasks, run_tasks
from autoround_fp8.inference.load import load_model

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")


def _tokenizer_without_bos():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


def _save(folder, family, tokenizer, **overrides):
    save_tiny_model(folder, family, with_tokenizer=False, **overrides)
    tokenizer.save_pretrained(folder)
    return folder


def test_gemma_gets_bos_whatever_its_folder_is_called(tmp_path, caplog):
    caplog.set_level("INFO")
    plain = _save(tmp_path / "in", "gemma2", _tokenizer_without_bos())
    AutoRound(str(plain), nsamples=2, seqlen=32).quantize_and_save(tmp_path / "out")
    models = [AutoRoundFP8LM(str(tmp_path / name), device="cpu") for name in ("in", "out")]
    for lm in models:
        assert lm.tok_encode("abc")[0] == BOS
        assert lm.tok_encode("<s>abc").count(BOS) == 1
        assert lm.tok_encode("abc", add_special_tokens=False)[0] != BOS
        ids, mask = lm.tok_batch_encode(["a", "abcd"])
        assert ids[0, mask[0] == 1].tolist()[0] == BOS
        assert (ids == BOS).sum(dim=1).tolist() == [1, 1]
        assert lm._encode_pair("ab", "cd") == ([BOS, *lm.tok_encode("ab")[1:]], lm.tok_encode("abcd")[3:])
    assert models[0].tok_encode("Hello.") == models[1].tok_encode("Hello.")
    assert caplog.text.count("model_type 'gemma2' needs BOS; prompts start with '<s>' (token 1)") == 2


def test_a_folder_called_gemma_changes_nothing(tmp_path):
    folder = _save(tmp_path / "gemma", "llama", _tokenizer_without_bos())
    lm = AutoRoundFP8LM(str(folder), device="cpu")
    assert lm.tok_encode("abc")[0] != BOS
    assert lm.bos_rule.reason == "the tokenizer does not add BOS"


def test_bos_of_the_tokenizer_is_kept_and_not_doubled(plain_checkpoint, fp8_checkpoint):
    for folder in (plain_checkpoint, fp8_checkpoint):
        lm = AutoRoundFP8LM(str(folder), device="cpu")
        assert lm.tok_encode("ab").count(BOS) == 1
        assert lm.bos_rule.reason == "the tokenizer adds BOS by itself"


@pytest.mark.parametrize(
    ("model_type", "asked", "adds_itself", "prepend"),
    [
        ("gemma3_text", None, False, True),
        ("gemma3_text", None, True, False),
        ("gemma3_text", False, False, False),
        ("llama", True, False, True),
        ("llama", None, False, False),
    ],
)
def test_bos_rule(model_type, asked, adds_itself, prepend):
    tokenizer = tiny_tokenizer() if adds_itself else _tokenizer_without_bos()
    assert bos_rule(model_type, tokenizer, asked).prepend is prepend


def test_no_bos_token_at_all():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    assert not bos_rule("gemma", tokenizer).prepend


def test_context_length_comes_from_the_config(tmp_path, task_folder):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = int(1e30)
    folder = _save(tmp_path / "short", "opt", tokenizer, max_position_embeddings=128)
    lm = AutoRoundFP8LM(str(folder), device="cpu")
    assert lm.max_length == 128
    assert lm.max_gen_toks == 64
    assert AutoRoundFP8LM(str(folder), device="cpu", max_length=32).max_length == 32
    # OPT has learned positions: a longer input is an index error, so this shows that lm-eval truncates.
    from lm_eval.api.instance import Instance

    request = Instance(request_type="loglikelihood", doc={}, arguments=("x" * 500, "yes"), idx=0)
    ((score, _),) = lm.loglikelihood([request], disable_tqdm=True)
    assert math.isfinite(score)
    results = run_tasks(folder, None, resolve_tasks(["tiny_generation"], task_folder), device="cpu", limit=1)
    assert 0.0 <= results["results"]["tiny_generation"]["exact_match,none"] <= 1.0


def test_a_task_that_generates_more_than_the_context_is_refused(plain_checkpoint, long_generation_file):
    with pytest.raises(ConfigError, match=r"'long_generation' generates 4000 tokens.*256"):
        run_tasks(plain_checkpoint, None, [str(long_generation_file)], device="cpu")


def test_linear_classes_are_counted_and_logged(plain_checkpoint, fp8_checkpoint, caplog):
    caplog.set_level("INFO")
    AutoRoundFP8LM(str(fp8_checkpoint), device="cpu")
    assert "14 x WeightFP8ActFP8StaticQuantLinear (FP8), 1 x Linear" in caplog.text
    assert describe_linears(load_model(plain_checkpoint)) == "15 x Linear; none of them is FP8"


def test_a_broken_scale_changes_the_score(fp8_checkpoint, task_folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in fp8_checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight_scale"] *= 100
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    scores = [_byte_perplexity(folder, task_folder) for folder in (fp8_checkpoint, broken)]
    assert abs(scores[0] - scores[1]) > 0.01 * scores[0]


def test_rolling_perplexity_equals_the_models_own(fp8_checkpoint, task_folder):
    """lm-eval's rule for short texts: BOS, then all tokens of the text (its own BOS too) are predicted."""

    model, tokenizer = load_model(fp8_checkpoint, dtype=torch.float32, kernel="reference"), tiny_tokenizer()
    total = 0.0
    for text in EVALUATION_TEXTS:
        tokens = torch.tensor([[BOS, *tokenizer(text)["input_ids"]]])
        log_p = torch.log_softmax(model(tokens).logits[0, :-1].detach(), dim=-1)
        total += float(log_p.gather(1, tokens[0, 1:, None]).sum())
    expected = math.exp(-total / sum(len(text.encode()) for text in EVALUATION_TEXTS))
    assert _byte_perplexity(fp8_checkpoint, task_folder) == pytest.approx(expected, rel=1e-5)


def _byte_perplexity(folder, task_folder) -> float:
    options = {"device": "cpu", "dtype": "float32", "kernel": "reference", "batch_size": 2}
    results = run_tasks(folder, None, resolve_tasks(["tiny_perplexity"], task_folder), **options)
    return results["results"]["tiny_perplexity"]["byte_perplexity,none"]


def test_simple_evaluate_by_name(fp8_checkpoint, task_folder):
    from lm_eval import simple_evaluate

    register_lm_eval_backend()
    resolved = resolve_tasks(["tiny_choice"], task_folder)
    results = simple_evaluate(
        model="autoround_fp8",
        model_args=f"pretrained={fp8_checkpoint},dtype=float32,kernel=reference,batch_size=2,device=cpu",
        tasks=["tiny_choice"],
        task_manager=resolved.manager,
        bootstrap_iters=0,
    )
    assert 0.0 <= results["results"]["tiny_choice"]["acc,none"] <= 1.0
    assert len(results["samples"]["tiny_choice"]) == 6


def test_model_in_memory_keeps_its_tokenizer(task_folder):
    lm = AutoRoundFP8LM(tiny_model("llama"), tokenizer=tiny_tokenizer())
    assert lm.device.type == "cpu"
    assert lm.tok_encode("ab")[0] == BOS


@ON_CPU
@pytest.mark.parametrize("device", ["0", 0, "cuda", "cuda:1"])
def test_a_missing_gpu_is_an_error_before_work(plain_checkpoint, device):
    with pytest.raises(ConfigError, match="not available: 0 CUDA devices"):
        AutoRoundFP8LM(str(plain_checkpoint), device=device)


def test_missing_path():
    with pytest.raises(CheckpointError, match="does not exist"):
        AutoRoundFP8LM("/no/such/model", device="cpu")


@pytest.mark.parametrize("option", ["peft", "parallelize", "gptqmodel", "load_in_4bit", "revision", "krenel"])
def test_arguments_that_would_be_ignored_are_refused(plain_checkpoint, option):
    with pytest.raises(ConfigError, match=f"{option}=True is not supported"):
        AutoRoundFP8LM(str(plain_checkpoint), device="cpu", **{option: True})


def test_batch_sizes(plain_checkpoint, caplog):
    assert AutoRoundFP8LM(str(plain_checkpoint), device="cpu", batch_size="4").batch_size == 4
    assert AutoRoundFP8LM(str(plain_checkpoint), device="cpu", batch_size="auto").batch_size == 8
    assert "batch_size 'auto' finds what fits into a GPU; on the CPU 8 is used" in caplog.text
    for wrong in (0, "-1", "many"):
        with pytest.raises(ConfigError, match="batch_size"):
            AutoRoundFP8LM(str(plain_checkpoint), device="cpu", batch_size=wrong)


CUSTOM_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_folder_runs_only_if_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save_tiny_model(tmp_path / "own", "llama")
    (folder / "own_code.py").write_text(CUSTOM_CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    for options in ({}, {"trust_remote_code": False}):
        with pytest.raises(ConfigError, match="--trust_remote_code"):
            AutoRoundFP8LM(str(folder), device="cpu", **options)
    lm = AutoRoundFP8LM(str(folder), device="cpu", trust_remote_code=True)
    assert type(lm.model).__name__ == "OwnForCausalLM"
