"""Workers register and deregister themselves if they have the secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.server.serve import registration_of
from tests.router.gateway.fakes import FakeWorker, Live, events, eventually, in_loop, routed

SECRET = "a secret of the cluster"


async def post_admin(live: Live, what: str, body: Any, secret: str = SECRET) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {secret}"}
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with live.client.post(f"{live.admin}/{what}", data=data, headers=headers) as answer:
        return answer.status, json.loads(await answer.read())


@in_loop
async def test_worker_registers_serves_and_leaves() -> None:
    async with FakeWorker() as worker, routed(router_secret=SECRET) as live:
        assert (await live.post())[0] == 503
        status, answer = await post_admin(live, "register", {"url": worker.url + "/", "instance": worker.instance})
        assert (status, answer) == (200, {"worker": worker.url, "incarnation": 1})
        await live.healthy(1)
        assert (await live.post())[0] == 200
        again = await post_admin(live, "register", {"url": worker.url, "role": "mixed", "instance": worker.instance})
        assert again[1]["incarnation"] == 1
        worker.goes_on.clear()
        running = asyncio.create_task(live.post())
        await eventually(lambda: worker.running == 1)
        assert (await post_admin(live, "deregister", {"url": worker.url}))[0] == 200
        assert (await live.post())[0] == 503
        worker.goes_on.set()
        assert events((await running)[2])[-1] == "[DONE]", "its running request was not finished"
        await eventually(lambda: live.router.workers() == ())
        assert (await post_admin(live, "deregister", {"url": worker.url}))[0] == 404


@in_loop
async def test_registration_checks_only_the_new_worker() -> None:
    """Checking every worker for each of a thousand registrations would be a million checks."""
    async with (
        FakeWorker("one") as one,
        FakeWorker("two") as two,
        FakeWorker("three") as three,
        routed(router_secret=SECRET, router={"health_check_interval_secs": 60.0}) as live,
    ):
        for count, worker in enumerate((one, two, three), 1):
            await post_admin(live, "register", {"url": worker.url, "instance": worker.instance})
            await live.healthy(count)
        assert [worker.checks for worker in (one, two, three)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("what", "body", "secret", "status"),
    [
        ("register", {"url": "http://127.0.0.1:1"}, "wrong", 401),
        ("register", {"url": "http://127.0.0.1:1"}, "", 401),
        ("deregister", {"url": "http://127.0.0.1:1"}, "wrong", 401),
        ("register", {"url": "file:///etc/passwd"}, SECRET, 400),
        ("register", {"url": "http://user:word@host"}, SECRET, 400),
        ("register", {"url": 1}, SECRET, 400),
        ("register", b"{", SECRET, 400),
        ("register", {"url": "http://127.0.0.1:1", "role": "both"}, SECRET, 400),
        ("register", b"x" * 20_000, SECRET, 413),
        ("health", {}, SECRET, 404),
    ],
)
@in_loop
async def test_unauthorized_registration_is_rejected(what: str, body: Any, secret: str, status: int) -> None:
    async with routed(router_secret=SECRET) as live:
        got, answer = await post_admin(live, what, body, secret)
        assert got == status and answer["error"]["message"]
        assert live.router.workers() == ()


@in_loop
async def test_pair_workers_need_a_transfer_secret_to_register() -> None:
    async with FakeWorker("p", role="prefill") as p, FakeWorker("d", role="decode") as d:
        async with routed(router_secret=SECRET) as live:
            for worker in (p, d):
                body = {"url": worker.url, "role": worker.role, "instance": worker.instance}
                assert (await post_admin(live, "register", body))[0] == 200
            await live.healthy(2)
            assert (await live.post())[0] == 200 and d.peers == ["127.0.0.1:7001"]
        async with routed(router_secret=SECRET, ticket_key=None) as live:
            status, answer = await post_admin(live, "register", {"url": p.url, "role": "prefill"})
            assert status == 400 and "--transfer-secret-file" in answer["error"]["message"]


@in_loop
async def test_server_stays_registered_and_deregisters() -> None:
    async with FakeWorker() as worker, routed(router_secret=SECRET) as live:
        config = ServerConfig(router=live.admin, router_secret=SECRET)
        registration = registration_of(config, worker.url, lambda: worker.instance, "mixed")
        assert registration is not None
        registration.start()
        await live.healthy(1)
        await registration.deregister()
        await eventually(lambda: live.router.workers() == ())
        await registration.deregister()


@in_loop
async def test_restarted_engine_registers_as_a_new_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_core.server.serve._REREGISTER_SECONDS", 0.02)
    async with FakeWorker(role="decode") as worker, routed(router_secret=SECRET) as live:
        config = ServerConfig(router=live.admin, router_secret=SECRET)
        registration = registration_of(config, worker.url, lambda: worker.instance, "decode")
        assert registration is not None
        registration.start()
        await live.healthy(1)
        (first,) = live.router.workers()
        await asyncio.sleep(0.1)
        assert live.router.workers() == (first,) and first.role == "decode"
        worker.instance = "w-2"
        await eventually(lambda: live.router.workers() != (first,))
        await live.healthy(1)
        await registration.deregister()


@in_loop
async def test_unreachable_router_does_not_disturb_a_server(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(router="http://127.0.0.1:9", router_secret=SECRET)
    registration = registration_of(config, "http://127.0.0.1:1", lambda: "i")
    assert registration is not None
    registration.start()
    await asyncio.sleep(0.1)
    await registration.deregister()
    assert "did not register this server" in caplog.text and SECRET not in caplog.text


@contextlib.asynccontextmanager
async def two_routers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, list[str], set[str]]]:
    """Yield an address that resolves to two routers, the requests each received, and those that reject the secret."""
    posted: list[str] = []
    refusing: set[str] = set()

    async def answer(request: web.BaseRequest) -> web.Response:
        at = request.transport.get_extra_info("sockname")[0]
        posted.append(f"{at}{request.path} {request.host.partition(':')[0]}")
        return web.Response(status=401 if at in refusing else 200)

    real, server = socket.getaddrinfo, web.Server(answer)
    loop = asyncio.get_running_loop()
    first = await loop.create_server(server, "127.0.0.1", 0)
    port = first.sockets[0].getsockname()[1]
    second = await loop.create_server(server, "127.0.0.2", port)

    def lookup(host: str, *rest: Any, **options: Any) -> Any:
        if host != "routers.test":
            return real(host, *rest, **options)
        return [real(each, *rest, **options)[0] for each in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    try:
        yield f"http://routers.test:{port}", posted, refusing
    finally:
        first.close()
        second.close()
        await server.shutdown()


@in_loop
async def test_server_registers_with_every_resolved_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_routers(monkeypatch) as (address, posted, _):
        registration = registration_of(ServerConfig(router=address, router_secret=SECRET), "http://w:1", lambda: "i")
        assert registration is not None
        registration.start()
        await eventually(lambda: len(posted) == 2)
        await registration.deregister()
    both = {"127.0.0.1/{} routers.test", "127.0.0.2/{} routers.test"}
    assert set(posted[:2]) == {each.format("register") for each in both}
    assert set(posted[2:]) == {each.format("deregister") for each in both}


@in_loop
async def test_router_that_rejects_the_secret_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_routers(monkeypatch) as (address, _, refusing):
        refusing.add("127.0.0.2")
        registration = registration_of(ServerConfig(router=address, router_secret=SECRET), "http://w:1", lambda: "i")
        assert registration is not None
        registration.start()
        await eventually(lambda: "127.0.0.2" in caplog.text)
        await registration.deregister()
    assert "127.0.0.1" not in caplog.text and "HTTP status 401" in caplog.text


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"router": "127.0.0.1:8081", "router_secret": SECRET}, "--router"),
        ({"router": "http://127.0.0.1:8081"}, "--router-secret-file"),
        ({"router": "http://127.0.0.1:8081", "router_secret": SECRET, "host": "0.0.0.0"}, "--advertise-url"),
    ],
)
def test_invalid_registration_settings(settings: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registration_of(ServerConfig(**settings), "http://localhost:1", lambda: "i")
    assert caught.value.field == field


def test_server_without_a_router_registers_nowhere() -> None:
    assert registration_of(ServerConfig(), "http://127.0.0.1:1", lambda: "i") is None


@in_loop
async def test_too_deeply_nested_body_is_rejected() -> None:
    async with routed(router_secret=SECRET) as live:
        status, answer = await post_admin(live, "register", b'{"url": "http://w:1", "a": ' + b"[" * 3000)
        assert (status, answer["error"]["code"]) == (400, "invalid_body")
