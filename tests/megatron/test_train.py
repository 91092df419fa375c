"""train.py from end to end: resumed, sliced, frozen and reshaped runs; folders and arguments that are errors of one line."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("PIL")

from PIL import Image

import ds_terapipe
from ds_terapipe import cli
from ds_terapipe.errors import ConfigError
from tests.megatron.test_data import write as write_sentences
from tests.spawn import free_port, in_background, launched

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
DAMAGED = {"flipped layer": "layer_02-model_00-model_states.pt", "flipped states": "mp_rank_00_model_states.pt"}


def elastic(entries: int, *resize: list[int]) -> dict[str, Any]:
    """So many entries freeze at the second step."""
    freeze = {"policy": "schedule", "frozen_layers": [[2, entries]]}
    return {"elastic_pipeline": {"freeze": freeze, "resize": {"policy": list(resize) or "off"}}}


def saved(folder: str, step: int) -> list[str]:
    """Save after so many steps and end there."""
    return ["--save", folder, "--save-interval", str(step), "--exit-interval", str(step)]


STILL, MOVED = {**SETTINGS, **elastic(3)}, {**SETTINGS, **elastic(3, [2, 1])}
EVALUATED, THREE_AND_ONE = shlex.split("--eval-interval 3 --eval-iters 2"), ["--stage-layers", "3,1"]
# configuration, arguments; in this order, as some go on from what others have saved
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "whole": (SETTINGS, [*GPT, *EVALUATED]),
    "stopped": (SETTINGS, [*GPT, *saved("saved", 3)]),
    "resumed": (SETTINGS, [*GPT, "--load", "saved"]),
    "longer": (SETTINGS, [*GPT, "--load", "saved", "--train-iters", "8", "--exit-interval", "4"]),
    "uneven, stopped": ({**SETTINGS, **SLICED}, [*GPT, *THREE_AND_ONE, *saved("uneven", 3)]),
    "uneven, resumed": ({**SETTINGS, **SLICED}, [*GPT, *THREE_AND_ONE, "--load", "uneven"]),
    "even after uneven": (SETTINGS, [*GPT, "--load", "uneven"]),
    "other stages": (SETTINGS, [*GPT, "--load", "saved", "--stage-layers", "1,3"]),
    "one step": ({**SETTINGS, **SLICED}, [*GPT, *saved("one", 1)]),
    "broken": (SETTINGS, [*GPT, "--load", "broken"]),
    "missing": (SETTINGS, [*GPT, "--load", "nowhere", "--save", "one"]),
    "another": (SETTINGS, [*GPT, "--load", "one", "--hidden-size", "64"]),
    **{name: ({**SETTINGS, **SLICED}, [*GPT, "--load", "one"]) for name in DAMAGED},
    "unwritable": (SETTINGS, [*GPT, "--save", "file/folder"]),
    "new": (SETTINGS, [*GPT, "--load", "new", "--save", "new", "--exit-interval", "1"]),
    "still": (STILL, UNTIED),
    "moved": (MOVED, [*UNTIED, *EVALUATED]),
    "moved, sliced, wide": ({**MOVED, **SLICED, **WIDE}, UNTIED),
    "moved, stopped": (MOVED, [*UNTIED, *saved("moved", 3)]),
    "moved, resumed": (MOVED, [*UNTIED, "--load", "moved"]),
}
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


def train_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    for number, (name, colour) in enumerate({"blue": (0, 0, 255), "red": (255, 0, 0)}.items()):
        (folder / "images" / name).mkdir(parents=True)
        for place in range(10):
            image = Image.new("RGB", (8, 8), colour)
            image.putpixel((place % 8, number), (0, 255, 0))
            image.save(folder / "images" / name / f"{place}.png")
    (folder / "broken" / "global_step3").mkdir(parents=True)
    (folder / "broken" / "latest").write_text("global_step3")
    (folder / "broken" / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    (folder / "file").touch()


def harm(name: str) -> None:
    """Damage a checkpoint before a run."""
    if name == "uneven, resumed":  # as a job leaves it that is killed between two renames
        Path("uneven", "global_step3").rename("uneven/.global_step3.replaced")
    if name in DAMAGED:
        file = Path("one", "global_step1", DAMAGED[name])
        data = file.read_bytes()
        file.write_bytes(data[:-300] + bytes([data[-300] ^ 1]) + data[-299:])


def worker(rank: int, world: int, names: list[str], folder: str) -> dict[str, Ran]:
    """train.py's own code once for each of these runs, in an empty folder."""
    ds_terapipe.register()
    os.chdir(folder)
    if rank == 0:
        prepare(Path(folder))
    train, found = train_module(), {}
    train.logger.setLevel("INFO")
    for name, (config, words) in ((name, RUNS[name]) for name in names):
        Path(f"{name} {rank}.json").write_text(json.dumps({"steps_per_print": 10**9, **config}))
        options = ["--deepspeed_config", f"{name} {rank}.json", "--log-file", f"{name}.jsonl"]
        torch.distributed.barrier()
        if rank == 0:
            harm(name)
        torch.distributed.barrier()
        said: list[str] = []
        handler = logging.Handler()
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
    runs = ranks[0]
    whole = runs["whole"].losses
    assert list(whole) == [1, 2, 3, 4, 5, 6] and whole[6] < whole[1] - 0.5
    assert {**runs["stopped"].losses, **runs["resumed"].losses} == whole
    assert {**runs["uneven, stopped"].losses, **runs["uneven, resumed"].losses} == pytest.approx(whole, rel=1e-5)
    assert set(runs["longer"].losses) == {4}
    order = "--train-iters: the checkpoint's training has 24 samples and this one 32, and their order depends on the number: "
    assert any(line.startswith(order) for line in runs["longer"].said)
    message = '--stage-layers: got "{}", must be as the checkpoint in {} was saved, use {}'
    for found in ranks:
        assert found["other stages"].error == message.format("1,3", "saved", "2,2")
        assert found["even after uneven"].error == message.format("2,2", "uneven", "3,1")


