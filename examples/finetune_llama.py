"""Fine-tunes a Hugging Face decoder on texts or chats, in a pipeline, and writes it to a folder.

Without ``--model`` and ``--data`` a small new Llama learns Python's standard library. Batch sizes, gradient accumulation,
precision, clipping and the monitors (TensorBoard, W&B) are in the file that ``--deepspeed_config`` names.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from peft import LoraConfig
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from ds_terapipe import hf
from ds_terapipe.errors import ConfigError

IGNORED = -100

Row = dict[str, list[int]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("model").add_argument
    add("--model", help="folder, or name on the Hub; without it: a small new Llama")
    add("--stages", type=int, help="pipeline stages; without it: one for each process")
    add("--gradient-checkpointing", action="store_true", help="recompute layers in the backward pass")
    add("--lora-r", type=int, default=0, help="rank of the LoRA adapters; 0: train all weights")
    add("--lora-alpha", type=int, default=16, help="scale of the adapters times their rank")
    add("--lora-dropout", type=float, default=0.0, help="dropout of the adapters' inputs")

    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, default=Path(argparse.__file__).parent, help="text file, .jsonl file, or folder of them")
    add("--eval-data", type=Path, help="the same for evaluations; without it: a share of --data")
    add("--eval-share", type=float, default=0.02, help="share of --data for evaluations")
    add("--max-seq-length", type=int, default=1024, help="tokens of a row")
    add("--packing", action="store_true", help="put several documents into a row, in place of padding")

    add = parser.add_argument_group("training").add_argument
    add("--num-train-epochs", type=float, default=1.0, help="epochs of --data")
    add("--max-steps", type=int, default=0, help="optimizer steps in place of epochs; 0: epochs")
    add("--learning-rate", type=float, default=1e-4, help="highest learning rate of AdamW")
    add("--weight-decay", type=float, default=0.0, help="weight decay of AdamW")
    add("--lr-scheduler-type", default="cosine", help="a name of transformers.get_scheduler")
    add("--warmup-ratio", type=float, default=0.0, help="share of the steps for the warm-up")
    add(
        "--mean-over",
        choices=["step", "micro_batch"],
        default="step",
        help="divide a loss by the labels of a step, or of each micro-batch",
    )
    add("--seed", type=int, default=1234, help="seed of weights, order and dropout")

    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, help="new folder for the trained model or adapter")
    add("--checkpoints", type=Path, help="folder for checkpoints")
    add("--resume-from-checkpoint", action="store_true", help="go on with the last checkpoint in --checkpoints, if any")
    add("--save-steps", type=int, default=500, help="steps between checkpoints")
    add("--eval-steps", type=int, default=500, help="steps between evaluations")
    add("--logging-steps", type=int, default=10, help="steps between lines of the log")
    add("--generate", default="def main(", help="prompt that the trained model continues; empty: no text")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser).set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    return parser.parse_args()


def read_settings(path: Path) -> dict[str, Any]:
    """The configuration. A block that the arguments of this script stand for would be ignored, or take their place."""
    if not path.is_file():
        raise ConfigError(f"--deepspeed_config: got {path}, must be a file, use a copy of examples/finetune_llama.json")
    settings: dict[str, Any] = json.loads(path.read_text())
    for key, arguments in (("optimizer", "--learning-rate"), ("scheduler", "--lr-scheduler-type")):
        if key in settings:
            raise ConfigError(f"{key}: got a block in {path}, must be absent beside this script, use {arguments}")
    return settings


def rows_of_step(settings: dict[str, Any], replicas: int) -> int:
    """Rows of an optimizer step; 1 for sizes that ``hf.pipeline`` or ``deepspeed.initialize`` will refuse."""
    sizes = [settings.get(name, 1) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    sizes = [settings["train_batch_size"]] if "train_batch_size" in settings else [*sizes, replicas]
    return math.prod(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else 1


def load_tokenizer(args: argparse.Namespace) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        config = AutoConfig.from_pretrained(args.model).get_text_config()
    except (OSError, ValueError) as problem:
        rule = "must be a folder with a model and its tokenizer, or a name on the Hub"
        reason = " ".join(str(problem).split())
        raise ConfigError(f"--model: got {args.model}, {rule}, use the path of one ({reason})") from problem
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    words, vectors = len(tokenizer), config.vocab_size
    if words > vectors:
        raise ConfigError(f"--model: got a tokenizer of {words} tokens, must be at most {vectors}, use the model's own")
    longest = getattr(config, "max_position_embeddings", args.max_seq_length)
    if not 2 <= args.max_seq_length <= longest:
        raise ConfigError(
            f"--max-seq-length: got {args.max_seq_length}, must be 2 to {longest} tokens, use e.g. {min(1024, longest)}"
        )
    return tokenizer


def make_engine(args: argparse.Namespace) -> Any:
    shape = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    lora = LoraConfig(**shape, target_modules="all-linear", task_type="CAUSAL_LM") if args.lora_r else None
    model = hf.pipeline(
        args.model,
        num_stages=args.stages,
        activation_checkpointing=args.gradient_checkpointing,
        mean_over=args.mean_over,
        lora=lora,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    warmup = math.ceil(args.warmup_ratio * args.max_steps)
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps)
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    return engine


def read_documents(key: str, path: Path) -> Iterator[tuple[str, str, bool]]:
    """Texts and lines of JSON: the place that each stands in, its text, and whether it is JSON."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in (".jsonl", ".txt", ".md", ".py"):
                yield from read_documents(key, file)
    elif not path.is_file():
        raise ConfigError(f"{key}: got {path}, must be a file or a folder, use the path of one")
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                yield f"{path}:{number}", line, True
    else:
        yield str(path), path.read_text(encoding="utf-8", errors="replace"), False


