"""Token ids of records -> calibration samples -> batches, without a single padding token.

A padding token would count in every activation range and make results depend on the batch size. So short texts are
joined instead of filled up, and only samples of equal length share a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autoround_fp8.errors import ConfigError


class _Packer:
    """Joins pieces of tokens, in order, and cuts the stream to samples of exactly `seqlen` tokens."""

    def __init__(self, seqlen: int):
        self._seqlen = seqlen
        self._pieces: list[torch.Tensor] = []
        self._size = 0

    def add(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Appends `[tokens]`; returns the samples that are now full."""
        self._pieces.append(tokens)
        self._size += len(tokens)
        if self._size < self._seqlen:
            return []
        *full, rest = _windows(torch.cat(self._pieces), self._seqlen)
        if len(rest) == self._seqlen:
            full.append(rest)
            rest = rest[:0]
        self._pieces, self._size = [rest], len(rest)
        return full

    def rest(self) -> list[torch.Tensor]:
        """The last sample, shorter than the others, if any tokens are left."""
        return [torch.cat(self._pieces)] if self._size else []


def collect_samples(
    pieces: Iterable[torch.Tensor], count: int, seqlen: int, *, pack: bool, concat: bool = False
) -> list[torch.Tensor]:
    """Makes up to `count` samples, and stops reading when there are enough.

    A record of at least `seqlen` tokens gives its first `seqlen`; shorter ones are packed, or are a sample each. If the
    records run out, what long ones had left over is used as well, in windows; what is shorter than `seqlen` comes last.

    Args:
        pieces: Token ids of the records, int64 `[tokens]` each.
        count: Samples wanted.
        seqlen: Most tokens of a sample.
        pack: Join short records to samples of exactly `seqlen` tokens.
        concat: Join all records, long ones too, and cut the stream: no record's end is left over.

    Returns:
        At most `count` samples of 1 to `seqlen` tokens, each in memory of its own.
    """
    packer, samples, left_over = _Packer(seqlen), [], []
    for tokens in pieces:
        if concat or (pack and len(tokens) < seqlen):
            samples.extend(packer.add(tokens))
        else:
            samples.append(tokens[:seqlen])
            if len(tokens) > seqlen:
                left_over.append(tokens[seqlen:])
        if len(samples) >= count:
            break
    if len(samples) < count:
        windows = [window for tokens in left_over for window in _windows(tokens, seqlen)]
        samples.extend(window for window in windows if len(window) == seqlen)
        tails = [window for window in windows if len(window) < seqlen]
        for tail in tails if pack else ():
            samples.extend(packer.add(tail))
        samples.extend(packer.rest() if pack or concat else tails)
    # Clones: a window is a view that would keep its whole record alive.
    return [sample.clone() for sample in samples[:count]]


def make_batches(samples: Sequence[torch.Tensor], batch_size: int) -> list[torch.Tensor]:
    """Puts samples of equal length into batches; nothing is ever padded.

    Args:
        samples: Token ids, `[tokens]` each.
        batch_size: Most samples of a batch.

    Returns:
        `[batch, tokens]` each: lengths in the order in which they first occur, samples of a length in their order.

    Raises:
        ConfigError: If the batch size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size ({batch_size}) must be at least 1")
    by_length: dict[int, list[torch.Tensor]] = {}
    for sample in samples:
        by_length.setdefault(len(sample), []).append(sample)
    return [
        torch.stack(group[start : start + batch_size])
        for group in by_length.values()
        for start in range(0, len(group), batch_size)
    ]


def _windows(tokens: torch.Tensor, seqlen: int) -> list[torch.Tensor]:
    """Consecutive windows of `seqlen` tokens; the last one may be shorter."""
    return [tokens[start : start + seqlen] for start in range(0, len(tokens), seqlen)]
