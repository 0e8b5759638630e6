"""`auto-round [quantize] | eval | compare | inspect | convert`: finds and runs the command, makes errors a sentence.

Exit codes: 0 done, 1 the work failed, 2 the command line is wrong, 129 ended by SIGHUP, 130 interrupted, 143 ended by
SIGTERM.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from autoround_fp8.errors import AutoRoundError, ConfigError
from autoround_fp8.version import __version__

COMMANDS = ("quantize", "eval", "compare", "inspect", "convert")

# Windows has no SIGHUP.
ENDING_SIGNALS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__)
# Signals that follow each other this fast are one request: a closing terminal sends SIGHUP twice.
REPEAT_SECONDS = 10.0


class EndedBySignalError(KeyboardInterrupt):
    """SIGTERM or SIGHUP came; a KeyboardInterrupt, so that libraries clean up as they do after Ctrl-C."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Parser(argparse.ArgumentParser):
    """argparse that names near matches of a mistyped option and never accepts abbreviations."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options here: the parser of the command knows which ones are near, the outer one does not."""
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            known = [option for action in self._actions for option in action.option_strings]
            words = [word.partition("=")[0] for word in message.removeprefix(prefix).split() if word.startswith("-")]
            for word in words:
                near = difflib.get_close_matches(word, known, n=1)
                message = f"unknown option {word}" + (f"; did you mean {near[0]}?" if near else "")
                break
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> Parser:
    """The whole command line."""
    from autoround_fp8.cli import convert, evaluate, inspect, quantize

    parser = Parser(
        prog="auto-round",
        description="W8A8-FP8 checkpoints of language models: quantise, evaluate, compare, inspect, convert.",
        epilog="'auto-round MODEL ...' is short for 'auto-round quantize MODEL ...'; "
        "'auto-round COMMAND --help' has the options.",
    )
    parser.add_argument("--version", action="version", version=f"autoround_fp8 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    quantize.add_quantize_parser(subparsers)
    evaluate.add_eval_parser(subparsers)
    evaluate.add_compare_parser(subparsers)
    inspect.add_inspect_parser(subparsers)
    convert.add_convert_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None, defaults: Sequence[str] = ()) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; by default the process's.
        defaults: Options put in front of the user's own, for recipes.

    Returns:
        The exit code.
    """
    from autoround_fp8.cli import convert, evaluate, inspect, quantize

    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in (*COMMANDS, "--version", "-h", "--help"):
        words = ["quantize", *words]
    if words[0] == "quantize":
        words[1:1] = defaults
    args = build_parser().parse_args(words)
    configure_logging(debug=getattr(args, "debug", False))
    run = {
        "quantize": quantize.run_quantize,
        "eval": evaluate.run_eval,
        "compare": evaluate.run_compare,
        "inspect": inspect.run_inspect,
        "convert": convert.run_convert,
    }[args.command]
    try:
        with ending_signals_raised():
            return run(args)
    except AutoRoundError as e:
        if getattr(args, "debug", False):
            raise
        print(f"auto-round: error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except EndedBySignalError as e:
        # After SIGHUP the terminal may be gone.
        with suppress(OSError):
            print(f"auto-round: interrupted by {e}", file=sys.stderr)
        return 128 + e.number
    except KeyboardInterrupt:
        print("auto-round: interrupted; nothing was left in the target folder", file=sys.stderr)
        return 130


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into `EndedBySignalError` inside a `with`; outside the main thread it does nothing.

    An ignored signal stays ignored, so that `nohup` works. Forked workers end by the signal as they would without this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, last, is_running = os.getpid(), -REPEAT_SECONDS, True

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        # A second exception would break off the removal of files that the first one started.
        if is_running and now - last >= REPEAT_SECONDS:
            last = now
            raise EndedBySignalError(number)

    previous = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    # None stands for a handler that was not set from Python and could not be restored.
    taken = {number: old for number, old in previous.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in taken:
            signal.signal(number, interrupt)
        yield
    finally:
        is_running = False
        for number, old in taken.items():
            signal.signal(number, old)


def configure_logging(*, debug: bool) -> None:
    """Sends this package's messages to stderr, and quietens the libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s" if debug else "%(message)s"))
    logger = logging.getLogger("autoround_fp8")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    if not debug:
        warnings.filterwarnings("ignore", category=FutureWarning)
        logging.getLogger("transformers").setLevel(logging.ERROR)


def main_best() -> int:
    """`auto-round-best`: the most calibration data."""
    return main(defaults=("--nsamples", "512"))


def main_light() -> int:
    """`auto-round-light`: little calibration data, for a first look."""
    return main(defaults=("--nsamples", "32", "--seqlen", "512"))


def main_rtn() -> int:
    """`auto-round-rtn`: round to nearest."""
    return main(defaults=("--algorithm", "rtn"))


def main_eval() -> int:
    """`auto-round-eval`: the same as `auto-round eval`."""
    return main(["eval", *sys.argv[1:]])
