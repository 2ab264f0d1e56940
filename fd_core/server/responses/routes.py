"""POST /v1/responses and /v1/responses/input_tokens, whose requests are converted to chats, and stored responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError, required, unsupported
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.jobs import (
    RESPONSES_NAMES,
    Job,
    chat_prompt,
    conversation_job,
    named_as_sent,
    require_effort,
    require_role,
)
from fd_core.server.responses import schemas
from fd_core.server.schemas.requests import (
    ChatRequest,
    ContentPart,
    Message,
    Tool,
    ToolChoice,
    function_tool,
    image_part,
    named_choice,
)
from fd_core.server.schemas.responses import Usage
from fd_core.server.state import ResponseStore, ServerState, StoredResponse, state_of
from fd_core.server.stream import response_format
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.structured.grammar import RequestedConstraint, SchemaConstraint
from fd_core.types import FinishReason

router = APIRouter(route_class=DirectRoute)
BODY: Final = BodyFormat(schemas.ResponsesRequest, schemas.REFUSED)
_PATH: Final = "/v1/responses/{response_id}"
_PREFIX = {"content": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {
    "content": (b"response.output_text.delta", b',"content_index":0,"logprobs":[]'),
    "reasoning": (b"response.reasoning_text.delta", b',"content_index":0'),
    "call": (b"response.function_call_arguments.delta", b""),
}
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"})


@router.post(
    "/v1/responses",
    **endpoint(
        "Create a response",
        schemas.ResponsesRequest,
        schemas.ResponseAnswer,
        stream=True,
        example={"input": "Say hello.", "max_output_tokens": 16},
    ),
)
async def create_response(request: Request) -> Response:
    """Generate an answer to a conversation, in the format of the Responses API."""
    state, body, headers = await BODY.read(request)
    chat = _chat(state, body, request)
    asking = conversation_job(state, chat, request, form=required_constraint(body), names=RESPONSES_NAMES)
    job = await response_format.cancel_on_disconnect(request, asking, long=state.images is not None)
    asked = (chat.messages or [])[1 if body.instructions else 0 :]

    def keep(answer: schemas.ResponseAnswer) -> None:
        state.responses.put(request.state.owner, StoredResponse(answer, (*asked, _assistant_message(answer))))

    keeps = bool(state.responses.capacity) and body.store is not False
    return response_format.GenerationResponse(
        state, _ResponsesFormat(job, body, keep if keeps else None), bool(body.stream), headers=headers
    )


@router.post(
    "/v1/responses/input_tokens",
    **endpoint(
        "Count the tokens of an input",
        schemas.ResponsesRequest,
        schemas.InputTokensAnswer,
        example={"input": "Say hello."},
    ),
)
async def count_input_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a response has."""
    state, body, headers = await BODY.read(request)
    chat = _chat(state, body, request)
    state.served(chat.model)
    try:
        reading = chat_prompt(state, chat)
        prompt = await response_format.cancel_on_disconnect(request, reading, long=state.images is not None)
    except (ApiError, BadRequest) as error:
        raise named_as_sent(error, RESPONSES_NAMES) from None
    return json_response(schemas.InputTokensAnswer(input_tokens=len(prompt.ids)), headers)


@router.get(_PATH, **endpoint("Get a stored response", None, schemas.ResponseAnswer, errors=(400, 401, 404)))
async def get_response(request: Request, response_id: str, stream: str | None = None) -> Response:
    """Return a stored response."""
    if stream not in (None, "", "false"):
        raise unsupported("stream is not supported: a stored response is returned whole", "stream")
    found = state_of(request).responses.get(request.state.owner, response_id)
    if found is None:
        raise _not_kept(response_id)
    return json_response(found.answer)


