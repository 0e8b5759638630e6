#!/usr/bin/env bash
# Everything a change must pass: lint, format, types, tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
