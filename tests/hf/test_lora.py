"""LoRA in a pipeline: trained as peft does it in one process, frozen and moved, and written as one folder that peft loads."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed, extra hf")

import peft
from safetensors.torch import load_file

from ds_terapipe import hf
from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.adapters import VALUES
from ds_terapipe.hf.source import source_of
from ds_terapipe.names import MANIFEST
from tests.hf.families import SGD, config_of, model_of, renamed, steps, train_alone
from tests.pipeline.training import Trace, build_engine, difference, mine, train, worst
from tests.spawn import run_ranks

TIED, SLICED = "llama, tied, dynamic", {"slices": [1, 15, 8]}
WHOLE = {"modules_to_save": ["lm_head"], "bias": "all"}
SHARED = {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
FIRST = {"target_modules": r".*(wpe|h\.0\.attn\.c_attn)", "fan_in_fan_out": True}
# model, LoraConfig, stages, block, configuration, options of the pipeline
CASES: dict[str, tuple[str, dict[str, Any], int, Any, dict[str, Any], dict[str, Any]]] = {
    "four stages": ("llama", {"rank_pattern": {"q_proj": 2}}, 4, SLICED, {}, {}),
    "a tied one that is given, ZeRO-1": (TIED, SHARED, 2, SLICED, {"zero_optimization": {"stage": 1}}, {}),
    "recomputed": ("qwen2", WHOLE, 2, SLICED, {}, {"activation_checkpointing": True}),
    "recomputed, DeepSpeed's engine": ("qwen2", WHOLE, 2, None, {}, {"activation_checkpointing": True}),
    "one stage of four trains": ("gpt2", FIRST, 4, SLICED, {}, {}),
    "bf16": ("llama", {}, 2, SLICED, {"bf16": {"enabled": True}}, {}),
}
FREEZE = [[2, 2], [4, 3]]
ELASTIC = {
    "freeze": {"policy": "schedule", "frozen_layers": FREEZE}, "resize": {"policy": [[2, 1], [4, 2]]}, "cache": {"enabled": True}
}  # fmt: skip


def lora(**options: Any) -> Any:
    plain = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": "gaussian"}
    return peft.LoraConfig(**plain | options)


def weights(made: Any, trained: bool = True) -> dict[str, torch.Tensor]:
    kept = {name: p.detach().float().clone() for name, p in made.named_parameters() if p.requires_grad or not trained}
    return renamed(Trace(weights=kept), made).weights


def work(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (family, options, stages, block, config, more) in CASES.items():
        given = model_of(family) if "given" in name else folder / family
        made = hf.pipeline(given, num_stages=stages, lora=lora(**options), **more)
        begin = weights(made)
        engine = build_engine((), None, token_pipeline=block, micro_batches=stages, optimizer=SGD, config=config, made=made)
        trace = train(engine, [[hf.batch(one) for one in step] for step in steps()])
        engine.save_checkpoint(str(folder / "checkpoints" / name), tag="step")
        hf.save_pretrained(engine, folder / "live" / name)
        found[name] = begin, renamed(trace, made)
        if block:
            engine.destroy()
    found["dropout"] = [losses(folder, stages, lora_dropout=0.5)[0] for stages in (4, 2)]
    found["elastic"] = losses(folder, 2, ELASTIC)
    return found


def losses(folder: Path, stages: int, elastic: Any = None, **options: Any) -> Any:
    """Losses of an elastic engine; with ``elastic`` numbers of stages, samples read from the cache and weights, too."""
    made = hf.pipeline(folder / "llama", num_stages=stages, lora=lora(**options))
    keys = {"elastic_pipeline": elastic or {"enabled": True}}
    cut = {"slices": 3}
    engine = build_engine((), None, token_pipeline=cut, micro_batches=stages, optimizer=SGD, config=keys, made=made)
    found = []
    for step in [mine(engine, each) for each in steps(6)]:  # of the shape at the start
        found.append((float(engine.train_batch(iter([hf.batch(one) for one in step]))), engine.num_stages))
    result = *zip(*found, strict=True), engine.cache_counts.read, weights(engine.module, trained=False)
    engine.destroy()
    return result


@pytest.fixture(scope="module")
def launch(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("lora")
    for family in ("llama", "qwen2", "gpt2"):
        model_of(family).save_pretrained(folder / family)
    return folder, run_ranks(work, 4, folder, timeout=240)


def alone(family: str, options: dict[str, Any], count: int = 2, freeze: Any = lambda model, step: None) -> Any:
    """peft's model, its weights at the beginning and its training in one process, by the names of the base model."""
    model = peft.get_peft_model(model_of(family), lora(**options))
    inner = model.base_model.model
    inner.load_state_dict(source_of(model_of(family), None, 1234, lora=lora(**options)).model.state_dict())
    begin = {name: p.detach().clone() for name, p in inner.named_parameters() if p.requires_grad}
    optimizer = partial(torch.optim.SGD, lr=SGD["params"]["lr"])
    trace = train_alone(model, steps(count), optimizer=optimizer, before_step=partial(freeze, inner))
    plain = [{name.removeprefix("base_model.model."): g for name, g in of_step.items()} for of_step in trace.gradients]
    trace = Trace(trace.losses, plain, weights={name: p.detach().clone() for name, p in inner.named_parameters()})
    return model.eval(), begin, trace


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_trains_as_in_one_process_and_peft_loads_it(launch: Any, name: str) -> None:
    (folder, ranks), (family, options, _, _, config, _) = launch, CASES[name]
    model, begin, expected = alone(family, options)
    trained: set[str] = set()
    for first, got in (rank[name] for rank in ranks):
        assert all(torch.equal(value, begin[own]) for own, value in first.items()), "it begins elsewhere"
        trained |= first.keys()
        if "bf16" not in config:
            assert all(of_step.keys() == first.keys() for of_step in got.gradients), "the base has gradients"
            assert max(map(worst, got.gradients, expected.gradients)) <= 1e-5
            assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert trained == begin.keys()
    live, tokens = folder / "live" / name, steps()[0][0]["input_ids"]
    out = hf.export(folder / "checkpoints" / name / "step", folder / "out" / name)
    first, second = load_file(live / VALUES), load_file(out / VALUES)
    assert first.keys() == second.keys() == peft.get_peft_model_state_dict(model).keys()
    assert all(torch.equal(first[own], second[own]) and first[own].dtype == torch.float32 for own in first)
    loaded = peft.PeftModel.from_pretrained(model_of(family), live).eval()(tokens).logits
    assert difference(loaded, model(tokens).logits) <= (2e-2 if "bf16" in config else 1e-5)
    assert difference(loaded, model_of(family).eval()(tokens).logits) > 1e-4, "it has learned nothing"


