"""`builtin_text.py`: text that needs neither network nor files of the user."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from autoround_fp8.calibration import builtin_text
from autoround_fp8.calibration.builtin_text import PIECE_CHARS, iter_builtin_texts, split_text


def test_same_seed_same_texts_other_seed_other_texts():
    first = list(itertools.islice(iter_builtin_texts(7), 20))
    assert first == list(itertools.islice(iter_builtin_texts(7), 20))
    assert first != list(itertools.islice(iter_builtin_texts(8), 20))


def test_half_is_english_and_half_is_code():
    pieces = list(itertools.islice(iter_builtin_texts(0), 100))
    topics = {piece for text in builtin_text._topics() for piece in split_text(text)}
    assert [piece in topics for piece in pieces] == [True, False] * 50
    english, code = sum(map(len, pieces[::2])), sum(map(len, pieces[1::2]))
    assert 0.5 < english / code < 2


def test_enough_for_512_samples_of_2048_tokens():
    # Five characters per token is more than tokenizers of large models reach on such text.
    num_chars = sum(map(len, builtin_text._topics() + builtin_text._library_sources()))
    assert num_chars > 512 * 2048 * 5


def test_split_text_loses_nothing_but_blank_pieces():
    text = "".join(f"line {i}\n" for i in range(5000))
    pieces = split_text(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARS + 20
    assert split_text("") == split_text("\n \n") == []


def test_missing_library_sources_leave_the_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builtin_text.sysconfig, "get_path", lambda name: str(tmp_path / "nothing"))
    pieces = list(iter_builtin_texts(0))
    assert sorted(pieces) == sorted(piece for text in builtin_text._topics() for piece in split_text(text))
