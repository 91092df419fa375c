"""A Hugging Face decoder as a DeepSpeed ``PipelineModule``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology

from ds_terapipe import shared_memory
from ds_terapipe.build_locks import waits_are_said
from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.check import check_chain
from ds_terapipe.hf.layers import Decoder, Embed, Head, Norm, tied_head
from ds_terapipe.hf.loss import NO_STEP, CausalLMLoss
from ds_terapipe.hf.parts import check_shared
from ds_terapipe.hf.positions import documents_of
from ds_terapipe.hf.record import write_record
from ds_terapipe.hf.source import Source, source_of
from ds_terapipe.hf.together import together
from ds_terapipe.job import Job
from ds_terapipe.staged_pipeline import StagedPipeline, stage_boundaries

logger = logging.getLogger(__name__)

CAUSAL_LM = "causal_lm"


class DecoderPipeline(StagedPipeline):
    """A decoder with a language modelling head.

    Layers: word embedding, ``num_hidden_layers`` decoder layers, norm where there is one, head. Input: token ids [b, S] int64, or
    with them what :func:`ds_terapipe.hf.batch` adds. Between layers: [b, s, hidden]. Output: logits [b, s, vocabulary]. A
    checkpoint has beside the layers what :func:`ds_terapipe.hf.export` needs.
    """

    layer_class = Decoder
    documents_of = staticmethod(documents_of)

    def __init__(
        self, source: Source, layers_per_stage: Sequence[int], topology: ProcessTopology, **arguments: Any
    ) -> None:
        self.__dict__["source"] = source  # before Module's constructor, and not one of its modules
        super().__init__(_specs(source), layers_per_stage, topology, **arguments)

    def check_without_keys(self) -> None:
        """Refuse also a mean over a step, before the last stage alone would find that DeepSpeed's own engine has none."""
        super().check_without_keys()
        if isinstance(self.loss_fn, CausalLMLoss) and self.loss_fn.mean_over == "step":
            raise ConfigError(NO_STEP)

    def save_state_dict(self, save_dir: Any, checkpoint_engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Override ``PipelineModule.save_state_dict``: also save the model's configuration and its weights' names."""
        together(lambda: write_record(self.source, Path(save_dir)) if self.global_rank == 0 else None)
        super().save_state_dict(save_dir, checkpoint_engine, *args, **kwargs)


def pipeline(
    model: Any,
    *,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    layers_per_stage: Sequence[int] | None = None,
    loss: str | Callable[..., Any] = CAUSAL_LM,
    mean_over: str = "micro_batch",
    activation_checkpointing: bool = False,
    dtype: torch.dtype | None = None,
    seed: int = 1234,
    revision: str | None = None,
    lora: Any = None,
    adapter: str | Path | None = None,
    **arguments: Any,
) -> DecoderPipeline:
    """Build a pipeline of a Hugging Face decoder's own layers. Every process calls it.

    Args:
        model: a causal language model, whose modules and weights are used as they are, or peft's around one; its configuration,
            for new weights; or a folder or name on the Hub, of which each stage reads the weights of its own layers.
        num_stages: pipeline stages; or
        topology: the layout.
        layers_per_stage: decoder layers of each stage; default: as even as can be, the head counted as what it costs.
        loss: ``"causal_lm"``, or a function of logits [b, S, vocabulary] and labels.
        mean_over: of ``"causal_lm"``, see :class:`CausalLMLoss`.
        activation_checkpointing: whether decoder layers are recomputed in backward.
        dtype: of the weights; default: a given model's own, else fp32.
        seed: of new weights, which are the same for any number of stages.
        revision: on the Hub.
        lora: ``peft.LoraConfig`` of a new adapter; its base is frozen.
        adapter: folder or name on the Hub of an adapter to go on with.
        arguments: further ones of ``PipelineModule``.

    Raises:
        ConfigError: on every process, where one can't have its layers: no decoder, a model that is more than its layers, a
            missing or damaged file, more stages than layers.
    """
    if not torch.distributed.is_initialized():
        with waits_are_said():  # DeepSpeed compiles an op here
            deepspeed.init_distributed()
        shared_memory.release()
    # as deepspeed.initialize does, but before NCCL is asked for anything: else all processes of a node would use its first device
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not callable(loss) and loss != CAUSAL_LM:
        raise ConfigError(f'loss: got "{loss}", must be "{CAUSAL_LM}" or a function, use "{CAUSAL_LM}"')
    if callable(loss) and mean_over != "micro_batch":
        raise ConfigError(
            f'mean_over: got "{mean_over}" beside a loss of your own, must be absent, use a loss that has a mean of its own'
        )
    topology = _topology(num_stages, topology)
    named = isinstance(model, (str, Path)) or adapter is not None
    source = together(lambda: source_of(model, dtype, seed, revision, lora, adapter), one_first=named)
    counts = list(layers_per_stage or balanced(source, topology.get_dim("pipe")))
    specs = _specs(source)
    norm = source.parts.norm is not None
    bounds = stage_boundaries(source.config.num_hidden_layers, topology.get_dim("pipe"), counts, (1, 1 + norm))
    stage = topology.get_coord(Job.current().rank).pipe
    stages = [[part for spec in specs[a:b] for part in _parts(source, spec)] for a, b in pairwise(bounds)]

    def check() -> None:
        # a given model's modules are used as they are, others are made one by one
        check_shared(source.model, source.parts, stages if source.given else [[part] for part in chain(*stages)])
        check_chain(source, lambda tiny: [_built(spec) for spec in _specs(tiny)], own_loss=loss == CAUSAL_LM)
        source.check(stages[stage])

    together(check)
    arguments.setdefault("dynamic_shape", True)  # DeepSpeed's engine then takes batches of other lengths, as ours does
    if activation_checkpointing:
        arguments.setdefault("activation_checkpoint_interval", 1)
    loss_fn = loss if callable(loss) else CausalLMLoss(mean_over)
    made = DecoderPipeline(source, counts, topology, loss_fn=loss_fn, **arguments)
    if source.adapter is not None:
        _say_what_trains(made)
    return made


def _say_what_trains(made: DecoderPipeline) -> None:
    """Log, once, how much trains, and the stages where nothing does; collective."""
    here = [(p.requires_grad, p.numel()) for p in made.parameters()]
    mine = made.stage_id, sum(count for trains, count in here if trains), sum(count for _, count in here)
    stages, idle = set(Job.current().gather(mine)), made.idle_stages
    trained, held = (sum(stage[index] for stage in stages) for index in (1, 2))
    if made.global_rank == 0:
        logger.info("hf.pipeline: %d of %d parameters are trained", trained, held)
    if made.global_rank == 0 and idle:
        numbers = ", ".join(map(str, idle))
        logger.warning("hf.pipeline: nothing is trained on stage %s, which needs token_pipeline", numbers)


def _specs(source: Source) -> list[LayerSpec]:
    layers = [LayerSpec(Decoder, source, index) for index in range(source.config.num_hidden_layers)]
    norm = [LayerSpec(Norm, source)] if source.parts.norm is not None else []
    if not source.parts.tied:
        return [LayerSpec(Embed, source), *layers, *norm, LayerSpec(Head, source)]
    weight = "tokens.weight"
    first = TiedLayerSpec("embed", Embed, source, tied_weight_attr=weight)
    head = TiedLayerSpec("embed", Embed, source, True, tied_weight_attr=weight, forward_fn=tied_head(source.softcap))
    return [first, *layers, *norm, head]


def _built(spec: LayerSpec) -> Callable[[Any], Any]:
    layer = spec.build()
    forward = getattr(spec, "forward_fn", None)
    return layer if forward is None else lambda inputs: forward(layer, inputs)


def _parts(source: Source, spec: LayerSpec) -> list[str]:
    """Names of the modules that an entry of the layer list takes."""
    parts = source.parts
    if spec.typename is Decoder:
        return [f"{parts.layers}.{spec.module_args[1]}"]
    words_only = len(spec.module_args) > 1
    of_embed = (parts.tokens, None if words_only else parts.positions)
    names = {Embed: of_embed, Norm: (parts.norm,), Head: (parts.head,)}[spec.typename]
    return [name for name in names if name is not None]


def balanced(source: Source, stages: int) -> list[int]:
    """Return the decoder layers of each stage with the fastest slowest stage; a head counts by its weights."""
    parts, layers = source.parts, source.config.num_hidden_layers
    if stages < 2 or layers < stages:
        return [layers] if stages < 2 else []
    head = source.numel(parts.tokens if parts.tied else parts.head) / source.numel(f"{parts.layers}.0")
    costs = {last: max(-(-(layers - last) // (stages - 1)), last + head) for last in range(1, layers - stages + 2)}
    last = max(count for count in costs if costs[count] == min(costs.values()))
    each, more = divmod(layers - last, stages - 1)
    return [each + (stage < more) for stage in range(stages - 1)] + [last]


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    world = len(Job.current().ranks)
    if topology is not None:
        if topology.world_size() != world or ("model" in topology.get_axis_names() and topology.get_dim("model") > 1):
            raise ConfigError(
                f"topology: got {topology} for {world} processes, must have all of them and no tensor parallelism, use num_stages"
            )
        return topology
    stages = 1 if num_stages is None else num_stages
    if stages < 1 or world % stages:
        raise ConfigError(f"num_stages: got {num_stages} for {world} processes, must divide {world}, use e.g. {world}")
    return PipeDataParallelTopology(num_pp=stages, num_dp=world // stages)
