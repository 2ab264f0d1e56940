"""Parsers with one fault each: a few lines on top of a right one, and the case that names the fault."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import ClassVar

from fd_core.text.parsing.argument_types import KINDS, json_of, kinds_of, parameter_schema
from fd_core.text.parsing.contract import ToolParser
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.formats.pythonic import PythonicTools
from fd_core.text.parsing.formats.tagged import GlmTools, QwenCoderTools
from fd_core.text.parsing.thinking import QwenReasoning
from tests.testing.witnesses import Witnesses

WRONG = Witnesses()
breaks = WRONG.breaks


# Cuts ---------------------------------------------------------------------------------------------------------


@breaks("8.[134]", "calls")
class ReadsEachPieceAlone(ToolParser):
    markers, form = HermesTools.markers, HermesTools.form

    def push(self, text):
        reading = HermesTools(self.tools)
        return [*reading.push(text), *reading.flush()]

    def flush(self):
        return ()


@breaks("8.[134]", "calls")
class TreatsAnEmptyPieceAsTheEnd(HermesTools):
    def push(self, text):
        return super().push(text) if text else super().flush()


@breaks("8.4", "cuts:test_malformed_texts_are_handled")
class RaisesOnInvalidJson(HermesTools):
    seen = ""

    def push(self, text):
        self.seen += text
        for call in re.findall("<tool_call>(.*?)</tool_call>", self.seen, re.DOTALL):
            json.loads(call)
        return super().push(text)


# Waiting ------------------------------------------------------------------------------------------------------


@breaks("8.2", "waiting:test_text_that_is_no_marker_is_emitted_at_once")
class WaitsForTheEndOfATag(HermesTools):
    held = ""

    def push(self, text):
        text, at = self.held + text, (self.held + text).rfind("<")
        at = len(text) if at < 0 or ">" in text[at:] else at
        self.held = text[at:]
        return super().push(text[:at])

    def flush(self):
        return [*super().push(self.held), *super().flush()]


@breaks("8.2", "waiting:test_no_part_of_an_answer_waits_for_its_end")
class WaitsForTheWholeCall(HermesTools):
    held = ""

    def emit_arguments(self, text):
        self.held += text

    def end_call(self):
        super().emit_arguments(self.held)
        self.held = ""
        super().end_call()


@breaks("8.2", "waiting:test_no_part_of_an_answer_waits_for_its_end")
class WaitsForTheEndOfReasoning(QwenReasoning):
    held = ""

    def emit_reasoning(self, text):
        self.held += text

    def emit_read(self, *, cut=True):
        super().emit_reasoning(self.held)
        super().emit_read(cut=cut)


@breaks("8.2", "waiting:test_a_call_begins_before_its_arguments_are_there")
class BeginsACallWithItsArguments(HermesTools):
    name, held = None, ""

    def begin_call(self, name, call_id=""):
        self.name, self._open = name, True

    def emit_arguments(self, text):
        self.held += text
        if len(self.held) > 12:
            self.emit_all()

    def emit_all(self):
        if self.name is not None:
            super().begin_call(self.name)
        super().emit_arguments(self.held)
        self.name, self.held = None, ""

    def end_call(self):
        self.emit_all()
        super().end_call()


# Characters ---------------------------------------------------------------------------------------------------


@breaks("8.3", "markup:test_text_without_markers_is_emitted_unchanged")
class StripsContent(HermesTools):
    def emit_content(self, text):
        super().emit_content(text.strip())


@breaks("8.3", "markup:test_text_without_markers_is_emitted_unchanged")
class ReadsUpToANul(HermesTools):
    def push(self, text):
        return super().push(text.partition("\0")[0])


@breaks("8.[134]", "calls")
class EmitsAsciiOnly(HermesTools):
    def emit_arguments(self, text):
        super().emit_arguments(text.encode("ascii", "ignore").decode())


@breaks("8.3", "day:test_an_ordinary_day")
class LosesHalfAMarker(HermesTools):
    def emit_content(self, text):
        super().emit_content(text.replace("<tool_", ""))


@breaks("8.3", "markup:test_text_without_markers_is_emitted_unchanged")
class DropsHeldBackText(HermesTools):
    def flush(self):
        return ()


@breaks("8.3", "markup:test_text_without_markers_is_emitted_unchanged")
class RepeatsHeldBackText(HermesTools):
    def flush(self):
        return [*super().flush()] * 2


@breaks("8.[134]", "calls")
class LosesEmptyArguments(HermesTools):
    held = ""

    def emit_arguments(self, text):
        self.held += text
        if self.held not in ("{", "{}"):
            super().emit_arguments(self.held)
            self.held = ""

    def end_call(self):
        self.held, self._arguments = "", True
        super().end_call()


@breaks("8.[134]", "calls")
class EndsNoCall(HermesTools):
    def push(self, text):
        return [event for event in super().push(text) if not isinstance(event, CallEnded)]


@breaks("8.[134]", "calls")
class EmitsEmptyContent(HermesTools):
    def push(self, text):
        return [Content(""), *super().push(text)]


@breaks("8.[134]", "answer")
class KeepsTheMarkersOfReasoning(QwenReasoning):
    def emit_reasoning(self, text):
        super().emit_reasoning(text)
        self.emitted = True

    def emit_read(self, *, cut=True):
        self.emit_content(self.end)
        super().emit_read(cut=cut)


@breaks("8.[134]", "day:test_an_ordinary_day")
class SharesTextBetweenParsers(HermesTools):
    shared: ClassVar[list[str]] = [""]

    @property
    def _text(self):
        return self.shared[0]

    @_text.setter
    def _text(self, value):
        self.shared[0] = value


@breaks("8", "calls")
class EmitsDictionaries(HermesTools):
    def push(self, text):
        return [{"content": each.text} if isinstance(each, Content) else each for each in super().push(text)]


# Ends ---------------------------------------------------------------------------------------------------------


@breaks("8.[134]", "calls")
class EndsACallThatWasCutOff(HermesTools):
    def flush(self):
        events = [*super().flush()]
        return [*events, CallEnded(self._calls)] if self.call_open else events


@breaks("8.[134]", "calls")
class CallsHalfAName(HermesTools):
    seen = ""

    def push(self, text):
        self.seen += text
        return super().push(text)

    def flush(self):
        events, half = [*super().flush()], re.search(r'"name": "(\w+)\Z', self.seen)
        if half and not events:
            self.begin_call(half[1])
        return [*events, *self._events]


@breaks("8.4", "ends:test_truncated_output_is_kept")
class LosesTheEndOfTheArguments(HermesTools):
    held = ""

    def emit_arguments(self, text):
        text = self.held + text
        self.held = text[-1:]
        super().emit_arguments(text[:-1])

    def end_call(self):
        super().emit_arguments(self.held)
        self.held = ""
        super().end_call()


@breaks("8.4", "ends:test_truncated_output_is_kept")
class LosesTheEndOfTheReasoning(QwenReasoning):
    held = ""

    def emit_reasoning(self, text):
        text = self.held + text
        self.held = text[-1:]
        super().emit_reasoning(text[:-1])

    def emit_read(self, *, cut=True):
        super().emit_reasoning("" if self.at_end else self.held)
        super().emit_read(cut=cut)


# Markup and time ----------------------------------------------------------------------------------------------


@breaks("8.[1345]", "calls")
class EmitsHalfAMarker(HermesTools):
    def flush(self):
        return super().finish()


@breaks("8.5", "markup:test_markers_doubled_or_left_out_are_no_content")
class KnowsOnlyTheBeginOfACall(HermesTools):
    def content_until(self, *begins):
        return self.until(*begins, emit=self._emit_outside, space=True)


@breaks("8.5", "markup:test_tags_of_the_format_are_markers")
class NamesOneMarker(ToolParser):
    """The server removes the other one, a control token, so that no call has an end."""

    markers, form = HermesTools.markers[:1], HermesTools.form

    def __init__(self, tools):
        super().__init__(tools)
        reading = HermesTools(tools)
        self.push, self.flush, self.finish = reading.push, reading.flush, reading.finish

    push = flush = None


# Calls --------------------------------------------------------------------------------------------------------


@breaks("8.[134]", "calls")
class MatchesToolsByPrefix(HermesTools):
    def begin_call(self, name, call_id=""):
        super().begin_call(next((tool for tool in sorted(self.tools, key=len) if name.startswith(tool)), name))


@breaks("8.[134]", "calls:value=markers")
class FindsMarkersInStrings(HermesTools):
    def _read_string(self, tell):
        tell((yield from self.take()))
        while True:
            character = yield from self.peek()
            if character == "<":
                return ""
            self.skip(1)
            tell(character)
            if character == "\\":
                tell((yield from self.take()))
            elif character in ('"', ""):
                return character


@breaks("8.3", "calls:test_a_trigger_begins_each_call_and_no_text[w]")
class HasATriggerThatNeverOccurs(HermesTools):
    @classmethod
    def form(cls, name):
        return super().form(name)._replace(trigger="<function_call>")


@breaks("8.3", "calls:test_a_trigger_begins_each_call_and_no_text[w]")
class HasATriggerThatTextHas(HermesTools):
    @classmethod
    def form(cls, name):
        return super().form(name)._replace(trigger="<")


@breaks("8.[134]", "calls")
class LosesBackslashes(HermesTools):
    def emit_arguments(self, text):
        super().emit_arguments(text.replace("\\", ""))


@breaks("8", "ends:test_no_text_of_an_answer_is_in_a_log")
class LogsUnknownTools(HermesTools):
    def push(self, text):
        events = super().push(text)
        if any(isinstance(each, CallBegun) and each.name not in self.tools for each in events):
            logging.getLogger(__name__).debug("unknown tool in %r", text)
        return events


@breaks("8.3", "markup:test_a_marker_in_other_case_is_text")
class KnowsMarkersInAnyCase(HermesTools):
    def push(self, text):
        return super().push(re.sub("(?i)</?tool_call>", lambda marker: marker[0].lower(), text))


@breaks("8.3", "calls:plain")
class NumbersCallsAsIds(HermesTools):
    def begin_call(self, name, call_id=""):
        super().begin_call(name, f"call_{self._calls}")


@breaks("8", "calls:plain")
class CompletesTheSchemas(GlmTools):
    def __init__(self, tools):
        for schema in tools.values():
            schema["additionalProperties"] = False
        super().__init__(tools)


@breaks("8.[134]", "day:test_an_ordinary_day")
class ExpectsObjectsAsSchemas(GlmTools):
    """A schema may be `true`."""

    def push(self, text):
        for schema in self.tools.values():
            assert all(each.get("type", "any") for each in schema.get("properties", {}).values())
        return super().push(text)


@breaks("8.[134]", "day:test_an_ordinary_day")
class TakesConstantsForStrings(GlmTools):
    def __init__(self, tools):
        constants = {"properties": {name: {"type": "string"} for name in ("where", "n", "x")}}
        super().__init__({name: constants if "const" in str(schema) else schema for name, schema in tools.items()})


@breaks("8.3", "calls:calls=300,chunk=64")
class ReadsUpTo128Calls(HermesTools):
    def push(self, text):
        return [each for each in super().push(text) if getattr(each, "index", 0) < 128]


@breaks("8.3", "calls:key=arguments")
class TakesTheLastKeyForTheArguments(HermesTools):
    def push(self, text):
        events = super().push(text)
        return [
            replace(each, text=each.text.rpartition('"arguments": ')[2]) if isinstance(each, ArgumentsDelta) else each
            for each in events
        ]


@breaks("8.6", "time:test_time_is_linear_in_the_text")
class LooksForEachTool(HermesTools):
    def push(self, text):
        for _ in range(3):
            assert None not in [re.search(rf"\b{re.escape(name)}\b", text) or "" for name in self.tools]
        return super().push(text)


@breaks("8.6", "time:test_time_before_an_answer_is_linear")
class ComparesAllTools(HermesTools):
    """Looks for tools whose name begins another one's, in pairs."""

    def __init__(self, tools):
        self.ambiguous = {a for a, b in itertools.permutations(tools, 2) if re.match(re.escape(a) + "[_-]", b)}
        super().__init__(tools)


