"""Engines that end the script once DeepSpeed has built them, on the way that a launch takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

from torch._subclasses import fake_tensor

from ds_terapipe.commands.checking.placing import Alone, place_layers
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import bad_value

UNFAKED = (
    fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException,
)  # fmt: skip


class Built(BaseException):
    """The script has come to its engine: the end of the check's run of it. No ``except Exception`` stops it.

    Attributes:
        engine: a pipeline engine; None where it cannot be built on fake tensors, and ``why`` says so.
        module: its ``PipelineModule``.
        settings: the block ``token_pipeline``; one slice where there is none.
        cut: whether there is such a block.
        config: DeepSpeed's, as it has read it.
    """

    def __init__(self, engine: Any, module: Any, settings: Any, cut: bool, config: Any, why: str = "") -> None:
        super().__init__("built")
        self.engine, self.module, self.settings, self.cut = engine, module, settings, cut
        self.config, self.why = config, why


@contextmanager
def stopping(config_path: str | None) -> Iterator[None]:
    """Context manager in which building an engine raises `Built`, and ``initialize`` without a configuration gets this one."""
    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    import ds_terapipe
    from ds_terapipe.elastic import engine as elastic
    from ds_terapipe.elastic.moves import start
    from ds_terapipe.pipeline import engine as pipeline
    from ds_terapipe.pipeline.controller import Controller

    ds_terapipe.register()
    ours: Any = pipeline.TokenPipelineEngine

    class CheckedEngine(ours):  # type: ignore[misc]
        """DeepSpeed's part of the engine's constructor, with what this package does in it."""

        def __init__(
            self, *args: Any, token_pipeline: Any, elastic_pipeline: Any = None, controller: Any = None, **kwargs: Any
        ) -> None:
            self._controller, self._token_pipeline = Controller(), token_pipeline
            _build(self, super(ours, self).__init__, args, kwargs, token_pipeline, cut=True)

        def destroy(self) -> None:
            """Leave everything: the process ends."""

        def __del__(self) -> None:
            pass

    class PlainEngine(PipelineEngine):  # type: ignore[misc]
        """DeepSpeed's own engine."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _build(self, super().__init__, args, kwargs, TokenPipelineConfig(slices=1), cut=False)

        def __del__(self) -> None:
            pass

    with ExitStack() as stack:
        for holder, name, value in (
            (pipeline, "TokenPipelineEngine", CheckedEngine),
            (elastic, "ElasticPipelineEngine", CheckedEngine),
            (start, "place_stages", place_layers),
            (start, "Consensus", Alone),
            (deepspeed, "PipelineEngine", PlainEngine),
            (deepspeed, "DeepSpeedEngine", _no_pipeline),
            (deepspeed, "initialize", _configured(deepspeed.initialize, config_path)),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


def _build(
    engine: Any, make: Callable[..., None], args: Any, kwargs: dict[str, Any], settings: TokenPipelineConfig, cut: bool
) -> NoReturn:
    """Run DeepSpeed's part of an engine's constructor, and raise `Built`."""
    why = ""
    try:
        make(*args, **kwargs)
    except UNFAKED as problem:
        why = f"the engine reads values ({problem})"
    raise Built(None if why else engine, kwargs["model"], settings, cut, kwargs["config_class"], why)


def _no_pipeline(*args: Any, **kwargs: Any) -> Any:
    name = type(kwargs.get("model")).__name__
    raise bad_value("check", name, "a PipelineModule, whose stages are counted", "deepspeed.pipe.PipelineModule")


def _configured(initialize: Callable[..., Any], path: str | None) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def with_config(*args: Any, **kwargs: Any) -> Any:
        named = getattr(kwargs.get("args", args[0] if args else None), "deepspeed_config", None)
        if named is None and kwargs.get("config") is None and kwargs.get("config_params") is None and path is not None:
            kwargs["config"] = path
        return initialize(*args, **kwargs)

    return with_config