def test_adapters_freeze_move_and_are_cached_and_their_dropout_does_not_depend_on_the_stages(launch: Any) -> None:
    def freeze(model: Any, step: int) -> None:
        last = max((entries for begin, entries in FREEZE if begin <= step), default=0) - 1
        for name, p in model.named_parameters():
            p.requires_grad_("lora" in name and int(name.split(".")[2]) >= last)

    expected, plain = alone("llama", {}, 6, freeze)[2], alone("llama", {}, 6)[2].losses
    for (found, shapes, _, after), (four, two) in ((rank["elastic"], rank["dropout"]) for rank in launch[1]):
        assert found == pytest.approx(expected.losses, rel=1e-5) and shapes == (2, 2, 1, 1, 2, 2)
        assert worst(after, expected.weights) <= 1e-5
        assert four == pytest.approx(two, rel=2e-6)
        assert max(abs(a / b - 1) for a, b in zip(four, plain, strict=True)) > 1e-5, "nothing is dropped"
    assert sum(rank["elastic"][2] for rank in launch[1]) > 0, "the cache is not read"


def test_an_embedding_that_trains_beside_an_adapter_stays_tied_and_is_in_its_folder() -> None:
    model, name = peft.get_peft_model(model_of(TIED), lora()), "model.embed_tokens.weight"
    model.get_input_embeddings().requires_grad_(True)
    source = source_of(model, None, 0)
    assert source.parts.tied and source.adapter is not None and source.adapter.names[f"base_model.model.{name}"] == name
    saved = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["wpe"], "layers_to_transform": [0]}
    assert source_of(peft.get_peft_model(model_of("gpt2"), lora(**saved)), None, 0).parts.positions == "transformer.wpe"


def test_a_part_that_is_missing_and_an_adapter_of_another_model_are_said(launch: Any, tmp_path: Path) -> None:
    checkpoint, adapter = tmp_path / "checkpoint", tmp_path / "adapter"
    shutil.copytree(launch[0] / "checkpoints" / "four stages" / "step", checkpoint)
    layer = checkpoint / "layer_02-model_states.pt"
    torch.save({own: value for own, value in torch.load(layer).items() if "q_proj.lora_B" not in own}, layer)
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(ConfigError, match=r"export: got no model.layers.1.*.q_proj.lora_B.default.weight in the part"):
        hf.export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.copytree(launch[0] / "live" / "four stages", adapter)
    again = source_of(model_of("llama"), None, 0, adapter=adapter).model.state_dict()
    for own, value in load_file(adapter / VALUES).items():
        at = own.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(again[at], value), own
    model, there = model_of("llama"), source_of(model_of("llama"), None, 0, lora=lora()).model
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    quantized = config_of("llama", quantization_config={"quant_method": "bitsandbytes"})
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (model_of("llama", num_hidden_layers=3), {"adapter": adapter}, rf"got {adapter}/{VALUES} with base_model.*layers.3"),
        (model_of("llama", num_hidden_layers=5), {"adapter": adapter}, rf"got {adapter}/{VALUES} without base_model"),
        (model_of("llama", intermediate_size=40), {"adapter": adapter}, r"up_proj.*of shape \[48, 4\] for one of \[40, 4\]"),
        (model, {"adapter": launch[0] / "llama"}, "adapter: got .*/llama/adapter_config.json"),
        (model, {"adapter": adapter, "lora": lora()}, "adapter: got .* beside lora"),
        (adapter, {}, "which has an adapter, must be a model"),
        (there, {"lora": lora()}, "lora: got a model that has an adapter"),
        (model, {"lora": lora(use_dora=True)}, "lora: got use_dora True"),
        (model, {"lora": lora(init_lora_weights="pissa")}, 'lora: got init_lora_weights "pissa"'),
        (peft.get_peft_model(model_of("llama"), prompt), {}, "hf.pipeline: got PROMPT_TUNING, must be LoRA"),
        (model_of(TIED), {"lora": lora(target_modules=["lm_head"], ensure_weight_tying=True)}, "on lm_head, which stays tied"),
        (model, {"lora": lora(target_modules=["query"])}, "lora: got .*'query'.* not found"),
        (model, {"lora": lora(modules_to_save=["hed"])}, 'lora: got modules_to_save "hed"'),
        (quantized, {"lora": lora()}, "got llama quantized by bitsandbytes"),
    ]  # fmt: skip
    for given, options, said in refused:
        with pytest.raises(ConfigError, match=f"^[^\n]*{said}[^\n]*$"):
            source_of(given, None, 0, **options)
    os.truncate(adapter / VALUES, 100)
    with pytest.raises(ConfigError, match=rf"{VALUES} that is damaged"):
        source_of(model_of("llama"), None, 0, adapter=adapter)
