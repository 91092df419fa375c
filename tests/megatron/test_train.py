"""train.py from end to end: resumed runs, evaluation, and the same losses with token slices."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")

import ds_terapipe
from ds_terapipe import cli
from ds_terapipe.errors import ConfigError
from tests.spawn import free_port, run_ranks

ROOT = Path(__file__).parents[2]
MODEL = shlex.split("--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 257")
RUN = shlex.split("--train-iters 6 --log-interval 1 --seed 5 --split 80,20,0 --pipeline-model-parallel-size 2")
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10**9,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
}

SLICED = ("uneven, stopped", "uneven, resumed")
DAMAGED = {"flipped layer": "layer_02-model_00-model_states.pt", "flipped states": "mp_rank_00_model_states.pt"}
FREEZE = {"policy": "schedule", "frozen_layers": [[2, 3]]}  # the embedding and half of the layers


def train_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(0)
    for number in range(30):
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(200))
        (folder / f"{number}.txt").write_text(text)
    prefix = str(folder / "corpus")
    assert cli.main(["prepare-data", "--input", str(folder), "--pattern", "*.txt", "--output-prefix", prefix]) == 0
    return prefix


def launch_in(rank: int, world: int, folder: str, runs: dict[str, list[str]]) -> dict[str, str]:
    """Run train.py's own code once for each entry of ``runs``; the errors of those that it refused, what it said of the order."""
    ds_terapipe.register()  # ranks are shared with tests that may have left the hook undone
    train, errors = train_module(), {}
    for name, arguments in runs.items():
        sys.argv = ["train.py", *arguments, "--log-file", f"{folder}/{name}.jsonl"]
        if name == "uneven, resumed" and rank == 0:  # as a job leaves it that is killed between two renames
            saved = Path(arguments[arguments.index("--load") + 1])
            (saved / "global_step3").rename(saved / ".global_step3.replaced")
        if name in DAMAGED and rank == 0:
            file = Path(arguments[arguments.index("--load") + 1], "global_step1", DAMAGED[name])
            data = file.read_bytes()
            file.write_bytes(data[:-300] + bytes([data[-300] ^ 1]) + data[-299:])
        try:
            with mock.patch.object(train.logger, "warning") as warning:
                trainer = train.Trainer(train.parse_arguments())
        except ConfigError as error:
            errors[name] = str(error)
            continue
        for line in (call.args[0] % call.args[1:] for call in warning.call_args_list):
            if line.startswith("--train-iters"):
                errors[name] = line
        trainer.train()
        engine = trainer.engine
        if name in SLICED:
            assert engine.slices_run == ((8,) * 4,) * 2 and engine.units_run == (8, 8), name
        if name.startswith("moved"):
            assert (engine.frozen_layers, engine.num_stages, engine.dp_world_size) == (3, 1, 2), name
            assert engine.module.layers_per_stage == (4,), name
    return errors


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["loss"] for line in lines}


def arguments(folder: Path, corpus: str, *more: str, slices: int | None = None) -> list[str]:
    settings: dict[str, Any] = {**SETTINGS, **({"token_pipeline": {"slices": slices}} if slices else {})}
    path = folder / f"config-{slices}.json"
    path.write_text(json.dumps(settings))
    return [*MODEL, *RUN, "--data-path", corpus, "--deepspeed_config", str(path), *more]


