# Every target that runs Python sees to its environment first: .venv, made once, with all that it needs (configs/venv.sh).
# `VENV=` (an empty name) takes the environment that is active as it is.
PYTHON ?= python3
# A plain `torch` would bring another version and gigabytes of CUDA libraries with it.
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=
VERSIONS ?= 3.11 3.12 3.10

RUN := $(if $(VENV),PATH="$(abspath $(VENV))/bin:$$PATH") OMP_NUM_THREADS=1
MYPY_CACHE ?= .mypy_cache

.PHONY: help venv demo test-fast test test-full test-versions test-device smoke test-smoke lint format clean docs gpu-attention gpu-lamb gpu-one gpu-rows gpu-memory gpu-two gpu-four gpu-speed

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/'
	@printf '\nEach makes the environment first where it is not there. Settings, e.g. make test ARGS="-k lamb":\n'
	@printf 'VENV=\ttake the active environment (it has the package with its extras), make none; default .venv\n'
	@printf 'PYTHON=\tmakes the environment, 3.10 or later; default python3\n'
	@printf 'TORCH=\twhat pip installs as PyTorch; default torch==2.13.0\n'
	@printf 'ARGS=\tmore arguments for pytest in test and test-full\n'
	@printf 'STEPS=\tof the training run in demo; default 120\n'
	@printf 'ROWS=\tan empty value runs all rows of tests/rows in test-device\n'

venv: ## make the environment .venv and install the package in it
	@VENV="$(VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash configs/venv.sh

demo: venv ## train a Megatron GPT on two processes with token slices, then compare with and without
	@$(RUN) bash configs/demo.sh

test-fast: venv ## the tests that start no process
	$(RUN) python -m pytest -q -n 2 -m "not full and not processes" $(ARGS)

test: venv ## the tests that CI runs
	$(RUN) python -m pytest -q -m "not full" --slowest 10 --most-minutes 12 $(ARGS)

test-full: venv ## all tests, known defects among them, and other versions: for the night
	$(RUN) python -m pytest -q --slowest 10 $(ARGS)
	@$(MAKE) smoke

test-versions: ## the tests under other versions of Python, megatron-core and PyTorch, e.g. VERSIONS="3.10 3.12:torch==2.13.0"
	bash configs/versions.sh test $(VERSIONS)

smoke: ## what another megatron-core and Python could break, in their own environment
	bash configs/versions.sh test-smoke 3.12

test-smoke: venv ## names that the package relies on, and Megatron models against one process
	$(RUN) python -m pytest -q -m "not full" tests/test_compat.py tests/test_package.py tests/megatron $(ARGS)

test-device: ## the engine on PyTorch's CUDA build, without a device; makes .venv-device, 5.6 GB
	bash configs/test_device.sh $(ARGS)

gpu-attention: venv ## on a GPU: the attention of slices (docs/gpu.md says what these are for)
	$(RUN) python -m pytest -q -m gpu tests/pipeline $(ARGS)

gpu-lamb: venv ## on a GPU: FusedLamb's op, once under compute-sanitizer
	$(RUN) python -m pytest -q -m gpu tests/optim $(ARGS)
	$(RUN) PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
		python -m pytest -q -m gpu tests/optim/test_cuda_op.py -k "not launches and not ten_thousand and not two_to_the_31"

gpu-one: venv ## on a GPU: a GPT on one stage, with slices and without
	@$(RUN) bash configs/gpu.sh 1

gpu-rows: venv ## on four GPUs: every row of tests/rows, and hardware queues, over NCCL
	$(RUN) TESTS_DEVICE=cuda TESTS_GPUS=$${GPUS:-4} NCCL_MULTI_RANK_GPU_ENABLE=1 TESTS_RANKS=4 NVIDIA_TF32_OVERRIDE=0 python -m pytest -q tests/rows tests/device_stand_in/test_engine.py $(ARGS)

gpu-memory: venv ## on a GPU: what the memory model says, and the allocator's counters
	$(RUN) python -m pytest -q -s -m gpu tests/pipeline/test_memory_of_steps.py $(ARGS)

gpu-two: venv ## on two GPUs: a GPT on two stages, with slices and without
	@$(RUN) bash configs/gpu.sh 2

gpu-four: venv ## on four GPUs: a GPT on four stages, with slices and without
	@$(RUN) bash configs/gpu.sh 4

gpu-speed: venv ## on two GPUs: a step of one long sequence, in slices and without
	$(RUN) TESTS_DEVICE=cuda TESTS_GPUS=$${GPUS:-2} NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$$(($${GPUS:-2} * 50)) \
		python -m tests.benchmarks.token_pipeline \
		--batches 1 --layers 8 --hidden 2048 --heads 16 --sequence 8192 --bf16 --rounds 3 --steps 3 --columns deepspeed,ours4,ours8,twice4 $(ARGS)

docs: ## the site of docs/ in build/site, strict, in its own environment .venv-docs: a CI job beside `.ci/run`
	@PYTHON="$(PYTHON)" bash configs/docs.sh

lint: venv ## format, style, types
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy --cache-dir $(MYPY_CACHE)

format: venv ## rewrite the files as `make lint` wants them
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

clean: ## remove the environment (only one that was made here) and the caches
	@for mark in .installed .begun; do if [ -n "$(VENV)" ] && [ -e "$(VENV)/$$mark" ]; then rm -rf "$(VENV)"; fi; done
	rm -rf .venv.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
