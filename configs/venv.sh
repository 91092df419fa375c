#!/usr/bin/env bash
# Makes the Python environment VENV with the package, its extras and PyTorch in it, and is done at once where that is there:
# every target of the Makefile that runs Python calls it first. VENV, PYTHON and TORCH come from there.
#
# An environment that was half made, was moved, or whose Python is gone is made again; one that somebody else made is left
# alone. With an empty VENV nothing is made: the environment that is active has to have everything.
set -euo pipefail
cd "$(dirname "$0")/.."

EXTRAS=megatron,hf,dev

fail() {
  echo "$1" >&2
  exit 1
}

check_active() {
  python - "$EXTRAS" <<'PYTHON' || fail "VENV: got an empty name and an active environment without these, must have them, use pip install -e '.[$EXTRAS]'"
import sys
from importlib.metadata import PackageNotFoundError, requires, version

try:
    wanted = [line for line in requires("ds_terapipe") if "extra ==" not in line or line.split('"')[-2] in sys.argv[1]]
except PackageNotFoundError:
    sys.exit(f"{sys.executable} has no ds_terapipe")
missing = []
for line in wanted:
    name = line.replace(";", " ").replace(">", " ").replace("<", " ").replace("=", " ").split()[0]
    try:
        version(name)
    except PackageNotFoundError:
        missing.append(name)
if missing:
    sys.exit(f"{sys.executable} has no {', '.join(missing)}")
PYTHON
}

[ -n "$VENV" ] || { check_active; exit 0; }

ROOT=$PWD
case $VENV in /*) ENV=$VENV ;; *) ENV=$ROOT/$VENV ;; esac
DONE=$ENV/.installed    # made here, and complete
BEGUN=$ENV/.begun       # made here, and not complete

works() { [ -e "$DONE" ] && grep -qF "$ENV" "$ENV/bin/activate" && "$ENV/bin/python" -c ''; } 2> /dev/null
complete() { works && [ ! setup.py -nt "$DONE" ] && [ ! constraints.txt -nt "$DONE" ]; }

complete && exit 0
if command -v flock > /dev/null; then
  exec 9> ".venv.lock"    # another make may be at it
  flock 9
  complete && exit 0
fi

if ! works; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "PYTHON: got $PYTHON, must be a Python from 3.10 on, use e.g. make venv PYTHON=python3.11"
  if [ -e "$DONE" ] || [ -e "$BEGUN" ]; then
    rm -rf "$ENV"
  elif [ -n "$(ls -A "$ENV" 2> /dev/null)" ]; then
    fail "VENV: got $VENV, which was not made here, must be free, use VENV= with that environment active, or remove it"
  fi
  echo "making the environment $VENV, once: about a minute and the download of PyTorch" >&2
  mkdir -p "$ENV"
  touch "$BEGUN"
  "$PYTHON" -m venv "$ENV"
fi

# TORCH says which PyTorch: the line that pins it is left out, or no other could be installed.
sed '/^torch==/d' constraints.txt > "$ENV/constraints.txt"
pip() { "$ENV/bin/python" -m pip install -qq --disable-pip-version-check -c "$ENV/constraints.txt" "$@"; }
pip "$TORCH" numpy setuptools wheel
pip --no-build-isolation -e ".[$EXTRAS]"
rm -f "$BEGUN"
touch "$DONE"
