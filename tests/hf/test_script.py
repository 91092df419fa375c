"""configs/train_hf.py as docs/huggingface.md launches it: from a folder to a folder, in token slices."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed, extra hf")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.documents import ROOT
from tests.hf.families import model_of, train_alone
from tests.pipeline.training import difference
from tests.spawn import run_to_exit

SCRIPT = ROOT / "configs" / "train_hf.py"
STEPS, RATE = 4, 1e-3
# text, tokens of a piece, sequences of a micro-batch, micro-batches, slices
CASES: dict[str, tuple[str, int, int, int, Any]] = {
    "long": (SCRIPT.read_text(), 64, 1, 2, [1, 40, 23]),
    "padded": ("not to be", 7, 2, 1, 2),
}


def folder_of_a_model(folder: Path) -> Any:
    """A tiny Llama with a tokenizer of bytes, in shards; with the end for padding, as most tokenizers have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.save_pretrained(folder)
    model = model_of("llama, tied, dynamic", vocab_size=len(tokenizer))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model, tokenizer


def run_scripts(rank: int, world: int, folder: Path) -> None:
    """The script itself, with its arguments, once for each case."""
    for name, (_, length, *_) in CASES.items():
        at = folder / name
        arguments = {
            "--model": at / "model", "--text": at / "text.txt", "--out": at / "out", "--seq-length": length,
            "--steps": STEPS, "--learning-rate": RATE, "--deepspeed_config": at / "ds_config.json",
        }  # fmt: skip
        sys.argv = ["train_hf.py", *(str(word) for pair in arguments.items() for word in pair)]
        print(f"case {name}", flush=True)
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_an_out_that_cannot_be_written_is_one_line_before_the_work(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", f"train_hf.py --model none --text none --out {tmp_path}".split())
    rule = "must be a new folder or an empty one"
    with pytest.raises(SystemExit, match=rf"^train_hf\.py: error: --out: got [^\n]*{rule}[^\n]*, use [^\n]*$"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_trains_as_one_process_and_writes_the_folder(tmp_path: Path) -> None:
    made = {name: folder_of_a_model(tmp_path / name / "model") for name in CASES}
    for name, (text, _, batch, micro_batches, slices) in CASES.items():
        config = json.loads((ROOT / "configs" / "hf.json").read_text()) | {"gradient_clipping": 0}
        config |= {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": micro_batches}
        (tmp_path / name / "ds_config.json").write_text(json.dumps(config | {"token_pipeline": {"slices": slices}}))
        (tmp_path / name / "text.txt").write_text(text)
    first, second = run_to_exit(run_scripts, 2, tmp_path, timeout=150)
    assert first.code == second.code == 0, first.output[-3000:] + second.output[-3000:]
    said = re.split(r"^case \w+$", first.output, flags=re.MULTILINE)[1:]
    for name, output in zip(CASES, said, strict=True):
        model, tokenizer = made[name]
        losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", output, re.MULTILINE)]
        assert losses == pytest.approx(alone(model, tokenizer, *CASES[name][:4]), rel=1e-5), name
        assert losses[-1] < losses[0] - 0.1, "it learns nothing"
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / name / "out")
        for weight, parameter in trained.named_parameters():
            assert difference(parameter, model.get_parameter(weight)) < 1e-4, f"{name}, {weight}"
        again = AutoTokenizer.from_pretrained(tmp_path / name / "out")
        assert again("def main")["input_ids"] == tokenizer("def main")["input_ids"]


def alone(model: Any, tokenizer: Any, text: str, length: int, batch: int, micro_batches: int) -> list[float]:
    """Losses of one process; the end of a text is taught, where the last piece is padded too."""
    tokens, end = tokenizer(text)["input_ids"], tokenizer.eos_token_id
    tokens = [*tokens, end]
    pieces = [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
    given = []
    for row in pieces:
        missing = length - len(row)
        mask, labels = [1] * len(row) + [0] * missing, row + [-100] * missing
        given.append({"input_ids": row + [end] * missing, "attention_mask": mask, "labels": labels})
    assert batch == 1 or given[-1]["attention_mask"][-1] == 0, "no piece is padded"
    rows = itertools.cycle(given)

    def micro_batch() -> dict[str, torch.Tensor]:
        taken = [next(rows) for _ in range(batch)]
        return {name: torch.tensor([row[name] for row in taken]) for name in taken[0]}

    steps = [[micro_batch() for _ in range(micro_batches)] for _ in range(STEPS)]
    return train_alone(model, steps, optimizer=partial(torch.optim.AdamW, lr=RATE)).losses
