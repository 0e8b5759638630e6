"""`autoround-fp8-lm-eval`: lm-eval's own command line, with the model `autoround_fp8` known to it.

Arguments are lm-eval's, unchanged: `autoround-fp8-lm-eval run --model autoround_fp8 --model_args pretrained=DIR ...`.
"""

from __future__ import annotations

import logging
import sys

from autoround_fp8.errors import AutoRoundError, ConfigError
from autoround_fp8.evaluation.lm_eval_registration import register_lm_eval_backend, require_lm_eval


def main() -> int:
    """Runs lm-eval on the process's arguments.

    Returns:
        Exit code: 0, or 2 (usage) or 1 (failure) after one sentence on stderr.
    """
    try:
        require_lm_eval()
        if not register_lm_eval_backend():
            raise ConfigError("lm_eval is installed but cannot be imported; 'python -c \"import lm_eval\"' shows why")
        from lm_eval.__main__ import cli_evaluate

        _show_messages()
        cli_evaluate()
    except AutoRoundError as e:
        print(f"autoround-fp8-lm-eval: error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    return 0


def _show_messages() -> None:
    # lm-eval configures its own logger only; what is really evaluated is said by this package's.
    package_logger = logging.getLogger("autoround_fp8")
    if not package_logger.handlers:
        package_logger.addHandler(logging.StreamHandler())
    package_logger.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
