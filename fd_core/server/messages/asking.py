"""From a request of the Messages API to a chat request."""

from __future__ import annotations

import json
from typing import Final

from fd_core.http.errors import required, unsupported
from fd_core.server.messages.schemas import CountRequest, InputBlock, MessagesRequest, TextBlock, Turn
from fd_core.server.preprocess.prompts import PromptState, require_effort
from fd_core.server.schemas.requests import ChatRequest, Message, Tool, ToolChoice, function_tool, named_choice
from fd_core.structured.grammar import FormAsked, SchemaForm

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_USUAL_EFFORT: Final = "high"
"""What requests that name no effort ask for."""


def as_chat(state: PromptState, body: CountRequest) -> ChatRequest:
    """Return the chat that a request asks for. Raises `ApiError` (400) for what this server does not read."""
    effort = None if body.output_config is None else body.output_config.effort
    if effort == _USUAL_EFFORT and not state.prompt_reader.takes_effort:
        effort = None
    require_effort(state.prompt_reader, effort, "output_config.effort")
    messages = [Message(role="system", content=_text(body.system, "system"))] if body.system else []
    for index, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{index}]")
    goes_on = messages[-1].role == "assistant"
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        continue_final_message=goes_on,
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    chat.reasoning_effort = effort
    if state.prompt_reader.switches_reasoning:
        chat.enable_thinking = body.thinking is not None and body.thinking.type != "disabled"
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stream = body.stream
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.cache_salt, chat.priority = body.cache_salt, body.priority
        chat.user = body.metadata.user_id[:256] if body.metadata and body.metadata.user_id else None
        reasoning = state.parsers.reasoning
        if body.thinking is not None and reasoning is not None and reasoning.end:
            chat.reasoning_max_tokens = body.thinking.budget_tokens
    return chat


def demanded_form(body: CountRequest) -> FormAsked | None:
    """Return the schema that the answer has to fit, if one is given."""
    newer = None if body.output_config is None else body.output_config.format
    wanted, place = (
        (body.output_format, "output_format.schema") if newer is None else (newer, "output_config.format.schema")
    )
    return None if wanted is None else FormAsked(place, SchemaForm(schema=wanted.schema))


def _messages(turn: Turn, place: str) -> list[Message]:
    """Return the chat's messages for one turn: what tools answered comes before what the user says beside it."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    texts, thoughts, calls, answers = [], [], [], []
    for index, block in enumerate(turn.content):
        where = f"{place}.content[{index}]"
        if block.type == "text":
            texts.append(required(block.text, f"{where}.text"))
        elif block.type == "tool_use" and turn.role == "assistant":
            given = {} if block.input is None else block.input
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            function = {"name": required(block.name, f"{where}.name"), "arguments": arguments}
            calls.append({"id": required(block.id, f"{where}.id"), "type": "function", "function": function})
        elif block.type == "tool_result" and turn.role == "user":
            content = _text(block.content or "", f"{where}.content")
            answered = required(block.tool_use_id, f"{where}.tool_use_id")
            answers.append(Message(role="tool", tool_call_id=answered, content=content))
        elif block.type == "thinking" and turn.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            raise _unread(block, where, turn.role)
    if turn.role == "assistant":
        thought = "\n".join(thoughts) or None
        text = "\n".join(texts)
        return [Message(role="assistant", content=text, tool_calls=calls or None, reasoning_content=thought)]
    return [*answers, *([Message(role=turn.role, content="\n".join(texts))] if texts or not answers else [])]


def _text(content: str | list[TextBlock] | None, place: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content or ()):
        if block.type != "text" or block.text is None:
            raise _unread(block, f"{place}[{index}]", "text")
    return "\n".join(block.text or "" for block in content or ())


def _tools(body: CountRequest) -> list[Tool] | None:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            message = f"tools[{index}].type is {tool.type[:40]!r}; served are tools of the client, of type 'custom'"
            raise unsupported(message, f"tools[{index}].type")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return tools or None


def _choice(body: CountRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        return named_choice(required(choice.name, "tool_choice.name"))
    return _CHOICES[choice.type]


def _unread(block: InputBlock | TextBlock, where: str, role: str) -> Exception:
    return unsupported(
        f"{where}.type is {block.type[:40]!r}, which is not read here ({role}); served are text, thinking, tool_use "
        "and tool_result",
        f"{where}.type",
    )
