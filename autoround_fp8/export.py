"""From quantised layers to a finished folder: the sink the compressor writes to, config.json, and the side files.

Knows files, not models; `checkpoint/writer.py` does the writing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoround_fp8.checkpoint.writer import CONFIG_FILE, REPORT_FILE, CheckpointWriter
from autoround_fp8.errors import CheckpointError
from autoround_fp8.formats.base import CheckpointFormat
from autoround_fp8.plan import QuantizationPlan, block_prefixes
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme

logger = logging.getLogger(__name__)

QUANT_CONFIG_FILE = "quantization_config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt", ".onnx")
_NOT_COPIED = (CONFIG_FILE, REPORT_FILE, QUANT_CONFIG_FILE)


class FormatSink:
    """Encodes each layer by a format and puts it into the writer at once."""

    def __init__(self, writer: CheckpointWriter, checkpoint_format: CheckpointFormat):
        self._writer = writer
        self._format = checkpoint_format

    def put(self, linear: QuantizedLinear) -> None:
        """Writes the tensors of one layer."""
        for name, tensor in self._format.encode(linear).items():
            self._writer.write(name, tensor)


class MemorySink:
    """Keeps the layers; they are a quarter to half the size of the model they came from."""

    def __init__(self) -> None:
        self.layers: dict[str, QuantizedLinear] = {}

    def put(self, linear: QuantizedLinear) -> None:
        """Keeps one layer."""
        self.layers[linear.fqn] = linear


def exported_config(
    raw_config: Mapping[str, Any],
    plan: QuantizationPlan,
    checkpoint_format: CheckpointFormat,
    scheme: QuantizationScheme,
) -> dict[str, Any]:
    """The source's config.json plus the new quantization_config, in place of an old one; nothing else changes."""
    prefixes = block_prefixes(plan.skeleton, plan.blocks)
    block = checkpoint_format.quantization_config(scheme, plan.exceptions, prefixes)
    kept = {k: v for k, v in raw_config.items() if k != "quantization_config"}
    text_config = kept.get("text_config")
    if isinstance(text_config, Mapping):
        kept["text_config"] = {k: v for k, v in text_config.items() if k != "quantization_config"}
    return {**kept, "quantization_config": block}


def collect_side_files(folder: Path, *, trust_remote_code: bool) -> dict[str, Path | bytes]:
    """The files of a checkpoint folder to copy byte for byte: tokenizer, generation config, chat template, licence ...

    Weights, indexes, config.json and files of an earlier quantisation are left out; Python files come along only when
    their code is trusted.

    Raises:
        CheckpointError: If a file is not readable.
    """
    files: dict[str, Path | bytes] = {}
    skipped = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if not path.is_file() or name.startswith("."):
            if path.is_dir() and not name.startswith("."):
                skipped.append(name + "/")
            continue
        if name.endswith(_WEIGHT_SUFFIXES) or name.endswith(".index.json") or name in _NOT_COPIED:
            continue
        if name.endswith(".py") and not trust_remote_code:
            skipped.append(name)
            continue
        try:
            path.open("rb").close()
        except OSError as e:
            raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
        files[name] = path
    if skipped:
        logger.info("not copied from the source folder: %s", ", ".join(skipped))
    return files


def quantization_config_file(config: Mapping[str, Any]) -> bytes:
    """Contents of quantization_config.json, which Intel's loader also reads."""
    return (json.dumps(config["quantization_config"], indent=2, ensure_ascii=False) + "\n").encode()
