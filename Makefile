# Everything runs in the environment .venv if it is there (`make venv` makes it), else in the current one.
PYTHON ?= python3
# A plain `torch` would bring another version and gigabytes of CUDA libraries with it.
TORCH ?= torch==2.13.0

VENV := $(CURDIR)/.venv
STAMP := $(VENV)/.installed
RUN := PATH="$(VENV)/bin:$$PATH" OMP_NUM_THREADS=1
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
MYPY_CACHE ?= .mypy_cache

.PHONY: help venv demo test test-full test-mutants lint format clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/'

venv: $(STAMP) ## make the environment .venv and install the package in it

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) numpy setuptools wheel
	$(PIP) --no-build-isolation -e '.[megatron,hf,dev]'
	@touch $@

demo: venv ## train a Megatron GPT on two processes with token slices, then compare with and without
	@$(RUN) bash configs/demo.sh

test: ## what CI runs
	$(RUN) python -m pytest -q -m "not full and not mutants"

test-full: ## every combination of settings, some tens of minutes
	$(RUN) python -m pytest -q

test-mutants: ## every known defect put into the package, and which tests find it
	$(RUN) python -m pytest -q tests/test_mutants.py

lint: ## format, style, types of the parts that need no torch
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy --cache-dir $(MYPY_CACHE)

format: ## rewrite the files as `make lint` wants them
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

clean: ## remove the environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
