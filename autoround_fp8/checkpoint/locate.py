"""From what the user typed to a folder: a local directory, or a model id of the Hugging Face hub.

The only place that may download a model.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from autoround_fp8.errors import CheckpointError, ConfigError

_LICENCES = ["LICENSE*", "LICENCE*", "COPYING*", "NOTICE*"]
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.py", "*.md", "*.tiktoken", *_LICENCES]


def locate_checkpoint(model: str | Path) -> Path:
    """The folder of a checkpoint: an existing directory as it is, or a hub id (`org/name`) put into the hub's cache.

    Raises:
        CheckpointError: If there is no such folder, or the hub cannot be reached or has no such model.
    """
    path = Path(model).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
        return path
    if os.path.exists(path):
        raise CheckpointError(f"model {str(model)!r} is a file; give the folder that holds config.json and the weights")
    word = str(model)
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+", word):
        raise CheckpointError(f"model folder {word!r} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # The bases bring in the network errors of whichever HTTP client the hub library uses; some are no OSError.
    failures: Any = (OSError, LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, *HfHubHTTPError.__bases__)

    try:
        return Path(snapshot_download(word, allow_patterns=_WANTED, etag_timeout=5))
    except failures as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(f"model {word!r} is neither a local folder nor to be had from the hub: {reason}") from e


def check_output_location(output_dir: Path, source: Path | None) -> None:
    """Refuses an output folder that is the source folder, or lies above it.

    Raises:
        ConfigError: Naming both.
    """
    if source is None:
        return
    target, origin = output_dir.resolve(), source.resolve()
    if target == origin or target in origin.parents:
        raise ConfigError(f"output_dir {str(output_dir)!r} must not be or contain the source model {str(source)!r}")
