"""The compose file holds together, its command lines are fdcore's, and its processes serve and are scraped."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import stat
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from fd_core.cli.app import app
from fd_core.cli.settings.settings import merge, merge_route
from tests.examples.conftest import EXAMPLES
from tests.server.processes import free_port, running
from tests.server.redis_server import redis_server

FOLDER = EXAMPLES / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("router", "worker-1", "worker-2")
SCRAPED = [
    target
    for job in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    for group in job["static_configs"]
    for target in group["targets"]
]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make_secrets.sh` writes."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copy(FOLDER / "make_secrets.sh", folder)
    subprocess.run(["sh", str(folder / "make_secrets.sh")], check=True)
    return folder / "secrets"


def arguments(name: str, secrets: Path) -> list[str]:
    """Return the command of `fdcore` in a container, with the local paths of secrets."""
    return [word.replace("/run/secrets/", f"{secrets}/") for word in SERVICES[name]["command"]]


def test_compose_file_is_valid() -> None:
    spec = pytest.importorskip("compose_spec", reason="`nox -s deploy` has it")
    # As Compose does, with the values of .env.
    text = re.sub(r"\$\{SECRETS_GID:[^}]*\}", "1000", (FOLDER / "compose.yaml").read_text())
    assert "${" not in text
    # PyYAML knows merged mappings (<<), which Compose takes too.
    read = spec.PyCompose.from_yaml(json.dumps(yaml.safe_load(text)))
    read.validate()
    assert set(read.service_names()) == SERVICES.keys()


def test_files_named_in_the_compose_file_exist() -> None:
    volumes = {volume.split(":")[0] for each in SERVICES.values() for volume in each.get("volumes", ())}
    assert {each for each in volumes if not each.startswith(".")} == COMPOSE["volumes"].keys()
    for each in volumes:
        assert not each.startswith(".") or (FOLDER / each).exists(), each
    for name, each in SERVICES.items():
        assert SERVICES.keys() >= set(each.get("depends_on", ())), name
    build = SERVICES["router"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
    assert set(SCRAPED) == {f"{name}:8000" for name in OURS}


def test_ports_are_local_and_every_image_has_a_version() -> None:
    ports = [port for each in SERVICES.values() for port in each.get("ports", ())]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    assert all(re.search(r":v?\d", each["image"]) for each in SERVICES.values())


def test_every_secret_is_made_for_one_group_and_used(secrets: Path) -> None:
    used = {secret for each in SERVICES.values() for secret in each.get("secrets", ())}
    assert used == COMPOSE["secrets"].keys() == {each.name for each in secrets.iterdir()}
    for name, where in COMPOSE["secrets"].items():
        file = secrets.parent / where["file"]
        assert file == secrets / name and stat.S_IMODE(file.stat().st_mode) == 0o440
    assert (secrets.parent / ".env").read_text() == f"SECRETS_GID={file.stat().st_gid}\n"
    for name, each in SERVICES.items():
        named = set(re.findall(r"/run/secrets/([\w.-]+)", json.dumps(each)))
        assert named == set(each.get("secrets", ())), name
        assert not named or ":${SECRETS_GID:?" in each["user"], name
    again = subprocess.run(["sh", str(secrets.parent / "make_secrets.sh")], check=False, capture_output=True)
    assert again.returncode != 0


@pytest.mark.parametrize("name", OURS)
def test_every_command_line_is_valid(name: str, secrets: Path) -> None:
    verb, *rest = arguments(name, secrets)
    params = get_command(app).commands[verb].make_context(verb, rest).params  # type: ignore[attr-defined]
    model = params.pop("model", None)
    given = {field: value for field, value in params.items() if value not in (None, [], ())}
    if verb == "route":
        assert merge_route(given, {})
    else:
        assert merge(model, given, {}).server.advertise_url == f"http://{name}:8000"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    [source] = yaml.safe_load((FOLDER / "grafana" / "datasources.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    [provider] = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in SERVICES["grafana"]["volumes"])
    assert (FOLDER / mounted[provider["options"]["path"]] / "fd_core.json").is_file()


@pytest.fixture(scope="module")
def addresses(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run router, workers and Redis without containers; yield where each service listens."""
    logs = tmp_path_factory.mktemp("logs")
    password = (secrets / "redis-password").read_text()
    found = {f"{name}:8000": f"127.0.0.1:{free_port()}" for name in OURS}
    found["router:8081"] = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        redis = redis_server("--requirepass", password, password=password)
        stack.callback(redis.close)
        found["redis:6379"] = f"127.0.0.1:{redis.port}"
        for name in OURS:
            words = [word for word in arguments(name, secrets) if word != "--host=0.0.0.0"]
            for there, here in found.items():
                words = [word.replace(there, here) for word in words]
            words = [
                word.replace("--tokenizer=smollm2", "--tokenizer=bytes").replace(
                    "--admin-host=0.0.0.0", "--admin-port=" + found["router:8081"].split(":")[1]
                )
                for word in words
            ]
            if name != "router":
                words[1:2] = ["null", "--backend=null", "--no-batch-api"]
            stack.enter_context(running(logs / name, *words, "--port", found[f"{name}:8000"].split(":")[1]))
        yield found


def page(address: str, key: str = "", body: Any = None) -> str:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}", data, headers), timeout=10) as answer:
        return str(answer.read().decode())


def test_processes_serve_together_and_every_target_is_scraped(addresses: dict[str, str], secrets: Path) -> None:
    router, until = addresses["router:8000"], time.monotonic() + 120
    states: list[str] = []
    while states != ["healthy", "healthy"]:
        assert time.monotonic() < until, states
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            states = [each["state"] for each in json.loads(page(f"{router}/status.json"))["workers"]]
    asked = {"model": "null", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    answer = json.loads(page(f"{router}/v1/completions", (secrets / "api-key").read_text(), asked))
    assert answer["usage"]["completion_tokens"] == 4
    for target in SCRAPED:
        text = page(f"{addresses[target]}/metrics")
        assert ("fdcore_router_worker_selected_total" if target == "router:8000" else "fdcore_kv_usage_ratio") in text
    for worker in OURS[1:]:
        assert re.search(r"fdcore_kv_store\w*", page(f"{addresses[f'{worker}:8000']}/metrics"))
