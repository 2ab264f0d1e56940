"""Memory that a peer may still write to is not reused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fd_core.disagg.connectors.contract import Connector, ConnectorError, ConnectorSettings, KVInbox, KVOutbox
from fd_core.testing.connectors.remote import Recipe, RemoteProcess
from fd_core.testing.connectors.suite import new_lease, put, value_of
from needs import needs_nixl

from fd_connector_nixl import connector as connecting
from fd_connector_nixl.connector import NixlConnector
from fd_connector_nixl.station import Memory

pytestmark = needs_nixl

WINDOW = 4
PIECES = range(12)
VALUE_BYTES = 700_000
POOLS: list[Memory] = []
"""Memory of each test alone; it stays mapped, as late writes may arrive."""


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlConnector]:
    monkeypatch.setenv("FD_NIXL_MEMORY_MB", "64")
    POOLS.append(Memory())
    monkeypatch.setattr(connecting, "MEMORY", POOLS[-1])
    connector = NixlConnector(ConnectorSettings(timeout=1.0))
    yield connector
    connector.close()


@pytest.fixture
def side() -> Iterator[RemoteProcess]:
    side = RemoteProcess()
    yield side
    side.close()


@pytest.fixture
def far(side: RemoteProcess) -> Connector:
    return side.make(Recipe(f"{NixlConnector.__module__}:NixlConnector", None, 1.0))


def opened(decode: Connector, prefill: Connector) -> tuple[KVInbox, KVOutbox]:
    lease = new_lease()
    inbox = decode.open_inbox(lease, pieces=PIECES, window=WINDOW, value_bytes=VALUE_BYTES)
    return inbox, prefill.open_outbox(lease, inbox.address, window=WINDOW, value_bytes=VALUE_BYTES)


def carry(inbox: KVInbox, outbox: KVOutbox) -> None:
    """Move every piece, as many at once as the window allows."""
    for first in PIECES[::WINDOW]:
        results = {index: put(outbox, index, value_of(index, 5000)) for index in range(first, first + WINDOW)}
        for index, result in results.items():
            assert bytes(inbox.take(index, *result)) == value_of(index, 5000)
            inbox.done(index, result.reference)


def in_time(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def held_back(connector: NixlConnector) -> int:
    return connector._station.held_back


def test_complete_lease_holds_no_memory(near: NixlConnector, far: Connector) -> None:
    inbox, outbox = opened(near, far)
    carry(inbox, outbox)
    inbox.close()
    assert held_back(near) == 0
    outbox.close()


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_confirmation_of_the_prefill_side_frees_held_memory(near: NixlConnector, far: Connector, first: str) -> None:
    inbox, outbox = opened(near, far)
    put(outbox, 0, value_of(0, VALUE_BYTES))
    if first == "decode":
        inbox.close()
        time.sleep(0.05)
        assert held_back(near) > VALUE_BYTES
        outbox.close()
    else:
        outbox.close()
        assert in_time(lambda: inbox._left)  # type: ignore[attr-defined] # of NixlInbox
        inbox.close()
    assert in_time(lambda: held_back(near) == 0)


def test_free_memory_serves_smaller_leases_at_the_limit(near: NixlConnector) -> None:
    slabs = [near._station.lend(8 << 20)[0] for _ in range(8)]
    with pytest.raises(ConnectorError):
        near._station.lend(1)
    for slab in slabs:
        near._station.give_back(slab)
    assert near._station.lend(1)[0] in slabs


def test_agent_restarts_when_too_much_memory_is_held(near: NixlConnector, far: Connector) -> None:
    first, kept = near._station, opened(near, far)
    for _ in range(40):  # never answered; together they exceed twice the memory
        near.open_inbox(new_lease(), pieces=PIECES, window=WINDOW, value_bytes=VALUE_BYTES).close()
        if near._station is not first:
            break
    assert near._station is not first
    assert not first.closed, "a lease is open there"
    carry(*kept)
    kept[1].close()
    kept[0].close()
    assert first.closed
    for _ in range(40):
        near.open_inbox(new_lease(), pieces=PIECES, window=WINDOW, value_bytes=VALUE_BYTES).close()


def test_late_write_of_a_stopped_worker_misses_later_leases(
    near: NixlConnector, far: Connector, side: RemoteProcess
) -> None:
    """Its first writes are in the system's buffers, the others in its own, when the memory is leased again."""
    inbox, outbox = opened(near, far)
    first, late = near._station, inbox._slab  # type: ignore[attr-defined] # of NixlInbox
    first._stop_polling()  # nothing lands while it is not polled
    for index in range(WINDOW):
        put(outbox, index, b"\xff" * VALUE_BYTES)
    with side.stopped():
        inbox.close()
        near._renew()
        assert first.closed
        late.bytes[:] = bytes(late.size)
        leases = [near.open_inbox(new_lease(), pieces=PIECES, window=WINDOW, value_bytes=VALUE_BYTES)]
        while leases[-1]._slab is not late:  # type: ignore[attr-defined] # of NixlInbox
            leases.append(near.open_inbox(new_lease(), pieces=PIECES, window=WINDOW, value_bytes=VALUE_BYTES))
    with pytest.raises(ConnectorError):
        for index in range(WINDOW, len(PIECES)):
            time.sleep(0.05)
            put(outbox, index, b"\xff" * VALUE_BYTES)
    for _ in range(100):
        first.poll()
        time.sleep(0.001)
    assert b"\xff" * 64 not in bytes(late.bytes)
    outbox.close()
    for lease in leases:
        lease.close()


def test_dead_workers_leave_no_descriptors(near: NixlConnector) -> None:
    counts = []
    for _ in range(4):
        doomed = RemoteProcess()
        try:
            far = doomed.make(Recipe(f"{NixlConnector.__module__}:NixlConnector", None, 1.0))
            ours, theirs = opened(near, far), opened(far, near)
            put(ours[1], 0, value_of(0, VALUE_BYTES))
            put(theirs[1], 0, value_of(0, VALUE_BYTES))
        finally:
            doomed.close()
        ours[0].close()
        theirs[1].close()
        assert in_time(lambda: not near._station._partings)
        counts.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    assert counts[-1] <= counts[1] + 1, "more than a connection that was not used since"


def test_idle_connector_does_not_poll(near: NixlConnector, far: Connector) -> None:
    inbox, outbox = opened(near, far)
    outbox.close()
    inbox.close()
    polled = []
    near._station.poll = lambda: polled.append(1) is None

    def idle() -> bool:
        polled.clear()
        time.sleep(0.2)
        return not polled

    assert in_time(idle)


def test_memory_read_by_a_stopped_worker_is_held(near: NixlConnector, far: Connector, side: RemoteProcess) -> None:
    inbox, outbox = opened(far, near)
    with side.stopped():
        put(outbox, 0, value_of(0, VALUE_BYTES))
        outbox.close()
        time.sleep(0.05)
        assert held_back(near) > VALUE_BYTES
    assert in_time(lambda: held_back(near) == 0)
    inbox.close()


def test_memory_of_another_lease_is_rejected(near: NixlConnector, far: Connector) -> None:
    lease = new_lease()
    inbox = near.open_inbox(lease, pieces=PIECES, window=WINDOW, value_bytes=VALUE_BYTES)
    inbox._slab.bytes[:16] = bytes(16)  # type: ignore[attr-defined] # of NixlInbox
    with pytest.raises(ConnectorError, match="no longer belongs"):
        far.open_outbox(lease, inbox.address, window=WINDOW, value_bytes=VALUE_BYTES)
    inbox.close()
    assert in_time(lambda: held_back(near) == 0)
