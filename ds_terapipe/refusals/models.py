"""Models and layers that token slices do not go with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ds_terapipe.config import TOKEN_PIPELINE
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.token_shares import is_divided


def check_model_class(model: Any, beside: str = TOKEN_PIPELINE) -> None:
    """Raise unless ``model`` is a ``PipelineModule`` that runs one stage per rank.

    Args:
        model: the argument of ``deepspeed.initialize``.
        beside: the block that the user has written, for the error.

    Raises:
        ConfigError: naming the class and its replacement.
    """
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule

    name = type(model).__name__
    if isinstance(model, DualPipeVModule):
        use = "deepspeed.pipe.PipelineModule or remove the key"
        raise bad_value(beside, name, "a model with one stage per rank (DualPipeV has two)", use)
    if not isinstance(model, PipelineModule):
        build = "deepspeed.pipe.PipelineModule(layers=..."
        if _is_bert(model):
            build = "ds_terapipe.megatron.bert_pipeline(config"
        elif _is_decoder(model):
            build = "ds_terapipe.hf.pipeline(model"
        use = f"{build}, num_stages=2) or remove the key"
        rule = "left uncompiled" if name == "OptimizedModule" else "a PipelineModule"
        raise bad_value(beside, name, rule, use)


def _is_bert(model: Any) -> bool:
    """Whether a model is a ``BertModel`` of Megatron-LM, megatron-core or Hugging Face, or has one in it."""
    inside = model.modules() if hasattr(model, "modules") else ()
    return any(type(module).__name__ == "BertModel" for module in inside)


def _is_decoder(model: Any) -> bool:
    """Whether a model is Hugging Face's, with a language modelling head."""
    names = [base.__name__ for base in type(model).__mro__]
    return "PreTrainedModel" in names and names[0].endswith("ForCausalLM")


def check_model(model: Any, cut: bool = True, beside: str = TOKEN_PIPELINE) -> None:
    """Raise for the first layer of this rank's stage that does not go with token slices.

    Args:
        model: a ``PipelineModule``.
        cut: whether sequences may be cut; compiled layers are refused only there.
        beside: the block that the user has written, for the error.

    Raises:
        ConfigError: naming the layer, the reason and the way out.
    """
    if cut and has_own_forward(model):
        rule = "PipelineModule's own where sequences are cut (a slice asks which layer it is in)"
        use = '"slices": 1, or layers that do the same'
        raise _refuse(beside, type(model).__name__, "has a forward of its own", rule, use)
    for index, layer in ModelChunks(model).functions.items():
        if cut and not hasattr(layer, "named_modules") and _compiled(layer):
            raise _refuse(beside, f"layer {index}", *_COMPILED)
    tensor = model.mpu().get_slice_parallel_world_size() if hasattr(model, "mpu") else 1
    for where, module in model.named_modules():
        layer, name = _Layer(module, tensor), f"layer {where or type(model).__name__} ({type(module).__name__})"
        for found in (*_CUT_RULES, *_RULES) if cut else _RULES:
            if found.refused(layer):
                raise _refuse(beside, name, found.got, found.must, found.use)
    if _additional_losses(model):
        got = "returns losses beside the model's own"
        raise _refuse(beside, "get_additional_losses", got, "None", "a loss_fn that adds them")


def has_own_forward(model: Any) -> bool:
    """Whether a ``PipelineModule``, or its class, has another forward than DeepSpeed's, which runs layer after layer."""
    from deepspeed.runtime.pipe.module import PipelineModule

    return isinstance(model, PipelineModule) and getattr(model.forward, "__func__", None) is not PipelineModule.forward


def _refuse(beside: str, where: str, got: str, rule: str, use: str) -> ConfigError:
    return ConfigError(f"{beside}: {where} {got}, must be {rule} beside {beside}, use {use}")


class _Layer:
    """A module as the rules ask about it.

    Args:
        module: a module of a stage, at any depth.
        tensor_parallel: number of ranks that share its products.
    """

    def __init__(self, module: Any, tensor_parallel: int) -> None:
        self.tensor_parallel = tensor_parallel
        self.module, self.config = module, getattr(module, "config", None)
        self.names = [base.__name__ for base in type(module).__mro__]
        self._origins = [base.__module__ for base in type(module).__mro__]
        # Megatron-DeepSpeed's layers read rotary positions and the zero-bubble switch from its global arguments
        self.arguments = getattr(module, "_args", None) or _megatron_arguments(module)

    def is_from(self, *packages: str) -> bool:
        """Whether its class or a base is of one of these packages."""
        return any(f"{origin}.".startswith(f"{package}.") for origin in self._origins for package in packages)

    def has(self, name: str, *holders: Any) -> bool:
        """Whether an attribute of the module, or of these holders, is True."""
        return any(getattr(holder, name, False) is True for holder in holders or (self.module,))


class _LayerRule(NamedTuple):
    """Layers that are refused: what one is or has, what it must be, and what to use."""

    refused: Callable[[_Layer], bool]
    got: str
    must: str
    use: str


_COMPILED = (
    "is compiled",
    "plain Python where sequences are cut (a compiled graph holds the attention of all tokens)",
    'it without torch.compile, or "slices": 1',
)
_CUT_RULES = (
    _LayerRule(lambda layer: "OptimizedModule" in layer.names or _compiled(layer.module), *_COMPILED),
    _LayerRule(lambda layer: layer.has("is_bidirectional"),  # ours, see ds_terapipe/megatron/attention.py
               "is attention that is not causal", "causal where sequences are cut", '"slices": 1'),
)  # fmt: skip
_RULES = (
    _LayerRule(lambda layer: layer.is_from("deepspeed.moe", "megatron.core.transformer.moe") or layer.has("is_moe_model")
               or "SwitchMLP" in layer.names or _number(layer.module, "num_experts") > 1,
               "is a mixture of experts", "dense (experts choose among all tokens, their loss is not a sum)", "an MLP"),
    _LayerRule(lambda layer: layer.is_from("deepspeed.sequence", "deepspeed.runtime.sequence_parallel")
               or layer.has("enable_ds_sequence_parallel") or layer.has("ds_sequence_parallel_fpdt"),
               "shares a sequence among ranks", "without Ulysses sequence parallelism", "more pipeline stages"),
    _LayerRule(lambda layer: layer.tensor_parallel == 1 and is_divided(layer.module),
               "has sequence_parallel=True", "False without tensor parallelism (no rank shares its tokens)", "False"),
    _LayerRule(lambda layer: _number(layer.config, "context_parallel_size") > 1,
               "has context_parallel_size > 1", "1 (it shares a sequence among ranks)", "more pipeline stages"),
    _LayerRule(lambda layer: layer.has("use_flash_attn") or any(n.startswith("FlashSelfAttention") for n in layer.names),
               "calls flash attention by itself", "attention that can be cut",
               "Megatron-DeepSpeed without --use-flash-attn"),
    _LayerRule(lambda layer: layer.has("use_rotary_position_embeddings", layer.module, layer.arguments),
               "has rotary positions", "without rotary positions (every slice would count from 0)",
               "learned positions, or a model of ds_terapipe.megatron"),
    _LayerRule(lambda layer: layer.has("enable_zbh1_pipeline", layer.arguments),
               "keeps weight gradients back for a zero-bubble schedule",
               "without it (only that schedule ever computes them)",
               "Megatron-DeepSpeed without --enable-zbh1-pipeline"),
)  # fmt: skip


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
