"""Blocks of ``ds_config.json`` as pydantic models, whose errors are one line: ``key: got X, must be ..., use ...``."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from .docstrings import entries, summary
from .errors import LARGEST_COUNT, ConfigError, bad_value, nearest, shown, unknown_key
from .names import is_on
from .rules import Rule, check

LARGEST_GB = 10**9  # 1e18 bytes fit 64 bits
LARGEST_64 = 2**63 - 1


class Must(NamedTuple):
    """Words of an error about a key's type: those after "must be" and "use".

    A key without it names the words that its type allows, and its default.
    """

    rule: str
    use: str


def _plain_int(value: object) -> object:
    """NumPy's integers as Python's, which alone a strict ``int`` takes."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _names_a_file(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise ValueError
    os.fsencode(value)  # UnicodeEncodeError, a ValueError: half a surrogate pair, which JSON can spell
    return value


Switch = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST_COUNT), BeforeValidator(_plain_int)]
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST_64), BeforeValidator(_plain_int)]
Number = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
FileName = Annotated[str, Field(strict=True), AfterValidator(_names_a_file)]
Gigabytes = Annotated[Annotated[Number, Field(le=LARGEST_GB)] | None, Must("a positive number of 1e9 bytes", "e.g. 16")]

AnyBlock = TypeVar("AnyBlock", bound="Block")


def _describe(schema: dict[str, Any], block: type[Block]) -> None:
    """Put the docstring's texts into the JSON schema of a block, which takes no other keys."""
    texts = entries(block, "Attributes")
    schema.pop("title", None)
    schema |= {"description": summary(block), "additionalProperties": False}
    for name, field in schema["properties"].items():
        field.pop("title", None)
        must = must_of(block.model_fields[name])
        field["description"] = f"{texts.get(name, '')} Must be {must.rule}.".strip().replace("``", "")


class Block(BaseModel):
    """An immutable block of keys, which the section ``Attributes`` of its docstring describes.

    Raises:
        ConfigError: an unknown key or a value that breaks its rule; only the first is reported.
    """

    model_config = ConfigDict(json_schema_extra=_describe)

    PATH: ClassVar[str]
    """Path of the block, the prefix of its keys in errors."""
    CHANGED_BY: ClassVar[Mapping[str, str]] = {}
    """Remedies that an error names for an assignment to a key."""

    def __init__(self, **data: Any) -> None:
        with _one_line(type(self), data):
            super().__init__(**data)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            # an engine has long been built from it: a value that changes here would change nothing there
            use = self.CHANGED_BY.get(name, "another configuration for a new engine")
            raise ConfigError(f"{self.PATH}.{name}: got an assignment, must stay as it was read, use {use}")
        super().__setattr__(name, value)

    @classmethod
    def read(cls: type[AnyBlock], data: object) -> AnyBlock:
        """Read a block as it stands in a configuration."""
        with _one_line(cls, data):
            return cls.model_validate(data)

    @model_validator(mode="wrap")
    @classmethod
    def _check_keys(cls: type[AnyBlock], data: Any, handler: ModelWrapValidatorHandler[AnyBlock]) -> AnyBlock:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise bad_value(cls.PATH, data, "a block of keys", f"some of {', '.join(cls.model_fields)}")
        for name in data:
            if name not in cls.model_fields:
                raise unknown_key(cls.PATH, name, cls.model_fields)
        return handler(dict(data))


def parse(kind: type[AnyBlock], config: Mapping[str, Any], rules: Sequence[Rule] = ()) -> AnyBlock | None:
    """Read a block of a DeepSpeed configuration.

    Args:
        kind: the block's model, which has its path.
        config: the whole configuration, as DeepSpeed reads it from the file.
        rules: of keys of the block beside others of it.

    Returns:
        The checked block, or None where it is absent or has ``"enabled": false``.

    Raises:
        ConfigError: the block is not one, has an unknown key, or a value that breaks its rule.
    """
    if not is_on(config, kind.PATH):
        return None
    settings = kind.read(config[kind.PATH])
    check(rules, config)
    return settings


@contextmanager
def _one_line(block: type[Block], data: Any) -> Iterator[None]:
    """Raise the first thing that pydantic finds wrong as ConfigError."""
    try:
        yield
    except ValidationError as error:
        first, *others = error.errors()
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        name = first["loc"][0]
        if first["type"] == "missing":
            must = must_of(block.model_fields[str(name)])
            raise ConfigError(f"{block.PATH}.{name}: missing, must be {must.rule}, use {must.use}") from None
        bounds = [each["ctx"]["le"] for each in (first, *others) if each["type"] == "less_than_equal"]
        raise _refusal(block, str(name), data[name], bounds) from None


def _refusal(block: type[Block], name: str, value: object, bounds: Sequence[int]) -> ConfigError:
    """The error of a value that does not have its key's type, or is above a bound of it."""
    field = block.model_fields[name]
    must = must_of(field)
    near = nearest(value, _words(field.annotation)) if isinstance(value, str) else None
    rule = f"{must.rule}, at most {bounds[0]:.0f}" if bounds else must.rule
    return bad_value(f"{block.PATH}.{name}", value, rule, shown(near) if near else must.use)


def must_of(field: FieldInfo) -> Must:
    """The words for a key's type: its own, or those that its type allows."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Block):
        return Must("a block of keys", f"some of {', '.join(kind.model_fields)}")
    named = Must(" or ".join(map(shown, _words(kind))) or "true or false", shown(field.default))
    return next((each for each in field.metadata if isinstance(each, Must)), named)


def _words(kind: Any) -> list[str]:
    """The words that a type allows, in lists of them left out."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [] if get_origin(kind) in (list, tuple) else [word for each in get_args(kind) for word in _words(each)]


def one_of(key: str, value: object, names: Sequence[str], default: str) -> str:
    """``value`` where it is one of the names, else an error with the nearest of them, or with the default."""
    if value in names:
        return str(value)
    use = (nearest(value, names) if isinstance(value, str) else None) or default
    raise bad_value(key, value, " or ".join(map(shown, names)), shown(use))
