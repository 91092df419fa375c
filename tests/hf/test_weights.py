"""Which models a pipeline takes; each stage reads its own weights, and what is trained is a folder that from_pretrained reads."""

import json
import os
import shutil
import signal
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_terapipe import cli, hf, manifest
from ds_terapipe.errors import ConfigError
from ds_terapipe.hf import decoder_pipeline, export, folder as hf_folder
from ds_terapipe.hf.check import check_chain, shrunk
from ds_terapipe.hf.decoder_pipeline import _built, _specs
from ds_terapipe.hf.record import write_model, write_record
from ds_terapipe.hf.source import source_of
from ds_terapipe.names import MANIFEST
from tests.hf.families import model_of, renamed, steps, train_alone
from tests.pipeline.training import Trace, allow_fp16, build_engine, difference, mine
from tests.spawn import run_ranks, run_to_exit

TIED, UNTIED, SLICED = "llama, tied, dynamic", "qwen2", {"slices": [1, 15, 8]}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
ZERO_1 = {"zero_optimization": {"stage": 1}}
# model, configuration, whether it is our engine
NUMBERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fp32": (TIED, {}, True), "fp32, ZeRO-1, DeepSpeed's engine": (UNTIED, ZERO_1, False),
    "bf16": (UNTIED, BF16, True), "bf16, ZeRO-1": (TIED, {**BF16, **ZERO_1}, True),
    "fp16": (UNTIED, FP16, True), "fp16, ZeRO-1": (TIED, {**FP16, **ZERO_1}, True),
}  # fmt: skip
SGD = {"type": "SGD", "params": {"lr": 0.3}}
NOT_COPIED = ("vocab.bin", "pytorch_model.bin.index.json")
ADAPTER = "which is an adapter's, must be weights of the model alone, use "


