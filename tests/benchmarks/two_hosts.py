"""A training step of a GPT on two hosts: token slices against pipeline, tensor and context parallelism.

``python -m tests.benchmarks.two_hosts``, as root, joins two network namespaces by a link of ``--rate``, and runs one rank in each
as a host of its own. Namespaces, link and its limit are gone afterwards, also after an error or ctrl-C. The peers, which
docs/benchmarks.md names, train the same model.
"""

import argparse
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import spawn
from tests.benchmarks import measure
from tests.benchmarks.measure import Result
from tests.benchmarks.models import QUICK, Block, Shape, Workload, layers, plain
from tests.benchmarks.token_pipeline import Step, deepspeeds, named, ours, plain_steps

HOSTS = [f"ds_terapipe_{os.getpid()}_{number}" for number in range(2)]
ADDRESSES, LINK = ("10.213.77.1", "10.213.77.2"), "veth0"  # seen inside the namespaces only
# A small burst: a whole message of a slice must not pass at once. 50 ms of packets may wait before any is dropped.
LIMIT = ("burst", "64kb", "latency", "50ms")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS = 2  # of a column in a round, the fastest counts


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Context manager around two namespaces, each with an end of the link. What is left running in them is killed."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        for host in HOSTS:
            system("ip", "netns", "add", host)
        ends = [("netns", host) for host in HOSTS]
        system("ip", "link", "add", "name", LINK, *ends[0], "type", "veth", "peer", "name", LINK, *ends[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            system("ip", "-n", host, "address", "add", f"{address}/30", "dev", LINK)
            for device in ("lo", LINK):
                system("ip", "-n", host, "link", "set", device, "up")
            system("tc", "-n", host, "qdisc", "add", "dev", LINK, "root", "tbf", "rate", rate, *LIMIT)
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for host in HOSTS:  # their end is that of the link
            for process in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


def system(*command: str) -> None:
    """Run a command of the system; where it fails the benchmark ends with what it says."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"two_hosts: {' '.join(command)}: {done.stderr.strip()}")


def on_hosts(arguments: Sequence[str]) -> tuple[Result, float]:
    """Run this program's :func:`rank` on both hosts; return the result of the rounds, and the bytes per second of the link.

    A rank that fails ends the benchmark.
    """
    environment = os.environ | measure.ENVIRONMENT | {
        "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": LINK, "NCCL_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    with tempfile.NamedTemporaryFile() as file:
        program = [sys.executable, "-m", "tests.benchmarks.two_hosts", *arguments, "--to", file.name]
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, *program], env=environment | {"RANK": str(number)},
                stdout=subprocess.DEVNULL, start_new_session=True,
            )
            for number, host in enumerate(HOSTS)
        ]  # fmt: skip
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.1)
        if any(codes):
            sys.exit(f"two_hosts: ranks ended with exit codes {codes}, see above")
        return pickle.load(file)


def bandwidth() -> float:
    """Bytes per second of one large message over the link. For both ranks."""
    message, exchange, peer = torch.zeros(2**23), *((dist.recv, 0) if dist.get_rank() else (dist.send, 1))
    return message.nbytes / min(measure.timed(lambda: exchange(message, peer), 3))


def tensor_parallel(workload: Workload) -> Step:
    """megatron-core's tensor parallelism: half of the heads, features and vocabulary on each host. The embedding is on both."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, vocab_parallel_cross_entropy

    from ds_terapipe.megatron.parallel import initialize_parallel

    initialize_parallel(tensor=2)
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True, perform_initialization=False)

    def shared(linear: nn.Linear, kind: Any, dimension: int, **options: bool) -> nn.Module:
        made = kind(
            linear.in_features, linear.out_features, config=config, init_method=None, bias=linear.bias is not None,
            skip_bias_add=False, **options,
        )  # fmt: skip
        with torch.no_grad():
            made.weight.copy_(linear.weight.chunk(2, dimension)[dist.get_rank()])
            if linear.bias is not None:
                made.bias.zero_()
        made.register_forward_hook(lambda module, given, outputs: outputs[0])
        return made

    column, row = {"gather_output": False}, {"input_is_parallel": True}
    model = plain(layers(workload.shape))
    *blocks, head = model[1:]
    for block in blocks:
        block.qkv, block.fc1 = (shared(each, ColumnParallelLinear, 0, **column) for each in (block.qkv, block.fc1))
        block.proj, block.fc2 = (shared(each, RowParallelLinear, 1, **row) for each in (block.proj, block.fc2))
    head.linear = shared(head.linear, ColumnParallelLinear, 0, **column)
    return plain_steps(model, workload.micro_batches(), lambda *given: vocab_parallel_cross_entropy(*given).mean())


class UlyssesBlock(Block):
    """The block of a host that has half of the tokens: it attends with half of the heads to all of them."""

    def __init__(self, shape: Shape, index: int) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__(shape, index)
        self.distributed = DistributedAttention(self.local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attention(self, *qkv: Tensor) -> Tensor:
        return self.distributed(*(each.transpose(1, 2) for each in qkv), 0).transpose(1, 2)

    @staticmethod
    def local(*qkv: Tensor) -> Tensor:
        heads_first = (each.transpose(1, 2) for each in qkv)
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def context_parallel(workload: Workload) -> Step:
    """DeepSpeed's Ulysses: half of the tokens on each host, gradients reduced as in data parallelism."""

    def half(tensor: Tensor) -> Tensor:
        return tensor.chunk(2, 1)[dist.get_rank()].contiguous()

    halves = [((half(tokens), half(at)), half(labels)) for (tokens, at), labels in workload.micro_batches()]
    step = plain_steps(DistributedDataParallel(plain(layers(workload.shape, block=UlyssesBlock))), halves)

    def mean() -> float:
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        return float(loss) / 2

    return mean


FILLED: dict[str, Any] = {"slices": 8, "schedule": "zero_bubble"}
WAYS: dict[str, Callable[[Workload], Step]] = {  # those of ours with a number have so many slices
    "deepspeed": deepspeeds, "tensor": tensor_parallel, "context": context_parallel, "ours8": partial(ours, slices=8),
    "filled8": partial(ours, **FILLED), "twice8": partial(ours, stages_per_place=2, **FILLED),
    "v8": partial(ours, stages_per_place=2, placement="v", **FILLED),
}  # fmt: skip


def rank(options: Any, sequences: int) -> None:
    """Measure as one of the two ranks; the first writes down what was found."""
    spawn._join_group()
    speed, columns = bandwidth(), named(WAYS, Workload(QUICK if options.quick else Shape(), sequences))
    result = measure.side_by_side(list(columns.values()), measure.settings_of(options), STEPS)
    if dist.get_rank() == 0:
        options.to.write_bytes(pickle.dumps((result, speed)))
    dist.barrier()
    os._exit(0)  # the end of Python would wait for engines' groups


def main() -> None:
    options = measure.parser("two_hosts", __doc__, rounds=3)
    add = options.add_argument
    add("--batches", type=measure.listed(int), default=[1, 2], help="sequences per step (default 1,2)")
    add("--rate", default="1gbit", help="of the link in each direction, as tc takes it (default 1gbit)")
    add("--to", type=Path, help=argparse.SUPPRESS)  # a rank of the benchmark's own: file for what it finds
    options = options.parse_args()
    if options.to is not None:
        return rank(options, *options.batches)
    if os.geteuid():
        sys.exit(f"two_hosts: got user {os.geteuid()}, must be root to make network namespaces, use sudo")
    if None in map(shutil.which, ("ip", "tc")):
        sys.exit("two_hosts: got no command ip or tc, must be there, install iproute2")
    report = measure.Report(options)
    with two_hosts(options.rate):
        for sequences in options.batches:
            result, speed = on_hosts([*sys.argv[1:], "--batches", str(sequences)])
            title = f"B={sequences}, {speed / 1e6:.0f} MB/s"
            report.add(f"B={sequences}", result, result.table(title, "deepspeed"))


if __name__ == "__main__":
    main()
