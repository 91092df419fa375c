"""A rank that is killed, stopped or fails: the others end in time, and it too, and say who waited for whom."""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.distributed.distributed_c10d import _get_default_store

from ds_terapipe import current_span
from ds_terapipe.pipeline.transport.watchdog import Position
from tests.full import is_full, marked
from tests.pipeline.models import Block, gpt, mean_loss, micro_batch, tied_gpt
from tests.pipeline.training import build_engine
from tests.spawn import Exit, mark, run_to_exit, torchrun

SLICES, LENGTH, MICRO_BATCHES, STEP = 4, 24, 2, 2
GRACE_S = 5.0  # see watchdog.py
REPORT_S = 40.0  # what a report and Python's exit take, about 10 of which are waits of the report's own, on busy cores
ENDS_WITHIN_S = 150  # more than any case may take
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
COLLECTIVES = {
    "header": ("_consensus.announce", "all ranks to start the step"),
    "tied": ("_exec_reduce_tied_grads", "the all-reduce of tied gradients"),
    "gradients": ("_exec_reduce_grads", "the all-reduce of gradients over data-parallel replicas"),
    "optimizer": ("_exec_optimizer_step", "the optimiser step of the other ranks"),
    "loss": ("_aggregate_total_loss", "the loss from the last stage"),
}


class Case(NamedTuple):
    """What happens to rank ``victim``, where: in a layer, or when it comes to a collective."""

    what: str
    victim: int
    world_size: int
    stages: int
    where: str
    timeout_s: float

    def stage_of(self, rank: int) -> int:
        """DeepSpeed numbers the replicas of a stage one after the other."""
        return rank // (self.world_size // self.stages)

    def replica_of(self, rank: int) -> int:
        return rank % (self.world_size // self.stages)

    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.victim]


CASES = {
    "kill the first of 2": Case("kill", 0, 2, 2, "layer", 60.0),
    "kill the last of 2": Case("kill", 1, 2, 2, "layer", 60.0),
    "kill the first of 4": Case("kill", 0, 4, 4, "layer", 60.0),
    "kill the last of 4": Case("kill", 3, 4, 4, "layer", 60.0),
    "kill in a replica": Case("kill", 3, 4, 2, "layer", 60.0),
    "bug": Case("raise", 1, 2, 2, "layer", 60.0),
    "stop the first of 2": Case("stop", 0, 2, 2, "layer", 12.0),
    "stop the last of 4": Case("stop", 3, 4, 4, "layer", 12.0),
    **{
        f"stop before {where}": Case("stop", 1, 2, 1 if where == "gradients" else 2, where, 12.0)
        for where in COLLECTIVES
    },
    "stop the store's host": Case("stop", 0, 2, 2, "header", 12.0),
}


FULL = ("stop before tied", "stop before optimizer", "stop before loss")


class Bug(KeyError):
    """What the user's layer raises."""


