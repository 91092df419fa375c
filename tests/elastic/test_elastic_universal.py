"""A training goes on from DeepSpeed's universal checkpoint, on other stages, replicas and tensor-parallel ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe.elastic.saved.universal import CARRIED, Universal
from ds_terapipe.errors import ConfigError
from tests.elastic.test_elastic_elsewhere import SAVED, STEPS, check, data_for, state_of
from tests.elastic.training import Case, engine_of
from tests.spawn import run_ranks

UNIVERSAL = {"checkpoint": {"load_universal": True}}
FREEZE = ((2, 1), (4, 3))
CHEAP = {"ZeRO-1": Case("texts", "adamw", 2, FREEZE, (), precision="ZeRO-1", scheduler="lambda")}
FULL = {
    "bf16": Case("texts", "adamw", 2, FREEZE, (), precision="bf16", scheduler="lambda"),
    "bf16, FusedLamb": Case("tied texts", "lamb", 2, ((2, 1),), (), precision="bf16"),
    "bf16 ZeRO-1": Case("texts", "adamw", 2, FREEZE, (), precision="bf16 ZeRO-1"),
    "ZeRO-1, FusedLamb": Case("texts", "lamb", 2, FREEZE, (), precision="ZeRO-1", scheduler="lambda"),
    "ZeRO-1, partly frozen": Case("partly frozen", "lamb", 2, ((2, 4),), (), precision="ZeRO-1"),
}
ELSEWHERE = {"one process": (1, 1), "replicas": (2, 1), "four stages": (4, 4), "two by two": (4, 2)}


def convert(source: Path, target: Path) -> None:
    """What DeepSpeed's script `ds_to_universal` does."""
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    (target.parent / "latest_universal").write_text(target.name)


