"""Faults in KV stores, each with the case or the test of the kit that detects it."""

from __future__ import annotations

import collections
import fcntl
import itertools
import logging
import mmap
import os
import threading
import time
import zlib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

from fd_core.kv.stores.contract import FailureReason, StoreError
from fd_core.kv.stores.disk import DiskReservations, DiskStore
from fd_core.kv.stores.memory import MemoryStore

WRONG = {}
"""By class: the case `store:...` or the test that detects it, and the arguments of the test."""
ANY_LINE = "test_a_value_may_change_or_be_read_at_any_line_of_a_call"
IN_USE = "test_what_was_used_stays_among_twice_as_many_values"
FEW = {"room": 64, "size": 100_000, "batch": 4}
MANY = {"room": 66_048, "size": 100, "batch": 256}
DAY = "test_an_ordinary_day_costs_no_more_than_with_a_store_of_the_core"


def found_by(test, **arguments):
    """Name the test that detects a store."""

    def register(cls):
        WRONG[cls] = test, arguments
        return cls

    return register


class ByAnotherKey(MemoryStore):
    """Stores a value under a function of its key."""

    def named(self, key):
        raise NotImplementedError

    def get(self, keys, limit, timeout):
        return super().get([*map(self.named, keys)], limit, timeout)

    def put(self, values, timeout):
        return super().put([(self.named(key), parts) for key, parts in values], timeout)

    def longest_prefix(self, keys, limit, timeout):
        return super().longest_prefix([*map(self.named, keys)], limit, timeout)

    def delete(self, keys, timeout):
        return super().delete([*map(self.named, keys)], timeout)


class StoresOtherValues(MemoryStore):
    """Stores a function of a value."""

    def stored(self, value):
        raise NotImplementedError

    def put(self, values, timeout):
        return super().put([(key, [self.stored(b"".join(parts))]) for key, parts in values], timeout)


@found_by("store:keys=last byte,key_bytes=17")
class CutsKeys(ByAnotherKey):
    def named(self, key):
        return key[:16]


@found_by("store:keys=first byte")
class IgnoresTheFirstByte(ByAnotherKey):
    def named(self, key):
        return key[1:] or key


@found_by("store:keys=one checksum")
class NamesValuesByChecksum(ByAnotherKey):
    def named(self, key):
        return zlib.crc32(key).to_bytes(4, "big")


@found_by("store:keys=zeros in front")
class TreatsKeysAsNumbers(ByAnotherKey):
    def named(self, key):
        return int.from_bytes(key, "big").to_bytes(32, "big")


@found_by("store:keys=zeros at the end")
class PadsKeys(ByAnotherKey):
    def named(self, key):
        return key.ljust(32, b"\0")


@found_by("store:keys=spaces")
class StripsKeys(ByAnotherKey):
    def named(self, key):
        return key.strip() or key


@found_by("store:keys=case of letters")
class IgnoresTheCaseOfLetters(ByAnotherKey):
    def named(self, key):
        return key.lower()


@found_by("store:keys=paths")
class NamesValuesByPaths(ByAnotherKey):
    def named(self, key):
        return os.path.normpath(key)


@found_by("store:keys=prefixes")
class MatchesPrefixesOfKeys(MemoryStore):
    def get(self, keys, limit, timeout):
        names = self.keys()[::-1]
        return super().get(
            [next((name for name in names if name.startswith(key)), key) for key in keys], limit, timeout
        )


@found_by("store:value_bytes=1048577")
class CutsLargeValues(StoresOtherValues):
    def stored(self, value):
        return value[: 1 << 20]


@found_by("store:value_bytes=16777217,count=2")
class CutsVeryLargeValues(StoresOtherValues):
    def stored(self, value):
        return value[: 1 << 24]


@found_by("store:content=like others,count=9")
class DecompressesValues(StoresOtherValues):
    def stored(self, value):
        return value if value[:2] != b"x\x9c" else b"?"


@found_by("store:content=alike")
class MergesValuesThatLookAlike(StoresOtherValues):
    def stored(self, value):
        return self.__dict__.setdefault("seen", {}).setdefault((len(value), value[:64], value[-64:]), value)


@found_by("store:content=zeros")
class DropsZerosAtTheEnd(StoresOtherValues):
    def stored(self, value):
        return value.rstrip(b"\0")


@found_by("store:parts=1025")
class DropsPartsAfterTheLimitOfASystemCall(MemoryStore):
    def put(self, values, timeout):
        return super().put([(key, parts[:1024]) for key, parts in values], timeout)


@found_by("store:limit=2^31")
class CutsLimits(MemoryStore):
    def get(self, keys, limit, timeout):
        return super().get(keys, limit & 0x7FFFFFFF, timeout)


@found_by("store:limit=2^32")
class CutsLimitsOfPrefixes(MemoryStore):
    def longest_prefix(self, keys, limit, timeout):
        return super().longest_prefix(keys, limit & 0xFFFFFFFF, timeout)


@found_by("store:limit=one less")
class IgnoresTheLimit(MemoryStore):
    def get(self, keys, limit, timeout):
        return super().get(keys, 1 << 40, timeout)