def until_all_have_said_where_they_are() -> None:
    """Every rank's watching thread has written down that it is in step ``STEP``."""
    store = _get_default_store()
    keys = [f"ds_terapipe/position/0/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not all(store.check([key]) and Position.from_text(store.get(key).decode()).step == STEP for key in keys):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def happen(what: str) -> None:
    until_all_have_said_where_they_are()  # as in the steps of a model worth slicing, which take longer than a moment
    mark("accident")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher ends the others as soon as it looks: see `torchrun`
        os.kill(os.getppid(), signal.SIGSTOP)
    if what == "raise":
        raise Bug("a bug in the layer")
    os.kill(os.getpid(), SIGNALS[what])


class Accident(Block):
    """A block that meets with an accident in the middle of step ``STEP``, in the third slice of the first micro-batch."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self.calls = what, 0
        self.armed = rank == int(os.environ["RANK"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.armed and torch.is_grad_enabled() and current_span() is not None:
            self.calls += 1
            if self.calls == STEP * MICRO_BATCHES * SLICES + 3:
                happen(self.what)
        return super().forward(hidden)


def train(rank: int, world_size: int, *case: Any) -> None:
    """Train until it happens."""
    case = Case(*case)
    layers = tied_gpt(6) if case.where == "tied" else gpt(6)
    if case.where == "layer":
        layers = [layers[0], *(LayerSpec(Accident, case.what, case.victim) for _ in range(6)), layers[-1]]
    engine = build_engine(
        layers,
        mean_loss,
        token_pipeline={"slices": SLICES, "timeout_s": case.timeout_s},
        micro_batches=MICRO_BATCHES,
        stages=case.stages,
        clip=1.0,
    )
    for step in range(STEP + 2):
        if step == STEP and rank == case.victim and case.where != "layer":
            *part, method = COLLECTIVES[case.where][0].split(".")
            setattr(getattr(engine, *part) if part else engine, method, lambda *args: happen(case.what))
        engine.train_batch(iter([micro_batch(m, length=LENGTH, masked=False) for m in range(MICRO_BATCHES)]))
    mark("trained")


# Where DeepSpeed or we are when it happens to one of three ranks whose engines are being built.
BUILDING = {
    "the first look at the model": "ds_terapipe.refusals:on_every_rank",
    "DeepSpeed's constructor": "deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model",
    "groups": "ds_terapipe.pipeline.engine:Consensus",
}
BUILT = {
    **{f"kill in {where}": Case("kill", 1, 3, 3, where, 60.0) for where in BUILDING},
    "kill the store's host": Case("kill", 0, 3, 3, "DeepSpeed's constructor", 60.0),
    "stop in groups": Case("stop", 1, 3, 3, "groups", 12.0),
}


def build(rank: int, world_size: int, *case: Any) -> None:
    """Have it happen while engines are built."""
    case = Case(*case)

    def accident(*args: Any, **kwargs: Any) -> None:
        mark("accident")
        os.kill(os.getpid(), SIGNALS[case.what])

    if rank == case.victim:
        module, _, path = BUILDING[case.where].partition(":")
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, importlib.import_module(module)), name, accident)
    build_engine(gpt(6), mean_loss, token_pipeline={"slices": SLICES, "timeout_s": case.timeout_s}, stages=case.stages)
    mark("built")


def test_who_is_missing_while_engines_are_built_is_said():
    def run(case: Case) -> list[Exit]:
        return run_to_exit(build, case.world_size, *case, timeout=ENDS_WITHIN_S)

    with ThreadPoolExecutor(len(BUILT)) as pool:
        launches = dict(zip(BUILT, pool.map(run, BUILT.values()), strict=True))
    for name, ends in launches.items():
        case = BUILT[name]
        assert ends[case.victim].code == -signal.SIGKILL, name
        for end in (ends[rank] for rank in case.survivors()):
            assert end.code in (1, 70) and "MARK built" not in end.output, (name, end.output)
            assert re.search(rf"rank {end.rank} waited [\d.]+ s for all ranks to build their engines: ", end.output), (
                end.output
            )
            assert re.search(rf"  rank {case.victim}: process \d+ is (gone|stopped)$", end.output, re.M), (
                name,
                end.output,
            )


@cache
def launched(full: bool) -> dict[str, list[Exit]]:
    """Many cases, some at a time: they mostly wait."""

    def run(case: Case) -> list[Exit]:
        return run_to_exit(train, case.world_size, *case, timeout=ENDS_WITHIN_S)

    cases = {name: case for name, case in CASES.items() if (name in FULL) == full}
    with ThreadPoolExecutor(6) as pool:
        return dict(zip(cases, pool.map(run, cases.values()), strict=True))


@pytest.fixture
def exits(request: pytest.FixtureRequest) -> dict[str, list[Exit]]:
    """Of the launches that the test is for."""
    return launched(full=is_full(request))


def report(end: Exit) -> str:
    """The last thing that a survivor wrote: its report."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in end.output.splitlines()]
    starts = [i for i, line in enumerate(lines) if re.search(r"rank \d+ \(stage \d+\) waited ", line)]
    assert starts, end.output
    return "\n".join(lines[starts[-1] :]).removeprefix("ds_terapipe.pipeline.transport.watchdog.PipelineStalled: ")


@pytest.mark.parametrize("name", marked(CASES, FULL))
def test_every_survivor_ends_in_time_and_says_who_waited_for_whom(exits, name):
    case, ends = CASES[name], exits[name]
    accident = ends[case.victim].mark("accident")
    limit = case.timeout_s + (0 if case.what == "kill" else GRACE_S + REPORT_S)
    for rank in case.survivors():
        end = ends[rank]
        assert end.code in (1, 70), end.output
        assert end.at - accident < limit, (end.at - accident, end.output)
        first = report(end).splitlines()[0]
        waited = rf"rank {rank} \(stage {case.stage_of(rank)}\) waited [\d.]+ s for .+ in step {STEP}: .+"
        assert re.fullmatch(waited, first), first
        assert f"(token_pipeline.timeout_s is {case.timeout_s:g})" in first
        if case.where != "layer":
            assert f" for {COLLECTIVES[case.where][1]} in " in first
        if case.what != "raise":  # that one may live a moment longer than its connections
            assert re.search(
                rf"^(\[rank\d\]: )?  rank {case.victim}: process \d+ is (gone|stopped)$", end.output, re.M
            ), end.output
    if case.what == "stop":
        assert ends[case.victim].code == -signal.SIGKILL, "no launcher's SIGTERM ends a process that is stopped"
        assert ends[case.victim].at - accident < limit


@pytest.mark.parametrize("name", marked(CASES, FULL))
def test_the_report_shows_where_everybody_is(exits, name):
    case, ends = CASES[name], exits[name]
    for rank in case.survivors():
        text = report(ends[rank])
        stage = case.stage_of(rank)
        if case.where != "header":
            assert re.search(r"^step +stage 0", text, re.M), text
            assert re.search(rf"\[\S+\].*<-- .*stage {stage}\b", text), text
        if case.victim == 0 and case.what != "raise":  # it had the store
            assert "positions unknown: the process with the store" in text
            continue
        if case.replica_of(rank) == case.replica_of(case.victim):
            assert (
                f"rank {case.victim} (stage {case.stage_of(case.victim)}): last seen in step {STEP}, action " in text
            ), text
        else:  # named by those who waited for it, or by its silence
            assert re.search(
                rf"  rank \d+: .* from rank {case.victim}: |  rank {case.victim}: .*; no sign of life", text
            ), text


def test_neighbours_name_the_dead_rank_and_the_message(exits):
    for name in ("kill the first of 2", "kill the first of 4"):
        message = report(exits[name][1]).splitlines()[0]
        assert re.search(r" for activations of 0\.\d from rank 0 in .*(closed|reset)", message, re.I), message
    for name, rank, victim in (("kill the last of 2", 0, 1), ("kill the last of 4", 2, 3), ("kill in a replica", 1, 3)):
        message = report(exits[name][rank]).splitlines()[0]
        assert re.search(rf" for gradients of 0\.\d from rank {victim} in .*(closed|reset)", message, re.I), message
        assert f"rank {victim} (stage" in report(exits[name][rank])
    for name, rank, what in (("stop the first of 2", 1, "activations"), ("stop the last of 4", 2, "gradients")):
        message = report(exits[name][rank]).splitlines()[0]
        assert re.search(rf" for {what} of 0\.\d from rank {CASES[name].victim} in .*Timed out", message), message


def test_whoever_died_is_told_from_those_who_waited(exits):
    far = report(exits["kill the last of 4"][0])
    assert re.search(r"rank 3 \(stage 3\): .*; no sign of life|rank 2 \(stage 2\): .* gave up waiting for", far), far
    other_replica = report(exits["kill in a replica"][0])
    assert re.search(r"rank 3: .*; no sign of life|rank 1: .* gave up waiting for", other_replica), other_replica


def test_a_bug_in_a_layer_is_the_failing_ranks_own_error(exits):
    survivor, failing = exits["bug"]
    assert failing.code == 1
    assert "Traceback" in failing.output and "Bug: 'a bug in the layer'" in failing.output
    assert "waited" not in failing.output and "PipelineStalled" not in failing.output
    told = r"rank 1 \(stage 1\): last seen in step 2, action \d+, failed: Bug: 'a bug in the layer'"
    assert re.search(told, report(survivor)), survivor.output
    assert survivor.at - failing.mark("accident") < CASES["bug"].timeout_s


def test_under_torchrun_a_survivor_says_it():
    said = r"rank 0 \(stage 0\) waited [\d.]+ s for gradients of 0\.\d from rank 1 in step 2: "
    end = torchrun(train, 2, *CASES["kill the last of 2"], until=said)
    assert end.code == 1, end.output
    assert re.search(said, end.output), end.output
