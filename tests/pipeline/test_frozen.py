"""A stage without a trained weight: it trains nothing, goes forward only where all before it is frozen, and needs no optimiser
of its own. The frozen layers that a place begins with are such a stage too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from ds_terapipe import ConfigError, FusedLamb
from ds_terapipe.pipeline.slicing import as_tuple
from ds_terapipe.schedule import Placement
from tests.full import is_full, marked
from tests.mutants.claims import holds
from tests.pipeline.models import (
    HIDDEN,
    SEED,
    Block,
    Embedding,
    FrozenBlock,
    FrozenEmbedding,
    Head,
    Plain,
    Tokens,
    masked_loss,
    steps_of,
    tied_gpt,
)
from tests.pipeline.training import ADAMW, SGD, build_engine, difference, train, train_plain
from tests.spawn import run_ranks

STEPS, AUTO_STEPS, SLICES, MICRO_BATCHES = 3, 7, 4, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": SGD},
    "AdamW": {"optimizer": ADAMW, "clip": 0.05},
    "FusedLamb": {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-2}}},
    "ZeRO-1": {"optimizer": ADAMW, "config": {"zero_optimization": {"stage": 1}}},
    "bf16": {"optimizer": ADAMW, "config": {"bf16": {"enabled": True}}},
    "fp64": {"optimizer": SGD, "dtype": torch.float64},
    "checkpointed": {
        "optimizer": SGD,
        "config": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
    },
    "checkpointed in twos": {
        "optimizer": SGD,
        "config": {"pipeline": {"activation_checkpoint_interval": 2, "use_reentrant": False}},
    },
    "per slice": {"optimizer": SGD, "weight_gradients": "slice"},
    "uncut": {"optimizer": SGD, "slices": 1},
    "terapipe": {"optimizer": SGD, "schedule": "terapipe"},
    "auto": {"optimizer": SGD, "slices": "auto"},
}


class Nothing(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Lora(nn.Linear):
    """A frozen linear layer beside a trained product of low rank."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.requires_grad_(False)
        self.lower, self.raised = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.raised(self.lower(x))


class LoraBlock(FrozenBlock):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up = Lora(HIDDEN, 3 * HIDDEN, bias=False), Lora(HIDDEN, 2 * HIDDEN)


