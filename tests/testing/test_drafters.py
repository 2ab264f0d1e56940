"""The core's drafters pass the kit, and each wrong one fails the test that names its fault."""

import inspect
import itertools

import numpy as np
import pytest

from fd_core.runner.drafting import SlotError
from fd_core.testing.axes.parts import cases_of
from fd_core.testing.hooks.drafted import DRAFTED, DrafterUnderTest
from fd_core.testing.hooks.drafters import DrafterSuite
from tests.testing.right.drafting import DraftsFromOneMatrix
from tests.testing.witnesses import check_of
from tests.testing.wrong.drafting import WRONG, ComparesAllOccurrences, Shortest

CASES, QUICK = cases_of(DRAFTED)


class _Quick(DrafterSuite):
    """The kit with the quick cases in one test."""

    test_case = None

    def test_quick_cases(self):
        for case in CASES[:QUICK]:
            case.check(self.subject(), "")


class TestNgram(_Quick):
    drafter = "ngram"

    @pytest.mark.soak  # ten seconds, and it is compared with itself
    def test_an_ordinary_day(self):
        super().test_an_ordinary_day()


class TestSuffix(_Quick):
    drafter = "suffix"

    @pytest.mark.soak  # ten seconds; TestRightDrafter lives one
    def test_an_ordinary_day(self):
        super().test_an_ordinary_day()


class TestDraftModel(_Quick):
    drafter = "draft_model"

    @pytest.mark.soak  # it is compared with itself, and lives the day that TestRightDrafter is compared with
    def test_an_ordinary_day(self):
        super().test_an_ordinary_day()

    @pytest.mark.soak  # ten seconds; the other drafters take one
    def test_calls_beyond_sixteen_bits_are_right(self):
        super().test_calls_beyond_sixteen_bits_are_right()


class TestRightDrafter(_Quick):
    def drafter_class(self):
        return DraftsFromOneMatrix


def test_options_that_contradict_each_other_may_be_refused_by_either_name():
    suite = DrafterSuite()
    suite.drafter, suite.options = "ngram", {"prompt_lookup_max": 8, "prompt_lookup_min": 3}
    suite.test_values_of_options_are_refused_by_name_or_have_right_drafts()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model"])
def test_core_plugins_pass_every_case(name):
    suite = DrafterSuite()
    suite.drafter = name
    for case in CASES:
        case.check(suite.subject(), "")


@pytest.mark.in_turn(8, by=lambda name: check_of(WRONG[name].noticed_by))
@pytest.mark.parametrize("name", WRONG)
def test_wrong_drafter_fails_the_test_that_names_its_fault(name):
    cls, noticed_by = WRONG[name].cls, WRONG[name].noticed_by
    suite = type("Suite", (DrafterSuite,), {"drafter_class": lambda self: cls})()
    test = getattr(suite, noticed_by)
    named = {
        "accepted": "none",
        "k": 4,
        "depth": 1,
        "text": "frequent" if cls is ComparesAllOccurrences else "constant",
    }
    arguments = {key: value for key, value in named.items() if key in inspect.signature(test).parameters}
    runs = [{"case": case} for case in CASES] if noticed_by == "test_case" else [arguments]
    with pytest.raises((AssertionError, SlotError, OverflowError)):
        for given in runs:
            test(**given)


def test_drafter_that_learns_from_others_declares_it():
    class Learns(Shortest):
        """Has one table for all slots, on purpose."""

        def __init__(self, context):
            super().__init__(context)
            self._learned = {}

        def grow(self, slot, tokens):
            super().grow(slot, tokens)
            text = self._texts[slot][-len(tokens) - 1 :]
            self._learned |= dict(itertools.pairwise(text))

        def guess(self, slot, limit):
            following = self._learned.get(self._texts[slot][-1])
            return np.array([] if following is None else [following], np.int32)

    for private, holds in ((True, False), (False, True)):
        subject = DrafterUnderTest(Learns, {}, private=private)
        failures = [case for case in CASES[:QUICK] if _fails(case, subject)]
        assert (not failures) is holds, failures


def _fails(case, subject):
    try:
        case.check(subject, "")
    except AssertionError:
        return True
    return False


def test_every_test_of_the_suite_is_needed():
    tests = {name for name in vars(DrafterSuite) if name.startswith("test_")}
    assert {wrong.noticed_by for wrong in WRONG.values()} == tests
