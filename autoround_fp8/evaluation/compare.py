"""How far a quantised checkpoint is from its original: KL, top-1 agreement, perplexity, errors of weights and blocks.

One model is in memory at a time: the reference leaves behind its last hidden states, its output layer (`logits.py`) and
its blocks' outputs for a few tokens (`block_error.py`). Both see the same tokens, in float32 unless asked otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoround_fp8.calibration.dataset import load_calibration_data, make_batches
from autoround_fp8.checkpoint.locate import locate_checkpoint
from autoround_fp8.checkpoint.reader import CheckpointReader, TensorSource
from autoround_fp8.checkpoint.source_format import is_native_fp8, open_source
from autoround_fp8.device import peak_memory_bytes, release_memory, resolve_device
from autoround_fp8.errors import CheckpointError, ConfigError, DataError, NumericsError
from autoround_fp8.evaluation.block_error import BlockError, block_errors, trace_blocks
from autoround_fp8.evaluation.comparison_report import ComparisonReport
from autoround_fp8.evaluation.logits import LogitStream
from autoround_fp8.evaluation.weight_error import weight_sqnr
from autoround_fp8.inference.load import load_model
from autoround_fp8.models.skeleton import load_config, source_dtype
from autoround_fp8.numerics.token_kl import kl_per_token, piece_length

_TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model"}
_PROBE_TEXT = "The 7 quick brown foxes,\n\tjump! über 12.5% of the lazy dogs."


def compare_checkpoints(
    reference: str | Path,
    candidate: str | Path,
    *,
    dataset: Any = "builtin",
    nsamples: int = 16,
    seqlen: int = 512,
    seed: int = 1234,
    batch_size: int = 4,
    device: str | int = "cpu",
    dtype: torch.dtype | str = torch.float32,
    kernel: str = "reference",
    trust_remote_code: bool = False,
) -> ComparisonReport:
    """Compares two checkpoints of one model on the same tokens.

    Args:
        reference: Folder or hub id of the original.
        candidate: Folder or hub id of the quantised model; a plain one works too.
        dataset: Text to compare on, as of `load_calibration_data`; read with the reference's tokenizer.
        nsamples: Documents.
        seqlen: Most tokens of a document.
        seed: Which documents; other than calibration's default, so that the text differs.
        batch_size: Documents per forward.
        device: cpu, cuda, a GPU number or auto.
        dtype: dtype both models run in.
        kernel: Kernel of the FP8 layers; "reference" is the float32 one.
        trust_remote_code: Whether code from the folders may run.

    Raises:
        CheckpointError: If a checkpoint is missing or damaged, or the two do not belong together.
        ConfigError: If an option, the device or the tokenizer cannot be used.
        DataError: If the data give no token to score.
        NumericsError: If a model computes NaN.
    """
    started = time.perf_counter()
    target = resolve_device(device)
    sides = [_Side.open(name, trust_remote_code=trust_remote_code) for name in (reference, candidate)]
    _check_same_family(*sides)
    text_config = sides[0].config.get_text_config(decoder=True)
    data = load_calibration_data(
        dataset,
        sides[0].tokenizer,
        nsamples=nsamples,
        seqlen=seqlen,
        seed=seed,
        max_positions=getattr(text_config, "max_position_embeddings", None),
        vocab_size=text_config.vocab_size,
    )
    batches = make_batches([sample for sample in data.samples if len(sample) > 1], batch_size)
    if not batches:
        raise DataError(f"data set {dataset!r} gives no document of two tokens or more")
    sqnr, unmatched = weight_sqnr(sides[0].weights, sides[1].weights)
    options = {"device": target, "dtype": dtype, "kernel": kernel, "trust_remote_code": trust_remote_code}
    documents, blocks = _score(sides, batches, options)
    kl_sums = torch.tensor([document.kl_sum for document in documents], dtype=torch.float64)
    counts = torch.tensor([document.num_tokens for document in documents], dtype=torch.float64)
    num_tokens = int(counts.sum())
    return ComparisonReport(
        reference=str(reference),
        candidate=str(candidate),
        dtype=str(dtype).removeprefix("torch."),
        kernel=kernel,
        num_documents=len(documents),
        num_tokens=num_tokens,
        data_sha256=data.sha256,
        kl_mean=float(kl_sums.sum()) / num_tokens,
        kl_stderr=_ratio_stderr(kl_sums, counts),
        kl_max=max(document.kl_max for document in documents),
        document_kl=tuple((kl_sums / counts).tolist()),
        top1_agreement=sum(document.num_same_top1 for document in documents) / num_tokens,
        reference_perplexity=_exp(sum(document.reference_nll for document in documents) / num_tokens),
        candidate_perplexity=_exp(sum(document.candidate_nll for document in documents) / num_tokens),
        reference_bytes=_bytes_on_disk(sides[0].reader),
        candidate_bytes=_bytes_on_disk(sides[1].reader),
        weight_sqnr_db=sqnr,
        unmatched_layers=unmatched,
        block_errors=blocks,
        seconds=time.perf_counter() - started,
        peak_memory_bytes=peak_memory_bytes(),
    )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two checkpoints, opened but not loaded; the tokenizer is None if its folder has none.

    `weights` are those of `reader`, a native FP8 checkpoint's dequantised.
    """

    name: str
    folder: Path
    reader: CheckpointReader
    weights: TensorSource
    config: Any
    tokenizer: Any

    @classmethod
    def open(cls, name: str | Path, *, trust_remote_code: bool) -> _Side:
        """Opens headers, config and tokenizer."""
        folder = locate_checkpoint(name)
        raw_config, config = load_config(folder, trust_remote_code=trust_remote_code)
        tokenizer = None
        if _TOKENIZER_FILES & {path.name for path in folder.iterdir()}:
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
            except (ValueError, OSError, KeyError, TypeError, ImportError) as e:
                raise ConfigError(f"the tokenizer of {str(name)!r} cannot be loaded: {e}") from e
        reader = CheckpointReader(folder)
        is_native = is_native_fp8(raw_config)
        return cls(
            name=str(name),
            folder=folder,
            reader=reader,
            weights=open_source(reader, raw_config, source_dtype(raw_config)) if is_native else reader,
            config=config,
            tokenizer=tokenizer,
        )


