"""Every public name can be imported, is recorded, and cannot be removed unnoticed."""

from __future__ import annotations

import importlib

import pytest

from fd_core.deprecations import OLD_NAMES
from fd_core.plugins import KINDS
from tests.releases.public_names import PAGE, RECORD, modules, names

COMMAND = "python -m tests.releases.public_names"


@pytest.mark.parametrize("module", ["fd_core", *modules()])
def test_every_public_name_can_be_imported(module):
    home = importlib.import_module(module)
    assert home.__all__ and all(getattr(home, name) is not None for name in home.__all__)


def test_no_public_name_is_removed_unnoticed():
    recorded, found = set(RECORD.read_text().splitlines()), set(names())
    gone, new = sorted(recorded - found), sorted(found - recorded)
    assert not gone, f"public names were removed; see docs/extend/public-names.md; then run `{COMMAND}`: {gone}"
    assert not new, f"public names are new: `{COMMAND}` records them: {new}"


def test_classes_in_hook_signatures_are_public():
    bases = {kind.base.partition(":")[0] for kind in KINDS}
    assert bases <= set(modules())


def test_page_lists_the_names_that_were_replaced():
    for old in OLD_NAMES:
        rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{old.name}`")]
        assert len(rows) == 1 and rows[0].endswith(f"| {old.until} |")
