"""The values between gateway and router: a request, the workers that were selected for it, or why there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from fd_core.errors import BadRequest
from fd_core.router.accounting import Guard, WorkerLoads
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray, frozen

__all__ = ["Mode", "NoWorker", "Reason", "RouteRequest", "Selection", "Verdict"]

Mode = Literal["mixed", "pd"]
Verdict = Literal["served", "failed", "declined"]
Reason = Literal["none_registered", "none_healthy", "all_busy", "all_tried", "too_many_attempts", "answer_started"]


@dataclass(frozen=True, slots=True, eq=False)
class RouteRequest:
    """What the router sees of a request. Raises `BadRequest` if there is no prompt."""

    tokens: IntArray
    """Prompt, int32 of shape [n], n at least 1, tokenized as the workers tokenize it; a gateway without a tokenizer
    gives numbers of its own that are equal where the text is, such as the bytes of the text."""
    session: str | None = None
    """Name that all requests of one conversation or user carry."""
    salt: str = ""
    """Requests of different salts share no prefix."""
    prefill_tokens: int | None = None
    """Length of the prompt for the accounting, in tokens; None counts `tokens`."""
    model: str | None = None
    """Name of the model that is asked for; None takes any model."""
    tokenized: bool = True
    """Whether `tokens` are token ids of the workers, and not numbers of the gateway's own."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not len(self.tokens):
            raise BadRequest("the prompt has no tokens", field="prompt", hint="send at least one token")
        frozen(self.tokens)
        if self.prefill_tokens is not None and self.prefill_tokens < 0:
            raise BadRequest(f"prefill_tokens is {self.prefill_tokens}, it cannot be negative", field="prompt")

    @property
    def length(self) -> int:
        """Tokens of the prompt, for the accounting."""
        return len(self.tokens) if self.prefill_tokens is None else self.prefill_tokens


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker can take the request."""

    reason: Reason
    message: str
    """For the client."""
    retry_after: float | None
    """Seconds after which the client should try again; None if trying again cannot help."""

    @property
    def status(self) -> int:
        """HTTP status: 429 if every worker is busy, 502 if workers failed, otherwise 503."""
        if self.reason == "all_busy":
            return 429
        return 503 if self.reason in ("none_registered", "none_healthy") else 502


class Selection:
    """The workers of one attempt, and the guards that count it; made by `Router.select` and `Router.retry`.

    The stream of the answer calls `first_token` when its first byte comes and `release` in its own `finally`, or uses
    the selection as a context manager. Verdicts (`Router.served`, `prefilled`, `failed`, `declined`) come before
    `release`.
    """

    __slots__ = (
        "_loads",
        "_on_release",
        "_released",
        "attempt",
        "decode",
        "guards",
        "hits",
        "keys",
        "kv_port",
        "mode",
        "prefill",
        "request",
        "started",
        "trials",
        "tried",
        "verdicts",
    )

    def __init__(
        self,
        request: RouteRequest,
        guards: tuple[Guard, ...],
        *,
        loads: WorkerLoads,
        on_release: Callable[[Selection], None],
        keys: tuple[bytes, ...] = (),
        hits: int = 0,
        tried: frozenset[str] = frozenset(),
        trials: frozenset[RouterWorker] = frozenset(),
        kv_port: int | None = None,
        attempt: int = 1,
    ) -> None:
        self.request = request
        self.guards = guards
        """One guard for a mixed worker; the prefill side's and the decode side's, in this order, for a pair."""
        self.prefill: RouterWorker = guards[0].worker
        self.decode: RouterWorker = guards[-1].worker
        """The worker that streams the answer; the same as `prefill` unless `mode` is `pd`."""
        self.mode: Mode = "mixed" if len(guards) == 1 else "pd"
        self.keys = keys
        """Block keys of the prompt, as far as a policy needed them."""
        self.hits = hits
        """Leading blocks of the prompt that the prefill side is believed to hold."""
        self.tried = tried
        """Addresses of workers on which earlier attempts of the request failed."""
        self.trials = trials
        """Workers whose circuit breaker let this one request through."""
        self.kv_port = kv_port
        """Port from which the decode worker of a pair takes the KV of the prompt; None for a mixed worker."""
        self.attempt = attempt
        """Number of the attempt, from 1 on."""
        self.started = False
        """Whether the answer has begun; then the request may not be retried."""
        self.verdicts: dict[RouterWorker, Verdict] = {}
        self._loads = loads
        self._on_release = on_release
        self._released = False

    @property
    def workers(self) -> tuple[RouterWorker, ...]:
        """Each worker once, the prefill side first."""
        return tuple(guard.worker for guard in self.guards)

    @property
    def released(self) -> bool:
        """Whether the selection has given back everything that it counted."""
        return self._released

    def first_token(self) -> None:
        """Give back what counted for prefill: the first token came. May be called for every token."""
        if self.started:
            return
        self.started = True
        for guard in self.guards:
            guard.first_token()

    def release(self) -> bool:
        """Give back the rest: the stream ended. A second call is counted as a fault and returns False."""
        if self._released:
            self._loads.fault()
            return False
        self._released = True
        for guard in self.guards:
            if not guard.released:
                guard.release()
        self._on_release(self)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
