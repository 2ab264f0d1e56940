"""The cases that every connector has to pass.

Two processes have one connector each: this process, and another that is the decode side in one run and the prefill side
in the next. After each case both must hold the same resources as before, and the connector must leave no external
resources behind.
"""

from __future__ import annotations

import itertools
import os
import resource
import secrets
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fd_core.disagg.connectors.contract import (
    MAX_ADDRESS_BYTES,
    MAX_REFERENCE_BYTES,
    Connector,
    ConnectorError,
    ConnectorSettings,
    KVInbox,
    KVOutbox,
    PutResult,
)
from fd_core.kv.stores.contract import FailureReason, KVStore, StoreError
from fd_core.plugins import CONNECTOR, installed_plugins
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.connectors.cases import TRANSFERS, ConnectorPair, TimedEnd, move_lease
from fd_core.testing.connectors.day import SERVERS, require_an_ordinary_day
from fd_core.testing.connectors.remote import Recipe, RemoteProcess
from fd_core.testing.kit.growth import require_bounded, require_idle
from fd_core.testing.kit.privacy import created_paths, hidden_in_any_folder, kept_out_of_logs
from fd_core.testing.kit.processes import LIMITS, at_a_limit, resource_snapshot
from fd_core.testing.kit.requirements import constructed, lacks, thorough_but
from fd_core.testing.stores import values

WINDOW = 4
PIECES = range(3, 40)

# The same examples in every run, so that failures are deterministic.
_DRAWS: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}

_FAR = pytest.StashKey[RemoteProcess]()
_WARM = pytest.StashKey[set[str]]()

OpenBoth = Callable[..., tuple[KVInbox, KVOutbox]]

_NUMBERS = 66_000
_SECONDS = 2.0
"""CPU time after which a slow connector has served enough of them; waiting, it has ten times as long."""
_PIECES = 2048
_LEASE_SECONDS = 0.05
_PIECE_SECONDS = 0.015
_SILENCE = 0.1
"""Timeout in seconds of calls while the store is silent."""
VALUE_BYTES = 720 * 1024 + 80
"""Size of a real value: the sealed KV of a block."""
_LIMITS: dict[str, int] = {"window": WINDOW, "value_bytes": VALUE_BYTES}


def new_lease() -> str:
    """Return a lease id in the core's format."""
    return secrets.token_hex(16)


value_of = partial(values.value_of, "random")
"""Returns a value of an index and a length."""


def put(outbox: KVOutbox, index: int, value: bytes) -> PutResult:
    """Put a value in two parts, as the core does, and check the result."""
    done = outbox.put(index, (value[:80], value[80:]))
    assert isinstance(done.reference, bytes)
    assert len(done.reference) <= MAX_REFERENCE_BYTES
    return PutResult(done.reference, tuple(bytes(frame) for frame in done.frames))


