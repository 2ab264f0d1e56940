"""From engine deltas to chunks of text: one `ChoiceStream` for each text, one `Generation` for each HTTP request.

A `Generation` owns its engine requests: whatever ends it (success, an error, a client that left, cancellation),
leaving its block closes them all, and the engine aborts those that still ran.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, NamedTuple

import msgspec

from fd_core.engine.clients.client import DeltaStream
from fd_core.errors import EngineDead
from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError
from fd_core.http.spans import RequestSpan
from fd_core.server.preprocess.sampling import choice_seed
from fd_core.server.schemas.responses import PromptTokensDetails, Usage
from fd_core.server.state.state import ServerState
from fd_core.server.stream.generation_spans import begin_generation, end_generation
from fd_core.structured.workers.messages import Unenforced
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.contract import OutputParser
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Event, Thought
from fd_core.types import (
    GRAMMAR_FAULT,
    NO_CHOICE,
    NOT_FINITE,
    Delta,
    FinishReason,
    PrefillOutcome,
    RequestSpec,
    SamplingParams,
    TokenLogprobs,
)

__all__ = ["ChoiceStream", "Generation", "Job", "TextChunk"]

_TAIL_TOKENS: Final = 64
"""Tokens at the end of a prompt that may open or close reasoning."""
_CALL_EVENTS: Final = (CallBegun, ArgumentsDelta, CallEnded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: everything that one HTTP request wants generated, and what its answer shows."""

    request_id: str
    model: str
    """The name under which the model answers."""
    fingerprint: str
    """Names what computes, see `ServerState.fingerprint`."""
    arrived: float
    """When the server received the request, in seconds of `time.perf_counter`."""
    prompts: list[tuple[int, ...]]
    params: list[SamplingParams]
    """For each prompt; the seed is that of its first choice."""
    n: int
    """Choices of each prompt; choice `j` of prompt `i` has index `i * n + j`."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    logprobs: int | None
    """Most likely tokens shown beside each chosen token; None shows no log-probabilities."""
    token_ids: bool
    """Whether ids are shown."""
    tokens_as_ids: bool
    """Whether log-probabilities name tokens by their ids."""
    usage_in_stream: bool
    """Whether a last event of a stream tells the usage."""
    usage_in_events: bool
    """Whether every event of a stream tells the usage so far."""
    most_tokens: int
    """The most that can be read and written."""
    priority: int
    tenant: str
    cache_salt: str
    adapter: str = ""
    """Digest of the LoRA adapter that the model's name stands for; empty for the model itself."""
    reading: AnswerReading | None = None
    """How answers are read; None for plain text."""
    prompt_logprobs: int | None = None
    """Most likely tokens shown beside each token of the prompt; None shows none."""
    warnings: tuple[Unenforced, ...] = ()
    """Parts of schemas that the answer may not keep."""
    prompt_only: bool = False
    """Whether the answer shows nothing of the text: one token is computed and dropped."""
    path: str = ""
    """Path of the API that was called."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Headers of the request that name its span, if spans are made."""
    prefill_at: str
    """`host:port` of the prefill worker that computes the prompts; empty computes them here."""
    owner: str = ""
    """Whose request it is, see `ApiKey.owner`."""
    record: RequestRecord = field(default_factory=RequestRecord)
    """Told what was read and written."""

    @property
    def warned(self) -> list[Unenforced] | msgspec.UnsetType:
        """The warnings as answers show them."""
        return list(self.warnings) or msgspec.UNSET


