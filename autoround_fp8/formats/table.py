"""The formats, as a literal table. A new format is one file and one line here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import CheckpointFormat, ParsedQuantization
from autoround_fp8.formats.compressed_tensors import CompressedTensorsFormat
from autoround_fp8.formats.fake import FakeFormat
from autoround_fp8.formats.fp8 import Fp8Format
from autoround_fp8.formats.fp8_static import Fp8StaticFormat
from autoround_fp8.schemes import QuantizationScheme, preset_name_to_scheme

logger = logging.getLogger(__name__)

FORMATS: tuple[CheckpointFormat, ...] = (Fp8StaticFormat(), CompressedTensorsFormat(), Fp8Format(), FakeFormat())


def get_format(name: str) -> CheckpointFormat:
    """The format with this name or alias, in any case.

    Raises:
        ConfigError: If there is none.
    """
    wanted = name.strip().lower()
    for candidate in FORMATS:
        if wanted == candidate.name or wanted in candidate.aliases:
            return candidate
    known = ", ".join(f.name + (f" (= {', '.join(f.aliases[:2])})" if f.aliases else "") for f in FORMATS)
    raise ConfigError(f"format {name!r} is not supported; choose from {known}")


def get_formats(names: str) -> tuple[CheckpointFormat, ...]:
    """The formats of a comma list, each once.

    Raises:
        ConfigError: If one does not exist, or none is named.
    """
    return tuple({f.name: f for f in map(get_format, names.split(","))}.values())


def normalized_formats(names: str) -> str:
    """A comma list of formats with every name in its first form.

    Raises:
        ConfigError: As `get_formats`.
    """
    return ",".join(f.name for f in get_formats(names))


def default_scheme(formats: Sequence[CheckpointFormat]) -> QuantizationScheme:
    """The scheme where the user asked for none: the finest static one that all formats hold."""
    without = [f.name for f in formats if not f.has_channel_scales]
    if not without:
        return preset_name_to_scheme("FP8_STATIC")
    logger.info("scheme FP8_STATIC_TENSOR: format %s holds one weight scale per matrix", ", ".join(without))
    return preset_name_to_scheme("FP8_STATIC_TENSOR")


def parse_quantization(block: Mapping[str, Any]) -> tuple[CheckpointFormat, ParsedQuantization]:
    """Finds the format a config.json block belongs to, and what it says.

    Raises:
        CheckpointError: If no format here reads it, naming the method.
    """
    for candidate in FORMATS:
        parsed = candidate.parse(block)
        if parsed is not None:
            return candidate, parsed
    raise CheckpointError(
        f"quantization_config has quant_method {block.get('quant_method')!r} (packing_format "
        f"{block.get('packing_format')!r}); this package loads {', '.join(f.name for f in FORMATS)}"
    )
