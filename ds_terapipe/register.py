"""Puts the package's features behind ``deepspeed.initialize``: the only file that changes a name in DeepSpeed.

It imports nothing but the standard library when it is imported. The rest of the package is loaded by the first
configuration that has one of our keys, or names one of our optimizers or LR schedulers.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from .arguments import Initialize, by_name, configuration_of, replaced_configuration
from .errors import ConfigError, nearest
from .names import KEYS, SAME_LOSS, TYPES, is_on

TOKEN_PIPELINE, ELASTIC_PIPELINE = KEYS
OPTIMIZERS, SCHEDULERS = TYPES["optimizer"], TYPES["scheduler"]

# DeepSpeed's own nearest top-level key is "pipeline" (0.73 alike); a letter or two wrong is above 0.9. "FusedAdam" and
# "FusedLamb" are 0.78 alike.
ALIKE = 0.8
TYPES_ALIKE = 0.85
FIRST_WORDS = {key.partition("_")[0]: key for key in KEYS}


class Wanted(NamedTuple):
    """Features of this package that a configuration requests."""

    pipeline: bool
    optimizer: bool
    scheduler: bool


def register() -> None:
    """Wrap ``deepspeed.initialize``, importing DeepSpeed if need be. A second call changes nothing.

    A configuration without our keys goes to DeepSpeed's own function with its arguments as they are.
    """
    install(importlib.import_module("deepspeed"))


def install(module: ModuleType) -> None:
    """Wrap ``initialize`` of the module ``deepspeed``, once its definition is there."""
    vars(module)["initialize"] = wrap(vars(module)["initialize"])


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` for a configuration that may have our keys; needs no hook and leaves none.

    Args:
        args, kwargs: arguments of ``deepspeed.initialize``.

    Returns:
        Engine, optimizer, data loader of ``training_data``, LR scheduler.

    Raises:
        ConfigError: a key of ours has a wrong value, or stands beside something that it does not go with.
    """
    deepspeed = importlib.import_module("deepspeed")
    original = getattr(deepspeed.initialize, "ds_terapipe_original", deepspeed.initialize)
    return wrap(original)(*args, **kwargs)


def wrap(original: Initialize) -> Initialize:
    """The function that looks for our keys before it calls ``original``; itself, if it is such a function already."""
    if hasattr(original, "ds_terapipe_original"):
        return original

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        if SAME_LOSS not in os.environ:
            return build(*args, **kwargs)
        recorded = importlib.import_module("ds_terapipe.same_loss").initialize
        config, given = configuration_of(original, args, kwargs), by_name(original, args, kwargs)
        built: tuple[Any, Any, Any, Any] = recorded(build, config, given)
        return built

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        config = configuration_of(original, args, kwargs)
        if config is None:
            return original(*args, **kwargs)
        given = by_name(original, args, kwargs)
        wanted = _wanted(config, given)
        if not wanted.pipeline and hasattr(given.get("model"), "check_without_keys"):  # a pipeline of this package
            given["model"].check_without_keys()
        if not any(wanted) or _being_built():
            return original(*args, **kwargs)
        return _build(original, given, config, wanted)

    initialize.ds_terapipe_original = original  # type: ignore[attr-defined]
    return initialize


def check_spelling(keys: Iterable[Any]) -> None:
    """Raise ConfigError for a key of a configuration that is nearly one of ours, or its first word."""
    for key in keys:
        alike = nearest(key, KEYS, ALIKE) if isinstance(key, str) and key not in KEYS else None
        near = FIRST_WORDS.get(key, alike)
        if near:
            raise ConfigError(f'{key}: unknown key, must be spelt "{near}", use "{near}"')


def _wanted(config: Mapping[str, Any], given: Mapping[str, Any]) -> Wanted:
    check_spelling(config)
    return Wanted(
        pipeline=any(is_on(config, key) for key in KEYS),
        optimizer=_names_ours(config, "optimizer", OPTIMIZERS, _deepspeeds_optimizer, given.get("optimizer")),
        scheduler=_names_ours(config, "scheduler", SCHEDULERS, _deepspeeds_scheduler, given.get("lr_scheduler")),
    )


