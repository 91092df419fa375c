#!/usr/bin/env bash
# Runs TARGET of the Makefile under other versions, each in an environment of its own: `make test-versions` and `make smoke` call it.
#
#   versions.sh TARGET ROW...   a row is PYTHON or PYTHON:TORCH, e.g. 3.12 or 3.12:torch==2.13.0
#
# constraints.txt has the megatron-core of each Python: 0.16.1, and 0.19.2 from 3.12 on.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local root
  root=$(pyenv root 2> /dev/null || true)
  for python in "python$1" "$root"/versions/"$1".*/bin/python; do
    "$python" -c '' 2> /dev/null && { echo "$python"; return; }
  done
  echo "python$1: got none, must be on PATH or in pyenv, use e.g. pyenv install $1" >&2
  return 1
}

target=$1
shift
for row in "$@"; do
  version=${row%%:*} torch=${row#"$version"}
  torch=${torch#:}
  python=$(find_python "$version")
  echo "== make $target with Python $version${torch:+, $torch}"
  make "$target" PYTHON="$python" VENV=".venv-$version${torch:+-${torch//[^0-9a-z.]/-}}" ${torch:+TORCH="$torch"}
done