@breaks("8.6", "time:test_time_before_an_answer_is_linear")
class ComparesAllParameters(HermesTools):
    def __init__(self, tools):
        names = [schema.get("properties", {}) for schema in tools.values()]
        self.ambiguous = {a for each in names for a, b in itertools.permutations(each, 2) if re.match(f"{a}[_-]", b)}
        super().__init__(tools)


@breaks("8.6", "time:test_time_before_an_answer_is_linear")
class SearchesThePromptFromEachCharacter(QwenReasoning):
    @classmethod
    def _opened_by(cls, prompt_tail):
        return super()._opened_by(prompt_tail) or bool(re.search(r"(?s).*\0\0", prompt_tail))


# Reasoning ----------------------------------------------------------------------------------------------------


@breaks("8.3", "reasoning:test_the_end_of_reasoning_is_the_one_that_is_named")
class NamesAnotherEnd(QwenReasoning):
    end = "</reasoning>"


@breaks("8.3", "reasoning:test_reasoning_that_the_prompt_closed_does_not_begin_again")
class KnowsOneWayToCloseReasoning(QwenReasoning):
    @classmethod
    def begins_reasoning(cls, prompt_tail, switched):
        return not prompt_tail.endswith(cls.end)


@breaks("8.3", "answer:begins=bare_prompt")
class ExpectsALineAfterTheMarker(QwenReasoning):
    @classmethod
    def _opened_by(cls, prompt_tail):
        return f"{cls.begin}\n" in prompt_tail and super()._opened_by(prompt_tail)


