"""Axes of what the policies of a scheduler order: waiting requests, and running ones of which one is preempted."""

from __future__ import annotations

import heapq
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Final, TypeVar

import numpy as np

from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.victims import RunningRequests, VictimPolicy
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.kit.growth import cpu_seconds
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.stores.values import draws

_FIRST: Final = (0, 2**15 - 3, 2**16 - 3, 2**31 - 3, 2**32 - 3)
"""Arrival of the oldest request."""
WAITING_AXES: Final = (
    Axis("first", _FIRST, ("QueuedRequest.arrival",)),
    Axis("prompt", ("mixed", "one", "large"), ("QueuedRequest.num_tokens",)),
    Axis("output", ("mixed", "one", "most"), ("QueuedRequest.max_new_tokens",)),
    Axis("priority", ("same", "falling", "wide"), ("QueuedRequest.priority",)),
    Axis("tenants", (1, 2, 7, 100), ("QueuedRequest.tenant",)),
    Axis("preempted", (0, 2, 5), ("QueuedRequest.preempted",)),
    Axis("aborted", (0, 2, 5)),
    Axis("parked", (0, 1, 3)),
    Axis("requests", (30, 1, 2, 200)),
    Axis("slots", (3, 1, 50)),
)
"""Every so many requests wait for an operation, such as the compilation of a grammar, before they join the queue."""
RUNNING_AXES: Final = (
    Axis("rows", (4, 1, 2, 3, 64, 65, 300), ("RunningRequests.slots",)),
    Axis("oldest", _FIRST, ("RunningRequests.arrivals",)),
    Axis("priorities", ("same", "two", "wide"), ("RunningRequests.priorities",)),
    Axis("tokens", ("mixed", "same", "large"), ("RunningRequests.num_tokens",)),
    Axis("gained", ("none", "below_a_block", "mixed"), ("RunningRequests.num_gained",)),
    Axis("again", ("none", "some", "all"), ("RunningRequests.preempted_before",)),
    Axis("block", (16, 1, 4096), ("RunningRequests.block_size",)),
)
_TENANTS: Final[Mapping[str, Callable[[int], str]]] = {
    "short": lambda at: f"t{at}",
    "long": lambda at: f"{'organisation-' * 20}{at}",
    "case": lambda at: format(at, "03b").translate({48: "a", 49: "A"}),
    "paths": lambda at: f"team/{at}-{at}@{at}:x {at}",
    "spaces": lambda at: " " * at,
}
"""Names of tenants, which differ in nothing else."""
SHARE_AXES: Final = (
    Axis("tenants", (2, 3, 7, 40)),
    Axis("names", tuple(_TENANTS), ("QueuedRequest.tenant", "SchedulingPolicy.turn.flow")),
    Axis("size", (30, 3000, 2**24), ("QueuedRequest.num_tokens",)),
    Axis("prompt", ("same", "longer", "all")),
    Axis("promised", ("same", "more"), ("QueuedRequest.max_new_tokens",)),
    Axis("used", ("same", "less", "more"), ("SchedulingPolicy.ended.num_computed",)),
    Axis("preempted", (0, 5), ("QueuedRequest.preempted",)),
    Axis("aborted", (0, 2)),
    Axis("waiting", (1, 10)),
    Axis("priorities", ("same", "spread"), ("QueuedRequest.priority",)),
    Axis("slots", (4, 1, 30)),
)
"""Tenants that always wait, and how the requests of the last one differ from those of the others; if all
their tokens are the prompt's, they end without output. Those of `spread` priorities are as important or less. Of four
requests of the last tenant one is seven times as large as the others; requests end in any order."""
ADMISSION_AXES: Final = (
    Axis("tenants", ("t0-t0", "t1-t0", "t0-idle", "t0-back", "t1-new", "t1-", "-t0"), ("QueuedRequest.tenant",)),
    Axis("large_one", ("none", "prompt", "output", "other_prompts", "other_outputs")),
    Axis("large", (5000, 2**20), ("QueuedRequest.num_tokens", "QueuedRequest.max_new_tokens")),
    Axis("past", ("new", "one", "several")),
    Axis("days", (0, 2**31, 2**34)),
    Axis("priority", (0, 5, -3), ("QueuedRequest.priority",)),
    Axis("preempted", (False, True), ("QueuedRequest.preempted",)),
    Axis("aborted", (0, 2)),
)
"""One request, while others of the same priority keep arriving. `tenants` are that of the request, and that of the
others: t0, one without requests so far, one whose only request ended at the start, each time a new one, or none, which
is the empty string. In the `past`, many requests of so many tenants have ended; days before, one was served so many
tokens. All prompts and outputs are small but for a `large_one`: a policy may have a limit anywhere between them."""
_PATIENCE: Final = 200
"""Admissions of later requests that may precede a request."""
_PAST: Final = (0, 2**24, 2**31, 2**32, 2**34)
"""Tokens that another tenant used on days before: a count of so many bits is full soon."""
EXCUSED: Final = {"SchedulingPolicy.displaced_by.victims": "victim policies have axes of their own"}
"""Fields of the contract that no axis varies, with the reason."""
_CHOICE_MS: Final = 5
"""Milliseconds in which a policy has to choose among 256 running requests; those of the core take 0.02."""
_WIDE: Final = (0, 127, 128, -129, 2**15, 2**31, -(2**31) - 1, 2**40)

