"""How a launch reaches the package: import orders, what is loaded without our keys, and what a failed hook does.

Every case is a Python process of its own, started outside the repository, with the package installed as a user has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from .spawn import free_port

HARNESS = """
import json, sys
import torch
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule

# compiled at first use, for a minute or more, under a lock that a killed test would leave behind
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

class Args:
    local_rank = 0
    deepspeed_config = None

def engine(initialize, keys, how="config", stages=1):
    layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(stages)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, **keys}
    if how in ("path", "args"):
        with open("ds_config.json", "w") as file:
            file.write("// a comment, as DeepSpeed's reader allows it\\n" + json.dumps(config))
    if how == "positional":
        return initialize(None, model, optimizer, config=config)
    if how == "args":
        args = Args()
        args.deepspeed_config = "ds_config.json"
        return initialize(args, model, optimizer)
    if how == "path":
        return initialize(model=model, optimizer=optimizer, config="ds_config.json")
    return initialize(model=model, optimizer=optimizer, **{how: config})

def name(thing):
    return f"{type(thing).__module__}.{type(thing).__name__}"

def ours():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "ds_terapipe")

def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

KEY = {"token_pipeline": {"slices": 2}}
OFF = {"token_pipeline": {"enabled": False, "slices": 2}, "elastic_pipeline": {"enabled": False}}
DEEPSPEED = "deepspeed.runtime.pipe.engine.PipelineEngine"
OURS = "ds_terapipe.pipeline.engine.TokenPipelineEngine"
"""

HOOK_MODULES = ["ds_terapipe", *(f"ds_terapipe.{name}" for name in ("autoload", "names", "register", "version"))]


def run(script: str, directory, **env: str) -> dict:
    """Run a script as a user's, and return what it printed last, which is JSON."""
    settings = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("DS_TERA")
    }
    settings.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        **env,
    )
    settings.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    settings.update(env)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, env=settings, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "stderr": done.stderr}


@pytest.fixture(scope="module", autouse=True)
def _installed():
    found = [point.value for point in entry_points(group="torch.backends") if point.name == "ds_terapipe"]
    if found != ["ds_terapipe.autoload:load"]:
        pytest.fail(f"install the package first (pip install --no-build-isolation -e .): entry points {found}")


ORDERS = {
    "torch first": "import torch\nimport deepspeed\nfrom deepspeed import initialize",
    "deepspeed first": "import deepspeed\nimport torch\ninitialize = deepspeed.initialize",
    "from deepspeed import initialize": "from deepspeed import initialize\nimport torch",
}