@breaks("8.3", "reasoning:test_reasoning_that_the_prompt_closed_does_not_begin_again")
class AlwaysStartsWithReasoning(QwenReasoning):
    @classmethod
    def _opened_by(cls, prompt_tail):
        return True

    @classmethod
    def begins_reasoning(cls, prompt_tail, switched):
        return "</think>" not in prompt_tail


# Long, nested and repeated parts, other ends and other answers: the parts `calls` and `answer` ------------------------


@breaks("8.[134]", "calls:size=2300,chunk=64")
class KeepsArgumentsInABufferOf128K(HermesTools):
    def begin_call(self, name, call_id=""):
        self.left = 1 << 17
        super().begin_call(name)

    def emit_arguments(self, text):
        super().emit_arguments(text[: self.left])
        self.left -= len(text[: self.left])


@breaks("8.[134]", "calls")
class DropsTextAfterACall(HermesTools):
    def emit_content(self, text):
        if not self._calls:
            super().emit_content(text)


@breaks("8.[134]", "calls")
class ReadsNumbersAsFloats(HermesTools):
    def emit_arguments(self, text):
        super().emit_arguments(re.sub(r"\b\d{17,}\b", lambda found: f"{float(found[0]):.0f}", text))


@breaks("8.[134]", "calls")
class DropsACallThatRepeatsTheLastOne(HermesTools):
    """Models that loop repeat a call, but a client may ask for the same thing twice."""

    last = None
    name = held = ""

    def begin_call(self, name, call_id=""):
        self.name, self.held, self.call_open, self._arguments = name, "", True, False

    def emit_arguments(self, text):
        self._arguments = True
        self.held += text

    def end_call(self):
        if (self.name, self.held) != self.last and self.held:
            super().begin_call(self.name)
            super().emit_arguments(self.held)
            super().end_call()
        self.last, self.call_open = (self.name, self.held), False


