"""The route table: every route of the application and of the router's gate has an entry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route as StarletteRoute

from fd_core.config import ServerConfig
from fd_core.http.access.control import ON_EVERY_WORKER, ROUTES, AccessControl, find_route
from fd_core.http.access.keys import ApiKey
from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError
from fd_core.router.gateway.gate import PAGES
from fd_core.server.app import create_app
from tests.server.fakes import FakeClient, byte_tokenizer, chat_template


@pytest.fixture(scope="module")
def app() -> FastAPI:
    async def make() -> FastAPI:
        return create_app(ServerConfig(batch_api=True), FakeClient(), byte_tokenizer(), chat_template())

    return asyncio.run(make())


def _routes(within: Any) -> Iterator[StarletteRoute]:
    for each in within.routes:
        if isinstance(each, StarletteRoute):
            yield each
        else:  # included routes; anything else fails here
            yield from _routes(each.original_router)


def test_every_route_of_the_application_has_an_entry(app: FastAPI) -> None:
    served = list(_routes(app))
    assert len(served) > 30
    for route in served:
        assert set(route.methods or ()) <= set(ROUTES[route.path].allowed), route.path
    methods = {(route.path, each) for route in served for each in route.methods or ()}
    entries = {(path, each) for path, entry in ROUTES.items() for each in entry.methods} - {("/status", "GET")}
    assert entries <= methods, "an entry without a route"


def test_every_page_of_the_router_has_an_entry() -> None:
    assert {ROUTES[path].right for path in PAGES} == {"page", "probe"}


def test_route_without_an_entry_is_rejected(app: FastAPI) -> None:
    forgotten = APIRoute("/v1/forgotten", lambda: {"open": "access"})
    app.router.routes.append(forgotten)
    sent: list[dict[str, object]] = []

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/forgotten", "headers": [], "query_string": b""}
        scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "scheme": "http", "root_path": ""}

        async def receive() -> dict[str, object]:
            return {"type": "http.request"}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        await app(scope, receive, send)  # type: ignore[arg-type]

    try:
        asyncio.run(ask())
    finally:
        app.router.routes.remove(forgotten)
    assert sent[0]["status"] == 404


@pytest.mark.parametrize(
    "path", ["", "/v1", "//v1/completions", "/v1/responses/", "/v1/responses/a/b", "/v1/responses/{response_id}/x"]
)
def test_other_spellings_have_no_entry(path: str) -> None:
    assert find_route(path) is None


@pytest.mark.parametrize(("key", "right"), [(None, True), (False, False), (True, True)])
def test_changes_of_a_server_require_an_admin_key_if_keys_exist(key: bool | None, right: bool) -> None:
    record = RequestRecord(key=None if key is None else ApiKey(digest=b"", name="a", admin=key))
    for path in ON_EVERY_WORKER:
        if right:
            AccessControl.authorize(record, "POST", path)
        else:
            with pytest.raises(ApiError) as refused:
                AccessControl.authorize(record, "POST", path)
            assert (refused.value.status, refused.value.code) == (403, "admin_key_required")
