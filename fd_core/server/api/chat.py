"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.errors import invalid
from fd_core.server.api.openapi import endpoint
from fd_core.server.preprocess.api_limits import CHAT as CHAT_LIMITS
from fd_core.server.preprocess.api_limits import MAX_TOOL_NAME
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.field_names import as_sent, named_as_sent, other_names
from fd_core.server.preprocess.jobs import build_job, with_grammar
from fd_core.server.preprocess.prompts import chat_prompt
from fd_core.server.preprocess.structured_fields import form_asked
from fd_core.server.preprocess.tool_grammars import constrained, demanded_form
from fd_core.server.preprocess.tools import answer_reading, offered_tools
from fd_core.server.schemas.requests import ChatRequest
from fd_core.server.schemas.responses import ChatAnswer, ChatChoice, ChatLogprobs, ChatMessage, Usage
from fd_core.server.schemas.unsupported import CHAT
from fd_core.server.state.state import ServerState, state_of
from fd_core.server.stream.chat_deltas import deltas, message_of
from fd_core.server.stream.disconnect import unless_gone
from fd_core.server.stream.generation import ChoiceStream, Job, TextChunk
from fd_core.server.stream.logprobs import chat_logprobs
from fd_core.server.stream.response_format import CollectedText, ResponseFormat
from fd_core.server.stream.streaming import GenerationResponse
from fd_core.structured.grammar import FormAsked
from fd_core.structured.workers.messages import FormOutcome, Unenforced
from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.events import Content
from fd_core.types.checks import check_structure

__all__ = ["BODY", "conversation_job", "router"]

router = APIRouter()
BODY: Final = BodyFormat(ChatRequest, CHAT)


@router.post("/v1/chat/completions", **endpoint("Answer a conversation", ChatRequest, ChatAnswer, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """Generate the assistant's next message."""
    state = state_of(request)
    body, headers = await BODY.read(request, state)
    job = await unless_gone(request, conversation_job(state, body, request))
    return GenerationResponse(state, ChatFormat(job, state.tokenizer), bool(body.stream), headers)


async def conversation_job(
    state: ServerState,
    body: ChatRequest,
    request: Request,
    form: FormAsked | None = None,
    names: Mapping[str, str] | None = None,
) -> Job:
    """Return what a conversation wants generated, with all checks; `form` is what its answer has to match.

    The other families say what they want as such a request, with the `names` of their fields, and get their answers as
    events in any case. Raises `ApiError`.
    """
    sent = other_names(body) if names is None else names
    with named_as_sent(sent):
        job = await _job(state, body, request, form or form_asked(body), events=names is not None)
    warnings = (Unenforced(*(as_sent(each.param, text, sent))) for each in job.warnings for text in [each.message])
    return dataclasses.replace(job, warnings=tuple(warnings)) if job.warnings else job


async def _job(state: ServerState, body: ChatRequest, request: Request, form: FormAsked | None, *, events: bool) -> Job:
    state.model_name(body.model)
    state.admit(1)
    logprobs = _logprobs(body)
    outcome = FormOutcome() if form is None else await state.grammars.checked(form)
    tools = offered_tools(body, MAX_TOOL_NAME if events else CHAT_LIMITS.tool_name)
    reading = answer_reading(
        state,
        tools,
        parallel=body.parallel_tool_calls is not False,
        show_reasoning=body.include_reasoning is not False,
    )
    if reading is None and events:
        reading = AnswerReading(None, None, {})
    calls = demanded_form(state, tools, reading, form)
    if calls is not None:
        outcome = await state.grammars.checked(calls)
    prompt = await chat_prompt(state, body)
    job = with_grammar(build_job(state, body, request, [prompt], logprobs, reading), outcome)
    job = constrained(state, job, _reasoning_budget(body), called=calls is not None)
    check_structure(job.params[0])
    return job


def _logprobs(body: ChatRequest) -> int | None:
    """Return how many likely tokens are wanted beside each chosen one."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid(f"top_logprobs is {body.top_logprobs}, which needs logprobs to be true", "top_logprobs")
    return None


def _reasoning_budget(body: ChatRequest) -> int | None:
    given = (body.reasoning_max_tokens, body.thinking_token_budget)
    if None not in given and given[0] != given[1]:
        raise invalid("reasoning_max_tokens and thinking_token_budget differ; give one", "thinking_token_budget")
    return given[0] if given[1] is None else given[1]


class ChatFormat(ResponseFormat):
    """Spells chat completions."""

    answer = ChatAnswer
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    opening = b',"delta":{"content":'
    closing = b"}"

    def first(self, choice: ChoiceStream) -> bytes:
        """Return the event that names the role."""
        return self.lead(choice, b',"delta":{"role":"assistant","content":""}')

    def logprobs(self, choice: ChoiceStream, chunk: TextChunk) -> ChatLogprobs:
        """Return log-probabilities with the bytes of each token."""
        job = self.job
        return chat_logprobs(self.tokenizer, chunk.token_ids, chunk.logprobs, job.logprobs or 0, job.tokens_as_ids)

    def whole(self, collected: list[CollectedText], usage: Usage) -> msgspec.Struct:
        """Return the answer, with what was asked of the prompt beside the choices."""
        answer = super().whole(collected, usage)
        return msgspec.structs.replace(answer, prompt_logprobs=self.prompt_scores.get(0, msgspec.UNSET))

    def choice(self, collected: CollectedText) -> ChatChoice:
        """Return one generated message."""
        ending = self.ending(collected)
        if self.job.reading is None:
            return ChatChoice(message=ChatMessage(content=collected.text), **ending)
        ending["finish_reason"] = _reason(collected.finish_reason, collected.choice)
        return ChatChoice(message=message_of(collected.events, self._bare_ids), **ending)

    def full_event(self, choice: ChoiceStream, chunk: TextChunk) -> bytes:
        """Return the events for a chunk: one, or one for each thing that was found in it."""
        if self.job.reading is None:
            return super().full_event(choice, chunk)
        if len(chunk.events) == 1 and chunk.finish_reason is None and not self.scored and self.usage_so_far is None:
            [event] = chunk.events
            if isinstance(event, Content):
                return self.quick_event(choice.index, event.text)
        begun = self.head + b'{"index":%d,"delta":' % choice.index
        said = deltas(chunk.events, self._bare_ids)
        last = said.pop() if said and chunk.finish_reason is None else b"{}"
        events = [b'%b%b,"logprobs":null,"finish_reason":null}%b' % (begun, each, self.end_of_event()) for each in said]
        if chunk.finish_reason is not None:
            chunk = chunk._replace(finish_reason=_reason(chunk.finish_reason, choice))
        return b"".join([*events, self.last_of_chunk(choice, chunk, begun + last)])

    @property
    def _bare_ids(self) -> bool:
        reading = self.job.reading
        return reading is not None and reading.tools is not None and reading.tools.bare_ids


def _reason(reason: str, choice: ChoiceStream) -> str:
    """Return why an answer ended; one with calls ended for them unless it was cut off."""
    return "tool_calls" if reason == "stop" and choice.called else reason