@dataclass(frozen=True, kw_only=True)
class _DocumentScore:
    """Sums over the scored tokens of one document."""

    num_tokens: int
    kl_sum: float
    kl_max: float
    num_same_top1: int
    reference_nll: float
    candidate_nll: float


def _check_same_family(reference: _Side, candidate: _Side) -> None:
    where = f"{reference.name!r} and {candidate.name!r}"
    # Of the text models: a language model taken out of a composite is compared with the whole checkpoint.
    types = [side.config.get_text_config(decoder=True).model_type for side in (reference, candidate)]
    if types[0] != types[1]:
        raise CheckpointError(
            f"{where} cannot be compared: model_type is {types[0]!r} in one and {types[1]!r} in the other"
        )
    vocabularies = [side.config.get_text_config(decoder=True).vocab_size for side in (reference, candidate)]
    if vocabularies[0] != vocabularies[1]:
        raise CheckpointError(
            f"{where} cannot be compared: vocab_size is {vocabularies[0]} in one and {vocabularies[1]} in the other"
        )
    tokenizers = [side.tokenizer for side in (reference, candidate) if side.tokenizer is not None]
    # The vocabulary alone does not tell: merges, normalisation and special tokens in front may differ.
    seen = [(tokenizer.get_vocab(), tokenizer(_PROBE_TEXT)["input_ids"]) for tokenizer in tokenizers]
    if any(other != seen[0] for other in seen):
        raise CheckpointError(f"{where} cannot be compared: their tokenizers differ, so tokens are not the same text")


def _score(
    sides: list[_Side], batches: list[torch.Tensor], options: dict[str, Any]
) -> tuple[list[_DocumentScore], tuple[BlockError, ...]]:
    """Runs the reference, then the candidate, and scores every document and every block."""
    reference = LogitStream(load_model(sides[0].folder, **options))
    kept = [reference.hidden_states(tokens).cpu() for tokens in batches]
    trace = trace_blocks(reference, batches)
    reference.release_blocks()
    release_memory()
    candidate = LogitStream(load_model(sides[1].folder, **options))
    if candidate.vocab_size != reference.vocab_size:
        raise CheckpointError(
            f"the output layers differ: {reference.vocab_size} rows in {sides[0].name!r}, {candidate.vocab_size} in "
            f"{sides[1].name!r}"
        )
    errors = block_errors(candidate, trace)
    del trace
    scores = []
    for tokens, reference_hidden in zip(batches, kept, strict=True):
        candidate_hidden = candidate.hidden_states(tokens)
        for row in range(len(tokens)):
            hidden = (reference_hidden[row], candidate_hidden[row])
            pieces = list(_token_scores(reference, candidate, tokens[row], hidden))
            scores.append(_document_score(torch.cat(pieces, dim=1), sides))
    return scores, errors


def _token_scores(
    reference: LogitStream, candidate: LogitStream, tokens: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Scores the tokens of one document in pieces.

    Args:
        reference: Output layer of the reference.
        candidate: Output layer of the candidate.
        tokens: `[tokens]`.
        hidden: Decoder outputs of both, `[tokens, hidden]`.

    Yields:
        float32 `[4, piece]` on the CPU: KL, whether the top-1 is the same, and -log p of the next token by both.
    """
    targets = tokens[1:]
    for start in range(0, len(targets), length := piece_length(reference.vocab_size)):
        piece = slice(start, min(start + length, len(targets)))
        log_p = torch.log_softmax(reference.logits(hidden[0][piece]), dim=-1)
        log_q = torch.log_softmax(candidate.logits(hidden[1][piece]), dim=-1)
        labels = targets[piece].to(log_p.device).unsqueeze(-1)
        same = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).float()
        nll = [-log.gather(-1, labels).squeeze(-1) for log in (log_p, log_q)]
        yield torch.stack([kl_per_token(log_p, log_q), same, *nll]).cpu()


def _document_score(scores: torch.Tensor, sides: list[_Side]) -> _DocumentScore:
    """Adds up `[4, tokens]` of one document in float64."""
    for side, row in zip(sides, (2, 3), strict=True):
        if bool(scores[row].isnan().any()):
            raise NumericsError(f"{side.name!r} computes NaN logits on the comparison's text")
    kl, same, reference_nll, candidate_nll = scores.double()
    return _DocumentScore(
        num_tokens=scores.shape[1],
        kl_sum=float(kl.sum()),
        kl_max=float(kl.max()),
        num_same_top1=int(same.sum()),
        reference_nll=float(reference_nll.sum()),
        candidate_nll=float(candidate_nll.sum()),
    )


def _ratio_stderr(sums: torch.Tensor, counts: torch.Tensor) -> float | None:
    """Standard error of `sums.sum() / counts.sum()` over documents, both `[documents]`; None for one document."""
    count = len(sums)
    if count < 2:
        return None
    residuals = sums - sums.sum() / counts.sum() * counts
    return math.sqrt(float(residuals.square().sum()) * count / (count - 1)) / float(counts.sum())


def _bytes_on_disk(reader: CheckpointReader) -> int:
    return sum(file.stat().st_size for file in {e.file for e in reader.entries.values() if e.file is not None})


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf
