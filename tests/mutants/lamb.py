"""Ways in which FusedLamb can be wrong and still train: mostly trust ratios of something that is no whole layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ds_terapipe.optim.modes import ADAPT, RULE_COLUMNS
from ds_terapipe.optim.op.plain import FOUND_INF, MAX_NORM, SQUARES
from ds_terapipe.optim.op.segments import Part
from tests.mutants.harness import Check, Hit, Mutant

_DECAY, _FLAGS = RULE_COLUMNS.index("weight_decay"), RULE_COLUMNS.index("flags")


def _no_sums(original: Any, hit: Hit) -> Any:
    def over(*args: Any) -> Iterator[Any]:
        if list(original(*args)):
            hit()
        return iter(())

    return over


def _one_layer_a_tensor(original: Any, hit: Hit) -> Any:
    def init(self: Any, parts: Sequence[Part]) -> None:
        first: dict[int, int] = {}
        merged = [part._replace(layer=first.setdefault(part.tensor, part.layer)) for part in parts]
        if merged != list(parts):
            hit()
        original(self, merged)

    return init


def _unsplit(original: Any, hit: Hit) -> Any:
    def runs(shape: Any, pattern: Any, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        if pattern is not None:
            hit()
        return original(shape, None, start, length)

    return runs


def _own_squares(original: Any, hit: Hit) -> Any:
    def agree(self: Any, found: torch.Tensor) -> None:
        own, clips = float(self.control[SQUARES]), float(self.control[MAX_NORM]) > 0
        original(self, found)
        if clips and own != float(found[0]):
            hit()
            # what is zero here alone makes no priming step: the others would wait for this rank
            self.control[SQUARES] = max(own, torch.finfo(torch.float32).tiny)

    return agree


def _counts_all(original: Any, hit: Hit) -> Any:
    def is_counted(self: Any, parameter: Any) -> bool:
        if not original(self, parameter):
            hit()
        return True

    return is_counted


def _finds_nothing(original: Any, hit: Hit) -> Any:
    def begin(self: Any, *args: Any) -> None:
        original(self, *args)
        if self.control[FOUND_INF]:
            hit()
            self.control[FOUND_INF] = 0

    return begin


def _always_started(original: Any, hit: Hit) -> Any:
    def has_started(self: Any) -> bool:
        if not original(self):
            hit()
        return True

    return has_started


def _decays_excluded(original: Any, hit: Hit) -> Any:
    def rule(group: Any, excluded: bool, lr: float) -> list[float]:
        row = original(group, excluded, lr)
        if row[_DECAY] != group["weight_decay"]:
            hit()
            row[_DECAY] = float(group["weight_decay"])
        return row

    return rule


def _adapts_excluded(original: Any, hit: Hit) -> Any:
    def rule(group: Any, excluded: bool, lr: float) -> list[float]:
        row = original(group, excluded, lr)
        if excluded:
            hit()
            row[_FLAGS] = float(int(row[_FLAGS]) | ADAPT)
        return row

    return rule


def _begins_anew(original: Any, hit: Hit) -> Any:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for values in self.state.values():
            if values.get("step"):
                hit()
                values["step"] = 0

    return load_state_dict


def _own_norm(original: Any, hit: Hit) -> Any:
    def global_gradient_norm(parameters: Any, mpu: Any, device: torch.device) -> Any:
        if mpu is not None and mpu.get_model_parallel_world_size() > 1:
            hit()
        original(parameters := list(parameters), mpu, device)  # a collective of all ranks
        return original(parameters, None, device)

    return global_gradient_norm


TENSOR_PARALLEL = "ratio of a tensor-parallel part"
PARTITION = "ratio of a rank's part of a flat buffer"
BUFFER = "norms of a flat buffer"
UNSPLIT = "queries, keys and values are one layer"
OWN_CLIP = "each rank clips by its own norm"
COPIES = "copies count in the norm"
INFINITE = "an infinite gradient is stepped with"
PRIMING = "a step of zeros counts"
DECAY = "excluded layers decay"
ADAPTED = "excluded layers have a trust ratio"
LOADED = "loaded moments are corrected as new ones"
STAGE_NORM = "each stage clips by its own norm"

_SHARDING, _TABLE = "ds_terapipe.optim.sharding:Reduction.", "ds_terapipe.optim.op.device_table:DeviceTable."

MUTANTS = (
    Mutant(
        TENSOR_PARALLEL,
        "The norms of a layer are not summed over tensor-parallel ranks.",
        (_SHARDING + "_over_tensor_parallel",),
        _no_sums,
        "LAMB, two ranks",
    ),
    Mutant(
        PARTITION,
        "The norms of a layer are not summed over the ranks that ZeRO cuts it over.",
        (_SHARDING + "_over_data",),
        _no_sums,
        "LAMB, two ranks",
    ),
    Mutant(
        BUFFER,
        "All layers of a flat buffer have one trust ratio.",
        ("ds_terapipe.optim.op.segments:SegmentArrays.__init__",),
        _one_layer_a_tensor,
        "LAMB, one rank",
    ),
    Mutant(
        UNSPLIT,
        "A fused attention matrix has one trust ratio in spite of split_qkv.",
        ("ds_terapipe.optim.op.segments:runs",),
        _unsplit,
        "LAMB, one rank",
    ),
    Mutant(
        OWN_CLIP,
        "max_grad_norm holds for what a rank has of the gradients.",
        (_TABLE + "agree",),
        _own_squares,
        "LAMB, two ranks",
    ),
    Mutant(
        COPIES,
        "Tied and replicated gradients are in the norm as often as there are copies.",
        (_SHARDING + "is_counted",),
        _counts_all,
        "LAMB, two ranks",
    ),
    Mutant(
        INFINITE,
        "A step with nan or inf in a gradient is made.",
        (_TABLE + "begin",),
        _finds_nothing,
        "LAMB, a bad gradient",
    ),
    Mutant(
        PRIMING,
        "The first step counts though all gradients are zero.",
        (_TABLE + "_has_started",),
        _always_started,
        "LAMB, a priming step",
    ),
    Mutant(
        DECAY,
        "Biases and norms decay in spite of exclude.",
        ("ds_terapipe.optim.modes:rule",),
        _decays_excluded,
        "LAMB, oracle",
    ),
    Mutant(
        ADAPTED,
        "Biases and norms are multiplied by a trust ratio in spite of exclude.",
        ("ds_terapipe.optim.modes:rule",),
        _adapts_excluded,
        "LAMB, oracle",
    ),
    Mutant(
        LOADED,
        "The steps that a loaded state has made are forgotten: its moments are corrected as if they were new.",
        ("ds_terapipe.optim.lamb:FusedLamb.load_state_dict",),
        _begins_anew,
        "LAMB, saved and loaded",
    ),
    Mutant(
        STAGE_NORM,
        "gradient_clipping holds for the gradients of each pipeline stage and tensor-parallel rank.",
        ("ds_terapipe.clipping:global_gradient_norm",),
        _own_norm,
        "LAMB, pipeline engine",
    ),
)

_OTHER_DATA = (
    "is about trust ratios and norms of sharded layers: no bad gradient, zeros, exclusion or loading in its runs"
)
_WHOLE = "has whole layers in one process"
_ENGINE = "the reference that it compares with is a FusedLamb in the same process"
_STEPPED = "is about which steps are made, not about how long they are"
_NO_FLAT = "has no flat buffers in these setups"


def _blind(why: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


_RATIOS = (TENSOR_PARALLEL, PARTITION, BUFFER, UNSPLIT, OWN_CLIP, COPIES)
_OTHERS = (INFINITE, PRIMING, DECAY, ADAPTED, LOADED)

CHECKS = (
    Check(
        "LAMB, one rank",
        "tests.optim.test_lamb_sharded:off_by",
        ("flat over 1, a group at a time", "flat over 1, split attention"),
        catches=(BUFFER, UNSPLIT),
        blind=_blind(_WHOLE, TENSOR_PARALLEL, PARTITION, OWN_CLIP, COPIES, STAGE_NORM) | _blind(_OTHER_DATA, *_OTHERS),
    ),
    Check(
        "LAMB, two ranks",
        "tests.optim.test_lamb_sharded:off_by",
        (
            "flat over 2, clipped",
            "tensor parallel, clipped",
            "flat over 2, split attention",
            "two stages, tied, clipped",
        ),
        catches=_RATIOS,
        blind=_blind(_OTHER_DATA, *_OTHERS) | {STAGE_NORM: "has no engine"},
    ),
    Check(
        "LAMB, four ranks",
        "tests.optim.test_lamb_sharded:off_by",
        (
            "tensor parallel x flat over 2",
            "tensor parallel x flat over 2, a group at a time, split attention",
            "two stages x flat over 2, tied",
        ),
        catches=_RATIOS,
        blind=_blind(_OTHER_DATA, *_OTHERS) | {STAGE_NORM: "has no engine"},
    ),
    Check(
        "LAMB, oracle",
        "tests.optim.test_lamb_numbers:off_by",
        ("paper", "excluded"),
        catches=(DECAY, ADAPTED),
        blind=_blind(_WHOLE, *_RATIOS, STAGE_NORM)
        | _blind("steps on, from the first, with good gradients", INFINITE, PRIMING, LOADED),
    ),
    Check(
        "LAMB, a bad gradient",
        "tests.mutants.claims:passes",
        ("tests.optim.test_lamb_state:skips_one_step", float("inf"), None, "auto"),
        catches=(INFINITE,),
        blind=_blind(_STEPPED, *_RATIOS, PRIMING, DECAY, ADAPTED, LOADED, STAGE_NORM),
    ),
    Check(
        "LAMB, a priming step",
        "tests.mutants.claims:passes",
        ("tests.optim.test_lamb_state:test_a_priming_step_counts_nothing", "auto"),
        catches=(PRIMING,),
        blind=_blind(_STEPPED, *_RATIOS, INFINITE, DECAY, ADAPTED, LOADED, STAGE_NORM),
    ),
    Check(
        "LAMB, skipped and priming steps of two ranks",
        "tests.optim.test_lamb_sharded:no_step_is_made",
        catches=(INFINITE, PRIMING),
        blind=_blind(_STEPPED, *_RATIOS, DECAY, ADAPTED, LOADED, STAGE_NORM),
    ),
    Check(
        "LAMB, saved and loaded",
        "tests.mutants.claims:passes",
        ("tests.optim.test_lamb_state:test_training_goes_on_bit_for_bit", "saved_and_loaded", torch.float32, "auto"),
        catches=(LOADED,),
        blind=_blind("compares two runs with the same defect", *_RATIOS, INFINITE, PRIMING, DECAY, ADAPTED, STAGE_NORM),
    ),
    Check(
        "LAMB, pipeline engine",
        "tests.optim.test_deepspeed_pipeline:steps_off_by",
        ("fp32, slices",),
        catches=(STAGE_NORM,),
        blind=_blind(_NO_FLAT, PARTITION, BUFFER)
        | _blind("DeepSpeed clips in place of the optimizer", OWN_CLIP, COPIES)
        | _blind("is not tensor parallel and splits nothing", TENSOR_PARALLEL, UNSPLIT)
        | _blind(_ENGINE, *_OTHERS),
    ),
    Check(
        "LAMB, pipeline engine with ZeRO-1",
        "tests.optim.test_deepspeed_pipeline:steps_off_by",
        ("fp32 zero1", "fp32 zero1, two groups", "bf16 zero1"),
        catches=(PARTITION, BUFFER),
        blind=_blind("DeepSpeed clips in place of the optimizer", OWN_CLIP, COPIES, STAGE_NORM)
        | _blind("is not tensor parallel and splits nothing", TENSOR_PARALLEL, UNSPLIT)
        | _blind(_ENGINE, *_OTHERS),
    ),
    Check(
        "LAMB, pipeline engine, checkpoints",
        "tests.optim.test_deepspeed_pipeline:training_goes_on",
        ("fp32", "fp32 zero1, two groups"),
        catches=(LOADED,),
        blind=_blind("compares two runs with the same defect", *_RATIOS, INFINITE, PRIMING, DECAY, ADAPTED, STAGE_NORM),
    ),
    Check(
        "LAMB, plain engine with ZeRO",
        "tests.optim.test_deepspeed_plain_engine:steps_off_by",
        ("fp32 zero1", "fp32 zero2", "bf16 zero1, fp32 sum"),
        catches=(PARTITION, BUFFER),
        blind=_blind("DeepSpeed clips in place of the optimizer", OWN_CLIP, COPIES, STAGE_NORM)
        | _blind("is not tensor parallel and splits nothing", TENSOR_PARALLEL, UNSPLIT)
        | _blind(_ENGINE, *_OTHERS),
    ),
    Check(
        "LAMB, plain engine, skipped steps and checkpoints",
        "tests.optim.test_deepspeed_plain_engine:no_step_is_lost",
        ("fp32",),
        catches=(INFINITE, LOADED),
        blind=_blind("compares two runs with the same defect", *_RATIOS, PRIMING, DECAY, ADAPTED, STAGE_NORM),
    ),
    Check(
        "LAMB, Megatron's layers on two tensor-parallel ranks",
        "tests.optim.test_deepspeed_tensor_parallel:steps_off_by",
        ("fp32, two stages", "fp32 zero1"),
        catches=(TENSOR_PARALLEL, PARTITION, BUFFER, STAGE_NORM),
        blind=_blind("DeepSpeed clips in place of the optimizer", OWN_CLIP, COPIES)
        | {UNSPLIT: "splits nothing"}
        | _blind(_ENGINE, *_OTHERS),
    ),
)
