"""From quantised layers to a finished folder: the sink the compressor writes to, config.json, and the side files.

Knows files, not models; `checkpoint/writer.py` does the writing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoround_fp8.checkpoint.writer import CONFIG_FILE, REPORT_FILE, CheckpointWriter
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.kv_cache import encode_cache_scales
from autoround_fp8.model_card import CARD_FILE, SOURCE_CARD_FILE
from autoround_fp8.plan import PlannedExport
from autoround_fp8.records import CacheScales, QuantizedLinear

logger = logging.getLogger(__name__)

QUANT_CONFIG_FILE = "quantization_config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt", ".onnx")
_NOT_COPIED = (CONFIG_FILE, REPORT_FILE, QUANT_CONFIG_FILE)


class FormatSink:
    """Encodes each layer as every export has it and puts it there at once."""

    def __init__(self, *targets: tuple[CheckpointWriter, PlannedExport]):
        self._targets = targets

    def put(self, linear: QuantizedLinear) -> None:
        """Writes the tensors of one layer."""
        for writer, export in self._targets:
            named = replace(linear, fqn=export.name_of(linear.fqn))
            dtype = writer.planned_dtype(f"{named.fqn}.weight")
            for name, tensor in export.format.encode(named, dtype).items():
                writer.write(name, tensor)

    def put_cache_scales(self, scales: CacheScales) -> None:
        """Writes the KV-cache scales of one block."""
        for writer, _ in self._targets:
            for name, tensor in encode_cache_scales(scales).items():
                writer.write(name, tensor)


class MemorySink:
    """Keeps the layers; they are a quarter to half the size of the model they came from."""

    def __init__(self) -> None:
        self.layers: dict[str, QuantizedLinear] = {}
        self.cache_scales: list[CacheScales] = []

    def put(self, linear: QuantizedLinear) -> None:
        """Keeps one layer."""
        self.layers[linear.fqn] = linear

    def put_cache_scales(self, scales: CacheScales) -> None:
        """Keeps the KV-cache scales of one block."""
        self.cache_scales.append(scales)


def exported_config(raw_config: Mapping[str, Any], block: Mapping[str, Any] | None) -> dict[str, Any]:
    """The source's config.json with this quantization_config, or none, in place of an old one; nothing else changes."""
    kept = {k: v for k, v in raw_config.items() if k != "quantization_config"}
    text_config = kept.get("text_config")
    if isinstance(text_config, Mapping):
        kept["text_config"] = {k: v for k, v in text_config.items() if k != "quantization_config"}
    return kept if block is None else {**kept, "quantization_config": block}


def collect_side_files(folder: Path, *, trust_remote_code: bool) -> dict[str, Path | bytes]:
    """The files of a checkpoint folder to copy byte for byte: tokenizer, generation config, chat template, licence ...

    The export has a README.md of its own; the folder's becomes `SOURCE_CARD_FILE`.
    Weights, indexes, config.json and files of an earlier quantisation are left out; Python files come along only when
    their code is trusted.

    Raises:
        CheckpointError: If a file is not readable.
    """
    files: dict[str, Path | bytes] = {}
    skipped = []
    has_card = (folder / CARD_FILE).is_file()
    for path in sorted(folder.iterdir()):
        name = path.name
        if not path.is_file() or name.startswith("."):
            if path.is_dir() and not name.startswith("."):
                skipped.append(name + "/")
            continue
        if name.endswith(_WEIGHT_SUFFIXES) or name.endswith(".index.json") or name in _NOT_COPIED:
            continue
        if (name.endswith(".py") and not trust_remote_code) or (name == SOURCE_CARD_FILE and has_card):
            skipped.append(name)
            continue
        try:
            path.open("rb").close()
        except OSError as e:
            raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
        files[SOURCE_CARD_FILE if name == CARD_FILE else name] = path
    if skipped:
        logger.info("not copied from the source folder: %s", ", ".join(skipped))
    return files


def quantization_config_file(block: Mapping[str, Any]) -> bytes:
    """Contents of quantization_config.json, which Intel's loader also reads."""
    return (json.dumps(block, indent=2, ensure_ascii=False) + "\n").encode()
