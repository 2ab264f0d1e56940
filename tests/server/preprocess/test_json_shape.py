"""The shape of a JSON text is counted outside its strings, for any slice boundaries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.server.preprocess import body as reading

TEXTS = st.text(st.sampled_from('ab",:{}[]\\\n\x00é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> reading.JsonShape:
    if isinstance(value, list):
        inner, names = [counted(each) for each in value], 0
    elif isinstance(value, dict):
        inner, names = [counted(each) for each in value.values()], len(value)
    else:
        return reading.JsonShape(0, 0, 0, 0)
    return reading.JsonShape(
        1 + sum(each.containers for each in inner),
        names + sum(each.names for each in inner),
        max(len(inner) - 1, 0) + sum(each.commas for each in inner),
        0,
    )


@given(VALUES, st.integers(1, 9), st.booleans())
def test_only_tokens_outside_strings_are_counted(value: Any, cut: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_SLICE", cut)
        assert reading.shape_of(body) == counted(value)._replace(escapes=body.count(b"\\"))


@given(st.binary(max_size=40), st.integers(1, 9))
def test_invalid_json_is_counted_without_an_error(body: bytes, cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_SLICE", cut)
        assert min(reading.shape_of(body)) >= 0