def test_folders_that_cannot_be_used_are_errors_on_every_rank_before_the_first_step(ranks: Ranks) -> None:
    """A checkpoint that can't be read, of another model, none at all, and a place where none can be written."""
    refused = {"even after uneven", "other stages", "broken", "missing", "another", "unwritable", *DAMAGED}
    for found in ranks:
        assert {name for name, run in found.items() if run.error} == refused
        # each stage has its own tensors, and each its own size that does not fit
        assert all(found[name].error == ranks[0][name].error for name in refused - {"another"})
        assert "\n" not in found["another"].error
    said = {name: run.error for name, run in ranks[0].items()}
    for name, key in (("flipped layer", "load_checkpoint"), ("flipped states", "--load")):
        text = f"{key}: got one/global_step1/{DAMAGED[name]} with another checksum, must be as it was saved, use"
        assert said[name].startswith(text)
    assert "mp_rank_00_model_states.pt" in said["broken"] and "torch.Size" in said["another"]
    assert said["missing"].startswith('--load: got "nowhere", must be a folder with checkpoints, use the one')
    assert said["another"].startswith('--load: got "one", must be a checkpoint of this model (size mismatch for ')
    assert said["unwritable"].startswith('--save: got "file/folder", must be a folder that can be written to (')
    assert set(ranks[0]["new"].losses) == {1}


def test_a_run_that_leaves_the_pipeline_has_the_losses_of_one_that_stays(elastic_ranks: Ranks) -> None:
    """And goes on from a checkpoint, with validation in between, and where its micro-batches get smaller."""
    runs = elastic_ranks[0]
    still, whole = runs["still"].losses, runs["moved"].losses
    assert list(whole) == [1, 2, 3, 4, 5, 6] and whole[6] < whole[1] - 0.5
    assert whole == pytest.approx(still, rel=1e-5) == runs["moved, sliced, wide"].losses
    assert {**runs["moved, stopped"].losses, **runs["moved, resumed"].losses} == whole
    for name in ("moved", "moved, sliced, wide", "moved, stopped", "moved, resumed"):
        assert runs[name].shape == (3, 1, 2), name


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


def test_stages_are_read_from_the_checkpoint_whoever_wrote_it(tmp_path: Path) -> None:
    read = train_module().saved_stages
    states, old = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "stage_layers.json"
    assert read(tmp_path) is None
    old.write_text("[2, 2]")
    assert read(tmp_path) == [2, 2]
    for zipped in (True, False):  # DeepSpeed's checkpoint.checkpoint_serialization
        torch.save({"module": None}, states, _use_new_zipfile_serialization=zipped)
        assert read(tmp_path) == [2, 2]
        torch.save({"stage_layers": [3, 1]}, states, _use_new_zipfile_serialization=zipped)
        assert read(tmp_path) == [3, 1]
        states.write_bytes(states.read_bytes()[:-20])
        with pytest.raises(ConfigError, match=re.escape(f"--load: got {states} (")):
            read(tmp_path)
    states.unlink()
    old.write_text("[2, ")
    with pytest.raises(ConfigError, match=r"stage_layers\.json \(.*\), must be a whole file"):
        read(tmp_path)


def test_a_line_of_the_log_has_the_mean_since_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    train = train_module()
    trainer = train.Trainer.__new__(train.Trainer)
    trainer.args = SimpleNamespace(log_interval=3, train_iters=8, log_file=None)
    trainer.engine, trainer.first, trainer.losses = SimpleNamespace(get_lr=lambda: [0.1]), True, []
    with caplog.at_level("INFO", logger="train"):
        for trainer.iteration in range(1, 9):
            trainer._report(mock.MagicMock(), float(trainer.iteration), 1.0, 1)
    said = [line.removeprefix("iteration ").split(" | lr")[0] for line in caplog.messages]
    assert said == ["1/8 | loss 1.0000", "3/8 | loss 2.5000", "6/8 | loss 5.0000", "8/8 | loss 7.5000"]


# ---------------------------------------------------------------------------------------------- arguments that cannot be

