"""TLS: bad settings fail at startup, certificates reload without a restart, and old protocols are rejected."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.http.connections import connections
from fd_core.http.connections.tls import ServingTls, client_context
from fd_core.router.config import GatewayConfig
from tests.router.gateway.fakes import CHAT, FakeWorker, eventually, in_loop, routed
from tests.server.fakes import live

from .endpoints import KINDS, Hostile, endpoint, until

CA = trustme.CA()
both = pytest.mark.parametrize("kind", KINDS)


def files(folder: Path, *, ca: trustme.CA = CA, name: str = "localhost", days: int = 30) -> dict[str, str]:
    """Write a certificate, its key and the CA; return the settings that name certificate and key."""
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    begins = expires - datetime.timedelta(days=90)
    made = ca.issue_cert(name, "127.0.0.1", not_after=expires, not_before=begins)
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def trusting(ca: trustme.CA = CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


@both
def test_clients_are_served_over_tls(kind: str, tmp_path: Path) -> None:
    with endpoint(kind, **files(tmp_path)) as opened, opened.connect(tls=trusting()) as connection:
        for _ in range(2):
            assert connection.post({"prompt": "a"}).answer()[0] == 200
        with opened.connect() as plain, pytest.raises((AssertionError, OSError)):
            plain.head("GET /health").answer()
        connection.head("GET /metrics")
        assert b"tls_handshakes_failed_total 1.0" in connection.answer()[2]


@both
def test_tls_before_1_2_is_rejected(kind: str, tmp_path: Path) -> None:
    old = trusting()
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with endpoint(kind, **files(tmp_path)) as opened, pytest.raises((ssl.SSLError, OSError)):
        opened.connect(tls=old)


@both
def test_missing_tls_handshake_times_out(kind: str, tmp_path: Path) -> None:
    with endpoint(kind, timeout_headers=0.4, **files(tmp_path)) as opened, opened.connect() as connection:
        assert connection.closed_within(3) > 0.3


@both
def test_pending_handshakes_count_as_connections(kind: str, tmp_path: Path) -> None:
    with endpoint(kind, limit_concurrency=2, **files(tmp_path)) as opened:
        silent = [opened.connect() for _ in range(2)]
        with opened.connect(tls=trusting()) as other:
            assert other.error() == (503, "too_many_connections")
        for each in silent:
            each.socket.close()


@both
def test_client_certificates_can_be_required(kind: str, tmp_path: Path) -> None:
    settings = {**files(tmp_path), "ssl_ca_certs": str(tmp_path / "ca.pem")}
    known = trusting()
    CA.issue_cert("client").configure_cert(known)
    with endpoint(kind, **settings) as opened:
        with opened.connect(tls=known) as connection:
            assert connection.head("GET /health").answer()[0] == 200
        with pytest.raises((AssertionError, OSError)), opened.connect(tls=trusting()) as unknown:
            unknown.head("GET /health").answer()


@both
def test_changed_certificate_is_reloaded_without_closing_connections(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_REFRESH_SECONDS", 0.05)
    other = trustme.CA()
    with endpoint(kind, **files(tmp_path)) as opened, opened.connect(tls=trusting()) as running:
        assert running.head("GET /health").answer()[0] == 200
        (tmp_path / "key.pem").write_text("torn")
        time.sleep(0.2)
        with opened.connect(tls=trusting()) as connection:
            assert connection.head("GET /health").answer()[0] == 200, "loaded a half-written change"
        files(tmp_path, ca=other)
        until(lambda: _serves(opened.port, trusting(other)))
        assert not _serves(opened.port, trusting())
        assert running.head("GET /health").answer()[0] == 200


def _serves(port: int, tls: ssl.SSLContext) -> bool:
    try:
        with Hostile(port, tls) as connection:
            return connection.head("GET /health").answer()[0] == 200
    except ssl.SSLError:
        return False


def test_slow_tls_reader_times_out(tmp_path: Path) -> None:
    with (
        endpoint("server", timeout_write=0.5, **files(tmp_path)) as opened,
        opened.connect(tls=trusting(), window=4096) as connection,
    ):
        opened.inner.reply, opened.inner.pause_after = (lambda _: b"a" * 390), 380
        connection.post({"prompt": "a", "max_tokens": 390, "stream": True, "n": 100, "logprobs": 20})
        until(lambda: opened.requests() > 0)
        until(lambda: opened.requests() == 0, 20)


@pytest.mark.parametrize(
    ("damage", "field", "message"),
    [
        ({"ssl_certfile": "/nowhere"}, "--ssl-certfile", "cannot read"),
        ({"ssl_keyfile": "/nowhere"}, "--ssl-keyfile", "cannot read"),
        ({"ssl_certfile": "KEY"}, "--ssl-certfile", "no certificate"),
        ({"ssl_keyfile": "CERT"}, "--ssl-keyfile", "no private key"),
        ({"ssl_keyfile": None}, "--ssl-certfile", "no private key"),
        ({"ssl_keyfile": "OTHER"}, "--ssl-keyfile", "does not match the certificate"),
        ({"ssl_ca_certs": "KEY"}, "--ssl-ca-certs", "no certificates"),
        ({"ssl_certfile": None}, "--ssl-keyfile", "--ssl-certfile"),
    ],
)
def test_unusable_tls_settings_fail_at_startup(
    tmp_path: Path, damage: dict[str, str | None], field: str, message: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    files(other)
    settings = files(tmp_path)
    paths = {"KEY": settings["ssl_keyfile"], "CERT": settings["ssl_certfile"], "OTHER": str(other / "key.pem")}
    changed = {name: paths.get(value, value) if value else None for name, value in damage.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        ServingTls.of(ServerConfig(**{**settings, **changed}))
    assert caught.value.field == field and caught.value.exit_code == 2


def test_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    settings = files(tmp_path)
    key = load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    secret = BestAvailableEncryption(b"open sesame")
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    with pytest.raises(ConfigError, match="--ssl-keyfile-password"):
        ServingTls.of(ServerConfig(**settings))
    with pytest.raises(ConfigError):
        ServingTls.of(ServerConfig(**settings, ssl_keyfile_password="wrong"))
    assert ServingTls.of(ServerConfig(**settings, ssl_keyfile_password="open sesame"))


@pytest.mark.parametrize(("days", "message"), [(-1, "expired on"), (3, "expires on"), (30, None)])
def test_expiring_certificate_is_logged_as_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, message: str | None
) -> None:
    with caplog.at_level(logging.WARNING):
        ServingTls.of(ServerConfig(**files(tmp_path, days=days)))
    assert [message in record.getMessage() for record in caplog.records] == ([] if message is None else [True])


@in_loop
async def test_router_trusts_the_ca_of_its_workers(tmp_path: Path) -> None:
    settings = files(tmp_path)
    ca = str(tmp_path / "ca.pem")
    with live(**settings) as server:
        worker = FakeWorker()
        worker.url = f"https://localhost:{server.port}"
        async with routed(worker, worker_ca_certs=ca, **settings) as gateway:
            status, body = await _over_tls(gateway.url)
            assert status == 200 and b"choices" in body
        async with routed(worker, healthy=0) as gateway:
            await asyncio.sleep(0.2)
            assert (await gateway.status())["not_ready"] == "no worker is healthy"


async def _over_tls(url: str) -> tuple[int, bytes]:
    import aiohttp

    body = {"messages": [{"role": "user", "content": "a"}]}
    async with aiohttp.ClientSession() as session, session.post(url + CHAT, json=body, ssl=trusting()) as answer:
        return answer.status, await answer.read()


@in_loop
async def test_server_registers_over_tls(tmp_path: Path) -> None:
    secret = "cluster secret"
    settings = files(tmp_path)
    async with routed(router_secret=secret, **settings) as gateway:
        admin = gateway.admin.replace("http://127.0.0.1", "https://localhost")
        shared = {"router": admin, "router_secret": secret, "advertise_url": "https://localhost:1"}
        with ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, live(**shared))
            await asyncio.sleep(0.3)
            assert not gateway.router.workers(), "an untrusted router got the secret"
            await asyncio.to_thread(stack.enter_context, live(router_ca_certs=str(tmp_path / "ca.pem"), **shared))
            await eventually(lambda: [each.url for each in gateway.router.workers()] == ["https://localhost:1"])
            await asyncio.to_thread(stack.close)


def test_unusable_ca_file_is_named_by_its_flag(tmp_path: Path) -> None:
    files(tmp_path)
    with pytest.raises(ConfigError) as caught:
        client_context(str(tmp_path / "key.pem"), "--worker-ca-certs", GatewayConfig())
    assert caught.value.field == "--worker-ca-certs"
    assert client_context(None, "--worker-ca-certs", GatewayConfig()) is True


@both
def test_garbage_handshakes_do_not_affect_other_clients(kind: str, tmp_path: Path) -> None:
    with endpoint(kind, **files(tmp_path)) as opened:
        for garbage in (b"\x00" * 5000, os.urandom(3000), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b""):
            with opened.connect() as connection:
                connection.send(garbage)
                connection.socket.shutdown(socket.SHUT_WR)
                connection.closed_within(3)
        with opened.connect(tls=trusting()) as connection:
            status, _, body = connection.head("GET /health").answer()
            assert status == 200 and json.loads(body)
