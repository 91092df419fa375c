"""A pipeline's places in one process: real assemblies, with messages in plain queues that carry tensors and no names."""

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.runtime import PipelineRuntime, Step
from ds_terapipe.pipeline.slicing import as_tuple, like
from ds_terapipe.pipeline.stage import GradientRules, Stage
from ds_terapipe.schedule import Action, Op, Placement, Unit


class Queues:
    """Two queues for each boundary of stages: what is sent in another order is taken for something else."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bool], deque[Any]] = defaultdict(deque)

    def send_forward(self, stage: int, unit: Unit, outputs: Any) -> None:
        tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in as_tuple(outputs)]
        self._waiting[stage, True].append(like(outputs, tensors))

    def receive_forward(self, stage: int, unit: Unit) -> Any:
        return self._waiting[stage - 1, True].popleft()

    def send_backward(self, stage: int, unit: Unit, gradients: Sequence[Tensor]) -> None:
        self._waiting[stage - 1, False].append([gradient.clone() for gradient in gradients])

    def receive_backward(self, stage: int, unit: Unit) -> list[Tensor]:
        return self._waiting[stage, False].popleft()

    def has(self, action: Action) -> bool:
        """Whether a receive would find something."""
        forward = action.op is Op.RECV_FORWARD
        return bool(self._waiting[action.stage - forward, forward])

    def begin(self, *given: Any) -> None:
        pass

    finish = begin


class PlainGradients:
    """`GradientRules` of plain PyTorch: the mean over micro-batches, summed in ``grad``."""

    def __init__(self, micro_batches: int) -> None:
        self.scale: Any = lambda loss: loss / micro_batches
        self.around: Any = lambda parameters, first=True, last=True: nullcontext()
        self.summed_bytes: Any = lambda parameters: 0


_NOBODY = SimpleNamespace(ended="", begin=lambda *args: None, watches=False)


def assemblies(
    placement: Placement, layers: Sequence[Any], gradients: GradientRules, module: Any = None, streams: Any = None
) -> list[PipelineRuntime]:
    """A runtime for each place; ``layers`` of the whole model. ``module`` and ``streams`` make what a place has of them."""
    queues, ranks = Queues(), tuple(range(placement.places))
    found = []
    for place in range(placement.places):
        stages, own = {}, streams() if streams is not None else None
        first_here = placement.stages[placement.stages_on(place)[0]].first_layer
        parent = module(first_here) if module is not None else None
        for number in placement.stages_on(place):
            _, first, stop = placement.stages[number]
            trains = placement.goes_backward(number)
            stages[number] = Stage(
                number, layers[first:stop], first, module=parent, trains=trains, gradients=gradients, streams=own
            )
        view: Any = RankView(placement, place, ranks)
        found.append(PipelineRuntime(view, stages, queues, _NOBODY))  # type: ignore[arg-type]
    return found


def run(places: Sequence[PipelineRuntime], steps: Sequence[Step]) -> int:
    """Run a step's rows side by side, as far as messages let them; returns what is left over."""
    queues: Any = places[0].links
    at, rows = [0] * len(places), [step.grid[place] for place, step in enumerate(steps)]
    for runtime, step, row in zip(places, steps, rows, strict=True):
        runtime.begin(step, row)
    while any(index < len(row) for index, row in zip(at, rows, strict=True)):
        before = sum(at)
        for place, row in enumerate(rows):
            while at[place] < len(row) and (not row[at[place]].op.is_receive or queues.has(row[at[place]])):
                places[place].execute(row[at[place]])
                at[place] += 1
        assert sum(at) > before, "the grid is stuck"
    left = sum(runtime.left_over for runtime in places)
    for runtime in places:
        runtime.end()
    return left
