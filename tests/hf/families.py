"""Tiny models of the families that ``ds_terapipe.hf`` is tested on, with their odd features on, batches, and trainings."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from ds_terapipe import hf
from ds_terapipe.hf.record import names_of
from tests.pipeline.training import Trace, build_engine, train, train_module, worst

LENGTH, BATCH, VOCABULARY, WINDOW, ORIGINAL = 24, 2, 61, 5, 16
_SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 48,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 8, "sliding_window": WINDOW, "final_logit_softcapping": 3.0}  # caps low enough to matter


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


# Some rotary scalings look at the longest sequence, which is longer here than what the model was trained on first.
_TRAINED_ON = {"original_max_position_embeddings": ORIGINAL}
_LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_TRAINED_ON)
_LONG = {"long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.0, 1.1, 1.2]}
_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_TIED = {"tie_word_embeddings": True}

FAMILIES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, _GROUPED | _LLAMA3 | {"attention_bias": True}),
    "llama, tied, dynamic": (transformers.LlamaConfig, _GROUPED | _rope("dynamic", factor=2.0) | _TIED |
                             {"max_position_embeddings": ORIGINAL}),
    "mistral": (transformers.MistralConfig, _GROUPED | {"sliding_window": WINDOW}),
    "qwen2": (transformers.Qwen2Config, _GROUPED | _rope("yarn", factor=2.0, **_TRAINED_ON)),
    "qwen3": (transformers.Qwen3Config, _GROUPED | {"head_dim": 16} | _WINDOWS | _TIED),
    "gemma2": (transformers.Gemma2Config, _GEMMA | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 0.3}),
    "gemma3": (transformers.Gemma3TextConfig, _GEMMA),
    "phi3": (transformers.Phi3Config, _GROUPED | _rope("longrope", **_TRAINED_ON, **_LONG) | _TRAINED_ON | {"pad_token_id": 0}),
    "olmo2": (transformers.Olmo2Config, _GROUPED),
    "gpt2": (transformers.GPT2Config, {"n_inner": 48, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "reorder_and_upcast_attn": True}),
    "gpt_neox": (transformers.GPTNeoXConfig, _rope("default", partial_rotary_factor=0.5)),
}  # fmt: skip


def config_of(family: str, **options: Any) -> transformers.PreTrainedConfig:
    kind, own = FAMILIES[family]
    return kind(**_SIZES | own | options)


def model_of(family: str, dtype: torch.dtype = torch.float32, seed: int = 7, **options: Any) -> Any:
    """A model whose norms and biases are not all alike, and whose weights are large enough for every layer to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config_of(family, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05 if parameter.dim() < 2 else 0.02)
    return model.to(dtype)


def features(kind: str, seed: int) -> dict[str, Tensor]:
    """A batch as a collator makes it: "plain"; "behind", "front": padding there; "counted": behind, and its labels count;
    "packed": two documents; "shifted": positions that begin at 3."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    made = {"input_ids": tokens, "labels": tokens.clone()}
    made["labels"][:, 3 : 5 + seed % 3] = -100  # a prompt
    # counted: within a window, else what a token says that sees nothing counts
    padding = 3 if kind == "counted" else 3 + seed % 4
    if kind in ("behind", "front", "counted"):
        mask = torch.ones_like(tokens)
        mask[1, -padding:] = 0
        mask = mask.flip(1) if kind == "front" else mask
        made["attention_mask"] = mask
        if kind != "counted":
            made["labels"] = made["labels"].where(mask > 0, -100)
        if kind == "front":  # of a token that sees nothing implementations say different things
            made["labels"][1, padding] = -100
    elif kind == "packed":
        documents = [torch.arange(LENGTH - 5 - padding), torch.arange(5 + padding)]
        made["position_ids"] = torch.cat(documents).expand(BATCH, -1)
    elif kind == "shifted":
        made["position_ids"] = torch.arange(3, LENGTH + 3)[None]
    return made


def steps(count: int = 2) -> list[list[dict[str, Tensor]]]:
    """Steps of four micro-batches, the same ones in each half."""
    return [[features("plain", 10 * (step // (count // 2)) + m) for m in range(4)] for step in range(count)]


def without_key_biases(config: Any, name: str, tensor: Tensor) -> Tensor:
    """A weight or gradient without the attention key biases that positions do not enter: their true gradient is zero."""
    if config.model_type == "gpt2" and name.endswith("c_attn.bias"):
        q, _, v = tensor.chunk(3)
        return torch.cat([q, v])
    if config.model_type == "gpt_neox" and name.endswith("query_key_value.bias"):
        size = config.hidden_size // config.num_attention_heads
        rotated = int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))
        q, k, v = tensor.view(config.num_attention_heads, 3, size).unbind(1)
        return torch.cat([q, k[:, :rotated], v], dim=1)
    return tensor


SGD = {"type": "SGD", "params": {"lr": 0.03}}
Steps = Sequence[Sequence[dict[str, Tensor]]]


def train_alone(
    model: Any, steps: Steps, *, mean_over_step: bool = False, before_step: Callable[[int], Any] = lambda number: None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=SGD["params"]["lr"]),  # noqa: B008
) -> Trace:  # fmt: skip
    """Train this model by the loss of its own; a step is the mean over micro-batches, or over all labels of the step."""

    def part_of_loss(features: dict[str, Tensor], step: Sequence[Any]) -> Tensor:
        count = sum((one["labels"][:, 1:] != -100).sum() for (one,) in step)
        more = {"num_items_in_batch": count} if mean_over_step else {}
        return model(**features, use_cache=False, **more).loss / (1 if mean_over_step else len(step))

    each = [[(one,) for one in step] for step in steps]
    return train_module(model, optimizer(model.train().parameters()), each, part_of_loss, before_step=before_step)


def train_in_pipeline(
    model: Any, steps: Steps, block: dict[str, Any] | None, *, stages: int = 2, config: Any = None, **options: Any
) -> Trace:
    """The same steps in a pipeline of a copy of the model, under the names that it has there."""
    made = hf.pipeline(copy.deepcopy(model), num_stages=stages, **options)
    replicas = torch.distributed.get_world_size() // stages
    engine = build_engine(
        (), None, token_pipeline=block, micro_batches=len(steps[0]) // replicas, optimizer=SGD, config=config, made=made
    )
    trace = train(engine, [[hf.batch(one) for one in step] for step in steps])
    engine.destroy()
    return renamed(trace, made)


def renamed(trace: Trace, made: Any) -> Trace:
    """A trace of a pipeline under the names of the model's weights."""
    known = {
        own: name
        for entry, names in enumerate(names_of(made.source))
        for layer, name in names.items()
        for own in (f"{entry}.{layer}", *([f"tied_modules.embed.{layer}"] if entry == 0 else []))
    }

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        owns = {name: next(own for own in known if name.startswith(own)) for name in tensors}
        return {known[own] + name.removeprefix(own): tensors[name] for name, own in owns.items()}

    return Trace(trace.losses, [rename(one) for one in trace.gradients], trace.norms, rename(trace.weights))


def compared(got: Trace, expected: Trace, config: Any) -> float:
    """Largest relative difference of a loss, a gradient or a weight; this rank's part."""
    assert got.weights
    assert all(step.keys() == got.weights.keys() for step in got.gradients), "weights without a gradient"

    def known(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: without_key_biases(config, name, tensors[name]) for name in got.weights}

    pairs = [*zip(got.gradients, expected.gradients, strict=True), (got.weights, expected.weights)]
    losses = [abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True)]
    return max(*losses, *(worst(known(a), known(b)) for a, b in pairs))
