"""How a launch reaches the package: import orders, what is loaded without our keys, and what a failed hook does.

Import orders have interpreters of their own, outside the repository. All else is forked from one that has imported torch and
deepspeed and none of our modules; ``HOOK`` runs the entry point as the end of ``import torch`` does.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from deepspeed import accelerator
from deepspeed.runtime import config, constants

from ds_terapipe import autoload, refusals, trainers
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import LOADING, QUEUES
from ds_terapipe.register import _checked, wrap

from .spawn import run_script

LOOKS = """
import sys

def ours():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "ds_terapipe")

def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""

_LOADED = "arguments autoload errors names register trainers version"
HOOK_MODULES = ["ds_terapipe", *(f"ds_terapipe.{name}" for name in _LOADED.split())]
NEAR_MISS = "ConfigError", 'token_pipline: unknown key, must be spelt "token_pipeline", use "token_pipeline"'
"""
ENGINES = LOOKS + """
import json
import torch
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from types import SimpleNamespace

assert ours() == []
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use, for a minute or more
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

def engine(initialize, keys, how="config", **given):
    model = PipelineModule([LayerSpec(torch.nn.Linear, 4, 4)], num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, **keys}
    if "optimizer" not in keys:
        config["gradient_clipping"] = 0
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **given}
    with open("ds_config.json", "w") as file:
        file.write("// a comment, as DeepSpeed's reader allows it\\n" + json.dumps(config))
    if how == "positional":
        return initialize(None, model, *given.values(), config=config)
    if how == "args":
        args = SimpleNamespace(deepspeed_config="ds_config.json", local_rank=0)
        result = initialize(args, model, **given)
        assert args.deepspeed_config == "ds_config.json"
        return result
    return initialize(model=model, **{"config" if how == "path" else how: "ds_config.json" if how == "path" else config}, **given)

def kind(result):
    return type(result[0]).__module__ + "." + type(result[0]).__name__

KEY = {"token_pipeline": {"slices": 2}}
DEEPSPEED = "deepspeed.runtime.pipe.engine.PipelineEngine"
OURS = "ds_terapipe.pipeline.engine.TokenPipelineEngine"
"""  # fmt: skip
HOOK = "torch._import_device_backends()\nfrom deepspeed import initialize\n"
BLOCK = """
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == blocked:
            raise ImportError(f"{name} is broken today")

sys.meta_path.insert(0, Blocked())
"""


def run(script: str, folder: Path, **env: str) -> str:
    """Run a script whose assertions must hold, and return what it wrote."""
    end = run_script(ENGINES + script, folder, env=env)
    assert end.code == 0, end.output[-6000:]
    return end.output


ORDERS = {
    "torch first": "import torch\nimport deepspeed\nfrom deepspeed import initialize",
    "deepspeed first": "from deepspeed import initialize\nimport torch\nimport deepspeed",
    "nothing but ours": """
before = set(sys.modules)
import ds_terapipe
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
assert tops - set(sys.stdlib_module_names) == {"ds_terapipe"} and ours() == HOOK_MODULES
sys.exit()
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_hook_is_there_in_any_import_order_and_loads_only_the_standard_library(order, tmp_path):
    script = LOOKS + ORDERS[order] + """
assert deepspeed.initialize is initialize and hasattr(initialize, "ds_terapipe_original")
assert ours() == HOOK_MODULES and type(deepspeed).__name__ == "module"
assert raised(initialize, config={"token_pipline": {"slices": 2}}) == NEAR_MISS
"""  # fmt: skip
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def test_a_key_of_ours_brings_our_engine_however_the_configuration_is_given(tmp_path):
    said = run(HOOK + """
plain = engine(initialize, {})
off = engine(initialize, {"token_pipeline": {"enabled": False, "slices": 2}, "elastic_pipeline": {"enabled": False}})
assert kind(plain) == kind(off) == DEEPSPEED and ours() == HOOK_MODULES
for how in ("config", "positional", "path", "args", "config_params"):
    result = engine(initialize, KEY, how)
    assert kind(result) == OURS, how
assert len(result) == 4 and result[1] is result[0].optimizer and result[2:] == (None, None)

def optimizer(parameters):
    said.append(hasattr(FileBaton.wait, "ds_terapipe_says"))  # waits for compilations, while an engine is built
    return torch.optim.SGD(parameters, lr=0.1)

from torch.utils.file_baton import FileBaton
said = []
for keys in ({}, KEY):
    engine(initialize, keys, optimizer=optimizer)
assert said == [False, True] and not hasattr(FileBaton.wait, "ds_terapipe_says")
assert deepspeed.PipelineEngine is type(plain[0]) and deepspeed.initialize is initialize

assert raised(engine, initialize, {"token_pipline": {"slices": 2}}) == NEAR_MISS
error, text = raised(engine, initialize, {"token_pipeline": {"slices": "8"}})
assert error == "ConfigError" and 'got "8"' in text
assert raised(initialize, None, None, None, None, None, None, 29500, None, None, None, dict(KEY))[0] == "ConfigError"
linear = torch.nn.Linear(4, 4)
error, text = raised(initialize, model=linear, config={"train_batch_size": 1, **KEY})
assert error == "ConfigError" and "PipelineModule" in text
# what DeepSpeed itself has to complain about
assert raised(initialize, model=None, config=KEY, colour="red")[0] == "TypeError"
assert raised(initialize, SimpleNamespace(deepspeed_config="x"), linear, config=KEY)[0] == "AssertionError"
assert raised(initialize, model=linear, config="no_such_file.json")[0] == "ValueError"
""", tmp_path)  # fmt: skip
    assert said.count("one pipeline stage, slices gain nothing") == 6


