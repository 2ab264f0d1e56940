"""Messages from the engine loop to its client."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from fd_core.engine.process.messages import ClientMessage, EngineMessage, EngineStats, Shutdown, StepEvents, Submit
from fd_core.engine.process.service import serve_engine
from tests.engine.helpers import null_engine
from tests.engine.stepping import greedy


class ScriptedInbox:
    """Supplies one request, then blocks until the last statistics satisfy the test."""

    def __init__(self, request: Submit, sent: list[EngineMessage]) -> None:
        self._first: list[ClientMessage] = [request]
        self._sent = sent
        self._until = time.monotonic() + 60

    def wake(self) -> None:
        raise AssertionError("this engine has no other client")

    def receive(self, timeout: float) -> list[ClientMessage]:
        if self._first:
            return [self._first.pop()]
        time.sleep(min(timeout, 0.01))
        if time.monotonic() > self._until or any(
            stats.kv and stats.kv.written_blocks == 6 for stats in sent_to_client(self._sent)
        ):
            return [Shutdown()]
        return []


def sent_to_client(sent: list[EngineMessage]) -> list[EngineStats]:
    return [message.stats for message in sent if isinstance(message, StepEvents) and message.stats is not None]


def test_statistics_are_published_before_first_request() -> None:
    sent: list[EngineMessage] = []

    class RequestingInbox(ScriptedInbox):
        def receive(self, timeout: float) -> list[ClientMessage]:
            assert len(sent_to_client(sent)) == 1
            return [Shutdown()]

    serve_engine(null_engine(), RequestingInbox(Submit(greedy("a", range(4), 1)), sent), sent.append)
    assert sent_to_client(sent)


def test_idle_engine_publishes_late_store_statistics_once(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of sixteen bytes")
    secret.chmod(0o600)
    engine = null_engine(kv_store=f"disk:{tmp_path / 'kv'}", kv_store_secret_file=str(secret))
    assert engine.info.kv_store_answers
    sent: list[EngineMessage] = []
    serve_engine(engine, ScriptedInbox(Submit(greedy("a", range(100), 3)), sent), sent.append)
    stats = sent_to_client(sent)
    assert stats[-1].kv is not None
    assert stats[-1].kv.written_blocks == 6
    assert stats[-1].scheduler.offload.saved_tokens == 96
    assert (stats[-1].scheduler.slots.running, stats[-1].scheduler.slots.loading) == (0, 0)
    assert all(before != after for before, after in pairwise(stats))
