"""The cases that every KV store has to pass.

Each writes through the store and reads through its back door, or vice versa. A store disables features that it cannot
support, with a reason that the report shows.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import signature
from operator import methodcaller
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from fd_core.errors import ConfigError, FdError, PluginError
from fd_core.kv.stores.contract import Bytes, FailureReason, KVStore, StoreError
from fd_core.kv.stores.location import StoreLocation, parse_location
from fd_core.plugins import STORE, installed_plugins
from fd_core.testing.axes.interleaving import interleaved
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.purity import clocks_ahead
from fd_core.testing.kit.growth import count_bytes, require_bounded, require_idle, seconds_of
from fd_core.testing.kit.privacy import created_paths, hidden_in_any_folder, kept_out_of_logs
from fd_core.testing.kit.processes import LIMITS, at_a_limit, resource_snapshot
from fd_core.testing.kit.requirements import OPEN, ReadNames, Requirement, constructed, lacks
from fd_core.testing.stores.cases import STORES, StorePlace, supported
from fd_core.testing.stores.day import SERVERS, Place, require_an_ordinary_day
from fd_core.testing.stores.values import assert_hidden, assert_value, keys_of
from fd_core.testing.stores.writer import writer_process

MakeStore = Callable[..., KVStore]

LIMIT = 720 * 1024 + 64
"""Realistic value size: a block's KV in its envelope, in bytes."""
TIMEOUT = 10.0
"""Seconds for a call that should succeed, even on a busy machine."""
SLACK = 1.5
"""Tolerance in seconds for a call on a busy machine."""


def key_of(number: int) -> bytes:
    """Return one of many distinct keys of 16 bytes, the size of block keys."""
    return number.to_bytes(2, "big") * 8


def value_of(key: bytes, length: int = 1000) -> bytes:
    """Return the value of a key: `length` bytes that are unique to the key, and that no store can compress."""
    return hashlib.shake_128(key).digest(length)


