"""The spawn launcher: the launcher suite, and tests that need one machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fd_core.launching import spawn
from fd_core.launching.contract import NODE_ADDRESS, Launcher, ProcessSpec
from fd_core.launching.owned import OwnedProcess
from fd_core.launching.spawn import SpawnLauncher
from fd_core.testing.launchers import LauncherSuite


class TestSpawn(LauncherSuite):
    launcher = "spawn"

    def test_processes_see_disjoint_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spawn, "_DEVICES", "FD_SUITE_DEVICES")
        monkeypatch.setenv("FD_SUITE_DEVICES", "3,5,6")
        launching = SpawnLauncher()
        try:
            specs = [self.spec(name, cores=0, devices=count) for name, count in (("a", 2), ("b", 1), ("c", 0))]
            shown = [self.seen(process)["environment"] for process in launching.start(specs)]
            assert [each["FD_SUITE_DEVICES"] for each in shown] == ["3,5", "6", ""]
            chosen = {"FD_SUITE_DEVICES": "5"}
            (process,) = launching.start([self.spec("d", cores=0, environment=chosen)])
            assert self.seen(process)["environment"]["FD_SUITE_DEVICES"] == "5"
        finally:
            launching.close()

    @pytest.mark.soak  # by default tests/cluster/test_deployment.py serves through both
    def test_server_and_router_announce_their_addresses(self, launching: Launcher) -> None:
        where = ("--host", NODE_ADDRESS, "--port", "0")
        words = ("-m", "fd_core.cli", "serve", "null", "--backend", "null", *where)
        (server,) = launching.start([ProcessSpec("server", words, cores=0)])
        url = self.announced_by(server)
        words = ("-m", "fd_core.cli", "route", "--worker", url, *where)
        (router,) = launching.start([ProcessSpec("router", words, cores=0)])
        at = self.announced_by(router)
        self.until(lambda: answers(f"{at}/ready"))
        body = {"model": "null", "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
        request = urllib.request.Request(
            f"{at}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        server.terminate()
        assert server.wait(30) == 0


def test_output_without_line_ends_is_not_kept_whole(tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text("import sys\nfor _ in range(64): sys.stdout.write('=' * 2**20)\n")
    path = os.pathsep.join((str(tmp_path), *sys.path))
    spec = ProcessSpec("bar", ("-m", "bar"), cores=0, environment={"PYTHONPATH": path})
    process = OwnedProcess(spec, "here", NODE_ADDRESS, (), {})
    try:
        assert process.wait(60) == 0
        assert 2**20 < len(process.reason()) < 2**24
    finally:
        process.close()


def test_reason_has_lines_that_no_thread_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread that reads the output may get no processor before the reason is asked for."""
    monkeypatch.setattr(OwnedProcess, "_forward", lambda self: None)
    (tmp_path / "fails.py").write_text("raise SystemExit('the disk is full')\n")
    path = os.pathsep.join((str(tmp_path), *sys.path))
    spec = ProcessSpec("fails", ("-m", "fails"), cores=0, environment={"PYTHONPATH": path})
    process = OwnedProcess(spec, "here", NODE_ADDRESS, (), {})
    try:
        assert process.wait(60) == 1
        assert process.reason() == "ended with exit code 1\nthe disk is full"
    finally:
        process.close()


def answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=30):
        return True
    return False
