"""The connections of a decode worker to prefill workers, on the one thread that owns them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq

from fd_core.disagg.loop import Loop
from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.peer import Endpoint, Peer, look_up, split_address
from fd_core.disagg.stats import Tally
from fd_core.disagg.wire import Unfit, Unsealed, Wire
from fd_core.kv.stores.contract import Bytes

__all__ = ["Connections"]

_KEEP_SECONDS: Final = 30.0
"""How long a connection without a lease is kept."""


class Connections:
    """Peers by their address: one for all leases there, given up when it is lost or was without a lease for a while."""

    def __init__(
        self,
        loop: Loop,
        wire: Wire,
        tally: Tally,
        *,
        hear: Callable[[Peer, FromPrefill, Sequence[Bytes]], None],
        begin: Callable[[str], None],
        gone: Callable[[str, str], None],
    ) -> None:
        """`hear` takes a message and the frames behind it.

        `begin` is told each lease that has to say its first word again, `gone` each whose connection is lost and why.
        """
        self._loop = loop
        self._wire = wire
        self._tally = tally
        self._hear = hear
        self._begin = begin
        self._gone = gone
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, address: str) -> Peer:
        """Return the peer at `host:port`, connected to sooner or later. Raises `ValueError` for what is no address."""
        peer = self._peers.get(address)
        if peer is None:
            host, port = split_address(address)
            peer = self._peers[address] = Peer(address)
            peer.endpoints = look_up(host, port, lambda found: self._loop.post(partial(self._found, peer, found)))
            if peer.endpoints and not self._connect(peer):
                self._loop.post(partial(self._found, peer, []))
        return peer

    def say(self, peer: Peer, message: FromDecode) -> None:
        """Send a message."""
        peer.send(self._wire.seal_from_decode(message))

    def tidy(self, now: float) -> float:
        """Give up connections that were not used for a while; return when the next one may have to be."""
        due = math.inf
        for peer in list(self._peers.values()):
            if not peer.leases:
                end = peer.idle_since + _KEEP_SECONDS
                if now >= end:
                    self._drop(peer)
                else:
                    due = min(due, end)
        return due

    def close(self) -> None:
        """Give up every connection."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._context.term()

    def _connect(self, peer: Peer) -> bool:
        connecting = peer.connect(self._context, self._wire.max_frame)
        if peer.socket is not None and peer.monitor is not None:
            self._loop.watch(peer.socket, partial(self._read, peer))
            self._loop.watch(peer.monitor, partial(self._check, peer))
        return connecting

    def _unwatch(self, peer: Peer) -> None:
        for source in (peer.socket, peer.monitor):
            if source is not None:
                self._loop.forget(source)

    def _drop(self, peer: Peer) -> None:
        self._unwatch(peer)
        del self._peers[peer.address]
        peer.close()

    def _found(self, peer: Peer, endpoints: list[Endpoint]) -> None:
        if self._peers.get(peer.address) is peer:
            peer.endpoints = endpoints
            self._go_on(peer, "the prefill worker cannot be reached")

    def _check(self, peer: Peer) -> None:
        if (reason := peer.loss()) is not None:
            self._unwatch(peer)
            self._go_on(peer, reason)

    def _go_on(self, peer: Peer, reason: str) -> None:
        """Try the next endpoint; if there is none, the peer is lost."""
        if self._connect(peer):
            for lease in list(peer.leases):
                self._begin(lease)
            return
        del self._peers[peer.address]
        for lease in list(peer.leases):
            self._gone(lease, reason)

    def _read(self, peer: Peer) -> None:
        for frames in peer.received():
            try:
                message = self._wire.open_from_prefill(frames[0].buffer)
            except (Unsealed, Unfit):
                self._tally.add("dropped_frames")
            else:
                self._hear(peer, message, [frame.buffer for frame in frames[1:]])
