"""configs/train_hf.py as docs/huggingface.md launches it: from a folder to a folder, in token slices."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents import ROOT
from tests.spawn import torchrun

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")


def folder_of_a_model(folder: Path) -> Any:
    """A tiny Llama with a tokenizer of bytes, in shards; with the end for padding, as most tokenizers have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.hf.families import model_of

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.save_pretrained(folder)
    model = model_of("llama, tied, dynamic", vocab_size=len(tokenizer))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model, tokenizer


def run_script(rank: int, world: int, folder: str, steps: int, length: int) -> None:
    """The script itself, with its arguments, in each process."""
    found = importlib.util.spec_from_file_location("train_hf", ROOT / "configs" / "train_hf.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    at = Path(folder)
    arguments = {
        "--model": at / "model", "--text": at / "text.txt", "--out": at / "out", "--seq-length": length,
        "--steps": steps, "--learning-rate": 1e-3, "--deepspeed_config": at / "ds_config.json",
    }  # fmt: skip
    sys.argv = ["train_hf.py", *(str(word) for pair in arguments.items() for word in pair)]
    script.main()


def test_an_out_that_cannot_be_written_is_one_line_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    script = [sys.executable, str(ROOT / "configs" / "train_hf.py"), "--model", "none", "--text", "none", "--out"]
    for out, rule in (
        ("full", "must be a new folder or an empty one"),
        ("full/file/out", "must be a folder that can be made (Not a directory)"),
    ):
        done = subprocess.run([*script, str(tmp_path / out)], capture_output=True, text=True, timeout=120, cwd=ROOT)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
        assert last.startswith("train_hf.py: error: --out: got ") and rule in last and ", use " in last, last
    assert [each.name for each in tmp_path.rglob("*")] == ["full", "file"], "something was left behind"


TEXT = (ROOT / "configs" / "train_hf.py").read_text()


@pytest.mark.parametrize(
    ("text", "length", "batch", "slices"), [(TEXT, 64, (1, 2), [1, 40, 23]), ("not to be", 7, (2, 1), 2)], ids=["long", "padded"]
)  # fmt: skip
def test_the_script_trains_and_writes_the_folder(
    tmp_path: Path, text: str, length: int, batch: tuple[int, int], slices: Any
) -> None:
    """As one process does; the end of a text is taught, where the last piece is padded too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = folder_of_a_model(tmp_path / "model")
    config = json.loads((ROOT / "configs" / "hf.json").read_text()) | {"gradient_clipping": 0}
    config |= {"train_micro_batch_size_per_gpu": batch[0], "gradient_accumulation_steps": batch[1]}
    (tmp_path / "ds_config.json").write_text(json.dumps(config | {"token_pipeline": {"slices": slices}}))
    (tmp_path / "text.txt").write_text(text)
    done = torchrun(run_script, 2, str(tmp_path), 4, length, until="step 1")
    assert done.code == 0, done.output[-3000:]
    losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", done.output, re.MULTILINE)]

    tokens, end = tokenizer(text)["input_ids"], tokenizer.eos_token_id
    tokens = [*tokens, *([end] if text != TEXT else [])]
    pieces = [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
    given = []
    for row in pieces:
        missing = length - len(row)
        mask, labels = [1] * len(row) + [0] * missing, row + [-100] * missing
        given.append({"input_ids": row + [end] * missing, "attention_mask": mask, "labels": labels})
    assert text == TEXT or (given[-1]["attention_mask"][-1] == 0 and pieces[-1][-1] == end)
    stepper, expected, at = torch.optim.AdamW(model.parameters(), lr=1e-3), [], 0
    for _ in range(4):
        stepper.zero_grad()
        each = []
        for _ in range(batch[1]):
            rows = [given[(at + row) % len(given)] for row in range(batch[0])]
            at += batch[0]
            each.append(model(**{name: torch.tensor([row[name] for row in rows]) for name in rows[0]}).loss / batch[1])
        torch.stack(each).sum().backward()
        stepper.step()
        expected.append(float(sum(each)))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.1, "it learns nothing"

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in trained.named_parameters():
        off = float((parameter - model.get_parameter(name)).norm() / parameter.norm())
        assert off < 1e-4, f"{name}: {off}"
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("def main")["input_ids"] == tokenizer("def main")["input_ids"]
