"""From engine deltas to chunks of text: one `ChoiceStream` for each text, one `Generation` for each HTTP request.

A `Generation` owns its engine requests: however it ends (success, an error, a client that left, cancellation),
leaving its block closes them all, and the engine aborts those that still ran.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from fd_core.engine.clients.client import DeltaStream
from fd_core.errors import EngineDead
from fd_core.http.errors import ApiError
from fd_core.http.spans import RequestSpan, RequestSpans, span_name
from fd_core.server.preprocess.jobs import Job
from fd_core.server.schemas.responses import PromptTokensDetails, Usage
from fd_core.server.state import ServerState, TokenTimes
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Event, ReasoningDelta, joined
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import (
    GRAMMAR_FAULT,
    NO_CHOICE,
    NOT_FINITE,
    PHASE_NAMES,
    Delta,
    FinishReason,
    PrefillOutcome,
    PrefillTrace,
    RequestSpec,
    TokenLogprobs,
    choice_seed,
)

_CALL_EVENTS: Final = (CallBegun, ArgumentsDelta, CallEnded)


class TextChunk(NamedTuple):
    """Part of a choice that one delta adds."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: Sequence[Event] = ()
    parts: Sequence[str] = ()
    """The text of each token, if reasoning is counted."""


@dataclass(slots=True)
class ScoredPrompt:
    """Log-probabilities of a prompt, computed with its first choice and shown with each."""

    rows: tuple[TokenLogprobs, ...] | None = None
    """Scores of the prompt's tokens except the first."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once no more rows will be added."""


class AnswerReader:
    """Parser of the text of one choice into content, reasoning and calls."""

    __slots__ = ("_early", "_is_reasoning", "_parser", "_reading", "called", "counts_reasoning", "reasoning_tokens")

    def __init__(self, reading: AnswerReading, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._reading = reading
        self._parser = reading.parser(reading.prompt_tail(tokenizer, prompt))
        self.called = False
        self.counts_reasoning = reading.reasoning is not None
        self.reasoning_tokens = 0
        """Tokens of reasoning and of its markers, counted one by one, so that they depend on the text alone."""
        self._is_reasoning: bool | None = None
        """True if the latest event is reasoning; None before the first."""
        self._early = 0
        """Tokens before the first event."""

    def read(self, chunk: TextChunk) -> TextChunk:
        """Return the chunk with its parsed events."""
        reading = self._reading
        events = self._push(chunk)
        if chunk.finish_reason is not None:
            ended = chunk.finish_reason == FinishReason.STOP and not isinstance(chunk.stop_reason, str)
            events = [*events, *(self._parser.finish() if ended else self._parser.flush())]
        for event in events:
            if isinstance(event, CallEnded):
                self.called = True
        if not reading.parallel:
            events = [event for event in events if not isinstance(event, _CALL_EVENTS) or event.index == 0]
        if not reading.show_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningDelta)]
        return chunk._replace(events=events)

    def _push(self, chunk: TextChunk) -> Sequence[Event]:
        events: list[Event] = []
        for part in chunk.parts:
            read = self._parser.push(part)
            if read:
                self._is_reasoning = isinstance(read[-1], ReasoningDelta)
                events += read
            if self._is_reasoning is None:
                self._early += 1
            elif self._is_reasoning:
                self.reasoning_tokens += 1 + self._early
                self._early = 0
        rest = self._parser.push(chunk.text[sum(map(len, chunk.parts)) :])
        return joined([*events, *rest]) if events else rest