@breaks("8.[134]", "calls")
class RepeatsHeldBackTextWhenTheModelEnds(HermesTools):
    def finish(self):
        events = [*super().finish()]
        return [*events, *(each for each in events if isinstance(each, Content))]


@breaks("8.[134]", "calls")
class DropsHeldBackTextWhenTheModelEnds(HermesTools):
    def finish(self):
        return self.flush()


@breaks("8.[134]", "calls")
class RequiresASpaceAfterAColon(HermesTools):
    def emit_arguments(self, text):
        super().emit_arguments(re.sub(r"\A:(?=[^ ])", "", text))


@breaks("8.[134]", "calls")
class ReadsStringsAsValues(GlmTools):
    """Ignores that the schema wants a string."""

    def _value(self, tool, key):
        value, closed = yield from self.text_until(*self.tagged.ends)
        if closed:
            self.emit_arguments(json_of(value, KINDS))
        return bool(closed)


@breaks("8.[134]", "day:test_an_ordinary_day")
class ReadsOptionalStringsAsValues(GlmTools):
    """Knows only `type: string`: with an `anyOf`, or with two types, `10115` becomes a number."""

    def _value(self, tool, key):
        named = parameter_schema(self.tools.get(tool, {}), key).get("type")
        if isinstance(named, str):
            return (yield from super()._value(tool, key))
        value, closed = yield from self.text_until(*self.tagged.ends)
        if closed:
            self.emit_arguments(json_of(value, KINDS))
        return bool(closed)


@breaks("8.[134]", "calls")
class ReadsOneLineOfArguments(HermesTools):
    """Arguments that a model indents are cut off."""

    over = False

    def begin_call(self, name, call_id=""):
        self.over = False
        super().begin_call(name)

    def emit_arguments(self, text):
        line, end, _ = text.partition("\n")
        super().emit_arguments("" if self.over else line)
        self.over = self.over or bool(end)


