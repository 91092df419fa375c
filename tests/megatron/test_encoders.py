"""BERT and ViT pipelines compute what megatron-core's BertModel and a plain ViT do, and train alike in every engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.nn import functional as F

from tests.megatron.common import exact_loss, relative, whole_tensors
from tests.pipeline.training import build_engine, mine, raised
from tests.spawn import launched

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 32, 12, 16, 2, 4
IMAGE, PATCH, CLASSES = 8, 4, 3
MICRO_BATCH, MICRO_BATCHES, STEPS = 2, 2, 6
EXACT, LIMITS = torch.float64, {torch.float32: 1e-5, torch.float64: 1e-10}


class Encoder(NamedTuple):
    """Which model to build; ``pool``: of a ViT, ``checkpoints``: ``activation_checkpoint_interval``."""

    kind: str  # "bert", "classifier" (BERT's) or "vit"
    rope: bool = False
    tied: bool = True
    pool: str = "class"
    checkpoints: int = 0
    dtype: torch.dtype = EXACT


def config(model: Encoder, tensor: int = 1) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tensor, params_dtype=model.dtype, use_cpu_initialization=True,
        init_method_std=0.2,  # else attention is nearly uniform, and what it attends to hardly counts
    )  # fmt: skip


def build(model: Encoder, *, tensor: int = 1, stages: int = 1, **arguments: Any) -> Any:
    """The model's pipeline, with biases that are not zero, so that none can be forgotten."""
    from ds_terapipe.megatron import bert_pipeline, vit_pipeline

    arguments = {"num_stages": stages, "activation_checkpoint_interval": model.checkpoints, **arguments}
    if model.kind == "vit":
        sizes = {"image": IMAGE, "patch": PATCH, "classes": CLASSES, "pool": model.pool}
        pipeline: Any = vit_pipeline(config(model, tensor), **sizes, **arguments)
    else:
        head = "pretraining" if model.kind == "bert" else "classification"
        pipeline = bert_pipeline(
            config(model, tensor), vocab_size=VOCAB, seq_length=SEQ, head=head, classes=CLASSES, tied=model.tied,
            position_embedding="rope" if model.rope else "learned", **arguments,
        )  # fmt: skip
    for parameter in (one for one in pipeline.parameters() if one.dim() == 1):
        whole = parameter.numel() * (tensor if getattr(parameter, "partition_dim", -1) == 0 else 1)
        shift = torch.linspace(-0.3, 0.3, whole, dtype=parameter.dtype).chunk(whole // parameter.numel())
        parameter.data += shift[dist.get_rank() % len(shift)]
    return pipeline


def batches(model: Encoder) -> Iterator[Any]:
    """Endless micro-batches of (inputs, labels); texts of two sentences are padded, and have other numbers of masked tokens."""
    random = torch.Generator().manual_seed(3)
    while True:
        labels = torch.randint(0, CLASSES, (MICRO_BATCH,), generator=random)
        if model.kind == "vit":
            yield torch.randn(MICRO_BATCH, 3, IMAGE, IMAGE, generator=random), labels
            continue
        tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ), generator=random)
        ends = torch.randint(SEQ // 2, SEQ, (MICRO_BATCH, 1), generator=random)
        second = torch.randint(2, SEQ // 2, (MICRO_BATCH, 1), generator=random)
        places = torch.arange(SEQ).expand(MICRO_BATCH, SEQ)
        padding = (places < ends).long()
        texts = tokens * padding, (places >= second).long() * padding, padding
        if model.kind == "classifier":
            yield texts, labels
            continue
        masked = (torch.rand(MICRO_BATCH, SEQ, generator=random) < 0.3) & (padding > 0)
        masked[:, 1] = True
        wanted = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ), generator=random).where(masked, -1)
        yield texts, (wanted, masked.long(), torch.randint(0, 2, (MICRO_BATCH,), generator=random))


Parameters, Loss = Mapping[str, nn.Parameter], Callable[[Any, Any], Tensor]


