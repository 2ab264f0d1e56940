"""Follows what workers tell of the prefixes that they hold, and passes it on to the router.

One task follows one incarnation: it asks for news again and again, each time from where it was (a long poll). Whatever
goes wrong, the router falls back on what that worker served, and the task begins anew with all that the worker holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from fd_core.kv.events import KVPage
from fd_core.router.gateway.relaying import TROUBLE, read_up_to
from fd_core.router.reported_kv import Mirror
from fd_core.router.router import Router
from fd_core.router.workers import RouterWorker
from fd_core.server.kv_events import PATH, WAIT_SECONDS

__all__ = ["KVFollowers"]

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 256 << 20
"""Of one answer: all that a worker holds, as token ids."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=WAIT_SECONDS + 20.0, sock_read=WAIT_SECONDS + 5.0)
_TOGETHER_SECONDS: Final = 0.02
"""What happens within so long is fetched together."""
_PAUSES: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before each attempt in a row to begin anew, the last of them from there on."""

_decoder: Final = msgspec.msgpack.Decoder(KVPage)


class _Broken(Exception):
    """What was told cannot be used; the text is for people and quotes nothing of it."""


class _Follower:
    """Follows one incarnation."""

    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        secret: str,
        worker: RouterWorker,
        say: Callable[[RouterWorker, str], None],
    ) -> None:
        self._router = router
        self._session = session
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._worker = worker
        self._say = say
        self._failures = 0

    async def run(self, fingerprint: str) -> None:
        """Follow until the incarnation is gone. `fingerprint` is that of the gateway's prompt reader."""
        worker = self._worker
        while worker in self._router.workers():
            await asyncio.sleep(_PAUSES[min(self._failures, len(_PAUSES) - 1)])
            self._failures += 1
            try:
                await self._listen(fingerprint)
            except _Broken as error:
                self._say(worker, str(error))
            except TROUBLE as error:
                self._say(worker, f"it does not answer ({type(error).__name__})")
            finally:
                self._router.reported_kv.end(worker)

    async def _listen(self, fingerprint: str) -> None:
        """Begin with all that is held, and go on as long as the worker counts. Raises `_Broken` or of `TROUBLE`."""
        page = await self._ask(None)
        if page.reading != fingerprint:
            raise _Broken("it reads text otherwise than --tokenizer, or has another chat template")
        try:
            mirror = Mirror(self._router.reported_kv, self._worker, page.block_size)
        except ValueError as error:
            raise _Broken(str(error)) from error
        instance = page.instance
        counts = self._router.reported_kv.begin(self._worker, page.block_size, instance)
        while counts:
            if page.instance != instance:
                raise _Broken("another process has its address")
            for event in page.events:
                try:
                    counts = mirror.apply(event)
                except ValueError as error:
                    raise _Broken(str(error)) from error
                if not counts:
                    return
                await asyncio.sleep(0)  # requests come first
            self._failures = 0
            self._say(self._worker, "")
            await asyncio.sleep(_TOGETHER_SECONDS)
            page = await self._ask(page)

    async def _ask(self, last: KVPage | None) -> KVPage:
        """Return what happened since the page `last`, if need be after a while; all that is held if it is None."""
        asked = {} if last is None else {"after": str(last.next), "instance": last.instance}
        async with self._session.get(
            self._worker.url + PATH, params=asked, headers=self._headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            if answer.status == 403:
                raise _Broken("it does not take the secret of --router-secret-file")
            if answer.status != 200:
                raise _Broken(f"it answered {answer.status}")
            data = await read_up_to(answer.content, _MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _Broken(f"it told more than {_MAX_BYTES >> 20} MiB at once")
        try:
            return _decoder.decode(data)
        except msgspec.MsgspecError:
            raise _Broken("it told what cannot be read") from None  # the error may quote it


class KVFollowers:
    """Follows every incarnation that offers to tell what it holds, as long as it is there."""

    def __init__(
        self, router: Router, session: aiohttp.ClientSession, secret: str, fingerprint: Callable[[], str | None]
    ) -> None:
        """`fingerprint` returns that of the gateway's prompt reader; None as long as it compares bytes."""
        self._router = router
        self._session = session
        self._secret = secret
        self._fingerprint = fingerprint
        self._tasks: dict[RouterWorker, asyncio.Task[None]] = {}
        self._said: dict[str, str] = {}
        """By address: the trouble that was logged last."""

    def offered(self, worker: RouterWorker) -> None:
        """A worker that is well says that it tells what it holds: follow it, if that is of use."""
        for other in [other for other, task in self._tasks.items() if task.done()]:
            self._tasks.pop(other).result()
        fingerprint = self._fingerprint()
        if worker in self._tasks or fingerprint is None or not self._secret or not self._router.uses_prefix(worker):
            return
        follower = _Follower(self._router, self._session, self._secret, worker, self._say)
        self._tasks[worker] = asyncio.create_task(follower.run(fingerprint))

    async def close(self) -> None:
        """End all tasks; an error of theirs comes to light here."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def _say(self, worker: RouterWorker, trouble: str) -> None:
        """Say once of each trouble that it is there, and that it is over."""
        if trouble == self._said.get(worker.url, ""):
            return
        if trouble:
            log.warning("what worker %s holds is unknown, so what it served counts: %s", worker.url, trouble)
        else:
            log.info("worker %s tells again what it holds", worker.url)
        self._said[worker.url] = trouble
