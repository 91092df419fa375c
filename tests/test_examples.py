"""The short scripts of examples/ as a user starts them, each with the JSON file beside it."""

import re
import runpy
import sys

import torch

from .programs import ROOT
from .spawn import in_background, run_to_exit

STEPS, LENGTH = 4, 64
TRAINED = f"--steps {STEPS} --length {LENGTH}"
SCRIPTS = {"plain_lamb": "--steps 10", "own_pipeline": TRAINED, "megatron_gpt": TRAINED}


def run_scripts(rank: int, world: int) -> None:
    """One process; then four, as two stages of two replicas, and as two stages of two tensor-parallel ranks."""
    torch.distributed.destroy_process_group = lambda *group: None  # the next script is in the same one
    for name, arguments in SCRIPTS.items():
        if rank == 0 or name != "plain_lamb":
            sys.argv = [f"{name}.py", *arguments.split()]
            print(f"run {name}", flush=True)
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


ends = in_background(f"{__name__}:run_scripts", 4, lambda: run_to_exit(run_scripts, 4, timeout=240))


def test_the_scripts_train_in_slices_and_the_plain_loop_learns(ends: list) -> None:
    assert [end.code for end in ends] == [0] * 4, ends[0].output[-3000:]
    said = re.split(r"^run \w+$", ends[0].output, flags=re.MULTILINE)[1:]
    for name, output in zip(SCRIPTS, said, strict=True):
        losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", output, re.MULTILINE)]
        steps, less = (2, 1.0) if name == "plain_lamb" else (STEPS, 0.2)
        assert len(losses) == steps and losses[-1] < losses[0] - less, f"{name}: {losses}"
        assert name == "plain_lamb" or re.search(rf"^\S.* step {STEPS}: .*4 slices, 1f1b", output, re.MULTILINE), output
