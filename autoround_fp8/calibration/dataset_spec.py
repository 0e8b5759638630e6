"""The `--dataset` text: which data sets to read, how much of each, and how.

`a.jsonl:num=256,mbpp:num=128:split=train:concat` is parsed here; nothing is opened. Read `dataset.py` for what follows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from autoround_fp8.errors import ConfigError

_FLAGS = ("concat", "apply_chat_template")
_VALUES = ("num", "split", "config", "system_prompt")
_OPTIONS_HELP = "num=<count>, split=<name>, config=<name>, concat, apply_chat_template, system_prompt=<text>"
# A quote opens only right after "=": an apostrophe inside an unquoted prompt is just a character.
_QUOTED = r"""=(?:"[^"]*"|'[^']*')"""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One data set of the `--dataset` option.

    Attributes:
        name: `builtin`, a file or folder, or a hub name.
        num: Samples to take from it; None = an even share of what the others leave.
        split: Split of a hub data set.
        config: Configuration of a hub data set that has several.
        concat: Join all records into one stream of tokens and cut that, instead of starting samples at record starts.
        apply_chat_template: Wrap each plain text as a user message.
        system_prompt: System message of conversations that have none; implies `apply_chat_template`.
    """

    name: str
    num: int | None = None
    split: str | None = None
    config: str | None = None
    concat: bool = False
    apply_chat_template: bool = False
    system_prompt: str | None = None


def parse_dataset_spec(text: str) -> tuple[DatasetSpec, ...]:
    """Parses a comma list of `name_or_path[:option...]`.

    A value that contains a comma or a colon is quoted: `a.json:system_prompt="Be brief, please"`. Text that is the path
    of an existing file is taken as that path.

    Raises:
        ConfigError: On an empty entry, an unknown option or a bad value.
    """
    if os.path.exists(text):
        return (DatasetSpec(name=text),)
    return tuple(_parse_entry(entry, text) for entry in _split(text, ","))


def assign_shares(specs: tuple[DatasetSpec, ...], nsamples: int) -> list[int]:
    """How many samples each data set gives: its `num`, or an even share of what the numbered ones leave.

    Args:
        specs: The data sets.
        nsamples: Samples asked for in all; only used for data sets without `num`.

    Returns:
        One count per data set, each at least 1.

    Raises:
        ConfigError: If nothing is left for a data set without `num`.
    """
    unnumbered = [spec for spec in specs if spec.num is None]
    left = nsamples - sum(spec.num for spec in specs if spec.num is not None)
    if len(unnumbered) > max(left, 0):
        raise ConfigError(
            f"nsamples ({nsamples}) leaves {max(left, 0)} samples for {len(unnumbered)} data sets without num= "
            f"({', '.join(spec.name for spec in unnumbered)}); raise --nsamples or give each a num="
        )
    shares, position = [], 0
    for spec in specs:
        if spec.num is not None:
            shares.append(spec.num)
        else:
            shares.append(left // len(unnumbered) + (position < left % len(unnumbered)))
            position += 1
    return shares


def _split(text: str, separator: str) -> list[str]:
    """Splits at a separator, except inside quotes that follow an equals sign."""
    parts = [""]
    for token in re.findall(rf"{_QUOTED}|.", text, flags=re.DOTALL):
        if token == separator:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _parse_entry(entry: str, text: str) -> DatasetSpec:
    name, *options = (part.strip() for part in _split(entry, ":"))
    if not name:
        raise ConfigError(f"dataset {text!r} has an entry without a name; write name_or_path[:option...],...")
    spec: dict[str, str | int | bool] = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if key in _FLAGS:
            spec[key] = _parse_flag(key, value if equals else "true", entry)
        elif key not in _VALUES:
            raise ConfigError(
                f"unknown option {key!r} of data set {name!r}; choose from {_OPTIONS_HELP} "
                f"(quote a value with commas or colons)"
            )
        elif not value:
            raise ConfigError(f"option {key} of data set {name!r} needs a value; known options: {_OPTIONS_HELP}")
        else:
            spec[key] = _parse_count(value, name) if key == "num" else value
    return DatasetSpec(name=name, **spec)  # type: ignore[arg-type]


def _parse_flag(key: str, value: str, entry: str) -> bool:
    if value.lower() not in ("true", "1", "false", "0"):
        raise ConfigError(f"option {key} of data set entry {entry!r} is a switch; {value!r} is neither true nor false")
    return value.lower() in ("true", "1")


def _parse_count(value: str, name: str) -> int:
    if not re.fullmatch(r"\d+", value) or int(value) < 1:
        raise ConfigError(f"num ({value!r}) of data set {name!r} must be a whole number of samples, at least 1")
    return int(value)
