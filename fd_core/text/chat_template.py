"""Chat templates: they turn a conversation into the prompt format that the model was trained on.

A template is shipped with the checkpoint and is an untrusted program: `fd_core.text.sandbox` limits its operations, and
`fd_core.text.template_budget` its time and memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.exceptions import SecurityError

from fd_core.errors import BadRequest, ModelError
from fd_core.models.loading.tokenizer_source import DEFAULT_TEMPLATE
from fd_core.text.sandbox import Sandbox
from fd_core.text.template_budget import TemplateLimitError, metered, the_budget

if TYPE_CHECKING:
    from fd_core.text.tokenizer import Tokenizer


Message = Mapping[str, Any]

_MAX_SOURCE_CHARS = 1 << 18
_MAX_ERROR_CHARS = 500
_MAX_PATTERN_CHARS = 200
_TRIAL = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."})
_TRIAL_PARTS: Final = [{"type": "image"}, {"type": "text", "text": _TRIAL[0]["content"]}]
_END = "\U000f4a7bend of the final message\U000f4a7b"
"""Marks the end of a message to be continued; private-use characters, which no text should contain."""
_IMAGE: Final = "\U000f4a7bimage\U000f4a7b"
"""Place of an image in the text of a message, until the template is known to take parts or texts."""
_MAX_CONTAINERS: Final = 32_768
"""Limit of compiled objects, because creating each blocks the process."""
_MAX_DIGITS: Final = 100
_SHORT_ID: Final = 9
_TOOL_TEMPLATE: Final = "tool_use"
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MISUSE = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, NameError)


class _Refused(Exception):
    """The template called `raise_exception`: it does not accept the conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, compiled once and rendered many times; safe to share between threads.

    `now` is the clock of the template's `strftime_now`. The rendered prompt carries the control tokens itself: encode
    it with `add_special=False`.
    """

    source: str
    """The default template; empty for a model that has named ones only."""
    bos_token: str | None = None
    eos_token: str | None = None
    now: Callable[[], datetime] = datetime.now
    named: Mapping[str, str] = field(default_factory=dict)
    """Templates for other purposes by name; `tool_use` replaces the default one where tools are given."""
    _others: dict[str, ChatTemplate] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> Self | None:
        """Return the template of `source`, else the one that is shipped with the tokenizer, if any.

        Raises `ModelError` with the line if it does not compile, or if already a short conversation goes beyond the
        limits.
        """
        named = tokenizer.named_templates if source is None else {}
        source = tokenizer.chat_template if source is None else source
        if source is None and not named:
            return None
        template = cls(source or "", tokenizer.bos_token, tokenizer.eos_token, named=named)
        for each in (template, template.for_tools):
            for turns in (_TRIAL[:1], _TRIAL):
                with contextlib.suppress(BadRequest):  # it may want other turns
                    each.render(turns)
        return template

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        image_text: str = "",
    ) -> str:
        """Return the prompt for a conversation.

        `messages` are OpenAI's: `role`, `content` (text, None or parts of type text), `tool_calls` and so on. With
        `image_text`, which takes the place of an image where a template only takes texts, parts may be of type image.
        `template_kwargs` are variables that the template defines, such as `enable_thinking`. With
        `continue_final_message` the prompt ends with the content of the last message, which has no tool calls;
        otherwise with the beginning of an answer, unless `add_generation_prompt` is False. `documents` are for
        templates that support them; a template without support for tools gets these as text, see `with_tools`.

        Arguments of calls are as a model wrote them: if they are not JSON, they are rendered as text, or as an object
        that contains the text if the template requires objects. Raises `BadRequest`, naming the field, for messages
        that are malformed or that the template rejects, and `ModelError` for a template that does not compile or goes
        beyond the limits.
        """
        chosen = self.for_tools if tools else self
        if not chosen.source and chosen.named:
            raise BadRequest(
                "the model has several chat templates and no default; select one with chat_template: "
                f"{', '.join(sorted(chosen.named))}",
                field="chat_template",
            )
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other; set only one",
                field="continue_final_message",
            )
        turns = flatten_messages(messages, images=bool(image_text))
        if continue_final_message and "tool_calls" in turns[-1]:
            raise BadRequest(
                "the last message has tool calls and cannot be continued; append the results of the calls",
                field="messages",
            )
        if documents and "documents" not in chosen.source:
            raise BadRequest("the chat template does not support documents", field="documents")
        ours = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
            "raise_exception": _refuse,
            "strftime_now": self._strftime_now,
        } | ({"documents": list(documents)} if documents else {})
        own = dict(template_kwargs or {})
        taken = own.keys() & {*ours, "messages", "self"}
        if taken:
            raise BadRequest(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}", field="chat_template_kwargs"
            )
        failures: list[BadRequest | ModelError] = []
        readings: Iterable[list[dict[str, Any]]] = ([dict(turn) for turn in turns],)
        if any("tool_calls" in turn for turn in turns):
            readings = _readings_of_calls(turns)
        for reading in readings:
            try:
                return chosen._render(reading, own | ours, continue_final_message, image_text)
            except (BadRequest, ModelError) as error:
                failures.append(error)
        raise failures[0]

    def _render(self, turns: list[dict[str, Any]], variables: Mapping[str, Any], goes_on: bool, image_text: str) -> str:
        compiled = self._compiled
        try:
            tools = variables["tools"]
            if not self.supports_tools and (
                tools or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
            ):
                calls = "tool_calls" not in self.source
                turns = with_tools(turns, tools, calls=calls, system=not tools or self._takes_system)
            if goes_on:
                turns[-1]["content"] += _END
            if image_text or self._needs_parts:
                turns = [self._with_parts(turn, image_text) for turn in turns]
            if self._calls_without_content:
                turns = [
                    {**turn, "content": turn["content"] or None} if "tool_calls" in turn else turn for turn in turns
                ]
            with metered() as budget:
                text = budget.join(compiled.generate({**variables, "messages": turns}))
            return _up_to_end(text) if goes_on else text
        except _Refused as error:
            raise BadRequest(f"the chat template rejected the messages: {error}", field="messages") from error
        except (SecurityError, TemplateLimitError, RecursionError, MemoryError) as error:
            raise ModelError(f"the chat template was stopped: {_shown(error)}", field="chat_template") from error
        except BadRequest:
            raise
        except _MISUSE as error:
            raise BadRequest(
                f"the chat template cannot render these messages: {_shown(error)}", field="messages"
            ) from error

    @cached_property
    def for_tools(self) -> ChatTemplate:
        """The template of conversations with tools: the one named `tool_use`, or this one."""
        return self.of_name(_TOOL_TEMPLATE) or self

    def of_name(self, name: str) -> ChatTemplate | None:
        """Return one of the model's templates; None if it has none of that name."""
        source = self.source if name == DEFAULT_TEMPLATE else self.named.get(name)
        if name not in self._others and source:
            self._others[name] = replace(self, source=source, named={})
        return self._others.get(name)

    def mentions(self, variable: str) -> bool:
        """Return True if one of the model's templates reads a variable."""
        return any(variable in source for source in (self.source, *self.named.values()))

    @cached_property
    def supports_tools(self) -> bool:
        """Return True if the template supports tools. Raises `ModelError` if it does not compile."""
        _ = self._compiled
        return "tools" in jinja2.meta.find_undeclared_variables(Sandbox().parse(self.source))

    def _with_parts(self, turn: dict[str, Any], image_text: str) -> dict[str, Any]:
        """Return a turn whose content is as the template takes it: a text, or parts."""
        content = turn["content"]
        if self._needs_parts or (_IMAGE in content and self._takes_parts):
            return {**turn, "content": _parts(content)}
        if _IMAGE not in content:
            return turn
        return {**turn, "content": "\n".join(part.get("text", image_text) for part in _parts(content))}

    @cached_property
    def _needs_parts(self) -> bool:
        """True if the template writes the texts of parts, but not a content that is a text."""
        return not self._writes(_TRIAL[0]["content"]) and self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        return self._writes(_TRIAL_PARTS)

    @cached_property
    def _takes_system(self) -> bool:
        """True if the template writes system messages."""
        return any(self._writes(content, "system") for content in (_TRIAL[0]["content"], _TRIAL_PARTS[1:]))

    @cached_property
    def _calls_without_content(self) -> bool:
        """True if the template recognizes messages with calls by their content, which is none."""
        tests = Sandbox().parse(self.source).find_all(jinja2.nodes.Test)
        return any(test.name == "none" and _is_content(test.node) for test in tests)

    def _writes(self, content: object, role: str = "user") -> bool:
        """Return True if the template writes the text of a content, and no objects; raises beyond the limits."""
        turns = [{"role": role, "content": content}, *({"role": "user", "content": "Hi."},) * (role == "system")]
        given = {"bos_token": "", "eos_token": "", "raise_exception": _refuse, "strftime_now": self._strftime_now}
        try:
            with metered() as budget:
                variables = {**given, "messages": turns, "tools": None, "add_generation_prompt": True}
                text = budget.join(self._compiled.generate(variables))
        except (_Refused, *_MISUSE):
            return False
        return _TRIAL[0]["content"] in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > _MAX_SOURCE_CHARS:
            raise ModelError(
                f"the chat template has {len(self.source)} characters; at most {_MAX_SOURCE_CHARS} are allowed",
                field="chat_template",
            )
        try:
            with metered():
                return Sandbox().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is invalid, line {error.lineno}: {_shown(error.message)}", field="chat_template"
            ) from error
        except (RecursionError, SyntaxError, ValueError, ArithmeticError, MemoryError, TemplateLimitError) as error:
            raise ModelError(f"the chat template cannot be compiled: {_shown(error)}", field="chat_template") from error

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise TemplateLimitError(f"a date pattern has more than {_MAX_PATTERN_CHARS} characters")
        return self.now().strftime(pattern)


