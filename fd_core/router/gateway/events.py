"""Server-sent events on their way to the client: only whole events are passed on, so that an error event can follow."""

from __future__ import annotations

from typing import Final

__all__ = ["DONE", "EventCutter"]

DONE: Final = b"[DONE]"
_MAX_HELD_BYTES: Final = 1 << 20
"""Larger events are passed on in pieces."""
_LAST_BYTES: Final = 4096


class EventCutter:
    """Passes chunks on up to the end of the last whole event. Usually a chunk is one event and nothing is held."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0
        self._edge = b""
        self._last = b""

    def push(self, chunk: bytes) -> bytes:
        """Take a chunk; return the bytes that may go to the client, none if no event has ended."""
        if chunk.endswith(b"\n\n"):
            return self._pass(chunk)
        border = len(self._edge)
        seen = self._edge + chunk
        end = max(_behind(seen, b"\n\n"), _behind(seen, b"\r\n\r\n")) - border
        if end > 0:
            ready = self._pass(chunk[:end])
            chunk = chunk[end:]
            self._edge = b""
        else:
            ready = b""
        if chunk:
            self._held.append(chunk)
            self._size += len(chunk)
            self._edge = (self._edge + chunk)[-3:]
        return ready if self._size <= _MAX_HELD_BYTES else ready + self.rest()

    def rest(self) -> bytes:
        """Return the bytes that are held back; they are complete if the stream ended well."""
        return self._pass(b"") if self._held else b""

    @property
    def done(self) -> bool:
        """Whether the last event passed on is `[DONE]`, which says that the answer is complete."""
        return self._last.rstrip().endswith(DONE)

    @property
    def told_error(self) -> bool:
        """Whether the last event passed on is an error. Generated text cannot look like one: its quotes are escaped."""
        last = self._last.rstrip().replace(b"\r\n", b"\n").rpartition(b"\n\n")[2]
        return b'"error"' in last

    def _pass(self, chunk: bytes) -> bytes:
        if self._held:
            chunk = b"".join((*self._held, chunk))
            self._held.clear()
            self._size = 0
        self._edge = b""
        if chunk:
            self._last = chunk[-_LAST_BYTES:]
        return chunk


def _behind(data: bytes, mark: bytes) -> int:
    found = data.rfind(mark)
    return -1 if found < 0 else found + len(mark)
