#!/usr/bin/env bash
# DeepSpeed's own pipeline tests on CPU, as they are and with {"token_pipeline": {"slices": 1}} in every configuration: what passes
# without the key must pass with it. PATH is a checkout of DeepSpeed, of about the version that is installed; it is left as it is.
#
#   tests/benchmarks/deepspeed_suite.sh PATH [arguments for pytest, e.g. -k Sequential]
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
checkout=$(realpath "$1")
shift
cd "$(dirname "$0")/../.."

# DeepSpeed's tests take LOCAL_SIZE for the number of devices on a CPU, and need four.
export DS_ACCELERATOR=cpu LOCAL_SIZE=4 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} DS_UNITTEST_TIMEOUT=${DS_UNITTEST_TIMEOUT:-300}
exec python -m tests.benchmarks.deepspeed_suite "$checkout" "$@"
