"""Chat templates: they turn a conversation into the prompt format that the model was trained on.

A template comes with the checkpoint and is an untrusted program: `fd_core.text.sandbox` limits what it can do, and
`fd_core.text.template_budget` what it can take.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError

from fd_core.errors import BadRequest, ModelError
from fd_core.text.sandbox import Sandbox
from fd_core.text.template_budget import TooMuch, joined, metered, the_budget
from fd_core.text.tool_prompt import with_tools

if TYPE_CHECKING:
    from fd_core.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "flatten_messages"]

Message = Mapping[str, Any]

_MAX_SOURCE_CHARS = 1 << 18
_MAX_ERROR_CHARS = 500
_MAX_PATTERN_CHARS = 200
_TRIAL = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."})
_END = "\U000f4a7bend of the final message\U000f4a7b"
"""Stands behind a message that is to be continued; characters for private use, which no text should hold."""
_MAX_CONTAINERS: Final = 32_768
"""Each of them is made while nothing else runs in this process."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MISUSE = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class _Refused(Exception):
    """The template called `raise_exception`: it does not accept the conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, compiled once and rendered many times; safe to share between threads.

    `now` is the clock behind the template's `strftime_now`. The rendered prompt carries the control tokens
    itself: encode it with `add_special=False`.
    """

    source: str
    bos_token: str | None = None
    eos_token: str | None = None
    now: Callable[[], datetime] = datetime.now

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> Self | None:
        """Return the template of `source`, else the one that came with the tokenizer, if any did.

        Raises `ModelError` with the line if it does not compile, or if already a short conversation goes beyond the
        limits.
        """
        source = tokenizer.chat_template if source is None else source
        if source is None:
            return None
        template = cls(source, tokenizer.bos_token, tokenizer.eos_token)
        for turns in (_TRIAL[:1], _TRIAL):
            with contextlib.suppress(BadRequest):  # it may want other turns
                template.render(turns)
        return template

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt for a conversation.

        `messages` are OpenAI's: `role`, `content` (text, None or parts of type text), `tool_calls` and so on.
        `template_kwargs` are variables of the template's own, such as `enable_thinking`. With `continue_final_message`
        the prompt ends with the content of the last message. `documents` are for templates that have a place for them;
        a template that knows no tools gets them as texts, see `fd_core.text.tool_prompt`.
        Raises `BadRequest`, naming the field, for messages that are malformed or that the template refuses, and
        `ModelError` for a template that does not compile or goes beyond the limits.
        """
        turns = flatten_messages(messages)
        if not self.knows_tools:
            turns = with_tools(turns, tools, calls="tool_calls" not in self.source)
        if continue_final_message:
            turns[-1]["content"] += _END
        if documents and "documents" not in self.source:
            raise BadRequest("the chat template has no place for documents", field="documents")
        ours = {
            "messages": turns,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
            "raise_exception": _refuse,
            "strftime_now": self._strftime_now,
        } | ({"documents": list(documents)} if documents else {})
        own = dict(template_kwargs or {})
        taken = own.keys() & {*ours, "self"}
        if taken:
            raise BadRequest(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}", field="chat_template_kwargs"
            )
        compiled = self._compiled
        try:
            with metered():
                text = joined(compiled.generate(own | ours))
            return _up_to_end(text) if continue_final_message else text
        except _Refused as error:
            raise BadRequest(f"the chat template refused the messages: {error}", field="messages") from error
        except (SecurityError, TooMuch, RecursionError, MemoryError) as error:
            raise ModelError(f"the chat template was stopped: {_shown(error)}", field="chat_template") from error
        except _MISUSE as error:
            raise BadRequest(
                f"the chat template cannot render these messages: {_shown(error)}", field="messages"
            ) from error

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template has a place for tools. Raises `ModelError` if it does not compile."""
        _ = self._compiled
        return "tools" in jinja2.meta.find_undeclared_variables(Sandbox().parse(self.source))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > _MAX_SOURCE_CHARS:
            raise ModelError(
                f"the chat template has {len(self.source)} characters, the limit is {_MAX_SOURCE_CHARS}",
                field="chat_template",
            )
        try:
            with metered():
                return Sandbox().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is not valid, line {error.lineno}: {_shown(error.message)}", field="chat_template"
            ) from error
        except (RecursionError, SyntaxError, ValueError, ArithmeticError, MemoryError, TooMuch) as error:
            raise ModelError(f"the chat template cannot be compiled: {_shown(error)}", field="chat_template") from error

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise TooMuch(f"a pattern of dates has more than {_MAX_PATTERN_CHARS} characters")
        return self.now().strftime(pattern)


def _shown(error: object) -> str:
    return str(error)[:_MAX_ERROR_CHARS]


def _refuse(message: object = "no reason given") -> NoReturn:
    raise _Refused(the_budget().text(message)[:_MAX_ERROR_CHARS])


def _up_to_end(text: str) -> str:
    """Return the prompt up to the end of the message that is to be continued."""
    prompt, found, _ = text.rpartition(_END)
    if not found or _END in prompt:
        raise BadRequest(
            "the chat template does not show the last message once, so the message cannot be continued",
            field="continue_final_message",
        )
    return prompt


def flatten_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as templates expect them: `content` is text, arguments of tool calls are objects.

    Text parts are joined by a newline; a missing or null content becomes the empty string. Raises `BadRequest`
    naming the field for anything else.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise BadRequest("messages must be a list with at least one message", field="messages")
    flat = []
    budget = _MAX_CONTAINERS
    for index, message in enumerate(messages):
        budget -= _containers(message)
        if budget < 0:
            raise BadRequest(
                f"messages: the arguments of tool calls hold more than {_MAX_CONTAINERS:,} objects and lists",
                field="messages",
            )
        flat.append(_flattened(message, f"messages[{index}]"))
    return flat


def _containers(message: Any) -> int:
    """Return how many objects and lists, about, the arguments of a message's calls hold as text."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    texts = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return sum(text.count("{") + text.count("[") for text in texts if isinstance(text, str))


def _flattened(message: Message, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{field} must be an object", field=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{field}.role must be a string such as 'user'", field=f"{field}.role")
    flat = {**message, "content": _text(message.get("content"), f"{field}.content")}
    calls = message.get("tool_calls")
    if calls:
        flat["tool_calls"] = _tool_calls(calls, f"{field}.tool_calls")
    return flat


def _text(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{field} must be text or a list of parts", field=field)
    return "\n".join(_part(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        raise BadRequest(
            f"{field}.type is {str(kind)[:40]!r}; this model reads text only, type 'text'", field=f"{field}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{field}.text must be a string", field=f"{field}.text")
    return text


def _tool_calls(calls: Any, field: str) -> list[Any]:
    """Parse the arguments, which OpenAI's clients send as JSON text and templates expect as an object."""
    if not isinstance(calls, list | tuple):
        raise BadRequest(f"{field} must be a list", field=field)
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequest(f"{field}[{index}].function must be an object", field=f"{field}[{index}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _arguments(arguments, f"{field}[{index}].function.arguments")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _arguments(text: str, field: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{field} is not valid JSON", field=field) from error
