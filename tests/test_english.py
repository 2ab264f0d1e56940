"""The checks of English find the faults, and only those."""

import pytest

from tests import english


def test_frequent_words_are_reported_with_their_rate() -> None:
    faults = [*english.overused({"a.py": "# It says so, and said so before." + " word" * 1000}, "fd_core")]
    assert faults == ["fd_core: says/said occurs 2 times, 19.9 per 10,000 words; at most 1.0"]


@pytest.mark.parametrize("name", ["who_said_it", "test_it_came", "SAID", "of  its own"])
def test_words_are_found_inside_names(name: str) -> None:
    _, found = english.occurrences({"a.py": name})
    assert found.total() == 1


@pytest.mark.parametrize("name", ["nobodys_business_saidx", "aside", "comeback", "outcome"])
def test_parts_of_other_words_are_not_counted(name: str) -> None:
    _, found = english.occurrences({"a.py": name})
    assert found.total() == 0


@pytest.mark.parametrize(
    "source",
    ['"""What it is."""', 'def f():\n    """Whether it is."""', 'class A:\n    x: int\n    """Where it is."""'],
)
def test_docstrings_with_wrong_openers_are_reported(source: str) -> None:
    (fault,) = english.faults_in("a.py", source)
    assert "the docstring opens with" in fault


def test_long_test_names_are_reported() -> None:
    (fault,) = english.faults_in("a.py", f"async def test_{'a' * 66}(): ...")
    assert "has 71 characters" in fault
    assert not [*english.faults_in("a.py", f"def test_{'a' * 65}(): ...")]


@pytest.mark.parametrize(
    "subject",
    [
        "Say that it is absent",
        "router: Stop",
        "router: stop.",
        "router, kv: stop",
        "router stop",
        f"router: {'a' * 65}",
    ],
)
def test_malformed_subjects_are_reported(subject: str) -> None:
    assert len([*english.wrong_subjects({"0" * 40: subject})]) == 1


def test_subject_of_the_form_passes() -> None:
    assert not [*english.wrong_subjects({"0" * 40: "router: release tokens when the upstream disconnects"})]
