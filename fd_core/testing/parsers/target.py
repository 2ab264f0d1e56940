"""The parser under test, looked up by name, and its results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from fd_core.errors import PluginError
from fd_core.plugins import TOOL_PARSER, Kind, installed_plugins
from fd_core.testing.hooks.purity import imported_again
from fd_core.testing.kit.law import InvariantViolated, broken, require
from fd_core.testing.kit.requirements import constructed
from fd_core.text.parsing.contract import CallForm, OutputParser, TaggedArguments, ToolSchemas
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, ReasoningDelta, joined


@contextmanager
def accepting(text: str) -> Iterator[None]:
    """Fail, with the beginning and the end of the text, if a parser raises for it."""
    try:
        yield
    except InvariantViolated:
        raise
    except Exception as error:  # noqa: BLE001 -- any exception breaks the rule
        shown = repr(text if len(text) < 1000 else f"{text[:400]}[{len(text) - 800} characters]{text[-400:]}")
        broken("8.4", f"{type(error).__name__} ({error}) for {shown}")


Tools = tuple[str, ...] | ToolSchemas
"""Tools of a request, by name or with their schemas."""
NOW: Final = "now"
"""The tool without arguments."""
_HALF: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, as `\\ud83d` in JSON, which UTF-8 has no bytes for."""


class Words(NamedTuple):
    """Content of a sample, or its replacement by the kit."""

    content: str = "I look."
    reasoning: str = "Hm."
    tool: str = "weather"
    city: str = "Rome"


SHOWN: Final = Words()
"""The texts of a parser's sample."""


class Meaning(NamedTuple):
    """Result of parsing an answer."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    """Name and arguments, as text."""
    ended: int
    """Number of complete calls."""


class SampleAnswer(NamedTuple):
    """A response as a model writes it, and its calls."""

    text: str
    tools: tuple[str, ...]
    calls: tuple[tuple[str, Any], ...] = ()
    """Name and arguments, as values."""


@dataclass(frozen=True)
class ParserTarget:
    """One parser under a name."""

    name: str
    cls: Any
    """Derived from `ToolParser` or `ReasoningParser`."""
    kind: Kind[Any]

    def about(self) -> dict[str, Any]:
        """Return the description for its report card."""
        return {"distribution": str(installed_plugins().offered(self.kind)[self.name].origin)}

    def alone(self) -> ParserTarget:
        """Return the parser from new instances of its modules, which have read no text."""
        return replace(self, cls=imported_again(self.cls))

    @property
    def markers(self) -> tuple[str, ...]:
        """Text that the format writes between parts."""
        return tuple(self.cls.markers)

    @property
    def half_markers(self) -> list[str]:
        """Proper prefixes of markers."""
        halves = [marker[:size] for marker in self.markers for size in range(1, len(marker))]
        return [half for half in halves if not any(marker in half for marker in self.markers)]

    @property
    def patience(self) -> int:
        """Maximum number of characters that may be held back."""
        return max((len(marker) for marker in self.markers), default=1)

    def form(self, name: str) -> CallForm | None:
        """Return the form of a tool call, None if the format, or the kind of parser, has none."""
        return self.cls.form(name) if self.kind is TOOL_PARSER else None

    def new(self, tools: Tools = (), prompt: str = "") -> OutputParser:
        """Return a new parser; tools without schemas have a `city`, a string."""
        if self.kind is not TOOL_PARSER:
            return self.cls(prompt)
        if isinstance(tools, Mapping):
            return self.cls(tools)
        city = {"type": "object", "properties": {"city": {"type": "string"}}}
        none: dict[str, Any] = {"type": "object", "properties": {}}
        return self.cls({name: none if name == NOW else city for name in tools})

    def answers(self, words: Words = SHOWN) -> Iterator[SampleAnswer]:
        """Yield responses with these texts: the parser's sample, and those in its form."""
        calls: tuple[tuple[str, Any], ...] = ((words.tool, {"city": words.city}), (NOW, {}))
        tools = tuple(name for name, _ in calls)
        if sample := self.cls.sample:
            for word, other in zip(SHOWN, words, strict=True):
                sample = sample.replace(word, other)
            yield SampleAnswer(sample, tools, calls if self.kind is TOOL_PARSER else ())
        if (form := self.form(words.tool)) is not None:
            content = words.content if form.anywhere else ""
            expected = calls if form.between is not None else calls[:1]
            forms = [(self.form(name) or form, arguments) for name, arguments in expected]
            texts = (own.begin + arguments_text(own.arguments, given) + own.end for own, given in forms)
            text = content + form.opening + (form.between or "").join(texts) + form.closing
            yield SampleAnswer(text, tools, expected)

    def long_answers(self, size: int) -> Iterator[tuple[type[Event], SampleAnswer, int]]:
        """Yield responses with `length` times `x` as content, reasoning or an argument, with event kind and
        position."""
        long = "x" * size
        kinds: tuple[tuple[type[Event], Words], ...] = (
            (Content, Words(content=long)),
            (ReasoningDelta, Words(reasoning=long)),
            (ArgumentsDelta, Words(city=long)),
        )
        for kind, words in kinds:
            for answer in self.answers(words):
                if long in answer.text:
                    yield kind, answer, answer.text.index(long)

    def read(self, *pieces: str, tools: Tools = (), prompt: str = "", finish: bool = False) -> list[Event]:
        """Return the events of a response in pieces, concatenated."""
        listened = self.listen(*pieces, tools=tools, prompt=prompt, finish=finish)
        return joined(event for events in listened for event in events)

    def listen(self, *pieces: str, tools: Tools = (), prompt: str = "", finish: bool = False) -> Iterator[list[Event]]:
        """Yield the events of each piece, then those of the end. Raises for invalid events (rules 8.3 and 8.4).

        With `finish` the model ended the text, otherwise it is truncated. Calls count from 0; each begins once, and
        arguments and ends belong to the one that is open.
        """
        parser, begun, is_open, earlier = self.new(tools, prompt), 0, False, list[tuple[Sequence[Event], list[Event]]]()
        end, text = parser.finish if finish else parser.flush, "".join(pieces)
        for piece in (*pieces, None):
            with accepting(text):
                returned = end() if piece is None else parser.push(piece)
                events = list(returned)
            for event in events:
                match event:
                    case CallBegun(index, name):
                        require(index == begun, "8.3", f"expected number {begun} for the call {name}, got {index}")
                        begun, is_open = index + 1, True
                    case ArgumentsDelta(index) | CallEnded(index):
                        require(is_open and index == begun - 1, "8.3", f"{event} belongs to no open call")
                        is_open = isinstance(event, ArgumentsDelta)
                    case Content() | ReasoningDelta():
                        pass
                    case _:
                        broken("8", f"{event!r} is not an event")
                shown = getattr(event, "text", "some")
                require(shown, "8.3", f"{event} is empty")
                half = _HALF.search(f"{shown}{getattr(event, 'name', '')}")
                require(half is None, "8.3", f"{event!r} has half of a character, which no server can send")
            earlier.append((returned, events[:]))
            yield events
        same = all(list(returned) == events for returned, events in earlier)
        require(same, "8.4", "events that were returned differ after later calls")


