"""DeepSpeed's own keys beside ours: a value that DeepSpeed cannot use is one line on every rank.

DeepSpeed reads some values before it builds an engine and raises whatever they lead to, and looks at others only during the
first step. The first are found by reading the configuration as DeepSpeed does, the others by a table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.utils import logger as deepspeed_logger
from pydantic import Field, TypeAdapter, ValidationError

from ds_terapipe.blocks import LARGEST_64, Count, Switch, Whole
from ds_terapipe.errors import bad_value, shown
from ds_terapipe.names import is_on
from ds_terapipe.rules import Rule, at, check, is_true

_Word = Annotated[str, Field(strict=True)] | None
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)] | Switch


def _but(kind: Any) -> Callable[[Any], bool]:
    """Refuse values of other types."""
    adapter = TypeAdapter(kind)

    def refused(value: Any) -> bool:
        try:
            adapter.validate_python(value)
        except ValidationError:
            return True
        return False

    return refused


def _no_interval(value: Any) -> bool:
    return value is not None and not (isinstance(value, (int, float)) and value != 0)  # null and infinity: never


def _no_dtype(value: Any) -> bool:
    try:
        return value is not None and not DtypeEnum(value)
    except ValueError:
        return True


_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning.enabled"
_ARGUMENTS = {"optimizer": "optimizer", "scheduler": "lr_scheduler"}
_DTYPES = "fp32, fp16, bf16 or null"

# Spelt as in DeepSpeed 0.19.8: runtime/constants.py, runtime/config.py.
VALUE_RULES = (
    Rule("optimizer", _but(Mapping), "a block of keys", 'e.g. {"type": "AdamW", "params": {"lr": 1e-3}}'),
    Rule("optimizer.type", _but(_Word), "the name of an optimizer", 'e.g. "AdamW"'),
    Rule("optimizer.params", _but(Mapping | None), "a block of keys", 'e.g. {"lr": 1e-3}'),
    Rule("optimizer.params.lr", _but(_Number), "a number", "e.g. 1e-3"),
    Rule("optimizer.params.eps", _but(_Number | list), "a number", "e.g. 1e-8"),
    Rule("optimizer.params.weight_decay", _but(_Number), "a number", "e.g. 0.01"),
    Rule("optimizer.params.betas", _but(list[_Number]), "a list of numbers", "e.g. [0.9, 0.999]"),
    Rule("scheduler", _but(Mapping), "a block of keys", 'e.g. {"type": "WarmupLR", "params": {}}'),
    Rule("scheduler.type", _but(_Word), "the name of an LR scheduler", 'e.g. "WarmupLR"'),
    Rule("scheduler.params", _but(Mapping | None), "a block of keys", 'e.g. {"warmup_num_steps": 100}'),
    Rule("scheduler.params.warmup_num_steps", _but(_Number), "a number of steps", "e.g. 100"),
    Rule("scheduler.params.total_num_steps", _but(_Number), "a number of steps", "e.g. 1000"),
    Rule("train_batch_size", _but(Count | None), "a positive number of samples", "e.g. 32, or leave it out"),
    Rule("train_micro_batch_size_per_gpu", _but(Count | None), "a positive number of samples", "e.g. 1"),
    Rule("gradient_accumulation_steps", _but(Count | None), "a positive number of micro-batches", "e.g. 8"),
    Rule("zero_optimization.stage", _but(_Number), "a number", "0 or 1"),
    Rule("gradient_clipping", _but(_Number), "a number, the largest norm of all gradients", "e.g. 1.0, or 0 for none"),
    Rule("steps_per_print", _no_interval, "a number of steps other than 0, or null", "e.g. 10"),
    Rule("log_level", _but(_Word), "the name of a level", 'e.g. "info"'),
    Rule("torch_autocast", _but(Mapping), "a block of keys", 'e.g. {"enabled": true, "dtype": "bfloat16"}'),
    Rule("torch_autocast.enabled", _but(Switch), "true or false", "false"),
    *(
        Rule(f"data_types.{name}", _no_dtype, _DTYPES, "null")
        for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype")
    ),
    Rule("tensor_parallel.autotp_size", _but(Whole | None), "a number of ranks", "0 for none"),
    Rule("data_efficiency.data_routing.random_ltd.enabled", _but(Switch), "true or false", "false"),
    Rule("pipeline.activation_checkpoint_interval", _but(Whole | Switch), "a number of layers", "e.g. 1, or 0"),
)


def check_keys(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise for the first value that DeepSpeed cannot use.

    How many replicas another model than a ``PipelineModule`` has is not known before DeepSpeed has set up its groups, so only the
    table counts for one.

    Args:
        config: the whole configuration, as DeepSpeed is going to get it.
        arguments: of ``deepspeed.initialize``; an optimizer or LR scheduler among them stands in for its block.

    Raises:
        ConfigError: naming the key and its value.
    """
    given = tuple(f"{block}." for block, name in _ARGUMENTS.items() if arguments.get(name) is not None)
    check((rule for rule in VALUE_RULES if not rule.path.startswith(given)), config)
    for path, value in _integers(config):
        if abs(value) > LARGEST_64:  # rank 0, which alone prints the configuration, fails at one that no float can hold
            raise bad_value(path, value, f"a number of 64 bits, at most {LARGEST_64}", "a smaller one")
    if isinstance(model := arguments.get("model"), PipelineModule):
        if arguments.get("training_data") is not None:
            _check_curriculum(config, model.num_pipeline_stages())
        loud, deepspeed_logger.disabled = deepspeed_logger.disabled, True  # it reads the same configuration afterwards
        try:
            _check_reading(config, model)
        finally:
            deepspeed_logger.disabled = loud


