"""What the user calls a data set -> token samples for calibration: `load_calibration_data` is the way in.

Sources (`text_sources.py`, `hub_source.py`, `builtin_text.py`, Python objects) give rows; `data_rows.py` makes records
of them, `record_encoder.py` token ids, `packing.py` samples and batches. No model is needed: everything wrong with the
data shows here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from autoround_fp8.calibration.builtin_text import iter_builtin_texts
from autoround_fp8.calibration.data_rows import ACCEPTED_TYPES, Record, iter_records
from autoround_fp8.calibration.dataset_spec import DatasetSpec, assign_shares, parse_dataset_spec
from autoround_fp8.calibration.hub_source import read_hub_rows
from autoround_fp8.calibration.packing import collect_samples, make_batches
from autoround_fp8.calibration.record_encoder import RecordEncoder
from autoround_fp8.calibration.text_sources import READERS, is_local, read_file_rows
from autoround_fp8.errors import ConfigError, DataError

__all__ = ["BUILTIN", "CalibrationData", "load_calibration_data", "make_batches"]

logger = logging.getLogger(__name__)

BUILTIN = "builtin"
# How much of a large or endless source is read before the draw: at least this many records, and this many characters
# per token that is wanted, but never more characters than the last bound.
_MIN_RECORDS = 10_000
_CHARS_PER_TOKEN = 32
_MAX_CHARS = 2**28


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """Token samples, ready to be batched.

    Attributes:
        samples: int64 `[tokens]` each, 1 to seqlen tokens, never padded.
        sources: What each data set gave, for people.
        sha256: Over all token ids and lengths, in order: equal for equal samples.
    """

    samples: tuple[torch.Tensor, ...]
    sources: tuple[str, ...]
    sha256: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(len(sample) for sample in self.samples)


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """What one data set gave: samples `[tokens]` each, a description, and whether that is well below what was asked."""

    samples: list[torch.Tensor]
    description: str
    is_short: bool


def load_calibration_data(
    dataset: Any,
    tokenizer: Any,
    *,
    nsamples: int,
    seqlen: int,
    seed: int,
    max_positions: int | None = None,
    vocab_size: int | None = None,
) -> CalibrationData:
    """Reads data sets and draws token samples from them; the same arguments give the same samples.

    Records are drawn in an order that the seed decides. If there are more texts than samples, texts shorter than
    `seqlen` are joined to samples of exactly `seqlen` tokens; otherwise each is a sample. Longer ones give their first
    `seqlen` tokens, and more windows if there is too little else. Rows of token ids are never joined, unless the
    `concat` option asks for it.

    Args:
        dataset: A string (`builtin`, a file, a folder, a hub name, or a comma list of these with options, see
            `dataset_spec.py`), strings, token ids, dicts, a tensor `[rows, tokens]`, a BatchEncoding, or an iterable of
            such.
        tokenizer: A Hugging Face tokenizer; None if the data are token ids. It is not changed.
        nsamples: Samples wanted; `num=` options override it.
        seqlen: Most tokens of a sample.
        seed: Decides which records are drawn.
        max_positions: Most positions the model can take; a longer `seqlen` is reduced to it.
        vocab_size: If given, all token ids are checked against it.

    Raises:
        ConfigError: If an option or count is wrong, or a tokenizer is missing.
        DataError: If a data set cannot be read, or gives no sample.
        TypeError: If `dataset` is none of the accepted types.
    """
    for name, value in (("nsamples", nsamples), ("seqlen", seqlen)):
        if value < 1:
            raise ConfigError(f"{name} ({value}) must be at least 1")
    if max_positions is not None and seqlen > max_positions:
        logger.warning("seqlen (%d) is reduced to the model's maximum position count (%d)", seqlen, max_positions)
        seqlen = max_positions
    draws, asked = [], 0
    for spec, rows, share in _open(dataset, nsamples, seed):
        draws.append(_draw(spec, rows, tokenizer, share, seqlen, seed))
        asked += share
        logger.info("Calibration data: %s", draws[-1].description)
    samples = tuple(sample for draw in draws for sample in draw.samples)
    sources = tuple(draw.description for draw in draws)
    data = CalibrationData(samples=samples, sources=sources, sha256=_sha256(samples))
    if vocab_size is not None:
        _check_vocabulary(draws, vocab_size)
    if any(draw.is_short for draw in draws):
        logger.warning(
            "Calibration data are few: %d samples with %d tokens, of %d samples with up to %d tokens asked for (%s)",
            *(len(samples), data.num_tokens, asked, asked * seqlen, "; ".join(sources)),
        )
    return data


def _open(dataset: Any, nsamples: int, seed: int) -> Iterator[tuple[DatasetSpec, Generator[Any, None, None], int]]:
    """Each data set with its rows, still unread, and the samples it is to give."""
    if not isinstance(dataset, str | os.PathLike):
        yield DatasetSpec(name=f"dataset ({type(dataset).__name__})"), _python_rows(dataset, seed), nsamples
        return
    specs = parse_dataset_spec(dataset) if isinstance(dataset, str) else (DatasetSpec(name=os.fspath(dataset)),)
    shares = assign_shares(specs, nsamples)
    if all(spec.num is not None for spec in specs) and sum(shares) != nsamples:
        logger.warning("The num= options ask for %d samples; they override nsamples (%d)", sum(shares), nsamples)
    for spec, share in zip(specs, shares, strict=True):
        if spec.name == BUILTIN:
            if spec.split is not None or spec.config is not None:
                raise ConfigError(
                    f"split= and config= do not apply to data set {BUILTIN!r}; only hub data sets have them"
                )
            yield spec, iter_builtin_texts(seed), share
        elif is_local(spec.name):
            yield spec, read_file_rows(spec.name, spec.split, spec.config), share
        else:
            yield spec, read_hub_rows(spec.name, spec.split, spec.config), share


def _python_rows(dataset: Any, seed: int) -> Generator[Any, None, None]:
    """The rows or batches of a Python object.

    Raises:
        TypeError: If it is none of the accepted types.
        ConfigError: If it is a list of file names.
    """
    pandas = sys.modules.get("pandas")  # a DataFrame is iterable, but yields the names of its columns
    is_table = pandas is not None and isinstance(dataset, pandas.DataFrame)
    if isinstance(dataset, bytes | bytearray | set | frozenset) or is_table or not isinstance(dataset, Iterable):
        raise TypeError(f"dataset is {type(dataset).__name__}; accepted is {ACCEPTED_TYPES}")
    if isinstance(dataset, list | tuple):
        files = [
            row for row in dataset if isinstance(row, str) and row.endswith(tuple(READERS)) and os.path.isfile(row)
        ]
        if files:
            raise ConfigError(
                f"a list of strings is taken as texts, but {files[0]!r} is a file; "
                f"join file names to one string with commas"
            )
    if isinstance(dataset, Mapping | torch.Tensor | np.ndarray):
        yield dataset
    elif isinstance(dataset, DataLoader):
        # A loader draws from torch's global generator: the caller's must stay as it is, a shuffle must follow the seed.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield from (
                _rows_of_collated(batch) if dataset.collate_fn is default_collate else batch for batch in dataset
            )
    else:
        yield from dataset


def _rows_of_collated(batch: Any) -> Any:
    """Undoes what the default collation does to rows that are lists: it makes a tensor `[rows]` per position."""
    if isinstance(batch, Mapping):
        return {key: _rows_of_collated(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and batch and all(isinstance(t, torch.Tensor) and t.ndim == 1 for t in batch):
        return torch.stack(list(batch), dim=1)
    return batch


def _draw(
    spec: DatasetSpec, rows: Generator[Any, None, None], tokenizer: Any, share: int, seqlen: int, seed: int
) -> _Draw:
    """Draws the share of one data set.

    Raises:
        DataError: If it gives no sample at all.
    """
    encoder = RecordEncoder(
        tokenizer, spec.name, apply_chat_template=spec.apply_chat_template, system_prompt=spec.system_prompt
    )
    is_text = True
    if spec.name == BUILTIN:
        records: Iterable[Record] = rows  # endless enough, and in the seed's order already
        pack, available = True, ""
    else:
        with closing(rows):  # reading may stop early; files and the random state are given back now
            kept = _read_records(rows, spec.name, share * seqlen)
        random.Random(seed).shuffle(kept)
        is_text = not any(isinstance(record, torch.Tensor) for record in kept)
        # With no more texts than samples, joining would only make fewer samples of the same tokens.
        records, pack, available = kept, is_text and len(kept) > share, f" of {len(kept)}"
    samples = collect_samples(encoder.encode(records), share, seqlen, pack=pack or spec.concat, concat=spec.concat)
    if encoder.num_refused:
        problem = f"the chat template refused {encoder.num_refused} conversations ({encoder.first_refusal})"
        if not samples:
            raise DataError(
                f"{spec.name} gives no calibration sample: {problem}; give other data or a tokenizer that fits"
            )
        logger.warning("%s: %s; they are skipped", spec.name, problem)
    if not samples:
        raise DataError(f"{spec.name} gives no calibration sample: its text has no tokens; give other data")
    num_tokens = sum(len(sample) for sample in samples)
    is_short = len(samples) < share or (is_text and num_tokens < share * seqlen / 2)
    description = (
        f"{spec.name}: {len(samples)} samples, {num_tokens} tokens, from {encoder.num_encoded}{available} records, "
        f"at most seqlen ({seqlen}) tokens each"
    )
    return _Draw(samples=samples, description=description, is_short=is_short)


def _read_records(rows: Iterator[Any], source: str, num_tokens: int) -> list[Record]:
    """Reads records until there are plenty to draw `num_tokens` tokens from, and reports blank ones once.

    Raises:
        DataError: If there is no record but blank ones.
    """
    kept: list[Record] = []
    num_blank = size = 0
    for record in (record for row in rows for record in iter_records(row, source)):
        if record is None:
            num_blank += 1
            continue
        kept.append(record)
        size += _num_chars(record)
        if size >= _MAX_CHARS or (len(kept) >= _MIN_RECORDS and size >= _CHARS_PER_TOKEN * num_tokens):
            logger.info("%s: samples are drawn from its first %d records", source, len(kept))
            break
    if not kept:
        found = f"all of its {num_blank} records are blank, null or empty" if num_blank else "it has no records"
        raise DataError(f"{source} gives no calibration sample: {found}")
    if num_blank:
        logger.warning(
            "%s: skipped %d of %d records that are blank, null or empty", source, num_blank, num_blank + len(kept)
        )
    return kept


def _num_chars(record: Record) -> int:
    if isinstance(record, list):
        return sum(len(message["content"]) for message in record)
    return len(record) * (1 if isinstance(record, str) else 4)  # a token stands for about four characters


def _check_vocabulary(draws: list[_Draw], vocab_size: int) -> None:
    for draw in draws:
        for sample in draw.samples:
            low, high = int(sample.min()), int(sample.max())
            if low < 0 or high >= vocab_size:
                raise DataError(
                    f"token id {low if low < 0 else high} is outside the model's vocabulary (0 to {vocab_size - 1}) in "
                    f"{draw.description}; use the tokenizer that belongs to the model"
                )


def _sha256(samples: tuple[torch.Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.array([len(sample)], dtype="<i8").tobytes())
        digest.update(sample.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
