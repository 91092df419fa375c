"""The job that a checked rank believes to be in: PyTorch's fake process groups of any size, in one process.

A collective leaves its tensors as they are, and what is gathered is this rank's own. Devices are those of the cluster:
16-bit types exist, whatever this machine has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

from ds_terapipe.job import Job

_PORT = "29500"  # no process listens or connects


@contextmanager
def job(rank: int, world: int, per_node: int) -> Iterator[None]:
    """Context manager in which this process is one rank of a job; the process ends with it."""
    from deepspeed.accelerator import get_accelerator
    from torch.testing._internal.distributed import fake_pg

    from ds_terapipe.pipeline.transport import watchdog

    new_group, init, accelerator = dist.new_group, dist.init_process_group, get_accelerator()

    def begin(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            init("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world)

    def group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    launched = {  # what a launcher sets for a rank
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_SIZE": min(world, per_node),
        "LOCAL_WORLD_SIZE": min(world, per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _PORT,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in launched.items()}))
        replaced = (
            (import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None),
            (watchdog, "launching", _nobody_watches),
            (accelerator, "is_fp16_supported", lambda: True),
            (accelerator, "is_bf16_supported", lambda: True),
            (dist, "new_group", group),
            (dist, "init_process_group", begin),
            (dist, "broadcast_object_list", lambda *args, **kwargs: None),
            (torch.cuda, "set_device", lambda device: None),
            (DataLoader, "__iter__", functools.partialmethod(_without_workers, DataLoader.__iter__)),
        )
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


def _without_workers(loader: Any, iterate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Iterate in this process: a rank is a daemon, which can't have children, and a fork would copy the mode of fake tensors."""
    loader.num_workers = loader.timeout = 0
    return iterate(loader)


@contextmanager
def _nobody_watches(*args: Any) -> Iterator[Any]:
    yield SimpleNamespace(job=Job.current(), processes=SimpleNamespace(learn=lambda: None))
