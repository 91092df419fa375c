"""Keys of the DeepSpeed configuration that token slices, and FusedLamb, do not go with: data, and one way to look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ds_terapipe.config import TOKEN_PIPELINE, TokenPipelineConfig
from ds_terapipe.errors import ConfigError, bad_value

_ABSENT = object()


class Rule(NamedTuple):
    """A key of the DeepSpeed configuration and the values that are refused."""

    path: str
    refused: Callable[[Any], bool]
    rule: str
    use: str


def is_true(value: Any) -> bool:
    return value is True or (isinstance(value, (int, float)) and value != 0)


def above(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value > limit


_TIMERS = "false beside {beside} (DeepSpeed's pipeline engine starts its timers twice and fails)"
_COMPILE = "false where sequences are cut (a compiled graph holds the attention of the whole sequence)"
_UNCUT = 'false, or "slices": 1, which cuts nothing'

# Spelt and defaulted as in DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, compile/config.py,
# runtime/tensor_parallel/config.py, runtime/data_pipeline/config.py, profiling/config.py.
RULES = (
    Rule(
        "zero_optimization.stage",
        above(1),
        "0 or 1 beside {beside} (pipeline stages keep their gradients until the last slice is done)",
        "1",
    ),
    Rule(
        "sequence_parallel_size",
        above(1),
        "1 beside {beside} (Ulysses shares a sequence among ranks, slices need it whole on each)",
        "1, with more pipeline stages",
    ),
    Rule(
        "data_efficiency.data_routing.random_ltd.enabled",
        is_true,
        "false beside {beside} (random-LTD drops tokens by their place in the whole sequence)",
        "false",
    ),
    Rule("flops_profiler.enabled", is_true, _TIMERS, "false"),
    Rule("wall_clock_breakdown", is_true, _TIMERS, "false"),
    Rule(
        "compile.deepcompile",
        is_true,
        "false beside {beside} (its passes are started by a forward of DeepSpeed's that is not used here)",
        "false",
    ),
    Rule(
        "tensor_parallel.autotp_size",
        above(0),
        "0 beside {beside} (DeepSpeed's automatic tensor parallelism rewrites layers after they are checked)",
        "0, and layers that are tensor parallel themselves, as megatron-core's are",
    ),
    Rule(
        "expert_parallel.enabled",
        is_true,
        "false beside {beside} (experts choose among all tokens of a sequence, their loss is not a sum)",
        "false, with dense layers",
    ),
)

# What goes with token_pipeline as long as nothing is cut.
CUT_RULES = (
    Rule("compile.enabled", is_true, _COMPILE, _UNCUT),
    Rule(
        "activation_checkpointing.contiguous_memory_optimization",
        is_true,
        "false where sequences are cut (its buffers hold as many checkpoints, of one length, as whole micro-batches leave)",
        _UNCUT,
    ),
)

_LAMB = "with optimizer.type FusedLamb"


def offloads(value: Any) -> bool:
    """Whether a block ``offload_optimizer`` or ``offload_param`` asks for it: DeepSpeed's default is ``"device": "none"``."""
    return isinstance(value, Mapping) and value.get("device", "none") not in ("none", None)


