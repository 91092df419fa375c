"""Trains with large batches in a plain PyTorch loop: FusedLamb and its learning rate, without DeepSpeed's engine.

    python examples/plain_lamb.py

The settings are in plain_lamb.json, spelt as in ds_config.json: the same blocks work under ``deepspeed.initialize``. The
schedule sets the learning rate, so the optimizer's block has none. Write your model and your batches into ``main``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from ds_terapipe import FusedLamb
from ds_terapipe.optim.schedules.lr_schedules import LambWarmup

VOCABULARY, WIDTH, CONTEXT = 256, 64, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--steps", type=int, help="default: those of the schedule")
    args = parser.parse_args()
    settings = json.loads(args.config.read_text())
    batch = settings["train_batch_size"]

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.LayerNorm(4 * WIDTH),
        nn.Linear(4 * WIDTH, VOCABULARY),
    ).to(device)
    optimizer = FusedLamb(model.parameters(), **settings["optimizer"]["params"])
    schedule = LambWarmup(optimizer, batch_size=batch, **settings["scheduler"]["params"])

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(1, (args.steps or schedule.total_steps) + 1):
        starts = torch.randint(len(text) - CONTEXT, (batch, 1))
        pieces = text[starts + torch.arange(CONTEXT + 1)].to(device)
        loss = F.cross_entropy(model(pieces[:, :-1]), pieces[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, next LR {schedule.get_last_lr()[0]:.2e}", flush=True)


if __name__ == "__main__":
    main()
