"""The leases of a prefill worker, on the one thread that owns its socket, the outboxes and the copies."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from fd_core.disagg.answers import Answers
from fd_core.disagg.connectors.contract import MAX_REFERENCE_BYTES, Bytes, Connector, Outbox, Put
from fd_core.disagg.lease import Action, PrefillEnd, Say, flaw, wanted
from fd_core.disagg.lease import Put as PutAction
from fd_core.disagg.listener import Listener
from fd_core.disagg.loop import Loop
from fd_core.disagg.messages import Abort, Confirm, FromDecode, FromPrefill, Open, Refuse
from fd_core.disagg.orders import Orders
from fd_core.disagg.prefill_lease import PrefillLease
from fd_core.disagg.stats import Tally
from fd_core.disagg.terms import Terms, difference
from fd_core.disagg.wire import Wire
from fd_core.errors import FdError
from fd_core.kv.effects import Send, Sent
from fd_core.ops.contract import KVCache
from fd_core.types import IntArray

__all__ = ["Sending"]

_BROKE_OFF: Final = "the prefill worker broke off"
_REMEMBERED: Final = 4096
"""Leases that ended lately: an `Open` that was repeated on its way must not open one again."""


@dataclass(slots=True, eq=False)
class _Lease:
    opening: Open
    machine: PrefillLease
    outbox: Outbox
    route: bytes
    """How the socket calls the connection that the decode side spoke on last."""
    began: float
    pieces: range
    sources: dict[int, tuple[int, IntArray]] = field(default_factory=dict)
    """Operation and block by index, for pieces that were not copied."""
    seen: set[int] = field(default_factory=set)
    """Indices that were among `sources` at some time."""
    left: dict[int, int] = field(default_factory=dict)
    """Blocks by operation that were not copied."""
    puts: deque[int] = field(default_factory=deque)


class Sending:
    """Performs what the machines of all open leases ask for."""

    def __init__(
        self,
        listener: Listener,
        cache: KVCache,
        wire: Wire,
        terms: Terms,
        make_connector: Callable[[str], Connector],
        answers: Answers[Sent],
        orders: Orders,
        tally: Tally,
        *,
        max_leases: int,
        longest: float,
        clock: Callable[[], float],
    ) -> None:
        self.loop = Loop("fdcore-kv-sender", self._turn, self._end_all)
        self.loop.watch(listener.socket, partial(listener.read, self._hear, self._unfit))
        self.turned_at = clock()
        """When the engine's loop turned last; assigned by its thread."""
        self._listener = listener
        self._cache = cache
        self._wire = wire
        self._terms = terms
        self._make_connector = make_connector
        self._answers = answers
        self._orders = orders
        self._tally = tally
        self._max_leases = max_leases
        self._longest = longest
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._work: deque[_Lease] = deque()
        """Leases with blocks to put; each puts one before it is the next one's turn."""
        self._due = math.inf
        """Nothing has to be done for its time's sake before."""

    def __len__(self) -> int:
        return len(self._leases)

    # What the engine wants --------------------------------------------------------------------------------

    def send(self, effect: Send) -> None:
        """Take in blocks that may be read from here on."""
        number, now = effect.operation, self._clock()
        lease = self._leases.get(effect.lease)
        if lease is None:
            self._answers.give(number, Sent(number))
            return
        if number not in self._answers:  # cancelled before it came here
            self._act(lease, lease.machine.failed(_BROKE_OFF, now))
            return
        for at in range(len(effect.blocks)):
            index = effect.first + at
            if index in lease.pieces and index not in lease.seen:
                lease.seen.add(index)
                lease.sources[index] = number, effect.blocks[at : at + 1]
                lease.left[number] = lease.left.get(number, 0) + 1
        self._act(lease, lease.machine.ready(effect.first, len(effect.blocks), now))
        if effect.tokens is not None:
            self._act(lease, lease.machine.finished(effect.tokens, effect.cached, now))
        if number not in lease.left:
            self._answers.give(number, Sent(number))

    def give_up(self, name: str, reason: str) -> None:
        """End a lease whose request ended without all its KV."""
        if (lease := self._leases.get(name)) is not None:
            self._act(lease, lease.machine.gave_up(reason or _BROKE_OFF, self._clock()))

    def refuse(self, name: str, reason: str) -> None:
        """End a lease that the engine does not take."""
        if (lease := self._leases.get(name)) is not None:
            self._tally.add_labelled("refused", "engine")
            self._act(lease, lease.machine.refuse(reason, self._clock()))

    def cancel(self, operation: int) -> None:
        """End the lease of a send that was answered without having been done."""
        for lease in list(self._leases.values()):
            if operation in lease.left:
                self._act(lease, lease.machine.failed(_BROKE_OFF, self._clock()))

    # What decode workers say ------------------------------------------------------------------------------

    def _hear(self, route: bytes, message: FromDecode) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None:
            lease.route = route
            if isinstance(message, Confirm):
                self._tally.add_seconds(self._clock() - lease.began)
            self._act(lease, lease.machine.heard(message, self._clock()))
        elif isinstance(message, Open) and message.lease not in self._over:
            self._open(route, message)
        else:
            self._tally.add("late_messages")
            if not isinstance(message, Abort | Confirm):
                self._listener.say(route, Abort(message.lease, "the prefill worker has no such lease"))

    def _open(self, route: bytes, opening: Open) -> None:
        sentence = difference(self._terms, opening.terms)
        if sentence is not None:
            self._turn_down(route, opening.lease, "terms", sentence)
            return
        if (wrong := flaw(opening)) is not None:
            self._turn_down(route, opening.lease, "malformed", wrong)
            return
        if len(self._leases) >= self._max_leases:
            self._turn_down(route, opening.lease, "busy", f"the prefill worker has {self._max_leases} leases already")
            return
        try:
            outbox = self._make_connector(opening.connector).open_outbox(
                opening.lease, opening.address, window=opening.window, value_bytes=self._wire.value_bytes
            )
        except Exception as error:  # noqa: BLE001 - a stranger's connector: whatever it raises is a failed call
            self._tally.error("connector", "open_outbox", error)
            known = isinstance(error, FdError)
            self._turn_down(
                route,
                opening.lease,
                "connector",
                f"the prefill worker cannot use the connector {opening.connector}" + (f": {error}" if known else ""),
            )
            return
        now = self._clock()
        pieces = wanted(opening)
        machine = PrefillLease(opening, pieces, longest=self._longest, now=now)
        lease = self._leases[opening.lease] = _Lease(opening, machine, outbox, route, now, pieces)
        self._tally.add("leases")
        self._orders.put(opening.job)
        # Afterwards, for the decode worker may turn out to be gone, which takes the order back.
        self._act(lease, machine.accept(now))

    def _unfit(self, route: bytes, lease: str, reason: str) -> None:
        if lease not in self._leases:
            self._turn_down(route, lease, "malformed", reason)

    def _turn_down(self, route: bytes, lease: str, kind: str, reason: str) -> None:
        self._tally.add_labelled("refused", kind)
        self._listener.say(route, Refuse(lease, reason))

    # Leases -----------------------------------------------------------------------------------------------

    def _act(self, lease: _Lease, actions: Sequence[Action], frames: Sequence[Bytes] = ()) -> None:
        unheard = False
        for action in actions:
            match action:
                case Say(message):
                    unheard |= not self._listener.say(lease.route, cast("FromPrefill", message), frames)
                    frames = ()
                case PutAction(index):
                    if not lease.puts:
                        self._work.append(lease)
                    lease.puts.append(index)
                case PrefillEnd():
                    self._end(lease, action)
        if unheard:
            reason = "the decode worker cannot be told any more"
            self._act(lease, lease.machine.failed(reason, self._clock()))
        self._due = min(self._due, lease.machine.next_tick)

    def _end(self, lease: _Lease, end: PrefillEnd) -> None:
        name = lease.opening.lease
        del self._leases[name]
        self._over[name] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        self._tally.add_labelled("ended", end.end)
        lease.puts.clear()
        lease.sources.clear()
        for number in list(lease.left):
            self._answers.give(number, Sent(number))
        lease.left.clear()
        try:
            lease.outbox.close()
        except Exception as error:  # noqa: BLE001 - a stranger's connector, which promises not to
            self._tally.error("connector", "close", error)
        self._orders.over(name, abort=end.abort)

    # Turns ------------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        """Put one block and do what is due; return the seconds until there is more."""
        if self._work:
            lease = self._work.popleft()
            if lease.puts:
                index = lease.puts.popleft()
                if lease.puts:
                    self._work.append(lease)
                self._put(lease, index)
        now = self._clock()
        if now >= self._due:
            self._due = math.inf
            for lease in list(self._leases.values()):
                working = now - self.turned_at < lease.opening.silence
                due = lease.machine.next_tick <= now
                self._act(lease, lease.machine.tick(now, working=working) if due else ())
        return 0.0 if self._work else self._due - self._clock()

    def _put(self, lease: _Lease, index: int) -> None:
        number, block = lease.sources.pop(index)
        array = self._export(number, block)
        lease.left[number] -= 1
        if not lease.left[number]:
            del lease.left[number]
            self._answers.give(number, Sent(number))
        if array is None:
            reason = "the prefill worker could not read a block"
            self._act(lease, lease.machine.failed(reason, self._clock()))
            return
        try:
            digest, parts = self._wire.seal_piece(lease.opening.lease, index, array)
            done: Put = lease.outbox.put(index, parts)
            reference, frames = done
            if len(reference) > MAX_REFERENCE_BYTES:
                raise ValueError("a reference is too long")
        except Exception as error:  # noqa: BLE001 - a stranger's connector: whatever it raises is a failed call
            self._tally.error("connector", "put", error)
            reason = "the connector could not send a piece"
            self._act(lease, lease.machine.failed(reason, self._clock()))
            return
        self._tally.add("pieces")
        self._tally.add("bytes", self._wire.payload_bytes)
        self._act(lease, lease.machine.put(index, digest, reference, self._clock()), frames)

    def _export(self, number: int, block: IntArray) -> npt.NDArray[Any] | None:
        if not self._answers.begin_copy(number):
            return None
        try:
            array: npt.NDArray[Any] = np.ascontiguousarray(self._cache.export_blocks(block))[0]
            return array
        except Exception as error:  # noqa: BLE001 - a backend's cache: what it cannot copy is not sent
            self._tally.error("cache", "export_blocks", error)
            return None
        finally:
            self._answers.end_copy()

    def _end_all(self) -> None:
        """Say that all is over, as the thread ends."""
        try:
            for lease in list(self._leases.values()):
                self._act(lease, lease.machine.gave_up("the prefill worker is shutting down", self._clock()))
        finally:
            self._answers.give_rest(Sent)
            self.loop.forget(self._listener.socket)
            self._listener.close()
