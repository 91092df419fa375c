"""What token slices, and FusedLamb, do not go with, refused by name before an engine exists.

Every finding names the key or the layer, the reason and the way out. A layer lives on one stage only, so what one rank
finds is exchanged, and all ranks raise.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from .config import TOKEN_PIPELINE
from .errors import ConfigError, bad_value, shown

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MESSAGE_BYTES = 1024


class Rule(NamedTuple):
    """A key of the DeepSpeed configuration and the values that do not go with token slices."""

    path: str
    refused: Callable[[Any], bool]
    rule: str
    use: str


def is_true(value: Any) -> bool:
    return value is True or (isinstance(value, (int, float)) and value != 0)


def above(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value > limit


_TIMERS = "false beside token_pipeline (DeepSpeed's pipeline engine starts its timers twice and fails)"
_COMPILE = "false where sequences are cut (a compiled graph holds the attention of the whole sequence)"
_UNCUT = 'false, or "slices": 1, which cuts nothing'

# Spelt and defaulted as in DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, compile/config.py,
# runtime/tensor_parallel/config.py, runtime/data_pipeline/config.py, profiling/config.py.
RULES = (
    Rule(
        "zero_optimization.stage",
        above(1),
        "0 or 1 beside token_pipeline (pipeline stages keep their gradients until the last slice is done)",
        "1",
    ),
    Rule(
        "sequence_parallel_size",
        above(1),
        "1 beside token_pipeline (Ulysses shares a sequence among ranks, slices need it whole on each)",
        "1, with more pipeline stages",
    ),
    Rule(
        "data_efficiency.data_routing.random_ltd.enabled",
        is_true,
        "false beside token_pipeline (random-LTD drops tokens by their place in the whole sequence)",
        "false",
    ),
    Rule("flops_profiler.enabled", is_true, _TIMERS, "false"),
    Rule("wall_clock_breakdown", is_true, _TIMERS, "false"),
    Rule(
        "compile.deepcompile",
        is_true,
        "false beside token_pipeline (its passes are started by a forward of DeepSpeed's that is not used here)",
        "false",
    ),
    Rule(
        "tensor_parallel.autotp_size",
        above(0),
        "0 beside token_pipeline (DeepSpeed's automatic tensor parallelism rewrites layers after they are checked)",
        "0, and layers that are tensor parallel themselves, as megatron-core's are",
    ),
    Rule(
        "expert_parallel.enabled",
        is_true,
        "false beside token_pipeline (experts choose among all tokens of a sequence, their loss is not a sum)",
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


def _offloads(value: Any) -> bool:
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
        "zero_optimization.stage",
        above(2),
        f"0, 1 or 2 {_LAMB} (ZeRO-3 does not tell where a layer's parts are)",
        "1",
    ),
    Rule(
        "zero_optimization.offload_optimizer",
        _offloads,
        f'absent {_LAMB} (the optimizer steps where the parameters are), or have device "none"',
        'device "none"',
    ),
    Rule("zero_optimization.offload_param", _offloads, f'absent {_LAMB}, or have device "none"', 'device "none"'),
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

_UNCOMPILED = (
    "plain Python where sequences are cut (a compiled graph holds the attention of all tokens)",
    'it without torch.compile, or "slices": 1',
)


def cuts(slices: Any) -> bool:
    """Whether sequences may be cut with this value of ``token_pipeline.slices``: with every one but 1."""
    return bool(slices != 1)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise for the first key of a DeepSpeed configuration that does not go with token slices.

    Raises:
        ConfigError: naming the key, its value, the reason and the value to use.
    """
    _check_rules(RULES, config)
    if cuts(at(config, f"{TOKEN_PIPELINE}.slices")):
        _check_rules(CUT_RULES, config)


def check_checkpointing(slices: Any) -> None:
    """Raise where ``deepspeed.checkpointing.configure``, which may be called at any time, asked for what slices don't go with.

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
    _check_rules(LAMB_RULES, config)


def _check_rules(rules: Iterable[Rule], config: Mapping[str, Any]) -> None:
    for rule in rules:
        value = at(config, rule.path)
        if rule.refused(value):
            raise bad_value(rule.path, value, rule.rule, rule.use)


def at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of nested blocks, None where a block or the key is missing."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def check_model_class(model: Any) -> None:
    """Raise unless ``model`` is a ``PipelineModule`` that runs one stage per rank.

    Raises:
        ConfigError: naming the class and what to build instead.
    """
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule

    name = type(model).__name__
    if isinstance(model, DualPipeVModule):
        use = "deepspeed.pipe.PipelineModule or remove the key"
        raise bad_value(TOKEN_PIPELINE, name, "a model with one stage per rank (DualPipeV has two)", use)
    if not isinstance(model, PipelineModule):
        build = "deepspeed.pipe.PipelineModule(layers=..."
        if _is_bert(model):
            build = "ds_terapipe.megatron.bert_pipeline(config"
        elif _is_decoder(model):
            build = "ds_terapipe.hf.pipeline(model"
        use = f"{build}, num_stages=2) or remove the key"
        rule = "left uncompiled" if name == "OptimizedModule" else "a PipelineModule"
        raise bad_value(TOKEN_PIPELINE, name, rule, use)


def _is_bert(model: Any) -> bool:
    """Whether it is Megatron-LM's, megatron-core's or Hugging Face's model of that name, or has one in it."""
    inside = model.modules() if hasattr(model, "modules") else ()
    return any(type(module).__name__ == "BertModel" for module in inside)