ALL_WAYS = """
plain = engine(initialize, {})
switched_off = engine(initialize, OFF)
loaded = ours()
result = engine(initialize, KEY)
print(json.dumps({
    "plain": name(plain[0]),
    "off": name(switched_off[0]),
    "loaded": loaded,
    "engines": {how: name(engine(initialize, KEY, how)[0]) for how in ("positional", "path", "args", "config_params")},
    "tuple": [len(result), result[1] is result[0].optimizer, result[2], result[3]],
    "class restored": deepspeed.PipelineEngine is type(plain[0]),
    "module restored": type(deepspeed).__name__,
    "same": deepspeed.initialize is initialize,
    "near miss": raised(engine, initialize, {"token_pipline": {"slices": 2}}),
    "wrong type": raised(engine, initialize, {"token_pipeline": {"slices": "8"}}),
    "no model": raised(initialize, None, None, None, None, None, None, 29500, None, None, None, dict(KEY)),
    "ordinary": raised(lambda: initialize(model=torch.nn.Linear(4, 4), config={"train_batch_size": 1, **KEY})),
    "unknown argument": raised(lambda: initialize(model=None, config=KEY, colour="red")),
    "two configs": raised(lambda: initialize(type("A", (), {"deepspeed_config": "x"}), torch.nn.Linear(4, 4), config=KEY)),
    "missing file": raised(lambda: initialize(model=torch.nn.Linear(4, 4), config="no_such_file.json")),
}))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_import_orders(order, tmp_path):
    seen = run(ORDERS[order] + HARNESS + ALL_WAYS, tmp_path)
    deepspeeds, ours = "deepspeed.runtime.pipe.engine.PipelineEngine", "ds_terapipe.pipeline.engine.TokenPipelineEngine"
    assert seen["plain"] == seen["off"] == deepspeeds
    assert seen["loaded"] == HOOK_MODULES
    assert seen["engines"] == dict.fromkeys(["positional", "path", "args", "config_params"], ours)
    assert seen["tuple"] == [4, True, None, None]
    assert seen["class restored"] and seen["same"] and seen["module restored"] == "module"
    assert seen["near miss"] == ["ConfigError", 'token_pipline: unknown key, must be spelt "token_pipeline", use '
                                 '"token_pipeline"']  # fmt: skip
    assert seen["wrong type"][0] == "ConfigError" and 'got "8"' in seen["wrong type"][1]
    assert seen["no model"][0] == seen["ordinary"][0] == "ConfigError"
    assert "PipelineModule" in seen["ordinary"][1]
    assert seen["unknown argument"][0] == "TypeError"
    assert seen["two configs"][0] == "AssertionError"
    assert seen["missing file"][0] == "ValueError"
    assert seen["stderr"].count("one pipeline stage, slices gain nothing") == 5


def test_explicit_import_after_deepspeed(tmp_path):
    """With PyTorch's own switch off nothing runs by itself, and ``import ds_terapipe`` brings the hook."""
    script = """
import deepspeed
import sys
before = sorted(name for name in sys.modules if name.partition(".")[0] == "ds_terapipe")
import ds_terapipe
""" + HARNESS + """
print(json.dumps({"before": before, "loaded": ours(), "with": name(engine(deepspeed.initialize, KEY)[0])}))
"""  # fmt: skip
    seen = run(script, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert seen["before"] == []
    assert seen["loaded"] == HOOK_MODULES
    assert seen["with"] == "ds_terapipe.pipeline.engine.TokenPipelineEngine"


def test_switched_off(tmp_path):
    """``DS_TERAPIPE_AUTOLOAD=0`` leaves DeepSpeed alone; ``ds_terapipe.initialize`` works and leaves nothing behind."""
    script = HARNESS + """
import ds_terapipe
original, engine_class = deepspeed.initialize, deepspeed.PipelineEngine
seen = {"hook": hasattr(original, "ds_terapipe_original"), "with": name(engine(deepspeed.initialize, KEY)[0])}
seen["explicit"] = name(engine(ds_terapipe.initialize, KEY)[0])
seen["plain"] = name(engine(ds_terapipe.initialize, {})[0])
seen["refused"] = raised(engine, ds_terapipe.initialize, {"token_pipeline": {"slices": 0}})
seen["as before"] = deepspeed.initialize is original and deepspeed.PipelineEngine is engine_class
ds_terapipe.register()
ds_terapipe.register()
seen["registered"] = name(engine(deepspeed.initialize, KEY)[0])
seen["once"] = deepspeed.initialize.ds_terapipe_original is original
print(json.dumps(seen))
"""  # fmt: skip
    seen = run(script, tmp_path, DS_TERAPIPE_AUTOLOAD="0")
    assert seen["hook"] is False and seen["as before"] and seen["once"]
    assert seen["with"] == seen["plain"] == "deepspeed.runtime.pipe.engine.PipelineEngine"
    assert seen["explicit"] == seen["registered"] == "ds_terapipe.pipeline.engine.TokenPipelineEngine"
    assert seen["refused"][0] == "ConfigError"


LAMB = """
from types import SimpleNamespace

LAMB = {"optimizer": {"type": "FusedLamb", "params": {
    "lr": 0.1, "max_grad_norm": 0.5, "monitor_interval": 2, "backend": "plain"}}}
WARMUP = {"scheduler": {"type": "LambWarmup", "params": {
    "reference_lr": 0.1, "reference_batch_size": 4, "total_steps": 10, "warmup_steps": 2}}}
MIXED = {"scheduler": {"type": "MixedBatch", "params": {"phases": [
    {"steps": 2, "batch_size": 2, "seq_length": 4, "lr": 0.1, "warmup_steps": 0}]}}}
CSV = {"csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"}}

def lamb_engine(initialize, keys, how="config", plain=False, **given):
    layers = [LayerSpec(torch.nn.Linear, 4, 4)]
    model = torch.nn.Linear(4, 4) if plain else PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, **keys}
    if how == "config":
        return initialize(model=model, config=config, **given)
    with open("lamb.json", "w") as file:
        json.dump(config, file)
    if how == "path":
        return initialize(model=model, config="lamb.json", **given)
    args = SimpleNamespace(deepspeed_config="lamb.json", local_rank=0)
    result = initialize(args=args, model=model, **given)
    assert args.deepspeed_config == "lamb.json"
    return result

def train(engine, steps):
    for _ in range(steps):
        if hasattr(engine, "train_batch"):
            engine.train_batch(iter([(torch.randn(1, 4), torch.randn(1, 4))] * engine.gradient_accumulation_steps()))
        else:
            engine.backward(engine(torch.randn(1, 4)).square().sum())
            engine.step()

def seen(result):
    engine = result[0]
    before = engine.get_lr()
    train(engine, 4)
    return [name(engine), engine.optimizer_name(), name(engine.basic_optimizer), before, engine.gradient_clipping(),
            name(result[3]) if result[3] else None, result[1] is engine.optimizer, bool((engine.get_global_grad_norm() or 0) > 0)]
"""

LAMB_WAYS = """
nothing = lamb_engine(deepspeed.initialize, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
loaded = ours()
initialize = deepspeed.initialize
result = {
    "loaded": loaded, "nothing": [name(nothing[0]), nothing[0].optimizer_name()],
    "pipeline": seen(lamb_engine(initialize, {**LAMB, **CSV})),
    "path": seen(lamb_engine(initialize, LAMB, "path")),
    "args": seen(lamb_engine(initialize, LAMB, "args")),
    "plain": seen(lamb_engine(initialize, LAMB, plain=True)),
    "sliced": seen(lamb_engine(initialize, {**LAMB, "token_pipeline": {"slices": 1}})),
    "zero": seen(lamb_engine(initialize, {**LAMB, "zero_optimization": {"stage": 1}})),
    "warmup": seen(lamb_engine(initialize, {**LAMB, **WARMUP})),
    "mixed": seen(lamb_engine(initialize, {**LAMB, **MIXED, "token_pipeline": {"slices": 1}})),
    "adam": seen(lamb_engine(initialize, {**WARMUP, "optimizer": {"type": "Adam", "params": {"lr": 1, "torch_adam": True}}})),
    "both": raised(lambda: lamb_engine(initialize, LAMB, optimizer=torch.optim.SGD)),
    "near": raised(lamb_engine, initialize, {"optimizer": {"type": "FusedLAMB"}}),
    "offload": raised(lamb_engine, initialize, {**LAMB, "zero_optimization": {"stage": 3}}),
    "restored": name(lamb_engine(initialize, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]),
}
from pathlib import Path
result["events"] = {path.stem: path.read_text().split()[1:] for path in Path("csv").rglob("*Lamb*.csv")}

def again(config=None, **kwargs):
    return initialize(config=config, **kwargs)

wrap = sys.modules["ds_terapipe.register"].wrap
result["wrapped twice"] = name(lamb_engine(wrap(again), LAMB)[0].basic_optimizer)
print(json.dumps(result))
"""


def test_fused_lamb_and_its_schedules(tmp_path):
    """With each engine and each way to give the configuration; nothing of ours is loaded by a configuration without them."""
    seen = run("import torch\nimport deepspeed\n" + HARNESS + LAMB + LAMB_WAYS, tmp_path)
    deepspeeds, ours = "deepspeed.runtime.pipe.engine.PipelineEngine", "ds_terapipe.pipeline.engine.TokenPipelineEngine"
    lamb, schedules = "ds_terapipe.optim.lamb.FusedLamb", "ds_terapipe.optim.schedules.lr_schedules"
    assert seen["loaded"] == HOOK_MODULES and seen["nothing"] == [deepspeeds, "SGD"] and seen["restored"] == deepspeeds
    for way, kind in (("pipeline", deepspeeds), ("path", deepspeeds), ("args", deepspeeds), ("sliced", ours),
                      ("zero", deepspeeds), ("plain", "deepspeed.runtime.engine.DeepSpeedEngine")):  # fmt: skip
        assert seen[way] == [kind, "FusedLamb", lamb, [0.1], 0.5, None, True, True], way
    assert seen["warmup"][3:] == [[0.025], 0.5, f"{schedules}.LambWarmup", True, True]  # half of 0.1 sqrt(1 / 4)
    assert seen["mixed"][0] == ours and seen["mixed"][5] == "ds_terapipe.optim.schedules.mixed_batch.MixedBatch"
    assert seen["adam"][5] == f"{schedules}.LambWarmup" and seen["adam"][1:4] == [
        "adam",
        "torch.optim.adamw.AdamW",
        [0.025],
    ]
    for way in ("both", "near", "offload"):
        assert seen[way][0] == "ConfigError"
    assert seen["wrapped twice"] == lamb
    assert set(seen["events"]) >= {"Train_Lamb_mean_trust_ratio", "Train_Lamb_clamped_share"}
    for rows in seen["events"].values():
        assert [row.split(",")[0] for row in rows] == ["2", "4"]


BLOCK = """
import sys

class Blocked:
    names = set()

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ImportError(f"{name} is broken today")

sys.meta_path.insert(0, Blocked())
"""


def test_a_hook_that_cannot_be_loaded(tmp_path):
    """torch and deepspeed import, a configuration without our keys works, one with a key says why it cannot."""
    script = BLOCK + "Blocked.names = {'ds_terapipe.register'}" + HARNESS + """
seen = {"plain": name(engine(deepspeed.initialize, {})[0])}
for how in ("config", "path", "args"):
    seen[how] = raised(engine, deepspeed.initialize, KEY, how)
seen["lamb"] = raised(engine, deepspeed.initialize, {"optimizer": {"type": "FusedLamb"}})
import ds_terapipe
seen["explicit"] = raised(lambda: ds_terapipe.initialize(model=None, config=KEY))
print(json.dumps(seen))
"""  # fmt: skip
    seen = run(script, tmp_path)
    assert seen["plain"] == "deepspeed.runtime.pipe.engine.PipelineEngine"
    for how in ("config", "path", "args", "lamb"):
        assert seen[how][0] == "RuntimeError"
        assert "ds_terapipe" in seen[how][1] and "ds_terapipe.register is broken today" in seen[how][1]
    assert seen["explicit"] == ["ImportError", "ds_terapipe.register is broken today"]


def test_a_package_that_cannot_run_here(tmp_path):
    script = BLOCK + "Blocked.names = {'ds_terapipe.config'}" + HARNESS + """
seen = {"plain": name(engine(deepspeed.initialize, {})[0]), "broken": raised(engine, deepspeed.initialize, KEY)}
Blocked.names = set()
deepspeed.__version__ = "0.18.9"
seen["plain on another version"] = name(engine(deepspeed.initialize, {})[0])
seen["another version"] = name(engine(deepspeed.initialize, KEY)[0])
from ds_terapipe import compat
report, compat.report = compat.report, lambda packages: {compat.Name("deepspeed:gone", "0.19.8", "nothing"): False}
seen["misfit"] = raised(engine, deepspeed.initialize, KEY)
compat.report = report
deepspeed.__version__ = "0.19.8"
seen["restored"] = name(engine(deepspeed.initialize, KEY)[0])
print(json.dumps(seen))
"""  # fmt: skip
    seen = run(script, tmp_path)
    assert seen["plain"] == seen["plain on another version"] == "deepspeed.runtime.pipe.engine.PipelineEngine"
    assert seen["broken"][0] == "RuntimeError" and "ds_terapipe.config is broken today" in seen["broken"][1]
    assert seen["misfit"][0] == "ConfigError" and "DeepSpeed 0.18.9 lacks deepspeed:gone" in seen["misfit"][1]
    assert seen["another version"] == seen["restored"] == "ds_terapipe.pipeline.engine.TokenPipelineEngine"


def test_the_hook_imports_only_the_standard_library(tmp_path):
    script = """
import sys
before = set(sys.modules)
import ds_terapipe
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
import json
print(json.dumps({"others": sorted(tops - set(sys.stdlib_module_names)), "modules": sorted(
    name for name in sys.modules if name.partition(".")[0] == "ds_terapipe")}))
"""
    seen = run(script, tmp_path)
    assert seen["others"] == ["ds_terapipe"]
    assert seen["modules"] == HOOK_MODULES
