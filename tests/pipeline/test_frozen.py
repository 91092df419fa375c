"""A stage without a trained weight: it trains nothing, goes forward only where all before it is frozen, and needs no optimiser
of its own. The frozen layers that a place begins with are such a stage too."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_terapipe import ConfigError
from ds_terapipe.pipeline.slicing import as_tuple
from ds_terapipe.schedule import Placement
from tests.pipeline.models import HIDDEN, Block, Embedding, Head, Plain, Tokens, masked_loss, steps_of, tied_gpt, trains
from tests.pipeline.test_interception import Lora
from tests.pipeline.training import ADAMW, build_engine, difference, module_of, raised, train, train_plain
from tests.spawn import launched

STEPS, SLICES, MICRO_BATCHES = 3, 4, 2
ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16_ZERO_1 = {**ZERO_1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": ADAMW, "clip": 0.05},
    "bf16": {"optimizer": ADAMW, "config": {"bf16": {"enabled": True}}},
    "checkpointed": {"config": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}},
    "per slice": {"keys": {"weight_gradients": "slice"}},
}


class LoraBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.qkv, self.up = Lora(HIDDEN, 3 * HIDDEN, 3), Lora(HIDDEN, 2 * HIDDEN, 3)


def frozen(kind: type[nn.Module]) -> LayerSpec:
    return LayerSpec(trains(kind, lambda parameter: False))


FROZEN_TOKENS: Any = trains(Tokens, lambda parameter: False)
F_EMBEDDING, F_BLOCK, F_HEAD = map(frozen, (Embedding, Block, Head))
EMBEDDING, BLOCK, HEAD, NOTHING, LORA = map(LayerSpec, (Embedding, Block, Head, nn.Identity, LoraBlock))
THREE = Placement.of([0, 0, 1], [0, 1, 3, 6], 1)
FIRST, SECOND = Placement.plain(2, [0, 3, 6], 1), Placement.of([0, 1, 1], [0, 3, 4, 6], 2)
# layers, where they are, configurations (rows freeze two layers in the others)
MODELS: dict[str, tuple[list[Any], Placement, tuple[str, ...]]] = {
    "LoRA": ([F_EMBEDDING, *[LORA] * 4, F_HEAD], THREE, ("AdamW",)),
    "tied": (tied_gpt(2, FROZEN_TOKENS), THREE, ("bf16",)),
    "first": ([F_EMBEDDING, *[F_BLOCK] * 2, *[BLOCK] * 2, HEAD], FIRST, ("checkpointed",)),
    "no weights": ([EMBEDDING, BLOCK, BLOCK, *[NOTHING] * 3], Placement.plain(2, [0, 3, 6]), ("AdamW", "bf16")),
    "in the second": ([F_EMBEDDING, *[F_BLOCK] * 3, BLOCK, HEAD], SECOND, ("per slice",)),
}
CASES = [(model, config) for model, (*_, configs) in MODELS.items() for config in configs]


def hidden_loss(hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, mask = labels
    return ((hidden.float().mean(-1) - targets / 53).square() * mask).sum() / mask.sum()


def loss_of(model: str) -> Callable[..., Tensor]:
    return hidden_loss if model == "no weights" else masked_loss


def data() -> list[Any]:
    return steps_of(STEPS, MICRO_BATCHES)


def engine_of(layers: list[Any], loss: Any, **options: Any) -> Any:
    keys = {"slices": SLICES, **options.pop("keys", {})}
    return build_engine(layers, loss, token_pipeline=keys, micro_batches=MICRO_BATCHES, **options)


def resumed(engine: Any, folder: str) -> bool:
    """Whether a checkpoint brings weights back that are lost."""
    engine.save_checkpoint(folder)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(folder)
    return all(map(torch.equal, before, engine.module.parameters()))


def one(model: str, config: str, folder: str) -> dict[str, Any]:
    engine, steps = engine_of(MODELS[model][0], loss_of(model), **CONFIGS[config]), data()
    passes, last = list[bool](), list[int]()  # in train mode of frozen layers: whether they made a graph

    def passed(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if layer.training:
            passes.append(any(tensor.requires_grad for tensor in as_tuple(outputs)))

    def stepped() -> None:
        last[:] = [len(passes), any(passes)]
        passes.clear()

    for layer in (each for s in engine._runtime.stages.values() if not s.trains for each in s.layers.modules):
        layer.register_forward_hook(passed)
    trace = train(engine, steps, after_step=stepped)
    found = {"trace": trace, "placement": engine.placement, "units": engine.units_run, "passes": last}
    found["evaluated"] = engine.eval_batch(iter(steps[0])).item()
    # DeepSpeed 0.19.8 can't load one of bf16 without ZeRO
    found["resumed"] = config == "bf16" or resumed(engine, f"{folder}/{model}/{config}")
    engine.destroy()
    trace.gradients.clear()
    return found


def refused() -> tuple[str, float, str]:
    """The error where nothing is trained, the loss of an evaluation, and the error of a weight that only one stage trains."""
    engine, step = engine_of([F_EMBEDDING, *[F_BLOCK] * 3], hidden_loss), data()[0]
    nothing = raised(lambda: engine.train_batch(iter(step)))
    loss = float(engine.eval_batch(iter(step)))
    engine.destroy()
    tokens: Any = trains(Tokens, lambda parameter: torch.distributed.get_rank() > 0)
    return nothing, loss, raised(lambda: engine_of(tied_gpt(2, tokens), masked_loss))


def switched(model: str, config: dict[str, Any], value: bool) -> str:
    """The error where ``requires_grad`` is set by hand; training goes on where it is set back."""
    engine = engine_of(MODELS[model][0], loss_of(model), config=config, optimizer=ADAMW)
    ups, steps = [p for name, p in engine.module.named_parameters() if name.startswith("1.up.")], data()
    first, before = engine.train_batch(iter(steps[0])), [up.detach().clone() for up in ups]
    nn.ParameterList(ups).requires_grad_(value)
    try:
        engine.train_batch(iter(steps[1]))
        said = "stays" if all(map(torch.equal, before, ups)) else "moves"
    except ConfigError as error:
        said = str(error)
        nn.ParameterList(ups).requires_grad_(not value)
        assert engine.train_batch(iter(steps[0])) != first
    engine.destroy()
    return said


def labelled(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    found = list(parameters)
    for parameter in found:
        parameter.is_matrix = parameter.dim() > 1
    return found


def by_shape(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    kinds: tuple[list[nn.Parameter], ...] = ([], [])
    for parameter in parameters:
        kinds[parameter.is_matrix].append(parameter)
    groups = [{"params": kinds[1], "lr": 1e-3}, {"params": kinds[0], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1)


MATRICES = LayerSpec(trains(Block, lambda parameter: parameter.dim() > 1))
UPPER = {  # of the second stage one group is frozen, or both
    "vectors": ([EMBEDDING, BLOCK, BLOCK, MATRICES, MATRICES, NOTHING], hidden_loss),
    "all": ([EMBEDDING, BLOCK, BLOCK, F_BLOCK, F_BLOCK, F_HEAD], masked_loss),
}
# what is frozen, the configuration, and whether the optimizer gets all parameters, or is a function of those that train
GROUPS = [("vectors", ZERO_1, True), ("all", BF16_ZERO_1, True), ("all", BF16_ZERO_1, False)]


def in_groups(which: str, config: dict[str, Any], given: bool, folder: str) -> tuple[Any, ...]:
    """Losses, the groups' settings, whether a checkpoint brings the weights back."""
    model = module_of(*UPPER[which])
    parameters = labelled(model.parameters())
    engine = engine_of([], None, made=model, optimizer=by_shape(parameters) if given else by_shape, config=config)
    losses = train(engine, data()).losses
    groups = [(group["lr"], group["weight_decay"]) for group in engine.basic_optimizer.param_groups]
    found = losses, groups, resumed(engine, folder)
    engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[Any, Any] = {case: one(*case, folder) for case in CASES}
    found["groups"] = [in_groups(*group, f"{folder}/groups {number}") for number, group in enumerate(GROUPS)]
    freezes = {"elastic_pipeline": {"freeze": {"policy": "schedule", "frozen_layers": [[1, 1]]}}}
    by_hand = ("no weights", BF16_ZERO_1, False), ("first", {}, True), ("first", freezes, True), ("no weights", {}, False)
    found["switched"] = [switched(*case) for case in by_hand]
    return {**found, "refused": refused()}


