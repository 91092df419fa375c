"""DeepSpeed's own pipeline tests twice, as they are and with our key in every configuration; ``deepspeed_suite.sh`` runs it.

Its folder of tests is copied, and the copy is changed where the tests need more than a CPU and what is installed here: images
of torchvision become random ones, fp16 becomes bf16, and the random state of a device that is no device is not saved. What is
tested is the installed DeepSpeed; what older tests compare and it no longer has is left out. That the key was there, and that
the engine which ran is ours, is taken from what ``deepspeed_suite_hooks.py`` writes down in the processes of the tests: a test
that passes without them counts as failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.runtime.engine import DeepSpeedEngine

from tests.benchmarks import deepspeed_suite_hooks as hooks

REPOSITORY = Path(__file__).parents[2]
BLOCK = {"slices": 1}
FILES = ("unit/pipe/test_pipe_module.py", "unit/runtime/pipe/test_pipe.py", "unit/checkpoint/test_pipeline.py")
PLAIN, OURS = "PipelineEngine", "TokenPipelineEngine"
MISSING = "missing"
_WORST = ("passed", "skipped", "failed")

MODEL, CHECKPOINT = "unit/alexnet_model.py", "unit/checkpoint/test_pipeline.py"
EDITS = (  # in which file, what, by what it is replaced
    (MODEL, "fork_rng(devices=[get_accelerator().current_device_name()]", "fork_rng(devices=[]"),
    (CHECKPOINT, '"fp16": {', '"bf16": {'),
    (CHECKPOINT, "dtype=torch.float16 if", "dtype=torch.bfloat16 if"),
)
COMPARISON = "unit/checkpoint/common.py"
GONE = "sparse_tensor_module_names"  # an attribute of the engine, compared by tests of DeepSpeed before 0.19.8, which has none
RANDOM_IMAGES = '''

class _RandomImages(torch.utils.data.Dataset):
    """As torchvision's FakeData, which is not installed: the same image and class for the same index."""

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
'''


@dataclass
class Ran:
    """What became of one test: its outcome, its output, and how often which engine did what, over all ranks."""

    outcome: str = MISSING
    text: str = ""
    events: Counter[tuple[str, str]] = field(default_factory=Counter)

    def done(self) -> Counter[str]:
        """How often what was done, by whatever engine."""
        done: Counter[str] = Counter()
        for (event, engine), times in self.events.items():
            if engine:
                done[event] += times
        return done

    def engines(self) -> set[str]:
        """The classes of the engines that did it."""
        return {engine for _, engine in self.events if engine}


def prepare(checkout: Path, folder: Path) -> Path:
    """Copy DeepSpeed's tests into ``folder`` and change what a CPU needs; the folder to run them in.

    Raises SystemExit where ``checkout`` is not one of DeepSpeed, or its tests are not those that the changes are for.
    """
    source, target = checkout / "tests", folder / "tests"
    absent = [name for name in FILES if not (source / name).is_file()]
    if absent:
        raise SystemExit(f"{checkout}: has no tests/{absent[0]}, must be a checkout of DeepSpeed")
    target.mkdir()
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(source / name, target)
    shutil.copytree(source / "unit", target / "unit")
    shutil.copy(hooks.__file__, target)
    with (target / "unit/__init__.py").open("a") as package:
        package.write(f"\nimport {Path(hooks.__file__).stem}  # noqa\n")
    for name, old, new in EDITS:
        text = (target / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"tests/{name}: has {old!r} {text.count(old)} times, must be once, use another version")
        (target / name).write_text(text.replace(old, new))
    if GONE not in inspect.getsource(DeepSpeedEngine):
        lines = (target / COMPARISON).read_text().splitlines(keepends=True)
        (target / COMPARISON).write_text("".join(line for line in lines if GONE not in line))
    if importlib.util.find_spec("torchvision") is None:
        with (target / MODEL).open("a") as model:
            model.write(RANDOM_IMAGES)
    return target


def run(tests: Path, folder: Path, block: Mapping[str, object] | None, arguments: Sequence[str]) -> dict[str, Ran]:
    """Run the three files, with ``block`` as ``token_pipeline`` in every configuration or without, and read what ran."""
    folder.mkdir()
    path = os.pathsep.join([str(tests), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, hooks.FOLDER: str(folder)}
    if block is None:
        env["DS_TERAPIPE_AUTOLOAD"] = "0"
    else:
        env[hooks.BLOCK] = json.dumps(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", Path(hooks.__file__).stem, "-p", "no:cacheprovider"]
    command += [f"--basetemp={folder / 'files'}", *FILES, *arguments]
    print(f"running {', '.join(FILES)} {'without the key' if block is None else f'with {block}'}", flush=True)
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        subprocess.run(command, cwd=tests, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return read(folder)


def read(folder: Path) -> dict[str, Ran]:
    """What the hooks wrote down, by test."""
    found: dict[str, Ran] = {}
    for line in _lines(folder / "outcomes"):
        ran = found.setdefault(line["test"], Ran())
        if ran.outcome == MISSING or _WORST.index(line["outcome"]) > _WORST.index(ran.outcome):
            ran.outcome, ran.text = line["outcome"], line["text"]
    for line in _lines(folder / "events"):
        found.setdefault(line["test"], Ran()).events[line["event"], line["engine"]] += 1
    return found


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def complaint(plain: Ran, ours: Ran) -> str:
    """Why a test that passes without the key does not count as passed with it; empty where it does, or did not pass before."""
    if plain.outcome != "passed":
        return ""
    if ours.outcome != "passed":
        return f"{ours.outcome} with the key"
    if plain.engines() - {PLAIN}:
        return f"without the key a {', '.join(sorted(plain.engines() - {PLAIN}))} ran"
    if ours.engines() - {OURS}:
        return f"with the key a {', '.join(sorted(ours.engines() - {OURS}))} ran"
    if ours.events[hooks.INJECTED, ""] != ours.done()[hooks.BUILT]:
        return "an engine was built without the key"
    if ours.done() != plain.done():
        return f"did {dict(plain.done())} without the key and {dict(ours.done())} with it"
    return ""


def report(plain: Mapping[str, Ran], ours: Mapping[str, Ran]) -> int:
    """Print the table and what is wrong; the number of complaints."""
    tests = list(dict.fromkeys([*plain, *ours]))
    rows, wrong = [("test", "plain", "with the key", "engines", "batches", "")], {}
    nothing = Ran()
    for test in tests:
        before, after = plain.get(test, nothing), ours.get(test, nothing)
        wrong[test] = complaint(before, after)
        done = after.done()
        batches = sum(done[name] for name in hooks.BATCHES)
        rows.append((test, before.outcome, after.outcome, str(done[hooks.BUILT]), str(batches), wrong[test]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for test, why in wrong.items():
        if why:
            print(f"\n{test}: {why}\n{ours.get(test, nothing).text}")
    complaints = [why for why in wrong.values() if why]
    passed = sum(ran.outcome == "passed" for ran in plain.values())
    injected = sum(ran.events[hooks.INJECTED, ""] for ran in ours.values())
    trained = sum(ran.events[name, OURS] for ran in ours.values() for name in hooks.BATCHES)
    print(f"\n{passed} of {len(tests)} tests pass without the key, {passed - len(complaints)} of them with it;")
    print(f"the key was put into {injected} configurations, and {OURS} ran {trained} batches (every rank counts)")
    if not trained:
        complaints.append("no test ran a batch with the key")
        print(complaints[-1])
    return len(complaints)


def main() -> None:
    """Command line: the checkout, and arguments that are handed to pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed")
    known, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="deepspeed_suite_") as name:
        folder = Path(name)
        tests = prepare(known.checkout, folder)
        plain = run(tests, folder / "plain", None, arguments)
        if not plain:
            raise SystemExit((folder / "plain/log").read_text())
        ours = run(tests, folder / "ours", BLOCK, arguments)
        wrong = report(plain, ours)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
