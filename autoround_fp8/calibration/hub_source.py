"""Data sets of the Hugging Face hub -> rows, quickly or with a quick error.

Rows are streamed, so that a huge data set costs what is read of it. Without a network, what `datasets` has cached is
used; if it has nothing, the error comes within seconds instead of after the hub client's retries.
"""

from __future__ import annotations

import logging
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

from autoround_fp8.errors import DataError

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
_WAY_OUT = "use `--dataset builtin` (needs no network) or a local .json, .jsonl, .txt or .parquet file"


def read_hub_rows(name: str, split: str | None = None, config: str | None = None) -> Generator[Any, None, None]:
    """The rows of one split of a hub data set, in the hub's order.

    Args:
        name: Hub name such as `NeelNanda/pile-10k`.
        split: Split such as `train`, `train+test` or `train[:100]`; None = `train`.
        config: Configuration, for data sets that have several.

    Yields:
        Mappings of column name to value.

    Raises:
        DataError: If the data set cannot be reached, does not exist, or has no such split or configuration.
    """
    import datasets

    split = split or "train"
    offline = datasets.config.HF_HUB_OFFLINE
    reachable = not offline and is_reachable(datasets.config.HF_ENDPOINT)
    if not reachable and not _is_cached(name, Path(datasets.config.HF_DATASETS_CACHE)):
        reason = (
            "offline mode is on (HF_HUB_OFFLINE)" if offline else f"{datasets.config.HF_ENDPOINT} cannot be reached"
        )
        raise DataError(f"data set {name!r} cannot be loaded: {reason}, and it is not in the local cache; {_WAY_OUT}")
    if not reachable:
        logger.warning("Data set %r is read from the local cache: the hub cannot be reached", name)
    try:
        # A slice needs the whole split; all else is read from the front, row by row.
        yield from datasets.load_dataset(name, config, split=split, streaming=reachable and "[" not in split)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, datasets.exceptions.DatasetsError) as e:
        message = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise DataError(
            f"data set {name!r} (split {split!r}, config {config!r}) cannot be loaded from the hub: {message}; "
            f"check its name, choose split= or config=, or {_WAY_OUT}"
        ) from e


def is_reachable(endpoint: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether anything answers at a URL within a few seconds; an answer that is an error counts.

    Args:
        endpoint: URL to ask; proxies of the environment are used.
        seconds: Time limit of the whole question, name resolution included.
    """
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=seconds):
                answers.append(True)
        except urllib.error.HTTPError:
            answers.append(True)
        except urllib.error.URLError as e:
            # The hub's client brings its own certificates: failing with the system's says nothing about it.
            answers.append(isinstance(e.reason, ssl.SSLError))
        except (OSError, ValueError):
            answers.append(False)

    # Name resolution knows no time limit: a resolver that never answers must not hold up the run.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return bool(answers) and answers[0]


def _is_cached(name: str, cache: Path) -> bool:
    """Whether `datasets` has prepared this data set before: its folder is `owner___name`."""

    def plain(folder: str) -> str:
        return folder.replace("_", "").lower()  # `datasets` turns MyData into my_data

    wanted = plain(name.replace("/", "___"))
    return cache.is_dir() and any(plain(entry.name) == wanted for entry in cache.iterdir())
