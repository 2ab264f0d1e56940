"""Sums and gathers of ranks over torch.distributed: gloo between ranks without shared memory, and device tensors.

The order of sums in gloo and NCCL depends on the number of elements and on the topology. Here they only transport the
data; each rank sums it locally, in the order of ranks and in float32.

Connections are not authenticated: ranks of several machines need a private network.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from fd_core.ops.contract import Array
from fd_core.ops.parallel import Parallel, RankGroup, RankRendezvous, group_memory

_POLL_SECONDS: Final = 0.01
"""Poll interval in seconds for a rank that has not joined yet."""
_WHOLE_BYTES: Final = 1 << 18
"""Bytes of a sum up to which all ranks exchange whole arrays; above, each rank sums one part for all."""

_PART_ALIGN: Final = 16
"""Elements of which a rank sums a multiple, so that kernels read all parts aligned."""


class TorchGroup(RankGroup):
    """Ranks without shared memory: slots are sent over gloo. They connect at the first exchange."""

    shares_memory = False

    def __init__(self, parallel: Parallel, rendezvous: RankRendezvous, store: TCPStore, timeout: float) -> None:
        """`store` is that of the rendezvous; see `open` and `join`."""
        memory = group_memory(parallel.size)
        try:
            super().__init__(parallel, memory, timeout)
        finally:
            os.close(memory)
        self.rendezvous, self.host = rendezvous, rendezvous.host
        self.store = PrefixStore(rendezvous.token, store)
        """Key-value store of all ranks, for a further rendezvous."""
        self._tensors = torch.from_numpy(self._slots)
        self._lock = threading.Lock()
        self._gloo: Any = None
        self._absent: int | None = None
        """A rank that did not join."""
        self._received: list[Any] = []
        self._sent: list[Any] = []

    @classmethod
    def open(cls, size: int, timeout: float, host: str = "127.0.0.1") -> TorchGroup:
        """Open a rendezvous as rank 0, at an address that the other ranks reach; they get `rendezvous`."""
        store, port = _listening(host)
        return cls(Parallel(0, size), RankRendezvous(host, port, secrets.token_hex(8)), store, timeout)

    @classmethod
    def join(cls, parallel: Parallel, rendezvous: RankRendezvous, timeout: float) -> TorchGroup:
        """Join the rendezvous of rank 0. Raises `OSError` if it is unreachable."""
        return cls(parallel, rendezvous, _connected(rendezvous.host, rendezvous.port, timeout), timeout)

    def abandon(self) -> None:
        """Make exchanges fail, also those of other ranks, whose connections break."""
        super().abandon()
        with contextlib.suppress(RuntimeError):
            self.store.set("abandoned", b"1")
        with self._lock:
            # An exchange that blocks another thread holds its connections until it ends, or this process does.
            self._gloo, self._received, self._sent = None, [], []

    def _show(self, number: int, count: int) -> None:
        rank, place = self.parallel.rank, number % 2
        self._numbers[rank] = number
        others = [other for other in range(self.parallel.size) if other != rank]
        slots = self._tensors[:, place, :count]
        try:
            for work in self._sent:
                work.wait(timedelta(seconds=self.timeout))
            with self._lock:
                if self._gloo is None and not self._connect(others):
                    return
                self._received = [None] * self.parallel.size
                for other in others:
                    self._received[other] = self._gloo.recv([slots[other]], other, 0)
                self._sent = [self._gloo.send([slots[rank]], other, 0) for other in others]
        except RuntimeError:  # a connection is lost
            self._abandoned[0] = 1

    def _awaited(self, rank: int, number: int, seconds: float) -> bool:
        if rank == self.parallel.rank:
            return True
        if self.abandoned or self._absent is not None:
            return rank != self._absent and not self.abandoned
        begun = time.monotonic()
        try:
            self._received[rank].wait(timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() - begun < 0.99 * seconds:  # else it is connected but silent
                self._abandoned[0] = 1
            return False
        return True

    def _connect(self, others: list[int]) -> bool:
        """Connect to all ranks once all have joined. Returns False if one times out."""
        self.store.set(f"rank-{self.parallel.rank}", b"1")
        for other in others:
            if not self._waited(lambda: self._has_joined(other), self.timeout, _POLL_SECONDS):  # noqa: B023 - called at once
                self._absent = other
                return False
        store = PrefixStore("gloo", self.store)
        # The local address of this machine's connection to the rendezvous.
        with socket.create_connection((self.rendezvous.host, self.rendezvous.port)) as connection:
            address = str(connection.getsockname()[0])
        self._gloo = gloo_group(store, self.parallel, address, seconds=self.timeout)
        return True

    def _has_joined(self, rank: int) -> bool:
        if self.store.check(["abandoned"]):
            self._abandoned[0] = 1
        return bool(self.store.check([f"rank-{rank}"]))


class TorchCollectives:
    """Sums and gathers of tensors over a process group, such as NCCL's; may be captured if the group supports it."""

    def __init__(self, process_group: Any, parallel: Parallel, add: Callable[[Array], Array] | None = None) -> None:
        """`add` is `add_in_rank_order`, or a kernel that computes the same."""
        self._group = process_group
        self._size = parallel.size
        self._add = add_in_rank_order if add is None else add

    def all_reduce(self, x: Array) -> Array:
        """Return the sum over all ranks, computed in float32 in the order of ranks, and rounded once."""
        if self._size == 2 or x.nbytes <= _WHOLE_BYTES:
            return self._add(self._gather(x.flatten())).reshape(x.shape)
        each = -(-x.numel() // (self._size * _PART_ALIGN)) * _PART_ALIGN
        parts = x.flatten()
        if x.numel() < self._size * each:
            parts = x.new_zeros(self._size * each)
            parts[: x.numel()] = x.flatten()
        mine = torch.empty_like(parts)
        self._group.alltoall_base(mine, parts, [], []).wait()
        total = self._gather(self._add(mine.unflatten(0, (self._size, each))))
        return total.flatten()[: x.numel()].reshape(x.shape)

    def all_gather(self, x: Array) -> Array:
        """Return x [n, ...] of all ranks, concatenated along the last axis in the order of ranks."""
        whole = self._gather(x.flatten()).unflatten(1, x.shape)
        return torch.cat(tuple(whole), dim=-1)

    def _gather(self, x: Array) -> Array:
        """[n] -> [ranks, n]"""
        whole = x.new_empty(self._size * len(x))
        if len(x):
            self._group._allgather_base(whole, x).wait()
        return whole.unflatten(0, (self._size, len(x)))


def add_in_rank_order(parts: Array) -> Array:
    """[ranks, n] -> [n], in float32 in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def shared_store(group: RankGroup) -> Any:
    """Return a store shared by all ranks of a group, for a further rendezvous such as NCCL's."""
    if isinstance(group, TorchGroup):
        return PrefixStore("device", group.store)
    store, port = _listening(group.host) if group.parallel.rank == 0 else (None, 0)
    ports = group.all_gather(np.array([port], np.int64))
    return store or _connected(group.host, int(ports[0]), group.timeout)


def gloo_group(store: Any, parallel: Parallel, address: str, seconds: float) -> Any:
    """Return a gloo process group for CPU tensors; blocks until all ranks have joined."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, parallel.rank, parallel.size, options)


def _listening(host: str) -> tuple[Any, int]:
    """Return a store that listens only at one address of this machine, and its port."""
    with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as listener:
        port = int(listener.getsockname()[1])
        # torch would listen on all addresses of the machine; it takes ownership of a socket passed to it.
        descriptor = listener.detach()
        return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor), port


def _connected(host: str, port: int, seconds: float) -> Any:
    return TCPStore(host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)
