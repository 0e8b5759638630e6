"""The formats, as a literal table. A new format is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.formats.base import CheckpointFormat, ParsedQuantization
from autoround_fp8.formats.fp8_static import Fp8StaticFormat

FORMATS: tuple[CheckpointFormat, ...] = (Fp8StaticFormat(),)


def get_format(name: str) -> CheckpointFormat:
    """The format with this name or alias, in any case.

    Raises:
        ConfigError: If there is none.
    """
    wanted = name.strip().lower()
    for candidate in FORMATS:
        if wanted == candidate.name or wanted in candidate.aliases:
            return candidate
    known = ", ".join(f"{f.name} (= {', '.join(f.aliases[:2])})" for f in FORMATS)
    raise ConfigError(f"format {name!r} is not supported; choose from {known}")


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
