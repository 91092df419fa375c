"""Trains a PipelineModule of your own layers in slices of tokens, on the bytes of Python's standard library.

    deepspeed --num_gpus 2 examples/own_pipeline.py

The settings are in own_pipeline.json. Without its block ``token_pipeline`` the script trains on DeepSpeed's own engine.
The layers need two things for slices: attention is PyTorch's with ``is_causal``, and positions come with the inputs.
Write your layers in place of ``Embedding``, ``Block`` and ``Head``, and your data in place of ``Text``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, 4


class Text(Dataset):
    """Pieces of a text as bytes: ((tokens, positions), the next tokens)."""

    def __init__(self, length: int) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py")))
        self.tokens, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length + 1].long()
        return (piece[:-1], torch.arange(self.length)), piece[1:]


class Embedding(nn.Module):
    """The first layer gets the inputs of the dataset."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.words(tokens) + self.positions(positions)


class Block(nn.Module):
    """A Transformer layer with the norms before attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_2(x))


class Head(nn.Module):
    """The last layer gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages; the other processes are replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    config = str(Path(__file__).with_suffix(".json"))
    deepspeed.add_config_arguments(parser).set_defaults(deepspeed=True, deepspeed_config=config)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    blocks = [LayerSpec(Block) for _ in range(LAYERS)]
    layers = [LayerSpec(Embedding, args.length), *blocks, LayerSpec(Head)]
    model = PipelineModule(layers, num_stages=args.stages, loss_fn=loss)
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
