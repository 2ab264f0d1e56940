"""Thousands of clients that disconnect, read slowly or do not stream, and each check their own responses."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

__all__ = ["Answer", "ClientProfile", "Crowd", "Prompt", "Report", "ask_alone", "client_profiles"]

_DONE = b"data: [DONE]"
_SMALL_BUFFER = 4096


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    delta: dict[str, Any] = {}
    message: dict[str, Any] = {}
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Refusal(msgspec.Struct):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class _Refused(msgspec.Struct):
    error: _Refusal


_events = msgspec.json.Decoder(_Event)
_refusals = msgspec.json.Decoder(_Refused)


@dataclass(slots=True)
class Answer:
    """One choice as read by the client."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: _Choice) -> bool:
        """Add the part of one event; return False if it follows the end."""
        if self.finish_reason is not None:
            return False
        self.text += choice.text or choice.delta.get("content") or choice.message.get("content") or ""
        self.token_ids += choice.token_ids or ()
        self.finish_reason = choice.finish_reason
        return True

    def begins(self, whole: Answer) -> bool:
        """Return True if this is a prefix of `whole`."""
        size = len(self.token_ids)
        return whole.token_ids[:size] == self.token_ids and whole.text.startswith(self.text.rstrip("\ufffd"))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that always has the same answer."""

    path: str
    body: Mapping[str, Any]
    long: bool = False
    """True if the answer fills every buffer between a worker and a client that does not read."""


Leaves = Literal["never", "before", "middle", "end"]


@dataclass(frozen=True, slots=True)
class ClientProfile:
    """Behaviour of one client."""

    prompt: int
    stream: bool
    leaves: Leaves
    when: float
    """Relative time of that, within [0, 1)."""
    slow: bool
    salt: str
    """Cache salt: prompts with the same salt share prefixes; it does not change answers."""


def client_profiles(prompts: Sequence[Prompt], count: int, seed: int) -> list[ClientProfile]:
    """Return prompt and behaviour of each client: a quarter disconnects, a fifth does not stream, one in forty reads
    slowly, and half of them share prefixes."""
    rng = random.Random(seed)
    short = [index for index, prompt in enumerate(prompts) if not prompt.long]
    long = [index for index, prompt in enumerate(prompts) if prompt.long]
    made: list[ClientProfile] = []
    for number in range(count):
        slow = rng.random() < 0.025
        stream = slow or rng.random() < 0.8
        leaves: Leaves = "never"
        if rng.random() < 0.25:
            leaves = rng.choice(("before", "middle", "middle", "end")) if stream else "before"
        salt = f"{seed}-{number}" if rng.random() < 0.5 else "shared"
        made.append(ClientProfile(rng.choice(long if slow else short), stream, leaves, rng.random(), slow, salt))
    return made


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ended with an error: its code, its start (of a stream: the first byte) and its end."""

    code: str | None
    began: float
    ended: float


