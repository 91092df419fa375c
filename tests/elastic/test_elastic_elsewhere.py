"""A training goes on from its checkpoint, or from DeepSpeed's universal one, on other processes and in another shape."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_terapipe.elastic.saved import restore
from ds_terapipe.elastic.saved.universal import CARRIED, Universal
from ds_terapipe.errors import ConfigError
from tests.elastic.samples import Texts
from tests.elastic.test_elastic_wrapped import kept
from tests.elastic.training import PRECISIONS, Case, data_of, engine_of
from tests.megatron.common import Model, batches, build, whole_tensors
from tests.pipeline.training import build_engine, raised
from tests.spawn import in_background, run_ranks, values_of

SAMPLES, SAVED, STEPS = 20, 3, 6
FREEZE = ((1, 1), (4, 2))
UNIVERSAL = {"checkpoint": {"load_universal": True}}
CASES = {  # and whether ds_to_universal converts the checkpoint
    "fused adam": (Case("texts", "fused adam", 2, FREEZE, (), scheduler="warmup"), False),
    # four stages have the groups in another order
    "groups": (Case("partly frozen", "adamw", 2, ((1, 4),), (), scheduler="lambda"), False),
    "universal, ZeRO-1": (Case("partly frozen", "adamw", 2, ((1, 4),), (), precision="ZeRO-1", scheduler="lambda"), True),
    "universal, bf16": (Case("tied texts", "lamb", 2, ((1, 1),), (), precision="bf16"), True),
    "alone, universal": (Case("partly frozen", "lamb", 2, (), (), precision="fp16 ZeRO-1"), True),  # token_pipeline, that is
    # a weight in the flat parts of two stages
    "tied, ZeRO-1": (Case("tied texts", "adamw", 2, (), ((99, 1),), precision="ZeRO-1"), False),
    "tied, bf16": (Case("tied texts", "adamw", 2, (), ((99, 1),), precision="bf16"), False),
}
READ = [(1, name) for name in CASES] + [(4, "groups"), (4, "universal, ZeRO-1")]  # on so many processes
SWITCHED = {(1, "groups"): "ZeRO-1", (1, "tied, ZeRO-1"): "fp32"}  # ZeRO-1 is on or off in the reading training


def held(engine: Any, case: Case) -> dict[str, tuple[Tensor, ...]]:
    """Weights of this rank by name, and what the optimizer steps in their place with its moments; collective."""
    moments = {} if case.precision == "fp32" else kept(engine)
    return {name: (p.detach().clone(), *moments.get(name, ())) for name, p in engine.module.named_parameters()}


def went_on(engine: Any, case: Case) -> tuple[Any, list[float]]:
    """Counts that all ranks share, and losses."""
    scheduler = engine.lr_scheduler
    position = getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", None))
    scale = engine.optimizer.loss_scale if case.precision.startswith("fp16") else None
    same = engine.global_steps, engine.global_samples, position, scale, getattr(engine, "frozen_layers", 0)
    losses = train(engine, case, STEPS)
    engine.destroy()
    return same, losses


def named_engine(name: str, case: Case, **config: Any) -> Any:
    alone = {"elastic_pipeline": {"enabled": False}} if name.startswith("alone") else {}
    return engine_of(case, training_data=None if alone else Texts(SAMPLES), config={**alone, **config})


def save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"DeepSpeed's": from_another_engine(f"{folder}/own"), "refused": refused(f"{folder}/none")}
    for name, (case, _) in CASES.items():
        engine = named_engine(name, case)
        train(engine, case, SAVED)
        engine.save_checkpoint(f"{folder}/{name}", "saved", {"mine": 7}, True, name == "groups")
        if name == "universal, ZeRO-1":
            engine.save_checkpoint(f"{folder}/small", "saved", None, True, True)
            files = ([*Path(folder, kind, "saved").glob("mp_rank_*")] for kind in (name, "small"))
            states = ([torch.load(file, weights_only=False)[CARRIED]["untrained"] for file in each] for each in files)
            found["carried"] = [{parameter[0] for state in each for parameter in state} for each in states]
        found[name] = held(engine, case), *went_on(engine, case)
    for name in (name for name, (_, universal) in CASES.items() if universal and rank == 0):
        convert(Path(folder, name))
    return found


def go_on(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    """On as many stages as there are processes; two replicas go on from a universal checkpoint."""
    found = {}
    for name in names:
        case, universal = CASES[name]
        stages, precision = min(world_size, 2 if universal else 4), SWITCHED.get((world_size, name), case.precision)
        case = replace(case, stages=stages, resize=(), precision=precision)
        engine = named_engine(name, case, **(UNIVERSAL if universal else {}))
        before = engine.basic_optimizer, engine.lr_scheduler
        if alone := name.startswith("alone"):  # frozen parameters are the model's
            with pytest.raises(ConfigError, match=r"^checkpoint\.load_universal: got .* without 0\..*, must have all"):
                engine.load_checkpoint(f"{folder}/{name}")
        path, client = engine.load_checkpoint(f"{folder}/{name}", load_module_strict=not alone and name != "groups")
        assert path and client["mine"] == 7 and not any("terapipe" in key or "universal" in key for key in client)
        assert before == (engine.basic_optimizer, engine.lr_scheduler)
        for state in engine.basic_optimizer.state.values():  # DeepSpeed reads moments in the order of a set
            state.update({key: state.pop(key) for key in sorted(state, reverse=rank % 2 == 1)})
        found[name] = held(engine, case), *went_on(engine, case)
    return found


def convert(folder: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(folder / "saved"), output_folder=str(folder / "universal"), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    (folder / "latest_universal").write_text("universal")


def all_processes() -> dict[int, list[Any]]:
    """Results of the ranks, by the number of processes: two save the checkpoints that one and four read."""
    with tempfile.TemporaryDirectory() as folder:
        found = {2: values_of(save, 2, folder, timeout=200)}
        for processes in (1, 4):
            names = [name for number, name in READ if number == processes]
            found[processes] = values_of(go_on, processes, folder, names, timeout=200)
    return found


found = in_background(f"{__name__}:all_processes", 4, all_processes)


@pytest.mark.parametrize(("processes", "name"), READ)
def test_a_training_goes_on_from_the_same_bits(found: dict[int, list[Any]], processes: int, name: str) -> None:
    ranks, others = ([rank[name] for rank in found[number]] for number in (2, processes))
    case, (_, same, losses) = CASES[name][0], ranks[0]
    had = {key: each for rank in ranks for key, each in rank[0].items()}
    assert same[-1] == case.frozen(SAVED - 1) and set(had) == {key for rank in others for key in rank[0]}
    for now, same_now, went in others:
        assert same_now == same
        assert went == pytest.approx(losses, rel=1e-5 if case.precision in ("fp32", "ZeRO-1") else 1e-2)
        for key, tensors in now.items():
            assert all(torch.equal(*two) for two in zip(tensors, had[key], strict=(processes, name) not in SWITCHED)), key


def from_another_engine(folder: str) -> Any:
    """DeepSpeed's engine saves, without ZeRO, parts that it does not read, and ours nothing beside them."""
    case = Case("texts", "adamw", 2, (), (), precision="bf16")
    engine = engine_of(case, config={"elastic_pipeline": {"enabled": False}})
    train(engine, case, SAVED)
    engine.save_checkpoint(folder, tag="of/steps")
    saved, losses = kept(engine), train(engine, case, STEPS)
    engine.destroy()
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    found = saved, kept(engine), losses, train(engine, case, STEPS)
    engine.destroy()
    return found


