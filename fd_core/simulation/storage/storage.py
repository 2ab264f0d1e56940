"""KV outside the device under the virtual clock: production's tiers and pairs.

Copies and the store take modelled time; the links of pairs are broken by a schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from fd_core.config import EngineConfig, Limits
from fd_core.disagg.connectors.contract import ConnectorSettings
from fd_core.disagg.connectors.tcp import TCPConnector
from fd_core.disagg.decode.connections import PrefillConnections, PrefillLink, split_address
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.prefill.connections import DecodeConnections
from fd_core.disagg.prefill.sender import Sender
from fd_core.disagg.stats import SideStats
from fd_core.disagg.wire import Wire
from fd_core.effects.port import CompletionQueue
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import Bytes, FailureReason, KVStore, StoreError, StoreStats
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.kv.tiers.offload import PENDING_BYTES, KVOffload, SealedStore
from fd_core.ops.contract import KVCache, KVShape
from fd_core.simulation.clock.timeline import Network, Timeline
from fd_core.simulation.clock.virtual_loop import VirtualCompletions, VirtualLoop, VirtualThreads
from fd_core.simulation.costs.profile import Costs
from fd_core.types import IntArray


class BlankKVCache(KVCache):
    """Blocks without content, for worlds that never read it: one byte each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size)
        self.num_blocks = num_blocks

    def layer(self, index: int) -> Any:
        """Return a placeholder, as blocks have no content."""
        raise NotImplementedError("blank blocks hold no KV")

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Return zeros, uint8[n, 1]."""
        return np.zeros((len(blocks), 1), np.uint8)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Do nothing."""


class SharedStore:
    """Store contents shared by all workers. They may change at any time; calls in progress end as before."""

    def __init__(self, timeline: Timeline, value_seconds: float = 0.0) -> None:
        """`timeline` is the store's clock; clocks of workers may differ.

        `value_seconds` is the store's time for each value, one after the other for all workers together; a worker
        that has the store for itself waits for the longer of that and of its own costs.
        """
        # The bound applies to sealed values as they are simulated, not to real sizes.
        self.values = MemoryStore(parse_location(f"memory:?max_bytes={2**30}"))
        self.fault: FailureReason | None = None
        """Failure of calls; with `TIMEOUT` each takes its full timeout."""
        self.write_fault: FailureReason | None = None
        """Failure of calls that write, such as `FULL`."""
        self.slowness = 1.0
        """Factor of the time of calls."""
        self._timeline = timeline
        self._value_seconds = value_seconds
        self._free = 0.0

    def lose(self, every: int = 1) -> None:
        """Delete every so-many-th value, the least recently used one first."""
        self.values.delete(self.values.keys()[::every], math.inf)

    def damage(self, every: int = 1) -> None:
        """Flip a bit in every so-many-th value."""
        keys = self.values.keys()[::every]
        for key, value in zip(keys, self.values.get(keys, 2**62, math.inf), strict=True):
            if value is not None:
                self.values.put([(key, (bytes(value[:-1]), bytes([value[-1] ^ 1])))], math.inf)

    def serve(self, ahead: float, values: int, seconds: float) -> float:
        """Accept a call that begins `ahead` seconds from now and would take `seconds`; return how long it takes."""
        begin = self._timeline.now + ahead
        self._free = max(self._free, begin) + values * self._value_seconds
        return max(seconds, self._free - begin) * self.slowness