class ChoiceStream:
    """One text that is being generated."""

    __slots__ = (
        "_detokenizer",
        "_job",
        "_metrics",
        "_silent_ends",
        "answer",
        "cached_tokens",
        "deltas",
        "finished",
        "index",
        "phases",
        "prefill",
        "prompt_index",
        "scores",
        "spec",
        "times",
        "tokens",
    )

    def __init__(
        self,
        state: ServerState,
        job: Job,
        spec: RequestSpec,
        deltas: DeltaStream,
        index: int,
        scores: ScoredPrompt | None,
    ) -> None:
        """`scores` are those of the prompt, if they are wanted; the first choice of the prompt fills them in."""
        self.index = index
        self.prompt_index = index // job.n
        self.spec = spec
        self.scores = scores
        self.tokens = 0
        """Tokens generated, up to and including the one that ended the text."""
        self.cached_tokens = 0
        self.phases: tuple[float, ...] = ()
        """Time in each phase in the engine, as `Delta.phases`; empty if unknown."""
        self.prefill: PrefillOutcome | None = None
        """Outcome of a prefill assigned to another worker; known with the first token."""
        self.finished: str | None = None
        self.times = TokenTimes(job.arrived)
        reading = job.reading
        self.answer = None if reading is None else AnswerReader(reading, state.tokenizer, spec.prompt)
        """Reads the text; None for plain text."""
        self.deltas = deltas
        self._job = job
        self._metrics = state.metrics
        params = spec.params
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *spec.eos_token_ids)
        self._silent_ends = () if job.include_stop else ends
        """Tokens that end the text and are not seen in it."""
        self._detokenizer = IncrementalDetokenizer(
            state.tokenizer,
            skip_special=job.skip_special,
            stop=job.stop,
            include_stop=job.include_stop,
            min_tokens=params.min_tokens,
            keep=() if reading is None else reading.markers,
        )

    @property
    def called(self) -> bool:
        """True if the model has completed a tool call."""
        return self.answer is not None and self.answer.called

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning, where answers are read."""
        return 0 if self.answer is None else self.answer.reasoning_tokens

    async def next(self) -> TextChunk | None:
        """Return the next chunk, None after the last; raises `EngineDead`, and `ApiError` if generation failed."""
        scores = self.scores
        if scores is not None and self.index != self.prompt_index * self._job.n:
            await scores.complete.wait()
        job, answer = self._job, self.answer
        while self.finished is None:
            try:
                delta = await self.deltas.__anext__()
            except StopAsyncIteration:
                raise EngineDead("the engine ended a request without a reason") from None
            chunk = self._read(delta)
            if answer is not None:
                chunk = answer.read(chunk)
            if chunk.finish_reason is not None:
                self.end(FinishReason.ABORT if delta.finish_reason is FinishReason.ABORT else chunk.finish_reason)
                return chunk
            # Tokens that add no text get a chunk if their log-probabilities or ids are shown.
            tokens_shown = chunk.token_ids and (job.logprobs is not None or job.token_ids)
            if (chunk.text if answer is None else chunk.events) or tokens_shown:
                return chunk
        return None

    def _read(self, delta: Delta) -> TextChunk:
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.phases is not None:
            self.phases = delta.phases
        if delta.prefill is not None:
            self.prefill = delta.prefill
        if delta.prompt_logprobs is not None and self.scores is not None:
            self.scores.rows = delta.prompt_logprobs
            self.scores.complete.set()
        ids, reason, logprobs = delta.token_ids, delta.finish_reason, delta.logprobs or ()
        if ids:
            self._metrics.observe_tokens(self.times, len(ids), first=not self.tokens)
        if reason is FinishReason.ERROR:
            raise self._failure(delta.error or "the engine gave no reason")
        if self._job.prompt_only and reason is not FinishReason.ABORT:
            return TextChunk("", (), (), finish_reason=None if reason is None else FinishReason.LENGTH.value)
        silent = reason is FinishReason.STOP and ids and ids[-1] in self._silent_ends
        read = ids[:-1] if silent else ids
        parts: list[str] = []
        if self.answer is not None and self.answer.counts_reasoning:
            for token_id in read:
                parts.append(self._detokenizer.push((token_id,)).text)
                if self._detokenizer.stopped_by is not None:
                    break
            read = ()
        text, stopped_by, consumed = self._detokenizer.push(read, last=reason is not None)
        if parts:
            text, consumed = "".join((*parts, text)), len(parts)
        if stopped_by is not None:
            self.tokens += consumed
            return TextChunk(text, ids[:consumed], logprobs[:consumed], "stop", stop_reason=stopped_by, parts=parts)
        self.tokens += len(ids)
        if reason is None:
            return TextChunk(text, ids, logprobs, parts=parts)
        if reason is FinishReason.ABORT:
            # Typed clients reject reasons that are not OpenAI's; of those, this one marks an incomplete text.
            return TextChunk(text, ids, logprobs, FinishReason.LENGTH, stop_reason=FinishReason.ABORT, parts=parts)
        stop_id = (
            ids[-1] if reason is FinishReason.STOP and ids and ids[-1] in self.spec.params.stop_token_ids else None
        )
        return TextChunk(text, ids, logprobs, finish_reason=reason.value, stop_reason=stop_id, parts=parts)

    def _failure(self, reason: str) -> ApiError:
        """Return the error of a failed generation: a 400 if the request allows no next token."""
        params = self.spec.params
        narrowed = params.grammar or params.allowed_token_ids or params.bad_words_token_ids or params.logit_bias
        if reason.startswith(GRAMMAR_FAULT) or (
            narrowed and reason.startswith(NO_CHOICE) and not reason.endswith(NOT_FINITE)
        ):
            return ApiError(400, f"the request allows no further token: {reason}", code="no_way_on")
        return ApiError(500, f"the generation failed: {reason}", kind="server_error")

    def end(self, outcome: str) -> None:
        """End an unfinished text: close its engine request and count its outcome."""
        if not self.deltas.done:
            self.deltas.abort()
        self.finished = outcome
        if self.scores is not None:
            self.scores.complete.set()
        self._metrics.ended(
            outcome,
            adapter=self._job.served.name if self._job.served.adapter else None,
            spec=self.spec,
            tokens=self.tokens,
            deltas=self.deltas,
            times=self.times,
        )


class Generation:
    """The engine requests of an HTTP request from entry to exit; entry raises `ApiError` (503, 429)."""

    __slots__ = ("_engine_ids", "_held", "_job", "_span", "_state", "choices", "used")

    def __init__(self, state: ServerState, job: Job) -> None:
        self._state = state
        self._job = job
        self._engine_ids: list[str] = []
        self._span: RequestSpan | None = None
        self.choices: list[ChoiceStream] = []
        self._held = 0
        """Bytes of images that are counted."""
        self.used = Usage(0, 0, 0, prompt_tokens_details=PromptTokensDetails(0))
        """Tokens read and written, set at the end of the block."""

    async def __aenter__(self) -> Generation:
        job, state = self._job, self._state
        count = len(job.prompts) * job.n
        state.admit(count)
        if job.record.account is not None:
            state.access.reserve(job.record, job.most_tokens)
        if state.spans is not None:
            self._span = begin_generation(state.spans, job, time.perf_counter() - job.arrived)
        self._engine_ids = state.active.enter(job.record.request_id, count, job.owner)
        try:
            if job.images and state.images is not None:
                size = sum(len(image.pixels) for image in job.images)
                state.images.hold(size)
                self._held = size
            for index, engine_id in enumerate(self._engine_ids):
                self._submit(index, engine_id)
        except BaseException as error:
            await self.__aexit__(type(error))
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close every engine request; those that still ran are aborted."""
        left = kind is not None and issubclass(kind, asyncio.CancelledError)
        outcome = "disconnect" if left else "error"
        job, record = self._job, self._job.record
        try:
            for choice in self.choices:
                if choice.finished is None:
                    choice.end(outcome)
        finally:
            if self._span is not None:
                end_generation(self._span, job, self.choices, outcome=outcome)
            self._state.active.leave(record.request_id, self._engine_ids)
            if self._held and self._state.images is not None:
                self._state.images.hold(-self._held)
            if self.choices:
                self.used = self.usage()
                record.tokens_in += self.used.prompt_tokens
                record.tokens_out += self.used.completion_tokens
            if record.reservation is not None:
                record.settle()

    async def each(self, follow: Callable[[ChoiceStream], Coroutine[Any, Any, None]]) -> None:
        """Run `follow` for every choice, at the same time; the first error ends all."""
        try:
            # A token resumes the coroutines of its task only, not those of the request around it.
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(follow(choice))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def usage(self) -> Usage:
        """Return the tokens read and written so far."""
        job = self._job
        read = sum(map(len, job.prompts))
        written = sum([choice.tokens for choice in self.choices])
        cached = sum([choice.cached_tokens for choice in self.choices[:: job.n]])
        return Usage(read, written, read + written, prompt_tokens_details=PromptTokensDetails(cached))

    def _submit(self, index: int, engine_id: str) -> None:
        job, client = self._job, self._state.client
        which, number = divmod(index, job.n)
        params = job.params[which]
        scores: ScoredPrompt | None = None
        if number:  # the first choice has the prompt's log-probabilities computed, for all of them
            scores = self.choices[which * job.n].scores
            params = msgspec.structs.replace(params, seed=choice_seed(params.seed, number), prompt_logprobs=None)
        elif params.prompt_logprobs is not None:
            scores = ScoredPrompt()
        spec = RequestSpec(
            request_id=engine_id,
            prompt=job.prompts[which],
            params=params,
            images=job.images,
            eos_token_ids=client.info.eos_token_ids,
            priority=job.priority,
            tenant=job.tenant,
            cache_salt=job.cache_salt,
            adapter=job.served.adapter,
            # A prompt that is scored is computed here in any case.
            traceparent="" if self._span is None or not job.prefill_at else self._span.headers["traceparent"],
            prefill_at=job.prefill_at if job.params[which].prompt_logprobs is None else "",
        )
        deltas = client.submit(spec)
        try:
            self.choices.append(ChoiceStream(self._state, job, spec, deltas=deltas, index=index, scores=scores))
        except BaseException:
            deltas.abort()
            raise


