"""Passages of a given length in tokens, cut from articles: calibration files, and held-out windows of token ids.

Used by the benches that calibrate two tools on the same text. The articles themselves come from demo_text.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_text

# A few tokens over: cutting and re-encoding a text can lose one where two pieces of a word merge.
SPARE_TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A piece of text, and the number of the article that it comes from."""

    text: str
    document: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """Token ids to judge a model on, and the number of the article that they come from."""

    ids: list[int]
    document: int


def load_tokenizer(model: str | Path) -> Any:
    """Load a model's tokenizer, and keep it from warning about articles longer than the model's context."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return AutoTokenizer.from_pretrained(model)


def cut_passages(articles: list[str], tokenizer: Any, num_tokens: int, count: int) -> list[Passage]:
    """Take `count` passages of `num_tokens` tokens, the first of every article, then the second of every article, ...

    Raises:
        ValueError: if the articles do not hold that much text.
    """
    encoded = [tokenizer(article, add_special_tokens=False)["input_ids"] for article in articles]
    passages: list[Passage] = []
    for start in range(0, max(map(len, encoded), default=0) - num_tokens + 1, num_tokens):
        for document, ids in enumerate(encoded):
            if len(ids) < start + num_tokens:
                continue
            # Whitespace at the ends is stripped by some readers: strip it here, for all.
            text = tokenizer.decode(ids[start : start + num_tokens]).strip()
            if len(tokenizer(text)["input_ids"]) >= num_tokens - SPARE_TOKENS:
                passages.append(Passage(text=text, document=document))
            if len(passages) == count:
                return passages
    raise ValueError(f"number of passages ({len(passages)}) must reach {count}; give fewer draws or a shorter --seqlen")


def cut_windows(articles: list[str], tokenizer: Any, num_tokens: int, count: int) -> list[Window]:
    """Cut `count` windows of exactly `num_tokens` token ids, special tokens of the tokenizer included."""
    passages = cut_passages(articles, tokenizer, num_tokens + SPARE_TOKENS, count)
    return [Window(ids=tokenizer(p.text)["input_ids"][:num_tokens], document=p.document) for p in passages]


def join_articles(articles: list[str], tokenizer: Any, num_tokens: int) -> list[str]:
    """Join neighbouring short articles into texts of at least `num_tokens` tokens; a short rest is dropped."""
    texts: list[str] = []
    gathered: list[str] = []
    for article in articles:
        gathered.append(article)
        text = "\n\n".join(gathered)
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) >= num_tokens:
            texts.append(text)
            gathered = []
    return texts


def write_calibration_files(
    draws: list[list[str]], tokenizer: Any, folder: Path, num_tokens: int, count: int
) -> list[Path]:
    """Write one JSONL file of `count` texts per draw; each text is a little longer than `num_tokens` tokens."""
    files = []
    for index, articles in enumerate(draws):
        path = folder / f"calibration-{index}.jsonl"
        passages = cut_passages(articles, tokenizer, num_tokens + SPARE_TOKENS, count)
        demo_text.write_jsonl(path, [passage.text for passage in passages])
        files.append(path)
    return files
