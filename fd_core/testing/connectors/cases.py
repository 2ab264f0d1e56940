"""Axes of connectors: leases, pieces, windows, sizes and history; each piece is compared with what was sent."""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from fd_core.disagg.connectors.contract import (
    MAX_ADDRESS_BYTES,
    MAX_REFERENCE_BYTES,
    Connector,
    ConnectorError,
    KVInbox,
    KVOutbox,
    PutResult,
)
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import clocks_ahead
from fd_core.testing.kit.processes import listening_ports
from fd_core.testing.stores.values import BUFFERS, CONTENTS, assert_hidden, assert_value, draws, parts_of, value_of

_LEASES: Final[dict[str, Callable[[int], str]]] = {
    "random": lambda number: draws(number).randbytes(16).hex(),
    "last letter": lambda number: f"{number:032x}",
    "first letter": lambda number: f"{number:x}{'5a' * 16}"[:32],
    "middle letter": lambda number: f"{'5a' * 8}{number:x}{'a5' * 8}"[:32],
}
_OF_THIS_PROCESS: Final = secrets.randbits(128)
"""Part of the names of leases, for other processes test the same connector at the same time."""
_MOVES: Final[dict[str, tuple[str, ...]]] = {
    "one by one": ("done", "take", "put"),
    "a window at a time": ("put", "take", "done"),
    "done late": ("take", "put", "done"),
    "at random": (),
}
"""Orders of the possible moves by preference."""
AXES: Final = (
    Axis("pieces", (9, 1, 3, 33, 129, 257), ("Connector.open_inbox.pieces",)),
    Axis(
        "first",
        (3, 0, 254, 65_534, 2**31 - 2, 2**32 - 2, 2**40),
        ("KVInbox.take.index", "KVOutbox.put.index", "KVInbox.done.index"),
    ),
    Axis("window", (4, 1, 2, 8, 65, 257), ("Connector.open_inbox.window", "Connector.open_outbox.window")),
    Axis(
        "value_bytes",
        (5000, 1, 65, 79, 81, 4097, 65_537, 737_360, 1_048_577),
        ("Connector.open_inbox.value_bytes", "Connector.open_outbox.value_bytes"),
        rare=(
            {"value_bytes": 4_194_305, "window": 2, "pieces": 2},
            {"value_bytes": 16_777_217, "window": 1, "pieces": 1},
        ),
    ),
    Axis("sizes", ("falling", "full", "empty", "every second empty")),
    Axis("content", CONTENTS),
    Axis("parts", (2, 1, 3, 65), ("KVOutbox.put.parts",)),
    Axis("buffer", tuple(BUFFERS)),
    Axis("moves", tuple(_MOVES), ("KVInbox.take.reference", "KVInbox.take.frames", "KVInbox.done.reference")),
    Axis("take", ("rising", "falling", "twice")),
    Axis("leases", (1, 2, 3, 9)),
    Axis(
        "lease",
        tuple(_LEASES),
        ("Connector.open_inbox.lease", "Connector.open_outbox.lease", "Connector.open_outbox.address"),
    ),
    Axis(
        "before",
        (
            "nothing",
            "the same lease",
            "a transfer",
            "four aborts",
            "a refused value",
            "another connector",
            "another decode side",
            "another prefill side",
            "another connector that ends later",
            "another connector that begins later",
            "a lease that ends later",
            "strangers connect",
        ),
    ),
    Axis("opened", ("in pairs", "inboxes first")),
    Axis("peer", ("prefill", "decode", "none")),
    Axis("thread", (False, True)),
    Axis("sent", ("at once", "when it is taken")),
    Axis("closed", ("outbox first", "inbox first")),
    Axis("age", (0, 3600)),
)
"""Axes of the leases of two connectors; `peer` is the side in another process."""
EXCUSED: Final[Mapping[str, str]] = {
    "Connector.settings": "the suite of a connector names them",
    "ConnectorSettings.make_store": "the suite of a connector names its store",
    "ConnectorSettings.timeout": "the suite of a connector names it",
}
"""Fields of the contract that no axis varies, with the reason."""
SLACK: Final = 1.5
"""Tolerance in seconds for a call on a busy machine."""
_MAX_BYTES: Final = 9e6
"""Bytes of the values, and of the buffers of all windows, of a case."""
_MAX_PIECES: Final = 400
"""Pieces of all leases of a case."""


