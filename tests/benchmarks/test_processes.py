import sys

import pytest
from harness.processes import EngineFailedError, Worker

ECHO = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "die":
        sys.exit(3)
    failed = message["op"] == "fail"
    print(json.dumps({"ok": not failed, "error": "it burns", "heard": message}), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    started = Worker([sys.executable, "-c", ECHO], {}, tmp_path / "log")
    yield started
    started.close()


def test_a_worker_answers_in_json_lines(worker):
    assert worker.ask(op="run", prompts=[[1, 2]])["heard"] == {"op": "run", "prompts": [[1, 2]]}


def test_a_failed_request_is_an_error_and_the_next_one_is_answered(worker):
    with pytest.raises(EngineFailedError, match=r"it burns; see .*log"):
        worker.ask(op="fail")
    assert worker.ask(op="run")["ok"]


def test_a_dead_worker_is_an_error_with_its_status(worker):
    with pytest.raises(EngineFailedError, match="ended with status 3"):
        worker.ask(op="die")