def begin_generation(spans: RequestSpans, job: Job, seconds_ago: float) -> RequestSpan:
    """Begin the span of a generation that arrived `seconds_ago`."""
    name, attributes = span_name(job.path, job.served.name)
    params = job.params[0]
    asked: dict[str, Any] = {
        **attributes,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": len(job.prompts) * job.n,
        "gen_ai.request.id": job.record.request_id,
    }
    return spans.begin(name, "server", job.trace, asked, seconds_ago=seconds_ago)


def end_generation(span: RequestSpan, job: Job, choices: Sequence[ChoiceStream], outcome: str) -> None:
    """End the span of a generation whose choices have ended, or that ended with `outcome` without any."""
    ended = [choice.finished or outcome for choice in choices] or [outcome]
    attributes: dict[str, Any] = {
        "gen_ai.response.model": job.served.name,
        "gen_ai.response.finish_reasons": ended,
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(choice.tokens for choice in choices),
    }
    for choice in choices[:1]:  # the durations of the first choice represent all
        if choice.deltas.admitted is not None:
            attributes["gen_ai.latency.time_in_queue"] = choice.deltas.admitted - choice.deltas.submitted
        if choice.tokens:
            attributes["gen_ai.latency.time_to_first_token"] = choice.times.first - choice.times.arrived
        phases = zip(PHASE_NAMES, choice.phases, strict=False)
        attributes |= {f"fdcore.phase.{name}": seconds for name, seconds in phases if seconds}
    span.end(attributes, error=next((each for each in ended if each in ("error", "disconnect")), None))


def prefill_span(spans: RequestSpans, model: str, trace: PrefillTrace) -> None:
    """Make the span of a prompt that this worker computed for a decode worker, below that worker's span."""
    attributes = {
        "gen_ai.operation.name": "prefill",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": trace.num_tokens,
        "fdcore.lease.end": trace.end,
    }
    carried = {"traceparent": trace.traceparent}
    span = spans.begin(f"prefill {model}", "server", carried, attributes, seconds_ago=trace.seconds)
    span.end(error=None if trace.end == "confirmed" else trace.end)
