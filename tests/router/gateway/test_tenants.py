"""Two tenants at a server and at a router with two workers: equal outcomes, and full isolation."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from fd_core.http.access.control import ROUTES
from fd_core.http.access.keys import ApiKey
from fd_core.http.access.record import TENANT_HEADER, Tenant, sign_tenant
from tests.router.gateway.fakes import gateway
from tests.server.fakes import LiveServer, key_file, live
from tests.server.stream.test_disconnect import eventually

KEYS = ({"name": "alice"}, {"name": "bob"}, {"name": "root", "admin": True})
ABORT = "/v1/abort_requests"
RESPONSES = "/v1/responses"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class Service:
    """A base address for clients, and the servers that it reaches."""

    def __init__(self, url: str, servers: list[LiveServer]) -> None:
        self.port = int(url.rpartition(":")[2])
        self.servers = servers

    def ask(self, key: str | None, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        if key is not None:
            named["X-Api-Key"] = key
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), named)
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("Content-Type", "")
            return answer.status, json.loads(data) if data and kind.startswith("application/json") else None
        finally:
            connection.close()

    def hold(self, held: bool) -> None:
        for each in self.servers:
            each.client.held = held

    @property
    def running(self) -> int:
        return sum(each.call(partial(len, each.client.live)) for each in self.servers)

    def begin(self, key: str, name: str) -> threading.Thread:
        """Send a request that runs until it is aborted."""
        wanted = self.running + 1
        body = {"prompt": "a", "max_tokens": 4}
        thread = threading.Thread(
            target=lambda: self.ask(key, "POST", "/v1/completions", body, X_Request_Id=name), daemon=True
        )
        thread.start()
        eventually(lambda: self.running == wanted)
        return thread


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    folder = tmp_path_factory.mktemp("tenants")
    file = key_file(folder, *KEYS)
    with ExitStack() as stack:
        settings: dict[str, Any] = {"response_store": 100, "batch_api": True}

        def serve(name: str, **keys: Any) -> LiveServer:
            return stack.enter_context(live(batch_store=str(folder / name), **settings, **keys))

        direct = serve("direct", api_key_file=file)
        workers = [serve(name, api_keys=("worker",)) for name in ("one", "two")]
        yield Service(direct.url, [direct]), Service(stack.enter_context(gateway(workers, file)), workers)


def hostile_responses(service: Service) -> list[Any]:
    """Two tenants use the same ids for their stored responses."""
    seen: list[Any] = []

    def respond(key: str, name: str, **fields: Any) -> int:
        body = {"input": f"of {key}", "max_output_tokens": 4, **fields}
        return service.ask(key, "POST", RESPONSES, body, X_Request_Id=name)[0]

    def look(key: str, name: str, method: str = "GET") -> int:
        return service.ask(key, method, f"{RESPONSES}/{name}")[0]

    seen += [respond("alice", "r1"), look("alice", "resp_r1"), look("bob", "resp_r1"), look("root", "resp_r1")]
    seen += [look("bob", "resp_r1", "DELETE"), look("alice", "resp_r1")]
    seen += [respond("bob", "r2", previous_response_id="resp_r1"), respond("bob", "r2", previous_response_id="resp_no")]
    seen += [respond("alice", "r2", previous_response_id="resp_r1")]
    seen += [respond("bob", "r1"), look("bob", "resp_r1", "DELETE"), look("alice", "resp_r1"), look("bob", "resp_r1")]
    seen += [look("bob", "resp_none"), look("bob", "resp_r1%2F..%2Fresp_r1"), look("bob", "%2e%2e/models")]
    seen += [look("alice", "resp_r1", "DELETE"), look("alice", "resp_r1")]
    return seen


def hostile_aborts(service: Service) -> list[Any]:
    """Two tenants use the same ids, ids that look like response ids, and ids of each other."""
    seen: list[Any] = []

    def abort(key: str, *ids: str) -> None:
        body = {"req_ids": list(ids)} if ids else {"abort_all": True}
        status, answer = service.ask(key, "POST", ABORT, body)
        seen.append((key, ids, status, sorted(answer["aborted"]), sorted(answer["not_found"])))

    service.hold(True)
    threads = [service.begin(key, name) for key, name in (("alice", "a"), ("bob", "same"), ("alice", "same"))]
    threads += [service.begin("bob", name) for name in ("cmpl-a", "chatcmpl-same", "cmpl-cmpl-a")]
    for ids in (("a",), ("none",), ("cmpl-cmpl-a", "chatcmpl-a", "resp_a"), ("chatcmpl-same",)):
        abort("bob", *ids)
        seen.append(service.running)
    abort("bob")
    seen.append(service.running)
    abort("alice", "cmpl-same", "same", "none")
    abort("bob", "a", "cmpl-a")
    seen.append(service.running)
    threads.append(service.begin("bob", "late"))
    abort("alice")
    seen.append(service.running)
    abort("root")
    seen.append(service.running)
    service.hold(False)
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    return seen


def test_stored_responses_are_private_to_their_tenant(services: tuple[Service, Service]) -> None:
    direct, routed = map(hostile_responses, services)
    assert direct == routed
    assert direct == [200, 200, 404, 404, 404, 200, 404, 404, 200, 200, 200, 200, 404, 404, 404, 404, 200, 404]


def test_tenant_aborts_only_its_own_requests(services: tuple[Service, Service]) -> None:
    direct, routed = map(hostile_aborts, services)
    assert direct == routed
    assert direct[:3] == [("bob", ("a",), 200, [], ["a"]), 6, ("bob", ("none",), 200, [], ["none"])]
    assert direct[-1] == 0 and 2 in direct


def test_tenants_have_separate_prefix_salts(services: tuple[Service, Service]) -> None:
    for service in services:
        for each in service.servers:
            each.client.specs.clear()
        for key in ("alice", "bob", "alice"):
            assert service.ask(key, "POST", "/v1/completions", {"prompt": "a secret", "max_tokens": 1})[0] == 200
        assert len({spec.cache_salt for each in service.servers for spec in each.client.specs}) == 2


def kind_of(status: int) -> int:
    return status if status in (401, 403) else status // 100


OLLAMA = {path for path in ROUTES if path.startswith("/api/")}
ABSENT = {
    "/load",
    "/openapi.json",
    "/docs",
    "/history.json",
    "/v1/requests",
    "/kv_events",
    "/status",
    "/v1/control",
    "/is_paused",
    "/is_sleeping",
} | OLLAMA
"""Routes served by only one of the two; batches and files are the server's as well."""