def _shown(error: object) -> str:
    return str(error)[:_MAX_ERROR_CHARS]


def _refuse(message: object = "no reason") -> NoReturn:
    raise _Refused(the_budget().text(message)[:_MAX_ERROR_CHARS])


def _is_content(node: jinja2.nodes.Expr) -> bool:
    """Return True for `message.content` or `message["content"]`."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, jinja2.nodes.Getitem) and node.arg == jinja2.nodes.Const("content")


def _up_to_end(text: str) -> str:
    """Return the prompt up to the end of the message that is to be continued."""
    prompt, found, _ = text.rpartition(_END)
    if not found or _END in prompt:
        raise BadRequest(
            "the last message cannot be continued, because the chat template does not render it exactly once",
            field="continue_final_message",
        )
    return prompt


def flatten_messages(messages: Sequence[Message], *, images: bool = False) -> list[dict[str, Any]]:
    """Return the messages as templates expect them: `content` is text, arguments of tool calls are parsed JSON.

    Text parts are joined by a newline; a missing or null content becomes the empty string; arguments that are no JSON
    stay text. Raises `BadRequest` naming the field for anything else, and for images unless they are allowed.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise BadRequest("messages must be a list with at least one message", field="messages")
    flat = []
    budget = _MAX_CONTAINERS
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{field} must be an object", field=field)
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if not isinstance(role, str) or not role:
            raise BadRequest(f"{field}.role must be a string such as 'user'", field=f"{field}.role")
        text = content if isinstance(content, str) else _text(content, f"{field}.content", images)
        turn = {**message, "content": text}
        turn.pop("tool_calls", None)
        if calls:
            budget -= _containers(calls)
            turn["tool_calls"] = _tool_calls(calls, f"{field}.tool_calls", parse=budget >= 0)
        flat.append(turn)
    return flat