@dataclass(frozen=True, slots=True)
class ConnectorPair:
    """Functions that make connectors of one kind here and in another process."""

    here: Callable[[], Connector]
    there: Callable[[], Connector]


def allowed(case: Case) -> bool:
    """Return True if a case takes less than about a second; at least `window` pieces may arrive."""
    pieces, window, size, leases = (int_of(case, name) for name in ("pieces", "window", "value_bytes", "leases"))
    return (
        leases * max(pieces, window) * size <= _MAX_BYTES
        and leases * pieces <= _MAX_PIECES
        and pieces * leases * int_of(case, "parts") <= 3000
    )


class TimedEnd:
    """An end, or a connector, whose calls have to return within its timeout."""

    def __init__(self, end: Any, timeout: float) -> None:
        self._end, self._timeout = end, timeout

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._end, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
        start = time.monotonic()
        try:
            return method(*arguments, **limits)
        finally:
            took = time.monotonic() - start
            assert took < self._timeout + SLACK, f"{name} took {took:.1f} s, with a timeout of {self._timeout} s"


@dataclass(slots=True)
class _LeaseUnderTest:
    """One lease: its ends, and where each piece is."""

    inbox: KVInbox
    outbox: KVOutbox
    window: int
    values: dict[int, bytes]
    unsent: list[int] = field(default_factory=list)
    announced: dict[int, PutResult] = field(default_factory=dict)
    taken: dict[int, Any] = field(default_factory=dict)


def check_transfer(pair: ConnectorPair, case: Case) -> None:
    """Move pieces through all leases of a case. Raises `AssertionError` for a piece that differs."""
    with ExitStack() as stack:

        def make(make_one: Callable[[], Connector]) -> Connector:
            connector = make_one()
            stack.callback(connector.close)
            stack.callback(connector.close)  # closing is idempotent
            return connector

        decode = make(pair.there if case["peer"] == "decode" else pair.here)
        transfer = _Transfer(case, decode, make(pair.there if case["peer"] == "prefill" else pair.here))
        sides = {
            "another connector": (None, None),
            "another decode side": (None, transfer.prefill),
            "another prefill side": (transfer.decode, None),
        }
        if (before := str(case["before"])) in sides:
            another = _Transfer(case, *(side or make(pair.here) for side in sides[before]))
            lease = another.open(103, stack)
            stack.callback(another.move_all, [lease])
        if before == "strangers connect":  # as a health check or a scan of ports does
            transfer.open(101, stack)
            for port, sent in itertools.product(listening_ports(), (b"", b"GET / HTTP/1.1\r\n\r\n")):
                with suppress(OSError):  # it listens on another address
                    stack.enter_context(socket.create_connection(("localhost", port), 1.0)).sendall(sent)
        if case["before"] == "another connector that ends later":
            transfer.another = make(pair.here)
        if case["before"] == "another connector that begins later":
            transfer.later = pair.here
        _happens_before(str(case["before"]), transfer)
        if case["thread"]:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(transfer.run).result()
        else:
            transfer.run()


def lease_name(kind: str, number: int) -> str:
    """Return the name of a lease, which differs from those of other numbers in the letters of the kind."""
    return f"{int(_LEASES[kind](number), 16) ^ _OF_THIS_PROCESS:032x}"


def move_lease(decode: Connector, prefill: Connector, case: Case, number: int) -> None:
    """Move the pieces of one lease of a case between two connectors. Raises `AssertionError` for one that differs."""
    with ExitStack() as stack:
        transfer = _Transfer(case, decode, prefill)
        transfer.move_all([transfer.open(number, stack)])


