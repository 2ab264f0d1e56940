"""Simulated clients: each runs one conversation, records the responses and verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

from fd_core.router.selection import RouteRequest
from fd_core.scheduling.images import identity
from fd_core.simulation.clock.timeline import ScheduledEvent, Timeline
from fd_core.simulation.clock.waits import WaitAccount
from fd_core.simulation.engines.device import END
from fd_core.simulation.results.summary import RequestOutcome
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn, tokens_of
from fd_core.types import Delta, Image, IntArray, RequestSpec, SamplingParams

_kept_tokens: Final = lru_cache(256)(tokens_of)
"""Cache of the tokens of pieces that many conversations share."""


def _image(piece: Piece, start: int) -> Image:
    """Return the image of a piece; no simulated step reads its one pixel."""
    return Image(start, piece.tokens, digest=(piece.seed & (2**64 - 1)).to_bytes(16), size=(1, 1), pixels=bytes(3))


class WrongAnswer(RuntimeError):
    """A token was lost, repeated or wrong: an invariant is violated."""


@dataclass(slots=True)
class _Reading:
    """Progress of one request. Times in seconds."""

    arrived: float = 0.0
    prompt_tokens: int = 0
    most: int = 0
    cached: int = 0
    count: int = 0
    first: float | None = None
    last: float = 0.0
    gap: float = 0.0
    worker: int = -1
    attempts: int = 0
    tokens: list[int] = field(default_factory=list)
    over: bool = False


class SimulatedClient:
    """One conversation: sends its requests one after the other until one fails."""

    def __init__(
        self,
        timeline: Timeline,
        conversation: Conversation,
        *,
        ask: Callable[[RequestSpec, RouteRequest, SimulatedClient], None],
        leave: Callable[[str], None],
        vocab_size: int,
        max_model_len: int,
        delay: float,
        ended: Callable[[RequestOutcome], None],
        done: Callable[[SimulatedClient], object],
        check: bool,
    ) -> None:
        """`leave` closes a request's connection. `delay`: seconds from a worker's engine to the client."""
        self.conversation = conversation
        self.wanted: tuple[Sequence[int], str] | None = None
        """Expected answer and finish reason of the request in progress, for a model other than the turn's. Set by the
        endpoint for every request."""
        self._timeline = timeline
        self._send, self._hang_up = ask, leave
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._delay = delay
        self._ended = ended
        self._done = done
        self._check = check
        self._number = -1
        self._text: IntArray = np.empty(0, np.int32)
        self._images: tuple[Image, ...] = ()
        self._turn: UserTurn = conversation.turns[0]
        self._more = len(conversation.turns) > 1
        self._patience: ScheduledEvent | None = None
        self._now = _Reading()
        self.account = WaitAccount(timeline.clock)

    @property
    def gone(self) -> bool:
        """Return True if the request in progress is over for the client."""
        return self._now.over

    @property
    def request_id(self) -> str:
        """ID of the request in progress."""
        return f"{self.conversation.name}/{self._number}"

    @property
    def answer(self) -> Piece:
        """Expected answer of the model to the request in progress."""
        return self._turn.answer

    def next_request(self) -> None:
        """Send the next request of the conversation, which must exist."""
        self._number += 1
        turns = self.conversation.turns
        self._turn = turn = turns[self._number]
        self._more = self._number + 1 < len(turns)
        parts = [] if turn.fresh or not len(self._text) else [self._text]
        parts += [_kept_tokens(piece, self._vocab_size) for piece in turn.adds]
        self._text = parts[0] if len(parts) == 1 else np.concatenate(parts or [self._text[:0]])
        self._keeps = self._more or self._check
        prompt = self._text
        self._images = () if turn.fresh else self._images
        at = len(prompt) - sum(piece.tokens for piece in turn.adds)
        for piece in turn.adds:
            if piece.image:
                self._images += (_image(piece, at),)
            at += piece.tokens
        room = max(1, self._max_model_len - len(prompt))
        most = room if turn.max_tokens is None else min(turn.max_tokens, room)
        self._now = _Reading(self._timeline.now, len(prompt), most)
        self.account = WaitAccount(self._timeline.clock)
        conversation = self.conversation
        spec = RequestSpec(
            request_id=self.request_id,
            prompt=tuple(prompt.tolist()),
            images=self._images,
            params=SamplingParams(max_tokens=most, temperature=0.0),
            eos_token_ids=(END,),
            priority=conversation.priority,
            tenant=conversation.tenant,
        )
        asked = RouteRequest(
            identity(prompt, self._images), session=conversation.name, output_tokens=turn.max_tokens or 0
        )
        if turn.patience is not None:
            self._patience = self._timeline.after(turn.patience, self.leave)
        self._send(spec, asked, self)

    def leave(self) -> None:
        """Disconnect before the request in progress has ended; the conversation is over."""
        if self._now.over:
            return
        request_id = self.request_id
        self._end(self._now, "left", "")
        self._hang_up(request_id)

    def tried(self) -> None:
        """Record that the request was sent to a worker."""
        if self._check and self._now.count and not self._now.over:
            raise WrongAnswer(f"request {self.request_id} was retried on another worker after its first token")
        self._now.attempts += 1
        if self._now.attempts > 1 and not self._now.over:
            self.account.begin_again()

    def read(self, delta: Delta, worker: int) -> None:
        """Receive a part of the response, which arrives at the client after the network delay."""
        now = self._now
        if now.over:
            return
        at = self._timeline.now + self._delay
        if delta.phases is not None:
            self.account.record(delta.phases, at)
        if tokens := delta.token_ids:
            if now.first is None:
                now.first = at
                self.account.first_token(at)
            elif (gap := at - now.last) > now.gap:
                now.gap = gap
            now.last = at
            now.count += len(tokens)
            if self._keeps:
                now.tokens += tokens
            if self.wanted is not None and self._check:
                begin = now.count - len(tokens)
                wanted = [*self.wanted[0][begin : now.count]]
                if [*tokens] != wanted:
                    raise WrongAnswer(
                        f"request {self.request_id}: expected {wanted} from token {begin} on, got {[*tokens]}"
                    )
        if delta.cached_tokens is not None:
            now.cached = delta.cached_tokens
        now.worker = worker
        if delta.finish_reason is not None:
            reason = str(delta.finish_reason)
            self._timeline.at(at, lambda: self._whole(now, reason))

    def broken(self, status: int, reason: str) -> None:
        """End the request without a response, or with an incomplete one."""
        now = self._now
        if not now.over:
            self._timeline.after(self._delay, lambda: self._end(now, "failed" if now.count else "refused", reason))

    def _whole(self, now: _Reading, end: str) -> None:
        if now.over:
            return
        if self._check and end != "abort":  # aborted by a third party: the tokens so far are right
            self._check_answer(now, end)
        self._end(now, end, "")

    def _end(self, now: _Reading, end: str, reason: str) -> None:
        if now.over:
            return
        now.over = True
        if now.first is not None and now.first > self._timeline.now:
            now.first, now.count = None, 0  # it was still on the network
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        conversation = self.conversation
        self._ended(
            RequestOutcome(
                request_id=self.request_id,
                tenant=conversation.tenant,
                priority=conversation.priority,
                prompt_tokens=now.prompt_tokens,
                cached_tokens=now.cached,
                output_tokens=now.count,
                arrived=now.arrived,
                first_token=now.first,
                ended=self._timeline.now,
                end=end,
                reason=reason,
                longest_gap=now.gap,
                worker=now.worker,
                attempts=now.attempts,
            )
        )
        turns, answered = conversation.turns, end in ("stop", "length")
        if self._more and answered:
            self._text = np.concatenate([self._text, np.array(now.tokens, np.int32)])
        while not answered and self._number + 1 < len(turns) and not turns[self._number + 1].fresh:
            self._number += 1  # needs the history
        if self._number + 1 < len(turns):
            self._timeline.after(turns[self._number + 1].think, self.next_request)
        else:
            self._done(self)

    def _check_answer(self, now: _Reading, end: str) -> None:
        """Raise `WrongAnswer` unless the answer is the expected one."""
        if self.wanted is not None:
            whole, wanted_end = self.wanted
            if (now.count, end) != (len(whole), wanted_end):
                what = f"expected {len(whole)} tokens and {wanted_end!r}, got {now.count}"
                raise WrongAnswer(f"request {self.request_id} ended by {end!r}: {what}")
            return
        answer = self._turn.answer
        wanted = tokens_of(Piece(answer.seed, min(answer.tokens, now.most)), self._vocab_size).tolist()
        got = now.tokens[:-1] if now.tokens[-1:] == [END] else now.tokens
        stops = answer.tokens < now.most
        if got != wanted or (end == "stop") is not stops:
            place = next((at for at, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), None)
            what = f"expected {len(wanted)} tokens, got {len(got)}" if place is None else f"token {place} is wrong"
            raise WrongAnswer(f"request {self.request_id} ended by {end!r}: {what}")