def _names_ours(
    config: Mapping[str, Any], block: str, names: tuple[str, ...], deepspeeds: Callable[[str], bool], argument: object
) -> bool:
    """Whether ``block.type`` is one of our names. DeepSpeed does not read the block where an argument stands in for it."""
    settings = config.get(block)
    kind = settings.get("type") if isinstance(settings, Mapping) else None
    if not isinstance(kind, str):
        return False
    if kind in names:
        return True
    near = nearest(kind, names, TYPES_ALIKE)
    if near is None or argument is not None or deepspeeds(kind):
        return False
    raise ConfigError(f'{block}.type: got "{kind}", must be spelt "{near}", use "{near}"')


def _deepspeeds_optimizer(kind: str) -> bool:
    known = importlib.import_module("deepspeed.runtime.config").DEEPSPEED_OPTIMIZERS
    return kind.lower() in known or hasattr(importlib.import_module("torch.optim"), kind)


def _deepspeeds_scheduler(kind: str) -> bool:
    modules = ("deepspeed.runtime.lr_schedules", "torch.optim.lr_scheduler")
    return any(hasattr(importlib.import_module(module), kind) for module in modules)


def _being_built() -> bool:
    """Whether a wrapper outside this one is at work: another package may have wrapped ours and been wrapped again."""
    return hasattr(importlib.import_module("deepspeed").PipelineEngine, "ds_terapipe_stands_for")


def _build(
    original: Initialize, given: dict[str, Any], config: Mapping[str, Any], wanted: Wanted
) -> tuple[Any, Any, Any, Any]:
    engine, keys = None, None
    with ExitStack() as during:
        during.enter_context(importlib.import_module("ds_terapipe.build_locks").waits_are_said())
        shared_memory = importlib.import_module("ds_terapipe.shared_memory")
        shared_memory.release_at_exit()
        if wanted.optimizer or wanted.scheduler:
            keys = _optimizer_keys(config, given, wanted)
            config = keys.config
            keys.put_into(given)
            during.enter_context(replaced_configuration(given, config))
        if wanted.pipeline:
            engine = _pipeline_engine(given, config, during)
            shared_memory.release()
        else:
            importlib.import_module("ds_terapipe.refusals").check_keys(config, given)
        during.enter_context(_engine_class(engine))
        result = original(**given)
        shared_memory.release()  # of a job whose process group was made just now
    if engine is not None and not isinstance(result[0], engine.ds_terapipe_builds):  # type: ignore[attr-defined]
        raise RuntimeError(f"{_written(config)}: DeepSpeed built a {type(result[0]).__name__} in spite of the key")
    if keys is not None:
        keys.finish(result[0])
    return result


def _optimizer_keys(config: Mapping[str, Any], arguments: Mapping[str, Any], wanted: Wanted) -> Any:
    """Read ``optimizer`` and ``scheduler`` as arguments of ``deepspeed.initialize``."""
    key = "optimizer.type" if wanted.optimizer else "scheduler.type"
    with _able(key):
        from . import compat

        compat.require(key)
        from .optim import json_keys
    return json_keys.read(config, arguments, optimizer=wanted.optimizer, scheduler=wanted.scheduler)


