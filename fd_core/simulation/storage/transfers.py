"""Prefill/decode pairs under the virtual clock: production's two sides, over links that a schedule breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

from fd_core.config import Limits
from fd_core.disagg.connectors.contract import ConnectorSettings
from fd_core.disagg.connectors.tcp import TCPConnector
from fd_core.disagg.decode.connections import PrefillConnections, PrefillLink, split_address
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.prefill.connections import DecodeConnections
from fd_core.disagg.prefill.sender import Sender
from fd_core.disagg.wire import Wire
from fd_core.effects.port import CompletionQueue, Tally
from fd_core.kv.stores.contract import Bytes
from fd_core.kv.stores.envelope import Envelope
from fd_core.ops.contract import KVCache
from fd_core.simulation.clock.network import Network
from fd_core.simulation.clock.virtual_loop import VirtualCompletions, VirtualLoop, VirtualThreads
from fd_core.simulation.costs.profile_costs import Costs
from fd_core.simulation.storage.storage import SECRET, TimedKVCache, drawer

_FIRST_PORT: Final = 9000
_UNREACHABLE: Final = "the prefill worker cannot be reached"
_BROKE: Final = "the connection to the prefill worker broke"


Message = tuple[FromDecode | FromPrefill, Sequence[Bytes]]
"""What one side says, and the frames of KV behind it."""
Arrive = Callable[[Message], None]


class TransferNetwork:
    """What lies between the prefill and the decode workers of a world: links over its network, and who listens."""

    def __init__(self, network: Network) -> None:
        self.fate: Callable[[int], Sequence[float]] = lambda _: (0.0,)
        """What becomes of a message, by its number: how much later than usual each of its copies leaves; none is lost.

        A message that holds KV is none the less heard whole or not at all.
        """
        self.said = 0
        """Messages so far."""
        self.listening: dict[str, SimulatedDecodeLinks] = {}
        """Prefill workers by address."""
        self.window = 8
        """Pieces of a lease that may be on their way at once, for receivers that start from here on."""
        self.longest = 600.0
        """Seconds after which a lease is over in any case, for sides that start from here on."""
        self.network = network
        self._leases = 0
        self._ports = _FIRST_PORT

    def name_lease(self) -> str:
        """Return a name that no lease of this world has."""
        self._leases += 1
        return f"{self._leases:032x}"

    def take_port(self) -> int:
        """Return a port that nobody had."""
        self._ports += 1
        return self._ports

    def carry(self, threads: VirtualThreads, origin: str, target: str, message: Message, arrive: Arrive) -> None:
        """Send a message from one place to another once it is that time for the job that says it."""
        threads.tell(partial(self._leave, threads, origin, target, message, arrive))

    def heard(self, place: str, message: Message) -> None:
        """Take note that the worker at `place` is about to take a message in."""

    def _leave(self, threads: VirtualThreads, origin: str, target: str, message: Message, arrive: Arrive) -> None:
        self.said += 1
        for seconds in self.fate(self.said):
            threads.tell(partial(self.network.send, origin, target, partial(arrive, message)), seconds)


class SimulatedPrefillLink(PrefillLink):
    """One prefill worker, as a decode worker reaches it: as long as the same process listens there."""

    def __init__(self, links: SimulatedPrefillLinks, address: str) -> None:
        super().__init__()
        self.address = address
        self.links = links
        self.route = b""
        """How the prefill worker names this link; empty until it heard something."""
        self._place, _ = split_address(address)
        self._heard_by: SimulatedDecodeLinks | None = None

    def say(self, message: FromDecode) -> None:
        """Send a message."""
        links = self.links
        links.transfers.carry(links.threads, links.place, self._place, (message, ()), self._arrive)

    def hear(self, message: Message) -> None:
        """Take a message and the frames behind it, at the decode worker."""
        self.links.loop.post(partial(self.links.take, self, message))

    def _arrive(self, message: Message) -> None:
        """Reach the prefill worker, or learn that there is none, or another one than before."""
        transfers = self.links.transfers
        there = transfers.listening.get(self.address)
        if self._heard_by is None and there is not None:
            self._heard_by, self.route = there, there.admit(self)
        if there is None or there is not self._heard_by:
            transfers.network.send(self._place, self.links.place, self.lose)
        else:
            there.hear(self.route, message)

    def lose(self) -> None:
        """Learn, at the decode worker, that the link is lost."""
        self.links.loop.post(partial(self.links.lost, self, _BROKE if self.route else _UNREACHABLE))


class SimulatedPrefillLinks(PrefillConnections):
    """The prefill workers of one decode worker, reached over a simulated network."""

    def __init__(
        self,
        transfers: TransferNetwork,
        threads: VirtualThreads,
        place: str,
        loop: VirtualLoop,
        costs: Costs,
        *,
        hear: Callable[[PrefillLink, FromPrefill, Sequence[Bytes]], None],
        gone: Callable[[str, str], None],
    ) -> None:
        """`place`: what the network calls the decode worker."""
        self.transfers = transfers
        self.threads = threads
        self.place = place
        self.loop = loop
        self._hear = hear
        self._gone = gone
        self._costs = costs
        self._links: dict[str, SimulatedPrefillLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def get(self, address: str) -> PrefillLink:
        """Return the link to `host:port`. Raises `ValueError` for no address."""
        if address not in self._links:
            self._links[address] = SimulatedPrefillLink(self, address)
        return self._links[address]

    def tidy(self, now: float) -> float:
        """Keep every link; none costs anything."""
        return float("inf")

    def close(self) -> None:
        """Give up every link."""
        self._links.clear()

    def take(self, link: SimulatedPrefillLink, message: Message) -> None:
        """Take a message in, on the loop; reading the KV behind it is work of the processor, if steps wait for that."""
        self.transfers.heard(self.place, message)
        if message[1]:
            self.threads.spend_beside(self._costs.transfer(1))
        self._hear(link, cast("FromPrefill", message[0]), message[1])

    def knows(self, link: SimulatedPrefillLink) -> bool:
        """Whether a link is neither lost nor given up."""
        return self.threads.alive and self._links.get(link.address) is link

    def lost(self, link: SimulatedPrefillLink, reason: str) -> None:
        """End the leases of a link."""
        if self.knows(link):
            del self._links[link.address]
            for lease in list(link.leases):
                self._gone(lease, reason)


class SimulatedDecodeLinks(DecodeConnections):
    """The decode workers of one prefill worker, reached over a simulated network."""

    def __init__(
        self,
        transfers: TransferNetwork,
        threads: VirtualThreads,
        costs: Costs,
        loop: VirtualLoop,
        place: str,
        *,
        hear: Callable[[bytes, FromDecode], object],
    ) -> None:
        """`place`: what the network calls the prefill worker. No process gets a port that another had."""
        self.port = transfers.take_port()
        self._transfers = transfers
        self._threads = threads
        self._costs = costs
        self._loop = loop
        self._place = place
        self._hear = hear
        self._links: dict[bytes, SimulatedPrefillLink] = {}
        transfers.listening[f"{place}:{self.port}"] = self
        threads.at_end(self.close)

    def admit(self, link: SimulatedPrefillLink) -> bytes:
        """Take a new link in and name it."""
        route = str(len(self._links)).encode()
        self._links[route] = link
        return route

    def hear(self, route: bytes, message: Message) -> None:
        """Take a message, at the prefill worker."""
        self._loop.post(partial(self._take, route, message))

    def say(self, route: bytes, message: FromPrefill, frames: Sequence[Bytes] = ()) -> bool:
        """Send a message; the KV behind it takes its time of the job that sends it."""
        if frames:
            self._threads.spend(self._costs.transfer(1))
        link = self._links[route]
        if not link.links.knows(link):
            # A connection that is gone does not show as long as nothing gets through.
            return not self._transfers.network.reaches(self._place, link.links.place)
        self._transfers.carry(self._threads, self._place, link.links.place, (message, frames), link.hear)
        return True

    def close(self) -> None:
        """Stop listening; decode workers see that, unless the network keeps it from them."""
        if self._transfers.listening.get(f"{self._place}:{self.port}") is self:
            del self._transfers.listening[f"{self._place}:{self.port}"]
            for link in self._links.values():
                self._transfers.network.send(self._place, link.links.place, link.lose)

    def _take(self, route: bytes, message: Message) -> None:
        self._transfers.heard(self._place, message)
        self._hear(route, cast("FromDecode", message[0]))


def simulated_receiver(
    threads: VirtualThreads,
    queue: CompletionQueue,
    cache: KVCache,
    costs: Costs,
    transfers: TransferNetwork,
    place: str,
    *,
    silence: float = 10.0,
) -> Receiver:
    """Return the decode side of the worker at `place`, see `Receiver`. `queue` is the engine's."""
    timed = TimedKVCache(cache, threads, costs)

    def connect(
        loop: Any,
        wire: Wire,
        tally: Tally,
        *,
        hear: Callable[[PrefillLink, FromPrefill, Sequence[Bytes]], None],
        reopen: Callable[[str], None],
        gone: Callable[[str, str], None],
    ) -> SimulatedPrefillLinks:
        return SimulatedPrefillLinks(transfers, threads, place, loop, costs, hear=hear, gone=gone)

    return Receiver(
        timed,
        timed.block,
        _compatibility(cache),
        Envelope(SECRET, draw=drawer()),
        TCPConnector(ConnectorSettings()),
        VirtualCompletions(threads, queue),
        window=transfers.window,
        silence=silence,
        longest=transfers.longest,
        clock=threads.clock,
        make_loop=threads.make_loop,
        connect=connect,
        name_lease=transfers.name_lease,
    )


