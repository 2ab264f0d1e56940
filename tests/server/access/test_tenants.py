"""Tenants forwarded by a router: signature, trust, and access of a tenant."""

from __future__ import annotations

import hashlib

import pytest

from fd_core.http.access.keys import ApiKey, KeyLimits
from fd_core.http.access.record import TENANT_HEADER, RequestRecord, Tenant, read_tenant, sign_tenant
from tests.server.fakes import live

SECRET = hashlib.sha256(b"worker").digest()
ALICE = Tenant.of(ApiKey(digest=b"", name="alice", limits=KeyLimits(tokens_per_minute=7)))
REQUEST = ("POST", "/v1/completions", "id-1")


def test_signed_tenant_round_trips() -> None:
    for tenant in (ALICE, Tenant(ALICE.owner, admin=True)):
        header = sign_tenant(SECRET, tenant, *REQUEST)
        assert read_tenant(SECRET, header.encode(), *REQUEST) == tenant


@pytest.mark.parametrize(
    "request_of", [("GET", *REQUEST[1:]), ("POST", "/v1/responses", "id-1"), (*REQUEST[:2], "id-2")]
)
def test_signature_is_valid_for_one_request(request_of: tuple[str, str, str]) -> None:
    assert read_tenant(SECRET, sign_tenant(SECRET, ALICE, *request_of).encode(), *REQUEST) is None


def test_modified_header_is_rejected() -> None:
    header = sign_tenant(SECRET, ALICE, *REQUEST)
    for wrong in (
        header.replace("user", "admin"),
        header.replace(" 7 ", "  "),
        header[:-1],
        header.upper(),
        "",
        "\xff" * 100,
        sign_tenant(b"other", ALICE, *REQUEST),
    ):
        assert read_tenant(SECRET, wrong.encode("latin-1"), *REQUEST) is None, wrong


def record(worker_key: ApiKey | None, tenant: Tenant | None) -> RequestRecord:
    return RequestRecord("id", worker_key, tenant)


def test_tenant_owns_part_of_its_routers_objects() -> None:
    worker, other = ApiKey(digest=b"w", name="router"), ApiKey(digest=b"o", name="other")
    admin = Tenant("f" * 32, admin=True)
    mine = record(worker, ALICE)
    assert mine.owner == f"{worker.owner}.{ALICE.owner}" != record(other, ALICE).owner
    assert mine.may_abort(mine.owner) and not mine.may_abort(worker.owner) and not mine.is_admin
    assert record(worker, admin).may_abort(mine.owner) and not record(worker, admin).may_abort(worker.owner)
    assert not record(other, admin).may_abort(mine.owner), "it is another router's tenant"
    root = ApiKey(digest=b"r", name="root", admin=True)
    assert record(root, admin).is_admin and not record(root, ALICE).is_admin
    assert not record(worker, admin).is_admin, "a tenant has at most the rights of its router's key"
    assert mine.tokens_per_minute == 7


def test_only_the_holder_of_a_key_may_sign_its_tenants() -> None:
    with live(api_keys=("router", "other")) as server:
        path, body = "/v1/completions", {"prompt": "a"}

        def status(key: str, secret: str) -> int:
            header = sign_tenant(hashlib.sha256(secret.encode()).digest(), ALICE, "POST", path, "id-1")
            headers = {"X_Api_Key": key, "X_Request_Id": "id-1", TENANT_HEADER.replace("-", "_"): header}
            return server.post(path, body, **headers).status

        assert [status("router", "router"), status("other", "router"), status("wrong", "router")] == [200, 403, 401]


def test_tenants_may_not_use_the_files_api() -> None:
    with live(api_keys=("router",), batch_api=True) as server:
        for path in ("/v1/files", "/v1/batches"):
            header = sign_tenant(hashlib.sha256(b"router").digest(), ALICE, "GET", path, "id-1")
            headers = {"X_Api_Key": "router", "X_Request_Id": "id-1", TENANT_HEADER.replace("-", "_"): header}
            assert server.get(path, **headers).status == 403