def core_bert(model: Encoder, weights: Mapping[str, Tensor]) -> tuple[Parameters, Loss]:
    """megatron-core's own model, with one more layer for classes of its pooled first token."""
    from megatron.core import tensor_parallel
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    # its attention keeps a buffer on the current CUDA device, and a random state there for dropout, which is zero here
    torch.cuda.current_device = lambda: "cpu"
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    core = BertModel(
        config(model), num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, vocab_size=VOCAB,
        max_sequence_length=SEQ, position_embedding_type="rope" if model.rope else "learned_absolute",
        share_embeddings_and_output_weights=model.tied,
    ).to(EXACT)  # fmt: skip
    named, pooled = dict(core.named_parameters()), list[Tensor]()
    core.pooler.register_forward_hook(lambda module, args, output: pooled.append(output))
    parameters = {name: named.get(_in_core(name), nn.Parameter(weight)) for name, weight in weights.items()}
    for name, weight in weights.items():
        parameters[name].data.copy_(weight)

    def loss(inputs: Any, labels: Any) -> Tensor:
        tokens, types, padding = inputs
        logits, order_logits = core(tokens, padding, types)
        if model.kind == "classifier":
            weight, bias = (parameters[f"{LAYERS + 2}.classifier.{name}"] for name in ("weight", "bias"))
            return F.cross_entropy(F.linear(pooled[-1], weight, bias), labels)
        wanted, mask, order = labels
        each = F.cross_entropy(logits.transpose(1, 2), wanted.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum() + F.cross_entropy(order_logits, order)

    return parameters, loss


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


def vit(parameters: Parameters, pool: str, images: Tensor) -> Tensor:
    """A vision Transformer, written out: images to logits of classes [b, classes]."""

    def layer(x: Tensor, number: int) -> Tensor:
        of = {name.partition(".")[2]: p for name, p in parameters.items() if name.startswith(f"{number}.")}

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, of[f"{name}.weight"], of[f"{name}.bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (HIDDEN,), of[f"{name}.weight"], of[f"{name}.bias"])

        qkv = linear(norm(x, "input_layernorm"), "self_attention.linear_qkv")
        q, k, v = qkv.view(len(x), -1, HEADS, 3, HIDDEN // HEADS).unbind(3)  # [b, s, heads, d]
        attended = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
        x = x + linear(attended.flatten(2), "self_attention.linear_proj")
        return x + linear(F.gelu(linear(norm(x, "pre_mlp_layernorm"), "mlp.linear_fc1")), "mlp.linear_fc2")

    cut = images.to(EXACT).unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = F.linear(cut, parameters["0.project.weight"].flatten(1), parameters["0.project.bias"])
    if pool == "class":
        x = torch.cat([parameters["0.class_token"].expand(len(x), 1, -1), x], dim=1)
    x = x + parameters["0.position_embeddings.weight"]
    for number in range(1, LAYERS + 1):
        x = layer(x, number)
    last = LAYERS + 1
    x = F.layer_norm(x, (HIDDEN,), parameters[f"{last}.norm.weight"], parameters[f"{last}.norm.bias"])
    x = x[:, 0] if pool == "class" else x.mean(dim=1)
    return F.linear(x, parameters[f"{last + 1}.classifier.weight"], parameters[f"{last + 1}.classifier.bias"])


def reference(model: Encoder) -> tuple[Parameters, Loss]:
    """Weights in fp64, by their names in the pipeline, and the loss of a micro-batch that they make."""
    weights = {name: parameter.detach().to(EXACT) for name, parameter in build(model).named_parameters()}
    if model.kind != "vit":
        return core_bert(model, weights)
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    return parameters, lambda inputs, labels: F.cross_entropy(vit(parameters, model.pool, inputs), labels)


def without_key_bias(name: str, value: np.ndarray) -> np.ndarray:
    """Attention key biases have a true gradient of zero; what is there, and what AdamW makes of it, is rounding noise."""
    return value.reshape(HEADS, 3, -1)[:, [0, 2]] if name.endswith("linear_qkv.bias") else value


KEYS: dict[str, dict[str, Any]] = {
    "PipelineEngine": {},
    "TokenPipelineEngine": {"token_pipeline": {"slices": 1}},
    "ElasticPipelineEngine": {
        "elastic_pipeline": {"freeze": {"policy": "schedule", "frozen_layers": [[1, 1], [3, 3]]}, "resize": {"policy": [[3, 1]]}}
    },
}
THEIRS, OURS, ELASTIC = KEYS


class Training(NamedTuple):
    """A training of six steps on two stages or two tensor-parallel ranks."""

    model: Encoder
    engine: str
    tensor: int = 1

    def frozen(self, step: int) -> tuple[str, ...]:
        """Beginnings of the names of parameters that this step does not train."""
        entries = 0 if self.engine != ELASTIC or step < 1 else 1 if step < 3 else 3
        tied = self.model.kind == "bert" and self.model.tied
        return tuple("tied_modules." if tied and entry == 0 else f"{entry}." for entry in range(entries))


class Result(NamedTuple):
    """Loss of each step, gradients of the first and weights at the end by name, and frozen entries, stages and replicas."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    shapes: list[tuple[int, int, int]] = []


BERT, ROTARY = Encoder("bert"), Encoder("bert", rope=True, tied=False, checkpoints=1)
CLASSIFIER, MEAN = Encoder("classifier", checkpoints=1), Encoder("vit", pool="mean")
TRAININGS = {
    "BERT": Training(BERT, OURS), "BERT, classes": Training(CLASSIFIER, OURS),
    "BERT, rotary, untied": Training(ROTARY, THEIRS), "ViT": Training(MEAN, OURS),
    "BERT, frozen and reshaped": Training(Encoder("bert", dtype=torch.float32), ELASTIC),
    "ViT, frozen and reshaped": Training(Encoder("vit", dtype=torch.float32), ELASTIC),
    # whatever needs another layout of processes comes last
    "BERT, TP2": Training(BERT, OURS, tensor=2), "ViT, TP2": Training(Encoder("vit"), THEIRS, tensor=2),
}  # fmt: skip


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """eps above the rounding noise of fp32 gradients, which AdamW would make whole steps of."""
    return torch.optim.AdamW(list(parameters), lr=3e-3, eps=1e-4, weight_decay=0.1)


def data_of(training: Training) -> list[list[Any]]:
    endless = batches(training.model)
    return [[next(endless) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)]


def train_alone(training: Training) -> Result:
    """The reference in one process; frozen parameters lose their gradients before the step."""
    parameters, loss = reference(training.model)
    optimizer, losses, gradients = optimizer_of(parameters.values()), list[float](), dict[str, np.ndarray]()
    for number, step in enumerate(data_of(training)):
        optimizer.zero_grad()
        mean = sum(loss(*micro_batch) for micro_batch in step) / len(step)
        mean.backward()
        losses.append(mean.item())
        gradients = gradients or {name: parameter.grad.numpy().copy() for name, parameter in parameters.items()}
        frozen = training.frozen(number)
        for parameter in (p for name, p in parameters.items() if name.startswith(frozen or "none")):
            parameter.grad = None
        optimizer.step()
    return Result(losses, gradients, {name: parameter.detach().numpy() for name, parameter in parameters.items()})


def engine_of(training: Training, **settings: Any) -> Any:
    stages, dtype = min(2, dist.get_world_size()) // training.tensor, training.model.dtype
    keys = {"pipeline": {"use_reentrant": False}, **KEYS[training.engine], **settings}
    blocks, pipeline = keys.pop("token_pipeline", None), build(training.model, tensor=training.tensor, stages=stages)
    engine = build_engine((), None, made=pipeline, token_pipeline=blocks, optimizer=optimizer_of, config=keys, dtype=dtype)
    assert type(engine).__name__ == training.engine
    return engine


def train(training: Training) -> Result:
    engine = engine_of(training)
    losses, shapes, gradients = [], [], {}

    def keep(*args: Any) -> None:
        if not gradients:
            gradients.update(whole_tensors(engine.module, lambda p: p.grad))

    engine.basic_optimizer.register_step_pre_hook(keep)
    # of the shape at the start: what a step has is shared out again where the shape changes
    for step in [mine(engine, each) for each in data_of(training)]:
        losses.append(exact_loss(engine, float(engine.train_batch(iter(step)))))
        shapes.append((getattr(engine, "frozen_layers", 0), engine.num_stages, engine.dp_world_size))
    weights = whole_tensors(engine.module)
    engine.destroy()
    return Result(losses, gradients, weights, shapes)


def alone(rank: int, world: int) -> Any:
    refused = raised(lambda: engine_of(Training(BERT, OURS), token_pipeline={"slices": "auto"}))
    return {name: train_alone(training) for name, training in TRAININGS.items()}, refused


def together(rank: int, world: int) -> dict[str, Result]:
    from ds_terapipe.megatron import destroy_parallel

    results, tensor = {}, 1
    for name, training in TRAININGS.items():
        if training.tensor != tensor:
            destroy_parallel()
        tensor, results[name] = training.tensor, train(training)
    return results if rank == 0 else {}


one, two = launched(alone, 1, timeout=240), launched(together, 2, timeout=240)


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_the_reference_in_one_process(one: Any, two: Any, name: str) -> None:
    training, wanted, got = TRAININGS[name], one[0][0][name], two[0][name]
    limit, stages = LIMITS[training.model.dtype], 2 // training.tensor
    assert got.losses == pytest.approx(wanted.losses, rel=limit) and len(set(got.losses)) == STEPS
    moves = [(0, 2, 1), (1, 2, 1), (1, 2, 1), (3, 1, 2), (3, 1, 2), (3, 1, 2)]
    assert got.shapes == (moves if training.engine == ELASTIC else [(0, stages, 1)] * STEPS)
    for what in ("gradients", "weights"):
        values, others = getattr(wanted, what), getattr(got, what)
        assert others.keys() == values.keys()
        for key, value in values.items():
            assert value.any(), f"{what} of {key} are zero"
            assert relative(*(without_key_bias(key, x) for x in (others[key], value))) <= limit, f"{what} of {key}"


def test_samples_are_not_cut(one: Any) -> None:
    assert one[0][1] == (
        "ConfigError: token_pipeline: layer 1.self_attention.core_attention (BidirectionalAttention) is attention that is not "
        'causal, must be causal where sequences are cut beside token_pipeline, use "slices": 1'
    )
