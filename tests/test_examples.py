"""The short scripts of examples/ as a user starts them, each with the JSON file beside it."""

import re
import runpy
import sys

import torch

from .programs import ROOT
from .spawn import in_background, run_to_exit

STEPS, LENGTH = 4, 64
SCRIPTS = {"own_pipeline": f"--steps {STEPS} --length {LENGTH}", "megatron_gpt": f"--steps {STEPS} --length {LENGTH}"}


def run_script(name: str, arguments: str) -> None:
    sys.argv = [f"{name}.py", *arguments.split()]
    print(f"run {name}", flush=True)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def run_scripts(rank: int, world: int) -> None:
    """One process; then four, as two stages of two replicas, and as two stages of two tensor-parallel ranks."""
    if rank == 0:
        run_script("plain_lamb", "--steps 10")
    torch.distributed.destroy_process_group = lambda *group: None  # the next script is in the same one
    for name, arguments in SCRIPTS.items():
        run_script(name, arguments)


ends = in_background(f"{__name__}:run_scripts", 4, lambda: run_to_exit(run_scripts, 4, timeout=240))


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", output, re.MULTILINE)]


def test_the_scripts_train_in_slices_and_the_plain_loop_learns(ends: list) -> None:
    assert [end.code for end in ends] == [0] * 4, ends[0].output[-3000:]
    said = re.split(r"^run \w+$", ends[0].output, flags=re.MULTILINE)[1:]
    plain = losses(said.pop(0))
    assert len(plain) == 2 and plain[-1] < plain[0] - 1.0
    for name, output in zip(SCRIPTS, said, strict=True):
        found = losses(output)
        assert len(found) == STEPS and found[-1] < found[0] - 0.2, f"{name}: {found}"
        assert re.search(rf"^\S.* step {STEPS}: .*4 slices, 1f1b", output, re.MULTILINE), output
