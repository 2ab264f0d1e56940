"""Scheduling and victim policies with one fault each, and the test of their kit that names it."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from dataclasses import replace
from time import sleep

import numpy as np

from fd_core.scheduling.policies import FairShare, Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.victims import FewestTokens, VictimPolicy


class NewestFirst(Fcfs):
    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def rank(self, request):
        return (-request.arrival,)


class SmallestFirst(Fcfs):
    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def rank(self, request):
        return (request.num_tokens, request.arrival)


class ShortestOutputFirst(Fcfs):
    """Within limits, which let thousands pass a request without `max_tokens`."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def rank(self, request):
        return (request.arrival + request.max_new_tokens // 64, request.arrival)


class ServesShortOutputsLast(Fcfs):
    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def rank(self, request):
        return (int(request.max_new_tokens < 200_000), request.arrival)


class FavoursOneTenant(FairShare):
    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def turn(self, flow):
        return 0 if flow == "t0" else 1


class RanksByClock(Fcfs):
    noticed_by = "test_order"

    def rank(self, request):
        return (time.monotonic_ns(), request.arrival)


class SharesStateBetweenObjects(Fcfs):
    noticed_by = "test_order"
    calls = 0

    def rank(self, request):
        SharesStateBetweenObjects.calls += 1
        return (-self.calls // 7, request.arrival)


class RanksByText(Fcfs):
    noticed_by = "test_order"

    def rank(self, request):
        return (str(request.arrival),)


class MovesAllTurns(FairShare):
    """The turn of each flow depends on the number of admissions."""

    noticed_by = "test_order"

    def __init__(self):
        super().__init__()
        self.admissions = 0

    def admitted(self, request):
        super().admitted(request)
        self.admissions += 1

    def turn(self, flow):
        return super().turn(flow) + self.admissions


class LooksAtAllTenants(FairShare):
    noticed_by = "test_time_of_requests_does_not_grow_with_waiting_ones"

    def turn(self, flow):
        lowest = min([max(clock, 0) for clock in self._clocks.values()], default=0)
        return super().turn(flow) - lowest


class ServesTheFewestRunning(FairShare):
    """The tenant with the fewest running requests is next; one that aborts waiting requests soon has less than none."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def __init__(self):
        super().__init__()
        self._running, self._served = {}, {}

    def flow(self, request):
        return request.tenant

    def turn(self, flow):
        return (self._running.get(flow, 0) << 40) + self._served.get(flow, 0)

    def admitted(self, request):
        super().admitted(request)
        self._served[request.tenant] = request.arrival
        self._running[request.tenant] = self._running.get(request.tenant, 0) + (not request.preempted)

    def ended(self, request, num_computed):
        super().ended(request, num_computed)
        self._running[request.tenant] = self._running.get(request.tenant, 0) - 1


class RemembersAbortedRequests(Fcfs):
    noticed_by = "test_it_forgets_requests_that_ended"

    def __init__(self):
        self._since = {}

    def arrived(self, request):
        self._since[request.arrival] = request

    def admitted(self, request):
        self._since.pop(request.arrival, None)


class CountsUngrantedRequests(FairShare):
    """A request that ends before it has a rank, as while its grammar is compiled, counts for ever."""

    noticed_by = "test_it_forgets_requests_that_ended"

    def __init__(self):
        super().__init__()
        self._active, self._ranked = Counter(), set()

    def arrived(self, request):
        super().arrived(request)
        self._active[request.tenant] += 1

    def rank(self, request):
        self._ranked.add(request.arrival)
        return super().rank(request)

    def ended(self, request, num_computed):
        super().ended(request, num_computed)
        if request.arrival in self._ranked:
            self._ranked.discard(request.arrival)
            self._active -= Counter([request.tenant])


class StartsNewTenantsAtZero(FairShare):
    """Each new tenant goes before those that have used anything."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def arrived(self, request):
        super().arrived(request)
        if self._unfinished[request.tenant] == 1:
            self._clocks[request.tenant] = 0


class LetsTimeRun(FairShare):
    """A tenant that was idle waits until the others have used as much as it would have."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def ended(self, request, num_computed):
        self._now += num_computed * len(self._unfinished)
        super().ended(request, num_computed)


class RoundsTimeDown(FairShare):
    """The time stops while more tenants are active than a request has tokens."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def ended(self, request, num_computed):
        self._shared = 0
        super().ended(request, num_computed)


class KeepsClocksUntilIdle(FairShare):
    noticed_by = "test_it_forgets_requests_that_ended"

    def __init__(self):
        super().__init__()
        self._most_clocks = 2**62


class ServesPreemptedRequestsLast(FairShare):
    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def turn(self, flow):
        return 2**62 if flow is None else super().turn(flow)


class ChargesReturningRequests(FairShare):
    """Each return after a preemption is charged again, and only the first charge is corrected."""

    noticed_by = "test_shares_of_tenants"

    def admitted(self, request):
        super().admitted(request)
        self._clocks[request.tenant] += request.num_tokens * request.preempted


class ChargesMaxTokens(FairShare):
    """A tenant that sets no `max_tokens` is charged for a whole context, whatever its requests use."""

    noticed_by = "test_shares_of_tenants"

    def ended(self, request, num_computed):
        self._clocks[request.tenant] += request.max_new_tokens
        super().ended(request, num_computed)


class ServesRequestsWithoutATenantFirst(FairShare):
    """Puts them into a flow without a name, which goes first."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def flow(self, request):
        return request.tenant or None

    def turn(self, flow):
        return -1 if flow is None else super().turn(flow)


class DisplacesWhoeverRuns(Fcfs):
    """Makes room for whoever waits, so that requests take turns in the slots for ever."""

    noticed_by = "test_displaced_requests_return_and_end"

    def displaced_by(self, request, running, victims):
        return victims.choose(running)


class CountsRequestsByFlow(FairShare):
    """A request that was preempted leaves another flow than it entered."""

    noticed_by = "test_it_forgets_requests_that_ended"

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def flow(self, request):
        return None if request.preempted else super().flow(request)

    def arrived(self, request):
        super().arrived(request)
        self.counts[self.flow(request)] += 1

    def ended(self, request, num_computed):
        super().ended(request, num_computed)
        flow = self.flow(request)
        self.counts[flow] -= 1
        if not self.counts[flow]:
            del self.counts[flow]


class ChargesPromptsOnly(FairShare):
    noticed_by = "test_shares_of_tenants"

    def admitted(self, request):
        super().admitted(replace(request, max_new_tokens=0))

    def ended(self, request, num_computed):
        super().ended(request, self._charges.get(request.arrival, (num_computed, 0))[0])


class TakesAllTokensForThePrompt(FairShare):
    """A request that ends is shown with its output, which is therefore not charged."""

    noticed_by = "test_shares_of_tenants"

    def ended(self, request, num_computed):
        num_prompt, *_ = self._charges.get(request.arrival, (0,))
        super().ended(request, num_prompt + num_computed - request.num_tokens)


class ChargesNothingWithoutOutput(FairShare):
    """A client that gives up during its prompts, and tries again, uses the engine for nothing."""

    noticed_by = "test_shares_of_tenants"

    def ended(self, request, num_computed):
        num_prompt, *_ = self._charges.get(request.arrival, (0,))
        super().ended(request, num_computed if num_computed > num_prompt else 0)


class RanksPrioritiesInSixteenBits(Priority):
    noticed_by = "test_order"

    def rank(self, request):
        return (int(np.int64(request.priority).astype(np.int16)), request.arrival)


class ServesLargePrioritiesFirst(Priority):
    noticed_by = "test_order"

    def rank(self, request):
        return (-request.priority, request.arrival)


class ComparesCandidatesInSixteenBits(Priority):
    noticed_by = "test_preemption_candidates"

    def preemption_candidates(self, running):
        return super().preemption_candidates(replace(running, priorities=running.priorities.astype(np.int16)))


class PreemptsTheMostImportant(Priority):
    noticed_by = "test_preemption_candidates"

    def preemption_candidates(self, running):
        return np.flatnonzero(running.priorities == running.priorities.min())


class CachesCandidates(Priority):
    """Finds candidates again only if the number of running requests changed."""

    noticed_by = "test_preemption_candidates"

    def __init__(self):
        self._known = {}

    def preemption_candidates(self, running):
        count = len(running.slots)
        if count not in self._known:
            self._known = {count: super().preemption_candidates(running)}
        return self._known[count]


class HasNoCandidates(Fcfs):
    noticed_by = "test_preemption_candidates"

    def preemption_candidates(self, running):
        return np.flatnonzero(running.priorities > running.priorities.min())


class CandidatesAreSlots(Fcfs):
    noticed_by = "test_preemption_candidates"

    def preemption_candidates(self, running):
        return running.slots


class ChoosesByChance(VictimPolicy):
    noticed_by = "test_victim"

    def choose(self, running):
        return random.randrange(len(running.slots))


class ReturnsTheSlot(VictimPolicy):
    noticed_by = "test_victim"

    def choose(self, running):
        return int(running.slots[np.argmax(running.arrivals)])


class ComparesArrivalsAsInt32(VictimPolicy):
    noticed_by = "test_victim"

    def choose(self, running):
        return int(np.argmax(running.arrivals.astype(np.int32)))


class SharesTies(VictimPolicy):
    """Of several requests with the fewest tokens, the first row."""

    noticed_by = "test_victim"

    def choose(self, running):
        return int(np.argmin(running.num_tokens))


class BreaksTiesBySlot(VictimPolicy):
    noticed_by = "test_victim"

    def choose(self, running):
        return int(np.lexsort((running.slots, running.num_tokens))[0])


class ComparesPrioritiesInSixteenBits(VictimPolicy):
    noticed_by = "test_victim"

    def choose(self, running):
        return int(np.lexsort((-running.arrivals, -running.priorities.astype(np.int16)))[0])


class ChoosesTheMostImportant(VictimPolicy):
    noticed_by = "test_victim"

    def choose(self, running):
        return int(np.lexsort((-running.arrivals, running.priorities))[0])


class CachesByArrivals(FewestTokens):
    """Chooses again only if other requests run, although their tokens have changed."""

    noticed_by = "test_victim"

    def __init__(self):
        self._key, self._arrival = (), 0

    def choose(self, running):
        key = tuple(sorted(running.arrivals.tolist()))
        if key != self._key:
            self._key, self._arrival = key, running.arrivals[super().choose(running)]
        return int(np.flatnonzero(running.arrivals == self._arrival)[0])


class RemembersVictims(FewestTokens):
    noticed_by = "test_it_forgets_requests"

    def __init__(self):
        self.seen = []

    def choose(self, running):
        row = super().choose(running)
        self.seen.append(running.arrivals[row])
        return row


class ReturnsWithCredit(FairShare):
    """Tenants that were idle continue with the clock that they had then."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def __init__(self):
        super().__init__()
        self._idle = {}

    def arrived(self, request):
        new = request.tenant not in self._unfinished
        super().arrived(request)
        if new and request.tenant in self._idle:
            self._clocks[request.tenant] = self._idle.pop(request.tenant)

    def ended(self, request, num_computed):
        clock = self._clocks.get(request.tenant)
        super().ended(request, num_computed)
        if request.tenant not in self._unfinished:
            self._idle = {**dict(list(self._idle.items())[-15:]), request.tenant: clock}


class CollectsPriorities(Priority):
    noticed_by = "test_it_forgets_requests_that_ended"

    def __init__(self):
        self._seen = np.zeros(0, np.int64)

    def preemption_candidates(self, running):
        self._seen = np.append(self._seen, running.priorities)
        return super().preemption_candidates(running)


class LearnsTheShareOfPrompts(FairShare):
    """Divides by the output of a request that ended, which is none if it is aborted soon."""

    noticed_by = "test_order"
    _share = 1.0

    def ended(self, request, num_computed):
        num_prompt, *_ = self._charges.get(request.arrival, (0,))
        super().ended(request, num_computed)
        if num_prompt:
            self._share = 0.9 * self._share + 0.1 * num_prompt / (num_computed - num_prompt)


class ServesTheOldestRequest(FairShare):
    """The tenant whose oldest request has waited longest is next: more requests get more service."""

    noticed_by = "test_shares_of_tenants"

    def __init__(self):
        super().__init__()
        self._waiting = {}

    def arrived(self, request):
        super().arrived(request)
        self._waiting.setdefault(request.tenant, {})[request.arrival] = None

    def admitted(self, request):
        super().admitted(request)
        self._leave(request)

    def ended(self, request, num_computed):
        super().ended(request, num_computed)
        self._leave(request)

    def _leave(self, request):
        waiting = self._waiting.get(request.tenant, {})
        waiting.pop(request.arrival, None)
        if not waiting:
            self._waiting.pop(request.tenant, None)

    def turn(self, flow):
        return -1 if flow is None else next(iter(self._waiting.get(flow, (0,))))


class RenamesTenants(FairShare):
    """Counts tenants under a name that several of them have."""

    def renamed(self, request):
        return request.tenant

    def _renamed(self, request):
        return replace(request, tenant=self.renamed(request))

    def flow(self, request):
        return super().flow(self._renamed(request))

    def arrived(self, request):
        super().arrived(self._renamed(request))

    def admitted(self, request):
        super().admitted(self._renamed(request))

    def ended(self, request, num_computed):
        super().ended(self._renamed(request), num_computed)


class CountsOrganisations(RenamesTenants):
    noticed_by = "test_shares_of_tenants"

    def renamed(self, request):
        return request.tenant.partition("/")[0]


class IgnoresTheCaseOfTenants(RenamesTenants):
    noticed_by = "test_shares_of_tenants"

    def renamed(self, request):
        return request.tenant.lower()


class ComparesTheBeginOfTenants(RenamesTenants):
    noticed_by = "test_shares_of_tenants"

    def renamed(self, request):
        return request.tenant[:64]


class ChargesWaitingRequests(FairShare):
    """A request that ended while it waited is charged its prompt."""

    noticed_by = "test_shares_of_tenants"

    def ended(self, request, num_computed):
        if request.arrival not in self._charges:
            self._clocks[request.tenant] += num_computed
        super().ended(request, num_computed)


class KeepsClocksInSixteenBits(FairShare):
    noticed_by = "test_shares_of_tenants"

    def turn(self, flow):
        return super().turn(flow) if flow is None else super().turn(flow) % 2**16


class FreesTheMostBlocks(VictimPolicy):
    """Preempts a long request again and again while short ones arrive."""

    noticed_by = "test_a_long_request_ends_while_short_ones_keep_arriving"

    def choose(self, running):
        return int(np.argmax(running.num_tokens))


class FreesTheMostOfTheLeastImportant(FewestTokens):
    """Frees many blocks at once wherever priorities differ."""

    noticed_by = "test_a_long_request_ends_while_short_ones_keep_arriving"

    def choose(self, running):
        least = running.priorities == running.priorities.max()
        if least.all():
            return super().choose(running)
        return int(np.lexsort((-running.arrivals, -running.num_tokens, ~least))[0])


class CollectsGarbage(FewestTokens):
    noticed_by = "test_it_forgets_requests"

    def choose(self, running):
        gc.collect(0)
        return super().choose(running)


class WaitsForOthers(Fcfs):
    noticed_by = "test_it_forgets_requests_that_ended"

    def ended(self, request, num_computed):
        sleep(1e-6)


class SearchesItsList(Fcfs):
    """Python's list does so in C, without a bytecode."""

    noticed_by = "test_time_of_requests_does_not_grow_with_waiting_ones"

    def __init__(self):
        self._waiting = []

    def arrived(self, request):
        self._waiting.append(request.arrival)

    def admitted(self, request):
        self._waiting.remove(request.arrival)


class LargestFirst(Fcfs):
    """To use each step well; a short request waits as long as long ones arrive."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def rank(self, request):
        return (-request.num_tokens, request.arrival)


class MultipliesPriorityAndArrival(Fcfs):
    """The newest request of those with a negative priority is first."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def rank(self, request):
        return (request.priority * request.arrival, request.arrival)


class RemembersRanks(Fcfs):
    """A request that is aborted while its grammar is compiled has none."""

    noticed_by = "test_order"

    def __init__(self):
        self._ranks = {}

    def rank(self, request):
        self._ranks[request.arrival] = (request.arrival,)
        return self._ranks[request.arrival]

    def ended(self, request, num_computed):
        del self._ranks[request.arrival]


class DividesTurnsByTheTime(FairShare):
    """NaN at the start: the queue looks for ever for the flow that has this turn."""

    noticed_by = "test_order"

    def turn(self, flow):
        with np.errstate(all="ignore"):
            return float(np.float64(super().turn(flow)) / self._now)


class KnowsTheTurnsOfTenantsWithRequests(FairShare):
    """Fails when the queue updates the turn of a flow after its last request."""

    noticed_by = "test_order"

    def turn(self, flow):
        return -1 if flow is None else self._clocks[flow]


class CountsPriorities(RenamesTenants):
    """A tenant has a share for each of its priorities."""

    noticed_by = "test_shares_of_tenants"

    def renamed(self, request):
        return f"{request.tenant} {request.priority}"


class KnowsThirtyTenants(RenamesTenants):
    """All further ones share the same flow."""

    noticed_by = "test_shares_of_tenants"

    def __init__(self):
        super().__init__()
        self._names = {}

    def renamed(self, request):
        if len(self._names) < 30:
            self._names[request.tenant] = request.tenant
        return self._names.get(request.tenant, "others")


class ComparesAllCandidates(Priority):
    noticed_by = "test_time_of_requests_does_not_grow_with_waiting_ones"

    def preemption_candidates(self, running):
        found = running.priorities.tolist()
        return np.array([row for row, each in enumerate(found) if sum(each < other for other in found) == 0])


class SumsItsQuotas(Fcfs):
    """Takes as long with few waiting requests as with many."""

    noticed_by = "test_time_of_requests_does_not_grow_with_waiting_ones"

    def arrived(self, request):
        self._quota = sum(range(300_000))


class ReturnsATuple(Priority):
    noticed_by = "test_preemption_candidates"

    def preemption_candidates(self, running):
        return tuple(super().preemption_candidates(running).tolist())


class SumsItsCosts(FewestTokens):
    noticed_by = "test_choice_takes_little_time"

    def choose(self, running):
        self._cost = sum(range(1_000_000))
        return super().choose(running)


class CountsTheYoungerInC(VictimPolicy):
    noticed_by = "test_choice_takes_little_time"

    def choose(self, running):
        return int((running.arrivals[:, None] >= running.arrivals).sum(axis=1).argmax())


class MultipliesTokensInThirtyTwoBits(FewestTokens):
    """Takes long requests for the cheapest ones."""

    noticed_by = "test_a_long_request_ends_while_short_ones_keep_arriving"

    def choose(self, running):
        return super().choose(replace(running, num_tokens=running.num_tokens * np.int32(50_000)))


class FreesTheMostAtOnce(FewestTokens):
    """A request of more than 131,072 tokens goes first, and of a million tokens never ends."""

    noticed_by = "test_a_long_request_ends_while_short_ones_keep_arriving"

    most = 1 << 17

    def choose(self, running):
        longest = int(running.num_tokens.argmax())
        return longest if running.num_tokens[longest] > self.most else super().choose(running)


class FreesAMillionAtOnce(FreesTheMostAtOnce):
    most = 10**6


class CountsTokensInSixteenBits(FewestTokens):
    noticed_by = "test_a_long_request_ends_while_short_ones_keep_arriving"

    def choose(self, running):
        return super().choose(replace(running, num_tokens=running.num_tokens.astype(np.int16)))


class KeepsClocksInFloat32(FairShare):
    """Requests of few tokens change no clock of some billions."""

    noticed_by = "test_request_is_admitted_while_others_keep_arriving"

    def admitted(self, request):
        super().admitted(request)
        self._clocks[request.tenant] = int(np.float32(self._clocks[request.tenant]))


class ChargesTheLongest(FairShare):
    """A tenant with a long request among short ones is charged that for each of them."""

    noticed_by = "test_shares_of_tenants"

    def __init__(self):
        super().__init__()
        self._longest = Counter()

    def ended(self, request, num_computed):
        admitted = request.arrival in self._charges
        self._longest[request.tenant] = max(num_computed, self._longest[request.tenant])
        super().ended(request, self._longest[request.tenant] if admitted else num_computed)
        if request.tenant not in self._unfinished:
            del self._longest[request.tenant]


class CorrectsTheOldestCharge(FairShare):
    """As if requests ended in the order of their admissions."""

    noticed_by = "test_shares_of_tenants"

    def ended(self, request, num_computed):
        if request.arrival in self._charges:
            first = next(iter(self._charges))
            self._charges[request.arrival], self._charges[first] = self._charges[first], self._charges[request.arrival]
        super().ended(request, num_computed)


def _faults(base: type) -> list[type]:
    return [
        each
        for each in list(globals().values())
        if isinstance(each, type) and "noticed_by" in vars(each) and issubclass(each, base)
    ]


WRONG_ORDERS, WRONG_VICTIMS = _faults(SchedulingPolicy), _faults(VictimPolicy)
