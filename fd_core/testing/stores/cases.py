"""Axes of KV stores: keys, values, batches, history, callers and time; each case against a dict and the back door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fd_core.kv.stores.contract import MAX_KEY_BYTES, Bytes, FailureReason, KVStore, StoreError
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import clocks_ahead
from fd_core.testing.stores.values import (
    BUFFERS,
    CONTENTS,
    KEYS,
    assert_hidden,
    assert_value,
    keys_of,
    parts_of,
    value_of,
)

if TYPE_CHECKING:
    from fd_core.testing.stores.suite import BackDoor

AXES: Final = (
    Axis("keys", tuple(KEYS), ("KVStore.put.values", "KVStore.delete.keys")),
    Axis("key_bytes", (16, 1, 8, 17, MAX_KEY_BYTES), ("KVStore.longest_prefix.keys",)),
    Axis("count", (3, 0, 1, 9, 65, 129), ("KVStore.get.keys",), rare=({"count": 1025},)),
    Axis(
        "value_bytes",
        (1000, 0, 1, 65, 4097, 65_537, 737_360, 1_048_577),
        rare=(
            {"value_bytes": 4_194_305},
            {"value_bytes": 16_777_217, "count": 2},
            {"value_bytes": 50_331_649, "count": 1},
        ),
    ),
    Axis("sizes", ("equal", "falling", "every second empty")),
    Axis("content", CONTENTS),
    Axis("parts", (2, 1, 1025, 3000)),
    Axis("buffer", tuple(BUFFERS)),
    Axis("before", ("absent", "shorter", "as long", "longer", "deleted", "timed out", "written from outside")),
    Axis(
        "limit",
        ("ample", "exact", "one less", "zero", "2^31", "2^32"),
        ("KVStore.get.limit", "KVStore.longest_prefix.limit"),
    ),
    Axis("order", ("as written", "reversed", "repeated", "with holes"), rare=({"order": "33000 keys"},)),
    Axis("writer", ("the store", "another object", "the back door")),
    Axis("reader", ("the store", "another object", "reopened")),
    Axis("thread", (False, True)),
    Axis(
        "timeout",
        (10.0, 0.9, 3600.0),
        tuple(f"KVStore.{name}.timeout" for name in ("open", "get", "put", "longest_prefix", "delete", "stats")),
    ),
    Axis("others", (0, 1, 100)),
    Axis("elsewhere", (False, True), ("KVStore.location",)),
    Axis("clock", (0, -3600, 3600)),
    Axis("removed", ("all", "none", "every second", "from outside")),
    Axis("opened", ("at first", "again", "by another object")),
    Axis("lists", ("new", "reused")),
)
"""Axes of one batch of values that is written, read and deleted."""
EXCUSED: Final[Mapping[str, str]] = {}
"""Arguments of the contract that no axis varies, with the reason."""

_MAX_BYTES: Final = 6e6
"""Bytes of the values of a case."""
_LIMITS: Final = {"ample": 1 << 28, "zero": 0, "2^31": 1 << 31, "2^32": 1 << 32}


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A store, other objects of its location, and a way around it."""

    store: KVStore
    make: Callable[..., KVStore]
    """Makes another store of the location, or of the location that is passed; the caller closes none of them."""
    elsewhere: str | None
    """Another location, whose values are separate; None if there is none."""
    door: BackDoor


def supported(place: StorePlace, shares: bool, persists: bool) -> Callable[[Axis, Any], bool]:
    """Return the test of `KitCase.with_only` for a store with these abilities."""

    def can(axis: Axis, value: Any) -> bool:
        if value == "another object":
            return shares
        if axis.name == "value_bytes":
            return not place.store.envelope.exceeded({"value_bytes": value})
        return persists if value == "reopened" else axis.name != "elsewhere" or place.elsewhere is not None

    return can


def allowed(case: Case) -> bool:
    """Return True if there are as many keys of the kind, and the values are not too large together."""
    count, size = int_of(case, "count"), int_of(case, "value_bytes")
    make_at_most = KEYS[str(case["keys"])][1](int_of(case, "key_bytes"))
    copies, fast = int_of(case, "parts") * count, case["timeout"] == 0.9  # also on a slow medium
    most = (_MAX_BYTES, 10_000) if not fast else (_MAX_BYTES / 100, 100)
    return count < make_at_most and count * size <= most[0] and copies <= most[1]


def check_store(place: StorePlace, case: Case) -> None:
    """Write, read and delete a batch of values, and compare each result. Raises `AssertionError`."""
    with ThreadPoolExecutor(1) as pool:
        _Batch(place, case, pool).check()