HEADS = (
    "--num-query-groups: got {}, must be a divisor of --num-attention-heads (4) and a multiple of "
    "--tensor-model-parallel-size ({}), use e.g. 4"
)
STAGES = '--stage-layers: got "{}", must be one positive number for each of 2 stages, 4 together, use e.g. 2,2'
COUNTS = [
    *((name, value) for name in ("--log-interval", "--save-interval", "--eval-interval") for value in ("0", "-1")),
    *((name, "0") for name in ("--train-iters", "--exit-interval", "--num-layers", "--hidden-size", "--vocab-size")),
    *((name, "0") for name in ("--num-attention-heads", "--num-query-groups", "--seq-length", "--max-position-embeddings")),
    *((name, "-2") for name in ("--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--eval-iters")),
    *((name, "0") for name in ("--img-h", "--img-w", "--patch-dim")),
    ("--log-interval", "ten"),
]  # fmt: skip
REFUSED: list[tuple[list[str], str]] = [
    *(([*ALONE, *GPT, name, value], f"argument {name}: got {value}, must be an integer of {0 if 'eval-it' in name else 1} or")
      for name, value in COUNTS),
    ([*ALONE, *GPT, "--num-query-groups", "3"], HEADS.format(3, 1)),
    ([*ALONE, *GPT, "--num-query-groups", "2", "--tensor-model-parallel-size", "4"], HEADS.format(2, 4)),
    ([*ALONE, *GPT, "--tensor-model-parallel-size", "3"],
     "--num-attention-heads: got 4, must be a multiple of --tensor-model-parallel-size (3), use e.g. 6"),
    *(([*ALONE, *GPT, "--pipeline-model-parallel-size", "2", "--stage-layers", layers], STAGES.format(layers))
      for layers in ("3,2", "4", "4,0", "two")),
    ([*ALONE, "--model", "gpt"], "the following arguments are required: --seq-length, --vocab-size, --data-path"),
    ([*ALONE, "--model", "bert", "--seq-length", "8"], "the following arguments are required: --data-path"),
    ([*ALONE, "--model", "vit"], "the following arguments are required: --data"),
]  # fmt: skip


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Arguments as train.py reads them; of a word that is given twice, the later one."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--deepspeed_config", "none.json"])
    return train_module().parse_arguments()


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_arguments_that_can_not_be_end_with_a_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(monkeypatch, *words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"error: {message}" in last
    assert last.endswith(message) or message.startswith("argument ")


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_phase_that_is_longer_than_the_samples_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = parsed(monkeypatch, *ALONE, *GPT, "--model", model).task
    with pytest.raises(ConfigError) as refused:
        task.datasets({16: 8, 64: 8}, 0, lambda: True)
    assert str(refused.value) == "--seq-length: got 32, must be that of the longest phase (64) or more, use 64"


def test_heads_are_shared_evenly_in_a_configuration_of_megatron_core() -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ds_terapipe.megatron.common import check_config

    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=3)
    message = "num_query_groups: got 3, must be a divisor of num_attention_heads (4), use e.g. 4"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(config, PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1))


# ------------------------------------------------------------------------------------------------------------ the launcher

WITHOUT_OP = """
import runpy
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path({train!r}, run_name="__main__")
"""


def launched_with(op: bool) -> subprocess.CompletedProcess[str]:
    """train.py by DeepSpeed's launcher with two tensor-parallel ranks; DeepSpeed's shared-memory op is there or not."""
    train, port = ROOT / "train.py", free_port()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings = {"env": environment, "capture_output": True, "text": True, "timeout": 900 if op else 280}
    parallel = "--tensor-model-parallel-size 2 --position-embedding-type rope --swiglu --normalization RMSNorm"
    with tempfile.TemporaryDirectory() as folder:
        text, script = Path(folder, "a.txt"), Path(folder, "launched.py")
        text.write_text("alpha beta gamma delta " * 2000)
        Path(folder, "config.json").write_text(json.dumps({"steps_per_print": 10**9, **SETTINGS, **SLICED}))
        script.write_text(WITHOUT_OP.format(train=str(train)))
        prepare = ["-m", "ds_terapipe.cli", "prepare-data", "--input", str(text), "--output-prefix", f"{folder}/corpus"]
        subprocess.run([sys.executable, *prepare], check=True, **settings)
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
        options = [*RUN, *GPT, *shlex.split(f"--train-iters 2 --split 1,0,0 {parallel} --deepspeed_config config.json")]
        done = subprocess.run([*command, str(train if op else script), *options], cwd=folder, **settings)
    assert not [*Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*")]
    return done


without_op = in_background(f"{__name__}:launcher", 2, lambda: launched_with(op=False))


def test_the_launcher_runs_it_with_tensor_parallelism(without_op: subprocess.CompletedProcess[str]) -> None:
    assert without_op.returncode == 0, without_op.stderr[-3000:]
    assert "iteration 2/2 | loss" in without_op.stderr


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_deepspeeds_shared_memory_op_leaves_no_buffers() -> None:
    """The op takes minutes to compile where the cache has none."""
    done = launched_with(op=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration 2/2 | loss" in done.stderr and "deepspeed_shm_comm_op built successfully" in done.stdout
