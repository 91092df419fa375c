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
LENGTH = 64


def folder_of_a_model(folder: Path) -> Any:
    """A tiny Llama with a tokenizer of bytes, in shards."""
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


def run_script(rank: int, world: int, folder: str, steps: int, length: int, rate: float) -> None:
    """The script itself, with its arguments, in each process."""
    found = importlib.util.spec_from_file_location("train_hf", ROOT / "configs" / "train_hf.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    at = Path(folder)
    arguments = {
        "--model": at / "model", "--text": at / "text.txt", "--out": at / "out", "--seq-length": length,
        "--steps": steps, "--learning-rate": rate, "--deepspeed_config": at / "ds_config.json",
    }  # fmt: skip
    sys.argv = ["train_hf.py", *(str(word) for pair in arguments.items() for word in pair)]
    script.main()


@pytest.mark.parametrize(
    ("out", "rule"),
    [
        ("full", "must be a new folder or an empty one"),
        ("full/file/out", "must be a folder that can be made (Not a directory)"),
    ],
)
def test_an_out_that_cannot_be_written_is_one_line_before_the_work(tmp_path: Path, out: str, rule: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    script = [sys.executable, str(ROOT / "configs" / "train_hf.py"), "--model", "none", "--text", "none"]
    done = subprocess.run(
        [*script, "--out", str(tmp_path / out)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert last.startswith("train_hf.py: error: --out: got ") and rule in last and ", use " in last, last
    assert [each.name for each in tmp_path.rglob("*")] == ["full", "file"], "something was left behind"


def launched(tmp_path: Path, text: str, blocks: dict[str, Any], steps: int, length: int, rate: float) -> list[float]:
    """The losses of the script on two processes."""
    config = json.loads((ROOT / "configs" / "hf.json").read_text()) | {"gradient_clipping": 0} | blocks
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    done = torchrun(run_script, 2, str(tmp_path), steps, length, rate, until="step 1")
    assert done.code == 0, done.output[-3000:]
    return [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", done.output, re.MULTILINE)]


def trained_alone(model: Any, steps: list[list[dict[str, torch.Tensor]]], rate: float) -> list[float]:
    """The losses of the same micro-batches in one process."""
    stepper, found = torch.optim.AdamW(model.parameters(), lr=rate), []
    for step in steps:
        stepper.zero_grad()
        losses = [model(**one).loss / len(step) for one in step]
        torch.stack(losses).sum().backward()
        stepper.step()
        found.append(float(sum(losses).detach()))
    return found


def test_the_script_trains_and_writes_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = folder_of_a_model(tmp_path / "model")
    text = (ROOT / "configs" / "train_hf.py").read_text()
    losses = launched(tmp_path, text, {"token_pipeline": {"slices": [1, 40, 23]}}, 4, LENGTH, 1e-3)

    tokens = tokenizer(text)["input_ids"]
    samples = [torch.tensor([tokens[start : start + LENGTH]]) for start in range(0, len(tokens), LENGTH - 1)]
    batches = [{"input_ids": one, "labels": one} for one in samples]
    expected = trained_alone(model, [batches[at : at + 2] for at in range(0, 8, 2)], 1e-3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.1, "it learns nothing"

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in trained.named_parameters():
        off = float((parameter - model.get_parameter(name)).norm() / parameter.norm())
        assert off < 1e-4, f"{name}: {off}"
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("def main")["input_ids"] == tokenizer("def main")["input_ids"]


def test_the_script_teaches_the_end_of_a_text(tmp_path: Path) -> None:
    """With the end for padding, as most tokenizers without padding have it, and a last piece that is padded."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = folder_of_a_model(tmp_path / "model")
    text, end, length, steps, rate = "not to be", tokenizer.eos_token_id, 7, 60, 5e-3
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "token_pipeline": {"slices": 2}}
    losses = launched(tmp_path, text, batch, steps, length, rate)

    tokens = [*tokenizer(text)["input_ids"], end]
    first, last = tokens[:length], tokens[length - 1 :]
    padding = length - len(last)
    assert last[-1] == end and padding > 0
    rows = {
        "input_ids": [first, last + [end] * padding],
        "attention_mask": [[1] * length, [1] * len(last) + [0] * padding],
        "labels": [first, last + [-100] * padding],
    }
    given = {name: torch.tensor(value) for name, value in rows.items()}
    expected = trained_alone(model, [[given]] * steps, rate)
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-5) and losses == pytest.approx(expected, rel=0.1)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for one in (trained, model):
        logits = one.eval()(input_ids=torch.tensor([last[:-1]])).logits[0, -1]
        assert float(logits.softmax(-1)[end].detach()) > 0.9