def _pipeline_engine(given: dict[str, Any], config: Mapping[str, Any], during: ExitStack) -> Callable[..., Any]:
    """Called as a ``PipelineEngine``, makes one of ours; its ``ds_terapipe_builds`` is the class.

    A model that is not cut, beside ``elastic_pipeline`` alone, has one slice. ``during``: until the engine is there.
    """
    key = ELASTIC_PIPELINE if is_on(config, ELASTIC_PIPELINE) else TOKEN_PIPELINE
    with _able(key):
        from . import compat, refusals
        from .elastic.moves import start
        from .pipeline.engine import TokenPipelineEngine
        from .pipeline.teardown import check_open
        from .pipeline.tied import tie_all
        from .pipeline.transport.watchdog import launching

        compat.require(key)
        kind: type[TokenPipelineEngine] = TokenPipelineEngine
        parts: dict[str, Any] = {}
        if key == ELASTIC_PIPELINE:
            from .elastic.engine import ElasticPipelineEngine as kind
        else:
            from .elastic.saved.named import PlacedController

            parts["controller"] = PlacedController()

    beside, model = _written(config), given.get("model")
    refusals.check_model_class(model, beside)
    check_open(model)
    watchdog = during.enter_context(launching(_timeout_s(config)))
    settings = watchdog.job.together(lambda: _checked(config, given))
    watchdog.processes.learn()
    tie_all(model, watchdog.job.gather)
    if settings[TOKEN_PIPELINE].plan_path is not None and key == TOKEN_PIPELINE:
        settings[TOKEN_PIPELINE] = start.as_planned(settings[TOKEN_PIPELINE], watchdog)
    if settings[TOKEN_PIPELINE].stages_per_place > 1:
        start.place_stages(given, settings[TOKEN_PIPELINE], watchdog)

    def engine(*engine_args: Any, **engine_kwargs: Any) -> Any:
        # DeepSpeed adds what deepspeed.tp_model_init asked for to the configuration after the first look at it.
        whole = engine_kwargs["config"]
        cut = settings[TOKEN_PIPELINE].model_dump()
        refusals.check_config({**(whole if isinstance(whole, Mapping) else {}), TOKEN_PIPELINE: cut}, beside)
        refusals.turn_off_partitioning(engine_kwargs["config_class"].pipeline, model, beside)
        return kind(*engine_args, **settings, **parts, **engine_kwargs)

    engine.ds_terapipe_builds = kind  # type: ignore[attr-defined]
    return engine


def _timeout_s(config: Mapping[str, Any]) -> float:
    """Before the configuration has been checked, on all ranks together."""
    from .config import TokenPipelineConfig, parse

    try:
        return (parse(config) or TokenPipelineConfig(slices=1)).timeout_s
    except Exception:  # is raised on every rank
        return TokenPipelineConfig(slices=1).timeout_s


def _written(config: Mapping[str, Any]) -> str:
    """The block that errors name: one that the user has written."""
    return TOKEN_PIPELINE if is_on(config, TOKEN_PIPELINE) else ELASTIC_PIPELINE


def _checked(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks of the pipeline that are there, by their names."""
    from . import refusals
    from .config import TokenPipelineConfig, parse

    settings: dict[str, Any] = {TOKEN_PIPELINE: parse(config) or TokenPipelineConfig(slices=1)}
    if is_on(config, ELASTIC_PIPELINE):
        from .elastic import settings as elastic

        block = elastic.parse(config)
        assert block is not None  # it is on
        settings[ELASTIC_PIPELINE] = elastic.check_config(block, config)
    beside, model = _written(config), given.get("model")
    refusals.check_config({**config, TOKEN_PIPELINE: settings[TOKEN_PIPELINE].model_dump()}, beside)
    refusals.check_keys(config, given)
    refusals.check_model(model, refusals.cuts(settings[TOKEN_PIPELINE].slices), beside)
    refusals.check_hardware_queue(model)
    refusals.advise(config, model, cut=is_on(config, TOKEN_PIPELINE))
    return settings


@contextmanager
def _able(key: str) -> Iterator[None]:
    """Raise what keeps the package from running here in the name of the key that asks for it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as reason:
        message = f"{key}: ds_terapipe cannot run here ({type(reason).__name__}: {reason}), remove the key"
        raise RuntimeError(message) from reason


@contextmanager
def _engine_class(engine: Callable[..., Any] | None) -> Iterator[None]:
    """Have ``deepspeed.initialize`` call ``engine`` where it would build a ``PipelineEngine``; None builds that very class.

    It looks the class up by name in its module and offers no other way to choose one. The name there also tells a second
    wrapper that this one is at work.
    """
    deepspeed = importlib.import_module("deepspeed")
    replaced = deepspeed.PipelineEngine
    engine = engine or functools.partial(replaced)
    engine.ds_terapipe_stands_for = replaced  # type: ignore[attr-defined]
    deepspeed.PipelineEngine = engine  # type: ignore[attr-defined]
    try:
        yield
    finally:
        deepspeed.PipelineEngine = replaced  # type: ignore[attr-defined]
