#!/usr/bin/env bash
# Builds the site of docs/ into build/site, in an environment of its own: `make docs`. A warning is an error: a dead link, a missing
# picture, a page that the navigation does not name.
set -euo pipefail
cd "$(dirname "$0")/.."

ENV=${DOCS_VENV:-.venv-docs}
VERSIONS=configs/docs_constraints.txt
if [ ! -e "$ENV/.installed" ] || [ "$VERSIONS" -nt "$ENV/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$ENV"
  "$ENV/bin/python" -m pip install -qq --disable-pip-version-check -c "$VERSIONS" mkdocs-material "mkdocstrings[python]"
  touch "$ENV/.installed"
fi
NO_MKDOCS_2_WARNING=1 "$ENV/bin/mkdocs" build --strict --site-dir build/site "$@"
echo "built: build/site/index.html"
