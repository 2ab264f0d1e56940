"""The core's router policies pass the kit, and each of these wrong ones fails the case that names its fault."""

import atexit
import itertools
import json
import logging
import os
import random
import struct
import zlib
from collections import Counter, OrderedDict
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.plugins.builtin import fd_register_router_policies
from fd_core.router.config import RouterConfig
from fd_core.router.policies import (
    Candidate,
    Expiring,
    RequestNum,
    RouterPolicy,
    SessionAffinity,
    fewest_requests,
    least,
    lowest,
)
from fd_core.router.workers import RouterWorker
from fd_core.testing.router_policies import RouterPolicySuite
from fd_core.testing.router_policies.cases import ROUTING
from fd_core.testing.router_policies.day import FLEETS, day_of, require_ordinary_day
from tests.testing.right.routing import FewWaiting, LongestPrefix, Recent, Rendezvous, SpreadsOverHosts, Weighted
from tests.testing.witnesses import check_of

CORE = Plugins.discover([])


@pytest.mark.in_turn(4)
class TestPoliciesOfTheCore(RouterPolicySuite):
    @pytest.fixture(autouse=True, params=[entry.name for entry in fd_register_router_policies()])
    def name(self, request):
        self.policy = request.param

    def policy_class(self):
        return CORE.load(ROUTER_POLICY, self.policy)

    @pytest.mark.in_turn(14)  # the days of right and of wrong policies are compared with those of all of these
    @pytest.mark.parametrize("fleet", FLEETS)
    def test_an_ordinary_day(self, fleet):
        super().test_an_ordinary_day(fleet)

    @pytest.mark.law("7.2")
    @pytest.mark.in_turn(4)  # it starts two processes
    def test_another_process_chooses_the_same(self):
        super().test_another_process_chooses_the_same()


class UsesRandom(RouterPolicy):
    def choose(self, context):
        return random.choice(context.candidates)


class Invented(RouterPolicy):
    def choose(self, context):
        return Candidate(RouterWorker("http://worker0", "mixed", 0), context.candidates[0].load)