def _is_decoder(model: Any) -> bool:
    """Whether it is a model of Hugging Face's with a language modelling head."""
    names = [base.__name__ for base in type(model).__mro__]
    return "PreTrainedModel" in names and names[0].endswith("ForCausalLM")


def check_model(model: Any, cut: bool = True) -> None:
    """Raise for the first layer of this rank's stage that does not go with token slices.

    Args:
        model: a ``PipelineModule``.
        cut: whether sequences may be cut; compiled layers are refused only there.

    Raises:
        ConfigError: naming the layer, the reason and the way out.
    """
    if cut and has_own_forward(model):
        rule = "PipelineModule's own where sequences are cut (a slice asks which layer it is in)"
        raise _refuse(type(model).__name__, "has a forward of its own", rule, '"slices": 1, or layers that do the same')
    for index, layer in enumerate(model.forward_funcs, start=model._local_start):
        if cut and not hasattr(layer, "named_modules") and _compiled(layer):
            raise _refuse(f"layer {index}", "is compiled", *_UNCOMPILED)
    for where, module in model.named_modules():
        for found in _findings(module, cut):
            raise _refuse(f"layer {where or type(model).__name__} ({type(module).__name__})", *found)
    if _additional_losses(model):
        raise _refuse(
            "get_additional_losses", "returns losses beside the model's own", "None", "a loss_fn that adds them"
        )


def has_own_forward(model: Any) -> bool:
    """Whether the class of a ``PipelineModule`` has another forward than DeepSpeed's, which runs layer after layer."""
    from deepspeed.runtime.pipe.module import PipelineModule

    return isinstance(model, PipelineModule) and type(model).forward is not PipelineModule.forward


def _refuse(where: str, got: str, rule: str, use: str) -> ConfigError:
    return ConfigError(f"{TOKEN_PIPELINE}: {where} {got}, must be {rule} beside token_pipeline, use {use}")


def _findings(module: Any, cut: bool) -> Iterator[tuple[str, str, str]]:
    origins = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
    names = [base.__name__ for base in type(module).__mro__]
    config = getattr(module, "config", None)

    if cut and ("OptimizedModule" in names or _compiled(module)):
        yield "is compiled", *_UNCOMPILED
    if cut and getattr(module, "is_bidirectional", False) is True:  # ours, see ds_terapipe/megatron/attention.py
        yield "is attention that is not causal", "causal where sequences are cut", '"slices": 1'
    if (
        any(origin.startswith(("deepspeed.moe.", "megatron.core.transformer.moe.")) for origin in origins)
        or "SwitchMLP" in names
        or _number(module, "num_experts") > 1
        or getattr(module, "is_moe_model", False) is True
    ):
        yield "is a mixture of experts", "dense (experts choose among all tokens, their loss is not a sum)", "an MLP"
    if (
        any(origin.startswith(("deepspeed.sequence.", "deepspeed.runtime.sequence_parallel.")) for origin in origins)
        or getattr(module, "enable_ds_sequence_parallel", False) is True
        or getattr(module, "ds_sequence_parallel_fpdt", False) is True
    ):
        yield "shares a sequence among ranks", "without Ulysses sequence parallelism", "more pipeline stages"
    marked = [module, config, *module.parameters(recurse=False)]
    if any(getattr(holder, "sequence_parallel", False) is True for holder in marked):
        yield "has sequence_parallel=True", "False (it shares a sequence among tensor-parallel ranks)", "False"
    if _number(config, "context_parallel_size") > 1:
        yield "has context_parallel_size > 1", "1 (it shares a sequence among ranks)", "more pipeline stages"
    if any(name.startswith("FlashSelfAttention") for name in names) or getattr(module, "use_flash_attn", False) is True:
        yield (
            "calls flash attention by itself",
            "attention that can be cut",
            "Megatron-DeepSpeed without --use-flash-attn",
        )
    yield from _megatron_deepspeed(module)


