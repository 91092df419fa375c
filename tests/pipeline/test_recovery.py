"""An error that is found before a step leaves an engine as it was, and one within a step ends it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

from ds_terapipe import current_span
from ds_terapipe.pipeline.inspection.sequence_dims import probe_spans
from ds_terapipe.schedule import Op
from tests.pipeline.models import Block, gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine, raised
from tests.spawn import launched

SLICES, LENGTH, MICRO_BATCHES = 4, 24, 2
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BAD = {"reduce_output": "sum", "num_micro_batches": 0}
REFUSED, UNUSABLE = "ConfigError: token_pipeline.slices: got", "RuntimeError: this engine is no longer usable"


class Faulty(Block):
    """Fails where it is told to: in a slice that begins at so many tokens."""

    at: int | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        span = current_span()
        if span is not None and span.start == Faulty.at:
            raise KeyError("a bug in the layer")
        return super().forward(hidden)


EMBEDDING, *_, HEAD = gpt(2)
FAULTY = [EMBEDDING, *[LayerSpec(Faulty)] * 3, HEAD]


def data(length: int = LENGTH) -> Any:
    return iter([micro_batch(m, length=length, masked=False) for m in range(MICRO_BATCHES)])


def engine_of(layers: Any, slices: int = SLICES, timeout_s: float = 60, **options: Any) -> Any:
    return build_engine(layers, mean_loss, token_pipeline={"slices": slices, "timeout_s": timeout_s}, **options)


def come_back(rank: int, world_size: int) -> dict[str, list[str]]:
    """Errors before the first action of a step, each followed by a step that succeeds."""
    engine = engine_of(FAULTY)
    if rank == 1:
        Faulty.at = probe_spans(LENGTH)[1].start  # on the last stage, when the first slice has been sent, and taken
    found = {"the model can't be cut": [raised(lambda: engine.train_batch(data())) for _ in range(2)]}
    Faulty.at = None
    found["good"] = [raised(lambda: engine.train_batch(data())) for _ in range(2)]
    found["evaluation"] = [raised(partial(engine.eval_batch, data(), **{key: value})) for key, value in BAD.items()]
    engine.destroy()
    return found


def break_down(rank: int, world_size: int) -> dict[str, list[str]]:
    """An error in the middle of a step, on the last stage; the other one waits in vain. A call after that is told."""
    engine = engine_of(FAULTY, timeout_s=10)
    found = {"good": [raised(lambda: engine.train_batch(data()))]}
    if rank == 1:
        Faulty.at = LENGTH // SLICES
    found["bad"] = [raised(lambda: engine.train_batch(data()))]
    Faulty.at = None
    batches = [partial(engine.train_batch, data()), partial(engine.eval_batch, data())]
    found["next"] = [raised(call) for call in (*batches, partial(engine.set_slices, 2), partial(engine.save_checkpoint, "never"))]
    assert not Path("never").exists()
    engine.destroy()
    return found


def autocast(rank: int, world_size: int) -> dict[str, Any]:
    """How often weight gradients that wait are made, and whether they may wait."""
    engine = engine_of(gpt(4), config=AUTOCAST)
    engine.train_batch(data())
    waiting = [action for action in engine._watchdog._grid[rank] if action.op is Op.WEIGHT_GRADIENTS]
    engine.destroy()
    keys = {"slices": SLICES, "weight_gradients": "micro_batch"}
    refused = raised(lambda: build_engine(gpt(4), mean_loss, token_pipeline=keys, config=AUTOCAST))
    return {"waiting": waiting, "refused": refused}


ranks = launched([come_back, autocast, break_down], 2)


def test_after_an_error_before_the_step_an_engine_goes_on(ranks):
    for found, *_ in ranks:
        for line in found["the model can't be cut"]:  # on every rank the same, and no message of the first is left over
            assert line.startswith(f"{REFUSED} a model that can't be cut: run on a slice it fails")
            assert "a bug in the layer" in line
        assert found["good"] == ["", ""]
        assert all("ConfigError: eval_batch: " in e and key in e for key, e in zip(BAD, found["evaluation"], strict=True))


def test_after_an_error_in_a_step_an_engine_says_so(ranks):
    first, last = (found for *_, found in ranks)
    assert first["good"] == last["good"] == [""]
    assert last["bad"] == ["KeyError: 'a bug in the layer'"]
    assert first["bad"][0].startswith("PipelineStalled: rank 0 (stage 0) waited")
    for found, why in ((last, "failed: KeyError"), (first, "gave up waiting for")):
        assert len(found["next"]) == 4 and all(line.startswith(f"{UNUSABLE} ({why}") for line in found["next"])


def test_no_weight_gradient_waits_beside_autocast(ranks):
    for _, found, *_ in ranks:
        assert found["waiting"] == []
        text = 'token_pipeline.weight_gradients: got "micro_batch", must be "slice" or "auto" beside torch_autocast'
        assert found["refused"].startswith(f"ConfigError: {text}")