def _containers(calls: Any) -> int:
    """Return how many objects and lists, about, the arguments of a message's calls hold as text."""
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    texts = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return sum(text.count("{") + text.count("[") for text in texts if isinstance(text, str))


def _text(content: Any, field: str, images: bool) -> str:
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{field} must be text or a list of parts", field=field)
    text = "\n".join(_part(part, f"{field}[{index}]", images) for index, part in enumerate(content))
    return text.replace(f"\n{_IMAGE}", _IMAGE).replace(f"{_IMAGE}\n", _IMAGE) if images else text


def _parts(content: str) -> list[dict[str, str]]:
    """Return the parts of a flattened content, none of them an empty text."""
    first, *others = ({"type": "text", "text": text} for text in content.split(_IMAGE))
    parts = [first, *(part for other in others for part in ({"type": "image"}, other))]
    return [part for part in parts if part.get("text") != ""] or [first]


def _part(part: Any, field: str, images: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and images:
        return _IMAGE
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind not in _TEXT_PARTS:
        supported = "only text and images are" if images else "only type 'text' is"
        raise BadRequest(f"{field}.type is {str(kind)[:40]!r}; {supported} supported", field=f"{field}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{field}.text must be a string", field=f"{field}.text")
    return text


def _tool_calls(calls: Any, field: str, parse: bool) -> list[Any]:
    """Parse the arguments, which OpenAI's clients send as JSON text and templates expect as an object."""
    if not isinstance(calls, list | tuple):
        raise BadRequest(f"{field} must be a list", field=field)
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequest(f"{field}[{index}].function must be an object", field=f"{field}[{index}].function")
        arguments = function.get("arguments")
        if parse and isinstance(arguments, str):
            arguments = _arguments(arguments)
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _arguments(text: str) -> Any:
    """Return the value of JSON text; the text itself if it is not JSON, or if a template could not write it."""
    try:
        value = json.loads(text.strip() or "{}", parse_int=_short_integer)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _short_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("an integer is too long for a template")
    return int(digits)


def _readings_of_calls(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield copies of the turns with the arguments of calls as they are, as objects, and as texts, then with short ids.

    A model may have written half an object or another value; some templates support only objects, others only texts.
    Ids may be those of another model; Mistral's templates require nine letters or digits.
    """
    yield from _readings_of_arguments(turns)
    shortened = [_with_short_ids(turn) for turn in turns]
    if shortened != turns:
        yield from _readings_of_arguments(shortened)


def _readings_of_arguments(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    arguments = [call["function"]["arguments"] for turn in turns for call in turn.get("tool_calls", ())]
    yield [dict(turn) for turn in turns]
    if not all(isinstance(each, dict) for each in arguments):
        yield [_with_arguments(turn, _as_object) for turn in turns]
    if not all(isinstance(each, str) for each in arguments):
        yield [_with_arguments(turn, _as_text) for turn in turns]


def _with_arguments(turn: dict[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    if "tool_calls" not in turn:
        return dict(turn)
    calls = [
        {**call, "function": {**call["function"], "arguments": read(call["function"]["arguments"])}}
        for call in turn["tool_calls"]
    ]
    return {**turn, "tool_calls": calls}


def _with_short_ids(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": _short_id(call["id"])} if "id" in call else call for call in turn.get("tool_calls", ())]
    answered = {"tool_call_id": _short_id(turn["tool_call_id"])} if "tool_call_id" in turn else {}
    return {**turn, **({"tool_calls": calls} if calls else {}), **answered}


def _short_id(call_id: Any) -> Any:
    if not isinstance(call_id, str) or (len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_SHORT_ID]


def _as_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments in (None, "") else {"arguments": arguments}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


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
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    calls: bool = True,
    system: bool = True,
) -> list[dict[str, Any]]:
    """Return the turns with the tools in the system message, or without `system` in the first one of the user.

    With `calls`, calls are written into the assistant's texts, and tool results into the user's. `turns` are flattened,
    see `fd_core.text.chat_template.flatten_messages`. Raises `BadRequest` for calls that are not JSON.
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
        asked = None if system else next((turn for turn in written if turn["role"] == "user"), None)
        if asked is not None:
            asked["content"] = f"{signatures}\n\n{asked['content']}"
        elif written and written[0]["role"] == "system":
            written[0]["content"] = f"{written[0]['content']}\n\n{signatures}"
        else:
            written.insert(0, {"role": "system", "content": signatures})
    return written


def shown_tool(tool: Any) -> dict[str, Any]:
    """Return a tool in the format of templates, without fields for servers; `TypeError` if it is malformed."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise TypeError("expected a tool as an object with a function")
    function = tool["function"]
    shown = {name: function[name] for name in _SHOWN if function.get(name) is not None}
    return {"type": "function", "function": shown}


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    try:
        spoken = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest("messages: a tool call must have a name and arguments", field="messages") from error
    return f"<tool_call>\n{spoken}\n</tool_call>"