class TextChunk(NamedTuple):
    """What a delta adds to a choice."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: Sequence[Event] = ()
    """What the text means, where answers are read."""


class ChoiceStream:
    """One text that is being generated."""

    __slots__ = (
        *(
            "_adapter",
            "_arrived",
            "_deltas",
            "_eos",
            "_every_token",
            "_first",
            "_include_stop",
            "_last",
            "_metrics",
            "_parser",
        ),
        *("_prompt_only", "_reading", "_scored", "_scorer", "_scores", "_spec", "_stop_ids", "_text"),
        *("cached_tokens", "called", "finished", "index"),
        *("phases", "prefill", "prompt_index", "reasoning_tokens", "tokens"),
    )

    def __init__(
        self,
        state: ServerState,
        job: Job,
        spec: RequestSpec,
        deltas: DeltaStream,
        index: int,
        first: ChoiceStream | None = None,
    ) -> None:
        """`first` is the first choice of the same prompt, None for that itself."""
        self.index = index
        self.prompt_index = index // job.n
        self.tokens = 0
        """Tokens generated, up to and including the one that ended the text."""
        self.cached_tokens = 0
        self.phases: tuple[float, ...] = ()
        """Where its time in the engine went, as `Delta.phases`; empty if nothing tells."""
        self.prefill: PrefillOutcome | None = None
        """What became of a prompt that another worker was to compute; known with the first token."""
        self._scorer = first or self
        self._scores: tuple[TokenLogprobs, ...] | None = None
        self._scored = asyncio.Event()
        """Set once nothing more is to come of the prompt's log-probabilities."""
        if spec.params.prompt_logprobs is None:
            self._scored.set()
        self.finished: str | None = None
        self._deltas = deltas
        # Tokens that add no text get a chunk if their log-probabilities or ids are shown.
        self._every_token = job.logprobs is not None or job.token_ids
        self._prompt_only = job.prompt_only
        self._include_stop = job.include_stop
        self._stop_ids = spec.params.stop_token_ids
        self._eos = () if spec.params.ignore_eos else spec.eos_token_ids
        reading = self._reading = job.reading
        self._text = IncrementalDetokenizer(
            state.tokenizer,
            skip_special=job.skip_special,
            stop=job.stop,
            include_stop=job.include_stop,
            keep=() if reading is None else reading.markers,
        )
        self.called = False
        """Whether the model has called a tool, with all arguments."""
        self.reasoning_tokens = 0
        self._parser: OutputParser | None = None
        if reading is not None:
            tail = spec.prompt[-_TAIL_TOKENS:]
            self._parser = reading.parser(state.tokenizer.decode(tail, skip_special=False))
        self._metrics = state.metrics
        self._adapter = job.model if job.adapter else None
        self._arrived = self._first = self._last = job.arrived
        self._spec = spec

    async def next(self) -> TextChunk | None:
        """Return the next chunk, None after the one with a finish reason.

        Raises `EngineDead` if the engine went away, `ApiError` if it could not go on with this request.
        """
        if not self._scorer._scored.is_set() and self._scorer is not self:
            await self._scorer._scored.wait()
        while self.finished is None:
            try:
                delta = await self._deltas.__anext__()
            except StopAsyncIteration:
                raise EngineDead("the engine ended a request without saying why") from None
            chunk = self._read(delta)
            if self._parser is not None:
                chunk = self._understood(chunk, self._parser)
            if chunk.finish_reason is not None:
                self._end(FinishReason.ABORT if delta.finish_reason is FinishReason.ABORT else chunk.finish_reason)
                await self._deltas.aclose()
                return chunk
            if (chunk.text if self._parser is None else chunk.events) or (self._every_token and chunk.token_ids):
                return chunk
        return None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of the prompt's tokens but the first, if they are wanted; known with the first chunk of each choice."""
        return self._scorer._scores

    def _failure(self, reason: str) -> ApiError:
        """Return the error of a text that the engine could not go on with: a 400 if the request leaves no way on."""
        params = self._spec.params
        narrowed = params.grammar or params.allowed_token_ids or params.bad_words_token_ids or params.logit_bias
        if reason.startswith(GRAMMAR_FAULT) or (
            narrowed and reason.startswith(NO_CHOICE) and not reason.endswith(NOT_FINITE)
        ):
            return ApiError(400, f"the request cannot be answered: {reason}", code="no_way_on")
        return ApiError(500, f"the generation failed: {reason}", kind="server_error")

    def _read(self, delta: Delta) -> TextChunk:
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.phases is not None:
            self.phases = delta.phases
        if delta.prefill is not None:
            self.prefill = delta.prefill
        if delta.prompt_logprobs is not None:
            self._scores = delta.prompt_logprobs
            self._scored.set()
        ids, reason, logprobs = delta.token_ids, delta.finish_reason, delta.logprobs or ()
        if ids:
            self._observe(len(ids))
        if reason is FinishReason.ERROR:
            raise self._failure(delta.error or "the engine gave no reason")
        if self._prompt_only and reason is not FinishReason.ABORT:
            return TextChunk("", (), (), None if reason is None else FinishReason.LENGTH.value)
        silent = reason is FinishReason.STOP and self._ends_silently(ids)
        text, stopped_by, consumed = self._text.push(ids[:-1] if silent else ids)
        if stopped_by is not None:
            self.tokens += consumed
            return TextChunk(text, ids[:consumed], logprobs[:consumed], "stop", stopped_by)
        self.tokens += len(ids)
        if reason is None:
            return TextChunk(text, ids, logprobs)
        text += self._text.flush().text
        if reason is FinishReason.ABORT:
            # Typed clients refuse reasons that are not OpenAI's; of those, this one says that the text is not whole.
            return TextChunk(text, ids, logprobs, FinishReason.LENGTH, FinishReason.ABORT)
        stop_id = ids[-1] if reason is FinishReason.STOP and ids and ids[-1] in self._stop_ids else None
        return TextChunk(text, ids, logprobs, reason.value, stop_id)

    def _understood(self, chunk: TextChunk, parser: OutputParser) -> TextChunk:
        """Return the chunk with what its text means."""
        events = parser.push(chunk.text)
        if chunk.finish_reason is not None:
            ended = chunk.finish_reason == FinishReason.STOP and not isinstance(chunk.stop_reason, str)
            events = [*events, *(parser.finish() if ended else parser.flush())]
        reading = self._reading
        for event in events:
            if isinstance(event, CallEnded):
                self.called = True
            elif isinstance(event, Thought) and event is events[-1]:
                self.reasoning_tokens += len(chunk.token_ids)
        if reading is not None and not reading.parallel:
            events = [event for event in events if not isinstance(event, _CALL_EVENTS) or event.index == 0]
        if reading is not None and not reading.show_reasoning:
            events = [event for event in events if not isinstance(event, Thought)]
        return chunk._replace(events=events)

    def _ends_silently(self, ids: tuple[int, ...]) -> bool:
        """Whether the last token ended the text and is not to be seen in it."""
        return bool(ids) and not self._include_stop and (ids[-1] in self._eos or ids[-1] in self._stop_ids)

    def _observe(self, count: int) -> None:
        moment = time.perf_counter()
        if self.tokens:
            self._metrics.inter_token.observe((moment - self._last) / count, count)
        else:
            self._metrics.ttft.observe(moment - self._arrived)
            self._first = moment
        self._last = moment

    def _end(self, outcome: str) -> None:
        self.finished = outcome
        self._scored.set()
        self._metrics.outcomes[outcome] += 1
        if self._adapter is not None:
            self._metrics.adapter_generations[self._adapter] += 1
            self._metrics.adapter_tokens[self._adapter] += self.tokens
        moment, metrics, deltas = time.perf_counter(), self._metrics, self._deltas
        metrics.end_to_end.observe(moment - self._arrived)
        metrics.prompt_length.observe(len(self._spec.prompt))
        metrics.max_tokens.observe(self._spec.params.max_tokens)
        if deltas.admitted is not None:
            metrics.queue.observe(deltas.admitted - deltas.submitted)
        if self.tokens:
            metrics.text_length.observe(self.tokens)
            metrics.decode.observe(self._last - self._first)
            if deltas.admitted is not None:
                metrics.prefill.observe(max(0.0, self._first - deltas.admitted))
        if self.tokens > 1:
            metrics.time_per_token.observe((self._last - self._first) / (self.tokens - 1))

    def latencies(self) -> dict[str, float]:
        """Return seconds, by what took them: until a slot was free, and until the first token, where there was one."""
        deltas, told = self._deltas, {}
        if deltas.admitted is not None:
            told["time_in_queue"] = deltas.admitted - deltas.submitted
        if self.tokens:
            told["time_to_first_token"] = self._first - self._arrived
        return told

    def give_up(self, outcome: str) -> None:
        """Count a choice that ends before its time; one that has ended stays as it is."""
        if self.finished is None:
            self._end(outcome)


