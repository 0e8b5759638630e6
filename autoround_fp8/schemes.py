"""What "FP8_STATIC" means, and which scheme each layer gets.

`QuantizationScheme` carries AutoRound's field names and works as a dict too. `SchemeResolver` is the only place that
decides between `layer_config`, `ignore_layers` and the default. Read `compressor.py` for where the decision is used.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoround_fp8.errors import ConfigError
from autoround_fp8.numerics.granularity import PER_CHANNEL, PER_TENSOR, PER_TOKEN


@dataclass(kw_only=True)
class QuantizationScheme:
    """How one linear layer is quantised; attribute and dict-style access (`scheme["bits"]`).

    Attributes:
        bits: Weight bits: 8 (FP8), or 16 for a layer that stays as it is.
        group_size: -1 = one weight scale per output channel, 0 = one per tensor.
        sym: Symmetric weights; always True for FP8.
        data_type: "fp" for FP8 E4M3FN, "float" for 16 bit.
        act_bits: Input bits: 8, or 16.
        act_group_size: 0 = one input scale per tensor; -1 = one per token.
        act_sym: Symmetric inputs; always True for FP8.
        act_data_type: "fp" or "float".
        act_dynamic: False = input scales are calibrated and stored; True = each token gets its own when it comes.
    """

    bits: int = 8
    group_size: int = PER_CHANNEL
    sym: bool = True
    data_type: str = "fp"
    act_bits: int = 8
    act_group_size: int = PER_TENSOR
    act_sym: bool = True
    act_data_type: str = "fp"
    act_dynamic: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether the layer gets FP8 codes at all."""
        return self.bits < 16

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> QuantizationScheme:
        """Builds a scheme from AutoRound's field names.

        Raises:
            ConfigError: On a name that is not a field.
        """
        scheme = cls()
        for key, value in fields.items():
            try:
                scheme[key] = value
            except KeyError as e:
                raise ConfigError(
                    f"unknown scheme field {key!r} (value {value!r}); choose from {', '.join(scheme)}"
                ) from e
        return scheme

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict."""
        return dataclasses.asdict(self)

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.to_dict():
            raise KeyError(key)
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in self.to_dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def keys(self) -> Any:
        """Field names, as of a dict."""
        return self.to_dict().keys()

    def values(self) -> Any:
        """Field values, as of a dict."""
        return self.to_dict().values()

    def items(self) -> Any:
        """Name and value pairs, as of a dict."""
        return self.to_dict().items()

    def get(self, key: str, default: Any = None) -> Any:
        """The field's value, or `default` for a name that is no field."""
        return self.to_dict().get(key, default)


UNQUANTIZED = QuantizationScheme(bits=16, data_type="float", act_bits=16, act_data_type="float")

PRESETS: dict[str, QuantizationScheme] = {
    "FP8_STATIC": QuantizationScheme(),
    "FP8_STATIC_TENSOR": QuantizationScheme(group_size=PER_TENSOR),
    "FP8_DYNAMIC": QuantizationScheme(act_group_size=PER_TOKEN, act_dynamic=True),
}

# Accepted values per field for a quantised layer: what this package can really do.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bits": (8,),
    "group_size": (PER_CHANNEL, PER_TENSOR),
    "sym": (True,),
    "data_type": ("fp", "fp8"),
    "act_bits": (8,),
    "act_group_size": (PER_TENSOR, PER_TOKEN),
    "act_sym": (True,),
    "act_data_type": ("fp", "fp8"),
    "act_dynamic": (False, True),
}


def preset_name_to_scheme(name: str) -> QuantizationScheme:
    """The scheme of a preset, by name in any case; quotes around the name are tolerated.

    Raises:
        ConfigError: If there is no such preset.
    """
    key = name.strip().strip("'\"").upper()
    if key not in PRESETS:
        raise ConfigError(
            f"scheme {name!r} is not supported; this package writes W8A8 FP8: choose from {', '.join(PRESETS)}"
        )
    return dataclasses.replace(PRESETS[key])


def validate_scheme(scheme: QuantizationScheme, where: str = "scheme") -> None:
    """Checks that a scheme is one this package can produce.

    Args:
        scheme: The scheme; 16 bits for both weights and inputs means "leave the layer alone".
        where: What the scheme belongs to, for the message.

    Raises:
        ConfigError: Naming the field, its value and the accepted ones.
    """
    if scheme.bits == 16 and scheme.act_bits == 16:
        return
    for name, accepted in _SUPPORTED.items():
        if scheme[name] not in accepted or isinstance(scheme[name], bool) != isinstance(accepted[0], bool):
            raise ConfigError(
                f"{name} ({scheme[name]!r}) of {where} is not supported by W8A8 FP8; use "
                f"{' or '.join(repr(value) for value in accepted)}"
            )
    if scheme.act_dynamic != (scheme.act_group_size == PER_TOKEN):
        raise ConfigError(
            f"act_dynamic ({scheme.act_dynamic!r}) of {where} does not go with act_group_size "
            f"({scheme.act_group_size!r}): inputs have one stored scale (False, 0) or one per token (True, -1)"
        )


