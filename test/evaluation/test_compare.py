"""Comparison of two checkpoints, against a computation with all logits at once."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model, tiny_tokenizer

from autoround_fp8.autoround import AutoRound
from autoround_fp8.calibration.dataset import load_calibration_data
from autoround_fp8.errors import CheckpointError, ConfigError, NumericsError
from autoround_fp8.evaluation import compare
from autoround_fp8.evaluation.compare import compare_checkpoints
from autoround_fp8.inference.load import load_model

SIZE = {"nsamples": 3, "seqlen": 40}


@pytest.fixture(scope="module")
def report(plain_checkpoint, fp8_checkpoint):
    return compare_checkpoints(plain_checkpoint, fp8_checkpoint, **SIZE)


def _naive(reference, candidate):
    """KL per token `[documents, tokens]`, top-1 agreement and both perplexities, from full logits in float64."""
    samples = load_calibration_data("builtin", tiny_tokenizer(), seed=1234, **SIZE).samples
    tokens = torch.stack(samples)
    models = [load_model(path, dtype=torch.float32, kernel="reference") for path in (reference, candidate)]
    with torch.no_grad():
        log_p, log_q = (torch.log_softmax(model(tokens).logits[:, :-1].double(), dim=-1) for model in models)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    perplexities = [float(torch.exp(-log.gather(-1, tokens[:, 1:, None]).mean())) for log in (log_p, log_q)]
    return kl, float(same), perplexities


def _check_against_naive(report, reference, candidate):
    kl, same, perplexities = _naive(reference, candidate)
    assert report.num_tokens == kl.numel()
    assert report.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-6)
    assert report.kl_max == pytest.approx(float(kl.max()), rel=1e-3, abs=1e-6)
    assert report.kl_stderr == pytest.approx(float(kl.mean(dim=1).std()) / math.sqrt(len(kl)), rel=1e-2)
    assert report.document_kl == pytest.approx(kl.mean(dim=1).tolist(), rel=1e-3, abs=1e-6)
    assert report.top1_agreement == pytest.approx(same)
    assert (report.reference_perplexity, report.candidate_perplexity) == pytest.approx(perplexities, rel=1e-5)


def test_equals_full_logits(report, plain_checkpoint, fp8_checkpoint):
    _check_against_naive(report, plain_checkpoint, fp8_checkpoint)
    assert report.kl_mean > 0


def test_pieces_and_batches_do_not_matter(report, plain_checkpoint, fp8_checkpoint, monkeypatch):
    monkeypatch.setattr(compare, "piece_length", lambda vocab_size: 7)
    other = compare_checkpoints(plain_checkpoint, fp8_checkpoint, batch_size=1, **SIZE)
    assert other.kl_mean == pytest.approx(report.kl_mean, rel=1e-3)
    assert other.data_sha256 == report.data_sha256


def test_capped_logits(tmp_path):
    """Gemma 2 caps its logits after the output layer; the cap must be in."""
    reference = save_tiny_model(tmp_path / "a", "gemma2", final_logit_softcapping=1.0)
    AutoRound(str(reference), nsamples=2, seqlen=32).quantize_and_save(tmp_path / "b")
    _check_against_naive(compare_checkpoints(reference, tmp_path / "b", **SIZE), reference, tmp_path / "b")


def test_a_model_against_itself(plain_checkpoint):
    same = compare_checkpoints(plain_checkpoint, plain_checkpoint, **SIZE)
    assert (same.kl_mean, same.kl_max, same.top1_agreement) == (0.0, 0.0, 1.0)
    assert same.reference_perplexity == same.candidate_perplexity
    assert same.reference_bytes == same.candidate_bytes
    assert same.weight_sqnr_db == {}


def test_weights_and_bytes(report, plain_checkpoint, fp8_checkpoint):
    assert len(report.weight_sqnr_db) == 14
    # A rounding error of 2^-4 relative at most, uniform: about 31.5 dB for E4M3.
    assert all(29.0 < value < 34.0 for value in report.weight_sqnr_db.values())
    assert report.reference_bytes == (plain_checkpoint / "model.safetensors").stat().st_size
    assert report.candidate_bytes < 0.7 * report.reference_bytes
    assert report.seconds > 0
    assert report.peak_memory_bytes > 0


def test_a_broken_scale_shows(plain_checkpoint, fp8_checkpoint, report, tmp_path):
    broken = _copy(fp8_checkpoint, tmp_path / "broken", "model.layers.1.mlp.up_proj.weight_scale", 100.0)
    worse = compare_checkpoints(plain_checkpoint, broken, **SIZE)
    assert worse.kl_mean > 10 * report.kl_mean
    assert min(worse.weight_sqnr_db, key=worse.weight_sqnr_db.get) == "model.layers.1.mlp.up_proj"
    assert worse.block_errors[0] == report.block_errors[0]
    assert worse.block_errors[1].own_error > 10 * report.block_errors[1].own_error


def test_blocks_are_released_before_the_candidate_is_loaded(plain_checkpoint, fp8_checkpoint, monkeypatch):
    loaded = []

    def load(*args, **kwargs):
        assert all(len(model.model.layers) == 0 for model in loaded)
        loaded.append(load_model(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(compare, "load_model", load)
    report = compare_checkpoints(plain_checkpoint, fp8_checkpoint, **SIZE)
    assert len(loaded) == len(report.block_errors) == 2


def test_a_candidate_with_fewer_blocks(plain_checkpoint, tmp_path):
    pruned = save_tiny_model(tmp_path / "pruned", "qwen3", num_hidden_layers=1)
    report = compare_checkpoints(plain_checkpoint, pruned, **SIZE)
    assert report.kl_mean > 0
    assert report.block_errors == ()


def test_nan_names_the_checkpoint(plain_checkpoint, tmp_path):
    # Finite, but the last norm overflows; a NaN in the file is refused by the loader already.
    broken = _copy(plain_checkpoint, tmp_path / "broken", "model.norm.weight", 2e38)
    with pytest.raises(NumericsError, match="broken' computes NaN"):
        compare_checkpoints(plain_checkpoint, broken, **SIZE)


def _copy(folder, target, name, factor):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    tensors[name] = tensors[name] * factor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_single_document_has_no_standard_error(plain_checkpoint, fp8_checkpoint):
    report = compare_checkpoints(plain_checkpoint, fp8_checkpoint, nsamples=1, seqlen=16)
    assert report.kl_stderr is None


def test_standard_error_of_unequal_documents():
    sums, counts = torch.tensor([1.0, 6.0, 2.0]).double(), torch.tensor([1.0, 3.0, 2.0]).double()
    residuals = sums - 1.5 * counts
    assert compare._ratio_stderr(sums, counts) == pytest.approx(math.sqrt(float((residuals**2).sum()) * 1.5) / 6)
    assert compare._ratio_stderr(2 * counts, counts) == 0.0


def test_another_vocabulary(plain_checkpoint, tmp_path):
    other = save_tiny_model(tmp_path / "other", "qwen3", vocab_size=160)
    with pytest.raises(CheckpointError, match="vocab_size is 128 in one and 160"):
        compare_checkpoints(plain_checkpoint, other, **SIZE)


def test_another_tokenizer(plain_checkpoint, tmp_path):
    other = save_tiny_model(tmp_path / "other", "qwen3", with_tokenizer=False)
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save_pretrained(other)
    with pytest.raises(CheckpointError, match="their tokenizers differ"):
        compare_checkpoints(plain_checkpoint, other, **SIZE)


def test_a_candidate_without_tokenizer_is_fine(plain_checkpoint, tmp_path):
    other = save_tiny_model(tmp_path / "other", "qwen3", with_tokenizer=False, seed=1)
    assert compare_checkpoints(plain_checkpoint, other, nsamples=2, seqlen=16).kl_mean > 0


def test_bad_arguments(plain_checkpoint, fp8_checkpoint):
    with pytest.raises(CheckpointError, match="does not exist"):
        compare_checkpoints("/no/such/folder", plain_checkpoint)
    with pytest.raises(CheckpointError, match="does not exist"):
        compare_checkpoints(plain_checkpoint, "/no/such/folder")
    with pytest.raises(ConfigError, match="dtype 'int3' is not supported"):
        compare_checkpoints(plain_checkpoint, plain_checkpoint, dtype="int3", **SIZE)
    with pytest.raises(ConfigError, match="kernel"):
        compare_checkpoints(plain_checkpoint, fp8_checkpoint, kernel="none_such", **SIZE)


def test_another_model_type(plain_checkpoint, tmp_path):
    other = save_tiny_model(tmp_path / "other", "llama")
    with pytest.raises(CheckpointError, match="'qwen3' in one and 'llama' in the other"):
        compare_checkpoints(plain_checkpoint, other, **SIZE)
