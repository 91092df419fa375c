"""Trainings in phases, in DeepSpeed's engines, ours and by hand, and what was seen of them at every step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import ds_terapipe
from tests.elastic.samples import Texts, micro_batch_of
from tests.pipeline.models import Plain, gpt, mean_loss
from tests.pipeline.training import SGD, Trace, build_engine, raised, train_module

SAMPLES = 25
PHASES: list[dict[str, Any]] = [
    {"steps": 2, "batch_size": 4, "seq_length": 8, "lr": 0.2, "warmup_steps": 2},
    {"steps": 3, "batch_size": 6, "seq_length": 16, "lr": 0.3, "warmup_ratio": 0.4, "micro_batch_size": 1},
    {"steps": 2, "batch_size": 2, "seq_length": 12, "lr": 0.1, "warmup_steps": 0, "end_lr": 0.05},
]
LRS = [0.1, 0.2, 0.3, 0.3, 0.15, 0.1, 0.075]  # by hand from the formula
STEPS = [phase for phase in PHASES for _ in range(phase["steps"])]
MICRO = [2, 2, 1, 1, 1, 1, 1]


def endless(order: list[int]) -> Iterator[int]:
    while True:
        yield from order


ROWS = list(zip(LRS, STEPS, MICRO, strict=True))
SKIPPING = [*ROWS[:2], *ROWS[1:]]  # a step that was skipped is tried again with the same LR, in the same phase


def reference(
    orders: list[list[int]], scale: int = 1, rows: list[Any] = ROWS, momentum: float = 0.0,
    frozen: Callable[[int], tuple[str, ...]] = lambda number: (),
) -> Trace:  # fmt: skip
    """The training by hand in one process: ``orders`` are the replicas' samples, ``scale`` multiplies the batches.

    ``frozen`` returns the beginnings of the names of what a step does not train.
    """
    model, replicas, steps, data = Plain(gpt(2)), [endless(order) for order in orders], [], Texts(SAMPLES)
    for _, phase, micro in rows:
        count = phase["batch_size"] * scale // (micro * len(orders))
        pieces = [[next(replica) for _ in range(micro)] for replica in replicas for _ in range(count)]
        data.set_seq_length(phase["seq_length"])
        steps.append([micro_batch_of(data, piece) for piece in pieces])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)

    def begin(number: int) -> None:
        optimizer.param_groups[0]["lr"] = rows[number][0]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen(number) or "none"))

    loss = lambda inputs, targets, step: mean_loss(model(inputs), targets) / len(step)  # noqa: E731
    return train_module(model, optimizer, steps, loss, before_step=begin)


def keys_of(phases: list[dict[str, Any]]) -> dict[str, Any]:
    return {"scheduler": {"type": "MixedBatch", "params": {"phases": phases}}}


def pipeline(keys: dict[str, Any] | None, data: Any = None, stages: int = 2) -> Any:
    """A pipeline engine with fixed shapes, as DeepSpeed's default is: a switch has to reset them."""
    return build_engine(
        gpt(2), mean_loss, token_pipeline=keys, stages=stages, module={"dynamic_shape": False}, training_data=data,
        config=keys_of(PHASES),
    )  # fmt: skip


