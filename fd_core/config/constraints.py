"""Valid values of a setting, declared once on its field: by its type, and by a constraint in its annotation.

    max_num_seqs: Annotated[int, Range(1, 65536)] = 32
    role: Annotated[str, OneOf("mixed", "prefill", "decode")] = "mixed"

Every instance of such a struct, from any source, gets the same check and the same messages.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fd_core.config.sizes import parse_size
from fd_core.errors import ConfigError

_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("0", "false", "no", "off")
_COUNT: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?[kmg]i?", re.IGNORECASE)
"""A number with a unit, such as 32k or 1M."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `minimum`, or just above it, to `maximum`."""

    minimum: float
    maximum: float = 2**31 - 1
    above: bool = False

    def __str__(self) -> str:
        if not self.above and self.maximum != math.inf:
            return f"between {self.minimum:g} and {self.maximum:.10g}"
        lower = f"above {self.minimum:g}" if self.above else f"at least {self.minimum:g}"
        return lower if self.maximum == math.inf else f"{lower} and at most {self.maximum:.10g}"

    def check(self, value: float) -> None:
        """Raise `ValueError` unless `value` is in the range."""
        if value > self.maximum or value < self.minimum or (self.above and value == self.minimum):
            shown = f"{value!r:.40}" if isinstance(value, int) else f"{value:.10g}"  # an int may exceed every float
            raise ValueError(f"{shown} is out of range; expected {self}")


class OneOf:
    """One of some words, or an alias of one; `instead` names the replacement of words that other programs use."""

    def __init__(
        self,
        *words: str,
        aliases: Mapping[str, str] = MappingProxyType({}),
        instead: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.words = words
        self.aliases = aliases
        self._instead = instead

    def check(self, value: str) -> None:
        """Raise `ValueError` unless `value` is one of the words or aliases."""
        if value in self._instead:
            raise ValueError(f"{value!r} is not supported; use {self._instead[value]}")
        if value not in self.words and value not in self.aliases:
            raise ValueError(f"expected one of {', '.join(self.words)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Prefix:
    """Text that begins with `prefix`."""

    prefix: str

    def check(self, value: str) -> None:
        """Raise `ValueError` unless `value` begins with the prefix."""
        if not value.startswith(self.prefix):
            raise ValueError(f"{value!r} must begin with {self.prefix}")


@dataclass(frozen=True, slots=True)
class ByteSize:
    """A number of bytes; as text it may have a unit, such as 256M or 2Gi."""

    minimum: int = 1

    def check(self, value: int) -> None:
        """Raise `ValueError` for an impossible number of bytes."""
        if not self.minimum <= value < 2**63:
            raise ValueError(f"{value} is not a valid size{' above 0' if self.minimum else ''}")


Constraint = Range | OneOf | Prefix | ByteSize
"""Narrows the values of a type; `check` raises `ValueError` with a phrase that completes "NAME: ..."."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Valid values of one field."""

    kind: type[Any]
    """`int`, `float`, `bool`, `str`, `tuple` for a tuple of texts, or another type, which is not inspected."""
    optional: bool
    constraint: Constraint | None

    def read(self, value: Any) -> Any:
        """Convert `value`, possibly text. Raises `ValueError` with a phrase that completes "NAME: ..."."""
        text = value.strip() if isinstance(value, str) else None
        if isinstance(self.constraint, ByteSize) and text is not None:
            value = 0 if text == "0" else parse_size(text)
        elif self.kind is int and text is not None and re.fullmatch(r"[+-]?[0-9]{1,30}", text):
            value = int(text)
        elif self.kind is int and text is not None and _COUNT.fullmatch(text):
            value = parse_size(text)
        elif self.kind is float and text is not None:
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"expected a number, got {value!r}") from None
        elif self.kind is bool and text is not None:
            return parse_switch(value)
        elif self.kind is tuple:
            value = texts(value)
        if self.optional and value is None:
            raise ValueError("expected a value, got None")
        self.check(value)
        return float(value) if self.kind is float else value

    def check(self, value: Any) -> None:
        """Raise `ValueError` with a phrase that completes "NAME: ..." unless the field may hold `value`."""
        if value is None and self.optional:
            return
        if self.kind is int and type(value) is not int:
            unit = " of bytes" if isinstance(self.constraint, ByteSize) else ""
            raise ValueError(f"expected an integer{unit}, got {value!r}")
        if self.kind is float and (type(value) not in (int, float) or not -math.inf < value < math.inf):
            raise ValueError(f"expected a number, got {value!r}")
        if self.kind is bool and type(value) is not bool:
            raise ValueError(f"expected true or false, got {value!r}")
        if self.kind is str and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"expected text, got {value!r}")
        if self.kind is tuple and not (
            isinstance(value, tuple | list) and all(isinstance(each, str) for each in value)
        ):
            raise ValueError(f"expected a list of texts, got {value!r}")
        if self.constraint is not None:
            self.constraint.check(value)


class CheckedStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of settings: an invalid value is rejected with `ConfigError`, regardless of its source."""

    def __post_init__(self) -> None:
        for field in _fields(type(self)):
            value = getattr(self, field.name)
            if value is not field.default:
                _check_field(type(self), field.name, value, called=field.encode_name)
                constraint = rules_of(type(self))[field.name].constraint
                if isinstance(constraint, OneOf) and value in constraint.aliases:
                    msgspec.structs.force_setattr(self, field.name, constraint.aliases[value])


@functools.cache
def _fields(settings: type[CheckedStruct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(settings)


_C = TypeVar("_C", bound=CheckedStruct)


def make_settings(settings: type[_C], values: Mapping[str, Any]) -> _C:
    """Return settings made of typed values by field name. Raises `ConfigError` that names the field at fault."""
    known = {field.name: field.encode_name for field in msgspec.structs.fields(settings)}
    unknown = [name for name in values if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known.values(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known.values())}"
        raise ConfigError(f"unknown setting {unknown[0]!r:.60}", field=unknown[0], hint=hint)
    for name, value in values.items():
        _check_field(settings, name, value, called=known[name])
    try:
        return msgspec.convert({known[name]: value for name, value in values.items()}, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _check_field(settings: type[CheckedStruct], name: str, value: Any, called: str) -> None:
    try:
        rules_of(settings)[name].check(value)
    except ValueError as error:
        raise ConfigError(f"{called}: {error}", field=called) from None


@cache
def rules_of(settings: type[Any]) -> dict[str, Rule]:
    """Return the rule of every field of a struct."""
    return {name: _rule(hint) for name, hint in get_type_hints(settings, include_extras=True).items()}


def parse_switch(value: Any) -> bool:
    """Return True if a text or a truth value means yes; raises `ValueError` for anything else."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in (*_YES, *_NO):
        raise ValueError(f"expected one of {', '.join((*_YES, *_NO))}, got {value!r}")
    return word in _YES


def _rule(hint: Any) -> Rule:
    optional, constraint = False, None
    while True:
        if get_origin(hint) is Annotated:
            constraint = next((extra for extra in get_args(hint)[1:] if isinstance(extra, Constraint)), constraint)
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
            optional = True
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        else:
            kind = get_origin(hint) or hint
            return Rule(kind if isinstance(kind, type) else object, optional, constraint)


def texts(value: Any) -> tuple[str, ...]:
    """Return texts of a list, or of one text with commas. Raises `ValueError` for anything else, and empty ones."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, tuple | list) or not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError("expected one or more names, separated by commas")
    return tuple(part.strip() for part in parts)
