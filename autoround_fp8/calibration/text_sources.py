"""Local files -> rows: .json, .jsonl, .txt, .parquet, and folders of them.

Only reads; what a row means is decided in `data_rows.py`. Hub data sets are in `hub_source.py`, the default text in
`builtin_text.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from autoround_fp8.calibration.data_rows import ACCEPTED_COLUMNS, COMPANION_COLUMNS
from autoround_fp8.errors import ConfigError, DataError


def is_local(name: str) -> bool:
    """Whether a data set name means a file or folder: it exists, ends like a data file, or is written like a path."""
    path = Path(name).expanduser()
    return path.exists() or path.suffix.lower() in READERS or name.startswith(("/", "./", "../", "~"))


def read_file_rows(name: str, split: str | None = None, config: str | None = None) -> Generator[Any, None, None]:
    """The rows of a local file, or of all data files of a folder in the order of their names.

    Args:
        name: Path of the file or folder.
        split: Must be None or "train": a file has no splits.
        config: Must be None: a file has no configurations.

    Yields:
        Strings, mappings or lists, as the file has them; None for an empty line or a null.

    Raises:
        ConfigError: If a split or configuration is asked for.
        DataError: If the file is missing, empty, of an unknown kind, or damaged.
    """
    if config is not None or split not in (None, "train"):
        option = f"config={config}" if config is not None else f"split={split}"
        raise ConfigError(f"{option} does not apply to the local data set {name!r}; only hub data sets have it")
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS and file.is_file())
        if not files:
            raise DataError(f"folder {name!r} has no data file; accepted are {', '.join(READERS)}")
    else:
        files = [path]
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Any]:
    reader = READERS.get(path.suffix.lower())
    if not path.is_file():
        raise DataError(f"data file {str(path)!r} does not exist; give a file, a hub name, or --dataset builtin")
    if reader is None:
        raise DataError(f"data file {str(path)!r} ends with {path.suffix!r}; accepted are {', '.join(READERS)}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"data file {str(path)!r} is empty (0 bytes)")
        yield from reader(path)
    except UnicodeDecodeError as e:
        raise DataError(f"data file {str(path)!r} is not UTF-8 text: {e}") from e
    except OSError as e:
        raise DataError(f"data file {str(path)!r} cannot be read: {e}") from e


def _read_lines(path: Path) -> Iterator[str]:
    # Iterating the file splits at line ends only; str.splitlines would also split inside JSON strings (U+2028).
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            yield line.rstrip("\r\n")


def _read_txt(path: Path) -> Iterator[Any]:
    yield from _read_lines(path)


def _read_jsonl(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_read_lines(path), start=1):
        try:
            yield json.loads(line) if line.strip() else None
        except json.JSONDecodeError as e:
            raise DataError(f"line {number} of data file {str(path)!r} is not valid JSON: {e}") from e


def _read_json(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as e:
        if not (e.msg == "Extra data" and re.match(r"\s*\{", text)):
            raise DataError(f"data file {str(path)!r} is not valid JSON: {e}") from e
        # Many tools call a file of one object per line .json.
        yield from _read_jsonl(path)
        return
    if isinstance(content, list):
        yield from content
    elif isinstance(content, dict):
        yield content
    else:
        raise DataError(
            f"data file {str(path)!r} holds a single {type(content).__name__}; a list or an object is needed"
        )


def _read_parquet(path: Path) -> Iterator[Any]:
    # pyarrow itself, not `datasets`: that one refuses files whose metadata names a feature it does not know.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            used = [name for name in names if name in (*ACCEPTED_COLUMNS, *COMPANION_COLUMNS)]
            for batch in file.iter_batches(batch_size=1024, columns=used or names):
                yield from batch.to_pylist()
    except pa.ArrowException as e:
        raise DataError(f"data file {str(path)!r} is not a readable parquet file: {e}") from e


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
}
