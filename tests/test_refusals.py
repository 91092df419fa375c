"""Everything that token slices do not go with is refused by name, on every rank, before there is an engine."""

import json
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config_utils import ScientificNotationEncoder
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.sequence.layer import DistributedAttention
from hypothesis import given, strategies as st
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

import ds_terapipe
from ds_terapipe import refusals
from ds_terapipe.errors import ConfigError
from ds_terapipe.refusals.deepspeed_keys import VALUE_RULES
from ds_terapipe.rules import Rule
from tests.json_values import JSON
from tests.pipeline.training import raised
from tests.spawn import launched

LAMB = {"type": "FusedLamb", "params": {"lr": 1e-3}}
MIXED = {"phases": [{"steps": 10, "batch_size": 8, "seq_length": 16, "lr": 1e-3, "warmup_steps": 0}]}
LTD = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}

# configuration, how the message begins, what else is in it
CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage: got 2, must be 0 or 1", "use 1"),
    ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}, "token_pipeline": {"stages_per_place": 2}},
     "zero_optimization.round_robin_gradients: got true, must be false where layers are placed or may move", "use false"),
    ({"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage: got "2", must be a number', "use 0 or 1"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size: got 2, must be 1", "use 1"),
    ({"data_efficiency": LTD}, "data_efficiency.data_routing.random_ltd.enabled: got true, must be false", "use false"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled: got true", "use false"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown: got true", "use false"),
    ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "torch_autocast: got {", "or the block fp16"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile: got true", "use false"),
    ({"compile": {"enabled": True}}, "compile.enabled: got true", "use false"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: got 2", "megatron-core"),
    ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled: got true", "dense"),
    ({"token_pipeline": {"slices": -3}}, "token_pipeline.slices: got -3", "use e.g. 8"),
    ({"token_pipline": {"slices": 2}}, "token_pipline: unknown key", 'use "token_pipeline"'),
    ({"optimizer": ["AdamW"]}, 'optimizer: got ["AdamW"], must be a block of keys', "use e.g. {"),
    ({"gradient_clipping": "1"}, 'gradient_clipping: got "1", must be a number', "0 for none"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "all"}},
     'zero_optimization.reduce_bucket_size: got "all", must be what DeepSpeed reads (Input should be', "leave it out"),
    ({"seed": [1, {"a": 10**400}]}, "seed[1].a: got 1000", "use a smaller one"),  # which only rank 0 prints
    ({"communication_data_type": "\ud800"},  # half a letter
     'communication_data_type: got "\\ud800", must be what DeepSpeed reads',
     "Got: \\ud800), use another value, or leave it out"),
    ({"train_batch_size": 8, "gradient_accumulation_steps": 3},
     "train_batch_size: got 8, must be what DeepSpeed reads (Check batch related parameters.",
     "8 != 1 * 3 * 1), use another value, or leave it out"),
    ({"scheduler": {"type": "MixedBatch", "params": MIXED}, "optimizer": LAMB, "gradient_accumulation_steps": 3},
     "gradient_accumulation_steps: got 3, must be scheduler.params.phases[0].batch_size / micro-batch size / data-parallel",
     "= 8 / 1 / 1 = 8 or absent beside MixedBatch, use 8"),
    ({"elastic_pipeline": {"freeze": {"policy": "alpah"}}},
     'elastic_pipeline.freeze.policy: got "alpah", must be', 'use "alpha"'),
    ({"elastic_pipeline": {"resize": {"policy": "halved"}}},
     'elastic_pipeline.resize.policy: got "halved", must be', 'use "halve"'),
]  # fmt: skip


class Plain(nn.Linear):
    """A layer that every check lets pass."""

    def __init__(self, **marks):
        super().__init__(4, 4)
        for name, value in marks.items():
            setattr(self, name, value)


def named(name: str) -> Any:
    return type(name, (Plain,), {})()


def changed(change: Any) -> Any:
    change(layer := Plain())
    return layer


class Experts(MoELayer):
    def __init__(self):
        nn.Module.__init__(self)