ranks = launched(worker, 2, folder=True, timeout=240)


def plain(model: str, config: str) -> tuple[Any, float]:
    """The same in one process, in fp32 from weights that bf16 can hold where it rounds; the first batch's loss at the end."""
    specs, loss, steps, options = MODELS[model][0], loss_of(model), data(), CONFIGS[config]
    adam, sgd = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1), partial(torch.optim.SGD, lr=0.2)
    start = torch.bfloat16 if config == "bf16" else torch.float32
    trace = train_plain(specs, loss, steps, adam if "optimizer" in options else sgd, clip=options.get("clip", 0.0), start=start)
    layers = Plain(specs)
    layers.load_state_dict(trace.weights)
    with torch.no_grad():
        losses = [loss(layers(inputs), labels).item() for inputs, labels in steps[0]]
    return trace, sum(losses) / MICRO_BATCHES


@pytest.mark.parametrize(("model", "config"), CASES)
def test_a_stage_that_trains_nothing_trains_with_the_others(ranks: list[Any], model: str, config: str) -> None:
    wanted, evaluated = plain(model, config)
    for number, rank in enumerate(ranks):
        found, limit, got = rank[model, config], 2e-2 if config == "bf16" else 1e-5, rank[model, config]["trace"]
        assert got.losses == pytest.approx(wanted.losses, rel=limit)
        if "clip" in CONFIGS[config]:
            assert got.norms == pytest.approx(wanted.norms, rel=1e-4)
        if config != "bf16":
            assert all(difference(weight, wanted.weights[name]) <= limit for name, weight in got.weights.items())
        assert found["resumed"] and found["evaluated"] == pytest.approx(evaluated, rel=limit)
        check_order(found, number, MODELS[model][1])


