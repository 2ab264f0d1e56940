"""Covering cases: every possible pair occurs, every value early, and failures shrink to what matters."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.errors import ConfigError
from fd_core.testing.axes import covering, latent, layers, parts, products, steps
from fd_core.testing.axes.covering import Axis, case_text, covering_cases, parse_case, smallest

AXES = (
    Axis("rows", (1, 2, 65)),
    Axis("window", (None, 7)),
    Axis("dtype", ("auto", "int8")),
    Axis("post", (False, True)),
)
axes_of_any_size = st.lists(st.integers(1, 5), min_size=2, max_size=6).map(
    lambda sizes: tuple(Axis(f"a{index}", tuple(range(size))) for index, size in enumerate(sizes))
)


@given(axes=axes_of_any_size, seed=st.integers(0, 9))
def test_every_pair_occurs(axes, seed):
    cases = covering_cases(axes, seed)
    for first, second in itertools.combinations(axes, 2):
        pairs = {(case[first.name], case[second.name]) for case in cases}
        assert pairs == set(itertools.product(first.values, second.values))


@given(axes=axes_of_any_size, seed=st.integers(0, 9))
def test_three_values_that_are_not_the_plainest_occur_of_any_axes(axes, seed):
    cases = covering_cases(axes, seed)
    for three in itertools.combinations([axis for axis in axes if len(axis.values) > 1], 3):
        assert any(all(case[axis.name] != axis.values[0] for axis in three) for case in cases)


@given(axes=axes_of_any_size, seed=st.integers(0, 9))
def test_every_three_values_of_a_group_occur(axes, seed):
    group = axes[-4:]
    cases = covering_cases(axes, seed, groups=([axis.name for axis in group],))
    for three in itertools.combinations(group, 3):
        found = {tuple(case[axis.name] for axis in three) for case in cases}
        assert found == set(itertools.product(*(axis.values for axis in three)))


@given(axes=axes_of_any_size, seed=st.integers(0, 9))
def test_first_cases_have_every_value(axes, seed):
    cases = covering_cases(axes, seed)
    first = cases[: covering.count_until_every_value(axes, cases)]
    assert cases[0] == covering.default_case(axes)
    assert {value for case in first for value in case.items()} == {(a.name, v) for a in axes for v in a.values}


def uncovered(axes, cases, allowed):
    """Return the pairs of values that an allowed case has and none of `cases`."""
    covered = {pair for case in cases for pair in itertools.combinations(case.items(), 2)}
    settings = [[(axis.name, value) for value in axis.values] for axis in axes]
    pairs = [pair for two in itertools.combinations(settings, 2) for pair in itertools.product(*two)]
    plain = covering.default_case(axes)
    return [pair for pair in pairs if pair not in covered and allowed({**plain, **dict(pair)})]


def test_every_pair_that_the_plainest_case_allows_occurs():
    def allowed(case):
        return not (case["rows"] == 65 and case["dtype"] == "int8")

    cases = covering_cases(AXES, 0, allowed)
    assert all(map(allowed, cases))
    assert uncovered(AXES, cases, allowed) == []


@pytest.mark.parametrize("part", [layers.LAYERS, steps.STEPS], ids=lambda part: part.name)
def test_cases_of_a_part_cover_all_pairs(part):
    cases, quick = parts.cases_of(part)
    assert uncovered(part.axes, [case.values for case in cases], part.allowed) == []
    assert quick < len(cases) / 3


@pytest.mark.parametrize(
    "part", [layers.LAYERS, latent.LATENT, products.LINEAR, products.HEAD], ids=lambda part: part.name
)
def test_case_without_what_a_plugin_lacks_can_exist(part):
    """Each value that needs an ability may be all that a case has, such as an image its only tokens."""
    for lacking in {axis.needs for axis in part.axes} - {None}:
        for case in [case for case in parts.cases_of(part)[0] if part.allowed(case.values)]:
            found = case.with_only(lambda axis, _, lacking=lacking: axis.needs != lacking)
            assert part.allowed(found.values), (lacking, case.text, found.text)
            assert all(found.values[axis.name] == axis.values[0] for axis in part.axes if axis.needs == lacking)


def test_interacting_settings_of_an_engine_meet_in_threes():
    """Adapters of each rank and number with weights of each format, and others, which pairs alone do not reach."""
    found = [case.values for case in parts.cases_of(steps.STEPS)[0]]
    alone = [case.values for case in parts.cases_of(dataclasses.replace(steps.STEPS, groups=()))[0]]
    plain = covering.default_case(steps.AXES)
    for group, counts in zip(steps.STEPS.groups, ((36, 36), (200, 400), (533, 533)), strict=True):
        axes = [axis for axis in steps.AXES if axis.name in group]
        assert len(axes) == len(group)
        possible = 0
        for three in itertools.combinations(axes, 3):
            for values in itertools.product(*(axis.values for axis in three)):
                triple = dict(zip((axis.name for axis in three), values, strict=True))
                if steps.STEPS.allowed({**plain, **triple}):
                    possible += 1
                    assert any(triple.items() <= case.items() for case in found), triple
        assert counts[0] <= possible <= counts[1]
    assert len(alone) < len(found) < 1.5 * len(alone)


def test_failing_case_shrinks_to_the_values_that_matter():
    def fails(case):
        return case["rows"] == 65 and case["post"]

    found = smallest({"rows": 65, "window": 7, "dtype": "int8", "post": True}, AXES, fails)
    assert case_text(found, AXES) == "rows=65,post=true"


@given(index=st.integers(0, 23))
def test_text_of_a_case_names_it(index):
    values = list(itertools.product(*(axis.values for axis in AXES)))[index]
    case = dict(zip([axis.name for axis in AXES], values, strict=True))
    assert parse_case(case_text(case, AXES), AXES) == case


@pytest.mark.parametrize(
    ("text", "message"), [("row=1", "'row' is not an axis"), ("window=wide", "window=wide is not a value")]
)
def test_unknown_case_is_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_case(text, AXES)


def test_failure_names_the_smallest_case_and_the_command(monkeypatch):
    def check(limit, case):
        assert case["rows"] < limit, f"row {case['rows']} is wrong"

    monkeypatch.setattr(parts, "_REDUCED", set())
    part = parts.Part("rows", AXES, check)
    with pytest.raises(AssertionError) as caught:
        part.case("rows=65,window=7,post=true").check(3, "fdcore conformance mychip")
    assert str(caught.value) == (
        "rows:rows=65: row 65 is wrong; repeat: fdcore conformance mychip --case rows:rows=65 "
        "(reduced from rows=65,window=7,post=true)"
    )


def test_failure_is_not_reduced_to_one_that_it_caused(monkeypatch):
    def check(left, case):
        assert not left, f"{len(left)} values are left"
        left.append(case)
        assert not case["post"], "law 5.3: value 3 is lost"

    monkeypatch.setattr(parts, "_REDUCED", set())
    with pytest.raises(AssertionError, match=r"^rows:rows=65,post=true: law 5\.3: value 3 is lost"):
        parts.Part("rows", AXES, check).case("rows=65,post=true").check([], "pytest")


def test_error_of_a_plugin_is_a_failure_with_its_type(monkeypatch):
    monkeypatch.setattr(parts, "_REDUCED", set())
    part = parts.Part("rows", AXES, lambda *_: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError: division by zero"):
        part.case("rows=2").check(None, "pytest")
