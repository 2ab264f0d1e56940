"""One agent of NIXL: it registers memory, writes to the memory of other agents, and lets them write to its own."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fd_core.disagg.connectors.contract import ConnectorError
from fd_core.errors import PluginError

from fd_connector_nixl.layout import Notice
from fd_connector_nixl.settings import Library, Settings

_UCX: Final = ["UCX"]
_HOST: Final = "DRAM"


class Transfer:
    """A write or read in progress, or over."""

    __slots__ = ("flaw", "handle", "over")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.over = False
        """Whether the memory on this side is no longer read or written."""
        self.flaw: str | None = None
        """Why the transfer failed; None if it did not."""

    def require(self) -> bool:
        """Return whether the transfer is over. Raises `ConnectorError` once it has failed."""
        if self.flaw is not None:
            raise ConnectorError(self.flaw)
        return self.over


class Agent:
    """Safe to use from several threads.

    An agent has no thread of its own: bytes move while both agents are polled. A write is over when its bytes have
    landed, and its notice leaves at the poll that finds that out.
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
        """Let other agents write to memory of this process, as long as this agent lives.

        Returns what they have to know to write: how to reach this agent, and this memory.
        """
        with self._translated("register memory") as agent:
            descriptors = agent.register_memory([(start, size, 0, "")], mem_type=_HOST, backends=_UCX)
            self._registered.append(descriptors)
            metadata: bytes = agent.get_partial_agent_metadata(descriptors, True, _UCX)
            return metadata

    def meet(self, metadata: bytes) -> str:
        """Learn how to reach another agent and some of its memory; return its name."""
        with self._translated("read what another worker said about its memory") as agent:
            name = agent.add_remote_agent(metadata)
            return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)

    def forget(self, peer: str) -> None:
        """Close the connection to another agent. Never raises."""
        with contextlib.suppress(ConnectorError), self._translated("close a connection") as agent:
            agent.remove_remote_agent(peer)

    def write(self, start: int, length: int, peer: str, there: int, notice: Notice) -> Transfer:
        """Begin to write bytes to another agent's memory, followed by a notice."""
        return self._begin("WRITE", start, length, peer, there, notice.encode())

    def read(self, start: int, length: int, peer: str, there: int) -> Transfer:
        """Begin to read bytes from another agent's memory."""
        return self._begin("READ", start, length, peer, there, b"")

    def tell(self, peer: str, notice: Notice) -> None:
        """Send a notice alone."""
        with self._translated("send a notice") as agent:
            agent.send_notif(peer, notice.encode())  # UCX is its only backend

    def poll(self) -> list[bytes]:
        """Let bytes move; return the notices that came, which may hold anything."""
        with self._translated("look for notices") as agent:
            found = agent.get_new_notifs(backends=_UCX)
            for transfer in list(self._transfers):
                self._check(transfer)
        return [notice for notices in found.values() for notice in notices]

    def close(self) -> None:
        """Abort all transfers. Afterwards nobody writes to registered memory. Idempotent, never raises."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for transfer in list(self._transfers):
                transfer.flaw = "NIXL was closed"
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
            transfer.flaw = f"NIXL could not move bytes: {type(error).__name__} {error}"
            self._release(transfer)

    def _settle(self, transfer: Transfer, state: str) -> None:
        if state not in ("DONE", "PROC"):
            transfer.flaw = f"NIXL could not move bytes: {state}"
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
