"""Compiled loops cover their whole range, on threads that survive forks, and compile where nothing can be written."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
compiled = pytest.importorskip("autoround_fp8.numerics.compiled")


@pytest.mark.parametrize(("length", "work", "parts"), [(10, 1 << 30, 3), (2, 1 << 30, 2), (10, 1 << 19, 1), (0, 0, 1)])
def test_parts_cover_the_range_once(monkeypatch: pytest.MonkeyPatch, length: int, work: int, parts: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    seen: list[tuple[int, int]] = []
    compiled.Threads().split(lambda begin, end: seen.append((begin, end)), length, work)
    assert len(seen) == parts
    assert [i for begin, end in sorted(seen) for i in range(begin, end)] == list(range(length))


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def fails_in_the_second_part(begin: int, end: int) -> None:
        if begin:
            raise ValueError(f"part {begin} to {end}")

    with pytest.raises(ValueError, match="part 5 to 10"):
        compiled.Threads().split(fails_in_the_second_part, 10, 1 << 30)


def test_a_forked_child_gets_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads = compiled.Threads()
    threads.split(lambda begin, end: None, 9, 1 << 30)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        threads.split(lambda begin, end: seen.extend(range(begin, end)), 9, 1 << 30)  # would wait on the parent's
        os._exit(0 if sorted(seen) == list(range(9)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_functions_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = compiled.numba.njit

    def njit_without_cache(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available for file")
        return njit(*arguments, **options)

    monkeypatch.setattr(compiled.numba, "njit", njit_without_cache)
    assert compiled.compiled()(lambda x: x + 1)(41) == 42
