"""The connector `nixl`, and both ends of a lease."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fd_core.disagg.connectors.contract import (
    Bytes,
    Connector,
    ConnectorError,
    ConnectorSettings,
    KVInbox,
    KVOutbox,
    PutResult,
    flat_parts,
)
from fd_core.errors import PluginError

from fd_connector_nixl.layout import (
    TOKEN_BYTES,
    Address,
    Layout,
    Notice,
    ReceiverSlots,
    Reference,
    SenderSlots,
    read_address,
    write_address,
)
from fd_connector_nixl.settings import load_library, read_settings
from fd_connector_nixl.station import MEMORY, Station, Transfer


class NixlInbox(KVInbox):
    """Inbox whose memory belongs to the lease until the prefill side can no longer write to it."""

    def __init__(self, station: Station, lease: str, pieces: range, layout: Layout, timeout: float) -> None:
        """The caller has entered `station` for this inbox."""
        self._station, self._layout, self._timeout = station, layout, timeout
        self._arrivals = ReceiverSlots(pieces, layout.window, layout.value_bytes)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._slab, metadata = station.lend(layout.size)
        layout.write_header(self._slab.bytes, self._token)
        slot = Address(self._token, station.agent.name, self._slab.start, layout.size, metadata)
        try:
            self.address = write_address(lease, slot)
        except ConnectorError:
            station.give_back(self._slab)
            raise
        self._left = False
        """True if the prefill side announced its last write."""
        self._closed = False
        station.listen(self._token, self._hear)

    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        """Wait for the piece to arrive and return a view of it."""
        if frames:
            raise ConnectorError("a piece of NIXL was also sent as a frame")
        where = Reference.decode(reference)
        if not self._station.wait(lambda: self._landed(index, where), time.monotonic() + self._timeout):
            raise ConnectorError("a piece timed out")
        start = self._layout.start(where.slot)
        return self._slab.bytes[start : start + where.length].toreadonly()

    def done(self, index: int, reference: bytes) -> None:
        """Increment the count of the freed slot in memory, which the prefill side reads."""
        where = Reference.decode(reference)
        with self._station.lock:
            if not self._closed:
                count = self._arrivals.done(index, where)
                self._layout.write_count(self._slab.bytes, where.slot, count)

    def close(self) -> None:
        """Return the memory, or have the station quarantine it if writes to it may be in flight."""
        with self._station.lock:
            if self._closed:
                return
            self._closed = True
            self._station.unlisten(self._token)
            if self._left or self._arrivals.complete:
                self._station.give_back(self._slab)
            else:
                self._station.hold_back(self._slab, self._token)
        self._station.leave()

    def _landed(self, index: int, where: Reference) -> bool:
        with self._station.lock:
            if self._closed:
                raise ConnectorError("the lease is over")
            return self._arrivals.check(index, where)

    def _hear(self, notice: Notice) -> None:
        if notice.ends:
            self._left = True
        else:
            self._arrivals.landed(notice.piece, notice.reference)


class NixlOutbox(KVOutbox):
    """An outbox that copies values to registered memory with the inbox's layout and writes them from there."""

    def __init__(self, station: Station, lease: str, address: bytes, layout: Layout, timeout: float) -> None:
        """Raises `ConnectorError` if the decode side's memory cannot be read. The caller has entered `station`."""
        self._station, self._layout, self._timeout = station, layout, timeout
        self._departures = SenderSlots(layout.window)
        self._writes: dict[int, Transfer] = {}
        """Last write from each slot."""
        self._read: Transfer | None = None
        self._closed = False
        there = read_address(lease, address)
        if there.size != layout.size:
            raise ConnectorError("the decode worker's memory does not have the agreed size")
        self._token, self._there = there.token, there.start
        self._slab, _ = station.lend(layout.size)
        try:
            self._peer = station.meet(there.agent, there.metadata)
        except ConnectorError:
            station.give_back(self._slab)
            raise
        try:
            self._learn(time.monotonic() + timeout)
        except ConnectorError:
            self._part()
            raise

    def put(self, index: int, parts: Sequence[Bytes]) -> PutResult:
        """Copy a value to a free slot and begin to write it; `KVInbox.take` waits for its arrival."""
        if self._closed:
            raise ConnectorError("the lease is over")
        flat, length = flat_parts(parts, self._layout.value_bytes)
        with self._connection():
            for write in self._writes.values():
                write.require()
        deadline = time.monotonic() + self._timeout
        slot = self._departures.free()
        if slot is None:
            self._learn(deadline)
            slot = self._departures.free()
            if slot is None:
                raise ConnectorError("no slot in the decode worker's memory is free")
        if (last := self._writes.get(slot)) is not None:
            self._finish(last, deadline)
        at = start = self._layout.start(slot)
        for part in flat:
            self._slab.bytes[at : at + len(part)] = part
            at += len(part)
        reference = Reference(slot, self._departures.write(slot), length)
        # An empty value is announced by a write, too, to have a single code path.
        self._writes[slot] = self._begin(start, max(length, 1), Notice(self._token, index, reference))
        self._station.nudge()
        return PutResult(reference.encode())

    def close(self) -> None:
        """Leave writes in flight to the station, which notifies the other side when they are complete."""
        if self._closed:
            return
        self._closed = True
        self._part()
        self._station.leave()

    def _part(self) -> None:
        transfers = [*self._writes.values()] + ([self._read] if self._read is not None else [])
        self._station.part(self._peer, self._slab, self._token, transfers)

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Mark the connection to the decode worker as broken once a transfer fails."""
        try:
            yield
        except ConnectorError:
            self._peer.broken = True
            raise

    def _begin(self, start: int, length: int, notice: Notice) -> Transfer:
        there = self._there + start
        with self._connection():
            return self._station.agent.write(self._slab.start + start, length, self._peer.name, there, notice)

    def _learn(self, deadline: float) -> None:
        """Read the free counts of all slots from the decode side's memory."""
        if self._read is None:
            length = self._layout.header_bytes
            with self._connection():
                self._read = self._station.agent.read(self._slab.start, length, self._peer.name, self._there)
        self._finish(self._read, deadline)
        self._read = None
        token, freed = self._layout.read_header(self._slab.bytes)
        if token != self._token:
            raise ConnectorError("the decode worker's memory no longer belongs to this lease")
        self._departures.learn(freed)

    def _finish(self, transfer: Transfer, deadline: float) -> None:
        with self._connection():
            over = self._station.wait(transfer.require, deadline)
        if not over:
            raise ConnectorError("the decode worker timed out")