class Generation:
    """The engine requests of one HTTP request, submitted on entry and closed on exit.

    Entry raises `ApiError`: 503 if the server takes no more, 429 if the key has no room for the tokens.
    """

    def __init__(self, state: ServerState, job: Job) -> None:
        self._state = state
        self._job = job
        self._engine_ids: list[str] = []
        self._open = AsyncExitStack()
        self._span: RequestSpan | None = None
        self.choices: list[ChoiceStream] = []

    async def __aenter__(self) -> Generation:
        job = self._job
        count = len(job.prompts) * job.n
        self._state.admit(count)
        self._state.access.reserve(job.record, job.most_tokens)
        if self._state.spans is not None:
            self._span = begin_generation(self._state.spans, job, time.perf_counter() - job.arrived)
        self._engine_ids = self._state.active.enter(job.request_id, count, job.owner)
        try:
            for index, engine_id in enumerate(self._engine_ids):
                await self._submit(index, engine_id)
        except BaseException:
            await self._close("error")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = kind is not None and issubclass(kind, asyncio.CancelledError)
        await self._close("disconnect" if left else "error")

    async def each(self, follow: Callable[[ChoiceStream], Coroutine[Any, Any, None]]) -> None:
        """Run `follow` for every choice, at the same time; the first error ends all."""
        if len(self.choices) == 1:
            await follow(self.choices[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(follow(choice))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def usage(self) -> Usage:
        """Return the tokens read and written so far."""
        job = self._job
        read = sum(map(len, job.prompts))
        written = sum(choice.tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: job.n])
        return Usage(read, written, read + written, PromptTokensDetails(cached))

    async def _submit(self, index: int, engine_id: str) -> None:
        job, client = self._job, self._state.client
        which, number = divmod(index, job.n)
        params = job.params[which]
        if number:  # the first choice has the prompt's log-probabilities computed, for all of them
            seed = choice_seed(params.seed, number)
            params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
        spec = RequestSpec(
            request_id=engine_id,
            prompt=job.prompts[which],
            params=params,
            eos_token_ids=client.info.eos_token_ids,
            priority=job.priority,
            tenant=job.tenant,
            cache_salt=job.cache_salt,
            adapter=job.adapter,
            # A prompt that is scored is computed here in any case.
            traceparent="" if self._span is None or not job.prefill_at else self._span.headers["traceparent"],
            prefill_at=job.prefill_at if job.params[which].prompt_logprobs is None else "",
        )
        deltas = client.submit(spec)
        await self._open.enter_async_context(aclosing(deltas))
        first = self.choices[which * job.n] if number else None
        self.choices.append(ChoiceStream(self._state, job, spec, deltas, index, first))

    async def _close(self, outcome: str) -> None:
        """Close every engine request; those that still ran are aborted."""
        try:
            await self._open.aclose()
        finally:
            for choice in self.choices:
                choice.give_up(outcome)
            if self._span is not None:
                end_generation(self._span, self._job, self.choices, outcome)
            self._state.active.leave(self._job.request_id, self._engine_ids)
            if self.choices:
                usage = self.usage()
                self._job.record.count(usage.prompt_tokens, usage.completion_tokens)
            self._job.record.settle()