@breaks("8.[134]", "day:test_an_ordinary_day")
class CountsCallsOfTruncatedAnswers(HermesTools):
    """Its numbers go on where an answer that was not ended left them."""

    left: ClassVar[list[int]] = [0]

    def __init__(self, tools):
        super().__init__(tools)
        self._calls = self.left[0]

    def begin_call(self, name, call_id=""):
        self.left[0] = self._calls
        super().begin_call(name)

    def end_call(self):
        super().end_call()
        self.left[0] = 0


@breaks("8.[134]", "calls:key=größe 城市")
class KnowsAsciiKeys(QwenCoderTools):
    """Loses arguments whose names have other letters, as those of tools in other languages."""

    def key(self):
        key = yield from super().key()
        return key if key is not None and re.fullmatch(r"[\w.-]+", key, re.ASCII) else None


@breaks("8.6", "time:test_time_is_linear_in_the_text")
class SearchesTheWholeText(HermesTools):
    seen = ""

    def push(self, text):
        self.seen += text
        re.search(r"<\|stop\|>|\[stop\]", self.seen)
        return super().push(text)


@breaks("8.6", "time:test_time_of_a_whole_text_is_linear")
class CutsOffOneCharacterAtATime(HermesTools):
    def push(self, text):
        rest = text
        while rest and len(text) > 100:
            rest = rest[1:].replace("\0", "")
        return super().push(text)


@breaks("8.[134]", "answer")
class LimitsReasoning(QwenReasoning):
    emitted = 0

    def emit_reasoning(self, text):
        if self.emitted < 4096:
            super().emit_reasoning(text)
        self.emitted += len(text)


@breaks("8.[134]", "answer")
class LosesLinesOfReasoning(QwenReasoning):
    def emit_reasoning(self, text):
        super().emit_reasoning(text.replace("\r\n", "\n"))


@breaks("8.[134]", "answer")
class ReadsOneBlockOfReasoning(QwenReasoning):
    blocks = 0

    def emit_reasoning(self, text):
        if self.blocks < 2:
            super().emit_reasoning(text)

    def until(self, *markers, emit, **others):
        self.blocks += emit == self.emit_reasoning
        return super().until(*markers, emit=emit, **others)


@breaks("8.[134]", "calls")
class LimitsDepth(HermesTools):
    """Leaves out what is nested more than 32 levels deep."""

    def begin_call(self, name, call_id=""):
        self.depth, self.quoted = 0, False
        super().begin_call(name)

    def emit_arguments(self, text):
        kept = []
        for character in text:
            self.quoted ^= character == '"'
            self.depth -= not self.quoted and character in "]}"
            kept.append(character if self.depth < 32 else "")
            self.depth += not self.quoted and character in "[{"
        super().emit_arguments("".join(kept))


@breaks("8.[134]", "answer")
class IgnoresTheEndOfEmptyReasoning(QwenReasoning):
    some = False

    def emit_reasoning(self, text):
        self.some = self.some or bool(text)
        super().emit_reasoning(text)

    def until(self, *markers, emit, **others):
        found = yield from super().until(*markers, emit=emit, **others)
        if emit == self.emit_reasoning and found and not self.some:
            found = yield from super().until(*markers, emit=emit, **others)
        return found


@breaks("8.[134]", "answer")
class ReturnsReasoningAsContent(QwenReasoning):
    """If there is no answer when the model ends, its reasoning is."""

    reasoned, answered = "", False

    def emit_reasoning(self, text):
        self.reasoned += text
        super().emit_reasoning(text)

    def emit_content(self, text):
        self.answered = self.answered or bool(text.strip())
        super().emit_content(text)

    def finish(self):
        events = [*super().finish()]
        return events if self.answered or not self.reasoned else [*events, Content(self.reasoned)]


@breaks("8.[134]", "calls")
class NeedsPropertiesInASchema(GlmTools):
    """The schema of a tool without parameters may be {}."""

    def begin_call(self, name, call_id=""):
        self.known = set(self.tools[name]["properties"]) if name in self.tools else set()
        super().begin_call(name)


