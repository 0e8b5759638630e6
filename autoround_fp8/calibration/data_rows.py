"""Rows and batches in all the shapes users have them -> records: a text, a conversation, or token ids.

What a row looks like is decided here only, for files, hub data sets and Python objects alike. Read `text_sources.py`
for where rows come from and `record_encoder.py` for how records become tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from autoround_fp8.errors import DataError

Chat: TypeAlias = list[dict[str, Any]]  # messages with "role" and "content"
Record: TypeAlias = str | Chat | torch.Tensor  # text, conversation, or int64 token ids [tokens]

# In order of preference: a row with several of them gives the first one that is not empty.
ACCEPTED_COLUMNS = ("input_ids", "messages", "conversations", "text", "prompt")
COMPANION_COLUMNS = ("attention_mask", "response", "completion")
ACCEPTED_TYPES = (
    "a string (`builtin`, a file, a hub name, or a comma list of them), a list of strings, token lists, tensors or "
    "dicts, a tensor [rows, tokens], a BatchEncoding, or a DataLoader or other iterable that yields these"
)
# ShareGPT's names of who speaks -> the names chat templates know.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


def iter_records(item: Any, source: str) -> Iterator[Record | None]:
    """The records of one row or one batch of rows.

    Args:
        item: A string, a mapping (one row, or columns of rows), token ids `[tokens]` or `[rows, tokens]` as a tensor,
            array or list, a conversation as a list of messages, or a list of any of these.
        source: What the row belongs to, for messages.

    Yields:
        Records; None for a row that is blank, null or empty.

    Raises:
        DataError: If a mapping has no accepted column, or a value has a shape that makes no sense.
        TypeError: If the item is none of the accepted types.
    """
    if item is None:
        yield None
    elif isinstance(item, str):
        yield item if item.strip() else None
    elif isinstance(item, Mapping):
        yield from _records_of_mapping(item, source)
    elif isinstance(item, torch.Tensor | np.ndarray):
        yield from _records_of_tokens(item, None, source)
    elif isinstance(item, list | tuple):
        yield from _records_of_sequence(item, source)
    else:
        raise TypeError(f"{source} holds {type(item).__name__}; accepted is {ACCEPTED_TYPES}")


def _records_of_sequence(items: Sequence[Any], source: str) -> Iterator[Record | None]:
    if not items:
        yield None
    elif _is_token_list(items):
        yield from _records_of_tokens(items, None, source)
    elif all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in items):
        yield _chat(items, source)
    elif len(items) > 1 and isinstance(items, tuple) and all(getattr(item, "ndim", 0) == 2 for item in items):
        raise DataError(
            f"{source} yields tuples of {len(items)} tensors, and which one holds the token ids is unknown; "
            f"yield dicts with input_ids and attention_mask"
        )
    else:
        for item in items:
            yield from iter_records(item, source)


def _records_of_mapping(row: Mapping[str, Any], source: str) -> Iterator[Record | None]:
    known = [column for column in ACCEPTED_COLUMNS if column in row]
    if not known:
        raise DataError(
            f"{source} has the columns {', '.join(map(str, row)) or '(none)'}; accepted are "
            f"{', '.join(ACCEPTED_COLUMNS)} (prompt may come with response, input_ids with attention_mask)"
        )
    column = next((column for column in known if not _is_empty(row[column])), None)
    if column is None:
        yield None
        return
    value = row[column]
    if column == "input_ids":
        yield from _records_of_tokens(value, row.get("attention_mask"), source)
    elif isinstance(value, list | tuple) and not (column != "text" and isinstance(value[0], Mapping)):
        used = [c for c in (*ACCEPTED_COLUMNS, *COMPANION_COLUMNS) if c in row and row[c] is not None]
        for single in _rows_of_columns({c: row[c] for c in used}, source):
            yield from _records_of_mapping(single, source)
    elif column in ("messages", "conversations"):
        yield _chat(value, source)
    elif column == "prompt":
        yield _chat_of_prompt(row, source)
    elif isinstance(value, str):
        yield value if value.strip() else None
    else:
        raise DataError(
            f"{source} has a text of type {type(value).__name__} ({str(value)[:40]}); texts must be strings"
        )


def _rows_of_columns(columns: Mapping[str, Any], source: str) -> Iterator[dict[str, Any]]:
    lengths = {name: len(values) if isinstance(values, list | tuple) else None for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"{source} has columns that are not lists of the same length: {lengths}")
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _chat_of_prompt(row: Mapping[str, Any], source: str) -> Chat | None:
    """A prompt and its response (each a string or messages) as one conversation."""
    messages: list[Any] = []
    for column, role in (("prompt", "user"), ("response", "assistant"), ("completion", "assistant")):
        value = row.get(column)
        if _is_empty(value):
            continue
        if isinstance(value, list | tuple):
            messages.extend(value)
        else:
            messages.append({"role": role, "content": value})
    return _chat(messages, source)


def _chat(messages: Any, source: str) -> Chat | None:
    """Messages with the names that chat templates know; None if nobody says anything."""
    chat: Chat = []
    for message in messages if isinstance(messages, list | tuple) else [messages]:
        if not isinstance(message, Mapping) or not ({"role", "from"} & set(message)):
            raise DataError(
                f"{source} has a conversation with {type(message).__name__} ({str(message)[:60]}); "
                f"conversations must be lists of {{role, content}} or {{from, value}}"
            )
        # Columnar files fill the keys that other messages have with null; a template would take null for a value.
        rest = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
        role = str(message.get("role") or message.get("from"))
        content = message.get("content") if message.get("content") is not None else message.get("value")
        chat.append({"role": _ROLES.get(role, role), "content": _content_text(content, source), **rest})
    return chat if any(message["content"].strip() for message in chat) else None


def _content_text(content: Any, source: str) -> str:
    if isinstance(
        content, list | tuple
    ):  # typed parts, as multimodal data has them; only their text concerns a language model
        content = "".join(str(p.get("text") or "") if isinstance(p, Mapping) else str(p) for p in content)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise DataError(f"{source} has a message whose content is {type(content).__name__}; it must be a string")
    return content


def _records_of_tokens(ids: Any, mask: Any, source: str) -> Iterator[torch.Tensor | None]:
    """Token ids of one row or of several (a list may be ragged), without their padding."""
    if not isinstance(ids, list | tuple) or _is_token_list(ids):
        ids = _as_integers(ids, "input_ids", source)
        if ids.ndim == 1:
            yield _without_padding(ids, mask, source)
            return
        if ids.ndim != 2:
            raise DataError(f"{source} has input_ids of shape {list(ids.shape)}; [tokens] or [rows, tokens] is needed")
    if mask is not None and len(mask) != len(ids):
        raise DataError(f"{source} has {len(ids)} rows of input_ids but {len(mask)} rows of attention_mask")
    for row, row_mask in zip(ids, [None] * len(ids) if mask is None else mask, strict=True):
        yield from _records_of_tokens([] if row is None else row, row_mask, source)


def _without_padding(ids: torch.Tensor, mask: Any, source: str) -> torch.Tensor | None:
    """The real tokens of a padded row `[tokens]`; None if there are none.

    Raises:
        DataError: If the mask does not fit, or has holes: then the row is not one run of text.
    """
    if mask is None:
        return ids if len(ids) else None
    mask = _as_integers(mask, "attention_mask", source)
    if mask.shape != ids.shape:
        raise DataError(
            f"{source} has an attention_mask of shape {list(mask.shape)} for input_ids of shape {list(ids.shape)}; "
            f"each token needs one mask value"
        )
    real = mask.nonzero().flatten()
    if not len(real):
        return None
    first, last = int(real[0]), int(real[-1])
    if last - first + 1 != len(real):
        raise DataError(
            f"{source} has an attention_mask with masked tokens between real ones; only padding at the left "
            f"or the right can be removed: pass separate rows"
        )
    return ids[first : last + 1]


def _as_integers(values: Any, what: str, source: str) -> torch.Tensor:
    if isinstance(values, list | tuple) and not values:
        return torch.empty(0, dtype=torch.int64)
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        raise DataError(f"{source} has {what} that are not whole numbers: {e}") from e
    if (
        tensor.dtype.is_floating_point
        or tensor.dtype.is_complex
        or (tensor.dtype == torch.bool and what == "input_ids")
    ):
        raise DataError(f"{source} has {what} of type {tensor.dtype}; token ids are whole numbers")
    # A copy: what the caller does to its tensors later must not change the samples.
    return tensor.to(torch.int64, copy=True)


def _is_token_list(items: Sequence[Any]) -> bool:
    return all(
        isinstance(item, int | np.integer) or (isinstance(item, torch.Tensor) and item.ndim == 0) for item in items
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and not value)