def _check_curriculum(config: Mapping[str, Any], stages: int) -> None:
    """Raise for DeepSpeed's sampler of ``training_data`` where it is not asked, or fails at the first batch."""
    elastic = is_on(config, "elastic_pipeline")
    if (elastic or stages > 1) and is_true(at(config, _CURRICULUM)):
        beside, why = "several pipeline stages", "DeepSpeed's sampler hands samples on within the first stage alone"
        if elastic:
            beside, why = "elastic_pipeline", "elastic_pipeline.data gives the order of samples"
        raise bad_value(
            _CURRICULUM, True, f"false beside {beside} and training_data ({why})", "false, or a loader of your own"
        )


def _check_reading(config: Mapping[str, Any], model: PipelineModule) -> None:
    """Raise for the key without which DeepSpeed can read the configuration, or has another error."""
    problem = _problem(config, model)
    if problem is None:
        return
    without = {key: _problem({name: config[name] for name in config if name != key}, model) for key in config}
    harmless = [key for key, other in without.items() if other is None]
    changes = [key for key, other in without.items() if str(other) != str(problem)]
    said = " ".join(str(problem).split()).encode(errors="backslashreplace").decode()
    if not changes:
        raise bad_value("ds_config.json", config, f"what DeepSpeed reads ({said})", "its keys") from problem
    key = (harmless or changes)[0]
    path, value = _word(key), config[key]
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        path, value, said = ".".join(map(_word, [key, *first["loc"]])), first["input"], first["msg"]
    reason = f"{type(problem).__name__}: {said}" if isinstance(problem, (AttributeError, TypeError)) else said
    use = "another value, or leave it out" if harmless else "another value"
    raise bad_value(path, value, f"what DeepSpeed reads ({reason[:300]})", use) from problem


def _problem(config: Mapping[str, Any], model: PipelineModule) -> Exception | None:
    """The error of reading a configuration as ``deepspeed.initialize`` does."""
    try:
        DeepSpeedConfig(copy.deepcopy(dict(config)), model.mpu())
    except Exception as problem:
        return problem
    return None


def _integers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """The integers in nested blocks and lists, with their paths."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _integers(each, f"{path}.{_word(name)}" if path else _word(name))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _integers(each, f"{path}[{index}]")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, value


def _word(name: object) -> str:
    """A key as a part of a path, on one line whatever is in it."""
    return str(name) if str(name).isidentifier() else shown(name)