Policy = TypeVar("Policy")
MakePolicy = Callable[[], SchedulingPolicy]
MakeVictims = Callable[[], VictimPolicy]


def requests_of(case: Case) -> list[QueuedRequest]:
    """Return the requests of a case, in the order of their arrival."""
    prompts: Mapping[str, Callable[[int], int]] = {
        "mixed": lambda at: 1 + 37 * at % 900,
        "one": lambda _: 1,
        "large": lambda at: 2**17 + at % 3,
    }
    outputs: Mapping[str, Callable[[int], int]] = {
        "mixed": lambda at: 1 + 53 * at % 700,
        "one": lambda _: 1,
        "most": lambda _: 2**31 - 1,
    }
    priorities: Mapping[str, Callable[[int], int]] = {
        "same": lambda _: 0,
        "falling": lambda at: -at,
        "wide": lambda at: _WIDE[at % len(_WIDE)],
    }
    prompt, output = prompts[str(case["prompt"])], outputs[str(case["output"])]
    priority, tenants = priorities[str(case["priority"])], int_of(case, "tenants")
    return [
        QueuedRequest(int_of(case, "first") + at, prompt(at), output(at), priority(at), f"t{at * at % tenants}", False)
        for at in range(int_of(case, "requests"))
    ]


class Queue:
    """The waiting queue as a policy's contract defines it, without a heap: it looks at all requests."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self._waiting: dict[int, tuple[QueuedRequest, str | None]] = {}
        self._parked: set[int] = set()
        """Requests that wait for an operation."""
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._flows: set[str | None] = set()
        """Flows in which requests waited so far."""

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, request: QueuedRequest) -> None:
        """Set a new request aside until it is added, or aborted, of which the policy is asked nothing yet."""
        self._parked.add(request.arrival)
        self._event(request, "arrived", lambda: self.policy.arrived(request))

    def add(self, request: QueuedRequest) -> None:
        """Add a new request, one that waited for an operation, or one that was preempted, which keeps its rank."""
        if request.arrival not in self._ranks:
            if request.arrival not in self._parked:
                self._event(request, "arrived", lambda: self.policy.arrived(request))
            self._parked.discard(request.arrival)
            rank = self._ranks[request.arrival] = self.policy.rank(request)
            numbers = isinstance(rank, tuple) and all(isinstance(each, (int, np.integer)) for each in rank)
            require(numbers, "8", f"expected a rank of whole numbers for {request}, got {rank!r}")
        flow = self.policy.flow(request)
        require(flow is None or isinstance(flow, str), "8", f"expected the name of a flow for {request}, got {flow!r}")
        self._flows.add(flow)
        self._waiting[request.arrival] = request, flow

    def admit(self) -> QueuedRequest:
        """Remove and return the request that is next."""
        turns = {flow: self.policy.turn(flow) for _, flow in self._waiting.values()}
        for flow, turn in turns.items():
            # The queue would look for ever for the flow whose turn is NaN, which equals nothing.
            require(math.isfinite(turn), "8", f"expected a finite number as the turn of flow {flow!r}, got {turn!r}")
        lowest = min(turns.values())
        flows = sorted((flow for flow in turns if turns[flow] == lowest), key=lambda flow: (flow is not None, flow))
        inside = [request for request, flow in self._waiting.values() if flow == flows[0]]
        chosen = min(inside, key=lambda request: (self._ranks[request.arrival], request.arrival))
        del self._waiting[chosen.arrival]
        self._event(chosen, "admitted", lambda: self.policy.admitted(chosen))
        return chosen

    def abort(self, request: QueuedRequest) -> None:
        """End a request that waits, in the queue or for an operation."""
        self._waiting.pop(request.arrival, None)
        self.end(request, request.num_tokens)

    def end(self, request: QueuedRequest, num_computed: int) -> None:
        """End an admitted request, or one that waited, and show it as it is then: with all of its tokens."""
        request = grown(request, max(0, num_computed - request.num_tokens))
        known = self._ranks.pop(request.arrival, None)
        self._parked.discard(request.arrival)
        unknown = "" if known else ", aborted while it waited for its grammar, before the policy was asked for its rank"
        self._event(request, f"ended{unknown}", lambda: self.policy.ended(request, request.num_tokens))

    def _event(self, request: QueuedRequest, name: str, handle: Callable[[], None]) -> None:
        """Notify the policy; only the turn of the flows of this request may change."""
        flows = {flow for _, flow in self._waiting.values()}
        own = {self.policy.flow(replace(request, preempted=preempted)) for preempted in (False, True)}
        before = {flow: self.policy.turn(flow) for flow in flows - own}
        try:
            handle()
        except Exception as error:  # noqa: BLE001 - a policy may raise anything
            broken("8", f"{request} {name}: the policy raises {error!r}")
        for flow in own & self._flows:  # as the queue does, also for the last request of a flow
            try:
                self.policy.turn(flow)
            except Exception as error:  # noqa: BLE001
                broken("8", f"after {request} {name}: the turn of its flow {flow!r} raises {error!r}")
        if request.arrival not in self._ranks:  # it ended
            self._flows -= own
        after = {flow: self.policy.turn(flow) for flow in flows - own}
        require(before == after, "8", f"an event of {request} changed the turns of other flows: {before}, {after}")


def serve_past(queue: Queue, tokens: int, size: int) -> Iterator[int]:
    """Serve another tenant as many tokens as in days, but for ten requests of a `size`; return the next arrivals.

    Its last request runs on, so that what a policy counts goes on as well.
    """
    arrivals, whole = itertools.count(tokens), max(0, tokens - 10 * size)
    sizes = [whole // 16] * 15 + [whole - whole // 16 * 15, size] if whole else []
    waiting = [QueuedRequest(next(arrivals), each - 1, 1, 0, "of the past", preempted=False) for each in sizes]
    for request in waiting:
        queue.add(request)
    for used in sizes[:-1]:
        queue.end(queue.admit(), used)
    for _ in sizes[-1:]:
        queue.admit()
    return arrivals


def orders(case: Case, policy: SchedulingPolicy, requests: Sequence[QueuedRequest]) -> Iterator[int]:
    """Serve the requests of a case; yield the arrival of each admission.

    Some requests are preempted, several times, and some end without output, as if they were aborted.

    Before each group of requests, others arrive that are aborted while they wait.
    """
    queue, running, left = Queue(policy), list[QueuedRequest](), [*requests]
    aborted = int_of(case, "first") + len(left)
    every, admitted, each, parked = int_of(case, "preempted"), 0, int_of(case, "parked"), list[QueuedRequest]()
    while left or parked or len(queue) or running:
        others = [
            QueuedRequest(aborted + at, 10, 10, 0, "t0", False) for at in range(int_of(case, "aborted") if left else 0)
        ]
        for request in parked:  # those of the turn before
            queue.add(request)
        parked = [request for request in left[:4] if each and request.arrival % each == 0]
        for request in (*others, *left[:4]):
            aside = request in parked or (request in others and each and request.arrival % 2)
            (queue.park if aside else queue.add)(request)
        for request in others:
            queue.abort(request)
        aborted += len(others)
        del left[:4]
        while len(queue) and len(running) < int_of(case, "slots"):
            running.append(queue.admit())
            admitted += 1
            yield running[-1].arrival
            if every and admitted % every == 0:
                queue.add(returned(running.pop()))
        if running:
            ended = running.pop(0)
            queue.end(ended, ended.num_tokens + min(ended.max_new_tokens, ended.arrival % 7 * 8))


def returned(request: QueuedRequest) -> QueuedRequest:
    """Return a request that was preempted after one more token."""
    return replace(grown(request, 1), preempted=True)


def grown(request: QueuedRequest, count: int) -> QueuedRequest:
    """Return a request after so many more tokens."""
    left = max(0, request.max_new_tokens - count)
    return replace(request, num_tokens=request.num_tokens + count, max_new_tokens=left)


def check_order(make: MakePolicy, case: Case) -> None:
    """Every request is admitted, and two policies with the same inputs order them equally. Raises `AssertionError`.

    Between the admissions of the second one, a third one serves other requests.
    """
    requests = requests_of(case)
    found = list(orders(case, make(), requests))
    names = {request.arrival for request in requests}
    require(set(found) == names, "2.2", f"expected admissions of {len(names)} requests, got {len(set(found))}")
    other = {**case, "tenants": 3, "prompt": "mixed", "output": "mixed", "preempted": 3, "slots": 2}
    with another_world(7, make):
        others = orders(other, make(), requests_of(other))
        again = [arrival for arrival, _ in zip_longest(orders(case, make(), requests), others) if arrival is not None]
    require(found == again, "8", f"another instance with the same inputs ordered {again[:9]}, not {found[:9]}")
    rank = [make().rank(request) for request in requests]
    heapq.heapify(rank)  # raises TypeError for ranks that cannot be compared
    if case["priority"] == "wide":
        _check_priorities(make, case)


def _check_priorities(make: MakePolicy, case: Case) -> None:
    """A larger priority value admits a request no earlier; the others have the value 0."""
    requests = requests_of({**case, "priority": "same"})
    at, before = len(requests) // 2, 0
    for priority in sorted(_WIDE):
        requests[at] = replace(requests[at], priority=priority)
        admitted = list(orders(case, make(), requests)).index(requests[at].arrival)
        what = f"with the priority {priority} a request is admission {admitted}, with a more important one {before}"
        require(admitted >= before, "8", what)
        before = admitted


def _can_wait(case: Case) -> bool:
    """Return False where a request that was preempted may wait for a million tokens of others."""
    return not (case["preempted"] and case["large_one"] == "prompt" and int_of(case, "large") > 5000)


def check_admission(make: MakePolicy, case: Case) -> None:
    """A request is admitted in time while one arrives for each that is admitted, some of which are aborted at once.

    Raises `InvariantViolated`.
    """
    kinds, large = ("prompt", "output", "other_prompts", "other_outputs"), int_of(case, "large")
    prompt, output, of_others, output_of_others = (large if case["large_one"] == kind else 10 for kind in kinds)
    queue, used = Queue(make()), of_others + 10
    arrivals = serve_past(queue, int_of(case, "days"), used)
    tenant, others = str(case["tenants"]).split("-")
    served, active = {"new": (0, 1), "one": (300, 1), "several": (300, 4)}[str(case["past"])]

    def new(tenant: str, prompt: int = of_others, output: int = output_of_others) -> QueuedRequest:
        arrival, priority = next(arrivals), int_of(case, "priority")
        name = f"new {arrival}" if tenant == "new" else tenant
        request = QueuedRequest(arrival, prompt, output, priority, name, preempted=False)
        queue.add(request)
        return request

    new("back")
    queue.end(queue.admit(), used)
    for number in range(20):
        new(f"t{number % active}")
    for _ in range(served):
        queue.end(ended := queue.admit(), used)
        new(ended.tenant)
    target = new(tenant, prompt, output)
    for _ in range(19):
        new("t0")
    # A request that was preempted has been served: others may get as many tokens first.
    patience = _PATIENCE + (prompt // used if case["preempted"] else 0)
    for _ in range(patience):
        admitted = queue.admit()
        if admitted.arrival == target.arrival:
            if admitted.preempted or not case["preempted"]:
                return
            queue.add(returned(admitted))
            continue
        queue.end(admitted, used)
        new(others)
        for _ in range(int_of(case, "aborted")):
            queue.abort(new(others))
    broken("2.2", f"a request waits after {patience} admissions of later ones")


def check_shares(make: MakePolicy, case: Case) -> None:
    """Serve tenants that always wait: none gets less than two thirds of an equal share, of requests or of tokens.

    Raises `InvariantViolated`.
    """
    size, tenants = int_of(case, "size"), [_TENANTS[str(case["names"])](at) for at in range(int_of(case, "tenants"))]
    queue, running, last = Queue(make()), list[QueuedRequest](), tenants[-1]
    if len({queue.policy.flow(QueuedRequest(0, 1, 1, 0, tenant, preempted=False)) for tenant in ("t0", "t1")}) < 2:
        lacks("the policy has no flow for each tenant")
    used = dict.fromkeys(tenants, size) | {last: {"less": size // 3 + 1, "more": 5 * size}.get(str(case["used"]), size)}

    rng, uses = draws(zlib.crc32(repr(sorted(case.items())).encode())), dict[int, int]()
    arrivals, numbers = serve_past(queue, rng.choice(_PAST), size), itertools.count()
    spread = case["priorities"] == "spread"

    def arrive(tenant: str) -> QueuedRequest:
        kind, promised = (str(case[name]) if tenant == last else "same" for name in ("prompt", "promised"))
        number, arrival = next(numbers) if tenant == last else 0, next(arrivals)
        whole = uses[arrival] = int(used[tenant] * ((2.8, 0.4, 0.4, 0.4)[number % 4] if tenant == last else 1))
        prompt = {"longer": whole - 2, "all": whole}.get(kind, min(size // 3, whole))
        most = (200 if promised == "more" else 14) * size  # no request uses more
        request = QueuedRequest(arrival, prompt, most, number % 10 * spread, tenant, preempted=False)
        queue.add(request)
        return request

    for tenant in tenants:
        for _ in range(4 * (int_of(case, "waiting") if tenant == last else 1)):
            arrive(tenant)
    counts, preemptions = Counter[str](), Counter[int]()
    while counts.total() < min(80 * len(tenants), 400 + 10 * len(tenants)):
        admitted = queue.admit()
        if admitted.tenant == last and preemptions[admitted.arrival] < int_of(case, "preempted"):
            preemptions[admitted.arrival] += 1
            queue.add(returned(admitted))
            continue
        counts[admitted.tenant] += 1
        arrive(admitted.tenant)
        for _ in range(int_of(case, "aborted") if admitted.tenant == last else 0):
            queue.abort(arrive(last))
        running.append(admitted)
        if len(running) > int_of(case, "slots"):
            ended = running.pop(rng.randrange(len(running)))
            queue.end(ended, uses[ended.arrival])
    shares = [[counts[tenant] * weight[tenant] for tenant in tenants] for weight in (used, dict.fromkeys(tenants, 1))]
    if spread:
        most = min(len(tenants) * share[-1] / sum(share) for share in shares)
        what = "a tenant whose requests have ten priorities, none of which is more important than that of the others,"
        require(most < 1.5, "2.2", f"{what} gets {most:.1f} times an equal share: a flow is that of a whole tenant")
        return
    fair = any(3 * len(tenants) * min(share) >= 2 * sum(share) for share in shares)
    require(fair, "2.2", f"the requests of tenants that always wait, in the order of their names, are {shares[1]}")


def running_of(case: Case) -> RunningRequests:
    """Return the running requests of a case, as arrays that cannot be written."""
    count, block = int_of(case, "rows"), int_of(case, "block")
    at = np.arange(count)
    priorities = {"same": np.zeros(count), "two": at % 2, "wide": np.take(_WIDE, at % len(_WIDE))}
    tokens = {"mixed": 1 + 37 * at % 900, "same": np.full(count, 9), "large": 2**31 - 1 - at % 5}
    gained = {"none": np.zeros(count), "below_a_block": np.full(count, block - 1), "mixed": 7 * at % (3 * block)}
    again = {"none": np.zeros(count), "some": at % 3 == 1, "all": np.ones(count)}
    found = RunningRequests(
        2 * at.astype(np.intp),
        int_of(case, "oldest") + np.random.default_rng(count).permutation(count).astype(np.int64),
        priorities[str(case["priorities"])].astype(np.int64),
        num_tokens=tokens[str(case["tokens"])].astype(np.int32),
        num_gained=gained[str(case["gained"])].astype(np.int32),
        preempted_before=again[str(case["again"])].astype(np.bool_),
        block_size=block,
    )
    return _frozen(found)


def _frozen(running: RunningRequests) -> RunningRequests:
    for name in ("slots", "arrivals", "priorities", "num_tokens", "num_gained", "preempted_before"):
        getattr(running, name).setflags(write=False)
    return running


def check_victim(make: MakeVictims, case: Case) -> None:
    """The choice is a row; see `_check_choices`."""

    def chosen(policy: VictimPolicy, rows: RunningRequests) -> set[int]:
        row, count = policy.choose(rows), len(rows.slots)
        right = isinstance(row, (int, np.integer)) and not isinstance(row, bool) and 0 <= row < count
        require(right, "8", f"expected a row below {count}, got {row!r}")
        return {int(rows.slots[row])}

    _check_choices(make, chosen, case)


def check_candidates(make: MakePolicy, case: Case) -> None:
    """The preemption candidates are some rows, each once; see `_check_choices`."""

    def chosen(policy: SchedulingPolicy, rows: RunningRequests) -> set[int]:
        given, count = policy.preemption_candidates(rows), len(rows.slots)
        found = np.asarray(given).tolist()
        valid = found and len(set(found)) == len(found) and all(0 <= row < count for row in found)
        require(valid, "8", f"expected some of {count} rows, each once, got {found}")
        try:
            return set(map(int, rows.only(given).slots.tolist()))
        except (IndexError, TypeError, ValueError) as error:
            broken("8", f"expected an array of rows, with which others are indexed, got {given!r}: {error}")

    _check_choices(make, chosen, case)


def check_time_of_choices(choose: Callable[[RunningRequests], object]) -> None:
    """The CPU time of a choice has a limit, and grows at most as the running requests. Raises `InvariantViolated`."""
    few = 1000 * cpu_seconds(partial(choose, _rows(256)))
    what = f"a choice among 256 running requests takes {few:.2f} ms of the processor"
    require(few < _CHOICE_MS, "2.6", f"{what}, expected less than {_CHOICE_MS}: it is made within a step")
    many = 1000 * cpu_seconds(partial(choose, _rows(4096)))
    require(many <= 64 * few + 1, "2.6", f"{what}, and among 4,096 it takes {many:.1f} ms: expected a linear growth")


def _rows(count: int) -> RunningRequests:
    return running_of({**CHOICES.case("priorities=wide,gained=mixed,again=some").values, "rows": count})


def _check_choices(
    make: Callable[[], Policy], chosen: Callable[[Policy, RunningRequests], set[int]], case: Case
) -> None:
    """A choice depends on the requests alone, not on their slots, the order of the rows or earlier calls.

    Arrivals only order requests, so a number added to all of them changes no choice. A chosen request is chosen as well
    if it is less important.
    """
    running, policy = running_of(case), make()
    count, slots = len(running.slots), chosen(policy, running)
    with another_world(7, make):
        again = chosen(make(), running)
    require(again == slots, "8", f"another instance with the same inputs chose slots {again}, not {slots}")
    for seed in range(3):
        other = running.only(np.random.default_rng(seed).permutation(count))
        again = chosen(policy, _frozen(other))
        require(again == slots, "8", f"with the rows in another order it chose slots {again}, not {slots}")
    moved = _frozen(replace(running, slots=running.slots[::-1].copy()))
    again, right = chosen(policy, moved), set(moved.slots[np.isin(running.slots, list(slots))].tolist())
    require(again == right, "8", f"with other slots, it chose the requests in slots {again}, not those in {right}")
    again = chosen(policy, running_of({**case, "oldest": 0}))
    require(again == slots, "8", f"with arrivals from 0 it chose slots {again}, not {slots}")
    for name, value in (("priorities", "two"), ("tokens", "same"), ("gained", "none"), ("again", "none")):
        other = running_of({**case, name: value})
        again, right = chosen(policy, other), chosen(make(), other)
        require(again == right, "8", f"after other requests it chose slots {again}, a new instance {right}")
    slot = min(slots)
    for priority in sorted(_WIDE):
        less = running.priorities.copy()
        less[running.slots == slot] = np.maximum(less[running.slots == slot], priority)
        again = chosen(policy, _frozen(replace(running, priorities=less)))
        require(slot in again, "8", f"slot {slot} is chosen, but with the priority {priority} slots {again} are")


ORDERS: Final[Part[MakePolicy]] = Part("order", WAITING_AXES, check_order)
"""Orders of admission under a scheduling policy."""
ADMISSIONS: Final[Part[MakePolicy]] = Part("admission", ADMISSION_AXES, check_admission, _can_wait)
"""Admissions of one request among many under a scheduling policy."""
SHARES: Final[Part[MakePolicy]] = Part("shares", SHARE_AXES, check_shares)
"""Shares of tenants under a scheduling policy."""
CANDIDATES: Final[Part[MakePolicy]] = Part("candidates", RUNNING_AXES, check_candidates)
"""Preemption candidates of a scheduling policy."""
CHOICES: Final[Part[MakeVictims]] = Part("victim", RUNNING_AXES, check_victim)
"""Choices of a victim policy."""
