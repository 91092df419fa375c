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
STEPS, LENGTH, RATE = 4, 64, 1e-3


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


def run_script(rank: int, world: int, folder: str) -> None:
    """The script itself, with its arguments, in each process."""
    found = importlib.util.spec_from_file_location("train_hf", ROOT / "configs" / "train_hf.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    at = Path(folder)
    arguments = {
        "--model": at / "model", "--text": at / "text.txt", "--out": at / "out", "--seq-length": LENGTH,
        "--steps": STEPS, "--learning-rate": RATE, "--deepspeed_config": at / "ds_config.json",
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


def test_the_script_trains_and_writes_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = folder_of_a_model(tmp_path / "model")
    text = (ROOT / "configs" / "train_hf.py").read_text()
    config = json.loads((ROOT / "configs" / "hf.json").read_text())
    config |= {"gradient_clipping": 0, "token_pipeline": {"slices": [1, 40, 23]}}
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    done = torchrun(run_script, 2, str(tmp_path), until="step 1")
    assert done.code == 0, done.output[-3000:]
    losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", done.output, re.MULTILINE)]

    tokens = tokenizer(text)["input_ids"]
    samples = [torch.tensor([tokens[start : start + LENGTH]]) for start in range(0, len(tokens) - 1, LENGTH)]
    stepper, expected = torch.optim.AdamW(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        stepper.zero_grad()
        pair = [model(input_ids=one, labels=one).loss / 2 for one in samples[2 * step : 2 * step + 2]]
        torch.stack(pair).sum().backward()
        stepper.step()
        expected.append(float(sum(pair).detach()))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.1, "it learns nothing"

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in trained.named_parameters():
        off = float((parameter - model.get_parameter(name)).norm() / parameter.norm())
        assert off < 1e-4, f"{name}: {off}"
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("def main")["input_ids"] == tokenizer("def main")["input_ids"]
