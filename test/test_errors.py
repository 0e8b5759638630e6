"""`errors.py`: another library's error ends a message of ours with one short line."""

from __future__ import annotations

import pytest

from autoround_fp8.errors import cause_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (RuntimeError("\n  padded \n"), "RuntimeError: padded"),
        (KeyError("nope"), "KeyError: 'nope'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_cause_line(error: Exception, line: str):
    assert cause_line(error) == line


def test_a_long_line_is_cut():
    line = cause_line(ValueError("word " * 1000))
    assert len(line) < 260
    assert line.endswith("word ...")
