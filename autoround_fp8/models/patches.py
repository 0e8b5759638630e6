"""The only place that changes what a transformers module does: on instances, never on a class, never on import.

Swapped forwards are always undone; a refused `save_pretrained` stays with the model it was put on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import nn

from autoround_fp8.errors import ConfigError


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


def refuse_saving(model: nn.Module, reason: str) -> None:
    """Makes a model's `save_pretrained` raise a ConfigError.

    For a model of which transformers would write files, without an error, that nothing loads as the same model.

    Args:
        model: The model.
        reason: Why, for the message.
    """
    # A partial of a function of the module, no closure, so that the model can still be copied and pickled.
    model.__dict__["save_pretrained"] = partial(_refuse_to_save, reason)


def _refuse_to_save(reason: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise ConfigError(
        f"save_pretrained of this model is not supported: {reason}; copy its folder, or use save_quantized of the "
        "AutoRound that made it"
    )
