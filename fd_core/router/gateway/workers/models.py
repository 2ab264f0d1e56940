"""The models that workers serve: the union of their GET /v1/models, and the name that leads to a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from fd_core.http.errors import ApiError, unavailable
from fd_core.router.gateway.requests.relaying import TROUBLE, read_up_to
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.workers import RouterWorker, WorkerState

_MAX_BYTES: Final = 1 << 20
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)


class _List(msgspec.Struct):
    """A worker's list of models, each as the worker describes it."""

    data: list[dict[str, Any]]


_decoder: Final = msgspec.json.Decoder(_List)


async def union(state: GatewayState, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return each model once, in the order of the workers. Raises `ApiError` if no worker can be asked.

    Every healthy worker is asked on every call: names change rarely, but clients ask for them rarely too. `headers` are
    those of the client, as they go to workers; a worker's refusal of a key is passed on.
    """
    workers = [w.worker for w in state.router.snapshot().workers if w.state is WorkerState.HEALTHY]
    if not workers:
        raise unavailable("no worker is healthy", "none_healthy", retry_after=1)
    found = await asyncio.gather(*(_of(state, worker, headers) for worker in workers))
    lists = [each for each in found if not isinstance(each, ApiError)]
    if not lists:
        raise next(each for each in found if isinstance(each, ApiError))
    models: dict[str, dict[str, Any]] = {}
    for each in lists:
        for model in each:
            models.setdefault(str(model.get("id")), model)
    return list(models.values())


async def first_root(state: GatewayState) -> str | None:
    """Return the name under which a worker loaded its first model; None if no worker answers."""
    try:
        models = await union(state, state.own_headers)
    except ApiError:
        return None
    root = models[0].get("root") or models[0].get("id") if models else None
    return root if isinstance(root, str) else None


async def served(state: GatewayState, worker: RouterWorker) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the names of the models of one worker, and those that are adapters; None if it does not answer."""
    found = await _of(state, worker, state.own_headers)
    if isinstance(found, ApiError):
        return None
    lengths = [most for model in found if type(most := model.get("max_model_len")) is int]
    state.costs.context = max([*lengths, *filter(None, [state.costs.context])], default=None)
    named = [(name, model.get("parent")) for model in found if isinstance(name := model.get("id"), str)]
    return frozenset(name for name, _ in named), frozenset(name for name, parent in named if parent)


async def _of(state: GatewayState, worker: RouterWorker, headers: Mapping[str, str]) -> list[dict[str, Any]] | ApiError:
    try:
        async with state.session.get(
            f"{worker.url}/v1/models", headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            if answer.status in (401, 403):
                return ApiError(answer.status, "the workers take another API key", code="invalid_api_key")
            if answer.status == 200:
                return _decoder.decode(await read_up_to(answer.content, _MAX_BYTES)).data
    except (*TROUBLE, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return unavailable("no worker names the models that it serves", "none_healthy", retry_after=1)
