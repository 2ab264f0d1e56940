"""Counts of inputs by kind: the inputs that a passing test reports are held, a failure is one that is not."""

from __future__ import annotations

import pytest

from tests.hostile.count import Kind, Tally, read, table
from tests.hostile.page import PAGE, replace

pytest_plugins = ["pytester"]


def test_inputs_are_counted_by_kind_and_failures_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_long_texts="""
            import pytest

            def test_many(record_property):
                record_property("inputs", 1200)

            @pytest.mark.parametrize("text", "ab")
            def test_one(text):
                pass

            def test_many_that_fail(record_property):
                record_property("inputs", 7)
                assert False

            @pytest.mark.skip
            def test_skipped():
                pass

            def test_of_another_kind(record_property):
                record_property("kind", "random")
        """
    )
    tally = Tally()
    pytester.inline_run("-p", "no:cacheprovider", plugins=[tally])
    assert tally.kinds == {"long texts": Kind(4, 1202, 1), "random": Kind(1, 1, 0)}


def test_set_up_failure_is_counted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="""
            import pytest

            @pytest.fixture
            def broken():
                assert False

            def test_it(broken):
                pass
        """
    )
    tally = Tally()
    pytester.inline_run("-p", "no:cacheprovider", plugins=[tally])
    assert tally.kinds == {"a": Kind(0, 0, 1)}


def test_table_round_trips_through_the_page() -> None:
    kinds = {"b": Kind(2, 40_000, 1), "a": Kind(1, 1, 0)}
    page = f"before\n{table(kinds)}\nafter | a | b |\n"
    assert read(page) == kinds
    assert "| **all** | 3 | 40,002 | 40,001 | 1 |" in page
    assert read("no table") == {}


def test_replace_swaps_the_table_between_markers() -> None:
    page = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter"
    assert replace(page, "a", "new") == ("before\n<!-- a -->\nnew\n<!-- end of a -->\nafter", "old")
    with pytest.raises(ValueError, match="no marks"):
        replace(page, "b", "new")


def test_page_has_markers_for_each_table() -> None:
    for mark in ("count", "faults"):
        replace(PAGE.read_text(), mark, "")
