#!/usr/bin/env bash
# Runs tests on PyTorch's CUDA build over tests/device_stand_in, which needs no device: `make test-device`, see docs/gpu.md.
# The environment .venv-device is made once. VENV takes another, PYTHON and TORCH as in the Makefile.
set -euo pipefail
cd "$(dirname "$0")/.."

export VENV=${VENV:-.venv-device} PYTHON=${PYTHON:-python3} TORCH=${DEVICE_TORCH:-torch==2.14.1}
if [ ! -e "$VENV/.installed" ]; then
  echo "$VENV gets $TORCH with CUDA's libraries: downloads about 3 GB, takes 5.6 GB" >&2
fi
bash configs/venv.sh || { echo "make test-device: $TORCH could not be installed, see above" >&2; exit 1; }
case $VENV in /*) ENV=$VENV ;; *) ENV=$PWD/$VENV ;; esac
export PATH=$ENV/bin:$PATH OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore TESTS_RANKS=${TESTS_RANKS:-8}
python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
  || { echo "make test-device: got a PyTorch without CUDA, must have it, use DEVICE_TORCH=torch==2.14.1" >&2; exit 1; }

settings=$(python -m tests.device_stand_in.build)
run() { (eval "$settings"; exec env TESTS_DEVICE=cuda "$@"); }
# Beside the rest, for it leaves a processor idle now and then: LAMB's kernels; `ds_terapipe check` beside the allocator's counters, by
# itself, for it enlarges the models of other tests; attention's kernels.
beside() {
  run python -m tests.device_stand_in.lamb
  run python -m pytest -q -p no:cacheprovider -m "not full" tests/test_cli_check.py -k a_launch_takes
  run python -m pytest -q -p no:cacheprovider -p tests.device_stand_in.plugin tests/pipeline/test_gpu_attention.py \
    -k "causal or explicit"
}
log=$(mktemp)
beside >"$log" 2>&1 & second=$!
trap 'kill $second 2>/dev/null || true; rm -f "$log"' EXIT
# What the stand-in itself gives; the engine on it: one hardware queue, races, host waits; rows; files of tests whose
# subject is more than a training; the memory model. With ROWS= all rows run.
passed=0
run env TESTS_ROWS="${ROWS-few}" python -m pytest -q -p no:cacheprovider --slowest 5 -m "not full" tests/device_stand_in \
  tests/hf/test_pipeline.py tests/pipeline/test_auto.py tests/pipeline/test_set_slices.py tests/pipeline/test_checkpoints.py \
  tests/elastic/test_elastic_cache.py tests/elastic/test_elastic_measured.py tests/rows \
  "tests/pipeline/test_memory_of_steps.py::test_the_model_says_what_a_device_takes[2]" "$@" || passed=$?
wait $second || passed=$?
cat "$log"
exit "$passed"
