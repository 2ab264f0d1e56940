"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError
from fd_core.server.api.openapi import DirectRoute, endpoint
from fd_core.server.preprocess import jobs
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.structured_fields import requested_constraint
from fd_core.server.schemas import responses
from fd_core.server.schemas.requests import ChatRequest, CompletionRequest
from fd_core.server.schemas.unsupported import CHAT, COMPLETIONS
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.server.stream.response_format import (
    CollectedText,
    CompletionLogprobsBuilder,
    EncodedLists,
    GenerationResponse,
    ResponseFormat,
    cancel_on_disconnect,
    chat_logprobs,
    deltas,
    end_with,
    json_text,
    message_of,
    slices,
)
from fd_core.structured.workers.messages import ConstraintOutcome
from fd_core.text.parsing.events import Content
from fd_core.text.prompt_reader import PromptText
from fd_core.text.tokenizer import Tokenizer

router = APIRouter(route_class=DirectRoute)
chat_router = APIRouter(route_class=DirectRoute)
CHAT_BODY: Final = BodyFormat(ChatRequest, CHAT)
COMPLETION_BODY: Final = BodyFormat(CompletionRequest, COMPLETIONS)


@chat_router.post(
    "/v1/chat/completions",
    **endpoint(
        "Create a chat completion",
        ChatRequest,
        responses.ChatAnswer,
        stream=True,
        example={"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
    ),
)
async def create_chat_completion(request: Request) -> Response:
    """Generate the assistant's next message."""
    state, body, headers = await CHAT_BODY.read(request)
    job = await cancel_on_disconnect(
        request, jobs.conversation_job(state, body, request), long=state.images is not None
    )
    return GenerationResponse(state, _ChatFormat(job, state.tokenizer), bool(body.stream), headers=headers)


class _ChatFormat(ResponseFormat):
    answer = responses.ChatAnswer
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    opening = b',"delta":{"content":'
    closing = b"}"

    def first(self, choice: ChoiceStream, usage: responses.Usage | None) -> bytes:
        return self.lead(choice, usage, b',"delta":{"role":"assistant","content":""}')

    def logprobs(self, choice: ChoiceStream, chunk: TextChunk) -> responses.ChatLogprobs:
        job = self.job
        return chat_logprobs(self.tokenizer, chunk.token_ids, chunk.logprobs, job.logprobs or 0, job.tokens_as_ids)

    def whole(self, collected: list[CollectedText], usage: responses.Usage) -> msgspec.Struct:
        answer = super().whole(collected, usage)
        return msgspec.structs.replace(answer, prompt_logprobs=self.prompt_scores.get(0, msgspec.UNSET))

    def choice(self, collected: CollectedText) -> responses.ChatChoice:
        ending = self.ending(collected)
        if self.job.reading is None:
            return responses.ChatChoice(message=responses.ChatMessage(content=collected.text), **ending)
        ending["finish_reason"] = _reason(collected.finish_reason, collected.choice)
        return responses.ChatChoice(message=message_of(collected.events, self.job.bare_ids), **ending)

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: responses.Usage | None) -> bytes:
        """Return the events for a chunk: one for each parsed event if the answer is parsed."""
        if choice.answer is None:
            return super().event(choice, chunk, usage)
        if len(chunk.events) == 1 and chunk.finish_reason is None and not self.scored and usage is None:
            [event] = chunk.events
            if isinstance(event, Content):
                return b"%b%b%b" % (self.head_of(choice.index), json_text(event.text), self.plain)
        begun = self.head + b'{"index":%d,"delta":' % choice.index
        encoded = deltas(chunk.events, self.job.bare_ids)
        last = encoded.pop() if encoded and chunk.finish_reason is None else b"{}"
        end = self.end if usage is None else end_with(usage)
        events = [b'%b%b,"logprobs":null,"finish_reason":null}%b' % (begun, each, end) for each in encoded]
        if chunk.finish_reason is not None:
            chunk = chunk._replace(finish_reason=_reason(chunk.finish_reason, choice))
        return b"".join([*events, self.full_event(choice, chunk, usage, begun + last)])