def trained(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Two stages of two replicas from a folder of shards, in every type of numbers; a checkpoint and a folder of each."""
    allow_fp16()
    found: dict[str, Any] = {}
    for name, (family, config, ours) in NUMBERS.items():
        made, model = hf.pipeline(str(folder / family), num_stages=2, layers_per_stage=[3, 1]), model_of(family)
        for own, weight in renamed(Trace(weights=dict(made.named_parameters())), made).weights.items():
            assert torch.equal(weight, model.get_parameter(own)), f"{own} is not what the folder has"
        found[name] = set(made.source._weights._opened)
        block = SLICED if ours else None
        engine = build_engine((), None, token_pipeline=block, micro_batches=2, made=made, config=config, optimizer=SGD)
        for step in steps():
            engine.train_batch(iter([hf.batch(one) for one in mine(engine, step)]))
        engine.save_checkpoint(str(folder / "checkpoints" / name), tag="step")
        hf.save_pretrained(engine, folder / "live" / name, largest=20_000)
        with pytest.raises(ConfigError):  # a folder that is there
            hf.save_pretrained(engine, folder / "live" / name)
        if name == "bf16":  # the last stage alone has an adapter
            if engine.grid.is_last_stage:
                attention = next(each for each in engine.module.forward_funcs if hasattr(each, "layer")).layer.self_attn
                attention.v_proj = torch.nn.ModuleDict({"base_layer": attention.v_proj})  # as peft names it
            with pytest.raises(ConfigError) as said:
                hf.save_pretrained(engine, folder / "adapted")
            torch.distributed.barrier()
            full = mock.patch.object(decoder_pipeline, "write_record", side_effect=OSError("full"))
            with full, pytest.raises(ConfigError, match="full"):
                engine.save_checkpoint(str(folder / "full"))
            found["adapters"] = str(said.value), [path.name for path in folder.glob("*adapted*")]
        if ours:
            engine.destroy()
    return found


def test_a_pipeline_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    for family in (TIED, UNTIED):
        model_of(family).save_pretrained(tmp_path / family, max_shard_size="10KB")
        for name in ("tokenizer.json", *NOT_COPIED):
            (tmp_path / family / name).write_text("{}")
    ranks, tokens = run_ranks(trained, 4, tmp_path, timeout=240), steps()[0][0]["input_ids"]
    said = f"hf.save_pretrained: got model.layers.3.self_attn.v_proj.base_layer.weight, {ADAPTER}engine.save_checkpoint"
    assert [rank["adapters"] for rank in ranks] == [(f"{said}, which keeps them", [])] * 4
    for name, (family, config, _) in NUMBERS.items():
        read = [rank[name] for rank in ranks]
        assert read[0] == read[1] and read[2] == read[3] and read[0] & read[2] < read[0] | read[2], "all read all"
        out = export(tmp_path / "checkpoints" / name / "step", tmp_path / "out" / name, largest=15_000)
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 2 and (out / "tokenizer.json").exists()
        assert not any((out / each).exists() for each in NOT_COPIED)
        folders = out, tmp_path / "live" / name
        ours, live = (AutoModelForCausalLM.from_pretrained(one, dtype="auto").eval() for one in folders)
        for own, parameter in ours.named_parameters():
            assert parameter.dtype == torch.float32, f"{name}: {own} is not the master"
            # without ZeRO masters of fp16 are in checkpoints only
            same = torch.equal(parameter.half() if name == "fp16" else parameter, live.get_parameter(own))
            assert same, f"{name}: {own} differs from the live one"
        alone = model_of(family)
        train_alone(alone, steps(), optimizer=partial(torch.optim.SGD, lr=SGD["params"]["lr"]))
        alone.eval()
        if not {"bf16", "fp16"} & set(config):
            assert all(difference(p, alone.get_parameter(own)) <= 1e-5 for own, p in ours.named_parameters()), name
        logits = ours(tokens).logits
        assert difference(logits, alone(tokens).logits) <= (2e-2 if {"bf16", "fp16"} & set(config) else 1e-5), name
        assert difference(logits, model_of(family).eval()(tokens).logits) > 5e-2, f"{name}: it has learned nothing"


TWO = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
SMALL = {**TWO, "intermediate_size": 48, "vocab_size": 64}
SIZES = SMALL | {"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
# docs/reference/hugging_face.md's list, by the name of the configuration's class
PASS = ["Apertus", "Arcee", "BitNet", "Cwm", "Ernie4_5", "Exaone4", "Gemma", "Glm", "Glm4", "GPTBigCode", "Helium",
        "HunYuanDenseV1", "InternLM3", "Jais2", "Ministral", "Ministral3", "Nemotron", "Olmo", "Olmo3", "Persimmon", "Phi",
        "SeedOss", "SmolLM3", "StableLm", "Starcoder2", "VaultGemma"]  # fmt: skip
DIFFERS = "whose own forward does more than its layers do"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "GraniteConfig": (SIZES | {"logits_scaling": 4.0}, DIFFERS), "CohereConfig": (SIZES | {"logit_scale": 0.1}, DIFFERS),
    "Cohere2Config": (SIZES, DIFFERS), "Gemma3nTextConfig": ({}, "with Gemma3nRMSNorm and"),
    "OPTConfig": (TWO | {"ffn_dim": 48}, "without a list of layers"), "MixtralConfig": (SIZES, "mixture"),
    "Lfm2Config": (SIZES | {"layer_types": ["conv", "full_attention"]}, "whose layers do not run one after the other"),
    "FalconConfig": (TWO, "AttentionInterface"),
    "GPTJConfig": ({"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, "AttentionInterface"),
    "BloomConfig": ({"hidden_size": 32, "n_head": 4, "n_layer": 2}, "AttentionInterface"),
    "BertConfig": (TWO, "with BertEmbeddings and BertEncoder"),
    "Starcoder2Config": (SIZES | {"embedding_dropout": 0.1}, "drops out beside its layers, must be a decoder of word embedding, "
                         "layers, norm and head, use it with embedding_dropout 0, or write"),
}  # fmt: skip


def check(model: Any) -> None:
    """Check a model as :func:`ds_terapipe.hf.pipeline` does before it reads weights."""
    source = source_of(model, torch.float64, 0)
    check_chain(source, lambda tiny: [_built(spec) for spec in _specs(tiny)])


def test_a_tiny_model_of_a_kind_shares_keys_where_that_kind_does() -> None:
    configs = [transformers.ApertusConfig(num_attention_heads=8, num_key_value_heads=keys) for keys in (8, 2)]
    vars(configs[0])["dtype"] = "float32"  # as save_pretrained leaves it; this kind reads it, and takes no text
    tiny = [transformers.ApertusForCausalLM(shrunk(each)).config for each in configs]
    assert [each.num_key_value_heads for each in tiny] == [4, 2]


@pytest.mark.parametrize("name", [*PASS, *OTHERS])
def test_a_model_that_is_its_layers_passes_and_another_is_refused_with_what(name: str) -> None:
    if name in PASS:
        check(getattr(transformers, f"{name}Config")(**SIZES))
        return
    sizes, said = OTHERS[name]
    with pytest.raises(ConfigError) as refused:
        check(getattr(transformers, name)(**sizes))
    assert said in str(refused.value) and "\n" not in str(refused.value), str(refused.value)


def test_a_forward_of_the_users_own_and_kernels_that_know_no_slices_are_refused() -> None:
    class Cooler(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits / 2
            return out

    config = LlamaConfig(**SIZES)
    check(LlamaForCausalLM(config))
    with pytest.raises(ConfigError, match=f"{DIFFERS}.*logits differs by"):
        check(Cooler(config))
    (other := LlamaForCausalLM(config)).loss_function = lambda logits, labels, **more: logits.logsumexp(-1).mean()
    with pytest.raises(ConfigError, match=f"{DIFFERS}.*the loss differs by"):
        check(other)
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    for part, named in (("", "LlamaForCausalLM"), ("model", "model"), ("lm_head", "lm_head")):
        hook = tied.get_submodule(part).register_forward_hook(print)
        with pytest.raises(ConfigError, match=f"a forward of its own on {named}, which a pipeline does not run"):
            check(tied)
        hook.remove()
    check(tied)
    for kernels in ("flash_attention_2", "flex_attention"):
        config._attn_implementation = kernels
        with pytest.raises(ConfigError, match=f'attn_implementation: got "{kernels}"'):
            check(config)


DAMAGED = {
    "missing": "that is missing, must be whole", "truncated": "that is damaged", "shape": "of shape [16, 32] in",
    "weight": "hf.pipeline: got no model.layers.3.mlp.up_proj.weight in", "pickle": "without model.safetensors",
}  # fmt: skip
LLAMA = LlamaConfig(**SMALL)
REPEATED = LlamaForCausalLM(LLAMA)
REPEATED.model.layers[1] = REPEATED.model.layers[0]
# what hf.pipeline is given (a function of the rank, or a value), its options, and what is said
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (transformers.T5Config(), {}, "hf.pipeline: got t5, an encoder with a decoder"),
    (lambda rank: transformers.BertModel(transformers.BertConfig(**TWO)), {}, "got bert, BertModel without a head for logits"),
    (LlamaConfig(**SMALL | {"num_hidden_layers": 1}), {}, "layers per stage: got"),
    (LLAMA, {"num_stages": 3}, "num_stages: got 3 for 2 processes"),
    (LLAMA, {"mean_over": "step", "loss": max}, 'mean_over: got "step" beside a loss of your own'),
    (LLAMA, {"mean_over": "step"}, 'mean_over: got "step", must be "micro_batch" under DeepSpeed'),
    (LLAMA, {"mean_over": "batch"}, 'mean_over: got "batch"'), ("/no/such/folder", {}, 'hf.pipeline: got "/no/such/folder"'),
    *((name, {}, said) for name, said in DAMAGED.items()),
    (lambda rank: "llama" if rank == 0 else "nowhere/llama", {}, "nowhere"), (lambda rank: LlamaForCausalLM(LLAMA), {}, "built"),
    (REPEATED, {}, "whose model.layers.1.self_attn.q_proj.weight is model.layers.0.self_attn.q_proj.weight, and each would"),
]  # fmt: skip


def refused(rank: int, world: int, folder: Path) -> list[str]:
    """Return the errors of each process; one that waits for another would not come back."""
    os.chdir(folder)
    said = []
    for given, options, _ in REFUSED:
        try:
            made = hf.pipeline(given(rank) if isinstance(given, types.FunctionType) else given, **{"num_stages": 2, **options})
            said.append(made.check_without_keys() or "built")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_what_can_not_be_built_is_said_on_every_process(tmp_path: Path) -> None:
    model = model_of("llama")
    for name in ("llama", *DAMAGED):
        model.save_pretrained(tmp_path / name, max_shard_size="10KB")
    index = json.loads((tmp_path / "weight" / "model.safetensors.index.json").read_text())
    last = index["weight_map"].pop("model.layers.3.mlp.up_proj.weight")
    (tmp_path / "weight" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "missing" / last).unlink()
    os.truncate(tmp_path / "truncated" / last, (tmp_path / "truncated" / last).stat().st_size - 10)
    config = json.loads((tmp_path / "shape" / "config.json").read_text())
    (tmp_path / "shape" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    for file in (tmp_path / "pickle").glob("model*"):
        file.rename(file.with_suffix(".bin"))
    for found in run_ranks(refused, 2, tmp_path):
        for said, (*_, wanted) in zip(found, REFUSED, strict=True):
            assert wanted in said and "\n" not in said, said


def write(rank: int, world: int, at: Path, victim: int, point: int) -> None:
    """Write the folders that are not there, from checkpoints or on two stages; a rank gets SIGKILL at a change of files."""
    left = [point if rank == victim else 0]
    save_file = hf_folder.save_file

    def happens(event: str, args: Any) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(f"{at}/out/"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def saved(tensors: Any, file: Path, *more: Any) -> None:
        sys.audit("open", file)
        save_file(tensors, file, *more)
        if left[0] == 1:  # it dies in the middle of this file
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(happens)
    hf_folder.save_file = saved
    for out in (at / "out" / name for name in ("model", "adapter")):
        if not out.exists() and world == 1:
            export(at / out.name, out, largest=20_000)
        elif not out.exists():
            made = hf.pipeline(model_of("llama"), num_stages=2, lora=lora_of(out.name))
            hf.save_pretrained(SimpleNamespace(module=made, grid=made.mpu()), out, largest=20_000)
    (at / f"{rank}.changes").write_text(str(-left[0]))


def lora_of(name: str) -> Any:
    return pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj"]) if name == "adapter" else None


@pytest.mark.parametrize("points", [3, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [1, 2], ids=["export", "save_pretrained"])
def test_a_folder_is_whole_or_absent_where_a_process_is_killed(tmp_path: Path, world: int, points: int) -> None:
    for name in ("model", "adapter"):
        checkpoint_of(model_of("llama"), tmp_path / name, lora_of(name))

    def run(victim: int = 0, point: int = 0) -> tuple[list[Any], dict[str, dict[str, bytes]]]:
        ends = run_to_exit(write, world, tmp_path, victim, point)
        out = [path for path in (tmp_path / "out").glob("*") if point == 0 or not path.name.startswith(".")]
        files = {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in out}
        return [end.code for end in ends], files

    whole = run()
    counts = [int((tmp_path / f"{rank}.changes").read_text()) for rank in range(world)]
    assert whole[0] == [0] * world and min(map(len, whole[1].values())) > 1 and sum(counts) > 20
    for number in range(points):
        shutil.rmtree(tmp_path / "out")
        victim = number % world
        codes, found = run(victim, 1 + number * (counts[victim] - 1) // (points - 1))
        assert codes[victim] == -signal.SIGKILL and found.items() <= whole[1].items(), (number, found.keys())
        assert run() == whole


def checkpoint_of(model: Any, folder: Path, lora: Any = None) -> Path:
    """The layer files of a checkpoint, written without an engine."""
    source = source_of(model, None, 0, lora=lora)
    folder.mkdir()
    for entry, spec in enumerate(_specs(source)):
        layer: Any = _built(spec)  # of a tied head a function
        torch.save(getattr(layer, "state_dict", dict)(), folder / f"layer_{entry:02d}-model_states.pt")
    write_record(source, folder)
    return folder


@pytest.mark.parametrize(("family", "head"), [("gemma3", ""), ("gpt_neox", ""), (TIED, "same"), (TIED, "other"), (TIED, "alone")])
def test_a_folder_is_read_as_transformers_reads_it(family: str, head: str, tmp_path: Path) -> None:
    model, file = model_of(family), tmp_path / "model.safetensors"
    model.generation_config.update(temperature=0.6, do_sample=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(file)
    if head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (head == "other")
    if head == "alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    source = source_of(str(tmp_path), torch.bfloat16, 0)
    parts = [*filter(None, (source.parts.tokens, source.parts.head, source.parts.rotary)), f"{source.parts.layers}.1"]
    for own, module in ((source.take(part), theirs.get_submodule(part)) for part in parts):
        found, expected = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (own, module))
        assert all(value.dtype == found[name].dtype and torch.equal(value, found[name]) for name, value in expected.items())
    assert source.parts.tied == (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight)
    out = export(checkpoint_of(str(tmp_path), tmp_path / "checkpoint"), tmp_path / "out")
    assert head == "alone" or not (load_file(out / file.name).keys() ^ tensors.keys()) - {"lm_head.weight"}
    write_model(source, tmp_path / "written")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "written").temperature == 0.6


@pytest.mark.parametrize("narrow", [False, True])
def test_an_export_is_loaded_in_the_type_that_it_has(narrow: bool, tmp_path: Path) -> None:
    model, made = model_of("qwen3"), torch.bfloat16 if narrow else torch.float32
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:3], 3  # cut by hand, of four layer_types
    model.config.dtype = torch.float32 if narrow else torch.bfloat16  # what a published folder says
    checkpoint_of(model, tmp_path / "step")
    (tmp_path / "latest").write_text("step")
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out"), *["--dtype", "bf16"] * narrow]) == 0
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(made)) and parameter.dtype == made, name


def test_an_export_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    checkpoint = checkpoint_of(model_of("llama"), tmp_path / "checkpoint")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("mine")

    def refused(said: str, given: Path = checkpoint, out: str = "out") -> None:
        with pytest.raises(ConfigError, match=f"^export: got .*{said}"):
            export(given, tmp_path / out)

    refused("there, must be a new folder or an empty one", out="there")
    refused("must be the folder of one step of a pipeline that ds_terapipe.hf.pipeline", tmp_path / "there")
    layer_file = checkpoint / "layer_02-model_states.pt"
    layer, whole = torch.load(layer_file), layer_file.read_bytes()
    for broken in (whole[:-100], b""):
        layer_file.write_bytes(broken)
        refused(rf"{layer_file.name} \(.*\), must be a whole file, use another")
    torch.save({"x": torch.ones(2)}, layer_file)
    refused("layer_02-model_states.pt of another layer, must be of entry 2")
    torch.save({}, layer_file)  # without frozen parameters
    refused("no model.layers.1.self_attn.q_proj.weight in .*, must be all weights of the model, use save_checkpoint without")
    for name in ("base_layer.weight", "lora_A.default.weight"):
        torch.save({**layer, f"layer.mlp.up_proj.{name}": torch.ones(2)}, layer_file)
        refused(f"model.layers.1.mlp.up_proj.{name}, {ADAPTER}")
    layer_file.write_bytes(whole)
    manifest.write(checkpoint, {})
    names = checkpoint / "hf" / "names.json"
    data = names.read_bytes()
    names.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    refused("names.json with another checksum, must be as it was saved, use")
    names.write_bytes(data)
    (checkpoint / MANIFEST).unlink()
    torch.save(layer, layer_file, _use_new_zipfile_serialization=False)  # DeepSpeed can, too
    assert export(checkpoint, tmp_path / "legacy").exists()
    layer_file.unlink()
    refused("0 files of layer 2 in")
    (checkpoint.parent / "latest").write_bytes(b"\0")
    for folder, said in ((checkpoint.parent, "error: export: got "), (tmp_path / "nowhere", "error: got ")):
        assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "there" / "thesis.tex").read_text() == "mine"
