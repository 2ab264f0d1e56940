"""No rule of the law is without a test and a mutant, and docs/understand/law.md says which they are."""

from fd_core.testing.kit.law import RULES
from tests.law import DOCUMENT, marked_tests, mutants_by_rule, page


def test_every_rule_has_a_test():
    assert RULES.keys() - marked_tests().keys() == set()


def test_every_rule_has_a_mutant():
    assert RULES.keys() - mutants_by_rule().keys() == set()


def test_nobody_names_a_rule_that_there_is_not():
    assert (marked_tests().keys() | mutants_by_rule().keys()) - RULES.keys() == set()


def test_the_document_is_what_tests_and_mutants_say():
    assert DOCUMENT.read_text() == page(), "write it anew: python -m tests.law"
