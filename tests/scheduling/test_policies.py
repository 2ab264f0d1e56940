"""Order of admission and choice of preemption victims."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.config import Limits
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.policies import FairShare, Priority, SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest, Request
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens, LatestArrival, RunningRequests
from fd_core.scheduling.waiting.queue import WaitingQueue
from fd_core.types import RequestSpec, SamplingParams
from tests.scheduling.driving import HASHER, add, answer, commit, output_of, planned


def request(arrival: int, tenant: str = "", prompt: int = 1, max_tokens: int = 9) -> Request:
    spec = RequestSpec(
        request_id=str(arrival), prompt=(1,) * prompt, params=SamplingParams(max_tokens=max_tokens), tenant=tenant
    )
    return Request(spec, arrival, 100_000, b"")


class Queue:
    """Requests that arrive, are admitted in order and end, as in a scheduler; each generates `uses` of its tokens."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.waiting = WaitingQueue(policy, PhaseClock(None))
        self.running: list[Request] = []
        self._arrivals = itertools.count()

    def add(self, tenant: str, prompt: int = 1, max_tokens: int = 9) -> Request:
        made = request(next(self._arrivals), tenant, prompt, max_tokens)
        self.policy.arrived(made.queued())
        self.waiting.push(made)
        return made

    def admit(self) -> Request:
        chosen = self.waiting.first()
        assert chosen is not None
        self.waiting.remove(chosen)
        self.policy.admitted(chosen.queued())
        self.waiting.turn_changed(chosen)
        self.running.append(chosen)
        return chosen

    def end(self, running: Request, uses: int = 0) -> None:
        running.tokens.append((5,) * uses)
        self.running.remove(running)
        self._ended(running)

    def abort_waiting(self, waiting: Request) -> None:
        self.waiting.remove(waiting)
        self._ended(waiting)

    def preempt(self, running: Request, after: int = 0) -> None:
        running.tokens.append((5,) * after)
        running.preemptions += 1
        self.running.remove(running)
        self.waiting.push(running)

    def _ended(self, ended: Request) -> None:
        self.policy.ended(ended.queued(), ended.num_tokens)
        self.waiting.turn_changed(ended)

    def turns(self, count: int, uses: dict[str, int]) -> Counter[str]:
        """Serve `count` requests one at a time from always backlogged tenants; return how many each tenant got."""
        served: Counter[str] = Counter()
        for _ in range(count):
            chosen = self.admit()
            tenant = chosen.spec.tenant
            served[tenant] += 1
            self.add(tenant, chosen.prompt_len, chosen.limit - chosen.prompt_len)
            self.end(chosen, uses[tenant])
        return served


# Fair share per tenant ----------------------------------------------------------------------------------------


def test_busy_tenant_does_not_delay_light_tenant() -> None:
    queue = Queue(FairShare())
    for _ in range(10):
        queue.add("greedy")
    queue.add("modest")
    assert "modest" in [queue.admit().spec.tenant for _ in range(2)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 50)), min_size=3, max_size=60))
def test_backlogged_tenants_get_equal_service(arrivals: list[tuple[str, int, int]]) -> None:
    queue = Queue(FairShare())
    uses: dict[int, int] = {}
    left: Counter[str] = Counter()
    for tenant, prompt, generated in arrivals:
        made = queue.add(tenant, prompt, 50)
        uses[made.arrival] = generated
        left[tenant] += 1
    served = dict.fromkeys(left, 0)
    while all(left.values()):
        chosen = queue.admit()
        left[chosen.spec.tenant] -= 1
        queue.end(chosen, uses[chosen.arrival])
        served[chosen.spec.tenant] += chosen.num_tokens
        assert max(served.values()) - min(served.values()) <= 2 * 100


def test_high_max_tokens_does_not_cost_a_tenant() -> None:
    queue = Queue(FairShare())
    queue.add("modest", 10, 100)
    queue.add("grand", 10, 32_000)
    served = queue.turns(100, {"modest": 20, "grand": 20})
    assert abs(served["modest"] - served["grand"]) <= 2


