"""What the handlers of one server share, who may still enter, and the grammars that requests ask for."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec
from fastapi import Request

import fd_core
from fd_core.config import ServerConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.process.messages import EngineInfo
from fd_core.errors import BadRequest
from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget
from fd_core.http.draining import Drain
from fd_core.http.errors import ApiError, unavailable, unsupported
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor
from fd_core.server.batches.service import BatchService
from fd_core.server.preprocess.body import UnknownFieldLog
from fd_core.server.responses.schemas import ResponseAnswer
from fd_core.server.schemas.requests import Message
from fd_core.server.state.metrics import ServerMetrics
from fd_core.structured.compiler import vocabulary_table
from fd_core.structured.grammar import FormAsked
from fd_core.structured.workers.messages import FormOutcome
from fd_core.structured.workers.pool import CompilePool
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import PromptReader
from fd_core.text.tokenizer import Tokenizer

MAX_BYTES: Final = 64 * 2**20
"""Of all that is kept, as JSON."""
_WAIT_SECONDS: Final = 30.0
"""For a slot, a process and the work together."""
_WARM_UP_SECONDS: Final = 2.0
"""Pause after the start of a server, whose first requests need the processors themselves."""
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the conversation up to its end, without the instructions."""

    answer: ResponseAnswer
    messages: tuple[Message, ...]


@dataclass(slots=True)
class _OwnerAnswers:
    """Answers of one owner, the oldest first, with their bytes."""

    kept: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)
    bytes: int = 0


class ResponseStore:
    """At most `capacity` answers and `max_bytes` of them, each seen by its owner only.

    Without room, the oldest answer of the owner who keeps most is forgotten, so that no key displaces those of others
    beyond an equal share.
    """

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._owners: dict[str, _OwnerAnswers] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep an answer of an owner; one that is larger than the store is not kept."""
        size = len(msgspec.json.encode((stored.answer, stored.messages)))
        if size > self._max_bytes or not self.capacity:
            return
        self.delete(owner, stored.answer.id)  # clients choose request ids, and may use one again
        owned = self._owners.setdefault(owner, _OwnerAnswers())
        owned.kept[stored.answer.id] = stored, size
        owned.bytes += size
        self._bytes += size
        self._count += 1
        while self._count > self.capacity:
            self._forget_oldest(max(self._owners, key=lambda each: len(self._owners[each].kept)))
        while self._bytes > self._max_bytes:
            self._forget_oldest(max(self._owners, key=lambda each: self._owners[each].bytes))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return an answer of an owner, None if it is not kept (any more)."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.kept.get(response_id)
        return None if found is None else found[0]

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget an answer of an owner; return True if it was kept."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.kept.pop(response_id, None)
        if owned is None or found is None:
            return False
        owned.bytes -= found[1]
        self._bytes -= found[1]
        self._count -= 1
        if not owned.kept:
            del self._owners[owner]
        return True

    def _forget_oldest(self, owner: str) -> None:
        self.delete(owner, next(iter(self._owners[owner].kept)))


class GrammarChecker:
    """Makes grammars in other processes, so that a bad one is a 400 and delays no one else; one for each server."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        """`info` is that of the engine whose requests are checked."""
        self._served = info.structured_output
        self._pool = CompilePool(partial(vocabulary_table, tokenizer, info.vocab_size, info.eos_token_ids))

    def warm_up(self) -> None:
        """Start a process soon, so that the first request with a form need not wait for it."""
        if self._served:
            self._pool.warm_up(_WARM_UP_SECONDS)

    async def checked(self, form: FormAsked) -> FormOutcome:
        """Return the grammar of a form, compiled once to see that it can be, and what it leaves open.

        Raises `ApiError` (400) that names the place of a form that cannot be used or takes too long, and 503 where too
        many others are before it.
        """
        if not self._served:
            raise unsupported(f"{form.field}: structured output is switched off here", form.field)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                outcome = await self._pool.run(form)
        except (OSError, EOFError):  # a timeout is an `OSError`
            raise unavailable(
                f"{form.field}: no process was free for its grammar; try again", "grammars_busy", retry_after=5
            ) from None
        if outcome.message:
            raise BadRequest(outcome.message, field=outcome.field, code=outcome.code)
        return outcome

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()


class ActiveRequests:
    """Which engine requests belong to which HTTP request.

    A client may use one request id for several requests at the same time (a trace id), and so may clients with other
    keys; engine ids are unique.
    """

    def __init__(self) -> None:
        self._engine_ids: dict[str, dict[str, str]] = {}
        """Engine ids by request id, each with the owner of its request."""
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._engine_ids)

    def enter(self, request_id: str, count: int, owner: str = "") -> list[str]:
        """Reserve `count` engine ids for a request of an owner's."""
        serial = next(self._serial)
        ids = [f"{request_id}.{serial:x}.{index}" for index in range(count)]
        self._engine_ids.setdefault(request_id, {}).update(dict.fromkeys(ids, owner))
        return ids

    def leave(self, request_id: str, engine_ids: list[str]) -> None:
        """Forget engine ids of a request that has ended."""
        left = self._engine_ids[request_id]
        for engine_id in engine_ids:
            del left[engine_id]
        if not left:
            del self._engine_ids[request_id]

    def engine_ids(self, given: str, reaches: Callable[[str], bool]) -> list[str]:
        """Return the engine ids behind a request id or the `id` of an answer; empty if none is active.

        Only requests whose owner the caller `reaches` are looked at: which ids others use changes nothing. A request id
        may look like the `id` of another answer; both are meant then, whichever worker has them.
        """
        names = (given, *(given.removeprefix(prefix) for prefix in _PREFIXES if given.startswith(prefix)))
        return [each for name in names for each, owner in self._engine_ids.get(name, {}).items() if reaches(owner)]

    def all_ids(self, reaches: Callable[[str], bool]) -> list[str]:
        """Return the engine ids of every request whose owner the caller `reaches`."""
        return [each for ids in self._engine_ids.values() for each, owner in ids.items() if reaches(owner)]

    @staticmethod
    def request_id(engine_id: str) -> str:
        """Return the request id that an engine id was made from."""
        return engine_id.rsplit(".", 2)[0]


