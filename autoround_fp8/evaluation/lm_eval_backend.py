"""The lm-eval model `autoround_fp8`: lm-eval's Hugging Face model, loaded and fed by this package's rules.

Plain and quantised checkpoints go through the same class, so that their scores differ by the weights only. Importing
this file needs lm-eval; `lm_eval_registration.py` does not, and `tasks.py` runs it.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import nn

from autoround_fp8.checkpoint.locate import locate_checkpoint
from autoround_fp8.device import resolve_device
from autoround_fp8.errors import ConfigError
from autoround_fp8.inference.load import load_model
from autoround_fp8.models.skeleton import load_config
from autoround_fp8.numerics.fp8 import FP8_DTYPE

logger = logging.getLogger(__name__)

# What HFLM takes and means the same here; everything else would be ignored or would load another model.
_HFLM_ARGUMENTS = (
    "truncation",
    "logits_cache",
    "softmax_dtype",
    "mixed_precision_dtype",
    "max_batch_size",
    "use_fast_tokenizer",
    "prefix_token_id",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)
_POSITION_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
# Tokenizers without a limit report about 1e30.
_NO_LIMIT = 10**9
_DEFAULT_MAX_LENGTH = 2048
_CPU_BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class BosRule:
    """Whether prompts start with BOS, and who puts it there.

    Attributes:
        prepend: This package has to add it, because the tokenizer does not.
        reason: One clause for the log.
    """

    prepend: bool
    reason: str


def bos_rule(model_type: str, tokenizer: Any, add_bos_token: bool | None = None) -> BosRule:
    """Decides on BOS from the model type and the tokenizer, never from a path.

    Gemma models score near zero without BOS, whatever folder they lie in and whatever the tokenizer's settings are.

    Args:
        model_type: `model_type` of the model's config.
        tokenizer: Its tokenizer.
        add_bos_token: What the user asked for; None = decide.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return BosRule(prepend=False, reason="the tokenizer has no BOS token")
    if add_bos_token is False:
        return BosRule(prepend=False, reason="add_bos_token=False was asked for")
    adds_itself = tokenizer("a")["input_ids"][:1] == [bos]
    if add_bos_token:
        return BosRule(prepend=not adds_itself, reason="add_bos_token=True was asked for")
    if "gemma" in model_type:
        return BosRule(prepend=not adds_itself, reason=f"model_type {model_type!r} needs BOS")
    if adds_itself:
        return BosRule(prepend=False, reason="the tokenizer adds BOS by itself")
    return BosRule(prepend=False, reason="the tokenizer does not add BOS")


def describe_linears(model: nn.Module) -> str:
    """Which classes of linear layers a model really has: `14 x WeightFP8ActFP8StaticQuantLinear (FP8), 1 x Linear`."""
    counts: Counter[str] = Counter()
    num_fp8 = 0
    for module in model.modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.dtype == FP8_DTYPE for tensor in tensors):
            counts[f"{type(module).__name__} (FP8)"] += 1
            num_fp8 += 1
        elif isinstance(module, nn.Linear):
            counts[type(module).__name__] += 1
    text = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    return text if num_fp8 else f"{text}; none of them is FP8"