def test_resumed_and_sliced_runs_have_the_same_losses(tmp_path: Path, corpus: str) -> None:
    saved, uneven = (str(tmp_path / name) for name in ("checkpoints", "uneven checkpoints"))
    stop = ["--save-interval", "3", "--exit-interval", "3"]
    three_and_one = ["--stage-layers", "3,1"]
    runs = {
        "whole": arguments(tmp_path, corpus, "--eval-interval", "3", "--eval-iters", "2"),
        "stopped": arguments(tmp_path, corpus, "--save", saved, *stop),
        "resumed": arguments(tmp_path, corpus, "--load", saved),
        "longer": arguments(tmp_path, corpus, "--load", saved, "--train-iters", "8", "--exit-interval", "4"),
        "uneven, stopped": arguments(tmp_path, corpus, *three_and_one, "--save", uneven, *stop, slices=4),
        "uneven, resumed": arguments(tmp_path, corpus, *three_and_one, "--load", uneven, slices=4),
        "even after uneven": arguments(tmp_path, corpus, "--load", uneven),
        "other stages": arguments(tmp_path, corpus, "--load", saved, "--stage-layers", "1,3"),
    }
    errors = run_ranks(launch_in, 2, str(tmp_path), runs, timeout=200)
    whole = losses(tmp_path, "whole")
    assert list(whole) == [1, 2, 3, 4, 5, 6] and whole[6] < whole[1] - 0.5
    assert losses(tmp_path, "stopped") == {step: whole[step] for step in (1, 2, 3)}
    assert losses(tmp_path, "resumed") == {step: whole[step] for step in (4, 5, 6)}
    assert {**losses(tmp_path, "uneven, stopped"), **losses(tmp_path, "uneven, resumed")} == pytest.approx(
        whole, rel=1e-5
    )
    order = "--train-iters: the checkpoint's training has 24 samples and this one 32, and their order depends on the number: "
    assert [told.pop("longer", "")[: len(order)] for told in errors] == [order, ""]
    assert set(losses(tmp_path, "longer")) == {4}
    message = '--stage-layers: got "{}", must be as the checkpoint in {} was saved, use {}'
    said = {
        "other stages": message.format("1,3", saved, "2,2"),
        "even after uneven": message.format("2,2", uneven, "3,1"),
    }
    assert errors == [said] * 2


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


def test_folders_that_cannot_be_used_are_errors_on_every_rank_before_the_first_step(
    tmp_path: Path, corpus: str
) -> None:
    """Whole or not: a checkpoint that can't be read, of another model, none at all, and a place where none can be written."""
    folder, saved = tmp_path / "saved" / "global_step3", str(tmp_path / "one step")
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step3")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    (tmp_path / "file").touch()
    runs = {
        "one step": arguments(
            tmp_path, corpus, "--save", saved, "--exit-interval", "1", "--save-interval", "1", slices=4
        ),
        "broken": arguments(tmp_path, corpus, "--load", str(folder.parent)),
        "missing": arguments(tmp_path, corpus, "--load", str(tmp_path / "nowhere"), "--save", saved),
        "another": arguments(tmp_path, corpus, "--load", saved),
        **{name: arguments(tmp_path, corpus, "--load", saved, slices=4) for name in DAMAGED},
        "unwritable": arguments(tmp_path, corpus, "--save", str(tmp_path / "file" / "folder")),
        "new": arguments(
            tmp_path, corpus, "--load", str(tmp_path / "new"), "--save", str(tmp_path / "new"), "--exit-interval", "1"
        ),
    }
    runs["another"][runs["another"].index("--hidden-size") + 1] = "64"
    first, second = run_ranks(launch_in, 2, str(tmp_path), runs)
    assert set(first) == set(second) == {"broken", "missing", "another", "unwritable", *DAMAGED}
    for name, key in (("flipped layer", "load_checkpoint"), ("flipped states", "--load")):
        text = f"{key}: got {saved}/global_step1/{DAMAGED[name]} with another checksum, must be as it was saved, use"
        assert first[name] == second[name] and first[name].startswith(text)
    # each stage has its own tensors, and each its own size that does not fit
    assert all(first[name] == second[name] for name in ("broken", "missing", "unwritable"))
    assert "mp_rank_00_model_states.pt" in first["broken"]
    assert first["missing"].startswith(
        f'--load: got "{tmp_path}/nowhere", must be a folder with checkpoints, use the one'
    )
    assert first["another"].startswith(f'--load: got "{saved}", must be a checkpoint of this model (size mismatch for ')
    assert "torch.Size" in first["another"] and "\n" not in first["another"] + second["another"]
    assert first["unwritable"].startswith(
        f'--save: got "{tmp_path}/file/folder", must be a folder that can be written to ('
    )
    assert set(losses(tmp_path, "new")) == {1}