def of_megatron_deepspeed(**arguments: Any) -> Any:
    """A layer of a module of the package ``megatron``, which reads ``arguments`` from there."""
    home = ModuleType(f"megatron.model.{'_'.join(arguments)}")
    home.get_args = lambda: SimpleNamespace(**arguments)
    sys.modules[home.__name__] = home
    return type("ParallelTransformerLayerPipe", (Plain,), {"__module__": home.__name__})()


EXPERTS, SHARES, SEQUENCE = "mixture of experts", "shares a sequence among ranks", "sequence_parallel=True"
# each is the last stage's, so that rank 0 cannot see it
LAYERS = {
    "OptimizedModule": (lambda: torch.compile(Plain()), "is compiled"),
    "module.compile()": (lambda: changed(nn.Module.compile), "is compiled"),
    "compiled forward": (lambda: changed(lambda m: setattr(m, "forward", torch.compile(m.forward))), "is compiled"),
    "compiled function": (lambda: torch.compile(torch.relu), "is compiled"),
    "DeepSpeed's experts": (lambda: MoE(4, Plain(), num_experts=2), EXPERTS),
    "megatron-core's experts": (Experts, "(Experts) is a mixture of experts"), "SwitchMLP": (lambda: named("SwitchMLP"), EXPERTS),
    "Ulysses attention": (lambda: DistributedAttention(Plain(), None), SHARES),
    "FPDT": (lambda: Plain(ds_sequence_parallel_fpdt=True), SHARES),
    "sequence_parallel layer": (lambda: Plain(sequence_parallel=True), SEQUENCE),
    "sequence_parallel config": (lambda: Plain(config=SimpleNamespace(sequence_parallel=True)), SEQUENCE),
    "sequence_parallel parameter": (lambda: changed(lambda m: setattr(m.bias, "sequence_parallel", True)), SEQUENCE),
    "context parallel": (lambda: Plain(config=SimpleNamespace(context_parallel_size=2)), "context_parallel_size > 1"),
    "use_flash_attn": (lambda: Plain(use_flash_attn=True), "flash attention"),
    "FlashSelfAttention": (lambda: named("FlashSelfAttention"), "flash attention"),
    "Megatron-DeepSpeed rotary": (
        lambda: of_megatron_deepspeed(use_rotary_position_embeddings=True, enable_zbh1_pipeline=False), "rotary positions"),
    "Megatron-DeepSpeed zero bubble": (
        lambda: of_megatron_deepspeed(enable_zbh1_pipeline=True), "keeps weight gradients back for a zero-bubble schedule"),
    "bidirectional attention": (lambda: Plain(is_bidirectional=True), "attention that is not causal"),
}  # fmt: skip
FINE = {"num_experts": 1, "config": SimpleNamespace(sequence_parallel=False, context_parallel_size=1, use_flash_attn=False)}
FINE |= dict.fromkeys(("use_flash_attn", "sequence_parallel", "is_moe_model", "use_rotary_position_embeddings"), False)
ELASTIC = {"elastic_pipeline": {"resize": {"policy": "off"}}}


def refused(model: Any, keys: dict[str, Any]) -> str:
    ds_terapipe.register()
    ours = {} if "elastic_pipeline" in keys or "token_pipline" in keys else {"token_pipeline": {"slices": 2}}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, **ours, **keys}
    return raised(lambda: deepspeed.initialize(model=model, config=config))


class Losing(PipelineModule):
    def get_additional_losses(self):
        return self.never_set_before_the_first_step


def pipeline(last_layer: Any = Plain, module_class: Any = PipelineModule) -> Any:
    """Two stages of one layer; what is wrong is on the last stage only."""
    layers = [LayerSpec(Plain), last_layer()]
    return module_class(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")


def four() -> Any:
    return DualPipeVModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, partition_method="uniform")


