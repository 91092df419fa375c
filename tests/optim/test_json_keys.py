"""``optimizer`` and ``scheduler`` of ds_config.json become arguments of ``deepspeed.initialize``, or are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.lr_schedules as schedules
import pytest
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim import json_keys
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.register import wrap

WARMUP_PARAMS = {"reference_lr": 1e-3, "reference_batch_size": 8, "total_steps": 100, "warmup_ratio": 0.1}
WARMUP = {"type": "LambWarmup", "params": WARMUP_PARAMS}
PHASE = {"steps": 10, "batch_size": 8, "seq_length": 16, "lr": 1e-3, "warmup_ratio": 0.1}
MIXED = {"type": "MixedBatch", "params": {"phases": [PHASE]}}


def config(**keys: Any) -> dict[str, Any]:
    return {**params(), **keys}


def params(**params: Any) -> dict[str, Any]:
    optimizer = {"type": "FusedLamb", "params": {"lr": 1e-3, **params}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": stage, **keys})


def read(settings: dict[str, Any], **arguments: Any) -> json_keys.JsonKeys:
    names = {"optimizer": ("FusedLamb",), "scheduler": ("LambWarmup", "MixedBatch")}
    ours = {block: (settings.get(block) or {}).get("type") in known for block, known in names.items()}
    return json_keys.read(settings, {"config": settings, **arguments}, **ours)


def test_params_are_the_optimizers_and_groups_have_their_own() -> None:
    given = {"eps": 1e-5, "weight_decay": 0.3, "mode": "deepspeed", "exclude": "bias_norm", "max_coeff": 5.0}
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": tensors[:1]}, {"params": tensors[1:], "weight_decay": 0.0}]
    lamb = read(params(betas=[0.8, 0.9], **given)).optimizer(groups)  # type: ignore[misc]
    assert isinstance(lamb, FusedLamb) and lamb.max_grad_norm == 0.0
    wanted = {"lr": 1e-3, "betas": (0.8, 0.9), **given}
    assert wanted.items() <= lamb.param_groups[0].items()
    assert (wanted | {"weight_decay": 0.0}).items() <= lamb.param_groups[1].items()


def test_the_users_configuration_stays_as_it_was() -> None:
    settings = {**params(max_grad_norm=2.0), "scheduler": MIXED}
    before = json.dumps(settings)
    keys = read(settings)
    assert json.dumps(settings) == before
    assert keys.config["gradient_clipping"] == 2.0 and "max_grad_norm" not in keys.config["optimizer"]["params"]
    assert keys.config["zero_allow_untested_optimizer"] is True and keys.config["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("norm", "clipping", "found"),
    [({}, 0.7, 0.7), ({"max_grad_norm": None}, None, None), ({"max_grad_norm": 0}, 0.0, 0.0)],
)
def test_max_grad_norm_is_gradient_clipping(norm: dict[str, Any], clipping: float | None, found: Any) -> None:
    settings = {**params(**norm), **({} if clipping is None else {"gradient_clipping": clipping})}
    assert read(settings).config.get("gradient_clipping") == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (params(max_grad_norm=-1), r"optimizer\.params\.max_grad_norm: got -1, must be a finite number, 0 or more"),
        ({**params(max_grad_norm=2.0), "gradient_clipping": 1.0},
         r"^optimizer\.params\.max_grad_norm: got .*, must be equal to gradient_clipping"),
        (params(mode="papre"), r'optimizer\.params\.mode: got "papre", must be one of paper'),
        (params(wieght_decay=0.1), r'optimizer\.params: unknown key "wieght_decay", .* use "weight_decay"$'),
        (config(optimizer={"type": "FusedLamb"}), r"optimizer\.params\.lr: missing, must be .* use e\.g\. 1e-3"),
        (zero(3), r"zero_optimization\.stage: got 3, must be 0, 1 or 2"),
        (zero(1, offload_optimizer={"device": "cpu"}),
         r'zero_optimization\.offload_optimizer: got \{"device": "cpu"\}, .* use device "none"'),
        (zero(2, zenflow={}), r"zero_optimization\.zenflow: got \{\}"),
        (zero(1, round_robin_gradients=True), r"zero_optimization\.round_robin_gradients: got true, must be false"),
        (config(bf16={"enabled": True, "bf16_master_weights_and_grads": True}), r"bf16\.bf16_master_weights_and_grads: got true"),
        (config(torch_autocast={"enabled": True, "dtype": "float16"}), r"torch_autocast: got .*float16"),
        (config(tensor_parallel={"autotp_size": 2}), r"tensor_parallel\.autotp_size: got 2"),
        (config(scheduler={"type": "LambWarmup", "params": {}}), r"scheduler\.params\.\w+: missing"),
        ({"train_batch_size": 8, "scheduler": WARMUP},
         r'^scheduler\.type: got "LambWarmup" without an optimizer, must have one, use optimizer\.type$'),
    ],
)  # fmt: skip
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("argument", "block"), [("optimizer", "optimizer"), ("lr_scheduler", "scheduler")])
def test_the_key_and_the_argument_are_one_too_many(argument: str, block: str) -> None:
    message = rf"^{block}\.type: got \"\w+\" beside initialize\({argument}=\.\.\.\), must be one"
    with pytest.raises(ConfigError, match=message):
        read(config(scheduler=WARMUP), **{argument: object()})


def test_a_schedule_of_ours_goes_with_another_optimizer() -> None:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    for key, argument in ((adam, {}), ({}, {"optimizer": object()})):
        keys = read({"train_batch_size": 8, "scheduler": WARMUP, **key}, **argument)
        assert keys.optimizer is None and keys.lr_scheduler is not None


@pytest.mark.parametrize("name", ["deepspeed_config", "deepscale_config"])
def test_the_users_args_get_back_what_they_held(name: str) -> None:
    args = SimpleNamespace(**{"deepspeed_config": None, name: "ds_config.json"})
    keys = read(config())
    with pytest.raises(KeyError), keys.put_into({"args": args}):
        assert getattr(args, name) is keys.config
        raise KeyError
    assert getattr(args, name) == "ds_config.json"


def initialize(args: Any = None, optimizer: Any = None, lr_scheduler: Any = None, config: Any = None) -> Any:
    """In the place of DeepSpeed's."""
    return config


