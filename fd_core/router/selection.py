"""The worker for one request, and what every worker has in flight."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Final, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import BadRequest
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray
from fd_core.types.metrics import gauge

Numbers = npt.NDArray[np.int64]


class WorkerIndices(dict[Hashable, int]):
    """The index of each worker in arrays and in bit sets, assigned on first use and kept until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[int] = []
        """Free indices, as a heap, so that there are at most as many indices as workers at one time."""
        self.size = 0
        """Length of arrays with one element for every index."""

    def __missing__(self, worker: Hashable) -> int:
        """Assign and return the index of a worker that has none."""
        self[worker] = index = heapq.heappop(self._free) if self._free else self.size
        self.size = max(self.size, index + 1)
        return index

    def among(self, workers: Iterable[Hashable]) -> Numbers:
        """Return the indices of several workers, shape [n]."""
        return np.array([self[worker] for worker in workers], np.int64)

    def release(self, worker: Hashable) -> None:
        """Free the index of a worker without any state left."""
        index = self.pop(worker, None)
        if index is not None:
            heapq.heappush(self._free, index)


class WorkerLoad(msgspec.Struct, frozen=True):
    """The load of one incarnation, or the part of one selection."""

    requests: Annotated[int, gauge("requests", "Requests in flight: assigned to the worker and not ended.")] = 0
    waiting: Annotated[int, gauge("requests_waiting", "Requests in flight whose answer has not begun.")] = 0
    prefill_tokens: Annotated[
        int,
        gauge(
            "prefill_tokens",
            "Prompt tokens to compute for requests whose answer has not begun, without tokens believed to be cached.",
        ),
    ] = 0

    def plus(self, other: WorkerLoad) -> WorkerLoad:
        """Return the sum of both loads."""
        return WorkerLoad(
            self.requests + other.requests, self.waiting + other.waiting, self.prefill_tokens + other.prefill_tokens
        )


IDLE: Final = WorkerLoad()


class WorkerLoads:
    """The load of every incarnation."""

    def __init__(self, on_idle: Callable[[RouterWorker], None], indices: WorkerIndices) -> None:
        """`on_idle` is called with each worker whose last request ended."""
        self.by_worker: dict[RouterWorker, WorkerLoad] = {}
        """The load of every incarnation that has one, lost ones included; read-only for others."""
        self._indices = indices
        self._columns = np.zeros((len(msgspec.structs.fields(WorkerLoad)), 16), np.int64)
        """The same by field and index."""
        self._cells, self._room = self._columns.data, self._columns.shape[1]
        self._on_idle = on_idle
        self.faults = 0
        """Duplicate or late releases and verdicts: 0 unless a caller has a bug."""

    def at(self, indices: Numbers) -> Numbers:
        """Return the current loads of workers by their indices: shape [fields of `WorkerLoad`, n]."""
        if self._indices.size > self._room:
            self._make_room()
        return self._columns.take(indices, axis=1)

    def change(self, worker: RouterWorker, requests: int, waiting: int, prefill_tokens: int) -> None:
        """Count load on `worker`; negative numbers release what was counted."""
        load = self.by_worker.get(worker, IDLE)
        requests, waiting = load.requests + requests, load.waiting + waiting
        prefill_tokens += load.prefill_tokens
        index = self._indices[worker]
        if index >= self._room:
            self._make_room()
        cells = self._cells  # a third of the time of `_columns[:, index] =`
        cells[0, index], cells[1, index], cells[2, index] = requests, waiting, prefill_tokens
        if requests or waiting or prefill_tokens:
            self.by_worker[worker] = WorkerLoad(requests, waiting, prefill_tokens)
        else:
            del self.by_worker[worker]
            self._on_idle(worker)

    def _make_room(self) -> None:
        longer = np.zeros((len(self._columns), 2 * self._indices.size), np.int64)
        longer[:, : self._room] = self._columns
        self._columns, self._cells, self._room = longer, longer.data, longer.shape[1]


