"""Ways in which a reshape or a freeze can lose or double something."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.mutants.harness import Check, Hit, Mutant


def _forgets_a_moment(original: Any, hit: Hit) -> Any:
    def refill(optimizer: Any, module: Any, group_of: Any, states: Any, settings: Any = None) -> int:
        for state in states.values():
            if "exp_avg" in state:
                hit()
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        return original(optimizer, module, group_of, states, settings)

    return refill


def _decay_of_the_first(original: Any, hit: Hit) -> Any:
    def settings(said: Any) -> list[dict[str, Any]]:
        found = original(said)
        for each in found:
            if each["weight_decay"] != found[0]["weight_decay"]:
                hit()
                each["weight_decay"] = found[0]["weight_decay"]
        return found

    return settings


def _decays_all(original: Any, hit: Hit) -> Any:
    def step(self: Any, lr_kwargs: Any = None) -> None:
        group = next(group for group in self.basic_optimizer.param_groups)
        original(self, lr_kwargs)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if not parameter.requires_grad:
                    hit()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])

    return step


def _trains_a_copy(original: Any, hit: Hit) -> Any:
    def refill(optimizer: Any, module: Any, group_of: Any, states: Any, settings: Any = None) -> int:
        freed = original(optimizer, module, group_of, states, settings)
        came = {id(parameter) for name, parameter in module.named_parameters() if name in states}
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if id(parameter) in came:
                    hit()
                    copy = nn.Parameter(parameter.detach().clone())
                    optimizer.state[copy] = optimizer.state.pop(parameter)
                    group["params"][number] = copy
        return freed

    return refill


def _hands_over_the_first_again(original: Any, hit: Hit) -> Any:
    def parcels(samples: int, readers: int, replicas: int, alike: bool = False) -> Any:
        found = original(samples, readers, replicas, alike)
        shifted = [parcel._replace(first=0, stop=parcel.stop - parcel.first) for parcel in found]
        if shifted != found:
            hit()
        return shifted

    return parcels


def _counts_one_less(original: Any, hit: Hit) -> Any:
    def reshape(
        self: Any, micro_batch: int, replicas: int, replica: int, consumed: int, *rest: Any, **more: Any
    ) -> None:
        if consumed:
            hit()
        original(self, micro_batch, replicas, replica, max(consumed - 1, 0), *rest, **more)

    return reshape


def _counts_within_the_replica(original: Any, hit: Hit) -> Any:
    def begin(self: Any, step: int, first_micro_batch: int = 0) -> None:
        if first_micro_batch:
            hit()
        original(self, step, 0)

    return begin


def _keeps_attributes(original: Any, hit: Hit) -> Any:
    def plain(value: Any) -> bool:
        if original(value):
            hit()
        return False

    return plain


def _all_layers_train(original: Any, hit: Hit) -> Any:
    def enter(self: Any) -> None:
        original(self)
        if self.frozen_layers:
            hit()
            self.module.train()

    return enter


def _rounds_masters(original: Any, hit: Hit) -> Any:
    def whole(place: Any, part: Any) -> Any:
        found = original(place, part)
        if part is place.master:
            hit()
            found = found.bfloat16().float()
        return found

    return whole


def _scales_anew(original: Any, hit: Hit) -> Any:
    def fill(wrapper: Any, before: Any = None) -> None:
        hit()
        original(wrapper)

    return fill


MOMENT = "a moment stays behind"
SETTING = "a group's decay is lost"
DECAYED = "frozen weights decay"
COPY = "a stale copy is trained"
HANDED = "a sample is handed over twice"
TWICE = "a sample is trained twice at a reshape"
STREAMS = "random streams count a replica's own micro-batches"
MARKS = "what was set on a parameter stays behind"
TRAINS = "frozen layers keep their dropout"
SCALE = "the loss scale begins anew"
ROUNDED = "masters go as what the layers compute with"

_ENGINE, _RESHAPE = "ds_terapipe.elastic.engine:ElasticPipelineEngine.", "ds_terapipe.elastic.moves.reshape:"

MUTANTS = (
    Mutant(
        MOMENT,
        "The first moment does not come with its weight.",
        (_RESHAPE + "refill",),
        _forgets_a_moment,
        "elastic, run",
    ),
    Mutant(
        SETTING,
        "After a reshape all parameter groups have the decay of the first.",
        (_RESHAPE + "_settings",),
        _decay_of_the_first,
        "elastic, run",
    ),
    Mutant(
        DECAYED,
        "What is frozen is still multiplied by what decay leaves of it.",
        (_ENGINE + "_exec_optimizer_step",),
        _decays_all,
        "elastic, run",
    ),
    Mutant(
        COPY,
        "The optimizer steps on copies of the weights that came, not on the module's.",
        (_RESHAPE + "refill",),
        _trains_a_copy,
        "elastic, run",
    ),
    Mutant(
        HANDED,
        "Every replica gets the first samples that a reader has.",
        ("ds_terapipe.elastic.feed:parcels",),
        _hands_over_the_first_again,
        "elastic, run",
    ),
    Mutant(
        TWICE,
        "A new shape begins with the last sample of the step before.",
        ("ds_terapipe.elastic.sampler:ElasticBatchSampler.reshape",),
        _counts_one_less,
        "elastic, sampler",
    ),
    Mutant(
        STREAMS,
        "Replicas draw the same random numbers for their micro-batches.",
        ("ds_terapipe.pipeline.operators.random_streams:RandomStreams.begin",),
        _counts_within_the_replica,
        "elastic, dropout",
    ),
    Mutant(
        MARKS,
        "A layer that is built anew has not what was set on the parameters of the live one.",
        ("ds_terapipe.elastic.moves.transfer:_is_plain",),
        _keeps_attributes,
        "elastic, holdings",
    ),
    Mutant(
        TRAINS,
        "A prefix that was frozen runs in train mode.",
        (_ENGINE + "_enter_training",),
        _all_layers_train,
        "elastic, run",
    ),
    Mutant(
        ROUNDED,
        "An fp32 master comes with the digits of bf16.",
        ("ds_terapipe.elastic.moves.masters:_whole",),
        _rounds_masters,
        "elastic, wrapped",
    ),
    Mutant(
        SCALE,
        "After a change the loss scale is that of the start.",
        ("ds_terapipe.elastic.optimizer:fill",),
        _scales_anew,
        "elastic, fp16",
    ),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)


def _check(name: str, measure: str, args: tuple[Any, ...], catches: tuple[str, ...], why: str) -> Check:
    return Check(name, measure, args, catches, {other: why for other in _NAMES if other not in catches})


CHECKS = (
    _check(
        "elastic, run",
        "tests.elastic.test_elastic_equivalence:off_by",
        (),
        (MOMENT, SETTING, DECAYED, COPY, HANDED, TRAINS),
        "has no dropout, plain iterators, and nothing set on its layers",
    ),
    _check(
        "elastic, dropout",
        "tests.elastic.test_elastic_equivalence:dropout_off_by",
        (),
        (STREAMS, TRAINS),
        "compares a shape with another, which both have it, or is about another one's numbers",
    ),
    _check(
        "elastic, holdings",
        "tests.mutants.claims:passes",
        ("tests.elastic.test_elastic_moves:test_a_holding_says_all_of_a_layer",),
        (MARKS,),
        "is about what is said of a layer",
    ),
    _check(
        "elastic, sampler",
        "tests.mutants.claims:passes",
        ("tests.elastic.test_sampler:test_a_batch_that_has_changed_goes_on_behind_the_last_sample",),
        (TWICE,),
        "is about the sampler alone",
    ),
    _check(
        "elastic, bits",
        "tests.elastic.test_elastic_bits:holds_for",
        ("shrunk",),
        (MOMENT, SETTING, TWICE),
        "compares runs that both have it",
    ),
    _check(
        "elastic, training_data",
        "tests.elastic.test_elastic_data:training_data_holds",
        (),
        (TWICE,),
        "is about the samples of training_data",
    ),
    _check(
        "elastic, iterators",
        "tests.elastic.test_elastic_data:iterators_hold",
        (),
        (HANDED,),
        "is about the samples of iterators, with tolerances of its own",
    ),
    _check(
        "elastic, wrapped",
        "tests.elastic.test_elastic_wrapped:holds_for",
        ("ZeRO-1, instance",),
        (ROUNDED, MOMENT, HANDED),
        "is about what wrappers keep",
    ),
    _check(
        "elastic, fp16",
        "tests.elastic.test_elastic_wrapped:holds_for",
        ("fp16, instance",),
        (SCALE, ROUNDED, MOMENT),
        "is about what wrappers of fp16 keep",
    ),
    _check(
        "elastic, phases",
        "tests.elastic.test_elastic_phases:holds_for",
        (),
        (TWICE, HANDED),
        "is about what is read in which phase",
    ),
    _check(
        "elastic, live layers",
        "tests.elastic.test_elastic_live:holds_for",
        (),
        (MARKS,),
        "is about what was set on live layers",
    ),
)
