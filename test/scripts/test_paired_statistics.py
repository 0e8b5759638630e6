"""`paired_statistics.py` against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from paired_statistics import Estimate, is_no_worse, paired_difference, paired_ratio, standard_error_over


def test_error_with_one_window_per_document_is_the_usual_one():
    assert standard_error_over([0, 1, 2], [1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(7) / math.sqrt(3))


def test_windows_of_one_document_count_once():
    # The same value twice per document carries no more information than once.
    once = standard_error_over([0, 1, 2], [1.0, 2.0, 6.0])
    assert standard_error_over([0, 0, 1, 1, 2, 2], [1.0, 1.0, 2.0, 2.0, 6.0, 6.0]) == pytest.approx(once)


def test_one_document_has_no_error():
    with pytest.raises(ValueError, match=r"documents \(1\)"):
        standard_error_over([0, 0], [1.0, 2.0])


def test_difference_is_paired_and_draws_are_averaged_first():
    # Differences 1, 3 in one draw and 3, 1 in the other: 2 for both windows, without spread.
    found = paired_difference([0, 1], [[11.0, 23.0], [13.0, 21.0]], [[10.0, 20.0], [10.0, 20.0]])
    assert found == Estimate(value=2.0, standard_error=0.0)


def test_ratio_is_the_mean_of_the_draws_ratios():
    found = paired_ratio([0, 1], [[2.0, 4.0], [1.0, 1.0]], [[1.0, 2.0], [2.0, 2.0]])
    assert found == Estimate(value=1.25, standard_error=0.0)
    # One draw, ratio 1: residuals (1 - 2) / 2 and (3 - 2) / 2, so 0.5 with n - 1 = 1.
    assert paired_ratio([0, 1], [[1.0, 3.0]], [[2.0, 2.0]]) == Estimate(value=1.0, standard_error=0.5)


def test_no_worse_means_within_two_standard_errors():
    assert is_no_worse(Estimate(value=2.0, standard_error=1.0))
    assert not is_no_worse(Estimate(value=2.1, standard_error=1.0))
    assert is_no_worse(Estimate(value=-0.1, standard_error=0.0))