def garbage(truth: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for forged bytes in place of `truth`, random or similar to it."""

    def bent(change: tuple[int, int, bytes]) -> bytes:
        start, length, text = change
        return truth[:start] + text + truth[start + length :]

    changes = st.tuples(st.integers(0, len(truth)), st.integers(0, 8), st.binary(max_size=8))
    return st.one_of(st.binary(max_size=80), st.just(b"x" * 5000), changes.map(bent)).filter(lambda it: it != truth)


class ConnectorSuite:
    """Derive a class `Test...` from it and name the connector."""

    connector: str
    """Value that users pass to `--kv-connector`."""
    timeout: float = 5.0
    """Timeout of a call in seconds, enough for a busy machine."""
    examples: int = 25
    """Half the number of garbage inputs."""

    @pytest.fixture
    def kv_store(self) -> str | None:
        """Return the value of `--kv-store` for a connector that needs a store, else None."""
        return None

    def left_behind(self, kv_store: str | None) -> set[str]:
        """Return the names of all external resources of the connector, outside both processes."""
        return set()

    def connector_class(self) -> type[Connector]:
        """Return the class of the connector; override for a class that no plugin registers."""
        return installed_plugins().load(CONNECTOR, self.connector)

    @pytest.fixture
    def recipe(self, kv_store: str | None) -> Recipe:
        """Settings from which both processes create the connector."""
        cls = self.connector_class()
        return Recipe(f"{cls.__module__}:{cls.__qualname__}", kv_store, self.timeout)

    @pytest.fixture
    def far(self, request: pytest.FixtureRequest, recipe: Recipe) -> RemoteProcess:
        """The other process of all cases, after a first transfer, so that lazy imports do not count as leaks."""
        session = request.session
        if _FAR not in session.stash:
            session.stash[_FAR] = RemoteProcess()
            session.stash[_WARM] = set()
            session.addfinalizer(session.stash[_FAR].close)
        side, warm = session.stash[_FAR], session.stash[_WARM]
        if recipe.cls not in warm:
            constructed(CONNECTOR, recipe.cls, recipe.make).close()
            warm.add(recipe.cls)
            with suppress(ConnectorError):
                for peer in ("prefill", "decode"):
                    pair = ConnectorPair(recipe.make, partial(side.make, recipe))
                    TRANSFERS.check(pair, TRANSFERS.case(f"peer={peer},pieces=1").values)
        return side

    @pytest.fixture
    def doomed(
        self, far: RemoteProcess, kv_store: str | None, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[RemoteProcess]:
        """Another process that may be killed before the end of the case; what it has created goes with its leases."""
        side, place = RemoteProcess(), (kv_store or "").partition(":")[2].partition("?")[0]
        stays = tuple(filter(None, (place, str(tmp_path_factory.getbasetemp()), *far.ask("created", 0))))
        with created_paths() as made:
            yield side
            side.close()
        paths = [path for path in {*map(str, made), *side.created} if not path.startswith(stays)]
        left = [path for path in paths if Path(path).exists()]
        assert not left, f"a process was killed, and after the other end was closed, these are left: {', '.join(left)}"

    @pytest.fixture
    def sides(self, request: pytest.FixtureRequest, far: RemoteProcess, recipe: Recipe) -> tuple[Connector, Connector]:
        """Connectors of the decode side and, in the other process, the prefill side; cases have both roles there."""
        near, other = recipe.make(), far.make(recipe)
        request.addfinalizer(other.close)
        request.addfinalizer(near.close)
        return near, other

    @pytest.fixture
    def open_both(self, sides: tuple[Connector, Connector]) -> Iterator[OpenBoth]:
        """Return a function that opens the two ends of a lease, which are closed at teardown."""
        ends: list[KVInbox | KVOutbox] = []

        def opened(lease: str | None = None, value_bytes: int = VALUE_BYTES) -> tuple[KVInbox, KVOutbox]:
            both = _opened(*sides, lease=lease, value_bytes=value_bytes)
            ends.extend(both)
            return both

        yield opened
        for end in reversed(ends):
            end.close()

    @pytest.fixture(autouse=True)
    def _nothing_is_left(
        self, request: pytest.FixtureRequest, far: RemoteProcess, kv_store: str | None
    ) -> Iterator[None]:
        if request.node.get_closest_marker("fd_pairs"):  # the first cases have every value
            yield
            return
        before, before_far, before_outside = resource_snapshot(), far.resource_snapshot(), self.left_behind(kv_store)
        yield
        for then, there in ((before, resource_snapshot()), (before_far, far.resource_snapshot())):
            assert _more(there.descriptors, then.descriptors) == [], "descriptors are left open"
            assert _more(there.mapped, then.mapped) == [], "memory is left mapped"
            assert _more(there.threads, then.threads) == [], "threads are left running"
        left, deadline = self.left_behind(kv_store) - before_outside, time.monotonic() + 2 * self.timeout
        while left and "PYTEST_XDIST_WORKER" in os.environ and time.monotonic() < deadline:
            time.sleep(0.05)  # leases of other workers end with their tests
            left &= self.left_behind(kv_store)
        assert left == set()

    @pytest.mark.law("6.1", "6.2")
    @pytest.mark.fd_cases(TRANSFERS)
    def test_case(self, recipe: Recipe, far: RemoteProcess, case: KitCase) -> None:
        case.check(ConnectorPair(recipe.make, partial(far.make, recipe)), "pytest", option="--fd-case")

    @pytest.mark.fd_thorough
    @pytest.mark.fd_alone
    @pytest.mark.law("6.1", "6.2")
    @pytest.mark.parametrize("day", SERVERS)
    def test_an_ordinary_day_costs_no_more_than_with_a_connector_of_the_core(self, recipe: Recipe, day: str) -> None:
        """Move the prompts of a day between workers that begin and end; compare pieces, messages and memory."""
        require_an_ordinary_day(self.connector_class(), recipe, day)

    @pytest.mark.law("6.1")
    def test_one_connector_serves_threads_with_a_lease_each(self, recipe: Recipe) -> None:
        decode, prefill = recipe.make(), recipe.make()
        case = TRANSFERS.case("value_bytes=65537,moves=at random").values
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(move_lease, decode, prefill, case, number) for number in range(4)]
        prefill.close()
        decode.close()
        for each in done:
            each.result()

    @pytest.mark.law("6")
    def test_garbage_for_a_piece_is_refused_and_harms_no_other(self, open_both: OpenBoth) -> None:
        inbox, outbox = open_both(value_bytes=1000)
        values = {index: value_of(index, 1000 - index) for index in PIECES[:WINDOW]}
        there = {index: put(outbox, index, value) for index, value in values.items()}
        truth = there[3]

        @settings(max_examples=2 * self.examples, **_DRAWS)
        @given(
            index=st.one_of(st.sampled_from(PIECES[: WINDOW + 1]), st.integers(-(2**63), 2**63 - 1)),
            reference=garbage(truth.reference),
            frames=st.lists(st.binary(max_size=1200), max_size=3),
        )
        def run(index: int, reference: bytes, frames: list[bytes]) -> None:
            try:
                value = inbox.take(index, reference, frames)
            except ConnectorError:
                return
            assert len(bytes(value)) <= 1000

        run()
        for index, value in values.items():
            assert bytes(inbox.take(index, *there[index])) == value

    @pytest.mark.law("6")
    def test_a_garbage_address_is_refused_or_leads_nowhere(
        self, sides: tuple[Connector, Connector], open_both: OpenBoth
    ) -> None:
        lease = new_lease()
        inbox, outbox = open_both(lease, value_bytes=1000)
        there = put(outbox, 3, value_of(3, 1000))
        assert len(inbox.address) <= MAX_ADDRESS_BYTES

        @settings(max_examples=2 * self.examples, **_DRAWS)
        @given(address=garbage(inbox.address), same=st.booleans())
        def run(address: bytes, same: bool) -> None:
            try:
                stranger = sides[1].open_outbox(
                    lease if same and inbox.address else new_lease(), address, window=WINDOW, value_bytes=1000
                )
            except ConnectorError:
                return
            with suppress(ConnectorError):
                stranger.put(4, [b"from a stranger"])
            stranger.close()

        run()
        assert bytes(inbox.take(3, *there)) == value_of(3, 1000)

    @pytest.mark.law("6")
    def test_the_address_of_another_lease_gives_no_way_into_it(
        self, sides: tuple[Connector, Connector], open_both: OpenBoth
    ) -> None:
        inbox, outbox = open_both()
        there = [put(outbox, index, value_of(index, 1000)) for index in (3, 4)]
        with suppress(ConnectorError):
            stranger = sides[1].open_outbox(new_lease(), inbox.address, **_LIMITS)
            for index in (3, 4, 5):
                with suppress(ConnectorError):
                    stranger.put(index, [bytes(1000)])
            stranger.close()
        for index, each in zip((3, 4), there, strict=True):
            assert bytes(inbox.take(index, *each)) == value_of(index, 1000)

    @pytest.mark.law("6.2")
    def test_late_writes_harm_no_later_lease(self, open_both: OpenBoth) -> None:
        inbox, late = open_both()
        put(late, 3, value_of(3, VALUE_BYTES))
        inbox.close()
        inbox, outbox = open_both()
        there = [put(outbox, index, value_of(index, VALUE_BYTES)) for index in PIECES[:WINDOW]]
        for index in PIECES[1:WINDOW]:
            with suppress(ConnectorError):
                late.put(index, [bytes(VALUE_BYTES)])
        for index, each in zip(PIECES, there, strict=False):
            assert bytes(inbox.take(index, *each)) == value_of(index, VALUE_BYTES)

    @pytest.mark.law("6.1")
    @pytest.mark.parametrize("what", ["leases", "pieces"])
    def test_numbers_beyond_sixteen_bits_are_served(self, recipe: Recipe, what: str) -> None:
        """Open and close more than 2^16 leases, as many as there is time for, or move as many pieces of one lease.

        Meanwhile the first lease stays open, and its first piece is not taken.
        """
        decode, prefill = recipe.make(), recipe.make()
        inbox, outbox = _opened(decode, prefill, value_bytes=100, pieces=range(3, 3 + _NUMBERS))
        first, began, start = put(outbox, 3, value_of(3, 100)), time.thread_time(), time.monotonic()
        for number in range(1, _NUMBERS):
            try:
                if what == "pieces":
                    there = put(outbox, 3 + number, b"piece")
                    inbox.take(3 + number, *there)
                    inbox.done(3 + number, there.reference)
                else:
                    for end in reversed(_opened(decode, prefill, lease=f"{number:032x}", value_bytes=100)):
                        end.close()
            except ConnectorError as error:
                raise AssertionError(
                    f"after {number:,} {what}, of which one is open, no other can be: {error}"
                ) from error
            if time.thread_time() - began > _SECONDS or time.monotonic() - start > 10 * _SECONDS:
                break
        found = inbox.take(3, *first)
        values.assert_value(f"piece 3 of a lease that was open during {number:,} {what}", found, value_of(3, 100))
        for each in (outbox, inbox, prefill, decode):
            each.close()

    @pytest.mark.law("6.1")
    def test_nothing_is_held_of_leases_that_are_over(self, recipe: Recipe) -> None:
        decode, prefill = recipe.make(), recipe.make()

        def use(number: int) -> None:
            inbox, outbox = _opened(decode, prefill, value_bytes=1000)
            there = put(outbox, 3, value_of(number, 1000))
            inbox.take(3, *there)
            inbox.done(3, there.reference)
            inbox.take(4, *put(outbox, 4, value_of(number, 1000)))  # and never done
            with suppress(ConnectorError):
                prefill.open_outbox(new_lease(), b"of no inbox", window=WINDOW, value_bytes=1000).close()
            outbox.close()
            inbox.close()

        require_bounded(use, 64, "leases that are over", "6.1", may_wait=True)
        prefill.close()
        decode.close()

    @pytest.mark.law("6")
    def test_a_lease_takes_memory_for_its_window(self, recipe: Recipe) -> None:
        """Open one for a prompt of many pieces, of which a few are in flight."""
        decode, prefill, before = recipe.make(), recipe.make(), _address_space()
        pieces = range(_PIECES)
        inbox = decode.open_inbox(lease := new_lease(), pieces=pieces, **_LIMITS)
        outbox = prefill.open_outbox(lease, inbox.address, **_LIMITS)
        grown = _address_space() - before
        for each in (outbox, inbox, prefill, decode):
            each.close()
        assert grown < _PIECES * VALUE_BYTES // 4, (
            f"a lease of {_PIECES:,} pieces of {VALUE_BYTES:,} bytes takes {grown:,}; at most its window, {WINDOW} "
            "pieces, is in flight"
        )

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("6")
    def test_pieces_and_leases_take_little_time(self, recipe: Recipe) -> None:
        decode, prefill = recipe.make(), recipe.make()
        seconds: dict[str, list[float]] = {"opening and closing a lease": [], "put, take and done of a piece": []}
        limits = dict(zip(seconds, (_LEASE_SECONDS, _PIECE_SECONDS), strict=True))
        for _ in range(5):
            start = time.perf_counter()
            for end in reversed(_opened(decode, prefill)):
                end.close()
            seconds["opening and closing a lease"].append(time.perf_counter() - start)
        inbox, outbox = _opened(decode, prefill)
        try:
            for index in PIECES:
                value = value_of(index, VALUE_BYTES)
                start = time.perf_counter()
                there = put(outbox, index, value)
                inbox.take(index, *there)
                inbox.done(index, there.reference)
                seconds["put, take and done of a piece"].append(time.perf_counter() - start)
            require_idle("a connector with an open lease")
        finally:
            for each in (outbox, inbox, prefill, decode):
                each.close()
        slow = [f"{what} {1000 * min(times):.0f} ms" for what, times in seconds.items() if min(times) > limits[what]]
        assert not slow, (
            f"at its best, {' and '.join(slow)}, of {1000 * _LEASE_SECONDS:.0f} for a lease and "
            f"{1000 * _PIECE_SECONDS:.0f} for a piece: a prompt has thousands, and one thread moves those of all leases"
        )

    @pytest.mark.law("6")
    def test_pieces_that_are_done_take_no_room(self, recipe: Recipe) -> None:
        """Move many through one lease, and compare the bytes that its ends hold, in memory and in files."""
        decode, prefill, held = recipe.make(), recipe.make(), list[int]()
        with ExitStack() as stack, created_paths() as made:
            stack.callback(decode.close)
            stack.callback(prefill.close)
            inbox, outbox = _opened(decode, prefill)
            stack.callback(inbox.close)
            stack.callback(outbox.close)
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            for index in PIECES:
                there = put(outbox, index, value_of(index, VALUE_BYTES))
                inbox.take(index, *there)
                inbox.done(index, there.reference)
                del there
                files = sum(path.stat().st_size for path in [*made] if path.is_file())
                held.append(files + tracemalloc.get_traced_memory()[0])
        grown, pieces = held[-1] - held[WINDOW], len(PIECES) - WINDOW - 1
        assert grown < WINDOW * VALUE_BYTES, (
            f"{pieces} more pieces of {VALUE_BYTES:,} bytes that are done hold {grown:,}"
        )

    @pytest.mark.law("6")
    def test_other_users_of_the_machine_and_readers_of_logs_see_no_pieces(
        self, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        values = [value_of(index, 1000) for index in (3, 4)]
        for hidden in hidden_in_any_folder(tmp_path_factory.getbasetemp()):
            decode, prefill = recipe.make(), recipe.make()
            with ExitStack() as stack, hidden, kept_out_of_logs(*values):
                stack.callback(decode.close)
                stack.callback(prefill.close)
                inbox, outbox = _opened(decode, prefill, value_bytes=1000)
                stack.callback(inbox.close)
                stack.callback(outbox.close)
                inbox.take(3, *put(outbox, 3, values[0]))
                put(outbox, 4, values[1])
                with suppress(ConnectorError):
                    inbox.take(5, b"?", values)

    @pytest.mark.law("6.3")
    @pytest.mark.parametrize("moved", [0, 9], ids=lambda count: f"{count} pieces")
    def test_the_prefill_side_is_killed(self, recipe: Recipe, doomed: RemoteProcess, moved: int) -> None:
        """After so many moved pieces, a full window is in flight, of which half is announced."""
        decode = recipe.make()
        inbox, outbox = _opened(decode, doomed.make(recipe))
        _move(inbox, outbox, PIECES[:moved])
        there = [put(outbox, index, value_of(index, 1000)) for index in PIECES[moved : moved + WINDOW]]
        doomed.kill()
        for index, each in zip(PIECES[moved:], there[: WINDOW // 2], strict=False):
            with suppress(ConnectorError):
                assert bytes(inbox.take(index, *each)) == value_of(index, 1000)
                inbox.done(index, each.reference)
        inbox.close()
        decode.close()

    @pytest.mark.law("6.3")
    @pytest.mark.parametrize("moved", [0, 9], ids=lambda count: f"{count} pieces")
    def test_the_decode_side_is_killed(self, recipe: Recipe, doomed: RemoteProcess, moved: int) -> None:
        """One lease has moved so many pieces by then, the prefill side begins another one later."""
        prefill, decode, lease = recipe.make(), doomed.make(recipe), new_lease()
        inbox, outbox = _opened(decode, prefill)
        address = decode.open_inbox(lease, pieces=PIECES, **_LIMITS).address
        _move(inbox, outbox, PIECES[:moved])
        for index in PIECES[moved : WINDOW - 1 + moved]:
            put(outbox, index, value_of(index, 1000))
        doomed.kill()
        with suppress(ConnectorError):
            outbox.put(PIECES[WINDOW - 1 + moved], [b"nobody takes this"])
        outbox.close()
        with suppress(ConnectorError):
            prefill.open_outbox(lease, address, **_LIMITS).close()
        prefill.close()

    @pytest.mark.law("6")
    def test_no_call_waits_for_a_side_that_stands_still(self, recipe: Recipe, doomed: RemoteProcess) -> None:
        """Wait half a second at most for room, and for a piece that was never put."""
        recipe = Recipe(recipe.cls, recipe.kv_store, timeout=0.5)
        decode, prefill = recipe.make(), recipe.make()
        inbox, outbox = _opened(doomed.make(recipe), prefill)
        waiting, other = _opened(decode, prefill)
        with doomed.stopped(), suppress(ConnectorError):
            for index in PIECES[:WINDOW]:
                outbox.put(index, [bytes(1000)])
        there = other.put(PIECES.start, [b"value"])
        with suppress(ConnectorError):
            waiting.take(PIECES.start + 1, there.reference, [])
        for end in (outbox, inbox, other, waiting, prefill, decode):
            end.close()

    @pytest.mark.law("6")
    @pytest.mark.parametrize("limit", LIMITS)
    def test_calls_of_a_process_at_a_limit_fail_one_lease_at_most(self, recipe: Recipe, limit: str) -> None:
        decode, prefill, lease = recipe.make(), recipe.make(), new_lease()
        inbox, outbox = _opened(decode, prefill)
        _move(inbox, outbox, PIECES[:2])
        waiting, value = decode.open_inbox(lease, pieces=PIECES, **_LIMITS), value_of(2, VALUE_BYTES)
        there = put(outbox, PIECES[2], value)

        def move(index: int) -> None:
            values.assert_value(
                f"a piece at the limit of {limit}", inbox.take(index, *put(outbox, index, value)), value
            )

        ends: list[KVInbox | KVOutbox] = [outbox, inbox, waiting]
        calls: list[Callable[[], object]] = [
            lambda: ends.append(decode.open_inbox(new_lease(), pieces=PIECES, **_LIMITS)),
            lambda: ends.append(prefill.open_outbox(lease, waiting.address, **_LIMITS)),
            lambda: values.assert_value("a piece that was put before", inbox.take(PIECES[2], *there), value),
            lambda: move(PIECES[3]),
        ]
        with at_a_limit(limit):
            for call in calls:
                with suppress(ConnectorError):
                    call()
        inbox, outbox = _opened(decode, prefill)
        _move(inbox, outbox, PIECES[:2])
        for each in (*ends, outbox, inbox, prefill, decode):
            each.close()

    @pytest.mark.law("6")
    def test_no_call_waits_for_a_silent_store_more_than_once(self, recipe: Recipe) -> None:
        """The store stops responding when most pieces are done, and some are in flight.

        Compares the timeouts that the calls of the store had in each call of the connector, not its time.
        """
        make_store, _ = recipe.settings()
        if make_store is None:
            lacks("the connector uses no KV store")
        stores, left, waited = list[KVStore](), list[bytes](), list[float]()

        def silent(keys: Any, *arguments: float, **named: float) -> None:
            timeout = named.get("timeout", (0.0, *arguments)[-1])
            left.extend(key for key in keys if isinstance(key, bytes))
            waited.append(timeout if threading.current_thread() is threading.main_thread() else 0.0)
            time.sleep(timeout)
            raise StoreError(FailureReason.TIMEOUT, "the KV store call timed out")

        def make() -> KVStore:
            stores.append(make_store())
            return stores[-1]

        decode, prefill = (self.connector_class()(ConnectorSettings(make, timeout=_SILENCE)) for _ in range(2))
        lease = new_lease()
        (inbox, outbox), (waiting, other) = _opened(decode, prefill, lease=lease), _opened(decode, prefill)
        pieces = PIECES[: 4 * WINDOW]
        for index in pieces:
            there = put(outbox, index, value_of(index, 1000))
            inbox.take(index, *there)
            if index < pieces[-WINDOW]:
                inbox.done(index, there.reference)
        calls: list[Callable[[], object]] = [
            lambda: other.put(PIECES.start, [b"value"]),
            lambda: waiting.take(PIECES.start, there.reference, there.frames),
            *(partial(inbox.done, index, there.reference) for index in pieces[-WINDOW:]),
            lambda: decode.open_inbox(new_lease(), pieces=PIECES, **_LIMITS),
            lambda: prefill.open_outbox(lease, inbox.address, **_LIMITS),
            *(end.close for end in (outbox, inbox, other, waiting)),
        ]
        with ExitStack() as stack:
            for each, name in itertools.product(stores, ("get", "put", "longest_prefix", "delete", "stats")):
                stack.enter_context(mock.patch.object(each, name, silent))
            for number, call in enumerate(calls):
                waited.clear()
                with suppress(ConnectorError):
                    call()
                times = sum(waited) / _SILENCE
                assert times < 1.5, f"call {number} waited {times:.1f} times its timeout for the store"
        for each in stores:  # as it would evict them
            with suppress(StoreError):
                each.delete(left, 10.0)
        prefill.close()
        decode.close()

    @pytest.mark.law("6")
    @pytest.mark.parametrize("slow", thorough_but(("put", "get", "delete"), "put"))
    def test_a_slow_store_has_the_time_that_the_user_allows(self, recipe: Recipe, slow: str) -> None:
        """Every call of the store fails that has less than a third of the timeout, and one takes over a second."""
        make_store, _ = recipe.settings()
        if make_store is None:
            lacks("the connector uses no KV store")
        pauses, most = dict[str, float](), 60.0

        def timed(name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            if (timeout := named.get("timeout", arguments[-1])) < most / 3:
                raise StoreError(FailureReason.TIMEOUT, f"{name} takes longer than {timeout} s, of {most} s")
            time.sleep(pauses.pop(name, 0.0))
            return call(*arguments, **named)

        def make() -> KVStore:
            store = make_store()
            for name in ("put", "get", "delete"):
                setattr(store, name, partial(timed, name, getattr(store, name)))
            return store

        decode, prefill = (self.connector_class()(ConnectorSettings(make, timeout=most)) for _ in range(2))
        inbox, outbox = _opened(decode, prefill)
        pauses[slow] = 1.2
        _move(inbox, outbox, PIECES[: WINDOW + 1])
        for end in (outbox, inbox, prefill, decode):
            end.close()


def _address_space() -> int:
    """Return the bytes that this process has reserved, touched or not."""
    status = Path("/proc/self/statm")
    if not status.exists():
        lacks(f"this system has no {status} that counts the memory of a process")
    return int(status.read_text().split()[0]) * resource.getpagesize()


def _more(there: list[str], then: list[str]) -> list[str]:
    """Return the names that occur more often in `there` than in `then`."""
    return [one for one in set(there) if there.count(one) > then.count(one)]


def _move(inbox: KVInbox, outbox: KVOutbox, pieces: Sequence[int]) -> None:
    """Move pieces of a lease from one side to the other."""
    for index in pieces:
        there = put(outbox, index, value_of(index, 1000))
        inbox.take(index, *there)
        inbox.done(index, there.reference)


def _opened(
    decode: Connector,
    prefill: Connector,
    *,
    lease: str | None = None,
    value_bytes: int = VALUE_BYTES,
    pieces: range = PIECES,
) -> tuple[KVInbox, KVOutbox]:
    lease = lease or new_lease()
    decode, prefill = (cast(Connector, TimedEnd(each, each.settings.timeout)) for each in (decode, prefill))
    inbox = decode.open_inbox(lease, pieces=pieces, window=WINDOW, value_bytes=value_bytes)
    outbox = prefill.open_outbox(lease, inbox.address, window=WINDOW, value_bytes=value_bytes)
    timeout = decode.settings.timeout
    return cast(KVInbox, TimedEnd(inbox, timeout)), cast(KVOutbox, TimedEnd(outbox, timeout))