@breaks("8.[134]", "calls")
class InlinesReferences(GlmTools):
    """Replaces each `$ref` by what it refers to; a schema may refer to itself."""

    def begin_call(self, name, call_id=""):
        self.inlined(self.tools.get(name, {}), name)
        super().begin_call(name)

    def inlined(self, part, name):
        if isinstance(part, dict) and "$ref" in part:
            part = self.tools[name]["$defs"][part["$ref"].rpartition("/")[2]]
        return {key: self.inlined(value, name) for key, value in part.items()} if isinstance(part, dict) else part


@breaks("8.[134]", "answer")
class CountsMarkersOfThePrompt(QwenReasoning):
    """Reasoning is open if more of it begins than ends in the tail of the prompt, which may begin within one."""

    @classmethod
    def _opened_by(cls, prompt_tail):
        return prompt_tail.count(cls.begin) > prompt_tail.count(cls.end)


# Calls in another order, after an abandoned answer, and what a later call changes -------------------------------------


@breaks("8.[134]", "calls")
class ReturnsItsOwnList(HermesTools):
    """The next call empties the list of events."""

    def push(self, text):
        returned = self.__dict__.setdefault("returned", [])
        returned[:] = super().push(text)
        return returned


@breaks("8.3", "reasoning:test_what_is_known_of_a_prompt_changes_no_other_call")
class RemembersPrompts(QwenReasoning):
    """Remembers of a prompt if reasoning begins, whether or not the template can switch it off."""

    known: ClassVar[dict[str, bool]] = {}

    @classmethod
    def begins_reasoning(cls, prompt_tail, switched):
        return cls.known.setdefault(prompt_tail, super().begins_reasoning(prompt_tail, switched))


@breaks("8.4", "ends:test_nothing_remains_of_many_answers")
class KeepsAbandonedAnswers(HermesTools):
    """Forgets the text of an answer with its end."""

    texts: ClassVar[dict[int, str]] = {}
    numbers = itertools.count()

    def __init__(self, tools):
        super().__init__(tools)
        self.number = next(self.numbers)

    def push(self, text):
        self.texts[self.number] = self.texts.get(self.number, "") + text
        return super().push(text)

    def _advance(self):
        if self._ended:
            self.texts.pop(self.number, None)
        return super()._advance()


@breaks("8.[134]", "calls")
class EmitsHeldTextAfterAWhile(HermesTools):
    """A beginning of a marker is emitted as text if nothing follows it for a minute."""

    last = None

    def push(self, text):
        last, self.last = self.last, time.monotonic()
        if last is not None and self.last - last > 60 and not self.call_open and self._text[self._at :].startswith("<"):
            self.emit_content(self.rest())
        return super().push(text)


@breaks("8.3", "reasoning:test_reasoning_of_an_earlier_turn_does_not_continue")
class LooksForTheEndAtTheEnd(QwenReasoning):
    """Reasoning that the prompt opened goes on unless the prompt ends with its end."""

    @classmethod
    def _opened_by(cls, prompt_tail):
        return cls.begin in prompt_tail and not prompt_tail.rstrip().endswith(cls.end)


@breaks("8.[134]", "day:test_an_ordinary_day")
class LooksForAnOpeningAtTheEnd(QwenReasoning):
    """A prompt whose reasoning has text, which the model continues, opens none."""

    @classmethod
    def _opened_by(cls, prompt_tail):
        return prompt_tail.rstrip().endswith(cls.begin)


@breaks("8.[134]", "answer:begins=continued")
class ContinuesNoReasoning(QwenReasoning):
    """The same, but a grammar applies after the reasoning."""

    def __init__(self, prompt_tail):
        super().__init__(prompt_tail)
        self._inside = prompt_tail.rstrip().endswith(self.begin)


@breaks("8.[134]", "answer:text=wide spaces")
class StripsEverySpace(QwenReasoning):
    """White space around markers is that of Unicode, such as the indent of a Chinese paragraph."""

    begun = False

    def emit_content(self, text):
        super().emit_content(text if self.begun else text.lstrip())
        self.begun = True


@breaks("8.[134]", "answer")
class KnowsMarkersAsTokens(QwenReasoning):
    """A piece that is a marker ends what was held back as the beginning of one, which is lost."""

    def push(self, text):
        held = self._text[self._at :]
        if text in self.markers and held.strip() and self.end.startswith(held):
            self._text = self._text[: self._at]
        return super().push(text)


@breaks("8.[134]", "calls")
class IgnoresTheCaseOfNames(HermesTools):
    def begin_call(self, name, call_id=""):
        super().begin_call(name.lower())


