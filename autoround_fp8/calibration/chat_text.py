"""Conversations -> the text a model would see, through the tokenizer's own chat template.

Templates are programs of model authors: some are missing, some refuse a system message, some refuse whole
conversations. Read `record_encoder.py` for what becomes of the text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jinja2

from autoround_fp8.calibration.data_rows import Chat

logger = logging.getLogger(__name__)

# What a template raises when it does not like a conversation: on purpose (TemplateError), or for want of some value.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class RenderedText:
    """A text to tokenise, and whether the tokenizer's special tokens are still to be added (templates write them)."""

    text: str
    add_special_tokens: bool


class ChatRenderer:
    """Renders conversations and remembers what did not work, so that each problem is reported once.

    Args:
        tokenizer: A Hugging Face tokenizer; it is only asked, never changed.
        source: What the conversations belong to, for messages.

    Attributes:
        num_refused: Conversations that the template refused.
        first_refusal: Why it refused the first of them.
    """

    def __init__(self, tokenizer: Any, source: str):
        self._tokenizer = tokenizer
        self._source = source
        self._has_template = getattr(tokenizer, "chat_template", None) is not None
        self._warned: set[str] = set()
        self.num_refused = 0
        self.first_refusal = ""

    def render(self, chat: Chat) -> RenderedText | None:
        """The text of one conversation; None if the template refuses it even without its system message."""
        if not self._has_template:
            self._warn_once(
                f"{self._source}: the tokenizer has no chat template; conversations are used as 'role: content'"
            )
            text = "\n".join(f"{message['role']}: {message['content']}" for message in chat)
            return RenderedText(text=text, add_special_tokens=True)
        try:
            return self._apply(chat)
        except _REFUSALS as e:
            refusal: Exception = e
        without_system = merge_system_message(chat)
        if without_system != chat:
            try:
                rendered = self._apply(without_system)
            except _REFUSALS as e:
                refusal = e
            else:
                self._warn_once(
                    f"{self._source}: the chat template refuses the system role ({refusal}); "
                    f"system messages are put in front of the first user message"
                )
                return rendered
        self.num_refused += 1
        self.first_refusal = self.first_refusal or f"{type(refusal).__name__}: {refusal}"
        return None

    def _apply(self, chat: Chat) -> RenderedText:
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
        return RenderedText(text=text, add_special_tokens=False)

    def _warn_once(self, message: str) -> None:
        kind = message.partition("(")[0]  # the reason in brackets may differ from one conversation to the next
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message)


def merge_system_message(chat: Chat) -> Chat:
    """The conversation with its system messages put before the first user message, or dropped if no user speaks."""
    system = "\n\n".join(message["content"] for message in chat if message["role"] == "system")
    rest = [dict(message) for message in chat if message["role"] != "system"]
    for message in rest:
        if message["role"] == "user" and system:
            message["content"] = f"{system}\n\n{message['content']}"
            break
    return rest


def add_system_message(chat: Chat, system_prompt: str | None) -> Chat:
    """The conversation with a system message in front, unless it has one already or there is none to add."""
    if system_prompt is None or any(message["role"] == "system" for message in chat):
        return chat
    return [{"role": "system", "content": system_prompt}, *chat]
