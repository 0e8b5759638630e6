"""Makes lm-eval know the model name `autoround_fp8`, as a lazy entry of its registry.

Importing this file imports nothing heavy. Read `lm_eval_backend.py` for the model class itself.
"""

from __future__ import annotations

import importlib.metadata
import logging

from packaging.version import InvalidVersion, Version

from autoround_fp8.errors import ConfigError

logger = logging.getLogger(__name__)

MODEL_NAME = "autoround_fp8"
# 0.4.12 is the first release with both the lazy registry and TaskManager.load; 0.4.13 is the tested one.
SUPPORTED_RANGE = "lm-eval>=0.4.12,<0.5"
_OLDEST, _NEXT = Version("0.4.12"), Version("0.5")
_TARGET = "autoround_fp8.evaluation.lm_eval_backend:AutoRoundFP8LM"


def require_lm_eval() -> None:
    """Checks, from the installed metadata alone, that lm-eval is there and of a version this package knows.

    Raises:
        ConfigError: Naming the version found and the range that works. A newer one than tested is only a warning.
    """
    version = _installed_version()
    if version is None:
        raise ConfigError(
            f"evaluation needs the package lm_eval, which is not installed: pip install '{SUPPORTED_RANGE}'"
        )
    if version < _OLDEST:
        raise ConfigError(f"lm_eval {version} is too old for this package: pip install '{SUPPORTED_RANGE}'")
    if version >= _NEXT:
        logger.warning("lm_eval %s is newer than what this package was tested with (%s)", version, SUPPORTED_RANGE)


def register_lm_eval_backend() -> bool:
    """Adds `autoround_fp8` to lm-eval's models; harmless if called again, or if lm-eval is missing or too old.

    Returns:
        Whether lm-eval knows the name now.
    """
    version = _installed_version()
    if version is None or version < _OLDEST:
        return False
    try:
        # lm-eval fills its registry with its own lazy entries only while it is empty, so those have to come first.
        # This imports neither torch nor transformers.
        import lm_eval.models  # noqa: F401
        from lm_eval.api.registry import model_registry
    except ImportError as e:
        logger.debug("lm_eval %s cannot be imported: %s", version, e)
        return False
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=_TARGET)
    return True


def _installed_version() -> Version | None:
    try:
        return Version(importlib.metadata.version("lm_eval"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None
