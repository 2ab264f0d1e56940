"""Structural tags in the syntax of vLLM and XGrammar: trees of formats, each for a part of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fd_core.errors import BadRequest
from fd_core.structured.arguments import TaggedGrammar
from fd_core.structured.lark import ANY_TEXT, LarkText, as_lark, slashed
from fd_core.structured.schemas import (
    MAX_TAGS,
    require_few_repeats,
    require_schema,
    require_shallow,
    require_small,
    wrong,
)
from fd_core.text.parsing.contract import TaggedArguments

_STYLES: Final = {
    "json": None,
    "qwen_xml": TaggedArguments("<parameter=", ">", "</parameter>", ends=("</parameter>",)),
    "glm_xml": TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>", ends=("</arg_value>",)),
}


def structural_tag(tag: Mapping[str, Any], *, field: str = "structural_tag") -> str:
    """Return the grammar of a text that consists of formats.

    `tag` is `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, or `{"format": ...}` with one of
    XGrammar's formats, which may be nested; those of tokens are unsupported. Raises `BadRequest` with the location.
    """
    require_shallow(tag, field)
    lark = LarkText()
    tags = _Formats(lark)
    if "format" in tag:
        start = tags.part(tag["format"], f"{field}.format", (), True)
    else:
        structures = _sequence(tag.get("structures"), f"{field}.structures")
        found = [tags.structure(each, f"{field}.structures[{index}]") for index, each in enumerate(structures)]
        start = tags.triggered(found, tag, field, ends=(), last=True)
    text = lark.text(start)
    require_small(text, "the tags together", field)
    return text


def _unfit(location: str, words: str) -> BadRequest:
    return BadRequest(f"{location} {words}", field=location)


class _Tag(NamedTuple):
    begin: str
    rest: str
    """The expression of the text after `begin`."""
    location: str


class _Formats:
    """Makes expressions of formats.

    A format whose text is free ends with the first of `ends`, the end markers of the enclosing tag; without any, it
    must be `last`, since no marker would end it.
    """

    def __init__(self, lark: LarkText) -> None:
        self._lark = lark
        self._makers: dict[str, tuple[str, Callable[..., str]]] = {
            "const_string": ("value", self._const),
            "json_schema": ("json_schema style any_order", self._json),
            "qwen_xml_parameter": ("json_schema", self._qwen),
            "any_text": ("excludes max_chars max_tokens", self._any_text),
            "grammar": ("grammar", self._grammar),
            "regex": ("pattern excludes", self._regex),
            "sequence": ("elements", self._row),
            "or": ("elements", self._or),
            "optional": ("content", self._repeated),
            "plus": ("content", self._repeated),
            "star": ("content", self._repeated),
            "repeat": ("content min max", self._repeated),
            "tag": ("begin content end", self._one_tag),
            "triggered_tags": ("triggers tags at_least_one stop_after_first excludes", self._triggered),
            "tags_with_separator": ("tags separator at_least_one stop_after_first", self._separated),
            "dispatch": ("rules loop excludes", self._dispatch),
        }
        """The fields of each format, and the method that makes its expression."""

    def part(self, given: Any, location: str, ends: Sequence[str], last: bool) -> str:
        """Return the expression of a format and one of `ends` after it."""
        given = _mapping(given, location)
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in self._makers:
            known = ", ".join(self._makers)
            raise _unfit(f"{location}.type", f"is {str(kind)[:40]!r}; expected {known}")
        fields, make = self._makers[kind]
        for name in given:
            if name not in ("type", *fields.split()):
                raise _unfit(f"{location}.{name}", "is not supported")
        return make(given, location, ends, last)

    def structure(self, given: Any, location: str) -> _Tag:
        """Return a tag in the older syntax, which has a schema as its content."""
        given = _mapping(given, location)
        schema = given.get("schema", True)
        end = given.get("end", "")
        if not isinstance(end, str):
            raise _unfit(f"{location}.end", "must be a text")
        schema = require_schema(schema, f"{location}.schema")
        rest = f"{self._lark.json(schema)} {self._lark.spelled(end)}"
        return _Tag(_text(given.get("begin"), f"{location}.begin"), rest, location)

    def triggered(
        self, tags: Sequence[_Tag], given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool
    ) -> str:
        """Return the expression of free text in which triggers begin tags, and of one of `ends` after it."""
        triggers = _texts(given.get("triggers"), f"{location}.triggers")
        begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            trigger = max((each for each in triggers if tag.begin.startswith(each)), key=len, default=None)
            if trigger is None:
                raise _unfit(f"{tag.location}.begin", "must start with one of the triggers")
            begun[trigger].append(f"{self._lark.spelled(tag.begin.removeprefix(trigger))} {tag.rest}")
        excludes = _texts(given.get("excludes"), f"{location}.excludes", optional=True)
        first = [f"{self._lark.spelled(tag.begin)} {tag.rest}" for tag in tags]
        needed, once = (_flag(given, name, location) for name in ("at_least_one", "stop_after_first"))
        return self._amid_text(begun, excludes, first if needed else [], once, location, ends, last)

    # The formats ------------------------------------------------------------------------------------------

    def _const(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        return f"{self._lark.spelled(_text(given.get('value'), f'{location}.value'))} {self._end(ends)}"

    def _json(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        where = f"{location}.json_schema"
        schema: Any = given.get("json_schema")
        style = given.get("style", "json")
        if style not in _STYLES:
            served = ", ".join(_STYLES)
            raise _unfit(f"{location}.style", f"is {str(style)[:40]!r}; expected {served}")
        if given.get("any_order"):
            raise _unfit(
                f"{location}.any_order", "is not supported: properties are generated in the order of the schema"
            )
        schema = require_schema(schema, where)
        form = _STYLES[style]
        if form is None or not isinstance(schema, Mapping):
            return f"{self._lark.json(schema)} {self._end(ends)}"
        return f"{TaggedGrammar(self._lark, schema, where, form=form).arguments()} {self._end(ends)}"

    def _qwen(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        return self._json({**given, "style": "qwen_xml"}, location, ends, last=last)

    def _any_text(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        if given.get("max_tokens") is not None:
            raise _unfit(f"{location}.max_tokens", "is not supported; use max_chars")
        most = given.get("max_chars")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= 100_000):
            raise _unfit(f"{location}.max_chars", "must be 0 to 100000")
        free = ANY_TEXT if most is None else f"/(?s:.{{0,{most}}})/"
        excludes = _texts(given.get("excludes"), f"{location}.excludes", optional=True)
        return self._free(excludes, location, ends, last=last or most is not None, free=free)

    def _grammar(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        text = _text(given.get("grammar"), f"{location}.grammar")
        require_small(text, "the grammar", f"{location}.grammar")
        require_few_repeats(text, f"{location}.grammar")
        return f"{self._lark.grammar(as_lark(text, f'{location}.grammar'))} {self._end(ends)}"

    def _regex(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        pattern = _text(given.get("pattern"), f"{location}.pattern")
        require_small(pattern, "the regular expression", f"{location}.pattern")
        require_few_repeats(pattern, f"{location}.pattern")
        excludes = _texts(given.get("excludes"), f"{location}.excludes", optional=True)
        text = self._lark.terminal(self._lark.free_text(excludes, f"/{slashed(pattern)}/"))
        return f"{text} {self._end(ends)}"

    def _row(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        *before, final = _sequence(given.get("elements"), f"{location}.elements")
        parts = [self.part(each, f"{location}.elements[{index}]", (), False) for index, each in enumerate(before)]
        return " ".join([*parts, self.part(final, f"{location}.elements[{len(before)}]", ends, last)])

    def _or(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        elements = enumerate(_sequence(given.get("elements"), f"{location}.elements"))
        return self._lark.either(
            self.part(each, f"{location}.elements[{index}]", ends, last) for index, each in elements
        )

    def _repeated(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        inner = self._lark.rule(self.part(given.get("content"), f"{location}.content", (), False))
        if given["type"] == "repeat":
            least, most = (self._count(given, name, location) for name in ("min", "max"))
            if least < 0 or (most < least and most != -1):
                raise _unfit(f"{location}.max", "must not be below min; -1 sets no limit")
            times = f"{{{least},{'' if most == -1 else most}}}"
        else:
            times = {"optional": "?", "plus": "+", "star": "*"}[given["type"]]
        return f"{inner}{times} {self._end(ends)}"

    def _one_tag(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        tag = self._tag(given, location, last and not ends)
        return f"{self._lark.spelled(tag.begin)} {tag.rest} {self._end(ends)}"

    def _triggered(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        return self.triggered(self._tags(given, location), given, location, ends=ends, last=last)

    def _separated(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        separator = given.get("separator")
        if not isinstance(separator, str):
            raise _unfit(f"{location}.separator", "must be a text")
        needed, once = (_flag(given, name, location) for name in ("at_least_one", "stop_after_first"))
        tag = self._lark.either(f"{self._lark.spelled(tag.begin)} {tag.rest}" for tag in self._tags(given, location))
        tags = tag if once else f"{tag} ({self._lark.spelled(separator)} {tag})*"
        return f"{tags if needed else f'({tags})?'} {self._end(ends)}"

    def _dispatch(self, given: Mapping[str, Any], location: str, ends: Sequence[str], last: bool) -> str:
        begun: dict[str, list[str]] = {}
        for index, rule in enumerate(_sequence(given.get("rules"), f"{location}.rules")):
            where = f"{location}.rules[{index}]"
            if not isinstance(rule, list | tuple) or len(rule) != 2:
                raise _unfit(where, "must be a list of a text and a format")
            begun.setdefault(_text(rule[0], f"{where}[0]"), []).append(self.part(rule[1], f"{where}[1]", (), False))
        excludes = _texts(given.get("excludes"), f"{location}.excludes", optional=True)
        once = given.get("loop", True) is False
        return self._amid_text(begun, excludes, [], once=once, location=location, ends=ends, last=last)

    # Their parts ------------------------------------------------------------------------------------------

    def _tags(self, given: Mapping[str, Any], location: str) -> list[_Tag]:
        tags = []
        for index, each in enumerate(_sequence(given.get("tags"), f"{location}.tags")):
            where = f"{location}.tags[{index}]"
            each = _mapping(each, where)
            if each.get("type", "tag") != "tag":
                raise _unfit(f"{where}.type", "must be 'tag'")
            tags.append(self._tag(each, where, False))
        return tags

    def _tag(self, given: Mapping[str, Any], location: str, last: bool) -> _Tag:
        begin, end = given.get("begin"), given.get("end", "")
        if not isinstance(begin, str):
            raise _unfit(f"{location}.begin", "must be a text; tokens are not supported")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise _unfit(f"{location}.end", "must be a text or texts; tokens are not supported")
        if "" in ends and len(ends) > 1:
            raise wrong(f"{location}.end", "texts of a list must not be empty")
        found = [each for each in ends if each]
        return _Tag(begin, self.part(given.get("content"), f"{location}.content", found, last and not found), location)

    def _amid_text(
        self,
        begun: Mapping[str, Sequence[str]],
        excludes: Sequence[str],
        first: Sequence[str],
        once: bool,
        location: str,
        ends: Sequence[str],
        last: bool,
    ) -> str:
        """Return the expression of free text in which each key of `begun` is followed by one of its expressions.

        If `first` is not empty, one of those precedes all text.
        """
        lark = self._lark
        if once and first:
            return f"{lark.either(first)} {self._end(ends)}"
        one = lark.either(
            f"{lark.text_up_to(trigger, without=excludes)} {lark.either(rest)}"
            for trigger, rest in begun.items()
            if rest
        )
        rest = self._free(excludes, location, ends, last=last)
        if once:
            return lark.either([f"{one} {self._end(ends)}", rest])
        return f"{lark.either(first) if first else ''} {one}* {rest}"

    def _free(
        self, excludes: Sequence[str], location: str, ends: Sequence[str], last: bool, free: str = ANY_TEXT
    ) -> str:
        if ends:
            return self._lark.text_up_to(*ends, without=excludes, free=free)
        if not last:
            raise wrong(location, "the end of its text is undefined; put it last, or into a tag with an end")
        return self._lark.terminal(self._lark.free_text(excludes, free))

    def _end(self, ends: Sequence[str]) -> str:
        return self._lark.either(map(self._lark.spelled, ends)) if ends else ""

    @staticmethod
    def _count(given: Mapping[str, Any], name: str, location: str) -> int:
        value = given.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= 10_000:
            raise _unfit(f"{location}.{name}", "must be an integer up to 10000")
        return value


def _mapping(value: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unfit(location, "must be a JSON object")
    return value


def _sequence(value: Any, location: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_TAGS:
        raise _unfit(location, f"must be a list of 1 to {MAX_TAGS} entries")
    return value


def _text(value: Any, location: str) -> str:
    if not isinstance(value, str) or not value:
        raise _unfit(location, "must be a non-empty text")
    return value


def _texts(value: Any, location: str, optional: bool = False) -> list[str]:
    if optional and not value:
        return []
    return [_text(each, location) for each in _sequence(value, location)]


def _flag(given: Mapping[str, Any], name: str, location: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _unfit(f"{location}.{name}", "must be true or false")
    return value
