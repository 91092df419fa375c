"""Small BERTs and ViTs, their batches, and what they are compared with: megatron-core's BertModel, a ViT written out.

A reference is a function from inputs to outputs over parameters with the names of the pipeline's, so that gradients, weights
and what is frozen can be compared by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 32, 12, 16, 2, 4
IMAGE, PATCH, CLASSES = 8, 4, 3
MICRO_BATCH, MICRO_BATCHES = 2, 2


@dataclass(frozen=True)
class Encoder:
    """Which model to build; ``pool``: of a ViT, ``checkpoints``: ``activation_checkpoint_interval``."""

    kind: str  # "bert", "classifier" (BERT's) or "vit"
    rope: bool = False
    tied: bool = True
    pool: str = "class"
    checkpoints: int = 0
    dtype: torch.dtype = torch.float32


def config(model: Encoder, tensor: int = 1) -> Any:
    """megatron-core's configuration of 4 layers of 16."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        init_method_std=0.2,  # else attention is nearly uniform, and what it attends to hardly counts
        params_dtype=model.dtype if model.dtype == torch.float64 else torch.float32,
        use_cpu_initialization=True,
    )


def build(model: Encoder, *, tensor: int = 1, stages: int = 1, **arguments: Any) -> Any:
    """The model's pipeline, with biases that are not zero, so that none can be forgotten."""
    from ds_terapipe.megatron import bert_pipeline, vit_pipeline

    arguments = {"num_stages": stages, "activation_checkpoint_interval": model.checkpoints, **arguments}
    if model.kind == "vit":
        sizes = {"image": IMAGE, "patch": PATCH, "classes": CLASSES, "pool": model.pool}
        pipeline: Any = vit_pipeline(config(model, tensor), **sizes, **arguments)
    else:
        pipeline = bert_pipeline(
            config(model, tensor),
            vocab_size=VOCAB,
            seq_length=SEQ,
            head="pretraining" if model.kind == "bert" else "classification",
            classes=CLASSES,
            position_embedding="rope" if model.rope else "learned",
            tied=model.tied,
            **arguments,
        )
    for parameter in pipeline.parameters():
        if parameter.dim() == 1:
            whole = parameter.numel() * (tensor if getattr(parameter, "partition_dim", -1) == 0 else 1)
            shift = torch.linspace(-0.3, 0.3, whole, dtype=parameter.dtype).chunk(whole // parameter.numel())
            parameter.data += shift[torch.distributed.get_rank() % len(shift)]
    return pipeline


# -------------------------------------------------------------------------------------------------------------- batches


def batches(model: Encoder) -> Iterator[Any]:
    """Endless micro-batches of (inputs, labels); texts are padded, micro-batches have other numbers of masked tokens."""
    random = torch.Generator().manual_seed(3)
    while True:
        labels = torch.randint(0, CLASSES, (MICRO_BATCH,), generator=random)
        if model.kind == "vit":
            yield torch.randn(MICRO_BATCH, 3, IMAGE, IMAGE, generator=random), labels
            continue
        texts = _texts(random)
        if model.kind == "classifier":
            yield texts, labels
            continue
        masked = (torch.rand(MICRO_BATCH, SEQ, generator=random) < 0.3) & (texts[2] > 0)
        masked[:, 1] = True
        wanted = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ), generator=random).where(masked, -1)
        yield texts, (wanted, masked.long(), torch.randint(0, 2, (MICRO_BATCH,), generator=random))