@pytest.mark.parametrize("key", [None, "wrong", "worker", "alice", "root"])
def test_every_route_grants_equal_access_to_each_key(services: tuple[Service, Service], key: str | None) -> None:
    direct, routed = services
    for template, entry in ROUTES.items():
        path = template.replace("{model:path}", "fake").replace("{response_id}", "resp_x")
        for method in ("GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD"):
            body = CHAT if method == "POST" else None
            one, other = (kind_of(each.ask(key, method, path, body)[0]) for each in (direct, routed))
            if template in ABSENT or "files" in path or "batches" in path:
                if key in (None, "wrong", "worker") and entry.right == "key":
                    assert one == other, (method, path)
                continue
            if entry.right == "admin" and method == "POST":  # also for root: the router's key is no admin's there
                assert other == (401 if key in (None, "wrong", "worker") else 403)
            if entry.right != "admin" or key != "root":
                assert one == other, (method, path, one, other)


def test_encoded_path_reaches_no_other_route(services: tuple[Service, Service]) -> None:
    for path in (
        "/v1%2Fload_lora_adapter",
        "/v1/./load_lora_adapter",
        "/v1/x/../load_lora_adapter",
        "//v1/load_lora_adapter",
    ):
        for service in services:
            assert service.ask("alice", "POST", path, {"lora_name": "x", "lora_path": "x"})[0] in (403, 404), path


def test_client_cannot_choose_its_tenant(services: tuple[Service, Service]) -> None:
    direct, routed = services
    bob = Tenant.of(ApiKey(digest=b"", name="bob"))
    body = {"input": "mine", "max_output_tokens": 4}
    assert routed.ask("bob", "POST", RESPONSES, body, X_Request_Id="forged")[0] == 200
    path = f"{RESPONSES}/resp_forged"
    for key in ("alice", "worker"):
        secret = ApiKey.of(key).digest
        header = {TENANT_HEADER: sign_tenant(secret, bob, "GET", path, "id-1"), "X_Request_Id": "id-1"}
        assert routed.ask("alice", "GET", path, **header)[0] == 404
        assert direct.ask("alice", "GET", path, **header)[0] == (404 if key == "alice" else 403)
    assert routed.ask("bob", "GET", path)[0] == 200
