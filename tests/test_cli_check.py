"""The command ``ds_terapipe check``: what a launch would take, by the launch itself, and its errors."""

import json
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe.commands.checking import ranks as checked_ranks
from ds_terapipe.commands.checking.planned import outcome_of
from ds_terapipe.commands.checking.ranks import _IF_NAMED, _PRELOADED
from ds_terapipe.plan.costs.hardware import CLUSTERS
from ds_terapipe.schedule import Placement, order, text_of
from tests import device
from tests.pipeline import models
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.test_memory_of_steps import Counted
from tests.pipeline.training import ADAMW, build_engine
from tests.spawn import launched
from tests.test_cli_plan import figures, run, written

# on a device heads are not so narrow, nor slices so short, that the padding of its kernels is more than what they keep
if device.NAME != "cpu":
    models.POSITIONS, models.HIDDEN, models.HEADS = 256, 128, 2
LENGTH, BATCH, MICRO_BATCHES = models.POSITIONS, 8 if device.NAME == "cpu" else 2, 3
CUT = {"slices": 4, "verify": False}
RECOMPUTED = {"activation_checkpoint_interval": 1, "use_reentrant": False}
# keys of ds_config.json of launches that are checked, and run on two ranks
LAUNCHES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, ZeRO-1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 20000}},
    "recomputed": {"gradient_accumulation_steps": 1, "pipeline": RECOMPUTED},
    "FusedLamb": {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-3}}},
    "two stages a place": {"token_pipeline": {**CUT, "stages_per_place": 2, "placement": "v"}},
}
# bytes of a parameter and of its optimiser: moments, a master and with ZeRO-1 its gradient
FULL, KEPT = ("bf16", "recomputed", "FusedLamb"), {"bf16": (2, 12), "bf16, ZeRO-1": (2, 14)}
OWN = f"""
import deepspeed, json, os, sys, torch
from deepspeed.pipe import PipelineModule
from tests.pipeline import models
from tests.pipeline.models import gpt, mean_loss
models.POSITIONS, models.HIDDEN, models.HEADS = {models.POSITIONS}, {models.HIDDEN}, {models.HEADS}
deepspeed.init_distributed("gloo")
order = torch.randperm(8).tolist()  # values that a script reads are there
blocks, stages = map(int, sys.argv[3:] or (4, 2))
model = PipelineModule(gpt(blocks), num_stages=stages, loss_fn=mean_loss, partition_method="uniform")
with open(sys.argv[2] if sys.argv[2:] else os.devnull, "a") as file:
    file.write(os.environ["RANK"])
engine, *_ = deepspeed.initialize(model=model, config=json.loads(sys.argv[1]), model_parameters=list(model.parameters()))
raise SystemExit("the check has gone beyond the engine")
"""
_SIZES = "--num-layers 3 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 --train-iters 1"
GPT = f"{_SIZES} --pipeline-model-parallel-size 3 --tensor-model-parallel-size 2 --data-path nowhere".split()


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    """The server of all checks: it has imported what any rank needs, which each would import again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")  # a check needs no device, whatever the launch ran on
        if device.NAME == "cpu":  # of a process with CUDA none can be forked
            get_context("forkserver").set_forkserver_preload(["torch._dynamo", *_PRELOADED, *_IF_NAMED.values()])
            forkserver.ensure_running()
        yield


def settings(**keys: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": MICRO_BATCHES}
    return {**sizes, "optimizer": ADAMW, "token_pipeline": CUT, **keys}


def stages(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    status, out, err = run(capsys, "check", "--json", "-", *arguments)
    assert status == 0, err
    return list(next(iter(json.loads(out).values())))  # or places


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status, out, err = run(capsys, "check", *arguments)
    assert status == 1, out
    return err.splitlines()[-1]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def measure(rank: int, world: int) -> dict[str, float]:
    """Return the peak of a step of each launch on this rank, counted by the allocator, in bytes."""
    found = {}
    for name, keys in LAUNCHES.items():
        config = {key: value for key, value in keys.items() if key not in ("optimizer", "token_pipeline")}
        optimizer, micro_batches = keys.get("optimizer", ADAMW), keys.get("gradient_accumulation_steps", MICRO_BATCHES)
        engine = build_engine(
            gpt(4), mean_loss, token_pipeline=keys.get("token_pipeline", CUT), micro_batches=micro_batches, batch=BATCH,
            config=config, optimizer=optimizer, module={"seed_layers": False},
        )  # fmt: skip
        memory = engine._memory
        memory._peak = Counted() if engine.device.type == "cpu" else memory._peak
        for _ in range(2):  # in the first one the model is inspected
            memory.begin(engine.module.parameters())
            memory.note_peak(engine.module.parameters())
            batches = iter([micro_batch(n, length=LENGTH, batch=BATCH, masked=False) for n in range(micro_batches)])
            engine.train_batch(batches if engine.is_first_stage() or engine.is_last_stage() else None)
        memory.end()
        found[name] = memory.taken or 0.0
        engine.destroy()
    return found


ranks = launched(measure, 2, timeout=300)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in LAUNCHES])
def test_a_launch_takes_what_was_checked(name, ranks, own, capsys):
    checked = stages(capsys, "--world", 2, "--seq-length", LENGTH, "--", own, json.dumps(settings(**LAUNCHES[name])))
    for stage, there in zip(checked, (of_rank[name] for of_rank in ranks), strict=True):
        assert not stage["computed"] and not stage["notes"]
        weight, state = KEPT.get(name, (4, 8))
        assert stage["weights"] == pytest.approx(weight * stage["parameters"], rel=0.01)
        assert stage["gradients"] == pytest.approx(weight * stage["parameters"], rel=0.01)
        assert stage["optimizer"] == pytest.approx(state * stage["parameters"], rel=0.01)
        step = stage["peak"] - stage["weights"] - stage["gradients"] - stage["optimizer"]
        if name == "recomputed":  # 3 layers x 4 slices keep the host's random state, which no operator makes
            step += 12 * torch.get_rng_state().nbytes
        assert step == pytest.approx(there, rel=0.05), (stage, there)


def test_every_distinct_rank_is_built_once_and_the_length_is_that_of_the_data(own, tmp_path, capsys):
    row = f"torch.zeros({LENGTH}).long()"
    own.write_text(OWN.replace("model=", f"training_data=[(({row}, {row}), {row})] * 99, model="))
    record = tmp_path / "ranks"
    checked = stages(capsys, "--world", 8, "--", own, json.dumps(settings()), record, 6, 4)
    assert record.read_text() == "026"  # of four stages of two replicas the third is as the second
    assert [stage["layers"] for stage in checked] == [["Embedding", "Block"], *[["Block"] * 2] * 2, ["Block", "Head"]]
    assert checked[1]["peak"] > checked[2]["peak"]  # it has one live unit more


@pytest.mark.full
def test_sizes_stand_for_a_script(tmp_path, capsys):
    config = written(tmp_path / "ds_config.json", settings())
    checked = stages(capsys, "--world", 2, "--ds-config", config, "--model", "gpt3-1b", "--stages", 2)
    of_stage = 12 * (12 * 2048**2 + 13 * 2048) + 51200 * 2048
    assert [stage["parameters"] for stage in checked] == [of_stage + 2048 * 2048, of_stage + 2 * 2048]


def test_megatron_model_with_a_plan_from_its_sizes(tmp_path, capsys, monkeypatch):
    config, kept, check = tmp_path / "ds_config.json", list[Any](), checked_ranks.check_launch
    monkeypatch.setattr(checked_ranks, "check_launch", lambda task: kept.extend(check(task)) or kept)
    block = {"slices": "auto", "weight_gradients": "slice"}
    config.write_text(json.dumps(settings(token_pipeline=block, train_micro_batch_size_per_gpu=1)))
    arguments = ["--world", 12, "--ds-config", config, "--json", tmp_path / "said", "--", "train.py", *GPT]
    status, out, err = run(capsys, "check", *arguments)
    assert status == 0, err
    plan = json.loads((tmp_path / "said").read_text())["plan"]
    sizes = {"num_layers": 3, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024}
    shape = ["--stages", 3, "--tensor-parallel", 2, "--data-parallel", 2, "--seq-length", 128]
    planned = figures(capsys, "plan", "--ds-config", config, "--model", written(tmp_path / "sizes.json", sizes), *shape)
    assert plan["predicted_step_s"] == pytest.approx(planned["predicted_step_s"]) and not plan["weights_once"]
    lines = text_of(order(plan["schedule"], Placement.plain(3), [len(plan["slices"])] * MICRO_BATCHES))
    found = written(tmp_path / "found.json", {**plan, "schedule": "searched", "order": lines})
    reports = [replace(report, settings={**report.settings, "plan_path": str(found)}) for report in kept]
    named, searched = (outcome_of(each, CLUSTERS["p3.16xlarge"]) for each in (kept, reports))
    assert searched == replace(named, schedule="searched", plan=searched.plan, lines=searched.lines) and named.uses
    lines = out.splitlines()
    assert lines[0] == "launch: 3 stages x 2 tensor-parallel x 2 replicas = 12 ranks"
    rows = [line.split() for line in lines[3:6]]
    hidden, table = 512, 1024 // 2 * 512  # a part of the padded vocabulary
    norms_and_biases = 4 * hidden + hidden + 3 * hidden // 2 + hidden + 2 * hidden
    layer = 12 * hidden**2 // 2 + norms_and_biases
    assert int(rows[1][-7].replace(",", "")) == layer
    assert int(rows[0][-7].replace(",", "")) == layer + table + 128 * hidden
    assert int(rows[2][-7].replace(",", "")) == layer + table + 2 * hidden
    assert any(line.startswith("plan: ") and line.endswith("tokens") for line in lines)
    assert "computed" not in out


HF = """
import deepspeed, sys
from ds_terapipe import hf
model = hf.pipeline(sys.argv[1], num_stages=2)
deepspeed.initialize(model=model, config=sys.argv[2], model_parameters=list(model.parameters()))
"""


def test_hugging_face_folder_without_weights(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256)
    llama.save_pretrained(tmp_path / "llama")
    script, config = written(tmp_path / "tune.py", HF), written(tmp_path / "ds_config.json", settings())
    checked = stages(capsys, "--world", 2, "--", script, tmp_path / "llama", config, "--max-seq-length", LENGTH)
    assert sum(stage["parameters"] for stage in checked) == LlamaForCausalLM(llama).num_parameters()
    assert not any(stage["computed"] or stage["notes"] for stage in checked)


ERRORS: dict[str, tuple[int, dict[str, Any], str]] = {
    "a key of DeepSpeed's": (2, {"zero_optimization": {"stage": 2}}, "zero_optimization.stage: got 2, must be 0 or 1"),
    "a plan": (2, {"token_pipeline": {"plan_path": "no.json"}}, "token_pipeline.plan_path: no.json: cannot be read"),
    "a world": (3, {}, "num_stages (2) must divide distributed world size (3)"),
    "slices": (2, {"token_pipeline": {"slices": [40, 4]}}, "add up to 44 tokens, must add up to the sequence length 48"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_is_the_launchs(name, own, capsys):
    world, keys, text = ERRORS[name]
    assert text in error(capsys, "--world", world, "--seq-length", LENGTH, "--", own, json.dumps(settings(**keys)))


READING = """
class Reading(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(32, 32)
    def forward(self, hidden):
        return self.inside(hidden) * float(hidden.detach().mean())
"""


def test_computed_figures_are_marked(own, capsys):
    text = OWN.replace("deepspeed.init_", READING + "deepspeed.init_", 1)
    own.write_text(text.replace("gpt(blocks)", "[*gpt(4)[:3], Reading(), *gpt(4)[3:]]"))
    status, out, err = run(capsys, "check", "--world", 2, "--seq-length", LENGTH, "--", own, json.dumps(settings()))
    assert status == 0, err
    reading = next(line for line in out.splitlines() if "Reading" in line)
    assert reading.split()[-3:] == ["?", "?", "?"] and "fake tensors cannot run it" in out
