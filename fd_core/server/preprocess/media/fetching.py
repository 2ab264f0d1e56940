"""From the URL of an image to its bytes: data URLs, web servers of allowed domains, and files of an allowed folder."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from fd_core.errors import BadRequest
from fd_core.http.bodies import BodyShare
from fd_core.text.image_files import bytes_of_data_url

_MAX_REDIRECTS: Final = 5
_SECONDS: Final = 10.0
"""Timeout of a download, with all its redirects."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NAT64: Final = IPv6Network("64:ff9b::/96")
_TIMEOUT: Final = aiohttp.ClientTimeout(total=_SECONDS)


class _NotPublic(OSError):
    """A host has an address that is not public."""


def is_public(address: str) -> bool:
    """Return True for an address of the public internet, also if an IPv6 address contains it."""
    try:
        found: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:  # such as one with a scope that is no address
        return False
    if isinstance(found, IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and found in _NAT64:
            inner = IPv4Address(int(found) & 0xFFFFFFFF)
        found = inner or found
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


class _PublicResolver(AbstractResolver):
    """Resolves names to public addresses only. The connection is made to the address that was checked."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if not all(is_public(each["host"]) for each in found):
            raise _NotPublic("the address of the host is not public")
        return found

    async def close(self) -> None:
        await self._resolver.close()


class MediaFetcher:
    """Reads the bytes of images. Errors name the field, never the URL, which may contain secrets."""

    def __init__(
        self,
        domains: tuple[str, ...],
        folder: str | None,
        *,
        largest: int,
        resolver: Callable[[], AbstractResolver] = ThreadedResolver,
    ) -> None:
        """`domains` are host names, or `*.NAME` for all below one; a file may have `largest` bytes."""
        self._domains = domains
        self._largest = largest
        self._folder = None if folder is None else Path(os.path.realpath(Path(folder).expanduser()))
        self._resolver = resolver

    async def download(self, url: str, field: str, share: BodyShare) -> bytes:
        """Return the body of an http URL, counted in `share`. Raises `BadRequest`, and `ApiError` of the share."""
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=_PublicResolver(self._resolver()), force_close=True, use_dns_cache=False
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=_TIMEOUT,
                auto_decompress=False,
                headers={"Accept-Encoding": "identity", "User-Agent": "fd_core"},
            ) as session:
                return await self._followed(session, URL(url), field, share)
        except BadRequest:
            raise
        except TimeoutError:
            raise _refused(field, f"the image was not received within {_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = "the address of its host is not public" if _is_private(error) else type(error).__name__
            raise _refused(field, f"the image could not be downloaded: {cause}") from None

    async def _followed(self, session: aiohttp.ClientSession, url: URL, field: str, share: BodyShare) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            self._check(url, field)
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status in _REDIRECTS and (target := answer.headers.get("Location")):
                    url = url.join(URL(target))
                    continue
                if answer.status != 200:
                    raise _refused(field, f"the image could not be downloaded: HTTP status {answer.status}")
                data = bytearray()
                async for part in answer.content.iter_any():
                    data += part
                    self._check_size(len(data), field)
                    share.received(len(part))
                return bytes(data)
        raise _refused(field, f"the image is beyond {_MAX_REDIRECTS} redirects")

    def _check(self, url: URL, field: str) -> None:
        """Raise `BadRequest` unless a URL, the first or that of a redirect, may be fetched."""
        host = (url.host or "").rstrip(".").lower()
        if url.scheme not in ("http", "https") or not any(_matches(host, domain) for domain in self._domains):
            raise _refused(field, "the host is not one of --allowed-media-domains; send the image as a data URL")
        if re.fullmatch(r"[\d.]+|.*:.*", host) and not is_public(host):  # the client resolves no addresses
            raise _NotPublic

    def _check_size(self, size: int, field: str) -> None:
        if size > self._largest:
            raise _refused(field, f"the image exceeds {self._largest:,} bytes; see --max-body-size")

    def read(self, url: str, field: str) -> bytes:
        """Return the bytes of a data or file URL; blocks. Raises `BadRequest`."""
        if url[:5].lower() == "file:":
            return self._file(url, field)
        if (data := bytes_of_data_url(url, field)) is None:
            raise _refused(field, "expected data:image/...;base64,..., or an http, https or file URL")
        return data

    def _file(self, url: str, field: str) -> bytes:
        """Return the bytes of a regular file that is below the folder after all links were followed."""
        if self._folder is None:
            raise _refused(field, "files are not allowed; see --allowed-local-media-path")
        path = unquote(url[5:])
        path = path.removeprefix("//localhost") if path.startswith("//localhost/") else path.removeprefix("//")
        try:
            found = Path(os.path.realpath(path, strict=True))
            if not path.startswith("/") or not found.is_relative_to(self._folder):
                raise PermissionError
            with os.fdopen(os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise PermissionError
                self._check_size(status.st_size, field)
                return file.read(status.st_size)
        except BadRequest:
            raise
        except (OSError, ValueError):
            # The same error for all causes: clients learn nothing of files elsewhere.
            raise _refused(field, "there is no such image below --allowed-local-media-path") from None


def _matches(host: str, domain: str) -> bool:
    domain = domain.lower()
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


def _is_private(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, _NotPublic):
        error = error.__cause__ or getattr(error, "os_error", None)
    return error is not None


def _refused(field: str, reason: str) -> BadRequest:
    return BadRequest(f"{field}: {reason}", field=field)