class _Transfer:
    def __init__(self, case: Case, decode: Connector, prefill: Connector) -> None:
        self.case, self.decode, self.prefill = case, decode, prefill
        self._draw = draws(int_of(case, "pieces"))
        self.another: Connector | None = None
        self.later: Callable[[], Connector] | None = None
        self._over: list[_LeaseUnderTest] = []
        """Leases that were closed before."""

    def open(self, number: int, stack: ExitStack, name: str | None = None) -> _LeaseUnderTest:
        """Open both ends of a lease; `stack` closes them."""
        return self._open_outbox(number, self._open_inbox(number, stack, name), stack, name)

    def _limits(self, number: int) -> dict[str, int]:
        """Return the limits of a lease; every second one has other limits than those before and after it."""
        return {name: max(1, int_of(self.case, name) >> number % 2) for name in ("window", "value_bytes")}

    def _open_inbox(self, number: int, stack: ExitStack, name: str | None = None) -> Any:
        first, count, limits = int_of(self.case, "first"), int_of(self.case, "pieces"), self._limits(number)
        name = name or lease_name(str(self.case["lease"]), number)
        pieces = range(first, first + max(count, limits["window"]))
        inbox = TimedEnd(self.decode.open_inbox(name, pieces=pieces, **limits), self.decode.settings.timeout)
        stack.callback(inbox.close)
        return inbox

    def _open_outbox(self, number: int, inbox: Any, stack: ExitStack, name: str | None = None) -> _LeaseUnderTest:
        first, count, limits = int_of(self.case, "first"), int_of(self.case, "pieces"), self._limits(number)
        name = name or lease_name(str(self.case["lease"]), number)
        assert len(inbox.address) <= MAX_ADDRESS_BYTES, f"an address has {len(inbox.address)} bytes"
        outbox: Any = self.prefill.open_outbox(name, inbox.address, **limits)
        outbox = TimedEnd(outbox, self.decode.settings.timeout)
        stack.callback(outbox.close)
        if self.case["closed"] == "inbox first":
            stack.callback(inbox.close)
        content = str(self.case["content"])
        sizes = [self._size(at, limits["value_bytes"]) for at in range(count)]
        values = {first + at: value_of(content, 1000 * number + at, size) for at, size in enumerate(sizes)}
        return _LeaseUnderTest(inbox, outbox, limits["window"], values, unsent=[*values])

    def _size(self, at: int, size: int) -> int:
        every_second = 0 if at % 2 else size
        return {"falling": max(0, size - 13 * at), "full": size, "empty": 0}.get(str(self.case["sizes"]), every_second)

    def run(self) -> None:
        """Open all leases, move their pieces in turns when the leases have an age, and close them."""
        with ExitStack() as stack, ExitStack() as earlier:
            if self.case["before"] == "a lease that ends later":
                self._over.append(self.open(95, earlier))
            if self.another is not None:
                earlier.callback(self.another.close)
            if (later := self.later) is not None:  # of another engine on this machine, which starts now
                earlier.callback(lambda: later().close())
            numbers = range(int_of(self.case, "leases"))
            if self.case["opened"] == "inboxes first":
                inboxes = [self._open_inbox(number, stack) for number in numbers]
                leases = [self._open_outbox(number, inboxes[number], stack) for number in numbers]
            else:
                leases = [self.open(number, stack) for number in numbers]
            earlier.close()
            for lease in self._over:  # closing is idempotent, also if others use the same resources by now
                lease.outbox.close()
                lease.inbox.close()
            with clocks_ahead(self.decode, int_of(self.case, "age")):
                self.move_all(leases)

    def move_all(self, leases: Sequence[_LeaseUnderTest]) -> None:
        """Move the pieces of all leases, in turns."""
        active = list(leases)
        while active:
            for lease in list(active):
                if not self._move(lease, leases.index(lease)):
                    active.remove(lease)

    def _move(self, lease: _LeaseUnderTest, number: int) -> bool:
        """Make one move; return False if no piece is left."""
        untaken = sorted(set(lease.announced) - set(lease.taken), reverse=self.case["take"] == "falling")
        moves = {"take": untaken[:1], "done": [*lease.taken][:1]}
        if lease.unsent and len(lease.announced) < lease.window:
            moves["put"] = lease.unsent[:1]
        possible = [move for move, indices in moves.items() if indices]
        if not possible:
            return False
        wanted = _MOVES[str(self.case["moves"])]
        move = next((move for move in wanted if move in possible), None) or self._draw.choice(possible)
        self._do(move, lease, moves[move][0], f"piece {moves[move][0]} of lease {number}")
        return True

    def _do(self, move: str, lease: _LeaseUnderTest, index: int, what: str) -> None:
        value = lease.values[index]
        if move == "put":
            lease.unsent.remove(index)
            lease.announced[index] = self._put(lease.outbox, index, value)
        elif move == "take":
            lease.announced[index] = _as_sent(lease.announced[index])
            for _ in range(2 if self.case["take"] == "twice" else 1):
                lease.taken[index] = lease.inbox.take(index, *lease.announced[index])
                assert_value(what, lease.taken[index], value)
        else:
            assert_value(f"{what} before it is done", lease.taken.pop(index), value)
            lease.inbox.done(index, lease.announced.pop(index).reference)

    def _put(self, outbox: KVOutbox, index: int, value: bytes) -> PutResult:
        parts = parts_of(value, int_of(self.case, "parts"), str(self.case["buffer"]))
        done = outbox.put(index, parts)
        assert len(done.reference) <= MAX_REFERENCE_BYTES, f"a reference has {len(done.reference)} bytes"
        assert len(done.frames) <= len(parts) + 1, f"put returned {len(done.frames)} frames for {len(parts)} parts"
        if not done.frames:
            for part in parts:
                flat = memoryview(part).cast("B")
                if not flat.readonly:
                    flat[:] = bytes(len(flat))
        return _as_sent(done) if self.case["sent"] == "at once" else done

    def abort(self, number: int, name: str | None = None) -> None:
        """Open a lease, and close it with announced, taken and unsent pieces, whose frames may be sent later."""
        with ExitStack() as stack:
            lease = self.open(number, stack, name)
            self._over.append(lease)
            for _ in range(1 + number % (2 * lease.window + 1)):
                self._move(lease, number)
            announced = {index: _as_sent(piece) for index, piece in lease.announced.items()}
        first = min(lease.values)
        _require_refused(lambda: lease.outbox.put(max(lease.values) + 1, [b"late"]), "a late value")
        piece = announced.get(first, PutResult(b"", (b"late",)))
        _require_refused(lambda: lease.inbox.take(first, *piece), "a piece of a lease that is over")
        sent = {index: _as_sent(piece) for index, piece in lease.announced.items()}
        assert sent == announced, "closing an outbox changed frames that are not sent yet"


