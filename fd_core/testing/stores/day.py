"""An ordinary day of engines with one KV store: blocks of conversations are put, looked for, read and damaged."""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
import tempfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fd_core.kv.stores.contract import Bytes, FailureReason, KVStore, StoreError
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.testing.hooks.purity import clocks_ahead
from fd_core.testing.kit.days.account import Day, DayAccount, account_of, require_as_good
from fd_core.testing.kit.days.sleeping import TimedCalls
from fd_core.testing.kit.days.work import HOUR, talks
from fd_core.testing.kit.law import require
from fd_core.testing.stores.values import (
    BUFFERS,
    HEADER_BYTES,
    assert_hidden,
    assert_value,
    changed,
    of_one_checksum,
    parts_of,
    sealed,
)

if TYPE_CHECKING:
    from fd_core.testing.stores.suite import BackDoor

_TIMEOUTS: Final = (5.0, 10.0, 30.0)
_SHORT: Final = 0.9
"""Seconds of a timeout that a busy machine may exceed at times, but not mostly."""
_PATIENCE: Final = 5.0
"""Seconds that a reader waits for a writer, if it does."""
_SECONDS_PER_TOKEN: Final = 0.03
_OPENED: Final = 256
"""Bytes that a store may read of each value when it is opened, such as those of an index."""

_COUNTS: Final = Path("/proc/self/io")


class StoreDay(NamedTuple):
    """Settings that the engines of a day have in common."""

    talks: int
    longest: int
    """Tokens of a prompt and its answer."""
    lengths: tuple[int, ...]
    """Bytes of a block of each model."""
    share: float | None
    """Part of the bytes of all blocks that the store may hold; None without a limit."""
    block: int = 32
    """Tokens of a block."""
    batch: int = 16
    """Blocks of a call."""
    zeros: int = 0
    """Bytes of another program's values, which are there in the morning."""


_BUFFERS: Final = 1 << 18
"""Bytes that buffers and connections to a medium may grow by in an afternoon."""
SERVERS: Final = {
    "small blocks": StoreDay(16, 32_768, (500, 900), share=None),
    "a store at its limit": StoreDay(10, 8192, (700, 3000), share=0.15),
    "large blocks": StoreDay(7, 16_384, (737_280, 5_242_880), share=0.4, block=1024, batch=2, zeros=9 << 30),
}


class Place(NamedTuple):
    """A store under test."""

    make: Callable[[int | None], KVStore]
    """Makes a store of the location with a limit in bytes."""
    engines: int
    """Stores that share values."""
    door: BackDoor | None
    capped: bool
    persists: bool
    zeros: bool = False
    """The door can write large values that take no space."""
    restart: Callable[[Sequence[KVStore], Sequence[bytes]], None] | None = None
    """Restarts the server of the values, which has these keys."""
    survives: bool = True
    """Values survive a restart of the server."""


class _StoredTurn(NamedTuple):
    at: float
    habit: str
    engine: int
    keys: tuple[bytes, ...]
    """Of the prompt and of the answer."""
    asked: int
    """Blocks of the prompt."""
    length: int
    scored: bool
    """All blocks of the prompt are computed, for their log probabilities."""