@router.delete(_PATH, **endpoint("Delete a stored response", None, schemas.DeletedResponse, errors=(401, 404)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    if not state_of(request).responses.delete(request.state.owner, response_id):
        raise _not_kept(response_id)
    return json_response(schemas.DeletedResponse(id=response_id))


def _assistant_message(answer: schemas.ResponseAnswer) -> Message:
    """Return the part of a conversation that an answer adds: one message of the assistant."""
    message = Message(role="assistant", content="")
    for item in answer.output:
        if item["type"] == "message":
            message.content = f"{message.content}" + "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            message.reasoning_content = (message.reasoning_content or "") + "".join(
                part["text"] for part in item["content"]
            )
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.tool_calls = [*(message.tool_calls or ()), call]
    return message


def _not_kept(response_id: str) -> ApiError:
    return ApiError(404, f"the response {response_id[:80]!r} is not stored, or was evicted", code="not_found")


class _ResponsesFormat(response_format.AnswerFormat):
    """Formats one answer of the Responses API; `keep`, if given, is called with the complete answer."""

    def __init__(
        self, job: Job, body: schemas.ResponsesRequest, keep: Callable[[schemas.ResponseAnswer], None] | None
    ) -> None:
        self.job = job
        self._body = body
        self._keep = keep
        self._id = f"resp_{job.record.request_id}"
        self._created = int(time.time())
        self._writer = response_format.BlockWriter()
        self._items: dict[int, tuple[str, str]] = {}
        self._number = 0
        self._reasoning_tokens = 0
        self._status = "completed"

    def whole(self, collected: list[response_format.CollectedText], usage: Usage) -> schemas.ResponseAnswer:
        [one] = collected
        self._reasoning_tokens = one.choice.reasoning_tokens
        self._writer.blocks = response_format.blocks_of(one.events)
        self._status = _status(one.finish_reason, one.stop_reason)
        return self._complete(usage)

    def first(self, choice: ChoiceStream, usage: Usage | None) -> bytes:
        answer = self._answer("in_progress", [])
        return self._event("response.created", response=answer) + self._event("response.in_progress", response=answer)

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: Usage | None) -> bytes:
        spelled = b"".join(self._spelled(step) for step in self._writer.write(chunk.events))
        if chunk.finish_reason is None:
            return spelled
        self._status = _status(chunk.finish_reason, chunk.stop_reason)
        self._reasoning_tokens = choice.reasoning_tokens
        return spelled + b"".join(self._spelled(step) for step in self._writer.close())

    def last(self, usage: Usage) -> bytes:
        answer = self._complete(usage)
        # The API has no event for a response that was cancelled.
        kind = "completed" if answer.status == "completed" else "incomplete"
        return self._event(f"response.{kind}", response=answer)

    def broken(self, error: ApiError) -> bytes:
        self._status = "failed"
        failed = self._answer(self._status, self._output())
        failed.error = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def _complete(self, usage: Usage) -> schemas.ResponseAnswer:
        answer = self._answer(self._status, self._output())
        if self._status == "incomplete":
            answer.incomplete_details = {"reason": "max_output_tokens"}
        cached = usage.prompt_tokens_details.cached_tokens
        answer.usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        if self._keep is not None:
            self._keep(answer)
        return answer

    def _output(self) -> list[dict[str, Any]]:
        return [self._item(block, self._ended(block)) for block in self._writer.blocks]

    def _ended(self, block: response_format.AnswerBlock) -> str:
        """Return the status of a block that has ended, incomplete if the end of the response cut it off."""
        return "completed" if block.is_complete or self._status == "completed" else "incomplete"

    def _answer(self, status: str, output: list[dict[str, Any]]) -> schemas.ResponseAnswer:
        body = self._body
        plain = msgspec.to_builtins
        return schemas.ResponseAnswer(
            id=self._id,
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.job.served.name,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=plain(body.reasoning) if body.reasoning else {"effort": None, "summary": None},
            store=self._keep is not None,
            temperature=self.job.params[0].temperature if body.temperature is None else body.temperature,
            text=_given(body.text) if body.text and body.text.format else {"format": {"type": "text"}},
            tool_choice=plain(body.tool_choice) or "auto",
            tools=[_given(tool) | {"strict": tool.strict, "parameters": tool.parameters} for tool in body.tools or ()],
            top_p=self.job.params[0].top_p if body.top_p is None else body.top_p,
            user=body.user,
            metadata=body.metadata or {},
            warnings=self.job.warned,
        )

    def _item(self, block: response_format.AnswerBlock, status: str, begun: bool = False) -> dict[str, Any]:
        """Return a block as an item: complete, or as at the start of a stream."""
        if block.index not in self._items:
            item_id = f"{_PREFIX[block.kind]}_{secrets.token_hex(12)}"
            self._items[block.index] = item_id, block.call_id or response_format.new_call_id(self.job.bare_ids)
        item_id, call_id = self._items[block.index]
        text = "" if begun else block.text
        if block.kind == "call":
            called = {"call_id": call_id, "name": block.name, "arguments": text}
            return {"type": "function_call", "id": item_id, "status": status, **called}
        if block.kind == "reasoning":
            thought = [] if begun else [{"type": "reasoning_text", "text": text}]
            return {"type": "reasoning", "id": item_id, "summary": [], "content": thought, "status": status}
        content = [] if begun else [_part(text)]
        return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}

    def _spelled(self, step: response_format.BlockStep) -> bytes:
        block = step.block
        if step.kind == "opened":
            item = self._item(block, "in_progress", begun=True)
            added = self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "content":
                return added
            return added + self._in_item("response.content_part.added", block, content_index=0, part=_part(""))
        if step.kind == "added":
            return self._delta(block, step.text)
        if block.kind == "call":
            event = self._in_item("response.function_call_arguments.done", block, name=block.name, arguments=block.text)
        elif block.kind == "reasoning":
            event = self._in_item("response.reasoning_text.done", block, content_index=0, text=block.text)
        else:
            done = {"content_index": 0, "text": block.text, "logprobs": []}
            event = self._in_item("response.output_text.done", block, **done)
            event += self._in_item("response.content_part.done", block, content_index=0, part=_part(block.text))
        item = self._item(block, self._ended(block))
        return event + self._event("response.output_item.done", output_index=block.index, item=item)

    def _delta(self, block: response_format.AnswerBlock, text: str) -> bytes:
        kind, fields = _DELTAS[block.kind]
        number, self._number = self._number, self._number + 1
        event = b'event: %b\ndata: {"type":"%b","sequence_number":%d,"item_id":"%b","output_index":%d%b,"delta":%b}\n\n'
        item_id = self._items[block.index][0].encode()
        return event % (kind, kind, number, item_id, block.index, fields, response_format.json_text(text))

    def _in_item(self, kind: str, block: response_format.AnswerBlock, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[block.index][0], output_index=block.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _status(finish_reason: str, stop_reason: str | int | None) -> str:
    if stop_reason is FinishReason.ABORT:
        return "cancelled"
    return "incomplete" if finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _given(value: msgspec.Struct) -> dict[str, Any]:
    """Return the fields set in a struct and in the structs within it."""
    fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
    return {
        name: _given(field) if isinstance(field, msgspec.Struct) else field
        for name, field in fields
        if field is not None
    }


def _chat(state: ServerState, body: schemas.ResponsesRequest, request: Request) -> ChatRequest:
    chat = as_chat(body, earlier_messages(body, state.responses, request.state.owner))
    require_effort(state.prompt_reader, chat.reasoning_effort, "reasoning.effort")
    return chat


def earlier_messages(body: schemas.ResponsesRequest, store: ResponseStore, owner: str) -> tuple[Message, ...]:
    """Return the conversation that a request continues. Raises `ApiError` (400, 404)."""
    if not store.capacity:
        for field, given in (("store", body.store), ("previous_response_id", body.previous_response_id)):
            if given:
                raise unsupported(
                    f"{field} is not supported: responses are not stored; send the whole conversation as input, or "
                    "start the server with --response-store",
                    field,
                )
    if not body.previous_response_id:
        return ()
    found = store.get(owner, body.previous_response_id)
    if found is None:
        message = f"previous_response_id {body.previous_response_id[:80]!r} is not stored, or was evicted"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return found.messages


def as_chat(body: schemas.ResponsesRequest, earlier: Sequence[Message]) -> ChatRequest:
    """Convert a request to a chat. Raises `ApiError` (400) for fields that this server does not support."""
    _check(body)
    messages = [*earlier, *_messages(body.input)]
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        model=body.model,
        messages=[*instructions, *messages],
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        user=body.user,
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def required_constraint(body: schemas.ResponsesRequest) -> RequestedConstraint | None:
    """Return the output constraint of the answer, None for any text."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return RequestedConstraint("text.format", SchemaConstraint(schema={"type": "object"}))
    schema = required(form.schema, "text.format.schema")
    return RequestedConstraint(
        "text.format.schema", SchemaConstraint(schema=schema, is_strict=form.strict is not False)
    )


def _check(body: schemas.ResponsesRequest) -> None:
    if body.truncation not in (None, "disabled"):
        raise _unsupported("truncation", "conversations are never truncated; shorten the input")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", "verbosity cannot be chosen")
    for wanted in body.include or ():
        if wanted != "reasoning.encrypted_content":
            raise _unsupported("include", f"{wanted[:80]!r} is not available")


def _messages(given: str | list[schemas.InputItem]) -> list[Message]:
    """Return the chat's messages. Calls, and the reasoning before an answer, belong to one message of the assistant.

    Reasoning that no answer follows is a message without text, as in a stored conversation.
    """
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    thought = ""
    for index, item in enumerate(given):
        place = f"input[{index}]"
        answers = item.type in (None, "message") and item.role == "assistant"
        if thought and not answers and item.type not in ("reasoning", "function_call"):
            messages.append(Message(role="assistant", content="", reasoning_content=thought))
            thought = ""
        if item.type in (None, "message"):
            role = required(item.role, f"{place}.role")
            require_role(role, f"{place}.role")
            messages.append(Message(role=role, content=_content(item.content, f"{place}.content")))
            messages[-1].reasoning_content, thought = thought or None, ""
        elif item.type == "reasoning":
            thought += _text(item.content, f"{place}.content") or _text(item.summary, f"{place}.summary")
        elif item.type == "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content=""))
            messages[-1].reasoning_content, thought = (messages[-1].reasoning_content or "") + thought or None, ""
            name, arguments = required(item.name, f"{place}.name"), required(item.arguments, f"{place}.arguments")
            function = {"name": name, "arguments": arguments}
            call = {"id": required(item.call_id, f"{place}.call_id"), "type": "function", "function": function}
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        elif item.type == "function_call_output":
            answered = required(item.call_id, f"{place}.call_id")
            messages.append(
                Message(role="tool", tool_call_id=answered, content=_content(item.output, f"{place}.output"))
            )
        else:
            raise unsupported(
                f"{place}.type is {item.type[:40]!r}; expected message, reasoning, function_call or "
                "function_call_output",
                f"{place}.type",
            )
    if thought:
        messages.append(Message(role="assistant", content="", reasoning_content=thought))
    return messages


def _content(content: str | list[schemas.InputPart] | None, place: str) -> str | list[ContentPart]:
    """Return a text, or parts if there are images."""
    if isinstance(content, str) or not any(part.type == "input_image" for part in content or ()):
        return _text(content, place)
    parts: list[ContentPart] = []
    for index, part in enumerate(content or ()):
        if part.type == "input_image":
            field = f"{place}[{index}].image_url"
            parts.append(image_part(required(part.image_url, field), field))
        else:
            parts.append(ContentPart(type="text", text=_text([part], place, index)))
    return parts


def _text(content: str | list[schemas.InputPart] | None, place: str, first: int = 0) -> str:
    """Return the text of parts, which are those from the index `first` on."""
    if isinstance(content, str):
        return content
    texts = [part.refusal if part.type == "refusal" else part.text for part in content or ()]
    for index, (part, text) in enumerate(zip(content or (), texts, strict=True), first):
        if part.type not in _TEXTS or text is None:
            raise unsupported(
                f"{place}[{index}].type is {part.type[:40]!r}; only text is supported", f"{place}[{index}].type"
            )
    return "\n".join(text or "" for text in texts)


def _tools(body: schemas.ResponsesRequest) -> list[Tool] | None:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            message = f"tools[{index}].type is {tool.type[:40]!r}; only tools of type 'function' are supported"
            raise unsupported(message, f"tools[{index}].type")
        name = required(tool.name, f"tools[{index}].name")
        tools.append(function_tool(name, tool.description, tool.parameters, strict=tool.strict))
    return tools or None


def _choice(body: schemas.ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "function":
        raise _unsupported("tool_choice.type", "expected none, auto, required or a function")
    return named_choice(required(choice.name, "tool_choice.name"))


def _unsupported(field: str, reason: str) -> ApiError:
    return unsupported(f"{field} is not supported: {reason}", field)
