"""The Redis store: values under `NAMESPACE:KEY`, keys in hexadecimal, moved in pipelined batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fd_core.kv.stores.contract import Bytes, FailureReason, KVStore, StoreError, StoreStats
from fd_core.kv.stores.location import StoreLocation
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from fd_storage_redis.settings import Settings, Topology
from fd_storage_redis.wire import Command, Routes, exchange, is_elsewhere, passes_over, routes_for, store_error, within

_WINDOW: Final = 32 << 20
"""Bytes of values requested at once, which the server may have to buffer for this reader."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Report:
    """Facts about one server; None where the server does not report one."""

    product: str
    """Name and version of the server."""
    values: int | None
    """All keys of the database, including those of other programs."""
    used_bytes: int | None
    limit_bytes: int | None
    """Limit of the server's memory in bytes, 0 without a limit."""
    policy: str | None
    """Server's policy when its memory is full: its `maxmemory-policy`."""


class RedisStore(KVStore):
    """Values in a Redis or Valkey server, a replicated pair behind Sentinels, or a cluster."""

    def __init__(self, location: StoreLocation) -> None:
        super().__init__(location)
        self.name = location.scheme
        self._settings = Settings.of(location)
        self._prefix = f"{self._settings.namespace}:".encode()
        self._expiry = [] if self._settings.ttl is None else [b"EX", b"%d" % self._settings.ttl]
        self._routes: Routes = routes_for(self._settings)
        self._clustered = self._settings.topology is Topology.CLUSTER
        self._closed = False

    def __repr__(self) -> str:
        return f"RedisStore({self._settings.shown})"

    def open(self, timeout: float) -> str:
        """Read from every writable server, and return a line about them."""
        with self._within(timeout):
            # Reads like later calls, so a server that is down, loading or denies reads fails here.
            self._lengths([b""])
            servers = self._reports()
        first = servers[0]
        many = f"{len(servers)} servers, " if len(servers) > 1 else ""
        return f"{many}{first.product} at {self._settings.shown}, {self._keeping(first)}"

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Read the lengths first, then the values that are short enough."""
        values: list[Bytes | None] = [None] * len(keys)
        # A range is bounded even if the value is replaced by a longer one meanwhile. For length 0, only GET
        # distinguishes an empty value from an absent one.
        bounded: Command = (b"GETRANGE", b"0", b"%d" % (limit - 1))
        with self._within(timeout):
            lengths = self._lengths(keys)
            wanted = [position for position, length in enumerate(lengths) if 0 <= length <= limit]
            for window in _windows(wanted, lengths):
                commands = [bounded if lengths[position] else (b"GET",) for position in window]
                answers = self._ask([keys[position] for position in window], commands)
                for position, value in zip(window, self._usable(answers, bytes, None, nothing=None), strict=True):
                    # The range of a value that was deleted meanwhile is empty.
                    gone = value is None or len(value) > limit or (lengths[position] > 0 and not value)
                    values[position] = None if gone else value
        return values

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Replace the values of the keys; if the server rejects some, the others are still stored."""
        with self._within(timeout):
            answers = self._ask([key for key, _ in values], [(b"SET", parts, *self._expiry) for _, parts in values])
            stored: int = sum(answer == b"OK" for answer in answers)
            if values and not stored:
                # If only some values were rejected, the count shows it; if all were, the error is raised.
                self._usable(answers, bytes, b"")
            return stored

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Read the lengths of all values in one round trip."""
        with self._within(timeout):
            for position, length in enumerate(self._lengths(keys)):
                # For length 0, only EXISTS distinguishes an empty value from an absent one.
                empty = length == 0 and self._usable(self._ask([keys[position]], [(b"EXISTS",)]), int, 0) == [1]
                if not (0 < length <= limit or empty):
                    return position
            return len(keys)

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Unlink the values; the server frees their memory later."""
        with self._within(timeout):
            return sum(self._usable(self._ask(keys, [(b"UNLINK",)] * len(keys)), int, 0))

    def stats(self, timeout: float) -> StoreStats:
        """Return statistics of whole databases, including values of other programs."""
        with self._within(timeout):
            servers = self._reports()
        return StoreStats(
            values=_total(report.values for report in servers),
            bytes=_total(report.used_bytes for report in servers),
            limit_bytes=_total(report.limit_bytes for report in servers) or None,
        )

    def close(self) -> None:
        """Close the connections; a connection in use by another thread is closed when that call ends."""
        self._closed = True
        self._routes.close()

    @contextmanager
    def _within(self, timeout: float) -> Iterator[None]:
        """Limit the time of one call, and translate its exceptions."""
        if self._closed:
            raise StoreError(FailureReason.OTHER, f"{self._settings.shown} is closed")
        try:
            with within(timeout):
                yield
        except (RedisError, RedisClusterException, OSError) as failure:
            self._routes.refresh()
            # Without its cause: the client's errors and frames may hold a password.
            raise self._error(failure) from None
        finally:
            if self._closed:
                self._routes.close()

    def _error(self, failure: Exception) -> StoreError:
        return store_error(failure, self._settings.shown, self._settings.credentials.password)

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Return the length of each value, 0 for one that is absent or empty, -1 for one of another type."""
        return self._usable(self._ask(keys, [(b"STRLEN",)] * len(keys)), int, -1)

    def _usable(self, answers: list[Any], kind: type[T], absent: S, nothing: object = ...) -> list[T | S]:
        """Return the replies, `absent` for an error of a single key or for `nothing`; raises on a rejection."""
        usable: list[T | S] = []
        for answer in answers:
            if isinstance(answer, kind):
                usable.append(answer)
            elif answer is nothing or passes_over(answer) or (self._clustered and is_elsewhere(answer)):
                usable.append(absent)
            elif is_elsewhere(answer):
                raise StoreError(
                    FailureReason.OTHER, f"{self._settings.shown} is a node of a cluster: use redis+cluster://"
                )
            elif isinstance(answer, ResponseError):
                raise self._error(answer)
            else:
                raise StoreError(
                    FailureReason.MALFORMED, f"{self._settings.shown}: the server returned an unexpected type"
                )
        return usable

    def _ask(self, keys: Sequence[bytes], commands: Sequence[Command]) -> list[Any]:
        """Return the replies to commands, whose key is inserted after the command's name."""
        names = [self._prefix + key.hex().encode() for key in keys]
        answers: list[Any] = [None] * len(keys)
        positions = list(range(len(keys)))
        for attempt in range(2):
            for pool, group in self._routes.groups([names[position] for position in positions]) if positions else ():
                asked = [positions[index] for index in group]
                said = exchange(pool, [(commands[p][0], names[p], *commands[p][1:]) for p in asked])
                for position, answer in zip(asked, said, strict=True):
                    answers[position] = answer
            positions = [position for position in positions if is_elsewhere(answers[position])]
            if positions and not attempt:
                self._routes.refresh()
        return answers

    def _keeping(self, report: _Report) -> str:
        if self._settings.ttl is not None:
            return f"values expire after {self._settings.ttl} s"
        if report.limit_bytes is None or report.policy is None:
            return "values do not expire"
        if not report.limit_bytes:
            return "without a memory limit: the server grows until ttl=SECONDS or its maxmemory is set"
        if report.policy == "noeviction" or report.policy.startswith("volatile-"):
            return f"rejects values when full ({report.policy}); set allkeys-lru to evict instead"
        return f"evicts by {report.policy}"

    def _reports(self) -> list[_Report]:
        """Read the facts of each server, without those that it denies."""
        reports = []
        for pool in self._routes.pools():
            server, memory, size = exchange(pool, [(b"INFO", b"server"), (b"INFO", b"memory"), (b"DBSIZE",)])
            about, facts = _facts(server), _facts(memory)
            valkey, version = about.get("valkey_version"), about.get("redis_version")
            report = _Report(
                product=f"Valkey {valkey}" if valkey else f"Redis {version}" if version else "a server",
                values=size if isinstance(size, int) else None,
                used_bytes=_number(facts.get("used_memory")),
                limit_bytes=_number(facts.get("maxmemory")),
                policy=facts.get("maxmemory_policy"),
            )
            reports.append(report)
        return reports


def _facts(answer: Any) -> dict[str, str]:
    if not isinstance(answer, bytes):
        return {}
    lines = answer.decode("utf-8", "replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _total(figures: Iterable[int | None]) -> int | None:
    known = list(figures)
    return None if None in known else sum(figure for figure in known if figure is not None)


def _windows(positions: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split `positions` into runs of values of at most about `_WINDOW` bytes in total."""
    window: list[int] = []
    size = 0
    for position in positions:
        if window and size + lengths[position] > _WINDOW:
            yield window
            window, size = [], 0
        window.append(position)
        size += lengths[position]
    if window:
        yield window
