"""A pytest plugin: a fault that shows at size runs the tests that have to notice it, the oracle all of those.

Other wrong backends leave the section `scale` out, which takes minutes.
"""

from __future__ import annotations

import pytest

from fd_core.testing.report.recorder import identity_of
from tests.testing.wrong import plugin
from tests.testing.wrong.fault import FAULTS, matches

assert plugin.MODULES
NAMED = {name: fault.noticed_by for name, fault in FAULTS.items() if fault.shows_at_size}
BY_ANY = tuple(pattern for patterns in NAMED.values() for pattern in patterns)


def is_wanted(item: pytest.Item) -> bool:
    """Whether a test says something about its backend that no cheaper one does."""
    target, section, test = identity_of(item)
    name, case = target.partition(":")[0], f"{section}:{test}"
    if section == "scale":
        return any(matches(case, pattern) for pattern in NAMED.get(name, BY_ANY if name == "reference" else ()))
    return name not in NAMED and item.get_closest_marker("fd_thorough") is None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
