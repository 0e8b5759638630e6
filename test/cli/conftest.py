"""The command line configures logging; after each test it is as before."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    loggers = logging.getLogger("autoround_fp8"), logging.getLogger("transformers")
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    with warnings.catch_warnings():
        yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
