"""Gradients of several replicas: what DeepSpeed makes of them, without its second copy of all of them."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_terapipe.pipeline.replicas import _ALONE, ReplicaGradients, follow_replicas
from tests.spawn import launched

LARGE, SMALL = ((_ALONE,), (3, _ALONE)), ((8,), (_ALONE - 1,), (2, 4))
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"gradient_average": False}, {"gradient_predivide_factor": 4.0},
    {"prescale_gradients": True, "gradient_predivide_factor": 4.0}, {"communication_data_type": torch.float64},
)  # fmt: skip


class Engine(DeepSpeedEngine):
    """The part of DeepSpeed's engine that reduces a list of gradients."""

    communication_data_type = None

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
    mine = [torch.randn(size, generator=generator) for size in (*LARGE, *SMALL)]
    mine.append(torch.randn((2, _ALONE), generator=generator).t())

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted), mock.patch("torch.distributed.distributed_c10d.all_reduce", noted):
        if isinstance(engine, Ours):  # has begun with a part of a flat gradient
            engine.mpu = SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD)
            engine._replicas._begin([mine[1][1]])
        engine.allreduce_no_retain(mine, dist.group.WORLD, numel_per_bucket=10**9, dp_world_size=2)
    return mine, sent, engine.flattened


def every_setting(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    found = []
    for setting in SETTINGS:
        theirs, _, all_copied = reduced(Engine(**setting))
        ours, sent, copied = reduced(Ours(**setting))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert [each.stride() for each in ours] == [each.stride() for each in theirs]
        found.append((sent, copied, all_copied))
    return found


ranks = launched(every_setting, 2)


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