Mode = Literal["mixed", "pd", "alone"]
"""A mixed worker, a pair of a prefill and a decode worker, or a decode worker that computes the prompt itself."""
Verdict = Literal["served", "failed", "declined"]
Reason = Literal[
    "none_registered", "none_healthy", "all_busy", "all_tried", "too_many_attempts", "failed_twice", "answer_started"
]


class RouteRequest(msgspec.Struct, frozen=True, eq=False):
    """The router's view of a request. Raises `BadRequest` if there is no prompt."""

    tokens: IntArray
    """Prompt, int32 of shape [n], n at least 1, tokenized as the workers tokenize it; a gateway without a tokenizer
    supplies numbers that are equal where the text is, such as the bytes of the text."""
    session: str | None = None
    salt: str = ""
    """Requests of different salts share no prefix."""
    prefill_tokens: int | None = None
    """Length of the prompt for the accounting, in tokens; None counts `tokens`."""
    model: str | None = None
    tokenized: bool = True
    """True if `tokens` are token ids of the workers, False for numbers that the gateway derived from the text."""
    output_tokens: int = 0
    """Most tokens of all answers together, if the request limits them."""
    home: RouterWorker | None = None
    """Worker that alone stores the conversation that the request continues; None allows any worker."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not len(self.tokens):
            raise BadRequest("the prompt has no tokens", field="prompt", hint="send at least one token")
        self.tokens.setflags(write=False)
        if self.prefill_tokens is not None and self.prefill_tokens < 0:
            raise BadRequest(f"prefill_tokens={self.prefill_tokens} is negative; expected at least 0", field="prompt")

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


class Selection(msgspec.Struct, eq=False):
    """The guard of one attempt, made by `Router.select` and `retry`: the load of its workers, until `release`."""

    request: RouteRequest
    workers: tuple[RouterWorker, ...]
    """The prefill side and the decode side of a pair, in this order; otherwise the one worker."""
    held: dict[RouterWorker, WorkerLoad]
    """Load counted on each worker at this moment."""
    loads: WorkerLoads
    on_release: Callable[[Selection], None]
    keys: tuple[bytes, ...] = ()
    """Block keys of the prompt, as far as a policy needed them."""
    hits: int = 0
    """Leading blocks of the prompt that the prefill side is believed to hold."""
    tried: frozenset[str] = frozenset()
    """Addresses of workers on which earlier attempts of the request failed."""
    trials: frozenset[RouterWorker] = frozenset()
    """Workers whose circuit breaker let this one request through."""
    kv_port: int | None = None
    """Port from which the decode worker of a pair takes the KV of the prompt; None where there is no pair."""
    mode: Mode = "mixed"
    attempt: int = 1
    suspects: tuple[RouterWorker, ...] = ()
    """Workers that failed on the request, now or earlier: they are at fault once another one succeeds."""
    failures: int = 0
    """Attempts, this one included, in which the side that answers failed although it was reachable."""
    started: bool = False
    """True once the answer has begun; then the request may not be retried."""
    released: bool = False
    verdicts: dict[RouterWorker, Verdict] = {}

    @property
    def prefill(self) -> RouterWorker:
        """The worker that computes the prompt."""
        return self.workers[0]

    @property
    def decode(self) -> RouterWorker:
        """The worker that streams the answer; the same as `prefill` unless `mode` is `pd`."""
        return self.workers[-1]

    def first_token(self) -> None:
        """Release the prefill load: the first token has arrived. May be called for every token."""
        if self.started:
            return
        self.started = True
        for worker, held in self.held.items():
            left = 0 if worker.role == "prefill" else held.requests
            self.held[worker] = WorkerLoad(left)
            self.loads.change(worker, left - held.requests, -held.waiting, -held.prefill_tokens)

    def release(self) -> bool:
        """Release the remaining load: the stream ended. A second call is counted as a fault and returns False."""
        if self.released:
            self.loads.faults += 1
            return False
        self.released = True
        for worker, held in self.held.items():
            if held.requests:
                self.loads.change(worker, -held.requests, -held.waiting, -held.prefill_tokens)
        self.held.clear()
        self.on_release(self)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