def test_an_explicit_import_brings_the_hook_where_pytorch_runs_none(tmp_path):
    run("import ds_terapipe\nassert ours() == HOOK_MODULES\nassert kind(engine(deepspeed.initialize, KEY)) == OURS", tmp_path)


def test_switched_off_deepspeed_is_left_alone(tmp_path):
    """``ds_terapipe.initialize`` works and leaves nothing behind; ``register`` brings the hook."""
    run(HOOK + """
import ds_terapipe
original, engine_class = deepspeed.initialize, deepspeed.PipelineEngine
assert not hasattr(original, "ds_terapipe_original")
assert kind(engine(deepspeed.initialize, KEY)) == kind(engine(ds_terapipe.initialize, {})) == DEEPSPEED
assert kind(engine(ds_terapipe.initialize, KEY)) == OURS
assert raised(engine, ds_terapipe.initialize, {"token_pipeline": {"slices": 0}})[0] == "ConfigError"
assert deepspeed.initialize is original and deepspeed.PipelineEngine is engine_class
ds_terapipe.register()
ds_terapipe.register()
assert kind(engine(deepspeed.initialize, KEY)) == OURS and deepspeed.initialize.ds_terapipe_original is original
""", tmp_path, DS_TERAPIPE_AUTOLOAD="0")  # fmt: skip


@pytest.mark.parametrize(("keys", "kind"), [(True, "OURS"), (False, "DEEPSPEED")])
def test_losses_are_recorded_with_our_keys_and_without_and_then_the_launch_ends(keys, kind, tmp_path):
    run(HOOK + f"""
assert "without token_pipeline" in raised(engine, initialize, {{}})[1]
result = engine(initialize, {{"token_pipeline": {{"slices": 1}}}}, "args")
assert kind(result) == {kind}
while True:
    result[0].train_batch(iter([(torch.randn(1, 6, 4), torch.randn(1, 6, 4))]))
""", tmp_path, DS_TERAPIPE_SAME_LOSS=f'["{tmp_path}/losses", 2, {str(keys).lower()}]')  # fmt: skip
    assert len((tmp_path / "losses").read_text().split()) == 2


