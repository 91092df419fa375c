"""A rank that is killed, stopped or fails: the others end in time, and it too, and say who waited for whom."""

import os
import pkgutil
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.distributed.distributed_c10d import _get_default_store

from ds_terapipe import current_span
from ds_terapipe.pipeline.transport.positions import Position
from tests.pipeline.models import Block, gpt, mean_loss, micro_batch, tied_gpt
from tests.pipeline.training import build_engine
from tests.spawn import Exit, in_background, mark, run_to_exit, torchrun

SLICES, MICRO_BATCHES, STEP = 4, 2, 2
GRACE_S = 5.0  # see watchdog.py
REPORT_S = 40.0  # what a report and Python's exit take, about 10 of which are waits of the report's own, on busy cores
ENDS_WITHIN_S = 200  # more than any case may take, on cores however busy
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
COLLECTIVES = {
    "header": ("_consensus.announce", "all ranks to start the step"),
    "tied": ("_exec_reduce_tied_grads", "the all-reduce of tied gradients"),
    "gradients": ("_exec_reduce_grads", "the all-reduce of gradients over data-parallel replicas"),
    "optimizer": ("_exec_optimizer_step", "the optimiser step of the other ranks"),
    "loss": ("_aggregate_total_loss", "the loss from the last stage"),
}
# Where DeepSpeed or we are when it happens to a rank while engines are built.
BUILDING = {
    "the first look at the model": ("ds_terapipe.job:Job", "together"),
    "DeepSpeed's constructor": ("deepspeed.runtime.engine:DeepSpeedEngine", "_configure_distributed_model"),
    "groups": ("ds_terapipe.pipeline.engine", "Consensus"),
}


class Case(NamedTuple):
    """An accident of rank ``victim``, and where: in a layer, when it comes to a collective, or while engines are built."""

    what: str
    victim: int
    world_size: int
    stages: int
    where: str = "layer"

    @property
    def timeout_s(self) -> float:
        return 15.0 if self.what == "stop" else 10 * ENDS_WITHIN_S

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.victim]


CASES = {  # those that take longest first: all together mostly wait
    "stop the first of 2": Case("stop", 0, 2, 2), "stop the last of 4": Case("stop", 3, 4, 4),
    "stop before header": Case("stop", 1, 2, 2, "header"), "stop before gradients": Case("stop", 1, 2, 1, "gradients"),
    "kill the first of 4": Case("kill", 0, 4, 4), "kill the last of 4": Case("kill", 3, 4, 4),
    "kill in a replica": Case("kill", 3, 4, 2), "bug": Case("raise", 1, 2, 2),
}  # fmt: skip
FULL = {f"stop before {where}": Case("stop", 1, 2, 2, where) for where in ("tied", "optimizer", "loss")}
BUILT = {
    "stop in groups": Case("stop", 1, 3, 3, "groups"), "kill in groups": Case("kill", 1, 2, 2, "groups"),
    "kill in the first look at the model": Case("kill", 1, 2, 2, "the first look at the model"),
    "kill in DeepSpeed's constructor": Case("kill", 1, 3, 3, "DeepSpeed's constructor"),
    "kill the store's host": Case("kill", 0, 2, 2, "DeepSpeed's constructor"),
}  # fmt: skip
BROKEN, LATE = "(closed|reset)", "Timed out"
# Lines of a survivor's report about ranks that it waited for, and about others.
TOLD = (
    ("kill the first of 4", 1, rf" for activations of 0\.\d from rank 0 in .*{BROKEN}"),
    ("kill the last of 4", 2, rf" for gradients of 0\.\d from rank 3 in .*{BROKEN}"),
    ("kill the last of 4", 0, r"rank 3 \(stage 3\): .*; no sign of life|rank 2 \(stage 2\): .* gave up waiting for"),
    ("kill in a replica", 1, rf" for gradients of 0\.\d from rank 3 in .*{BROKEN}"),
    ("kill in a replica", 0, r"rank 3: .*; no sign of life|rank 1: .* gave up waiting for"),
    ("stop the first of 2", 1, rf" for activations of 0\.\d from rank 0 in .*{LATE}"),
    ("stop the last of 4", 2, rf" for gradients of 0\.\d from rank 3 in .*{LATE}"),
    ("bug", 0, r"rank 1 \(stage 1\): last seen in step 2, action \d+, failed: KeyError: 'a bug in the layer'"),
)


