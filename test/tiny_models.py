"""Tiny random models and a tiny tokenizer, saved as ordinary Hugging Face folders; built in well under a second.

Every test that needs a checkpoint starts from `save_tiny_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 128
PAD, BOS, EOS, UNK = 0, 1, 2, 3

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}

# Documents of the local lm-eval tasks.
EVALUATION_TEXTS = (
    "Rivers carve valleys over many years.",
    "A loaf needs flour, water, salt and time.",
    "Sixteen ships left port.",
)

# family -> what differs from _COMMON; the key is transformers' model_type.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "opt": {
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "intermediate_size": None,
        "num_key_value_heads": None,
        "head_dim": None,
    },
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers config of a tiny model; overrides of None remove a field."""
    fields = {**_COMMON, **FAMILIES[family], **overrides}
    return AutoConfig.for_model(family, **{k: v for k, v in fields.items() if v is not None})


def tiny_model(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Any:
    """A tiny random model in memory, in eval mode, with norms and biases that are not all one or zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)  # the default init is so small that every block is nearly the identity
            if "pad" in name:
                parameter.zero_()
    return model


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A character tokenizer with `VOCAB_SIZE` entries (printable ASCII); each text starts with BOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": UNK}
    vocab |= {chr(c): 4 + i for i, c in enumerate(range(33, 127))}
    vocab |= {f"w{i}": i for i in range(len(vocab), VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_model(
    folder: Path, family: str = "qwen3", *, with_tokenizer: bool = True, max_shard_size: str = "5GB", **kwargs: Any
) -> Path:
    """Saves a tiny model (arguments as of `tiny_model`) and its tokenizer; returns the folder."""
    tiny_model(family, **kwargs).save_pretrained(folder, max_shard_size=max_shard_size)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder
