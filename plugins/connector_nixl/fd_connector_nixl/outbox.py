"""The prefill side's end of a lease: it writes to places of the decode side's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fd_core.disagg.connectors.contract import Bytes, ConnectorError, KVOutbox, PutResult, flat_parts

from fd_connector_nixl.address import read_address
from fd_connector_nixl.agent import Transfer
from fd_connector_nixl.layout import Layout, Notice, Reference
from fd_connector_nixl.places import Departures
from fd_connector_nixl.station import Station


class NixlOutbox(KVOutbox):
    """An outbox that copies values to registered memory with the inbox's layout and writes them from there."""

    def __init__(self, station: Station, lease: str, address: bytes, layout: Layout, timeout: float) -> None:
        """Raises `ConnectorError` if the decode side's memory cannot be read. The caller has entered `station`."""
        self._station, self._layout, self._timeout = station, layout, timeout
        self._departures = Departures(layout.window)
        self._writes: dict[int, Transfer] = {}
        """The last write from each place."""
        self._read: Transfer | None = None
        self._closed = False
        there = read_address(lease, address)
        if there.size != layout.size:
            raise ConnectorError("the decode worker's memory has another size than was agreed on")
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
        """Copy a value to a free place and begin to write it; `KVInbox.take` waits for it to land."""
        if self._closed:
            raise ConnectorError("the lease is over")
        flat, length = flat_parts(parts, self._layout.value_bytes)
        self._check()
        deadline = time.monotonic() + self._timeout
        place = self._departures.free()
        if place is None:
            self._learn(deadline)
            place = self._departures.free()
            if place is None:
                raise ConnectorError("no place in the decode worker's memory is free")
        if (last := self._writes.get(place)) is not None:
            self._finish(last, deadline)
        at = start = self._layout.start(place)
        for part in flat:
            self._slab.bytes[at : at + len(part)] = part
            at += len(part)
        reference = Reference(place, self._departures.write(place), length)
        # A value of no bytes is announced by a write, too, so that there is one way only.
        self._writes[place] = self._begin(start, max(length, 1), Notice(self._token, index, reference))
        self._station.nudge()
        return PutResult(reference.encode())

    def close(self) -> None:
        """Leave writes that are on their way to the station, which tells the other side when they have landed."""
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
        """Hold the connection to the decode worker broken as soon as a transfer fails."""
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
        """Read from the decode side's memory how often each place was freed."""
        if self._read is None:
            length = self._layout.header_bytes
            with self._connection():
                self._read = self._station.agent.read(self._slab.start, length, self._peer.name, self._there)
        self._finish(self._read, deadline)
        self._read = None
        token, freed = self._layout.read_header(self._slab.bytes)
        if token != self._token:
            raise ConnectorError("the decode worker's memory is not this lease's any more")
        self._departures.learn(freed)

    def _check(self) -> None:
        with self._connection():
            for write in self._writes.values():
                write.require()

    def _finish(self, transfer: Transfer, deadline: float) -> None:
        with self._connection():
            over = self._station.wait(transfer.require, deadline)
        if not over:
            raise ConnectorError("the decode worker does not answer in time")
