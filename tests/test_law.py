"""Every invariant has a test and a mutant; docs/understand/law.md lists the invariants, its index both."""

from fd_core.testing.kit.law import RULES
from tests.law import DOCUMENT, index, marked_tests, mutants_by_rule, page


def test_every_rule_has_a_test():
    assert RULES.keys() - marked_tests().keys() == set()


def test_every_rule_has_a_mutant():
    assert RULES.keys() - mutants_by_rule().keys() == set()


def test_tests_and_mutants_name_existing_rules():
    assert (marked_tests().keys() | mutants_by_rule().keys()) - RULES.keys() == set()


def test_document_lists_the_rules():
    assert DOCUMENT.read_text() == page(), "write it anew: python -m tests.law"


def test_index_names_every_test_and_mutant():
    named = set(index().splitlines())
    for found in (marked_tests(), mutants_by_rule()):
        assert {f"- `{name}`" for names in found.values() for name in names} <= named
