"""The default calibration text: English and source code that every CPython installation has.

Python's reference topics and docstrings, alternating with its standard library's source code. Needs no network and no
file of the user; the text depends on the Python version only.
"""

from __future__ import annotations

import ast
import importlib
import random
import sysconfig
from collections.abc import Generator, Iterator
from pathlib import Path

PIECE_CHARS = 8000  # about 2000 tokens: many topics and modules get into a small sample
_MAX_FILE_BYTES = 200_000
# Packages of the standard library beside its top-level modules; absent ones are skipped.
_PACKAGES = (
    *("asyncio", "collections", "concurrent/futures", "ctypes", "curses", "dbm", "email", "html", "http", "importlib"),
    *("json", "logging", "multiprocessing", "re", "sqlite3", "tkinter", "tomllib", "unittest", "urllib", "wsgiref"),
    *("xml/dom", "xml/etree", "xml/sax", "xmlrpc", "zipfile", "zoneinfo"),
)


def iter_builtin_texts(seed: int) -> Generator[str, None, None]:
    """English and code pieces in turn, in an order drawn from the seed, until both are used up.

    Args:
        seed: Same seed and same Python version, same texts in the same order.

    Yields:
        Texts of at most about `PIECE_CHARS` characters.
    """
    rng = random.Random(seed)
    topics = [piece for text in _topics() for piece in split_text(text)]
    sources = _library_sources()
    code = [piece for source in sources for piece in split_text(source)]
    for pieces in (topics, sources, code):
        rng.shuffle(pieces)
    streams = [_english(topics, sources), iter(code)]
    while streams:
        for stream in list(streams):
            piece = next(stream, None)
            if piece is None:
                streams.remove(stream)
            else:
                yield piece


def split_text(text: str) -> list[str]:
    """Cuts a text into pieces of about equal size, at most about `PIECE_CHARS` characters, at line ends."""
    target = len(text) / (len(text) // PIECE_CHARS + 1)
    pieces, start, size = [], 0, 0
    lines = text.splitlines(keepends=True)
    for position, line in enumerate(lines, start=1):
        size += len(line)
        if size >= target or position == len(lines):
            pieces.append("".join(lines[start:position]))
            start, size = position, 0
    return [piece for piece in pieces if piece.strip()]


def _english(topics: list[str], sources: list[str]) -> Iterator[str]:
    """The topics, then the docstrings; those are collected only as far as they are asked for."""
    yield from topics
    for source in sources:
        yield from split_text(_docstrings(source))


def _topics() -> list[str]:
    """Python's language reference as `help()` shows it; empty where an installation leaves it out."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def _library_sources() -> list[str]:
    """The source of the standard library's modules, in path order; empty if only byte code is installed."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for folder in ("", *_PACKAGES) for path in sorted((root / folder).glob("*.py"))]
    sources = []
    for path in paths:
        try:
            if path.stat().st_size <= _MAX_FILE_BYTES:
                sources.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
    return sources


def _docstrings(source: str) -> str:
    """All docstrings of a module as one text."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text)
