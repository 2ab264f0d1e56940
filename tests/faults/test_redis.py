"""Every fault of a real Redis server while the engine is short of blocks: golden texts, bounded waits, an error
counter, and a store that recovers afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fd_core.kv.stores.contract import FailureReason
from tests.faults.pressed import SOON, SPECS, Pressed, no_leaks
from tests.faults.proxy import Proxy
from tests.faults.raw_stores import on_server

SERVER_STOPS_SECONDS = 2.0


@contextmanager
def detached_replica(server: Any) -> Iterator[None]:
    """Serve existing values and reject writes, as a replica does."""
    server.back_door.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        server.back_door.replicaof("no", "one")


def faulty(server: Any, reason: FailureReason) -> AbstractContextManager[object]:
    from door import Door

    return detached_replica(server) if reason is FailureReason.READ_ONLY else Door(server).fault(reason)


def check_fault(
    location: str,
    secret: Path,
    fault: Callable[[], AbstractContextManager[object]],
    reasons: set[FailureReason],
    *,
    waits: float = 10.0,
    seconds: float = 0.5,
    still_loads: bool = False,
) -> None:
    """Run engines before, during and after a fault that starts while requests run."""
    with no_leaks():
        earlier = Pressed(location, secret)
        earlier.warm()
        earlier.close()
        engine = Pressed(location, secret, waits=waits)
        engine.loads()
        if waits > SOON:
            assert engine.calm().store_errors == {}
        with ExitStack() as stack:
            ends = time.monotonic() + seconds
            engine.round("fault", busy=lambda: stack.enter_context(fault()))
            while time.monotonic() < ends or not set(engine.tiers.store_errors) & reasons:
                assert time.monotonic() < ends + 10, f"no error was counted: {engine.tiers}"
                before = engine.tiers.loaded_blocks_store
                engine.round()
                assert not still_loads or engine.tiers.loaded_blocks_store > before
            assert engine.calm().dropped_blocks > 0
            assert set(engine.tiers.store_errors) <= reasons, engine.tiers
            newcomer = Pressed(location, secret, waits=waits)
            newcomer.round("newcomer")
            newcomer.close()
            assert newcomer.tiers.dropped_blocks > 0
            assert set(newcomer.tiers.store_errors) & reasons
        engine.recover()
        engine.close()


@pytest.mark.parametrize(
    ("reason", "labels", "still_loads"),
    [
        (FailureReason.UNREACHABLE, {FailureReason.UNREACHABLE}, False),
        (FailureReason.FULL, {FailureReason.FULL}, True),
        (FailureReason.READ_ONLY, {FailureReason.READ_ONLY}, True),
        (FailureReason.DENIED, {FailureReason.DENIED}, False),
    ],
)
def test_engine_survives_redis_faults(
    redis_server: Any, secret: Path, reason: FailureReason, labels: set[FailureReason], still_loads: bool
) -> None:
    fault = lambda: faulty(redis_server, reason)  # noqa: E731 - each use needs a new context manager
    check_fault(redis_server.unix_url, secret, fault, labels, still_loads=still_loads)


@pytest.mark.parametrize(
    "seconds", [SERVER_STOPS_SECONDS, pytest.param(5.0, marks=pytest.mark.soak)], ids=["for 2 s", "for 5 s"]
)
def test_engine_survives_a_stopped_redis(redis_server: Any, secret: Path, seconds: float) -> None:
    check_fault(
        redis_server.unix_url, secret, redis_server.frozen, {FailureReason.TIMEOUT}, waits=SOON, seconds=seconds
    )


@pytest.mark.parametrize(
    ("pause", "piece"),
    [
        pytest.param(60.0, 65536, id="silent", marks=pytest.mark.soak),  # as a stopped server is
        pytest.param(0.05, 4, id="80 bytes a second"),
    ],
)
def test_operations_time_out_on_a_stalled_connection(
    redis_server: Any, proxy: Proxy, secret: Path, pause: float, piece: int
) -> None:
    location = f"redis://127.0.0.1:{proxy.port}/0"
    fault = lambda: proxy.answering(pause=pause, piece=piece)  # noqa: E731 - each use needs a new context manager
    check_fault(location, secret, fault, {FailureReason.TIMEOUT}, waits=SOON)


def test_engine_survives_a_restart_that_empties_redis(redis_server: Any, secret: Path) -> None:
    with no_leaks():
        engine = Pressed(redis_server.unix_url, secret)
        engine.warm()
        engine.round(busy=redis_server.restart)
        engine.recover()
        engine.close()


@pytest.mark.parametrize("host", [0, 1 << 20], ids=["without a host tier", "with a host tier"])
def test_engine_starts_without_redis(secret: Path, host: int) -> None:
    from servers import free_port

    with no_leaks():
        engine = Pressed(f"redis://127.0.0.1:{free_port()}/0", secret, host_kv_memory=host)
        for _ in range(3):
            engine.round()
        tiers = engine.calm()
        assert set(tiers.store_errors) == {FailureReason.UNREACHABLE}
        assert tiers.dropped_blocks > 0
        assert (tiers.loaded_blocks_host > 0) == (host > 0), "the host tier works without a store"
        assert "is unavailable" in (engine.engine.info.kv_store or "")
        engine.close()


def test_store_is_used_once_the_password_is_right(start_redis: Any, secret: Path) -> None:
    server = start_redis("--requirepass", "right", password="right")
    with no_leaks():
        engine = Pressed(f"unix://:wrong@{server.socket}", secret)
        engine.round()
        assert set(engine.calm().store_errors) == {FailureReason.DENIED}
        server.back_door.config_set("requirepass", "wrong")
        engine.recover()
        engine.close()


def test_slow_store_is_used_only_where_loading_beats_computing(proxy: Proxy, secret: Path) -> None:
    location = f"redis://127.0.0.1:{proxy.port}/0"
    with no_leaks():
        earlier = Pressed(location, secret)
        earlier.warm()
        earlier.close()
        engine = Pressed(location, secret, always_loads=False)
        engine.round("without the store", specs=SPECS[:3])  # measures the cost of computing
        with proxy.answering(pause=0.1):
            engine.round(specs=SPECS[:3])
            assert engine.calm().loaded_blocks_store > 0, "a store of unknown pace is tried"
            engine.round(specs=SPECS[:3])
        assert engine.offload_counters.declined > 0
        assert not engine.calm().store_errors
        engine.close()


def test_blocks_that_failed_to_save_are_saved_when_used_again(redis_server: Any, secret: Path) -> None:
    """A prefix in constant use stays in the host tier, so no lookup misses it."""
    raw_store = on_server(redis_server)
    healthy = Pressed(raw_store.location, secret)
    healthy.warm()
    healthy.close()
    expected = set(raw_store.keys())
    redis_server.back_door.flushall()
    with no_leaks():
        engine = Pressed(raw_store.location, secret, waits=SOON, host_kv_memory=1 << 20)
        with redis_server.frozen():
            engine.round()
            assert engine.calm().dropped_blocks > 0
        redis_server.restart()
        ends = time.monotonic() + 20
        while engine.calm().write_breaker != "closed":
            engine.round(f"other {time.monotonic()}")
            assert time.monotonic() < ends
        while not expected <= set(raw_store.keys()):
            assert time.monotonic() < ends
            engine.round()
            engine.calm()
        engine.close()