class _Batch:
    """The values of a case, and calls in the thread of the case."""

    def __init__(self, place: StorePlace, case: Case, pool: ThreadPoolExecutor) -> None:
        self.place, self.case = place, case
        self.timeout = float(case["timeout"] or 0)
        *self.keys, self.absent = keys_of(str(case["keys"]), int_of(case, "key_bytes"), int_of(case, "count") + 1)
        self.values = {key: value_of(self._kind, at, self._length(at)) for at, key in enumerate(self.keys)}
        self.others = {
            b"another key %5d" % at: value_of("random", -at, 50 + at % 7) for at in range(int_of(case, "others"))
        }
        self._pool = pool
        self._list: list[Any] = []

    @property
    def _kind(self) -> str:
        return str(self.case["content"])

    def _length(self, at: int) -> int:
        size = int_of(self.case, "value_bytes")
        match self.case["sizes"]:
            case "falling":
                return max(0, size - 37 * at)
            case "every second empty":
                return size * (1 - at % 2)
        return size

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.case["lists"] == "reused" and arguments and isinstance(arguments[0], list):
            self._list[:], arguments = arguments[0], (self._list, *arguments[1:])
        return self._pool.submit(call, *arguments).result() if self.case["thread"] else call(*arguments)

    def put(self, store: KVStore, values: Mapping[bytes, bytes], count: int = 1) -> None:
        """Put values in `count` parts."""
        buffer = str(self.case["buffer"])
        written = [(key, parts_of(value, count, buffer)) for key, value in values.items()]
        found = self.run(store.put, written, self.timeout)
        assert found == len(values), f"put of {len(values)} values returned {found}"

    def check(self) -> None:
        place, every = self.place, [*self.keys, self.absent, *self.others]
        self.run(place.store.delete, every, self.timeout)
        self.put(place.store, self.others)
        with self._values_elsewhere(), self._writer() as writer:
            self._earlier(writer)
            if writer is None:
                for key, value in self.values.items():
                    place.door.write(key, value)
            else:
                self.put(writer, self.values, int_of(self.case, "parts"))
        for at, (key, value) in enumerate(self.values.items()):
            assert_value(f"value {at} of {len(self.values)} behind the store", place.door.read(key), value)
        with self._reader() as reader:
            self._read(reader)
            self._remove(reader)
        if reader is not place.store:
            self.run(reader.close)
        found = self.run(place.store.get, [self.absent, *self.others], 1 << 28, self.timeout)
        assert [*map(_bytes, found)] == [None, *self.others.values()], "another object or batch changed other values"
        for at, (key, other) in enumerate(self.others.items()):
            if at % 29 == 0 or at == len(self.others) - 1:
                assert_value(f"value {at} that was there before", place.door.read(key), other)
        self.run(place.store.delete, every, self.timeout)

    @contextmanager
    def _values_elsewhere(self) -> Iterator[None]:
        """Keep other values under the same keys at another location."""
        if not self.case["elsewhere"]:
            yield
            return
        store = self.place.make(self.place.elsewhere)
        others = {key: value_of("random", at + 7_000, 90) for at, key in enumerate(self.keys)}
        self.put(store, others)
        parent = Path(str(self.place.elsewhere).partition(":")[2]).parent
        assert not parent.is_dir() or any(parent.iterdir()), f"{self.place.elsewhere} is not where its values are"
        yield
        for key, found in zip(others, self.run(store.get, [*others], 1 << 20, self.timeout), strict=True):
            assert_value("value of another location", found, others[key])
        self.run(store.delete, [*others], self.timeout)

    @contextmanager
    def _writer(self) -> Iterator[KVStore | None]:
        """Yield the store that writes, None for the back door; it is closed afterwards if the case reopens it."""
        name = self.case["writer"]
        if name == "the back door":
            yield None
            return
        reopened = self.case["reader"] == "reopened"
        writer = self.place.make() if reopened or name == "another object" else self.place.store
        yield writer
        if reopened:
            self.run(writer.close)

    @contextmanager
    def _reader(self) -> Iterator[KVStore]:
        reader = self.place.store if self.case["reader"] == "the store" else self.place.make()
        shift = int_of(self.case, "clock")
        with clocks_ahead(reader, shift, uptime=max(0, shift)):
            if self.case["opened"] != "at first":
                opened = self.place.make() if self.case["opened"] == "by another object" else reader
                self.run(opened.open, self.timeout)
                if opened is not reader:  # one store ends while another one is in use
                    self.run(opened.close)
            yield reader

    def _earlier(self, writer: KVStore | None) -> None:
        """Leave what the case names under the keys."""
        before, longest = self.case["before"], max(map(len, self.values.values()), default=0)
        if before == "absent":
            return
        length = {"shorter": longest // 2, "longer": 2 * longest + 1}.get(str(before), longest)
        length = min(length, self.place.store.envelope.value_bytes or length)
        values = {key: value_of(self._kind, at + 9_000, length) for at, key in enumerate(self.keys)}
        if before == "written from outside" and writer is not None:
            self.put(writer, self.values)
        if writer is None or before == "written from outside":
            for key, value in values.items():
                self.place.door.write(key, value)
        elif before == "timed out":
            self._let_time_out(values, writer.put, [(key, [value]) for key, value in values.items()])
            for store in (writer, self.place.store):
                self._let_time_out(values, store.get, self.keys, 1 << 28)
                self._let_time_out(values, store.longest_prefix, self.keys, 1 << 28)
                self._let_time_out(values, store.delete, self.keys)
        else:
            self.put(writer, values)
            for store in (writer, self.place.store):
                self.run(store.get, self.keys, 1 << 28, self.timeout)
                self.run(store.longest_prefix, self.keys, 1 << 28, self.timeout)
            if before == "deleted":
                found = self.run(writer.delete, self.keys, self.timeout)
                assert found == len(values), f"delete of {len(values)} values returned {found}"

    def _let_time_out(self, values: Mapping[bytes, bytes], call: Callable[..., Any], *arguments: Any) -> None:
        """Make a call that has no time, and may end nevertheless; its error does not show the values."""
        try:
            self.run(call, *arguments, 0.0)
        except StoreError as error:
            assert error.reason is FailureReason.TIMEOUT, f"timeout 0 was reported as {error.reason}"
            for value in values.values():
                assert_hidden(value, error)

    def _read(self, reader: KVStore) -> None:
        """Read with one limit after another: what is too long for the one is not for the next."""
        longest = max(map(len, self.values.values()), default=0)
        named = {"exact": longest, "one less": max(0, longest - 1)}
        limit = (_LIMITS | named)[str(self.case["limit"])]
        for each in (limit, _LIMITS["ample"], limit) if limit <= longest else (limit,):
            self._read_within(reader, each)
        self._check_stats(reader, {**self.values, **self.others})

    def _read_within(self, reader: KVStore, limit: int) -> None:
        asked = self._asked()
        expected = [self._within(key, limit) for key in asked]
        found = self.run(reader.get, asked, limit, self.timeout)
        assert len(found) == len(asked), f"get of {len(asked)} keys returned {len(found)} values"
        for at, (value, right) in enumerate(zip(found, expected, strict=True)):
            assert_value(f"value {at} of a get of {len(asked)} with limit {limit:,}", value, right)
        prefix = next((at for at, value in enumerate(expected) if value is None), len(asked))
        counted = self.run(reader.longest_prefix, asked, limit, self.timeout)
        assert counted == prefix, f"longest_prefix of {len(asked)} keys: expected {prefix}, got {counted}"

    def _within(self, key: bytes, limit: int) -> bytes | None:
        value = self.values.get(key)
        return value if value is not None and len(value) <= limit else None

    def _asked(self) -> Sequence[bytes]:
        match self.case["order"]:
            case "reversed":
                return self.keys[::-1]
            case "repeated":
                return [*self.keys, *self.keys[:3], *self.keys]
            case "with holes":
                return [*self.keys[: len(self.keys) // 2], self.absent, *self.keys, self.absent]
            case "33000 keys":
                return (self.keys * 33_000)[:33_000]
        return self.keys

    def _check_stats(self, store: KVStore, there: Mapping[bytes, Bytes]) -> None:
        stats = self.run(store.stats, self.timeout)
        compressible = {} if self._kind == "random" else self.values
        size = sum(len(value) for key, value in there.items() if key not in compressible)
        assert stats.values in (None, len(there)), f"stats: expected {len(there)} values, got {stats.values}"
        assert stats.bytes is None or stats.bytes >= size, f"stats: expected {size:,} bytes or more, got {stats.bytes}"

    def _remove(self, store: KVStore) -> None:
        gone = {"all": self.keys, "none": []}.get(str(self.case["removed"]), self.keys[::2])
        if self.case["removed"] == "from outside":
            for key in gone:
                self.place.door.delete(key)
        else:
            found = self.run(store.delete, [*gone, self.absent, *gone[:2]], self.timeout)
            assert found == len(gone), f"delete of {len(gone)} values, one absent and two repeated, returned {found}"
        left = {key: value for key, value in self.values.items() if key not in set(gone)}
        for at, key in enumerate(self.keys):
            assert_value(f"value {at} after a delete, behind the store", self.place.door.read(key), left.get(key))
        for at, value in enumerate(self.run(store.get, self.keys, 1 << 28, self.timeout)):
            assert_value(f"value {at} after a delete", value, left.get(self.keys[at]))
        first = next((at for at, key in enumerate(self.keys) if key not in left), len(self.keys))
        counted = self.run(store.longest_prefix, self.keys, 1 << 28, self.timeout)
        assert counted == first, f"longest_prefix after a delete: expected {first}, got {counted}"
        again = self.run(store.delete, [*gone, self.absent, *gone[:2]], self.timeout)
        assert again == 0, f"delete of values that are gone returned {again}"
        self._check_stats(store, {**left, **self.others})


def _bytes(value: Bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


STORES: Final[Part[StorePlace]] = Part("store", AXES, check_store, allowed)
