"""Schedulers with one fault each: a few lines on top of the right one, and the case that names the fault."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from time import monotonic
from typing import Any

import msgspec
import numpy as np

from fd_core.effects.operations import NO_EFFECTS, AbandonLease, Cancel, CompileGrammar, Fetch, Fetched, Loaded
from fd_core.errors import ConfigError
from fd_core.scheduling.images import ImageBudget
from fd_core.scheduling.requests import State
from fd_core.scheduling.running import planner
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.waiting import admission_planner
from fd_core.types import FinishReason
from tests.testing.witnesses import Witnesses

WRONG = Witnesses()
breaks = WRONG.breaks


def instead(part: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of a part by `function(part, right, *arguments)`; `right` is the original method."""
    right = getattr(part, name)
    setattr(part, name, lambda *arguments, **named: function(part, right, *arguments, **named))


def ranks(scheduler: Any, rank: Callable[[Any], tuple[int, ...]]) -> None:
    """Ask the policy for the rank of each request, and use another one."""

    def push(_: Any, right: Callable[..., Any], request: Any) -> None:
        if request.rank is None:
            scheduler._policy.rank(request.queued())
        request.rank = rank(request)
        right(request)

    instead(scheduler._waiting, "push", push)


class Changed(ContinuousBatchingScheduler):
    """The right scheduler, with parts that a subclass changes."""

    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.change()

    def change(self) -> None:
        """Apply the fault."""


class Answers(Changed):
    """Changes the result of commit."""

    def commit(self, plan: Any, output: Any) -> Any:
        before = {name: request.state for name, request in self._requests.items()}
        deltas, effects = super().commit(plan, output)
        return [delta for delta in deltas if self.keeps(delta, before.get(delta.request_id), output)], effects

    def keeps(self, delta: Any, state: State | None, output: Any) -> bool:
        return True


class Plans(Changed):
    """Changes the result of plan."""

    def plan(self) -> Any:
        plan, effects = super().plan()
        return (None if plan is None else self.changed(plan)), effects

    def changed(self, plan: Any) -> Any:
        return plan


# Signals ------------------------------------------------------------------------------------------------------


@breaks("1.1", "schedule:depth=2")
class DropsTokensInFlightForADrainingSlot(Answers):
    def keeps(self, delta, state, output):
        return not (state is State.DRAINING and delta.token_ids)


@breaks("1.1", "schedule:k=3")
class DeliversOneTokenOfAStep(Answers):
    """Accepted drafts are lost."""

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        return [msgspec.structs.replace(delta, token_ids=delta.token_ids[:1]) for delta in deltas], effects


@breaks("1.2", "schedule:depth=3")
class RevokesTwice(Plans):
    """Repeats a revocation until it is acknowledged."""

    pending: tuple = ()

    def changed(self, plan):
        again = tuple(each for each in self.pending if self._slots.draining[each.slot])
        self.pending = (*again, *plan.revocations)
        return replace(plan, revocations=self.pending)


@breaks("1.2", "schedule:incident=abort_draining")
class EndsAnAbortedRequestBeforeItsRelease(Changed):
    def abort(self, request_id):
        request = self._requests.get(request_id)
        delta = super().abort(request_id)
        if request is not None and request.state is State.DRAINING and not hasattr(self, "has_ended"):
            self.has_ended = True
            return self._output_processor.end(request, FinishReason.ABORT)
        return delta


@breaks("1.3", "schedule:incident=abort_all")
class MakesNoStepOfRevocationsAlone(Plans):
    def plan(self):
        running = [self._slots.request_in(int(slot)) for slot in np.flatnonzero(self._slots.running)]
        if self._aborting and all(request in self._aborting for request in running):
            return None, NO_EFFECTS
        return super().plan()


@breaks("1.3", "schedule:incident=error")
class DropsRowsAfterAnError(Answers):
    def keeps(self, delta, state, output):
        return not output.errors or delta.finish_reason is FinishReason.ERROR


