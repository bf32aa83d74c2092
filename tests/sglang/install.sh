#!/usr/bin/env bash
# Usage: tests/sglang/install.sh [VENV]
#
# Makes the virtual environment in which the `sglang` tests run their server: SGLang 0.5.23 on a CPU, 1.5 GB with a CPU
# build of torch. SGLang 0.5.9 and the transformers that it pins lie apart in it, in VENV/sglang-0.5.9: with that on the
# PYTHONPATH they are imported instead. Needs Python 3.11 (PYTHON=... chooses one). A second call returns at once; an
# environment of other versions, or one whose making was interrupted, is made again. The default VENV is where the tests
# look for it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/osprey-jax/sglang-0.5.23}
stamp=$venv/osprey-sglang-tests # empty while the environment is in the making
wanted=$(cat "$here/install.sh" "$here/requirements.txt" | sha256sum)

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

find_python() { # a Python 3.11 that really runs: a shim on the PATH may have nothing behind it
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
}

python=$(find_python)
if [ -z "$python" ]; then
  echo "error: no Python 3.11 with venv found; set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

if [ -e "$venv" ] && [ ! -e "$stamp" ]; then
  echo "error: $venv exists and was not made by this script; remove it or name another place" >&2
  exit 2
fi
rm -rf "$venv"
mkdir -p "$venv"
: >"$stamp"
"$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-warn-conflicts "$@"; }
install torch==2.13.0
install --no-deps sglang==0.5.23 xgrammar==0.2.7
install --requirement "$here/requirements.txt"
install --no-deps --target "$venv/sglang-0.5.9" \
  sglang==0.5.9 transformers==4.57.1 huggingface-hub==0.36.2 tokenizers==0.22.2
echo "$wanted" >"$stamp"
