"""A failed case of a kit says which rule of the law it holds, whoever runs the kit and however."""

import subprocess
import sys

import pytest

from fd_core.testing.connectors.suite import ConnectorSuite
from fd_core.testing.kit.law import RULES
from fd_core.testing.router_policies.suite import RouterPolicySuite
from fd_core.testing.stores.suite import StoreSuite

ABOUT_WORDS = {
    "test_a_store_works_without_being_opened",
    "test_an_unknown_parameter_is_named",
    "test_opening_says_one_line_and_may_be_done_again",
    "test_secrets_are_never_shown",
    "test_stats_count_what_is_there",
}
"""Cases of what people read and type, of which the law says nothing."""

CASES = """
import pytest

@pytest.mark.law("5.4", "8")
def test_wrong():
    assert False

@pytest.mark.law("5.5")
def test_right():
    pass

def test_of_no_rule():
    assert False
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    (folder / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("rule", ["5.4", "8"])
def test_a_failed_case_says_its_rules_word_for_word(said, rule):
    assert said.count(f"{rule}: {RULES[rule]}") == 1


def test_nothing_is_said_of_rules_that_were_kept(said):
    assert RULES["5.5"] not in said
    assert said.count("the law") == 1


@pytest.mark.parametrize("suite", [StoreSuite, ConnectorSuite, RouterPolicySuite])
def test_every_case_of_a_kit_names_its_rule(suite):
    cases = {name: case for name, case in vars(suite).items() if name.startswith("test_") and name not in ABOUT_WORDS}
    assert len(cases) >= 4
    for name, case in cases.items():
        rules = [rule for mark in getattr(case, "pytestmark", ()) if mark.name == "law" for rule in mark.args]
        assert rules, name
        assert set(rules) <= set(RULES)
