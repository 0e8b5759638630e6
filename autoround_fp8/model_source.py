"""The model to quantise, opened: a folder, a hub id, or a transformers model in memory; and its tokenizer."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoround_fp8.checkpoint.locate import locate_checkpoint
from autoround_fp8.checkpoint.reader import CheckpointReader, InMemorySource, TensorSource
from autoround_fp8.checkpoint.source_format import open_source
from autoround_fp8.errors import ConfigError
from autoround_fp8.export import collect_side_files
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.models.linear_experts import LinearExperts
from autoround_fp8.models.loaded_model import loaded_tensors
from autoround_fp8.models.skeleton import build_model, decoded, load_config, source_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model to quantise, wherever it comes from.

    Attributes:
        name: What the user called it.
        folder: Its folder, or None for a model in memory.
        tensors: Its weights.
        raw_config: Its config.json.
        config: Its transformers config, without quantization_config.
        side_files: Files to copy into the export.
    """

    name: str
    folder: Path | None
    tensors: TensorSource
    raw_config: Mapping[str, Any]
    config: Any
    side_files: Mapping[str, Path | bytes]


def open_model(model: Any, tokenizer: Any = None, *, trust_remote_code: bool = False) -> ModelSource:
    """Opens a model by path, hub id, or as an object in memory.

    Args:
        model: Folder, hub id, or a transformers model with its weights in memory.
        tokenizer: Tokenizer to save beside a model in memory.
        trust_remote_code: Whether code from the model's folder may run.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ConfigError: If `model` is neither a path nor a model, or a model that this package made.
    """
    if isinstance(model, (str, Path)):
        folder = locate_checkpoint(model)
        raw_config, config = load_config(folder, trust_remote_code=trust_remote_code)
        return ModelSource(
            name=str(model),
            folder=folder,
            tensors=open_source(CheckpointReader(folder), raw_config, source_dtype(raw_config)),
            raw_config=raw_config,
            config=config,
            side_files=collect_side_files(folder, trust_remote_code=trust_remote_code),
        )
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ConfigError(f"model must be a folder, a hub id or a transformers model, got {type(model).__name__}")
    return _open_in_memory(model, tokenizer)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model's folder, or None if there is none.

    Raises:
        ConfigError: If there is one and it cannot be loaded.
    """
    if source.folder is None:
        return None
    names = {path.name for path in source.folder.iterdir()}
    if not names & {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model"}:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as e:
        raise ConfigError(f"the tokenizer of {source.name!r} cannot be loaded: {e}") from e


def _open_in_memory(model: Any, tokenizer: Any) -> ModelSource:
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts | WeightFP8ActFP8StaticQuantLinear):
            raise ConfigError(
                f"the model was loaded or quantised by autoround_fp8 ({name!r} is a {type(module).__name__}) and "
                "cannot be quantised again; give the original model or its folder"
            )
    raw_config = json.loads(model.config.to_json_string(use_diff=True))
    raw_config["architectures"] = [type(model).__name__]
    raw_config["dtype"] = str(model.dtype).removeprefix("torch.")
    config = type(model.config).from_dict({k: decoded(v) for k, v in raw_config.items() if k != "quantization_config"})
    tensors = loaded_tensors(model, build_model(config, model.dtype))
    files: dict[str, Path | bytes] = {}
    if getattr(model, "generation_config", None) is not None:
        # Written as it is: saving through transformers refuses settings that the model's authors shipped.
        files["generation_config.json"] = (model.generation_config.to_json_string() + "\n").encode()
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files.update({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()})
    else:
        logger.info("no tokenizer was given with the model in memory, so none is exported")
    return ModelSource(
        name=getattr(model, "name_or_path", "") or type(model).__name__,
        folder=None,
        tensors=open_source(InMemorySource(tensors), raw_config, source_dtype(raw_config)),
        raw_config=raw_config,
        config=config,
        side_files=files,
    )