def simulated_sender(
    threads: VirtualThreads,
    queue: CompletionQueue,
    cache: KVCache,
    costs: Costs,
    transfers: TransferNetwork,
    place: str,
    limits: Limits,
) -> Sender:
    """Return the prefill side of the worker at `place`, see `Sender`. `queue` is the engine's."""
    timed = TimedKVCache(cache, threads, costs)

    def listen(
        loop: Any,
        wire: Wire,
        tally: Tally,
        host: str,
        port: int,
        *,
        hear: Callable[[bytes, FromDecode], object],
        turn_down: Callable[[bytes, str, str], object],
    ) -> SimulatedDecodeLinks:
        return SimulatedDecodeLinks(transfers, threads, costs, loop, host, hear=hear)

    return Sender(
        timed,
        timed.block,
        _compatibility(cache),
        Envelope(SECRET, draw=drawer()),
        lambda _: TCPConnector(ConnectorSettings()),
        VirtualCompletions(threads, queue),
        host=place,
        max_leases=4 * limits.max_num_seqs,
        max_tokens=limits.max_model_len,
        longest=transfers.longest,
        clock=threads.clock,
        make_loop=threads.make_loop,
        listen=listen,
    )


def _compatibility(cache: KVCache) -> KVCompatibility:
    shape = cache.shape
    return KVCompatibility(
        model="simulated",
        dtype="float32",
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