def _require_refused(call: Callable[[], object], what: str, value: bytes = b"") -> None:
    try:
        call()
    except ConnectorError as error:
        assert_hidden(value, error)
    else:
        raise AssertionError(f"{what} was accepted")


def _as_sent(piece: PutResult) -> PutResult:
    """Return a piece as a message carries it, in new memory."""
    return PutResult(bytes(piece.reference), tuple(bytes(frame) for frame in piece.frames))


def _happens_before(what: str, transfer: _Transfer) -> None:
    """Use the connectors for other leases first; a lease with its name, and one that is complete, have other limits."""
    half = {name: max(1, int_of(transfer.case, name) // 2) for name in ("window", "value_bytes")}
    match what:
        case "the same lease":
            earlier = _Transfer({**transfer.case, **half}, transfer.decode, transfer.prefill)
            earlier.abort(5, lease_name(str(transfer.case["lease"]), 0))
        case "a transfer":
            with ExitStack() as stack:
                earlier = _Transfer({**transfer.case, "window": half["window"]}, transfer.decode, transfer.prefill)
                earlier.move_all([earlier.open(90, stack)])
        case "four aborts":
            for number in range(91, 95):
                transfer.abort(number)
        case "a refused value":
            with ExitStack() as stack:
                lease = transfer.open(102, stack)
                first, most = min(lease.values), int_of(transfer.case, "value_bytes")
                too_long = (b"a prompt " * most)[: most + 1]
                what = f"a value of {most + 1:,} bytes, one over the limit"
                _require_refused(lambda: lease.outbox.put(first, [too_long]), what, too_long)
                _require_refused(lambda: lease.inbox.take(first, b"", [too_long]), what, too_long)
                transfer.move_all([lease])


TRANSFERS: Final[Part[ConnectorPair]] = Part("transfer", AXES, check_transfer, allowed)
