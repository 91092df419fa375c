"""Settings and inputs of FusedLamb, and its keys in ds_config.json: arguments of ``deepspeed.initialize``, or refused by name."""

import json
import math
from collections.abc import Callable
from typing import Any

import deepspeed.runtime.lr_schedules as schedules
import pytest
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim import json_keys
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.register import wrap

NAN, INF, BIG = math.nan, math.inf, 10**400  # JSON has no limit
BAD: dict[str, tuple[Any, ...]] = {
    "mode": ("foo", "Paper", None, 3), "exclude": ("bias", "", True),
    "lr": (-1e-3, NAN, INF, BIG, "0.1", None, True, torch.ones(2)), "eps": (-1e-8, NAN, "1e-6"),
    "weight_decay": (-0.1, INF, BIG, None), "betas": ((0.9,), (1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), 0.9, ("a", "b")),
    "max_grad_norm": (-1.0, BIG, NAN, "1.0", True), "min_coeff": (-0.1, NAN, "x"), "max_coeff": (0.0, BIG, NAN, "x"),
    "weight_norm_clip": (0.0, -1.0, (2.0, 1.0), (1.0,), "x", (0.0, NAN), True),
    **dict.fromkeys(("bias_correction", "eps_inside_sqrt", "grad_averaging", "split_qkv", "check_gradients"), (1,)),
    "monitor_interval": (-1, 1.5, True), "backend": ("fast",),
}  # fmt: skip
WHOLE = r"Parameter shard of .*, must be a whole tensor.*, use DDP"
Shapes = list[list[tuple[int, ...]]]
Action = Callable[[FusedLamb], Any]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_named(name: str) -> None:
    live = name in (optimizer := made([[(3,)]])).param_groups[0] and name != "lr"  # which is a schedule's
    for value, is_live in ((value, how) for value in BAD[name] for how in {False, live}):
        with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got ") as caught:
            optimizer.param_groups[0].update({name: value}) if is_live else made([[(3,)]], **{name: value})
            optimizer.step()
        assert ", must be " in str(caught.value) and ", use " in str(caught.value) and "\n" not in str(caught.value)


def test_a_group_with_a_bad_setting_or_of_another_type_is_not_added() -> None:
    repeated = [{"params": [Parameter(torch.ones(3))], "max_grad_norm": 0.5}]  # as ZeroRedundancyOptimizer does
    optimizer = FusedLamb(repeated, max_grad_norm=0.5, min_coeff=2.0, max_coeff=2.0)
    for name, value in {"betas": (2, 2), "max_grad_norm": 1.0, "min_coeff": 5.0}.items():
        with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got "):
            optimizer.add_param_group({"params": [Parameter(torch.ones(3))], name: value})
    for tensor in (torch.ones(3).double(), torch.eye(3).to_sparse()):
        with pytest.raises(ConfigError, match=r"parameter of .*must be dense float32, float16 or bfloat16"):
            optimizer.add_param_group({"params": [Parameter(tensor)]})
    for mark in ("_is_flat_param", "_fsdp_flattened", "__tensor_flatten__"):  # FSDP1's parameters and DTensors
        with pytest.raises(ConfigError, match=WHOLE):
            optimizer.add_param_group({"params": [marked(torch.ones(3), mark)]})
    assert len(optimizer.param_groups) == 1


