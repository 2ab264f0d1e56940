"""Which fields of a body are read, also within its objects: what a client sends beside them is found by its path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

__all__ = ["KnownFields", "UnknownField"]

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array: Final = msgspec.json.Decoder(list[msgspec.Raw])


class UnknownField(NamedTuple):
    """A field that nobody reads."""

    path: str
    """Such as `stream_options.x` or `messages[].x`, whichever message has it."""
    value: msgspec.Raw


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
        """Yield what an object has beside the fields that are read. Raises what msgspec's decoders raise."""
        for name, value in _object.decode(body).items():
            inner = self.inner.get(name)
            if inner is not None:
                yield from inner._within(value, f"{path}{name}")
            elif name not in self.names:
                yield UnknownField(path + name, value)

    def _within(self, value: msgspec.Raw, path: str) -> Iterator[UnknownField]:
        """Look into an object, or into each object of an array; another value is left to the schema's own decoder."""
        begin = bytes(value[:1]) if isinstance(value, bytes) else bytes(memoryview(value)[:1])
        if begin == b"{":
            yield from self.unknown(value, f"{path}.")
        elif begin == b"[":
            for each in _array.decode(value):
                if bytes(memoryview(each)[:1]) == b"{":
                    yield from self.unknown(each, f"{path}[].")


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field holds: by itself, as an option, or in a list."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for each in get_args(hint) if (found := _struct_in(each)) is not None), None)
