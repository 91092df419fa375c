"""Everything that token slices do not go with is refused by name, on every rank, before there is an engine."""

from __future__ import annotations

import json
import logging
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config_utils import ScientificNotationEncoder
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_terapipe import refusals
from ds_terapipe.errors import ConfigError
from ds_terapipe.refusals.configuration import Rule
from ds_terapipe.refusals.deepspeed_keys import VALUE_RULES
from tests.json_values import JSON
from tests.schedule.strategies import SCHEDULES

from .mutants.claims import holds, refused_or_let_pass
from .spawn import run_ranks

KEY = {"token_pipeline": {"slices": 2}}

LAMB = {"type": "FusedLamb", "params": {"lr": 1e-3}}
RAMP = {"reference_lr": 1e-3, "reference_batch_size": 8, "total_steps": 100, "warmup_steps": 0}
PHASE = {"steps": 10, "batch_size": 8, "seq_length": 16, "lr": 1e-3, "warmup_steps": 0}

CONFIGS = {
    "zero-2": ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage: got 2, must be 0 or 1", "use 1"),
    "zero-3": ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: got 3, must be 0 or 1", "use 1"),
    "ulysses": ({"sequence_parallel_size": 2}, "sequence_parallel_size: got 2, must be 1", "use 1"),
    "random-ltd": (
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}},
        "data_efficiency.data_routing.random_ltd.enabled: got true, must be false",
        "use false",
    ),
    "flops profiler": ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled: got true", "use false"),
    "timers": ({"wall_clock_breakdown": True}, "wall_clock_breakdown: got true", "use false"),
    "deepcompile": ({"compile": {"deepcompile": True}}, "compile.deepcompile: got true", "use false"),
    "compile": ({"compile": {"enabled": True}}, "compile.enabled: got true", "use false"),
    "autotp": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: got 2", "megatron-core"),
    "autoep": ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled: got true", "dense"),
    "slices": ({"token_pipeline": {"slices": -3}}, "token_pipeline.slices: got -3", "use e.g. 8"),
    "slices by another word": (
        {"token_pipeline": {"slices": "many"}},
        'token_pipeline.slices: got "many"',
        "use e.g. 8",
    ),
    "schedule": ({"token_pipeline": {"slices": 2, "schedule": "gpipe"}}, 'got "gpipe"', SCHEDULES),
    "key": ({"token_pipeline": {"slises": 2}}, 'unknown key "slises"', 'use "slices"'),
    "top-level key": ({"token_pipline": {"slices": 2}}, "token_pipline: unknown key", 'use "token_pipeline"'),
    "optimizer": ({"optimizer": ["AdamW"]}, 'optimizer: got ["AdamW"], must be a block of keys', "use e.g. {"),
    "its type": ({"optimizer": {"type": ["AdamW"]}}, 'optimizer.type: got ["AdamW"], must be the name', "use e.g."),
    "its rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}},
        'optimizer.params.lr: got "1e-3", must be a number',
        "use e.g. 1e-3",
    ),
    "scheduler": ({"scheduler": "WarmupLR"}, 'scheduler: got "WarmupLR", must be a block of keys', "use e.g. {"),
    "its steps": (
        {"scheduler": {"type": "LambWarmup", "params": {**RAMP, "total_steps": 10**300}}, "optimizer": LAMB},
        "scheduler.params.total_steps: got 1000",
        "at most 9007199254740992",
    ),
    "clipping": ({"gradient_clipping": "1"}, 'gradient_clipping: got "1", must be a number', "0 for none"),
    "autocast": (
        {"torch_autocast": {"enabled": "yes"}},
        'torch_autocast.enabled: got "yes", must be true or false',
        "use false",
    ),
    "a block of DeepSpeed's": (
        {"flops_profiler": 3},
        "flops_profiler: got 3, must be what DeepSpeed reads",
        "leave it",
    ),
    "a value in one": (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": "all"}},
        'zero_optimization.reduce_bucket_size: got "all", must be what DeepSpeed reads (Input should be',
        "leave it out",
    ),
    "what only rank 0 prints": ({"seed": [1, {"a": 10**400}]}, "seed[1].a: got 1000", "use a smaller one"),
    "half a letter": (
        {"communication_data_type": "\ud800"},
        'communication_data_type: got "\\ud800", must be what DeepSpeed reads',
        "Got: \\ud800), use another value, or leave it out",
    ),
    "batch sizes": (
        {"train_batch_size": 8, "gradient_accumulation_steps": 3},
        "train_batch_size: got 8, must be what DeepSpeed reads (Check batch related parameters.",
        "8 != 1 * 3 * 1), use another value, or leave it out",
    ),
    "batch sizes beside MixedBatch": (
        {
            "scheduler": {"type": "MixedBatch", "params": {"phases": [PHASE]}},
            "optimizer": LAMB,
            "gradient_accumulation_steps": 3,
        },
        "gradient_accumulation_steps: got 3, must be scheduler.params.phases[0].batch_size / micro-batch size / data-parallel",
        "= 8 / 1 / 1 = 8 or absent beside MixedBatch, use 8",
    ),
    "path": (
        {"token_pipeline": {"trace_path": "a\0"}},
        'trace_path: got "a\\u0000", must be the name of a file',
        "trace.json",
    ),
    "path of half a letter": (
        {"token_pipeline": {"plan_path": "\ud800"}},
        'got "\\ud800", must be the name',
        "plan.json",
    ),
    "elastic": (
        {"elastic_pipeline": {"resize": {"policy": "halved"}}},
        'elastic_pipeline.resize.policy: got "halved", must be',
        'use "halve"',
    ),
}


