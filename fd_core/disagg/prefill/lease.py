"""The prefill side of a lease: it sends blocks as soon as they are settled and the window allows; pure."""

from __future__ import annotations

import math
from collections import deque

from fd_core.disagg import messages
from fd_core.disagg.lease import Action, Clock, End, PrefillEnd, SendMessage, SendPiece, commit_digest, requested_pieces


class PrefillLease:
    """One lease on the prefill worker."""

    def __init__(self, opening: messages.Open, *, longest: float, now: float) -> None:
        """Serve a valid `opening`, see `validate_open`; the lease expires after `longest` seconds."""
        self.ended: End | None = None
        self._opening = opening
        self._name = opening.job.lease
        self._pieces = requested_pieces(opening)
        self._clock = Clock(opening.idle_timeout, longest, now)
        self._accepted = False
        self._waiting: deque[int] = deque()
        self._seen: set[int] = set()
        self._putting: set[int] = set()
        self._sent: dict[int, bytes] = {}
        self._credited = 0
        self._progress = now
        self._final: tuple[int, int] | None = None

    @property
    def next_tick(self) -> float:
        """Return the deadline of the next call of `tick`."""
        return min(self._clock.next, self._stuck) if self.ended is None else math.inf

    def accept(self, now: float) -> list[Action]:
        """Accept the job."""
        if self.ended is not None:
            return []
        self._accepted = True
        return self._send(messages.Accept(self._name), now)

    def refuse(self, reason: str) -> list[Action]:
        """Reject the job, with a reason for the decode side."""
        if self.ended is not None:
            return []
        return [SendMessage(messages.Refuse(self._name, reason)), *self._end("refused", reason, abort=False)]

    def receive(self, message: messages.FromDecode, now: float) -> list[Action]:
        """Handle a message of the decode side, in any order of arrival."""
        if self.ended is not None:
            return []
        self._clock.received(now)
        match message:
            case messages.Open():
                return self._send(messages.Accept(self._name), now) if self._accepted else []
            case messages.Credit(taken=taken):
                return self._receive_credit(taken, now)
            case messages.Confirm():
                return self._end("confirmed", "")
            case messages.AbortLease(reason=reason):
                return self._end("aborted", reason or "the decode worker aborted the lease")
            case _:
                return []

    def ready(self, first: int, count: int) -> list[Action]:
        """Record that `count` blocks from `first` on may be read; blocks that were not requested are ignored."""
        if self.ended is not None:
            return []
        for index in range(max(first, self._pieces.start), min(first + count, self._pieces.stop)):
            if index not in self._seen:
                self._seen.add(index)
                self._waiting.append(index)
        return self._flow()

    def put(self, index: int, digest: bytes, reference: bytes, now: float) -> list[Action]:
        """Record that a piece was passed to the connector: the digest of the value, and the connector's reference."""
        if self.ended is not None or index not in self._putting:
            return []
        self._putting.remove(index)
        self._sent[index] = digest
        self._progress = now
        sending = self._send(messages.KVPiece(self._name, index, digest, reference=reference), now)
        return [*sending, *self._commit(now)]

    def finished(self, tokens: int, cached: int, now: float) -> list[Action]:
        """Record that `ready` named all blocks: they hold the KV of `tokens`, `cached` of which were not computed."""
        if self.ended is not None or self._final is not None:
            return []
        self._final = tokens, cached
        if len(self._seen) < len(self._pieces):
            return self._break("gave_up", "the prefill worker did not compute the whole prompt")
        return self._commit(now)

    def abandon(self, reason: str) -> list[Action]:
        """Record that the request ended without all its KV."""
        return [] if self.ended is not None else self._break("gave_up", reason, abort=False)

    def failed(self, reason: str) -> list[Action]:
        """Record that a piece could not be sent, or that the decode side disconnected."""
        return [] if self.ended is not None else self._break("failed", reason)

    def tick(self, now: float, *, working: bool) -> list[Action]:
        """Process timeouts: end the lease, or send a message; while blocks remain, only if the engine makes
        progress."""
        if self.ended is not None:
            return []
        if late := self._clock.expiry_reason(now):
            return self._break("expired", late)
        if now >= self._stuck:
            return self._break("expired", "a piece was lost in transit or not acknowledged")
        if not self._clock.heartbeat_due(now):
            return []
        if commit := self._commit(now):
            return commit
        if working or self._final is not None:
            return self._send(messages.Heartbeat(self._name), now)
        self._clock.postpone(now)
        return []

    @property
    def _stuck(self) -> float:
        """Return the time at which a piece without credit counts as lost."""
        return self._progress + self._opening.idle_timeout if len(self._sent) > self._credited else math.inf

    def _receive_credit(self, taken: int, now: float) -> list[Action]:
        credited = min(taken, len(self._sent))
        if credited <= self._credited:
            return []
        self._credited = credited
        self._progress = now
        return self._flow()

    def _flow(self) -> list[Action]:
        actions: list[Action] = []
        while self._waiting and len(self._putting) + len(self._sent) - self._credited < self._opening.window:
            index = self._waiting.popleft()
            self._putting.add(index)
            actions.append(SendPiece(index))
        return actions

    def _commit(self, now: float) -> list[Action]:
        if self._final is None or len(self._sent) < len(self._pieces):
            return []
        tokens, cached = self._final
        return self._send(messages.Commit(self._name, tokens, commit_digest(self._sent), cached=cached), now)

    def _send(self, message: messages.FromPrefill, now: float) -> list[Action]:
        self._clock.sent(now)
        return [SendMessage(message)]

    def _break(self, end: End, reason: str, *, abort: bool = True) -> list[Action]:
        return [SendMessage(messages.AbortLease(self._name, reason)), *self._end(end, reason, abort=abort)]

    def _end(self, end: End, reason: str, *, abort: bool = True) -> list[Action]:
        self.ended = end
        return [PrefillEnd(end, reason, abort and self._final is None)]
