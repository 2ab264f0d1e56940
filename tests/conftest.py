"""Settings for every test."""

import contextlib
import gc
import importlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# The time of an example depends on the load of the machine, not on the property.
_QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": (HealthCheck.too_slow,)}
settings.register_profile("fixed", **_QUIET, derandomize=True)
settings.register_profile("drawn", **_QUIET)
# Importing these plugins, which no test uses, takes each process of pytest that a test starts 0.8 s.
os.environ.setdefault("PYTEST_ADDOPTS", "-p no:schemathesis -p no:valkey -p no:canitoolcall -p no:anyio")
SEED = int(os.environ.get("FD_TEST_SEED", "0"))
SHARE = 1 if os.environ.get("FD_TEST_EXAMPLES") == "all" else 3
"""Hypothesis draws one of so many examples that a test asks for; `nox -s soak` draws all of them."""
LEAST = 8
FEW = 5
"""Cases of a matrix that run without taking turns."""
PAIR = 2
"""Cases of a test of a class with the mark `in_turn` that do."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples in every run; `--hypothesis-seed=N` draws others, which N reproduces.

    Temporary files go to one folder that ends with the run: tests kill processes, which leave theirs.
    """
    settings.load_profile("fixed" if config.getoption("hypothesis_seed") is None else "drawn")
    if not hasattr(config, "workerinput"):  # workers inherit the environment
        config._tmp_path_factory.getbasetemp()  # not below the folder: pytest keeps the files of three runs
        # The name is short for the sake of socket paths.
        folder, patch = tempfile.mkdtemp(prefix="fd"), pytest.MonkeyPatch()
        Path(folder).chmod(0o1777)  # open to others, as /tmp is: what a wrong plugin writes there must be found
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(patch.undo)


def pytest_report_header(config: pytest.Config) -> str:
    """Name the seeds of the run."""
    drawn = config.getoption("hypothesis_seed")
    examples = "fixed" if drawn is None else f"drawn with --hypothesis-seed={drawn}"
    return f"seeds: hypothesis examples {examples}; FD_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Seed the shared generators, so that a test draws the same numbers alone and after others."""
    random.seed(SEED)
    np.random.seed(SEED)


def pytest_collection(session: pytest.Session) -> None:
    """Prepare the collection of many files, which no worker can leave to another.

    It makes millions of objects that stay: looking for garbage among them takes a quarter of the time. Compiling the
    files takes half of it where no earlier run has left them compiled. Workers begin with different files, so that
    each compiles a part, and finds that of the others.
    """
    gc.disable()
    if (worker := getattr(session.config, "workerinput", None)) is not None:
        files = sorted(file for argument in session.config.args for file in Path(argument).rglob("test_*.py"))
        for file in files[int(worker["workerid"][2:]) :: worker["workercount"]]:
            # A file that is skipped or broken is reported when it is collected.
            with contextlib.suppress(pytest.skip.Exception, Exception):
                importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that hold slow tests: workers side by side then end at about the same time.

    A failed test of elapsed time is repeated once; the summary reports it.
    """
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if SHARE > 1:
        _draw_fewer_examples(items)
        _take_turns(items)


def _take_turns(items: list[pytest.Item]) -> None:
    """Leave most cases of large matrices, and of tests with the mark `in_turn`, to `nox -s soak`.

    Of two parameters, the others have every value of each. Of a class with the mark, tests with two cases run both.
    With `by`, a function of the parameters, one of so many cases with each of its results runs. At least one runs.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if case and not any(map(item.get_closest_marker, ("soak", "guide"))):
            tests.setdefault(test, []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("in_turn")
        if mark not in cases[0].own_markers and len(cases) <= (FEW if mark is None else PAIR):
            continue
        chosen = _covering(cases) if mark is None else _of_each(cases, *mark.args, **mark.kwargs)
        for number, item in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.soak)


def _covering(cases: list[pytest.Item]) -> set[int]:
    """Return the numbers of a few cases that have every value of each mark `parametrize`."""
    marks = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
    axes = [mark.replace(",", " ").split() if isinstance(mark, str) else mark for mark in marks]
    # Those of fixtures and of pytest_generate_tests may be rows of a table; their combinations are values.
    if others := [name for name in cases[0].callspec.params if not any(name in axis for axis in axes)]:
        axes.append(others)
    values = [
        {(number, *(id(item.callspec.params[name]) for name in axis)) for number, axis in enumerate(axes)}
        for item in cases
    ]
    missing, chosen = set().union(*values), set()
    for fewest in range(len(axes), 0, -1):
        for number, each in enumerate(values):
            if len(each & missing) >= fewest:
                chosen.add(number)
                missing -= each
    return chosen


def _of_each(cases: list[pytest.Item], count: int, by: Callable[..., object] | None = None) -> set[int]:
    """Return the numbers of one of so many cases; of those with each result of `by`, the first is one."""
    seen: Counter[object] = Counter()
    numbers: dict[str, dict[int, int]] = {}
    chosen = set()
    for number, item in enumerate(cases):
        if by is not None:
            kind = by(**item.callspec.params)
            turn = seen[kind]
            seen[kind] += 1
        else:
            turn = len(item.parent.name + item.function.__name__)
            for name, value in item.callspec.params.items():
                known = numbers.setdefault(name, {})
                turn += known.setdefault(id(value), len(known))
        if turn % count == 0:
            chosen.add(number)
    return chosen or {0}


def _draw_fewer_examples(items: list[pytest.Item]) -> None:
    """Divide the number of examples of each property and of each state machine by `SHARE`, once."""
    done: set[Any] = set()
    for item in items:
        test = getattr(item, "obj", None)
        machine = hasattr(test, "_hypothesis_state_machine_class")
        owner = getattr(item, "cls", None) if machine else getattr(test, "__func__", test)
        name = "settings" if machine else "_hypothesis_internal_use_settings"
        asked = getattr(owner, name, None)
        if isinstance(asked, settings) and owner not in done:
            done.add(owner)
            fewer = min(asked.max_examples, max(LEAST, asked.max_examples // SHARE))
            setattr(owner, name, settings(asked, max_examples=fewer))


def pytest_collection_finish() -> None:
    """Leave the modules and items of all tests out of later collections of garbage.

    There are millions of objects: each `gc.collect()`, such as that of an engine that starts, takes 0.7 s with them.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