class FrozenHead(Head):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def biases_only(layer: nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


class BiasBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        biases_only(self)


class BiasHead(Head):
    def __init__(self) -> None:
        super().__init__()
        biases_only(self)


class FrozenTokens(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


MODELS: dict[str, list[Any]] = {
    "LoRA": [FrozenEmbedding, LoraBlock, LoraBlock, LoraBlock, LoraBlock, FrozenHead],
    "biases": [FrozenEmbedding, BiasBlock, BiasBlock, BiasBlock, BiasBlock, BiasHead],
    "middle": [Embedding, Block, FrozenBlock, FrozenBlock, Block, Head],
    "tied": tied_gpt(2, FrozenTokens),
    "first": [FrozenEmbedding, FrozenBlock, FrozenBlock, Block, Block, Head],
    "no weights": [Embedding, Block, Block, Nothing, Nothing, Nothing],
    "in the first": [FrozenEmbedding, FrozenBlock, Block, Block, Block, Head],
    "in the second": [FrozenEmbedding, FrozenBlock, FrozenBlock, FrozenBlock, Block, Head],
}
PLACEMENTS = {
    "LoRA": Placement.of([0, 0, 1], [0, 1, 3, 6], 1),
    "biases": Placement.of([0, 0, 1], [0, 1, 3, 6], 1),
    "middle": Placement.plain(2, [0, 3, 6]),
    "tied": Placement.of([0, 0, 1], [0, 1, 3, 6], 1),
    "first": Placement.plain(2, [0, 3, 6], 1),
    "no weights": Placement.plain(2, [0, 3, 6]),
    "in the first": Placement.of([0, 0, 1], [0, 2, 3, 6], 1),
    "in the second": Placement.of([0, 1, 1], [0, 3, 4, 6], 2),
}


def specs_of(model: str) -> list[Any]:
    return [kind if isinstance(kind, LayerSpec) else LayerSpec(kind) for kind in MODELS[model]]


def hidden_loss(hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, mask = labels
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    return ((wide.mean(-1) - targets / 53).square() * mask).sum() / mask.sum()


def one(model: str, config: str, folder: str) -> dict[str, Any]:
    specs = specs_of(model)
    options = dict(CONFIGS[config])
    keys = {"slices": options.pop("slices", SLICES)}
    keys |= {name: options.pop(name) for name in ("schedule", "weight_gradients") if name in options}
    loss = hidden_loss if model == "no weights" else masked_loss
    engine = build_engine(specs, loss, token_pipeline=keys, micro_batches=MICRO_BATCHES, **options)
    steps = steps_of(STEPS if keys["slices"] != "auto" else AUTO_STEPS, MICRO_BATCHES)
    with forward_passes(engine) as passes:
        trace = train(engine, steps, after_step=passes.step)
    row = engine._watchdog._grid[engine.stage_id]
    found = {
        "losses": trace.losses,
        "weights": trace.weights,
        "norms": trace.norms,
        "ops": {(action.stage, action.op.name) for action in row},
        "units": engine.units_run,
        "placement": engine.placement,
        "passes": passes.counted,
        "kept": passes.kept or passes.left_over,
    }
    evaluated = engine.eval_batch(iter(steps[0])).item()
    found["evaluated"] = engine.total_loss.item() / MICRO_BATCHES if engine.is_last_stage() else evaluated
    engine.save_checkpoint(f"{folder}/{model}/{config}")
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    if config == "bf16":  # DeepSpeed 0.19.8 can't load one without ZeRO
        engine.destroy()
        return {**found, "resumed": 0.0}
    engine.load_checkpoint(f"{folder}/{model}/{config}")
    found["resumed"] = max(
        (float((p - before[n]).abs().max()) for n, p in engine.module.named_parameters()), default=0.0
    )
    engine.destroy()
    return found


LEARNING = {  # stages with matrices that are trained
    "LoRA": {1, 2},
    "biases": set(),
    "middle": {0, 1},
    "tied": {1, 2},
    "first": {1},
    "no weights": {0},
    "in the first": {1, 2},
    "in the second": {2},
}


class Passes:
    """How often frozen layers ran in train mode in the last step, if they made a graph, and what steps left."""

    def __init__(self) -> None:
        self.counted = self._now = self.left_over = 0
        self.kept = False

    def ran(self, layer: nn.Module, outputs: Any) -> None:
        self._now += layer.training
        self.kept = self.kept or any(tensor.requires_grad for tensor in as_tuple(outputs))

    def step(self) -> None:
        self.counted, self._now = self._now, 0


@contextmanager
def forward_passes(engine: Any) -> Iterator[Passes]:
    passes = Passes()
    stages = [stage for stage in engine._assembly.stages.values() if not stage.trains]
    frozen = [layer for stage in stages for layer in stage.layers.modules]
    hooks = [layer.register_forward_hook(lambda layer, inputs, outputs: passes.ran(layer, outputs)) for layer in frozen]
    assembly = engine._assembly
    end = assembly.end

    def ended() -> None:
        passes.left_over += assembly.left_over
        end()

    assembly.end = ended
    yield passes
    del assembly.end
    for hook in hooks:
        hook.remove()


def runs() -> list[tuple[str, str]]:
    """A reentrant checkpoint of an embedding that is trained is refused."""
    refused = {("no weights", "checkpointed"), ("middle", "checkpointed")}
    others = {"SGD", "AdamW", "ZeRO-1", "fp64", "checkpointed", "checkpointed in twos", "per slice"}
    chosen = {"LoRA": others, "biases": others, "middle": others, "tied": {"SGD", "fp64", "bf16"}}
    return [
        (model, config)
        for model in MODELS
        for config in CONFIGS
        if (model, config) not in refused and config in chosen.get(model, CONFIGS)
    ]


def half(runs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Every second of them: each model and each configuration several times."""
    models, configs = list(MODELS), list(CONFIGS)
    return [(model, config) for model, config in runs if (models.index(model) + configs.index(config)) % 2]


def nothing_trained() -> tuple[str, float]:
    """What training says, and the loss of an evaluation."""
    specs = [LayerSpec(kind) for kind in (FrozenEmbedding, FrozenBlock, FrozenBlock, FrozenBlock)]
    engine = build_engine(specs, hidden_loss, token_pipeline={"slices": SLICES})
    data = steps_of(1, MICRO_BATCHES)[0]
    with pytest.raises(ConfigError) as raised:
        engine.train_batch(iter(data))
    loss = float(engine.eval_batch(iter(data)))
    engine.destroy()
    return str(raised.value), loss


class FrozenOnTheFirst(Tokens):
    """Of several that share a weight only the first stage's is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(torch.distributed.get_rank() > 0)


def tied_apart() -> str:
    """What is said of a weight that one stage trains and another does not."""
    specs = tied_gpt(2)
    for spec in (specs[0], specs[-1]):
        spec.typename = FrozenOnTheFirst
    with pytest.raises(ConfigError) as raised:
        build_engine(specs, masked_loss, token_pipeline={"slices": SLICES})
    return str(raised.value)


class Matrices(Block):
    """A block of whose parameters the vectors are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() > 1)


def labelled(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """As users mark what an optimizer has to know."""
    found = list(parameters)
    for parameter in found:
        parameter.is_matrix = parameter.dim() > 1
    return found


def by_shape(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay for matrices alone."""
    kinds: tuple[list[nn.Parameter], ...] = ([], [])
    for parameter in parameters:
        kinds[parameter.is_matrix].append(parameter)
    groups = [{"params": kinds[1], "lr": 1e-3}, {"params": kinds[0], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1)


ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16_ZERO_1 = {**ZERO_1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
UPPER = {  # of the second stage one group is frozen, or both
    "vectors": [Embedding, Block, Block, Matrices, Matrices, Nothing],
    "all": [Embedding, Block, Block, FrozenBlock, FrozenBlock, FrozenHead],
}
# what is frozen, the configuration, and whether the optimizer gets all parameters, or is a function of those that train
GROUPS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "a group, all given": ("vectors", ZERO_1, True),
    "a group, a function": ("vectors", ZERO_1, False),
    "both, all given": ("all", ZERO_1, True),
    "both, a function": ("all", ZERO_1, False),
    "both, bf16": ("all", BF16_ZERO_1, True),
    "both, bf16, a function": ("all", BF16_ZERO_1, False),
}


def in_groups(name: str, folder: str) -> dict[str, Any]:
    frozen, config, given = GROUPS[name]
    options = {"partition_method": "uniform", "seed_layers": True, "base_seed": SEED, "dynamic_shape": True}
    loss = hidden_loss if frozen == "vectors" else masked_loss
    model = PipelineModule([LayerSpec(kind) for kind in UPPER[frozen]], num_stages=2, loss_fn=loss, **options)
    parameters = labelled(model.parameters())
    optimizer = by_shape(parameters) if given else by_shape
    engine = build_engine((), loss, token_pipeline={"slices": SLICES}, made=model, optimizer=optimizer, config=config)
    found: dict[str, Any] = {"losses": train(engine, steps_of(STEPS, MICRO_BATCHES)).losses}
    engine.save_checkpoint(folder)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine.load_checkpoint(folder)
    found["resumed"] = all(map(torch.equal, before, model.parameters()))
    found["groups"] = [(group["lr"], group["weight_decay"]) for group in engine.basic_optimizer.param_groups]
    engine.destroy()
    return found


def switched() -> dict[str, Any]:
    """What is said where ``requires_grad`` is set by hand, and the losses of a training that it was set back in."""
    found: dict[str, Any] = {}
    for name, model, config, value in (
        ("off", "no weights", BF16_ZERO_1, False),
        ("on", "first", {}, True),
        ("off in fp32", "no weights", {}, False),
    ):
        loss = hidden_loss if model == "no weights" else masked_loss
        engine = build_engine(specs_of(model), loss, token_pipeline={"slices": SLICES}, config=config, optimizer=ADAMW)
        layer, data = dict(engine.module.named_children()).get("1"), steps_of(2, MICRO_BATCHES)
        first = engine.train_batch(iter(data[0]))
        before = None if layer is None else layer.up.weight.detach().clone()
        if layer is not None:
            layer.up.requires_grad_(value)
        try:
            engine.train_batch(iter(data[1]))
        except ConfigError as error:
            found[name] = str(error)
            if layer is not None:
                layer.up.requires_grad_(not value)
            assert engine.train_batch(iter(data[0])) != first
        else:
            found[name] = "stays" if before is None or torch.equal(before, layer.up.weight) else "moves"
        engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str, full: bool) -> dict[str, Any]:
    asked = [case for case in runs() if (case in half(runs())) == full]
    found = {f"{model} {config}": one(model, config, folder) for model, config in asked}
    groups = {} if full else {name: in_groups(name, f"{folder}/groups {name}") for name in GROUPS}
    return {**found, "nothing": nothing_trained(), "tied": tied_apart(), "groups": groups, "switched": switched()}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[dict[str, Any]]]:
    @cache
    def launch(full: bool) -> list[dict[str, Any]]:
        return run_ranks(worker, 2, str(tmp_path_factory.mktemp("checkpoints")), full, timeout=240)

    return launch


@pytest.fixture
def ranks(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = launched(is_full(request))
    return found


@cache
def plain(model: str, config: str) -> Any:
    """The same in one process, in fp32; what rounds to bf16 begins with weights that bf16 can hold."""
    options, dtype = CONFIGS[config], CONFIGS[config].get("dtype", torch.float32)
    make = {
        "SGD": partial(torch.optim.SGD, lr=0.2),
        "AdamW": partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
        "FusedLamb": partial(FusedLamb, lr=1e-2),
    }[options["optimizer"]["type"]]
    specs, loss = specs_of(model), hidden_loss if model == "no weights" else masked_loss
    start = torch.bfloat16 if config == "bf16" else torch.float32
    steps = steps_of(AUTO_STEPS if options.get("slices") == "auto" else STEPS, MICRO_BATCHES)
    return train_plain(specs, loss, steps, make, clip=options.get("clip", 0.0), dtype=dtype, start=start)


@cache
def evaluated(model: str, config: str) -> float:
    """The loss of the first step's batch with the weights at the end."""
    dtype = CONFIGS[config].get("dtype", torch.float32)
    layers, loss = Plain(specs_of(model)).to(dtype), hidden_loss
    layers.load_state_dict(plain(model, config).weights)
    if model != "no weights":
        loss = masked_loss
    with torch.no_grad():
        return (
            sum(
                loss(layers(inputs), (targets, mask.to(dtype))).item()
                for inputs, (targets, mask) in steps_of(1, MICRO_BATCHES)[0]
            )
            / MICRO_BATCHES
        )


@pytest.mark.parametrize(("model", "config"), marked(runs(), half(runs())))
def test_a_stage_that_trains_nothing_trains_with_the_others(ranks, model, config):
    wanted = plain(model, config)
    for number, rank in enumerate(ranks):
        found = rank[f"{model} {config}"]
        limit = {"bf16": 2e-2, "fp64": 1e-10}.get(config, 1e-5)
        seen = limit if number == 1 else max(limit, 1e-5)  # DeepSpeed hands the loss on in fp32
        assert found["losses"] == pytest.approx(wanted.losses, rel=seen)
        if "clip" in CONFIGS[config]:
            assert found["norms"] == pytest.approx(wanted.norms, rel=1e-4)
        if config != "bf16":
            assert max((difference(w, wanted.weights[n]) for n, w in found["weights"].items()), default=0.0) <= limit
        assert found["resumed"] == 0.0
        assert found["evaluated"] == pytest.approx(evaluated(model, config), rel=seen)
        check_order(found, number, PLACEMENTS[model])
    deferring = {s for rank in ranks for s, op in rank[f"{model} {config}"]["ops"] if op == "WEIGHT_GRADIENTS"}
    if CONFIGS[config].get("slices") != "auto":  # else it may have ended uncut
        once = CONFIGS[config].get("slices", SLICES) > 1 and config != "per slice" and "checkpointed" not in config
        assert deferring == (LEARNING[model] if once else set())


def check_order(found: dict[str, Any], place: int, where: Placement) -> None:
    """Frozen layers run once for each unit, make no graph and get nothing back; the others go backward."""
    assert found["placement"] == where
    own = where.stages_on(place)
    backward = [stage for stage in own if where.goes_backward(stage)]
    assert [stage for stage in own if (stage, "BACKWARD") in found["ops"]] == backward
    for stage in own:
        assert ((stage, "RECV_FORWARD") in found["ops"]) == where.receives_forward(stage)
        assert ((stage, "SEND_BACKWARD") in found["ops"]) == where.sends_backward(stage)
    units = found["units"][0] // len(own)
    assert found["units"] == (units * len(own), units * len(backward)) and units > 0
    frozen = sum(stop - first for at, first, stop in where.stages[: where.forward_only] if at == place)
    assert found["passes"] == units * frozen and not found["kept"]


def test_a_model_of_which_nothing_is_trained_can_be_evaluated(ranks):
    for rank in ranks:
        said, loss = rank["nothing"]
        assert said.startswith("model: got no parameter that is trained, must have one on some stage, use ")
        assert loss == ranks[0]["nothing"][1] > 0


def test_a_tied_weight_is_trained_by_all_that_share_it_or_by_none(ranks):
    for rank in ranks:
        assert rank["tied"] == (
            'model: got the tied layer "tokens" trained on stage 1 and not on stage 0, must be the same on all stages that '
            "share it, use requires_grad_() alike"
        )


@pytest.mark.parametrize("name", GROUPS)
def test_a_stage_that_trains_nothing_of_a_group_has_it_all_the_same(launched, name):
    frozen, config, _ = GROUPS[name]
    specs, loss = [LayerSpec(kind) for kind in UPPER[frozen]], hidden_loss if frozen == "vectors" else masked_loss
    wanted = train_plain(specs, loss, steps_of(STEPS, MICRO_BATCHES), lambda ps: by_shape(labelled(ps))).losses
    for rank in launched(False):
        found = rank["groups"][name]
        assert found["losses"] == pytest.approx(wanted, rel=1e-2 if "bf16" in config else 1e-5) and found["resumed"]
        if (
            name != "both, bf16, a function"
        ):  # there the second stage has one group, which DeepSpeed's BF16_Optimizer takes
            assert found["groups"] == [(1e-3, 0.1), (2e-3, 0.0)]


def test_what_is_frozen_or_trained_by_hand_where_that_has_no_effect_is_named(ranks):
    text = (
        "model: got 1.up.weight.requires_grad {} after initialize, must be set before it (now it has no effect), use "
    )
    for rank in ranks:
        said = rank["switched"]
        assert said["off"].startswith(text.format(False)) and said["on"].startswith(text.format(True))
        assert said["off in fp32"] == "stays"


# for tests.mutants


def only_switched(rank: int, world_size: int) -> dict[str, Any]:
    return {"switched": switched()}


def names_what_is_switched(mutant: str | None) -> bool:
    ranks = run_ranks(only_switched, 2, mutant=mutant)
    return holds(test_what_is_frozen_or_trained_by_hand_where_that_has_no_effect_is_named, ranks)
