"""Keys of the DeepSpeed configuration that token slices, and FusedLamb, do not go with.

Spelt and defaulted as in DeepSpeed 0.19.8: runtime/config.py, runtime/precision_config.py, runtime/zero/config.py,
runtime/tensor_parallel/config.py, runtime/data_pipeline/config.py, compile/config.py, profiling/config.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ds_terapipe.config import TOKEN_PIPELINE
from ds_terapipe.errors import bad_value
from ds_terapipe.names import LOADING, QUEUES, is_on
from ds_terapipe.rules import Rule, above, at, autocasts_to_fp16, check, is_true, offloads

_TIMERS = "false beside {beside} (DeepSpeed's pipeline engine starts its timers twice and fails)"
_SCALERS = "(every pipeline stage would scale its loss by itself)"
_OWN_TENSOR_PARALLEL = "0, and layers that are tensor parallel themselves, as megatron-core's are"


def _places(config: Mapping[str, Any]) -> bool:
    """Whether a place has, or may have by a plan, several stages."""
    return above(1)(at(config, f"{TOKEN_PIPELINE}.stages_per_place")) or bool(at(config, f"{TOKEN_PIPELINE}.plan_path"))


RULES = (
    Rule("zero_optimization.stage", above(1),
         "0 or 1 beside {beside} (pipeline stages keep their gradients until the last slice is done)", "1"),
    Rule("zero_optimization.round_robin_gradients", is_true,
         "false where layers are placed or may move (DeepSpeed then notes a wrong place for every parameter in its flat "
         "buffers)", "false", when=lambda config: _places(config) or is_on(config, "elastic_pipeline")),
    Rule("zero_optimization.elastic_checkpoint", is_true,
         "false where places have several stages (its files have no names of parameters)", "false", when=_places),
    Rule("sequence_parallel_size", above(1),
         "1 beside {beside} (Ulysses shares a sequence among ranks, slices need it whole on each)",
         "1, with more pipeline stages"),
    Rule("data_efficiency.data_routing.random_ltd.enabled", is_true,
         "false beside {beside} (random-LTD drops tokens by their place in the whole sequence)", "false"),
    Rule("flops_profiler.enabled", is_true, _TIMERS, "false"),
    Rule("wall_clock_breakdown", is_true, _TIMERS, "false"),
    Rule("compile.deepcompile", is_true,
         "false beside {beside} (its passes are started by a forward of DeepSpeed's that is not used here)", "false"),
    Rule("tensor_parallel.autotp_size", above(0),
         "0 beside {beside} (DeepSpeed's automatic tensor parallelism rewrites layers after they are checked)",
         _OWN_TENSOR_PARALLEL),
    Rule("torch_autocast", autocasts_to_fp16, "bfloat16 or off beside {beside} " + _SCALERS, "dtype bfloat16, or the block fp16"),
    Rule("expert_parallel.enabled", is_true,
         "false beside {beside} (experts choose among all tokens of a sequence, their loss is not a sum)",
         "false, with dense layers"),
    Rule(f"{TOKEN_PIPELINE}.weight_gradients", lambda value: value == "micro_batch",
         '"slice" or "auto" beside torch_autocast (a layer multiplies with a copy of its weight, whose gradient is made '
         "with it)", '"auto"', when=lambda config: is_true(at(config, "torch_autocast.enabled"))),
)  # fmt: skip

_UNCUT = 'false, or "slices": 1, which cuts nothing'
_CONTIGUOUS = "false where sequences are cut (its buffers hold the checkpoints of whole micro-batches, of one length)"

# These keys are allowed beside token_pipeline as long as nothing is cut.
CUT_RULES = (
    Rule("compile.enabled", is_true,
         "false where sequences are cut (a compiled graph holds the attention of the whole sequence)", _UNCUT),
    Rule("activation_checkpointing.contiguous_memory_optimization", is_true, _CONTIGUOUS, _UNCUT),
)  # fmt: skip

_LAMB = "with optimizer.type FusedLamb"
_MASTERS = f"false {_LAMB} (it updates fp32 master weights)"

LAMB_RULES = (
    Rule("zero_optimization.stage", above(2),
         f"0, 1 or 2 {_LAMB} (ZeRO-3 does not tell where a layer's parts are)", "1"),
    Rule("zero_optimization.offload_optimizer", offloads,
         f'absent {_LAMB} (the optimizer steps where the parameters are), or have device "none"', 'device "none"'),
    Rule("zero_optimization.offload_param", offloads, f'absent {_LAMB}, or have device "none"', 'device "none"'),
    Rule("zero_optimization.cpu_offload", is_true, f"false {_LAMB}", "false"),
    Rule("zero_optimization.zenflow", lambda value: isinstance(value, Mapping) and value.get("enabled") is not False,
         f"absent {_LAMB} (ZenFlow updates single columns of a layer)", "ZeRO-1 or ZeRO-2 without it"),
    Rule("zero_optimization.round_robin_gradients", is_true,
         f"false {_LAMB} (DeepSpeed then notes a wrong place for every parameter in its flat buffers)", "false"),
    Rule("bf16.bf16_master_weights_and_grads", is_true, _MASTERS, "false"),
    Rule("fp16.fp16_master_weights_and_grads", is_true, _MASTERS, "false"),
    Rule("torch_autocast", autocasts_to_fp16, f"bfloat16 or off {_LAMB} {_SCALERS}", "dtype bfloat16"),
    Rule("tensor_parallel.autotp_size", above(1),
         f"0 or 1 {_LAMB} (DeepSpeed's automatic tensor parallelism replaces layers after they are counted)",
         _OWN_TENSOR_PARALLEL),
    Rule("expert_parallel.enabled", is_true, f"false {_LAMB} (experts' norms are on other ranks)", "false"),
)  # fmt: skip


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
    check(RULES, config, beside)
    if cuts(at(config, f"{TOKEN_PIPELINE}.slices")):
        check(CUT_RULES, config)


def check_checkpointing(slices: Any) -> None:
    """Refuse settings of ``deepspeed.checkpointing.configure``, which may be called at any time, that exclude slices.

    Raises:
        ConfigError: naming its argument, the reason and the way out.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if checkpointing.CONTIGUOUS_CHECKPOINTING and cuts(slices):
        raise bad_value("deepspeed.checkpointing.configure: contiguous_checkpointing", True, _CONTIGUOUS, _UNCUT)


def check_hardware_queue(model: Any) -> None:
    """Refuse one hardware queue beside kernels that CUDA loads at their first use.

    Such a load waits for the device (CUDA Programming Guide, "Lazy Loading", hazards). Behind a receive on the only
    queue it holds the host, and with it the message that the receive's sender waits for.

    Raises:
        ConfigError: naming the variable and the way out.
    """
    from deepspeed.accelerator import get_accelerator

    lazy = os.environ.get(LOADING, "").upper() != "EAGER"
    if (
        model.num_pipeline_stages() > 1
        and lazy
        and os.environ.get(QUEUES) == "1"
        and get_accelerator().device_name() == "cuda"
    ):
        rule = "unset, or above 1, while CUDA loads kernels at their first use (behind a receive, maybe for ever)"
        raise bad_value(QUEUES, 1, rule, f"{LOADING}=EAGER beside it")
