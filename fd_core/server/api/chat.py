"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.api.openapi import DirectRoute, endpoint
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.jobs import conversation_job
from fd_core.server.schemas.requests import ChatRequest
from fd_core.server.schemas.responses import ChatAnswer, ChatChoice, ChatLogprobs, ChatMessage, Usage
from fd_core.server.schemas.unsupported import CHAT
from fd_core.server.stream.blocks import deltas, message_of
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.server.stream.response_format import CollectedText, ResponseFormat, chat_logprobs, end_with, json_text
from fd_core.server.stream.streaming import GenerationResponse, unless_gone
from fd_core.text.parsing.events import Content

router = APIRouter(route_class=DirectRoute)
BODY: Final = BodyFormat(ChatRequest, CHAT)


@router.post("/v1/chat/completions", **endpoint("Answer a conversation", ChatRequest, ChatAnswer, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """Generate the assistant's next message."""
    state, body, headers = await BODY.read(request)
    job = await unless_gone(request, conversation_job(state, body, request))
    return GenerationResponse(state, _ChatFormat(job, state.tokenizer), bool(body.stream), headers)


class _ChatFormat(ResponseFormat):
    """Spells chat completions."""

    answer = ChatAnswer
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    opening = b',"delta":{"content":'
    closing = b"}"

    def first(self, choice: ChoiceStream, usage: Usage | None) -> bytes:
        return self.lead(choice, usage, b',"delta":{"role":"assistant","content":""}')

    def logprobs(self, choice: ChoiceStream, chunk: TextChunk) -> ChatLogprobs:
        job = self.job
        return chat_logprobs(self.tokenizer, chunk.token_ids, chunk.logprobs, job.logprobs or 0, job.tokens_as_ids)

    def whole(self, collected: list[CollectedText], usage: Usage) -> msgspec.Struct:
        answer = super().whole(collected, usage)
        return msgspec.structs.replace(answer, prompt_logprobs=self.prompt_scores.get(0, msgspec.UNSET))

    def choice(self, collected: CollectedText) -> ChatChoice:
        ending = self.ending(collected)
        if self.job.reading is None:
            return ChatChoice(message=ChatMessage(content=collected.text), **ending)
        ending["finish_reason"] = _reason(collected.finish_reason, collected.choice)
        return ChatChoice(message=message_of(collected.events, self.job.bare_ids), **ending)

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: Usage | None) -> bytes:
        """Return the events for a chunk; of an answer that is read, one for each thing that was found in it."""
        if choice.answer is None:
            return super().event(choice, chunk, usage)
        if len(chunk.events) == 1 and chunk.finish_reason is None and not self.scored and usage is None:
            [event] = chunk.events
            if isinstance(event, Content):
                return b"%b%b%b" % (self.head_of(choice.index), json_text(event.text), self.plain)
        begun = self.head + b'{"index":%d,"delta":' % choice.index
        said = deltas(chunk.events, self.job.bare_ids)
        last = said.pop() if said and chunk.finish_reason is None else b"{}"
        end = self.end if usage is None else end_with(usage)
        events = [b'%b%b,"logprobs":null,"finish_reason":null}%b' % (begun, each, end) for each in said]
        if chunk.finish_reason is not None:
            chunk = chunk._replace(finish_reason=_reason(chunk.finish_reason, choice))
        return b"".join([*events, self.full_event(choice, chunk, usage, begun + last)])


def _reason(reason: str, choice: ChoiceStream) -> str:
    """Return why an answer ended; one with calls ended for them unless it was cut off."""
    return "tool_calls" if reason == "stop" and choice.called else reason
