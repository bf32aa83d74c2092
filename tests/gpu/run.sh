#!/bin/sh
# Numerics, speed and memory on a machine with one NVIDIA GPU, meant to take less than 8 minutes (without the
# installation).
#
# tests/gpu/run.sh [--venv DIR] [--extra cuda12|cuda13] [--tiny] [OUT.json]
#
# --venv    make DIR an environment of its own first (python3.12, or PYTHON=...); else the current Python is used, which
#           then has the project with one of its GPU extras: pip install '.[cuda12]'
# --extra   of the new environment (default: cuda12)
# --tiny    small shapes on whatever device there is, to see that it runs
# OUT.json  where the results go (default: gpu-results.json)
set -eu
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; }

venv="" extra=cuda12 tiny="" out=gpu-results.json
while [ $# -gt 0 ]; do
    case $1 in
    --venv | --extra)
        [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
        case $1 in --venv) venv=$2 ;; --extra) extra=$2 ;; esac
        shift 2
        ;;
    --tiny) tiny=--tiny; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "error: unknown option $1; see --help" >&2; exit 2 ;;
    *) out=$1; shift ;;
    esac
done
case $extra in cuda12 | cuda13) ;; *) echo "error: --extra $extra: use cuda12 or cuda13" >&2; exit 2 ;; esac

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python}
if [ -n "$venv" ]; then
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3.12}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --editable "$root[$extra]"
    python=$venv/bin/python
fi
# Memory is taken as it is needed, so that the peak is what was used.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/tests/gpu/measure.py" $tiny "$out"
