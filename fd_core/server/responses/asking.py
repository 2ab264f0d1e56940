"""From a request of the Responses API to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fd_core.http.errors import ApiError, required, unsupported
from fd_core.server.preprocess.prompts import require_role
from fd_core.server.responses.schemas import InputItem, InputPart, ResponsesRequest
from fd_core.server.schemas.requests import ChatRequest, Message, Tool, ToolChoice, function_tool, named_choice
from fd_core.server.state.state import ResponseStore
from fd_core.structured.grammar import FormAsked, SchemaForm

_HARMLESS_INCLUDES: Final = frozenset({"reasoning.encrypted_content"})
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"})


def earlier_messages(body: ResponsesRequest, store: ResponseStore, owner: str) -> tuple[Message, ...]:
    """Return the conversation that a request goes on from. Raises `ApiError` (400, 404)."""
    if not store.capacity:
        for field, given in (("store", body.store), ("previous_response_id", body.previous_response_id)):
            if given:
                raise unsupported(
                    f"{field} is not supported: this server keeps no answers; send the whole conversation as input, or "
                    "start the server with --response-store",
                    field,
                )
    if not body.previous_response_id:
        return ()
    found = store.get(owner, body.previous_response_id)
    if found is None:
        message = f"previous_response_id names {body.previous_response_id[:80]!r}, which is not kept (any more)"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return found.messages


def as_chat(body: ResponsesRequest, earlier: Sequence[Message]) -> ChatRequest:
    """Return the chat that a request asks for. Raises `ApiError` (400) for what this server does not read."""
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


def demanded_form(body: ResponsesRequest) -> FormAsked | None:
    """Return the form that the answer has to have, None for any text."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return FormAsked("text.format", SchemaForm(schema={"type": "object"}))
    schema = required(form.schema, "text.format.schema")
    return FormAsked("text.format.schema", SchemaForm(schema=schema, is_strict=form.strict is not False))


def _check(body: ResponsesRequest) -> None:
    if body.truncation not in (None, "disabled"):
        raise _unsupported("truncation", "conversations are never cut; shorten the input")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", "verbosity cannot be chosen")
    for wanted in body.include or ():
        if wanted not in _HARMLESS_INCLUDES:
            raise _unsupported("include", f"{wanted[:80]!r} cannot be included")


def _messages(given: str | list[InputItem]) -> list[Message]:
    """Return the chat's messages. Calls, and the reasoning before an answer, belong to one message of the assistant."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    thought: str | None = None
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if item.type in (None, "message"):
            role = required(item.role, f"{place}.role")
            require_role(role, f"{place}.role")
            messages.append(Message(role=role, content=_text(item.content, f"{place}.content")))
            if role == "assistant" and thought is not None:
                messages[-1].reasoning_content, thought = thought, None
        elif item.type == "reasoning":
            thought = _text(item.content, f"{place}.content") or _text(item.summary, f"{place}.summary") or None
        elif item.type == "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content="", reasoning_content=thought))
                thought = None
            name, arguments = required(item.name, f"{place}.name"), required(item.arguments, f"{place}.arguments")
            function = {"name": name, "arguments": arguments}
            call = {"id": required(item.call_id, f"{place}.call_id"), "type": "function", "function": function}
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        elif item.type == "function_call_output":
            answered = required(item.call_id, f"{place}.call_id")
            messages.append(Message(role="tool", tool_call_id=answered, content=_text(item.output, f"{place}.output")))
        else:
            raise unsupported(
                f"{place}.type is {item.type[:40]!r}; served are message, reasoning, function_call and "
                "function_call_output",
                f"{place}.type",
            )
    return messages


def _text(content: str | list[InputPart] | None, place: str) -> str:
    if isinstance(content, str):
        return content
    texts = [part.refusal if part.type == "refusal" else part.text for part in content or ()]
    for index, part in enumerate(content or ()):
        if part.type not in _TEXTS or texts[index] is None:
            raise unsupported(
                f"{place}[{index}].type is {part.type[:40]!r}; only text is read here", f"{place}[{index}].type"
            )
    return "\n".join(text or "" for text in texts)


def _tools(body: ResponsesRequest) -> list[Tool] | None:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            message = f"tools[{index}].type is {tool.type[:40]!r}; served are functions, which the client calls"
            raise unsupported(message, f"tools[{index}].type")
        name = required(tool.name, f"tools[{index}].name")
        tools.append(function_tool(name, tool.description, tool.parameters, tool.strict))
    return tools or None


def _choice(body: ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "function":
        raise _unsupported("tool_choice.type", "served are none, auto, required and a function")
    return named_choice(required(choice.name, "tool_choice.name"))


def _unsupported(field: str, reason: str) -> ApiError:
    return unsupported(f"{field} is not supported: {reason}", field)
