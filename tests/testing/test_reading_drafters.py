"""The core's drafter that reads hidden states passes the kit; each wrong one fails the test that names its fault."""

import inspect

import pytest

from fd_core.errors import EngineDead
from fd_core.testing.hooks.readers import _SETTINGS, ReadingDrafterSuite
from tests.testing.wrong.reading import WRONG


class TestEagle3(ReadingDrafterSuite):
    drafter = "eagle3"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_drafter_fails_the_test_that_names_its_fault(name):
    cls, noticed_by = WRONG[name].cls, WRONG[name].noticed_by
    suite = type("Suite", (ReadingDrafterSuite,), {"drafter_class": lambda self: cls})()
    test = getattr(suite, noticed_by)
    runs = [{"setting": each} for each in _SETTINGS] if "setting" in inspect.signature(test).parameters else [{}]
    with pytest.raises((AssertionError, EngineDead), match=r"law|still referenced|out of bounds"):
        for given in runs:
            test(**given)


def test_every_test_of_the_suite_is_needed():
    tests = {name for name in vars(ReadingDrafterSuite) if name.startswith("test_")}
    assert {wrong.noticed_by for wrong in WRONG.values()} == tests
