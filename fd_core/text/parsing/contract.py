"""Parser contract. A parser reads the text of one answer incrementally and emits events.

Invariants 8.1 to 8.6 of docs/understand/law.md, which `fdcore conformance --tool-parser NAME` or `--reasoning-parser
NAME` verifies:
1. However a stream is split, its events, joined, are those of the whole text.
2. Text is held back only where it may be the beginning of a marker, or white space before one.
3. No character is lost or repeated. Parts of the format are not text: markers, and the white space around them.
4. A text may end anywhere. Emitted events stay valid; a call that was cut off gets no `CallEnded`.
5. Markup, whole or cut off, is never content.
6. Time is linear in the text.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from fd_core.text.parsing.events import Event

__all__ = ["CallForm", "FreePart", "OutputParser", "ReasoningParser", "TaggedArguments", "ToolParser", "ToolSchemas"]

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Names of the tools of a request, with the JSON schemas of their arguments, as clients write them: {} is one."""


class TaggedArguments(NamedTuple):
    """Arguments one by one between markers: strings as they are, other values as JSON."""

    before_key: str
    before_value: str
    after_value: str
    ends: tuple[str, ...]
    """Strings that end a value at any position, so no value can contain them; `after_value` begins with one of them."""


class CallForm(NamedTuple):
    """A call, written around its arguments."""

    trigger: str
    """Prefix that only calls begin with; `begin` starts with it, or `opening` if there is one."""
    begin: str
    end: str
    between: str | None
    """Separator between two calls; None if an answer has one at most."""
    opening: str = ""
    """Precedes the first call."""
    closing: str = ""
    """Follows the last one."""
    arguments: TaggedArguments | Literal["json", "python"] = "json"
    """Syntax of arguments: one JSON object, or keyword arguments as in Python, `a=1, b='x'`."""
    anywhere: bool = True
    """True if calls may follow text; otherwise an answer is calls from its first character on, or has none."""


class FreePart(NamedTuple):
    """A part of an answer whose text is free."""

    begin: str
    end: str
    """Ends the text."""
    behind: str
    """Separator between `end` and the next part."""


class OutputParser(abc.ABC):
    """Reads one answer. An instance serves one text; it does no I/O, has no clock, and never raises for a text."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Markers that the format writes between parts. Those that are control tokens are kept for the parser."""
    sample: ClassVar[str] = ""
    """An answer as such models write it, for the conformance kit, which substitutes other words.

    The sample of a tool parser begins with `I look.`, then it calls `weather`, whose `city` is `Rome`, and `now`
    without arguments. That of a reasoning parser has the reasoning `Hm.` and the content `I look.`. A tool parser with
    a `form` needs none.
    """

    @abc.abstractmethod
    def push(self, text: str) -> Sequence[Event]:
        """Process more text and return its events, which later calls do not change."""

    @abc.abstractmethod
    def flush(self) -> Sequence[Event]:
        """Return the events of text that was held back; the text was truncated and no more is pushed.

        An incomplete marker is dropped.
        """

    def finish(self) -> Sequence[Event]:
        """Return the events of text that was held back when the model ended the text: an incomplete marker is text."""
        return self.flush()


class ToolParser(OutputParser):
    """Finds tool calls in the content of an answer; made for requests that offer tools."""

    reads_reasoning: ClassVar[bool] = False
    """True if it parses reasoning as well; then no reasoning parser runs before it."""
    bare_ids: ClassVar[bool] = False
    """True if the templates of such models require ids of nine letters and digits."""
    before_calls: ClassVar[tuple[FreePart, ...]] = ()
    """For formats that write everything as messages: those that may precede calls, such as reasoning."""
    answer_begin: ClassVar[str] = ""
    """For such formats: beginning of the message that is the answer instead of calls."""

    def __init__(self, tools: ToolSchemas) -> None:
        self.tools = tools

    @classmethod
    def form(cls, name: str) -> CallForm | None:
        """Return the format of a call of the tool `name`, for grammars that enforce it.

        None if no grammar can enforce it; then requests that need one are rejected.
        """
        return None


class ReasoningParser(OutputParser):
    """Separates reasoning from content. A tool parser may parse its `Content` further."""

    end: ClassVar[str] = ""
    """The marker that ends reasoning; empty if there is no single one, and then reasoning has no budget."""

    def __init__(self, prompt_tail: str) -> None:
        """`prompt_tail` is how the prompt ends: templates may open reasoning, or close it, themselves.

        It may begin in the middle of an earlier turn.
        """

    @classmethod
    def begins_reasoning(cls, prompt_tail: str, switched: bool) -> bool:
        """Return True if an answer to such a prompt begins with reasoning, so that a grammar applies only after it.

        `switched` is True if the chat template can switch reasoning off.
        """
        return True
