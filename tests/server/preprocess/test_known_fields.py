"""Unknown fields are found at any depth, and no others."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from fd_core.server.preprocess.body import KnownFields


class Leaf(msgspec.Struct):
    a: Any = None


class Branch(msgspec.Struct):
    b: Any = None
    leaf: Leaf | None = None
    leaves: str | list[Leaf] | None = None


class Root(msgspec.Struct):
    branches: Annotated[list[Branch], Meta(max_length=9)] | None = None
    c: dict[str, Any] | None = None


KNOWN = KnownFields(Root)


def found(body: Any) -> set[str]:
    return {path for path, _ in KNOWN.unknown(json.dumps(body).encode())}


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({}, set()),
        ({"x": 1, "c": {"y": 1}}, {"x"}),
        ({"branches": [{"b": {"y": 1}, "leaf": {"z": 1}}, {"y": 2}]}, {"branches[].leaf.z", "branches[].y"}),
        ({"branches": [{"leaves": [{"a": 1}, {"z": 1}]}, {"leaves": "text"}]}, {"branches[].leaves[].z"}),
        ({"branches": [1, "x", None, [], {"y": 1}]}, {"branches[].y"}),
        ({"branches": "wrong", "c": 3}, set()),
        ({"branches": {"y": 1}}, {"branches.y"}),
        ({"branches": None}, set()),
    ],
)
def test_paths_name_unknown_fields(body: Any, paths: set[str]) -> None:
    assert found(body) == paths


@given(
    st.recursive(
        st.none() | st.booleans() | st.text('abc"{[', max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["branches", "leaf", "leaves", "a", "b", "x"]), inner, max_size=4)
        ),
    )
)
def test_any_body_can_be_checked(value: Any) -> None:
    paths = found({"branches": value, "x": value})
    assert "x" in paths
    assert all(path.split(".")[-1] not in ("branches", "b") or "." in path for path in paths)
