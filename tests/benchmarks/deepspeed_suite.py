"""DeepSpeed's own pipeline tests twice, as they are and with our key in every configuration; ``deepspeed_suite.sh`` runs it.

Its folder of tests is copied, and the copy is changed where the tests need more than a CPU and what is installed here. That our
engine ran is taken from what ``deepspeed_suite_hooks.py`` writes down: a test that passes without it counts as failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks import deepspeed_suite_hooks as hooks

REPOSITORY, HOOKS, BLOCK = Path(__file__).parents[2], Path(hooks.__file__).stem, {"slices": 1}
FILES = ("unit/pipe/test_pipe_module.py", "unit/runtime/pipe/test_pipe.py", "unit/checkpoint/test_pipeline.py")
PLAIN, OURS, WORST = "PipelineEngine", "TokenPipelineEngine", ("passed", "skipped", "failed")
MODEL, CHECKPOINT = "unit/alexnet_model.py", "unit/checkpoint/test_pipeline.py"
EDITS = (  # in which file, what, by what it is replaced
    (MODEL, "fork_rng(devices=[get_accelerator().current_device_name()]", "fork_rng(devices=[]"),
    (CHECKPOINT, '"fp16": {', '"bf16": {'),
    (CHECKPOINT, "dtype=torch.float16 if", "dtype=torch.bfloat16 if"),
)
# an attribute that DeepSpeed 0.19.8 has no more
COMPARISON, GONE = "unit/checkpoint/common.py", "sparse_tensor_module_names"
RANDOM_IMAGES = """

class _RandomImages(torch.utils.data.Dataset):  # as torchvision's FakeData, which is not installed
    def __init__(self, dtype):
        self.dtype = dtype

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=random).to(self.dtype)
        return image, int(torch.randint(0, 10, (1,), generator=random))


def cifar_trainset(fp16=False):
    return _RandomImages(torch.float16 if fp16 else torch.float32)
"""


class Ran(NamedTuple):
    """What became of one test: its outcome, its output, and how often (engine, event) happened, over all ranks."""

    outcome: str = "missing"
    text: str = ""
    events: Mapping[tuple[str, str], int] = {}

    def done(self) -> dict[str, int]:
        return {event: times for (_, event), times in self.events.items()}


def prepare(checkout: Path, folder: Path) -> Path:
    """Copy DeepSpeed's tests into ``folder`` and change what a CPU needs; the folder to run them in."""
    source, target = checkout / "tests", folder / "tests"
    if absent := [name for name in FILES if not (source / name).is_file()]:
        raise SystemExit(f"{checkout}: has no tests/{absent[0]}, must be a checkout of DeepSpeed")
    shutil.copytree(source / "unit", target / "unit")
    for path in (source / "conftest.py", source / "pytest.ini", hooks.__file__):
        shutil.copy(path, target)
    with (target / "unit/__init__.py").open("a") as package:
        package.write(f"\nimport {HOOKS}  # noqa\n")
    for name, old, new in EDITS:
        text = (target / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"tests/{name}: has {old!r} {text.count(old)} times, must be once, use another version")
        (target / name).write_text(text.replace(old, new))
    lines = (target / COMPARISON).read_text().splitlines(keepends=True)
    (target / COMPARISON).write_text("".join(line for line in lines if GONE not in line))
    if importlib.util.find_spec("torchvision") is None:
        with (target / MODEL).open("a") as model:
            model.write(RANDOM_IMAGES)
    return target


def run(tests: Path, folder: Path, block: Mapping[str, object] | None, arguments: Sequence[str]) -> dict[str, Ran]:
    """Run the three files, with ``block`` as ``token_pipeline`` in every configuration or without; what ran, by test."""
    folder.mkdir()
    env = {**os.environ, hooks.FOLDER: str(folder), hooks.BLOCK: json.dumps(block)}
    env["PYTHONPATH"] = os.pathsep.join([str(tests), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    env["DS_TERAPIPE_AUTOLOAD"] = str(int(block is not None))
    command = [sys.executable, "-m", "pytest", "-q", "-p", HOOKS, "-p", "no:cacheprovider"]
    command += [f"--basetemp={folder / 'files'}", *FILES, *arguments]
    print(f"running {', '.join(FILES)} {'without the key' if block is None else f'with {block}'}", flush=True)
    with (folder / "log").open("wb") as log:
        subprocess.run(command, cwd=tests, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    outcomes, events = (lines_of(folder / name) for name in ("outcomes", "events"))
    if not outcomes:
        raise SystemExit((folder / "log").read_text())
    found: dict[str, Ran] = {}
    for line in sorted(outcomes, key=lambda line: WORST.index(line["outcome"])):  # a test is what its worst phase is
        happened = Counter((one["engine"], one["event"]) for one in events if one["test"] == line["test"])
        found[line["test"]] = Ran(line["outcome"], line["text"], happened)
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def complaint(plain: Ran, ours: Ran) -> str:
    """Why a test that passes without the key does not count as passed with it; empty where it does, or did not pass before."""
    if plain.outcome != "passed":
        return ""
    if ours.outcome != "passed":
        return f"{ours.outcome} with the key"
    for ran, wanted, how in ((plain, PLAIN, "without"), (ours, OURS, "with")):
        if others := {engine for engine, _ in ran.events} - {wanted}:
            return f"{how} the key a {', '.join(sorted(others))} ran"
    return "" if ours.done() == plain.done() else f"did {plain.done()} without the key and {ours.done()} with it"


def report(plain: Mapping[str, Ran], ours: Mapping[str, Ran]) -> int:
    """Print the table and what is wrong; the number of complaints."""
    passed = trained = wrong = 0
    for test, before in plain.items():
        after = ours.get(test, Ran())
        why = complaint(before, after)
        passed, wrong = passed + (before.outcome == "passed"), wrong + bool(why)
        trained += sum(after.events.get((OURS, name), 0) for name in hooks.BATCHES)
        print(f"{test}: {before.outcome} without the key, {after.outcome} with it {after.done()}")
        print(f"  {why}\n{after.text}" if why else "", end="")
    print(f"\n{passed} tests pass without the key, {passed - wrong} of them with it; {OURS} ran {trained} batches")
    return wrong + (not trained)


def main() -> None:
    """Command line: the checkout, and arguments that are handed to pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed")
    known, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="deepspeed_suite_") as name:
        folder = Path(name)
        tests = prepare(known.checkout, folder)
        plain, ours = (run(tests, folder / how, block, arguments) for how, block in (("plain", None), ("ours", BLOCK)))
        raise SystemExit(bool(report(plain, ours)))


if __name__ == "__main__":
    main()