class Observed:
    """Notes settings and shapes that the optimizer and the first layer of an engine meet, step by step."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.shapes, self.steps, self.losses = engine, [], [], []
        engine.basic_optimizer.register_step_pre_hook(self._before_step)
        first = next(m for m in engine.module.modules() if not list(m.children()) and list(m.parameters()))
        first.register_forward_hook(lambda module, inputs, output: self.shapes.append(tuple(output.shape[:2])))

    def _before_step(self, optimizer: Any, *args: Any) -> None:
        batch, pieces = self.engine.train_batch_size(), self.engine.gradient_accumulation_steps()
        pieces = getattr(self.engine.optimizer, "gradient_accumulation_steps", pieces)  # ZeRO's own copy
        self.steps.append((optimizer.param_groups[0]["lr"], batch, pieces, set(self.shapes)))
        self.shapes.clear()

    def train(self, steps: int, *data: Iterator[Any]) -> None:
        self.losses += [float(self.engine.train_batch(*data)) for _ in range(steps)]

    def report(self) -> dict[str, Any]:
        """All that was noted, and the weights; destroys the engine."""
        engine = self.engine
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        counted = (engine.global_steps, engine.global_samples, engine.tput_timer.batch_size)
        engine.destroy()
        return {"losses": self.losses, "steps": self.steps, "weights": weights, "counted": counted}


def whole_run(keys: dict[str, Any] | None, folder: str, starts: tuple[int, ...] = (2, 3), stages: int = 2) -> dict[Any, Any]:
    """Train seven steps, and again from checkpoints after each of ``starts``: 2 is at a switch, 3 inside the next phase."""
    data = Texts(SAMPLES)
    engine = pipeline(keys, data, stages)
    observed = Observed(engine)
    for step in range(len(STEPS)):
        if step in starts:
            engine.save_checkpoint(folder, tag=str(step))
        observed.train(1)
    last = (engine.lr_scheduler.phase_index, engine.train_batch_size(), engine.micro_batch_size)
    found: dict[Any, Any] = {"last": last, "whole": observed.report(), "asked": list(zip(data.asked, data.lengths, strict=True))}
    for start in starts:
        engine = pipeline(keys, Texts(SAMPLES), stages)
        assert engine.load_checkpoint(folder, tag=str(start))[0] is not None
        resumed = Observed(engine)
        resumed.train(len(STEPS) - start)
        found[start] = resumed.report()
    return found


class Iterated(Iterator[Any]):
    """Micro-batches of the engine's present size, in the guise of a loader's iterator with worker processes."""

    def __init__(self, engine: Any, data: Texts, order: Iterator[int], workers: int) -> None:
        self.engine, self.data, self.order, self._num_workers = engine, data, order, workers

    def __next__(self) -> Any:
        picked = [next(self.order) for _ in range(self.engine.train_micro_batch_size_per_gpu())]
        return micro_batch_of(self.data, picked)


def own_iterator() -> dict[str, Any]:
    """``train_batch(data_iter)``: unregistered, registered, and those that read ahead across a switch, which must be new ones."""
    engine, data, order = pipeline(None), Texts(SAMPLES), endless(list(range(SAMPLES)))
    iterator = Iterated(engine, data, order, workers=2)
    found: dict[str, Any] = {"unregistered": raised(lambda: engine.train_batch(iterator))}
    engine.lr_scheduler.register_dataset(data)
    observed = Observed(engine)
    observed.train(2, iterator)
    found["read ahead"] = raised(lambda: engine.train_batch(iterator))
    observed.train(3, Iterated(engine, data, order, workers=2))
    observed.train(2, Iterated(engine, data, order, workers=0))
    return {**found, "registered": observed.report()}


def plain_run(folder: str, zero: bool = False, resumes: bool = False) -> dict[str, Any]:
    """A plain engine on two replicas, with batches twice as large, in the loop of a user's script.

    Without ZeRO one step counts as skipped at the end of a phase. In ``folder`` a checkpoint is made after three steps, or one
    that is there goes on.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "gradient_clipping": 0.0, "optimizer": SGD,
        "zero_allow_untested_optimizer": True,
        **keys_of([{**phase, "batch_size": 2 * phase["batch_size"]} for phase in PHASES]),
        **({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}} if zero else {}),
    }  # fmt: skip
    engine, _, loader, _ = ds_terapipe.initialize(model=Plain(gpt(2)), config=config, training_data=Texts(SAMPLES))
    if resumes:
        engine.load_checkpoint(folder, tag="three")
        engine.lr_scheduler.seek(engine.global_samples)
    end, observed = len(ROWS if zero else SKIPPING), Observed(engine)
    while engine.global_steps < end:
        for inputs, targets in loader:
            before = engine.global_steps
            if not zero:
                engine.optimizer.overflow = before == 1  # as an optimizer of fp16 says of the step it skipped
            loss = mean_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            observed.losses.append(loss.item())
            if before < engine.global_steps == 3 and not resumes:
                engine.save_checkpoint(folder, tag="three")
            if engine.global_steps == end:
                break
    engine.save_checkpoint(folder, tag="end")
    engine.lr_scheduler.steps_taken = 0
    engine.load_checkpoint(folder, tag="end", load_lr_scheduler_states=False)
    return {"restarted": engine.get_lr(), **observed.report()}
