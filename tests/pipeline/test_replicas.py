"""Gradients of several replicas: what DeepSpeed makes of them, without its second copy of all of them."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_terapipe.pipeline import replicas
from ds_terapipe.pipeline.replicas import _ALONE, ReplicaGradients, follow_replicas
from tests.pipeline.models import gpt, masked_loss, steps_of
from tests.pipeline.training import ADAMW, allow_fp16, build_engine, mine
from tests.spawn import launched

LARGE, SMALL = ((_ALONE,), (3, _ALONE)), ((8,), (_ALONE - 1,), (2, 4))
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"gradient_average": False}, {"gradient_predivide_factor": 4.0},
    {"prescale_gradients": True, "gradient_predivide_factor": 4.0}, {"communication_data_type": torch.float64},
)  # fmt: skip
FP16 = {"fp16": {"enabled": True, "loss_scale": 2.0**-8}}  # gradients of few bits, which a division rounds
FP32_SUMS = {**FP16, "data_types": {"grad_accum_dtype": "fp32"}}
COMM_FP16, COMM_FP32 = {"communication_data_type": "fp16"}, {"communication_data_type": "fp32"}
APART = {"contiguous_gradients": False}
ZERO: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # keys of ``zero_optimization``, and others
    ({}, {}), ({}, COMM_FP16), (APART, COMM_FP16), ({"reduce_scatter": False}, {"gradient_predivide_factor": 3.0}),
    ({}, FP16), ({}, {**FP16, **COMM_FP32}), (APART, FP32_SUMS), ({}, FP32_SUMS),
)  # fmt: skip


class Engine(DeepSpeedEngine):
    """The part of DeepSpeed's engine that reduces a list of gradients."""

    communication_data_type = optimizer = None

    def __init__(self, **setting: Any) -> None:
        torch.nn.Module.__init__(self)
        found = {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_average": True, **setting}
        type(self).communication_data_type = found.pop("communication_data_type", torch.float32)
        self.gradient_average, self.flattened = found.pop("gradient_average"), 0
        self._config = SimpleNamespace(**found)

    def flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        self.flattened += sum(each.numel() for each in tensors)
        return torch._utils._flatten_dense_tensors(tensors)

    def unflatten(self, flat: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return torch._utils._unflatten_dense_tensors(flat, tensors)

    def __del__(self) -> None:  # DeepSpeed's undoes more than there is
        pass


class Ours(Engine):
    def __init__(self, **setting: Any) -> None:
        super().__init__(**setting)
        self._replicas = ReplicaGradients(self, {})
        follow_replicas(self)


def reduced(engine: Any) -> tuple[list[torch.Tensor], list[int], int]:
    """Gradients after the reduction, sizes of messages in their order, elements copied; the last is not contiguous."""
    generator, sent, real = torch.Generator().manual_seed(dist.get_rank()), [], dist.all_reduce
    own = [torch.randn(size, generator=generator) for size in (*LARGE, *SMALL)]
    own.append(torch.randn((2, _ALONE), generator=generator).t())

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted), mock.patch("torch.distributed.distributed_c10d.all_reduce", noted):
        if isinstance(engine, Ours):  # has begun with a part of a flat gradient
            engine.mpu = SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD)
            engine._replicas._begin(own[1][1], engine.communication_data_type)
        engine.allreduce_no_retain(own, dist.group.WORLD, numel_per_bucket=10**9, dp_world_size=2)
    return own, sent, engine.flattened


def every_setting(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    found = []
    for setting in SETTINGS:
        theirs, _, all_copied = reduced(Engine(**setting))
        ours, sent, copied = reduced(Ours(**setting))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert [each.stride() for each in ours] == [each.stride() for each in theirs]
        found.append((sent, copied, all_copied))
    return found


def trained(zero: dict[str, Any], others: dict[str, Any], alone: int) -> tuple[list[torch.Tensor], list[Any], int, int]:
    """Weights, norms and losses after some steps of ZeRO-1, elements that were sent, and gradients that began early."""
    sent, real, begin = [], dist.all_reduce, mock.Mock(wraps=replicas._begin)

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10000, **zero}, **others}
    with mock.patch.multiple(replicas, _ALONE=alone, _begin=begin), mock.patch.object(dist, "all_reduce", noted):
        keys = {"slices": 3}
        engine = build_engine(gpt(), masked_loss, token_pipeline=keys, stages=1, optimizer=ADAMW, clip=0.5, config=config)
        scalars = []
        for step in steps_of(3, 4):
            scalars += [engine.train_batch(iter(mine(engine, step))), engine.get_global_grad_norm()]
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.destroy()
    return weights, scalars, sum(sent), begin.call_count


def every_zero(rank: int, world_size: int) -> None:
    allow_fp16()
    for zero, others in ZERO:
        ours, scalars, sent, early = trained(zero, others, 30)
        theirs, wanted, all_sent, none = trained(zero, others, 10**9)
        torch.testing.assert_close([*ours, *scalars], [*theirs, *wanted], rtol=0, atol=0, msg=f"{zero} {others}")
        assert sent == all_sent and early > none == 0


ranks = launched(every_setting, 2)
of_zero = launched(every_zero, 2)


def test_large_gradients_are_reduced_where_they_are_and_come_out_as_deepspeeds(ranks: list[Any]) -> None:
    large = _ALONE + 3 * _ALONE
    rest = 8 + (_ALONE - 1) + 8 + 2 * _ALONE
    for result in ranks:
        for setting, (sent, copied, all_copied) in zip(SETTINGS, result, strict=True):
            assert all_copied == sum(sent) == rest + large
            if "communication_data_type" in setting:
                assert copied == all_copied - _ALONE
            else:
                assert copied == rest and sent[:4] == [_ALONE] * 4


def test_zero_takes_gradients_that_began_early_with_the_bits_of_its_own(of_zero: list[None]) -> None:
    assert of_zero == [None, None]
