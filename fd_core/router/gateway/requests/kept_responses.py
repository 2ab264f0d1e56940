"""Responses that workers keep. All workers are asked for the one that has it, so the router remembers nothing."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from fd_core.http.access.record import RequestRecord
from fd_core.router.gateway.requests.headers import to_worker
from fd_core.router.gateway.requests.relaying import TROUBLE
from fd_core.router.gateway.state import GatewayState
from fd_core.router.workers import RouterWorker, WorkerState

__all__ = ["keeper"]

_RESPONSES_PATH: Final = "/v1/responses"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)


class _Following(msgspec.Struct):
    """The field of a request that names what it goes on from."""

    previous_response_id: str | None = None


_decoder: Final = msgspec.json.Decoder(_Following)


async def keeper(
    state: GatewayState, request: web.BaseRequest, body: bytes, record: RequestRecord
) -> RouterWorker | None:
    """Return the worker that keeps the response which a request names; None if it names none or no worker has it.

    Workers are asked for the client: a worker shows a response to the key that made it.
    """
    name = _named(request.path, body)
    if not name:
        return None
    headers = to_worker(state, request.headers, record, "HEAD", f"{_RESPONSES_PATH}/{name}")
    answering = (WorkerState.HEALTHY, WorkerState.DRAINING)
    shown = [each for each in state.router.snapshot().workers if each.state in answering]
    workers = [each.worker for each in shown if each.worker.role != "prefill"]
    found = await asyncio.gather(*(_keeps(state, worker, name, headers) for worker in workers))
    return next((worker for worker, keeps in zip(workers, found, strict=True) if keeps), None)


def _named(path: str, body: bytes) -> str | None:
    if path.startswith(_RESPONSES_PATH + "/"):
        return path.removeprefix(_RESPONSES_PATH + "/")
    if path != _RESPONSES_PATH or b"previous_response_id" not in body:
        return None
    try:
        return _decoder.decode(body).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the worker refuses it properly
        return None


async def _keeps(state: GatewayState, worker: RouterWorker, name: str, headers: CIMultiDict[str]) -> bool:
    url = f"{worker.url}{_RESPONSES_PATH}/{quote(name, safe='')}"
    try:
        async with state.session.head(url, headers=headers, timeout=_TIMEOUT, allow_redirects=False) as answer:
            return answer.status == 200
    except TROUBLE:
        return False
