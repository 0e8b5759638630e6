"""`passages.py` with a tokenizer of whole words, and the texts that `demo_text.py` makes of the standard library."""

from __future__ import annotations

import json
from pathlib import Path

import demo_text
import pytest
from passages import SPARE_TOKENS, cut_passages, cut_windows, join_articles, write_calibration_files

LONG = [f"a{i}" for i in range(40)]
SHORT = [f"b{i}" for i in range(25)]


class WordTokenizer:
    """Words are tokens; texts start with `<s>` if special tokens are asked for."""

    def __init__(self) -> None:
        self.words = ["<s>"]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        found = ["<s>"] * add_special_tokens + text.split()
        self.words += [word for word in dict.fromkeys(found) if word not in self.words]
        return {"input_ids": [self.words.index(word) for word in found]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_first_passages_of_all_articles_come_before_second_ones():
    passages = cut_passages([" ".join(LONG), " ".join(SHORT), "too short"], WordTokenizer(), 20, 3)
    assert [p.text for p in passages] == [" ".join(LONG[:20]), " ".join(SHORT[:20]), " ".join(LONG[20:])]
    assert [p.document for p in passages] == [0, 1, 0]


@pytest.mark.parametrize("articles", [[], ["a b"], [" ".join(LONG)]])
def test_too_little_text_is_an_error(articles: list[str]):
    with pytest.raises(ValueError, match="must reach 4"):
        cut_passages(articles, WordTokenizer(), 20, 4)


def test_windows_have_the_length_asked_for_with_special_tokens():
    tokenizer = WordTokenizer()
    (window,) = cut_windows([" ".join(LONG)], tokenizer, 12, 1)
    assert (tokenizer.decode(window.ids), window.document) == (" ".join(["<s>", *LONG[:11]]), 0)


def test_short_articles_are_joined_and_the_rest_is_dropped():
    assert join_articles(["a b", "c d", "e f g h", "i"], WordTokenizer(), 4) == ["a b\n\nc d", "e f g h"]


def test_each_draw_has_a_file_of_its_own_articles(tmp_path: Path):
    files = write_calibration_files([[" ".join(LONG)], [" ".join(SHORT)]], WordTokenizer(), tmp_path, 10, 1)
    texts = [json.loads(path.read_text())["text"].split() for path in files]
    assert texts == [LONG[: 10 + SPARE_TOKENS], SHORT[: 10 + SPARE_TOKENS]]


def test_python_source_is_long_and_starts_with_code():
    sources = demo_text.read_python_source()
    assert len(sources) > 20
    assert all(len(text) >= demo_text.MIN_SOURCE_CHARS and text.startswith(("class ", "def ")) for text in sources)
