"""Which fields of a body are read, also within its objects: what a client sends beside them is found by its path."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

__all__ = ["KnownFields", "UnknownField", "UnknownFieldLog"]

log = logging.getLogger(__name__)

_MAX_TOLD: Final = 1000
_PAUSE_SECONDS: Final = 10.0
"""Between two lines: clients make up as many names as they like."""

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_array: Final = msgspec.json.Decoder(list[msgspec.Raw])
_CONTAINERS: Final = b"{["
_BRACE: Final = _CONTAINERS[0]


class UnknownField(NamedTuple):
    """A field that nobody reads."""

    path: str
    """Such as `stream_options.x` or `messages[].x`, whichever message has it."""
    value: msgspec.Raw


class UnknownFieldLog:
    """Tells the operator of unknown fields: each once, all of a request in one line, a line every ten seconds."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._quiet_until = float("-inf")

    def tell(self, names: Iterable[str], now: float) -> None:
        """Log the names that have not been logged; `now` is a monotonic time in seconds."""
        new = [name for name in names if name not in self._told]
        if not new or len(self._told) >= _MAX_TOLD or now < self._quiet_until:
            return
        self._quiet_until = now + _PAUSE_SECONDS
        self._told.update(new)
        log.warning("a request has unknown fields, which are ignored (logged once): %s", ", ".join(new))


class KnownFields:
    """Names that a struct reads, and those of the structs within it."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.names = frozenset(struct.__struct_fields__)
        self.inner = {
            name: KnownFields(found)
            for name, hint in get_type_hints(struct, include_extras=True).items()
            if (found := _struct_in(hint)) is not None
        }

    def unknown(self, body: bytes | msgspec.Raw, path: str = "") -> Iterator[UnknownField]:
        """Yield what an object, or each object of an array, has beside the fields that are read.

        `path` stands before the names. Raises what msgspec's decoders raise.
        """
        if not path or memoryview(body)[0] == _BRACE:
            objects = [_object.decode(body)]
        else:
            path = f"{path[:-1]}[]."
            try:
                objects = _objects.decode(body)
            except msgspec.ValidationError:  # something else is among them
                objects = [_object.decode(each) for each in _array.decode(body) if memoryview(each)[0] == _BRACE]
        for fields in objects:
            for name in fields.keys() - self.names:
                yield UnknownField(path + name, fields[name])
            for name, inner in self.inner.items():
                value = fields.get(name)
                # Another value is left to the schema's own decoder.
                if value is not None and memoryview(value)[0] in _CONTAINERS:
                    yield from inner.unknown(value, f"{path}{name}.")


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field holds: by itself, as an option, or in a list."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for each in get_args(hint) if (found := _struct_in(each)) is not None), None)