class Plain(nn.Linear):
    """A layer that every check lets pass."""

    def __init__(self, **marks):
        super().__init__(4, 4)
        for name, value in marks.items():
            setattr(self, name, value)


class FlashSelfAttention(Plain):
    """Megatron-DeepSpeed's, by its name."""


class SwitchMLP(Plain):
    """Megatron-DeepSpeed's, by its name."""


def marked_parameter():
    layer = Plain()
    layer.bias.sequence_parallel = True
    return layer


def compiled_in_place():
    layer = Plain()
    layer.compile()
    return layer


def compiled_forward():
    layer = Plain()
    layer.forward = torch.compile(layer.forward)
    return layer


def compiled_inside():
    return nn.Sequential(Plain(), torch.compile(Plain()))


def deepspeed_moe():
    from deepspeed.moe.layer import MoE

    return MoE(4, Plain(), num_experts=2)


def ulysses_attention():
    from deepspeed.sequence.layer import DistributedAttention

    return DistributedAttention(Plain(), None)


def megatron_deepspeed_layer(**arguments):
    """A layer of a module of the package ``megatron``, which reads ``arguments`` from there."""
    home = ModuleType(f"megatron.model.{'_'.join(arguments)}")
    home.get_args = lambda: SimpleNamespace(**arguments)
    sys.modules[home.__name__] = home
    return type("ParallelTransformerLayerPipe", (Plain,), {"__module__": home.__name__})()


LAYERS = {
    "OptimizedModule": (lambda: torch.compile(Plain()), "is compiled"),
    "module.compile()": (compiled_in_place, "is compiled"),
    "compiled forward": (compiled_forward, "is compiled"),
    "compiled part": (compiled_inside, "is compiled"),
    "compiled function": (lambda: torch.compile(torch.relu), "is compiled"),
    "DeepSpeed MoE": (deepspeed_moe, "mixture of experts"),
    "experts by number": (lambda: Plain(num_experts=4), "mixture of experts"),
    "SwitchMLP": (SwitchMLP, "mixture of experts"),
    "Ulysses attention": (ulysses_attention, "shares a sequence among ranks"),
    "Ulysses by mark": (lambda: Plain(enable_ds_sequence_parallel=True), "shares a sequence among ranks"),
    "FPDT": (lambda: Plain(ds_sequence_parallel_fpdt=True), "shares a sequence among ranks"),
    "sequence_parallel layer": (lambda: Plain(sequence_parallel=True), "sequence_parallel=True"),
    "sequence_parallel config": (
        lambda: Plain(config=SimpleNamespace(sequence_parallel=True)),
        "sequence_parallel=True",
    ),
    "sequence_parallel parameter": (marked_parameter, "sequence_parallel=True"),
    "context parallel": (lambda: Plain(config=SimpleNamespace(context_parallel_size=2)), "context_parallel_size > 1"),
    "use_flash_attn": (lambda: Plain(use_flash_attn=True), "flash attention"),
    "FlashSelfAttention": (FlashSelfAttention, "flash attention"),
    "Megatron-DeepSpeed rotary": (
        lambda: megatron_deepspeed_layer(use_rotary_position_embeddings=True, enable_zbh1_pipeline=False),
        "rotary positions",
    ),
    "Megatron-DeepSpeed zero bubble": (
        lambda: megatron_deepspeed_layer(enable_zbh1_pipeline=True),
        "keeps weight gradients back for a zero-bubble schedule",
    ),
    "bidirectional attention": (lambda: Plain(is_bidirectional=True), "attention that is not causal"),
    "rotary by mark": (lambda: Plain(use_rotary_position_embeddings=True), "rotary positions"),
}

