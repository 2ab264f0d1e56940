"""A station: an agent of NIXL, its registered memory, and the assignment of memory to leases.

A write to unmapped pages crashes the process. So pages are never returned to the system, but reused.

Memory that a prefill worker may still write to is quarantined until that worker announces its last write, or until the
agent is closed, which stops all writes. The connector retires a station with much quarantined memory, and starts
another one.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from fd_core.disagg.connectors.contract import ConnectorError
from fd_core.errors import PluginError

from fd_connector_nixl.layout import Notice
from fd_connector_nixl.settings import Library, Settings

_UCX: Final = ["UCX"]
_HOST: Final = "DRAM"


class Transfer:
    """A write or read, in progress or complete."""

    __slots__ = ("failure", "handle", "over")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.over = False
        """True if the local memory is no longer read or written."""
        self.failure: str | None = None
        """Reason of the failure; None if there was none."""

    def require(self) -> bool:
        """Return True if the transfer is complete. Raises `ConnectorError` if it failed."""
        if self.failure is not None:
            raise ConnectorError(self.failure)
        return self.over


class Agent:
    """An agent of NIXL, which accesses the registered memory of other agents and vice versa. Thread-safe.

    An agent has no thread: bytes move while both agents are polled. A write is complete when its bytes have arrived,
    and its notification is sent at the poll that detects it.
    """

    def __init__(self, library: Library, settings: Settings) -> None:
        """Listen. Raises `PluginError` if NIXL does not start."""
        self.name = f"fd_core-{secrets.token_hex(16)}"
        """Unique to this object."""
        self._errors = library.errors
        self._lock = threading.RLock()
        self._transfers: set[Transfer] = set()
        self._registered: list[Any] = []
        api = library.api
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False,  # it would spin
                enable_listen_thread=False,  # it would listen on every interface
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent: Any = api.nixl_agent(self.name, config)
            chosen = {"engine_config": settings.engine_config} if settings.engine_config else {}
            self._agent.create_backend(_UCX[0], chosen)
        except self._errors as error:
            raise PluginError(
                f"NIXL does not start with the transports {settings.transports} on the devices {settings.devices}: "
                f"{type(error).__name__} {error}",
                field="--kv-connector",
                hint="see FD_NIXL_TLS and FD_NIXL_NET_DEVICES, or use --kv-connector tcp",
            ) from error

    def register(self, start: int, size: int) -> bytes:
        """Register memory for writes of other agents, for the lifetime of this agent.

        Returns the metadata that they need: of this agent, and of this memory.
        """
        with self._translated("register memory") as agent:
            descriptors = agent.register_memory([(start, size, 0, "")], mem_type=_HOST, backends=_UCX)
            self._registered.append(descriptors)
            metadata: bytes = agent.get_partial_agent_metadata(descriptors, True, _UCX)
            return metadata

    def meet(self, metadata: bytes) -> str:
        """Load the metadata of another agent and its memory; return its name."""
        with self._translated("read another worker's memory metadata") as agent:
            name = agent.add_remote_agent(metadata)
            return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)

    def forget(self, peer: str) -> None:
        """Close the connection to another agent. Never raises."""
        with contextlib.suppress(ConnectorError), self._translated("close a connection") as agent:
            agent.remove_remote_agent(peer)

    def write(self, start: int, length: int, peer: str, there: int, notice: Notice) -> Transfer:
        """Begin to write bytes to another agent's memory, followed by a notification."""
        return self._begin("WRITE", start, length, peer=peer, there=there, notice=notice.encode())

    def read(self, start: int, length: int, peer: str, there: int) -> Transfer:
        """Begin to read bytes from another agent's memory."""
        return self._begin("READ", start, length, peer=peer, there=there, notice=b"")

    def tell(self, peer: str, notice: Notice) -> None:
        """Send a notification without a write."""
        with self._translated("send a notification") as agent:
            agent.send_notif(peer, notice.encode())  # UCX is its only backend

    def poll(self) -> list[bytes]:
        """Poll; return received notifications, which are untrusted."""
        with self._translated("poll notifications") as agent:
            found = agent.get_new_notifs(backends=_UCX)
            for transfer in list(self._transfers):
                self._check(transfer)
        return [notice for notices in found.values() for notice in notices]

    def close(self) -> None:
        """Abort all transfers; no agent can write to registered memory afterwards. Idempotent, never raises."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for transfer in list(self._transfers):
                transfer.failure = "NIXL was closed"
                self._release(transfer)
            for descriptors in self._registered:
                with contextlib.suppress(*self._errors):
                    agent.deregister_memory(descriptors)
            self._registered.clear()

    def _begin(self, operation: str, start: int, length: int, peer: str, there: int, notice: bytes) -> Transfer:
        with self._translated("reach another worker") as agent:
            local = agent.get_xfer_descs([(start, length, 0)], mem_type=_HOST)
            remote = agent.get_xfer_descs([(there, length, 0)], mem_type=_HOST)
            transfer = Transfer(agent.initialize_xfer(operation, local, remote, peer, notice, backends=_UCX))
            try:
                self._settle(transfer, agent.transfer(transfer.handle))
            except self._errors:
                self._release(transfer)
                raise
        if not transfer.over:
            self._transfers.add(transfer)
        transfer.require()
        return transfer

    def _check(self, transfer: Transfer) -> None:
        try:
            self._settle(transfer, self._agent.check_xfer_state(transfer.handle))
        except self._errors as error:
            transfer.failure = f"NIXL could not move bytes: {type(error).__name__} {error}"
            self._release(transfer)

    def _settle(self, transfer: Transfer, state: str) -> None:
        if state not in ("DONE", "PROC"):
            transfer.failure = f"NIXL could not move bytes: {state}"
        if state != "PROC":
            self._release(transfer)

    def _release(self, transfer: Transfer) -> None:
        transfer.over = True
        self._transfers.discard(transfer)
        with contextlib.suppress(*self._errors):
            transfer.handle.release()
        transfer.handle = None

    @contextmanager
    def _translated(self, what: str) -> Iterator[Any]:
        with self._lock:
            if self._agent is None:
                raise ConnectorError(f"NIXL cannot {what}: it was closed")
            try:
                yield self._agent
            except self._errors as error:
                raise ConnectorError(f"NIXL could not {what}: {type(error).__name__} {error}") from error


_GRAIN: Final = 1 << 16
_LARGEST: Final = 2
"""Maximum ratio of the size of a slab to that of its lease."""


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
        """Return a slab of at least `size` bytes. Raises `ConnectorError` if the total would exceed `limit`."""
        size = -(-size // _GRAIN) * _GRAIN
        with self._lock:
            if (slab := fitting(self._free, size)) is not None:
                self._free.remove(slab)
                return slab
            if self.taken + size > limit:
                if (slab := fitting(self._free, size, wasteful=True)) is not None:
                    self._free.remove(slab)
                    return slab
                raise ConnectorError(
                    f"a lease needs {size:,} bytes for NIXL, but {self.taken:,} of {limit:,} are in use",
                    hint="raise FD_NIXL_MEMORY_MB, or run fewer requests at once",
                )
            try:
                slab = Slab(size)
            except (OSError, ValueError, OverflowError) as error:
                raise ConnectorError(f"cannot allocate {size:,} bytes for NIXL: {error}") from error
            self._all.append(slab)
            return slab

    def give_back(self, slab: Slab) -> None:
        """Recycle a slab that no agent can write to any more."""
        with self._lock:
            self._free.append(slab)


def fitting(slabs: list[Slab], size: int, *, wasteful: bool = False) -> Slab | None:
    """Return the smallest slab for `size` bytes; unless `wasteful`, one of which most is used."""
    fit = (slab for slab in slabs if size <= slab.size and (wasteful or slab.size <= _LARGEST * max(size, _GRAIN)))
    return min(fit, key=lambda slab: slab.size, default=None)


MEMORY: Final = Memory()


_IDLE_PEERS: Final = 16
"""Number of idle connections that are cached."""
_PAUSE: Final = 20e-6
_SHORTEST: Final = 50e-6
_LONGEST: Final = 1e-3
_GROWTH: Final = 1.2
"""Backoff factor between pauses, in seconds, while idle."""
_LINGER_SECONDS: Final = 0.1
"""Duration of polling after the last use, so that the last notification is sent."""


@dataclass(slots=True, eq=False)
class Peer:
    """The agent of a decode worker."""

    name: str
    known: set[bytes] = field(default_factory=set)
    """Metadata loaded into NIXL."""
    users: int = 0
    broken: bool = False


@dataclass(slots=True, eq=False)
class _PendingClose:
    """Pending writes of a closed outbox."""

    peer: Peer
    slab: Slab
    token: bytes
    transfers: list[Transfer]


class Station:
    """Thread-safe. Every `enter` needs one `leave`."""

    def __init__(self, library: Library, settings: Settings, memory: Memory) -> None:
        """Start an agent and the thread that polls it."""
        self._memory, self._limit = memory, settings.memory
        self.agent = Agent(library, settings)
        self.lock = threading.RLock()
        """Lock held during listener calls."""
        self._metadata: dict[Slab, bytes] = {}
        self._free: list[Slab] = []
        self._held_back: dict[bytes, Slab] = {}
        """By token."""
        self._listeners: dict[bytes, Callable[[Notice], None]] = {}
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._partings: list[_PendingClose] = []
        self._inside = 0
        self._retired = False
        self.closed = False
        self._used_at = time.monotonic()
        self._nudged = threading.Event()
        self._stopping = False
        # NIXL moves bytes only when it is polled.
        self._thread = threading.Thread(target=self._poll_while_wanted, name="fd-nixl", daemon=True)
        self._thread.start()

    @property
    def held_back(self) -> int:
        """Quarantined bytes: of finished leases that may still be written to."""
        with self.lock:
            parting = sum(parting.slab.size for parting in self._partings)
            return parting + sum(slab.size for slab in self._held_back.values())

    def enter(self) -> None:
        """Count an opening end of a lease."""
        with self.lock:
            self._inside += 1
        self.nudge()

    def leave(self) -> None:
        """Count a closed end."""
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
            # These pages are unreachable now, so the quarantine ends.
            for slab in self._metadata:
                self._memory.give_back(slab)
            self._metadata.clear()
            self._free.clear()
            self._held_back.clear()
            self._peers.clear()

    def lend(self, size: int) -> tuple[Slab, bytes]:
        """Return registered memory, and the metadata that other agents need to write to it."""
        with self.lock:
            if self.closed:
                raise ConnectorError("NIXL was closed")
            slab = fitting(self._free, size)
            if slab is not None:
                self._free.remove(slab)
                return slab, self._metadata[slab]
            try:
                slab = self._memory.lend(size, self._limit)
            except ConnectorError:
                if (slab := fitting(self._free, size, wasteful=True)) is None:
                    raise
                self._free.remove(slab)
                return slab, self._metadata[slab]
            try:
                self._metadata[slab] = self.agent.register(slab.start, slab.size)
            except ConnectorError:
                self._memory.give_back(slab)
                raise
            return slab, self._metadata[slab]

    def give_back(self, slab: Slab) -> None:
        """Recycle memory without pending writes."""
        with self.lock:
            if slab in self._metadata:
                self._free.append(slab)

    def hold_back(self, slab: Slab, token: bytes) -> None:
        """Quarantine memory until the prefill side announces its last write."""
        with self.lock:
            if slab in self._metadata:
                self._held_back[token] = slab

    def listen(self, token: bytes, listener: Callable[[Notice], None]) -> None:
        """Call `listener` for each notification of a lease, under `lock`."""
        with self.lock:
            self._listeners[token] = listener

    def unlisten(self, token: bytes) -> None:
        """Ignore the notifications of a lease, except its last one."""
        with self.lock:
            self._listeners.pop(token, None)

    def poll(self) -> bool:
        """Poll and dispatch notifications; return True if there were any. Never raises."""
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
        """Poll until `done` returns True; return False after `deadline`, in seconds of the monotonic clock."""
        while not over():
            if time.monotonic() > deadline:
                return False
            self.poll()
            time.sleep(_PAUSE)
        return True

    def nudge(self) -> None:
        """Poll frequently for a while."""
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

    def meet(self, name: str, metadata: bytes) -> Peer:
        """Connect to another agent for writes. Every call needs one `part`."""
        with self.lock:
            peer = self._peers.get(name)
            if peer is not None and peer.broken and not peer.users:
                self._forget(peer)
                peer = None
            if peer is not None and peer.broken:
                raise ConnectorError("the connection to the decode worker is broken")
            if name == self.agent.name:
                raise ConnectorError("the decode worker is this worker")
            if peer is None or metadata not in peer.known:
                met = self.agent.meet(metadata)
                if met != name:
                    if met not in self._peers:
                        self.agent.forget(met)
                    raise ConnectorError("the address for NIXL belongs to another agent")
                peer = peer or Peer(name)
                peer.known.add(metadata)
            self._peers[name] = peer
            self._peers.move_to_end(name)
            peer.users += 1
            return peer

    def part(self, peer: Peer, slab: Slab, token: bytes, transfers: Iterable[Transfer]) -> None:
        """End the prefill side of a lease: after its last write, notify the other side and recycle the memory."""
        with self.lock:
            if self.closed:
                return
            parting = _PendingClose(peer, slab, token, transfers=list(transfers))
            if not self._parted(parting):
                self._partings.append(parting)
        self.nudge()

    def _parted(self, parting: _PendingClose) -> bool:
        if not all(transfer.over for transfer in parting.transfers):
            return False
        parting.peer.broken |= any(transfer.failure is not None for transfer in parting.transfers)
        self.give_back(parting.slab)
        if not parting.peer.broken:
            with contextlib.suppress(ConnectorError):  # it detects that by other means
                self.agent.tell(parting.peer.name, Notice.of_the_end(parting.token))
        parting.peer.users -= 1
        idle = [one for one in self._peers.values() if not one.users]
        for one in idle:
            if one.broken:
                self._forget(one)
        idle = [one for one in idle if not one.broken]
        for one in idle[: max(0, len(idle) - _IDLE_PEERS)]:
            self._forget(one)
        return True

    def _forget(self, peer: Peer) -> None:
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self.agent.forget(peer.name)
