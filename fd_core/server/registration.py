"""A server tells a router that it is there, and that it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Final, Literal

import aiohttp

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.server.doors.tls import client_context
from fd_core.server.listening import ANY_ADDRESS

__all__ = ["Registration", "registration_of"]

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 10.0
"""Seconds between registrations; a repeated one changes nothing, but tells a restarted router of this server."""
_RETRY_SECONDS: Final = 1.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=3)


class Registration:
    """Keeps one server registered with one router; what the router does not answer never disturbs the server."""

    def __init__(
        self,
        router: str,
        secret: str,
        url: str,
        instance: Callable[[], str],
        role: str,
        trusted: ssl.SSLContext | Literal[True] = True,
    ) -> None:
        """`router` is the router's admin address, `url` where it finds the server, `instance` names what serves.

        `trusted` says which certificates the router may have.
        """
        self._trusted = trusted
        self._router = router.rstrip("/")
        self._secret = secret
        self._url = url
        self._role = role
        self._instance = instance
        self._task: asyncio.Task[None] | None = None
        self._said = ""

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._stay())

    async def leave(self) -> None:
        """Ask for no more requests; call it before they are refused. Safe to call without a start, or twice."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._post("deregister")

    async def _stay(self) -> None:
        while True:
            answered = await self._post("register")
            await asyncio.sleep(_AGAIN_SECONDS if answered else _RETRY_SECONDS)

    async def _post(self, what: str) -> bool:
        """Send one message; say its failure once for each kind."""
        body = {"url": self._url, "role": self._role, "instance": self._instance()}
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT, headers={"Authorization": f"Bearer {self._secret}"}) as session,
                session.post(f"{self._router}/{what}", json=body, allow_redirects=False, ssl=self._trusted) as answer,
            ):
                trouble = "" if answer.status == 200 else f"it answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            trouble = "it does not answer" if isinstance(error, TimeoutError) else type(error).__name__
        if trouble and trouble != self._said:
            log.warning("the router at %s did not %s this server: %s", self._router, what, trouble)
        elif self._said and not trouble:
            log.info("the router at %s answers again", self._router)
        self._said = trouble
        return not trouble


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
        raise ConfigError(
            "a router registers only servers that know its secret",
            field="--router-secret-file",
            hint="give the file that the router was started with",
        )
    if config.advertise_url is None and config.host in ANY_ADDRESS:
        raise ConfigError(
            "the server listens on every address, so the router needs the one at which it reaches the server",
            field="--advertise-url",
            hint="for example http://10.0.0.5:8000",
        )
    trusted = client_context(config.router_ca_certs, "--router-ca-certs", config)
    return Registration(config.router, config.router_secret, config.advertise_url or url, instance, role, trusted)