class AutoRoundFP8LM(HFLM):
    """lm-eval model over `load_model`: `simple_evaluate(model="autoround_fp8", model_args="pretrained=DIR")`.

    Args:
        pretrained: Checkpoint folder or hub id, quantised by this package or plain; or a model in memory.
        tokenizer: Tokenizer, or a folder that has it; by default the checkpoint's.
        device: cpu, cuda, a GPU number or auto; None = auto.
        dtype: dtype of everything that is not FP8; "auto" or None = the checkpoint's.
        kernel: Kernel of the FP8 layers: auto, reference, cpu ...
        batch_size: A number, or "auto" to try what fits (on a GPU).
        max_length: Longest context in tokens; None = what the model's config says.
        add_bos_token: True or False to overrule the BOS rule, see `bos_rule`.
        trust_remote_code: Whether code from the checkpoint's folder may run.
        options: Further arguments of HFLM, those in `_HFLM_ARGUMENTS`.

    Raises:
        ConfigError: If the device is not there, or an argument is not supported.
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        device: str | int | None = None,
        dtype: str | torch.dtype | None = "auto",
        kernel: str = "auto",
        batch_size: int | str | None = 1,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        trust_remote_code: bool | None = False,
        **options: Any,
    ):
        for name, value in options.items():
            if name not in _HFLM_ARGUMENTS:
                raise ConfigError(
                    f"model argument {name}={value!r} is not supported by the model 'autoround_fp8'; it takes "
                    "pretrained, tokenizer, device, dtype, kernel, batch_size, max_length, add_bos_token, "
                    f"trust_remote_code, {', '.join(_HFLM_ARGUMENTS)}"
                )
        self._kernel = kernel
        if isinstance(pretrained, nn.Module):
            target = next(pretrained.parameters()).device
        else:
            target = resolve_device(device)
            # Absolute: a relative path such as out/model would be looked up on the hub for its revision.
            pretrained = str(locate_checkpoint(str(pretrained)).resolve())
        super().__init__(
            pretrained,
            backend="causal",
            tokenizer=tokenizer,
            device=str(target),
            dtype=dtype,
            batch_size=_batch_size(batch_size, target),
            max_length=max_length,
            add_bos_token=add_bos_token,
            trust_remote_code=bool(trust_remote_code),
            **options,
        )
        self.bos_rule = bos_rule(_model_type(self.config), self.tokenizer, add_bos_token)
        first = self.tok_encode("a")[0]
        logger.info(
            "BOS rule: %s; prompts start with %r (token %d)",
            self.bos_rule.reason,
            self.tokenizer.decode([first]),
            first,
        )
        self.linears = describe_linears(self.model)
        logger.info("evaluating %s on %s with at most %d tokens of context", self.linears, self.device, self.max_length)

    @property
    def max_length(self) -> int:
        """Longest context in tokens: the user's, else the config's, else the tokenizer's if it is a real limit."""
        if self._max_length:
            return int(self._max_length)
        text_config = self.model.config.get_text_config(decoder=True)
        for field in _POSITION_FIELDS:
            value = getattr(text_config, field, None)
            if isinstance(value, int) and value > 0:
                return value
        limit = self.tokenizer.model_max_length
        return int(limit) if limit < _NO_LIMIT else _DEFAULT_MAX_LENGTH

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task names no number: lm-eval's 256, but never more than half the context."""
        return min(256, self.max_length // 2)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of one string, with BOS in front where the rule says so and the tokenizer does not."""
        tokens = super().tok_encode(string, add_special_tokens, **kwargs)
        if self._prepends_bos(add_special_tokens) and tokens[:1] != [self.tokenizer.bos_token_id]:
            tokens = [self.tokenizer.bos_token_id, *tokens]
        return tokens[-left_truncate_len:] if left_truncate_len else tokens

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask `[batch, tokens]` of prompts to continue, padded as lm-eval does."""
        if self._prepends_bos(None):
            bos = self.tokenizer.bos_token
            strings = [string if string.startswith(bos) else bos + string for string in strings]
        return super().tok_batch_encode(strings, *args, **kwargs)

    def _prepends_bos(self, add_special_tokens: bool | None) -> bool:
        return self.bos_rule.prepend and add_special_tokens is not False

    def _get_config(self, pretrained: str, *, trust_remote_code: bool = False, **_: Any) -> None:
        # Without its quantization_config, which HFLM would hand to transformers' own quantisers.
        _, self._config = load_config(Path(pretrained), trust_remote_code=trust_remote_code)

    def _create_model(
        self,
        pretrained: str,
        *,
        dtype: str | torch.dtype | None = None,
        trust_remote_code: bool | None = False,
        **_: Any,
    ) -> None:
        self._model = load_model(
            pretrained,
            device=self.device,
            dtype=None if dtype == "auto" else dtype,
            kernel=self._kernel,
            trust_remote_code=bool(trust_remote_code),
        )


def _batch_size(value: int | str | None, device: torch.device) -> int | str:
    word = str(1 if value is None else value).strip()
    if word.startswith("auto"):
        if device.type != "cpu":
            return word
        # There is nothing to run out of on a CPU but the host's memory, and then the process is killed.
        logger.warning("batch_size %r finds what fits into a GPU; on the CPU %d is used", word, _CPU_BATCH_SIZE)
        return _CPU_BATCH_SIZE
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"batch_size ({value!r}) must be a number of at least 1, or auto")
    return int(word)


def _model_type(config: Any) -> str:
    # A multimodal model names itself and its language model.
    return " ".join(dict.fromkeys((config.model_type, config.get_text_config(decoder=True).model_type))).lower()
