"""DeepSpeed's own pipeline tests twice, as they are and with our key in every configuration; ``deepspeed_suite.sh`` runs it.

Its folder of tests is copied, and the copy is changed where the tests need more than a CPU and what is installed here. So is this
file: imported in every process of the tests, it puts our key into the configurations and sees to it that the engine is ours.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import deepspeed

KEY = "DEEPSPEED_SUITE_KEY"  # environment variable: the block token_pipeline, or null where DeepSpeed runs by itself
REPOSITORY, HOOKS = Path(__file__).parents[2], Path(__file__).stem
FILES = ("unit/pipe/test_pipe_module.py", "unit/runtime/pipe/test_pipe.py", "unit/checkpoint/test_pipeline.py")
MODEL, CHECKPOINT = "unit/alexnet_model.py", "unit/checkpoint/test_pipeline.py"
EDITS = (  # in which file, what, by what it is replaced
    (MODEL, "fork_rng(devices=[get_accelerator().current_device_name()]", "fork_rng(devices=[]"),
    (CHECKPOINT, '"fp16": {', '"bf16": {'),
    (CHECKPOINT, "dtype=torch.float16 if", "dtype=torch.bfloat16 if"),
)
# an attribute that DeepSpeed 0.19.8 has no more
COMPARISON, GONE = "unit/checkpoint/common.py", "sparse_tensor_module_names"
RANDOM_IMAGES = """

def cifar_trainset(fp16=False):  # as torchvision's FakeData, which is not installed
    random = torch.Generator().manual_seed(0)
    images = torch.randn(2048, 3, 32, 32, generator=random).to(torch.float16 if fp16 else torch.float32)
    return [(image, int(torch.randint(0, 10, (1,), generator=random))) for image in images]
"""


def prepare(checkout: Path, folder: Path) -> Path:
    """Copy DeepSpeed's tests into ``folder`` and change what a CPU needs; the folder to run them in."""
    source, target = checkout / "tests", folder / "tests"
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


def run(tests: Path, key: Mapping[str, object] | None, arguments: Sequence[str]) -> dict[str, str]:
    """Run the three files, with ``key`` as ``token_pipeline`` in every configuration or without; outcomes by test."""
    found, env = tests / "outcomes.xml", {**os.environ, KEY: json.dumps(key)}
    env["PYTHONPATH"] = os.pathsep.join([str(tests), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    env["DS_TERAPIPE_AUTOLOAD"] = str(int(key is not None))
    command = [sys.executable, "-m", "pytest", "-q", "-p", HOOKS, "-p", "no:cacheprovider", f"--junitxml={found}"]
    subprocess.run([*command, *FILES, *arguments], cwd=tests, env=env, check=False)
    cases = ElementTree.fromstring(found.read_bytes()).iter("testcase")
    found.unlink()  # the next run must not be taken for this one
    return {f"{c.get('classname')}::{c.get('name')}": "/".join(child.tag for child in c) or "passed" for c in cases}


def main() -> None:
    """Command line: the checkout, and arguments that are handed to pytest."""
    _, checkout, *arguments = sys.argv
    with tempfile.TemporaryDirectory(prefix="deepspeed_suite_") as folder:
        tests = prepare(Path(checkout), Path(folder))
        plain, ours = (run(tests, key, arguments) for key in (None, {"slices": 1}))
    wrong = [test for test, outcome in plain.items() if outcome == "passed" != ours.get(test)]
    passed = list(plain.values()).count("passed")
    print("\n".join([*(f"{test}: passed without the key, not with it" for test in wrong), ""]))
    print(f"{passed} tests pass without the key, {passed - len(wrong)} of them with it")
    raise SystemExit(bool(wrong) or not passed)


def watched(initialize: Callable[..., Any], key: Mapping[str, object] | None) -> Callable[..., Any]:
    """``deepspeed.initialize`` with the key in its argument ``config``, which fails where another engine than the key's runs."""

    @functools.wraps(initialize)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if key is not None:
            kwargs["config"] = {**kwargs["config"], "token_pipeline": key}
        result = initialize(*args, **kwargs)
        assert type(result[0]).__name__ == ("PipelineEngine" if key is None else "TokenPipelineEngine")
        return result

    return wrapped


if KEY in os.environ:
    # compiled at first use, for a minute or more, and its shared memory stays behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if (wanted := json.loads(os.environ[KEY])) is not None:
        import ds_terapipe

        ds_terapipe.register()
    deepspeed.initialize = watched(deepspeed.initialize, wanted)

if __name__ == "__main__":
    main()
