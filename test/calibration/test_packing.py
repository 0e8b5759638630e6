"""`packing.py`: which tokens end up in which sample, exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoround_fp8.calibration.packing import collect_samples, make_batches
from autoround_fp8.errors import ConfigError


def pieces(*sizes: int) -> list[torch.Tensor]:
    """Token runs of these sizes, counting on from 0."""
    return list(torch.arange(sum(sizes)).split(list(sizes)))


def lists(samples: list[torch.Tensor]) -> list[list[int]]:
    return [sample.tolist() for sample in samples]


def test_short_records_are_packed_exactly_and_in_order():
    samples = collect_samples(pieces(3, 3, 3, 3), 9, 4, pack=True)
    assert lists(samples) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_partial_pack_is_used_only_if_still_short():
    assert lists(collect_samples(pieces(3, 3), 2, 4, pack=True)) == [[0, 1, 2, 3], [4, 5]]
    assert lists(collect_samples(pieces(3, 3), 1, 4, pack=True)) == [[0, 1, 2, 3]]


def test_long_record_gives_its_start_and_more_windows_only_if_needed():
    assert lists(collect_samples(pieces(10, 5), 2, 4, pack=True)) == [[0, 1, 2, 3], [10, 11, 12, 13]]
    everything = collect_samples(pieces(10, 5), 9, 4, pack=True)
    assert lists(everything) == [[0, 1, 2, 3], [10, 11, 12, 13], [4, 5, 6, 7], [8, 9, 14]]


def test_every_token_is_used_once_when_records_run_out():
    generator = torch.Generator().manual_seed(0)
    for pack in (True, False):
        sizes = torch.randint(1, 40, (50,), generator=generator).tolist()
        samples = collect_samples(pieces(*sizes), 10_000, 16, pack=pack)
        assert sorted(torch.cat(samples).tolist()) == list(range(sum(sizes)))
        assert max(map(len, samples)) == 16
        if pack:
            assert [len(sample) for sample in samples[:-1]] == [16] * (len(samples) - 1)


def test_without_packing_each_record_is_a_sample():
    assert lists(collect_samples(pieces(2, 6, 3), 3, 4, pack=False)) == [[0, 1], [2, 3, 4, 5], [8, 9, 10]]


def test_concat_joins_long_records_too():
    samples = collect_samples(pieces(6, 1, 5), 9, 5, pack=True, concat=True)
    assert lists(samples) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_reading_stops_when_there_are_enough():
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(3, dtype=torch.int64)

    assert len(collect_samples(endless(), 5, 4, pack=True)) == 5


def test_samples_own_their_memory():
    (long,) = pieces(1000)
    (sample,) = collect_samples([long], 1, 4, pack=False)
    assert sample.untyped_storage().nbytes() == 4 * 8


def test_only_equal_lengths_share_a_batch():
    samples = pieces(3, 5, 3, 3, 5, 1)
    batches = make_batches(samples, 2)
    assert [tuple(batch.shape) for batch in batches] == [(2, 3), (1, 3), (2, 5), (1, 1)]
    assert [row.tolist() for row in batches[0]] == [samples[0].tolist(), samples[2].tolist()]
    assert sorted(torch.cat([batch.flatten() for batch in batches]).tolist()) == list(range(20))


def test_batch_size_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"batch_size \(0\) must be at least 1"):
        make_batches(pieces(1), 0)
