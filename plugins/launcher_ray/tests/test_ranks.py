"""Ranks that Ray places: they exchange over TCP, and one that is killed costs no token."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from fd_core.launching.contract import ProcessSpec
from fd_core.launching.spawn import SpawnLauncher
from needs import needs_ray

SERVE = ("serve", "null", "--backend", "null", "--host", "127.0.0.1", "--port", "0", "--num-threads", "1")
OWN = uuid.uuid4().hex
"""Marks ranks of this test among others on the machine."""
RANKS = ("-tp", "2", "--distributed-executor-backend", "ray", "--rank-transport", "gloo")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks() -> dict[int, int]:
    """Return the process ids of the ranks of this test, and of the Ray node that each is on.

    A node's own process has its workers for children, and each of them the rank that it was to start.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, variables = (name.read_bytes().split(b"\0") for name in (path, path.with_name("environ")))
        except OSError:
            continue
        if b"fd_core.engine.ranks.child" in words and f"FD_OWN_RANKS={OWN}".encode() in variables:
            pid = int(path.parent.name)
            found[pid] = parent(parent(pid))
    return found


def rank_1() -> int | None:
    """Return the process id of a rank of this test."""
    return next(iter(ranks()), None)


def texts(url: str) -> list[Any]:
    body = {"model": "null", "prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "seed": 7}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=200) as answer:
        return [json.load(answer)["choices"][0]["text"]]


@needs_ray
def test_ranks_on_several_nodes_match_one_process(cluster: Any) -> None:
    launcher = SpawnLauncher()
    answers = []
    try:
        # Three ranks in addition to the server's own, and two processors on each node.
        for flags in ((), ("-tp", "4", *RANKS[2:])):
            (server,) = launcher.start(
                [ProcessSpec("server", ("-m", "fd_core.cli", *SERVE, *flags), {"FD_OWN_RANKS": OWN}, cores=0)]
            )
            while (url := server.announced()) is None:
                assert server.exit_code() is None, server.reason()
                time.sleep(0.1)
            answers.append(texts(url))
            nodes = set(ranks().values())
            server.terminate()
            server.wait(30.0)
        assert answers[0] == answers[1]
        assert len(nodes) == 2, nodes
    finally:
        launcher.close()


@needs_ray
def test_killed_rank_that_ray_placed_costs_no_token(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = SpawnLauncher()
    try:
        (server,) = launcher.start(
            [ProcessSpec("server", ("-m", "fd_core.cli", *SERVE, *RANKS), {"FD_OWN_RANKS": OWN}, cores=0)]
        )
        while (url := server.announced()) is None:
            assert server.exit_code() is None, server.reason()
            time.sleep(0.1)
        expected = texts(url)
        answers: list[list[Any]] = []
        asking = threading.Thread(target=lambda: answers.append(texts(url)))
        asking.start()
        time.sleep(0.2)
        killed = rank_1()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        asking.join()
        assert answers == [expected] and texts(url) == expected
        assert rank_1() not in (None, killed)
        assert "rank 1 was ended by SIGKILL" in capfd.readouterr().err
    finally:
        launcher.close()