def bert_in_a_wrapper() -> Any:
    """Megatron-DeepSpeed's pretrain_bert.py hands over its model as it is, or so."""
    bert = type("BertModel", (Plain,), {"__module__": "megatron.model.bert_model"})()
    return type("Wrapper", (nn.Sequential,), {})(bert)


BERT = "use ds_terapipe.megatron.bert_pipeline(config, num_stages=2) or remove the key"
USE = "use deepspeed.pipe.PipelineModule(layers=..., num_stages=2) or"
SHARING = partial(pipeline, lambda: Plain(sequence_parallel=True))
# a model, keys, the beginning of the message, and its end or a part of it
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str, str]] = {
    "additional losses": (partial(pipeline, module_class=Losing), {}, "token_pipeline: ", "get_additional_losses"),
    "no PipelineModule": (Plain, {}, 'token_pipeline: got "Plain", must be a PipelineModule', USE),
    "Megatron's BERT": (bert_in_a_wrapper, {}, f'token_pipeline: got "Wrapper", must be a PipelineModule, {BERT}', ""),
    "compiled PipelineModule": (lambda: torch.compile(pipeline()), {}, "", "uncompiled"),
    "DualPipeV": (four, {}, "", "DualPipeV"),
    "elastic: no PipelineModule": (Plain, ELASTIC, 'elastic_pipeline: got "Plain", must be a PipelineModule', ""),
    "elastic: DualPipeV": (four, ELASTIC, 'elastic_pipeline: got "DualPipeVModule"', ""),
    "elastic: layer": (SHARING, ELASTIC, "elastic_pipeline: layer 1", "beside elastic_pipeline, use"),
}
ADDED = "model elastic: added", "wall_clock_breakdown: got true, must be false beside elastic_pipeline (", ""


def everything(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = pipeline()
    found.update({f"config {number}": refused(model, row[0]) for number, row in enumerate(CONFIGS)})
    found.update({f"layer {name}": refused(pipeline(make), {}) for name, (make, _) in LAYERS.items()})
    found.update({f"model {name}": refused(make(), keys) for name, (make, keys, *_) in MODELS.items()})
    added = {"wall_clock_breakdown": True}  # as what deepspeed.tp_model_init asked for is added
    with patch.object(deepspeed, "merge_tp_model_init_into_config", lambda config, *rest: config.update(added)):
        found[ADDED[0]] = refused(pipeline(), ELASTIC)
    return found


ranks = launched(everything, 2)

CASES = [(f"config {number}", begins, has) for number, (_, begins, has) in enumerate(CONFIGS)]
CASES += [(f"layer {name}", "token_pipeline: layer 1", says) for name, (_, says) in LAYERS.items()]
CASES += [ADDED, *((f"model {name}", *says) for name, (_, _, *says) in MODELS.items())]


@pytest.mark.parametrize(("name", "begins", "has"), CASES, ids=[case[0] for case in CASES])
def test_the_same_line_is_raised_on_every_rank(ranks, name, begins, has):
    message, other = (found[name] for found in ranks)
    assert message == other and message.startswith(f"ConfigError: {begins}"), (message, other)
    assert has in message and "\n" not in message, message
    if not name.startswith("config"):
        assert "must be" in message and ", use " in message
        assert "elastic:" not in name or "token_pipeline" not in message


def stage(*layers: Any) -> nn.Module:
    """One rank's stage as the checks see it."""
    model = nn.Sequential(*layers)
    model.forward_funcs, model.get_additional_losses = list(layers), lambda: None
    model._local_start, model._local_stop = 0, len(layers)
    return model


def test_ordinary_layers_pass():
    megatron = of_megatron_deepspeed(use_rotary_position_embeddings=False, enable_zbh1_pipeline=False)
    refusals.check_model(stage(Plain(), Plain(**FINE), megatron, nn.LayerNorm(4), nn.MultiheadAttention(4, 1)))
    refusals.check_model(stage(Plain(is_bidirectional=True)), cut=False)  # runs uncut


def test_ordinary_configs_pass():
    ordinary = {
        "zero_optimization": {"stage": 1}, "sequence_parallel_size": 1, "flops_profiler": {"enabled": False},
        "wall_clock_breakdown": False, "compile": {"deepcompile": False}, "tensor_parallel": {"autotp_size": 0},
        "data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": False}}}, "gradient_clipping": "auto",
    }  # fmt: skip
    for config in ({}, {"zero_optimization": True}, ordinary):
        refusals.check_config(config)
    for block in ("token_pipeline", "elastic_pipeline"):  # the block that the user wrote is named
        with pytest.raises(ConfigError, match=f"zero_optimization.stage: got 2, must be 0 or 1 beside {block} "):
            refusals.check_config({"zero_optimization": {"stage": 2}}, block)