@breaks("8", "schedule:plain")
class ReassignsADrainingSlot(Changed):
    """A slot is free as soon as it is revoked; its request is requeued at once."""

    def change(self):
        def revoke(running_batch, right, slot, request, draft):
            right(slot, request, draft)
            if not request.abort_requested:
                self._admission_planner.enqueue(running_batch.release(slot))

        instead(self._running_batch, "revoke", revoke)


@breaks("1.4", "schedule:depth=2")
class ForgetsTokensReceivedWhileDraining(Plans):
    """A request is readmitted with the tokens that it had when its slot was revoked."""

    def change(self):
        self.had = {}

        def preempt(running_batch, right, slot, draft):
            request = running_batch.slots.request_in(slot)
            self.had[request.spec.request_id] = request.num_tokens
            right(slot, draft)

        instead(self._running_batch, "preempt", preempt)

    def changed(self, plan):
        cut = tuple(
            replace(each, token_ids=each.token_ids[: self.had.get(each.request_id, len(each.token_ids))])
            for each in plan.admissions
        )
        return replace(plan, admissions=cut)


@breaks("1.5", "schedule:incident=stale")
class AcceptsAnotherEpoch(Changed):
    def commit(self, plan, output):
        return super().commit(plan, replace(output, epoch=plan.epoch))


@breaks("1.5", "schedule:incident=repeated")
class AppliesAnAnswerTwice(Changed):
    def commit(self, plan, output):
        self._output_processor._next_step = plan.step
        return super().commit(plan, output)


@breaks("1.5", "signals:test_a_row_of_another_gen_is_dropped[False]")
class MatchesRowsBySlotOnly(Changed):
    def commit(self, plan, output):
        gens = output.gens.copy()
        gens[plan.slots] = plan.gens
        return super().commit(plan, replace(output, gens=gens))


@breaks("1.5", "schedule:plain")
class KeepsTheGen(Changed):
    def change(self):
        def occupy(slots, right, slot, request, *given, **more):
            right(slot, request, *given, **more)
            slots.gen[slot] = 1

        instead(self._slots, "occupy", occupy)


@breaks("1.6", "schedule:stages=4,results=cls,incident=abort_ending")
class RequeuesRequestsThatEndedWhileDraining(Answers):
    """The end of a draining request is reported with its release, if at all."""

    def commit(self, plan, output):
        before = {name: request.state for name, request in self._requests.items()}
        deltas, effects = super().commit(plan, output)
        return [
            msgspec.structs.replace(each, finish_reason=None)
            if before.get(each.request_id) is State.DRAINING and each.token_ids
            else each
            for each in deltas
        ], effects


@breaks("1.7", "schedule:incident=abort_waiting")
class AbortsWhenItIsAdmitted(Changed):
    def abort(self, request_id):
        request = self._requests.get(request_id)
        if request is not None and request.state is State.WAITING:
            return None
        return super().abort(request_id)


@breaks("1.7", "schedule:incident=abort_waiting")
class ReportsAnAbortTwice(Changed):
    def abort(self, request_id):
        delta = super().abort(request_id)
        self.last = getattr(self, "last", None) if delta is None else delta
        return self.last


@breaks("1.8", "schedule:keep=all,requests=12")
class SleepsOnceAllEndsAreReported(Changed):
    """A stopping engine then exits, although slots still drain or saves are running."""

    @property
    def has_work(self):
        return bool(self._requests)


@breaks("1.9", "schedule:requests=12")
class IgnoresTokenZero(Answers):
    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        return [
            msgspec.structs.replace(each, token_ids=tuple(token for token in each.token_ids if token > 0))
            for each in deltas
        ], effects


# Budget -------------------------------------------------------------------------------------------------------


@breaks("2.1", "budget:test_a_budget_equal_to_the_demand_plans_the_whole_demand[3]")
class ReservesBudgetForEverySlot(Changed):
    """Budget for a decode with all drafts is reserved for every slot, occupied or not."""

    def change(self):
        reserve = self.limits.max_num_seqs
        budget = max(self.limits.max_num_batched_tokens - reserve, 1 + self.limits.max_drafts)
        self._planner._limits = msgspec.structs.replace(self.limits, max_num_batched_tokens=budget)


