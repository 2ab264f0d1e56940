"""Follows the KV events of workers and passes them on to the router.

One task follows one incarnation by long polls: each asks for the events that follow the last one. Whenever something
goes wrong, the router goes by the prefixes that the worker served, and the task begins anew with all that the worker
holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import aiohttp
import msgspec

from fd_core.router.gateway.requests.relaying import TROUBLE, read_up_to
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.workers import RouterWorker
from fd_core.server.api.kv_events import PATH, WAIT_SECONDS
from fd_core.types.kv_events import KVPage

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 256 << 20
"""Limit of one answer, which may name all blocks that a worker holds, as token ids."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=WAIT_SECONDS + 20.0, sock_read=WAIT_SECONDS + 5.0)
_TOGETHER_SECONDS: Final = 0.02
"""Events within this time are fetched together."""
_PAUSES: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds to wait before each attempt in a row; the last value holds for all further attempts."""

_decoder: Final = msgspec.msgpack.Decoder(KVPage)


class _Broken(ValueError):
    """The worker's events cannot be used; the text of the exception is for people and quotes none of them."""


class _Follower:
    def __init__(self, state: GatewayState, worker: RouterWorker, report: Callable[[RouterWorker, str], None]) -> None:
        self._state = state
        self._router = state.router
        self._worker = worker
        self._report = report
        self._failures = 0

    async def run(self, fingerprint: str) -> None:
        """Follow until the incarnation is gone. `fingerprint` is that of the gateway's prompt reader."""
        worker = self._worker
        while worker in self._router.workers():
            await asyncio.sleep(_PAUSES[min(self._failures, len(_PAUSES) - 1)])
            self._failures += 1
            try:
                await self._listen(fingerprint)
            except TROUBLE as error:
                if self._failures > 1:  # one answer that does not come is no trouble: a worker may have just begun
                    self._report(worker, f"it does not answer ({type(error).__name__})")
            except ValueError as error:
                self._report(worker, str(error))
            finally:
                self._router.reported_kv.end(worker)

    async def _listen(self, fingerprint: str) -> None:
        """Take the worker's blocks, then its events while they count. Raises `ValueError` or one of `TROUBLE`."""
        page = await self._ask(None)
        if page.reading != fingerprint:
            raise _Broken("its tokenizer or its chat template is not that of --tokenizer")
        reported, instance = self._router.reported_kv, page.instance
        if not reported.begin(self._worker, page.block_size, instance, page.engines):
            return
        while True:
            if page.instance != instance:
                raise _Broken("another process has its address")
            for event in page.events:
                if not reported.apply(self._worker, event):
                    return
                await asyncio.sleep(0)  # requests come first
            self._failures = 0
            self._report(self._worker, "")
            await asyncio.sleep(_TOGETHER_SECONDS)
            page = await self._ask(page)

    async def _ask(self, last: KVPage | None) -> KVPage:
        """Wait for the events that follow the page `last` and return them; all blocks of the worker if it is None."""
        asked = {} if last is None else {"after": str(last.next), "instance": last.instance}
        headers = {"Authorization": f"Bearer {self._state.config.router_secret}"}
        async with self._state.session.get(
            self._worker.url + PATH, params=asked, headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            if answer.status == 403:
                raise _Broken("it does not take the secret of --router-secret-file")
            if answer.status != 200:
                raise _Broken(f"it answered {answer.status}")
            data = await read_up_to(answer.content, _MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _Broken(f"it sent more than {_MAX_BYTES >> 20} MiB at once")
        try:
            return _decoder.decode(data)
        except msgspec.MsgspecError:
            raise _Broken("it sent events that cannot be read") from None  # the error may quote it


class KVFollowers:
    """Follows every incarnation that offers KV events, as long as the incarnation is there."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._following: set[RouterWorker] = set()
        self._logged: dict[str, str] = {}
        """The trouble that was logged last, by address."""

    def offered(self, worker: RouterWorker) -> None:
        """Follow a healthy worker that offers KV events, if the policy can use them."""
        state, fingerprint = self._state, self._state.reader.fingerprint
        if worker in self._following or fingerprint is None or not state.config.router_secret:
            return
        if not state.router.uses_prefix(worker):
            return
        follower = _Follower(state, worker, self._log_trouble)
        self._following.add(worker)
        task = state.supervisor.start("kv_events", partial(follower.run, fingerprint), part=worker.url)
        task.add_done_callback(lambda _: self._following.discard(worker))

    def _log_trouble(self, worker: RouterWorker, trouble: str) -> None:
        """Log each trouble once when it begins, and once when it is over (an empty `trouble`)."""
        if trouble == self._logged.get(worker.url, ""):
            return
        if trouble:
            told = "KV events of worker %s cannot be used, so the router goes by what the worker served: %s"
            log.warning(told, worker.url, trouble)
        else:
            log.info("KV events of worker %s can be used", worker.url)
        self._logged[worker.url] = trouble