@given(st.sampled_from(VALUE_RULES), JSON)
def test_any_value_of_deepspeeds_keys_is_taken_or_one_line(rule: Rule, value: Any):
    config: Any = value
    for name in reversed(rule.path.split(".")):
        config = {name: config}
    try:
        refusals.check_keys(config, {})
    except ConfigError as error:
        assert re.fullmatch(rf"{re.escape(rule.path)}.*: got .*, must be .*, use .*", str(error))
    else:
        assert not rule.refused(value)
        json.dumps(config, cls=ScientificNotationEncoder)  # as DeepSpeed prints it, on rank 0 alone


@pytest.mark.parametrize(("block", "argument"), [("optimizer", "optimizer"), ("scheduler", "lr_scheduler")])
def test_a_block_that_an_argument_stands_in_for_is_not_read(block, argument):
    config = {block: {"type": "Mine", "params": {"lr": "auto", "warmup_num_steps": "auto"}}}
    refusals.check_keys(config, {argument: object()})
    with pytest.raises(ConfigError, match=rf'{block}.params.\w+: got "auto", must be'):
        refusals.check_keys(config, {})


AUTO_ALONE = {"slices": "auto", "memory_gb": 4, "measurements_path": "costs.json", "granularity": 16}
GAINS = "one pipeline stage, slices gain nothing"
DOES_NOTHING = "token_pipeline.granularity, memory_gb, measurements_path: nothing is planned with one pipeline stage"


@pytest.mark.parametrize(("stages", "config", "lines"), [
    (1, {"token_pipeline": AUTO_ALONE}, [GAINS, DOES_NOTHING]), (1, {"token_pipeline": {"slices": "auto"}}, [GAINS]),
    (2, {"token_pipeline": AUTO_ALONE}, []), (1, {"gradient_clipping": 1.0}, [GAINS]),
    *((2, {"gradient_clipping": 1.0, **norm}, []) for norm in ({"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}})),
    (2, {"gradient_clipping": None}, ["gradient_clipping: 1.0 (DeepSpeed's default) clips by the true norm over"]),
])  # fmt: skip
def test_what_gains_nothing_or_differs_is_said_once(caplog, stages, config, lines):
    caplog.set_level(logging.INFO)
    given_keys = {name: value for name, value in {"gradient_clipping": 0.0, **config}.items() if value is not None}
    refusals.advise(given_keys, SimpleNamespace(num_pipeline_stages=lambda: stages))
    assert len(caplog.records) == len(lines) and all(record.levelno == logging.WARNING for record in caplog.records)
    assert all(line in record.getMessage() for line, record in zip(lines, caplog.records, strict=True))


def test_partitioned_activations_are_turned_off_with_one_warning(caplog):
    for tensor_parallel, warns in ((1, 0), (2, 1)):
        block = {"stages": "auto", "pipe_partitioned": True, "grad_partitioned": True}
        model = SimpleNamespace(mpu=lambda size=tensor_parallel: SimpleNamespace(model_parallel_size=size))
        refusals.turn_off_partitioning(block, model, "elastic_pipeline")
        assert block == {"stages": "auto", "pipe_partitioned": False, "grad_partitioned": False}
        line = "pipeline.pipe_partitioned and pipeline.grad_partitioned ignored beside elastic_pipeline: a slice"
        assert len(caplog.records) == warns == (line in caplog.text)
