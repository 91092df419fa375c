"""Roles of the modules of a Hugging Face decoder, found in the built model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ds_terapipe.errors import ConfigError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class Parts(NamedTuple):
    """Names of modules within a model.

    Attributes:
        tokens: the word embedding.
        layers: the list of decoder layers.
        head: makes the logits.
        tied: whether the head's weight is the word embedding's.
        norm: behind the last layer; None: there is none.
        positions: a table of learned positions, added to the word embedding.
        dropout: behind these.
        rotary: makes cosines and sines for all layers.
    """

    tokens: str
    layers: str
    head: str
    tied: bool
    norm: str | None
    positions: str | None
    dropout: str | None
    rotary: str | None


def refusal(model_type: str, what: str, use: str) -> ConfigError:
    """The error for a model that is no chain of embedding, layers, norm and head."""
    return ConfigError(
        f"hf.pipeline: got {model_type}, {what}, must be a decoder of word embedding, layers, norm and head, use {use}"
    )


def parts_of(model: Any) -> Parts:
    """The parts of a model with a language modelling head.

    Raises:
        ConfigError: it has others, or not all of these.
    """
    config = model.config
    kind = config.model_type
    experts = next((name for name in _EXPERTS if (getattr(config, name, None) or 0) > 1), None)
    if experts is not None:
        what = f"a mixture of experts ({experts} {getattr(config, experts)}), whose routers' losses are not collected"
        raise refusal(kind, what, "a dense model")
    names = {id(module): name for name, module in model.named_modules()}
    base, tokens, head = model.base_model, model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or base is model:
        raise refusal(kind, f"{type(model).__name__} without a head for logits", "AutoModelForCausalLM")
    found: dict[str, list[nn.Module]] = {"layers": [], "positions": [], "dropout": [], "rotary": [], "norm": []}
    for child in base.children():
        if child is not tokens:
            found[_what(child, config)].append(child)
    several = [what for what, modules in found.items() if len(modules) > 1]
    if several or not found["layers"]:
        odd = [type(module).__name__ for what in several for module in found[what]]
        raise refusal(kind, f"with {' and '.join(odd)}" if odd else "without a list of layers", "another model")
    tied = getattr(head, "weight", None) is tokens.weight
    if tied and getattr(head, "bias", None) is not None:
        raise refusal(kind, "with a bias on tied logits", "a model without")
    name = {what: names[id(modules[0])] if modules else None for what, modules in found.items()}
    return Parts(
        names[id(tokens)], name["layers"] or "", names[id(head)], tied,
        norm=name["norm"], positions=name["positions"], dropout=name["dropout"], rotary=name["rotary"],
    )  # fmt: skip


def without_adapter(module: Any) -> Any:
    """Return the module that peft has put an adapter or a copy around, else the module itself."""
    return getattr(module, "base_layer", None) or getattr(module, "original_module", module)


def _what(module: nn.Module, config: Any) -> str:
    if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
        return "layers"
    if isinstance(without_adapter(module), nn.Embedding):
        return "positions"
    if isinstance(module, nn.Dropout):
        return "dropout"
    return "rotary" if "Rotary" in type(module).__name__ else "norm"


def check_around(model: Any, parts: Parts) -> None:
    """Refuse hooks and a ``forward`` that a user has put on modules which a pipeline does not run. Raises ConfigError."""
    run = [name for name in parts if isinstance(name, str) and not (parts.tied and name == parts.head)]
    for name, module in model.named_modules():
        if name != parts.layers and any(f"{name}.".startswith(f"{part}.") for part in run):
            continue
        if "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS):
            said = name or type(model).__name__
            what = f"with a hook or a forward of its own on {said}, which a pipeline does not run"
            raise refusal(model.config.model_type, what, "a model without, or hooks on its layers")


def check_shared(model: Any, parts: Parts, groups: Sequence[Sequence[str]]) -> None:
    """Refuse a trained weight in two groups of modules, each of which would train a copy; not that of tied logits.

    Raises:
        ConfigError: with both names of a weight.
    """
    tied = set(map(id, model.get_submodule(parts.tokens).parameters() if parts.tied else ()))
    known: dict[int, tuple[int, str]] = {}
    for number, group in enumerate(groups):
        weights = ((f"{part}.{n}", p) for part in group for n, p in model.get_submodule(part).named_parameters())
        for name, weight in weights:
            first, other = known.setdefault(id(weight), (number, name))
            if weight.requires_grad and first != number and id(weight) not in tied:
                what = f"whose {name} is {other}, and each would train a copy of its own"
                raise refusal(model.config.model_type, what, "weights that one stage alone has")
