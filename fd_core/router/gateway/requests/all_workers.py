"""Requests to every worker: find the one that stores a response, POST /v1/abort_requests, and changes of workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ErrorAnswer, unavailable
from fd_core.router.gateway.http1.clients import ClientRequest, WholeAnswer, json_answer
from fd_core.router.gateway.http1.heads import Headers, forwarded
from fd_core.router.gateway.http1.workers import UPSTREAM_ERRORS
from fd_core.router.gateway.requests.forwarding import ANSWER_ONLY, to_worker
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.workers import RouterWorker, WorkerState
from fd_core.server.schemas.responses import AbortAnswer

RESPONSES_PATH: Final = "/v1/responses"
_CONTINUING: Final = frozenset({RESPONSES_PATH, f"{RESPONSES_PATH}/input_tokens"})
"""Paths whose requests may name the response before them."""
_TIMEOUT: Final = 5.0


class _Following(msgspec.Struct):
    previous_response_id: str | None = None


_following: Final = msgspec.json.Decoder(_Following)


async def keeper(
    state: GatewayState, request: ClientRequest, body: bytes, record: RequestRecord
) -> RouterWorker | None:
    """Return the worker that stores the response a request names, queried with the client's key; None if none does."""
    name = _named(request.path, body)
    if not name:
        return None
    headers = to_worker(state, request.headers, record, method="HEAD", path=f"{RESPONSES_PATH}/{name}")
    workers = _answering(state)
    found = await asyncio.gather(*(_keeps(state, worker, name, headers=headers) for worker in workers))
    return next((worker for worker, keeps in zip(workers, found, strict=True) if keeps), None)


def _answering(state: GatewayState, *, prefill: bool = False) -> list[RouterWorker]:
    """Return the workers that serve clients, and those that only `prefill` if asked for."""
    members = [each for each in state.router.registry if each.state in (WorkerState.HEALTHY, WorkerState.DRAINING)]
    return [each.worker for each in members if prefill or each.worker.role != "prefill"]


def _named(path: str, body: bytes) -> str | None:
    if path not in _CONTINUING:
        return path.removeprefix(RESPONSES_PATH + "/")
    if b"previous_response_id" not in body:
        return None
    try:
        return _following.decode(body).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the worker rejects it with the proper error
        return None


async def _keeps(state: GatewayState, worker: RouterWorker, name: str, headers: Headers) -> bool:
    target = f"{RESPONSES_PATH}/{quote(name, safe='')}"
    try:
        async with (
            asyncio.timeout(_TIMEOUT),
            await state.client.request("HEAD", worker.url, target, headers) as answer,
        ):
            return answer.status == 200
    except UPSTREAM_ERRORS:
        return False


ABORT_PATH: Final = "/v1/abort_requests"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
_decoder: Final = msgspec.json.Decoder(AbortAnswer)
_error_decoder: Final = msgspec.json.Decoder(ErrorAnswer)


async def abort(state: GatewayState, path: str, body: bytes, headers: Mapping[str, str]) -> WholeAnswer:
    """Return the ids that the workers aborted and those unknown to all; an error response if every worker failed."""
    responses = await _broadcast(state, path, body, headers=headers, timeout=_TIMEOUT, workers=_answering(state))
    answers = []
    for each in responses:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if each.status == 200:
                answers.append(_decoder.decode(each.body))
    if not answers:
        return _refusal(responses)
    aborted = dict.fromkeys(each for answer in answers for each in answer.aborted)
    missing = dict.fromkeys(each for answer in answers for each in answer.not_found if each not in aborted)
    return json_answer(AbortAnswer(list(aborted), list(missing)))


async def change_all(state: GatewayState, path: str, body: bytes, headers: Mapping[str, str]) -> WholeAnswer:
    """Change every worker; return the first error response, if any, which names the workers that changed all the same.

    A worker without the adapter that the others unload, such as one that was restarted, is as wanted. Raises `ApiError`
    (503) if a worker was not reached.
    """
    workers = _answering(state, prefill=True)
    responses = await _broadcast(state, path, body, headers=headers, timeout=300.0, workers=workers)
    pairs = [*zip((worker.url for worker in workers), responses, strict=True)]
    done = {url: each for url, each in pairs if each.status == 200}
    wanted = {200, 404} if done and path.partition("?")[0] == UNLOAD_PATH else {200}
    refused = {url: each for url, each in pairs if each.status not in wanted}
    if done and not refused:
        return next(iter(done.values()))
    if not done:
        return _refusal(responses)
    where = f"{', '.join(done)} changed, but not {', '.join(refused)}: repeat the request, or revert it"
    for each in refused.values():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if 400 <= each.status < 500:
                error = _error_decoder.decode(each.body).error
                error.message = f"{error.message} ({where})"
                return json_answer(ErrorAnswer(error), each.status)
    raise unavailable(f"not every worker responded: {where}", "partly_changed", retry_after=1)


async def _broadcast(
    state: GatewayState,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout: float,
    workers: Sequence[RouterWorker],
) -> list[WholeAnswer]:
    """Return the responses of workers; 503 stands for a worker that could not be reached."""

    async def ask(worker: RouterWorker) -> WholeAnswer:
        try:
            async with (
                asyncio.timeout(timeout),
                await state.client.request("POST", worker.url, path, headers, body) as answer,
            ):
                data = await answer.read_up_to(4 << 20)
                return WholeAnswer(answer.status, data, forwarded(answer.headers, ANSWER_ONLY))
        except UPSTREAM_ERRORS:
            return WholeAnswer(503)

    return await asyncio.gather(*map(ask, workers))


def _refusal(responses: list[WholeAnswer]) -> WholeAnswer:
    """Return the error response of a worker. Raises `ApiError` (503) if none responded."""
    for each in responses:
        if 400 <= each.status < 500:
            return each
    raise unavailable("no worker responded", "none_healthy", retry_after=1)
