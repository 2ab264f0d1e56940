"""Each backend with one fault fails the tests that name the fault, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.testing.report.recorder import CaseEnded, RecordedEvent
from tests.testing.wrong import kernels, plugin, selection
from tests.testing.wrong.fault import FAULTS, matches

ROOT = Path(__file__).parents[2]
# Each backend takes ten seconds, two at a time, in addition to other load.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SHARE = int(os.environ.get("FD_WRONG_BACKENDS", "0"))
"""`nox -s kit` runs the whole kit on every backend, or on every second, third or tenth."""
SAMPLE = ("wrong_exports_rounded", "wrong_releases_the_first_hundred", "wrong_leaves_a_stale_token")
"""A fault in computing, one that shows at size, and one in signals: the default run uses only these and the sections
of the kit that name them, also for the right backends."""
TRIED = list(FAULTS)[::SHARE] if SHARE else list(SAMPLE)


def installed(folder: Path) -> dict[str, str]:
    """Install the wrong backends into a folder; return an environment that includes them."""
    info = folder / "fd_wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nwrong = {plugin.__name__}\n")
    more = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return os.environ | more | ({} if SHARE else {"FD_WRONG_TRIED": ",".join(SAMPLE)})


def target(name: str) -> str:
    """Return the target; the backend that hangs has a short watchdog timeout."""
    return f"{name}:watchdog_seconds=1" if "hangs" in name else name


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, set[str]]:
    """Failures of each wrong backend, and the number of failures of each right one."""
    folder = tmp_path_factory.mktemp("wrong")
    environment = installed(folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    names = ["null", "reference", *TRIED]
    runs = []
    for half in range(2):
        command = [sys.executable, "-m", "pytest", "-p", "fd_core.testing.report.recorder", "-p", "no:cacheprovider"]
        command += ["-c", str(folder / "pytest.ini"), "--basetemp", str(folder / f"files{half}"), "-q", "--tb=no"]
        command += ["--pyargs", "fd_core.testing.suite", "-p", selection.__name__]
        command += [
            f"--fd-results={folder / f'results{half}'}",
            *(f"--fd-backend={target(name)}" for name in names[half::2]),
        ]
        with (folder / f"output{half}").open("wb") as output:
            runs.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder))
    assert [run.wait() for run in runs] == [1, 1], (folder / "output0").read_text()[-2000:]
    found: dict[str, set[str]] = defaultdict(set)
    for half in range(2):
        for line in (folder / f"results{half}").read_bytes().splitlines():
            event = msgspec.json.decode(line, type=RecordedEvent)
            if isinstance(event, CaseEnded) and event.result.outcome == "fail":
                found[event.target.partition(":")[0]].add(f"{event.result.section}:{event.result.test}")
            elif isinstance(event, CaseEnded):
                found[event.target.partition(":")[0]] |= set()
    return dict(found)


@pytest.mark.parametrize("name", ["null", "reference"])
def test_right_backends_pass(failures, name):
    assert failures[name] == set()


@pytest.mark.parametrize("name", TRIED)
def test_wrong_backend_fails_exactly_the_tests_naming_its_fault(failures, name):
    fault = FAULTS[name]
    assert {test for test in failures[name] if not fault.is_named_by(test)} == set()
    assert [each for each in fault.noticed_by if not any(matches(test, each) for test in failures[name])] == []
    assert fault.noticed_by


def test_there_are_many_wrong_backends():
    assert len(FAULTS) >= 45
    assert len(kernels.FAULTS) >= 75
