"""Logits of a causal model in pieces: the decoder once per batch, the output layer a few tokens at a time.

With a vocabulary of 262 000 entries the logits of one sequence fill gigabytes, its last hidden states a few megabytes.
So the states are kept and the logits made when they are needed. Read `compare.py` for the use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.models.patches import swapped_forwards
from autoround_fp8.models.skeleton import find_blocks


class LogitStream:
    """One model, split at the output of its decoder.

    The model's own forward does both parts, so that scalings and soft caps of its logits are all in.

    Args:
        model: A transformers causal language model in eval mode.

    Raises:
        UnsupportedModelError: If its decoder blocks cannot be found.
    """

    def __init__(self, model: Any):
        self._model = model
        self._container = find_blocks(model, model.config)[0].rpartition(".")[0]
        # The module that runs the blocks, and usually a last norm: what it returns goes into the output layer.
        self._decoder = model.get_submodule(self._container.rpartition(".")[0])
        self._output_type: Any = None
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(model.config.get_text_config(decoder=True).hidden_size)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """Module name -> decoder block, in order; none once they are released."""
        blocks: Any = self._model.get_submodule(self._container)
        return {f"{self._container}.{index}": block for index, block in enumerate(blocks)}

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Runs the decoder.

        Args:
            tokens: `[batch, tokens]`, on any device, without padding.

        Returns:
            Its output `[batch, tokens, hidden]` in the model's dtype, on the model's device.
        """
        seen: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: Any, output: Any) -> Any:
            seen.append(output[0])
            self._output_type = type(output)
            # One position is enough to go on with: the logits of this pass are thrown away.
            return self._decoder_output(output[0][:, :1])

        handle = self._decoder.register_forward_hook(keep)
        try:
            self._model(input_ids=tokens.to(self._model.device), use_cache=False)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0].shape[:2] != tokens.shape:
            raise UnsupportedModelError(
                f"cannot split {type(self._model).__name__} at its output layer: the decoder of {self._container!r} "
                f"ran {len(seen)} times in one forward"
            )
        return seen[0]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the output layer on decoder outputs `[tokens, hidden]`; returns float32 `[tokens, vocab]`."""
        output = self._decoder_output(hidden.to(self._model.device).unsqueeze(0))
        dummy = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self._model.device)
        with swapped_forwards({self._decoder: lambda *args, **kwargs: output}):
            return self._model(input_ids=dummy, use_cache=False).logits[0].float()

    def release_blocks(self) -> None:
        """Drops the decoder blocks, when only `logits` is still needed: nearly all of the model's memory."""
        self._model.set_submodule(self._container, nn.ModuleList())

    def _decoder_output(self, hidden: torch.Tensor) -> Any:
        if issubclass(self._output_type, tuple):
            return (hidden,)
        return self._output_type(last_hidden_state=hidden)