@cache
def _turns(server: StoreDay) -> list[_StoredTurn]:
    """Return the requests of a day in the order of their arrival."""
    found = list[_StoredTurn]()
    for number, talk in enumerate(talks(server.talks, longest=server.longest)):
        now, keys, seed = 0.0, list[bytes](), talk.turns[0].spec
        salt = f"{seed.tenant}{seed.cache_salt}{seed.adapter}{number % len(server.lengths)}".encode()
        for turn in talk.turns:
            now += turn.pause
            streamed = turn.answer[: turn.leaves_after]
            text, asked = (*turn.spec.prompt, *streamed), len(turn.spec.prompt) // server.block
            for at in range(len(keys), len(text) // server.block):
                tokens = repr(text[at * server.block : (at + 1) * server.block]).encode()
                keys.append(hashlib.blake2b(tokens, digest_size=16, key=keys[-1] if keys else salt[:64]).digest())
            length = server.lengths[number % len(server.lengths)]
            found.append(_StoredTurn(now, talk.habit, number, tuple(keys), asked, length, scored=len(found) % 7 == 3))
            del keys[asked:]  # an answer that was cut is not in the next prompt
            now += len(streamed) * _SECONDS_PER_TOKEN
    return sorted(found, key=lambda turn: turn.at)


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written, in files and sockets."""
    return sum(int(line.split()[1]) for line in _COUNTS.read_text().splitlines()[:2]) if _COUNTS.exists() else 0


class _Meanwhile(Sequence[tuple[bytes, Sequence[Bytes]]]):
    """Values for a put during which calls of other threads are made and end."""

    def __init__(
        self, values: Sequence[tuple[bytes, Sequence[Bytes]]], calls: Mapping[str, Callable[[], Future[object]]]
    ) -> None:
        self._values, self._calls, self.made, self.late = values, calls, dict[str, Future[object]](), ""

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        for who in self._calls if index == len(self._values) // 2 and not self.made else ():
            self.made[who] = self._calls[who]()
            try:
                self.made[who].exception(_PATIENCE)
            except TimeoutError:
                self.late = who
                break
        return self._values[index]


@dataclass
class _Engine:
    """A store object with a thread that reads and one that writes, and the blocks of a device."""

    store: KVStore
    blocks: int
    reader: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    writer: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    device: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def keep(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.device[key] = None
            self.device.move_to_end(key)
        while len(self.device) > self.blocks:
            self.device.popitem(last=False)

    def close(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()
        self.store.close()


class _DayOfValues:
    """The day: what was put, what must still be there, and what the calls cost."""

    def __init__(self, place: Place, server: StoreDay, limit: int | None) -> None:
        self.place, self.server, self.limit, self.engines = place, server, limit, list[_Engine]()
        self.held: dict[bytes, tuple[int | bytes, ...]] = {}
        """Versions of a value, or damaged ones, one of which may be there."""
        self.used: dict[bytes, int] = {}
        """Bytes that had been used when a value was, for those that may not be missing unless they were evicted."""
        self.lengths: dict[bytes, int] = {}
        self.passed, self.hour, self.timed = 0, 0, TimedCalls()
        self.short, self.failed = 0, 0
        self.moved: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.asked: dict[str, int] = defaultdict(int)
        self.computed: dict[str, int] = defaultdict(int)
        self.held_most, self.draw, self.keys = 0, random.Random(3), list[bytes]()  # noqa: S311
        self.in_hand: deque[tuple[Bytes, bytes]] = deque()
        """Values that are copied to the device later, and digests of them."""

    # Calls

    def call(self, engine: _Engine, name: str, *arguments: Any, values: int | None = 0) -> Any:
        """Make a call in the thread of its kind; some have a short timeout, or none."""
        chance = self.draw.randrange(40)
        timeout = {0: 0.0, 1: _SHORT, 2: _SHORT, 3: _SHORT}.get(chance, _TIMEOUTS[chance % len(_TIMEOUTS)])
        self.short += timeout == _SHORT
        pool = engine.writer if name in ("put", "delete") else engine.reader
        before = _bytes_moved()
        try:
            return self.timed.run(pool, getattr(engine.store, name), *arguments, timeout)
        except StoreError as error:
            require(
                timeout < 1.0 and error.reason is FailureReason.TIMEOUT,
                "5.5",
                f"{name} with a timeout of {timeout} s: {error.reason}: {error}",
            )
            if name == "put":
                assert_hidden(bytes(arguments[0][0][1][0]), error)
            self.failed += timeout > 0
            return None
        finally:
            if values is not None:
                self.moved[name, self.hour].append(max(0, _bytes_moved() - before - values))

    # What is there

    def expected(self, key: bytes) -> list[bytes]:
        """Return the values one of which may be there."""
        versions = self.held.get(key, ())
        return [each if isinstance(each, bytes) else self.whole(key, each) for each in versions]

    def whole(self, key: bytes, version: int) -> bytes:
        return b"".join(sealed(key, version, self.lengths[key]))

    def is_sure(self, key: bytes) -> bool:
        """Return True if a value has to be there."""
        if key not in self.used:
            return False
        return self.limit is None or self.passed - self.used[key] <= self.limit * 3 / 4

    def fits(self, key: bytes, limit: int) -> list[bool]:
        """Return for each value that may be there whether it has at most `limit` bytes."""
        whole = self.lengths[key] + HEADER_BYTES
        return [(len(each) if isinstance(each, bytes) else whole) <= limit for each in self.held.get(key, ())]

    def use(self, key: bytes, times: int = 1) -> None:
        self.passed += times * (-(-(self.lengths[key] + HEADER_BYTES) // 4096) * 4096 + 1024)
        self.used[key] = self.passed

    def check(self, what: str, key: bytes, value: Bytes | None, limit: int) -> bool:
        """Compare a value; return True if it is the block of its key."""
        fits = self.fits(key, limit)
        if value is None:
            ago = self.passed - self.used.get(key, 0)
            least = f"{what}: a value is gone that was used {ago:,} bytes ago, of {self.limit or 0:,}"
            require(not (self.is_sure(key) and all(fits)), "5.2", least)
            if all(fits):
                self.gone([key])
            return False
        rights = dict(zip(self.expected(key), self.held.get(key, ()), strict=True))
        found = bytes(value)
        assert_value(what, value, found if found in rights and len(found) <= limit else next(reversed(rights), None))
        self.held[key] = (rights[found],)
        self.use(key)
        self.in_hand.append((value, hashlib.blake2b(found).digest()))
        self.copy(all_but=2 * self.server.batch)
        return isinstance(rights[found], int)

    def copy(self, all_but: int) -> None:
        """Copy values in hand to the device: they are what they were when they were read."""
        while len(self.in_hand) > all_but:
            value, digest = self.in_hand.popleft()
            require(hashlib.blake2b(value).digest() == digest, "5.2", "a value in hand changes")

    def gone(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)
            self.used.pop(key, None)

    # Users

    def turn(self, engine: _Engine, turn: _StoredTurn) -> None:
        """Serve a request: blocks that neither the device nor the store has are computed, and put."""
        limit, prompt = turn.length + HEADER_BYTES, turn.keys[: turn.asked]
        for key in turn.keys:
            self.lengths.setdefault(key, turn.length)
        have = next((at for at, key in enumerate(prompt) if key not in engine.device), len(prompt))
        wanted = prompt[have:]
        if turn.scored:
            have = 0
        elif wanted:
            have += self.load(engine, wanted, limit)
        self.asked[turn.habit] += len(prompt)
        self.computed[turn.habit] += len(prompt) - have
        engine.keep(turn.keys)
        new = [*turn.keys[have:]]
        for at in range(0, len(new), self.server.batch):
            self.put(engine, new[at : at + self.server.batch], prompt[:have][-4:], limit)

    def load(self, engine: _Engine, wanted: Sequence[bytes], limit: int) -> int:
        """Return how many leading blocks the store has."""
        found = self.call(engine, "longest_prefix", wanted, limit)
        if found is None:  # it may be there nevertheless
            found = min(len(wanted), self.server.batch)
        else:
            self.compare(wanted, found, limit)
        for start in range(0, found, self.server.batch):
            keys = list(wanted[start : start + self.server.batch])  # also of blocks after those that were found
            self.keys[:] = keys
            values = self.call(
                engine, "get", self.keys, limit, values=sum(self.lengths[key] + HEADER_BYTES for key in keys)
            )
            if values is None:
                return start
            require(len(values) == len(keys), "5.2", f"get of {len(keys)} keys returned {len(values)} values")
            got = enumerate(zip(keys, values, strict=True))
            right = [self.check(f"value {at} of a get", key, value, limit) for at, (key, value) in got]
            if not all(right):
                at = right.index(False)
                if values[at] is not None:
                    self.delete(engine, keys[at : at + 1])
                return start + at
        return found

    def compare(self, wanted: Sequence[bytes], found: int, limit: int) -> None:
        """Compare a number of leading keys with those that have to be there and those that may be."""
        sure = (self.is_sure(key) and all(self.fits(key, limit)) for key in wanted)
        low, high = [*sure, False].index(False), [*(any(self.fits(key, limit)) for key in wanted), False].index(False)
        require(low <= found <= high, "5.2", f"longest_prefix: expected {low} to {high}, got {found}")
        if found < len(wanted) and all(self.fits(wanted[found], limit)):
            self.gone(wanted[found : found + 1])

    def delete(self, engine: _Engine, keys: list[bytes]) -> bool:
        """Delete values; return False if there was no time."""
        least, most = sum(map(self.is_sure, set(keys))), len({*keys} & {*self.held})
        found = self.call(engine, "delete", keys)
        if found is None:
            for key in keys:
                self.used.pop(key, None)
            return False
        require(least <= found <= most, "5.2", f"delete: expected {least} to {most}, got {found}")
        self.gone(keys)
        return True

    def put(self, engine: _Engine, keys: Sequence[bytes], others: Sequence[bytes], limit: int) -> None:
        """Put blocks; during every fourth call, the other thread of the engine reads, and other engines write."""
        version, buffers = self.timed.count + 1, tuple(BUFFERS)
        kind = buffers[self.timed.count % len(buffers)]
        values: list[tuple[bytes, Sequence[Bytes]]] = []
        for key in keys:
            header, payload = sealed(key, version, self.lengths[key])
            small = len(payload) < 1 << 16
            parts = parts_of(header + payload, 1 + self.timed.count % 3, kind) if small else (header, payload)
            values.append((key, parts))
        size = sum(self.lengths[key] + HEADER_BYTES for key in keys)
        for key in keys:
            self.use(key, 2)
        stamps = {key: self.used.pop(key) for key in keys}
        given: Sequence[tuple[bytes, Sequence[Bytes]]] = values
        calls = {"a reader": partial(self._read, engine, others, limit)}
        calls |= {f"engine {at}": partial(self._write, each, limit) for at, each in enumerate(self.engines)
                  if each is not engine}  # fmt: skip
        meanwhile = _Meanwhile(values, calls)
        if self.timed.count % 4 == 0 and others:
            given = meanwhile
        self.held.update((key, (*self.held.get(key, ()), version)) for key in keys)
        stored = self.call(engine, "put", given, values=None if given is meanwhile else size)
        require(not meanwhile.late, "5.5", f"{meanwhile.late} waits until the values of a put are written")
        for made in meanwhile.made.values():
            made.result()
        if stored is None:
            return
        require(stored == len(keys), "5.2", f"put of {len(keys)} values returned {stored}")
        for key in keys:
            self.held[key], self.used[key] = (version,), stamps[key]

    def _read(self, engine: _Engine, keys: Sequence[bytes], limit: int) -> Future[object]:
        def read() -> None:
            found = engine.store.longest_prefix(keys, limit, 2 * _PATIENCE)
            require(0 <= found <= len(keys), "5.2", f"longest_prefix of {len(keys)} keys returned {found}")
            for key, value in zip(keys, engine.store.get(keys, limit, 2 * _PATIENCE), strict=True):
                self.check("a value during a put", key, value, limit)

        return engine.reader.submit(read)

    def _write(self, engine: _Engine, limit: int) -> Future[object]:
        """Store a block and delete it."""
        key = hashlib.blake2b(b"%d" % self.timed.count, digest_size=16).digest()
        self.lengths[key] = limit - HEADER_BYTES
        self.use(key, 2)
        del self.used[key]

        def write() -> None:
            value = sealed(key, 0, self.lengths.pop(key))
            for what, count in (
                ("put", engine.store.put([(key, value)], 2 * _PATIENCE)),
                ("delete", engine.store.delete([key], 2 * _PATIENCE)),
            ):
                require(count == 1, "5.2", f"{what} of a value during a put of another engine returned {count}")

        return engine.writer.submit(write)

    # Each hour

    def end_of_hour(self, engines: Sequence[_Engine], soon: Sequence[bytes], draw: random.Random) -> None:
        self.timed.note_resources()
        for engine in engines:
            self.statistics(engine)
        self.accidents(soon, draw)
        if self.place.restart is not None and self.hour == 4:
            self.place.restart([engine.store for engine in engines], [*self.held])
            if not self.place.survives:
                self.gone([*self.held])

    def restart(self, engines: list[_Engine], new: _Engine) -> None:
        """Replace an engine; its store raises errors from then on."""
        number = self.hour % len(engines)
        old, engines[number] = engines[number], new
        self.end(old)
        before = _bytes_moved()
        new.store.open(_TIMEOUTS[0])
        moved, most = _bytes_moved() - before, _OPENED * (256 + len(self.held))
        require(moved <= most, "5.5", f"open moved {moved:,} bytes, expected at most {most:,}: leave values unread")

    def end(self, old: _Engine) -> None:
        """Close an engine, whose store raises errors from then on."""
        old.close()
        for call in (old.store.open, partial(old.store.get, [b"key"], 1), old.store.stats):
            try:
                call(_TIMEOUTS[0])
            except StoreError:
                continue
            require(False, "5.5", "a closed store raises no error")

    def emptied(self, engine: _Engine) -> None:
        """Fail unless a location of which everything was deleted is about empty."""
        while (stats := self.call(engine, "stats")) is None:
            pass
        door = self.place.door
        size = max(stats.bytes or 0, door.size() if door is not None and door.counts else 0)
        most = self.held_most // 2 + (4 << 20)
        require(stats.values in (None, 0), "5.5", f"when all values are deleted, there are {stats.values}")
        require(size <= most, "5.5", f"when all values are deleted, {size:,} bytes are there")

    def accidents(self, soon: Sequence[bytes], draw: random.Random) -> None:
        """Remove and damage values that are read soon, as another program or a power cut does."""
        door, there = self.place.door, [key for key in soon if self.is_sure(key)]
        if door is None:
            return
        for at, key in enumerate(draw.sample(there, min(12, len(there)))):
            value = self.expected(key)[-1]
            assert_value("a value behind the store", door.read(key), value)
            if at % 6 == 0:
                door.delete(key)
                self.gone([key])
                continue
            wrongs = (
                value[: len(value) // 2],
                changed(value, len(value) // 2, 1),
                value + b"?",
                value[: len(value) - 9] + bytes(9),
                of_one_checksum(value, 77) if len(value) < 1 << 16 else b"",
            )
            self.held[key] = (wrongs[at % 6 - 1],)
            door.write(key, wrongs[at % 6 - 1])

    def statistics(self, engine: _Engine) -> None:
        """Compare statistics, and what is at the location, with the limit."""
        stats = self.call(engine, "stats")
        door = self.place.door
        size = door.size() if door is not None and door.counts else 0
        if stats is not None:
            exact = self.limit is None and len(self.used) == len(self.held)
            require(
                stats.values is None or stats.values == len(self.held) or not exact,
                "5.5",
                f"statistics: expected {len(self.held):,} values, got {stats.values}",
            )
            if self.limit is not None:
                require(stats.limit_bytes == self.limit, "5.5", f"expected the limit {self.limit:,}, got {stats}")
            size = max(size, stats.bytes or 0)
        self.held_most = max(self.held_most, size)
        require(
            self.limit is None or size <= self.limit,
            "5.5",
            f"the store holds {size:,} bytes, its limit is {self.limit or 0:,}",
        )

    def figures(self) -> dict[str, float]:
        """Return what users would notice."""
        allowed = max(self.timed.count // 50, 1)
        require(self.failed <= self.short // 2 + allowed, "5.5", f"{self.failed} calls of {_SHORT} s took longer")
        found = {
            f"blocks of {habit} that were computed": 16 + 0.01 * count + self.computed[habit]
            for habit, count in self.asked.items()
        }
        found |= self.timed.figures()
        morning, evening = range(1, 3), range(5, 8)
        for name in {name for name, _ in self.moved}:
            few, many = ([each for at in hours for each in self.moved[name, at]] for hours in (morning, evening))
            if few and many and _COUNTS.exists():
                most = 4 * max(few) + 64 * statistics.median(many) + 8192
                require(
                    max(many) <= most,
                    "5.5",
                    f"a {name} in the evening moved {max(many):,} bytes beside its values, in the morning at most "
                    f"{max(few):,}",
                )
        return found


def day_of(place: Place, server: StoreDay) -> Day:
    """Return a day of some engines with a store."""
    return partial(_live, place, server)


def _live(place: Place, server: StoreDay) -> Generator[None, None, Mapping[str, float]]:
    turns, draw = _turns(server), random.Random(1)  # noqa: S311
    sizes = {key: turn.length for turn in turns for key in turn.keys}
    blocks, limit, zeros = len(sizes) // 50, None, dict[bytes, int]()
    if server.share is not None and place.capped:
        limit = int(server.share * sum(size + 4096 for size in sizes.values())) >> 10 << 10
        if server.zeros and place.door is not None and place.zeros:
            zeros = {turns[-1].keys[0][:1] + b"zeros %d" % at: 1 << 30 for at in range(server.zeros >> 30)}
            limit += sum(zeros.values())
    del sizes
    history, hours = _DayOfValues(place, server, limit), itertools.count(1)
    with ExitStack() as stack:
        stack.enter_context(history.timed.counted())
        engines = history.engines = [_Engine(place.make(limit), blocks) for _ in range(place.engines)]
        stack.callback(lambda: [*map(_Engine.close, engines)])
        for key, size in zeros.items():
            assert place.door is not None
            place.door.write_zeros(key, size)
        for engine, timeout in zip(engines * 2, _TIMEOUTS, strict=False):
            engine.store.open(timeout)
        until = HOUR
        for number, turn in enumerate(turns):
            while turn.at > until and history.hour < 8:
                until += HOUR
                history.hour = next(hours)
                soon = dict.fromkeys(key for each in turns[number : number + 12] for key in each.keys[: each.asked])
                history.end_of_hour(engines, [*soon], draw)
                if place.persists and history.hour % 2:
                    history.restart(engines, _Engine(place.make(limit), blocks))
                history.copy(all_but=0)  # the memory that a store holds is measured, not theirs
                yield
            at = (turn.engine + history.hour // 3) % len(engines)
            with clocks_ahead(engines[at].store, turn.at, uptime=at * 1_000_000 + turn.at):
                history.turn(engines[at], turn)
        figures = history.figures()
        keys, history.held = [*history.held, *zeros], {**history.held, **dict.fromkeys(zeros, (0,))}
        for start in range(0, len(keys), 256):
            while not history.delete(engines[0], keys[start : start + 256]):
                pass
        history.emptied(engines[0])
        for engine in engines:
            history.end(engine)
    return figures


class _Door:
    """A way around a store of the core: another object."""

    counts = False

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def read(self, key: bytes) -> Bytes | None:
        return self._store.get([key], 1 << 30, 10.0)[0]

    def write(self, key: bytes, value: bytes) -> None:
        self._store.put([(key, [value])], 10.0)

    def delete(self, key: bytes) -> None:
        self._store.delete([key], 10.0)


def _keep(_: Sequence[KVStore], __: Sequence[bytes]) -> None:
    pass


def _delete(stores: Sequence[KVStore], keys: Sequence[bytes]) -> None:
    stores[0].delete(keys, 10.0)


@cache
def _core_account(
    server: StoreDay, engines: int, capped: bool, *, door: bool, persists: bool, restart: Any
) -> DayAccount:
    """Return the account of a day with a store of the core that has the abilities of another one."""
    cls = DiskStore if engines > 1 else MemoryStore
    with tempfile.TemporaryDirectory() as folder:
        text = f"disk:{folder}/kv" if engines > 1 else "memory:"
        plain = cls(parse_location(text))

        def make(limit: int | None) -> KVStore:
            return (
                plain if limit is None and engines == 1 else cls(parse_location(f"{text}?max_bytes={limit or 1 << 40}"))
            )

        way: Any = _Door(plain) if door else None
        place = Place(make, engines, way, capped, persists, restart=restart, survives=restart is not _delete)
        return account_of(day_of(place, server))


def require_an_ordinary_day(place: Place, server: str) -> None:
    """Live the day of a server with a store, and compare what users notice with a store of the core."""
    settings, restart = SERVERS[server], _keep if place.survives else _delete
    firsts = [(turn.keys[0], turn.length) for turn in _turns(settings) if turn.keys][:3]
    secrets = [(key, bytes(sealed(key, 1, length)[1][:64])) for key, length in firsts]
    mine = account_of(day_of(place, settings), *itertools.chain.from_iterable(secrets))
    left = [each for each in mine.left if not Path(each).is_dir()]  # folders of values may stay
    mine = mine._replace(left=left, grown=mine.grown - _BUFFERS)
    core = _core_account(
        settings,
        place.engines,
        place.capped,
        door=place.door is not None,
        persists=place.persists,
        restart=restart if place.restart else None,
    )
    slack = dict.fromkeys(core.figures, 1.3) | {"peak": 2.0, "grown": 1.5}
    require_as_good(mine, core, f"a day of a server with {server}", "5.5", slack)
