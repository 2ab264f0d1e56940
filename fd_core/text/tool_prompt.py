"""Tools in a conversation whose chat template knows nothing of them: written into its texts, in the form of hermes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fd_core.errors import BadRequest

_SHOWN: Final = ("name", "description", "parameters")

_HEAD: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TAIL: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def with_tools(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, calls: bool = True
) -> list[dict[str, Any]]:
    """Return the turns with the tools in the system message.

    With `calls`, calls are written into the assistant's texts, and what tools answered into the user's. `turns` are
    flattened, see `fd_core.text.chat_template.flatten_messages`. Raises `BadRequest` for calls that are not JSON.
    """
    written: list[dict[str, Any]] = [] if calls else [dict(turn) for turn in turns]
    for turn in turns if calls else ():
        role = turn["role"]
        if role == "tool":
            answer = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if written and written[-1].get("tool") is True:
                written[-1]["content"] += f"\n{answer}"
            else:
                written.append({"role": "user", "content": answer, "tool": True})
        elif turn.get("tool_calls"):
            spoken = "\n".join(_call(call) for call in turn["tool_calls"])
            written.append({"role": role, "content": f"{turn['content']}\n{spoken}" if turn["content"] else spoken})
        else:
            written.append(dict(turn))
    if tools:
        signatures = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL
        if written and written[0]["role"] == "system":
            written[0]["content"] = f"{written[0]['content']}\n\n{signatures}"
        else:
            written.insert(0, {"role": "system", "content": signatures})
    return written


def shown_tool(tool: Any) -> dict[str, Any]:
    """Return a tool of OpenAI's as templates expect it, without what only clients and servers read.

    Raises `TypeError` for what is no tool.
    """
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise TypeError("a tool is an object with a function")
    function = tool["function"]
    shown = {name: function[name] for name in _SHOWN if function.get(name) is not None}
    return {"type": "function", "function": shown}


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    try:
        spoken = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest("messages: a tool call needs a name and arguments", field="messages") from error
    return f"<tool_call>\n{spoken}\n</tool_call>"