@breaks("2", "schedule:k=3,wrong=1.0,depth=3")
class ChargesOneTokenForEachDecode(Changed):
    def change(self):
        def decode(planner, right, rows, draft):
            budget, slots = draft.budget.left, self._slots
            draft.budget.left = 10_000
            right(rows, draft)
            decodes = int((slots.num_planned[rows] - slots.num_computed[rows] == 1).sum())
            draft.budget.left = max(budget - decodes, 0)

        instead(self._planner, "_decode", decode)


@breaks("2.1", "schedule:budget=3,k=2")
class ChargesMissingDrafts(Changed):
    def change(self):
        def ready(slots, right):
            slots.drafts_ready[:] = self.limits.max_drafts
            return right()

        instead(self._slots, "ready", ready)


@breaks("2.2", "schedule:budget=3,k=2")
class SkipsDecodesForDrafts(Changed):
    def change(self):
        def decode(planner, right, rows, draft):
            slots = self._slots
            decoding = rows[slots.num_planned[rows] - slots.num_computed[rows] == 1]
            for row in decoding.tolist():
                wanted = 1 + int(planner._wanted_drafts(np.array([row]), draft)[0])
                taken = draft.budget.take(wanted)
                if taken:
                    draft.add_rows(np.array([row]), np.array([taken], np.int32), np.array([taken - 1], np.int32))

        instead(self._planner, "_decode", decode)


@breaks("2.2", "budget:test_decodes_are_left_out_in_rotation[2]")
class AlwaysServesTheFirstSlots(Changed):
    def change(self):
        def decode(planner, right, rows, draft):
            last, self._slots.last_step = self._slots.last_step, np.zeros_like(self._slots.last_step)
            right(rows, draft)
            self._slots.last_step = last

        instead(self._planner, "_decode", decode)


@breaks("2.3", "budget:test_budget_of_an_aborted_request_goes_to_others[0]")
class ChargesAbortedRequests(Changed):
    def change(self):
        def revoke(running_batch, right, slot, request, draft):
            draft.budget.take(int(request.abort_requested))
            right(slot, request, draft)

        instead(self._running_batch, "revoke", revoke)


@breaks("1.7", "schedule:budget=3,stages=2,results=last,incident=abort_ending")
class AbortsWhenBudgetIsLeft(Changed):
    def change(self):
        def revoke(running_batch, right, slot, request, draft):
            if not request.abort_requested or int(self._slots.running.sum()) < draft.budget.left:
                right(slot, request, draft)

        instead(self._running_batch, "revoke", revoke)


@breaks("2.5", "schedule:budget=3")
class RequiresBudgetForEverySlot(Changed):
    def change(self):
        budget, demand = self.limits.max_num_batched_tokens, self.limits.max_num_seqs * (1 + self.limits.max_drafts)
        if budget < demand:
            raise ConfigError(f"max_num_batched_tokens is {budget}, but all slots together take {demand}")


@breaks("2.2", "budget:test_everybody_gets_a_first_token_while_others_keep_coming[blocks]")
class AdmitsTheShortestFirst(Changed):
    """Shortest first, without aging."""

    def change(self):
        ranks(self, lambda request: (request.prompt_len,))


# Blocks -------------------------------------------------------------------------------------------------------


@breaks("3.2", "schedule:incident=abort_loading")
class FreesWhileALoadWrites(Changed):
    def change(self):
        instead(self._pool, "pin", lambda pool, right, blocks: None)
        instead(self._pool, "unpin", lambda pool, right, blocks: None)


@breaks("3.3", "schedule:incident=abort_loading")
class EvictsMatchedBlocks(Changed):
    """Allocates new blocks before it acquires those of the cached prefix."""

    def change(self):
        self.matched = ()

        def acquire(pool, right, blocks):
            self.matched = blocks

        def allocate(pool, right, count):
            matched, self.matched = self.matched, ()
            blocks = right(count)
            if blocks is not None and len(matched):
                pool._references[matched] += ~np.isin(matched, blocks)
                for block in matched.tolist():
                    pool._cached.pop(block, None)
            return blocks

        def release(pool, right, blocks, fence):
            if blocks is self.matched:
                self.matched = ()
            else:
                right(blocks, fence)

        for name, wrong in (("acquire", acquire), ("allocate", allocate), ("release", release)):
            instead(self._pool, name, wrong)


