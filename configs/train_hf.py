"""Fine-tunes a Hugging Face decoder on a text file in a pipeline of its own layers, and writes it as a folder.

``deepspeed --num_gpus 2 configs/train_hf.py --model FOLDER --text FILE --out FOLDER --deepspeed_config configs/hf.json``: in
token slices where the configuration has the key ``token_pipeline``, and on DeepSpeed's own engine where it has not.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from ds_terapipe import hf
from ds_terapipe.errors import ConfigError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder or name on the Hub")
    parser.add_argument("--text", required=True, type=Path, help="file to train on")
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def samples_of(tokenizer: Any, text: str, seq_length: int) -> list[dict[str, list[int]]]:
    """The text and its end in pieces. A piece begins with the last token of the one before, so each token is predicted once."""
    tokens = tokenizer(text)["input_ids"]
    if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
        tokens.append(tokenizer.eos_token_id)
    pieces = [tokens[start : start + seq_length] for start in range(0, len(tokens) - 1, seq_length - 1)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    options = parse()
    if options.out is not None:
        hf.check_new("--out", options.out)  # before the work
    if not options.text.is_file():
        raise ConfigError(f"--text: got {options.text}, must be a text file, use the path of one")
    if options.seq_length < 2:
        raise ConfigError(f"--seq-length: got {options.seq_length}, must be at least 2 tokens, use e.g. 1024")
    model = hf.pipeline(options.model, num_stages=options.stages)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    samples = samples_of(tokenizer, options.text.read_text(), options.seq_length)
    collate = DataCollatorForSeq2Seq(tokenizer)  # ignores labels of padding, where others ignore all ends of texts, too

    engine, *_ = deepspeed.initialize(
        args=options,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.learning_rate),
        training_data=samples,
        collate_fn=lambda rows: hf.batch(collate(rows)),
    )
    for step in range(1, options.steps + 1):
        loss = float(engine.train_batch())
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
    if options.out is not None:
        hf.save_pretrained(engine, options.out)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as problem:
        raise SystemExit(f"train_hf.py: error: {problem}") from None
