"""The cases that every router policy has to pass.

A policy is pure: two instances with the same inputs make the same choices, independent of the process's clock and
random numbers. So the cases pass the same inputs to two instances, varied in every way that the router can.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Candidates, RouterPolicy, RoutingContext
from fd_core.router.router import Router
from fd_core.router.selection import IDLE, RouteRequest, Selection, WorkerLoad
from fd_core.router.workers import ROLES, Role, RouterWorker
from fd_core.testing.policies.purity import another_world, holdings

_BLOCKS: Final = 4
"""Full blocks of each prompt."""
_REQUESTS: Final = 400
"""Number of requests after which a policy must free old state."""
_CONSTANT: Final = 40
"""Maximum growth in objects, independent of the number of requests."""
_NEVER: Final = 1e9
"""Time in seconds at which all state has expired."""

_numbers = st.integers(0, 3)
_seen = st.lists(st.tuples(_numbers, _numbers, _numbers, _numbers), min_size=1, max_size=5)


class _Choice(NamedTuple):
    """One call of `choose`: the candidate workers, with waiting and running requests, tokens and hits."""

    loads: list[tuple[int, int, int, int]]
    number: float
    session: str | None
    prompt: int


_calls = st.builds(_Choice, _seen, st.floats(0, 1, exclude_max=True), st.sampled_from([None, "s", "t"]), _numbers)
_departures = st.integers(0, 4)


class RouterPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value that users pass to `--policy`."""
    examples: int = 100
    """Number of random sequences of calls."""

    def policy_class(self) -> type[RouterPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        from fd_core.plugins import ROUTER_POLICY, installed_plugins

        return installed_plugins().load(ROUTER_POLICY, self.policy)

    def router_config(self) -> RouterConfig:
        """Return the settings of the policy."""
        return RouterConfig()

    def new_policy(self) -> RouterPolicy:
        """Create the policy as the router does for one role."""
        return self.policy_class()(self.router_config())

    def shown(
        self,
        workers: Sequence[tuple[RouterWorker, WorkerLoad, int]],
        number: float = 0.0,
        session: str | None = None,
        prompt: int = 0,
        now: float = 0.0,
    ) -> RoutingContext:
        """Return the router's inputs for workers with loads and hits, for the prompt of that number."""
        size, prefix = self.router_config().cache_block_size, self.policy_class().uses_prefix
        tokens = np.arange(prompt, prompt + size * _BLOCKS, dtype=np.int32)
        tokens.flags.writeable = False
        keys = tuple(f"{prompt}/{block}".encode() for block in range(_BLOCKS))
        candidates = Candidates.of(
            Candidate(worker, load, *((hits, min(_BLOCKS, hits + 1)) if prefix else ()))
            for worker, load, hits in workers
        )
        return RoutingContext(candidates, tokens, keys if prefix else (), session=session, random=number, now=now)

    @pytest.mark.law("7.2")
    def test_it_chooses_a_candidate_and_equal_calls_give_equal_answers(self) -> None:
        @settings(max_examples=self.examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(calls=st.lists(_calls | _departures, min_size=1, max_size=8), shift=st.integers(1, 1000))
        def check(calls: list[_Choice | int], shift: int) -> None:
            one, other = self.new_policy(), self.new_policy()
            incarnations, now = [0, 1, 2, 3, 4], 0.0
            for call in calls:
                now += 1
                if isinstance(call, int):  # a worker leaves, and returns as a new incarnation
                    left = _worker(call, incarnations[call])
                    incarnations[call] += 5
                    for policy in (one, other):
                        policy.departed(left)
                        policy.sweep(now)
                    continue
                workers = [
                    (_worker(at, incarnations[at]), WorkerLoad(waiting + running, waiting, 100 * tokens), hits)
                    for at, (waiting, running, tokens, hits) in enumerate(call.loads)
                ]
                context = self.shown(workers, call.number, call.session, prompt=call.prompt, now=now)
                chosen = one.choose(context)
                assert any(chosen is candidate for candidate in context.candidates), "it chose no candidate"
                with another_world(shift):
                    again = other.choose(context)
                assert again is chosen, "another instance with the same inputs chose another worker"

        check()

    @pytest.mark.law("7.2")
    @pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
    def test_only_candidate_is_chosen_under_any_load(self, number: float) -> None:
        policy = self.new_policy()
        for load in (IDLE, WorkerLoad(10_000, 10_000, 10**9)):
            context = self.shown([(_worker(0, 0), load, 0)], number, "s")
            assert policy.choose(context) is context.candidates[0]

    @pytest.mark.law("7.1")
    def test_it_forgets_workers_that_are_gone_and_requests_that_are_long_past(self) -> None:
        policy = self.new_policy()
        policy.choose(self.shown([(_worker(0, 0), IDLE, 0)]))
        before = holdings(policy)
        for number in range(1, _REQUESTS):
            worker = _worker(number, number)
            policy.choose(self.shown([(worker, IDLE, 0)], session=f"session {number}", prompt=number, now=number))
            policy.departed(worker)
        policy.sweep(_NEVER)
        grown = holdings(policy) - before
        assert grown < _CONSTANT, f"it holds {grown} objects more after {_REQUESTS} requests and as many workers"

    @pytest.mark.law("7.1")
    @pytest.mark.parametrize("pair", [False, True], ids=["mixed", "pair"])
    def test_the_router_serves_with_it_and_counts_to_zero(self, pair: bool) -> None:
        name = self.policy_class().__name__  # `role` is part of error messages
        config = replace(self.router_config(), policy=name, prefill_policy=name, decode_policy=name)
        router = Router(config, lambda _: self.policy_class())
        draw = random.Random(1)  # noqa: S311 - not for cryptography
        roles: tuple[Role, ...] = ("prefill", "decode") if pair else ("mixed",)
        for at in range(3):
            for role in roles:
                worker = router.register(f"http://{role}{at}", role, 0.0)
                router.health(worker, True, 0.0, role=role, kv_port=7001 if role == "prefill" else None)
        running: list[Selection] = []
        for number in range(100):
            tokens = np.arange(number % 7, number % 7 + 300, dtype=np.int32)
            answer = router.select(RouteRequest(tokens), float(number), draw.random())
            assert isinstance(answer, Selection), answer
            running.append(answer)
            if len(running) > 10:
                _end(router, running.pop(draw.randrange(len(running))), float(number))
        for selection in running:
            _end(router, selection, 100.0)
        state = router.snapshot()
        assert state.total == IDLE and all(one.load == IDLE for one in state.workers)
        assert sum(one.tally.selected for one in state.workers) == 100 * len(roles)


def _worker(at: int, incarnation: int) -> RouterWorker:
    return RouterWorker(f"http://worker{at}", ROLES[0], incarnation)


def _end(router: Router, selection: Selection, now: float) -> None:
    with selection:
        selection.first_token()
        if selection.mode == "pd":
            router.prefilled(selection, now)
        router.served(selection, now)