def test_fused_lamb_and_its_schedules_are_built_from_the_configuration(tmp_path):
    """However it is given; nothing of ours is loaded by a configuration without them."""
    run(HOOK + """
from pathlib import Path

LAMB = {"type": "FusedLamb", "params": {"lr": 0.1, "max_grad_norm": 0.5, "monitor_interval": 2, "backend": "plain"}}
SGD, ADAM = {"type": "SGD", "params": {"lr": 0.1}}, {"type": "Adam", "params": {"lr": 1, "torch_adam": True}}
RAMP = {"reference_lr": 0.1, "reference_batch_size": 4, "total_steps": 10, "warmup_steps": 2}
CSV = {"csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"}}
WARMUP = {"scheduler": {"type": "LambWarmup", "params": RAMP}}

assert kind(engine(initialize, {"optimizer": SGD})) == DEEPSPEED and ours() == HOOK_MODULES
for optimizer, how, name in ((ADAM, "config", "AdamW"), *((LAMB, how, "FusedLamb") for how in ("path", "args", "config"))):
    made, given, _, scheduler = engine(initialize, {"optimizer": optimizer, **WARMUP, **CSV}, how)
    assert type(made).__name__ == "PipelineEngine" and type(scheduler).__name__ == "LambWarmup" and given is made.optimizer
    assert type(made.basic_optimizer).__name__ == name and made.get_lr() == [0.025]  # half of 0.1 sqrt(1 / 4)
assert made.gradient_clipping() == 0.5 and made.optimizer_name() == "FusedLamb"
assert kind(engine(initialize, {"optimizer": SGD})) == DEEPSPEED

for _ in range(4):
    made.train_batch(iter([(torch.randn(1, 4), torch.randn(1, 4))]))
events = {path.stem: path.read_text().split()[1:] for path in Path("csv").rglob("*Lamb*.csv")}
assert events.keys() >= {"Train_Lamb_mean_trust_ratio", "Train_Lamb_clamped_share"} and made.get_global_grad_norm() > 0
assert all([row.split(",")[0] for row in rows] == ["2", "4"] for rows in events.values())

def again(config=None, **kwargs):
    return initialize(config=config, **kwargs)

wrapped = sys.modules["ds_terapipe.register"].wrap(again)
assert type(engine(wrapped, {"optimizer": LAMB})[0].basic_optimizer).__name__ == "FusedLamb"
""", tmp_path)  # fmt: skip


def test_a_hook_that_cannot_be_loaded_is_said_by_a_configuration_that_needs_it(tmp_path):
    run("blocked = 'ds_terapipe.register'" + BLOCK + HOOK + """
assert kind(engine(deepspeed.initialize, {})) == DEEPSPEED
for keys, how in ((KEY, "config"), (KEY, "path"), (KEY, "args"), ({"optimizer": {"type": "FusedLamb"}}, "config")):
    error, text = raised(engine, deepspeed.initialize, keys, how)
    assert error == "RuntimeError" and "ds_terapipe" in text and "ds_terapipe.register is broken today" in text
import ds_terapipe
assert raised(lambda: ds_terapipe.initialize) == ("ImportError", "ds_terapipe.register is broken today")
""", tmp_path)  # fmt: skip