def check_order(found: dict[str, Any], place: int, where: Placement) -> None:
    """Frozen layers run once for each unit and make no graph; the others go backward."""
    own = where.stages_on(place)
    backward = sum(where.goes_backward(stage) for stage in own)
    units = found["units"][0] // len(own)
    assert found["placement"] == where and found["units"] == (units * len(own), units * backward) and units > 0
    in_prefix = sum(stop - first for at, first, stop in where.stages[: where.forward_only] if at == place)
    assert found["passes"] == [units * in_prefix, False]


def test_what_cannot_train_is_said(ranks: list[dict[Any, Any]]) -> None:
    text = "model: got 1.up.weight.requires_grad {} after initialize, must be set before it (now it has no effect), use"
    for rank in ranks:
        said, loss, apart = rank["refused"]
        assert said.startswith("ConfigError: model: got no parameter that is trained, must have one on some stage, use ")
        assert loss == ranks[0]["refused"][1] > 0, "it can be evaluated"
        assert apart == (
            'ConfigError: model: got the tied layer "tokens" trained on stage 1 and not on stage 0, must be the same on all '
            "stages that share it, use requires_grad_() alike"
        )
        off, *on, in_fp32 = rank["switched"]
        assert off.startswith(text.format(False)) and in_fp32 == "stays" and all(t.startswith(text.format(True)) for t in on)


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_a_stage_that_trains_nothing_of_a_group_has_it_all_the_same(ranks: list[dict[Any, Any]], number: int) -> None:
    which, config, given = GROUPS[number]
    wanted = train_plain(*UPPER[which], data(), lambda parameters: by_shape(labelled(parameters))).losses
    for rank in ranks:
        losses, groups, loaded = rank["groups"][number]
        assert losses == pytest.approx(wanted, rel=1e-2 if "bf16" in config else 1e-5) and loaded
        if given or "bf16" not in config:  # else the second stage has one group, which DeepSpeed's BF16_Optimizer takes
            assert groups == [(1e-3, 0.1), (2e-3, 0.0)]
