"""Change of an engine between two steps: layers freeze or train again, and move to other stages and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ds_terapipe.elastic.cache.session import CacheSession
from ds_terapipe.elastic.data import ElasticData
from ds_terapipe.elastic.freezing import LayerFreezing
from ds_terapipe.elastic.moves.groups import level_steps
from ds_terapipe.elastic.moves.masters import check_states, is_wrapped, join, unwrap
from ds_terapipe.elastic.moves.rebuild import rebuild_engine
from ds_terapipe.elastic.moves.reshape import Reshape
from ds_terapipe.elastic.moves.shares import Bucket, new_bucket
from ds_terapipe.elastic.moves.start import places_for
from ds_terapipe.elastic.optimizer import layer_dtype, wrapped
from ds_terapipe.elastic.policies.resize import POLICY, Shape, balanced
from ds_terapipe.elastic.saved.state import resized
from ds_terapipe.elastic.shapes.costs import Costs
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.ended import poison_on_error
from ds_terapipe.pipeline.shared_weights import refuse_split, shared_weights, split
from ds_terapipe.pipeline.teardown import shape_groups
from ds_terapipe.pipeline.trained import check_switches
from ds_terapipe.process_groups import close_groups


class Change(NamedTuple):
    """Frozen entries, stages and partition of an engine from a step on.

    Attributes:
        frozen: number of frozen entries of the layer list.
        stages: number of pipeline stages; of places, if these have several.
        parts: first entry of each stage, then the number of entries; None: balanced by costs.
    """

    frozen: int
    stages: int
    parts: Sequence[int] | None = None


class Changed(NamedTuple):
    """Seconds of a change on this rank, and the bytes that it freed and sent."""

    seconds: float
    freed: int
    sent: int


def check_changeable(engine: Any) -> None:
    """Refuse what a change would take no notice of, or could not keep; this rank alone.

    Raises:
        ConfigError: ``requires_grad`` was changed without effect, or a state cannot be divided.
    """
    check_switches(engine)
    if is_wrapped(engine.optimizer):
        check_states(engine.optimizer)


class Mover:
    """Applies changes to an engine; DeepSpeed's engine is rebuilt around the same objects.

    Args:
        arguments: arguments of DeepSpeed's constructor.
        freezing, data, caching: parts that follow a change.

    Attributes:
        costs: costs of the layers, by which stages are balanced.
        on_reshape: called with the engine after each reshape.
    """

    def __init__(
        self, arguments: Mapping[str, Any], freezing: LayerFreezing, data: ElasticData, caching: CacheSession
    ) -> None:
        self._arguments, self._freezing, self._data, self._caching = arguments, freezing, data, caching
        self.costs = Costs()
        self.on_reshape: list[Callable[[Any], None]] = []

    def apply(self, engine: Any, change: Change, traced: bool) -> Changed:
        """Freeze and reshape; collective. ``traced``: whether to record the change beside the next step."""
        started = time.perf_counter()
        level_steps(engine.basic_optimizer)
        new = self._data.shape_with(engine, change.stages)
        parts = change.parts
        if parts is None and (new != engine.shape or (engine.elastic_pipeline.moves and change.stages > 1)):
            parts = self._balanced(engine, new, change.frozen)
        reshape = None
        if parts is not None and (new != engine.shape or tuple(parts) != ModelChunks(engine.module).parts):
            reshape = self._prepare(engine, new, parts, change.frozen)
        engine._recorder.begin(engine.global_steps + 1, wanted=traced)
        with _bucket(engine) as bucket, poison_on_error(engine._watchdog), engine._recorder.collective("reshape"):
            engine._runtime.close()
            if bucket is not None:
                unwrap(engine.optimizer, engine.module)
            freed = self._freezing.freeze(engine, change.frozen)
            sent = 0
            if reshape is not None:
                norms = self._freezing.norms
                norms.load(norms.state(engine._consensus))  # a layer's new owner needs the sums so far
                sent = self._reshape(engine, new, reshape, bucket)
            elif bucket is not None:
                engine.optimizer = wrapped(engine, engine.basic_optimizer, engine.optimizer, bucket)
            engine._controller.has_moved = True
            engine._build_runtime()
        engine._trace.keep(engine._recorder.end())
        return Changed(time.perf_counter() - started, freed, sent)

    def _balanced(self, engine: Any, shape: Shape, frozen: int) -> Sequence[int]:
        """Balance the entries of a shape's stages by their costs; collective."""
        costs, _ = self.costs.now(engine)
        present = list(ModelChunks(engine.module).parts) if shape == engine.shape else None
        first, places = max(frozen, engine.untrained_layers), places_for(engine, shape.stages)
        # whether a cache pays is known to those alone who have the first stage
        forward = engine._consensus.decide(lambda: self._caching.forward_seconds(costs.forward, first))
        parts = balanced(forward, costs.backward, first, len(places), present)
        return parts if present is None or not split(engine._shared, parts, places) else present

    def _prepare(self, engine: Any, shape: Shape, parts: Sequence[int], frozen: int) -> Reshape:
        """Prepare a reshape, in which every rank may refuse; collective.

        Raises:
            ConfigError: on every rank; nothing has been changed. Also for stages that would each train a copy of a weight
                that their layers share now.
        """
        returns = bool(engine.elastic_pipeline.freeze.unfreeze)
        engine._shared = shared_weights(engine.module, engine._consensus, also=self._freezing.aside if returns else ())
        stays_frozen = 0 if returns else frozen
        trained = [each for each in engine._shared if each.entries[0] >= stays_frozen]
        places = places_for(engine, shape.stages)
        refuse_split(trained, parts, places, POLICY, ', or "off"')
        reshape = Reshape(engine.module, engine.basic_optimizer, engine._consensus, engine.device, layer_dtype(engine))
        reshape.prepare(resized(engine.module._topo, shape.stages), parts, places)
        return reshape

    def _reshape(self, engine: Any, shape: Shape, reshape: Reshape, bucket: Bucket | None) -> int:
        """Run a prepared reshape; return the bytes that this rank sent."""
        old = shape_groups(engine.module)
        if bucket is not None:
            join(engine.basic_optimizer, bucket)
        reshape.run(bucket)
        close_groups(old)
        with engine._watchdog.making_groups():
            rebuild_engine(engine, shape, self._arguments, lambda basic, before: wrapped(engine, basic, before))
        engine._consensus.set_pipelines(engine.grid.pipe_groups)
        self._data.follow_shape(engine)
        for callback in self.on_reshape:
            callback(engine)
        return reshape.sent_bytes


def _bucket(engine: Any) -> AbstractContextManager[Bucket | None]:
    """Return the context manager of a bucket for masters and moments; None without DeepSpeed's wrappers."""
    if not is_wrapped(engine.optimizer):
        return nullcontext()
    return new_bucket(engine.device, engine._consensus, engine.module._topo.get_axis_comm_lists("data"))
