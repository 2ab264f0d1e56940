"""The cases that every router policy has to pass.

A policy is pure: two instances with the same inputs make the same choices, independent of the process's clock and
random numbers. So the cases pass the same inputs to two instances, varied in every way that the router can.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from fd_core.plugins import ROUTER_POLICY, installed_plugins
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Candidates, RequestNum, RouterPolicy, RoutingContext
from fd_core.router.selection import IDLE, WorkerLoad
from fd_core.router.workers import ROLES, RouterWorker
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.purity import another_world, require_freed
from fd_core.testing.kit.growth import count_bytes, require_bounded, seconds_of
from fd_core.testing.kit.processes import python
from fd_core.testing.kit.requirements import constructed, lacks
from fd_core.testing.router_policies.cases import ROUTING, PolicyUnderTest, choices
from fd_core.testing.router_policies.day import FLEETS, require_ordinary_day
from fd_core.testing.stores.values import draws
from fd_core.types import IntArray

_BLOCKS: Final = 4
"""Full blocks of each prompt."""
_REQUESTS: Final = 400
"""Number of requests after which a policy must free old state."""
_PAST: Final = 33_000
"""Number of requests after which a choice takes as long as before."""
_TOKENS: Final = 100_000
_CHOICE_SECONDS: Final = 0.005
"""Time of a choice for a prompt of so many tokens, in which every other request waits."""
_OF_CORE: Final = 60
"""Times of a choice of `request_num` that one of another policy may take: 0.6 ms."""
_CONSTANT: Final = 40
"""Maximum number of results, independent of the number of requests."""
_LONG: Final = 1e6
"""Seconds after which all state has expired."""
_SMALL: Final = (5, 10, 20, 40, 80)
"""Loads at which a policy shows whether it prefers the less busy one of two workers."""
_LONGEST: Final = 2**14
"""Full blocks of the longest prompt, of a million tokens."""
_BUSY: Final = ((100_000, 1000), (300, 10))
"""Requests of a busy worker, all of which wait, and their prompt tokens as multiples of a prompt that it holds."""
_HELD: Final = (((0, 0), (1, 1)), ((0, 0), (0, 1)), ((0, 1), (1, 1)))
"""Hits and expected hits of two workers, as shares of a prompt: less of it, and more."""
_DRAWS: Final = (0.0, 0.25, 0.5, 0.75, 0.99)
_EDGES: Final = tuple(2**bits + more for bits in (8, 15, 16, 24, 31) for more in (-1, 0, 1))
"""Loads at which a number of some bits is full."""
_FEW: Final = (3, 257)
_FLEETS: Final = (1025, 4097)
"""Workers of which a policy that finds the least busy one of fewer finds it as well."""

_SERVED: Final = (8, 240)
"""Workers, and requests of one kind, which are many for each of them."""
_KINDS: Final = tuple(itertools.product(((5,), (300,), (30_000,), (5, 300, 30_000)), (False, True), (1, 2)))
"""Lengths of prompts in tokens, whether requests name sessions, and the number of models, each with its own workers."""

_Prompt = tuple[IntArray, tuple[bytes, ...]]
"""Tokens, and keys of blocks."""


class RouterPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value that users pass to `--policy`."""

    def policy_class(self) -> type[RouterPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        return installed_plugins().load(ROUTER_POLICY, self.policy)

    def router_config(self) -> RouterConfig:
        """Return the settings of the policy."""
        return RouterConfig()

    def new_policy(self) -> RouterPolicy:
        """Create the policy as the router does for one role."""
        return self.policy_class()(self.router_config())

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(ROUTER_POLICY, self.policy_class(), self.new_policy)

    def shown(
        self,
        workers: Sequence[tuple[RouterWorker, WorkerLoad, int]],
        number: float = 0.0,
        session: str | None = None,
        prompt: int = 0,
        now: float = 0.0,
    ) -> RoutingContext:
        """Return the router's inputs for workers with loads and hits, for the prompt of that number."""
        prefix = self.policy_class().uses_prefix
        tokens, keys = self._prompt(prompt, prefix)
        candidates = Candidates.of(
            Candidate(worker, load, *((hits, min(_BLOCKS, hits + 1)) if prefix else ()))
            for worker, load, hits in workers
        )
        return RoutingContext(candidates, tokens, keys, session=session, random=number, now=now)

    def _prompt(self, number: int, prefix: bool, blocks: int = _BLOCKS) -> _Prompt:
        """Return the tokens of a prompt and, if the policy sees them, the keys of its blocks."""
        tokens = np.arange(number, number + self.router_config().cache_block_size * blocks, dtype=np.int32)
        tokens.flags.writeable = False
        return tokens, tuple(f"{number}/{block}".encode() for block in range(blocks if prefix else 0))

    @pytest.mark.law("7.2")
    @pytest.mark.fd_cases(ROUTING)
    def test_case(self, case: KitCase) -> None:
        case.check(PolicyUnderTest(self.policy_class(), self.router_config()), "pytest", option="--fd-case")

    @pytest.mark.law("7.1", "7.2")
    @pytest.mark.fd_thorough
    @pytest.mark.parametrize(
        "fleet",
        [pytest.param(name, marks=[pytest.mark.fd_alone] * fleet.traced) for name, fleet in FLEETS.items()],
    )
    def test_an_ordinary_day(self, fleet: str) -> None:
        require_ordinary_day(self.policy_class(), self.router_config(), FLEETS[fleet])

    @pytest.mark.law("7.2")
    def test_another_process_chooses_the_same(self) -> None:
        """Compare with processes whose hashes of strings differ, and in which no instance has other settings."""
        cls = self.policy_class()
        policy = PolicyUnderTest(cls, self.router_config())
        if "<locals>" in cls.__qualname__ or cls.__module__ not in sys.modules:
            lacks("the class of the policy is local, and no other process can import it")
        texts = ["plain", "workers=256,loads=equal,calls=40", "urls=unordered,session=each its own,calls=40"]
        passed = json.dumps([cls.__module__, cls.__qualname__, msgspec.to_builtins(policy.config), texts])
        elsewhere = []
        for seed in ("77", "78"):  # the largest of 256 hashes is the same with two seeds once in some thousand runs
            with python(f"from {__name__} import print_choices; print_choices()", PYTHONHASHSEED=seed) as process:
                printed, _ = process.communicate(passed.encode())
            assert process.returncode == 0, "another process cannot use the policy, see its errors"
            elsewhere.append(json.loads(printed))
        cases = [ROUTING.case(text).values for text in texts]
        for case in cases:
            choices(policy, {**case, "block_size": 16, "max_sessions": 2})
        here = [choices(policy, case) for case in cases]
        assert elsewhere == [here, here], "another process with equal calls chose other workers"

    @pytest.mark.law("7.1", "7.2")
    def test_the_least_recent_of_more_sessions_than_max_sessions_is_forgotten(self) -> None:
        """Use one session in turn with others."""
        config = replace(self.router_config(), max_sessions=4)
        policy, homes = self.policy_class()(config), set()
        there = [(_worker(at, at), WorkerLoad(5 * at, 0, 999 * at), 0) for at in range(2)]
        for number in range(9):
            homes.add(policy.choose(self.shown(there, 0.5, "a session", now=1.0)).worker)
            there = [(_worker(at, at), WorkerLoad(5 - 5 * at, 0, 999 - 999 * at), 0) for at in range(2)]
            if number == 0 and policy.choose(self.shown(there, 0.5, "a session", now=1.0)).worker not in homes:
                break  # it keeps no sessions
            policy.choose(self.shown(there, 0.5, f"other {number}", now=1.0))
        assert len(homes) == 1, "with max-sessions=4, a session is forgotten although others were idle for longer"

    @pytest.mark.law("7.2")
    @pytest.mark.parametrize("field", WorkerLoad.__struct_fields__)
    def test_less_busy_worker_is_preferred_at_every_size_of_its_load(self, field: str) -> None:
        """Show two workers that differ in one field of the load by its half, then more; other fields are equal."""

        def chosen(load: int, other: int, count: int = 2) -> set[bool]:
            """Return whether the less busy one, first or last, was chosen."""
            loads = [WorkerLoad(**{**dict.fromkeys(fields, other), field: each}) for each in (load, 2 * load + 1)]
            return {
                self.new_policy()
                .choose(self.shown([(_worker(at, at), loads[at != less], 0) for at in range(count)], draw))
                .worker
                == _worker(less, less)
                for less in (0, count - 1)
                for draw in (0.0, 0.99)
            }

        def prefers(load: int, other: int, count: int = 2) -> bool:
            return chosen(load, other, count) == {True}

        fields = WorkerLoad.__struct_fields__
        others = [other for other in (0, 1, 2, 300, 70_000) if all(prefers(load, other) for load in _SMALL)]
        if not others:
            if field != "waiting":  # which are requests that do not decode yet
                busier = all(chosen(load, load) == {False} for load in _SMALL)
                assert not busier, f"of two workers that differ only in {field}, it chooses the busier one"
            lacks(f"a choice between two workers does not depend on their {field}")
        for load, other in itertools.product(_EDGES, others):
            assert prefers(load, other), (
                f"of {field}={load:,} and {2 * load + 1:,}, where other loads are {other:,}, it chose the larger one; "
                f"with up to {_SMALL[-1]} it chooses the smaller one"
            )
        if all(prefers(_SMALL[0], others[0], count) for count in _FEW):  # it does not draw some of them
            for count in _FLEETS:
                assert prefers(_SMALL[0], others[0], count), (
                    f"the worker with the fewest {field} is not chosen among {count:,}, but among {_FEW[-1]} it is"
                )

    @pytest.mark.law("7.2")
    def test_a_cached_prefix_counts_but_does_not_outweigh_every_load(self) -> None:
        """Show workers that hold more or less of a prompt, equally busy ones and a busy one among idle ones."""
        prefix, none, longest = self.policy_class().uses_prefix, (0, 0), math.log2(_LONGEST)
        lengths = [_LONGEST, *(round(2 ** draws(at).uniform(2, longest)) for at in range(3))] if prefix else []
        prompts = [self._prompt(0, prefix=True, blocks=blocks) for blocks in (_BLOCKS, *lengths)]
        for pair, load in itertools.product(_HELD, (IDLE, WorkerLoad(5, 1, 1000))):
            most = 0
            for prompt in prompts:
                less, more = (tuple(each * len(prompt[1]) for each in held) for held in pair)
                both = [
                    (first, draw, self._among([(load, first), (load, less if first == more else more)], draw, prompt))
                    for first, draw in itertools.product((less, more), _DRAWS)
                ]
                chosen = sum((at == 0) == (first == more) for first, _, at in both)
                most = most or chosen
                if prefix:
                    assert 0 < most <= chosen, (
                        f"of two workers with equal loads, it chooses the one with hits and expected hits of {more} "
                        f"{chosen} times, and that with {less} {len(both) - chosen} times"
                    )
                else:
                    assert all(at == self._among([(load, none)] * 2, draw, prompt) for _, draw, at in both), (
                        "the choice depends on the hits of workers or the keys of the prompt, but the class does not "
                        "set `uses_prefix = True`: the router will supply neither"
                    )
        for (requests, ahead), prompt in itertools.product(_BUSY, prompts if prefix else ()):
            tokens, whole = prompt[0], (len(prompt[1]),) * 2
            busy = WorkerLoad(requests, requests, ahead * len(tokens))
            assert all(self._among([(busy, whole), *[(IDLE, none)] * 3], draw, prompt) for draw in _DRAWS), (
                f"of four workers, three of them idle, it chose the one with {requests:,} requests, which wait for "
                f"{busy.prefill_tokens:,} tokens, since that holds a prompt of {len(tokens):,}: it is served last"
            )

    def _among(self, workers: Sequence[tuple[WorkerLoad, tuple[int, ...]]], draw: float, prompt: _Prompt) -> int:
        """Return the index that a new policy chooses of workers with these loads, hits and expected hits."""
        made = [Candidate(_worker(at, at), load, *hits) for at, (load, hits) in enumerate(workers)]
        shown = RoutingContext(Candidates.of(made), *prompt, session=None, random=draw, now=0.0)
        return made.index(self.new_policy().choose(shown))

    @pytest.mark.law("7.1")
    def test_every_worker_serves_whatever_arrives(self) -> None:
        """Show prompts of one size or of several, new sessions or none, and requests of two models in turn."""
        served = {kind: self._served(*kind) for kind in _KINDS}
        most = max(served.values())
        for (lengths, sessions, models), count in served.items():
            what = f"prompts of {lengths} tokens with{'' if sessions else 'out'} sessions, of {models} models in turn"
            assert count == most, (
                f"requests with {what} are served by {count} of {_SERVED[0]} workers, others by {most}"
            )

    def _served(self, lengths: Sequence[int], sessions: bool, models: int) -> int:
        """Return the number of workers that serve some of the requests, each of which ends a while later."""
        (count, calls), policy, draw = _SERVED, self.new_policy(), draws(len(lengths))
        workers, running = [_worker(at, at) for at in range(count)], list[tuple[RouterWorker, int]]()
        for call in range(calls):
            length = lengths[call % len(lengths)]
            _, keys = self._prompt(call, policy.uses_prefix, length // policy.config.cache_block_size)
            there = []
            for worker in workers[call % models :: models]:
                own = [tokens for each, tokens in running[-2 * count :] if each is worker]
                there.append((worker, WorkerLoad(len(own), 0, sum(own)), 0))
            shown = self.shown(there, draw.random(), f"session {call}" if sessions else None, now=float(call))
            tokens = np.arange(call, call + length, dtype=np.int32)
            running.append((policy.choose(replace_fields(shown, tokens=tokens, keys=keys)).worker, length))
        return len({worker for worker, _ in running})

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("7.2")
    def test_the_time_of_a_choice_is_at_most_linear_in_workers(self) -> None:
        """It takes about as long as with the core's `request_num`, in which the load of the machine cancels."""
        few, many = (self._seconds(self.new_policy(), workers=workers) for workers in (64, 1024))
        assert many < 50 * few, f"a choice among 1,024 workers takes {many / few:.0f} times as long as among 64"
        most = _OF_CORE * self._seconds(RequestNum(self.router_config()), workers=64)
        what = f"a choice among 64 workers takes {1e6 * few:.0f} microseconds of the router's event loop"
        assert few < most, f"{what}, expected less than {1e6 * most:.0f}"

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("7.2")
    def test_a_choice_for_a_long_prompt_takes_little_time(self) -> None:
        policy, times = self.new_policy(), list[float]()
        there = [(_worker(at, at), WorkerLoad(at % 5, at % 2, at % 7), at % 3) for at in range(64)]
        keys = tuple(map(str.encode, map(str, range(_TOKENS // policy.config.cache_block_size * policy.uses_prefix))))
        for number in range(9):
            context = replace_fields(
                self.shown(there, number / 9, f"long {number}"),
                tokens=np.arange(number, number + _TOKENS, dtype=np.int32),
                keys=keys,
            )
            times.append(seconds_of(partial(policy.choose, context)))
        took = f"a choice for a prompt of {_TOKENS:,} tokens takes {1000 * min(times):.1f} ms"
        assert min(times) < _CHOICE_SECONDS, f"{took} of the router's event loop, expected less than 5"

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("7.2")
    def test_the_time_of_a_choice_does_not_grow_with_past_requests(self) -> None:
        """Also once there are as many sessions as the settings allow."""
        policy = self.policy_class()(replace(self.router_config(), max_sessions=_PAST // 4))
        before = self._seconds(policy, workers=4)
        shown = self.shown([(_worker(at, at), WorkerLoad(at % 2), 0) for at in range(4)])
        for number in range(_PAST):
            session, now, (tokens, keys) = (
                f"session {number}",
                1 + number / 100,
                self._prompt(number, policy.uses_prefix),
            )
            draw = number % 101 / 101
            policy.choose(replace_fields(shown, tokens=tokens, keys=keys, session=session, random=draw, now=now))
            if number % 4096 == 4095:
                names = [(f"{number}/{again}", (number + again + 1) * _PAST) for again in range(2)]
                ratio = min(self._seconds(policy, workers=4, name=each, prompt=one) for each, one in names) / before
                assert ratio < 5, f"after {number + 1:,} requests a choice takes {ratio:.0f} times as long"

    def _seconds(self, policy: RouterPolicy, workers: int, name: str = "timed", prompt: int = _PAST) -> float:
        """Return the shortest time of a choice among so many workers, for new prompts from that number on."""
        there = [(_worker(at, at), WorkerLoad(at % 5, at % 2, at % 7), at % 3) for at in range(workers)]
        times = []
        for number in range(25):
            context = self.shown(there, number / 25, f"{name} {number}", prompt=prompt + number, now=0.0)
            times.append(seconds_of(partial(policy.choose, context)))
        return min(times)

    @pytest.mark.law("7.1")
    @pytest.mark.parametrize("expired", [True, False])
    def test_the_process_holds_nothing_of_past_requests_and_workers(self, expired: bool) -> None:
        """Neither in the instance nor in its class, its module or a cache of a function.

        Every second request is served by a worker that never leaves. Sessions that have not `expired` are kept, as many
        as `max_sessions`.
        """
        policy, there = self.policy_class()(replace(self.router_config(), max_sessions=64)), [(_worker(0, 0), IDLE, 0)]

        def use(number: int) -> None:
            if not expired:
                policy.choose(self.shown(there, 0.5, f"session {number}", number % 8))
                return
            worker = _worker(number % 2 and number, number % 2 and number)
            policy.choose(self._varied(worker, number))
            if number % 2:
                policy.departed(worker)
            policy.sweep((number + 1) * _LONG)

        what = "requests and as many workers" if expired else "sessions, none of them expired, with max-sessions=64"
        require_bounded(use, _REQUESTS, what, "7.1")
        require_freed(self.new_policy, "7.1")

    @pytest.mark.law("7.1")
    def test_a_session_takes_no_memory_for_its_prompt(self) -> None:
        """A quarter of it at most, as for the keys of its blocks: there are `max_sessions` of them."""
        policy, there = self.new_policy(), [(_worker(0, 0), IDLE, 0)]
        prompts = [self._prompt(number, policy.uses_prefix, 100) for number in range(4)]

        def use() -> None:
            for number in range(_REQUESTS // 4):
                tokens, keys = prompts[number % 4]
                shown = self.shown(there, 0.5, f"session {number}", now=1.0)
                policy.choose(replace_fields(shown, tokens=tokens.copy(), keys=keys))

        held, most = count_bytes(use), _REQUESTS // 4 * prompts[0][0].nbytes // 4
        what = f"after {_REQUESTS // 4} sessions with prompts of {len(prompts[0][0]):,} tokens"
        assert held <= most, f"{what} the policy holds {held:,} bytes, expected at most {most:,}"

    def _varied(self, worker: RouterWorker, number: int) -> RoutingContext:
        """Return a context that has nothing in common with those of other numbers, except for the worker."""
        load = WorkerLoad(number, number // 2, 97 * number)
        shown = self.shown(
            [(worker, load, number % 4)], number / 1e6, f"session {number}", prompt=number, now=number * _LONG
        )
        return replace_fields(shown, tokens=shown.tokens[: -1 - number % 50])

    @pytest.mark.law("7.1")
    def test_what_it_works_out_once_for_some_workers_does_not_grow(self) -> None:
        """Call it for the same workers, for which the router keeps the results of `Candidates.once`."""
        policy, workers = self.new_policy(), tuple(_worker(at, at) for at in range(3))
        results: dict[Callable[..., Any], Any] = {}
        for number in range(_REQUESTS):
            shown = self.shown([(workers[0], IDLE, 0)], session=f"session {number}", prompt=number, now=number)
            seen = Candidates(workers, np.array([[number % 3, 1, 2]] * 3, np.int64), worked_out=results)
            policy.choose(replace_fields(shown, candidates=seen))
        assert len(results) < _CONSTANT, (
            f"after {_REQUESTS} requests for the same workers, `once` holds {len(results)} results; pass it the same "
            "function each time"
        )


def print_choices() -> None:
    """Print the choices of a policy in some cases; a test writes both to standard input."""
    module, name, config, texts = json.load(sys.stdin)
    with another_world(shift=77):  # also for a module that imports the clocks by name
        cls = getattr(importlib.import_module(module), name)
        policy = PolicyUnderTest(cls, msgspec.convert(config, RouterConfig))
        print(json.dumps([choices(policy, ROUTING.case(text).values) for text in texts]))


def _worker(at: int, incarnation: int) -> RouterWorker:
    return RouterWorker(f"http://worker{at}", ROLES[0], incarnation)
