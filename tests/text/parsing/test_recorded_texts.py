"""The built-in parsers read recorded texts, and chunk boundaries never change the events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import REASONING_PARSERS, RECORDED, TOOL_PARSERS, Recorded, answer_of, parsed, parser

from fd_core.server.stream.response_format import deltas, message_of
from fd_core.text.parsing.events import CallBegun, Event

EACH = pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED)


def read(recorded: Recorded, *pieces: str) -> list[Event]:
    return parsed(parser(recorded.reasoning, recorded.tools, recorded.prompt), list(pieces))


PARSERS = [*TOOL_PARSERS.values(), *REASONING_PARSERS.values()]
MARKERS = sorted({marker for each in PARSERS for marker in each.markers})


@EACH
def test_recorded_text_parses_to_its_meaning(recorded: Recorded) -> None:
    assert answer_of(read(recorded, recorded.text)) == recorded.means


def test_calls_of_kimi_keep_their_count_of_the_conversation() -> None:
    """A grammar that enforces calls repeats one count."""
    events = read(RECORDED["kimi_k2"], RECORDED["kimi_k2"].text)
    ids = ["functions.weather:3", "functions.now:4"]
    assert [event.call_id for event in events if isinstance(event, CallBegun)] == ids
    assert [call.id for call in message_of(events, False).tool_calls] == ids  # type: ignore[union-attr]
    assert [json.loads(each)["tool_calls"][0].get("id") for each in deltas(events, False) if b"name" in each] == ids


@EACH
def test_single_cut_does_not_change_events(recorded: Recorded) -> None:
    whole = read(recorded, recorded.text)
    for cut in range(len(recorded.text) + 1):
        assert read(recorded, recorded.text[:cut], recorded.text[cut:]) == whole, cut
    assert read(recorded, *recorded.text) == whole


@EACH
@given(data=st.data())
def test_random_cuts_do_not_change_events(recorded: Recorded, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(recorded.text)), max_size=12)))
    pieces = [recorded.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(recorded.text)], strict=True)]
    assert read(recorded, *pieces) == read(recorded, recorded.text)


def common_prefix_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


UNFINISHED = (*MARKERS, "\\n</parameter>", ")]", "```<｜tool▁call▁end｜>")
"""Possible suffixes of a truncated call: text until the last character decides."""


@EACH
def test_truncated_text_parses_to_a_prefix(recorded: Recorded) -> None:
    """A truncated text parses to a prefix of the whole answer; only an unfinished marker may differ."""
    whole = recorded.means
    for end in range(len(recorded.text)):
        part = answer_of(read(recorded, recorded.text[:end]))
        assert len(part.calls) <= len(whole.calls)
        for (name, arguments), (whole_name, whole_arguments) in zip(part.calls, whole.calls, strict=False):
            assert name == whole_name
            arguments = arguments.removesuffix("…")
            same = common_prefix_length(arguments, whole_arguments)
            assert arguments[same:] == "" or any(each.startswith(arguments[same:]) for each in UNFINISHED)


SOUP = [*MARKERS, "to=functions.now", "analysis", "function", '{"name": "now"', ', "arguments": ', "```json", "```"]
SOUP += [*"{}[]()\"'\\,:; \n1-aé🙂\u2028", "now", "weather(", "city=", "null", "True", "\\u00"]


@pytest.mark.parametrize("name", sorted({(each.reasoning, each.tools) for each in RECORDED.values()}, key=str), ids=str)
@given(parts=st.lists(st.sampled_from(SOUP), max_size=14), data=st.data())
def test_no_text_breaks_a_parser(name: tuple[str | None, str | None], parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parsed(parser(*name), [text])
    cut = data.draw(st.integers(0, len(text)))
    assert parsed(parser(*name), [text[:cut], text[cut:]]) == whole
    assert parsed(parser(*name), list(text)) == whole