def made(shapes: Shapes, **settings: Any) -> FusedLamb:
    """An optimizer of parameters of these shapes per group, with gradients."""
    groups = [{"params": [Parameter(torch.ones(shape)) for shape in group]} for group in shapes]
    for parameter in (parameter for group in groups for parameter in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    return FusedLamb(groups, **settings)


def marked(tensor: Tensor, mark: str = "__tensor_flatten__") -> Parameter:
    setattr(shard := Parameter(tensor.detach().clone()), mark, True)
    return shard


def step_with(gradient: Tensor) -> Action:
    def action(optimizer: FusedLamb) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad_dtype, parameter.grad = None, gradient
        optimizer.step()

    return action


def load(shapes: Shapes = [[(4, 3), (5,)]], **damage: Any) -> Action:  # noqa: B006
    def action(optimizer: FusedLamb) -> None:
        other = made(shapes)
        other.step()
        saved = other.state_dict()
        saved["state"][len(saved["state"]) - 1].update(damage)
        optimizer.load_state_dict(saved)

    return action


REFUSED: dict[str, tuple[Action, str]] = {
    "sparse gradient": (step_with(torch.ones(4, 3).to_sparse()), "FusedLamb does not support sparse gradients"),
    "fp64 gradient": (step_with(torch.ones(4, 3).double()), "got a gradient of torch.float64"),
    "copy of another shape": (lambda o: o.step(copies=[torch.ones(3, 4), None]), "FusedLamb.* copy"),
    "no scale": (lambda o: o.step(grad_scale=0.0), "got grad_scale"),
    "state of more groups": (load([[(4, 3)], [(5,)]]), "^optimizer: got "),
    "state of other shapes": (load([[(4, 3), (6,)]]), "^optimizer: got "),
    "no moment": (load(exp_avg=None), "^optimizer: got "),
    # ZeRO steps one group after another; the norm of one is not the norm of all
    "clipping": (lambda o: vars(o).update(max_grad_norm=1.0, param_groups=[]) or o.step(), "m: got 1.0 .*gradient_clipping"),
    # accelerate puts those of FSDP2 into the groups of an optimizer that there is
    "shards": (lambda o: o.param_groups[0].update(params=[*map(marked, o.param_groups[0]["params"])]) or o.step(), WHOLE),
    "a flat buffer": (lambda o: o.param_groups[0].update(made([[(17,)]]).param_groups[0]) or o.step(), "a parameter group of 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_changed_nothing(name: str) -> None:
    optimizer = made([[(4, 3), (5,)]])
    optimizer.step()
    params = optimizer.param_groups[0]["params"]

    def everything() -> list[Tensor]:
        values = [torch.as_tensor(v).clone() for parameter in params for v in optimizer.state[parameter].values()]
        return [*(parameter.detach().clone() for parameter in params), *values]

    before, (action, message) = everything(), REFUSED[name]
    with pytest.raises((ConfigError, RuntimeError, ValueError), match=message):
        action(optimizer)
    assert all(map(torch.equal, before, everything()))


@pytest.mark.parametrize("rows", [(3, 2), 12, None])
def test_rows_of_queries_keys_and_values_that_do_not_fit_are_refused(rows: object) -> None:
    parameter = Parameter(torch.randn(12, 5))
    parameter.grad = torch.ones(12, 5)
    if rows is not None:
        parameter.lamb_rows = rows
    with pytest.raises(ConfigError, match=r"optimizer.params.split_qkv: got (lamb_rows|true)"):
        FusedLamb([parameter], split_qkv=True).step()
    FusedLamb([parameter])
    parameter.lamb_rows = (6,)  # a single sub-layer
    FusedLamb([parameter], split_qkv=True).step()


def test_parameters_with_rows_may_leave() -> None:
    fused, left = Parameter(torch.ones(2, 3)), Parameter(torch.ones(3))
    fused.lamb_rows = (1, 1)  # type: ignore[attr-defined]
    optimizer = FusedLamb([fused, left], split_qkv=True)
    optimizer.param_groups[0]["params"], left.grad = [left], torch.ones(3)
    optimizer.parameters_changed()
    optimizer.step()
    assert left.max() < 1


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


def test_the_users_configuration_stays_as_it_was_and_max_grad_norm_is_gradient_clipping() -> None:
    settings = {**params(max_grad_norm=2.0), "scheduler": MIXED}
    before, keys = json.dumps(settings), read(settings)
    assert json.dumps(settings) == before
    assert keys.config["gradient_clipping"] == 2.0 and "max_grad_norm" not in keys.config["optimizer"]["params"]
    assert keys.config["zero_allow_untested_optimizer"] is True and keys.config["train_batch_size"] == 8
    for norm, clipping in (({}, 0.7), ({"max_grad_norm": None}, None), ({"max_grad_norm": 0}, 0.0)):
        settings = {**params(**norm), **({} if clipping is None else {"gradient_clipping": clipping})}
        assert read(settings).config.get("gradient_clipping") == clipping


@pytest.mark.parametrize(("settings", "message"), [
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
    (config(optimizer={"type": "FusedLamb"}, scheduler=MIXED), r"optimizer\.params\.lr: missing, must be .* beside .* \(0\.1\)"),
    ({"train_batch_size": 8, "scheduler": WARMUP},
     r'^scheduler\.type: got "LambWarmup" without an optimizer, must have one, use optimizer\.type$'),
])  # fmt: skip
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(settings, model_parameters=[{"params": []}, {"params": [], "lr": 0.1}])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("argument", "block"), [("optimizer", "optimizer"), ("lr_scheduler", "scheduler")])
def test_the_key_and_the_argument_are_one_too_many(argument: str, block: str) -> None:
    message = rf"^{block}\.type: got \"\w+\" beside initialize\({argument}=\.\.\.\), must be one"
    with pytest.raises(ConfigError, match=message):
        read(config(scheduler=WARMUP), **{argument: object()})


def initialize(args: Any = None, optimizer: Any = None, lr_scheduler: Any = None, config: Any = None) -> Any:
    """In the place of DeepSpeed's."""
    return config


@pytest.mark.parametrize(("block", "right", "kinds"), [
    ("optimizer", "FusedLamb", ("fusedlamb", "FusedLAMB", "Fused_Lamb", "FusedLam")),
    ("scheduler", "LambWarmup", ("lambwarmup", "Lamb-Warmup")), ("scheduler", "MixedBatch", ("Mixed_Batch",)),
])  # fmt: skip
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
