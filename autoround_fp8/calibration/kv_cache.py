"""Watches what goes into the KV cache of a block: keys after norm and rotary embedding, values as projected.

A block is given a cache that keeps nothing. The model's own attention hands it what it would cache, in the form in
which it caches it, so no family needs code here; the attention function would be the other place to look, but which one
is called differs by implementation and may see keys repeated or padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.nn.observers import AbsMaxObserver, InputRange
from autoround_fp8.records import BlockInputs

# How transformers' blocks call the cache they are given, now, in old families, and before 5.24.
CACHE_ARGUMENTS = ("cache", "layer_past", "past_key_values")

KEY, VALUE = "key", "value"


class WatchedCache:
    """Stands for an empty cache, of which attention calls these methods only; it hands back what it is given."""

    def __init__(self, observe: Callable[[torch.Tensor, torch.Tensor], None]):
        self._observe = observe

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[batch, heads, tokens, head_dim]`, unchanged."""
        self._observe(key, value)
        return key, value

    def get_seq_length(self, *_args: Any) -> int:
        """Tokens in the cache."""
        return 0


class CacheObserver:
    """Records the ranges of the keys and values of one block's attention.

    Args:
        fqn: Name of the attention module, for messages.
    """

    def __init__(self, fqn: str):
        self._fqn = fqn
        self._observers = {KEY: AbsMaxObserver(), VALUE: AbsMaxObserver()}

    def watch(self, inputs: BlockInputs, *, is_counted: bool = True) -> BlockInputs:
        """The same call of the block, with a cache that is watched.

        Args:
            inputs: The call, as captured without a cache.
            is_counted: Whether the tokens count, as of `AbsMaxObserver.observe`.

        Raises:
            UnsupportedModelError: If the block takes no cache that is known here.
        """
        name = next((name for name in CACHE_ARGUMENTS if name in inputs.kwargs), None)
        if name is None:
            raise UnsupportedModelError(
                f"decoder block {inputs.block} is given no KV cache, so what {self._fqn!r} caches cannot be seen; "
                "leave out static_kv_dtype"
            )

        def observe(key: torch.Tensor, value: torch.Tensor) -> None:
            for what, states in ((KEY, key), (VALUE, value)):
                by_token = states.transpose(1, 2).flatten(2)
                self._observers[what].observe(self._fqn, by_token, is_counted=is_counted, what=f"cached {what}")

        return replace(inputs, kwargs={**inputs.kwargs, name: WatchedCache(observe)})

    def ranges(self, block: str) -> tuple[InputRange, InputRange]:
        """What was seen of the keys and of the values.

        Raises:
            UnsupportedModelError: If nothing was, naming the block.
        """
        seen = [observer.ranges.get(self._fqn, InputRange()) for observer in self._observers.values()]
        if not all(one.num_tokens for one in seen):
            raise UnsupportedModelError(
                f"block {block!r} put nothing into its KV cache, so {self._fqn!r} gets no scales; leave out "
                "static_kv_dtype"
            )
        return seen[0], seen[1]
