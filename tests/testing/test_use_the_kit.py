"""The commands of the page about the kit run and print what the page describes."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from fd_core.config.envelope import OperatingEnvelope
from tests.testing.documents import ROOT, follow

PAGE = (ROOT / "docs" / "extend" / "use-the-kit.md").read_text()


def test_page_declares_an_envelope_with_fields_that_exist():
    [declared] = re.findall(r"OperatingEnvelope\((.*)\)", PAGE)
    names = {word.partition("=")[0] for word in declared.split(", ")}
    assert names <= {field.name for field in fields(OperatingEnvelope)}


@pytest.mark.guide
def test_commands_of_the_page_print_what_it_describes(tmp_path):
    _, outputs = follow("use-the-kit.md", tmp_path)
    cases, again, soak, workers, model, expected, coverage = (" ".join(output.split()) for _, output in outputs)
    assert "2 passed" in cases
    assert "held where tested, layer: decodes 1" in cases
    assert "2 passed" in again
    assert re.search(r"seeds: \d+", soak)
    assert "0 failed" in workers
    assert re.search(r"held where tested, layer: .*kv_heads 8, group 2, head_dim 128, .*hidden 512, inner 1,536", model)
    assert "of cpu.py never executed by a check: cpu.py " in coverage
    assert "passes now: remove the line: test_token_id_zero_is_a_token # example" in expected