@breaks("3.4", "blocks:test_one_victim_is_enough_while_its_blocks_are_fenced[2]")
class PreemptsAChain(Changed):
    """Does not count the blocks that are being freed."""

    def change(self):
        def grow(planner, right, ready, draft):
            pool = self._pool

            class Blind:
                num_fenced = 0
                num_free = property(lambda _: pool.num_free)
                allocate = staticmethod(pool.allocate)

            planner._pool = Blind()
            rows = right(ready, draft)
            planner._pool = pool
            return rows

        instead(self._planner, "_grow", grow)


@breaks("3.5", "schedule:k=3,keep=all,wrong=1.0")
class SharesRejectedDrafts(Changed):
    """Registers blocks once they are computed, even if their drafts were rejected."""

    def change(self):
        def settle(running_batch, right, rows, upto, step):
            ahead = np.minimum(upto + 4, self._slots.num_tokens[rows])
            right(rows, ahead.astype(np.int32), step)

        instead(self._running_batch, "settle", settle)


@breaks("4", "schedule:caching=true,shared=prefix,results=prompt")
class ReadsEveryPromptFromTheCache(Changed):
    """A cached position is not computed again, even if its outputs were requested."""

    def change(self):
        size = self._prefixes.hasher.block_size
        whole = lambda prefixes, right, request: request.chain[: (request.num_tokens - 1) // size]  # noqa: E731
        instead(self._prefixes, "keys", whole)


@breaks("4", "schedule:results=prompt,budget=3")
class ReportsOnlyTheLastPromptChunk(Answers):
    def commit(self, plan, output):
        rows = dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))
        slots = {name: request.slot for name, request in self._requests.items()}
        deltas, effects = super().commit(plan, output)
        return [
            msgspec.structs.replace(delta, prompt_logprobs=delta.prompt_logprobs[-rows[slots[delta.request_id]] :])
            if delta.prompt_logprobs
            else delta
            for delta in deltas
        ], effects


@breaks("4", "schedule:results=prompt")
class RepeatsPromptLogprobs(Answers):
    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        self.sent |= {delta.request_id: delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs}
        again = [
            msgspec.structs.replace(delta, prompt_logprobs=self.sent.get(delta.request_id, delta.prompt_logprobs))
            for delta in deltas
        ]
        return again, effects

    def change(self):
        self.sent = {}


@breaks("2.1", "budget:test_more_requests_run_at_once_than_eight_bits_count")
class NumbersRequestsInEightBits(Changed):
    def plan(self):
        found = super().plan()
        np.uint8(self.held().running)  # raises OverflowError from 256 on
        return found


@breaks("5.4", "storage:test_keys_of_kv_depend_on_the_nonce_of_the_weights")
class CountsItsWeights(Changed):
    version = 0

    def change_weights(self, nonce):
        self.version += 1
        return super().change_weights(b"version %d" % self.version)


@breaks("5.4", "storage:test_damaged_value_is_recomputed_and_stored_again")
class TreatsDamagedKVAsStored(Changed):
    def complete(self, completion):
        remembered = dict(self._offloading._stored_keys)
        super().complete(completion)
        self._offloading._stored_keys.update(remembered)


@breaks("5.4", "schedule:keep=all,outcome=in_part")
class UsesPartialLoads(Changed):
    """Treats a load of half of its blocks as complete."""

    def complete(self, completion):
        if isinstance(completion, Loaded):
            keys = self._operations.open[completion.operation][0].keys
            completion = msgspec.structs.replace(completion, blocks=len(keys))
        super().complete(completion)


@breaks("5.6", "storage:test_kv_is_loaded_only_where_that_beats_computing_it[host-2.5-2]")
class AlwaysLoads(Changed):
    def change(self):
        self._offloading.load_or_recompute.prefill_measured = lambda pace: None


