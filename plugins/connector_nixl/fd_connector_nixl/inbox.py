"""The decode side's end of a lease: memory that the prefill side writes to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from fd_core.disagg.connectors.contract import Bytes, ConnectorError, KVInbox

from fd_connector_nixl.address import Address, write_address
from fd_connector_nixl.layout import TOKEN_BYTES, Layout, Notice, Reference
from fd_connector_nixl.places import Arrivals
from fd_connector_nixl.station import Station


class NixlInbox(KVInbox):
    """An inbox whose memory belongs to the lease until the prefill side cannot write to it any more."""

    def __init__(self, station: Station, lease: str, pieces: range, layout: Layout, timeout: float) -> None:
        """The caller has entered `station` for this inbox."""
        self._station, self._layout, self._timeout = station, layout, timeout
        self._arrivals = Arrivals(pieces, layout.window, layout.value_bytes)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._slab, metadata = station.lend(layout.size)
        layout.write_header(self._slab.bytes, self._token)
        place = Address(self._token, station.agent.name, self._slab.start, layout.size, metadata)
        try:
            self.address = write_address(lease, place)
        except ConnectorError:
            station.give_back(self._slab)
            raise
        self._left = False
        """Whether the prefill side said that it will write nothing more."""
        self._closed = False
        station.listen(self._token, self._hear)

    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        """Wait until the piece has landed and return a view of it."""
        if frames:
            raise ConnectorError("a piece that NIXL carries came behind its message as well")
        where = Reference.decode(reference)
        if not self._station.wait(lambda: self._landed(index, where), time.monotonic() + self._timeout):
            raise ConnectorError("a piece did not land in time")
        start = self._layout.start(where.place)
        return self._slab.bytes[start : start + where.length].toreadonly()

    def done(self, index: int, reference: bytes) -> None:
        """Count in the memory that the place was freed; the prefill side reads the count."""
        where = Reference.decode(reference)
        with self._station.lock:
            if not self._closed:
                count = self._arrivals.done(index, where)
                self._layout.write_count(self._slab.bytes, where.place, count)

    def close(self) -> None:
        """Return the memory, or have the station hold it back if pieces may be on their way to it."""
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
            return self._arrivals.look(index, where)

    def _hear(self, notice: Notice) -> None:
        if notice.ends:
            self._left = True
        else:
            self._arrivals.landed(notice.piece, notice.reference)