def save(rank: int, world_size: int, folder: str, cases: dict[str, Case]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        engine = engine_of(case, training_data=data_for(case))
        for _ in range(SAVED):
            engine.train_batch()
        engine.save_checkpoint(f"{folder}/{name}", tag="saved", client_state={"mine": 7})
        state = state_of(engine, case)
        found[name] = state, [float(engine.train_batch()) for _ in range(STEPS - SAVED)]
        engine.destroy()
    return found


def go_on(rank: int, world_size: int, folder: str, stages: int, cases: dict[str, Case]) -> dict[str, Any]:
    found = {}
    for name, saved in cases.items():
        case = Case(**{**vars(saved), "stages": stages})
        engine = engine_of(case, training_data=data_for(case), config=UNIVERSAL)
        path, client = engine.load_checkpoint(f"{folder}/{name}")
        assert path and client["mine"] == 7 and not any("terapipe" in key or "universal" in key for key in client)
        state, shape = state_of(engine, case), tuple(engine.shape)
        found[name] = state, [float(engine.train_batch()) for _ in range(STEPS - SAVED)], shape
        engine.destroy()
    return found


def goes_on(folder: Path, cases: dict[str, Case], places: dict[str, tuple[int, int]]) -> None:
    ranks = run_ranks(save, 2, str(folder), cases, timeout=250)
    for name in cases:
        convert(folder / name / "saved", folder / name / "universal")
    for processes, stages in places.values():
        others = run_ranks(go_on, processes, str(folder), stages, cases, timeout=250)
        for name in cases:
            shape = stages, processes // stages
            check(name, [rank[name] for rank in ranks], [rank[name] for rank in others], shape, cases[name])


def test_one_process(tmp_path):
    goes_on(tmp_path, CHEAP, {"one process": (1, 1)})


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_all_places(tmp_path):
    goes_on(tmp_path, {**CHEAP, **FULL}, ELSEWHERE)


# ----------------------------------------------------------------------------------------------------- tensor parallelism


def save_tensor(rank: int, world_size: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    from tests.elastic.tensor_training import engine_of, trained

    found = {}
    for name, case in cases.items():
        engine = engine_of(case)
        trained(engine, case, range(SAVED))
        engine.save_checkpoint(f"{folder}/{name}", tag="saved")
        state = whole_state(engine, case)
        found[name] = state, trained(engine, case, range(SAVED, STEPS)), engine.frozen_layers
        engine.destroy()
    return found


def load_tensor(rank: int, world_size: int, folder: str, cases: dict[str, Any], stages: int) -> dict[str, Any]:
    from tests.elastic.tensor_training import engine_of, trained

    found = {}
    for name, case in cases.items():
        engine = engine_of(case, stages, world_size // stages, **UNIVERSAL)
        engine.load_checkpoint(f"{folder}/{name}")
        state, frozen = whole_state(engine, case), engine.frozen_layers
        found[name] = state, trained(engine, case, range(SAVED, STEPS)), frozen
        engine.destroy()
    return found


def whole_state(engine: Any, case: Any) -> dict[str, Any]:
    """Weights, masters and moments, put together from all ranks."""
    from tests.elastic.tensor_training import held
    from tests.megatron.common import whole_tensors

    mine = held(engine, case)
    names = {id(p): name for name, p in engine.module.named_parameters()}
    found = {"weight": whole_tensors(engine.module)}
    for number, kind in enumerate(("master", "exp_avg", "exp_avg_sq")):
        found[kind] = whole_tensors(
            engine.module, lambda p, n=number: mine[names[id(p)]][n] if names[id(p)] in mine else torch.zeros_like(p)
        )
    return found


@pytest.mark.full
@pytest.mark.timeout(900)
def test_other_tensor_parallel_sizes(tmp_path):
    pytest.importorskip("megatron.core")
    from tests.elastic.tensor_training import TensorCase

    options: dict[str, Any] = {"resize": "off", "schedule": ((2, 1), (4, 3)), "frozen": ((2, 1), (4, 3)), "stages": ()}
    cases = {
        "ZeRO-1": TensorCase(precision="ZeRO-1", **options),
        "ZeRO-1, modern": TensorCase("lamb", "ZeRO-1", modern=True, **options),
        "bf16": TensorCase(precision="bf16", modern=True, tied=True, **options),
    }
    ranks = run_ranks(save_tensor, 4, str(tmp_path), cases, timeout=250)
    for name in cases:
        convert(tmp_path / name / "saved", tmp_path / name / "universal")
    for processes, stages in ((1, 1), (2, 1), (2, 2)):
        others = run_ranks(load_tensor, processes, str(tmp_path), cases, stages, timeout=250)
        for name in cases:
            (state, losses, frozen), limit = ranks[0][name], 1e-2 if "bf16" in name else 1e-5
            assert frozen == 3
            for rank in others:
                loaded, went_on, frozen_there = rank[name]
                assert frozen_there == frozen and went_on == pytest.approx(losses, rel=limit)
                for kind, tensors in state.items():
                    assert set(tensors) == set(loaded[kind])
                    assert all((tensors[n] == loaded[kind][n]).all() for n in tensors), (name, kind)


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    found = []
    plain = Case("texts", "adamw", world_size, (), ())
    wrapped = Case("texts", "adamw", world_size, (), (), precision="ZeRO-1")
    for case, options in ((plain, {}), (wrapped, {}), (wrapped, {"load_module_only": True})):
        engine = engine_of(case, training_data=data_for(case), config=UNIVERSAL)
        with pytest.raises(ConfigError) as error:
            engine.load_checkpoint(folder, tag="none", **options)
        found.append(str(error.value))
        engine.destroy()
    return found


def test_what_is_not_universal_is_refused(tmp_path):
    for plain, none, weights in run_ranks(refused, 2, str(tmp_path)):
        assert plain.startswith("checkpoint.load_universal: got true, must be false without bf16 or ZeRO-1")
        assert "must be an output folder of ds_to_universal" in none
        assert weights.startswith("load_checkpoint: got load_module_only")
        assert all("\n" not in line for line in (plain, none, weights))


def test_what_is_missing_or_in_another_group_is_refused(tmp_path):
    """DeepSpeed gives groups their rates by number, and a stage numbers those that it has a parameter of."""
    for name in ("0.weight", "1.weight"):
        (tmp_path / "one" / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.ones(2)}, tmp_path / "one" / "zero" / name / "fp32.pt")
    carried = {"state": {}, "groups": {"0.weight": 0, "1.weight": 1}, "tensor": 0, "untrained": {}}
    torch.save({CARRIED: carried}, tmp_path / "one" / "mp_rank_00_model_states.pt")
    universal = Universal(tmp_path, "one")
    universal.check({"0.weight": 0, "1.weight": 1}, {})
    file = tmp_path / "one" / "zero" / "1.weight" / "fp32.pt"
    whole = file.read_bytes()
    at = whole.index(torch.ones(2).numpy().tobytes())
    for damaged in (whole[:at] + b"x" + whole[at + 1 :], whole[:100], b""):
        file.write_bytes(damaged)
        with pytest.raises(
            ConfigError, match=r"^checkpoint\.load_universal: got .*1\.weight/fp32\.pt \(.*\), must be a whole"
        ):
            universal.check({"0.weight": 0, "1.weight": 1}, {})
    file.write_bytes(whole)
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.load_universal: got 1\.weight in parameter group 1, must be 0 as"
    ):
        universal.check({"1.weight": 0}, {})
    with pytest.raises(ConfigError, match=r"^checkpoint\.load_universal: got .* without 2\.weight, must have all"):
        universal.check({"2.weight": 1}, {})
    with pytest.raises(ConfigError, match=r"^checkpoint\.load_universal: got .* without buffer, must have all"):
        universal.check({}, {"buffer": torch.zeros(1)})
