"""Pytest plugin: a fault that shows at size runs only the tests that have to detect it, the oracle all of those.

Other wrong backends skip the section `scale`, which takes minutes, and `cases` unless it has to detect their fault,
which alone runs then if it needs an engine. With FD_WRONG_TRIED, names of faults, each backend
runs only the sections of its fault, and a right one those of the faults of similar backends.
"""

from __future__ import annotations

import os

import pytest

from fd_core.testing.kit.plugin import identity_of
from tests.testing.wrong import plugin
from tests.testing.wrong.fault import BASES, FAULTS, matches

assert plugin.MODULES
NAMED = {name: fault.noticed_by for name, fault in FAULTS.items() if fault.shows_at_size}
TRIED = tuple(filter(None, os.environ.get("FD_WRONG_TRIED", "").split(",")))
BY_ANY = tuple(pattern for name, patterns in NAMED.items() if name in (TRIED or NAMED) for pattern in patterns)


def sections_of(name: str) -> set[str]:
    """Return the sections of the kit in which a fault may show, or those that a right backend runs."""
    if name in FAULTS:
        return {test.partition(":")[0] for test in (*FAULTS[name].noticed_by, *FAULTS[name].spreads_to)}
    same = (each for each in TRIED if issubclass(FAULTS[each].backend, BASES[name]))
    return {"scale"}.union(*map(sections_of, same))


def is_wanted(item: pytest.Item) -> bool:
    """Return True unless a cheaper test covers the same of its backend."""
    target, section, test = identity_of(item)
    name, case = target.partition(":")[0], f"{section}:{test}"
    if name in FAULTS and (section == "cases" or FAULTS[name].case is not None):
        return any(matches(case, pattern) for pattern in FAULTS[name].noticed_by)
    if TRIED and section not in sections_of(name):
        return False
    if section == "scale":
        return any(matches(case, pattern) for pattern in NAMED.get(name, BY_ANY if name == "reference" else ()))
    return name not in NAMED and item.get_closest_marker("fd_thorough") is None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
