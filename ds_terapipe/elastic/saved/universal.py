"""DeepSpeed's universal checkpoints: information for ``ds_to_universal``, and the parts that it would leave out.

It converts the optimisers' parameters, copies the ``mp_rank`` files, and leaves out the rest of a folder: our own file,
frozen parameters, buffers. So these are also in the ``mp_rank`` files of a checkpoint that can be converted (DeepSpeed
0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from ds_terapipe import deepspeed_state, tensor_files
from ds_terapipe.deepspeed_state import Absent
from ds_terapipe.elastic.moves.layers import copies
from ds_terapipe.elastic.saved.order import numbers_of
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import UNUSED
from ds_terapipe.overrides import replaced
from ds_terapipe.parameter_marks import is_tensor_parallel
from ds_terapipe.pipeline.checkpoints import tag_of

CARRIED = "ds_terapipe_elastic"
LATEST = "latest_universal"
KEY = "checkpoint.load_universal"
# Kinds of parameters in the conversion; None: DeepSpeed joins parts along the first dimension.
_REPLICATED, _ROW, _HALVES = (
    TP_REPLICATED_PARAMETER_PATTERNS,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
)
_UNKNOWN = "unknown"


Part = tuple[Tensor, str | None]  # a tensor that is not trained, and its kind as for the conversion


def kind_of(tensor: Tensor, sharded: bool) -> str | None:
    """Return the rule by which tensor-parallel parts make a whole parameter, from megatron-core's attributes.

    Args:
        tensor: a parameter or buffer.
        sharded: whether there are several tensor-parallel ranks.
    """
    if not (sharded and is_tensor_parallel(tensor)):
        return cast(str, _REPLICATED)
    dimension, stride = getattr(tensor, "partition_dim", None), getattr(tensor, "partition_stride", 1)
    kinds: dict[tuple[Any, Any], str | None] = {(0, 1): None, (1, 1): _ROW, (0, 2): _HALVES}
    return kinds.get((dimension, stride), _UNKNOWN)


def joined(parts: Sequence[Part]) -> Tensor:
    """Join the parts of all tensor-parallel ranks, in their order."""
    values, kind = [value for value, _ in parts], parts[0][1]
    if kind == _REPLICATED or len(values) == 1:
        return values[0]
    if kind == _HALVES:
        halves = [value.chunk(2) for value in values]
        return torch.cat([half[n] for n in (0, 1) for half in halves])
    return torch.cat(values, dim=1 if kind == _ROW else 0)


def part_of(whole: Tensor, kind: str | None, rank: int, ranks: int) -> Tensor:
    """Return the part of one of ``ranks``: the inverse of `joined`."""
    if kind == _REPLICATED or ranks == 1:
        return whole
    if kind == _HALVES:
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(ranks, dim=1 if kind == _ROW else 0)[rank]


def info(said: Sequence[tuple[int, Mapping[str, str | None], Sequence[Sequence[Any]]]]) -> dict[str, Any] | None:
    """Return the entry that DeepSpeed's universal conversion expects; None if its result could not be right.

    Args:
        said: stage of every rank, the kinds of the parameters that it trains, by name, and the names in its files.
    """
    kinds: dict[str, str | None] = {}
    stages: dict[str, set[int]] = {}
    for stage, of_rank, names in said:
        kinds |= of_rank
        for name in chain(*names):
            stages.setdefault(name, set()).add(stage)
    stages = {name: stages.get(name, {0}) for name in kinds}
    copies = {name: on for name, on in stages.items() if len(on) > 1}
    if _UNKNOWN in kinds.values() or any(0 not in on for on in copies.values()):
        return None  # DeepSpeed would take the first stage's copy, or both
    patterns = {kind: _patterns(n for n, k in kinds.items() if k == kind) for kind in (_REPLICATED, _ROW, _HALVES)}
    return {**patterns, PIPELINE_REPLICATED_PARAMETER_PATTERNS: _patterns(copies)}


def _patterns(names: Any) -> list[str]:
    return [f"^{re.escape(name)}$" for name in sorted(names)]


def to_carry(
    engine: Any, state: Mapping[str, Any] | None, said: dict[str, Any] | None, frozen: bool, kept: Collection[str]
) -> dict[str, Any]:
    """Return this rank's additions to its ``mp_rank`` file.

    Args:
        engine: the engine that saves.
        state: state of `ElasticCheckpointer`; None: of another engine.
        said: `info`; None: the checkpoint can't be converted.
        frozen: whether frozen parameters are among the additions.
        kept: names of those that are in any case.
    """
    if said is None:
        return {}
    sharded = engine.grid.model_parallel_size > 1
    rest = {
        name: (tensor.detach().cpu().clone(), kind_of(tensor, sharded))
        for name, tensor in untrained(engine.module).items()
        if engine.save_non_zero_checkpoint  # one replica writes them
        and (frozen or name in kept or not isinstance(tensor, nn.Parameter))
    }
    carried = {
        "state": state,
        "tensor": engine.grid.get_slice_parallel_rank(),
        "untrained": rest,
        "groups": numbers_of(engine),
    }
    return {UNIVERSAL_CHECKPOINT_INFO: said, CARRIED: carried}


def untrained(module: PipelineModule) -> dict[str, Tensor]:
    """Return frozen parameters and persistent buffers, by name."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    saved = module.state_dict(keep_vars=True)
    found = frozen | {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {name: tensor for name, tensor in found.items() if not name.startswith(copies(module))}


class Universal:
    """The additions of this engine to a universal checkpoint.

    Args:
        folder: folder of the checkpoints.
        tag: tag of this checkpoint; None: the latest.

    Attributes:
        folder: folder of this checkpoint.
        state: state of `ElasticCheckpointer`; None: another engine saved it.
        untrained: whole tensors and their kinds, by name.
    """

    def __init__(self, folder: Any, tag: Any) -> None:
        self.folder = Path(folder) / str(tag_of(folder, tag, KEY, LATEST))
        self.state: dict[str, Any] | None = None
        self._groups: dict[str, int] = {}
        self._is_ours = False
        parts: dict[str, dict[int, Part]] = {}
        for path in sorted(self.folder.glob("mp_rank_*_model_states.pt")):
            carried = tensor_files.read(KEY, path, mapped=False, proven=True).get(CARRIED)
            if carried is not None:
                self._is_ours, self.state = True, self.state or carried["state"]
                self._groups |= carried["groups"]
                for name, part in carried["untrained"].items():
                    parts.setdefault(name, {})[carried["tensor"]] = part
        self.untrained = {name: (joined([each[n] for n in sorted(each)]), each[0][1]) for name, each in parts.items()}

    def check(self, names: Mapping[str, int], wanted: Mapping[str, Tensor]) -> None:
        """Refuse an incomplete or damaged checkpoint; ``ds_to_universal`` writes no manifest.

        Args:
            names: group numbers of the parameters that this rank trains, by name.
            wanted: tensors that are not trained here, by name.

        Raises:
            ConfigError: naming a damaged or missing file, or a parameter in another group: rates go by group number.
        """
        missing = [name for name in names if not (self.folder / "zero" / name / "fp32.pt").is_file()]
        use = "ds_to_universal on a checkpoint of the same layers"
        if self._is_ours and not missing:
            missing = [name for name in wanted if name not in self.untrained]
            use += ", or load_module_strict=False to keep those of the model"
        if missing:
            raise ConfigError(
                f"{KEY}: got {self.folder} without {', '.join(sorted(missing)[:3])}, must have all that this engine has, "
                f"use {use}"
            )
        for path in (path for name in sorted(names) for path in sorted((self.folder / "zero" / name).glob("*.pt"))):
            state = tensor_files.read(KEY, path, proven=True)
            if path.stem != "step" and not (isinstance(state, dict) and isinstance(state.get("param"), Tensor)):
                raise ConfigError(
                    f"{KEY}: got {path} without a tensor, must be a file of ds_to_universal, use its output"
                )
        other = [name for name in names if self._groups.get(name, names[name]) != names[name]]
        if other:
            raise ConfigError(
                f"{KEY}: got {other[0]} in parameter group {self._groups[other[0]]}, must be {names[other[0]]} as here, "
                "use stages of which the first has parameters of every group"
            )

    def fill(self, module: PipelineModule, rank: int, ranks: int) -> None:
        """Set a module's untrained tensors; this rank is number ``rank`` of ``ranks`` tensor-parallel ones."""
        for name, tensor in untrained(module).items():
            if name in self.untrained:
                whole, kind = self.untrained[name]
                with torch.no_grad():
                    tensor.copy_(part_of(whole, kind, rank, ranks))


@contextmanager
def groups_filled(engine: Any, folder: Path) -> Iterator[None]:
    """Context manager that fills empty groups of an engine's wrapper while DeepSpeed reads a universal checkpoint."""
    filled = deepspeed_state.groups_filled(engine.optimizer, partial(_absent, folder))
    with replaced(engine, _get_zero_param_shapes=dict), filled:  # shapes are never read
        yield


def _absent(folder: Path, names: Sequence[str]) -> Absent:
    """Return a stand-in for parameters of these names, with the moments and the step of the first in the folder."""
    known = [folder / "zero" / name for name in names if name != UNUSED]
    keys = sorted(path.stem for path in known[0].glob("exp_avg*.pt")) if known else []
    counts = bool(known) and (known[0] / "step.pt").is_file()
    return Absent(keys, tensor_files.read(KEY, known[0] / "step.pt", mapped=False) if counts else None)