FINE = {
    "num_experts": 1,
    "use_flash_attn": False,
    "sequence_parallel": False,
    "is_moe_model": False,
    "use_rotary_position_embeddings": False,
    "config": SimpleNamespace(sequence_parallel=False, context_parallel_size=1, use_flash_attn=False),
}


ELASTIC = {"elastic_pipeline": {"resize": {"policy": "off"}}}


def refused(model, keys) -> tuple[str, str]:
    """Class and text of what ``deepspeed.initialize`` with the hook raises."""
    import deepspeed

    import ds_terapipe

    ds_terapipe.register()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, **KEY, **keys}
    if "elastic_pipeline" in keys or "token_pipline" in keys:
        del config["token_pipeline"]
    try:
        deepspeed.initialize(model=model, config=config)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def pipeline(last_layer=Plain, module_class=None):
    """Two stages of one layer; what is wrong stands on the last stage only, so rank 0 cannot see it."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(Plain), last_layer()]
    return (module_class or PipelineModule)(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )


def refused_configs(rank, world_size, names=tuple(CONFIGS)):
    model = pipeline()
    return {name: refused(model, CONFIGS[name][0]) for name in names}


def refused_layers(rank, world_size, names=tuple(LAYERS)):
    return {name: refused(pipeline(LAYERS[name][0]), {}) for name in names}


def bert():
    """Megatron-DeepSpeed's pretrain_bert.py hands over its model as it is, or in a wrapper."""
    model = type("BertModel", (Plain,), {"__module__": "megatron.model.bert_model"})()
    return type("Wrapper", (nn.Sequential,), {})(model)


def refused_models(rank, world_size):
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    class WithLosses(PipelineModule):
        def get_additional_losses(self):
            return {"moe loss": torch.zeros(())}

    class WithLossesLater(PipelineModule):
        def get_additional_losses(self):
            return self.never_set_before_the_first_step

    found = refused_layers(rank, world_size)
    found["additional losses"] = refused(pipeline(module_class=WithLosses), {})
    found["additional losses later"] = refused(pipeline(module_class=WithLossesLater), {})
    found["no PipelineModule"] = refused(Plain(), {})
    found["Megatron's BERT"] = refused(bert(), {})
    found["compiled PipelineModule"] = refused(torch.compile(pipeline()), {})
    four = DualPipeVModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, partition_method="uniform")
    found["DualPipeV"] = refused(four, {})
    return found


def refused_elastic(rank, world_size):
    """With the block ``elastic_pipeline`` alone: models, a layer, and what DeepSpeed adds to the configuration later."""
    import deepspeed
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    four = DualPipeVModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, partition_method="uniform")
    found = {"no PipelineModule": refused(Plain(), ELASTIC), "DualPipeV": refused(four, ELASTIC)}
    found["layer"] = refused(pipeline(lambda: Plain(sequence_parallel=True)), ELASTIC)
    added = {"wall_clock_breakdown": True}  # as what deepspeed.tp_model_init asked for is added
    with patch.object(deepspeed, "merge_tp_model_init_into_config", lambda config, *rest: config.update(added)):
        found["added"] = refused(pipeline(), ELASTIC)
    return found


def test_users_of_elastic_pipeline_alone_read_of_that():
    messages = on_every_rank(run_ranks(refused_elastic, 2))
    assert messages["no PipelineModule"].startswith('elastic_pipeline: got "Plain", must be a PipelineModule')
    assert messages["DualPipeV"].startswith('elastic_pipeline: got "DualPipeVModule"')
    assert messages["layer"].startswith("elastic_pipeline: layer 1")
    assert "beside elastic_pipeline, use" in messages["layer"]
    assert messages["added"].startswith("wall_clock_breakdown: got true, must be false beside elastic_pipeline (")
    assert not any("token_pipeline" in message for message in messages.values())


def on_every_rank(results) -> dict[str, str]:
    first, second = results
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == second[name], name
        assert first[name][0] == "ConfigError", (name, first[name])
        assert "\n" not in first[name][1]
    return {name: message for name, (_, message) in first.items()}


