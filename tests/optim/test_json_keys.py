"""What ``optimizer`` and ``scheduler`` of ds_config.json become as arguments of ``deepspeed.initialize``, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim import json_keys
from ds_terapipe.optim.engine_hooks import is_sharded
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.register import wrap

LAMB = {"type": "FusedLamb", "params": {"lr": 1e-3}}
WARMUP = {
    "type": "LambWarmup",
    "params": {"reference_lr": 1e-3, "reference_batch_size": 8, "total_steps": 100, "warmup_ratio": 0.1},
}
PHASE = {"steps": 10, "batch_size": 8, "seq_length": 16, "lr": 1e-3, "warmup_ratio": 0.1}
MIXED = {"type": "MixedBatch", "params": {"phases": [PHASE]}}


def config(**keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": LAMB, **keys}


def params(**params: Any) -> dict[str, Any]:
    return config(optimizer={"type": "FusedLamb", "params": {"lr": 1e-3, **params}})


def read(settings: dict[str, Any], **arguments: Any) -> json_keys.JsonKeys:
    named = lambda block, names: (settings.get(block) or {}).get("type") in names  # noqa: E731
    return json_keys.read(
        settings,
        {"config": settings, **arguments},
        optimizer=named("optimizer", ("FusedLamb",)),
        scheduler=named("scheduler", ("LambWarmup", "MixedBatch")),
    )


def made(settings: dict[str, Any], parameters: Any = None) -> FusedLamb:
    maker = read(settings).optimizer
    assert maker is not None
    return maker(parameters or [torch.nn.Parameter(torch.ones(2, 2))])


def test_params_are_the_optimizer_s() -> None:
    lamb = made(
        params(betas=[0.8, 0.9], eps=1e-5, weight_decay=0.3, mode="deepspeed", exclude="bias_norm", max_coeff=5.0)
    )
    group = lamb.param_groups[0]
    assert isinstance(lamb, FusedLamb)
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 1e-5, 0.3)
    assert (group["mode"], group["exclude"], group["max_coeff"], lamb.max_grad_norm) == (
        "deepspeed",
        "bias_norm",
        5.0,
        0.0,
    )


def test_groups_have_settings_of_their_own() -> None:
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": tensors[:1]}, {"params": tensors[1:], "weight_decay": 0.0}]
    assert [group["weight_decay"] for group in made(config(), groups).param_groups] == [0.01, 0.0]


def test_the_user_s_configuration_stays_as_it_was() -> None:
    settings = config(optimizer={"type": "FusedLamb", "params": {"lr": 1e-3, "max_grad_norm": 2.0}}, scheduler=MIXED)
    before = json.dumps(settings)
    keys = read(settings)
    assert json.dumps(settings) == before
    assert keys.config["gradient_clipping"] == 2.0 and "max_grad_norm" not in keys.config["optimizer"]["params"]
    assert keys.config["zero_allow_untested_optimizer"] is True and keys.config["train_batch_size"] == 8


@given(st.floats(0, 1e6), st.one_of(st.none(), st.floats(0, 1e6)))
def test_max_grad_norm_is_gradient_clipping(norm: float, clipping: float | None) -> None:
    settings = {**params(max_grad_norm=norm), **({} if clipping is None else {"gradient_clipping": clipping})}
    if clipping is None or clipping == norm:
        assert read(settings).config["gradient_clipping"] == norm
    else:
        with pytest.raises(
            ConfigError, match=r"^optimizer\.params\.max_grad_norm: got .*, must be equal to gradient_clipping"
        ):
            read(settings)


def test_without_max_grad_norm_the_engine_s_clipping_stays() -> None:
    assert read(config(gradient_clipping=0.7)).config["gradient_clipping"] == 0.7
    assert "gradient_clipping" not in read(params(max_grad_norm=None)).config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (params(max_grad_norm="1"), r'optimizer\.params\.max_grad_norm: got "1", must be a finite number'),
        (params(max_grad_norm=-1), r"optimizer\.params\.max_grad_norm: got -1, must be a finite number, 0 or more"),
        (params(max_grad_norm=True), r"optimizer\.params\.max_grad_norm: got true"),
        (params(mode="papre"), r'optimizer\.params\.mode: got "papre", must be one of paper'),
        (params(lr=-1), r"optimizer\.params\.lr: got -1"),
        (params(wieght_decay=0.1), r'optimizer\.params: unknown key "wieght_decay", .* use "weight_decay"$'),
        (params(tensor_parallel_group=1), r'optimizer\.params: unknown key "tensor_parallel_group"'),
        (config(optimizer={"type": "FusedLamb"}), r"optimizer\.params\.lr: missing, must be .* use e\.g\. 1e-3"),
        (
            config(optimizer={"type": "FusedLamb", "params": [1]}),
            r"optimizer\.params: got \[1\], must be a block of keys",
        ),
        (config(zero_optimization={"stage": 3}), r"zero_optimization\.stage: got 3, must be 0, 1 or 2"),
        (
            config(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}),
            r'zero_optimization\.offload_optimizer: got \{"device": "cpu"\}, .* use device "none"',
        ),
        (
            config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}),
            r'zero_optimization\.offload_optimizer: got \{"device": "nvme"',
        ),
        (config(zero_optimization={"stage": 1, "cpu_offload": True}), r"zero_optimization\.cpu_offload: got true"),
        (config(zero_optimization={"stage": 2, "zenflow": {}}), r"zero_optimization\.zenflow: got \{\}"),
        (
            config(zero_optimization={"stage": 1, "round_robin_gradients": True}),
            r"zero_optimization\.round_robin_gradients: got true, must be false",
        ),
        (
            config(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
            r"bf16\.bf16_master_weights_and_grads: got true",
        ),
        (config(torch_autocast={"enabled": True, "dtype": "float16"}), r"torch_autocast: got .*float16"),
        (config(tensor_parallel={"autotp_size": 2}), r"tensor_parallel\.autotp_size: got 2"),
        (config(scheduler={"type": "LambWarmup", "params": {}}), r"scheduler\.params\.\w+: missing"),
        (config(scheduler=MIXED, train_batch_size=9), r"train_batch_size: got 9"),
        (
            {"train_batch_size": 8, "scheduler": WARMUP},
            r'^scheduler\.type: got "LambWarmup" without an optimizer, must have one, use optimizer\.type$',
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "none"}}),
        config(zero_optimization={"stage": 1, "offload_param": None, "elastic_checkpoint": True}),
        config(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        config(torch_autocast={"enabled": False, "dtype": "float16"}),
    ],
)
def test_what_is_not_refused(settings: dict[str, Any]) -> None:
    assert read(settings).optimizer is not None


@pytest.mark.parametrize(("argument", "block"), [("optimizer", "optimizer"), ("lr_scheduler", "scheduler")])
def test_the_key_and_the_argument_are_one_too_many(argument: str, block: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{block}\.type: got \"\w+\" beside initialize\({argument}=\.\.\.\), must be one"
    ):
        read(config(scheduler=WARMUP), **{argument: object()})


def test_a_schedule_sets_the_learning_rate_that_the_optimizer_has_not() -> None:
    keys = read(config(optimizer={"type": "FusedLamb"}, scheduler=WARMUP, train_batch_size=8))
    lamb = keys.optimizer([torch.nn.Parameter(torch.ones(2))])  # type: ignore[misc]
    schedule = keys.lr_scheduler(lamb)  # type: ignore[misc]
    assert lamb.param_groups[0]["lr"] == pytest.approx(1e-4) == schedule.get_lr()[0]  # the first of 10 steps of warm-up


def test_a_schedule_of_ours_goes_with_another_optimizer() -> None:
    keys = read({"train_batch_size": 8, "scheduler": WARMUP, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert keys.optimizer is None and keys.lr_scheduler is not None
    keys = read({"train_batch_size": 8, "scheduler": WARMUP}, optimizer=object())
    assert keys.optimizer is None and keys.lr_scheduler is not None


@pytest.mark.parametrize("name", ["config", "config_params"])
def test_arguments_are_replaced(name: str) -> None:
    keys = read(config())
    arguments: dict[str, Any] = {"model": None, name: config()}
    with keys.put_into(arguments):
        assert arguments == {"model": None, name: keys.config, "optimizer": keys.optimizer}


@pytest.mark.parametrize("name", ["deepspeed_config", "deepscale_config"])
def test_the_user_s_args_get_back_what_they_held(name: str) -> None:
    args = SimpleNamespace(**{"deepspeed_config": None, name: "ds_config.json"})
    keys = read(config())
    with pytest.raises(KeyError), keys.put_into({"args": args}):
        assert getattr(args, name) is keys.config
        raise KeyError
    assert getattr(args, name) == "ds_config.json"


@pytest.mark.parametrize(
    ("block", "kind", "right"),
    [
        ("optimizer", "fusedlamb", "FusedLamb"),
        ("optimizer", "FusedLAMB", "FusedLamb"),
        ("optimizer", "Fused_Lamb", "FusedLamb"),
        ("optimizer", "FusedLam", "FusedLamb"),
        ("scheduler", "lambwarmup", "LambWarmup"),
        ("scheduler", "Lamb-Warmup", "LambWarmup"),
        ("scheduler", "Mixed_Batch", "MixedBatch"),
    ],
)
def test_types_that_nearly_are_ours(block: str, kind: str, right: str) -> None:
    def initialize(args: Any = None, optimizer: Any = None, lr_scheduler: Any = None, config: Any = None) -> Any:
        return "DeepSpeed's"

    settings = {"train_batch_size": 1, block: {"type": kind}}
    with pytest.raises(ConfigError, match=f'^{block}.type: got "{kind}", must be spelt "{right}", use "{right}"$'):
        wrap(initialize)(config=settings)
    # DeepSpeed does not read the block where there is an argument for it
    argument = {"optimizer": "optimizer", "scheduler": "lr_scheduler"}[block]
    assert wrap(initialize)(config=settings, **{argument: object()}) == "DeepSpeed's"


def test_no_type_of_others_is_taken_for_ours() -> None:
    import deepspeed.runtime.lr_schedules as schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    def initialize(args: Any = None, optimizer: Any = None, lr_scheduler: Any = None, config: Any = None) -> Any:
        return config

    optimizers = [*DEEPSPEED_OPTIMIZERS, *dir(torch.optim), "Lamb", "LAMB", "OneBitLamb", "FusedAdam", "FusedLion"]
    for block, kinds in (("optimizer", optimizers), ("scheduler", [*dir(torch.optim.lr_scheduler), *dir(schedules)])):
        for kind in kinds:
            settings = {block: {"type": kind}}
            assert wrap(initialize)(config=settings) is settings
    for odd in ({"optimizer": None}, {"optimizer": {"type": 3}}, {"scheduler": []}, {"optimizer": "FusedLamb"}):
        assert wrap(initialize)(config=odd) is odd


@pytest.mark.parametrize(
    ("settings", "pipeline", "sharded"),
    [
        ({}, True, False),
        ({"bf16": {"enabled": True}}, True, True),
        ({"bf16": {"enabled": True}}, False, False),
        ({"bfloat16": {"enabled": True}}, True, True),
        ({"bf16": {"enabled": False}}, True, False),
        ({"zero_optimization": {"stage": 1}}, False, True),
        ({"zero_optimization": {"stage": 0}}, True, False),
        ({"fp16": {"enabled": True}}, True, False),
    ],
)
def test_where_layers_are_shared_out(settings: dict[str, Any], pipeline: bool, sharded: bool) -> None:
    assert is_sharded(settings, pipeline) is sharded