@breaks("5.6", "storage:test_kv_is_loaded_only_where_that_beats_computing_it[all-0.4-8]")
class ComparesABlockWithAToken(Changed):
    """Loading a block has to be faster than computing one token of it."""

    def change(self):
        def decide(_, right, name, host, store, tokens):
            decision = right(name, host, store, tokens // self.limits.block_size)
            return msgspec.structs.replace(decision, num_tokens=tokens)

        instead(self._offloading.load_or_recompute, "decide", decide)


# Pairs --------------------------------------------------------------------------------------------------------


@breaks("3.6", "schedule:pairs=elsewhere")
class DecodesBeforeTheTransfer(Changed):
    def plan(self):
        plan, effects = super().plan()
        for each in effects.operations:
            if isinstance(each, Fetch):
                self.complete(Fetched(each.operation, "transferred"))
        return plan, effects


@breaks("6.3", "schedule:pairs=elsewhere,outcome=in_part")
class UsesPartialTransfers(Changed):
    def complete(self, completion):
        if isinstance(completion, Fetched):
            completion = msgspec.structs.replace(completion, outcome="transferred")
        super().complete(completion)


@breaks("6.3", "schedule:pairs=elsewhere,delivered=7")
class FetchesThePromptOfAnotherEpochAgain(Changed):
    def change(self):
        transferring = self._transferring

        class Asking:
            __slots__ = ()
            wants = staticmethod(lambda request: bool(request.spec.prefill_at) and request.prefill is None)

            def __getattr__(self, name):
                return getattr(transferring, name)

        self._admission_planner._transferring = Asking()


@breaks("6.1", "schedule:depth=3,requests=12,incident=abort_loading")
class KeepsLeasesOfAbortedRequests(Changed):
    def change(self):
        def take(operations, right):
            operations.effects[:] = [effect for effect in operations.effects if not isinstance(effect, Cancel)]
            return right()

        instead(self._operations, "take", take)


@breaks("1.7", "schedule:grammar=own,incident=abort_waiting,requests=12")
class CompilesGrammarsOfAbortedRequests(Changed):
    """A client that leaves while its grammar is compiled keeps the compiler busy, and its place in the line for it."""

    def change(self):
        def cancel(operations, right, number):
            effect = operations.open[number][0] if number else None
            right(number)
            if isinstance(effect, CompileGrammar):
                operations.effects.pop()

        instead(self._operations, "cancel", cancel)


@breaks("6.1", "pairs:test_lease_leaves_room_for_running_requests")
class ComputesPromptsOfOtherWorkers(Changed):
    def change(self):
        self._transferring.paired = False


@breaks("6.1", "pairs:test_lease_leaves_room_for_running_requests")
class LeasesAllFreeBlocks(Changed):
    def change(self):
        instead(self._probe.control, "growth", lambda *_: 0)


@breaks("6.2", "schedule:pairs=jobs,requests=12")
class SendsABlockThatIsNotFull(Changed):
    def change(self):
        def send(running_batch, right, slot, request):
            if request.spec.prefill_job is not None:
                upto = -(-int(self._slots.num_computed[slot]) // self.limits.block_size)
                self._transferring.settled(request, self._slots.tables[:, slot], upto)

        instead(self._running_batch, "_send_settled", send)


@breaks("6.2", "pairs:test_preempted_job_resumes_after_the_blocks_already_sent[2-3]")
class ResendsAJobFromTheStart(Changed):
    def change(self):
        def preempt(running_batch, right, slot, draft):
            job = running_batch.slots.request_in(slot).spec.prefill_job
            if job is not None:
                running_batch.slots.request_in(slot).sent = job.held_blocks
            right(slot, draft)

        instead(self._running_batch, "preempt", preempt)


@breaks("6.1", "schedule:pairs=jobs,incident=abort_running,budget=3")
class NeverAbandonsLeases(Changed):
    def change(self):
        def take(operations, right):
            operations.effects[:] = [effect for effect in operations.effects if not isinstance(effect, AbandonLease)]
            return right()

        instead(self._operations, "take", take)


@breaks("3.2", "schedule:pairs=jobs,requests=12")
class OverwritesBlocksBeingSent(Changed):
    """Blocks of a send are free as soon as the request has left its slot."""

    def change(self):
        def begin(operations, right, about, request, blocks=None):
            if type(about).__name__ != "Send":
                return right(about, request, blocks)
            about.blocks.setflags(write=False)
            return right(about, request)

        instead(self._operations, "begin", begin)


# Deltas for clients -------------------------------------------------------------------------------------------


class ChangesDeltas(Changed):
    """Changes the deltas of commit."""

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        return [self.changed_delta(delta) for delta in deltas], effects


@breaks("1.1", "schedule:results=top,k=3")
class MixesUpLogprobs(ChangesDeltas):
    """Of several tokens of a step, the log-probabilities of the last one are first."""

    def changed_delta(self, delta):
        return msgspec.structs.replace(delta, logprobs=delta.logprobs and delta.logprobs[::-1])


@breaks("1.1", "schedule:ends=stop,output=5")
class ReportsLengthForAStopAtTheLimit(ChangesDeltas):
    def commit(self, plan, output):
        self.full = {name for name, each in self._requests.items() if each.num_tokens + 1 == each.limit}
        return super().commit(plan, output)

    def changed_delta(self, delta):
        if delta.finish_reason is FinishReason.STOP and delta.request_id in self.full:
            return msgspec.structs.replace(delta, finish_reason=FinishReason.LENGTH)
        return delta


@breaks("8", "schedule:schedulers=two,requests=20,slots=2")
class RanksByAClockImportedByName(Changed):
    """Later requests are less important by one level for each 20 seconds."""

    def change(self):
        began = monotonic()
        ranks(self, lambda request: (int((monotonic() - began) / 20), request.arrival))


@breaks("8", "schedule:plain")
class ReturnsMutablePlans(Plans):
    def changed(self, plan):
        return replace(plan, slots=plan.slots.copy())


@breaks("4", "schedule:plain")
class ChangesTheParameters(Plans):
    """After a restart, max_tokens of a request is the number of its remaining tokens."""

    def changed(self, plan):
        return replace(
            plan,
            admissions=tuple(
                replace(
                    each,
                    params=msgspec.structs.replace(
                        each.params, max_tokens=each.params.max_tokens - len(each.token_ids) + each.prompt_len
                    ),
                )
                for each in plan.admissions
            ),
        )


@breaks("3.5", "schedule:images=one,caching=true,shared=same,requests=20,prompt=above,block_size=16")
class NamesPrefixesWithoutTheirImages(Changed):
    """Prompts with the same words and other images share blocks."""

    def change(self):
        def extend(prefixes, right, request):
            images, request.images = request.images, ()
            right(request)
            request.images = images

        instead(self._prefixes, "extend", extend)


@breaks("3.5", "schedule:images=several,caching=true,shared=same,requests=20,prompt=above,block_size=4,context=129")
class DividesAnImageByAHit(Changed):
    """The last tokens of an image are computed after a hit on its first ones."""

    def change(self):
        admit = self._admission_planner.admit

        def without(builder, step):
            whole, admission_planner.whole_blocks = admission_planner.whole_blocks, lambda images, blocks, size: blocks
            try:
                admit(builder, step)
            finally:
                admission_planner.whole_blocks = whole

        self._admission_planner.admit = without


class CutsImages(Changed):
    """Chunks end according to another budget of images."""

    budget = ImageBudget

    def change(self):
        def plan(part, right, aborting):
            kept, planner.ImageBudget = planner.ImageBudget, self.budget
            try:
                return right(aborting)
            finally:
                planner.ImageBudget = kept

        instead(self._planner, "plan", plan)


@breaks("2", "schedule:images=undivided,prompt=above,block_size=16,budget=8,spare_blocks=1")
class DividesImagesOfLaterChunks(CutsImages):
    """Only the first chunk of a prompt, or of what a hit leaves, ends before an image."""

    class budget(ImageBudget):  # noqa: N801
        def cut(self, images, start, wanted):
            self._whole = not start
            return super().cut(images, start, wanted)


@breaks("2.2", "schedule:images=undivided,prompt=above,block_size=16,budget=1,slots=1")
class WantsRoomAfterAnImage(CutsImages):
    """An image that needs all of the budget never has room."""

    class budget(ImageBudget):  # noqa: N801
        def cut(self, images, start, wanted):
            for image in images:
                if start <= image.start and image.end == start + wanted:
                    wanted -= 1
            return super().cut(images, start, wanted)


@breaks("2", "schedule:images=several,prompt=above,block_size=64,context=129,budget=4097")
class EncodesAllImagesAtOnce(Changed):
    """The encoder's work of a step has no limit."""

    def change(self):
        self._planner._limits = msgspec.structs.replace(self._planner._limits, max_image_tokens=10**6)


@breaks("2.6", "lifetime:test_cost_does_not_grow_with_waiting_requests[slots]")
class CollectsGarbageInEachStep(Changed):
    def plan(self):
        gc.collect()
        return super().plan()


@breaks("2.6", "lifetime:test_a_step_of_one_request_takes_about_as_long_as_with_the_core[10000]")
class LooksForTheOldestRequestInC(Changed):
    """Neither bytecodes nor memory show that each step reads all requests."""

    def plan(self):
        for _ in range(4):
            min(map(attrgetter("arrival"), self._requests.values()), default=0)
        return super().plan()


@breaks("2.2", "budget:test_requests_that_arrive_one_by_one_run_at_once")
class AdmitsWhileHalfOfTheBudgetIsLeft(Changed):
    """To avoid small chunks."""

    def admit(self, builder, step):
        if builder.budget.left * 2 >= builder.budget.limit:
            super().admit(builder, step)


class _PromptsFirst(planner.Planner):
    def _decode(self, rows, builder):
        if not self._prompts(rows):
            super()._decode(rows, builder)
            return
        super()._continue_prefills(rows, builder)
        decoding = rows[self._slots.num_planned[rows] - self._slots.num_computed[rows] == 1]
        if builder.budget.left and len(decoding):
            super()._decode(decoding, builder)

    def _continue_prefills(self, rows, builder):
        if not self._prompts(rows):
            super()._continue_prefills(rows, builder)

    def _prompts(self, rows):
        return (self._slots.num_planned[rows] - self._slots.num_computed[rows] > 1).any()


@breaks("2.2", "size:budget=3,spare_blocks=64,requests=20")
class ComputesPromptsBeforeTexts(Changed):
    def change(self):
        self._planner.__class__ = _PromptsFirst


@breaks("3.3", "blocks:test_the_tail_of_a_prefix_is_evicted_before_its_head")
class EvictsTheHeadOfAPrefix(Changed):
    def change(self):
        instead(self._pool, "release", lambda _, right, blocks, fence: right(blocks[::-1], fence))


@breaks("3.3", "blocks:test_the_prefix_that_was_used_last_stays")
class EvictsInTheOrderOfTheirFirstUse(Changed):
    def change(self):
        def evict(pool, right, count):
            for block in [block for block in pool._key_of if block in pool._cached]:
                pool._cached.move_to_end(block)
            return right(count)

        instead(self._pool, "_evict", evict)


@breaks("2.1", "budget:test_requests_that_arrive_one_by_one_run_at_once")
class StartsBatchesOfTheSizeOfTheLastOne(Changed):
    """Batches enter and leave together; one that a single request began is followed by others of one."""

    last = running = 0

    def change(self):
        instead(self._slots, "free_slot", lambda slots, right: None if self._is_full() else right())

    def _is_full(self):
        return 0 < self.last <= self.held().running + self.held().loading

    def admit(self, builder, step):
        held = self.held()
        if not held.loading + held.running + held.draining:
            self.last, self.running = self.running, 0
            super().admit(builder, step)
            self.running = self.held().running + self.held().loading