def test_configs_are_refused_on_every_rank():
    check_configs(run_ranks(refused_configs, 2))


def check_configs(results):
    for name, message in on_every_rank(results).items():
        for part in CONFIGS[name][1:]:
            assert part in message, name


def check_layers(results):
    for name, message in on_every_rank(results).items():
        assert LAYERS[name][1] in message, name
        assert message.startswith("token_pipeline: layer 1"), name
        assert "must be" in message and ", use " in message


def found_by_one(rank, world_size):
    """What all ranks get of an error of the last one, and of none."""

    def check():
        if rank == world_size - 1:
            raise ConfigError("key: got \ud800, must be this")  # which utf-8 cannot encode
        return rank

    model = pipeline()
    try:
        refusals.on_every_rank(model, check)
    except ConfigError as error:
        return str(error), refusals.on_every_rank(model, lambda: rank)
    return "nothing", refusals.on_every_rank(model, lambda: rank)


def test_what_one_rank_finds_is_raised_on_all():
    check_found(run_ranks(found_by_one, 2))


def check_found(results):
    assert results == [("key: got \\ud800, must be this", 0), ("key: got \ud800, must be this", 1)]


# measures of these tests for tests.mutants
def configs_are_refused(mutant, *names):
    return holds(check_configs, refused_or_let_pass(run_ranks(refused_configs, 2, names, mutant=mutant)))


def layers_are_refused(mutant, *names):
    return holds(check_layers, refused_or_let_pass(run_ranks(refused_layers, 2, names, mutant=mutant)))


def all_are_told(mutant):
    return holds(check_found, run_ranks(found_by_one, 2, mutant=mutant))


def test_models_are_refused_on_every_rank():
    results = run_ranks(refused_models, 2)
    check_layers([{name: found[name] for name in LAYERS} for found in results])
    messages = on_every_rank(results)
    assert "get_additional_losses" in messages["additional losses"]
    assert "get_additional_losses" in messages["additional losses later"]
    assert 'got "Plain", must be a PipelineModule' in messages["no PipelineModule"]
    assert "use deepspeed.pipe.PipelineModule(layers=..., num_stages=2) or" in messages["no PipelineModule"]
    assert messages["Megatron's BERT"] == (
        'token_pipeline: got "Wrapper", must be a PipelineModule, '
        "use ds_terapipe.megatron.bert_pipeline(config, num_stages=2) or remove the key"
    )
    assert "uncompiled" in messages["compiled PipelineModule"]
    assert "DualPipeV" in messages["DualPipeV"]


def stage(*layers) -> nn.Module:
    """One rank's stage as the checks see it."""
    model = nn.Sequential(*layers)
    model.forward_funcs = list(layers)
    model._local_start = 0
    model.get_additional_losses = lambda: None
    return model


def test_ordinary_layers_pass():
    megatron = megatron_deepspeed_layer(use_rotary_position_embeddings=False, enable_zbh1_pipeline=False)
    refusals.check_model(stage(Plain(), Plain(**FINE), megatron, nn.LayerNorm(4), nn.MultiheadAttention(4, 1)))


def test_megatron_core_mixture_of_experts():
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_layer")

    class Experts(moe.MoELayer):
        def __init__(self):
            nn.Module.__init__(self)

    with pytest.raises(ConfigError, match=r"layer 1 \(Experts\) is a mixture of experts"):
        refusals.check_model(stage(Plain(), Experts()))


def test_a_forward_of_the_modules_own_runs_uncut_only():
    class Doubled(PipelineModule):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    model = Doubled.__new__(Doubled)
    nn.Module.__init__(model)
    model.forward_funcs, model._local_start = [], 0
    refusals.check_model(model, cut=False)
    with pytest.raises(
        ConfigError, match=r'^token_pipeline: Doubled has a forward of its own, must be .*, use "slices": 1'
    ):
        refusals.check_model(model)


def test_bidirectional_attention_runs_uncut():
    refusals.check_model(stage(Plain(is_bidirectional=True)), cut=False)


def test_ordinary_configs_pass():
    refusals.check_config({})
    refusals.check_config(
        {
            "zero_optimization": {"stage": 1},
            "sequence_parallel_size": 1,
            "flops_profiler": {"enabled": False},
            "wall_clock_breakdown": False,
            "compile": {"deepcompile": False},
            "tensor_parallel": {"autotp_size": 0},
            "data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": False}}},
            "gradient_clipping": "auto",
        }
    )
    refusals.check_config({"zero_optimization": True})


