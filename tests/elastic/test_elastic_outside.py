"""What is in no entry of the layer list alone: a loss with a state, weights that entries share, parameters that are nobody's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from ds_terapipe import ConfigError
from ds_terapipe.elastic.policies.resize import POLICY
from ds_terapipe.elastic.shapes.predict import Choice
from ds_terapipe.pipeline.transport.consensus import error_of
from tests.elastic.training import MODELS, Case, data_of, engine_of, grouped_adamw, reference
from tests.mutants.claims import holds
from tests.pipeline.models import VOCABULARY, Plain, gpt, mean_loss
from tests.pipeline.test_shared_weights import SHARED, sharing
from tests.pipeline.training import difference
from tests.spawn import launched, run_ranks

LOSS = Case("texts", "adamw", 2, (), ((2, 1), (5, 2)), steps=8)
LOSSES = {
    "fp32": LOSS,
    "uncut, SGD": replace(LOSS, optimizer="sgd", slices=None),
    "bf16 ZeRO-1": replace(LOSS, precision="bf16 ZeRO-1"),
}
SAVED = 3  # on two replicas


class Scaled(nn.Module):
    """Cross entropy of trained multiples of the logits, and less of it with every call in training."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.8 * first, 1.2 * first, VOCABULARY))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.register_buffer("factor", torch.full((), first))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        factor = self.factor.clone()
        if self.training:
            self.factor.mul_(0.97)
        return factor * F.cross_entropy((logits.float() * self.scale + self.bias).flatten(0, 1), targets.flatten())


@contextmanager
def known(name: str, layers: Callable[[], list[Any]], loss: Any) -> Iterator[None]:
    """A model for the length of a training; its samples are texts."""
    with mock.patch.dict(MODELS, {name: (layers, loss, MODELS["texts"][2])}):
        yield


def trained(engine: Any, case: Case, steps: range) -> list[float]:
    """As the launch has it: the replicas of the start share a step's micro-batches."""
    replicas = engine.start_shape.replicas
    share = case.batch // case.size // replicas
    first = torch.distributed.get_rank() % replicas * share
    return [float(engine.train_batch(iter(data_of(case)[step][first:][:share]))) for step in steps]


def with_loss(case: Case, rank: int, folder: str) -> dict[str, Any]:
    """The copy of the first stage, which nothing uses there, has other values than that of the last one."""
    found: dict[str, Any] = {}
    for way, steps in (("run", range(case.steps)), ("resumed", range(SAVED, case.steps))):
        first = 3.0 if rank == 0 or way == "resumed" else 1.0
        with known("scaled", gpt, Scaled(first)):
            engine = engine_of(replace(case, model="scaled"))
        if way == "resumed":
            engine.load_checkpoint(folder)
        else:
            found["run"] = trained(engine, case, range(SAVED))
            engine.save_checkpoint(folder)
        found[way] = found["run"][:SAVED] + trained(engine, case, range(SAVED, steps.stop))
        ends = engine.is_last_stage()
        found["loss"] = {n: p.detach().clone() for n, p in engine.module.loss_fn.named_parameters() if ends}
        found["trains"] = {p.requires_grad for p in engine.module.loss_fn.parameters()} == {ends}
        found["shapes"] = engine.num_stages
        engine.destroy()
    return found


def alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """One process. A replica's loss goes on from that of the last stage and counts its own calls, as in data parallel runs."""
    model, loss, losses = Plain(gpt()), Scaled(), []
    stepper = {"adamw": grouped_adamw, "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)}
    optimizer = stepper[case.optimizer]([*loss.parameters(), *model.parameters()])
    of_replicas = [loss]
    for number, step in enumerate(data_of(case)):
        replicas = 2 // case.stages_at(number)
        if replicas != len(of_replicas):
            of_replicas = [loss, *(copy.deepcopy(loss) for _ in range(replicas - 1))]
            for other in of_replicas[1:]:
                other.scale, other.bias = loss.scale, loss.bias
        optimizer.zero_grad()
        total, share = 0.0, len(step) // replicas
        for place, (inputs, targets) in enumerate(step):
            part = of_replicas[place // share](model(inputs), targets) / len(step)
            part.backward()
            total += part.item()
        nn.utils.clip_grad_norm_([*loss.parameters(), *model.parameters()], case.clip)
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in loss.named_parameters()}


# ------------------------------------------------------------------------------------------------------ shared weights


class Tying(PipelineModule):
    """Two layers get one weight when both are there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.stage_id == 1:
            self.forward_funcs[1].qkv.weight = self.forward_funcs[0].qkv.weight


REFUSED, APART = ("head's weight", "in specs"), ("copied", "tied")
SHARING = Case("texts", "adamw", 1, (), ((2, 2),), slices=None, steps=4)


def shared(kind: str) -> dict[str, Any]:
    """What two stages say at the start, and one that would become two; its losses up to there and behind it."""
    found: dict[str, Any] = {"start": "", "move": ""}
    with known("shared", partial(sharing, kind), mean_loss):
        case = replace(SHARING, model="shared")
        try:
            engine_of(replace(case, stages=2, resize=())).destroy()
        except ConfigError as error:
            found["start"] = str(error)
        engine = engine_of(case)
        found["losses"] = trained(engine, case, range(2))
        try:
            found["losses"] += trained(engine, case, range(2, case.steps))
        except ConfigError as error:
            found["move"] = str(error)
        engine.destroy()
        found["alone"] = reference(case).losses
    reference.cache_clear()
    return found


def not_measured() -> list[int]:
    """On rank 0, how many shapes "measured" could go to, where the only one would divide what is shared."""
    found: list[int] = []

    def choose(present: Any, others: Any, *args: Any) -> Any:
        found.append(len(others))
        return Choice(present, ())

    with known("shared", partial(sharing, "one block"), mean_loss):
        case = replace(SHARING, model="shared")
        engine = engine_of(case, config={"elastic_pipeline": {"resize": {"policy": "measured"}}})
        with mock.patch("ds_terapipe.elastic.shapes.measured.choose", choose):
            trained(engine, case, range(case.steps))
        engine.destroy()
    return found


def tied_by_hand() -> str:
    """On two stages, of which the second has both; with one, the first rank would build two weights."""
    engine = engine_of(replace(SHARING, stages=2, resize=((2, 1),)), kind=Tying)
    error = error_of(lambda: trained(engine, SHARING, range(SHARING.steps)))
    engine.destroy()
    return str(error)


# ------------------------------------------------------------------------------------------------- nobody's parameters


def nobodys() -> dict[str, str]:
    """What is said of a trained parameter that a loss which is a function uses."""
    found = {}
    for name, case, config in (
        ("moves", replace(SHARING, resize=((2, 2),)), {}),
        ("may move", SHARING, {"elastic_pipeline": {}}),
        ("flat", SHARING, {"elastic_pipeline": {"resize": {"policy": "off"}}, "zero_optimization": {"stage": 1}}),
        ("off", SHARING, {"elastic_pipeline": {"resize": {"policy": "off"}}}),
    ):
        weight, lines = nn.Parameter(torch.ones(VOCABULARY)), []

        def loss(logits: Tensor, targets: Tensor, weight: nn.Parameter = weight) -> Tensor:
            return mean_loss(logits * weight, targets)

        def with_it(parameters: Any, weight: nn.Parameter = weight) -> torch.optim.Optimizer:
            return torch.optim.SGD([*parameters, weight], lr=0.1)

        with known("nobody's", gpt, loss), mock.patch("ds_terapipe.pipeline.recording.report.emit", lines.append):
            try:
                engine = engine_of(replace(case, model="nobody's"), optimizer=with_it, config=config)
            except Exception as error:
                found[name] = str(error)
                continue
            trained(engine, case, range(1))
            found[name] = f"{not torch.equal(weight, torch.ones(VOCABULARY))} {' '.join(lines)}"
            engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str, only: tuple[str, str] | None = None) -> dict[str, Any]:
    parts: dict[str, dict[str, Callable[[], Any]]] = {
        "losses": {name: partial(with_loss, case, rank, f"{folder}/{name}") for name, case in LOSSES.items()},
        "shared": {kind: partial(shared, kind) for kind in (*REFUSED, *APART)},
        "others": {"measured": not_measured, "by hand": tied_by_hand, "nobody's": nobodys},
    }
    return {
        part: {name: of() for name, of in each.items() if only in (None, (part, name))} for part, each in parts.items()
    }


ranks = launched(worker, 2, timeout=250, folder=True)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_a_module_goes_where_the_model_ends_and_into_checkpoints(ranks, name):
    check_losses(LOSSES[name], [rank["losses"][name] for rank in ranks])


def check_losses(case: Case, ranks: list[dict[str, Any]]) -> None:
    losses, weights = alone(case)
    limit = 1e-2 if "bf16" in case.precision else 1e-5
    for found in ranks:
        assert found["shapes"] == 2 and found["trains"]
        assert found["run"] == pytest.approx(losses, rel=limit) and found["resumed"] == pytest.approx(losses, rel=limit)
    assert ranks[0]["loss"] == {} and set(ranks[1]["loss"]) == set(weights)
    for name, weight in ranks[1]["loss"].items():
        assert difference(weight, weights[name]) <= 10 * limit, name


@pytest.mark.parametrize("kind", REFUSED)
def test_stages_that_would_train_copies_of_a_weight_are_refused(ranks, kind):
    check_shared(kind, [rank["shared"][kind] for rank in ranks])


def check_shared(kind: str, ranks: list[dict[str, Any]]) -> None:
    entries, weights = SHARED[kind]
    text = f"got entries {entries} of the layer list on stages 0 and 1, which share trained weights and would train copies, must"
    for found in ranks:
        for way, key in (("start", "model"), ("move", POLICY)):
            assert found[way].startswith(f"{key}: {text}"), found[way]
            assert f' use TiedLayerSpec("shared", {weights}' in found[way] and "\n" not in found[way]
        assert found["losses"] == pytest.approx(found["alone"][:2], rel=1e-5)


@pytest.mark.parametrize("kind", APART)
def test_entries_that_share_nothing_or_lie_together_are_not_refused(ranks, kind):
    for rank in ranks:
        found = rank["shared"][kind]
        assert (found["start"], found["move"]) == ("", "")
        assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)


def test_measured_shapes_leave_what_is_shared_together(ranks):
    assert [rank["others"]["measured"] for rank in ranks] == [[0], []]


def test_a_weight_that_was_made_one_by_hand_is_not_built_as_two(ranks):
    text = f"{POLICY}: got one parameter as 3.qkv.weight and 4.qkv.weight, set on a live layer, which the layer's spec does not"
    assert all(rank["others"]["by hand"].startswith(text) for rank in ranks)


def test_a_parameter_that_is_in_no_layer_and_not_in_the_loss_is_named(ranks):
    for number, rank in enumerate(ranks):
        said = rank["others"]["nobody's"]
        text = f"optimizer: got parameter 50 of group 0, of shape [{VOCABULARY}], must be in the PipelineModule "
        assert said["moves"].startswith(f"{text}where layers may go to other ranks, use ")
        assert said["flat"].startswith(f"{text}beside bf16, fp16 or ZeRO, use ")
        line = f"elastic_pipeline.resize.policy: off, since {text}where" if number == 0 else ""
        assert said["may move"].startswith(f"True {line}") and said["off"] == "True "


# for tests.mutants


def holds_for(mutant: str | None, part: str, name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [found[part][name] for found in run_ranks(worker, 2, folder, (part, name), mutant=mutant)]
    check = partial(check_losses, LOSSES[name]) if part == "losses" else partial(check_shared, name)
    return holds(check, ranks)
