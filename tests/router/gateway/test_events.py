"""Only whole events pass, however the bytes are cut."""

from __future__ import annotations

import random

import pytest

from fd_core.router.gateway.requests.relaying import EventCutter

STREAM = b"".join(b'data: {"i": %d, "t": "x\\n"}\n\n' % index for index in range(30)) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("seed", range(20))
def test_events_pass_whole_and_nothing_is_lost(seed: int, end: bytes) -> None:
    rng = random.Random(seed)
    stream = STREAM.replace(b"\n\n", end)
    cutter, passed, place = EventCutter(), b"", 0
    while place < len(stream):
        size = rng.randint(1, 60)
        ready = cutter.push(stream[place : place + size])
        place += size
        assert not ready or ready.endswith(end)
        passed += ready
        assert len(stream[:place]) - len(passed) < 60 + 30
    assert passed + cutter.rest() == stream
    assert cutter.done and not cutter.told_error


def test_whole_events_do_not_wait() -> None:
    cutter = EventCutter()
    assert cutter.push(b"data: 1\n\n") == b"data: 1\n\n"
    assert cutter.push(b"data: 2\n\ndata: 3") == b"data: 2\n\n"
    assert cutter.push(b"\n") == b""
    assert cutter.push(b"\n") == b"data: 3\n\n"


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    cutter, passed = EventCutter(), 0
    for _ in range(100):
        passed += len(cutter.push(b"x" * 65536))
    assert passed > 4_000_000


def test_errors_are_told_from_texts_about_errors() -> None:
    cutter = EventCutter()
    cutter.push(b'data: {"text": "an \\"error\\""}\n\n')
    assert not cutter.told_error
    cutter.push(b'event: error\ndata: {"error": {}}\n\n')
    assert cutter.told_error and not cutter.done
