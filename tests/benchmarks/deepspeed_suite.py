"""DeepSpeed's own pipeline tests twice, as they are and with our key in every configuration; ``deepspeed_suite.sh`` runs it.

Its folder of tests is copied, and the copy is changed where the tests need more than a CPU and what is installed here. So is this
file: imported in every process of the tests, it puts our key into the configurations and writes into a folder what ran. A test
that passes without our engine counts as failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed

# environment variables; of the second: the block token_pipeline, or null where DeepSpeed runs by itself
FOLDER, BLOCK = "DEEPSPEED_SUITE_FOLDER", "DEEPSPEED_SUITE_BLOCK"
BATCHES = ("train_batch", "eval_batch")
REPOSITORY, HOOKS, SLICED = Path(__file__).parents[2], Path(__file__).stem, {"slices": 1}
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
    """Outcome and output of one test, and how often each (engine, event) happened over all ranks."""

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
    for path in (source / "conftest.py", source / "pytest.ini", __file__):
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
    env = {**os.environ, FOLDER: str(folder), BLOCK: json.dumps(block)}
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
        trained += sum(after.events.get((OURS, name), 0) for name in BATCHES)
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
        plain, ours = (run(tests, folder / how, block, arguments) for how, block in (("plain", None), ("ours", SLICED)))
        raise SystemExit(bool(report(plain, ours)))


# --------------------------------------------------------------------------- a plugin in the processes of DeepSpeed's tests


def pytest_runtest_setup(item: Any) -> None:
    """Tells the processes of a test which one they run: they may come from a server that was started before it."""
    Path(os.environ[FOLDER], "current").write_text(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test, by phase."""
    if report.when == "call" or not report.passed:
        note("outcomes", test=report.nodeid, outcome=report.outcome, text=report.longreprtext[-2000:])


def noted(function: Callable[..., Any], event: str, block: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function, with the key in its argument ``config``; its calls are written down with the class of the engine."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if block is not None:
            kwargs["config"] = {**kwargs["config"], "token_pipeline": block}
        result = function(*args, **kwargs)
        engine = getattr(function, "__self__", None) or result[0]
        test = Path(os.environ[FOLDER], "current").read_text()
        note("events", test=test, event=event, engine=type(engine).__name__)
        for name in BATCHES if event == "engine" else ():
            if hasattr(engine, name):
                setattr(engine, name, noted(getattr(engine, name), name))
        return result

    return wrapped


def note(name: str, **line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    file = os.open(Path(os.environ[FOLDER], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


if FOLDER in os.environ:
    # compiled at first use, for a minute or more, and its shared memory stays behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    key = json.loads(os.environ[BLOCK])
    if key is not None:
        import ds_terapipe

        ds_terapipe.register()
    deepspeed.initialize = noted(deepspeed.initialize, "engine", key)

if __name__ == "__main__":
    main()