def _texts(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, types and padding of two sentences each."""
    tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ), generator=random)
    ends = torch.randint(SEQ // 2, SEQ, (MICRO_BATCH, 1), generator=random)
    second = torch.randint(2, SEQ // 2, (MICRO_BATCH, 1), generator=random)
    places = torch.arange(SEQ).expand(MICRO_BATCH, SEQ)
    padding = (places < ends).long()
    return tokens * padding, (places >= second).long() * padding, padding


# ----------------------------------------------------------------------------------------------------------- references


@dataclass
class Reference:
    """A model in one process: its parameters by the pipeline's names, and the loss of a micro-batch."""

    parameters: Mapping[str, nn.Parameter]
    loss: Callable[[Any, Any], Tensor]


def reference(model: Encoder) -> Reference:
    """With the pipeline's weights."""
    pipeline = build(model)
    weights = {name: parameter.detach().clone() for name, parameter in pipeline.named_parameters()}
    if model.kind != "vit":
        return _core_bert(model, weights)
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    return Reference(parameters, lambda inputs, labels: F.cross_entropy(_vit(parameters, model, inputs), labels))


def _core_bert(model: Encoder, weights: Mapping[str, Tensor]) -> Reference:
    """megatron-core's own model; for classes its pooled first token with one more layer."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    core = BertModel(
        config(model),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope" if model.rope else "learned_absolute",
        share_embeddings_and_output_weights=model.tied,
    ).to(model.dtype)
    named = dict(core.named_parameters())
    parameters = {name: named.get(_in_core(name)) for name in weights}
    parameters |= {name: nn.Parameter(weights[name]) for name, found in parameters.items() if found is None}
    for name, weight in weights.items():
        parameters[name].data.copy_(weight)

    def loss(inputs: Any, labels: Any) -> Tensor:
        tokens, types, padding = inputs
        with _on_the_cpu():
            if model.kind == "classifier":
                return F.cross_entropy(_classes(core, parameters, inputs), labels)
            wanted, mask, order = labels
            if model.dtype == torch.float64:  # its loss rounds to fp32
                logits, order_logits = core(tokens, padding, types)
                each = F.cross_entropy(logits.transpose(1, 2), wanted.clamp(min=0), reduction="none")
            else:
                each, order_logits = core(tokens, padding, types, lm_labels=wanted)
            return (each * mask).sum() / mask.sum() + F.cross_entropy(order_logits, order)

    return Reference(parameters, loss)


def _classes(core: Any, parameters: Mapping[str, nn.Parameter], inputs: Any) -> Tensor:
    pooled = []
    handle = core.pooler.register_forward_hook(lambda module, args, output: pooled.append(output))
    core(inputs[0], inputs[2], inputs[1])
    handle.remove()
    head = LAYERS + 2
    return F.linear(pooled[0], parameters[f"{head}.classifier.weight"], parameters[f"{head}.classifier.bias"])


def _in_core(name: str) -> str:
    """The name in BertModel of what the pipeline calls so."""
    first, _, rest = name.removeprefix("tied_modules.").partition(".")
    if first in ("embedding", "0"):
        return f"embedding.{rest}"
    entry = int(first)
    if entry <= LAYERS:
        return f"encoder.layers.{entry - 1}.{rest}"
    kind, _, what = rest.partition(".")
    heads = {
        "dense": "lm_head.dense", "pooler": "pooler.dense", "order": "binary_head", "output_layer": "output_layer",
        "norm": "encoder.final_layernorm" if entry == LAYERS + 1 else "lm_head.layer_norm", "bias": "output_layer.bias",
    }  # fmt: skip
    return f"{heads.get(kind, kind)}.{what}".rstrip(".")


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """core's attention keeps a buffer on the current CUDA device, and a random state there for dropout, which is zero here."""
    tracker = SimpleNamespace(fork=nullcontext)
    with (
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: tracker),
    ):
        yield


def _vit(parameters: Mapping[str, nn.Parameter], model: Encoder, images: Tensor) -> Tensor:
    """A vision Transformer, written out: images to logits of classes [b, classes]."""

    def layer(x: Tensor, number: int) -> Tensor:
        of = {name.partition(".")[2]: p for name, p in parameters.items() if name.startswith(f"{number}.")}

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, of[f"{name}.weight"], of[f"{name}.bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (HIDDEN,), of[f"{name}.weight"], of[f"{name}.bias"])

        qkv = linear(norm(x, "input_layernorm"), "self_attention.linear_qkv")
        q, k, v = qkv.view(len(x), -1, HEADS, 3, HIDDEN // HEADS).unbind(3)  # [b, s, heads, d]
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div((HIDDEN // HEADS) ** 0.5).softmax(-1)
        x = x + linear(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2), "self_attention.linear_proj")
        return x + linear(F.gelu(linear(norm(x, "pre_mlp_layernorm"), "mlp.linear_fc1")), "mlp.linear_fc2")

    images = images.to(model.dtype)
    cut = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = F.linear(cut, parameters["0.project.weight"].flatten(1), parameters["0.project.bias"])
    if model.pool == "class":
        x = torch.cat([parameters["0.class_token"].expand(len(x), 1, -1), x], dim=1)
    x = x + parameters["0.position_embeddings.weight"]
    for number in range(1, LAYERS + 1):
        x = layer(x, number)
    last = LAYERS + 1
    x = F.layer_norm(x, (HIDDEN,), parameters[f"{last}.norm.weight"], parameters[f"{last}.norm.bias"])
    x = x[:, 0] if model.pool == "class" else x.mean(dim=1)
    return F.linear(x, parameters[f"{last + 1}.classifier.weight"], parameters[f"{last + 1}.classifier.bias"])
