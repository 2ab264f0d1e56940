"""Each backend with a fault that needs an engine, or several ranks, fails a case or a test that names it."""

from __future__ import annotations

import pytest

from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import installed_plugins
from fd_core.testing.axes import parts
from fd_core.testing.axes.sampling import MASK
from fd_core.testing.axes.steps import STEPS, supported_by
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.arrays import Values
from fd_core.testing.models.cases import cases_of
from fd_core.testing.suite import test_attention, test_cases, test_costs, test_lifetime, test_models, test_ranks
from fd_core.testing.suite.kv import test_kv
from fd_core.testing.suite.scale.test_counters import test_texts_are_right_at_any_number_of_steps as check_counts
from fd_core.testing.suite.scale.test_memory import test_memory_of_a_rising_context_is_linear as check_memory
from fd_core.testing.suite.scale.test_memory import test_nothing_remains_of_an_operation as check_operation
from tests.testing.witnesses import check_of
from tests.testing.wrong import plugin
from tests.testing.wrong.fault import BASES, FAULTS, matches

TESTS = [
    *cases_of((test_attention, test_costs, test_kv, test_lifetime, test_models, test_ranks)),
    *(test for test in cases_of((test_cases,)) if test.function is test_cases.test_states_of_images),
]
"""Those that take seconds at most."""
IN_TESTS = {
    name: tests
    for name, fault in FAULTS.items()
    if (tests := [test for test in TESTS if matches(str(test), fault.noticed_by[0])])
}
TIMED = [
    name
    for name, tests in IN_TESTS.items()
    if any(mark.name == "timing" for mark in getattr(tests[0].function, "pytestmark", []))
]
COUNTS = "scale:test_texts_are_right_at_any_number_of_steps"
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


@pytest.mark.in_turn(8, by=lambda name: check_of(IN_ENGINES[name]))
@pytest.mark.parametrize("name", IN_ENGINES)
def test_wrong_backend_fails_its_case(folder, name):
    with pytest.raises(AssertionError, match=r"^step:"):
        STEPS.case(IN_ENGINES[name]).check(parse_target(name, folder), "fdcore conformance")


@pytest.mark.parametrize("base", BASES)
def test_right_backend_passes_the_cases_of_wrong_ones(folder, base):
    cases = {case for name, case in IN_ENGINES.items() if issubclass(FAULTS[name].backend, BASES[base])}
    assert cases
    target = parse_target(base, folder)
    for case in cases:
        STEPS.case(case).with_only(supported_by(target)).check(target, "fdcore conformance")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.in_turn(8, by=lambda name: check_of(FAULTS[name].noticed_by[0]))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.timing if name in TIMED else ()) for name in IN_TESTS]
)
def test_wrong_backend_fails_a_test(folder, monkeypatch, name):
    target = parse_target(name, folder)
    fixtures = {
        "target": target,
        "ops": target.ops,
        "checkpoints": folder,
        "values": Values(11),
        "require": lambda *_: None,
        "monkeypatch": monkeypatch,
    }

    def fails(test):
        try:
            test.run(**fixtures)
        except pytest.skip.Exception:
            return False
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a plugin may raise anything
            return True
        return False

    assert any(map(fails, IN_TESTS[name]))


def test_memory_that_is_kept_for_each_length_is_found(folder):
    with pytest.raises(AssertionError, match="contexts of 1 to 200 tokens leave"):
        check_memory(parse_target("wrong_keeps_positions_of_each_length", folder))
    check_memory(parse_target("reference", folder))


def test_masks_that_are_kept_are_found(folder):
    with pytest.raises(AssertionError, match="calls of mask_logits the process holds"):
        check_operation(parse_target("wrong_keeps_masks", folder), MASK)
    check_operation(parse_target("reference", folder), MASK)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if COUNTS in fault.noticed_by])
def test_counts_that_end_are_found(folder, name):
    with pytest.raises((AssertionError, ValueError), match=r"after about|reshape"):
        check_counts(parse_target(name, folder))


@pytest.mark.parametrize("base", BASES)
def test_right_backend_counts_any_number_of_steps(folder, base):
    check_counts(parse_target(base, folder))
