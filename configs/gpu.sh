#!/usr/bin/env bash
# Trains a GPT on as many GPUs as stages, in four slices and without the key "token_pipeline", in fp32 from one seed, and compares
# losses and speed: `make gpu-one`, `make gpu-two`, `make gpu-four`, see docs/gpu.md. With GPUS=1 the stages share one GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

STAGES=$1
OUT=build/gpu
STEPS=${STEPS:-12}
CONFIG=${CONFIG:-configs/gpu.json}
export GPUS=${GPUS:-$STAGES} NCCL_MULTI_RANK_GPU_ENABLE=1
# Products of fp32 in TF32 differ by more than slices do.
export NVIDIA_TF32_OVERRIDE=0 PYTHONWARNINGS=ignore

mkdir -p "$OUT"
rm -rf "$OUT/cache"
python -m ds_terapipe.cli prepare-data --output-prefix "$OUT/data"
python -c "import json, sys; c = json.load(open(sys.argv[1])); del c['token_pipeline']; json.dump(c, open(sys.argv[2], 'w'))" \
  "$CONFIG" "$OUT/without.json"

# train NAME CONFIG
train() {
  rm -f "$OUT/$1.jsonl"
  deepspeed --log_level warning --num_gpus "$STAGES" --no_python --no_local_rank \
    bash -c 'LOCAL_RANK=$((LOCAL_RANK % GPUS)) exec python "$@"' bash train.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 4096 --vocab-size 257 --pipeline-model-parallel-size "$STAGES" --data-path "$OUT/data" \
    --data-cache-path "$OUT/cache" --log-file "$OUT/$1.jsonl" --train-iters "$STEPS" --log-interval 1 \
    --deepspeed --deepspeed_config "$2"
}

train with "$CONFIG"
train without "$OUT/without.json"
python configs/compare.py "$OUT/with.jsonl" "$OUT/without.jsonl"
