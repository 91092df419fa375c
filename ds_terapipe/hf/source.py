"""Sources of a pipeline's layers: an existing model, or its configuration with weights, if there are any."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.hf import attention
from ds_terapipe.hf.adapters import CONFIG, Adapter, adapter_in, adapter_of
from ds_terapipe.hf.parts import check_around, parts_of, refusal
from ds_terapipe.hf.positions import Rotary
from ds_terapipe.hf.weights import Weights, folder_of, has_weights
from ds_terapipe.skip_init import is_skipping_init


class Source:
    """Gives out the modules of a model one by one, so that a process holds its own layers only.

    Args:
        model: on the meta device unless it is ``given``; its parameters and buffers have their types.
        given: whether it is a model of the user's, whose modules are handed out as they are.
        weights: values of the modules; None: new ones, drawn from ``seed`` and the module's name.
        seed: see ``weights``.
        adapter: to be put into the model, or that it has.

    Attributes:
        given: see above.
        parts: of the model.
        adapter: its adapter, if it has one.
        rotary: of all layers; None: there is none.
        softcap: of the logits.
    """

    def __init__(
        self, model: Any, *, given: bool, weights: Weights | None = None, seed: int = 0, adapter: Adapter | None = None
    ) -> None:
        self.model, self.given, self._weights, self._seed = model, given, weights, seed
        self.config: PreTrainedConfig = model.config
        self._plain = self.parts = parts_of(model)
        check_around(model, self.parts)
        self.adapter = adapter
        if adapter is not None:
            self.parts = adapter.put_into(model, self._plain, seed, given)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.rotary = None if self.parts.rotary is None else Rotary(self.take(self.parts.rotary))

    def __repr__(self) -> str:
        return type(self.model).__name__

    def __deepcopy__(self, memo: Any) -> Source:
        return self  # layers that are copied are of the same model

    def layer_type(self, index: int) -> str | None:
        """Type of a layer by the configuration's name; None if all layers are alike."""
        types = getattr(self.config, "layer_types", None)
        return None if types is None else types[index]

    def numel(self, part: str) -> int:
        """Parameters of a module."""
        return sum(parameter.numel() for parameter in self.model.get_submodule(part).parameters())

    def take(self, part: str) -> nn.Module:
        """A module with its weights, or room for them, on the CPU; of a given model the very module."""
        module: nn.Module = self.model.get_submodule(part)
        if self.given:
            return module
        module = copy.deepcopy(module, {id(self.config): self.config}).to_empty(device="cpu")
        if is_skipping_init():
            return module
        stored = {name: self._stored(f"{part}.{name}") for name in module.state_dict()}
        loaded = {name: self._weights.read(at) for name, at in stored.items() if at} if self._weights else {}
        for name, tensor in _tensors(module):  # transformers draws no values for these
            known = vars(tensor)["_is_hf_initialized"] = name in loaded or stored.get(name, name) is None
            if not known and tensor.is_floating_point():
                tensor.data.fill_(float("nan"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{self._seed} {part}".encode()))
            for inside in reversed([*module.modules()]):  # a module after those in it, whose values it may set, too
                self.model._init_weights(inside)
            for name, tensor in _tensors(module):
                if name in loaded:
                    tensor.copy_(loaded[name])
                elif stored.get(name, name) is not None and bool(tensor.isnan().any()):
                    what = f"for whose {part}.{name} _init_weights has no value"
                    use = "a model that is there: AutoModelForCausalLM.from_config(...)"
                    raise refusal(self.config.model_type, what, use)
        if self.adapter is not None:
            self.adapter.begin(module, part, self._seed)
        return module

    def _stored(self, name: str) -> str | None:
        """Return the name that a tensor has in the model's folder; None: it is an adapter's alone."""
        own = name if self.adapter is None else self.adapter.base_name(name)
        head = f"{self._plain.head}."
        if own is not None and self._plain.tied and own.startswith(head):
            return f"{self._plain.tokens}.{own.removeprefix(head)}"
        return own

    def check(self, parts: list[str]) -> None:
        """See that the weights of these modules are there.

        Raises:
            ConfigError: a tensor is missing, has another shape, or is in a damaged file.
        """
        if self._weights is not None:
            for part in parts:
                module = self.model.get_submodule(part)
                stored = ((self._stored(f"{part}.{name}"), tensor) for name, tensor in module.state_dict().items())
                self._weights.check((name, tensor) for name, tensor in stored if name is not None)


def source_of(
    what: Any,
    dtype: torch.dtype | None,
    seed: int,
    revision: str | None = None,
    lora: Any = None,
    adapter: str | Path | None = None,
) -> Source:
    """Return the source of a model, a configuration, or the name of a folder or of a model on the Hub.

    ``lora``, ``adapter``: as for :func:`ds_terapipe.hf.pipeline`.

    Raises:
        ConfigError: it is nothing of that, no decoder, or its attention can't be served; or the adapter is not for it.
    """
    attention.register()
    base = str(what) if isinstance(what, (str, Path)) else getattr(what, "name_or_path", None)
    wanted, there = adapter_of(lora, adapter, base), adapter_in(what)
    if hasattr(what, "get_base_model"):
        what = what.get_base_model()
    if isinstance(what, PreTrainedModel):
        _check(what.config)
        if not what._can_set_attn_implementation():
            raise _without_interface(what.config)
        if there is not None and wanted is not None:
            raise ConfigError("lora: got a model that has an adapter, must be without, use model.unload() or no lora")
        what.set_attn_implementation(attention.NAME)
        for module in what.modules():  # a layer that was copied has a configuration of its own
            if isinstance(own := getattr(module, "config", None), PreTrainedConfig):
                own._attn_implementation = attention.NAME
        for tensor in what.state_dict(keep_vars=True).values() if dtype is not None else ():
            if tensor.is_floating_point():  # tables of frequencies are none of these, and stay as precise as they are
                tensor.data = tensor.data.to(dtype)
        return Source(what, given=True, seed=seed, adapter=there or wanted)
    folder: Path | None = None
    if isinstance(what, (str, Path)):
        folder = folder_of(str(what), revision)
        what = _config_of(folder)
    if not isinstance(what, PreTrainedConfig):
        raise ConfigError(
            f"hf.pipeline: got {type(what).__name__}, must be a model, its configuration, its folder or its name on the Hub, use "
            "e.g. AutoConfig.from_pretrained(...)"
        )
    _check(what)
    model = on_meta(what, dtype or torch.float32)
    absent = folder is not None and is_skipping_init() and not has_weights(folder)
    weights = None if folder is None or absent else Weights(folder, _renaming(model))
    if weights is not None:
        _tie_as_stored(model, weights)
    return Source(model, given=False, weights=weights, seed=seed, adapter=wanted)


def _renaming(model: Any) -> Callable[[str], str]:
    """Return the function from a name in a folder, perhaps an older one, to the name in the model."""
    changes = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    own, prefix = model.state_dict(), model.base_model_prefix
    return lambda name: name if name in own else rename_source_key(name, changes, [], prefix, own)[0]


def _tie_as_stored(model: Any, weights: Weights) -> None:
    """Tie embedding and logits as transformers does: not where a folder has two different weights, else to the stored one."""
    parts = parts_of(model)
    tokens, head = f"{parts.tokens}.weight", f"{parts.head}.weight"
    if not parts.tied or head not in weights.names:
        return
    if tokens not in weights.names:
        weights.names[tokens] = weights.names[head]
    elif not torch.equal(weights.read(tokens), weights.read(head)):
        logits = model.get_submodule(parts.head)
        logits.weight = nn.Parameter(torch.empty_like(logits.weight))
        model.config.tie_word_embeddings = False


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A model without values, whose attention is ours, in the types that transformers gives a model of ``dtype``.

    Raises:
        ConfigError: transformers has no causal language model of this configuration.
    """
    config = copy.deepcopy(config)
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(config.model_type, "an encoder with a decoder", "a decoder alone, e.g. Llama")
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype)
    except KeyError as problem:
        raise _without_interface(config) from problem
    except ValueError as problem:
        raise refusal(
            config.model_type, f"which is none of AutoModelForCausalLM's ({one_line(problem)})", "e.g. Llama"
        ) from problem
    if not model._can_set_attn_implementation():
        raise _without_interface(config)
    return model


def _without_interface(config: Any) -> ConfigError:
    return refusal(config.model_type, "whose attention is not transformers' AttentionInterface", "another model")


def _check(config: Any) -> None:
    """Raise ConfigError for attention with kernels of its own, and for a quantized model."""
    asked = getattr(config, "_attn_implementation", None)
    if asked not in attention.SERVED:
        raise ConfigError(
            f'attn_implementation: got "{asked}", must be "eager" or "sdpa", for which attention of slices stands in, use '
            'attn_implementation="sdpa"'
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        settings = quantized if isinstance(quantized, dict) else vars(quantized)
        raise ConfigError(
            f"hf.pipeline: got {config.model_type} quantized by {settings.get('quant_method', type(quantized).__name__)}, must "
            "have weights of 16 or 32 bits (QLoRA is not followed), use the model before its quantization"
        )


def _config_of(folder: Path) -> Any:
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"hf.pipeline: got {folder}, which has an adapter, must be a model, use pipeline(MODEL, adapter=...) with that folder"
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"hf.pipeline: got {folder}, must have a config.json of a model that transformers knows, use one that "
            f"save_pretrained has written ({one_line(problem)})"
        ) from problem


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