def parse_scheme(value: str | Mapping[str, Any] | QuantizationScheme) -> QuantizationScheme:
    """A validated scheme from a preset name, a dict of fields, or a scheme.

    Raises:
        ConfigError: On an unknown preset, an unknown field, or a scheme that is not supported.
    """
    if isinstance(value, str):
        scheme = preset_name_to_scheme(value)
    elif isinstance(value, QuantizationScheme):
        scheme = dataclasses.replace(value)
    elif isinstance(value, Mapping):
        scheme = QuantizationScheme.from_dict(value)
        if scheme.bits == 16 and value.get("act_bits", 16) == 16:
            scheme = dataclasses.replace(UNQUANTIZED)
    else:
        raise ConfigError(f"scheme must be a preset name, a dict or a QuantizationScheme, got {type(value).__name__}")
    validate_scheme(scheme)
    if scheme.is_quantized:  # "fp8" is another word for the same
        scheme = dataclasses.replace(scheme, data_type="fp", act_data_type="fp")
    return scheme


def parse_layer_config(value: str | Mapping[str, Any] | None) -> dict[str, QuantizationScheme]:
    """Reads `layer_config`: a mapping, JSON text, or the path of a JSON file; pattern -> preset name or scheme fields.

    Raises:
        ConfigError: On unreadable JSON or a bad scheme, naming the entry.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        text = value
        if not value.lstrip().startswith("{"):
            try:
                with open(value, encoding="utf-8") as file:
                    text = file.read()
            except (OSError, ValueError) as e:  # ValueError: not UTF-8, or no possible file name
                raise ConfigError(f"layer_config {value!r} is neither JSON text nor a readable file: {e}") from e
        try:
            value = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"layer_config is not valid JSON: {e}") from e
    if not isinstance(value, Mapping):
        raise ConfigError(f"layer_config must map layer names to schemes, got {type(value).__name__}")
    schemes = {}
    for pattern, entry in value.items():
        try:
            schemes[str(pattern)] = parse_scheme(entry)
        except ConfigError as e:
            raise ConfigError(f"layer_config entry {pattern!r}: {e}") from e
    return schemes


def matches_layer(pattern: str, fqn: str) -> bool:
    """Whether a user's pattern names a layer.

    A plain pattern matches whole path segments (`layers.1` is not `layers.10`, `k_proj` is every `k_proj`); `*` stands
    for any characters within a segment. A pattern that starts with `.*` or has other regular-expression characters is
    searched as a regular expression; one that starts with `re:` is matched from the start of the name.

    Raises:
        ConfigError: If the pattern is meant as a regular expression and is not one.
    """
    if not pattern.strip("."):
        return False
    if re.fullmatch(r"[\w.\-*]+", pattern) and not pattern.startswith(".*"):
        body = re.escape(pattern.strip(".")).replace(r"\*", r"[^.]*")
        return re.search(rf"(^|\.){body}(\.|$)", fqn) is not None
    try:
        if pattern.startswith("re:"):
            return re.match(pattern.removeprefix("re:"), fqn) is not None
        return re.search(pattern, fqn) is not None
    except re.error as e:
        raise ConfigError(f"layer pattern {pattern!r} is not a valid regular expression: {e}") from e


class SchemeResolver:
    """Decides the scheme of every layer, and remembers which patterns never matched.

    Order: `ignore_layers`, the last matching `layer_config` entry (exact names before patterns), the default.

    Args:
        default: Scheme of layers that nothing else names.
        layer_config: Pattern -> scheme, as `parse_layer_config` returns it.
        ignore_layers: Patterns of layers that stay in 16 bit.
    """

    def __init__(
        self,
        default: QuantizationScheme,
        layer_config: Mapping[str, QuantizationScheme] | None = None,
        ignore_layers: tuple[str, ...] = (),
    ):
        self.default = default
        self._layer_config = dict(layer_config or {})
        self._ignore_layers = ignore_layers
        self._used: set[str] = set()

    def resolve(
        self, fqn: str, default: QuantizationScheme | None = None, *, alias: str | None = None
    ) -> QuantizationScheme:
        """The scheme of a layer.

        Args:
            fqn: Its name in the source checkpoint, without `.weight`.
            default: Its scheme if nothing names it; None = the resolver's.
            alias: Its name in the model, where that differs; patterns may use either.
        """
        names = [fqn] if alias in (None, fqn) else [fqn, str(alias)]
        if any(self.is_ignored(name) for name in names):
            return UNQUANTIZED
        chosen = default or self.default
        for pattern, scheme in self._layer_config.items():
            if any(pattern == name or matches_layer(pattern, name) for name in names):
                self._used.add(pattern)
                chosen = scheme
        exact = [self._layer_config[name] for name in names if name in self._layer_config]
        return exact[0] if exact else chosen

    def is_ignored(self, fqn: str) -> bool:
        """Whether an `ignore_layers` pattern names this module."""
        hits = [pattern for pattern in self._ignore_layers if matches_layer(pattern, fqn)]
        self._used.update(hits)
        return bool(hits)

    def unused_patterns(self) -> list[str]:
        """Patterns that named no layer so far: most likely typing errors."""
        return [p for p in (*self._ignore_layers, *self._layer_config) if p not in self._used]
