"""A server tells its routers that it is there, and that it leaves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.http.connections.listening import ANY_ADDRESS
from fd_core.http.connections.tls import client_context
from fd_core.http.supervision import Supervisor, cancelled

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 10.0
"""Seconds between registrations; a repeated one changes nothing, but tells a restarted router of this server."""
_RETRY_SECONDS: Final = 1.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=3)
_SILENT: Final = "it does not answer"
_ABSENT: Final = frozenset({_SILENT, aiohttp.ClientConnectorError.__name__})
"""Troubles that an address has at which there is no router."""


class Registration:
    """Keeps one server registered with its routers; what a router does not answer never disturbs the server.

    A name that has several addresses, such as that of a headless service, stands for one router at each of them. It is
    looked up each time, since routers come and go.
    """

    def __init__(self, config: ServerConfig, url: str, instance: Callable[[], str], role: str) -> None:
        """See `registration_of`. Raises `ConfigError` for certificates that cannot be read."""
        self._trusted = client_context(config.router_ca_certs, "--router-ca-certs", config)
        self._router = (config.router or "").rstrip("/")
        self._secret = config.router_secret
        self._url = config.advertise_url or url
        self._role = role
        self._instance = instance
        self._task: asyncio.Task[None] | None = None
        self._said: dict[str, str] = {}
        """The troubles that were logged and are not over, by place."""

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Begin; returns at once."""
        self._task = (supervisor or Supervisor()).start("registration", self._stay)

    async def leave(self) -> None:
        """Ask for no more requests; call it before they are refused. Safe to call without a start, or twice."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancelled(task)
        await self._post("deregister")

    async def _stay(self) -> None:
        while True:
            answered = await self._post("register")
            await asyncio.sleep(_AGAIN_SECONDS if answered else _RETRY_SECONDS)

    async def _post(self, what: str) -> bool:
        """Send one message to each router; return whether one took it. Says each trouble once, and when it is over.

        That nobody listens at an address is no trouble while a router at another one answers.
        """
        target = URL(self._router)
        try:
            found = await ThreadedResolver().resolve(target.host or "", target.port or 0, socket.AF_UNSPEC)
        except (OSError, ValueError) as error:
            troubles = {self._router: type(error).__name__}
        else:
            told = await asyncio.gather(*(self._tell(what, each) for each in found))
            troubles = {
                self._router if each["host"] == target.host else f"{self._router} ({each['host']})": trouble
                for each, trouble in zip(found, told, strict=True)
                if trouble not in _ABSENT or "" not in told
            }
        said, self._said = self._said, {place: trouble for place, trouble in troubles.items() if trouble}
        for place, trouble in troubles.items():
            if trouble and trouble != said.get(place):
                log.warning("the router at %s did not %s this server: %s", place, what, trouble)
            elif not trouble and place in said:
                log.info("the router at %s answers again", place)
        return "" in troubles.values()

    async def _tell(self, what: str, place: ResolveResult) -> str:
        """Send one message to the router at one address; return why it was not taken, empty if it was."""
        body = {"url": self._url, "role": self._role, "instance": self._instance()}
        connector = aiohttp.TCPConnector(resolver=_Known(place), ssl=self._trusted)
        headers = {"Authorization": f"Bearer {self._secret}"}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers=headers) as session,
                session.post(f"{self._router}/{what}", json=body, allow_redirects=False) as answer,
            ):
                return "" if answer.status == 200 else f"it answered {answer.status}"
        except TimeoutError:
            return _SILENT
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return type(error).__name__


class _Known(AbstractResolver):
    """Knows one address for every name, so that the name in the request and in its certificate stays the same."""

    def __init__(self, place: ResolveResult) -> None:
        self._place = place

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [self._place]

    async def close(self) -> None:
        """Nothing is open."""


def registration_of(
    config: ServerConfig, url: str, instance: Callable[[], str], role: str = "mixed"
) -> Registration | None:
    """Return the registration that the settings ask for, or None. Raises `ConfigError` if it cannot work.

    `instance` is asked each time: it is what the server answers to health checks, and another one after a restart.
    """
    if config.router is None:
        return None
    if not config.router.startswith(("http://", "https://")):
        raise ConfigError(
            f"{config.router!r} is not an address", field="--router", hint="give http://HOST:PORT of its admin port"
        )
    if not config.router_secret:
        message = "a router registers only servers that know its secret"
        raise ConfigError(message, field="--router-secret-file", hint="give the file that the router was started with")
    if config.advertise_url is None and config.host in ANY_ADDRESS:
        message = "the server listens on every address, so the router needs the one at which it reaches the server"
        raise ConfigError(message, field="--advertise-url", hint="for example http://10.0.0.5:8000")
    return Registration(config, url, instance, role)