@found_by("store:order=33000 keys")
class CountsIn15Bits(MemoryStore):
    def longest_prefix(self, keys, limit, timeout):
        return super().longest_prefix(keys, limit, timeout) & 0x7FFF


@found_by("store:count=129")
class ReadsAHundredKeys(MemoryStore):
    def get(self, keys, limit, timeout):
        return super().get(keys[:128], limit, timeout) + [None] * len(keys[128:])


@found_by("store:sizes=every second empty")
class TreatsEmptyValuesAsAbsent(MemoryStore):
    def get(self, keys, limit, timeout):
        return [value or None for value in super().get(keys, limit, timeout)]


@found_by("store:order=with holes")
class OmitsAbsentValues(MemoryStore):
    def get(self, keys, limit, timeout):
        return [value for value in super().get(keys, limit, timeout) if value is not None]


@found_by("store:order=with holes")
class CountsBeyondHoles(MemoryStore):
    def longest_prefix(self, keys, limit, timeout):
        return sum(value is not None for value in self.get(keys, limit, timeout))


@found_by("store:before=shorter")
class KeepsTheExistingValue(MemoryStore):
    def put(self, values, timeout):
        super().put([value for value in values if value[0] not in self._values], timeout)
        return len(values)


@found_by("store:before=longer")
class KeepsTheEndOfALongerValue(MemoryStore):
    def put(self, values, timeout):
        found = [(key, b"".join(parts), self._values.get(key, b"")) for key, parts in values]
        return super().put([(key, [value, before[len(value) :]]) for key, value, before in found], timeout)


@found_by("store:removed=every second")
class DeletesAllIfAnyIsDeleted(MemoryStore):
    def delete(self, keys, timeout):
        count = super().delete(keys, timeout)
        if count > 1:
            self._values.clear()
        return count


@found_by("store:plain")
class IsWrittenNever(MemoryStore):
    def put(self, values, timeout):
        self.__dict__.setdefault("written", {}).update({key: b"".join(parts) for key, parts in values})
        return len(values)

    def get(self, keys, limit, timeout):
        return [self.__dict__.get("written", {}).get(key) for key in keys]


@found_by("store:clock=3600")
class ExpiresByTheClock(MemoryStore):
    def put(self, values, timeout):
        self.__dict__.setdefault("at", {}).update(dict.fromkeys((key for key, _ in values), time.time()))
        return super().put(values, timeout)

    def get(self, keys, limit, timeout):
        at = self.__dict__.get("at", {})
        return [
            value if abs(time.time() - at.get(key, time.time())) < 60 else None
            for key, value in zip(keys, super().get(keys, limit, timeout), strict=True)
        ]


@found_by("store:thread=true")
class ServesOneThread(MemoryStore):
    def get(self, keys, limit, timeout):
        if self.__dict__.setdefault("_owner", threading.main_thread().ident) != threading.get_ident():
            return [None] * len(keys)
        return super().get(keys, limit, timeout)


@found_by("store:elsewhere=true")
class ConfusesFoldersOfOneName(DiskStore):
    cache: dict = {}  # noqa: RUF012 - that is the fault

    def put(self, values, timeout):
        count = super().put(values, timeout)
        self.cache.update({(self.path.name, key): b"".join(parts) for key, parts in values})
        return count

    def get(self, keys, limit, timeout):
        found = super().get(keys, limit, timeout)
        return [None if value is None else self.cache.get((self.path.name, key), value)
                for key, value in zip(keys, found, strict=True)]  # fmt: skip


@found_by("store:reader=another object")
class KeepsValuesInTheObject(DiskStore):
    def get(self, keys, limit, timeout):
        mine = self.__dict__.get("mine", set())
        return [
            value if key in mine else None for key, value in zip(keys, super().get(keys, limit, timeout), strict=True)
        ]

    def put(self, values, timeout):
        self.__dict__.setdefault("mine", set()).update(key for key, _ in values)
        return super().put(values, timeout)


@found_by("test_a_killed_writer_leaves_whole_values")
class WritesInPlace(DiskStore):
    def put(self, values, timeout):
        for key, parts in values:
            path = self.path / key.hex()[:2] / f"{key.hex()}.kv"
            path.parent.mkdir(parents=True, exist_ok=True)
            value = b"".join(parts)
            with path.open("wb", buffering=0) as file:
                for start in range(0, len(value), 4096):
                    file.write(value[start : start + 4096])
                    time.sleep(0.001)  # so that the writer is always killed in the middle of a value
        return len(values)


@found_by(DAY, day="small blocks")
class HoldsALockWhileItWrites(MemoryStore):
    def __init__(self, location):
        super().__init__(location)
        self._whole = threading.RLock()

    def put(self, values, timeout):
        with self._whole:
            return super().put(values, timeout)

    def get(self, keys, limit, timeout):
        with self._whole:
            return super().get(keys, limit, timeout)


@found_by("test_the_time_of_a_call_does_not_grow_with_the_values")
class SearchesAllValues(MemoryStore):
    def longest_prefix(self, keys, limit, timeout):
        there = list(self._values)
        return next((at for at, key in enumerate(keys) if key not in there), len(keys))


