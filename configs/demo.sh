#!/usr/bin/env bash
# Trains a small GPT on the sources of Python's standard library in two processes, with slices that are chosen in its first
# steps, compares the same run with and without the key "token_pipeline", and draws what ran when. No GPU. `make demo` runs it in an
# environment that has the package installed.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=build/demo                  # data, logs, measurements, pictures: configs/demo.json names it too
STEPS=${STEPS:-120}             # of the training run
COMPARE_STEPS=${COMPARE_STEPS:-8}

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# megatron-core warns once for each fused CUDA kernel that is not installed; none is used here.
export PYTHONWARNINGS=ignore

MODEL=(--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 1024 --vocab-size 257)
DATA="$OUT/data/python"

# DeepSpeed leaves its shared memory buffers behind on CPU, 66 MB for each process, named after the port.
PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
trap 'rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$PORT"_*' EXIT

# What DeepSpeed says of every pipeline on a CPU and of every LR schedule.
NO_NEWS='^SEED_LAYERS=|^Using topology: |shm_comm_op built successfully|learning rate from scheduler before it has started'

# train NAME CONFIG ARGUMENTS...
train() {
  local name=$1 config=$2
  shift 2
  rm -f "$OUT/$name.jsonl"
  deepspeed --log_level error --num_gpus 2 --master_port "$PORT" train.py "${MODEL[@]}" --pipeline-model-parallel-size 2 \
    --data-path "$DATA" --data-cache-path "$OUT/cache" --log-file "$OUT/$name.jsonl" \
    --deepspeed --deepspeed_config "$config" "$@" 2>&1 | grep --line-buffered -vE "$NO_NEWS"
}

mkdir -p "$OUT"
echo "== data"
rm -rf "$OUT/cache"
python -m ds_terapipe.cli prepare-data --output-prefix "$DATA"

rm -f "$OUT/costs.json" "$OUT/trace.json"
echo "== $STEPS steps with configs/demo.json: \"token_pipeline\": {\"slices\": \"auto\", ...}"
train demo configs/demo.json --train-iters "$STEPS" --log-interval 20 --eval-interval "$STEPS" --eval-iters 2

echo "== $COMPARE_STEPS steps from the same seed, with the key (the measurements are there now) and without"
for run in with:demo without:demo_without; do
  echo "   ${run%:*} the key ..."
  train "${run%:*}" "configs/${run#*:}.json" --train-iters "$COMPARE_STEPS" --log-interval 1 > "$OUT/${run%:*}.log" || {
    cat "$OUT/${run%:*}.log"
    exit 1
  }
done
python configs/compare.py "$OUT/with.jsonl" "$OUT/without.jsonl" --training "$OUT/demo.jsonl"

echo "== what ran when: the traced steps, and the same step uncut as the measurements predict it"
python -m ds_terapipe.cli simulate --measured "$OUT/costs.json" --micro-batches 1 --slices 1 --trace "$OUT/uncut.json" > "$OUT/uncut.txt"
python -m ds_terapipe.cli trace "$OUT/uncut.json" "$OUT/trace.json" --picture "$OUT/timeline.svg"
echo "picture: $OUT/timeline.svg, for Perfetto: $OUT/trace.json"