def test_a_line_of_the_log_has_the_mean_since_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    train = train_module()
    trainer = train.Trainer.__new__(train.Trainer)
    trainer.args = SimpleNamespace(log_interval=3, train_iters=8, log_file=None)
    trainer.engine, trainer.first, trainer.losses = SimpleNamespace(get_lr=lambda: [0.1]), True, []
    with caplog.at_level("INFO", logger="train"):
        for trainer.iteration in range(1, 9):
            trainer._report(mock.MagicMock(), float(trainer.iteration), 1.0, 1)
    said = [line.split(" | lr")[0] for line in caplog.messages]
    assert said == [
        "iteration 1/8 | loss 1.0000",
        "iteration 3/8 | loss 2.5000",
        "iteration 6/8 | loss 5.0000",
        "iteration 8/8 | loss 7.5000",
    ]


def elastic(folder: Path, corpus: str, name: str, *more: str, **settings: Any) -> list[str]:
    """Arguments of a run with layers that freeze; ``settings`` beside those of the others."""
    made = arguments(folder, corpus, "--untie-embeddings-and-output-weights", *more)
    path = folder / f"config-{name}.json"
    path.write_text(json.dumps({**SETTINGS, **settings}))
    made[made.index("--deepspeed_config") + 1] = str(path)
    return made


def test_a_run_that_leaves_the_pipeline_has_the_losses_of_one_that_stays(tmp_path: Path, corpus: str) -> None:
    """And goes on from a checkpoint of either shape, with validation in between, and where its micro-batches get smaller."""
    still, saved = {"elastic_pipeline": {"freeze": FREEZE}}, [str(tmp_path / f"saved{step}") for step in (1, 3)]
    moved = {"elastic_pipeline": {"freeze": FREEZE, "resize": {"policy": [[2, 1]]}}}
    wide = {
        **moved,
        "token_pipeline": {"slices": 4},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    stop = [
        ("--save", to, "--save-interval", step, "--exit-interval", step) for to, step in zip(saved, "13", strict=True)
    ]
    runs = {
        "still": elastic(tmp_path, corpus, "still", **still),
        "moved": elastic(tmp_path, corpus, "moved", "--eval-interval", "3", "--eval-iters", "2", **moved),
        "moved, sliced, wide": elastic(tmp_path, corpus, "wide", **wide),
        "stopped before": elastic(tmp_path, corpus, "moved", *stop[0], **moved),
        "moved, resumed before": elastic(tmp_path, corpus, "moved", "--load", saved[0], **moved),
        "moved, stopped": elastic(tmp_path, corpus, "moved", *stop[1], **moved),
        "moved, resumed": elastic(tmp_path, corpus, "moved", "--load", saved[1], **moved),
    }
    assert run_ranks(launch_in, 2, str(tmp_path), runs, timeout=200) == [{}, {}]
    still_losses, whole = losses(tmp_path, "still"), losses(tmp_path, "moved")
    assert list(whole) == [1, 2, 3, 4, 5, 6] and whole[6] < whole[1] - 0.5
    assert whole == pytest.approx(still_losses, rel=1e-5)
    assert losses(tmp_path, "moved, sliced, wide") == pytest.approx(still_losses, rel=1e-5)
    assert losses(tmp_path, "moved, resumed before") == {step: whole[step] for step in (2, 3, 4, 5, 6)}
    assert losses(tmp_path, "moved, resumed") == {step: whole[step] for step in (4, 5, 6)}


def test_the_launcher_runs_it_with_tensor_parallelism(tmp_path: Path, corpus: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    options = arguments(tmp_path, corpus, "--tensor-model-parallel-size", "2", "--position-embedding-type", "rope")
    options[options.index("--pipeline-model-parallel-size") + 1] = "1"
    options[options.index("--train-iters") + 1] = "2"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [*command, str(ROOT / "train.py"), *options, "--swiglu", "--normalization", "RMSNorm"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration 2/2 | loss" in done.stderr
