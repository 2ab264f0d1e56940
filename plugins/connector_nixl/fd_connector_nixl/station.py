"""A station: an agent, the memory registered with it, and which lease uses which of the memory.

A write that arrives when its pages are unmapped ends the process. So pages are never returned to the system: a process
keeps what it once took, and uses it again.

Memory that a prefill worker may still write to is held back until that worker says that it writes nothing more, or
until the agent is closed, after which no write lands. The connector retires a station that holds back much memory, and
goes on with another one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from fd_core.disagg.connectors.contract import ConnectorError

from fd_connector_nixl.agent import Agent, Transfer
from fd_connector_nixl.layout import Notice
from fd_connector_nixl.settings import Library, Settings

_GRAIN: Final = 1 << 16
_LARGEST: Final = 2
"""A slab may be this many times as large as the lease that gets it, and no larger."""


class Slab:
    """Pages for one lease at a time."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.bytes = memoryview(pages)
        """uint8[size]"""
        self.start = int(np.frombuffer(self.bytes, np.uint8).ctypes.data)
        """Address of the first byte in this process."""


class Memory:
    """The slabs of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Slab] = []
        self._free: list[Slab] = []

    @property
    def taken(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.size for slab in self._all)

    def lend(self, size: int, limit: int) -> Slab:
        """Return a slab of at least `size` bytes. Raises `ConnectorError` if that takes more than `limit` in all."""
        size = -(-size // _GRAIN) * _GRAIN
        with self._lock:
            if (slab := fitting(self._free, size)) is not None:
                self._free.remove(slab)
                return slab
            if self.taken + size > limit:
                raise ConnectorError(
                    f"a lease needs {size:,} bytes for NIXL, and {self.taken:,} of {limit:,} are taken",
                    hint="raise FD_NIXL_MEMORY_MB, or run fewer requests at once",
                )
            try:
                slab = Slab(size)
            except (OSError, ValueError, OverflowError) as error:
                raise ConnectorError(f"no memory of {size:,} bytes for NIXL: {error}") from error
            self._all.append(slab)
            return slab

    def give_back(self, slab: Slab) -> None:
        """Let the next lease have a slab that nobody can write to any more."""
        with self._lock:
            self._free.append(slab)


def fitting(slabs: list[Slab], size: int) -> Slab | None:
    """Return the smallest slab that `size` bytes fit in without wasting most of it."""
    fit = (slab for slab in slabs if size <= slab.size <= _LARGEST * max(size, _GRAIN))
    return min(fit, key=lambda slab: slab.size, default=None)


MEMORY: Final = Memory()
"""The slabs of this process."""


_IDLE_PEERS: Final = 16
"""Connections that are kept for the next lease."""
_PAUSE: Final = 20e-6
_SHORTEST: Final = 50e-6
_LONGEST: Final = 1e-3
_GROWTH: Final = 1.2
"""Factor between one pause and the next, in seconds, while nothing happens."""
_LINGER_SECONDS: Final = 0.1
"""How long to poll after the last use, so that the last notice leaves."""


@dataclass(slots=True, eq=False)
class Peer:
    """The agent of a decode worker."""

    name: str
    known: set[bytes] = field(default_factory=set)
    """Metadata that NIXL was given."""
    users: int = 0
    broken: bool = False


@dataclass(slots=True, eq=False)
class _Parting:
    """The writes of a closed outbox that are not over."""

    peer: Peer
    slab: Slab
    token: bytes
    transfers: list[Transfer]


class Station:
    """Safe to use from several threads. `leave` comes once for every `enter`."""

    def __init__(self, library: Library, settings: Settings, memory: Memory) -> None:
        """Start an agent and the thread that polls it."""
        self._memory, self._limit = memory, settings.memory
        self.agent = Agent(library, settings)
        self.lock = threading.RLock()
        """Held while a listener is called."""
        self._metadata: dict[Slab, bytes] = {}
        self._free: list[Slab] = []
        self._held_back: dict[bytes, Slab] = {}
        """By token."""
        self._listeners: dict[bytes, Callable[[Notice], None]] = {}
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._partings: list[_Parting] = []
        self._inside = 0
        self._retired = False
        self.closed = False
        """Whether the agent is closed."""
        self._used_at = time.monotonic()
        self._nudged = threading.Event()
        self._stopping = False
        # NIXL moves bytes only when it is polled.
        self._thread = threading.Thread(target=self._poll_while_wanted, name="fd-nixl", daemon=True)
        self._thread.start()

    @property
    def held_back(self) -> int:
        """Bytes of leases that are over and that may still be written to."""
        with self.lock:
            parting = sum(parting.slab.size for parting in self._partings)
            return parting + sum(slab.size for slab in self._held_back.values())

    # Coming and going -------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Count an end of a lease that is about to be opened."""
        with self.lock:
            self._inside += 1
        self.nudge()

    def leave(self) -> None:
        """Count an end that is closed."""
        with self.lock:
            self._inside -= 1
            self._used_at = time.monotonic()
        self._close_if_last()

    def retire(self) -> None:
        """Close as soon as the last end is closed."""
        with self.lock:
            self._retired = True
        self._close_if_last()

    def _close_if_last(self) -> None:
        with self.lock:
            last = self._retired and not self._inside
        if last:
            self.close()

    def close(self) -> None:
        """Abort all transfers and return the memory. Idempotent, never raises."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        self._stop_polling()
        with self.lock:
            self._listeners.clear()
            self._partings.clear()
            self.agent.close()
            # Nobody reaches these pages any more, so what was held back is not.
            for slab in self._metadata:
                self._memory.give_back(slab)
            self._metadata.clear()
            self._free.clear()
            self._held_back.clear()
            self._peers.clear()

    # Memory -----------------------------------------------------------------------------------------------

    def lend(self, size: int) -> tuple[Slab, bytes]:
        """Return registered memory, and the metadata that other agents need to write to it."""
        with self.lock:
            if self.closed:
                raise ConnectorError("NIXL was closed")
            slab = fitting(self._free, size)
            if slab is not None:
                self._free.remove(slab)
                return slab, self._metadata[slab]
            slab = self._memory.lend(size, self._limit)
            try:
                self._metadata[slab] = self.agent.register(slab.start, slab.size)
            except ConnectorError:
                self._memory.give_back(slab)
                raise
            return slab, self._metadata[slab]

    def give_back(self, slab: Slab) -> None:
        """Return memory that nobody writes to any more."""
        with self.lock:
            if slab in self._metadata:
                self._free.append(slab)

    def hold_back(self, slab: Slab, token: bytes) -> None:
        """Lend memory to no other lease until the prefill side says that it writes nothing more."""
        with self.lock:
            if slab in self._metadata:
                self._held_back[token] = slab

    # Notices ----------------------------------------------------------------------------------------------

    def listen(self, token: bytes, listener: Callable[[Notice], None]) -> None:
        """Have `listener` called for each notice of a lease, under `lock`."""
        with self.lock:
            self._listeners[token] = listener

    def unlisten(self, token: bytes) -> None:
        """Ignore the notices of a lease, except its last one."""
        with self.lock:
            self._listeners.pop(token, None)

    def poll(self) -> bool:
        """Let bytes move and hand out notices; return whether any came. Never raises."""
        with self.lock:
            if self.closed:
                return False
            try:
                found = self.agent.poll()
            except ConnectorError:
                return False
            for encoded in found:
                self._hear(Notice.decode(encoded))
            self._partings = [parting for parting in self._partings if not self._parted(parting)]
            return bool(found)

    def wait(self, over: Callable[[], bool], deadline: float) -> bool:
        """Poll until something is over; return whether it was before `deadline`, in seconds of the monotonic clock."""
        while not over():
            if time.monotonic() > deadline:
                return False
            self.poll()
            time.sleep(_PAUSE)
        return True

    def nudge(self) -> None:
        """Poll often for a while."""
        self._used_at = time.monotonic()
        self._nudged.set()

    def _hear(self, notice: Notice | None) -> None:
        if notice is None:
            return
        if (listener := self._listeners.get(notice.token)) is not None:
            listener(notice)
        elif notice.ends and (slab := self._held_back.pop(notice.token, None)) is not None:
            self._free.append(slab)

    def _stop_polling(self) -> None:
        self._stopping = True
        self._nudged.set()
        self._thread.join()

    def _poll_while_wanted(self) -> None:
        pause = _SHORTEST
        while not self._stopping:
            pause = _SHORTEST if self.poll() else min(pause * _GROWTH, _LONGEST)
            used_lately = time.monotonic() - self._used_at < _LINGER_SECONDS
            if self._nudged.wait(pause if self._inside or self._partings or used_lately else None):
                self._nudged.clear()
                pause = _SHORTEST

    # Peers ------------------------------------------------------------------------------------------------

    def meet(self, name: str, metadata: bytes) -> Peer:
        """Return another agent, which the caller is going to write to. `part` follows once for each call."""
        with self.lock:
            peer = self._peers.get(name)
            if peer is not None and peer.broken and not peer.users:
                self._forget(peer)
                peer = None
            if peer is not None and peer.broken:
                raise ConnectorError("the connection to the decode worker is broken")
            if name == self.agent.name:
                raise ConnectorError("the decode worker is this one")
            if peer is None or metadata not in peer.known:
                met = self.agent.meet(metadata)
                if met != name:
                    if met not in self._peers:
                        self.agent.forget(met)
                    raise ConnectorError("the address for NIXL is another agent's")
                peer = peer or Peer(name)
                peer.known.add(metadata)
            self._peers[name] = peer
            self._peers.move_to_end(name)
            peer.users += 1
            return peer

    def part(self, peer: Peer, slab: Slab, token: bytes, transfers: Iterable[Transfer]) -> None:
        """End the prefill side of a lease: once all its writes are over, tell the other side and return the memory."""
        with self.lock:
            if self.closed:
                return
            parting = _Parting(peer, slab, token, list(transfers))
            if not self._parted(parting):
                self._partings.append(parting)
        self.nudge()

    def _parted(self, parting: _Parting) -> bool:
        if not all(transfer.over for transfer in parting.transfers):
            return False
        parting.peer.broken |= any(transfer.flaw is not None for transfer in parting.transfers)
        self.give_back(parting.slab)
        if not parting.peer.broken:
            with contextlib.suppress(ConnectorError):  # it has other ways to find out
                self.agent.tell(parting.peer.name, Notice.of_the_end(parting.token))
        self._leave_peer(parting.peer)
        return True

    def _leave_peer(self, peer: Peer) -> None:
        peer.users -= 1
        idle = [one for one in self._peers.values() if not one.users]
        for one in idle:
            if one.broken:
                self._forget(one)
        idle = [one for one in idle if not one.broken]
        for one in idle[: max(0, len(idle) - _IDLE_PEERS)]:
            self._forget(one)

    def _forget(self, peer: Peer) -> None:
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self.agent.forget(peer.name)
