"""A start is timed by the files that its processes map, by its terminal output, and by the answer of /ready."""

import signal
import sys

import pytest
import start_up
from harness.start_watch import Mark, Start, Waymarks, watched

from fd_core.cli.bench.compare.processes import EngineFailedError
from tests.server.processes import free_port

ENGINE = """
import mmap, sys, time
spent = time.process_time()
while time.process_time() - spent < 0.3: pass
file = open(sys.argv[1], "rb")
weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("at work", flush=True)
sys.stdin.read()
"""
SERVER = """
import http.server, subprocess, sys, time
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
engine.stdout.readline()
print("Warming up" if sys.stdout.isatty() else "no terminal", flush=True)
class Answers(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Answers.asked += 1
        self.send_response(200 if Answers.asked > 5 else 503)
        self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Answers).serve_forever()
"""
WAYMARKS = Waymarks(
    server={".weights": "server maps"},
    engine={"": "engine exists", ".weights": "engine maps"},
    terminal={"Warming up": "bar"},
)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize("terminal", [False, True], ids=["a pipe", "a terminal"])
def test_marks_are_in_order_with_the_time_of_each_process(port, tmp_path, terminal):
    weights = tmp_path / "some.weights"
    weights.write_bytes(b"0" * 4096)
    command = [sys.executable, "-c", SERVER, ENGINE, str(weights), str(port)]
    start = watched(command, port, WAYMARKS, terminal=terminal)
    names = ["engine exists", "engine maps", *(["bar"] if terminal else []), "/ready answers"]
    assert [mark.name for mark in start.marks] == names
    assert [mark.wall_s for mark in start.marks] == sorted(mark.wall_s for mark in start.marks)
    assert start.ready.engine_cpu_s >= 0.29


def test_server_that_exits_is_an_error_with_its_last_output(port):
    with pytest.raises(EngineFailedError, match=r"(?s)status 3.*no such model"):
        watched(
            [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"], port, WAYMARKS, terminal=False
        )


def test_server_that_never_gets_ready_is_terminated(port):
    with pytest.raises(EngineFailedError, match="status None"):
        watched(
            [sys.executable, "-c", "import time; time.sleep(60)"], port, WAYMARKS, terminal=False, ready_timeout=0.2
        )


def test_figures_are_median_min_max_of_marks_that_all_starts_have():
    starts = [
        Start((Mark("engine", 1.0, 0.5, 0.0), Mark("/ready answers", wall, 1.0, 2.0))) for wall in (6.0, 4.0, 5.0)
    ]
    starts[1] = Start((*starts[1].marks[:1], Mark("seen once", 2.0, 1.0, 1.0), starts[1].ready))
    found = start_up.summary(starts)
    assert found["ready_wall_s"] == {"median": 5.0, "least": 4.0, "most": 6.0}
    assert found["both_cpu_s"]["median"] == 3.0
    assert [row["mark"] for row in found["marks"]] == ["engine", "/ready answers"]


def test_both_commits_are_started_alternately_and_recorded(monkeypatch, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    turns = []

    def start(program, options, *, terminal):
        turns.append((program.name, terminal))
        return Start((Mark("/ready answers", 5.0, 1.0, 2.0),))

    monkeypatch.setattr(start_up, "start", start)
    monkeypatch.setattr(start_up, "RESULTS", tmp_path)
    try:
        assert start_up.main(["--fdcore", "new", "--before", "old", "--rounds", "2"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    one = [("new", False), ("old", False), ("new", True), ("old", True)]
    assert turns == [("new", False), ("old", False), *one, *reversed(one)]
    kept = start_up.json.loads((tmp_path / "start_up.json").read_text())
    assert set(kept["summaries"]) == {
        *("fd_core", "fd_core-before"),
        *("fd_core, in a terminal", "fd_core-before, in a terminal"),
    }
    assert "/ready after 5.00 s" in capsys.readouterr().out