def tokenize(tokenizer: Any, document: dict[str, Any], length: int) -> list[Row]:
    """A text in pieces, or one row of a chat or a completion, in which the answers' labels count."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "messages" in document:
        return [tokenize_chat(tokenizer, document["messages"])]
    if "completion" in document:
        prompt = tokenizer(document.get("prompt", ""))["input_ids"]
        answer = tokenizer(document["completion"], add_special_tokens=False)["input_ids"] + end
        return [{"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}]
    tokens = tokenizer(document["text"], verbose=False)["input_ids"]
    tokens += [] if tokens[-1:] == end else end
    # a piece begins with the last token of the one before, so each token is predicted once
    pieces = [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def tokenize_chat(tokenizer: Any, messages: list[dict[str, str]]) -> Row:
    """The whole chat; labels of what the template makes of the assistant's messages count."""
    tokens: list[int] = []
    labels: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
            through = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
            if prompt[: len(tokens)] != tokens or through[: len(prompt)] != prompt:
                raise ValueError("a chat whose template changes earlier messages; use chats of one answer")
            labels += [IGNORED] * (len(prompt) - len(labels)) + through[len(prompt) :]
            tokens = through
    return {"input_ids": tokens, "labels": labels}


def read_rows(key: str, path: Path, tokenizer: Any, args: argparse.Namespace) -> list[Row]:
    """All documents as rows of at most ``--max-seq-length`` tokens."""
    rows: list[Row] = []
    for place, text, is_json in read_documents(key, path):
        try:
            found = tokenize(tokenizer, json.loads(text) if is_json else {"text": text}, args.max_seq_length)
        except (ValueError, KeyError, TypeError) as problem:
            rule = "must have messages, prompt and completion, or text, use one JSON object a line"
            raise ConfigError(f"{key}: got {place} ({type(problem).__name__}: {problem}), {rule}") from problem
        longest = max((len(row["input_ids"]) for row in found), default=0)
        if longest > args.max_seq_length:
            raise ConfigError(
                f"{key}: got {longest} tokens in {place}, must be at most {args.max_seq_length}, use a larger --max-seq-length"
            )
        rows += [row for row in found if len(row["input_ids"]) > 1]
    if not rows:
        raise ConfigError(f"{key}: got nothing in {path}, must have documents, use .jsonl, .txt, .md or .py files")
    return rows


def pack(rows: list[Row], length: int) -> list[Row]:
    """Rows joined up to ``length`` tokens. Positions restart with each document: so documents do not see each other."""
    packed: list[Row] = []
    for row in rows:
        size = len(row["input_ids"])
        if not packed or len(packed[-1]["input_ids"]) + size > length:
            packed.append({"input_ids": [], "labels": [], "position_ids": []})
        packed[-1]["input_ids"] += row["input_ids"]
        packed[-1]["labels"] += [IGNORED, *row["labels"][1:]]  # the document before does not predict it
        packed[-1]["position_ids"] += range(size)
    return packed


def collate(tokenizer: Any, rows: list[Row]) -> Any:
    """A micro-batch. Packed rows are filled up with one more document, whose labels do not count."""
    if "position_ids" not in rows[0]:
        return hf.batch(DataCollatorForSeq2Seq(tokenizer)(rows))  # which ignores padding, but no end of a text
    filled, longest = [], max(len(row["input_ids"]) for row in rows)
    for row in rows:
        missing = longest - len(row["input_ids"])
        more = {
            "input_ids": [tokenizer.pad_token_id] * missing,
            "labels": [IGNORED] * missing,
            "position_ids": range(missing),
        }
        filled.append({name: [*row[name], *more[name]] for name in row})
    return hf.batch({name: torch.tensor([row[name] for row in filled]) for name in rows[0]})


