"""Two processes that read alike have one name for it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from fd_core.text.byte_tokenizer import byte_tokenizer
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.reading import reading_of

BYTES = byte_tokenizer()
DATED = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_it_depends_on_what_comes_out_and_not_on_what_it_is_made_of() -> None:
    template = ChatTemplate.of(BYTES)
    assert reading_of(BYTES, template) == reading_of(replace(BYTES, digest="elsewhere"), template)
    assert len({reading_of(BYTES, None), reading_of(BYTES, template), reading_of(BYTES, ChatTemplate("{{ 1 }}"))}) == 3


def test_a_date_in_the_template_changes_nothing() -> None:
    days = [ChatTemplate(DATED, now=lambda day=day: datetime(2026, 1, day)) for day in (1, 2)]
    assert reading_of(BYTES, days[0]) == reading_of(BYTES, days[1])


def test_a_template_may_refuse() -> None:
    assert reading_of(BYTES, ChatTemplate("{{ raise_exception('no system') }}"))
