"""Foreign host names and origins are rejected; allowed ones get the complete response."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.errors import ConfigError
from fd_core.http.errors import ApiError
from fd_core.http.hosts import HostRules, Visit

from .endpoints import COMPLETIONS, JSON, KINDS, Hostile, endpoint

PAGE = "https://chat.example.org"
OWN = (
    "localhost",
    "localhost:8000",
    "LOCALHOST",
    "localhost.",
    "app.localhost",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.8.9.1",
)
OWN_SIX = ("[::1]", "[::1]:8000")
FOREIGN = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "203.0.113.9",
    "[::2]",
    "localhost@evil.example",
)
STRANGE = ("", ":8000", "a b", "[::1", "localhost:80:80", "localhost/evil.example", "localhost\x7f")

both = pytest.mark.parametrize("kind", KINDS)


def asks(host: str | None, origin: str | None = None, address: str = "127.0.0.1", **more: str) -> Visit:
    return Visit([] if host is None else [host], address, origin, **more)


@pytest.mark.parametrize("host", [*OWN, *OWN_SIX, None])
def test_loopback_names_are_served(host: str | None) -> None:
    assert HostRules("127.0.0.1", (), ()).check(asks(host)) == {}
    assert HostRules("0.0.0.0", ("api.example.org",), ()).check(asks(host)) == {}


@pytest.mark.parametrize("host", [*FOREIGN, *STRANGE])
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_loopback_server_rejects_foreign_hosts(host: str, bound: str) -> None:
    with pytest.raises(ApiError, match="--allowed-hosts") as caught:
        HostRules(bound, (), ()).check(asks(host))
    assert (caught.value.status, caught.value.code) == (421, "foreign_host")


@pytest.mark.parametrize("host", [*FOREIGN, *STRANGE])
def test_server_on_other_addresses_accepts_all_hosts_by_default(host: str) -> None:
    HostRules("0.0.0.0", (), ()).check(asks(host))
    HostRules("127.0.0.1", ("*",), ()).check(asks(host))
    with pytest.raises(ApiError):
        HostRules("0.0.0.0", ("api.example.org",), ()).check(asks(host))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("api.example.org", True),
        ("API.example.org:443", True),
        ("a.pods.example.org", True),
        ("pods.example.org", False),
        ("example.org", False),
        ("10.0.0.5", True),
        ("10.0.0.5:8000", True),
        ("10.0.0.6", False),
    ],
)
def test_allowed_hosts_and_the_local_address_are_served(host: str, allowed: bool) -> None:
    rules = HostRules("0.0.0.0", ("api.example.org", "*.pods.example.org"), ())
    visit = asks(host, address="10.0.0.5")
    if allowed:
        rules.check(visit)
        return
    with pytest.raises(ApiError):
        rules.check(visit)


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://localhost", "localhost", True),
        ("https://localhost:443", "localhost", True),
        ("http://localhost", "localhost:80", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:8001", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("file://", "localhost:8000", False),
        ("http://localhost:bad", "localhost:8000", False),
        ("http://localhost:8000.evil.example", "localhost:8000", False),
        ("http://localhost:8000@evil.example", "localhost:8000", False),
        ("", "localhost:8000", False),
    ],
)
def test_same_origin_is_distinguished_from_foreign_origins(origin: str, host: str, same: bool) -> None:
    rules = HostRules("127.0.0.1", (), ())
    if same:
        assert rules.check(asks(host, origin)) == {}
        return
    with pytest.raises(ApiError, match="--allowed-origins") as caught:
        rules.check(asks(host, origin))
    assert (caught.value.status, caught.value.code) == (403, "foreign_origin")


@pytest.mark.parametrize("given", ["", "http://example.org", "example.org:80", "exa mple.org", "*.*", "a/b"])
def test_invalid_allowed_hosts_are_rejected_at_startup(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HostRules("127.0.0.1", (given,), ())
    assert caught.value.field == "--allowed-hosts"


@pytest.mark.parametrize("given", ["", "example.org", "https://", "https://example.org/path", "https://a b"])
def test_invalid_allowed_origins_are_rejected_at_startup(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HostRules("127.0.0.1", (), (given,))
    assert caught.value.field == "--allowed-origins"


def test_invalid_hosts_are_rejected_before_the_model_is_resolved() -> None:
    result = CliRunner().invoke(app, ["serve", "no-such-model", "--allowed-origins", "example.org"])
    assert result.exit_code == 2 and "--allowed-origins" in result.output and result.output.count("\n") == 1


@both
def test_dns_rebinding_is_rejected(kind: str) -> None:
    with endpoint(kind) as opened:
        for path in ("/health", "/metrics", "/", "/status.json", "/v1/models"):
            status, _, body = opened.get(path, host="evil.example")
            assert (status, json.loads(body)["error"]["code"]) == (421, "foreign_host"), path
            assert opened.get(path, host="127.0.0.1:1")[0] == 200, path
        with opened.connect() as connection:
            connection.head("GET http://evil.example/health")
            assert connection.error() == (421, "foreign_host")
        with opened.connect() as connection:
            assert connection.head("GET http://localhost/health", host="evil.example").answer()[0] == 200
        with opened.connect() as connection:
            connection.head("GET /health", "Host: evil.example")
            assert connection.answer()[0] == 400, "two hosts"
        with opened.connect() as connection:
            assert connection.send("GET /health HTTP/1.0\r\n\r\n").answer()[0] == 200


@both
def test_foreign_origin_is_rejected_before_any_work(kind: str) -> None:
    with endpoint(kind) as opened, opened.connect() as connection:
        connection.post({"prompt": "a"}, COMPLETIONS, f"Origin: {PAGE}")
        assert connection.error() == (403, "foreign_origin")
        preflight = ("Access-Control-Request-Method: POST", f"Origin: {PAGE}")
        status, headers, _ = connection.head(f"OPTIONS {COMPLETIONS}", *preflight).answer()
        assert status == 403 and "access-control-allow-origin" not in headers
        assert opened.requests() == 0


@both
@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_allowed_origin_gets_cors_headers(kind: str, allowed: str) -> None:
    with endpoint(kind, allowed_origins=(allowed,), api_keys=("k",)) as opened, opened.connect() as connection:
        preflight = (
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization,content-type",
        )
        status, headers, _ = connection.head(f"OPTIONS {COMPLETIONS}", f"Origin: {PAGE}", *preflight).answer()
        assert status == 204 and headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in headers["access-control-allow-methods"]
        for key, wanted in (("k", 200), ("wrong", 401)):
            connection.post({"prompt": "a"}, COMPLETIONS, f"Origin: {PAGE}", f"Authorization: Bearer {key}")
            status, headers, _ = connection.answer()
            assert (status, headers["access-control-allow-origin"], headers["vary"]) == (wanted, PAGE, "Origin")
            assert "X-Request-Id" in headers["access-control-expose-headers"]
        status, headers, _ = connection.head("GET /v1/models", "Authorization: Bearer k").answer()
        assert status == 200 and "access-control-allow-origin" not in headers


@both
def test_stream_to_an_allowed_origin_has_cors_headers(kind: str) -> None:
    with endpoint(kind, allowed_origins=(PAGE,)) as opened, opened.connect() as connection:
        if kind == "router":
            opened.inner.usual = "stream"
        connection.post({"prompt": "a", "stream": True}, COMPLETIONS, f"Origin: {PAGE}")
        status, headers, body = connection.answer()
        assert (status, headers["access-control-allow-origin"]) == (200, PAGE) and b"[DONE]" in body


def test_admin_port_checks_hosts() -> None:
    with endpoint("router") as opened:
        port = int(opened.admin.rpartition(":")[2])
        with Hostile(port) as connection:
            connection.head("POST /register", JSON, "Content-Length: 2", host="evil.example").send("{}")
            assert connection.error() == (421, "foreign_host")
        with Hostile(port) as connection:
            connection.head("POST /register", JSON, "Content-Length: 2").send("{}")
            assert connection.error() == (401, "invalid_secret")