def test_a_package_that_cannot_run_here_leaves_other_configurations_alone(tmp_path):
    run("blocked = 'ds_terapipe.config'" + BLOCK + HOOK + """
assert kind(engine(initialize, {})) == DEEPSPEED
error, text = raised(engine, initialize, KEY)
assert error == "RuntimeError" and "ds_terapipe.config is broken today" in text
blocked, deepspeed.__version__ = "", "0.18.9"
assert kind(engine(initialize, {})) == DEEPSPEED and kind(engine(initialize, KEY)) == OURS
from ds_terapipe import compat
compat.names = lambda: [compat.Name("deepspeed:gone", "register")]
error, text = raised(engine, initialize, KEY)
assert error == "ConfigError" and "DeepSpeed 0.18.9 lacks deepspeed:gone" in text
""", tmp_path)  # fmt: skip


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """A module ``deepspeed`` that is half imported."""
    module = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    others = [finder for finder in sys.meta_path if not isinstance(finder, autoload._Watch)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.delenv("DS_TERAPIPE_AUTOLOAD", raising=False)
    return module


def initialize(args=None, model=None, config=None, config_params=None):
    return args, model, config, config_params


def test_load_never_raises(module, monkeypatch):
    def broken(module):
        raise RuntimeError("broken")

    monkeypatch.setattr(sys, "meta_path", ())
    autoload.load()
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(autoload, "_cover", broken)
    autoload.load()
    assert sys.meta_path[0].find_spec("deepspeed.ops") is None


def test_with_one_hardware_queue_kernels_are_loaded_at_the_start_or_the_launch_is_refused(module, monkeypatch, tmp_path):
    (tmp_path / "ours.json").write_text('{"token_pipeline": {}}')
    (tmp_path / "other.json").write_text("{}")
    # the configuration, the queues, the setting and what becomes of it
    cases = [("ours", "1", None, "EAGER"), ("ours", "1", "LAZY", "LAZY"), ("ours", "8", None, None), ("other", "1", None, None)]
    for name, queues, given, wanted in cases:
        monkeypatch.setattr(sys, "argv", ["train.py", "--deepspeed_config", str(tmp_path / f"{name}.json")])
        monkeypatch.setenv(QUEUES, queues)
        monkeypatch.setenv(LOADING, given or "")
        if given is None:
            monkeypatch.delenv(LOADING)
        module.__class__ = ModuleType
        autoload.load()
        assert os.environ.get(LOADING) == wanted, (name, queues, given)
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setenv(QUEUES, "1")
    one, two = (SimpleNamespace(num_pipeline_stages=lambda n=n: n) for n in (1, 2))
    refusals.check_hardware_queue(one)
    for other in ("check_config", "check_keys", "check_model", "advise"):
        monkeypatch.setattr(refusals, other, lambda *given, **options: None)
    with pytest.raises(ConfigError, match=r"^CUDA_DEVICE_MAX_CONNECTIONS: got 1, .*, use CUDA_MODULE_LOADING=EAGER beside it$"):
        _checked({"token_pipeline": {}}, {"model": two})
    monkeypatch.setenv(LOADING, "EAGER")
    refusals.check_hardware_queue(two)


@pytest.mark.parametrize("right", ["token_pipeline", "elastic_pipeline"])
def test_keys_that_nearly_are_ours_are_refused(right):
    camel, first = "".join(word.title() for word in right.split("_")), right.split("_")[0]
    for key in (right.replace("line", "lne"), right.replace("_", "-"), right.replace("_", ""), camel, first, f"{right}s"):
        with pytest.raises(ConfigError, match=f'^{key}: unknown key, must be spelt "{right}", use "{right}"$'):
            wrap(initialize)(config={key: {}, "train_batch_size": 1})


def test_no_key_of_deepspeed_is_taken_for_ours():
    """All lower-case words in DeepSpeed's sources of configuration keys, top-level ones among them."""
    values = [value for module in (config, constants) for value in vars(module).values()]
    words = {word for word in values if isinstance(word, str) and word.replace("_", "").isalnum()}
    words |= {"pipeline", "tensor_parallel", "data_efficiency", "curriculum_learning", "elasticity"}
    assert len(words) > 100
    for word in words:
        assert wrap(initialize)(config={word: {}})[2] == {word: {}}


def test_deepspeed_gets_its_arguments_as_they_are():
    args, model, settings = object(), object(), {"train_batch_size": 1, "my_section": {}}
    given = wrap(initialize)(args, model, config_params=settings)
    assert [id(each) for each in given] == [id(args), id(model), id(None), id(settings)]
    assert wrap(initialize).ds_terapipe_original is wrap(wrap(initialize)).ds_terapipe_original is initialize
    assert wrap(initialize)() == (None,) * 4


@pytest.mark.parametrize("imported", ["before", "after"])
def test_accelerate_and_trainer_are_refused_as_they_read_our_keys(module, monkeypatch, tmp_path, imported):
    class DeepSpeedPlugin:
        def __init__(self, hf_ds_config=None):
            self.hf_ds_config = hf_ds_config
            self.__post_init__()

        def __post_init__(self):
            self.done = True

    if imported == "after":
        autoload.load()
    monkeypatch.setitem(sys.modules, trainers.MODULE, SimpleNamespace(DeepSpeedPlugin=DeepSpeedPlugin))
    for _ in range(2):
        autoload.load() if imported == "before" else sys.meta_path[0].find_spec("accelerate.data_loader")
    phase = {"steps": 1, "batch_size": 4, "seq_length": 8, "lr": 0.1, "warmup_steps": 0}
    phases = ({"phases": [phase, {**phase, "batch_size": size}]} for size in (4, 2))
    alike, mixed = ({"scheduler": {"type": "MixedBatch", "params": each}} for each in phases)
    for given in ({"token_pipeline": {"enabled": False}}, "none", None, object(), alike):
        assert DeepSpeedPlugin(given).done
    (tmp_path / "ours.json").write_text('{"token_pipeline": {"slices": "auto"}}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ours.json"))
    trainers_own = type("HfTrainerDeepSpeedConfig", (), {"config": {"elastic_pipeline": {}}})()
    sizes = (mixed, "scheduler.params.phases: got several batch sizes and accelerate")
    for given, said in ((None, "token_pipeline: got accelerate"), (trainers_own, "elastic_pipeline: got tr"), sizes):
        with pytest.raises(ConfigError, match=f"^{said}.*deepspeed.initialize"):
            DeepSpeedPlugin(given)
