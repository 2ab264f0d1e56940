"""POST /v1/abort_requests: passed to every worker that may have the requests; the answers become one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from fd_core.router.gateway.answers import json_response
from fd_core.router.gateway.headers import to_client
from fd_core.router.gateway.relaying import TROUBLE, read_up_to
from fd_core.router.gateway.state import GatewayState
from fd_core.router.workers import RouterWorker, WorkerState
from fd_core.server.access.control import not_admin
from fd_core.server.access.record import RequestRecord
from fd_core.server.body import BodyFormat
from fd_core.server.errors import unavailable
from fd_core.server.request_schemas import AbortRequest
from fd_core.server.response_schemas import AbortAnswer

__all__ = ["ABORT_PATH", "abort"]

ABORT_PATH: Final = "/v1/abort_requests"
_MAX_BYTES: Final = 4 << 20
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_BODY: Final = BodyFormat(AbortRequest)
_decoder: Final = msgspec.json.Decoder(AbortAnswer)


async def abort(state: GatewayState, body: bytes, headers: Mapping[str, str], record: RequestRecord) -> web.Response:
    """Return the ids that the workers aborted, and the ids that no worker which answered has.

    The workers that answer clients are asked: a prefill worker's part of a request ends with the request itself. A
    refusal, such as of a key or of a body that is wrong, is passed on if nobody answered otherwise. Raises `ApiError`
    (503) if no worker can be asked, 403 for what only an admin key may do. A key of the router's aborts its own
    requests, an admin key those of all.
    """
    foreign: list[str] = []
    if record.key is not None and not record.key.admin:
        own, foreign = _told_apart(state, body, record.owner)
        if not own:
            return json_response(AbortAnswer([], foreign))
        body = msgspec.json.encode({"req_ids": own})
    answering = (WorkerState.HEALTHY, WorkerState.DRAINING)
    shown = [each for each in state.router.snapshot().workers if each.state in answering]
    workers = [each.worker for each in shown if each.worker.role != "prefill"]
    told = await asyncio.gather(*(_ask(state, worker, body, headers, record.request_id) for worker in workers))
    answers = [each for each in told if isinstance(each, AbortAnswer)]
    if answers:
        return json_response(_joined([*answers, AbortAnswer([], foreign)]))
    for refusal in told:
        if isinstance(refusal, web.Response):
            return refusal
    raise unavailable("no worker could be asked", "none_healthy", retry_after=1)


async def _ask(
    state: GatewayState, worker: RouterWorker, body: bytes, headers: Mapping[str, str], request_id: str
) -> AbortAnswer | web.Response | None:
    """Return the answer of one worker; None if it cannot be used."""
    try:
        async with state.session.post(
            worker.url + ABORT_PATH, data=body, headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            data = await read_up_to(answer.content, _MAX_BYTES)
            if answer.status == 200:
                return _decoder.decode(data)
            if 400 <= answer.status < 500 and answer.status != 404:
                kept: CIMultiDict[str] = to_client(answer.headers, {"X-Request-Id": request_id})
                return web.Response(body=data, status=answer.status, headers=kept)
    except (*TROUBLE, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return None


def _told_apart(state: GatewayState, body: bytes, owner: str) -> tuple[list[str], list[str]]:
    """Return the ids in a body whose requests are an owner's, and all others. Raises `ApiError` for a wrong body."""
    asked, _ = _BODY.decode(body)
    if asked.req_ids is None or asked.abort_all:
        raise not_admin("abort_all")
    given = dict.fromkeys(asked.req_ids)
    own = [each for each in given if state.active.engine_ids(each, owner)]
    return own, [each for each in given if each not in own]


def _joined(answers: list[AbortAnswer]) -> AbortAnswer:
    aborted = dict.fromkeys(each for answer in answers for each in answer.aborted)
    missing = dict.fromkeys(each for answer in answers for each in answer.not_found if each not in aborted)
    return AbortAnswer(list(aborted), list(missing))