def test_tenant_with_longer_outputs_gets_fewer_turns() -> None:
    queue = Queue(FairShare())
    queue.add("short", 10, 1000)
    queue.add("long", 10, 1000)
    served = queue.turns(200, {"short": 10, "long": 190})
    assert served["long"] * 200 == pytest.approx(served["short"] * 20, rel=0.2)


def test_concurrent_requests_are_charged_typical_output() -> None:
    """With all slots taken none has ended, so nothing is corrected yet: the charge must be close to actual use."""
    queue = Queue(FairShare())
    queue.add("any", 10, 1000)
    queue.turns(60, {"any": 20})
    queue.end(queue.admit(), 20)
    for _ in range(80):
        queue.add("long prompts", 100, 1000)
        queue.add("short prompts", 40, 1000)
    served = Counter(queue.admit().spec.tenant for _ in range(60))
    tokens = {"long prompts": served["long prompts"] * 120, "short prompts": served["short prompts"] * 60}
    assert tokens["long prompts"] == pytest.approx(tokens["short prompts"], abs=240)


def test_idle_tenant_accumulates_no_credit() -> None:
    queue = Queue(FairShare())
    queue.add("busy", 100, 100)
    queue.turns(50, {"busy": 100})
    for _ in range(10):
        queue.add("busy", 100, 100)
        queue.add("was idle", 100, 100)
    served = [queue.admit().spec.tenant for _ in range(10)]
    assert 4 <= served.count("busy") <= 6


def test_debt_is_not_forgiven_by_a_pause() -> None:
    """A tenant that used a burst resumes after the others, although it had no requests meanwhile."""
    queue = Queue(FairShare())
    queue.add("other", 10, 100)
    queue.add("greedy", 10, 20_000)
    first, second = queue.admit(), queue.admit()
    greedy = first if first.spec.tenant == "greedy" else second
    queue.end(greedy, 10_000)
    queue.add("greedy", 10, 100)
    for _ in range(10):
        queue.add("other", 10, 100)
    assert {queue.admit().spec.tenant for _ in range(10)} == {"other"}


def test_unserved_aborted_request_is_not_charged() -> None:
    queue = Queue(FairShare())
    for _ in range(20):
        queue.abort_waiting(queue.add("impatient", 1000, 1000))
    queue.add("impatient")
    queue.add("other")
    assert queue.admit().spec.tenant == "impatient", "equal clocks: first come, first served"


def test_abort_refunds_unused_charge() -> None:
    queue = Queue(FairShare())
    queue.add("a", 10, 1000)
    queue.add("b", 10, 1000)
    served = []
    for _ in range(12):
        chosen = queue.admit()
        served.append(chosen.spec.tenant)
        queue.add(chosen.spec.tenant, 10, 1000)
        queue.end(chosen, 0 if chosen.spec.tenant == "a" else 110)
    assert served.count("a") > 4 * served.count("b"), "a uses 10 tokens a request, b 120"


def test_preempted_request_goes_first_and_is_charged_once() -> None:
    queue = Queue(FairShare())
    first = queue.add("a", 10, 50)
    queue.add("b", 10, 50)
    assert queue.admit() is first
    queue.preempt(first, after=20)
    assert queue.admit() is first, "although it is b's turn"
    queue.end(first, 10)
    queue.add("a", 10, 50)
    assert queue.admit().spec.tenant == "b"
    assert queue.admit().spec.tenant == "a"


def filled(tenants: dict[str, int], slots: int = 6, blocks: int = 600) -> ContinuousBatchingScheduler:
    """Return a scheduler to which each tenant in turn submitted so many long texts; the first one holds all slots."""
    limits = Limits(
        max_num_seqs=slots,
        max_num_batched_tokens=64,
        max_model_len=400,
        block_size=4,
        num_kv_blocks=blocks,
        vocab_size=100,
    )
    made = ContinuousBatchingScheduler(
        SchedulerSetup(limits=limits, policy=FairShare(), victims=FewestTokens(), hasher=HASHER)
    )
    for tenant, count in tenants.items():
        for index in range(count):
            add(made, spec_of(f"{tenant}{index}", tenant))
        for _ in range(8):
            answer(made, planned(made))
    return made