class RemembersPrompts(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._last = None

    def choose(self, context):
        self._last = self._last or super().choose(context)
        return self._last


class OutOfRange(RouterPolicy):
    def choose(self, context):
        return context.candidates[round(context.random * len(context.candidates))]


class RefusesLoad(RouterPolicy):
    def choose(self, context):
        return next(candidate for candidate in context.candidates if candidate.load.requests < 100)


class ServesMixedOnly(RouterPolicy):
    def choose(self, context):
        return next(candidate for candidate in context.candidates if candidate.worker.role == "mixed")


class HashesUrls(RouterPolicy):
    def choose(self, context):
        return max(context.candidates, key=lambda candidate: hash(candidate.worker.url))


class ComparesIdentities(RouterPolicy):
    def choose(self, context):
        return max(context.candidates, key=lambda candidate: id(candidate) // 64 % 7)


class CountsIn8Bits(RequestNum):
    def choose(self, context):
        return context.candidates[int(context.candidates.requests.argmin()) & 0xFF or len(context.candidates) * 2]


class PacksLoadsIn32Bits(RouterPolicy):
    def choose(self, context):
        return min(context.candidates, key=lambda candidate: struct.pack(">I", candidate.load.prefill_tokens))


class DividesByPromptBlocks(RouterPolicy):
    def choose(self, context):
        blocks = len(context.tokens) // self.config.cache_block_size
        return context.candidates[int(context.random * len(context.candidates)) % blocks]


class DividesByAWeight(RequestNum):
    def choose(self, context):
        assert self.config.load_balance_weight / self.config.hit_ratio_weight >= 0
        return super().choose(context)


class EncodesSessions(RouterPolicy):
    def choose(self, context):
        return context.candidates[len((context.session or "").encode("ascii")) % len(context.candidates)]


class ReordersCandidates(RouterPolicy):
    def choose(self, context):
        context.candidates.workers = context.candidates.workers[::-1]
        return context.candidates[0]


class SmugglesState(RouterPolicy):
    calls = 0

    def choose(self, context):
        type(self).calls += 1
        return context.candidates[self.calls // 30 % len(context.candidates)]


class UsesTimeInDays(RouterPolicy):
    def choose(self, context):
        return context.candidates[int(np.int32(context.now * 1000)) % len(context.candidates)]


class ComparesAllPairs(RouterPolicy):
    def choose(self, context):
        seen = context.candidates
        return max(seen, key=lambda one: sum(one.load.requests < other.load.requests for other in seen))


class SearchesPastPrompts(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self.past = []

    def choose(self, context):
        head = context.tokens[:64].tobytes()
        known = head in self.past
        self.past.append(head)
        return context.candidates[0] if known else super().choose(context)


class TrustsDepartures(SessionAffinity):
    """Looks for the worker of a session until that departs, although it may be unhealthy."""

    def choose(self, context):
        home = self._homes.get(context.session, context.now)
        assert home in (None, *(worker.url for worker in context.candidates.workers))
        return super().choose(context)

    def departed(self, worker):
        self._homes.sweep(float("inf"))


class LooksAtTheFirst1024(RouterPolicy):
    def choose(self, context):
        seen = context.candidates
        return lowest(seen, context.random, seen.requests[:1024], seen.prefill_tokens[:1024])


class ReadsMinutesAsSeconds(SessionAffinity):
    def __init__(self, config):
        super().__init__(config)
        self._homes = Expiring(duration=config.eviction_duration_mins, capacity=config.max_sessions)


class RemembersPositions(RequestNum):
    """Until the number of workers changes."""

    def __init__(self, config):
        super().__init__(config)
        self._homes = Expiring(duration=config.eviction_duration, capacity=config.max_sessions)
        self._positions = {}

    def choose(self, context):
        seen = context.candidates
        if len(seen) != len(self._positions):
            self._positions = {each.worker.url: position for position, each in enumerate(seen)}
        home = self._homes.get(context.session, context.now) if context.session else None
        chosen = seen[self._positions[home]] if home in self._positions else super().choose(context)
        if context.session:
            self._homes.put(context.session, chosen.worker.url, context.now)
        return chosen


class SweepsEarly(SessionAffinity):
    def sweep(self, now):
        super().sweep(now + self.config.eviction_duration / 2)


class SharesHomes(SessionAffinity):
    homes = {}  # noqa: RUF012 - that is the fault

    def __init__(self, config):
        super().__init__(config)
        self._homes = self.homes.setdefault(config.max_sessions, self._homes)


class SweepsToTheLatest(SessionAffinity):
    """A sweep keeps only the session that was used last."""

    def sweep(self, now):
        super().sweep(now)
        while len(self._homes) > 1:
            self._homes._entries.popitem(last=False)


class HashesPromptsByIdentity(RouterPolicy):
    """Hashes an array once; when it is freed, another prompt may have its address."""

    def __init__(self, config):
        super().__init__(config)
        self.hashes = OrderedDict()

    def choose(self, context):
        if id(context.tokens) not in self.hashes:
            self.hashes[id(context.tokens)] = zlib.crc32(context.tokens.tobytes())
        if len(self.hashes) > 64:
            self.hashes.popitem(last=False)
        return context.candidates[self.hashes[id(context.tokens)] % len(context.candidates)]


@lru_cache(maxsize=64)
def points_of(workers):
    """Return the points of a ring, computed with the settings of the policy that needs it first."""
    return []


class SharesARing(RouterPolicy):
    """Policies with other settings have the same workers."""

    def choose(self, context):
        points = points_of(context.candidates.workers)
        points[1:] = []
        points.append(self.config.cache_block_size)
        head = context.tokens[: points[0]]
        return context.candidates[zlib.crc32(head.tobytes()) % len(context.candidates)]


class ImportsTheClock(RouterPolicy):
    def choose(self, context):
        return context.candidates[int(monotonic() / 3600) % len(context.candidates)]


class RemembersLoads(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._scores = {}

    def choose(self, context):
        for each in context.candidates:
            self._scores.setdefault(each.load, each.load.requests + each.load.prefill_tokens)
        return super().choose(context)


class KeepsSessionsInItsClass(RequestNum):
    names = {}  # noqa: RUF012 - that is the fault

    def choose(self, context):
        self.names.setdefault(context.session, len(self.names))
        return super().choose(context)


class ReadsWeightsFromAFile(RouterPolicy):
    def choose(self, context):
        Path(os.devnull).read_bytes()
        return context.candidates[0]


class WorksOutALambda(RouterPolicy):
    def choose(self, context):
        return context.candidates[context.candidates.once(lambda workers: len(workers) - 1)]


class WorksOutLoads(RouterPolicy):
    """Sorts the workers by load once, although loads change and workers do not."""

    def choose(self, context):
        self.requests = context.candidates.requests
        return context.candidates[context.candidates.once(self.least)]

    def least(self, workers):
        return int(self.requests.argmin())


class RotatesWhatWasWorkedOut(RouterPolicy):
    """Round robin in a list that starts anew when the workers change."""

    def choose(self, context):
        order = context.candidates.once(list)
        order.append(order.pop(0))
        return context.candidates[context.candidates.workers.index(order[-1])]


class NeverChoosesTheLast(RouterPolicy):
    def choose(self, context):
        return context.candidates[int(context.random * max(1, len(context.candidates) - 1))]


class KnowsTheWorkersItHasSeen(RequestNum):
    """Fails for the departure of a worker that never was a candidate, such as one of another role."""

    def __init__(self, config):
        super().__init__(config)
        self._seen = set()

    def choose(self, context):
        self._seen.update(context.candidates.workers)
        return super().choose(context)

    def departed(self, worker):
        self._seen.remove(worker)


class ForgetsAnAddress(RouterPolicy):
    """The departure of an incarnation takes the next one, with the same address, from the ring as well."""

    def __init__(self, config):
        super().__init__(config)
        self._known, self._ring = set(), {}

    def choose(self, context):
        for at, worker in enumerate(context.candidates.workers):
            if worker not in self._known:
                self._known.add(worker)
                self._ring[worker.url] = at
        there = [each for each in context.candidates if each.worker.url in self._ring]
        return there[int(context.random * len(there))]

    def departed(self, worker):
        self._known.discard(worker)
        self._ring.pop(worker.url, None)


class NumbersSessions(RouterPolicy):
    """The number of a session, modulo that of the workers: one more moves nearly all sessions."""

    def choose(self, context):
        there = sorted(context.candidates, key=lambda each: each.worker.url)
        return there[zlib.crc32((context.session or "").encode()) % len(there)]


class NumbersNamedSessions(RequestNum):
    """Only of requests that have one."""

    def choose(self, context):
        number = zlib.crc32((context.session or "").encode())
        there = sorted(context.candidates, key=lambda each: each.worker.url)
        return there[number % len(there)] if context.session else super().choose(context)


class HashesHosts(RequestNum):
    """Workers of one host have one place: all sessions that go there go to the first of them."""

    def choose(self, context):
        weights = {}
        for each in context.candidates:
            host = each.worker.url.rpartition(":")[0]
            weights.setdefault(zlib.crc32(f"{context.session} {host}".encode()), each)
        return weights[max(weights)] if context.session else super().choose(context)


class CountsPromptsUntilWorkersLeave(RequestNum):
    """Keeps a number for each prompt of a worker."""

    def __init__(self, config):
        super().__init__(config)
        self._counts = {}

    def choose(self, context):
        chosen = super().choose(context)
        counts = self._counts.setdefault(chosen.worker.url, Counter())
        counts[hash(context.tokens.tobytes())] += 1
        return chosen

    def departed(self, worker):
        self._counts.pop(worker.url, None)


class PacksRequestsAndTokens(RouterPolicy):
    """Compares both as one number, with 16 bits for the tokens."""

    def choose(self, context):
        seen = context.candidates
        return lowest(seen, context.random, (seen.requests << 16) | seen.prefill_tokens)


class CutsNamesOfSessions(SessionAffinity):
    def choose(self, context):
        return super().choose(replace(context, session=context.session and context.session[:32]))


class CutsUrls(SessionAffinity):
    """A session returns to the first worker whose address begins like its own."""

    def choose(self, context):
        chosen = super().choose(context)
        return next(each for each in context.candidates if each.worker.url[:40] == chosen.worker.url[:40])


class TimesSessionsFromTheirFirstUse(SessionAffinity):
    def __init__(self, config):
        super().__init__(config)
        put = self._homes.put
        self._homes.put = lambda key, *rest: key in self._homes._entries or put(key, *rest)


class RanksTwiceASecond(SessionAffinity):
    """All requests of a burst without a known session go to the worker that was the least busy one before it."""

    def __init__(self, config):
        super().__init__(config)
        self._best, self._ranked = None, 0.0

    def choose(self, context):
        home = None if context.session is None else self._homes.get(context.session, context.now)
        is_fresh = 0 <= context.now - self._ranked < 0.5
        known = {each.worker.url: each for each in context.candidates}
        chosen = known.get(home) or (known.get(self._best) if is_fresh else None)
        if chosen is None:
            chosen = fewest_requests(context)
            self._best, self._ranked = chosen.worker.url, context.now
        if context.session is not None:
            self._homes.put(context.session, chosen.worker.url, context.now)
        return chosen


class LooksAtThePrefixFirst(RouterPolicy):
    uses_prefix = True

    def choose(self, context):
        return least(context.candidates, lambda each: (-each.hits, each.load.requests), context.random)


class CountsHitsInAByte(RouterPolicy):
    uses_prefix = True

    def choose(self, context):
        seen = context.candidates
        load = seen.prefill_tokens + 256 * seen.requests
        return lowest(seen, context.random, load - 64 * seen.expected_hits.astype(np.uint8).astype(np.int64))


class KeepsMillisecondsInThirtyTwoBits(SessionAffinity):
    def choose(self, context):
        return super().choose(replace(context, now=int(context.now * 1000) % 2**32 / 1000))


class WritesEachChoice(RequestNum):
    """A millisecond of the router's event loop."""

    def choose(self, context):
        json.dumps([*range(20_000)])
        return super().choose(context)


class TradesTokensForRequests(RouterPolicy):
    """A long prompt outweighs hundreds of requests, whatever they have to compute."""

    uses_prefix = True

    def choose(self, context):
        seen = context.candidates
        left = seen.requests * 1024 - seen.expected_hits * self.config.cache_block_size
        return lowest(seen, context.random, left, seen.prefill_tokens)


class TakesNoSessionForOne(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._homes = {}

    def choose(self, context):
        home = self._homes.get(context.session)
        there = (each for each in context.candidates if each.worker.url == home)
        chosen = next(there, None) or super().choose(context)
        self._homes[context.session] = chosen.worker.url
        return chosen


class HashesTheBeginning(RouterPolicy):
    """All prompts with one system prompt go to one worker."""

    def choose(self, context):
        found = zlib.crc32(context.tokens[:64].tobytes())
        return sorted(context.candidates, key=lambda one: one.worker.url)[found % len(context.candidates)]


class WritesThePrompt(RouterPolicy):
    """Names a prompt by its tokens as text."""

    def choose(self, context):
        return context.candidates[zlib.crc32(",".join(map(str, context.tokens)).encode()) % len(context.candidates)]


class PrintsSessions(SessionAffinity):
    def choose(self, context):
        chosen = super().choose(context)
        print(context.session, chosen.worker.url)
        return chosen


class LogsTheBeginning(RequestNum):
    def choose(self, context):
        chosen = super().choose(context)
        logging.getLogger("choices").debug("%s for %s", chosen.worker.url, context.tokens[:16].tolist())
        return chosen


class SavesAtExit(SessionAffinity):
    """Writes the homes of sessions for the next process, long after the last check."""

    def __init__(self, config):
        super().__init__(config)
        atexit.register(self.save)

    def save(self):
        pass


class ComparesWithTheLastPrompt(SessionAffinity):
    """Keeps the prompt of each session: those of 65,536 sessions take gigabytes."""

    def choose(self, context):
        self._homes.put(f"of {context.session}", context.tokens, context.now)
        return super().choose(context)


class ChoosesWhoServedLeast(RouterPolicy):
    """Counts its choices: one that joins gets all requests until it has caught up."""

    def __init__(self, config):
        super().__init__(config)
        self._served = Counter()

    def choose(self, context):
        chosen = least(context.candidates, lambda each: self._served[each.worker], context.random)
        self._served[chosen.worker] += 1
        return chosen

    def departed(self, worker):
        self._served.pop(worker, None)


class AvoidsAddressesThatFailed(RequestNum):
    def __init__(self, config):
        super().__init__(config)
        self._lost = OrderedDict()

    def choose(self, context):
        there = [each for each in context.candidates if each.worker.url not in self._lost] or context.candidates
        return least(there, lambda each: each.load.requests, context.random)

    def departed(self, worker):
        self._lost[worker.url] = True
        while len(self._lost) > 16:
            self._lost.popitem(last=False)


class ChoosesAmongTheFirst64(RouterPolicy):
    def choose(self, context):
        return context.candidates[int(context.random * min(64, len(context.candidates)))]


class PrefersMoreTokens(RouterPolicy):
    def choose(self, context):
        return least(context.candidates, lambda each: (each.load.requests, -each.load.prefill_tokens), context.random)


class PrefersFewerHits(RouterPolicy):
    uses_prefix = True

    def choose(self, context):
        return least(context.candidates, lambda each: (each.load.requests, each.expected_hits), context.random)


class ForgetsToUsePrefixes(RouterPolicy):
    def choose(self, context):
        return least(context.candidates, lambda each: (each.load.requests, -each.hits), context.random)


class SessionsWithoutALimit(SessionAffinity):
    def __init__(self, config):
        super().__init__(config)
        self._homes._capacity = 10**9


class ForgetsTheFirstSession(SessionAffinity):
    """Compares all sessions to find the first one, which may be in use."""

    def __init__(self, config):
        super().__init__(config)
        self._homes.put = self._put

    def _put(self, key, value, now):
        entries = self._homes._entries
        entries[key] = (now, value)
        if len(entries) > self.config.max_sessions:
            del entries[min(entries, key=lambda each: entries[each][0])]


class HashesTheFirstBlock(RouterPolicy):
    uses_prefix = True

    def choose(self, context):
        first = context.keys[0] if context.keys else b""
        return max(context.candidates, key=lambda each: zlib.crc32(first + each.worker.url.encode()))


class HashesWholePrompts(RouterPolicy):
    """Each request of a conversation goes to another worker."""

    def key(self, context):
        return context.tokens.tobytes()

    def choose(self, context):
        return max(context.candidates, key=lambda each: zlib.crc32(self.key(context) + each.worker.url.encode()))


class HashesToAWorkerWithRoom(HashesWholePrompts):
    """Sessions move while loads change."""

    def choose(self, context):
        most = 1 + context.candidates.requests.mean()
        seen = [each for each in context.candidates if each.load.requests < most]
        return max(seen, key=lambda each: zlib.crc32(self.key(context) + each.worker.url.encode()))


class CountsItsCalls(RouterPolicy):
    """Of requests for two models in turn, each model's have every second number only."""

    calls = 0

    def choose(self, context):
        self.calls += 1
        return context.candidates[self.calls % len(context.candidates)]


class ReservesWorkersForLongPrompts(RequestNum):
    """Half of them idle in an hour of short ones."""

    def choose(self, context):
        there, is_long = sorted(context.candidates, key=lambda each: each.worker.url), len(context.tokens) > 2048
        half = there[: len(there) // 2] if is_long else there[len(there) // 2 :]
        return least(half or there, lambda each: each.load.requests, context.random)


DAY = "test_an_ordinary_day"
EQUAL = "calls=40,loads=rising"
FORGETS = "test_the_process_holds_nothing_of_past_requests_and_workers"
SERVE = "test_every_worker_serves_whatever_arrives"
PROMPTS = "test_a_session_takes_no_memory_for_its_prompt"
OTHER = "test_another_process_chooses_the_same"
WORKERS = "test_the_time_of_a_choice_is_at_most_linear_in_workers"
PAST = "test_the_time_of_a_choice_does_not_grow_with_past_requests"
ONCE = "test_what_it_works_out_once_for_some_workers_does_not_grow"
LOADS = "test_less_busy_worker_is_preferred_at_every_size_of_its_load"
PREFIX = "test_a_cached_prefix_counts_but_does_not_outweigh_every_load"
SESSIONS = "test_the_least_recent_of_more_sessions_than_max_sessions_is_forgotten"


@pytest.mark.in_turn(8, by=lambda wrong, case, arguments: check_of(case))
@pytest.mark.parametrize(
    "wrong, case, arguments",
    [
        (CountsItsCalls, SERVE, ()),
        (ReservesWorkersForLongPrompts, SERVE, ()),
        (UsesRandom, EQUAL, ()),
        (Invented, EQUAL, ()),
        (RemembersPrompts, EQUAL, ()),
        (OutOfRange, f"random={1 - 2**-53}", ()),
        (RefusesLoad, "loads=near 2^31", ()),
        (CountsPromptsUntilWorkersLeave, FORGETS, (True,)),
        (NeverChoosesTheLast, DAY, ()),
        (TakesNoSessionForOne, DAY, ()),
        (HashesTheFirstBlock, DAY, ()),
        (PrintsSessions, DAY, ()),
        (LogsTheBeginning, DAY, ()),
        (ComparesWithTheLastPrompt, PROMPTS, ()),
        (SavesAtExit, FORGETS, ()),
        (ChoosesWhoServedLeast, DAY, ()),
        (AvoidsAddressesThatFailed, DAY, ()),
        (ChoosesAmongTheFirst64, DAY, ()),
        (PrefersMoreTokens, LOADS, ("prefill_tokens",)),
        (PrefersFewerHits, PREFIX, ()),
        (TradesTokensForRequests, PREFIX, ()),
        (CountsHitsInAByte, PREFIX, ()),
        (KeepsMillisecondsInThirtyTwoBits, DAY, ()),
        (WritesEachChoice, WORKERS, ()),
        (ForgetsToUsePrefixes, PREFIX, ()),
        (SessionsWithoutALimit, FORGETS, (False,)),
        (ForgetsTheFirstSession, SESSIONS, ()),
        (NumbersSessions, DAY, ()),
        (NumbersNamedSessions, DAY, ()),
        (HashesHosts, DAY, ()),
        (HashesWholePrompts, DAY, ()),
        (HashesToAWorkerWithRoom, DAY, ()),
        (ForgetsTheFirstSession, PAST, ()),
        (HashesTheBeginning, DAY, ()),
        (KnowsTheWorkersItHasSeen, "change=one leaves", ()),
        (ForgetsAnAddress, "workers=1,change=one returns,calls=40,departed=a call later", ()),
        (HashesUrls, OTHER, ()),
        (RemembersPositions, DAY, ()),
        (ReadsMinutesAsSeconds, DAY, ()),
        (ComparesIdentities, "workers=64", ()),
        (CountsIn8Bits, "workers=257,loads=one idle", ()),
        (PacksLoadsIn32Bits, "loads=near 2^32", ()),
        (DividesByPromptBlocks, "tokens=63", ()),
        (DividesByAWeight, "weights=zero", ()),
        (EncodesSessions, f"session={'ü漢' * 9}", ()),
        (TrustsDepartures, "change=one is away,session=s", ()),
        (ReordersCandidates, "plain", ()),
        (SmugglesState, "calls=40", ()),
        (UsesTimeInDays, "now=2147483647.0", ()),
        (ServesMixedOnly, "role=decode", ()),
        (ComparesAllPairs, WORKERS, ()),
        (WritesThePrompt, "test_a_choice_for_a_long_prompt_takes_little_time", ()),
        (SearchesPastPrompts, PAST, ()),
        (WorksOutALambda, ONCE, ()),
        (WorksOutLoads, "plain", ()),
        (RotatesWhatWasWorkedOut, "plain", ()),
        (SweepsEarly, "session=s,pace=1000.0,calls=40,swept=before each call", ()),
        (SharesHomes, "session=s", ()),
        (SweepsToTheLatest, "session=four in turn,calls=40,swept=before each call", ()),
        (HashesPromptsByIdentity, "calls=40", ()),
        (SharesARing, OTHER, ()),
        (ImportsTheClock, OTHER, ()),
        (RemembersLoads, FORGETS, (True,)),
        (KeepsSessionsInItsClass, FORGETS, (True,)),
        (ReadsWeightsFromAFile, FORGETS, (True,)),
        (PacksRequestsAndTokens, LOADS, ("prefill_tokens",)),
        (LooksAtTheFirst1024, LOADS, ("requests",)),
        (CutsNamesOfSessions, DAY, ()),
        (CutsUrls, DAY, ()),
        (TimesSessionsFromTheirFirstUse, DAY, ()),
        (LooksAtThePrefixFirst, PREFIX, ()),
        (RanksTwiceASecond, DAY, ()),
    ],
)
def test_wrong_policy_fails_the_case_that_names_its_fault(wrong, case, arguments):
    suite = RouterPolicySuite()
    suite.policy_class = lambda: wrong
    check = getattr(suite, case, None) or (lambda: suite.test_case(ROUTING.case(case)))
    with pytest.raises((AssertionError, IndexError, StopIteration)):
        for each in ([fleet] for fleet in FLEETS) if case == DAY else [arguments]:
            check(*each)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("right", [FewWaiting, LongestPrefix, Recent, Rendezvous, SpreadsOverHosts, Weighted])
def test_right_policies_have_ordinary_days(right, fleet):
    require_ordinary_day(right, RouterConfig(), FLEETS[fleet])


def test_requests_of_a_day_vary_in_every_field():
    seen = {}

    class Records(RequestNum):
        uses_prefix = True

        def choose(self, context):
            chosen = super().choose(context)
            for each in (context, chosen, chosen.load, chosen.worker):
                names = getattr(each, "__struct_fields__", None) or [field.name for field in fields(each)]
                for name in names:
                    values = seen.setdefault((type(each), name), set())
                    if len(values) < 2:
                        values.add(str(getattr(each, name)))
            return chosen

    hours = itertools.chain.from_iterable(day_of(Records, RouterConfig(), fleet)() for fleet in FLEETS.values())
    enough = any(seen and min(map(len, seen.values())) == 2 for _ in hours)
    assert enough, [name for name, values in seen.items() if len(values) < 2]