def train(engine: Any, case: Case, until: int) -> list[float]:
    """On the case's data, if the engine has none of its own."""
    given = [None if engine.training_dataloader is not None else iter(data) for data in data_of(case)]
    return [float(engine.train_batch(given[step])) for step in range(engine.global_steps, until)]


def test_a_training_goes_on_from_what_deepspeed_saved_of_bf16_without_zero(found: dict[int, list[Any]]) -> None:
    for had, loaded, losses, others in (rank["DeepSpeed's"] for rank in found[2]):
        assert had and set(had) == set(loaded) and losses == others
        assert all(torch.equal(a, b) for key in had for a, b in zip(had[key], loaded[key], strict=True))


TENSOR = {"ZeRO-1": Model(tied=False), "bf16": Model(modern=True)}  # by precision


def tensor_run(rank: int, world_size: int, folder: str, saves: bool) -> dict[str, Any]:
    """Weights where the checkpoint is, put together from all ranks, and the losses from there on."""
    found, each = {}, 2 if saves else 1
    for precision in TENSOR:
        module, data = build(TENSOR[precision], tensor=each, stages=each), batches(seed=3)
        config = {"elastic_pipeline": Case("", "", each, ((1, 1), (2, 3)), ()).elastic(), **PRECISIONS[precision], **UNIVERSAL}
        optimizer = {"type": "AdamW", "params": {"lr": 4e-3, "eps": 1e-4, "torch_adam": True}}
        engine = build_engine((), None, made=module, token_pipeline=None, config=config, optimizer=optimizer, clip=1.0)
        steps = [[next(data), next(data)] for _ in range(STEPS)]
        if saves:
            for step in steps[:SAVED]:
                engine.train_batch(iter(step))
            engine.save_checkpoint(f"{folder}/{precision}", tag="saved")
        else:
            engine.load_checkpoint(f"{folder}/{precision}")
        state = whole_tensors(engine.module)
        losses = [float(engine.train_batch(iter(step))) for step in steps[SAVED:]]
        found[precision] = state, engine.frozen_layers, losses
        engine.destroy()
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_universal_checkpoint_is_for_any_tensor_parallel_size(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    ranks = run_ranks(tensor_run, 4, str(tmp_path), True, timeout=250)
    for precision in TENSOR:
        convert(tmp_path / precision)
    (other,) = run_ranks(tensor_run, 1, str(tmp_path), False, timeout=250)
    for precision, (state, frozen, losses) in ranks[0].items():
        assert other[precision][1] == frozen == 3
        assert other[precision][2] == pytest.approx(losses, rel=1e-5 if precision == "ZeRO-1" else 1e-2)
        loaded = other[precision][0]
        assert set(state) == set(loaded) and all((state[name] == loaded[name]).all() for name in state)


def refused(folder: str) -> list[str]:
    found, plain = [], Case("texts", "adamw", 2, (), ())
    for case, options in ((plain, {}), (replace(plain, precision="ZeRO-1"), {"load_module_only": True})):
        engine = engine_of(case, training_data=Texts(SAMPLES), config=UNIVERSAL)
        found.append(raised(lambda engine=engine, options=options: engine.load_checkpoint(folder, tag="none", **options)))
        engine.destroy()
    return found


def test_what_is_not_universal_is_refused(found: dict[int, list[Any]]) -> None:
    for plain, weights in (rank["refused"] for rank in found[2]):
        assert plain.startswith("ConfigError: checkpoint.load_universal: got true, must be false without bf16 or ZeRO-1")
        assert weights.startswith("ConfigError: load_checkpoint: got load_module_only") and "\n" not in plain + weights
    assert found[2][0]["carried"] == [{*"0123"}, {"3"}]  # which the policy has frozen: it was trained


def test_a_universal_checkpoint_that_lacks_something_or_has_it_in_another_group_is_refused(tmp_path: Path) -> None:
    """DeepSpeed gives groups their rates by number, and a stage numbers those that it has a parameter of."""
    for name in ("0.weight", "1.weight"):
        (tmp_path / "one" / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.ones(2)}, tmp_path / "one" / "zero" / name / "fp32.pt")
    carried = {"state": {}, "groups": {"0.weight": 0, "1.weight": 1}, "tensor": 0, "untrained": {}}
    torch.save({CARRIED: carried}, tmp_path / "one" / "mp_rank_00_model_states.pt")
    universal, file = Universal(tmp_path, "one"), tmp_path / "one" / "zero" / "1.weight" / "fp32.pt"
    universal.check({"0.weight": 0, "1.weight": 1}, {})
    whole = file.read_bytes()
    at = whole.index(torch.ones(2).numpy().tobytes())
    file.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
    with pytest.raises(ConfigError, match=r"^checkpoint\.load_universal: got .*1\.weight/fp32\.pt \(.*\), must be a whole"):
        universal.check({"0.weight": 0, "1.weight": 1}, {})
    file.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"^checkpoint\.load_universal: got 1\.weight in parameter group 1, must be 0 as"):
        universal.check({"1.weight": 0}, {})


ONE, BOTH, APART = [["0.weight"]], [["0.weight", "1.weight"]], [["0.weight", "1.weight"], []]


@pytest.mark.parametrize(("groups", "number", "said"), [
    (ONE, 1, r"got .* without the optimizer's state of .*1\.weight"),
    (BOTH, 2, r"optimizer: got .*\[1\] parameter groups.* must be 2"),
    (APART, 2, "optimizer: got .*other parameter groups"),
])  # fmt: skip
def test_an_optimizer_without_a_parameter_or_with_other_groups_is_refused(tmp_path, groups, number, said):
    part = {"kind": "plain", "stage": 0, "data": 0, "tensor": 0, "file": "x.pt", "groups": groups}
    wanted = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("0.weight", "1.weight")}
    numbers = {"0.weight": 0, "1.weight": int(groups is APART)}
    with pytest.raises(ConfigError, match=f"^load_checkpoint: {said}"):
        restore.SavedStates(tmp_path, [part], 0, number, numbers, wanted)
