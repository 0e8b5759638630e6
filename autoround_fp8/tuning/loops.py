"""Whether there are compiled loops. Numba is imported when first needed: it takes 60 MB and a quarter of a second."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def _compiled() -> Any:
    try:
        from autoround_fp8.tuning import numba_loops
    except ImportError:  # Numba is optional
        return None
    return numba_loops


def compiled_loops(device: torch.device) -> Any:
    """The module `numba_loops` for work on this device, or None if plain torch has to do it."""
    return _compiled() if device.type == "cpu" else None