@breaks("8.[134]", "calls")
class IgnoresTheCaseOfKeys(QwenCoderTools):
    def key(self):
        key = yield from super().key()
        return None if key is None else key.lower()


@breaks("8.3", "calls:test_ended_calls_have_json_arguments_whatever_the_model_writes")
class TakesNaNForANumber(GlmTools):
    def _value(self, tool, key):
        value, closed = yield from self.text_until(*self.tagged.ends)
        with suppress(ValueError):
            value = json.loads(value)
        self.emit_arguments(json.dumps(value) if closed else "")
        return bool(closed)


@breaks("8.3", "calls")
class KnowsTypesByNameOfTheArgument(GlmTools):
    """Of two tools with an argument of one name, the last one determines its type."""

    def __init__(self, tools):
        super().__init__(tools)
        self.last = {key: tool for tool, schema in tools.items() for key in schema.get("properties", ())}

    def _value(self, tool, key):
        return (yield from super()._value(self.last.get(key, tool), key))


@breaks("8.[134]", "day:test_an_ordinary_day")
class KnowsToolsOfEarlierRequests(GlmTools):
    """A cache of the module has the schema of a tool by its name, and other requests have other schemas."""

    def __init__(self, tools):
        super().__init__({name: _SCHEMAS.setdefault(name, schema) for name, schema in tools.items()})


_SCHEMAS = {}


@breaks("8.[134]", "answer")
class EndsReasoningWithALine(QwenReasoning):
    """JSON of a grammar right after the marker stays reasoning."""

    def until(self, *markers, **named):
        return super().until(*(f"{self.end}\n",) if markers == (self.end,) else markers, **named)


@breaks("8.3", "cuts:test_calls_of_tools_that_were_not_offered_are_not_lost")
class DropsCallsOfOtherTools(HermesTools):
    """An answer that calls a tool which was not offered is empty."""

    offered = True

    def begin_call(self, name, call_id=""):
        self.offered = name in self.tools
        self.call_open = True
        if self.offered:
            super().begin_call(name, call_id)

    def emit_arguments(self, text):
        if self.offered:
            super().emit_arguments(text)

    def end_call(self):
        if self.offered:
            super().end_call()
        self.call_open, self._after_call = False, True


@breaks("8.[134]", "calls")
class FindsCallsInTheBeginning(HermesTools):
    """After 2,000 characters of content an answer has no more calls."""

    emitted = 0

    def emit_content(self, text):
        self.emitted += len(text)
        super().emit_content(text)

    def content_until(self, *begins):
        while marker := (yield from super().content_until(*begins)):
            if self.emitted < 2000:
                return marker
            self.emit_content(f"{self.space_before}{marker}")
        return ""


@breaks("8.[134]", "calls")
class RemovesMarkersOfReasoning(HermesTools):
    """Content that names a marker of other formats loses it."""

    def emit_content(self, text):
        super().emit_content(text.replace("<think>", ""))


@breaks("8.[134]", "calls")
class KnowsTheTypesOfSomeTools(GlmTools):
    """Of a request with many tools, all arguments of the last ones are strings."""

    def __init__(self, tools):
        some = list(tools)[:128]
        strings = {"additionalProperties": {"type": "string"}}
        super().__init__({name: tools[name] if name in some else strings for name in tools})


@breaks("8.[134]", "answer:begins=continued")
class LooksAtTheEndOfThePrompt(QwenReasoning):
    """Reasoning that a template opened is found in the last 100 characters, not in the last 64 tokens."""

    def __init__(self, prompt_tail):
        super().__init__(prompt_tail[-100:])


class ChangesSchemas(QwenCoderTools):
    """Brings the schemas of all tools into one form."""

    def __init__(self, tools):
        super().__init__({name: {**schema, "properties": self.simplified(schema)} for name, schema in tools.items()})

    def simplified(self, schema):
        raise NotImplementedError


@breaks("8.3", "calls:shape=wide")
class UnwrapsProperties(ChangesSchemas):
    """A tool with a parameter called `properties` loses the types of all its parameters."""

    def simplified(self, schema):
        inner = schema.get("properties", {})
        while isinstance(inner.get("properties"), dict):
            inner = inner["properties"]
        return inner


