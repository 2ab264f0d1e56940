import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fd_core.cli.bench.compare import processes
from fd_core.cli.bench.compare.processes import EngineFailedError, Worker

ECHO = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "die":
        sys.exit(3)
    failed = message["op"] == "fail"
    print(json.dumps({"ok": not failed, "error": "it burns", "received": message}), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    started = Worker([sys.executable, "-c", ECHO], {}, tmp_path / "log")
    yield started
    started.close()


def test_worker_answers_in_json_lines(worker):
    assert worker.ask(op="run", prompts=[[1, 2]])["received"] == {"op": "run", "prompts": [[1, 2]]}


def test_failed_request_is_an_error_and_the_next_one_is_answered(worker):
    with pytest.raises(EngineFailedError, match=r"it burns; see .*log"):
        worker.ask(op="fail")
    assert worker.ask(op="run")["ok"]


def test_dead_worker_is_an_error_with_its_status(worker):
    with pytest.raises(EngineFailedError, match="ended with status 3"):
        worker.ask(op="die")


PARENT = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fd_core.cli.bench.compare.processes import Worker, interrupted_by_sigterm
interrupted_by_sigterm()
worker = Worker([sys.executable, "-c", sys.argv[2]], {}, Path(sys.argv[3]))
print(worker.ask(op="pid")["pid"], flush=True)
try:
    time.sleep(60)
finally:
    time.sleep(0.2)
    worker.close()
"""
STUBBORN = """
import json, os, time
input()
print(json.dumps({"ok": True, "pid": os.getpid()}), flush=True)
time.sleep(60)
"""
"""Stops reading its standard input."""


@pytest.fixture
def parent(tmp_path):
    command = [sys.executable, "-c", PARENT, str(Path(processes.__file__).parents[4]), STUBBORN, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        yield started
        started.kill()


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGKILL,)], ids=["terminated", "killed"])
def test_engine_ends_when_the_comparison_is_killed(parent, signals):
    engine = int(parent.stdout.readline())
    for number in signals:  # `timeout` sends SIGTERM to its child, and then to the whole group
        parent.send_signal(number)
        time.sleep(0.05)
    parent.wait(30)
    with pytest.raises(ProcessLookupError):
        for _ in range(300):
            os.kill(engine, 0)
            time.sleep(0.1)
