"""Short helpers that build routers and requests for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.router.config import RouterConfig
from fd_core.router.router import Router
from fd_core.router.selection import IDLE, NoWorker, RouteRequest, Selection
from fd_core.router.workers import Role, RouterWorker

KV_PORT = 7001
policy_class = partial(Plugins.discover([]).load, ROUTER_POLICY)


def router_of(mixed: int = 0, prefill: int = 0, decode: int = 0, **settings: object) -> Router:
    """Return a router with this many healthy workers of each role, at time 0."""
    router = Router(RouterConfig(**settings), policy_class)  # type: ignore[arg-type]
    for role, count in (("mixed", mixed), ("prefill", prefill), ("decode", decode)):
        for number in range(count):
            add(router, f"http://{role}{number}", role)  # type: ignore[arg-type]
    return router


def add(router: Router, url: str, role: Role = "mixed", now: float = 0.0, instance: str | None = None) -> RouterWorker:
    """Register a worker whose first check passes."""
    return pass_check(router, router.register(url, role, now, instance=instance), now, instance)


def pass_check(router: Router, worker: RouterWorker, now: float = 0.0, instance: str | None = None) -> RouterWorker:
    """Report a passed check that includes everything the worker's role requires."""
    port = KV_PORT if worker.role == "prefill" else None
    return router.health(worker, True, now, instance=instance, role=worker.role, kv_port=port)


def request(tokens: Sequence[int] = (1, 2, 3), **more: object) -> RouteRequest:
    return RouteRequest(np.array(tokens, np.int32), **more)  # type: ignore[arg-type]


def chosen(answer: Selection | NoWorker) -> Selection:
    assert isinstance(answer, Selection), answer
    return answer


def refused(answer: Selection | NoWorker) -> NoWorker:
    assert isinstance(answer, NoWorker)
    return answer


def place(router: Router, tokens: Sequence[int] = (1, 2, 3), now: float = 0.0, rng: float = 0.0) -> Selection:
    return chosen(router.select(request(tokens), now, rng))


def serve(router: Router, tokens: Sequence[int] = (1, 2, 3), now: float = 0.0, rng: float = 0.0) -> RouterWorker:
    """Complete one request; return the worker that answered."""
    with place(router, tokens, now, rng) as selection:
        selection.first_token()
        if selection.mode == "pd":
            router.prefilled(selection, now)
        router.served(selection, now)
    return selection.decode


def is_idle(router: Router) -> bool:
    """Return True if every counter is zero and no fault was counted."""
    state = router.snapshot()
    return state.total == IDLE and state.departed == () and all(one.load == IDLE for one in state.workers)
