"""train.py with BERT and ViT: in phases, frozen and reshaped, resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("PIL")

from PIL import Image

import ds_terapipe
from tests.megatron.test_bert_data import write as write_text
from tests.megatron.test_train import losses, train_module
from tests.spawn import run_ranks

MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"]
RUN = ["--split", "80,20,0", "--log-interval", "1", "--seed", "5", "--pipeline-model-parallel-size", "2"]
STEPS = 6
LAMB = {
    "optimizer": {"type": "FusedLamb", "params": {"exclude": "bias_norm", "max_grad_norm": 1.0}},
    "scheduler": {
        "type": "MixedBatch",
        "params": {
            "phases": [
                {"steps": 4, "batch_size": 8, "seq_length": 32, "lr": 5e-2, "warmup_steps": 0},
                {"steps": 2, "batch_size": 4, "seq_length": 48, "lr": 5e-2, "warmup_steps": 0, "micro_batch_size": 1},
            ]
        },
    },
    "train_micro_batch_size_per_gpu": 2,
}
ADAMW = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 8,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Arguments of each model, its data among them: text in sentences, images in two colours."""
    folder = tmp_path_factory.mktemp("data")
    for number, (name, colour) in enumerate({"blue": (0, 0, 255), "red": (255, 0, 0)}.items()):
        (folder / "images" / name).mkdir(parents=True)
        for place in range(10):
            image = Image.new("RGB", (8, 8), colour)
            image.putpixel((place % 8, number), (0, 255, 0))
            image.save(folder / "images" / name / f"{place}.png")
    text = ["--seq-length", "48", "--data-path", write_text(folder, "--split-sentences")]
    images = ["--data", str(folder / "images"), "--img-h", "8", "--img-w", "8", "--patch-dim", "4"]
    return {"bert": ["--model", "bert", *text], "vit": ["--model", "vit", *images]}


def launch(rank: int, world: int, folder: str, runs: dict[str, list[str]]) -> dict[str, Any]:
    """train.py's own code once for each entry of ``runs``: the engine, its shape at the end and the validation losses."""
    ds_terapipe.register()
    train, found = train_module(), {}
    for name, arguments in runs.items():
        sys.argv = ["train.py", *arguments, "--log-file", f"{folder}/{name}.jsonl"]
        trainer = train.Trainer(train.parse_arguments())
        said: list[str] = []
        train.logger.info = said.append
        trainer.train()
        engine = trainer.engine
        shape = getattr(engine, "frozen_layers", 0), engine.num_stages, engine.dp_world_size
        found[name] = type(engine).__name__, shape, [line for line in said if "validation" in line]
    return found


def arguments(folder: Path, data: list[str], name: str, settings: dict[str, Any], *more: str) -> list[str]:
    """Of a run on two stages."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"steps_per_print": 10**9, **settings}))
    return [*MODEL, *RUN, "--train-iters", str(STEPS), *data, "--deepspeed_config", str(path), *more]


def elastic(settings: dict[str, Any], *resize: list[int]) -> dict[str, Any]:
    """With the embedding and a layer frozen from step 2 on."""
    freeze = {"policy": "schedule", "frozen_layers": [[2, 2]]}
    return {**settings, "elastic_pipeline": {"freeze": freeze, "resize": {"policy": list(resize) or "off"}}}


def test_frozen_and_reshaped_and_resumed_runs_have_the_same_losses(tmp_path: Path, data: dict[str, list[str]]) -> None:
    runs, saved = {}, str(tmp_path / "checkpoints")
    for model, settings in (("bert", LAMB), ("vit", ADAMW)):
        moved = elastic(settings, [2, 1])
        for name, keys, more in (
            ("whole", settings, ["--eval-interval", "3", "--eval-iters", "1"]),
            ("still", elastic(settings), []),
            ("moved", moved, ["--save", f"{saved}/{model}", "--save-interval", "5", "--exit-interval", "5"]),
            ("resumed", moved, ["--load", f"{saved}/{model}"]),
        ):
            runs[f"{model} {name}"] = arguments(tmp_path, data[model], f"{model} {name}", keys, *more)
    (found, _) = run_ranks(launch, 2, str(tmp_path), runs, timeout=200)
    for model in ("bert", "vit"):
        whole, still = losses(tmp_path, f"{model} whole"), losses(tmp_path, f"{model} still")
        assert found[f"{model} whole"][0] == "PipelineEngine" and len(found[f"{model} whole"][2]) == 2
        assert found[f"{model} still"][:2] == ("ElasticPipelineEngine", (2, 2, 1))
        assert found[f"{model} moved"][:2] == ("ElasticPipelineEngine", (2, 1, 2))
        assert list(whole) == list(still) == list(range(1, STEPS + 1)) and whole[4] < whole[1] - 0.2
        assert whole[2] == pytest.approx(still[2], rel=1e-5) and whole[4] != pytest.approx(still[4], rel=1e-5)
        moved = losses(tmp_path, f"{model} moved")
        assert moved == pytest.approx({step: still[step] for step in moved}, rel=1e-5) and len(moved) == 5
        assert losses(tmp_path, f"{model} resumed") == pytest.approx({6: still[6]}, rel=1e-5)
