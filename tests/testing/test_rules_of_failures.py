"""A failed case of a kit names the rule that it checks, however the kit is run."""

import subprocess
import sys

import pytest

from fd_core.testing.connectors.suite import ConnectorSuite
from fd_core.testing.hooks.observers import ObserverSuite
from fd_core.testing.hooks.scaling import ScalingPolicySuite
from fd_core.testing.kit.law import RULES
from fd_core.testing.router_policies.suite import RouterPolicySuite
from fd_core.testing.stores.suite import StoreSuite

ABOUT_WORDS = {
    "test_an_unknown_parameter_is_named",
    "test_open_returns_one_line_and_is_repeatable",
    "test_secrets_are_never_shown",
}
"""Cases about messages and options, to which no rule applies."""

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
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    (folder / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("rule", ["5.4", "8"])
def test_failed_case_quotes_its_rules(output, rule):
    assert output.count(f"{rule}: {RULES[rule]}") == 1


def test_passing_rules_are_not_mentioned(output):
    assert RULES["5.5"] not in output
    assert output.count("the law") == 1


@pytest.mark.parametrize("suite", [StoreSuite, ConnectorSuite, RouterPolicySuite, ScalingPolicySuite, ObserverSuite])
def test_every_case_of_a_kit_names_its_rule(suite):
    cases = {name: case for name, case in vars(suite).items() if name.startswith("test_") and name not in ABOUT_WORDS}
    assert len(cases) >= 4
    for name, case in cases.items():
        rules = [rule for mark in getattr(case, "pytestmark", ()) if mark.name == "law" for rule in mark.args]
        assert rules, name
        assert set(rules) <= set(RULES)