def _reason(reason: str, choice: ChoiceStream) -> str:
    """Return the finish reason; `tool_calls` for an answer with calls unless it was truncated."""
    return "tool_calls" if reason == "stop" and choice.called else reason


@router.post(
    "/v1/completions",
    **endpoint(
        "Create a completion",
        CompletionRequest,
        responses.CompletionAnswer,
        stream=True,
        example={"prompt": "Once upon a time", "max_tokens": 16},
    ),
)
async def create_completion(request: Request) -> Response:
    """Generate texts that continue one or several prompts."""
    state, body, headers = await COMPLETION_BODY.read(request)
    served = state.served(body.model)
    state.admit(1)
    try:
        constraint = requested_constraint(body)
        outcome = (
            ConstraintOutcome()
            if constraint is None
            else await cancel_on_disconnect(request, state.grammars.checked(constraint))
        )
        prompts = await cancel_on_disconnect(request, jobs.completion_prompts(state, body))
        ids = [each.ids for each in prompts]
        job = jobs.build_job(state, request, body, served=served, prompts=ids, logprobs=body.logprobs, outcome=outcome)
    except (ApiError, BadRequest) as error:
        raise jobs.named_as_sent(error, jobs.other_names(body)) from None
    return GenerationResponse(state, _CompletionFormat(job, state.tokenizer, body, prompts), bool(body.stream), headers)


class _CompletionFormat(ResponseFormat):
    """Formats text completions; with `echo` the prompts' texts are sent first."""

    answer = responses.CompletionAnswer
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    opening = b',"text":'
    closing = b""

    def __init__(self, job: jobs.Job, tokenizer: Tokenizer, body: CompletionRequest, prompts: list[PromptText]) -> None:
        super().__init__(job, tokenizer)
        self._echoes: list[str] | None = None
        if body.echo:
            self._echoes = [
                tokenizer.decode(each.ids, job.skip_special) if each.text is None else each.text for each in prompts
            ]
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._echoed: dict[int, EncodedLists] = {}

    def first(self, choice: ChoiceStream, usage: responses.Usage | None) -> bytes:
        if self._echoes is None and not self.job.token_ids and not self.job.warnings:
            return b""
        echoed = self._echoed.get(choice.prompt_index)
        scores = b"null" if echoed is None else bytes(echoed.encoded())
        return self.lead(choice, usage, b',"text":' + msgspec.json.encode(self._echo(choice)), scores)

    def logprobs(self, choice: ChoiceStream, chunk: TextChunk) -> responses.CompletionLogprobs:
        builder = self._builders.get(choice.index)
        if builder is None:
            builder = self._builders[choice.index] = self._builder(len(self._echo(choice)))
        return builder.build(chunk.token_ids, chunk.logprobs)

    def choice(self, collected: CollectedText) -> responses.CompletionChoice:
        choice, ending = collected.choice, self.ending(collected)
        scores = self.prompt_scores.get(choice.prompt_index, msgspec.UNSET)
        return responses.CompletionChoice(text=self._echo(choice) + collected.text, prompt_logprobs=scores, **ending)

    async def prepare(self, choice: ChoiceStream) -> None:
        await super().prepare(choice)
        job, prompt = self.job, choice.prompt_index
        rows = None if choice.scores is None else choice.scores.rows
        if self._echoes is None or job.logprobs is None or rows is None or prompt in self._echoed:
            return
        builder = self._builder(0)
        shifted, ids, lists = [None, *rows], job.prompts[prompt], EncodedLists()
        for part in slices(len(ids)):
            lists.add(builder.build(ids[part], shifted[part]))
            await asyncio.sleep(0)
        self._echoed[prompt] = lists

    def begun_scores(self, choice: ChoiceStream) -> EncodedLists:
        return EncodedLists(self._echoed.get(choice.prompt_index))

    def _builder(self, offset: int) -> CompletionLogprobsBuilder:
        job = self.job
        return CompletionLogprobsBuilder(self.tokenizer, job.logprobs or 0, offset, job.skip_special, job.tokens_as_ids)

    def _echo(self, choice: ChoiceStream) -> str:
        return "" if self._echoes is None else self._echoes[choice.prompt_index]