def spec_of(name: str, tenant: str, max_tokens: int = 300) -> RequestSpec:
    prompt = tuple((hash(name) + at * at) % 90 for at in range(8))
    return RequestSpec(request_id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), tenant=tenant)


def running_texts(scheduler: ContinuousBatchingScheduler) -> Counter[str]:
    slots = scheduler.probe().slots
    return Counter(slots.request_in(slot).spec.tenant for slot in np.flatnonzero(slots.running).tolist())


def test_request_of_another_tenant_runs_although_one_holds_all_slots() -> None:
    made = filled({"greedy": 20})
    add(made, spec_of("short", "modest", max_tokens=2))
    first = next(step for step in range(40) if any(each.request_id == "short" for each in answer(made, planned(made))))
    assert first <= 16 + 3
    assert made.stats().counters.preemptions == 1


def test_request_of_another_tenant_runs_although_one_holds_all_blocks() -> None:
    made = filled({"greedy": 3}, blocks=150)
    for _ in range(130):
        answer(made, planned(made))
    assert running_texts(made) == {"greedy": 3}
    long = RequestSpec(request_id="long", prompt=(7,) * 200, params=SamplingParams(max_tokens=4), tenant="modest")
    add(made, long)
    assert made.stats().blocks.total - made.stats().blocks.used < 50
    assert any(each.request_id == "long" for _ in range(60) for each in answer(made, planned(made)))


def test_short_texts_one_after_another_never_wait_for_long_ones() -> None:
    made = filled({"greedy": 20})
    waited = []
    for number in range(20):
        add(made, spec_of(f"short{number}", "modest", max_tokens=3))
        steps = 0
        while f"short{number}" in made.probe().requests:
            answer(made, planned(made))
            steps += 1
        waited.append(steps)
    assert max(waited) <= 16 + 2 + 3, f"{waited} steps for three tokens"


def test_one_tenant_displaces_nobody() -> None:
    made = filled({"only": 20})
    for _ in range(100):
        answer(made, planned(made))
    assert made.stats().counters.preemptions == 0


@given(st.dictionaries(st.sampled_from(["", *"abcd"]), st.integers(1, 12), min_size=1), st.integers(1, 9))
def test_every_tenant_runs_a_text_and_none_are_displaced_for_ever(tenants: dict[str, int], slots: int) -> None:
    made = filled(tenants, slots)
    for _ in range(20 * slots):
        answer(made, planned(made))
    held, clocks = running_texts(made), made._policy._clocks  # type: ignore[attr-defined]
    assert sum(held.values()) == min(slots, sum(tenants.values()))
    idle = [clocks[tenant] for tenant in tenants if not held[tenant]]
    assert all(count < 2 or clocks[tenant] < min(idle) for tenant, count in held.items() if idle)
    count = made.stats().counters.preemptions
    for _ in range(100):
        answer(made, planned(made))
    assert made.stats().counters.preemptions - count <= slots


def test_end_of_preempted_request_corrects_tenant_charge() -> None:
    queue = Queue(FairShare())
    first = queue.add("a", 10, 256)
    queue.admit()
    queue.preempt(first)
    queue.admit()
    other = queue.add("b", 10, 100)
    queue.admit()
    waiting = {tenant: queue.add(tenant, 10, 10) for tenant in "ab"}
    assert queue.waiting.first() is waiting["b"], "charged 110 tokens compared with 266"
    queue.end(first, 1)
    assert queue.waiting.first() is waiting["a"], "it used 11"
    queue.end(other, 0)
    assert queue.waiting.first() is waiting["b"], "it used 10"