def _megatron_deepspeed(module: Any) -> Iterator[tuple[str, str, str]]:
    """Megatron-DeepSpeed's layers read rotary positions and the zero-bubble switch from its global arguments."""
    arguments = getattr(module, "_args", None) or _megatron_arguments(module)
    if True in (
        getattr(module, "use_rotary_position_embeddings", False),
        getattr(arguments, "use_rotary_position_embeddings", False),
    ):
        use = "learned positions, or a model of ds_terapipe.megatron"
        yield "has rotary positions", "without rotary positions (every slice would count from 0)", use
    if getattr(arguments, "enable_zbh1_pipeline", False) is True:
        yield (
            "keeps weight gradients back for a zero-bubble schedule",
            "without it (only that schedule ever computes them)",
            "Megatron-DeepSpeed without --enable-zbh1-pipeline",
        )


def _megatron_arguments(module: Any) -> Any:
    origin = type(module).__module__
    if not origin.startswith("megatron.") or origin.startswith("megatron.core."):
        return None
    get_args = getattr(sys.modules.get(origin), "get_args", None)
    try:
        return get_args() if callable(get_args) else None
    except AssertionError:
        return None  # no arguments were parsed, so no layer can read any


def _additional_losses(model: Any) -> bool:
    try:
        return model.get_additional_losses() is not None
    except Exception:
        return True  # it wants values of a step that has not been run


def _compiled(layer: Any) -> bool:
    return (
        getattr(layer, "_compiled_call_impl", None) is not None
        or hasattr(layer, "_torchdynamo_orig_callable")
        or hasattr(getattr(layer, "forward", None), "_torchdynamo_orig_callable")
    )


def _number(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if isinstance(value, int) else 0


def advise(config: Mapping[str, Any], model: Any, cut: bool = True) -> None:
    """Log on rank 0 what is legal but gains nothing, and what differs from DeepSpeed's own engine.

    Args:
        config: the DeepSpeed configuration.
        model: a ``PipelineModule``.
        cut: whether there is a block ``token_pipeline``.
    """
    if not _first_rank():
        return
    if cut and model.num_pipeline_stages() == 1:
        logger.warning("%s: the model has one pipeline stage, slices gain nothing; use num_stages >= 2", TOKEN_PIPELINE)
    from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT

    clipping = config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    if above(0)(clipping):
        logger.warning(
            "%s: got %s%s, which clips by the true norm over all pipeline stages; DeepSpeed's own engine counts the "
            "first stage only, so a clipped run differs from one without ds_terapipe",
            GRADIENT_CLIPPING,
            shown(clipping),
            "" if GRADIENT_CLIPPING in config else " (DeepSpeed's default)",
        )


def turn_off_partitioning(pipeline: dict[str, Any], model: Any) -> None:
    """Set ``pipe_partitioned`` and ``grad_partitioned`` to False, with one warning where they would have counted.

    Args:
        pipeline: the block ``pipeline`` as ``DeepSpeedConfig`` has filled it in; changed in place, it is no user's.
        model: a ``PipelineModule``.
    """
    names = [name for name in ("pipe_partitioned", "grad_partitioned") if pipeline.get(name)]
    if names and model.mpu().model_parallel_size > 1 and _first_rank():
        logger.warning(
            "%s ignored beside %s: a slice travels whole to every tensor-parallel rank; set to false to silence this",
            " and ".join(f"pipeline.{name}" for name in names),
            TOKEN_PIPELINE,
        )
    pipeline.update(pipe_partitioned=False, grad_partitioned=False)


def on_every_rank(model: Any, check: Callable[[], Result]) -> Result:
    """Run a check and raise on all ranks what any rank finds, so that none waits for one that has given up.

    Args:
        model: a ``PipelineModule``; the ranks are those of its ``world_group``.
        check: run once on this rank.

    Returns:
        What ``check`` returns.

    Raises:
        ConfigError: another rank's finding, in its words; this rank's own error is raised as it is.
    """
    failure: Exception | None = None
    try:
        result = check()
    except Exception as error:
        failure = error
    messages = _exchange(model, "" if failure is None else " ".join(str(failure).split()) or type(failure).__name__)
    if failure is not None:
        raise failure
    for message in messages:
        if message:
            raise ConfigError(message)
    return result


def _exchange(model: Any, message: str) -> list[str]:
    """Every rank's message, cut to ``MESSAGE_BYTES``, by one all-gather."""
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name(model.local_rank)
    encoded = message.encode("utf-8")[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    mine = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    received = [torch.empty_like(mine) for _ in range(model.world_size)]
    torch.distributed.all_gather(received, mine, group=model.world_group)
    return [bytes(each.tolist()).rstrip(b"\0").decode("utf-8", errors="ignore") for each in received]


def _first_rank() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
