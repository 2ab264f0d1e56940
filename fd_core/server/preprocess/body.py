"""Reading and decoding the body of a request: bounded while it arrives, strict in types, clear in its errors.

The elements of a body are counted before it is decoded: decoders hold the GIL while they work.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import Request
from starlette.requests import ClientDisconnect

from fd_core.http.errors import ApiError, invalid, unsupported
from fd_core.http.headers import refuse_encoding
from fd_core.server.schemas.unsupported import HARMLESS, Refusal

if TYPE_CHECKING:
    from fd_core.server.state import ServerState


log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at (`key` in )?`\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_PRINTABLE = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
_MAX_UNKNOWN = 1000
_IDS_PER_TOKEN = 4
"""Numbers that a body may hold for each token of the context."""
_PAUSE_SECONDS: Final = 10.0
"""Seconds between two log lines: clients may send any number of unknown names."""

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_array: Final = msgspec.json.Decoder(list[msgspec.Raw])
_CONTAINERS: Final = b"{["
_BRACE: Final = _CONTAINERS[0]
SMALL_BYTES: Final = 64 * 1024
"""A body of this size is decoded in a few milliseconds, with any content."""
_MAX_CONTAINERS: Final = 32_768
"""Objects and arrays of one text, each of which takes about half a microsecond."""
_MAX_NAMES: Final = 65_536
_MAX_VALUES: Final = 131_072
_MAX_ESCAPES: Final = 2_000_000
_SLICE: Final = 1 << 20
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING: Final = b"{["


class BodyFormat(Generic[T]):
    """The format of one endpoint's body."""

    def __init__(
        self, schema: type[T], refused: Mapping[str, Refusal] | None = None, *, needs_type: bool = True
    ) -> None:
        """`needs_type` is False for clients that send JSON without a content type, such as curl without a header."""
        self.schema = schema
        self.needs_type = needs_type
        self._refused = refused or {}
        self._decoder = msgspec.json.Decoder(schema)
        self._known = KnownFields(schema)

    async def read(self, request: Request) -> tuple[ServerState, T, dict[str, str]]:
        """Return the server's state, the decoded body, and headers of the answer; `ApiError` describes the error."""
        state: ServerState = request.app.state.fd
        headers = request.headers
        kind = headers.get("content-type", "")
        if kind != "application/json" and self.needs_type:
            require_json(kind)
        share = state.bodies.share(headers.get("content-length"), state.config.max_body_bytes)
        parts = []
        try:
            if "content-encoding" in headers:
                refuse_encoding(headers.getlist("content-encoding"))
            async for part in request.stream():
                if part:
                    share.received(len(part))
                    parts.append(part)
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            if len(body) <= SMALL_BYTES:
                decoded, ignored = self.decode(body)
            else:
                decoded, ignored = await self.decode_bounded(body, state.context)
        except ClientDisconnect:
            raise invalid("the client disconnected before the body was complete", None, "invalid_body") from None
        finally:
            share.release()
        if not ignored:
            return state, decoded, {}
        state.unknown_fields.log(ignored, time.monotonic())
        return state, decoded, {"X-Ignored-Fields": ", ".join(ignored)}

    async def decode_bounded(self, body: bytes, context: int) -> tuple[T, list[str]]:
        """Decode a body of any size without blocking the event loop; see `read`."""
        if not await decodable(body, _IDS_PER_TOKEN * context):
            message = "the body has more fields, lists or numbers than a request may have"
            raise invalid(message, None, "invalid_body")
        if len(body) <= SMALL_BYTES:
            return self.decode(body)
        return await asyncio.to_thread(self.decode, body)

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """Decode a body and return with it the ignored names, see `read`; 5.0 is an integer where one is wanted."""
        try:
            unknown = self._known.unknown(body)
            first = next(unknown, None)
            ignored = [] if first is None else self._refuse(chain((first,), unknown))
            try:
                return self._decoder.decode(body), ignored
            except msgspec.ValidationError as error:
                if "Expected `int" not in str(error) or "got `float`" not in str(error):
                    raise
                return msgspec.convert(_with_integers(msgspec.json.decode(body)), self.schema, str_keys=True), ignored
        except msgspec.ValidationError as error:
            raise _explain(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # a UnicodeDecodeError's text is harmless: it names one byte and its position
            reason = str(error).removeprefix("JSON is malformed: ")
            raise invalid(f"the body is not valid JSON in UTF-8: {reason}", None, "invalid_json") from None
        except RecursionError:
            raise invalid("the body is nested too deeply", None, "invalid_json") from None

    def _refuse(self, unknown: Iterable[tuple[str, msgspec.Raw]]) -> list[str]:
        """Raise `ApiError` for unsupported fields that would change the text; return the names of ignored ones."""
        given: dict[str, msgspec.Raw] = {}
        for path, value in unknown:
            if path in HARMLESS or bytes(value) == b"null":
                continue
            refusal = self._refused.get(path)
            if refusal is None:
                given.setdefault(path, value)
            elif msgspec.json.decode(value) not in refusal.neutral:
                raise unsupported(f"{path} is not supported: {refusal.reason}", path)
            if len(given) > _MAX_UNKNOWN:
                raise invalid(f"the body has more than {_MAX_UNKNOWN:,} unknown fields", None, "invalid_body")
        return [path for path in sorted(given) if _PRINTABLE.fullmatch(path)][:16]


def _with_integers(value: Any) -> Any:
    """Return a decoded value with whole numbers as integers, which fields for any number accept as well."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    return value


def require_json(content_type: str) -> None:
    """Raise `ApiError` (415) for a body that is not sent as JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        named = kind if _PRINTABLE.fullmatch(kind.replace("/", "-")) else "the one sent"
        message = f"the body must be sent as content-type application/json, not {named}"
        raise ApiError(415, message, code="unsupported_media_type")


def _explain(error: msgspec.ValidationError) -> ApiError:
    """Convert a decoding error, the field first. The library's text never quotes values."""
    text = str(error)
    missing = _MISSING.search(text)
    place = _PATH.search(text)
    path = place["path"] if place else ""
    if missing:
        path = f"{path}.{missing['field']}".lstrip(".")
        return invalid(f"{path} is required", path, "missing_required_parameter")
    if place is None:
        return invalid(f"the body is invalid: {_lower(text)}", None, "invalid_body")
    what = _lower(text[: place.start()])
    if place[1]:
        what = f"invalid key: {what}"
    return invalid(f"{path}: {what}", path, "invalid_value")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


class UnknownFieldLog:
    """Logs unknown fields for the operator: each once, all of a request in one line, a line every ten seconds."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._quiet_until = float("-inf")

    def log(self, names: Iterable[str], now: float) -> None:
        """Log the names that have not been logged; `now` is a monotonic time in seconds."""
        new = [name for name in names if name not in self._logged]
        if not new or len(self._logged) >= 1000 or now < self._quiet_until:
            return
        self._quiet_until = now + _PAUSE_SECONDS
        self._logged.update(new)
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

    def unknown(self, body: bytes | msgspec.Raw, path: str = "") -> Iterator[tuple[str, msgspec.Raw]]:
        """Yield unread fields, such as `messages[].x`, below `path`, and their values. Raises as msgspec does."""
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
                yield path + name, fields[name]
            for name, inner in self.inner.items():
                value = fields.get(name)
                # Another value is left to the schema's own decoder.
                if value is not None and memoryview(value)[0] in _CONTAINERS:
                    yield from inner.unknown(value, f"{path}{name}.")


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for each in get_args(hint) if (found := _struct_in(each)) is not None), None)


class JsonShape(NamedTuple):
    """Counts of the elements of a JSON text, most of them outside its strings."""

    containers: int
    """Objects and arrays."""
    names: int
    commas: int
    escapes: int


async def decodable(body: bytes, ids: int) -> bool:
    """Return True if a body decodes in tens of ms, `ids` more numbers allowed. Large ones are counted on a thread."""
    if len(body) <= SMALL_BYTES:
        return True
    shape = await asyncio.to_thread(shape_of, body)
    most = JsonShape(_MAX_CONTAINERS, _MAX_NAMES, _MAX_VALUES + ids, escapes=_MAX_ESCAPES)
    return all(count <= limit for count, limit in zip(shape, most, strict=True))


def shape_of(body: bytes) -> JsonShape:
    """Count elements outside strings; if the body is not JSON, the counts are arbitrary."""
    data = np.frombuffer(body, np.uint8)
    containers = names = commas = escapes = 0
    inside = False
    backslashes = 0
    """At the end of the slice before, next to each other."""
    for begin in range(0, len(data), _SLICE):
        part = data[begin : begin + _SLICE]
        quotes, backslashes = _quotes(part, backslashes)
        within = np.bitwise_xor.accumulate(quotes)
        if inside:
            within = ~within
        inside = bool(within[-1])
        outside = ~within
        escapes += int(np.count_nonzero(part == _BACKSLASH))
        containers += sum(int(np.count_nonzero((part == sign) & outside)) for sign in _OPENING)
        names += int(np.count_nonzero((part == _COLON) & outside))
        commas += int(np.count_nonzero((part == _COMMA) & outside))
    return JsonShape(containers, names, commas, escapes=escapes)


def _quotes(part: npt.NDArray[np.uint8], before: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Return where strings begin or end, and the backslashes that end `part`; `before` of them precede it."""
    quotes = part == _QUOTE
    escapes = part == _BACKSLASH
    if not before and not escapes.any():
        return quotes, 0
    places = np.arange(len(part))
    others = np.maximum.accumulate(np.where(escapes, -1 - before, places))
    """The last index up to here without a backslash."""
    found = np.flatnonzero(quotes)
    last = np.where(found > 0, others[found - 1], -1 - before)
    quotes[found[(found - 1 - last) % 2 == 1]] = False
    return quotes, int(places[-1] - others[-1])
