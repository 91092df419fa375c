"""The device that ranks of tests train on: the CPU, or with ``TESTS_DEVICE=cuda`` GPUs or the stand-in of a CUDA runtime.

``TESTS_GPUS`` is the number of GPUs of the machine: NCCL needs one for each rank. The stand-in has 8.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

NAME = os.environ.get("TESTS_DEVICE", "cpu")
GPUS = int(os.environ.get("TESTS_GPUS", "8"))
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def local_rank(rank: int) -> int:
    """LOCAL_RANK of a rank, by which everyone chooses its device."""
    return rank if NAME == "cpu" else rank % GPUS


@contextmanager
def untouched() -> Iterator[None]:
    """Answer modules that ask for devices while they are imported: a process that has asked CUDA itself can't be forked."""
    if NAME == "cpu":
        yield
        return
    import torch

    with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: GPUS):
        yield


def take() -> str:
    """Set this process's device; the backend of its job."""
    name = os.environ["DS_ACCELERATOR"]
    if name == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # products of fp32 in TF32 differ by more than slices do
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        from tests.device_stand_in import runtime

        if runtime.LIBRARY is not None:
            from tests.device_stand_in import compute, lamb

            compute.install()
            lamb.install()
    return BACKENDS[name]
