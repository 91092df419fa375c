"""Weights in and out: each stage reads its own, and what a pipeline has trained is a folder that from_pretrained reads."""

from __future__ import annotations

import contextlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe import cli, manifest
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import MANIFEST
from tests.spawn import launch, run_ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")

NUMBERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, ZeRO-1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, ZeRO-1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16, ZeRO-1": {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 1}},
}
SGD = {"type": "SGD", "params": {"lr": 0.3}}
NOT_COPIED = ("vocab.bin", "pytorch_model.bin.index.json")
TIED, UNTIED = "llama, tied, dynamic", "qwen2"


def steps() -> list[list[dict[str, torch.Tensor]]]:
    """Two steps of four micro-batches: two replicas' two."""
    from tests.hf.families import features

    return [[features("plain", 10 * step + m) for m in range(4)] for step in range(2)]


def trained(rank: int, world: int, folder: Path, block: dict[str, Any] | None) -> dict[str, Any]:
    """Two stages of two replicas from a folder of shards, in every type of numbers; a checkpoint and a folder of each."""
    from ds_terapipe import hf
    from tests.hf import families
    from tests.pipeline.training import allow_fp16, build_engine, mine

    allow_fp16()
    found: dict[str, Any] = {}
    for index, (name, config) in enumerate(NUMBERS.items()):
        family = (TIED, UNTIED)[index % 2]
        made = hf.pipeline(str(folder / family), num_stages=2, layers_per_stage=[3, 1])
        model = families.model_of(family)
        given = {
            f"{entry}.{own}" if entry or not made.source.parts.tied else f"tied_modules.embed.{own}": hf_name
            for entry, names in enumerate(hf_names(made))
            for own, hf_name in names.items()
        }
        for own, parameter in made.named_parameters():
            prefix = next(one for one in given if own.startswith(one))
            expected = model.get_parameter(given[prefix] + own.removeprefix(prefix))
            assert torch.equal(parameter, expected), f"{own} is not what the folder has"
        found[f"{name}, shards read"] = sorted(made.source._weights._opened)
        engine = build_engine(
            (), None, token_pipeline=block, micro_batches=2, made=made, config=config, optimizer=SGD
        )  # fmt: skip
        for step in steps():
            engine.train_batch(iter([hf.batch(one) for one in mine(engine, step)]))
        engine.save_checkpoint(str(folder / "checkpoints" / name), tag="step")
        hf.save_pretrained(engine, folder / "live" / name, largest=20_000)
        if name == "bf16":
            found["adapters"] = refused_adapters(engine, folder / "adapted")
        with contextlib.suppress(ConfigError):
            hf.save_pretrained(engine, folder / "live" / name)
            found[name] = "written over a folder that was there"
        if block is not None:
            engine.destroy()
    return found


class Adapted(torch.nn.Module):
    """A layer under a name of peft's, and the layer that it stands for."""

    def __init__(self, layer: torch.nn.Module, name: str) -> None:
        super().__init__()
        within = torch.nn.ModuleDict({"default": layer})
        self.add_module(name, within if name in ("lora_A", "modules_to_save") else layer)


def refused_adapters(engine: Any, out: Path) -> tuple[str, list[str]]:
    """What each process is told where the last stage alone has an adapter, and what is there of a folder."""
    from ds_terapipe import hf

    if engine.grid.is_last_stage:
        attention = next(layer for layer in engine.module.forward_funcs if hasattr(layer, "layer")).layer.self_attn
        attention.v_proj = Adapted(attention.v_proj, "base_layer")
    try:
        hf.save_pretrained(engine, out)
    except ConfigError as error:
        torch.distributed.barrier()
        return str(error), [path.name for path in out.parent.glob("*adapted*")]
    return "saved", []


def hf_names(made: Any) -> list[dict[str, str]]:
    from ds_terapipe.hf.record import names_of

    return names_of(made.source)


