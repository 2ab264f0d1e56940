"""Observers: receive the samples of each step, outside the engine's loop and without blocking it.

    engine's loop                    observer's thread
    step_ended(...) --> bounded queue --> SampledStep --> Observer.observe

The loop queues immutable values and continues. If the observer lags, steps are dropped and counted; its exceptions are
counted and logged once.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from fd_core import signals
from fd_core.types import StepOutput, StepPlan
from fd_core.types.metrics import counter, snapshot

__all__ = ["Observer", "ObserverStats", "ObserverThread", "SampledRequest", "SampledStep"]

_log = logging.getLogger(__name__)

MAX_QUEUED: Final = 1024
"""Capacity of the queue; further steps are dropped."""
_IDLE_SECONDS: Final = 0.05
_CLOSE_SECONDS: Final = 5.0
"""Timeout in seconds to drain the queue at close."""


class SampledRequest(msgspec.Struct, frozen=True):
    """Tokens that a step sampled for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """Accepted drafts and one further token. Those after the end of the request's text are not delivered."""
    drafts_proposed: int
    """Number of drafts in the plan."""
    drafts_accepted: int


class SampledStep(msgspec.Struct, frozen=True):
    """Tokens sampled in one step, without prompts. Requests without a sampled token are omitted."""

    epoch: int
    step: int
    requests: tuple[SampledRequest, ...]


class Observer(abc.ABC):
    """Observer of sampled tokens. Created without arguments when the engine starts, then called on one thread; it may
    block and raise. Files that it writes the ids of tokens to are private, as the texts of answers are."""

    @abc.abstractmethod
    def observe(self, step: SampledStep) -> None:
        """Receive one step. Steps arrive in order, with gaps for dropped ones."""

    def close(self) -> None:  # noqa: B027 - most observers hold no resources
        """Release the observer's resources; called after the last step."""


class ObserverStats(msgspec.Struct):
    """Counters of one observer."""

    steps: Annotated[int, counter("observer_steps", "Steps that the observer received.")] = 0
    failures: Annotated[int, counter("observer_failures", "Calls that the observer ended with an exception.")] = 0
    dropped: Annotated[int, counter("observer_dropped_steps", "Steps dropped because the observer lagged.")] = 0


class ObserverThread:
    """Delivers the steps of one engine to one observer."""

    def __init__(self, observer: Observer, slots: int) -> None:
        self._observer = observer
        self._names = [""] * slots
        """Request by slot. Replaced, not mutated, because queued steps refer to it."""
        self._queue: deque[tuple[StepPlan, StepOutput, list[str]]] = deque()
        self._stats = ObserverStats()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fdcore-observer", daemon=True)
        self._thread.start()

    def step_ended(self, plan: StepPlan, output: StepOutput) -> None:
        """Queue a step with its output, or count it as dropped if the queue is full."""
        if plan.admissions:
            self._names = self._names.copy()
            for admission in plan.admissions:
                self._names[admission.slot] = admission.request_id
        if len(self._queue) < MAX_QUEUED:
            self._queue.append((plan, output, self._names))
        else:
            self._stats.dropped += 1

    def stats(self) -> ObserverStats:
        """Return the counters as they are now."""
        return snapshot(self._stats)

    def close(self) -> None:
        """Drain the queue within the timeout, then close the observer."""
        self._ending.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(_IDLE_SECONDS)
            while self._queue:
                plan, output, names = self._queue.popleft()
                self._stats.steps += 1
                self._attempt(self._observe, plan, output, names)
                # Yields the GIL to the engine's thread at once instead of after a switch interval.
                time.sleep(0)
        self._attempt(self._observer.close)

    def _observe(self, plan: StepPlan, output: StepOutput, names: list[str]) -> None:
        slots, outcomes = plan.slots, signals.read(output.tokens, output.errors)
        counts = outcomes.counts[slots] * (output.gens[slots] == plan.gens)
        columns = slots, outcomes.tokens[slots], counts, plan.num_drafts
        rows = zip(*(column.tolist() for column in columns), strict=True)
        requests = (
            SampledRequest(names[slot], tuple(tokens[:count]), drafts, drafts_accepted=count - 1)
            for slot, tokens, count, drafts in rows
            if count
        )
        self._observer.observe(SampledStep(plan.epoch, plan.step, tuple(requests)))

    def _attempt(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - a plugin's observer may raise anything
            if not self._stats.failures:
                # Without the message, which may contain tokens of a text.
                _log.warning("the observer failed: %s; further failures are only counted", type(error).__name__)
            self._stats.failures += 1
