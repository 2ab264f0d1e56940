"""Each backend with a fault that needs an engine fails the case that names it."""

from __future__ import annotations

import pytest

from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import installed_plugins
from fd_core.testing.axes import parts
from fd_core.testing.axes.steps import STEPS
from fd_core.testing.kit.target import parse_target
from tests.testing.wrong import plugin
from tests.testing.wrong.fault import BASES, FAULTS

IN_ENGINES = {name: fault.case for name, fault in FAULTS.items() if fault.case is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Install the wrong backends; return a folder for checkpoints."""
    folder = tmp_path_factory.mktemp("wrong")
    info = folder / "fd_wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nwrong = {plugin.__name__}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(parts, "_SECONDS_TO_REDUCE", 0.0)
        installed_plugins.cache_clear()
        yield folder
    installed_plugins.cache_clear()


@pytest.mark.parametrize("name", IN_ENGINES)
def test_wrong_backend_fails_its_case(folder, name):
    with pytest.raises(AssertionError, match=r"^step:"):
        STEPS.case(IN_ENGINES[name]).check(parse_target(name, folder), "fdcore conformance")


@pytest.mark.parametrize("base", BASES)
def test_right_backend_passes_the_cases_of_wrong_ones(folder, base):
    cases = {case for name, case in IN_ENGINES.items() if issubclass(FAULTS[name].backend, BASES[base])}
    assert cases
    for case in cases:
        STEPS.case(case).check(parse_target(base, folder), "fdcore conformance")