def _block_is_on(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("enabled", True) is not False


def autocasts_to_fp16(value: Any) -> bool:
    """Whether the block ``torch_autocast`` asks for it."""
    if not isinstance(value, Mapping) or not is_true(value.get("enabled")):
        return False
    return str(value.get("dtype", "")).lower().removeprefix("torch.") in ("fp16", "float16", "half")


# Spelt and defaulted as in DeepSpeed 0.19.8: runtime/zero/config.py, runtime/precision_config.py, runtime/config.py,
# runtime/tensor_parallel/config.py.
LAMB_RULES = (
    Rule(
        "zero_optimization.stage", above(2), f"0, 1 or 2 {_LAMB} (ZeRO-3 does not tell where a layer's parts are)", "1"
    ),
    Rule(
        "zero_optimization.offload_optimizer",
        offloads,
        f'absent {_LAMB} (the optimizer steps where the parameters are), or have device "none"',
        'device "none"',
    ),
    Rule("zero_optimization.offload_param", offloads, f'absent {_LAMB}, or have device "none"', 'device "none"'),
    Rule("zero_optimization.cpu_offload", is_true, f"false {_LAMB}", "false"),
    Rule(
        "zero_optimization.zenflow",
        _block_is_on,
        f"absent {_LAMB} (ZenFlow updates single columns of a layer)",
        "ZeRO-1 or ZeRO-2 without it",
    ),
    Rule(
        "zero_optimization.round_robin_gradients",
        is_true,
        f"false {_LAMB} (DeepSpeed then notes a wrong place for every parameter in its flat buffers)",
        "false",
    ),
    Rule("bf16.bf16_master_weights_and_grads", is_true, f"false {_LAMB} (it updates fp32 master weights)", "false"),
    Rule("fp16.fp16_master_weights_and_grads", is_true, f"false {_LAMB} (it updates fp32 master weights)", "false"),
    Rule(
        "torch_autocast",
        autocasts_to_fp16,
        f"bfloat16 or off {_LAMB} (every pipeline stage would scale its loss by itself)",
        "dtype bfloat16",
    ),
    Rule(
        "tensor_parallel.autotp_size",
        above(1),
        f"0 or 1 {_LAMB} (DeepSpeed's automatic tensor parallelism replaces layers after they are counted)",
        "0, and layers that are tensor parallel themselves, as megatron-core's are",
    ),
    Rule("expert_parallel.enabled", is_true, f"false {_LAMB} (experts' norms are on other ranks)", "false"),
)


def cuts(slices: Any) -> bool:
    """Whether sequences may be cut with this value of ``token_pipeline.slices``: with every one but 1."""
    return bool(slices != 1)


def check_config(config: Mapping[str, Any], beside: str = TOKEN_PIPELINE) -> None:
    """Raise for the first key of a DeepSpeed configuration that does not go with token slices.

    Args:
        config: with the block ``token_pipeline``, the user's or the default.
        beside: the block that the user has written, for the error.

    Raises:
        ConfigError: naming the key, its value, the reason and the value to use.
    """
    check_rules((rule._replace(rule=rule.rule.format(beside=beside)) for rule in RULES), config)
    if cuts(at(config, f"{TOKEN_PIPELINE}.slices")):
        check_rules(CUT_RULES, config)


def check_checkpointing(slices: Any) -> None:
    """Refuse settings of ``deepspeed.checkpointing.configure``, which may be called at any time, that exclude slices.

    Raises:
        ConfigError: naming its argument, the reason and the way out.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if checkpointing.CONTIGUOUS_CHECKPOINTING and cuts(slices):
        rule = next(rule for rule in CUT_RULES if rule.path.endswith("contiguous_memory_optimization"))
        raise bad_value("deepspeed.checkpointing.configure: contiguous_checkpointing", True, rule.rule, rule.use)


def check_lamb_config(config: Mapping[str, Any]) -> None:
    """Raise for the first key of a DeepSpeed configuration that does not go with ``FusedLamb``.

    Raises:
        ConfigError: naming the key, its value, the reason and the value to use.
    """
    check_rules(LAMB_RULES, config)


def check_rules(rules: Iterable[Rule], config: Mapping[str, Any]) -> None:
    """Raise for the first rule whose key is there with a value that it refuses.

    Raises:
        ConfigError: naming the key, its value, the rule and the value to use.
    """
    for rule in rules:
        value = at(config, rule.path, _ABSENT)
        if value is not _ABSENT and rule.refused(value):
            raise bad_value(rule.path, value, rule.rule, rule.use)


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path of nested blocks, the default where a block or the key is missing."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name, default) if isinstance(value, Mapping) else default
    return value


def check_weight_gradients(token_pipeline: TokenPipelineConfig, autocast: bool) -> None:
    """Raise ConfigError for weight gradients per micro-batch beside ``torch_autocast``."""
    if token_pipeline.weight_gradients == "micro_batch" and autocast:
        raise ConfigError(
            'token_pipeline.weight_gradients: got "micro_batch" beside torch_autocast, must be "slice" or "auto" (a layer '
            'multiplies with a copy of its weight, whose gradient is made with it), use "auto"'
        )
