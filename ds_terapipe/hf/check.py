"""Is a model the chain that a pipeline makes of it? A tiny one of its kind is run both ways and compared.

Operations outside a model's layers (scaled embeddings or logits, keys that layers share, a second embedding) does not
show in its modules; its own ``forward`` does it. So before any weights are read, a model of the same configuration with
a few narrow layers runs in fp64 as transformers trains it and layer after layer: logits, loss and all gradients, with
padding and with packed documents. Dropout is a factor there, and a cast to fp32 is none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.hf import attention
from ds_terapipe.hf.batches import batch
from ds_terapipe.hf.loss import CausalLMLoss
from ds_terapipe.hf.parts import refusal
from ds_terapipe.hf.source import Source

_LENGTH, _WINDOW, _VOCABULARY, _HEADS = 16, 5, 96, 4
_GRADIENT = "the gradient of "
_LOSS = "_loss_function"  # what a model has that was given another loss_function
_TOLERANCE = 1e-9

Chain = Callable[[Source], Sequence[Callable[[Any], Any]]]


class Exact(TorchDispatchMode):
    """Operators without chance and in fp64: a dropout keeps all elements, scaled, and fp32 is never asked for."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(1.0)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return op(*args, **kwargs)


def check_chain(source: Source, chain: Chain, own_loss: bool = True) -> None:
    """Compare a tiny model of this class, transformers' or the user's, with the chain that ``chain`` makes of it.

    ``own_loss``: whether the loss must be the model's own.

    Raises:
        ConfigError: they differ, or there is no tiny model of this kind.
    """
    kind, name = type(source.model), source.config.model_type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = kind(shrunk(source.config)).double().train()
        except Exception as problem:
            what = f"of which no small model could be made to be compared ({one_line(problem)})"
            raise refusal(name, what, "another model") from problem
        if (given := vars(source.model).get(_LOSS)) is not None:
            setattr(model, _LOSS, given)
        for parameter in model.parameters():
            if parameter.dim() < 2:  # norms and biases are all alike at first
                parameter.data.add_(torch.randn_like(parameter) / 10)
        for features in _batches():
            found = _difference(model, chain, features, own_loss)
            if found is not None:
                drops = [key for key, p in vars(source.config).items() if "drop" in key and isinstance(p, float) and p]
                if drops and _difference(model.eval(), chain, features, own_loss) is None:
                    said, use = "whose own forward drops out beside its layers", f"it with {' and '.join(drops)} 0"
                else:
                    said, use = f"whose own forward does more than its layers do ({found})", "another model"
                raise refusal(name, said, f"{use}, or write its layers into a PipelineModule")


def _difference(model: Any, chain: Chain, features: dict[str, Tensor], own_loss: bool) -> str | None:
    """Return the first difference between a model and its chain on a batch, as text with its size; None: they agree."""
    try:
        with Exact():  # type: ignore[no-untyped-call]
            expected = _own(model, features, own_loss)
            model.set_attn_implementation(attention.NAME)
            got = _chained(chain(Source(model, given=True)), model, features)
    except ConfigError:
        raise
    except Exception as problem:
        what = f"whose layers do not run one after the other ({one_line(problem)})"
        raise refusal(model.config.model_type, what, "another model") from problem
    model.set_attn_implementation("eager")
    wrong = (f"{what} differs by {error:.1e}" for what, error in _differences(expected, got) if not error <= _TOLERANCE)
    return next(wrong, None)


def _differences(expected: dict[str, Tensor], got: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Largest ones, relative to the largest element; of small gradients to the largest of all, whose rounding is in them."""
    most = max(float(value.abs().max()) for name, value in expected.items() if name.startswith(_GRADIENT))
    for name, a in expected.items():
        b = got.get(name)
        scale = max(float(a.abs().max()), most / 100 if name.startswith(_GRADIENT) else 0.0)
        yield name, 1.0 if b is None else float((a - b).abs().max()) / scale


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of few and narrow layers; heads keep their size, which rotary frequencies may list."""
    tiny = copy.deepcopy(config)
    tiny._attn_implementation = "eager"
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    grouped = getattr(config, "num_key_value_heads", heads) or heads
    types = getattr(config, "layer_types", None)
    layers = 2
    if types is not None:  # up to the first of another type
        layers = max(2, min(len(types), 1 + next((i for i, t in enumerate(types) if t != types[0]), 1)))
    wanted = {
        "num_hidden_layers": min(layers, config.num_hidden_layers),
        "hidden_size": _HEADS * size,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS if grouped == heads else _HEADS // 2,
        "intermediate_size": 2 * size,
        "vocab_size": _VOCABULARY,
        "dtype": torch.float32,  # saving a model leaves a text here, which some models can't be built with
        "sliding_window": _WINDOW,
        "pad_token_id": 0,  # of no token here; some configurations take no None
        "bos_token_id": 0,
        "eos_token_id": 0,
        "reorder_and_upcast_attn": False,  # the same formula, computed in fp32
    }
    for name, value in wanted.items():
        if getattr(tiny, name, None) is not None:
            setattr(tiny, name, value)
    if types is not None:
        tiny.layer_types = types[: tiny.num_hidden_layers]
    return tiny


def _batches() -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, _VOCABULARY, (2, _LENGTH))
    padded = torch.ones_like(tokens)
    padded[1, 3:6] = 0  # not in front: implementations differ in what a token says that sees nothing
    packed = torch.cat([torch.arange(_LENGTH - 6), torch.arange(6)])[None].expand(2, -1)
    return [
        {"input_ids": tokens, "attention_mask": padded, "labels": tokens.where(padded > 0, -100)},
        {"input_ids": tokens, "position_ids": packed, "labels": tokens},
    ]


def _own(model: Any, features: dict[str, Tensor], own_loss: bool) -> dict[str, Tensor]:
    given = features if own_loss else {name: value for name, value in features.items() if name != "labels"}
    outputs = model(**given, use_cache=False)
    loss = outputs.loss if own_loss else CausalLMLoss()(outputs.logits, features["labels"])
    return _result(model, outputs.logits, loss, features)


def _chained(chain: Sequence[Callable[[Any], Any]], model: Any, features: dict[str, Tensor]) -> dict[str, Tensor]:
    value: Any = batch(features)[0]
    for layer in chain:
        value = layer(value)
    return _result(model, value, CausalLMLoss()(value, features["labels"]), features)


def _result(model: nn.Module, logits: Tensor, loss: Tensor, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of the tokens that are none of padding, loss, gradients."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    real = features.get("attention_mask", torch.ones_like(features["labels"])) > 0
    found = {"the logits": logits.detach()[real], "the loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{_GRADIENT}{name}"] = parameter.grad
    return found