def arguments_text(form: TaggedArguments | str, arguments: dict[str, Any], *, ascii_only: bool = False) -> str:
    """Return the arguments of a call in the syntax of a form."""
    if isinstance(form, TaggedArguments):
        return "".join(
            f"{form.before_key}{key}{form.before_value}"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=ascii_only)}{form.after_value}"
            for key, value in arguments.items()
        )
    if form == "python":
        return ", ".join(f"{key}={ascii(value) if ascii_only else repr(value)}" for key, value in arguments.items())
    return json.dumps(arguments, ensure_ascii=ascii_only)


def text_of(events: Iterable[Event], *kinds: type[Event]) -> str:
    """Return the text of the events of some kinds, by default of content and reasoning."""
    return "".join(
        getattr(event, "text", "") for event in events if isinstance(event, kinds or (Content, ReasoningDelta))
    )


def meaning_of(events: list[Event]) -> Meaning:
    """Return the result of a response's events."""
    begun = [event for event in events if isinstance(event, CallBegun)]
    repeated = [name for name, count in Counter(event.call_id for event in begun).items() if name and count > 1]
    require(not repeated, "8.3", f"several calls have the id {repeated[:1]}, by which clients find their results")
    arguments = {event.index: "" for event in begun}
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index] += event.text
    return Meaning(
        text_of(events, Content),
        text_of(events, ReasoningDelta),
        [(event.name, arguments[event.index]) for event in begun],
        ended=sum(isinstance(event, CallEnded) for event in events),
    )


def find_parser(name: str, kind: Kind[Any]) -> ParserTarget:
    """Return the parser `name`. Raises `PluginError` if it cannot be constructed or has no sample."""
    target = ParserTarget(name, installed_plugins().load(kind, name), kind)
    constructed(kind, name, target.new)
    words = SHOWN[:2] if kind is not TOOL_PARSER else (*SHOWN[2:], NOW)
    sample = target.cls.sample
    if missing := [word for word in words if word not in sample] if sample or target.form(NOW) is None else []:
        raise PluginError(
            f"the sample of the {kind.word} {name} lacks {missing[0]!r}",
            hint="define `sample` in its class with the texts that fd_core/text/parsing/contract.py lists",
        )
    return target