@found_by(DAY, day="a store at its limit")
class ExceedsTheLimitByAValue(MemoryStore):
    def put(self, values, timeout):
        limit, self.limit_bytes = self.limit_bytes, self.limit_bytes + max(sum(map(len, parts)) for _, parts in values)
        try:
            return super().put(values, timeout)
        finally:
            self.limit_bytes = limit


@found_by("test_no_call_takes_longer_than_it_may", timeout=0.0)
class TakesItsTime(MemoryStore):
    def delete(self, keys, timeout):
        time.sleep(1.6 if timeout == 0 else 0)
        return super().delete(keys, timeout)


@found_by("test_no_call_takes_longer_than_it_may", timeout=0.0)
class HidesAValueInItsError(MemoryStore):
    def stats(self, timeout):
        raise KeyError("prompt")


@found_by(DAY, day="small blocks")
class WorksAfterClose(MemoryStore):
    def close(self):
        pass


@found_by("test_an_unknown_parameter_is_named")
class TakesAnyParameter(MemoryStore):
    def __init__(self, location):
        super().__init__(type(location)(location.scheme, location.text, {}))


@found_by("store:opened=again")
class EmptiesItselfWhenItIsOpened(DiskStore):
    def open(self, timeout):
        for path in self.path.glob("??/*.kv"):
            path.unlink()
        return super().open(timeout)


@found_by(DAY, day="small blocks")
class ReadsIntoTwoBuffersInTurn(DiskStore):
    def get(self, keys, limit, timeout):
        found = super().get(keys, limit, timeout)
        self.buffers = self.__dict__.get("buffers", [bytearray(), bytearray()])[::-1]
        whole = b"".join(value for value in found if value is not None)
        if len(self.buffers[0]) < len(whole):
            self.buffers[0] = bytearray(len(whole))
        self.buffers[0][: len(whole)] = whole
        ends = itertools.accumulate(len(value or b"") for value in found)
        return [value and memoryview(self.buffers[0])[end - len(value) : end]
                for value, end in zip(found, ends, strict=True)]  # fmt: skip


@found_by("test_a_reader_sees_whole_values_while_a_writer_replaces_them", writers="two other objects")
class OverwritesValuesOfOneSize(DiskStore):
    def put(self, values, timeout):
        new = []
        for key, parts in values:
            path, value = self.path / key.hex()[:2] / f"{key.hex()}.kv", b"".join(parts)
            try:
                with path.open("r+b", buffering=0) as file:
                    if os.fstat(file.fileno()).st_size != len(value):
                        raise FileNotFoundError
                    for start in range(0, len(value), 4096):
                        file.write(value[start : start + 4096])
                        time.sleep(0.001)  # so that every reader finds a value half written
            except FileNotFoundError:
                new.append((key, parts))
        return len(values) - len(new) + super().put(new, timeout)


@found_by(IN_USE, **FEW)
class EvictsWhatWasPutFirst(DiskStore):
    """A `get` is no use."""

    def get(self, keys, limit, timeout):
        with mock.patch.object(os, "utime"):
            return super().get(keys, limit, timeout)


@found_by("test_wrong_values_of_parameters_are_refused_by_name")
class ParsesAParameter(MemoryStore):
    """A location with `retries=much` is a traceback at the start of the server."""

    def __init__(self, location):
        self.retries = int(location.parameters.get("retries", 1))
        others = {name: value for name, value in location.parameters.items() if name != "retries"}
        super().__init__(replace(location, parameters=others))


@found_by(IN_USE, **FEW)
class UsesTheFirstValueOfABatch(MemoryStore):
    def get(self, keys, limit, timeout):
        rest = [self._values.get(key) for key in keys[1:]]
        return [*super().get(keys[:1], limit, timeout), *rest]


@found_by("test_the_time_of_a_put_at_the_cap_does_not_grow_with_the_values")
class SearchesAllValuesToEvict(MemoryStore):
    def put(self, values, timeout):
        used = self.__dict__.setdefault("used", {})
        for key, parts in values:
            while self._values and self._bytes + sum(map(len, parts)) > self.limit_bytes:
                self._delete(min(self._values, key=lambda each: used.get(each, 0)))
            used[key] = time.monotonic()
        return super().put(values, timeout)


@found_by("test_nothing_is_held_of_values_that_are_gone")
class CountsEveryKey(MemoryStore):
    def longest_prefix(self, keys, limit, timeout):
        self.__dict__.setdefault("asked", collections.Counter()).update(keys)
        return super().longest_prefix(keys, limit, timeout)


@found_by("test_a_timeout_is_of_the_whole_call")
class TimesEachValue(MemoryStore):
    def put(self, values, timeout):
        return sum(super(TimesEachValue, self).put([value], timeout) for value in values)


@found_by("store:plain")
class ReturnsWords(MemoryStore):
    """The length of what it returns is not that of the value."""

    def get(self, keys, limit, timeout):
        return [memoryview(value).cast("I") if value and not len(value) % 4 else value
                for value in super().get(keys, limit, timeout)]  # fmt: skip


@found_by("test_a_new_store_holds_nothing_and_a_closed_one_neither")
class LeavesItsFolderOpen(DiskStore):
    def open(self, timeout):
        line = super().open(timeout)
        self.folder = os.open(self.path, os.O_RDONLY)
        return line