def versions_of(key: bytes) -> list[bytes]:
    """Return values that replace each other under a key, as one that is sealed again does; each ends as it begins."""
    marks = [bytes([number]) * len(key) for number in range(1, len(_VERSIONS) + 1)]
    values = [bytes(map(int.__xor__, key, mark)) for mark in marks]
    return [(value * (length // len(key) + 1))[:length] for value, length in zip(values, _VERSIONS, strict=True)]


def as_bytes(values: Iterable[Bytes | None]) -> list[bytes | None]:
    """Return a store's value as plain bytes."""
    return [None if value is None else bytes(value) for value in values]


def usable_again(store: KVStore) -> None:
    """Wait until the store responds again after a fault or a restart; fails after 15 seconds."""
    end = time.monotonic() + 15.0
    while True:
        try:
            store.get([b"is anybody there"], LIMIT, TIMEOUT)
        except StoreError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def with_parameter(location: str, parameter: str) -> str:
    """Return the location with an additional parameter."""
    return f"{location}{'&' if '?' in location else '?'}{parameter}"


A, B, C = key_of(1), key_of(2), key_of(3)


_TIMED: Final = tuple(
    name for name, method in vars(KVStore).items() if callable(method) and "timeout" in signature(method).parameters
)
"""Methods of the contract that have a timeout, in its order: `open` is the first one, `stats` the last."""
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "open": (),
    "get": ([A], LIMIT),
    "put": ([(B, [value_of(B, LIMIT)])],),
    "longest_prefix": ([A], LIMIT),
    "delete": ([C],),
    "stats": (),
}


def _calls(timeout: float) -> list[Callable[[KVStore], object]]:
    """Return a call of each method that has a timeout."""
    return [methodcaller(name, *_ARGUMENTS[name], timeout) for name in _TIMED]


_SIZES: Final = {2**31: "2147483648", 2**32 + 1: "4294967297", 96 << 10: "96Ki", 8 << 30: "8Gi"}
"""Limits, also above those that a number of 32 bits has, as users write them."""
_NUMBERED: Final = 66_048
"""Small values that a store holds, more than 2^16; a multiple of 256."""
_WRONG_VALUES: Final = ("much", "-1", "", "nan", "1e999")
"""Values of parameters that are no sizes, counts or times."""
_MANY: Final = 2048
"""Values that a store holds while calls are timed."""
_CALL_SECONDS: Final = 0.01
"""Time of a call for a small value of a store that is near, at its best."""
_BLOCK_SECONDS: Final = 0.04
"""Likewise, of each of several blocks that a call reads or writes."""
_KEY_SECONDS: Final = 1e-4
"""Likewise, of each of many keys that a call looks up."""
_LARGE: Final = 16 << 20
"""Bytes of a value that a limit of 2,000 bytes excludes."""
_AT_ANY_LINE: Final = (
    ("put", "read"),
    ("put", "delete from outside"),
    ("get", "delete"),
    ("get", "shorten from outside"),
    ("longest_prefix", "delete from outside"),
    ("delete", "delete from outside"),
    ("stats", "delete from outside"),
)
"""A call, and what happens at each of its lines in turn."""
_GONE: Final = 128
"""Values that are put and deleted, one by one."""
_LINES: Final = 100
"""Most lines of a call at which a value changes."""
_VERSIONS: Final = (LIMIT, LIMIT, LIMIT - 100_000)
"""Lengths of the values that replace each other under a key."""


def _fastest(call: Callable[[], object], count: int = 25) -> float:
    """Return the shortest time of some calls, in seconds."""
    return min(seconds_of(call) for _ in range(count))


def _without_time(call: Callable[[float], object]) -> None:
    """Make a call that has no time: one that takes long has to end by its timeout."""
    try:
        call(0.0)
    except StoreError as error:
        assert error.reason is FailureReason.TIMEOUT, f"timeout 0 was reported as {error.reason}"


class _SlowValues(Sequence[tuple[bytes, Sequence[Bytes]]]):
    """Values for a `put`, of which the third one takes some seconds."""

    def __init__(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], seconds: float) -> None:
        self._values, self._seconds = values, seconds

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            time.sleep(self._seconds)
        return self._values[index]


class BackDoor(abc.ABC):
    """Independent access to the values of a store, so that a broken `put` is not masked by a matching `get`.

    The methods that are not abstract are optional. Without an override, the tests that need them are skipped; override
    with `lacks("...")` to give a better reason.
    """

    @abc.abstractmethod
    def read(self, key: bytes) -> bytes | None:
        """Return the value under `key`, None if there is none."""

    @abc.abstractmethod
    def write(self, key: bytes, value: bytes) -> None:
        """Put `value` under `key`, as another program would."""

    @abc.abstractmethod
    def delete(self, key: bytes) -> None:
        """Remove the value under `key`, if there is one."""

    def spoil(self, key: bytes) -> None:
        """Put data that is not a value under `key`, such as another type or a folder."""
        lacks(f"{type(self).__name__} can only put values under a key")

    def write_zeros(self, key: bytes, length: int) -> None:
        """Put a value of zeros under `key`, which takes no space; by default, an empty one."""
        self.write(key, b"")

    def restart(self) -> None:
        """Kill the server of the values and restart it."""
        lacks(f"{type(self).__name__} has no server to restart")

    def size(self) -> int:
        """Return the bytes of everything at the location, unfinished values included."""
        lacks(f"{type(self).__name__} cannot tell how much there is")

    @property
    def counts(self) -> bool:
        """True if `size` is known."""
        return type(self).size is not BackDoor.size

    def fault(self, reason: FailureReason) -> AbstractContextManager[object]:
        """Return a context manager in which the store has the fault; it recovers at exit."""
        lacks(f"{type(self).__name__} cannot simulate {reason}")


class StoreSuite:
    """Derive a class `Test...` from it and override the fixtures `location` and `back_door`."""

    persistence: Requirement = OPEN
    """Values outlive the store object that put them."""
    survives_restart: Requirement = OPEN
    """Values survive a restart of the server."""
    sharing: Requirement = OPEN
    """Two store objects of one location share values."""
    size_cap: Requirement = OPEN
    """The parameter `max_bytes` of a location is a limit, with least recently used eviction."""
    secrets: tuple[str, ...] = ()
    """Secrets in the location, which must not appear in messages."""

    @pytest.fixture
    def location(self) -> str:
        """Value of `--kv-store` for an empty location, exclusive to the test."""
        raise AssertionError(f"{type(self).__name__} must override the fixture `location`")

    @pytest.fixture
    def back_door(self) -> BackDoor:
        """The back door of the same location; may use the fixture `store`."""
        raise AssertionError(f"{type(self).__name__} must override the fixture `back_door`")

    def elsewhere(self, location: str) -> str | None:
        """Return another location with the same name, such as a folder in another folder; None if there is none."""
        scheme, _, rest = location.partition(":")
        path = Path(rest)
        if "?" in rest or not path.is_absolute():
            return None
        parent = path.parent / "another place ü [1] 100%41"
        parent.mkdir(exist_ok=True)
        return f"{scheme}:{parent / path.name}"

    def new_store(self, location: StoreLocation) -> KVStore:
        """Return the store that a user would get; override for a class that no plugin registers."""
        return installed_plugins().load(STORE, location.scheme)(location)

    @pytest.fixture
    def make_store(self, request: pytest.FixtureRequest, location: str) -> Iterator[MakeStore]:
        """Return a function that creates a store of the location, or of another one, and closes it at teardown.

        Only cases are reduced to the envelope of a store; other tests of a smaller one are skipped.
        """
        made: list[KVStore] = []

        def make(text: str = location) -> KVStore:
            place, new = parse_location(text), self.new_store
            passes = PluginError if text == location else FdError  # errors for parameters of locations
            made.append(constructed(STORE, place.scheme, lambda: new(place), passes=passes))
            if made[-1].envelope.exceeded({"value_bytes": LIMIT}) and "case" not in request.fixturenames:
                lacks(f"its envelope has value_bytes={made[-1].envelope.value_bytes}; the test has {LIMIT}")
            return made[-1]

        yield make
        for store in made:
            store.close()

    @pytest.fixture
    def store(self, make_store: MakeStore) -> KVStore:
        store = make_store()
        store.open(TIMEOUT)
        return store

    @pytest.mark.law("5.2", "5.4")
    @pytest.mark.fd_cases(STORES)
    def test_case(
        self, store: KVStore, make_store: MakeStore, location: str, back_door: BackDoor, case: KitCase
    ) -> None:
        place = StorePlace(store, make_store, self.elsewhere(location), back_door)
        can = supported(place, shares=self.sharing.reason is None, persists=self.persistence.reason is None)
        if (edge := store.envelope.value_bytes) is not None and case.text == "plain":
            for size in (edge, edge - 1):
                STORES.case(f"value_bytes={size},count=1").check(place, "pytest", option="--fd-case")
        case.with_only(can).check(place, "pytest", option="--fd-case")

    @pytest.mark.fd_thorough
    @pytest.mark.fd_alone
    @pytest.mark.law("5.2", "5.4", "5.5")
    @pytest.mark.parametrize("day", SERVERS)
    def test_an_ordinary_day_costs_no_more_than_with_a_store_of_the_core(
        self, location: str, store: KVStore, make_store: MakeStore, back_door: BackDoor, day: str
    ) -> None:
        """Serve the conversations of a day, with all accidents; compare values, blocks computed again and costs."""
        shares, capped = self.sharing.reason is None, self.size_cap.reason is None

        def make(limit: int | None) -> KVStore:
            if limit is None:
                return make_store() if shares else store
            return make_store(with_parameter(location, f"max_bytes={limit >> 10}Ki"))

        def restart(stores: Sequence[KVStore], _: Sequence[bytes]) -> None:
            back_door.restart()
            for each in stores:
                usable_again(each)

        place = Place(
            make,
            engines=3 if shares else 1,
            door=back_door if shares or not capped or SERVERS[day].share is None else None,
            capped=capped,
            persists=self.persistence.reason is None and shares,
            zeros=type(back_door).write_zeros is not BackDoor.write_zeros,
            restart=restart if type(back_door).restart is not BackDoor.restart else None,
            survives=self.survives_restart.reason is None,
        )
        require_an_ordinary_day(place, day)

    @pytest.mark.law("5.4")
    def test_invalid_value_does_not_affect_others(self, store: KVStore, back_door: BackDoor) -> None:
        store.put([(B, [value_of(B)])], TIMEOUT)
        back_door.spoil(A)
        try:
            assert as_bytes(store.get([A, B], LIMIT, TIMEOUT)) == [None, value_of(B)]
        except StoreError as error:
            assert error.reason is FailureReason.MALFORMED
        assert store.longest_prefix([B, A], LIMIT, TIMEOUT) == 1
        assert store.stats(TIMEOUT).values in (None, 1, 2), "stats count more values than there are entries"
        try:
            store.put([(A, [value_of(A)])], TIMEOUT)
            assert back_door.read(A) == value_of(A)
        except StoreError as error:
            assert error.reason is FailureReason.MALFORMED
        assert as_bytes(store.get([B], LIMIT, TIMEOUT)) == [value_of(B)]

    @pytest.mark.law("5.2")
    @pytest.mark.parametrize("writers", ["the same object", "two other objects"])
    def test_a_reader_sees_whole_values_while_a_writer_replaces_them(
        self, store: KVStore, make_store: MakeStore, writers: str
    ) -> None:
        if writers != "the same object":
            self.sharing.require()
        writing = [store] if writers == "the same object" else [make_store(), make_store()]
        keys = [key_of(number) for number in range(4)]
        whole = {key: versions_of(key) for key in keys}
        rounds = [0] * len(writing)
        enough = threading.Event()

        def write(at: int) -> None:
            while not enough.is_set():
                for version in range(len(_VERSIONS)):
                    assert writing[at].put([(key, [whole[key][version]]) for key in keys], TIMEOUT) == len(keys)
                assert writing[at].delete(keys[::2], TIMEOUT) <= 2
                rounds[at] += 1

        with ThreadPoolExecutor(len(writing)) as pool:
            running = [pool.submit(write, at) for at in range(len(writing))]
            try:
                for number in itertools.count():
                    if (number >= 40 and min(rounds) >= 4) or any(writer.done() for writer in running):
                        break
                    found = as_bytes(store.get(keys, LIMIT, TIMEOUT))
                    assert all(value in (None, *whole[key]) for key, value in zip(keys, found, strict=True))
                    if number % 4 == 0 and writers != "the same object":
                        make_store().open(TIMEOUT)  # as an engine that starts meanwhile
                    assert 0 <= store.longest_prefix(keys, LIMIT, TIMEOUT) <= len(keys)
            finally:
                enough.set()
        for writer in running:
            writer.result()
        store.delete(keys, TIMEOUT)
        assert store.get(keys, LIMIT, TIMEOUT) == [None] * len(keys)

    @pytest.mark.law("5.2")
    def test_a_killed_writer_leaves_whole_values(
        self, store: KVStore, make_store: MakeStore, location: str, back_door: BackDoor
    ) -> None:
        """Kill a process in the middle of a put; another one goes on."""
        self.sharing.require()
        keys = [key_of(number) for number in range(4)]
        with writer_process(type(store), location) as writer:
            for _ in range(2):
                writer.wait_for_put()
                found = as_bytes(store.get(keys, LIMIT, TIMEOUT))
                assert all(value in (None, *versions_of(key)) for key, value in zip(keys, found, strict=True))
            time.sleep(0.002)
            writer.kill()
        assert all(back_door.read(key) in (None, *versions_of(key)) for key in keys)
        for each in (store, make_store()):
            assert each.put([(key, [value_of(key)]) for key in keys], TIMEOUT) == len(keys)
            assert as_bytes(each.get(keys, LIMIT, TIMEOUT)) == [value_of(key) for key in keys]

    @pytest.mark.law("5.5")
    def test_the_cap_holds_for_what_a_killed_writer_left(
        self, location: str, make_store: MakeStore, back_door: BackDoor
    ) -> None:
        """Kill a process before it names a value; a day later the store fills up to its limit."""
        self.sharing.require()
        self.size_cap.require()
        store = make_store(with_parameter(location, f"max_bytes={LIMIT}"))
        with writer_process(type(store), with_parameter(location, f"max_bytes={LIMIT}"), "write_and_die") as writer:
            writer.wait()
        with clocks_ahead(store, 86_400.0):
            for number in range(12):
                store.put([(key_of(number), [value_of(key_of(number), LIMIT // 8)])], TIMEOUT)
        assert back_door.size() <= LIMIT, f"{back_door.size():,} bytes are there, the limit is {LIMIT:,}"

    @pytest.mark.law("5.2", "5.5")
    def test_no_call_waits_for_a_writer_that_stands_still(
        self, store: KVStore, make_store: MakeStore, location: str
    ) -> None:
        """Suspend a process before each system call of a put in turn, where it may hold a lock.

        It has the process id and thread ids of this one, as on another machine: their writes do not collide.
        """
        self.sharing.require()
        capped = with_parameter(location, f"max_bytes={8 * LIMIT}") if self.size_cap.reason is None else location
        other, key, stops = make_store(capped), key_of(1000), 0

        def attempt(call: Callable[[KVStore], object]) -> None:
            with contextlib.suppress(StoreError):
                call(other)

        with ThreadPoolExecutor(1) as pool, writer_process(type(store), capped, "write_and_stop") as writer:
            for stops, _ in enumerate(writer.stops(), 1):
                for call in _calls(0.05):
                    late = wait([pool.submit(attempt, call)], 0.05 + SLACK).not_done
                    assert not late, f"a call waited for a writer that stood still before its system call {stops - 1}"
                try:
                    make_store(capped).open(0.2)
                    other.put([(key, [value_of(key)])], 0.2)
                except StoreError as error:  # the other one may hold a lock
                    assert error.reason is FailureReason.TIMEOUT, f"at system call {stops} of another machine: {error}"
        assert other.put([(key, [value_of(key)])], TIMEOUT) == 1
        keys = [key, *(key_of(number) for number in range(4, stops + 1))]  # the calls put and delete others
        for at, (each, found) in enumerate(zip(keys, other.get(keys, LIMIT, TIMEOUT), strict=True)):
            assert_value(f"value {at} of two machines that put at the same time", found, value_of(each))

    @pytest.mark.law("5.2", "5.4", "5.5")
    @pytest.mark.parametrize(("name", "change"), _AT_ANY_LINE)
    def test_a_value_may_change_or_be_read_at_any_line_of_a_call(
        self, location: str, store: KVStore, make_store: MakeStore, back_door: BackDoor, name: str, change: str
    ) -> None:
        """The call returns what it does before or after the change; the caller detects a torn value.

        A put evicts other values, if the location can be capped.
        """
        if "outside" in change:
            self.sharing.require()
            if name == "put" and self.size_cap.reason is None:
                store = make_store(with_parameter(location, "max_bytes=10000"))  # two values
        changes: dict[str, Callable[[], object]] = {
            "read": lambda: self._is_one_of(store.get([A], LIMIT, TIMEOUT)[0], A, f"read during a {name}"),
            "delete": lambda: store.delete([A], TIMEOUT),
            "delete from outside": lambda: back_door.delete(A),
            "shorten from outside": lambda: back_door.write(A, value_of(A, 10)),
        }
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: store.put([(C, [value_of(C)[:600], value_of(C)[600:]])], TIMEOUT),
            "get": lambda: store.get([A, B, A], LIMIT, TIMEOUT),
            "longest_prefix": lambda: store.longest_prefix([B, A], LIMIT, TIMEOUT),
            "delete": lambda: store.delete([B], TIMEOUT),
            "stats": lambda: store.stats(TIMEOUT).values,
        }
        right = {"put": (1,), "longest_prefix": (1, 2), "delete": (1,), "stats": (None, 1, 2)}
        for line in range(_LINES):
            store.put([(A, [value_of(A)]), (B, [value_of(B)])], TIMEOUT)
            lines, where = itertools.count(), f"{change} at line {line} of a {name}"

            def change_once(line: int = line, lines: Iterator[int] = lines) -> None:
                if next(lines) == line:
                    changes[change]()

            found = interleaved(calls[name], change_once, type(store).__module__.partition(".")[0], patience=0.05)
            if name == "get":
                assert_value(f"another value, {where}", found[1], value_of(B))
                for value in found[::2] if "shorten" not in change else ():
                    self._is_one_of(value, A, where)
            else:
                assert found in right[name], f"{where}: expected one of {right[name]}, got {found}"
            if name == "put":
                assert_value(f"the new value, {where}", store.get([C], LIMIT, TIMEOUT)[0], value_of(C))
            if next(lines) <= line:
                return

    @staticmethod
    def _is_one_of(value: Bytes | None, key: bytes, where: str) -> None:
        """Raise `AssertionError` if a value is neither absent nor that of its key."""
        if value is not None:
            assert_value(where, value, value_of(key))

    @pytest.mark.law("5.4")
    def test_a_value_over_the_limit_is_not_read_into_memory(self, store: KVStore, back_door: BackDoor) -> None:
        """Another program may have written it, of any size."""
        self.sharing.require()
        store.put([(B, [value_of(B)])], TIMEOUT)
        back_door.write(A, bytes(_LARGE))
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda: as_bytes(store.get([A, B], 2000, TIMEOUT)) == [None, value_of(B)],
            "longest_prefix": lambda: store.longest_prefix([B, A], 2000, TIMEOUT) == 1,
        }
        for name, call in calls.items():
            results = list[bool]()
            peak = count_bytes(lambda: results.append(call()))  # noqa: B023 - called at once
            assert results[0], f"{name} does not leave out a value of {_LARGE:,} bytes, over its limit of 2000"
            assert peak < _LARGE // 2, f"{name} took {peak:,} bytes of memory for a value over its limit of 2000 bytes"

    @pytest.mark.law("5.5")
    def test_other_files_at_the_location_stay(self, location: str, make_store: MakeStore) -> None:
        """Open, fill up, empty and close stores in a folder in which a user keeps other files."""
        folder = Path(location.partition(":")[2].partition("?")[0])
        store = make_store(with_parameter(location, "max_bytes=100000") if self.size_cap.reason is None else location)
        store.open(TIMEOUT)
        if not (folder.is_absolute() and folder.is_dir()):
            lacks("the location is no folder")
        files = [folder / name for name in ("notes.txt", "notes.tmp", ".notes", "notes/ab/notes.kv", "ab/notes.bin")]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"notes in {file.name}")
        for each in (store, make_store(store.location.text)):
            each.open(TIMEOUT)
            for number in range(40):
                each.put([(key_of(number), [value_of(key_of(number), 9000)])], TIMEOUT)
            each.stats(TIMEOUT)
            each.delete([key_of(number) for number in range(40)], TIMEOUT)
            each.close()
        gone = [str(file) for file in files if not file.exists() or file.read_text() != f"notes in {file.name}"]
        assert not gone, f"files that are not of the store were removed or changed: {gone}; delete only your own"

    @pytest.mark.law("5.5")
    def test_a_timeout_is_of_the_whole_call(self, store: KVStore) -> None:
        """Let 1/8 of the timeout pass with each reading of the clock: a call that goes on must not start it again."""
        keys = [key_of(number) for number in range(64)]
        store.put([(key, [value_of(key)]) for key in keys], TIMEOUT)
        calls: list[Callable[[], object]] = [
            lambda: store.put([(key, [value_of(key)]) for key in keys], TIMEOUT),
            lambda: store.get(keys, LIMIT, TIMEOUT),
            lambda: store.longest_prefix(keys, LIMIT, TIMEOUT),
            lambda: store.stats(TIMEOUT),
            lambda: store.open(TIMEOUT),
            lambda: store.delete(keys, TIMEOUT),
        ]
        for name, call in zip(("put", "get", "longest_prefix", "stats", "open", "delete"), calls, strict=True):
            readings, start = itertools.count(), time.monotonic()
            clock = (start + next(readings) * TIMEOUT / 8 for _ in itertools.repeat(None))
            try:
                with mock.patch("time.monotonic", lambda clock=clock: next(clock)):
                    call()
            except StoreError as error:
                assert error.reason is FailureReason.TIMEOUT
            else:
                passed = (next(readings) - 1) / 8
                assert passed < 2, f"{name} of 64 values returned after {passed:.0f} times its timeout"

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("5.5")
    def test_the_time_of_a_call_does_not_grow_with_the_values(self, store: KVStore) -> None:
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: store.put([(A, [value_of(A)])], TIMEOUT),
            "get": lambda: store.get([A], LIMIT, TIMEOUT),
            "longest_prefix": lambda: store.longest_prefix([A], LIMIT, TIMEOUT),
            "get of an absent value": lambda: store.get([B], LIMIT, TIMEOUT),
            "delete": lambda: store.delete([C], TIMEOUT),
            "stats": lambda: _without_time(store.stats),
        }
        assert {"open", *(name.partition(" ")[0] for name in calls)} == {*_TIMED}
        few = {name: _fastest(call) for name, call in calls.items()}
        keys = keys_of("random", length=24, count=_MANY)
        for start in range(0, _MANY, 64):
            store.put([(key, [key]) for key in keys[start : start + 64]], TIMEOUT)
        blocks = [(key_of(number), [value_of(key_of(number), LIMIT)]) for number in range(8)]
        store.put(blocks, TIMEOUT)
        large: dict[str, tuple[Callable[[], object], float]] = {
            f"put of {len(blocks)} blocks": (lambda: store.put(blocks, TIMEOUT), _BLOCK_SECONDS * len(blocks)),
            f"get of {len(blocks)} blocks": (
                lambda: store.get([key for key, _ in blocks], LIMIT, TIMEOUT),
                _BLOCK_SECONDS * len(blocks),
            ),
            f"longest_prefix of {_MANY:,} keys": (
                lambda: store.longest_prefix(keys, LIMIT, TIMEOUT),
                _KEY_SECONDS * _MANY,
            ),
        }
        times = {name: (seconds, _CALL_SECONDS) for name, seconds in few.items() if name != "stats"}
        times |= {name: (_fastest(call, 3), most) for name, (call, most) in large.items()}
        slow = [
            f"{name} {1000 * seconds:.0f} ms, of {1000 * most:.0f} allowed"
            for name, (seconds, most) in times.items()
            if seconds > most
        ]
        assert not slow, (
            f"calls take too long, at their best: {', '.join(slow)}; blocks of {LIMIT:,} bytes would be computed again "
            "in less; keep connections open, and move several values with one call of the medium"
        )
        require_idle("a store between two calls")
        store.delete([key for key, _ in blocks], TIMEOUT)
        for _ in range(3):  # other programs take time as well
            many = {name: _fastest(call) for name, call in calls.items()}
            most = dict.fromkeys(calls, 4) | {"stats": 30}  # it may check its deadline once for each of many folders
            slower = {name: many[name] / few[name] for name in calls if many[name] > most[name] * few[name]}
            if not slower:
                return
        shown = ", ".join(f"{name} {ratio:.0f} times, of {most[name]} allowed" for name, ratio in slower.items())
        raise AssertionError(f"with {_MANY:,} values more, calls take longer: {shown}")

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("5.5")
    def test_the_time_of_a_put_at_the_cap_does_not_grow_with_the_values(
        self, location: str, make_store: MakeStore
    ) -> None:
        """Put new values where there is room, and while others of many are evicted."""
        self.size_cap.require()
        capped = with_parameter(location, f"max_bytes={_MANY * 5120}")
        for _ in range(3):  # other programs take time as well
            few, many = (self._seconds_of_puts(make_store(text), at) for text, at in ((location, 64), (capped, _MANY)))
            if many <= 10 * few + 50e-6:  # memory that is new takes as much time
                return
        raise AssertionError(
            f"a put that evicts some of {_MANY:,} values takes {many / few:.0f} times as long as one with room"
        )

    @staticmethod
    def _seconds_of_puts(store: KVStore, values: int) -> float:
        """Return the mean time of puts after many, some of which may evict many values at once."""
        keys = keys_of("random", length=24, count=values + values // 4 + 512)
        batches = [[(key, [value_of(key, 4000)]) for key in keys[at : at + 8]] for at in range(0, len(keys), 8)]
        for batch in batches[:-64]:
            store.put(batch, TIMEOUT)
        start = time.perf_counter()
        for batch in batches[-64:]:
            store.put(batch, TIMEOUT)
        seconds = (time.perf_counter() - start) / (64 * 8)
        for at in range(0, len(keys), 64):
            store.delete(keys[at : at + 64], TIMEOUT)
        return seconds

    @pytest.mark.law("5.5")
    def test_nothing_is_held_of_values_that_are_gone(self, store: KVStore) -> None:
        """Open, write, look for and delete ever other values; no memory, space, descriptor or thread may remain."""

        def use(number: int) -> None:
            keys = [number.to_bytes(4, "big") + at.to_bytes(12, "big") for at in range(16)]
            store.open(TIMEOUT)
            store.longest_prefix(keys, LIMIT, TIMEOUT)
            store.put([(key, [key]) for key in keys[:8]], TIMEOUT)
            store.longest_prefix(keys, LIMIT, TIMEOUT)
            store.get(keys, LIMIT, TIMEOUT)
            store.stats(TIMEOUT)
            store.delete(keys, TIMEOUT)
            for call in _calls(0.0) if number % 2 else ():
                with contextlib.suppress(StoreError):
                    call(store)

        use(0)
        before = resource_snapshot()
        for number in range(64):
            use(number)
        after = resource_snapshot()
        for name, grown in (
            ("descriptors", len(after.descriptors) - len(before.descriptors)),
            ("mappings", len(after.mapped) - len(before.mapped)),
            ("threads", len(after.threads) - len(before.threads)),
        ):
            assert grown < 32, f"it holds {grown} {name} more after calls for values that are gone"
        require_bounded(use, 64, "batches of values that were deleted", "5.5", may_wait=True)
        with created_paths() as made:
            for number in range(_GONE):
                store.put([(key_of(number), [value_of(key_of(number), LIMIT)])], TIMEOUT)
                store.delete([key_of(number)], TIMEOUT)
        files = {path for path in (*made, *map(Path, resource_snapshot().descriptors)) if path.is_file()}
        size = sum(path.stat().st_size for path in files)
        assert size < _GONE * LIMIT // 2, f"{_GONE} values of {LIMIT:,} bytes that were deleted leave {size:,} bytes"

    @pytest.mark.law("5.4")
    def test_other_users_of_the_machine_and_readers_of_logs_see_no_values(
        self, location: str, make_store: MakeStore, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Use a location in which nothing was before, if there is another one; then its folder is there."""
        values = {key: value_of(key[::-1]) for key in keys_of("random", length=16, count=2)}
        place = self.elsewhere(location) or location
        for hidden in hidden_in_any_folder(tmp_path_factory.getbasetemp()):
            new = make_store(place)
            with hidden, kept_out_of_logs(*values, *values.values()):
                new.open(TIMEOUT)
                new.put([(key, [value]) for key, value in values.items()], TIMEOUT)
                new.get([*values], LIMIT, TIMEOUT)
                for call in (new.get, new.longest_prefix):  # which may log failures
                    with contextlib.suppress(StoreError):
                        call([*values], LIMIT, 0.0)
            new.delete([*values], TIMEOUT)
            new.close()

    @pytest.mark.law("5.5")
    def test_closing_during_calls_raises_store_errors_only(self, make_store: MakeStore) -> None:
        for number in range(5):
            calls = _calls(TIMEOUT)[1 + number % 2 :: 2]
            store, started = make_store(), threading.Barrier(1 + len(calls))

            def work(call: Callable[[KVStore], object], store: KVStore, started: threading.Barrier) -> None:
                call(store)
                started.wait(TIMEOUT)
                until = time.monotonic() + TIMEOUT
                with contextlib.suppress(StoreError):
                    while time.monotonic() < until:
                        call(store)
                    raise AssertionError("calls of a closed store raise no StoreError")

            with ThreadPoolExecutor(len(calls)) as pool:
                running = [pool.submit(work, call, store, started) for call in calls]
                started.wait(TIMEOUT)
                time.sleep(0.008 * number)
                store.close()
            for each in running:
                each.result()

    @pytest.mark.law("5.5")
    @pytest.mark.parametrize(("room", "size", "batch"), [(64, 100_000, 4), (_NUMBERED, 100, 256)])
    def test_what_was_used_stays_among_twice_as_many_values(
        self, location: str, make_store: MakeStore, room: int, size: int, batch: int
    ) -> None:
        """Put twice as many values as have room, few or more than sixteen bits count; read the first ones in between.

        Some that are put again meanwhile are as new as any.
        """
        self.size_cap.require()
        store = make_store(with_parameter(location, f"max_bytes={room * size}"))
        keys = [number.to_bytes(4, "big") * 4 for number in range(2 * room)]
        values, used, again, start = {key: value_of(key, size) for key in keys}, keys[:8], keys[8:16], time.monotonic()
        for at in range(0, len(keys), batch):
            some = keys[at : at + batch]
            assert store.put([(key, [values[key]]) for key in some], TIMEOUT) == batch
            assert as_bytes(store.get(used[: at + batch], LIMIT, TIMEOUT)) == [
                values[key] for key in used[: at + batch]
            ], f"after {at + batch:,} values, of at most {room:,}, one in use is gone"
            if at == len(keys) // 4:
                store.put([(key, [values[key]]) for key in again], TIMEOUT)
            if at == len(keys) // 2:
                assert None not in store.get(again, LIMIT, TIMEOUT), (
                    "a value that was put again is gone before older ones"
                )
            if (time.monotonic() - start) * len(keys) > 5.0 * (at + 1024):
                lacks(f"{len(keys):,} values take over 5 seconds; {at + batch:,} were written")
        assert as_bytes(store.get(some, LIMIT, TIMEOUT)) == [values[key] for key in some], "new values are gone"

    @pytest.mark.law("5.5")
    def test_a_limit_of_one_value_holds_the_last_one_and_a_smaller_limit_none(
        self, location: str, make_store: MakeStore
    ) -> None:
        self.size_cap.require()
        store = make_store(with_parameter(location, "max_bytes=150000"))
        for number in range(4):
            assert store.put([(key_of(number), [value_of(key_of(number), 100_000)])], TIMEOUT) == 1
        found = store.get([key_of(number) for number in range(4)], LIMIT, TIMEOUT)
        for number, value in enumerate(found):
            assert_value(f"value {number} of 4", value, value_of(key_of(3), 100_000) if number == 3 else None)
        smaller = make_store(with_parameter(location, "max_bytes=1"))
        smaller.open(TIMEOUT)
        assert smaller.put([(A, [value_of(A)])], TIMEOUT) == 0

    @pytest.mark.law("5.5")
    @pytest.mark.parametrize("timeout", [0.0, 0.02])
    def test_no_call_takes_longer_than_it_may(self, store: KVStore, back_door: BackDoor, timeout: float) -> None:
        for call in _calls(TIMEOUT):  # each call has its own
            call(store)
        keys = [key_of(number) for number in range(40)]
        values = [(key, [value_of(key, LIMIT)]) for key in keys]
        timed: list[Callable[[], object]] = [
            lambda: store.put(values, timeout),
            lambda: store.get(keys, LIMIT, timeout),
            lambda: store.longest_prefix(keys, LIMIT, timeout),
            lambda: store.stats(timeout),
            lambda: store.open(timeout),
            lambda: store.delete(keys, timeout),
        ]
        for each in timed:
            start = time.monotonic()
            try:
                each()
            except StoreError as error:
                assert error.reason is FailureReason.TIMEOUT
                assert_hidden(value_of(keys[0]), error)
            assert time.monotonic() - start < timeout + SLACK
        with pytest.raises(StoreError) as caught:
            store.put(_SlowValues([(key, [key]) for key in keys[:4]], timeout + 0.05), timeout)
        assert caught.value.reason is FailureReason.TIMEOUT
        store.delete(keys[:4], TIMEOUT)
        assert store.put(values[:1], TIMEOUT) == 1
        assert as_bytes(store.get(keys[:1], LIMIT, TIMEOUT)) == [value_of(keys[0], LIMIT)]
        assert all(back_door.read(key) in (None, value_of(key, LIMIT)) for key in keys)

    @pytest.mark.law("5.5")
    @pytest.mark.parametrize("reason", [FailureReason.FULL, FailureReason.READ_ONLY])
    def test_read_only_store_reports_writes_and_still_reads(
        self, store: KVStore, back_door: BackDoor, reason: FailureReason
    ) -> None:
        store.put([(A, [value_of(A)])], TIMEOUT)
        with back_door.fault(reason):
            for _ in range(2):
                with pytest.raises(StoreError) as caught:
                    store.put([(B, [value_of(B, LIMIT)])], TIMEOUT)
                assert caught.value.reason is reason
                assert as_bytes(store.get([A, B], LIMIT, TIMEOUT)) == [value_of(A), None]
        self._recovers(store, back_door)

    @pytest.mark.law("5.5")
    @pytest.mark.parametrize("reason", [FailureReason.UNREACHABLE, FailureReason.DENIED, FailureReason.TIMEOUT])
    def test_unreachable_store_reports_its_reason_in_time(
        self, store: KVStore, back_door: BackDoor, make_store: MakeStore, reason: FailureReason
    ) -> None:
        store.put([(A, [value_of(A)])], TIMEOUT)
        calls = [(call, make_store()) for call in _calls(0.4)[:-1]]  # statistics may be known without the server
        with back_door.fault(reason):
            for call, new in calls:
                for each in (store, new):
                    start = time.monotonic()
                    with pytest.raises(StoreError) as caught:
                        call(each)
                    assert caught.value.reason is reason
                    assert time.monotonic() - start < 0.4 + SLACK
                    self._hides_secrets(str(caught.value), repr(caught.value))
            if reason is FailureReason.UNREACHABLE:
                self._keeps_no_failed_puts(store)
        for each in (store, *(new for _, new in calls)):  # a new one has failed in one call
            self._recovers(each, back_door)

    @staticmethod
    def _keeps_no_failed_puts(store: KVStore) -> None:
        def use(number: int) -> None:
            with contextlib.suppress(StoreError):
                store.put([(key_of(number), [value_of(key_of(number), 10_000)])], 0.05)

        require_bounded(use, 8, "puts that failed", "5.5", may_wait=True)

    @pytest.mark.law("5.2", "5.5")
    @pytest.mark.parametrize("limit", LIMITS)
    def test_calls_of_a_process_at_a_limit_harm_no_value(self, store: KVStore, back_door: BackDoor, limit: str) -> None:
        store.put([(A, [value_of(A)])], TIMEOUT)
        for call in _calls(TIMEOUT):  # which may import modules
            call(store)
        with at_a_limit(limit):
            for call in _calls(TIMEOUT):
                with contextlib.suppress(StoreError):
                    call(store)
        assert_value(f"a value that was there at the limit of {limit}", back_door.read(A), value_of(A))
        assert_value(
            f"a value that is put at the limit of {limit}", back_door.read(B) or value_of(B, LIMIT), value_of(B, LIMIT)
        )
        self._recovers(store, back_door)

    def _recovers(self, store: KVStore, back_door: BackDoor) -> None:
        usable_again(store)
        for call in _calls(TIMEOUT)[1:]:  # an engine opens a store once
            call(store)
        assert back_door.read(B) in (None, value_of(B, LIMIT))
        assert store.put([(B, [value_of(B, LIMIT)]), (C, [value_of(C)])], TIMEOUT) == 2
        assert as_bytes(store.get([B, C], LIMIT, TIMEOUT)) == [value_of(B, LIMIT), value_of(C)]

    @pytest.mark.law("5.5")
    def test_a_new_store_holds_nothing_and_a_closed_one_neither(
        self, location: str, store: KVStore, make_store: MakeStore
    ) -> None:
        folder = Path(location.partition(":")[2].partition("?")[0])
        is_folder = folder.is_absolute() and folder.is_dir()
        other = f"{location.partition(':')[0]}:{folder}-new" if is_folder else None
        before = resource_snapshot()
        new = make_store(other or location)
        assert resource_snapshot() == before, "making a store opened something"
        assert other is None or not Path(f"{folder}-new").exists(), "making a store created its folder"
        found = new.get([A], LIMIT, TIMEOUT), new.longest_prefix([A], LIMIT, TIMEOUT), new.delete([A], TIMEOUT)
        assert found == ([None], 0, 0), f"before `open`, an empty store returned {found}"
        assert new.stats(TIMEOUT).values in (None, 0), "before `open`, the statistics of an empty store count values"
        new.open(TIMEOUT)
        new.put([(A, [value_of(A)])], TIMEOUT)
        assert as_bytes(new.get([A, B], LIMIT, TIMEOUT)) == [value_of(A), None]
        new.close()
        assert resource_snapshot() == before, "a closed store holds threads, processes or descriptors"

    def test_open_returns_one_line_and_is_repeatable(self, store: KVStore) -> None:
        assert store.location.shown, "a store keeps its location, which the engine shows"
        assert store.shared == (self.sharing.reason is None), f"its suite contradicts shared={store.shared}"
        for _ in range(2):
            line = store.open(TIMEOUT)
            assert line.strip() == line
            assert len(line.splitlines()) == 1

    def test_an_unknown_parameter_is_named(self, location: str, make_store: MakeStore) -> None:
        with pytest.raises(ConfigError, match="no_such_thing"):
            make_store(with_parameter(location, "no_such_thing=1"))

    @pytest.mark.law("5.5")
    @pytest.mark.usefixtures("store")
    def test_wrong_values_of_parameters_are_refused_by_name(self, location: str) -> None:
        """Try the parameters of the location, and those that the store reads one by one; some accept any text."""
        place = parse_location(location)
        parameters = ReadNames(place.parameters)
        self.new_store(replace(place, parameters=parameters)).close()
        for name, wrong in itertools.product(sorted(parameters.read | {*place.parameters}), _WRONG_VALUES):
            try:
                self.new_store(replace(place, parameters={**place.parameters, name: wrong})).close()
            except ConfigError as error:
                assert name in error.message, f"the error for {wrong!r} of {name} does not name it: {error.message}"
            except Exception as error:
                raise AssertionError(f"the value {wrong!r} of {name} is not refused: it raises {error!r}") from error

    @pytest.mark.law("5.5")
    def test_a_zero_byte_in_the_location_is_refused_by_documented_errors(
        self, location: str, make_store: MakeStore
    ) -> None:
        base, mark, parameters = location.partition("?")
        with contextlib.suppress(ConfigError, StoreError):
            make_store(f"{base}\0{mark}{parameters}").open(TIMEOUT)

    @pytest.mark.law("5.5")
    def test_the_cap_is_a_size_as_users_write_it(
        self, location: str, make_store: MakeStore, back_door: BackDoor
    ) -> None:
        """Put more than there is room for; if the back door can, beside a value that nearly fills the location."""
        self.size_cap.require()
        small = [(key_of(number), [value_of(key_of(number), 9000)]) for number in range(40)]
        for size, text in _SIZES.items():
            if size > _LARGE:
                back_door.write_zeros(b"large", size - 65_536)
            store = make_store(with_parameter(location, f"max_bytes={text}"))
            store.open(TIMEOUT)
            found = store.stats(TIMEOUT).limit_bytes
            assert found == size, f"with max_bytes={text}, the limit is {found}"
            for each in small:
                assert store.put([each], TIMEOUT) == 1, f"with max_bytes={text}, a value has no room"
            held = max(store.stats(TIMEOUT).bytes or 0, back_door.size() if back_door.counts else 0)
            assert held <= size, f"with max_bytes={text}, it holds {held:,} bytes"
            store.delete([b"large", *(key for key, _ in small)], TIMEOUT)
        for wrong in ("much", "-1", ""):
            with pytest.raises(ConfigError, match="max_bytes"):
                make_store(with_parameter(location, f"max_bytes={wrong}"))

    def test_secrets_are_never_shown(
        self, location: str, store: KVStore, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        if not self.secrets:
            lacks("the location holds no secret")
        assert all(secret in location for secret in self.secrets)
        with caplog.at_level(logging.DEBUG):
            for call in _calls(0.0):  # which may time out
                with contextlib.suppress(StoreError):
                    call(store)
            shown = store.open(TIMEOUT), str(store), repr(store), repr(store.location), store.location.shown
            with pytest.raises(ConfigError) as caught:
                self.new_store(parse_location(with_parameter(location, "no_such_thing=1")))
            store.close()
            with pytest.raises(StoreError) as refused:
                store.open(TIMEOUT)
        self._hides_secrets(*shown)
        self._hides_secrets(str(caught.value), str(refused.value))
        self._hides_secrets(caplog.text, *capfd.readouterr())

    def _hides_secrets(self, *texts: str) -> None:
        assert [text for text in texts for secret in self.secrets if secret in text] == []
