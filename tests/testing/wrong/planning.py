"""Schedulers whose fault shows for some settings, requests or incidents only; each fails a case of the kit."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from fd_core.effects.operations import NO_EFFECTS, CompileGrammar, GrammarReady, NotStored
from fd_core.errors import BadRequest
from fd_core.scheduling.contract import SchedulerHoldings
from fd_core.scheduling.operations.kv_offloading import KVOffloading
from fd_core.scheduling.requests import QueuedRequest, State
from fd_core.types import FinishReason, Phase
from tests.testing.wrong.scheduling import Changed, ChangesDeltas, Plans, breaks, instead, ranks


class StopsAt(Changed):
    """Ends texts at some of their stop ids only."""

    def stops(self, ids):
        return ids

    def change(self):
        def occupy(slots, right, slot, request, *given, **more):
            right(slot, request, *given, **more)
            ids = slots.stops[slot].copy()
            params, eos = request.spec.params, request.spec.eos_token_ids
            known = self.stops(params.stop_token_ids, () if params.ignore_eos else eos)
            slots.stops[slot, ~np.isin(ids, known)] = np.iinfo(np.int32).max

        instead(self._slots, "occupy", occupy)


@breaks("1.1", "schedule:ends=eos")
class OnlyTheFirstEosEndsAText(StopsAt):
    def stops(self, stop, eos):
        return (*stop, *eos[:1])


@breaks("1.1", "schedule:ends=eos")
class KnowsAHundredStopIds(StopsAt):
    def stops(self, stop, eos):
        return (*stop, *eos)[:100]


@breaks("1.1", "schedule:ends=eos")
class IgnoresEosWithStopIds(StopsAt):
    def stops(self, stop, eos):
        return stop or eos


class Roots(Changed):
    """Identifies prefixes by only some of what decides their KV."""

    def change(self):
        instead(self._prefixes, "root", lambda prefixes, right, salt, adapter: right(*self.identity(salt, adapter)))


@breaks("3.5", "schedule:caching=true,shared=prefix,owner=adapters")
class SharesPrefixesBetweenAdapters(Roots):
    def identity(self, salt, adapter):
        return salt, adapter[:40]


@breaks("5.3", "schedule:caching=true,shared=prefix,owner=long_salts")
class ComparesShortSalts(Roots):
    def identity(self, salt, adapter):
        return salt[:255], adapter


@breaks("3.5", "schedule:caching=true,shared=prefix,owner=crossed")
class JoinsSaltAndAdapter(Roots):
    def identity(self, salt, adapter):
        return salt + adapter, ""


@breaks("2.2", "schedule:requests=60")
class PutsPreemptedRequestsLast(Changed):
    """A preempted request waits behind everything that arrived meanwhile."""

    def change(self):
        ranks(self, lambda request: (self._arrivals if request.preemptions else request.arrival,))


@breaks("2.2", "schedule:policy=priority,requests=60,priority=wide")
class ComparesPrioritiesAsBytes(Changed):
    def change(self):
        ranks(self, lambda request: (int(np.int64(request.spec.priority).astype(np.int8)), request.arrival))


@breaks("8", "schedule:policy=fair")
class NotifiesThePolicyOfTheFirstAdmissionOnly(Changed):
    def change(self):
        policy = self._admission_planner._policy

        class Quiet:
            def __getattr__(self, name):
                return getattr(policy, name)

            def admitted(self, request):
                if not request.preempted:
                    policy.admitted(request)

        self._admission_planner._policy = Quiet()


@breaks("8", "schedule:policy=fair")
class ReportsOneTokenLess(Changed):
    """The policy receives the number of tokens without the last one."""

    def change(self):
        right = self._policy

        class Cheap:
            def __getattr__(self, name):
                if name == "ended":
                    return lambda request, num_computed: right.ended(request, max(num_computed - 1, 1))
                return getattr(right, name)

        self._policy = Cheap()


@breaks("2.6", "schedule:grammar=own")
class AdmitsBeforeTheGrammarIsCompiled(Changed):
    def plan(self):
        for number, (effect, request, _) in list(self._operations.open.items()):
            if isinstance(effect, CompileGrammar) and request is not None:
                request.compiling = None
                self._waiting.wake(number)
        return super().plan()


@breaks("1.3", "schedule:grammar=own,outcome=badly")
class RunsRequestsWithABadGrammar(Changed):
    def complete(self, completion):
        if isinstance(completion, GrammarReady):
            completion = GrammarReady(completion.operation)
        return super().complete(completion)


class Lies(Changed):
    """Reports that an idle scheduler holds nothing, whatever it lost."""

    def held(self):
        held = super().held()
        return held if self._requests or self._operations.open or self._slots.num_draining else SchedulerHoldings()


@breaks("3.1", "schedule:incident=error")
class LosesABlockOfEachFailedRow(Changed):
    def change(self):
        def finish(running_batch, right, slot, request, reason):
            if reason is FinishReason.ERROR and request.state is State.RUNNING:
                self._slots.num_blocks[slot] = max(int(self._slots.num_blocks[slot]) - 1, 0)
            right(slot, request, reason)

        instead(self._running_batch, "finish", finish)


@breaks("3.6", "schedule:depth=2,incident=abort_draining")
class LosesTheSlotOfAnAbortedVictim(Lies):
    """A slot whose request is aborted while it drains is never assigned again."""

    def change(self):
        self.lost = np.zeros(self.limits.max_num_seqs, np.bool_)

        def release(running_batch, right, slot):
            request = self._slots.request_in(slot)
            self.lost[slot] |= request.abort_requested and request.preemptions > 0 and request.ended is None
            return right(slot)

        def free_slot(slots, right):
            free = ~(slots.occupied | self.lost)
            return int(free.argmax()) if free.any() else None

        instead(self._running_batch, "release", release)
        instead(self._slots, "free_slot", free_slot)


@breaks("1.5", "schedule:first_step=65533")
class CountsStepsInSixteenBits(Plans):
    def changed(self, plan):
        return replace(plan, step=plan.step & 0xFFFF)

    def commit(self, plan, output):
        step = self._output_processor._next_step
        return super().commit(replace(plan, step=step), replace(output, step=step))


@breaks("3.2", "schedule:depth=8,first_step=2147483645")
class ComparesFencesAsInt32(Changed):
    """Blocks are free as soon as they are released once steps have more than 31 bits."""

    def change(self):
        instead(
            self._pool,
            "release",
            lambda pool, right, blocks, fence: right(blocks, int(np.int64(fence).astype(np.int32))),
        )


@breaks("3.1", "size:budget=70000,context=70000,block_size=1,requests=2,prompt=longest")
class StoresBlocksInSixteenBits(Changed):
    def change(self):
        def allocate(pool, right, count):
            blocks = right(count)
            return blocks if blocks is None else blocks.astype(np.int16).astype(np.int32)

        instead(self._pool, "allocate", allocate)


@breaks("1.4", "size:vocab=152064")
class StoresPromptsInSixteenBits(Changed):
    def add(self, spec):
        return super().add(msgspec.structs.replace(spec, prompt=tuple(token % 2**16 for token in spec.prompt)))


@breaks("2.6", "lifetime:test_a_step_of_a_full_batch_takes_little_time[2-6400]")
class CopiesItsRequests(Changed):
    """A copy of all that runs in each plan, to return to it after an error."""

    def plan(self):
        self.copies = [copy.deepcopy(each.spec) for each in self._slots.requests if each is not None for _ in range(9)]
        return super().plan()


@breaks("3.2", "schedule:depth=8")
class FencesFourSteps(Changed):
    """Frees blocks four steps before the last one that touches them."""

    def change(self):
        instead(self._pool, "release", lambda pool, right, blocks, fence: right(blocks, fence - 3))


@breaks("1.1", "schedule:results=top")
class DeliversElevenAlternatives(ChangesDeltas):
    def changed_delta(self, delta):
        cut = lambda score: msgspec.structs.replace(score, top=score.top[:11])  # noqa: E731
        return msgspec.structs.replace(delta, logprobs=delta.logprobs and tuple(map(cut, delta.logprobs)))


@breaks("4", "schedule:budget=3,results=mean")
class PoolsTheLastChunkOnly(ChangesDeltas):
    def change(self):
        def collect(processor, right, output, indices):
            if output.pooled is not None:
                output = replace(output, pooled=replace(output.pooled, starts=np.zeros_like(output.pooled.starts)))
            right(output, indices)

        instead(self._output_processor, "_collect", collect)

    def changed_delta(self, delta):
        return delta


@breaks("5.3", "schedule:events=true,owner=salts")
class PublishesSaltedPrefixes(Changed):
    def change(self):
        def complete(prefixes, right, request, table, first, upto):
            spec = request.spec
            request.spec = msgspec.structs.replace(spec, cache_salt="", adapter="")
            right(request, table, first, upto)
            request.spec = spec

        instead(self._prefixes, "complete", complete)


@breaks("8", "schedule:timed=true")
class ForgetsTheTimeBeforeAPreemption(ChangesDeltas):
    def changed_delta(self, delta):
        phases = delta.phases
        return delta if phases is None else msgspec.structs.replace(delta, phases=(*phases[:-1], 0.0))


@breaks("4", "schedule:owner=adapters")
class DropsTheAdapterOfAPreemptedRequest(Plans):
    def changed(self, plan):
        again = tuple(
            replace(each, adapter="") if self._requests[each.request_id].preemptions else each
            for each in plan.admissions
        )
        return replace(plan, admissions=again)


@breaks("8", "schedule:ids=long")
class ComparesShortIds(Changed):
    """Requests whose ids agree in 64 characters count as one."""

    def add(self, spec):
        name = spec.request_id[:64]
        return super().add(msgspec.structs.replace(spec, request_id=name))


@breaks("2.2", "budget:test_tenant_with_few_requests_waits_for_few_of_another")
class ServesTenantsByArrival(Changed):
    """Asks the policy for everything, and then ignores its flows."""

    def change(self):
        policy = self._waiting._policy

        class OneFlow:
            def __getattr__(self, name):
                return getattr(policy, name)

            def flow(self, request):
                policy.flow(request)
                return ""

            def turn(self, flow):
                return 0

        self._waiting._policy = OneFlow()


@breaks("8", "schedule:policy=priority,priority=wide,requests=12")
class AsksForTheRankAfterEachPreemption(Changed):
    def change(self):
        def push(waiting, right, request):
            request.rank = request.rank if not request.preemptions else None
            right(request)

        instead(self._waiting, "push", push)


@breaks("8", "schedule:policy=priority,priority=wide,requests=12")
class KeepsThePriorityOfTheLastRequest(Changed):
    """Writes the priority of a slot only for requests that set one."""

    def change(self):
        def occupy(slots, right, slot, request, *given, **more):
            before = slots.priority[slot]
            right(slot, request, *given, **more)
            if not request.spec.priority:
                slots.priority[slot] = before

        instead(self._slots, "occupy", occupy)


class ShowsAnotherRequest(Changed):
    """Shows the policy a request that differs."""

    def view(self, request, right):
        raise NotImplementedError

    def change(self):
        def push(waiting, right, request):
            request.queued_view = self.view(request, request.queued())
            right(request)

        instead(self._waiting, "push", push)


@breaks("8", "schedule:depth=2")
class ShowsRequestsAsTheyArrived(ShowsAnotherRequest):
    """Never renews the view of a request, also not after a preemption."""

    def view(self, request, right):
        length = request.prompt_len
        return replace(right, num_tokens=length, max_new_tokens=request.limit - length, preempted=False)


@breaks("8", "schedule:output=2147483647")
class ShowsTheMostTokensThatWereAskedFor(ShowsAnotherRequest):
    """The context may allow fewer."""

    def view(self, request, right):
        return replace(right, max_new_tokens=request.spec.params.max_tokens - request.num_generated)


class ShowsOtherRows(Changed):
    """Shows both policies running requests that differ."""

    def rows(self, running):
        raise NotImplementedError

    def change(self):
        instead(self._slots, "running_requests", lambda slots, right: self.rows(right()))


@breaks("8", "schedule:depth=2")
class CountsGainsSinceTheArrival(ShowsOtherRows):
    def rows(self, running):
        return replace(
            running, num_gained=self._slots.num_tokens[running.slots] - self._slots.prompt_len[running.slots]
        )


@breaks("8", "schedule:depth=2")
class SparesTheOldest(ShowsOtherRows):
    """Shows the policies all but the first of several requests."""

    def rows(self, running):
        return running.only(np.arange(len(running.slots) > 1, len(running.slots)))


class ExaminesTheQueue(Changed):
    """Costs grow with the number of waiting requests in one of the calls."""


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[slots]")
class SearchesTheQueueForAnAbort(ExaminesTheQueue):
    def abort(self, request_id):
        found = [name for name in self._requests if name == request_id]
        return super().abort(found[0]) if found else None


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[slots]")
class CountsBlocksForStats(ExaminesTheQueue):
    """One by one; the engine reads them several times a second."""

    def stats(self):
        self.used = sum(references > 0 for references in self._pool._references)
        return super().stats()


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[slots]")
class SortsTheQueue(ExaminesTheQueue):
    def plan(self):
        sorted(request.rank for request in self._requests.values() if request.rank)
        return super().plan()


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[turns]")
class ComparesAllTenants(ExaminesTheQueue):
    def add(self, spec):
        min(self._waiting._flows, key=lambda flow: self._policy.turn(flow), default=None)
        return super().add(spec)


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[grammars]")
class CopiesTheQueue(ExaminesTheQueue):
    def plan(self):
        self.waits = list(self._requests)
        return super().plan()


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[context]")
class ReservesWholeTexts(Changed):
    """Memory for all tokens that a request may get, while it waits."""

    def change(self):
        self.reserved = {}

    def add(self, spec):
        effects = super().add(spec)
        self.reserved[spec.request_id] = np.zeros(self._requests[spec.request_id].limit, np.int32)
        return effects


@breaks("3.6", "lifetime:test_memory_does_not_grow_with_requests[served]")
class RemembersEveryRequest(Changed):
    def change(self):
        self.begun = set()

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        self.begun |= {delta.request_id for delta in deltas}
        return deltas, effects


@breaks("1.5", "lifetime:test_counters_grow_beyond_sixteen_bits")
class CountsGensInFifteenBits(Changed):
    def change(self):
        def occupy(slots, right, slot, request, *given, **more):
            right(slot, request, *given, **more)
            slots.gen[slot] = slots.delivering_gen[slot] = max(int(slots.gen[slot]) & 0x7FFF, 1)

        instead(self._slots, "occupy", occupy)


@breaks("1.5", "lifetime:test_counters_grow_beyond_sixteen_bits")
class NumbersOperationsInFifteenBits(Changed):
    def change(self):
        began = np.zeros(1 << 15, int)

        def begin(operations, right, *given):
            began[operations.next] += 1
            return right(*given)

        instead(self._operations, "begin", begin)


@breaks("3.6", "lifetime:test_memory_does_not_grow_with_requests[aborted]")
class RemembersAborts(Changed):
    """Recognises a repeated abort by a set of ids that is never emptied."""

    def change(self):
        self.aborts = set()

    def abort(self, request_id):
        if request_id in self.aborts:
            return None
        self.aborts.add(request_id)
        return super().abort(request_id)


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_the_texts")
class ReadsTheWholeText(Changed):
    """Looks for a repeated phrase in the whole text of each request after each step: quadratic."""

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            text = [] if request is None else request.tokens.view().tolist()
            self.repeats = sum(text[at : at + 2] == text[-2:] for at in range(len(text) - 2))
        return deltas, effects


@breaks("2.2", "schedule:grammar=shared,outcome=badly")
class SharesCompilations(Changed):
    """Requests with one grammar share its compilation; if it cannot be used, only the first of them ends."""

    def change(self):
        opened, self.sharers = {}, {}

        def begin(operations, right, effect, request, blocks=None):
            if not isinstance(effect, CompileGrammar):
                return right(effect, request, blocks)
            number = opened.get(effect.grammar)
            if number not in operations.open:
                opened[effect.grammar] = number = right(effect, request, blocks)
                self.sharers[number] = []
            self.sharers[number].append(request)
            return number

        instead(self._operations, "begin", begin)

    def complete(self, completion):
        if isinstance(completion, GrammarReady):
            for request in self.sharers.pop(completion.operation):
                request.compiling = completion.operation if completion.error else None
        return super().complete(completion)


@breaks("8", "schedule:policy=priority,priority=falling,requests=12")
class PreemptsAnyone(Changed):
    """Does not ask the scheduling policy for candidates: important requests are preempted."""

    def change(self):
        def choose(planner, right):
            running = self._slots.running_requests()
            return int(running.slots[planner._victims.choose(running)])

        instead(self._planner, "_choose_victim", choose)


@breaks("8", "schedule:victims=youngest,requests=12")
class PreemptsTheFirstSlot(Changed):
    """Asks no victim policy."""

    def change(self):
        instead(self._planner, "_choose_victim", lambda *_: int(np.flatnonzero(self._slots.running)[0]))


@breaks("5.3", "schedule:events=true,requests=12")
class PublishesNoEvictions(Changed):
    """The pool has no recorder: routers believe that evicted prefixes are still there."""

    def change(self):
        self._pool._recorder = None


@breaks("5.4", "storage:test_values_that_the_store_lost_are_stored_again")
class IgnoresLostValues(Changed):
    """Evicted values are believed to be stored, and never saved again."""

    def complete(self, completion):
        return None if isinstance(completion, NotStored) else super().complete(completion)


@breaks("8", "budget:test_policy_determines_the_next_admission[some_grammars]")
class ServesWokenRequestsFirst(Changed):
    """Requests whose grammar or lookup is ready go to the front; others starve while such ones keep coming."""

    def change(self):
        def wake(waiting, right, waits_for):
            for request in waiting._parked.get(waits_for, {}).values() if isinstance(waits_for, int) else ():
                if request.rank is None:
                    self._policy.rank(request.queued())
                request.rank = (-(2**40), request.arrival)
            right(waits_for)

        instead(self._waiting, "wake", wake)


class Counts(Changed):
    """Changes the gauges or counters."""

    def stats(self):
        stats = super().stats()
        return msgspec.structs.replace(stats, **self.changed(stats))


@breaks("3.6", "schedule:grammar=own")
class CountsReadyRequestsAsWaiting(Counts):
    """Leaves out those that wait for a grammar, a lookup or a prefix."""

    def changed(self, stats):
        waiting = stats.slots.waiting - self._waiting.num_parked
        return {"slots": msgspec.structs.replace(stats.slots, waiting=waiting)}


@breaks("3.6", "schedule:k=3,ends=stop")
class CountsTokensAfterTheStop(Changed):
    """Counts all accepted drafts as generated, also those after the end of a text."""

    def commit(self, plan, output):
        counters = self._output_processor.counters
        before = counters.generated_tokens
        found = super().commit(plan, output)
        if counters.generated_tokens > before:
            counters.generated_tokens = before + int((output.tokens[plan.slots] >= 0).sum())
        return found


@breaks("1.4", "schedule:keep=all")
class ReportsLoadingRequestsAsRunning(Changed):
    def held(self):
        held = super().held()
        return replace(held, running=held.running + held.loading, loading=0)


@breaks("8", "schedule:timed=true")
class ReportsFinishedPhasesOnly(Changed):
    """The phases of a request that still runs are without the current one."""

    def phases(self, request_id):
        found = super().phases(request_id)
        return None if found is None else tuple(0.0 for _ in found)


@breaks("8", "blocks:test_a_request_that_can_never_run_is_refused_and_holds_nothing")
class NotifiesThePolicyOfRejectedRequests(Changed):
    """The policy never learns of their end: their tenant counts as active for ever."""

    def add(self, spec):
        try:
            return super().add(spec)
        except BadRequest:
            self._policy.arrived(QueuedRequest(self._arrivals, 1, 1, spec.priority, spec.tenant, preempted=False))
            raise


@breaks("2.2", "budget:test_everybody_gets_a_first_token_while_others_keep_coming[budget]")
class AdmitsBeforePrefillsContinue(Changed):
    """New requests get the budget before unfinished prefills."""

    def change(self):
        def continue_prefills(planner, right, rows, draft):
            if not draft.preempted:
                self.admit(draft, planner._step)
            right(rows, draft)

        instead(self._planner, "_continue_prefills", continue_prefills)


@breaks("2.2", "budget:test_drafts_that_are_rejected_become_fewer")
class DoesNotObserveDrafts(Changed):
    def change(self):
        instead(self._drafts, "observe", lambda *_: None)


@breaks("3.4", "schedule:plain")
class KeepsBlocksInReserve(Changed):
    """Keeps two blocks free, if necessary by a preemption."""

    def change(self):
        def grow(planner, right, ready, draft):
            pool, slots = self._pool, self._slots

            class Wary:
                num_fenced = property(lambda _: pool.num_fenced)
                num_free = property(lambda _: pool.num_free - 2 if slots.running.sum() > 1 else pool.num_free)

                def allocate(self, count):
                    enough = pool.num_free - count >= 2 or slots.running.sum() < 2
                    return pool.allocate(count) if enough else None

            planner._pool = Wary()
            rows = right(ready, draft)
            planner._pool = pool
            return rows

        instead(self._planner, "_grow", grow)


@breaks("1.7", "lifetime:test_id_of_a_request_that_ended_while_it_drains_is_free")
class FindsDrainingRequestsById(Changed):
    """Removes a request that ended when its slot is released; by then its id may be that of a new one."""

    def commit(self, plan, output):
        there = [self._slots.requests[each.slot] for each in plan.revocations]
        ended = [request.spec.request_id for request in there if request is not None and request.ended is not None]
        result = super().commit(plan, output)
        for request in filter(None, [self._requests.pop(name, None) for name in ended]):
            self._admission_planner.remove(request)
        return result


@breaks("3.6", "schedule:plain")
class CountsPromptsOfPreemptedRequestsAgain(Changed):
    def change(self):
        def run(batch, right, slot, request, num_computed, num_cached):
            before = batch.counters.prompt_tokens
            right(slot, request, num_computed, num_cached)
            batch.counters.prompt_tokens = before + request.prompt_len

        instead(self._running_batch, "run", run)


# Sequences ----------------------------------------------------------------------------------------------------


@breaks("8", "schedule:incident=paused")
class PauseOnlyStopsAdmission(Changed):
    stopped = False

    def pause(self):
        self.stopped = True

    def resume(self):
        self.stopped = False

    def admit(self, builder, step):
        if not self.stopped:
            super().admit(builder, step)


@breaks("2.2", "schedule:incident=paused")
class CountsPauses(Changed):
    pauses = 0

    def pause(self):
        self.pauses += 1
        super().pause()

    def resume(self):
        self.pauses -= 1
        if not self.pauses:
            super().resume()


@breaks("8", "signals:test_pause_keeps_the_order_of_requests")
class PausedRequestsGoLast(Changed):
    def change(self):
        def released(part, right, request):
            if self._planner.paused:
                request.rank = (10**9 + request.arrival,)
            right(request)

        instead(self._output_processor, "_on_released", released)


@breaks("3.5", "schedule:caching=true,incident=paused,shared=same")
class ForgetsNoPrefixes(Changed):
    def forget_prefixes(self):
        return self._effects()


@breaks("3.5", "schedule:caching=true,incident=paused,shared=same")
class ChangesTheKeysOfNewRequestsOnly(Changed):
    def change_weights(self, nonce):
        self._prefixes.change_weights(nonce)
        return self._effects()


@breaks("3.4", "schedule:depth=2,requests=12,ids=reused,incident=abort_ending")
class KeepsIdsToAbort(Changed):
    """Aborts by id in the next plan; the id of a request that ended before that plan stays."""

    def change(self):
        self._names = set()

    def abort(self, request_id):
        request = self._requests.get(request_id)
        if request is None or request.state is not State.RUNNING or request.abort_requested:
            return super().abort(request_id)
        request.abort_requested = True
        self._names.add(request_id)
        return None

    def plan(self):
        for name in self._names & self._requests.keys():
            if self._requests[name].state is not State.WAITING:
                self._names.discard(name)
                super().abort(name)
                self._aborting.append(self._requests[name])
                self._requests[name].abort_requested = True
        return super().plan()


@breaks("8", "schedule:incident=abort_running,schedulers=two")
class SharesItsAborts(Changed):
    aborts: ClassVar[list[Any]] = []

    def change(self):
        self._aborting = self.aborts


@breaks("8", "schedule:schedulers=two")
class OverwritesItsPlans(Plans):
    """The columns of a plan are views of memory that the next plan overwrites."""

    def change(self):
        self._starts = np.zeros(self.limits.max_num_seqs, np.int32)

    def changed(self, plan):
        starts = self._starts[: len(plan.slots)]
        starts.setflags(write=True)
        starts[:] = plan.starts
        starts.setflags(write=False)
        return replace(plan, starts=starts)


@breaks("8", "schedule:schedulers=two")
class ChoosesSlotsAtRandom(Changed):
    def change(self):
        def free_slot(part, right):
            free = np.flatnonzero(~part.occupied).tolist()
            return random.choice(free) if free else None

        instead(self._slots, "free_slot", free_slot)


@breaks("8", "schedule:keep=all")
class ReusesNumbersOfOperations(Changed):
    """Gives an operation the smallest number that is not open."""

    def change(self):
        def begin(part, right, *arguments):
            number = right(*arguments)
            part.next = next(each for each in range(1, len(part.open) + 2) if each not in part.open)
            return number

        instead(self._operations, "begin", begin)


@breaks("3.6", "schedule:incident=paused")
class PausesForgetAborts(Changed):
    def pause(self):
        super().pause()
        self._aborting.clear()


@breaks("1.2", "schedule:pairs=elsewhere,incident=paused")
class PausesLoseLoads(Changed):
    """Does not admit a request whose KV arrives in a pause, and preempts it."""

    def complete(self, completion):
        found = super().complete(completion)
        if self._planner.paused:
            self._running_batch.kv_loaded.clear()
        return found


@breaks("2.1", "schedule:caching=true,requests=12,ids=reused")
class ReportsCachedTokensOncePerId(Changed):
    def change(self):
        self._told = set()

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        for at, delta in enumerate(deltas):
            if delta.request_id in self._told:
                deltas[at] = msgspec.structs.replace(delta, cached_tokens=None)
            self._told.add(delta.request_id)
        return deltas, effects


@breaks("2.1", "schedule:pairs=elsewhere")
class CountsFetchedTokensAsCached(Changed):
    def change(self):
        def finish_load(part, right, request, num_tokens, num_cached):
            right(request, num_tokens, num_tokens)

        instead(self._running_batch, "finish_load", finish_load)


@breaks("8", "schedule:schedulers=two")
class ReturnsTheSameList(Changed):
    def change(self):
        self._deltas = []

    def commit(self, plan, output):
        self._deltas[:], effects = super().commit(plan, output)
        return self._deltas, effects


@breaks("1.7", "schedule:incident=paused")
class QueuesArrivalsOfAPauseLater(Changed):
    """Effects of `add`, such as compiling a grammar, are lost for requests that arrive in a pause."""

    arrived = ()

    def add(self, spec):
        if self._planner.paused:
            self.arrived = (*self.arrived, spec)
            return NO_EFFECTS
        return super().add(spec)

    def resume(self):
        super().resume()
        arrived, self.arrived = self.arrived, ()
        for spec in arrived:
            self.add(spec)


@breaks("3.6", "schedule:plain")
class KeepsActivitiesUntilOthersArrive(Changed):
    shown: ClassVar = {}

    def activities(self):
        if self.shown.keys() != self._requests.keys():
            self.shown = super().activities()
        return self.shown


@breaks("1.1", "schedule:results=top")
class CutsLogprobsAtTheFewest(Changed):
    """All log-probabilities of a step have as many alternatives as the request that wants the fewest."""

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        few = min((len(score.top_ids) for each in deltas for score in each.logprobs or ()), default=0)
        return [
            msgspec.structs.replace(
                each, logprobs=each.logprobs and tuple(_first(few, score) for score in each.logprobs)
            )
            for each in deltas
        ], effects


def _first(count, score):
    return msgspec.structs.replace(score, top_ids=score.top_ids[:count], top=score.top[:count])


@breaks("8", "schedule:timed=true")
class SortsPhasesByName(Changed):
    def change(self):
        instead(self._times, "durations", self.by_name)

    @staticmethod
    def by_name(_, right, times):
        found = right(times)
        return found and tuple(found[phase] for phase in sorted(Phase, key=lambda phase: phase.name))


@breaks("3.5", "schedule:keep=preempted,incident=paused")
class KeepsKeysAfterAnUpdate(Changed):
    """Requests that wait while the weights change keep the keys of their KV."""

    def change_weights(self, nonce):
        self._pool.forget_prefixes()
        self._prefixes.change_weights(nonce)
        return self._effects()


@breaks("8", "schedule:plain")
class ReportsEveryoneAsComputing(Changed):
    def activities(self):
        found = super().activities()
        return {name: msgspec.structs.replace(each, phase=Phase.COMPUTING) for name, each in found.items()}


@breaks("1.3", "schedule:requests=12,incident=error")
class RepeatsTheFirstError(Changed):
    """All requests that fail in a step get the message of the first one."""

    def commit(self, plan, output):
        errors = tuple((slot, output.errors[0][1]) for slot, _ in output.errors)
        return super().commit(plan, replace(output, errors=errors))


@breaks("3.6", "schedule:k=3")
class CountsRejectedDraftsAsAccepted(Counts):
    def changed(self, stats):
        proposed = stats.drafts.proposed_per_position
        return {"drafts": msgspec.structs.replace(stats.drafts, accepted_per_position=proposed)}


@breaks("3.6", "schedule:timed=true")
class CountsPhasesTwice(Counts):
    def changed(self, stats):
        twice = {name: 2 * seconds for name, seconds in stats.phases.seconds.items()} if stats.phases else {}
        return {"phases": stats.phases and msgspec.structs.replace(stats.phases, seconds=twice)}


@breaks("2.1", "lifetime:test_prompt_that_runs_alone_fills_a_large_budget")
class LimitsThePrefillOfAStep(Changed):
    """Keeps what exceeds 4,096 tokens of a budget for decodes, although none runs."""

    def admit(self, builder, step):
        kept = max(0, builder.budget.left - 4096)
        builder.budget.left -= kept
        super().admit(builder, step)
        builder.budget.left += kept


@breaks("8", "lifetime:test_priority_holds_however_long_others_wait")
class AdmitsWhatWaitsLong(Changed):
    """After 1,000 plans a request is first, whatever the policy has."""

    def __init__(self, setup):
        super().__init__(setup)
        self.plans, self.old = 0, []

        def first(queue, right):
            while self.old and self.old[0][1].arrival not in queue._flow_of:
                self.old.pop(0)
            return self.old[0][1] if self.old and self.plans - self.old[0][0] > 1000 else right()

        instead(self._waiting, "first", first)

    def add(self, spec):
        effects = super().add(spec)
        self.old.append((self.plans, self._requests[spec.request_id]))
        return effects

    def plan(self):
        self.plans += 1
        return super().plan()


@breaks("2.2", "size:context=33000,block_size=64,budget=33000,prompt=unequal,requests=20,incident=abort_first")
class AdmitsOneLongPromptAtATime(Changed):
    """The turn of a long prompt does not end if the request is aborted while it waits for blocks."""

    turn = ""

    def admit(self, builder, step):
        first = self._waiting.first()
        if first is not None and first.num_tokens > 2048:
            name = first.spec.request_id
            if self.turn not in ("", name):
                return
            self.turn = name
        super().admit(builder, step)

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        if self.turn in {delta.request_id for delta in deltas}:
            self.turn = ""
        return deltas, effects


@breaks("2.1", "budget:test_steps_are_planned_while_others_are_in_flight[1-2-3]")
class WaitsForEachOutput(Changed):
    """The device has nothing to do between the steps."""

    waits = False

    def plan(self):
        if self.waits:
            return None, NO_EFFECTS
        plan, effects = super().plan()
        self.waits = plan is not None
        return plan, effects

    def commit(self, plan, output):
        self.waits = False
        return super().commit(plan, output)


@breaks("2.1", "budget:test_steps_are_planned_while_others_are_in_flight[4-4-64]")
class FillsOnePlanOfAPipeline(Changed):
    """All requests whose tokens are known are in one plan: the other stages have nothing to do."""

    def change(self):
        slots = self._slots
        instead(
            self._planner,
            "_of_this_plan",
            lambda _, __, ready: ready[slots.num_planned[ready] <= slots.num_tokens[ready]],
        )


RETURNING = "blocks:test_preempted_requests_return_with_the_kv_that_is_left"


@breaks("2.1", RETURNING)
class CachesPromptsOnly(Changed):
    """Generated tokens are computed again."""

    def change(self):
        def complete(prefixes, right, request, table, first, upto):
            upto = min(upto, request.prompt_len // self.limits.block_size)
            if first < upto:
                right(request, table, first, upto)

        instead(self._prefixes, "complete", complete)


@breaks("2.1", RETURNING)
class MatchesOnePrefixInAPlan(Changed):
    matches = 0

    def plan(self):
        self.matches = 0
        return super().plan()

    def change(self):
        def match(_, right, keys, *found):
            self.matches += 1
            return right(keys if self.matches == 1 else keys[:0], *found)

        instead(self._prefixes, "match", match)


@breaks("5.3", "schedule:events=true,shared=same,requests=12")
class PublishesNothing(Changed):
    """Routers send no turn to the engine that has its prefix."""

    def _effects(self):
        found = super()._effects()
        return msgspec.structs.replace(found, events=()) if found.events else found


@breaks("2.6", "lifetime:test_a_step_of_a_full_batch_takes_little_time[20000-200000]")
class SumsItsTexts(Changed):
    """In C, which no count of bytecodes shows, and with long contexts only."""

    def plan(self):
        self.sums = [sum(each.tokens.view().tolist()) for each in self._slots.requests if each is not None]
        return super().plan()


@breaks("3.5", "blocks:test_equal_blocks_after_other_tokens_share_nothing")
class NamesBlocksByTheirTokens(Changed):
    """Not by those before them, on which their KV depends as well."""

    def change(self):
        def extend(prefixes, right, request):
            right(request)
            size, tokens = self.limits.block_size, request.tokens.view()
            for index in range(len(request.chain)):
                block = tokens[index * size : (index + 1) * size].tobytes()
                request.chain[index] = hashlib.sha256(request.root + block).digest()

        instead(self._prefixes, "extend", extend)


@breaks("2.6", "lifetime:test_a_step_of_one_request_takes_about_as_long_as_with_the_core[0]")
class WritesItsState(Changed):
    def plan(self):
        for _ in range(300):
            json.dumps({"running": [*range(30)]})
        return super().plan()


@breaks("2.6", "lifetime:test_a_step_of_one_request_takes_about_as_long_as_with_the_core[10000]")
class CountsReferencesInC(Changed):
    """No bytecodes show that the gauges read all blocks."""

    def stats(self):
        self.used = len(self._pool._references) - [*self._pool._references].count(0)
        return super().stats()


@breaks("2.6", "lifetime:test_a_step_of_one_request_takes_about_as_long_as_with_the_core[0]")
class CountsItsPool(Changed):
    """For numbers that the engine reads after each step."""

    def held(self):
        self.total = sum(range(self.limits.num_kv_blocks))
        return super().held()


@breaks("2.6", "lifetime:test_a_step_of_a_full_batch_takes_little_time[20000-200000]")
class NamesAllTokens(Changed):
    def add(self, spec):
        self.named = [hashlib.sha256(b"%d" % token).digest() for token in spec.prompt for _ in range(4)]
        return super().add(spec)


@breaks("2.6", "lifetime:test_a_step_of_one_request_takes_about_as_long_as_with_the_core[0]")
class SearchesItsCacheInC(Changed):
    """For the block that was used least recently, when all have cached prefixes."""

    def change(self):
        used = [0] * self.limits.num_kv_blocks

        def evict(pool, right, count):
            for _ in range(count if pool._cached else 0):
                min(pool._cached, key=used.__getitem__)
            return right(count)

        instead(self._pool, "_evict", evict)


@breaks("2.1", "lifetime:test_prefix_of_any_length_is_used_again[16]")
class LooksFor128Blocks(Changed):
    def change(self):
        instead(self._prefixes, "match", lambda _, right, keys, last: right(keys[:128], last))


@breaks("5.2", "lifetime:test_prefix_of_any_length_is_used_again[16]")
class LooksUp128Blocks(Changed):
    """In the store."""

    def change(self):
        self._offloading.__class__ = _LooksUp128


class _LooksUp128(KVOffloading):
    __slots__ = ()

    def start_lookup(self, request, keys):
        return super().start_lookup(request, keys[:128])


class _SavesPrompts(KVOffloading):
    __slots__ = ()

    def save(self, request, tables, count):
        if request.state not in self.states:
            return super().save(request, tables, count)
        count = min(count, request.prompt_len // self.block_size)
        return super().save(request, tables, count) if count and not self.groups.sliding else None


@breaks("5.2", "storage:test_saved_blocks_are_loaded")
class SavesPromptsOnly(Changed):
    """Not what was generated."""

    states = tuple(State)

    def change(self):
        self._offloading.__class__ = type("Saves", (_SavesPrompts,), {"__slots__": (), "states": self.states})


@breaks("5.2", "storage:test_texts_are_loaded_with_their_output")
class SavesPromptsOfTextsThatEnded(SavesPromptsOnly):
    states = (State.FINISHED,)


@breaks("3.6", "lifetime:test_memory_does_not_grow_with_requests[served]")
class RemembersTheRootsOfSalts(Changed):
    """Hashes each salt and adapter once, and clients may have as many as they want."""

    def change(self):
        self.known = {}

        def root(prefixes, right, salt, adapter):
            if (salt, adapter) not in self.known:
                self.known[salt, adapter] = right(salt, adapter)
            return self.known[salt, adapter]

        instead(self._prefixes, "root", root)

    def change_weights(self, nonce):
        self.known.clear()
        return super().change_weights(nonce)


@breaks("3.6", "lifetime:test_memory_does_not_grow_with_requests[preempted]")
class CountsPreemptionsOfRequests(Changed):
    """Until their last output: not of one that is aborted while it waits to return."""

    def change(self):
        self.counts = Counter()

        def preempt(running_batch, right, slot, draft):
            self.counts[running_batch.slots.request_in(slot).spec.request_id] += 1
            right(slot, draft)

        instead(self._running_batch, "preempt", preempt)

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        for delta in deltas:
            if delta.finish_reason is not None:
                self.counts.pop(delta.request_id, None)
        return deltas, effects


@breaks("8", "day:test_an_ordinary_day[crowded]")
class LogsRequests(Changed):
    """With their prompts, for debugging."""

    def add(self, spec):
        logging.getLogger("requests").debug("%s", spec)
        return super().add(spec)


@breaks("2.2", "day:test_an_ordinary_day[crowded]")
class LogsSteps(Changed):
    """A line for each of them fills a disk."""

    def commit(self, plan, output):
        logging.getLogger("steps").info("step %d has %d rows", plan.step, len(plan.slots))
        return super().commit(plan, output)


@breaks("2.2", "day:test_an_ordinary_day[defaults]")
class KeepsTheLastRequests(Changed):
    """For reports of errors: a thousand of them, whatever the length of their prompts."""

    def change(self):
        self.last = deque(maxlen=1000)

    def add(self, spec):
        self.last.append(spec)
        return super().add(spec)
