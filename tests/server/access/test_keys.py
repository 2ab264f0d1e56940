"""Key lookup."""

from __future__ import annotations

import hashlib

import pytest

from fd_core.config import ListenConfig
from fd_core.http.access.control import AccessControl
from fd_core.http.access.keys import ApiKey, KeyRing
from fd_core.http.errors import ApiError

BASIC = b"Basic bm9ib2R5OmE="  # nobody:a


def test_without_keys_access_is_open() -> None:
    assert AccessControl().identify("GET", "/v1/models", None, None) is None
    with pytest.raises(ApiError):
        AccessControl(ListenConfig(api_keys=("k",))).identify("GET", "/v1/models", None, None)


@pytest.mark.parametrize("sent", [(b"Bearer a", None), (b"bearer  a ", None), (None, b"a"), (b"Bearer x", b"a")])
def test_key_is_found_in_either_header(sent: tuple[bytes | None, bytes | None]) -> None:
    ring = KeyRing(("a", "b"))
    assert ring.find(*sent) == ApiKey.of("a")


@pytest.mark.parametrize(
    "sent",
    [(None, None), (b"a", None), (b"Basic a", None), (b"Bearer", b""), (b"Bearer a b", b"\xff\x00"), (BASIC, None)],
)
def test_malformed_headers_are_no_key(sent: tuple[bytes | None, bytes | None]) -> None:
    assert KeyRing(("a", "b")).find(*sent) is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("path", ["/", "/status.json", "/v1/models"])
def test_basic_auth_allows_protected_pages_only(method: str, path: str) -> None:
    access = AccessControl(ListenConfig(api_keys=("a",), protect_pages=True))
    if path != "/v1/models" and method != "POST":
        assert access.identify(method, path, BASIC, None) == ApiKey.of("a")
    else:
        with pytest.raises(ApiError):
            access.identify(method, path, BASIC, None)


def test_known_and_unknown_keys_cost_equal_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(len(left) == len(right) == 32)
        return left == right

    ring = KeyRing(("a", "b", "c"))
    monkeypatch.setattr("hmac.compare_digest", compare)
    for sent in ((b"Bearer a", None), (b"Bearer x", b"y"), (None, b"c")):
        ring.find(*sent)
    assert compared == [True] * 6, "one comparison per header, for any input"


def test_hash_position_of_a_key_is_unpredictable() -> None:
    rings = [KeyRing(("a",)), KeyRing(("a",))]
    slots = {next(iter(ring._keys)) for ring in rings}
    assert len(slots) == 2 and hashlib.sha256(b"a").digest() not in slots


def test_owner_of_a_named_key_survives_key_rotation() -> None:
    old, new = (ApiKey(digest=digit * 32, name="alice") for digit in (b"1", b"2"))
    other = ApiKey(digest=b"1" * 32, name="bob")
    unnamed = ApiKey(digest=b"1" * 32)
    assert old.owner == new.owner and len({old.owner, other.owner, unnamed.owner}) == 3
    assert KeyRing((new,)).of_owner(old.owner) == new