class _SharedStoreClient(KVStore):
    """Store contract for one worker: calls take time of their job, and read the contents at their start."""

    name = "simulated"
    shared = True

    def __init__(self, store: SharedStore, threads: VirtualThreads, costs: Costs) -> None:
        super().__init__(parse_location("simulated:"))
        self._store = store
        self._threads = threads
        self._costs = costs

    def open(self, timeout: float) -> str:
        return "a simulated store"

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        found = self._store.values.get(keys, limit, timeout)
        self._call(timeout, self._costs.store_read(len(keys)), len(keys))
        return found

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Store values; other workers find them when the call is over."""
        self._call(timeout, self._costs.store_write(len(values)), len(values), writes=True)
        store = self._store.values
        self._threads.post_to_caller(lambda: store.put(values, math.inf))
        return len(values)

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        found = self._store.values.longest_prefix(keys, limit, timeout)
        self._call(timeout, self._costs.store_read(0), 0)
        return found

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        self._call(timeout, self._costs.store_write(0), 0, writes=True)
        return self._store.values.delete(keys, timeout)

    def stats(self, timeout: float) -> StoreStats:
        """Return exact numbers, at no cost."""
        return self._store.values.stats(timeout)

    def close(self) -> None:
        """Close this client; the store stays open for the other workers."""

    def _call(self, timeout: float, seconds: float, values: int, *, writes: bool = False) -> None:
        """Spend the time of a call. Raises `StoreError` for a scheduled failure, or if the time exceeds `timeout`."""
        store, threads = self._store, self._threads
        trouble = store.fault or (store.write_fault if writes else None)
        taken = timeout if trouble is FailureReason.TIMEOUT else store.serve(threads.ahead, values, seconds)
        threads.spend(min(taken, timeout), waits=True)
        if trouble is not None or taken > timeout:
            raise StoreError(trouble or FailureReason.TIMEOUT, "the simulated store fails")


SECRET: Final = bytes(range(32))
"""Shared by all simulated workers: values sealed with it never leave the simulation."""


class TimedKVCache(KVCache):
    """A cache whose copies take time of the job that makes them; another cache keeps the contents of the blocks.

    Blocks are written when the copy is over, and a block that changes while it is read ends the run, so that
    releasing a block too early is detected.
    """

    def __init__(self, cache: KVCache, threads: VirtualThreads, costs: Costs) -> None:
        self.shape = cache.shape
        self.num_blocks = cache.num_blocks
        self.block = (
            BlockFormat(np.uint8, (1,)) if isinstance(cache, BlankKVCache) else BlockFormat.of(cache.shape, "float32")
        )
        self._cache = cache
        self._threads = threads
        self._costs = costs

    def layer(self, index: int) -> Any:
        """Return the handle of one layer."""
        return self._cache.layer(index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host."""
        copied = self._cache.export_blocks(blocks)
        self._threads.copy(self._costs.host_copy(len(blocks)))
        if not isinstance(self._cache, BlankKVCache):
            self._threads.post_to_caller(lambda: self._require(blocks, copied.tobytes()))
        return copied

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Copy blocks from the host."""
        self._threads.copy(self._costs.host_copy(len(blocks)))
        if not isinstance(self._cache, BlankKVCache):
            self._threads.post_to_caller(lambda: self._cache.import_blocks(blocks, data))

    def _require(self, blocks: IntArray, content: bytes) -> None:
        if self._cache.export_blocks(blocks).tobytes() != content:
            raise RuntimeError(f"KV block {blocks.tolist()} was written while it was copied to the host")


def _envelope() -> Envelope:
    """Return an envelope whose random bytes are a counter, so that they are unique and every run has the same."""
    numbers = itertools.count()
    return Envelope(SECRET, draw=lambda count: next(numbers).to_bytes(count, "little"))


def simulated_storage(
    threads: VirtualThreads,
    queue: CompletionQueue,
    cache: KVCache,
    costs: Costs,
    *,
    block_bytes: int,
    host_bytes: int,
    store: SharedStore | None = None,
    load_seconds: float = 1.0,
) -> KVOffload:
    """Return the tiers of one worker, see `KVOffload`. `queue` is the engine's.

    `block_bytes`: size of a block of the simulated model, in which `host_bytes` are counted; the blocks of `cache`
    may have any size. The port's own byte gauges refer to `cache`.
    """
    timed = TimedKVCache(cache, threads, costs)
    timed.block.batch = BlockFormat.batch_of(block_bytes)
    sealed = None if store is None else SealedStore(_SharedStoreClient(store, threads, costs), _envelope())
    return KVOffload(
        VirtualCompletions(threads, queue),
        timed,
        timed.block,
        host_bytes=host_bytes // block_bytes * timed.block.bytes,
        store=sealed,
        load_seconds=load_seconds,
        pending_bytes=PENDING_BYTES // block_bytes * timed.block.bytes,
        clock=threads.clock,
        make_loop=threads.make_loop,
    )


_UNREACHABLE: Final = "the prefill worker cannot be reached"
_BROKE: Final = "the connection to the prefill worker was lost"


Message = tuple[FromDecode | FromPrefill, Sequence[Bytes]]
"""A message of one side, and its frames of KV."""
Arrive = Callable[[Message], None]


class TransferNetwork:
    """Links between the prefill and the decode workers of a world over its network, and their listeners."""

    def __init__(self, network: Network) -> None:
        self.fate: Callable[[int], Sequence[float]] = lambda _: (0.0,)
        """Delays of the copies of a message, by its number, in addition to the usual one; no message is lost.

        A message with KV is still received whole or not at all.
        """
        self.num_sent = 0
        self.listening: dict[str, _SimulatedDecodeLinks] = {}
        """Prefill workers by address."""
        self.window = 8
        """Pieces of a lease that may be in flight at once, for receivers that start from here on."""
        self.longest = 600.0
        """Maximum duration of a lease in seconds, for sides that start from here on."""
        self.network = network
        self._leases = 0
        self._ports = 9000

    def name_lease(self) -> str:
        """Return a lease name that is unique in this world."""
        self._leases += 1
        return f"{self._leases:032x}"

    def take_port(self) -> int:
        """Return a port that was never used."""
        self._ports += 1
        return self._ports

    def carry(self, threads: VirtualThreads, origin: str, target: str, message: Message, arrive: Arrive) -> None:
        """Send a message from one endpoint to another at the time of the sending job."""
        threads.post_to_caller(partial(self._leave, threads, origin, target, message, arrive))

    def received(self, endpoint: str, message: Message) -> None:
        """Record that the worker at `endpoint` is about to receive a message."""

    def _leave(self, threads: VirtualThreads, origin: str, target: str, message: Message, arrive: Arrive) -> None:
        self.num_sent += 1
        for seconds in self.fate(self.num_sent):
            threads.post_to_caller(partial(self.network.send, origin, target, partial(arrive, message)), seconds)


class _SimulatedPrefillLink(PrefillLink):
    """Link to one prefill worker at a decode worker: valid as long as the same process listens there."""

    def __init__(self, links: _SimulatedPrefillLinks, address: str) -> None:
        super().__init__()
        self.address = address
        self.links = links
        self.route = b""
        """The prefill worker's name of this link; empty until it received a message."""
        self._endpoint, _ = split_address(address)
        self._heard_by: _SimulatedDecodeLinks | None = None

    def send(self, message: FromDecode) -> None:
        links = self.links
        links.transfers.carry(links.threads, links.endpoint, self._endpoint, (message, ()), self._arrive)

    def on_message(self, message: Message) -> None:
        """Receive a message and its frames, at the decode worker."""
        self.links.loop.post(partial(self.links.take, self, message))

    def _arrive(self, message: Message) -> None:
        """Deliver to the prefill worker, or detect that there is none, or another one than before."""
        transfers = self.links.transfers
        there = transfers.listening.get(self.address)
        if self._heard_by is None and there is not None:
            self._heard_by, self.route = there, there.admit(self)
        if there is None or there is not self._heard_by:
            transfers.network.send(self._endpoint, self.links.endpoint, self.lose)
        else:
            there.on_message(self.route, message)

    def lose(self) -> None:
        """Detect, at the decode worker, that the link is lost."""
        self.links.loop.post(partial(self.links.lost, self, _BROKE if self.route else _UNREACHABLE))


