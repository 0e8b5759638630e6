"""The only place that changes what a transformers module does: forwards swapped on instances, always undone.

Nothing is patched on import, and no class is ever changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def swapped_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Lets each module instance run another function as its forward; hooks still run. Undone on exit, also on errors.

    Args:
        forwards: Module -> function with the arguments of its forward, without `self`.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, function in forwards.items():
            module.__dict__["forward"] = function
        yield
    finally:
        for module, previous in before.items():
            if previous is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = previous
