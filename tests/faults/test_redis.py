"""A real Redis server in every trouble, under an engine in want of blocks: golden texts, bounded waits, a number that
tells, and a store that is used again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fd_core.kv.stores.contract import FailureReason
from tests.faults.places import on_server
from tests.faults.pressed import SOON, SPECS, Pressed, nothing_left_behind
from tests.faults.proxy import Proxy

SERVER_STOPS_SECONDS = 2.0


@contextmanager
def replica_of_nobody(server: Any) -> Iterator[None]:
    """Serve what is there and refuse writes, as a replica does."""
    server.back_door.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        server.back_door.replicaof("no", "one")


def in_trouble(server: Any, trouble: FailureReason) -> AbstractContextManager[object]:
    from door import Door

    return replica_of_nobody(server) if trouble is FailureReason.READ_ONLY else Door(server).fault(trouble)


def endure(
    location: str,
    secret: Path,
    fault: Callable[[], AbstractContextManager[object]],
    troubles: set[FailureReason],
    *,
    waits: float = 10.0,
    seconds: float = 0.5,
    still_loads: bool = False,
) -> None:
    """Run engines before, in and after a fault that begins while requests run."""
    with nothing_left_behind():
        earlier = Pressed(location, secret)
        earlier.warm()
        earlier.close()
        engine = Pressed(location, secret, waits=waits)
        engine.loads()
        if waits > SOON:
            assert engine.calm().store_errors == {}
        with ExitStack() as stack:
            ends = time.monotonic() + seconds
            engine.round("in trouble", busy=lambda: stack.enter_context(fault()))
            while time.monotonic() < ends or not set(engine.tiers.store_errors) & troubles:
                assert time.monotonic() < ends + 10, f"nothing tells what happened: {engine.tiers}"
                before = engine.tiers.loaded_blocks_store
                engine.round()
                assert not still_loads or engine.tiers.loaded_blocks_store > before
            assert engine.calm().dropped_blocks > 0
            assert set(engine.tiers.store_errors) <= troubles, engine.tiers
            newcomer = Pressed(location, secret, waits=waits)
            newcomer.round("newcomer")
            newcomer.close()
            assert newcomer.tiers.dropped_blocks > 0
            assert set(newcomer.tiers.store_errors) & troubles
        engine.recover()
        engine.close()


@pytest.mark.parametrize(
    ("trouble", "labels", "still_loads"),
    [
        (FailureReason.UNREACHABLE, {FailureReason.UNREACHABLE}, False),
        (FailureReason.FULL, {FailureReason.FULL}, True),
        (FailureReason.READ_ONLY, {FailureReason.READ_ONLY}, True),
        (FailureReason.DENIED, {FailureReason.DENIED}, False),
    ],
)
def test_a_server_killed_full_read_only_or_with_another_password(
    redis_server: Any, secret: Path, trouble: FailureReason, labels: set[FailureReason], still_loads: bool
) -> None:
    fault = lambda: in_trouble(redis_server, trouble)  # noqa: E731 - a fault is made anew each time
    endure(redis_server.unix_url, secret, fault, labels, still_loads=still_loads)


@pytest.mark.parametrize(
    "seconds", [SERVER_STOPS_SECONDS, pytest.param(5.0, marks=pytest.mark.soak)], ids=["for 2 s", "for 5 s"]
)
def test_a_server_that_is_stopped(redis_server: Any, secret: Path, seconds: float) -> None:
    endure(redis_server.unix_url, secret, redis_server.frozen, {FailureReason.TIMEOUT}, waits=SOON, seconds=seconds)


@pytest.mark.parametrize(
    ("pause", "piece"), [(60.0, 65536), (0.05, 4)], ids=["says nothing", "drips 80 bytes a second"]
)
def test_a_connection_without_end(redis_server: Any, proxy: Proxy, secret: Path, pause: float, piece: int) -> None:
    location = f"redis://127.0.0.1:{proxy.port}/0"
    fault = lambda: proxy.answering(pause=pause, piece=piece)  # noqa: E731 - a fault is made anew each time
    endure(location, secret, fault, {FailureReason.TIMEOUT}, waits=SOON)


def test_a_server_that_is_restarted_at_once_has_forgotten_everything(redis_server: Any, secret: Path) -> None:
    with nothing_left_behind():
        engine = Pressed(redis_server.unix_url, secret)
        engine.warm()
        engine.round(busy=redis_server.restart)
        engine.recover()
        engine.close()


@pytest.mark.parametrize("host", [0, 1 << 20], ids=["without a host tier", "with one"])
def test_a_server_that_never_was(secret: Path, host: int) -> None:
    from servers import free_port

    with nothing_left_behind():
        engine = Pressed(f"redis://127.0.0.1:{free_port()}/0", secret, host_kv_memory=host)
        for _ in range(3):
            engine.round()
        tiers = engine.calm()
        assert set(tiers.store_errors) == {FailureReason.UNREACHABLE}
        assert tiers.dropped_blocks > 0
        assert (tiers.loaded_blocks_host > 0) == (host > 0), "the host tier works without a store"
        assert "is unavailable" in (engine.engine.info.kv_store or "")
        engine.close()


def test_a_wrong_password_from_the_start_until_it_is_the_right_one(start_redis: Any, secret: Path) -> None:
    server = start_redis("--requirepass", "right", password="right")
    with nothing_left_behind():
        engine = Pressed(f"unix://:wrong@{server.socket}", secret)
        engine.round()
        assert set(engine.calm().store_errors) == {FailureReason.DENIED}
        server.back_door.config_set("requirepass", "wrong")
        engine.recover()
        engine.close()


def test_a_slow_server_is_used_but_not_where_computing_is_sooner(proxy: Proxy, secret: Path) -> None:
    location = f"redis://127.0.0.1:{proxy.port}/0"
    with nothing_left_behind():
        earlier = Pressed(location, secret)
        earlier.warm()
        earlier.close()
        engine = Pressed(location, secret, always_loads=False)
        engine.round("of its own", specs=SPECS[:3])  # what computing costs is learnt from these
        with proxy.answering(pause=0.1):
            engine.round(specs=SPECS[:3])
            assert engine.calm().loaded_blocks_store > 0, "what is unknown is tried"
            engine.round(specs=SPECS[:3])
        assert engine.offload_counters.declined > 0
        assert not engine.calm().store_errors
        engine.close()


def test_what_could_not_be_written_is_written_when_it_is_used_again(redis_server: Any, secret: Path) -> None:
    """A prefix that everybody uses stays in the host tier, so no lookup ever misses it."""
    place = on_server(redis_server)
    healthy = Pressed(place.location, secret)
    healthy.warm()
    healthy.close()
    expected = set(place.keys())
    redis_server.back_door.flushall()
    with nothing_left_behind():
        engine = Pressed(place.location, secret, waits=SOON, host_kv_memory=1 << 20)
        with redis_server.frozen():
            engine.round()
            assert engine.calm().dropped_blocks > 0
        redis_server.restart()
        ends = time.monotonic() + 20
        while engine.calm().write_breaker != "closed":
            engine.round(f"other {time.monotonic()}")
            assert time.monotonic() < ends
        while not expected <= set(place.keys()):
            assert time.monotonic() < ends
            engine.round()
            engine.calm()
        engine.close()
