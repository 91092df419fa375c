"""Report of a rank's engine: its layers, its bytes, and signatures by which alike stages are recognised."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_terapipe.commands.checking.building import UNFAKED, Built
from ds_terapipe.commands.checking.bytes import allocate_state, computed_kept, kept_by
from ds_terapipe.commands.checking.inputs import NoSample, StagePart, sample_of
from ds_terapipe.commands.checking.rank import Report, Signature, Task
from ds_terapipe.commands.checking.stage import StageRun
from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.autotune.slice_plan import configured_slices
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.placing import parts_of
from ds_terapipe.pipeline.token_shares import shares_of
from ds_terapipe.plan.costs.hardware import Model
from ds_terapipe.refusals import cuts

# Names of sizes that a config may lack or have as None: of the feed-forward network, groups of heads, a head.
_HUGGING_FACE = ("intermediate_size", "num_key_value_heads", "head_dim")
_MEGATRON = ("ffn_hidden_size", "num_query_groups", "kv_channels")


def report_of(built: Built, task: Task, mode: Any) -> Report:
    """Return the report of a rank whose script has come to its engine.

    Raises:
        ConfigError: the model cannot be cut, as the launch's first step would say.
    """
    engine, module = built.engine, built.module
    notes = [built.why] if built.why else []
    topology, part = module._topo, StagePart.of(module, task.stage)
    sizes = {axis: max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "model")}
    kept, counted, length = None, None, task.length
    shares = shares_of(module, lambda divided: [divided])
    multiple = 1 if shares is None else shares.size
    if engine is not None:
        try:
            allocate_state(getattr(engine, "basic_optimizer", None))
            kept = kept_by(engine)
        except UNFAKED as problem:
            notes.append(f"the optimiser reads values ({problem})")
        try:
            sample = sample_of(engine, part, length, task.before, mode, multiple)
            length = sample.length
            cut = built.cut and cuts(configured_slices(built.settings, engine.num_stages))
            counted = StageRun(engine, part, built.settings, task.before, sample, mode).count(cut)
        except NoSample as problem:
            notes.append(f"activations: {problem}")
        except Exception as problem:  # a layer that fake tensors cannot run
            if isinstance(problem, ConfigError) and not _read_values(problem):
                raise
            notes.append(f"activations: {one_line(problem)}")
    chunks = ModelChunks(module)
    return Report(
        stage=part.number, places=chunks.places, tensor=sizes["model"], replicas=sizes["data"],
        parts=chunks.parts, layers=tuple(map(_name, part.functions)),
        parameters=sum(parameter.numel() for parameter in module.parameters()), part=parts_of(module)[part.turn],
        kept=kept or computed_kept(module, built.config, sizes["data"]), by_rule=kept is None, counted=counted,
        notes=tuple(notes), length=length,
        sequences=built.config.train_micro_batch_size_per_gpu, micro_batches=built.config.gradient_accumulation_steps,
        settings=built.settings.model_dump(), cut=built.cut,
        weights_once=built.cut and engine is not None and engine.makes_weight_gradients_once(), sizes=model_sizes(module),
        ranks=tuple(_rank(topology, pipe=place) for place in range(sizes["pipe"])),
        last_shard=_rank(topology, model=sizes["model"] - 1), signatures=signatures(module) if task.signs else (),
        multiple=multiple,
    )  # fmt: skip


def _read_values(problem: BaseException | None) -> bool:
    """Whether an error comes from code that reads values of fake tensors."""
    return problem is not None and (isinstance(problem, UNFAKED) or _read_values(problem.__cause__))


def _rank(topology: Any, **place: int) -> int:
    """Return the rank with these coordinates, and 0 on the other axes."""
    names = topology.get_axis_names()
    return int(topology.get_rank(**{name: place.get(name, 0) for name in names}))


def signatures(module: Any) -> tuple[Signature, ...]:
    """Return what tells the stages apart, by stage: classes and shapes of their layers; built here, without memory."""
    chunks = ModelChunks(module)
    of_layers = [_signature(spec) for spec in chunks.specs]
    stages = [tuple(of_layers[start:stop]) for start, stop in zip(chunks.parts, chunks.parts[1:], strict=False)]
    last = len(stages) - 1
    return tuple((stage in (0, last), layers) for stage, layers in enumerate(stages))


def _signature(spec: Any) -> Signature:
    built = spec.build() if hasattr(spec, "build") else spec
    if not isinstance(built, nn.Module):
        return (_name(built),)
    shapes = ((name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in built.named_parameters())
    return (type(built).__name__, getattr(spec, "key", None), *shapes)


def _name(layer: Any) -> str:
    module = next(iter(modules_of(layer)), None)
    return getattr(layer, "__name__", type(layer).__name__) if module is None else type(module).__name__


def model_sizes(module: Any) -> Model | None:
    """Return the sizes of a decoder of `ds_terapipe.megatron` or `ds_terapipe.hf`, else None."""
    kind, specs = type(module).__name__, ModelChunks(module).specs
    if kind == "DecoderPipeline":
        config = module.source.config
        name, layers, vocab_size = config.model_type, config.num_hidden_layers, config.vocab_size
        optional, swiglu = _HUGGING_FACE, getattr(config, "hidden_act", "") == "silu"
        untied = not getattr(config, "tie_word_embeddings", True)
    elif kind == "GPTPipeline":
        config, vocab_size = specs[0].module_args[:2]
        name, layers = "GPT", sum(module.layers_per_stage)
        optional, swiglu = _MEGATRON, bool(config.gated_linear_unit)
        untied = not hasattr(specs[0], "key")
    else:
        return None
    ffn, groups, channels = (getattr(config, each, None) or 0 for each in optional)
    heads = config.num_attention_heads
    return Model(name, layers, config.hidden_size, heads, ffn, groups, channels, vocab_size, swiglu, untied)
