#!/usr/bin/env bash
# GPT 125M on GPUs: configs/gpt_125m.sh PREFIX [train.py arguments], with PREFIX.bin and PREFIX.idx of GPT-2 tokens.
# STAGES x TENSOR processes hold the model, the other GPUs hold replicas of it.
set -euo pipefail
cd "$(dirname "$0")/.."

DATA=${1:?usage: configs/gpt_125m.sh PREFIX [train.py arguments]}
shift
STAGES=${STAGES:-4}
TENSOR=${TENSOR:-1}
CHECKPOINTS=${CHECKPOINTS:-runs/gpt_125m}

# One queue to the GPU: collectives start before the kernels that are launched after them.
export CUDA_DEVICE_MAX_CONNECTIONS=1

deepspeed ${HOSTFILE:+--hostfile "$HOSTFILE"} train.py \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
  --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type learned_absolute \
  --vocab-size 50257 --make-vocab-size-divisible-by 128 \
  --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$STAGES" \
  --data-path "$DATA" --split 969,30,1 \
  --train-iters 100000 --eval-interval 1000 --eval-iters 10 --log-interval 10 \
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 1000 \
  --deepspeed --deepspeed_config configs/gpt_125m.json "$@"
