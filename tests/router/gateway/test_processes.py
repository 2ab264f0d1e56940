"""Real processes: a router and two servers with the null backend, and OpenAI's own client."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fd_core.ops.polled_timeout import PolledTimeout
from tests.server.processes import free_port, running

pytestmark = pytest.mark.slow

NULL = ("null", "--backend", "null", "--max-model-len", "600", "--num-threads", "1")
TURNS = [{"role": "user", "content": "What is the capital of France?"}]


def value(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def status(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/status.json", timeout=60) as page:
        return json.load(page)


def until(condition: Callable[[], bool], log: Path) -> None:
    limit = PolledTimeout(120)
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert not limit.expired(), log.read_text()
        time.sleep(0.1)


def streamed(client: openai.OpenAI, seed: int, tokens: int = 40) -> str:
    stream = client.chat.completions.create(
        model="null", messages=TURNS, stream=True, seed=seed, max_tokens=tokens, extra_body={"ignore_eos": True}
    )
    return "".join(event.choices[0].delta.content or "" for event in stream if event.choices)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def test_router_with_two_servers(logs: Path) -> None:
    """They register and serve; one is suspended and killed, the other leaves; every counter returns to zero."""
    secret = logs / "secret"
    secret.write_text("a-secret-of-this-cluster\n")
    router, admin, first, second = (free_port() for _ in range(4))
    url = f"http://127.0.0.1:{router}"
    joins = ("--router", f"http://127.0.0.1:{admin}", "--router-secret-file", str(secret))
    with ExitStack() as stack:
        route = ("route", "--port", str(router), "--admin-port", str(admin), "--router-secret-file", str(secret))
        policy = ("--policy", "cache_aware", "--tokenizer", "bytes", "--health-check-interval-secs", "0.3")
        policy += ("--health-check-timeout-secs", "0.5")
        stack.enter_context(running(logs / "route", *route, *policy))
        servers = [
            stack.enter_context(running(logs / name, "serve", *NULL, "--port", str(port), *joins))
            for port, name in ((first, "first"), (second, "second"))
        ]
        until(lambda: value(url, "fdcore_router_worker_healthy") == 2, logs / "route")

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["null"]
        texts = [streamed(client, seed) for seed in range(4)]
        alone = openai.OpenAI(base_url=f"http://127.0.0.1:{first}/v1", api_key="none")
        assert texts == [streamed(alone, seed) for seed in range(4)], "the router changed a text"
        assert value(url, "fdcore_router_hit_blocks_total") == 0, "a prompt below one block cannot hit"

        stream = client.chat.completions.create(
            model="null", messages=TURNS, stream=True, max_tokens=500, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        until(lambda: value(url, "fdcore_router_requests") == 0, logs / "route")
        for port in (first, second):
            until(lambda port=port: value(f"http://127.0.0.1:{port}", "fdcore_requests_running") == 0, logs / "route")

        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="null", messages=TURNS, temperature=9)
        assert streamed(client, 0) == texts[0]
        os.kill(servers[1].pid, signal.SIGSTOP)
        assert [streamed(client, seed) for seed in range(4)] == texts, "requests of a stopped server were lost"
        os.kill(servers[1].pid, signal.SIGCONT)
        until(lambda: value(url, "fdcore_router_worker_healthy") == 2, logs / "route")
        os.killpg(servers[1].pid, signal.SIGKILL)
        assert [streamed(client, seed) for seed in range(4)] == texts, "requests of a killed server were lost"
        servers[0].send_signal(signal.SIGINT)
        assert servers[0].wait(60) in (0, 130)
        with pytest.raises(openai.InternalServerError, match="worker"):
            streamed(client, 0)
        workers = [each["worker"]["url"] for each in status(url)["workers"]]
        assert workers == [f"http://127.0.0.1:{second}"], "the deregistered server is still listed"
        assert status(url)["total"] == {"requests": 0, "waiting": 0, "prefill_tokens": 0}
        assert value(url, "fdcore_router_faults_total") == 0
        shown = (logs / "route").read_text()
        assert "fdcore routes" in shown and "a-secret" not in shown and "France" not in shown


def test_router_with_a_pair(logs: Path) -> None:
    """The prefill worker computes prompts, the decode worker the text; every counter returns to zero."""
    router, first, second = (free_port() for _ in range(3))
    url, alone = f"http://127.0.0.1:{router}", f"http://127.0.0.1:{second}"
    secret = logs / "of-pairs"
    secret.write_text("a-secret-of-these-pairs\n")
    secret.chmod(0o600)
    shares = ("--transfer-secret-file", str(secret))
    (logs / "weights" / "trained").mkdir(parents=True)
    with ExitStack() as stack:
        null = ("serve", *NULL, "--block-size", "4", *shares, "--weights-folder", str(logs / "weights"))
        prefill = stack.enter_context(running(logs / "p", *null, "--role", "prefill", "--port", str(first)))
        stack.enter_context(running(logs / "d", *null, "--role", "decode", "--port", str(second)))
        pair = ("--prefill", f"http://127.0.0.1:{first}", "--decode", alone)
        often = ("--health-check-interval-secs", "0.3", "--health-check-timeout-secs", "2")
        stack.enter_context(running(logs / "r", "route", "--port", str(router), *pair, *often, *shares))
        until(lambda: {each["state"] for each in status(url)["workers"]} == {"healthy"}, logs / "r")

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        text = streamed(client, 1)
        assert status(url)["transfers"] == {"transferred": 1}
        assert text == streamed(openai.OpenAI(base_url=f"{alone}/v1", api_key="none"), 1)
        assert [streamed(client, 1), streamed(client, 1)] == [text, text]
        assert status(url)["transfers"] == {"transferred": 1, "held": 2}
        forged = client.with_options(default_headers={"X-FD-Prefill": "127.0.0.1:9;00"})
        assert streamed(forged, 1) == text
        changed: Any = client.post("/update_weights", body={"model_path": "trained"}, cast_to=object)
        assert changed["weight_version"] == "1" and streamed(client, 1) == text
        assert status(url)["transfers"] == {"transferred": 2, "held": 3}
        until(lambda: value(url, "fdcore_router_requests") == 0, logs / "r")
        roles = status(url)["roles"]
        assert (roles["prefill"]["served"], roles["prefill"]["unused"], roles["decode"]["served"]) == (2, 3, 5)

        os.killpg(prefill.pid, signal.SIGKILL)
        until(lambda: {each["state"] for each in status(url)["workers"]} == {"healthy", "unhealthy"}, logs / "r")
        assert streamed(client, 1) == text and status(url)["not_ready"] is None
        assert status(url)["modes"] == {"mixed": 0, "pd": 5, "alone": 1}
        assert "decode workers compute prompts themselves" in (logs / "r").read_text()
        assert status(url)["total"] == {"requests": 0, "waiting": 0, "prefill_tokens": 0}
        assert value(url, "fdcore_router_faults_total") == 0 and "a-secret" not in (logs / "r").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no workers are configured"),
        (("--worker", "ftp://x"), 2, "--worker"),
        (("--worker", "http://x:1", "--prefill", "http://x:2"), 2, "a prefill worker needs a decode worker"),
        (("--decode", "http://x:2"), 2, "a decode worker needs a prefill worker"),
        (("--prefill", "http://x:1", "--decode", "ftp://x"), 2, "--decode"),
        (("--prefill", "http://x:1", "--decode", "http://x:2", "--prefill-policy", "none"), 4, "none"),
        (("--worker", "http://x:1", "--tokenizer", "no-such-model"), 3, "no such model"),
        (("--worker", "http://x:1", "--policy", "no_such_policy"), 4, "no_such_policy"),
        (("--worker", "http://x:1", "--port", "70000"), 2, "--port"),
        (("--worker", "http://x:1", "--health-check-interval-secs", "0"), 2, "--health-check-interval-secs"),
        (("--router-secret-file", "/nowhere"), 2, "--router-secret-file"),
        (("--config", "/nowhere.toml"), 2, "--config"),
    ],
)
def test_invalid_settings_are_one_line_errors(arguments: tuple[str, ...], code: int, message: str) -> None:
    from typer.testing import CliRunner

    from fd_core.cli.app import app

    result = CliRunner().invoke(app, ["route", *arguments])
    assert result.exit_code == code, result.output
    assert message in result.output and result.output.count("\n") == 1