@pytest.mark.parametrize(
    "block", [{"slices": [1, 15, 8]}, pytest.param(None, marks=pytest.mark.full)], ids=["ours", "DeepSpeed's"]
)
def test_a_pipeline_from_a_folder_to_a_folder(block: dict[str, Any] | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ds_terapipe.hf import export
    from tests.hf import families
    from tests.pipeline.training import difference

    for family in (TIED, UNTIED):
        model = families.model_of(family)
        model.save_pretrained(tmp_path / family, max_shard_size="10KB")
        (tmp_path / family / "tokenizer.json").write_text("{}")
        for name in NOT_COPIED:
            (tmp_path / family / name).write_text("{}")
    ranks = run_ranks(trained, 4, tmp_path, block, timeout=240)
    for name, config in NUMBERS.items():
        read = [set(rank.pop(f"{name}, shards read")) for rank in ranks]
        assert read[0] == read[1] and read[2] == read[3] and read[0] & read[2] < read[0] | read[2], (
            "all read all shards"
        )
        dtype = next((t for key, t in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if key in config), None)
        out = export(tmp_path / "checkpoints" / name / "step", tmp_path / "out" / name, largest=15_000)
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 2 and (out / "tokenizer.json").exists()
        assert not any((out / name).exists() for name in NOT_COPIED)
        ours, live = (
            AutoModelForCausalLM.from_pretrained(one, dtype="auto") for one in (out, tmp_path / "live" / name)
        )
        for own, parameter in ours.named_parameters():
            other = live.get_parameter(own)
            assert parameter.dtype == torch.float32, f"{name}: {own} is not the master"
            # without ZeRO masters of fp16 are in checkpoints only
            same = torch.equal(parameter.half() if name == "fp16" else parameter, other)
            assert same, f"{name}: {own} differs from the live one"
        if name == "fp16" and block is None:
            continue  # DeepSpeed's own engine divides gradients by a loss scale that the loss has not had (0.19.8)
        family = (TIED, UNTIED)[list(NUMBERS).index(name) % 2]
        alone = trained_alone(families.model_of(family), dtype)
        limit = 1e-5 if dtype is None else 2e-2
        for own, parameter in ours.named_parameters():
            if dtype is None:
                assert difference(parameter, alone.get_parameter(own)) <= limit, f"{name}: {own}"
        tokens = steps()[0][0]["input_ids"]
        assert difference(ours.eval()(tokens).logits, alone.eval()(tokens).logits) <= limit, name
        moved = difference(ours(tokens).logits, families.model_of(family).eval()(tokens).logits)
        assert moved > 5e-2, f"{name}: it has learned nothing, {moved}"
        if dtype is torch.bfloat16:
            narrow = tmp_path / "narrow" / name  # by the command, of the latest
            assert cli.main(["export", str(tmp_path / "checkpoints" / name), str(narrow), "--dtype", "bf16"]) == 0
            again = AutoModelForCausalLM.from_pretrained(narrow, dtype="auto")
            for own, parameter in again.named_parameters():
                assert torch.equal(parameter, ours.get_parameter(own).bfloat16()), own
    name = "model.layers.3.self_attn.v_proj.base_layer.weight"
    said = f"hf.save_pretrained: got {name}, which is an adapter's, must be weights of the model alone, use "
    assert ranks == [{"adapters": (f"{said}engine.save_checkpoint, which keeps them", [])}] * 4


def trained_alone(model: Any, dtype: torch.dtype | None) -> Any:
    """The same steps in one process, in fp32."""
    model.train()
    stepper = torch.optim.SGD(model.parameters(), lr=SGD["params"]["lr"])
    for step in steps():
        stepper.zero_grad()
        for one in step:
            (model(**one, use_cache=False).loss / len(step)).backward()
        stepper.step()
    return model


# ------------------------------------------------------------------------------------------------------------- bad input


def refused(rank: int, world: int, folder: Path) -> dict[str, str]:
    """What each process is told; one that waits for another would not come back."""
    from transformers import AutoConfig, BertConfig, BertModel, CLIPConfig, GraniteConfig, T5Config

    from ds_terapipe import hf
    from tests.hf.families import config_of, model_of

    llama, tiny = config_of("llama"), {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    fast = config_of("llama")
    fast._attn_implementation = "flash_attention_2"
    one_misses_it = str(folder / "llama") if rank == 0 else str(folder / "nowhere" / "llama")
    experts = AutoConfig.for_model("mixtral", **tiny, num_key_value_heads=2, num_local_experts=4, vocab_size=64)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "encoder": (BertConfig(**tiny), {}),
        "encoder and decoder": (T5Config(), {}),
        "no causal head": (BertModel(BertConfig(**tiny)), {}),
        "no decoder": (CLIPConfig(), {}),
        "experts": (experts, {}),
        "scaled outside": (GraniteConfig(**tiny, intermediate_size=48, vocab_size=64, logits_scaling=4.0), {}),
        "more stages than layers": (config_of("llama", num_hidden_layers=1), {}),
        "layers per stage": (llama, {"layers_per_stage": [4, 1]}),
        "stages": (llama, {"num_stages": 3}),
        "flash": (fast, {}),
        "loss": (llama, {"loss": "masked_lm"}),
        "mean": (llama, {"mean_over": "batch"}),
        "nothing": (None, {}),
        "adapters around it": (type("PeftModel", (), {"get_base_model": None})(), {}),
        "no such name": ("/no/such/folder", {}),
        "missing shard": (str(folder / "missing"), {}),
        "truncated shard": (str(folder / "truncated"), {}),
        "another shape": (str(folder / "shape"), {}),
        "a weight is missing": (str(folder / "weight"), {}),
        "an index that is none": (str(folder / "index"), {}),
        "another format": (str(folder / "pickle"), {}),
        "one process only": (one_misses_it, {}),
        "good": (model_of("llama"), {}),
    }
    said = {}
    for name, (model, options) in cases.items():
        try:
            hf.pipeline(model, **{"num_stages": 2, **options})
            said[name] = "built"
        except ConfigError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


SAID = {
    "encoder": "hf.pipeline: got bert, with BertEmbeddings and BertEncoder",
    "encoder and decoder": "hf.pipeline: got t5, an encoder with a decoder",
    "no causal head": "hf.pipeline: got bert, BertModel without a head for logits",
    "no decoder": "hf.pipeline: got clip, which is none of AutoModelForCausalLM's",
    "experts": "hf.pipeline: got mixtral, a mixture of experts (num_local_experts 4)",
    "scaled outside": "hf.pipeline: got granite, whose own forward does more than its layers do (the logits",
    "more stages than layers": "layers per stage: got",
    "layers per stage": "layers per stage: got [4, 1] for 4 layers",
    "stages": "num_stages: got 3 for 2 processes",
    "flash": 'attn_implementation: got "flash_attention_2"',
    "loss": 'loss: got "masked_lm"',
    "mean": 'mean_over: got "batch"',
    "nothing": "hf.pipeline: got NoneType",
    "adapters around it": "hf.pipeline: got PeftModel, must be the model that its adapters are in, use model.get_base_model()",
    "no such name": 'hf.pipeline: got "/no/such/folder"',
    "missing shard": "that is missing, must be whole",
    "truncated shard": "that is damaged",
    "another shape": "of shape [16, 32] in",
    "a weight is missing": "hf.pipeline: got no model.layers.3.mlp.up_proj.weight in",
    "an index that is none": "model.safetensors.index.json that is damaged",
    "another format": "without model.safetensors",
    "one process only": "nowhere",
    "good": "built",
}


def test_what_can_not_be_built_is_said_on_every_process(tmp_path: Path) -> None:
    from tests.hf import families

    model = families.model_of("llama")
    for name in ("llama", "missing", "truncated", "shape", "weight", "index", "pickle"):
        model.save_pretrained(tmp_path / name, max_shard_size="10KB")
    index = json.loads((tmp_path / "weight" / "model.safetensors.index.json").read_text())
    last = index["weight_map"].pop("model.layers.3.mlp.up_proj.weight")
    (tmp_path / "weight" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "missing" / last).unlink()
    os.truncate(tmp_path / "truncated" / last, (tmp_path / "truncated" / last).stat().st_size - 10)
    config = json.loads((tmp_path / "shape" / "config.json").read_text())
    (tmp_path / "shape" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{")
    for file in (tmp_path / "pickle").glob("model*"):
        file.rename(file.with_suffix(".bin"))
    ranks = launch(refused, 2, tmp_path, timeout=120)
    for rank in ranks:
        assert rank.error is None, rank.traceback
        assert rank.value.keys() == SAID.keys()
        for name, said in rank.value.items():
            assert SAID[name] in said and "\n" not in said, f"rank {rank.rank}, {name}: {said}"


class Killed(BaseException):
    """Stands for a kill: nothing that cleans up runs afterwards, but for what Python itself does."""


def test_an_export_that_is_killed_leaves_nothing_under_the_name(tmp_path: Path, monkeypatch: Any) -> None:
    from ds_terapipe.hf import export, folder
    from tests.hf import families

    checkpoint = checkpoint_of(families.model_of("llama"), tmp_path / "checkpoint")
    calls: list[str] = []

    def dies(original: Any, at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(calls) == at:
                raise Killed
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return call

    kills = 0
    while True:
        out = tmp_path / f"out {kills}"
        calls.clear()
        try:
            with monkeypatch.context() as patched:
                for owner, name in (
                    (folder, "save_file"),
                    (folder.shutil, "copyfile"),
                    (Path, "write_text"),
                    (Path, "rename"),
                ):
                    patched.setattr(owner, name, dies(getattr(owner, name), kills))
                export(checkpoint, out, largest=30_000)
            break
        except Killed:
            kills += 1
            assert not out.exists()
    assert kills > 5 and calls[-1] == "rename" and calls.count("save_file") > 1, calls
    assert (out / "model.safetensors.index.json").exists()
    export(checkpoint, tmp_path / "out 0", largest=30_000)  # what a kill left is no hindrance
    assert (tmp_path / "out 0" / "config.json").exists()


def checkpoint_of(model: Any, folder: Path) -> Path:
    """The layer files of a checkpoint, written without an engine."""
    from ds_terapipe.hf.decoder_pipeline import _built, _specs
    from ds_terapipe.hf.record import write_record
    from ds_terapipe.hf.source import source_of

    source = source_of(model, None, 0)
    folder.mkdir()
    for entry, spec in enumerate(_specs(source)):
        layer = _built(spec)
        torch.save(dict(layer.state_dict()), folder / f"layer_{entry:02d}-model_states.pt")
    write_record(source, folder)
    return folder


@pytest.mark.parametrize("name", ["base_layer", "lora_A", "original_module", "modules_to_save"])
def test_a_checkpoint_with_adapters_is_no_folder(name: str, tmp_path: Path) -> None:
    from ds_terapipe.hf import export
    from tests.hf import families

    model = families.model_of("llama")
    attention = model.model.layers[2].self_attn
    attention.q_proj = Adapted(attention.q_proj, name)
    checkpoint = checkpoint_of(model, tmp_path / "checkpoint")
    with pytest.raises(
        ConfigError,
        match=rf"^export: got model.layers.2.self_attn.q_proj.{name}\..*weight, which is an adapter's, must be",
    ):
        export(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "something was written"


@pytest.mark.parametrize("narrow", [False, True])
def test_an_export_is_loaded_in_the_type_that_it_has(narrow: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ds_terapipe.hf import export
    from tests.hf import families

    model = families.model_of("llama")
    model.config.dtype = torch.float32 if narrow else torch.bfloat16  # what a published folder says
    checkpoint = checkpoint_of(model, tmp_path / "checkpoint")
    made = torch.bfloat16 if narrow else torch.float32
    out = export(checkpoint, tmp_path / "out", dtype=made if narrow else None)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(made)), name
        assert parameter.dtype == made, name


def test_the_type_of_a_folder_is_the_widest_of_its_weights(tmp_path: Path) -> None:
    from ds_terapipe.hf.folder import Folder

    folder = Folder(tmp_path / "out")
    folder.begin()
    (folder.unfinished / "config.json").write_text('{"dtype": "bfloat16"}')
    kinds = {"a": torch.float32, "b": torch.bfloat16, "c": torch.int64}
    folder.finish([folder.write(name, {name: torch.ones(2, dtype=dtype)}) for name, dtype in kinds.items()])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float32"}


def test_an_export_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    from ds_terapipe.hf import export
    from tests.hf import families

    checkpoint = checkpoint_of(families.model_of("llama"), tmp_path / "checkpoint")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"export: got .*there, must be a new folder or an empty one"):
        export(checkpoint, tmp_path / "there")
    with pytest.raises(ConfigError, match=r"must be the folder of one step of a pipeline that ds_terapipe.hf.pipeline"):
        export(tmp_path / "there", tmp_path / "out")
    for file in ("layer_02-model_states.pt", "mp_rank_00_model_states.pt"):
        whole = (checkpoint / file).read_bytes() if (checkpoint / file).exists() else b""
        for broken in (whole[:-100], b"PK", b""):
            (checkpoint / file).write_bytes(broken)
            with pytest.raises(ConfigError, match=rf"^export: got .*{file} \(.*\), must be a whole file, use another"):
                export(checkpoint, tmp_path / "out")
        (checkpoint / file).write_bytes(whole)
    (checkpoint / "mp_rank_00_model_states.pt").unlink()
    layer = torch.load(checkpoint / "layer_02-model_states.pt")
    torch.save({"x": torch.ones(2)}, checkpoint / "layer_02-model_states.pt")
    with pytest.raises(
        ConfigError, match=r"^export: got .*layer_02-model_states.pt of another layer, must be of entry 2"
    ):
        export(checkpoint, tmp_path / "out")
    torch.save(layer, checkpoint / "layer_02-model_states.pt")
    manifest.write(checkpoint, {})
    for file in ("layer_02-model_states.pt", "hf/names.json", "hf/config.json"):
        whole = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(
            ConfigError, match=rf"^export: got .*{file} with another checksum, must be as it was saved, use"
        ):
            export(checkpoint, tmp_path / "out")
        (checkpoint / file).write_bytes(whole)
    (checkpoint / MANIFEST).unlink()
    (checkpoint.parent / "latest").write_bytes(b"\0")
    assert cli.main(["export", str(checkpoint.parent), str(tmp_path / "out")]) == 1
    assert "error: export: got " in capsys.readouterr().err
    torch.save(
        layer, checkpoint / "layer_02-model_states.pt", _use_new_zipfile_serialization=False
    )  # DeepSpeed can, too
    assert export(checkpoint, tmp_path / "legacy").exists()
    (checkpoint / "layer_02-model_states.pt").unlink()
    with pytest.raises(ConfigError, match=r"export: got 0 files of layer 2 in"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert "error: got " in capsys.readouterr().err
    assert (tmp_path / "there" / "thesis.tex").read_text() == "mine"
