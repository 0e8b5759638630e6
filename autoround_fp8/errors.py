"""Errors a user can meet. Each message names the thing, its value and the way out.

Everything raised on purpose derives from `AutoRoundError`, so that the CLI can turn it into one sentence and an exit
code.
"""

import textwrap


class AutoRoundError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(AutoRoundError, ValueError):
    """An option, argument or scheme is wrong or not supported."""


class DataError(AutoRoundError, ValueError):
    """The calibration or evaluation data cannot be used."""


class CheckpointError(AutoRoundError, ValueError):
    """A checkpoint on disk is missing, damaged, inconsistent or cannot be written."""


class UnsupportedModelError(AutoRoundError, NotImplementedError):
    """The model's architecture cannot be handled; the message says which part and why."""


class NumericsError(AutoRoundError, ArithmeticError):
    """A NaN or infinity appeared in weights, activations or scales."""


def cause_line(error: BaseException) -> str:
    """Class and first line of another library's error, to end a message of ours with."""
    line = textwrap.shorten(str(error).strip().partition("\n")[0], 240, placeholder=" ...")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