def endless(rows: list[Row], seed: int) -> Iterator[Row]:
    """All rows again and again, each epoch in an order of its own."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


def train(engine: Any, args: argparse.Namespace, data: list[Row], held_out: list[Row], collate: Any) -> None:
    """Train to step ``--max-steps``; evaluate, save and report on the way."""
    size, replicas = engine.train_micro_batch_size_per_gpu(), engine.grid.get_data_parallel_world_size()
    replica, first = engine.grid.get_data_parallel_rank(), engine.global_rank == 0

    def micro_batches(rows: list[Row]) -> Iterator[Any]:
        for start in range(replica * size, len(rows), replicas * size):
            yield collate(rows[start : start + size])

    def evaluate() -> None:
        blank = {**held_out[0], "labels": [IGNORED] * len(held_out[0]["labels"])}
        rows = held_out + [blank] * (-len(held_out) % (replicas * size))
        loss = float(engine.eval_batch(micro_batches(rows), num_micro_batches=len(rows) // (replicas * size)))
        if args.mean_over == "micro_batch":  # those of blank rows alone are 0 in their mean
            loss *= (len(rows) // size) / math.ceil(len(held_out) / size)
        if first:
            bar.write(f"step {engine.global_steps}: evaluation loss {loss:.6f}, perplexity {math.exp(loss):.2f}")

    if args.resume_from_checkpoint:
        engine.load_checkpoint(str(args.checkpoints), load_module_strict=not args.lora_r)
    stream = itertools.islice(endless(data, args.seed), engine.global_samples, None)
    bar = tqdm(total=args.max_steps, initial=engine.global_steps, unit="step", disable=not first)
    while engine.global_steps < args.max_steps:
        rows, start = list(itertools.islice(stream, engine.train_batch_size())), time.perf_counter()
        loss = float(engine.train_batch(micro_batches(rows)))
        step, tokens = engine.global_steps, sum(len(row["input_ids"]) for row in rows)
        bar.update()
        bar.set_postfix_str(f"loss {loss:.4f}, {tokens / (time.perf_counter() - start):,.0f} tokens/s")
        if first and (step % args.logging_steps == 0 or step == args.max_steps):
            bar.write(f"step {step}: loss {loss:.6f}")
        if held_out and (step % args.eval_steps == 0 or step == args.max_steps):
            evaluate()
        if args.checkpoints and (step % args.save_steps == 0 or step == args.max_steps):
            engine.save_checkpoint(str(args.checkpoints), exclude_frozen_parameters=bool(args.lora_r))
    bar.close()


def generate(folder: Path, tokenizer: Any, prompt: str) -> None:
    """Continue a prompt, in one process, with what was written; of an adapter transformers loads the base, too."""
    device = get_accelerator().current_device_name()
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True), flush=True)


def main() -> None:
    args = parse()
    if args.out is not None:
        hf.check_new("--out", args.out)  # before the work
    if args.resume_from_checkpoint and args.checkpoints is None:
        raise ConfigError("--resume-from-checkpoint: got no --checkpoints, must be beside it, use the folder of before")
    settings = read_settings(Path(args.deepspeed_config))
    if args.model is not None:
        tokenizer = load_tokenizer(args)
    deepspeed.init_distributed()
    world, first = torch.distributed.get_world_size(), torch.distributed.get_rank() == 0
    if args.model is None:
        from small_llama import make_small_llama

        args.model = str(make_small_llama(first))
        torch.distributed.barrier()
        tokenizer = load_tokenizer(args)
    args.stages = args.stages or world

    data = read_rows("--data", args.data, tokenizer, args)
    if args.eval_data is not None:
        held_out = read_rows("--eval-data", args.eval_data, tokenizer, args)
    else:
        random.Random(args.seed).shuffle(data)
        share = math.ceil(args.eval_share * len(data)) if len(data) > 1 else 0
        if not 0 <= share < len(data):
            rule = "must be 0 or more and leave a row for training"
            raise ConfigError(f"--eval-share: got {args.eval_share} of {len(data)} rows, {rule}, use e.g. 0.02")
        held_out, data = data[:share], data[share:]
    if args.packing:
        data, held_out = (pack(rows, args.max_seq_length) for rows in (data, held_out))
    batch = rows_of_step(settings, world // args.stages)
    args.max_steps = args.max_steps or math.ceil(args.num_train_epochs * len(data) / batch)

    engine = make_engine(args)
    train(engine, args, data, held_out, functools.partial(collate, tokenizer))
    if args.out is not None:
        hf.save_pretrained(engine, args.out)
        if first:
            tokenizer.save_pretrained(args.out)
    engine.destroy()
    torch.distributed.destroy_process_group()
    if first and args.out is not None and args.generate:
        generate(args.out, tokenizer, args.generate)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as problem:
        raise SystemExit(f"finetune_llama.py: error: {problem}") from None
