"""Records -> token ids: texts and conversations go through the tokenizer, token ids pass.

The tokenizer belongs to the caller and is saved beside the model later: nothing here leaves a trace on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autoround_fp8.calibration.chat_text import ChatRenderer, RenderedText, add_system_message
from autoround_fp8.calibration.data_rows import Record
from autoround_fp8.errors import ConfigError, DataError

_CHUNK = 32  # records tokenised at a time: enough for the tokenizer's threads, few enough not to waste work


class RecordEncoder:
    """Turns the records of one data set into token ids.

    Args:
        tokenizer: A Hugging Face tokenizer; None if all records are token ids already.
        source: What the records belong to, for messages.
        apply_chat_template: Wrap each plain text as a user message.
        system_prompt: System message of conversations that have none; implies `apply_chat_template`.

    Attributes:
        num_encoded: Records that gave at least one token.
    """

    def __init__(
        self, tokenizer: Any, source: str, *, apply_chat_template: bool = False, system_prompt: str | None = None
    ):
        self._tokenizer = tokenizer
        self._source = source
        self._wraps_text = apply_chat_template or system_prompt is not None
        self._system_prompt = system_prompt
        self._renderer = ChatRenderer(tokenizer, source)
        self.num_encoded = 0

    @property
    def num_refused(self) -> int:
        """Conversations that the chat template refused so far."""
        return self._renderer.num_refused

    @property
    def first_refusal(self) -> str:
        """Why the chat template refused the first of them; empty if it refused none."""
        return self._renderer.first_refusal

    def encode(self, records: Iterable[Record]) -> Iterator[torch.Tensor]:
        """Token ids of the records, lazily and in order; records that give no token are left out.

        Yields:
            int64 `[tokens]`, at least one token each, never cut and never padded.

        Raises:
            ConfigError: If a text needs a tokenizer and there is none.
            DataError: If a chat template is asked for and the records are token ids already.
        """
        iterator = iter(records)
        while chunk := list(itertools.islice(iterator, _CHUNK)):
            for tokens in self._encode_chunk(chunk):
                if len(tokens):
                    self.num_encoded += 1
                    yield tokens

    def _encode_chunk(self, records: list[Record]) -> list[torch.Tensor]:
        results: list[torch.Tensor | None] = [None] * len(records)
        to_tokenize: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for position, record in enumerate(records):
            if isinstance(record, torch.Tensor):
                results[position] = self._checked_tokens(record)
            elif (rendered := self._render(record)) is not None:
                to_tokenize[rendered.add_special_tokens].append((position, rendered.text))
        for add_special_tokens, texts in to_tokenize.items():
            if texts:
                encoded = tokenize([text for _, text in texts], self._tokenizer, add_special_tokens)
                for (position, _), tokens in zip(texts, encoded, strict=True):
                    results[position] = tokens
        return [tokens for tokens in results if tokens is not None]

    def _checked_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._wraps_text:
            raise DataError(
                f"{self._source} holds token ids, to which no chat template can be applied; give text, or leave out "
                f"apply_chat_template and system_prompt"
            )
        return tokens

    def _render(self, record: Record) -> RenderedText | None:
        if self._tokenizer is None:
            raise ConfigError(f"{self._source} holds text, for which a tokenizer is needed; pass one, or token ids")
        if isinstance(record, str):
            if not self._wraps_text:
                return RenderedText(text=record, add_special_tokens=True)
            record = [{"role": "user", "content": record}]
        assert isinstance(record, list)
        return self._renderer.render(add_system_message(record, self._system_prompt))


def tokenize(texts: list[str], tokenizer: Any, add_special_tokens: bool = True) -> list[torch.Tensor]:
    """Token ids of texts, int64 `[tokens]` each, neither cut nor padded; the tokenizer stays as it was.

    Args:
        texts: The texts.
        tokenizer: A Hugging Face tokenizer.
        add_special_tokens: Whether the tokenizer adds what it adds by default (BOS, EOS).
    """
    with _unchanged(tokenizer):
        # verbose=False: the note that a text is longer than the model's context does not concern us, it will be cut.
        encoded = tokenizer(
            texts, add_special_tokens=add_special_tokens, padding=False, truncation=False, verbose=False
        )
    return [torch.tensor(ids, dtype=torch.int64) for ids in encoded["input_ids"]]


@contextmanager
def _unchanged(tokenizer: Any) -> Iterator[None]:
    """Restores truncation and padding of a fast tokenizer: a call without them deletes what its file says on them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    truncation, padding = getattr(backend, "truncation", None), getattr(backend, "padding", None)
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)  # type: ignore[union-attr]
        if padding is not None:
            backend.enable_padding(**padding)  # type: ignore[union-attr]
