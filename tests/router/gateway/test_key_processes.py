"""Real processes: key reload on SIGHUP, one request id in both logs, bad key files at the start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.router.gateway.test_processes import NULL, until
from tests.server.processes import free_port, running

pytestmark = pytest.mark.slow

ALICE = '[[keys]]\nname = "alice"\nkey = "sk-alice"\ntokens_per_minute = 10_000\n'
BOB = '[[keys]]\nname = "bob"\nkey = "sk-bob"\n'
WORKER = "worker-key-of-this-test"


def ask(url: str, key: str, request_id: str, **fields: Any) -> int:
    body = json.dumps({"prompt": "a private text", "max_tokens": 8, **fields}).encode()
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": request_id, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def lines(log: Path, request_id: str) -> list[dict[str, Any]]:
    """Return the lines of an access log in JSON, found among other lines."""
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if line["logger"] == "fd_core.access" and request_id in line["request_id"]]


class Routed:
    """A router with a key file in front of one worker."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.keys, worker_keys = folder / "keys.toml", folder / "worker"
        self.keys.write_text(ALICE)
        self.keys.chmod(0o600)
        worker_keys.write_text(WORKER)
        worker_keys.chmod(0o600)
        self.worker_log, self.log = folder / "worker.log", folder / "router.log"
        port, own = free_port(), free_port()
        self.url = f"http://127.0.0.1:{own}"
        logging = ("--access-log", "--log-format", "json")
        stack.enter_context(
            running(self.worker_log, "serve", *NULL, *logging, "--port", str(port), "--api-key-file", str(worker_keys))
        )
        workers = ("--worker", f"http://127.0.0.1:{port}", "--worker-key-file", str(worker_keys))
        flags = ("--api-key-file", str(self.keys), "--port", str(own), "--health-check-interval-secs", "0.2")
        self.process = stack.enter_context(running(self.log, "route", *workers, *flags, *logging))
        until(self.ready, self.log)

    def ready(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as page:
            return bool(page.status == 200)

    def hang_up(self, message: str) -> None:
        """Send SIGHUP and wait for its line in the log."""
        seen = self.log.read_text().count(message)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.log.read_text().count(message) > seen, self.log)


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        yield Routed(tmp_path, stack)


def test_request_id_is_in_both_logs_and_keys_are_reloaded(routed: Routed) -> None:
    for stream in (False, True):
        assert ask(routed.url, "sk-alice", f"trace-{stream}", stream=stream) == 200
        for log in (routed.log, routed.worker_log):  # either may write first
            until(lambda s=stream, log=log: bool(lines(log, f"trace-{s}")), log)
        (here,) = lines(routed.log, f"trace-{stream}")
        (there,) = lines(routed.worker_log, f"trace-{stream}")
        assert (here["tokens_in"], here["tokens_out"]) == (there["tokens_in"], there["tokens_out"]) != (0, 0)
        assert (here["key"], there["key"], here["status"]) == ("alice", "unnamed", 200)
    assert ask(routed.url, "sk-bob", "early") == 401
    routed.keys.write_text(ALICE + BOB)
    routed.hang_up(": 2 API keys")
    assert ask(routed.url, "sk-bob", "late") == 200
    routed.keys.write_text(ALICE + "admin = 3\n")
    routed.hang_up("line 5, admin: expected true or false")
    assert ask(routed.url, "sk-bob", "later") == 200, "an invalid file changes nothing"
    for log in (routed.log, routed.worker_log):
        text = log.read_text()
        assert not [secret for secret in ("sk-alice", "sk-bob", WORKER, "private") if secret in text]


@pytest.mark.parametrize("command", [("serve", *NULL), ("route", "--worker", "http://127.0.0.1:1")])
def test_bad_key_file_exits_with_code_two_and_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ALICE + ALICE)
    ended = subprocess.run(
        [sys.executable, "-m", "fd_core.cli", *command, "--api-key-file", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"FD_PORT": str(free_port())},
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "line 6, name: line 2 has the same name" in ended.stderr, ended.stderr


EARLY = """
import os, signal, sys
from fd_core.cli.serving import startup
from fd_core.cli.main import main
from fd_core.errors import ModelError

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup of the tests would hide it

def find_model(*_):
    os.kill(os.getpid(), signal.SIGHUP)
    raise ModelError("still there")

startup.find_model = find_model
sys.argv = ["fdcore", "serve", "null", "--backend", "null", "--port", "0", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("with_file", [True, False])
def test_sighup_during_load_ends_only_processes_without_key_file(tmp_path: Path, with_file: bool) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ALICE)
    flags = ["--api-key-file", str(path)] if with_file else []
    command = [sys.executable, "-c", EARLY, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (3 if with_file else -signal.SIGHUP), ended.stderr
    assert ("still there" in ended.stderr) == with_file


def test_page_protection_without_keys_is_rejected(tmp_path: Path) -> None:
    worker = ("route", "--worker", "http://127.0.0.1:1", "--port", str(free_port()), "--protect-pages")
    command = [sys.executable, "-m", "fd_core.cli", *worker]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "protected pages require an API key" in ended.stderr.splitlines()[-1]