@pytest.mark.parametrize(
    ("block", "right", "kinds"),
    [
        ("optimizer", "FusedLamb", ("fusedlamb", "FusedLAMB", "Fused_Lamb", "FusedLam")),
        ("scheduler", "LambWarmup", ("lambwarmup", "Lamb-Warmup")),
        ("scheduler", "MixedBatch", ("Mixed_Batch",)),
    ],
)
def test_types_that_nearly_are_ours(block: str, right: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        settings = {"train_batch_size": 1, block: {"type": kind}}
        with pytest.raises(ConfigError, match=f'^{block}.type: got "{kind}", must be spelt "{right}", use "{right}"$'):
            wrap(initialize)(config=settings)
        # DeepSpeed does not read the block where there is an argument for it
        argument = {"optimizer": "optimizer", "scheduler": "lr_scheduler"}[block]
        assert wrap(initialize)(config=settings, **{argument: object()}) is settings


def test_no_type_of_others_is_taken_for_ours() -> None:
    optimizers = [*DEEPSPEED_OPTIMIZERS, *dir(torch.optim), "Lamb", "LAMB", "OneBitLamb", "FusedAdam", "FusedLion"]
    settings: list[Any] = [{"optimizer": {"type": kind}} for kind in optimizers]
    settings += [{"scheduler": {"type": kind}} for kind in (*dir(torch.optim.lr_scheduler), *dir(schedules))]
    settings += [{"optimizer": None}, {"optimizer": {"type": 3}}, {"scheduler": []}, {"optimizer": "FusedLamb"}]
    for each in settings:
        assert wrap(initialize)(config=each) is each
