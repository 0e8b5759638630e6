"""Finds the attention module of each decoder block, and whether it has a KV cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autoround_fp8.errors import UnsupportedModelError
from autoround_fp8.models.skeleton import Skeleton

# transformers' `layer_types` of blocks that cache keys and values and nothing else.
_CACHING_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def cached_attentions(skeleton: Skeleton) -> tuple[str, ...]:
    """The checkpoint name of each block's attention (`model.layers.0.self_attn`), in order.

    Raises:
        UnsupportedModelError: If the model's cache is not one of keys and values per block, or an attention module
            cannot be told, naming the block.
    """
    config = skeleton.model.config
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} has latent attention, which caches neither keys nor values; engines "
            "drop every KV-cache scale of it, so leave out static_kv_dtype"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"the last {config.num_kv_shared_layers} blocks of model_type {config.model_type!r} use the KV cache of "
            "others and have none of their own; leave out static_kv_dtype"
        )
    types = getattr(config, "layer_types", None) or ()
    for name, layer_type in zip(skeleton.block_names, types, strict=False):
        if layer_type not in _CACHING_TYPES:
            raise UnsupportedModelError(
                f"block {name!r} is of type {layer_type!r}, which has no cache of keys and values alone; leave out "
                "static_kv_dtype"
            )
    return tuple(
        _checkpoint_name(_attention_in(block, name), skeleton.sources)
        for name, block in zip(skeleton.block_names, skeleton.blocks, strict=True)
    )


def _attention_in(block: Any, name: str) -> str:
    """The module that holds linears and knows its block's number, which it needs to address the cache."""
    found = [
        f"{name}.{inner}"
        for inner, module in block.named_modules()
        if inner and hasattr(module, "layer_idx") and any(isinstance(child, nn.Linear) for child in module.children())
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"block {name!r} has {len(found)} modules that may be its attention{': ' if found else ''}"
            f"{', '.join(found)}; KV-cache scales need exactly one, so leave out static_kv_dtype"
        )
    return found[0]


def _checkpoint_name(module: str, sources: Mapping[str, str]) -> str:
    for parameter, tensor in sources.items():
        if parameter.startswith(f"{module}."):
            tail = parameter.removeprefix(module)
            if tensor.endswith(tail):
                return tensor.removesuffix(tail)
    raise UnsupportedModelError(f"no tensor of the checkpoint says how it calls {module!r}; leave out static_kv_dtype")
