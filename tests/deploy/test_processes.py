"""Processes with the command lines of the manifests serve together, with local addresses; for `nox -s deploy`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import NAMESPACE, objects, programs
from tests.deploy.test_manifests import SECRET
from tests.server.processes import free_port

pytestmark = pytest.mark.skipif(not os.environ.get("FD_HELM"), reason="takes ten seconds; `nox -s deploy` runs it")
ROLES = ("router", "mixed", "prefill", "decode")
ELSEWHERE = ("--kv-store", "--kv-store-secret-file", "--tokenizer", "--kv-cache-dtype")
"""Settings of the manifests that need Redis, or a model that is not available."""


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    """Start a router and a worker of each role from `pairs.yaml`; yield the router's address."""
    for name in ("router-secret", "transfer-secret", "worker-key"):
        (tmp_path / name).write_text(f"{name}-of-a-test\n")
        (tmp_path / name).chmod(0o440)
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "alice"\nkey = "sk-of-a-test"\n')
    *ports, admin, transfer = (free_port() for _ in range(6))
    here = dict(zip(ROLES, ports, strict=True))
    made, running = programs(objects("pairs")), []
    for role in ROLES:
        changed = {
            "--port": str(here[role]),
            "--admin-port": str(admin),
            "--transfer-port": str(transfer),
            "--router": f"http://localhost:{admin}",
            "--advertise-url": f"http://127.0.0.1:{here[role]}",
            "--drain-delay": "0",
        }
        arguments = []
        for word in made[f"fd-core-{role}"][1]["args"]:
            flag, equals, value = word.replace(SECRET, f"{tmp_path}/").partition("=")
            if flag not in ELSEWHERE:
                arguments.append(f"{flag}={changed.get(flag, value)}" if equals else flag)
        if role != "router":
            arguments[1:2] = ["null", "--backend=null"]
        command = [sys.executable, "-m", "fd_core.cli", *arguments]
        running.append(subprocess.Popen(command, env=os.environ | {"POD_NAMESPACE": NAMESPACE}))
    try:
        yield f"http://127.0.0.1:{here['router']}"
    finally:
        for each in reversed(running):
            each.terminate()
        codes = [each.wait(60) for each in running]
    assert codes == [0] * len(ROLES)


def asked(url: str, body: Any = None, key: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as answer:
        return json.loads(answer.read())


def test_workers_of_every_role_register_and_serve_authorized_clients(router: str) -> None:
    states: dict[str, str] = {}
    until = time.monotonic() + 240
    while set(states.values()) != {"healthy"} or len(states) < 3:
        assert time.monotonic() < until, states
        time.sleep(0.2)
        try:
            states = {each["worker"]["role"]: each["state"] for each in asked(f"{router}/status.json")["workers"]}
        except OSError:
            continue
    assert states.keys() == {"mixed", "prefill", "decode"}
    assert asked(f"{router}/ready") == {"status": "ok", "reason": None}
    prompt = {"model": "null", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    assert asked(f"{router}/v1/completions", prompt, "sk-of-a-test")["usage"]["completion_tokens"] == 4
    with pytest.raises(urllib.error.HTTPError, match="401"):
        asked(f"{router}/v1/completions", prompt)