@found_by("test_a_new_store_holds_nothing_and_a_closed_one_neither")
class CreatesItsFolderWhenItIsMade(DiskStore):
    def __init__(self, location):
        super().__init__(location)
        self.path.mkdir(parents=True, exist_ok=True)


@found_by("store:before=timed out")
class ShowsValuesInErrors(MemoryStore):
    def put(self, values, timeout):
        try:
            return super().put(values, timeout)
        except StoreError as error:
            raise StoreError(error.reason, f"put of {bytes(values[0][1][0])[:40]!r} failed") from None


@found_by(DAY, day="a store at its limit")
class ReadsPlainNumbers(MemoryStore):
    def __init__(self, location):
        limit = location.parameters.pop("max_bytes", None)
        super().__init__(location)
        self.limit_bytes = int(limit or self.limit_bytes)


@found_by(ANY_LINE, name="put", change="read")
class SharesABuffer(MemoryStore):
    buffer = bytearray()

    def put(self, values, timeout):
        for key, parts in values:
            self.buffer = bytearray()
            for part in parts:
                self.buffer += part
            super().put([(key, [self.buffer])], timeout)
        return len(values)

    def get(self, keys, limit, timeout):
        found = super().get(keys, limit, timeout)
        for at, value in enumerate(found):
            if value is not None:
                self.buffer = bytearray()
                self.buffer += value
                found[at] = bytes(self.buffer)
        return found


@found_by(DAY, day="large blocks")
class CountsEvictedValues(MemoryStore):
    """Only a delete lowers the number of values."""

    def __init__(self, location):
        super().__init__(location)
        self.known = set()

    def put(self, values, timeout):
        self.known |= {key for key, _ in values}
        return super().put(values, timeout)

    def delete(self, keys, timeout):
        self.known -= set(keys)
        return super().delete(keys, timeout)

    def stats(self, timeout):
        return replace(super().stats(timeout), values=len(self.known))


@found_by(IN_USE, **FEW)
class KeepsThePlaceOfReplacedValues(MemoryStore):
    """A value that is put again stays as old as it was."""

    def put(self, values, timeout):
        stored = 0
        for key, parts in values:
            if key in self._opened():
                self._opened()[key] = b"".join(parts)
                stored += 1
            else:
                stored += super().put([(key, parts)], timeout)
        return stored


@found_by(ANY_LINE, name="get", change="delete")
class ReadsWithoutALock(MemoryStore):
    """Another thread may delete a value between the two look-ups."""

    def get(self, keys, limit, timeout):
        values, found = self._opened(), []
        for key in keys:
            if key in values and len(values[key]) <= limit:
                values.move_to_end(key)
                found.append(values[key])
            else:
                found.append(None)
        return found


@found_by("store:lists=reused")
class KnowsListsByIdentity(MemoryStore):
    """Names the keys of a list once; the caller may put others into it."""

    last, names = None, ()

    def get(self, keys, limit, timeout):
        if keys is not self.last:
            self.last, self.names = keys, tuple(keys)
        return super().get(self.names, limit, timeout)


@found_by("store:reader=another object")
class SharesAHandle(DiskStore):
    """The objects of a folder share a handle, which ends with the first of them."""

    ended = {}  # noqa: RUF012 - that is the fault

    def __init__(self, location):
        super().__init__(location)
        self.handle = self.ended.setdefault(self.path, [])

    def close(self):
        super().close()
        self.handle.append(self)

    def get(self, keys, limit, timeout):
        if self.handle:
            raise StoreError(FailureReason.OTHER, "the KV store is closed")
        return super().get(keys, limit, timeout)


@found_by("store:before=timed out")
class AnswersTheCallThatTimedOut(MemoryStore):
    """The response of a call that timed out is taken for that of the next one."""

    late = None

    def longest_prefix(self, keys, limit, timeout):
        found, late = super().longest_prefix(keys, limit, timeout), self.late
        self.late = None if timeout else found
        if not timeout:
            raise StoreError(FailureReason.TIMEOUT, "the KV store call timed out")
        return found if late is None else late


@found_by("store:limit=one less")
class RemembersTheLimit(MemoryStore):
    """A value that fits once counts as one that fits, until it is changed."""

    def __init__(self, location):
        super().__init__(location)
        self.fits = {}

    def longest_prefix(self, keys, limit, timeout):
        for at, key in enumerate(keys):
            value = self._opened().get(key, b"")
            if self.fits.get(key, (None, False))[0] is not value:
                self.fits[key] = value, super().longest_prefix([key], limit, timeout) == 1
            if not self.fits[key][1]:
                return at
        return len(keys)

    def delete(self, keys, timeout):
        self.fits.clear()
        return super().delete(keys, timeout)


@found_by("test_nothing_is_held_of_values_that_are_gone")
class LeavesADescriptorOfATimeout(DiskStore):
    def put(self, values, timeout):
        try:
            return super().put(values, timeout)
        except StoreError:
            self.__dict__.setdefault("left", []).append(os.dup(2))
            raise

    def __del__(self):
        for descriptor in self.__dict__.get("left", ()):
            os.close(descriptor)


