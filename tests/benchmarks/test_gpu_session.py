import json
import subprocess
import sys
from pathlib import Path

import gpu_session
import pytest

SCRIPT = Path(gpu_session.__file__)
NO_GPU = "no NVIDIA driver is installed"
NAMES = [item.name for item in gpu_session.items(Path("r"))]
NEED_NO_GPU = ("roofline", "compile", "compare")


@pytest.fixture(autouse=True)
def modules_are_installed(monkeypatch):
    """The environment of the default run has no Triton."""
    monkeypatch.setattr(gpu_session, "find_spec", lambda name: name)


def session(problem="", statuses=None, only=None):
    """Run all items by doubles; returns outcomes and the items that were started, in order."""
    started = []

    def begin(item):
        started.append(item.name)
        status = (statuses or {}).get(item.name, 0)
        if isinstance(status, Exception):
            raise status
        return status

    wanted = [item for item in gpu_session.items(Path("r")) if only is None or item.name in only]
    return gpu_session.run(wanted, lambda backend: problem, begin), started


def test_with_a_gpu_all_run_in_order():
    outcomes, started = session()
    assert started == NAMES
    assert started[:5] == [
        "roofline",
        "environment",
        "hardware",
        "families",
        "kernels",
    ]  # what is useful if the machine is taken away
    assert {each.result for each in outcomes} == {"passed"}


def test_without_a_gpu_skipped_commands_are_listed_with_reasons(capsys):
    outcomes, started = session(problem=NO_GPU)
    assert started == ["roofline", "compile"]
    assert [each.item for each in outcomes if each.why == NO_GPU] == [each for each in NAMES if each not in NEED_NO_GPU]
    output = capsys.readouterr().out
    assert "pytest -q -m hardware" in output and "conformance gpu_cuda gpu_cuda:dtype=float32" in output
    assert output.count("would run") == len(NAMES) - 2 and "not run: first-hour did not pass" in output


def test_item_whose_modules_are_not_installed_is_not_run(monkeypatch):
    monkeypatch.setattr(gpu_session, "find_spec", lambda name: None if name == "triton" else name)
    outcomes, started = session()
    assert "compile" not in started
    assert [each.why for each in outcomes if each.item == "compile"] == ["triton not installed"]


@pytest.mark.parametrize("status", [1, 5, OSError("no such program")])
def test_failed_item_does_not_stop_the_others(status):
    outcomes, started = session(statuses={"hardware": status})
    assert len(started) == len(NAMES)
    assert [each.item for each in outcomes if each.result == "failed"] == ["hardware"]


def test_comparison_is_skipped_without_a_measurement():
    _, started = session(statuses={"first-hour": 1})
    assert "compare" not in started


def test_emulated_backend_does_not_count_as_gpu(monkeypatch):
    from fd_gpu_cuda.backend import CudaBackend

    from fd_core.backends.contract import Availability

    monkeypatch.setattr(CudaBackend, "probe", staticmethod(lambda: Availability(True, "emulated here", emulated=True)))
    assert gpu_session.problem_of("gpu_cuda") == "emulated here"
    assert gpu_session.problem_of("nochip") == "nochip is not installed"


def test_exit_status_is_1_if_an_item_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_session, "start", lambda item: 0)
    monkeypatch.setattr(gpu_session, "run", lambda chosen: [gpu_session.Outcome("hardware", "failed", "exit status 1")])
    assert gpu_session.main(["--results", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "gpu_session.json").read_text())[0]["why"] == "exit status 1"


def test_hanging_item_is_terminated(monkeypatch):
    monkeypatch.setattr(gpu_session, "ITEM_TIMEOUT", 0.2)
    item = gpu_session.Item("hangs", "", (sys.executable, "-c", "import time; time.sleep(60)"))
    assert gpu_session.start(item) == 124


@pytest.mark.skipif(not gpu_session.problem_of("gpu_cuda"), reason="there is a GPU, and this would run everything")
def test_command_without_a_gpu_runs_cpu_items_and_exits_with_0(tmp_path):
    only = [each for each in NAMES if each != "compile"]
    command = [sys.executable, str(SCRIPT), "--results", str(tmp_path), "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gpu_roofline.md").exists()
    assert not (tmp_path / "gpu_session.json").exists()
    assert "hardware            not run" in done.stdout
