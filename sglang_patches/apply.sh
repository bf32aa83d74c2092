#!/usr/bin/env bash
# Usage: sglang_patches/apply.sh --check | --apply | --revert  [--python PYTHON | --site-packages DIR]
#
# Puts the drafters' models into an installed SGLang, 0.5.9 or 0.5.23: for servers that cannot be given the variable
# SGLANG_EXTERNAL_MODEL_PACKAGE. Without options it is the SGLang of `python3`; PYTHON names another interpreter,
# DIR the directory that holds the `sglang` package itself, an unpacked wheel, say.
#
# --apply   adds srt/models/osprey_sgl_models/ and changes srt/models/registry.py; nothing where that is done already
# --revert  takes both back, to the byte
# --check   says which of the two it is; changes nothing
#
# Exit status: 0 done, or checked and either pristine or applied; 1 in another state, or refused; 2 wrong usage.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python3
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --python)
      [ $# -gt 1 ] || { echo "error: --python needs the path of an interpreter" >&2; exit 2; }
      python=$2
      shift 2
      ;;
    --python=*)
      python=${1#*=}
      shift
      ;;
    *)
      arguments+=("$1")
      shift
      ;;
  esac
done
command -v "$python" >/dev/null || { echo "error: $python: no such interpreter" >&2; exit 2; }
exec "$python" -B "$here/apply.py" ${arguments[@]+"${arguments[@]}"}