@given(st.sampled_from(VALUE_RULES), JSON)
def test_any_value_of_deepspeeds_keys_is_taken_or_one_line(rule: Rule, value: Any) -> None:
    config: Any = value
    for name in reversed(rule.path.split(".")):
        config = {name: config}
    try:
        refusals.check_keys(config, {})
    except ConfigError as error:
        assert re.match(rf"{re.escape(rule.path)}.*: got .*, must be .*, use ", str(error)) and "\n" not in str(error)
    else:
        assert not rule.refused(value)
        json.dumps(config, cls=ScientificNotationEncoder)  # as DeepSpeed prints it, on rank 0 alone


def test_a_block_that_an_argument_stands_in_for_is_not_read() -> None:
    for block, argument in (("optimizer", "optimizer"), ("scheduler", "lr_scheduler")):
        config = {block: {"type": "Mine", "params": {"lr": "auto", "warmup_num_steps": "auto"}}}
        refusals.check_keys(config, {argument: object()})
        with pytest.raises(ConfigError, match=rf'{block}.params.\w+: got "auto", must be'):
            refusals.check_keys(config, {})


def one_or_more_stages(stages):
    return SimpleNamespace(num_pipeline_stages=lambda: stages)


def test_one_stage_is_warned_about(caplog):
    refusals.advise({"gradient_clipping": 0}, one_or_more_stages(1))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "one pipeline stage, slices gain nothing" in caplog.text


AUTO_ALONE = {"slices": "auto", "memory_gb": 4, "measurements_path": "costs.json", "granularity": 16}
DOES_NOTHING = "token_pipeline.granularity, memory_gb, measurements_path: nothing is planned with one pipeline stage"


@pytest.mark.parametrize(
    ("stages", "block", "said"),
    [
        (1, AUTO_ALONE, True),
        (1, {**AUTO_ALONE, "slices": None}, True),  # "auto" where it is left out
        (1, {**AUTO_ALONE, "plan_path": "plan.json"}, False),
        (1, {"slices": "auto"}, False),
        (1, {}, False),
        (2, AUTO_ALONE, False),
    ],
)
def test_what_a_plan_would_read_is_warned_about_where_there_is_none(caplog, stages, block, said):
    block = {name: value for name, value in block.items() if value is not None}
    refusals.advise({"gradient_clipping": 0, "token_pipeline": block}, one_or_more_stages(stages))
    assert (DOES_NOTHING in caplog.text) == said
    assert len(caplog.records) == (stages == 1) + said


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "gradient_clipping: 1.0 (DeepSpeed's default) clips by the true norm over all"),
        ({"gradient_clipping": 0.5}, "gradient_clipping: 0.5 clips by the true norm over all"),
    ],
)
def test_clipping_is_told_in_one_line(caplog, config, text):
    caplog.set_level(logging.INFO)
    refusals.advise(config, one_or_more_stages(2))
    assert len(caplog.records) == 1
    assert text in caplog.text


def test_no_clipping_no_line(caplog):
    caplog.set_level(logging.INFO)
    refusals.advise({"gradient_clipping": 0.0}, one_or_more_stages(2))
    assert not caplog.records


@pytest.mark.parametrize(("tensor_parallel", "given", "warnings"), [(2, True, 1), (2, False, 0), (1, True, 0)])
def test_partitioned_activations_are_turned_off_with_one_warning(caplog, tensor_parallel, given, warnings):
    pipeline_block = {"stages": "auto", "pipe_partitioned": given, "grad_partitioned": given}
    model = SimpleNamespace(mpu=lambda: SimpleNamespace(model_parallel_size=tensor_parallel))
    refusals.turn_off_partitioning(pipeline_block, model, "elastic_pipeline")
    assert pipeline_block == {"stages": "auto", "pipe_partitioned": False, "grad_partitioned": False}
    assert len(caplog.records) == warnings
    line = "pipeline.pipe_partitioned and pipeline.grad_partitioned ignored beside elastic_pipeline: a slice"
    assert (line in caplog.text) == bool(warnings)


def test_the_block_that_the_user_wrote_is_named() -> None:
    for block in ("token_pipeline", "elastic_pipeline"):
        with pytest.raises(ConfigError, match=f"zero_optimization.stage: got 2, must be 0 or 1 beside {block} "):
            refusals.check_config({"zero_optimization": {"stage": 2}}, block)