def happen(what: str) -> None:
    """Have it happen when the watching threads of all ranks have written down that they are in step ``STEP``."""
    # as in the steps of a model worth slicing, which take longer than a moment
    store = _get_default_store()
    keys = [f"ds_terapipe/position/1/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    while not all(store.check([key]) and Position.from_text(store.get(key).decode()).step == STEP for key in keys):
        time.sleep(0.05)
    mark("accident")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher ends the others as soon as it looks: see `torchrun`
        os.kill(os.getppid(), signal.SIGSTOP)
    if what == "raise":
        raise KeyError("a bug in the layer")
    os.kill(os.getpid(), SIGNALS[what])


class Accident(Block):
    """A block that meets with an accident in the middle of step ``STEP``, in the third slice of the first micro-batch."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self.calls, self.armed = what, 0, rank == int(os.environ["RANK"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.armed and torch.is_grad_enabled() and current_span() is not None:
            self.calls += 1
            if self.calls == STEP * MICRO_BATCHES * SLICES + 3:
                happen(self.what)
        return super().forward(hidden)


def train(rank: int, world_size: int, *fields: Any) -> None:
    case = Case(*fields)
    if rank == case.victim and case.where in BUILDING:
        owner, name = BUILDING[case.where]
        setattr(pkgutil.resolve_name(owner), name, lambda *args, **kwargs: os.kill(os.getpid(), SIGNALS[case.what]))
    layers = tied_gpt(6) if case.where == "tied" else gpt(6)
    if case.where == "layer":
        layers = [layers[0], *(LayerSpec(Accident, case.what, case.victim) for _ in range(6)), layers[-1]]
    keys = {"slices": SLICES, "timeout_s": case.timeout_s, "verify": False}
    options = {"micro_batches": MICRO_BATCHES, "stages": case.stages, "clip": 1.0}
    engine = build_engine(layers, mean_loss, token_pipeline=keys, **options)
    mark("built")
    for step in range(STEP + 2):
        if step == STEP and rank == case.victim and case.where in COLLECTIVES:
            *part, method = COLLECTIVES[case.where][0].split(".")
            setattr(getattr(engine, *part) if part else engine, method, lambda *args: happen(case.what))
        engine.train_batch(iter([micro_batch(m, masked=False) for m in range(MICRO_BATCHES)]))
    mark("trained")


def ends_of(name: str, cases: dict[str, Case]) -> Any:
    """A fixture: the exits of all cases."""

    def run() -> dict[str, list[Exit]]:
        with ThreadPoolExecutor(6) as pool:
            ends = pool.map(lambda case: run_to_exit(train, case.world_size, *case, timeout=ENDS_WITHIN_S), cases.values())
            return dict(zip(cases, ends, strict=True))

    return in_background(f"{__name__}:{name}", 1, run)  # they mostly wait


built, exits, exits_full = ends_of("built", BUILT), ends_of("exits", CASES), ends_of("full", FULL)


def gone(rank: int) -> str:
    return rf"^(\[rank\d\]: )?  rank {rank}: process \d+ is (gone|stopped)$"


@pytest.mark.parametrize("name", BUILT)
def test_who_is_missing_while_engines_are_built_is_said(built: dict[str, list[Exit]], name: str) -> None:
    case, ends = BUILT[name], built[name]
    assert ends[case.victim].code == -signal.SIGKILL
    for end in (ends[rank] for rank in case.survivors):
        assert end.code in (1, 70) and "MARK built" not in end.output, end.output
        said = rf"rank {end.rank} waited [\d.]+ s for all ranks to build their engines: "
        assert re.search(said, end.output) and re.search(gone(case.victim), end.output, re.M), end.output


def report(end: Exit) -> str:
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in end.output.splitlines()]
    starts = [i for i, line in enumerate(lines) if re.search(r"rank \d+ \(stage \d+\) waited ", line)]
    assert starts, end.output
    return "\n".join(lines[starts[-1] :]).removeprefix("ds_terapipe.pipeline.transport.watchdog.PipelineStalled: ")


def check(case: Case, ends: list[Exit]) -> None:
    """Every survivor ends in time, says for what it waited and how long, and shows where everybody is."""
    accident, victim = ends[case.victim].mark("accident"), case.victim
    limit = min(case.timeout_s + GRACE_S + REPORT_S, ENDS_WITHIN_S)
    replicas = case.world_size // case.stages  # DeepSpeed numbers the replicas of a stage one after the other
    reports = {rank: report(ends[rank]) for rank in case.survivors}
    for rank, text in reports.items():
        end, stage, first = ends[rank], rank // replicas, text.splitlines()[0]
        assert end.code in (1, 70), end.output
        assert end.at - accident < limit, (end.at - accident, end.output)
        assert re.fullmatch(rf"rank {rank} \(stage {stage}\) waited [\d.]+ s for .+ in step {STEP}: .+", first), first
        assert f"(token_pipeline.timeout_s is {case.timeout_s:g})" in first
        assert case.where == "layer" or f" for {COLLECTIVES[case.where][1]} in " in first
        # a rank with a bug may live a moment longer than its connections
        assert case.what == "raise" or re.search(gone(victim), end.output, re.M), end.output
        if case.where != "header":
            assert re.search(r"^step +stage 0", text, re.M), text
            assert re.search(rf"\[\S+\].*<-- .*stage {stage}\b", text), text
        if victim == 0 and case.what != "raise":  # it had the store
            assert "positions unknown: the process with the store" in text
        elif rank % replicas == victim % replicas:
            assert f"rank {victim} (stage {victim // replicas}): last seen in step {STEP}, action " in text, text
        else:  # named by those who waited for it, or by its silence
            named = rf"  rank \d+: .* from rank {victim}: |  rank {victim}: (.*; no sign of life|process \d+ is gone)"
            assert re.search(named, text), text
    if case.what == "stop":
        assert ends[victim].code == -signal.SIGKILL, "no launcher's SIGTERM ends a process that is stopped"
        assert ends[victim].at - accident < limit
    if case.what == "raise":  # its own error, once
        own, end = ends[victim].output, "KeyError: 'a bug in the layer'"
        assert ends[victim].code == 1 and end in own and "waited" not in own and "PipelineStalled" not in own


@pytest.mark.parametrize("name", CASES)
def test_survivors_end_in_time_and_say_who_waited_for_whom(exits: dict[str, list[Exit]], name: str) -> None:
    check(CASES[name], exits[name])
    for rank, told in ((rank, told) for case, rank, told in TOLD if case == name):
        assert re.search(told, report(exits[name][rank]), re.I), (rank, told, report(exits[name][rank]))


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_survivors_say_for_which_collective_they_waited(exits_full: dict[str, list[Exit]], name: str) -> None:
    check(FULL[name], exits_full[name])


SAID = r"rank 0 \(stage 0\) waited [\d.]+ s for gradients of 0\.\d from rank 1 in step 2: "
under_torchrun = in_background(f"{__name__}:torchrun", 2, lambda: torchrun(train, 2, *Case("kill", 1, 2, 2), until=SAID))


def test_under_torchrun_a_survivor_says_it(under_torchrun: Exit) -> None:
    assert under_torchrun.code == 1 and re.search(SAID, under_torchrun.output), under_torchrun.output
