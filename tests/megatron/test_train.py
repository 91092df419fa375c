"""train.py from end to end: resumed, sliced, frozen and reshaped runs; folders and arguments that are errors of one line."""

import json
import logging
import os
import random
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import ds_terapipe
from ds_terapipe import cli
from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.layers import Rotary
from tests.megatron.test_data import write as write_sentences, write_images
from tests.spawn import free_port, in_background, launched

pytest.importorskip("PIL")
ROOT = Path(__file__).parents[2]
RUN = shlex.split("--num-layers 4 --hidden-size 32 --num-attention-heads 4 --log-interval 1 --seed 5 --split 80,20,0")
ON_TWO = [*RUN, "--train-iters", "6", "--pipeline-model-parallel-size", "2"]
GPT = shlex.split("--seq-length 32 --vocab-size 257 --data-path corpus")
UNTIED = [*GPT, "--untie-embeddings-and-output-weights"]
ALONE = [*RUN, "--train-iters", "1"]
BERT = shlex.split("--model bert --seq-length 48 --data-path sentences/corpus")
VIT = shlex.split("--model vit --data images --img-h 8 --img-w 8 --patch-dim 4")
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
}  # fmt: skip
PHASES = [
    {"steps": 4, "batch_size": 8, "seq_length": 32, "lr": 5e-2, "warmup_steps": 0},
    {"steps": 2, "batch_size": 4, "seq_length": 48, "lr": 5e-2, "warmup_steps": 0, "micro_batch_size": 1},
]
LAMB: dict[str, Any] = {
    "optimizer": {"type": "FusedLamb", "params": {"exclude": "bias_norm", "max_grad_norm": 1.0}},
    "scheduler": {"type": "MixedBatch", "params": {"phases": PHASES}},
    "train_micro_batch_size_per_gpu": 2,
}
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
ADAMW: dict[str, Any] = {"optimizer": ADAM, "train_micro_batch_size_per_gpu": 4, "train_batch_size": 8}
SLICED = {"token_pipeline": {"slices": 4}}
WIDE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}


def elastic(entries: int, *resize: list[int]) -> dict[str, Any]:
    """Keys that freeze ``entries`` entries at the second step."""
    freeze = {"policy": "schedule", "frozen_layers": [[2, entries]]}
    return {"elastic_pipeline": {"freeze": freeze, "resize": {"policy": list(resize) or "off"}}}


def saved(folder: str, step: int) -> list[str]:
    return ["--save", folder, "--save-interval", str(step), "--exit-interval", str(step)]


STILL, MOVED = {**SETTINGS, **elastic(3)}, {**SETTINGS, **elastic(3, [2, 1])}
EVALUATED, THREE_AND_ONE = shlex.split("--eval-interval 3 --eval-iters 2"), ["--stage-layers", "3,1"]
# configuration, arguments; in this order, as some go on from what others have saved
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "whole": (SETTINGS, [*GPT, *EVALUATED]), "stopped": (SETTINGS, [*GPT, *saved("saved", 3)]),
    "resumed": (SETTINGS, [*GPT, "--load", "saved"]),
    "longer": (SETTINGS, [*GPT, "--load", "saved", "--train-iters", "8", "--exit-interval", "4"]),
    "uneven, stopped": ({**SETTINGS, **SLICED}, [*GPT, *THREE_AND_ONE, *saved("uneven", 3)]),
    "uneven, resumed": ({**SETTINGS, **SLICED}, [*GPT, *THREE_AND_ONE, "--load", "uneven"]),
    "even after uneven": (SETTINGS, [*GPT, "--load", "uneven"]),
    "one step": ({**SETTINGS, **SLICED}, [*GPT, *saved("one", 1)]), "broken": (SETTINGS, [*GPT, "--load", "broken"]),
    "missing": (SETTINGS, [*GPT, "--load", "nowhere", "--save", "one"]),
    "another": (SETTINGS, [*GPT, "--load", "one", "--hidden-size", "64"]),
    "flipped": ({**SETTINGS, **SLICED}, [*GPT, "--load", "one"]),
    "unwritable": (SETTINGS, [*GPT, "--save", "file/folder"]),
    "new": (SETTINGS, [*GPT, "--load", "new", "--save", "new", "--exit-interval", "1"]), "still": (STILL, UNTIED),
    "moved": (MOVED, [*UNTIED, *EVALUATED]),
    "moved, sliced, wide": ({**MOVED, **SLICED, **WIDE}, [*UNTIED, "--log-interval", "2"]),
    "moved, stopped": (MOVED, [*UNTIED, *saved("moved", 3)]), "moved, resumed": (MOVED, [*UNTIED, "--load", "moved"]),
}  # fmt: skip
for model, settings, words in (("bert", LAMB, BERT), ("vit", ADAMW, VIT)):
    RUNS[f"{model} whole"] = (settings, [*words, *EVALUATED])
    RUNS[f"{model} still"] = ({**settings, **elastic(2)}, words)
    RUNS[f"{model} moved"] = ({**settings, **elastic(2, [2, 1])}, [*words, *saved(model, 5)])
    RUNS[f"{model} resumed"] = ({**settings, **elastic(2, [2, 1])}, [*words, "--load", model])


