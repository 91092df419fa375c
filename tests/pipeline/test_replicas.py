"""Gradients of several replicas: what DeepSpeed makes of them, without its second copy of all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_terapipe.pipeline.gradients import _ALONE, Replicas
from tests.spawn import run_ranks

REPLICAS = 2
SIZES = ((8,), (_ALONE,), (_ALONE - 1,), (3, _ALONE // 2), (2, 4))
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_predivide_factor": 4.0},
    {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
    {"gradient_average": False},
    {"communication": torch.float64},
)


class Engine(DeepSpeedEngine):
    """As much of DeepSpeed's engine as reduces a list of gradients."""

    def __init__(
        self,
        prescale_gradients: bool = False,
        gradient_predivide_factor: float = 1.0,
        gradient_average: bool = True,
        communication: torch.dtype = torch.float32,
    ) -> None:
        torch.nn.Module.__init__(self)
        self._config = SimpleNamespace(
            prescale_gradients=prescale_gradients, gradient_predivide_factor=gradient_predivide_factor
        )
        self.gradient_average, self._type = gradient_average, communication
        self.flattened = 0

    @property
    def communication_data_type(self) -> torch.dtype:
        return self._type

    def flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        self.flattened += sum(each.numel() for each in tensors)
        return torch._utils._flatten_dense_tensors(tensors)

    def unflatten(self, flat: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return torch._utils._unflatten_dense_tensors(flat, tensors)

    def __del__(self) -> None:  # DeepSpeed's undoes more than there is
        pass


class Ours(Replicas, Engine):
    pass


def gradients(rank: int) -> list[torch.Tensor]:
    """One of them turned: not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(size, generator=generator) for size in SIZES]
    return [*made, torch.randn((2, _ALONE), generator=generator).t()]


def reduced(rank: int, make: Callable[..., Any], setting: dict[str, Any]) -> tuple[list[torch.Tensor], list[int], int]:
    """The gradients after the reduction, the sizes of messages in their order, and elements copied into a buffer."""
    engine, mine, sent = make(**setting), gradients(rank), []
    real = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_reduce", noted),
        mock.patch("torch.distributed.distributed_c10d.all_reduce", noted),
    ):
        engine.allreduce_no_retain(mine, dist.group.WORLD, numel_per_bucket=10**9, dp_world_size=REPLICAS)
    return mine, sent, engine.flattened


def every_setting(rank: int, world_size: int) -> list[tuple[list[str], list[int], int, int]]:
    found = []
    for setting in SETTINGS:
        theirs, _, all_copied = reduced(rank, Engine, setting)
        ours, sent, copied = reduced(rank, Ours, setting)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        found.append(([str(each.stride()) for each in ours], sent, copied, all_copied))
    return found


def test_large_gradients_are_reduced_where_they_are_and_come_out_as_deepspeeds() -> None:
    small = 8 + (_ALONE - 1) + 8
    turned, large = 2 * _ALONE, _ALONE + 3 * (_ALONE // 2)
    for result in run_ranks(every_setting, REPLICAS, timeout=120):
        for setting, (strides, sent, copied, all_copied) in zip(SETTINGS, result, strict=True):
            assert all_copied == small + turned + large
            assert strides[-1] == str((1, _ALONE))
            if "communication" in setting:
                assert (copied, sum(sent)) == (all_copied, all_copied)
            else:
                assert copied == small + turned
                assert sent[:2] == [_ALONE, 3 * (_ALONE // 2)]
                assert sum(sent) == all_copied


@pytest.mark.parametrize("bucket", [[], [8]])
def test_a_bucket_without_a_large_gradient_is_deepspeeds(bucket: list[int]) -> None:
    class DeepSpeeds(DeepSpeedEngine):
        buckets: list[Any] = []
        gradient_average, communication_data_type = False, torch.float32

        def __init__(self) -> None: ...

        def __del__(self) -> None: ...

        def allreduce_no_retain(
            self, bucket: list[Any], dp_group: Any, numel_per_bucket: int, dp_world_size: int
        ) -> None:
            self.buckets.append((len(bucket), dp_group, numel_per_bucket, dp_world_size))

    class Alone(Replicas, DeepSpeeds):
        pass

    Alone().allreduce_no_retain([torch.zeros(n) for n in bucket], "replicas", numel_per_bucket=7, dp_world_size=2)
    assert DeepSpeeds.buckets[-1] == (len(bucket), "replicas", 7, 2)
