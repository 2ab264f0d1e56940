"""Fetching of images: only public addresses of allowed hosts, only files below one folder, all within limits."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fd_core.errors import BadRequest
from fd_core.http.bodies import BodyBudget
from fd_core.server.preprocess.media import fetching
from fd_core.server.preprocess.media.fetching import MediaFetcher, is_public
from fd_core.text import image_files
from tests.server.preprocess.media.images import data_url

FIELD = "messages[0].content[0].image_url.url"
PRIVATE = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/29"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "::/127", "fc00::/7", "fe80::/10", "ff00::/8"),
]


@given(st.sampled_from(PRIVATE), st.integers(0), st.sampled_from(["", "::ffff:", "64:ff9b::", "2002:"]))
@example("169.254.0.0/16", 169 * 256 + 254, "64:ff9b::")  # metadata of clouds
def test_no_private_address_is_public(network: str, index: int, wrapped: str) -> None:
    found = ipaddress.ip_network(network)
    address = found[index % found.num_addresses]
    text = str(address)
    if wrapped and address.version == 4:
        number = int(address)
        text = f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1" if wrapped == "2002:" else f"{wrapped}{address}"
    assert not is_public(text)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8", "::ffff:1.1.1.1"])
def test_public_address_is_public(address: str) -> None:
    assert is_public(address)


class Names(AbstractResolver):
    """Resolves every name to the next of some addresses, the last one from then on."""

    def __init__(self, port: int, *addresses: str) -> None:
        self.port, self.addresses, self.asked = port, [*addresses], list[str]()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        address = self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]
        return [ResolveResult(hostname=host, host=address, port=self.port, family=family, proto=0, flags=0)]

    async def close(self) -> None:
        """Nothing to close."""


async def images(request: web.Request) -> web.StreamResponse:
    target = request.match_info["path"]
    if target == "slow":
        await asyncio.sleep(0.5)
    if target == "large":
        return web.Response(body=bytes(3000))
    if target == "secret":
        return web.Response(status=403)
    if target == "loop":
        raise web.HTTPFound("/loop")
    if target != "image":
        raise web.HTTPFound(request.query["to"])
    return web.Response(body=b"an image")


def download(url: str, *addresses: str, domains: tuple[str, ...] = ("a.example", "*.b.example")) -> tuple[bytes, Names]:
    """Download from a server at 127.0.0.1, which is the only one; 127.0.0.2 reaches it as well."""

    async def run() -> tuple[bytes, Names]:
        app = web.Application()
        app.router.add_get("/{path}", images)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        names = Names(site._server.sockets[0].getsockname()[1], *(addresses or ("127.0.0.1",)))  # type: ignore[attr-defined]
        fetcher = MediaFetcher(domains, None, largest=2000, resolver=lambda: names)
        try:
            with BodyBudget(1 << 20).share(None, 1 << 20) as share:
                return await fetcher.download(url, FIELD, share), names
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")


@pytest.mark.usefixtures("loopback_is_public")
@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/image",
        "http://A.Example./image",
        "http://x.b.example/image",
        "http://a.example/r?to=http://x.y.b.example/image",
        "http://a.example/r?to=/image",
    ],
)
def test_image_of_an_allowed_host_is_downloaded(url: str) -> None:
    assert download(url)[0] == b"an image"


@pytest.mark.usefixtures("loopback_is_public")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://b.example/image", "--allowed-media-domains"),
        ("http://a.example.evil.example/image", "--allowed-media-domains"),
        ("http://a.example@evil.example/image", "--allowed-media-domains"),
        ("http://a.example/r?to=http://evil.example/image", "--allowed-media-domains"),
        ("http://a.example/r?to=file:///etc/passwd", "--allowed-media-domains"),
        ("http://a.example/large", "exceeds 2,000 bytes"),
        ("http://a.example/secret?token=hush", "HTTP status 403"),
        ("http://[::1/image", "could not be downloaded"),
    ],
)
def test_other_hosts_and_answers_are_rejected(url: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        download(url)
    assert caught.value.field == FIELD and "hush" not in str(caught.value) and "evil" not in str(caught.value)


@pytest.mark.usefixtures("loopback_is_public")
def test_endless_redirects_are_rejected() -> None:
    with pytest.raises(BadRequest, match="beyond 5 redirects"):
        download("http://a.example/loop")


@pytest.mark.usefixtures("loopback_is_public")
def test_slow_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_TIMEOUT", fetching.aiohttp.ClientTimeout(total=0.05))
    with pytest.raises(BadRequest, match="was not received within"):
        download("http://a.example/slow")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "2130706433", "127.1", "a.example"]
)
def test_address_that_is_not_public_is_never_contacted(host: str) -> None:
    with pytest.raises(BadRequest, match="not public"):
        download(f"http://{host}/image", domains=(host.strip("[]"),))


@pytest.mark.usefixtures("loopback_is_public")
def test_name_that_changes_its_address_is_rejected() -> None:
    data, names = download("http://a.example/image", "127.0.0.1", "127.0.0.2")
    assert data == b"an image" and names.asked == ["a.example"]  # one resolution, whose result was contacted
    with pytest.raises(BadRequest, match="not public"):
        download("http://a.example/r?to=http://a.example/image", "127.0.0.1", "127.0.0.2")


@contextmanager
def folder_of(base: Path) -> Iterator[Callable[[str], bytes]]:
    inside, outside = base / "inside", base / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "an image.png").write_bytes(b"an image")
    (inside / "large.png").write_bytes(bytes(3000))
    (outside / "secret.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(outside / "secret.png")
    (inside / "folder").symlink_to(outside)
    (base / "inside-too").mkdir()
    (base / "inside-too" / "x.png").write_bytes(b"secret")
    fetcher = MediaFetcher((), str(inside), largest=2000)
    yield lambda url: fetcher.read(url.replace("BASE", str(base)), FIELD)


def test_file_below_the_folder_is_read(tmp_path: Path) -> None:
    with folder_of(tmp_path) as read:
        assert read("file://BASE/inside/an%20image.png") == b"an image"
        assert read("file://localhostBASE/inside/../inside/an image.png") == b"an image"


@pytest.mark.parametrize(
    "path",
    [
        "BASE/outside/secret.png",
        "BASE/inside/../outside/secret.png",
        "BASE/inside/%2e%2e/outside/secret.png",
        "BASE/inside/link.png",
        "BASE/inside/folder/secret.png",
        "BASE/inside-too/x.png",
        "BASE/inside",
        "BASE/inside/absent.png",
        "inside/an%20image.png",
        "/dev/zero",
        "BASE/inside/an%20image.png%00",
    ],
)
def test_no_file_elsewhere_is_read(path: str, tmp_path: Path) -> None:
    with folder_of(tmp_path) as read, pytest.raises(BadRequest, match="no such image below --allowed") as caught:
        read(f"file://{path}")
    assert "outside" not in str(caught.value)


def test_large_and_forbidden_files_are_rejected(tmp_path: Path) -> None:
    with folder_of(tmp_path) as read, pytest.raises(BadRequest, match="exceeds 2,000 bytes"):
        read("file://BASE/inside/large.png")
    with pytest.raises(BadRequest, match="see --allowed-local-media-path"):
        MediaFetcher((), None, largest=2000).read("file:///etc/passwd", FIELD)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,QUJD", "data:;base64,QUJD", "DATA:image/svg+xml;a=b;BASE64,QUJD"]
)
def test_data_url_is_decoded(url: str) -> None:
    assert MediaFetcher((), None, largest=2000).read(url, FIELD) == b"ABC"


@given(st.binary(max_size=100))
@settings(max_examples=50)
def test_data_url_of_several_chunks_is_decoded(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_files, "_CHUNK", 8)
        assert MediaFetcher((), None, largest=2000).read(data_url(data), FIELD) == data


@pytest.mark.parametrize(
    "url",
    [
        *("data:image/png;base64,QUJ", "data:image/png;base64,QU-D", "data:image/png;base64,QU JD", "data:,QUJD"),
        *(
            "data:text/html;base64,QUJD",
            "ftp://a.example/x",
            "QUJD",
            "",
            "data:image/png;base64,é",
            "data:;base64,QQ==QQ==",
        ),
        "data:" + ";a" * 1000 + ";base64,QUJD",
    ],
)
def test_malformed_url_is_rejected(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        MediaFetcher((), None, largest=2000).read(url, FIELD)
    assert caught.value.field == FIELD