_log = logging.getLogger(__name__)

_MOST_HELD_BACK: Final = 1 / 4
"""Share of the allowed memory that may be quarantined; beyond it, the connector starts a new station."""


class NixlConnector(Connector):
    """Connector for workers in a private network: NIXL does not check the targets of writes."""

    name = "nixl"

    def __init__(self, settings: ConnectorSettings) -> None:
        """Start NIXL, so that errors are reported at start-up.

        Raises `ConfigError` for the environment's settings, `PluginError` if NIXL is missing or does not start.
        """
        super().__init__(settings)
        self._nixl_settings = read_settings(os.environ)
        self._library = load_library()
        self._lock = threading.Lock()
        self._closed = False
        self._station = Station(self._library, self._nixl_settings, MEMORY)
        self._retired: list[Station] = []
        _log.warning(
            "NIXL listens on the devices %s without authentication: any peer can modify this process's memory",
            self._nixl_settings.devices,
        )

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> KVInbox:
        """Return an inbox with memory for `window` values."""
        with self._entered() as station:
            return NixlInbox(station, lease, pieces, layout=Layout(window, value_bytes), timeout=self.settings.timeout)

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> KVOutbox:
        """Return an outbox that is connected to the inbox's agent and can access its memory."""
        with self._entered() as station:
            return NixlOutbox(station, lease, address, Layout(window, value_bytes), self.settings.timeout)

    def close(self) -> None:
        """Close the agents."""
        with self._lock:
            self._closed = True
            stations = [self._station, *self._retired]
        for station in stations:
            station.close()

    @contextmanager
    def _entered(self) -> Iterator[Station]:
        """Enter the station for an end that is opened; leave it if that fails."""
        with self._lock:
            if self._closed:
                raise ConnectorError("the connector nixl is closed")
            if self._station.held_back > _MOST_HELD_BACK * self._nixl_settings.memory:
                self._renew()
            station = self._station
            station.enter()
        try:
            yield station
        except ConnectorError:
            station.leave()
            raise

    def _renew(self) -> None:
        """Start another station. The old one closes with its last lease, which frees its quarantined memory."""
        try:
            station = Station(self._library, self._nixl_settings, MEMORY)
        except PluginError as error:
            raise ConnectorError(f"NIXL cannot be restarted: {error.message}") from error
        old, self._station = self._station, station
        self._retired = [one for one in self._retired if not one.closed]
        self._retired.append(old)
        old.retire()
