"""Loops compiled by Numba, spread over this package's own threads.

Numba is optional: whoever imports this module has the same in plain torch for where it is not installed. The threads
are not Numba's: two OpenMP pools in one process (torch's and Numba's) spin against each other and turn a loop of 1 ms
into one of 8.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import torch

# Least elements per thread: below this, waking a thread costs more than it saves.
_GRAIN = 1 << 20


def compiled(*flags: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` without the GIL, cached on disk where a place can be written.

    Args:
        flags: LLVM fast-math flags; none at all by default, so rounding is IEEE. They do not reach functions that are
            called from the one they are given for.
    """

    def compile_later(function: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "fastmath": set(flags)}
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "no locator available": neither the package nor the user's cache folder is writable
            return numba.njit(**options)(function)

    return compile_later


class Threads:
    """As many threads as torch may use, for loops that hold no GIL."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0

    def split(self, task: Callable[[int, int], None], length: int, work: int) -> None:
        """Runs `task(begin, end)` over `range(length)`, on several threads if `work` (in elements) is worth it."""
        num_threads = min(torch.get_num_threads(), work // _GRAIN, length)
        if num_threads <= 1:  # a small layer must not pay for threads
            task(0, length)
            return
        bounds = [length * i // num_threads for i in range(num_threads + 1)]
        waiting = [self._started().submit(task, bounds[i], bounds[i + 1]) for i in range(1, num_threads)]
        task(bounds[0], bounds[1])
        for future in waiting:
            future.result()

    def _started(self) -> ThreadPoolExecutor:
        # Threads do not survive a fork: a child process needs a pool of its own.
        if self._pool is None or self._pool_pid != os.getpid():
            self._pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="fp8-loops")
            self._pool_pid = os.getpid()
        return self._pool