class Ran(NamedTuple):
    """Of a run: the error, the loss of each step, the engine, (frozen entries, stages, replicas) at the end, the log."""

    error: str
    losses: dict[int, float] = {}
    engine: str = ""
    shape: tuple[int, int, int] = (0, 0, 0)
    said: list[str] = []


def prepare(folder: Path) -> None:
    """Texts, sentences, images of two colours; and what is no checkpoint."""
    words, texts = random.Random(0), folder / "texts"
    texts.mkdir()
    for number in range(30):
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(200))
        (texts / f"{number}.txt").write_text(text)
    where = ["--input", str(texts), "--pattern", "*.txt", "--output-prefix", str(folder / "corpus")]
    assert cli.main(["prepare-data", *where]) == 0
    (folder / "sentences").mkdir()
    write_sentences(folder / "sentences", "--split-sentences")
    write_images(folder / "images", {"blue": 10, "red": 10}, blue=(0, 0, 255), red=(255, 0, 0))
    (folder / "broken" / "global_step3").mkdir(parents=True)
    (folder / "broken" / "latest").write_text("global_step3")
    (folder / "broken" / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    (folder / "file").touch()


def harm(name: str) -> None:
    if name == "uneven, resumed":  # as a job leaves it that is killed between two renames
        Path("uneven", "global_step3").rename("uneven/.global_step3.replaced")
    if name == "flipped":
        file = Path("one", "global_step1", "mp_rank_00_model_states.pt")
        data = file.read_bytes()
        file.write_bytes(data[:-300] + bytes([data[-300] ^ 1]) + data[-299:])


def worker(rank: int, world: int, names: list[str], folder: str) -> dict[str, Ran]:
    """train.py's own code once for each of these runs, in an empty folder."""
    ds_terapipe.register()
    os.chdir(folder)
    if rank == 0:
        prepare(Path(folder))
    train, found = SimpleNamespace(**runpy.run_path(str(ROOT / "train.py"))), {}
    train.logger.setLevel("INFO")
    for name, (config, words) in ((name, RUNS[name]) for name in names):
        Path(f"{name} {rank}.json").write_text(json.dumps({"steps_per_print": 10**9, **config}))
        options = ["--deepspeed_config", f"{name} {rank}.json", "--log-file", f"{name}.jsonl"]
        torch.distributed.barrier()
        if rank == 0:
            harm(name)
        torch.distributed.barrier()
        said, handler = list[str](), logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        train.logger.addHandler(handler)
        with mock.patch.object(sys, "argv", ["train.py", *ON_TWO, *words, *options]):
            try:
                trainer = train.Trainer(train.parse_arguments())
                trainer.train()
            except ConfigError as error:
                found[name] = Ran(str(error))
                continue
            finally:
                train.logger.removeHandler(handler)
        engine, log = trainer.engine, Path(f"{name}.jsonl")
        if "token_pipeline" in config and "elastic_pipeline" not in config:
            assert engine.slices_run == ((8,) * 4,) * 2 and engine.units_run == (8, 8), name
            assert engine.makes_weight_gradients_once() and not engine.not_deferred, name
        torch.distributed.barrier()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        shape = getattr(engine, "frozen_layers", 0), engine.num_stages, engine.dp_world_size
        found[name] = Ran("", {line["iteration"]: line["loss"] for line in lines}, type(engine).__name__, shape, said)
    return found


Ranks = list[dict[str, Ran]]
_NAMES = list(RUNS)
ranks = launched(worker, 2, _NAMES[: _NAMES.index("still")], timeout=280, folder=True)
elastic_ranks = launched(worker, 2, _NAMES[_NAMES.index("still") :], timeout=280, folder=True)


def test_resumed_and_sliced_runs_have_the_same_losses(ranks: Ranks) -> None:
    runs, whole = ranks[0], ranks[0]["whole"].losses
    assert list(whole) == [1, 2, 3, 4, 5, 6] and whole[6] < whole[1] - 0.5
    assert {**runs["stopped"].losses, **runs["resumed"].losses} == whole
    assert {**runs["uneven, stopped"].losses, **runs["uneven, resumed"].losses} == pytest.approx(whole, rel=1e-5)
    order = "--train-iters: the checkpoint's training has 24 samples and this one 32, and their order depends on the number: "
    assert set(runs["longer"].losses) == {4} and any(line.startswith(order) for line in runs["longer"].said)
    message = '--stage-layers: got "2,2", must be as the checkpoint in uneven was saved, use 3,1'
    assert [found["even after uneven"].error for found in ranks] == [message] * 2


def test_folders_that_cannot_be_used_are_errors_on_every_rank_before_the_first_step(ranks: Ranks) -> None:
    """A checkpoint that can't be read, of another model, none at all, and a place where none can be written."""
    refused = {"even after uneven", "broken", "missing", "another", "unwritable", "flipped"}
    for found in ranks:
        assert {name for name, run in found.items() if run.error} == refused
        # each stage has its own tensors, and each its own size that does not fit
        assert all(found[name].error == ranks[0][name].error for name in refused - {"another"})
        assert "\n" not in found["another"].error
    said = {name: run.error for name, run in ranks[0].items()}
    text = "--load: got one/global_step1/mp_rank_00_model_states.pt with another checksum, must be as it was saved, use"
    assert said["flipped"].startswith(text)
    assert "mp_rank_00_model_states.pt" in said["broken"] and "torch.Size" in said["another"]
    assert said["missing"].startswith('--load: got "nowhere", must be a folder with checkpoints, use the one')
    assert said["another"].startswith('--load: got "one", must be a checkpoint of this model (size mismatch for ')
    assert said["unwritable"].startswith('--save: got "file/folder", must be a folder that can be written to (')
    assert set(ranks[0]["new"].losses) == {1}


def test_a_run_that_leaves_the_pipeline_has_the_losses_of_one_that_stays(elastic_ranks: Ranks) -> None:
    """And goes on from a checkpoint, with validation, and where micro-batches get smaller; a line has the mean of its steps."""
    runs = elastic_ranks[0]
    still, whole = runs["still"].losses, runs["moved"].losses
    assert list(whole) == [1, 2, 3, 4, 5, 6] and whole[6] < whole[1] - 0.5
    assert whole == pytest.approx(still, rel=1e-5) == runs["moved, sliced, wide"].losses
    assert {**runs["moved, stopped"].losses, **runs["moved, resumed"].losses} == whole
    for name in ("moved", "moved, sliced, wide", "moved, stopped", "moved, resumed"):
        assert runs[name].shape == (3, 1, 2), name
    _, losses, *_, said = runs["moved, sliced, wide"]
    means = {1: losses[1], 2: losses[2], 4: (losses[3] + losses[4]) / 2, 6: (losses[5] + losses[6]) / 2}
    lines = [line.split(" | lr")[0] for line in said if " | lr" in line]
    assert lines == [f"iteration {step}/6 | loss {mean:.4f}" for step, mean in means.items()]


@pytest.mark.parametrize("model", ["bert", "vit"])
def test_so_do_encoders_in_phases(elastic_ranks: Ranks, model: str) -> None:
    names = ("whole", "still", "moved", "resumed")
    whole, still, moved, resumed = (elastic_ranks[0][f"{model} {name}"] for name in names)
    assert whole.engine == "PipelineEngine" and sum("validation" in line for line in whole.said) == 2
    assert (still.engine, still.shape) == ("ElasticPipelineEngine", (2, 2, 1)) and moved.shape == (2, 1, 2)
    assert list(whole.losses) == list(still.losses) == [1, 2, 3, 4, 5, 6] and whole.losses[4] < whole.losses[1] - 0.2
    assert whole.losses[2] == pytest.approx(still.losses[2], rel=1e-5)
    assert whole.losses[4] != pytest.approx(still.losses[4], rel=1e-5)
    assert {**moved.losses, **resumed.losses} == pytest.approx(still.losses, rel=1e-5)
    assert (len(moved.losses), list(resumed.losses)) == (5, [6])


STAGES = '--stage-layers: got "{}", must be one positive number for each of 2 stages, 4 together, use e.g. 2,2'
REFUSED: list[tuple[list[str], str]] = [
    ([*ALONE, *GPT, "--train-iters", "0"], "argument --train-iters: got 0, must be an integer of 1 or"),
    ([*ALONE, *GPT, "--log-interval", "ten"], "argument --log-interval: got ten, must be an integer of 1 or"),
    ([*ALONE, *GPT, "--num-query-groups", "2", "--tensor-model-parallel-size", "4"],
     "--num-query-groups: got 2, must be a divisor of --num-attention-heads (4) and a multiple of "
     "--tensor-model-parallel-size (4), use e.g. 4"),
    ([*ALONE, *GPT, "--tensor-model-parallel-size", "3"],
     "--num-attention-heads: got 4, must be a multiple of --tensor-model-parallel-size (3), use e.g. 6"),
    *(([*ALONE, *GPT, "--pipeline-model-parallel-size", "2", "--stage-layers", layers], STAGES.format(layers))
      for layers in ("3,2", "4,0", "two")),
    ([*ALONE, *BERT, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
     '--sequence-parallel: got "bert with 2 tensor-parallel rank(s)", must be gpt with several that share its tokens, use '
     "--tensor-model-parallel-size 2 or leave it out"),
    ([*ALONE, "--model", "gpt"], "the following arguments are required: --seq-length, --vocab-size, --data-path"),
]  # fmt: skip


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Arguments as train.py reads them; of a word that is given twice, the later one."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--deepspeed_config", "none.json"])
    return runpy.run_path(str(ROOT / "train.py"))["parse_arguments"]()


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_arguments_that_can_not_be_end_with_a_line(words, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(monkeypatch, *words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"error: {message}" in last
    assert last.endswith(message) or message.startswith("argument ")


def test_a_phase_that_is_longer_than_the_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = parsed(monkeypatch, *ALONE, *GPT).task
    assert task.args.rotary_base == Rotary().base
    with pytest.raises(ConfigError) as refused:
        task.datasets({16: 8, 64: 8}, 0, lambda: True)
    assert str(refused.value) == "--seq-length: got 32, must be that of the longest phase (64) or more, use 64"


WITHOUT_OP = """
import runpy, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path({train!r}, run_name="__main__")
"""


def launch() -> subprocess.CompletedProcess[str]:
    """train.py by DeepSpeed's launcher with two tensor-parallel ranks, without DeepSpeed's op that takes minutes to compile."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings = {"env": environment, "capture_output": True, "text": True, "timeout": 280}
    parallel = "--tensor-model-parallel-size 2 --position-embedding-type rope --swiglu --normalization RMSNorm"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "launched.py")
        Path(folder, "a.txt").write_text("alpha beta gamma delta " * 2000)
        Path(folder, "config.json").write_text(json.dumps({"steps_per_print": 10**9, **SETTINGS, **SLICED}))
        script.write_text(WITHOUT_OP.format(train=str(ROOT / "train.py")))
        subprocess.run(shlex.split("ds_terapipe prepare-data --input a.txt --output-prefix corpus"), cwd=folder, **settings)
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
        options = [*RUN, *GPT, *shlex.split(f"--train-iters 2 --split 1,0,0 {parallel} --deepspeed_config config.json")]
        return subprocess.run([*command, str(script), *options], cwd=folder, **settings)


without_op = in_background(f"{__name__}:launcher", 2, launch)


def test_the_launcher_runs_it_with_tensor_parallelism(without_op: subprocess.CompletedProcess[str]) -> None:
    assert without_op.returncode == 0 and "iteration 2/2 | loss" in without_op.stderr, without_op.stderr[-3000:]