@found_by(DAY, day="a store at its limit")
class KeepsTheSpaceOfATimeout(MemoryStore):
    """Space is reserved for all values of a put, and freed only at its end."""

    def put(self, values, timeout):
        space = sum(memoryview(part).nbytes for _, parts in values for part in parts)
        self.limit_bytes -= space if timeout == 0 else 0
        return super().put(values, timeout)


@found_by("test_the_cap_holds_for_what_a_killed_writer_left")
class LeavesUnfinishedFiles(DiskStore):
    """Its names of unfinished files are not those that are counted and cleaned up."""

    @contextmanager
    def _reservations(self, root, deadline):
        with super()._reservations(root, deadline) as made:
            made.__class__ = _OtherNames
            yield made


@found_by("test_nothing_is_held_of_values_that_are_gone")
class MarksWhatItDeletes(DiskStore):
    def delete(self, keys, timeout):
        with mock.patch(
            "os.unlink", lambda name, dir_fd: os.rename(name, f"{name}-", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        ):
            return super().delete(keys, timeout)


@found_by(DAY, day="large blocks")
class ReadsAllValuesWhenItIsOpened(DiskStore):
    """Looks for values that cannot be read."""

    def open(self, timeout):
        for path in self.path.rglob("*.kv"):
            if path.stat().st_size < 1 << 30:
                path.read_bytes()
        return super().open(timeout)


class _OtherNames(DiskReservations):
    def reserve(self, size):
        name, *rest = super().reserve(size)
        os.rename(name, f"{name}.tmp", src_dir_fd=self.partial, dst_dir_fd=self.partial)
        return f"{name}.tmp", *rest


class Copying(DiskStore):
    """Has a copy in memory of values that are there."""

    def __init__(self, location):
        super().__init__(location)
        self.copies = {}

    def delete(self, keys, timeout):
        for key in keys:
            self.copies.pop(key, None)
        return super().delete(keys, timeout)


@found_by(DAY, day="small blocks")
class CopiesWhatItPuts(Copying):
    def put(self, values, timeout):
        self.copies.update((key, b"".join(parts)) for key, parts in values)
        return super().put(values, timeout)


@found_by(DAY, day="small blocks")
class WritesAnIndexAtTimes(DiskStore):
    """Every hundredth put takes as long as there are values."""

    puts = 0

    def put(self, values, timeout):
        self.puts += 1
        if self.puts % 100 == 0:
            (self.path / "index").write_text("".join(value.name for value in self.path.glob("??/*.kv")))
        return super().put(values, timeout)


@found_by("test_no_call_waits_for_a_writer_that_stands_still")
class NamesUnfinishedFilesByIds(DiskStore):
    """Processes on two machines may have the same ids."""

    @contextmanager
    def _reservations(self, root, deadline):
        with super()._reservations(root, deadline) as made:
            made.__class__ = _NamesOfIds
            yield made


class _NamesOfIds(DiskReservations):
    def reserve(self, size):
        if (reserved := super().reserve(size)) is None:
            return None
        name, file, space = reserved
        ours = f"{space}-{os.getpid():08x}{threading.get_ident():016x}"
        os.rename(name, ours, src_dir_fd=self.partial, dst_dir_fd=self.partial)
        return ours, file, space


@found_by(DAY, day="a store at its limit")
class AgesByTheMonotonicClock(DiskStore):
    """The clock of another machine starts at another time."""

    def _mark(self, keys):
        for value in (value for key in keys for value in self.path.glob(f"??/{key.hex()}.kv")):
            with suppress(FileNotFoundError):
                os.utime(value, ns=(time.monotonic_ns(), time.monotonic_ns()))

    def get(self, keys, limit, timeout):
        found = super().get(keys, limit, timeout)
        self._mark(keys)
        return found

    def put(self, values, timeout):
        stored = super().put(values, timeout)
        self._mark([key for key, _ in values])
        return stored


@found_by(DAY, day="a store at its limit")
class CountsItsOwnBytes(DiskStore):
    """Counts the bytes in use in the object, although other engines write to the folder as well."""

    used = None

    @contextmanager
    def _reservations(self, root, deadline):
        with super()._reservations(root, deadline) as made:
            made._recorded = lambda: self.used
            made._record = partial(setattr, self, "used")
            yield made


@found_by("store:count=65,before=timed out")
class RemembersMissingKeys(MemoryStore):
    """Knows which keys it lacks; a call that puts several values corrects the first one."""

    def __init__(self, location):
        super().__init__(location)
        self.missing = set()

    def get(self, keys, limit, timeout):
        found = super().get(keys, limit, timeout)
        found = [None if key in self.missing else value for key, value in zip(keys, found, strict=True)]
        self.missing.update(key for key, value in zip(keys, found, strict=True) if value is None)
        return found

    def put(self, values, timeout):
        self.missing.difference_update(key for key, _ in values[:1])
        return super().put(values, timeout)


@found_by("store:timeout=0.9")
class RoundsTimeouts(MemoryStore):
    """Its client library takes whole seconds."""

    def put(self, values, timeout):
        return super().put(values, int(timeout))


@found_by("store:opened=by another object")
class ClosesTheOtherStores(MemoryStore):
    """The list of open stores is one of the class."""

    made = []  # noqa: RUF012 - that is the fault

    def __init__(self, location):
        super().__init__(location)
        self.made.append(self)

    def close(self):
        while self.made:
            MemoryStore.close(self.made.pop())


@found_by("test_open_returns_one_line_and_is_repeatable")
class PretendsToBeShared(MemoryStore):
    """Other processes have other values."""

    shared = True


@found_by("test_closing_during_calls_raises_store_errors_only")
class CountsInValuesThatAreGone(MemoryStore):
    """Only the beginning of a count expects that another thread closes the store."""

    def longest_prefix(self, keys, limit, timeout):
        self._opened()
        time.sleep(0.001)  # so that it is usually here when it is closed
        return sum(key in self._values for key in keys)


@found_by("store:removed=from outside,count=9")
class RemembersCounts(MemoryStore):
    """A prefix that was complete stays so until this object deletes a value."""

    def __init__(self, location):
        super().__init__(location)
        self.complete = set()

    def longest_prefix(self, keys, limit, timeout):
        name = (*keys, limit)
        if name not in self.complete:
            count = super().longest_prefix(keys, limit, timeout)
            if count < len(keys):
                return count
            self.complete.add(name)
        return len(keys)

    def put(self, values, timeout):
        self.complete.clear()
        return super().put(values, timeout)

    def delete(self, keys, timeout):
        self.complete.clear()
        return super().delete(keys, timeout)


@found_by("test_no_call_takes_longer_than_it_may", timeout=0.0)
class KeepsTheFirstTimeout(MemoryStore):
    """Its client has one timeout, that of the first call."""

    first = None

    def put(self, values, timeout):
        self.first = self.first or timeout
        return super().put(values, self.first)


class _WaitsForEver(DiskReservations):
    @contextmanager
    def _locked(self):
        fcntl.flock(self._usage, fcntl.LOCK_EX)
        try:
            self.deadline.check()
            yield
        finally:
            fcntl.flock(self._usage, fcntl.LOCK_UN)


@found_by("test_no_call_waits_for_a_writer_that_stands_still")
class WaitsForTheLock(DiskStore):
    """A process that stands still with the lock stops all others."""

    @contextmanager
    def _reservations(self, root, deadline):
        with super()._reservations(root, deadline) as right:
            yield _WaitsForEver(self, root, right.partial, usage=right._usage, deadline=deadline)


@found_by(DAY, day="small blocks")
class LocksItsFolderDuringAPut(DiskStore):
    """Counts and writes under one lock, for which other engines wait."""

    @contextmanager
    def _reservations(self, root, deadline):
        with super()._reservations(root, deadline) as right, right._locked():
            right._locked = nullcontext
            yield right


@found_by("test_unreachable_store_reports_its_reason_in_time", reason=FailureReason.DENIED)
class GivesUpAfterAFailedLookup(DiskStore):
    """Refuses writes from then on."""

    failed = None

    def put(self, values, timeout):
        if self.failed:
            raise self.failed
        return super().put(values, timeout)

    def longest_prefix(self, keys, limit, timeout):
        try:
            return super().longest_prefix(keys, limit, timeout)
        except StoreError as error:
            self.failed = error
            raise


@found_by(ANY_LINE, name="get", change="shorten from outside")
class BelievesTheSizeOfAFile(DiskStore):
    """Reads as many bytes as the file had before."""

    def get(self, keys, limit, timeout):
        paths = [self.path / key.hex()[:2] / f"{key.hex()}.kv" for key in keys]
        sizes = [path.stat().st_size for path in paths]
        found = super().get(keys, limit, timeout)
        for value, size in zip(found, sizes, strict=True):
            if value is not None and len(value) < size:
                raise EOFError
        return found


@found_by("test_a_value_over_the_limit_is_not_read_into_memory")
class ReadsBeforeItLooksAtTheLimit(DiskStore):
    def get(self, keys, limit, timeout):
        found = super().get(keys, 1 << 40, timeout)
        return [None if value is None or len(value) > limit else value for value in found]


@found_by(ANY_LINE, name="stats", change="delete from outside")
class CountsFilesByPath(DiskStore):
    def stats(self, timeout):
        size = 0
        for path in list(self.path.glob("??/*.kv")):
            size += path.stat().st_size
        return replace(super().stats(timeout), bytes=size)


@found_by("test_invalid_value_does_not_affect_others")
class ReadsEveryEntryToCount(DiskStore):
    def stats(self, timeout):
        size = sum(len(path.read_bytes()) for path in self.path.glob("??/*.kv"))
        return replace(super().stats(timeout), bytes=size)


@found_by("test_a_new_store_holds_nothing_and_a_closed_one_neither")
class CountsOnlyOnceItIsOpened(DiskStore):
    def stats(self, timeout):
        _ = [*self.path.iterdir()]
        return super().stats(timeout)


@found_by("test_a_limit_of_one_value_holds_the_last_one_and_a_smaller_limit_none")
class EvictsToAShareOfTheLimit(MemoryStore):
    """Fails if no value may stay."""

    def put(self, values, timeout):
        size = sum(len(part) for _, parts in values for part in parts)
        while self._bytes + size > self.limit_bytes * 7 / 8:
            self._delete(next(iter(self._values)))
        return super().put(values, timeout)


@found_by("test_a_limit_of_one_value_holds_the_last_one_and_a_smaller_limit_none")
class WritesAProbe(MemoryStore):
    def open(self, timeout):
        if not self.put([(b"probe", [b"probe"])], timeout):
            raise StoreError(FailureReason.FULL, "there is no space for a probe")
        self.delete([b"probe"], timeout)
        return super().open(timeout)


@found_by("test_a_zero_byte_in_the_location_is_refused_by_documented_errors")
class PassesAnyPathOn(MemoryStore):
    def __init__(self, location):
        Path("/", location.rest).stat()
        super().__init__(location)


@found_by("test_the_cap_is_a_size_as_users_write_it")
class KeepsItsLimitIn32Bits(MemoryStore):
    def __init__(self, location):
        super().__init__(location)
        self.limit_bytes &= 0xFFFF_FFFF


@found_by("store:plain")
class SharesFilesWithItsGroup(DiskStore):
    """Also those that other parts of the process write, as soon as it is opened."""

    def open(self, timeout):
        os.umask(0o002)
        return super().open(timeout)


@found_by("test_the_time_of_a_call_does_not_grow_with_the_values")
class CountsEveryValueForStatistics(MemoryStore):
    def stats(self, timeout):
        found = super().stats(timeout)
        return replace(found, values=sum(bool(value) or 1 for value in self._values.values()))


@found_by(IN_USE, **MANY)
class NumbersValuesIn16Bits(MemoryStore):
    """From 2^16 values on, a use is noted for another one."""

    def get(self, keys, limit, timeout):
        if len(self._values) > 0xFFFF:
            return [self._values.get(key) for key in keys]
        return super().get(keys, limit, timeout)


@found_by("test_other_users_of_the_machine_and_readers_of_logs_see_no_values")
class LogsItsKeys(MemoryStore):
    def get(self, keys, limit, timeout):
        logging.getLogger("store").debug("get of %s", [key.hex() for key in keys])
        return super().get(keys, limit, timeout)


@found_by("test_other_users_of_the_machine_and_readers_of_logs_see_no_values")
class SharesItsFolderWithOtherUsers(DiskStore):
    def put(self, values, timeout):
        count = super().put(values, timeout)
        for path in [self.path, *self.path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        return count


@found_by("test_other_users_of_the_machine_and_readers_of_logs_see_no_values")
class ReliesOnItsFolder(DiskStore):
    """Only a folder that it makes itself is private, and so are its files."""

    def put(self, values, timeout):
        count = super().put(values, timeout)
        for path in self.path.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return count


TIMES = "test_the_time_of_a_call_does_not_grow_with_the_values"


@found_by(TIMES)
class ConnectsForEachCall(MemoryStore):
    def get(self, keys, limit, timeout):
        time.sleep(0.02)
        return super().get(keys, limit, timeout)


@found_by(TIMES)
class TakesLongForEachBlock(MemoryStore):
    """Its checksum is one of Python, or it compresses values best."""

    def put(self, values, timeout):
        time.sleep(sum(len(part) for _, parts in values for part in parts) * 0.06 / 737_000)
        return super().put(values, timeout)


@found_by(TIMES)
class AsksForEachKey(MemoryStore):
    """Waits for the response to each key before the next one."""

    def longest_prefix(self, keys, limit, timeout):
        time.sleep(0.0002 * len(keys))
        return super().longest_prefix(keys, limit, timeout)


@found_by(TIMES)
class PollsWithoutAPause(MemoryStore):
    def open(self, timeout):
        if "thread" not in vars(self):
            self.thread = threading.Thread(target=self.poll, daemon=True)
            self.thread.start()
        return super().open(timeout)

    def poll(self):
        while self._values is not None:
            time.sleep(0)


@found_by("test_other_files_at_the_location_stay")
class CleansItsFolder(DiskStore):
    """Removes what is no value, such as what an earlier version left."""

    def open(self, timeout):
        line = super().open(timeout)
        for path in self.path.rglob("*"):
            if path.is_file() and path.suffix != ".kv" and path.name != "usage":
                path.unlink()
        return line


@found_by("store:clock=3600")
class ForgetsAfterAnHour(MemoryStore):
    def put(self, values, timeout):
        self.__dict__.setdefault("at", {}).update(dict.fromkeys((key for key, _ in values), time.monotonic()))
        return super().put(values, timeout)

    def get(self, keys, limit, timeout):
        old = [key for key, at in self.__dict__.get("at", {}).items() if time.monotonic() > at + 3000]
        super().delete(old, timeout)
        return super().get(keys, limit, timeout)


@found_by("store:elsewhere=true")
class DecodesItsPath(DiskStore):
    def __init__(self, location):
        super().__init__(location)
        self.path = Path(unquote(str(self.path)))


@found_by(DAY, day="small blocks")
class CannotCloseWhatIsInUse(DiskStore):
    def get(self, keys, limit, timeout):
        self.maps = self.__dict__.get("maps", [])[-8:]
        return [value and self.mapped(value) for value in super().get(keys, limit, timeout)]

    def mapped(self, value):
        self.maps.append(mmap.mmap(-1, len(value)))
        self.maps[-1][:] = value
        return memoryview(self.maps[-1])

    def close(self):
        for each in self.__dict__.pop("maps", ()):
            each.close()
        super().close()


@found_by("store:content=the same,removed=every second")
class StoresEqualValuesOnce(MemoryStore):
    """The value goes with the first of its keys that is deleted."""

    def put(self, values, timeout):
        for key, parts in values:
            self.__dict__.setdefault("keys_of", {}).setdefault(b"".join(parts), set()).add(key)
        return super().put(values, timeout)

    def delete(self, keys, timeout):
        equal = {each for key in keys for each in self.__dict__.get("keys_of", {}).get(self._values.get(key), ())}
        count = super().delete(keys, timeout)
        super().delete(list(equal), timeout)
        return count


@found_by(ANY_LINE, name="put", change="delete from outside")
class ExpectsNoOtherEngine(DiskStore):
    """A value that another engine evicts while this one looks for the oldest is an error of the file system."""

    def put(self, values, timeout):
        oldest = sorted(self.path.glob("??/*.kv"))
        [path.stat() for path in oldest]
        return super().put(values, timeout)


@found_by(DAY, day="large blocks")
class CountsByTheLastSize(MemoryStore):
    """Takes all values to be as large as the last one, as those of one model are."""

    def put(self, values, timeout):
        stored = 0
        for key, parts in values:
            value = b"".join(parts)
            with self._lock:
                self._delete(key)
                if len(value) > self.limit_bytes:
                    continue
                self._values[key] = value
                self._bytes, stored = self._bytes + len(value), stored + 1
                while len(self._values) > max(1, self.limit_bytes // (len(value) + 64)):
                    self._delete(next(iter(self._values)))
        return stored


class KeepsWhatItTakesForEqual(DiskStore):
    """Writes no value that equals the stored one, of which it compares a part."""

    def put(self, values, timeout):
        there = super().get([key for key, _ in values], 1 << 30, timeout)
        new = [
            each for each, held in zip(values, there, strict=True) if not self.equal(each[0], held, b"".join(each[1]))
        ]
        return len(values) - len(new) + super().put(new, timeout)

    def equal(self, key, held, value):
        raise NotImplementedError


@found_by("store:content=alike,before=as long,value_bytes=65535")
class ComparesBothEnds(KeepsWhatItTakesForEqual):
    def equal(self, key, held, value):
        ends = slice(4096), slice(-4096, None)
        return held is not None and len(held) == len(value) and all(held[end] == value[end] for end in ends)


@found_by("store:content=alike,before=as long,value_bytes=65535")
class ComparesChecksums(KeepsWhatItTakesForEqual):
    def equal(self, key, held, value):
        return held is not None and len(held) == len(value) and zlib.crc32(held) == zlib.crc32(value)


@found_by("store:before=written from outside")
class ComparesWithItsLastPut(KeepsWhatItTakesForEqual):
    """Another program has changed the value since."""

    def equal(self, key, held, value):
        last = self.__dict__.setdefault("last", {})
        last[key], same = value, last.get(key) == value
        return held is not None and same


@found_by("test_the_cap_is_a_size_as_users_write_it")
class CountsIn32Bits(DiskStore):
    """At 4 GiB it begins at 0, so that a limit above never holds."""

    @contextmanager
    def _reservations(self, root, deadline):
        with super()._reservations(root, deadline) as whole:
            record = whole._record
            whole._record = lambda used: record(used & 0xFFFF_FFFF)
            yield whole


@found_by("test_unreachable_store_reports_its_reason_in_time", reason=FailureReason.UNREACHABLE)
class KeepsWhatItCouldNotWrite(DiskStore):
    """Values are written later, and there is no limit to how many wait."""

    def put(self, values, timeout):
        waiting = self.__dict__.setdefault("waiting", [])
        try:
            while waiting:
                super().put(waiting[:1], timeout)
                waiting.pop(0)
            return super().put(values, timeout)
        except StoreError as error:
            if error.reason is FailureReason.UNREACHABLE:
                waiting += [(key, [b"".join(parts)]) for key, parts in values]
            raise


@found_by("test_calls_of_a_process_at_a_limit_harm_no_value", limit="descriptors")
class DeletesWhatItCannotRead(DiskStore):
    """A value that cannot be read is taken for a damaged one."""

    def get(self, keys, limit, timeout):
        try:
            return super().get(keys, limit, timeout)
        except StoreError as error:
            for key in keys if isinstance(error.__cause__, OSError) else ():
                with suppress(OSError):
                    (self.path / key.hex()[:2] / f"{key.hex()}.kv").unlink()
            raise


@found_by("test_calls_of_a_process_at_a_limit_harm_no_value", limit="sizes of files")
class WritesOnce(DiskStore):
    """Takes each write for a whole one, which on a disk that fills up it is not."""

    def put(self, values, timeout):
        write = os.writev

        def written(file, parts):
            write(file, parts)
            return sum(map(len, parts))

        with mock.patch.object(os, "writev", written):
            return super().put(values, timeout)