class _SimulatedPrefillLinks(PrefillConnections):
    """Prefill workers of one decode worker, reached over a simulated network."""

    def __init__(
        self,
        transfers: TransferNetwork,
        threads: VirtualThreads,
        endpoint: str,
        costs: Costs,
        loop: VirtualLoop,
        _wire: Wire,
        _stats: SideStats,
        *,
        on_message: Callable[[PrefillLink, FromPrefill, Sequence[Bytes]], None],
        reopen: Callable[[str], None],
        on_disconnect: Callable[[str, str], None],
    ) -> None:
        """`endpoint`: network name of the decode worker. No `Open` has to be repeated."""
        self.transfers = transfers
        self.threads = threads
        self.endpoint = endpoint
        self.loop = loop
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._costs = costs
        self._links: dict[str, _SimulatedPrefillLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def get(self, address: str) -> PrefillLink:
        if address not in self._links:
            self._links[address] = _SimulatedPrefillLink(self, address)
        return self._links[address]

    def tidy(self, now: float) -> float:
        return math.inf

    def close(self) -> None:
        self._links.clear()

    def take(self, link: _SimulatedPrefillLink, message: Message) -> None:
        """Receive a message on the loop; reading its KV takes processor time if steps share the processor."""
        self.transfers.received(self.endpoint, message)
        if message[1]:
            self.threads.spend_on_step_cpu(self._costs.transfer(1))
        self._on_message(link, cast("FromPrefill", message[0]), message[1])

    def knows(self, link: _SimulatedPrefillLink) -> bool:
        return self.threads.alive and self._links.get(link.address) is link

    def lost(self, link: _SimulatedPrefillLink, reason: str) -> None:
        if self.knows(link):
            del self._links[link.address]
            for lease in list(link.leases):
                self._on_disconnect(lease, reason)


class _SimulatedDecodeLinks(DecodeConnections):
    """Decode workers of one prefill worker, reached over a simulated network."""

    def __init__(
        self,
        transfers: TransferNetwork,
        threads: VirtualThreads,
        costs: Costs,
        loop: VirtualLoop,
        _wire: Wire,
        _stats: SideStats,
        endpoint: str,
        _port: int,
        *,
        on_message: Callable[[bytes, FromDecode], object],
        on_reject: Callable[[bytes, str, str], object],
    ) -> None:
        """`endpoint`: network name of the prefill worker. No process gets a port that another had."""
        self.port = transfers.take_port()
        self._transfers = transfers
        self._threads = threads
        self._costs = costs
        self._loop = loop
        self._endpoint = endpoint
        self._on_message = on_message
        self._links: dict[bytes, _SimulatedPrefillLink] = {}
        transfers.listening[f"{endpoint}:{self.port}"] = self
        threads.at_end(self.close)

    def admit(self, link: _SimulatedPrefillLink) -> bytes:
        route = str(len(self._links)).encode()
        self._links[route] = link
        return route

    def on_message(self, route: bytes, message: Message) -> None:
        self._loop.post(partial(self._take, route, message))

    def send(self, route: bytes, message: FromPrefill, frames: Sequence[Bytes] = ()) -> bool:
        """Send a message; its KV takes time of the job that sends it."""
        if frames:
            self._threads.spend(self._costs.transfer(1))
        link = self._links[route]
        if not link.links.knows(link):
            # A lost connection is not detected as long as nothing gets through.
            return not self._transfers.network.reaches(self._endpoint, link.links.endpoint)
        self._transfers.carry(self._threads, self._endpoint, link.links.endpoint, (message, frames), link.on_message)
        return True

    def close(self) -> None:
        """Stop listening; decode workers detect that, unless the network is partitioned."""
        if self._transfers.listening.get(f"{self._endpoint}:{self.port}") is self:
            del self._transfers.listening[f"{self._endpoint}:{self.port}"]
            for link in self._links.values():
                self._transfers.network.send(self._endpoint, link.links.endpoint, link.lose)

    def _take(self, route: bytes, message: Message) -> None:
        self._transfers.received(self._endpoint, message)
        self._on_message(route, cast("FromDecode", message[0]))


def simulated_transfer(
    threads: VirtualThreads,
    queue: CompletionQueue,
    cache: KVCache,
    costs: Costs,
    transfers: TransferNetwork,
    endpoint: str,
    config: EngineConfig,
    limits: Limits,
) -> Receiver | Sender | None:
    """Return the transfer side of the worker at `endpoint`, None for a mixed one. `queue` is the engine's."""
    timed, shape = TimedKVCache(cache, threads, costs), cache.shape
    compatibility = KVCompatibility(
        model="simulated",
        dtype="float32",
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    connector, completions = TCPConnector(ConnectorSettings()), VirtualCompletions(threads, queue)
    if config.role == "decode":
        return Receiver(
            timed,
            timed.block,
            compatibility,
            envelope=_envelope(),
            connector=connector,
            queue=completions,
            window=transfers.window,
            idle_timeout=config.lease_seconds,
            longest=transfers.longest,
            clock=threads.clock,
            make_loop=threads.make_loop,
            connect=partial(_SimulatedPrefillLinks, transfers, threads, endpoint, costs),
            name_lease=transfers.name_lease,
        )
    if config.role == "prefill":
        return Sender(
            timed,
            timed.block,
            compatibility,
            envelope=_envelope(),
            make_connector=lambda _: connector,
            queue=completions,
            host=endpoint,
            max_leases=4 * limits.max_num_seqs,
            max_tokens=limits.max_model_len,
            longest=transfers.longest,
            clock=threads.clock,
            make_loop=threads.make_loop,
            listen=partial(_SimulatedDecodeLinks, transfers, threads, costs),
        )
    return None
