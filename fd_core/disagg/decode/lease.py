"""Decode side of a lease: owns the blocks and decides if received KV may be used; pure."""

from __future__ import annotations

import math

from fd_core.disagg.lease import Action, Clock, DecodeEnd, SendMessage, TakePiece, commit_digest, requested_pieces
from fd_core.disagg.messages import AbortLease, Commit, Confirm, Credit, FromPrefill, Heartbeat, KVPiece, Open, Refuse
from fd_core.types import PrefillOutcome


class DecodeLease:
    """One lease on the decode worker, which sends `opening` when it creates this."""

    def __init__(self, opening: Open, *, longest: float, now: float) -> None:
        """Expect the pieces of a valid `opening`, see `validate_open`; the lease expires after `longest` seconds."""
        self.outcome: PrefillOutcome | None = None
        self.cached = 0
        """Tokens in the prefix cache of the prefill side, as its `Commit` reports."""
        self._opening = opening
        self._name = opening.job.lease
        self._pieces = requested_pieces(opening)
        self._tokens = opening.job.num_tokens
        self._clock = Clock(opening.idle_timeout, longest, now)
        self._peer_seen = False
        self._taking: set[int] = set()
        self._copied: dict[int, bytes] = {}
        self._credited = 0
        self._commit: Commit | None = None
        self._progress = now
        """Time of the commit, or of the last piece copied since."""

    @property
    def next_tick(self) -> float:
        """Return the deadline of the next call of `tick`."""
        return min(self._clock.next, self._stuck) if self.outcome is None else math.inf

    def receive(self, message: FromPrefill, now: float) -> list[Action]:
        """Handle a message of the prefill side, in any order of arrival."""
        if self.outcome is not None:
            return []
        self._peer_seen = True
        self._clock.received(now)
        match message:
            case Refuse(reason=reason):
                return self._end("refused", reason or "the prefill worker gave no reason")
            case AbortLease(reason=reason):
                return self._end("lost", reason or "the prefill worker aborted the lease")
            case KVPiece():
                return self._piece(message)
            case Commit():
                return self._receive_commit(message, now)
            case _:
                return []

    def copied(self, index: int, digest: bytes, now: float) -> list[Action]:
        """Record that a `Take` was checked and copied; `digest` is that of the copied value."""
        if self.outcome is not None or index not in self._taking:
            return []
        self._taking.remove(index)
        self._copied[index] = digest
        self._progress = now
        if ends := self._settle():
            return ends
        if self._taking and len(self._copied) - self._credited < max(self._opening.window // 2, 1):
            return []  # one message per several pieces
        return self._credit(now)

    def spoiled(self, index: int, reason: str) -> list[Action]:
        """Record that a `Take` failed or did not pass its check."""
        if self.outcome is not None or index not in self._taking:
            return []
        return self._break("damaged", f"piece {index}: {reason}")

    def disconnected(self, reason: str) -> list[Action]:
        """Record that the prefill side disconnected."""
        return [] if self.outcome is not None else self._end("lost", reason)

    def abort(self) -> list[Action]:
        """End the lease, as the prompt is no longer needed."""
        return [] if self.outcome is not None else self._break("aborted", "the request was aborted")

    def tick(self, now: float) -> list[Action]:
        """Process timeouts: end the lease, or send a message."""
        if self.outcome is not None:
            return []
        if late := self._clock.expiry_reason(now):
            return self._break("expired", late)
        if now >= self._stuck:
            return self._break("expired", "a piece was lost in transit")
        if not self._clock.heartbeat_due(now):
            return []
        if self._copied:
            return self._credit(now)
        self._clock.sent(now)
        return [SendMessage(Heartbeat(self._name) if self._peer_seen else self._opening)]

    @property
    def _stuck(self) -> float:
        """Return the time at which a missing piece counts as lost: all were sent before the commit."""
        waits = self._commit is not None and not self._taking
        return self._progress + self._opening.idle_timeout if waits else math.inf

    def _piece(self, piece: KVPiece) -> list[Action]:
        index = piece.index
        if index not in self._pieces or index in self._taking or index in self._copied:
            return []
        if len(self._taking) >= self._opening.window:
            return self._break("damaged", f"expected at most {self._opening.window} pieces in flight, got more")
        self._taking.add(index)
        return [TakePiece(piece)]

    def _receive_commit(self, commit: Commit, now: float) -> list[Action]:
        if self._commit is not None:
            return []
        if commit.tokens != self._tokens:
            return self._break("damaged", f"expected {self._tokens} computed tokens, got {commit.tokens}")
        self._commit, self._progress = commit, now
        return self._settle()

    def _settle(self) -> list[Action]:
        if self._commit is None or len(self._copied) < len(self._pieces):
            return []
        if commit_digest(self._copied) != self._commit.digest:
            return self._break("damaged", "the received pieces differ from those that were sent")
        self.cached = max(0, min(self._commit.cached, self._tokens))
        return [SendMessage(Confirm(self._name)), *self._end("transferred", "")]

    def _credit(self, now: float) -> list[Action]:
        self._clock.sent(now)
        self._credited = len(self._copied)
        return [SendMessage(Credit(self._name, len(self._copied)))]

    def _break(self, outcome: PrefillOutcome, reason: str) -> list[Action]:
        return [SendMessage(AbortLease(self._name, reason)), *self._end(outcome, reason)]

    def _end(self, outcome: PrefillOutcome, reason: str) -> list[Action]:
        self.outcome = outcome
        return [DecodeEnd(outcome, reason)]