def test_scheduler_gives_tenants_equal_turns() -> None:
    """With one slot and requests of 20 tokens, a tenant with max_tokens=32,000 gets as many turns as one with 100."""
    limits = Limits(
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=40_000,
        block_size=64,
        num_kv_blocks=1000,
        vocab_size=100,
    )
    scheduler = ContinuousBatchingScheduler(
        SchedulerSetup(limits=limits, policy=FairShare(), victims=FewestTokens(), hasher=None)
    )
    for index in range(40):
        for tenant, max_tokens in (("grand", 32_000), ("modest", 100)):
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(51,))
            scheduler.add(RequestSpec(request_id=f"{tenant} {index}", prompt=(1, 2), params=params, tenant=tenant))
    ended: list[str] = []
    while len(ended) < 40:
        plan = planned(scheduler)
        (running,) = filter(None, scheduler.probe().slots.requests)
        deltas = commit(scheduler, plan, output_of(scheduler, plan, 51 if running.num_generated == 19 else 50))
        ended += [delta.request_id.split()[0] for delta in deltas if delta.finish_reason is not None]
    assert abs(ended.count("grand") - 20) <= 1


# Policy inputs ------------------------------------------------------------------------------------------------


def test_policy_receives_request_attributes() -> None:
    made = request(3, "t", prompt=4, max_tokens=20)
    assert made.queued() == QueuedRequest(3, 4, 20, 0, "t", False)
    made.tokens.append((1, 2))
    made.preemptions = 1
    assert made.queued() == QueuedRequest(3, 6, 18, 0, "t", True)


def test_preempted_request_keeps_its_rank() -> None:
    queue = Queue(Priority())
    first = queue.add("")
    rank = first.rank
    assert queue.admit() is first
    queue.add("")
    queue.preempt(first)
    assert first.rank == rank
    assert queue.admit() is first


# Preemption victims -------------------------------------------------------------------------------------------


def running(num_tokens: list[int], *, preempted: list[int] | None = None, gained: int = 0) -> RunningRequests:
    rows = len(num_tokens)
    return RunningRequests(
        slots=np.arange(rows) + 10,
        arrivals=np.arange(rows),
        priorities=np.zeros(rows, np.int64),
        num_tokens=np.array(num_tokens, np.int32),
        num_gained=np.full(rows, gained, np.int32),
        preempted_before=np.isin(np.arange(rows), preempted or []),
        block_size=16,
    )


def test_only_lowest_priority_requests_are_candidates() -> None:
    three = running([5, 5, 5])
    three.priorities[:] = [0, 3, 3]
    assert Priority().preemption_candidates(three).tolist() == [1, 2]


def test_candidates_carry_full_request_state() -> None:
    three = running([9, 4, 7], preempted=[2], gained=3)
    three.priorities[:] = [0, 5, 6]
    two = three.only(np.array([2, 1]))
    assert two.slots.tolist() == [12, 11]
    assert two.arrivals.tolist() == [2, 1]
    assert two.priorities.tolist() == [6, 5]
    assert two.num_tokens.tolist() == [7, 4]
    assert two.num_gained.tolist() == [3, 3]
    assert two.preempted_before.tolist() == [True, False]
    assert two.block_size == 16


def test_victim_has_fewest_tokens_then_latest_arrival() -> None:
    assert FewestTokens().choose(running([9, 4, 7, 4])) == 3


def test_resumed_request_is_spared_until_it_fills_a_block() -> None:
    assert FewestTokens().choose(running([9, 4, 7], preempted=[1])) == 2
    assert FewestTokens().choose(running([9, 4, 7], preempted=[0, 1, 2])) == 1, "one victim is needed"
    assert FewestTokens().choose(running([9, 4, 7], preempted=[1], gained=15)) == 2
    assert FewestTokens().choose(running([9, 4, 7], preempted=[1], gained=16)) == 1


def test_lifo_preempts_latest_arrival() -> None:
    assert LatestArrival().choose(running([9, 4, 7])) == 2
    assert LatestArrival().choose(running([9, 4, 7]).only(np.array([1, 0]))) == 0