@dataclass(slots=True)
class Report:
    """Results of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """`whole`, `left`, `broken`, `refused STATUS CODE` and the behaviour of each client."""
    broken: list[Failed] = field(default_factory=list)
    """Streams that ended with an error event."""
    refused: list[Failed] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """Violations of what must always hold."""
    longest: float = 0.0
    """Seconds of the slowest request of a fast reader."""

    @property
    def requests(self) -> int:
        return sum(self.count(kind) for kind in ("whole", "left", "broken", "refused", "wrong"))

    def count(self, kind: str) -> int:
        return sum(count for name, count in self.outcomes.items() if name.split()[0] == kind)


class _Left(Exception):
    """The client has read enough and disconnects."""


class _Wrong(Exception):
    """The response violates the protocol."""


class Crowd:
    """Clients that send requests to `url`, at most `at_once` at a time."""

    def __init__(
        self, url: str, prompts: Sequence[Prompt], whole: Sequence[list[Answer]], *, at_once: int, longest: float
    ) -> None:
        """`whole` holds the expected answers; `longest` limits the seconds of a request."""
        self.report = Report()
        self._url = url
        self._prompts = prompts
        self._whole = whole
        self._at_once = at_once
        self._longest = longest
        self.num_sent = 0

    async def ask_all(self, every: Iterable[ClientProfile]) -> None:
        """Send a request for each of `every`."""
        left = iter(every)

        async def one_after_the_other(quick: aiohttp.ClientSession, slow: aiohttp.ClientSession) -> None:
            for profile in left:
                self.num_sent += 1
                await self._one(slow if profile.slow else quick, profile)

        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(
                self._url, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=5), timeout=timeout
            ) as quick,
            aiohttp.ClientSession(
                self._url,
                connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_small_socket),
                timeout=timeout,
                read_bufsize=_SMALL_BUFFER,
            ) as slow,
        ):
            await asyncio.gather(*(one_after_the_other(quick, slow) for _ in range(self._at_once)))

    async def _one(self, session: aiohttp.ClientSession, profile: ClientProfile) -> None:
        report, began = self.report, time.monotonic()
        try:
            async with asyncio.timeout(self._longest):
                outcome = await self._ask(session, profile)
        except _Wrong as wrong:
            outcome = "wrong"
            report.violations.append(f"{wrong} ({profile})")
        except TimeoutError:
            outcome = "wrong"
            report.violations.append(f"no end after {self._longest:g} s ({profile})")
        except (aiohttp.ClientError, OSError) as error:
            outcome = "wrong"
            report.violations.append(f"the connection broke: {error!r} ({profile})")
        report.outcomes[outcome] += 1
        if not profile.slow:
            report.longest = max(report.longest, time.monotonic() - began)

    async def _ask(self, session: aiohttp.ClientSession, profile: ClientProfile) -> str:
        prompt, began = self._prompts[profile.prompt], time.monotonic()
        asking = session.post(
            prompt.path,
            data=msgspec.json.encode({**prompt.body, "stream": profile.stream, "cache_salt": profile.salt}),
            headers={"Content-Type": "application/json"},
        )
        if profile.leaves == "before":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.12 * profile.when**2), asking as response:
                    return await self._read(response, profile, began)
            return "left before"
        async with asking as response:
            try:
                return await self._read(response, profile, began)
            except _Left:
                response.close()
                return f"left {profile.leaves}"

    async def _read(self, response: aiohttp.ClientResponse, profile: ClientProfile, began: float) -> str:
        if response.status != 200:
            code = _refusal_of(await response.read()).code
            self.report.refused.append(Failed(code, began, time.monotonic()))
            return f"refused {response.status} {code}"
        whole = self._whole[profile.prompt]
        if not profile.stream:
            return _complete(_in_one_piece(await response.read()), whole)
        return await self._follow(response, profile, whole)

    async def _follow(self, response: aiohttp.ClientResponse, profile: ClientProfile, whole: list[Answer]) -> str:
        """Read a stream to its end, or until this client disconnects."""
        answers = [Answer() for _ in whole]
        size = sum(len(answer.token_ids) for answer in whole)
        enough = int(profile.when * size) if profile.leaves == "middle" else None
        held, began, done, failed, read = b"", time.monotonic(), False, None, 0
        while chunk := await response.content.readany():
            *blocks, held = (held + chunk).split(b"\n\n")
            for block in blocks:
                if done or failed:
                    raise _Wrong(f"data after the end: {block[:80]!r}")
                if block == _DONE:
                    done = True
                elif block.startswith(b"event: error\n"):
                    failed = _refusal_of(block.partition(b"data:")[2])
                else:
                    read += _add_event(block, answers)
            over = all(answer.finish_reason for answer in answers)
            if (enough is not None and read > enough) or (profile.leaves == "end" and over and not failed):
                _check_beginning(answers, whole)
                raise _Left
            if profile.slow:
                await asyncio.sleep(0.004 if len(chunk) < _SMALL_BUFFER else 0.03)
        if held:
            raise _Wrong(f"incomplete event at the end: {held[:80]!r}")
        if done:
            return _complete(answers, whole)
        if failed is None:
            raise _Wrong("a stream ended without [DONE] and without an error")
        _check_beginning(answers, whole)
        self.report.broken.append(Failed(failed.code, began, time.monotonic()))
        return f"broken {failed.code}"


async def ask_alone(url: str, prompts: Sequence[Prompt]) -> list[list[Answer]]:
    """Return the answers to all prompts, without streaming and few at a time."""
    gate = asyncio.Semaphore(8)

    async def one(session: aiohttp.ClientSession, prompt: Prompt) -> list[Answer]:
        async with gate, session.post(prompt.path, json={**prompt.body, "stream": False}) as response:
            content = await response.read()
            assert response.status == 200, content
            return _in_one_piece(content)

    async with aiohttp.ClientSession(url) as session:
        return await asyncio.gather(*(one(session, prompt) for prompt in prompts))


def _add_event(block: bytes, answers: list[Answer]) -> int:
    """Add an event to the answers and return its number of tokens."""
    try:
        event = _events.decode(block.removeprefix(b"data:"))
    except msgspec.MsgspecError as error:
        raise _Wrong(f"no event: {error}: {block[:80]!r}") from error
    if event.error is not None or not block.startswith(b"data:"):
        raise _Wrong(f"an error event of another type: {block[:120]!r}")
    for choice in event.choices:
        if not answers[choice.index].add(choice):
            raise _Wrong(f"an event after the finish reason: {block[:120]!r}")
    return sum(len(choice.token_ids or ()) for choice in event.choices)


def _in_one_piece(content: bytes) -> list[Answer]:
    try:
        choices = sorted(_events.decode(content).choices, key=lambda choice: choice.index)
    except msgspec.MsgspecError as error:
        raise _Wrong(f"no answer: {error}: {content[:80]!r}") from error
    answers = [Answer() for _ in choices]
    for answer, choice in zip(answers, choices, strict=True):
        answer.add(choice)
    return answers


def _complete(answers: list[Answer], whole: list[Answer]) -> str:
    if answers != whole:
        raise _Wrong(f"expected {whole!r:.300}, got {answers!r:.300}")
    return "whole"


def _check_beginning(answers: list[Answer], whole: list[Answer]) -> None:
    for answer, right in zip(answers, whole, strict=True):
        if not answer.begins(right):
            raise _Wrong(f"not a prefix of the text: {answer!r:.300}, expected {right!r:.300}")


def _refusal_of(content: bytes) -> _Refusal:
    try:
        return _refusals.decode(content).error
    except msgspec.MsgspecError as error:
        raise _Wrong(f"an error not in OpenAI's format: {content[:200]!r}") from error


def _small_socket(info: Any) -> socket.socket:
    """Make a socket with small buffers."""
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    return made