class ServedName(NamedTuple):
    """A name under which the model answers, and what computes its texts."""

    name: str
    adapter: str
    """Digest of the LoRA adapter that the name stands for; empty for the model itself."""
    fingerprint: str
    """OpenAI's `system_fingerprint`: equal where equal requests with a seed get equal texts."""


@dataclass
class ServerState:
    """The engine, or the engines, behind one HTTP server."""

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    prompt_reader: PromptReader
    metrics: ServerMetrics
    grammars: GrammarChecker
    bodies: BodyBudget
    parsers: Parsers = field(default_factory=Parsers)
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    active: ActiveRequests = field(default_factory=ActiveRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this process, so that a router notices another one at the same address."""
    ticket_key: bytes | None = None
    """Authenticates the tickets with which a router assigns prompts to prefill workers; None unless this is a decode
    worker."""
    batches: BatchService | None = None
    """Keeps files and runs batches; None if that is turned off."""
    supervisor: Supervisor = field(default_factory=Supervisor)
    drain: Drain = field(default_factory=Drain)
    access: AccessControl = field(default_factory=AccessControl)
    spans: RequestSpans | None = None
    unknown_fields: UnknownFieldLog = field(default_factory=UnknownFieldLog)
    _names: dict[str, ServedName] = field(init=False, default_factory=dict)
    """What answers under each name, the main one first."""
    _named_for: EngineInfo | None = field(init=False, default=None)
    """The engine that `_names` was made for."""

    @property
    def context(self) -> int:
        """Most tokens of prompt and text together."""
        return self.client.info.max_model_len

    @property
    def max_n(self) -> int:
        """Texts that one request may ask for."""
        return self.config.max_n

    @property
    def trusts_templates(self) -> bool:
        """Whether requests may bring a template."""
        return self.config.trust_request_chat_template

    @property
    def incarnation(self) -> str:
        """Names this process and its engine's start: whoever answers under another name has an empty cache."""
        return f"{self.instance}.{self.client.info.epoch}"

    @property
    def names(self) -> Mapping[str, ServedName]:
        """Names under which the model answers, the main one first, and those of its adapters."""
        info = self.client.info
        if info is not self._named_for:
            own = self.config.served_model_names or (info.model,)
            forms = sorted({use.computed for use in info.weights})
            computing = (fd_core.__version__, info.model, info.num_parameters, info.backend, info.device, info.dtype)
            digests = [adapter.digest for adapter in info.adapters]
            text = repr(((*computing, forms), digests))
            mark = f"fp_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
            self._names = {name: ServedName(name, "", mark) for name in own}
            for adapter in info.adapters:
                self._names.setdefault(adapter.name, ServedName(adapter.name, adapter.digest, mark))
            self._named_for = info
        return self._names

    def served(self, asked: str | None) -> ServedName:
        """Return what answers under a name, or under the main one; `ApiError` (404) for a model that is not served."""
        names = self.names
        if not asked:
            return next(iter(names.values()))
        found = names.get(asked)
        if found is None:
            message = f"the model {asked[:128]!r} does not exist; served here: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    @property
    def degraded(self) -> str:
        """What is missing while requests are served: engines, background tasks; empty if nothing is."""
        return "; ".join(filter(None, (self.client.missing, self.supervisor.failing)))

    def not_ready(self) -> str | None:
        """Say why requests are refused, or return None if they are served."""
        if self.drain.leaving:
            return "the server is shutting down"
        return None if self.client.alive else self.client.missing

    def admit(self, count: int) -> None:
        """Raise `ApiError` (503) if `count` more generations cannot be taken, 400 if none ever is."""
        if self.client.info.role == "prefill":
            message = "this prefill worker only computes prompts; send requests to a decode worker or to the router"
            raise ApiError(400, message, code="prefill_worker")
        if not self.client.alive:
            raise unavailable(self.client.missing, "engine_dead", retry_after=5)
        queue = self.config.max_queued_requests
        if self.client.active_requests + count > self.client.info.max_num_seqs + queue:
            raise unavailable(
                f"the queue holds {queue} requests and has no room for {count} more", "queue_full", retry_after=1
            )


def state_of(request: Request) -> ServerState:
    """Return the state that the application was assembled with."""
    state: ServerState = request.app.state.fd
    return state
