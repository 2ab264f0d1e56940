"""The JSON types that a tool's schema leaves to an argument that is written as bare text."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.text.parsing.argument_types import KINDS, json_of, kind_of, kinds_of

VALUES = (None, True, 0, 7.5, "", "10115", [], {})
DEFINITIONS = {"text": {"type": "string"}, "size": {"type": ["integer", "null"]}, "loop": {"$ref": "#/$defs/loop"}}
PARTS = st.recursive(
    st.one_of(
        st.sampled_from([{}, {"minLength": 1}, {"type": "boolean"}, {"enum": ["a", 1]}, {"const": None}]),
        st.sampled_from(["text", "size"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
    ),
    lambda parts: st.dictionaries(
        st.sampled_from(["allOf", "anyOf"]), st.lists(parts, min_size=1, max_size=3), min_size=1
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"allOf": [{"type": "string"}, {"minLength": 5}]}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/text"}, {"description": "A zip code."}]}, {"string"}),
        ({"type": ["string", "null"], "allOf": [{"$ref": "#/$defs/text"}]}, {"string"}),
        ({"allOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"enum": [1, 2]}]}, {"number"}),
        ({"allOf": [{}, {"description": "Anything."}]}, KINDS),
        ({"$ref": "#/$defs/loop"}, KINDS),
        ({"allOf": "text"}, KINDS),
    ],
)
def test_types_are_those_that_all_parts_allow(schema: dict[str, Any], kinds: set[str]) -> None:
    assert kinds_of(schema, {"$defs": DEFINITIONS}) == kinds


@given(PARTS, st.sampled_from(VALUES))
def test_type_of_every_valid_value_is_found(part: dict[str, Any], value: object) -> None:
    root = part | {"$defs": DEFINITIONS}
    if jsonschema.Draft202012Validator(root).is_valid(value):
        assert kind_of(value) in kinds_of(part, root)


def test_schemas_without_end_are_any_type() -> None:
    wide: dict[str, Any] = {"anyOf": [{"type": "string"}] * 1000}
    assert kinds_of(wide, wide) == KINDS
    deep: dict[str, Any] = {"allOf": [{"$ref": "#"}]}
    assert kinds_of(deep, deep) == KINDS


def test_zip_code_stays_a_string() -> None:
    schema = {"allOf": [{"type": "string"}, {"pattern": "^[0-9]{5}$"}]}
    assert json_of("10115", kinds_of(schema, schema)) == '"10115"'
