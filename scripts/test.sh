#!/usr/bin/env bash
# Runs the test suite in .venv, which is made if missing. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python -m pytest "$@"
