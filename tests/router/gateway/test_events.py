"""Only whole events are forwarded, for any chunk boundaries."""

from __future__ import annotations

import random

import pytest

from fd_core.router.gateway.requests.relaying import EventCutter

STREAM = b"".join(b'data: {"i": %d, "t": "x\\n"}\n\n' % index for index in range(30)) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("seed", range(20))
def test_events_are_forwarded_whole_for_any_chunking(seed: int, end: bytes) -> None:
    rng = random.Random(seed)
    stream = STREAM.replace(b"\n\n", end)
    cutter, passed, offset = EventCutter(), b"", 0
    while offset < len(stream):
        size = rng.randint(1, 60)
        ready = cutter.push(stream[offset : offset + size])
        offset += size
        assert not ready or ready.endswith(end)
        passed += ready
        assert len(stream[:offset]) - len(passed) < 60 + 30
    assert passed + cutter.rest() == stream
    assert cutter.done and not cutter.error_forwarded


@pytest.mark.parametrize("size", range(1, 30))
def test_lines_are_forwarded_whole_for_any_chunking(size: int) -> None:
    stream = b'{"done":false,"x":{"done":true,"error":1}}\n' * 3 + b'{"done":true}\n'
    cutter, passed = EventCutter(lines=True), b""
    for offset in range(0, len(stream), size):
        ready = cutter.push(stream[offset : offset + size])
        assert not ready or ready.endswith(b"\n")
        passed += ready
        assert cutter.done is passed.endswith(b'{"done":true}\n') and not cutter.error_forwarded
    assert passed == stream
    assert (
        EventCutter(lines=True).push(b'{"er') == b"" and cutter.push(b'{"error":"lost"}\n') and cutter.error_forwarded
    )


def test_whole_events_are_forwarded_immediately() -> None:
    cutter = EventCutter()
    assert cutter.push(b"data: 1\n\n") == b"data: 1\n\n"
    assert cutter.push(b"data: 2\n\ndata: 3") == b"data: 2\n\n"
    assert cutter.push(b"\n") == b""
    assert cutter.push(b"\n") == b"data: 3\n\n"


def test_unterminated_event_has_bounded_buffer() -> None:
    cutter, passed = EventCutter(), 0
    for _ in range(100):
        passed += len(cutter.push(b"x" * 65536))
    assert passed > 4_000_000


def test_error_events_differ_from_text_about_errors() -> None:
    cutter = EventCutter()
    cutter.push(b'data: {"text": "an \\"error\\""}\n\n')
    assert not cutter.error_forwarded
    cutter.push(b'event: error\ndata: {"error": {}}\n\n')
    assert cutter.error_forwarded and not cutter.done
