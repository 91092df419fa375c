"""Data, models and settings that can't be run: one line of error on every rank, at once, and no rank is left waiting.

An error that is found before a step leaves an engine as it was, and one within a step ends it.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe import current_span
from ds_terapipe.pipeline.inspection.sequence_dims import probe_spans
from ds_terapipe.schedule import Op
from tests.pipeline.models import Block, Embedding, Head, MaskedTokenLoss, gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine, raised, train_plain
from tests.spawn import launched, run_to_exit

TIMEOUT_S = 900  # of waits, longer than the processes get: an error that a rank has to wait for does not come at all
ENDS_WITHIN_S = 300
MICRO_BATCHES, OF_REPLICAS = 2, (24, 16)
INPUTS, LABELS = micro_batch(0)
SHORTER = tuple(label[:, :-2] for label in LABELS)
BAD, CANT = "the data iterator: got ", "token_pipeline.slices: got a model that can't be cut: "
OF_22 = "token_pipeline.cut: got labels of [22] tokens for inputs of [24]"


def good(length: int = 24, masked: bool = True) -> Iterator[Any]:
    return iter([micro_batch(m, length=length, masked=masked) for m in range(MICRO_BATCHES)])


def read(sick: bool, number: int) -> Any:
    if sick and number == 0:
        raise OSError("no such\nshard")
    return micro_batch(number)


# what the iterator yields, and what the one line says
DATA: dict[str, tuple[Any, str]] = {
    "None": (None, BAD + "nothing, must yield (inputs, labels)"),
    "no labels": ((INPUTS,), BAD + "tuple of 1, must yield (inputs, labels)"),
    "inputs in a list of lists": (([[1, 2]], LABELS), BAD + "list as inputs"),
    "a scalar": ((torch.tensor(1), LABELS), "token_pipeline.cut: got none, inputs[0] (int64 [])"),
    "unequal inputs": (((INPUTS[0], INPUTS[1][:, :-1]), LABELS), "token_pipeline.cut: got none, inputs[1] (int64 [2, 23])"),
    "labels that are None": ((INPUTS, None), BAD + "NoneType as labels"),
    "labels of another length": ((INPUTS, SHORTER), OF_22),
    "more slices than tokens": (micro_batch(0, length=5), "token_pipeline.slices: got 6, must be at most the sequence length 5"),
}  # fmt: skip


def bad_data(rank: int, world_size: int) -> dict[str, Any]:
    """With other lengths on the second replica; with bad data on all ranks, on those of that replica, and on some stage."""
    engine = build_engine(gpt(2), MaskedTokenLoss(), token_pipeline={"slices": 6, "timeout_s": TIMEOUT_S})
    of_lengths = engine.train_batch(good(OF_REPLICAS[engine.grid.data_parallel_id]))
    found: dict[str, Any] = {"stage": engine.stage_id, "lengths": float(of_lengths)}

    def step(name: str, data: Iterator[Any] | None) -> None:
        engine.set_dataiterator(None)
        found[name] = raised(lambda: engine.train_batch(data))

    for where, chosen in (("all", True), ("replica 1", engine.grid.data_parallel_id == 1)):
        for name, (item, _) in DATA.items():
            step(f"{name}, {where}", iter([item] * MICRO_BATCHES) if chosen else good())
        step(f"no data iterator, {where}", None if chosen else good())
    loss_fn, last_replica = engine.module.loss_fn, engine.grid.data_parallel_id == 1
    loss_fn.step_weight = lambda labels: None if last_replica else torch.ones(())
    step("a weight on one replica", good())
    del loss_fn.step_weight
    for name, sick in (("first", engine.is_first_stage()), ("last", engine.is_last_stage()), ("every", True)):
        step(f"broken {name}", data := map(partial(read, sick), range(MICRO_BATCHES + 1)))
        found[f"left {name}"] = len([*data])
        step(f"exhausted {name}", iter([]) if sick else good())
    found["then"] = float(engine.train_batch(good()))  # nothing of all this has done the engine any harm
    found["evaluation"] = raised(lambda: engine.eval_batch(iter([None] * MICRO_BATCHES)))
    found["at the end"] = float(engine.train_batch(good()))
    return found


Raising = type("Raising", (nn.Module,), {"forward": lambda self, hidden: {}["first line\nsecond line"]})
KEPT: list[Tensor] = []
Keeping = type("Keeping", (Block,), {"forward": lambda self, x: (KEPT.append(x.square().mean()), Block.forward(self, x))[1]})


def model(last: type = Block) -> list[LayerSpec]:
    return [LayerSpec(kind) for kind in (Embedding, Block, Block, Block, last, Head)]


MODELS: dict[str, tuple[list[Any], Any, str]] = {
    "bug": (model(Raising), mean_loss, CANT + "run on a slice it fails, KeyError: 'first line\\nsecond line'"),
    "other inputs": ([LayerSpec(Raising), *model()], mean_loss, "the data iterator: got inputs that the model fails with, cut"),
    "no loss_fn": (model(), None, "got a PipelineModule without loss_fn"),
    "losses": (model(), lambda outputs, labels: (mean_loss(outputs, labels), 0), "loss_fn: got tuple from it, must be"),
    "kept": (model(Keeping), lambda outputs, labels: mean_loss(outputs, labels) + KEPT[-1].detach(), "had run in slices and "),
    "labels": (model(), lambda outputs, labels: mean_loss(outputs, labels[:, 1:]), "got labels that the loss_fn"),
}
# the second rank's settings, where it is given others the first one's, and what the one line says
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    # a setting that these steps do not need: without the comparison they would run
    "other time": ({"slices": 2}, {"slices": 2, "timeout_s": TIMEOUT_S + 1}, "token_pipeline: got other settings on rank "),
    "other micro-batches": ({"slices": 2, "micro_batches": 2}, {"slices": 2, "micro_batches": 1},
                            "gradient_accumulation_steps: got 2 micro-batches on rank"),
    "misspelt on one rank": ({"slices": 2, "layuot": "bsh"}, {"slices": 2}, 'token_pipeline: unknown key "layuot"'),
    "too short to look at": ({"slices": 2, "length": 2}, None, "token_pipeline.slices: got 2 for 2 tokens, must be 1 below 3"),
}  # fmt: skip


def bad_models_and_settings(rank: int, world_size: int) -> dict[str, str]:
    def train(specs: Any, loss: Any, micro_batches: int = 2, length: int = 24, **keys: Any) -> None:
        keys = {"timeout_s": TIMEOUT_S, **keys}
        engine = build_engine(specs, loss, token_pipeline=keys, micro_batches=micro_batches)
        engine.train_batch(good(length, masked=False))

    found = {name: raised(lambda row=row: train(*row[:2], slices=4)) for name, row in MODELS.items()}
    for name, (own, first, _) in SETTINGS.items():
        given = own if rank == 1 or first is None else first
        found[name] = raised(lambda given=given: train(gpt(2), mean_loss, **given))
    return found


class Faulty(Block):
    """Fails where it is told to: in a slice that begins at so many tokens."""

    at: int | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        span = current_span()
        if span is not None and span.start == Faulty.at:
            raise KeyError("a bug in the layer")
        return super().forward(hidden)


BAD_EVALUATION = {"reduce_output": "sum", "num_micro_batches": 0}
SLICES = 4


def calls_of_a_faulty_engine(rank: int, world_size: int) -> dict[str, list[str]]:
    """Errors of the last stage before the first action of a step, and in the middle of one; steps and calls after them."""
    specs = [LayerSpec(kind) for kind in (Embedding, Faulty, Faulty, Faulty, Head)]
    engine = build_engine(specs, mean_loss, token_pipeline={"slices": SLICES, "timeout_s": 10})

    def train() -> str:
        return raised(lambda: engine.train_batch(good(masked=False)))

    if rank == 1:
        Faulty.at = probe_spans(24)[1].start  # when the first slice has been sent, and taken
    found = {"the model can't be cut": [train(), train()]}
    Faulty.at = None
    evaluations = [partial(engine.eval_batch, good(masked=False), **{key: value}) for key, value in BAD_EVALUATION.items()]
    found["good"], found["evaluation"] = [train(), train()], [raised(call) for call in evaluations]
    if rank == 1:
        Faulty.at = 24 // SLICES
    found["bad"] = [train()]
    Faulty.at = None
    calls = [partial(engine.eval_batch, good()), partial(engine.set_slices, 2), partial(engine.save_checkpoint, "never")]
    found["next"] = [train(), *map(raised, calls)]
    assert not Path("never").exists()
    engine.destroy()
    return found


def autocast(rank: int, world_size: int) -> tuple[list[Any], str]:
    """Weight gradients that wait beside autocast, and what is said where they are asked to."""
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine = build_engine(gpt(2), mean_loss, token_pipeline={"slices": SLICES}, config=config)
    engine.train_batch(good(masked=False))
    waiting = [action for action in engine._watchdog._grid[rank] if action.op is Op.WEIGHT_GRADIENTS]
    engine.destroy()
    keys = {"slices": SLICES, "weight_gradients": "micro_batch"}
    return waiting, raised(lambda: build_engine(gpt(2), mean_loss, token_pipeline=keys, config=config))


data = launched(bad_data, 4, timeout=ENDS_WITHIN_S)
several = launched([bad_models_and_settings, calls_of_a_faulty_engine, autocast], 2, timeout=ENDS_WITHIN_S)


def check_one_line(expected: Mapping[str, str], ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        for name, text in expected.items():
            said = found[name]
            assert said.startswith("ConfigError: ") and "\n" not in said and text in said, (name, rank, said)


def test_replicas_may_have_other_lengths(data):
    step = [each for length in OF_REPLICAS for each in good(length)]
    plain = train_plain(gpt(2), MaskedTokenLoss(), [step])
    assert [found["lengths"] for found in data] == pytest.approx(plain.losses * 4, rel=1e-5)


def test_bad_data_is_one_line_on_every_rank(data):
    expected = {name: text for name, (_, text) in DATA.items()} | {"no data iterator": BAD + "nothing, must yield"}
    expected = {f"{name}, {where}": text for name, text in expected.items() for where in ("all", "replica 1")}
    check_one_line({**expected, "evaluation": BAD}, data)
    for name, stages in (("first", (0,)), ("last", (1,)), ("every", (0, 1))):
        sick = [rank for rank, found in enumerate(data) if found["stage"] in stages]
        for rank, found in enumerate(data):
            others = f"RankFailed: rank {sick[0]} failed: OSError: no such shard"
            assert found[f"broken {name}"] == ("OSError: no such\nshard" if rank in sick else others)
            assert found[f"exhausted {name}"].startswith("StopIteration") and found[f"left {name}"] == 1
    for found in data:
        said = found["a weight on one replica"]
        assert said.startswith("ConfigError: loss_fn.step_weight: got None on some replicas and a")
        assert found["at the end"] < found["then"] and math.isfinite(found["then"])


def test_bad_models_and_settings_are_one_line_on_every_rank(several):
    check_one_line({name: row[-1] for name, row in {**MODELS, **SETTINGS}.items()}, [found for found, *_ in several])


def test_after_an_error_before_a_step_an_engine_goes_on_and_after_one_in_a_step_it_says_so(several):
    for rank, (_, found, _) in enumerate(several):
        for line in found["the model can't be cut"]:  # on every rank the same, and no message of the first is left over
            assert line.startswith(f"ConfigError: {CANT}run on a slice it fails") and "a bug in the layer" in line
        assert found["good"] == ["", ""]
        told = zip(BAD_EVALUATION, found["evaluation"], strict=True)
        assert all("ConfigError: eval_batch: " in line and key in line for key, line in told)
        bad = ("PipelineStalled: rank 0 (stage 0) waited", "KeyError: 'a bug in the layer'")[rank]
        why = ("gave up waiting for", "failed: KeyError")[rank]
        assert found["bad"][0].startswith(bad) and len(found["next"]) == 4
        assert all(line.startswith(f"RuntimeError: this engine is no longer usable ({why}") for line in found["next"])


def test_no_weight_gradient_waits_beside_autocast(several):
    text = 'token_pipeline.weight_gradients: got "micro_batch", must be "slice" or "auto" beside torch_autocast'
    for *_, (waiting, refused) in several:
        assert waiting == [] and refused.startswith(f"ConfigError: {text}")


def uncaught(rank: int, world_size: int) -> None:
    engine = build_engine(gpt(2), MaskedTokenLoss(), token_pipeline={"slices": 6}, stages=world_size)
    engine.train_batch(iter([(INPUTS, SHORTER)] * MICRO_BATCHES) if rank == 1 else good())


def test_a_script_that_lets_the_error_pass_ends_by_itself():
    for end in run_to_exit(uncaught, 2):
        last = end.output.rstrip().splitlines()[-1]
        assert end.code == 1 and "ds_terapipe.errors.ConfigError: " in last and OF_22 in last, end.output
