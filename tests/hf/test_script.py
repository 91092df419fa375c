"""examples/finetune_llama.py as docs/tutorials/hugging_face.md launches it: from a folder to a folder, in token slices."""

import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.hf.families import model_of, train_alone
from tests.pipeline.training import difference
from tests.programs import ROOT
from tests.spawn import run_to_exit

SCRIPT = ROOT / "examples" / "finetune_llama.py"
STEPS, RATE = 4, 1e-3
LINES = [{"prompt": a, "completion": b} for a, b in (("to ", "be"), ("n", "o"), ("", "To be"))]
# text, tokens of a row, sequences of a micro-batch, micro-batches, slices
CASES: dict[str, tuple[str, int, int, int, int]] = {
    "long": ("to be or not to be, that is the question. " * 40, 64, 1, 2, 3),
    "padded": ("not to be", 7, 2, 1, 2),
    "packed": (SCRIPT.read_text()[:200], 16, 2, 1, 3),
}
PACKED, ALONE = ["--packing", "--lora-r", "2", "--learning-rate", "0.01"], ["--stages", "1", "--mean-over", "micro_batch"]
HALF = f"--checkpoints folder --max-steps {STEPS // 2}".split()
# runs of each case, with more arguments; of two replicas that are each alone, the second evaluates blank rows
RUNS = {"long": [["--generate", "def "]], "padded": [[]],
        "packed": [PACKED + ALONE, PACKED, PACKED + HALF, [*PACKED, *HALF[:2], "--resume-from-checkpoint"]]}  # fmt: skip


def folder_of_a_model(folder: Path) -> Any:
    """A tiny Llama with a tokenizer of bytes, in shards; with the end for padding, as most tokenizers have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.save_pretrained(folder)
    model = model_of("llama", vocab_size=len(tokenizer), tie_word_embeddings=True)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model, tokenizer


def run_scripts(rank: int, world: int, folder: Path) -> None:
    torch.distributed.destroy_process_group = lambda *group: None  # the next run is in the same one
    for name, (_, length, *_) in CASES.items():
        os.chdir(folder / name)
        for number, more in enumerate(RUNS[name]):
            arguments = f"--model {folder / name}/model --data text.txt --eval-data eval.jsonl --out out{number} "
            arguments += f"--max-seq-length {length} --max-steps {STEPS} --learning-rate {RATE} "
            arguments += "--lr-scheduler-type constant --logging-steps 1 --deepspeed_config ds_config.json --generate"
            sys.argv = [SCRIPT.name, *arguments.split(), "", *more]
            print(f"run {name}", flush=True)
            runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize(("out", "rule"), [
    ("", "--out: got [^\n]*must be a new folder or an empty one"), ("new", "--model: got ./no/such, must be a folder with a "),
])  # fmt: skip
def test_a_folder_of_no_use_is_one_line_before_the_work(tmp_path: Path, monkeypatch: Any, out: str, rule: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", f"finetune_llama.py --model ./no/such --data none --out {tmp_path / out}".split())
    with pytest.raises(SystemExit, match=rf"^finetune_llama\.py: error: {rule}[^\n]*, use [^\n]*$"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_trains_as_one_process_and_writes_the_folder(tmp_path: Path) -> None:
    made = {name: folder_of_a_model(tmp_path / name / "model") for name in CASES}
    for name, (text, _, batch, micro_batches, slices) in CASES.items():
        config = json.loads((ROOT / "configs" / "hf.json").read_text()) | {"gradient_clipping": 0}
        config |= {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": micro_batches}
        (tmp_path / name / "ds_config.json").write_text(json.dumps(config | {"token_pipeline": {"slices": slices}}))
        (tmp_path / name / "text.txt").write_text(text)
        (tmp_path / name / "eval.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    first, second = run_to_exit(run_scripts, 2, tmp_path, timeout=240)
    assert first.code == second.code == 0, first.output[-3000:] + second.output[-3000:]
    said = re.split(r"^run \w+$", first.output, flags=re.MULTILINE)[1:]
    names = [(name, number) for name in CASES for number in range(len(RUNS[name]))]
    losses = []
    for (name, number), output in zip(names, said, strict=True):
        model, tokenizer = made[name]
        losses.append([float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", output)])
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / name / f"out{number}")
        (evaluated,) = re.findall(r"evaluation loss ([\d.]+), perplexity", output)
        assert float(evaluated) == pytest.approx(loss_of_lines(trained, tokenizer), rel=1e-5), name
        if name != "packed":
            assert losses[-1] == pytest.approx(alone(model, tokenizer, *CASES[name][:4]), rel=1e-5), name
            assert losses[-1][-1] < losses[-1][0] - 0.1, "it learns nothing"
            for weight, parameter in trained.named_parameters():
                assert difference(parameter, model.get_parameter(weight)) < 1e-4, f"{name}, {weight}"
        again = AutoTokenizer.from_pretrained(tmp_path / name / f"out{number}")
        assert again("def main")["input_ids"] == tokenizer("def main")["input_ids"]
    assert re.search(r"^def .", said[0], re.MULTILINE), "nothing is generated"
    whole, half, rest = losses[-3:]
    assert half + rest == whole and whole[-1] < whole[0] - 0.05


def loss_of_lines(model: Any, tokenizer: Any) -> float:
    """The mean loss of the answers' tokens, line by line."""
    total, count = 0.0, 0
    for line in LINES:
        prompt, answer = (tokenizer(line[part])["input_ids"] for part in ("prompt", "completion"))
        tokens = [*prompt, *answer, tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + answer + [tokenizer.eos_token_id]
        counted = len(answer) + bool(prompt)
        total += float(model(torch.tensor([tokens]), labels=torch.tensor([labels])).loss) * counted
        count += counted
    return total / count


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
    rows = runpy.run_path(str(SCRIPT))["endless"](given, 1234)

    def micro_batch() -> dict[str, torch.Tensor]:
        taken = [next(rows) for _ in range(batch)]
        return {name: torch.tensor([row[name] for row in taken]) for name in taken[0]}

    steps = [[micro_batch() for _ in range(micro_batches)] for _ in range(STEPS)]
    return train_alone(model, steps, mean_over_step=True, optimizer=partial(torch.optim.AdamW, lr=RATE, weight_decay=0)).losses