class ChangesStrings(QwenCoderTools):
    """Emits a string when it is complete."""

    def _value(self, tool, key):
        schema = self.tools.get(tool, {})
        if kinds_of(parameter_schema(schema, key), schema) != {"string"}:
            return (yield from super()._value(tool, key))
        self.emit_arguments('"')
        value, closed = yield from self.text_until(*self.tagged.ends)
        self.emit_arguments(json.dumps(self.changed(value), ensure_ascii=False)[1 : None if closed else -1])
        return bool(closed)

    def changed(self, value):
        raise NotImplementedError


@breaks("8.[134]", "calls:value=breaks")
class StripsLineBreaks(ChangesStrings):
    """Drops all line breaks around a string, instead of the one of the format: a file loses its blank lines."""

    def changed(self, value):
        return value.strip("\n")


class DropsSchemas(QwenCoderTools):
    """Assumes any type where a part of a schema is of an unknown form."""

    def __init__(self, tools):
        super().__init__({name: self.known(dict(schema)) for name, schema in tools.items()})

    def known(self, part):
        if isinstance(part, dict):
            known = {name: self.known(value) for name, value in part.items()}
            return {} if self.is_unknown(known) else known
        return [self.known(each) for each in part] if isinstance(part, list) else part

    def is_unknown(self, part):
        raise NotImplementedError


@breaks("8.[134]", "day:test_an_ordinary_day")
class KnowsDefsOnly(DropsSchemas):
    """Reads numbers where clients write `definitions`, as in drafts up to 7 of JSON Schema."""

    def is_unknown(self, part):
        return not str(part.get("$ref", "#/$defs/")).startswith("#/$defs/")


@breaks("8.[134]", "day:test_an_ordinary_day")
class IgnoresAdditionalProperties(DropsSchemas):
    def is_unknown(self, part):
        part.pop("additionalProperties", None)
        return False


@breaks("8.3", "day:test_an_ordinary_day")
class KnowsNoReferencesInAllOf(DropsSchemas):
    """As pydantic 1 and OpenAPI 3.0 write a parameter that has a type of its own and a default."""

    def is_unknown(self, part):
        return any("$ref" in each for each in part.get("allOf", ()) if isinstance(each, dict))


@breaks("8.2", "day:test_an_ordinary_day")
class HoldsLinesOfArguments(QwenCoderTools):
    """Of a value with several lines, all after the first line break waits for the end of the call."""

    def __init__(self, tools):
        super().__init__(tools)
        self.several, self.late = False, []

    def push(self, text):
        return [*self.passed(super().push(text))]

    def flush(self):
        return [*self.passed(super().flush()), *self.late]

    def finish(self):
        return [*self.passed(super().finish()), *self.late]

    def passed(self, events):
        for event in events:
            if not isinstance(event, ArgumentsDelta):
                yield from self.late
                self.several, self.late = False, []
            elif self.several:
                self.late.append(event)
                continue
            else:
                self.several = "\\n" in event.text
            yield event


@breaks("8.4", "ends:test_nothing_remains_of_many_answers")
class KeepsTheToolsOfRequests(QwenCoderTools):
    """Works out each list of tools once, for as long as the server runs."""

    ready: ClassVar[dict[str, object]] = {}

    def __init__(self, tools):
        super().__init__(tools)
        self.tools = self.ready.setdefault(json.dumps(tools), tools)


@breaks("8.3", "cuts:test_the_arguments_of_a_malformed_call_are_not_lost")
class DropsWhatItCannotRead(HermesTools):
    """A call that is no JSON is no content either."""

    def json_calls(self, *, known=False):
        self.emit_read = lambda **_: self.forget()
        yield from super().json_calls(known=known)
        del self.emit_read


@breaks("8.4", "ends:test_nothing_remains_of_many_answers")
class KeepsTheFormsOfCalls(HermesTools):
    form = staticmethod(cache(HermesTools.form))


@breaks("8.4", "ends:test_nothing_remains_of_many_answers")
class KeepsTheBeginningsOfAnswers(QwenReasoning):
    begins_reasoning = staticmethod(cache(QwenReasoning.begins_reasoning))


@breaks("8.3", "cuts:test_malformed_texts_are_handled")
class DecodesHalvesOfPairs(PythonicTools):
    """Takes an escape of JSON, half of a pair, for a character: an answer with it cannot be encoded."""

    def _escape(self):
        escape = yield from super()._escape()
        found = re.fullmatch(r"\\u([0-9a-fA-F]{4})", escape)
        return chr(int(found[1], 16)) if found else escape
