"""Trains a GPT of megatron-core's layers with pipeline and tensor parallelism, on the bytes of Python's standard library.

    deepspeed --num_gpus 4 examples/megatron_gpt.py

The settings are in megatron_gpt.json. Two processes share each layer (``--tensor``), and two such pairs are the stages.
Write your model into ``shape``, and your data in place of ``Text``. ``train.py`` is the full script: data files, checkpoints,
evaluation, BERT and ViT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.data import Dataset

from ds_terapipe.megatron import gpt_pipeline, initialize_parallel

VOCABULARY = 256


class Text(Dataset):
    """Pieces of a text as bytes: ((tokens, positions), (the next tokens, which of them count))."""

    def __init__(self, length: int) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py")))
        self.tokens, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        piece = self.tokens[index * self.length : (index + 1) * self.length + 1].long()
        return (piece[:-1], torch.arange(self.length)), (piece[1:], torch.ones(self.length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=2, help="processes that share a layer")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages; the other processes are replicas")
    parser.add_argument("--sequence-parallel", action="store_true", help="share the tokens of a slice, too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    config = str(Path(__file__).with_suffix(".json"))
    deepspeed.add_config_arguments(parser).set_defaults(deepspeed=True, deepspeed_config=config)
    args = parser.parse_args()

    deepspeed.init_distributed()
    topology = initialize_parallel(tensor=args.tensor, pipeline=args.stages)
    if get_accelerator().device_name() == "cuda":
        model_parallel_cuda_manual_seed(1234)  # megatron-core's layers draw from its generators on a GPU
    shape = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor,
        sequence_parallel=args.sequence_parallel,
    )
    model = gpt_pipeline(shape, vocab_size=VOCABULARY, seq_length=args.length, topology=topology)
    engine, *_ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Text(args.length)
    )
    for _ in range(args.steps):
        value = float(engine.train_batch())  # one optimizer step; the mean loss, on every rank
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {value:.4f}", flush=True)
    # engine.save_checkpoint(folder) and engine.load_checkpoint(folder) work as in DeepSpeed
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
