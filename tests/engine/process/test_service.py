"""What the loop tells its client."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from fd_core.engine.process.messages import ClientMessage, EngineMessage, EngineStats, Shutdown, StepEvents, Submit
from fd_core.engine.process.service import serve_engine
from tests.engine.helpers import null_engine
from tests.engine.stepping import greedy


class ScriptedInbox:
    """Hands out one request, then waits until the last statistics satisfy the test."""

    def __init__(self, request: Submit, sent: list[EngineMessage]) -> None:
        self._first: list[ClientMessage] = [request]
        self._sent = sent
        self._until = time.monotonic() + 10

    def wake(self) -> None:
        raise AssertionError("nobody else asks this engine for anything")

    def receive(self, timeout: float) -> list[ClientMessage]:
        if self._first:
            return [self._first.pop()]
        time.sleep(min(timeout, 0.01))
        if time.monotonic() > self._until or any(
            stats.kv and stats.kv.written_blocks == 6 for stats in told(self._sent)
        ):
            return [Shutdown()]
        return []


def told(sent: list[EngineMessage]) -> list[EngineStats]:
    return [message.stats for message in sent if isinstance(message, StepEvents) and message.stats is not None]


def test_an_engine_tells_its_statistics_before_the_first_request() -> None:
    sent: list[EngineMessage] = []

    class Asking(ScriptedInbox):
        def receive(self, timeout: float) -> list[ClientMessage]:
            assert len(told(sent)) == 1
            return [Shutdown()]

    serve_engine(null_engine(), Asking(Submit(greedy("a", range(4), 1)), sent), sent.append)
    assert told(sent)


def test_an_idle_engine_tells_what_its_store_still_did_and_nothing_twice(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of sixteen bytes")
    secret.chmod(0o600)
    engine = null_engine(kv_store=f"disk:{tmp_path / 'kv'}", kv_store_secret_file=str(secret))
    assert engine.info.kv_store_answers
    sent: list[EngineMessage] = []
    serve_engine(engine, ScriptedInbox(Submit(greedy("a", range(100), 3)), sent), sent.append)
    stats = told(sent)
    assert stats[-1].kv is not None
    assert stats[-1].kv.written_blocks == 6
    assert stats[-1].scheduler.offload.saved_tokens == 96
    assert (stats[-1].scheduler.slots.running, stats[-1].scheduler.slots.loading) == (0, 0)
    assert all(before != after for before, after in pairwise(stats))
