"""Black-box audit of a scheduler from its plans, effects and deltas, which names the rule that a call breaks.

The auditor tracks the request in every slot and gen, block tables, the blocks of steps in flight and of operations, and
the content of every position of the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core import signals
from fd_core.config import Limits
from fd_core.effects import operations
from fd_core.scheduling.contract import RequestActivity, SchedulerHoldings, SchedulerStats
from fd_core.scheduling.requests import QueuedRequest
from fd_core.signals import Outcome
from fd_core.testing.kit.law import broken, require
from fd_core.testing.schedulers.tiers import Operation, wanted_blocks
from fd_core.types import (
    PHASE_NAMES,
    Admission,
    BlockGrant,
    Delta,
    FinishReason,
    LogprobRows,
    Phase,
    PooledRows,
    PrefillOutcome,
    PromptLogprobRows,
    RequestSpec,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from fd_core.types.kv_events import KVEvent, Stored, StoredBlocks

_PHASES: Final = tuple(Phase)
_STATES: Final[Mapping[str, tuple[str, ...]]] = {
    "waits": ("waiting",),
    "loads": ("loading", "running"),
    "runs": ("running",),
    "drains": ("draining",),
}
"""States of a `RequestActivity` by the place of its request; one whose KV has arrived may count as running."""
_PATIENCE: Final = 4
"""Maximum number of consecutive plans per slot that may skip a decode."""
_MAX_OVERTAKEN: Final = 24
"""Plans that may admit a later request while one waits for no operation, beyond those that its prefill takes twice:
a prompt whose prefix another request computes may wait for it."""
Order = Callable[[QueuedRequest], tuple[str, tuple[int, ...]]]
"""Group and rank of a request: within a group, the smallest rank is admitted first."""


@dataclass(slots=True)
class Occupancy:
    """A request in a slot, as observable from outside."""

    request: Followed
    slot: int
    gen: int
    tables: list[list[int]]
    """Blocks of each group of layers; -1 before those of a sliding one."""
    num_planned: int
    """Number of tokens after all steps in flight, if all their drafts are accepted."""
    num_computed: int
    """Positions whose KV exists or is in flight, under the same assumption."""
    length: int
    """Number of tokens in the runner."""
    revoked: bool = False
    ended: bool = False
    in_flight: int = 0
    drafts_ready: int | None = 0
    """Drafts of the runner; None while a step of this slot occupancy is in flight."""
    left_out: int = 0
    """Consecutive plans that skipped its decode."""
    begin: int = 0
    """First entry that it owns in the tables of sliding groups."""
    entered: int = 0
    """Number of tokens at its admission."""

    def __str__(self) -> str:
        return f"slot {self.slot} gen {self.gen} ({self.request.name})"

    @property
    def remaining(self) -> int:
        """Tokens not computed yet; 1 is a decode."""
        return self.num_planned - self.num_computed

    @property
    def num_blocks(self) -> int:
        """Blocks that it was granted in every group."""
        return min(map(len, self.tables))


@dataclass(slots=True)
class Followed:
    """A request: the tokens that its client has, and its state."""

    spec: RequestSpec
    limit: int
    tokens: list[int]
    arrival: int
    place: tuple[str, tuple[int, ...]] = ("", ())
    """Group and rank in the waiting queue."""
    added_at: float = 0.0
    overtaken: int = 0
    """Plans that admitted a request of a larger rank while this one waited for no operation."""
    compiling: int | None = None
    """Open operation that compiles its grammar."""
    compiled: bool = False
    """True if its grammar was compiled."""
    weights: int = 0
    """Number of changes of the weights."""
    marks: list[int] = field(default_factory=list)
    """For each position, a hash of the inputs of its KV: weights, salt, adapter, all tokens and images up to there."""
    occupancy: Occupancy | None = None
    loading: operations.Load | operations.Fetch | None = None
    abort_requested: bool = False
    end: FinishReason | None = None
    revoked: bool = False
    """True if one of its slots was revoked."""
    preempted: bool = False
    """True if that was not for an abort."""
    first_delivered: bool = False
    cached: int | None = None
    """Cached tokens at the first admission."""
    fetches: int = 0
    """Number of times that another worker was requested to compute the prompt."""
    held: int = 0
    """Cached tokens then; the scripted worker has none."""
    prefill: PrefillOutcome | None = None
    """Outcome of that computation."""
    sent: int = 0
    """Leading blocks of a prefill job that the decode worker has or was offered."""
    is_over: bool = False
    """True if that worker was notified of the end of the job, either way."""
    seen: int = 0
    """Leading positions computed by this request."""
    read: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Runner's results for positions of the prompt."""
    pooled: list[tuple[npt.NDArray[np.float64], int]] = field(default_factory=list)
    """The runner's vectors of the prompt, and their numbers of tokens."""

    @property
    def scores_prompt(self) -> bool:
        """True if the log-probabilities of its prompt are returned with its first token."""
        return self.spec.params.prompt_logprobs is not None and not self.spec.delivered

    @property
    def needs_every_position(self) -> bool:
        """True if every position of the prompt must be computed for a pending result, even if its KV is cached."""
        pools = self.spec.pooling is not None and self.spec.pooling.reads_all
        return not self.first_delivered and (self.scores_prompt or pools)

    @property
    def vector(self) -> bytes | None:
        """The vector of the prompt, of what the runner has computed."""
        if self.spec.pooling is None:
            return None
        values, counts = zip(*self.pooled or [(np.zeros(0), 1)], strict=True)
        found = sum(values) / sum(counts) if self.spec.pooling.kind == "mean" else np.concatenate(values)
        return found.astype("<f4").tobytes()

    @property
    def name(self) -> str:
        return self.spec.request_id

    @property
    def where(self) -> str:
        """`waits`, `loads`, `runs`, `drains` or `ended`. A draining request may have ended already."""
        if self.occupancy is not None:
            return "drains" if self.occupancy.revoked else "runs"
        if self.end is not None:
            return "ended"
        return "waits" if self.loading is None else "loads"

    @property
    def waits(self) -> bool:
        return self.where == "waits"

    def queued(self, *, preempted: bool) -> QueuedRequest:
        """Return what a scheduling policy is shown of it."""
        spec, size = self.spec, len(self.tokens)
        return QueuedRequest(self.arrival, size, self.limit - size, spec.priority, spec.tenant, preempted)

    def mark(self, position: int) -> int:
        """Return the expected content of the KV at a position."""
        while len(self.marks) <= position:
            owner = self.weights, self.spec.cache_salt, self.spec.adapter
            before, here = self.marks[-1] if self.marks else hash(owner), len(self.marks)
            image = next((each for each in self.spec.images if each.start <= here < each.end), None)
            content: object = self.tokens[here] if image is None else (image.digest, here - image.start)
            self.marks.append(hash((before, content)))
        return self.marks[position]


class StepClock:
    """Clock of a scheduler, in seconds: it advances by one with each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Row(NamedTuple):
    """A row of a step in flight, at the position that the runner actually computed."""

    occupancy: Occupancy
    start: int
    """First position that it computed."""
    own: int
    drafts: int
    samples: bool


@dataclass(slots=True)
class _InFlight:
    touched: set[int] = field(default_factory=set)
    rows: list[_Row] = field(default_factory=list)


class _Expected(NamedTuple):
    """Expected output of a step for a request."""

    request: Followed
    tokens: tuple[int, ...] = ()
    end: FinishReason | None = None
    draining: bool = False
    error: str = ""


class Auditor:
    """Auditor of a scheduler; raises `InvariantViolated` on the first violation."""

    def __init__(
        self, limits: Limits, epoch: int, clock: StepClock, order: Order | None = None, *, events: bool = False
    ) -> None:
        """`order` is that of the scheduling policy; None if any order is right. `events` have to name all prefixes."""
        self._events = events
        self.limits = limits
        self._clock = clock
        self.requests: dict[str, Followed] = {}
        """All requests so far, by id."""
        self.arrivals: list[Followed] = []
        """All requests so far, in the order of arrival."""
        self.occupancies: dict[int, Occupancy] = {}
        """Slot occupancies by slot, including draining ones."""
        self.stale = 0
        """Number of outputs and rows that must be dropped."""
        self.preemptions = 0
        self.counts = Counter[str]()
        """Expected counters of a scheduler, by name, those of drafts with the position."""
        self.seconds = dict.fromkeys(PHASE_NAMES, 0.0)
        """Seconds of all requests that ended, by the name of the phase."""
        self.paused = False
        """True if plans must preempt everything and admit nothing."""
        self.displaced: set[int] = set()
        """Arrival that the scheduling policy lets the current plan preempt for a waiting request, or none."""
        self._weights = 0
        """Number of changes of the weights."""
        self._epoch = epoch
        self._order = order
        self._step: int | None = None
        """Number of the next plan; the first one may have any."""
        self._gens = dict.fromkeys(range(limits.max_num_seqs), 0)
        self._in_flight: dict[int, _InFlight] = {}
        self._content: list[list[int | None]] = [[None] * limits.block_size for _ in range(limits.num_kv_blocks)]
        """Content of settled KV by block and offset; None if it is not settled."""
        self._stale_blocks: dict[int, str] = {}
        """Blocks without KV because a load or a transfer did not fill them, and the rule that a request that uses them
        breaks."""
        self._operations: dict[int, Operation] = {}
        """Open operations."""
        self._used: set[int] = set()
        """Numbers of all operations."""
        self._jobs: dict[str, Followed] = {}
        """Prefill jobs for other workers, by lease."""
        self._to_cancel: set[int] = set()
        """Fetches and compilations without a waiting request that were not cancelled yet."""
        self._named: dict[bytes, int] = {}
        self._known = StoredBlocks(limits.block_size)
        """Prefixes that events leave stored."""
        self._paths: dict[bytes, bytes] = {b"": b""}
        """Tokens up to the end of each block in an event, by key."""

    @property
    def live(self) -> list[Occupancy]:
        return [occupancy for occupancy in self.occupancies.values() if not occupancy.revoked]

    @property
    def unfinished(self) -> set[str]:
        return {name for name, request in self.requests.items() if request.end is None}

    @property
    def tables(self) -> set[int]:
        return {block for occupancy in self.live for block in self._owned(occupancy)}

    def _owned(self, occupancy: Occupancy) -> set[int]:
        begins = [self._first_entry(group, occupancy.begin) for group in range(self.limits.groups.count)]
        return {block for begin, table in zip(begins, occupancy.tables, strict=True) for block in table[begin:]}

    def _first_entry(self, group: int, begin: int) -> int:
        return begin if group >= self.limits.groups.whole else 0

    def touched(self) -> set[int]:
        return {block for step in self._in_flight.values() for block in step.touched}

    def unowned(self) -> set[int]:
        """Return the blocks outside tables that a step or an operation in flight may still touch."""
        return (self.touched() | self.operating()) - self.tables

    def operating(self, *kinds: type) -> set[int]:
        """Return the blocks of open operations, of some kinds or of any."""
        open_ones = [each for each in self._operations.values() if isinstance(each, kinds or object)]
        holders = [each for each in open_ones if not isinstance(each, operations.Lookup | operations.CompileGrammar)]
        return {block for each in holders for block in each.blocks.tolist()}

    def added(self, spec: RequestSpec, effects: operations.Effects) -> None:
        limit = min(len(spec.prompt) + spec.params.max_tokens, self.limits.max_model_len)
        tokens, number = [*spec.prompt, *spec.delivered], len(self.arrivals)
        request = Followed(spec, limit, tokens, number, added_at=self._clock.now, weights=self._weights)
        if self._order is not None:
            request.place = self._order(request.queued(preempted=False))
        self.requests[spec.request_id] = request
        self.arrivals.append(request)
        if (job := spec.prefill_job) is not None:
            request.sent = job.held_blocks
            self._jobs[job.lease] = request
        self._began(effects)

    def aborted(self, name: str, delta: Delta | None) -> None:
        """Check the abort of a request, known or unknown."""
        request = self.requests.get(name)
        at_once = (
            request is not None and request.end is None and not request.abort_requested and request.occupancy is None
        )
        if request is None or not at_once:
            state = "unknown" if request is None else "aborted or ended already"
            held = request is not None and request.end is None and request.occupancy is not None
            rule, why = ("1.2", "holds its slot") if held else ("1.7", f"is {state}")
            require(delta is None, rule, f"abort of {name}, which {why}, returned {delta}")
            if request is not None:
                request.abort_requested = True
            return
        if delta is None and request.loading is not None and request.loading.operation not in self._operations:
            request.abort_requested = (
                True  # its KV has arrived, so it may count as running, and the next plan revokes it
            )
            return
        what = f"{name} was aborted while it {'waited' if request.loading is None else 'loaded'}"
        require(delta is not None, "1.7", f"{what}, but got no delta with its end")
        assert delta is not None
        require(delta.request_id == name, "1.7", f"{what}, but the delta is for {delta.request_id}")
        require(delta.finish_reason is FinishReason.ABORT, "1.7", f"{what}, but got {delta.finish_reason}")
        require(not delta.token_ids, "1.1", f"{what}, but got tokens: {delta.token_ids}")
        if isinstance(request.loading, operations.Fetch):
            self._to_cancel.add(request.loading.operation)
        if request.compiling is not None:
            self._to_cancel.add(request.compiling)
        request.abort_requested, request.end, request.loading = True, FinishReason.ABORT, None
        self._check_phases(request, delta)

    def forgot(self, effects: operations.Effects, *, new_weights: bool) -> None:
        """Apply that all KV of the device was forgotten, and that of other weights everywhere."""
        self._content = [[None] * self.limits.block_size for _ in self._content]
        self._weights += new_weights
        for request in self.requests.values():
            request.weights = self._weights
            request.marks.clear()
        self._began(effects)

    def planned(self, plan: StepPlan | None, effects: operations.Effects) -> None:
        """Check a plan and its effects; `plan` is None if there is nothing to do."""
        wanted = [occupancy for occupancy in self.live if occupancy.request.abort_requested]
        revoked = {(each.slot, each.gen) for each in plan.revocations} if plan is not None else set()
        for occupancy in wanted:
            more = "" if plan is not None else ": there is no plan, but revocations alone require one"
            rule = "1.7" if plan is not None else "1.3"
            require(
                (occupancy.slot, occupancy.gen) in revoked, rule, f"{occupancy} was aborted, but is not revoked{more}"
            )
        if plan is not None:
            self._take_in(plan)
        require(not (self.paused and self.live), "8", f"a paused plan leaves {[str(each) for each in self.live]}")
        self._began(effects)
        late = [
            name for name, each in self.requests.items() if each.abort_requested and each.where in ("waits", "loads")
        ]
        require(not late, "1.7", f"{late} were aborted, but the next plan did not revoke them")
        for each in [self._operations[number] for number in self._to_cancel & self._operations.keys()]:
            compiles = isinstance(each, operations.CompileGrammar)
            shared = isinstance(each, operations.CompileGrammar) and any(
                other.waits and other.end is None and other.spec.params.grammar == each.grammar
                for other in self.requests.values()
            )
            require(shared, "1.7" if compiles else "6.1", f"its request was aborted, but {each} is not cancelled")
        for lease, job in self._jobs.items():
            require(job.end is None or job.is_over, "6.1", f"{job.name} ended, but lease {lease} is not given up")

    def _take_in(self, plan: StepPlan) -> None:
        count = len(plan.slots)
        require(plan.epoch == self._epoch, "1.5", f"expected a plan of epoch {self._epoch}, got {plan.epoch}")
        expected = plan.step if self._step is None else self._step
        require(plan.step == expected >= 0, "1.5", f"expected step {expected}, got {plan.step}")
        self._step = expected + 1
        columns = (plan.slots, plan.gens, plan.starts, plan.num_tokens, plan.num_drafts, plan.samples)
        require(all(len(column) == count for column in columns), "8", "the columns of the plan differ in length")
        require(not any(column.flags.writeable for column in columns), "8", "arrays of the plan are writable")
        total, budget = int(plan.num_tokens.sum()), self.limits.max_num_batched_tokens
        require(total <= budget, "2", f"step {plan.step} computes {total} tokens, over the budget {budget}")
        left_for_images = self._check_images(plan)
        self.counts.update(steps=1, budget_used=total, budget_limit=budget)
        require(len(set(plan.slots.tolist())) == count, "8", f"step {plan.step} has two rows for one slot")
        useful = count or plan.admissions or plan.revocations or plan.grants
        require(useful, "8", f"step {plan.step} is empty")
        before = {
            occupancy.slot: (occupancy, occupancy.remaining, occupancy.num_computed)
            for occupancy in self.live
            if not occupancy.in_flight
            and occupancy.num_planned < occupancy.request.limit
            and not occupancy.request.abort_requested
        }
        entering = {(each.slot, each.gen) for each in plan.admissions}
        leaving = {(each.slot, each.gen) for each in plan.revocations}
        self._check_preemptions(plan)
        # Blocks of a revoked request may be granted in the same plan, and an admitted request may be revoked at once.
        for revoked in plan.revocations:
            if (revoked.slot, revoked.gen) not in entering:
                self._revoke(revoked.slot, revoked.gen)
        touched = self.touched()
        for admission in plan.admissions:
            self._admit(admission, plan, touched, occupancies=(admission.slot, admission.gen) not in leaving)
        self._check_order(plan)
        for slot, gen in entering & leaving:
            self._revoke(slot, gen)
        admitted = {admission.slot for admission in plan.admissions}
        for grant in plan.grants:
            if grant.slot not in admitted:
                self._grant(grant, touched)
        step = self._in_flight[plan.step] = _InFlight()
        for row in range(len(plan.slots)):
            self._check_row(plan, row, step)
        self._check_left_out(plan, before, left_for_images)

    def _check_images(self, plan: StepPlan) -> int:
        """Return the tokens left for images: those that begin in chunks of a step are within the encoder's budget.

        No chunk ends within an image that a step has to compute as a whole.
        """
        found = {occupancy.slot: occupancy.request.spec for occupancy in self.live}
        found |= {each.slot: self.requests[each.request_id].spec for each in plan.admissions}
        rows = [*zip(plan.slots.tolist(), plan.starts.tolist(), plan.num_tokens.tolist(), strict=True)]
        for slot, start, count in rows if self.limits.whole_images else ():
            images = found[slot].images if slot in found else ()
            divided = [image.start for image in images if image.start < start + count < image.end]
            what = f"step {plan.step} computes slot {slot} up to {start + count}"
            require(not divided, "2", f"{what}, within the image at {divided}, which has to be whole")
        tokens = sum(
            image.num_tokens
            for slot, start, count in rows
            if count > 1 and slot in found
            for image in found[slot].images
            if start <= image.start < start + count
        )
        most = self.limits.max_image_tokens
        require(tokens <= most, "2", f"step {plan.step} encodes {tokens} tokens of images, over the budget {most}")
        return most - tokens

    def _check_preemptions(self, plan: StepPlan) -> None:
        """Check that a request is preempted only if running ones need more blocks than are free, or to displace one."""
        size, live = self.limits.block_size, {each.slot: each for each in self.live}
        revoked = [live[each.slot] for each in plan.revocations if each.slot in live]
        revoked = [each for each in revoked if not each.request.abort_requested]
        preempted = [str(each) for each in revoked if each.request.arrival not in self.displaced]
        loads = any(each.loading is not None for each in self.requests.values())  # its other blocks are not known yet
        if loads or self.paused or not preempted:
            return
        free = self.limits.num_kv_blocks - len(self.tables | self.unowned())
        needed = sum(each.num_computed >= len(table) * size for each in live.values() for table in each.tables)
        what = f"step {plan.step} preempts {preempted}, although {free} blocks are free"
        require(needed > free, "3.4", f"{what} and running requests need {needed}")

    def _check_order(self, plan: StepPlan) -> None:
        """Check that no request waits for long while requests that the policy puts after it are admitted."""
        others = [each for each in self._operations.values() if not isinstance(each, operations.CompileGrammar)]
        if self._order is None or others or not plan.admissions:
            return
        last: dict[str, tuple[int, ...]] = {}
        for admission in plan.admissions:
            group, rank = self.requests[admission.request_id].place
            last[group] = max(rank, last.get(group, rank))
        for request in self.requests.values():
            group, rank = request.place
            inadmissible = request.end is not None or not request.waits or request.compiling is not None
            if inadmissible or rank >= last.get(group, rank):
                continue
            request.overtaken += 1
            most = _MAX_OVERTAKEN + 4 * (len(request.tokens) // self.limits.max_num_batched_tokens)
            what = f"{request.name} waits while {request.overtaken} plans admitted later requests"
            require(request.overtaken <= most, "2.2", f"{what}, expected at most {most}")

    def _admit(self, admission: Admission, plan: StepPlan, touched: set[int], *, occupancies: bool) -> None:
        name, slot = admission.request_id, admission.slot
        request = self.requests.get(name)
        require(0 <= slot < self.limits.max_num_seqs, "1.4", f"slot {slot} does not exist")
        there = self.occupancies.get(slot)
        if there is not None:
            state = "drains" if there.revoked else "runs"
            broken("1.4", f"slot {slot} was assigned to {name} while {there.request.name} {state} there")
        loads = [each for each in self.requests.values() if each.loading is not None and each.loading.slot == slot]
        require(all(each is request for each in loads), "1.4", f"slot {slot} was assigned to {name} during a load")
        if request is None:
            broken("1.1", f"{name!r} was admitted but never added")
        require(request.end is None, "1.7", f"{name} was admitted after its end")
        require(
            request.occupancy is None, "1.4", f"{name} was admitted to slot {slot} while it has {request.occupancy}"
        )
        gen = self._gens[slot]
        require(admission.gen > gen, "1.5", f"slot {slot} has gen {admission.gen} after gen {gen}")
        self._gens[slot] = admission.gen
        told, known = admission.token_ids.tolist(), request.tokens
        require(told == known, "1.4", f"{name} was admitted with wrong tokens ({len(told)} of {len(known)})")
        require(admission.prompt_len == len(request.spec.prompt), "1.4", f"{name} was admitted with a wrong prompt_len")
        require(admission.params == request.spec.params, "4", f"{name} was admitted with wrong sampling parameters")
        require(admission.eos_token_ids == request.spec.eos_token_ids, "4", f"{name} was admitted with wrong EOS ids")
        require(admission.adapter == request.spec.adapter, "4", f"{name} was admitted with a wrong adapter")
        require(admission.pooling == request.spec.pooling, "4", f"{name} was admitted with a wrong pooling")
        given, own = ([(each.start, each.end, each.pixels) for each in of.images] for of in (admission, request.spec))
        require(given == own, "1.4", f"{name} was admitted with wrong images")
        compiled = request.spec.params.grammar is None or request.compiled
        require(compiled, "2.6", f"{name} was admitted before its grammar was compiled")
        request.overtaken = 0
        computed = admission.computed
        require(0 <= computed < len(told), "3.5", f"{name} was admitted with {computed} of {len(told)} tokens computed")
        divided = any(each.start < computed < each.end for each in request.spec.images)
        require(not divided, "3.5", f"{name} begins with {computed} positions, which divide an image")
        if request.needs_every_position:
            begins = f"{name} begins with {computed} positions, of which it computed {request.seen}"
            require(computed <= request.seen, "4", f"{begins}, but needs every position of its prompt")
        first, size = request.cached is None and not request.spec.delivered, len(told)
        self.counts.update({"prompt_tokens": size} if first else {"recomputed_tokens": size - computed})
        request.cached = computed if request.cached is None else request.cached
        loaded, request.loading = request.loading, None
        if self._events and computed and loaded is None and self.limits.groups.count == 1:
            self._check_published(request, computed // self.limits.block_size * self.limits.block_size)
        hits = request.held if isinstance(loaded, operations.Fetch) else computed
        self.counts.update(prefix_queries=size, prefix_hits=hits)
        groups, begin = self.limits.groups, 0
        if groups.sliding:
            begin = groups.first_kept(computed, self.limits.block_size)
        tables = [[-1] * self._first_entry(group, begin) for group in range(groups.count)]
        occupancy = Occupancy(
            request,
            slot,
            admission.gen,
            tables,
            num_planned=len(told),
            num_computed=computed,
            length=len(told),
            begin=begin,
            entered=len(told),
        )
        for grant in [grant for grant in plan.grants if grant.slot == slot]:
            self._grant(grant, touched, occupancy, own=[] if loaded is None else loaded.blocks.tolist())
        self.occupancies[slot], request.occupancy = occupancy, occupancy
        if not occupancies:
            return
        size = self.limits.block_size
        require(
            occupancy.num_computed <= occupancy.num_blocks * size,
            "3.5",
            f"{occupancy} has no blocks for its computed tokens",
        )
        for group, table in enumerate(occupancy.tables):
            for position in range(self._first_entry(group, begin) * size, occupancy.num_computed):
                block = table[position // size]
                if self._content[block][position % size] != _mark(request, position, group):
                    broken(
                        self._stale_blocks.get(block, "5.3" if request.spec.cache_salt else "3.5"),
                        f"{occupancy} reuses position {position} of block {block}, which has no settled KV of its text "
                        f"under its salt",
                    )

    def _grant(
        self, grant: BlockGrant, touched: set[int], occupancy: Occupancy | None = None, own: Sequence[int] = ()
    ) -> None:
        """Check granted blocks; only those of a cached prefix may have other owners."""
        shared = 0 if occupancy is None else occupancy.num_computed // self.limits.block_size
        occupancy = self.occupancies.get(grant.slot) if occupancy is None else occupancy
        if occupancy is None or occupancy.revoked:
            broken("3.1", f"slot {grant.slot} was granted blocks, but has no running request")
        require(0 <= grant.group < len(occupancy.tables), "3.1", f"{occupancy} was granted blocks of {grant.group}")
        table = occupancy.tables[grant.group]
        require(grant.offset == len(table), "3.1", f"{occupancy} was granted blocks at offset {grant.offset}")
        tables = self.tables | {block for other in self.requests.values() for block in _loaded(other.loading)}
        held, known, who = self.operating(), self._owned(occupancy), str(occupancy)
        for index, block in enumerate(grant.blocks.tolist(), grant.offset):
            require(0 <= block < self.limits.num_kv_blocks, "3.1", f"{who} was granted block {block}")
            twice = "3.3" if grant.offset < shared else "3.1"
            require(block not in known, twice, f"{who} was granted block {block} twice")
            known.add(block)
            table.append(block)
            if index < shared:
                coming = self.operating(operations.Load, operations.Fetch) - set(own)
                require(block not in coming, "3.2", f"{who} shares block {block}, whose KV is in transit")
                continue
            require(block not in tables, "3.1", f"{who} was granted block {block}, which another request owns")
            if block in own:
                continue
            require(block not in touched, "3.2", f"{who} was granted block {block}, which a step in flight touches")
            require(block not in held, "3.2", f"{who} was granted block {block}, which an operation holds")
            self._content[block] = [None] * self.limits.block_size
            self._stale_blocks.pop(block, None)

    def _revoke(self, slot: int, gen: int) -> None:
        occupancy = self.occupancies.get(slot)
        if occupancy is None or occupancy.gen != gen:
            broken("1.2", f"slot {slot} gen {gen} was revoked, but has no request")
        require(not occupancy.revoked, "1.2", f"{occupancy} was revoked twice")
        occupancy.revoked = occupancy.request.revoked = True
        self.preemptions += (preempted := not occupancy.request.abort_requested)
        occupancy.request.preempted |= preempted

    def _check_row(self, plan: StepPlan, row: int, step: _InFlight) -> None:
        slot, gen, count = int(plan.slots[row]), int(plan.gens[row]), int(plan.num_tokens[row])
        start, drafts, samples = int(plan.starts[row]), int(plan.num_drafts[row]), bool(plan.samples[row])
        occupancy, size = self.occupancies.get(slot), self.limits.block_size
        if occupancy is None or occupancy.gen != gen:
            broken("1.5", f"step {plan.step} computes slot {slot} gen {gen}, which has no request")
        require(not occupancy.revoked, "1.2", f"step {plan.step} computes {occupancy}, which was revoked")
        where = f"step {plan.step}: {occupancy}"
        own = count - drafts
        require(own >= 1 and drafts >= 0, "2.1", f"{where} computes {count} tokens with {drafts} drafts")
        require(samples or not drafts, "2.1", f"{where} has drafts in a chunk that does not sample")
        most = self.limits.max_drafts if occupancy.drafts_ready is None else occupancy.drafts_ready
        require(drafts <= most, "2.1", f"{where} is charged for {drafts} drafts, but the runner has at most {most}")
        require(
            start == occupancy.num_computed, "1.1", f"{where}: expected start {occupancy.num_computed}, got {start}"
        )
        end, known = start + own, occupancy.num_planned
        require(end <= known, "2.1", f"{where} is charged up to position {end}, but has {known} tokens")
        require(samples == (end == known), "1.1", f"{where} {'samples' if samples else 'does not sample'} at {end}")
        require(start + count <= occupancy.num_blocks * size, "3.1", f"{where} computes positions without a block")
        real = occupancy.length - own if samples else start
        written, end = set[int](), -(-(start + count) // size)
        for group, table in enumerate(occupancy.tables):
            read = self.limits.groups.first_read(real, size) if group >= self.limits.groups.whole else 0
            step.touched.update(table[read:end])
            written.update(table[real // size : end])
            for position in range(real, start + count):
                self._content[table[position // size]][position % size] = None
        others = {block for other in self.live if other is not occupancy for block in self._owned(other)}
        require(not written & others, "3.1", f"{where} writes blocks {written & others}, which have other owners")
        held = self.operating()
        require(not written & held, "3.2", f"{where} writes blocks {written & held}, which an operation holds")
        step.rows.append(_Row(occupancy, real, own, drafts=drafts, samples=samples))
        occupancy.num_computed += count
        occupancy.num_planned += samples + drafts
        occupancy.in_flight += 1
        occupancy.drafts_ready = None

    def _check_left_out(
        self, plan: StepPlan, before: dict[int, tuple[Occupancy, int, int]], left_for_images: int
    ) -> None:
        """Check that a request computes fewer tokens than possible only if the budget is exhausted."""
        left = self.limits.max_num_batched_tokens - int(plan.num_tokens.sum())
        for occupancy, remaining, computed in before.values():
            room = occupancy.num_blocks * self.limits.block_size - computed
            if occupancy.revoked or room < 1:
                continue
            done = occupancy.num_computed - computed
            if done:
                occupancy.left_out = 0
            if done >= min(remaining, room):
                continue
            image = next((each for each in occupancy.request.spec.images if each.start == computed + done), None)
            least = image.num_tokens if self.limits.whole_images and image is not None else 0
            if image is not None and (image.num_tokens > left_for_images or left < least):
                continue
            what = f"step {plan.step} computes {done} of {remaining} tokens of {occupancy}"
            if remaining == 1:
                rest = int((plan.num_tokens - 1).sum())  # drafts, and prompts
                require(not rest or self.limits.num_stages > 1, "2.2", f"{what}, but {rest} tokens that could wait")
                occupancy.left_out += 1
                patience = _PATIENCE * self.limits.max_num_seqs + 8
                require(
                    occupancy.left_out <= patience,
                    "2.2",
                    f"{occupancy} was skipped in {occupancy.left_out} consecutive plans",
                )
            refund = "2.3" if plan.revocations else "2.1"
            # With several stages each plan gets its share of the rows.
            unused = left and self.limits.num_stages == 1
            require(not unused, refund, f"{what}, but {left} tokens of the budget are unused")

    def _began(self, effects: operations.Effects) -> None:
        for effect in effects.operations:
            match effect:
                case operations.Save():
                    for key, block in zip(effect.keys, effect.blocks.tolist(), strict=True):
                        content, what = self._content[block][-1], f"operation {effect.operation} saves"
                        if content is None or None in self._content[block]:
                            broken("3.5", f"{what} block {block}, which is not settled")
                        named = self._named.setdefault(key, content)
                        require(named == content, "5.3", f"{what} different contents under one key")
                case operations.Load():
                    self._await_kv(effect, "5.2", "5.4")
                    self.counts["loads"] += 1
                case operations.Fetch():
                    self._fetch(effect)
                case operations.Send():
                    self._send(effect)
                case operations.AbandonLease(lease):
                    self._job(lease, "is given up").is_over = True
                case operations.Cancel(operation):
                    self._cancelled(operation)
                case operations.CompileGrammar():
                    self._compile(effect)
            if isinstance(effect, Operation):
                require(effect.operation not in self._used, "8", f"the number {effect.operation} names two operations")
                self._used.add(effect.operation)
                frozen = not hasattr(effect, "blocks") or not effect.blocks.flags.writeable
                require(frozen, "8", f"the blocks of operation {effect.operation} are writable")
                self._operations[effect.operation] = effect
        for event in effects.events:
            self._check_event(event)

    def _cancelled(self, operation: int) -> None:
        """Record the end of interest in an operation; of the compilations of one grammar, it may be any."""
        grammars = {
            number: each.grammar
            for number, each in self._operations.items()
            if isinstance(each, operations.CompileGrammar)
        }
        owed = [each for each in self._to_cancel if each in grammars and grammars[each] == grammars.get(operation)]
        meant = owed[0] if owed and operation not in owed else operation
        self._to_cancel.discard(meant)
        for request in self.requests.values():
            if request.compiling in (meant, operation):
                request.compiling = None if request.compiling == meant else meant

    def _compile(self, effect: operations.CompileGrammar) -> None:
        """Record the compilation of a grammar, which several requests may have."""
        named = [each for each in self.requests.values() if each.spec.params.grammar == effect.grammar]
        waiting = [each for each in named if each.waits and each.compiling is None]
        what = f"operation {effect.operation} compiles {effect.grammar!r}, for which no request waits"
        require(waiting, "2.6", what)
        min(waiting, key=lambda each: each.compiled).compiling = effect.operation

    def _check_event(self, event: KVEvent) -> None:
        """Check that events name prefixes of requests that anyone may know, and nothing that is not stored."""
        try:
            self._known.apply(event)
        except ValueError as error:
            broken("5.3", f"{error}: {event}")
        if not isinstance(event, Stored):
            return
        path, size = self._paths[event.parent], 4 * self.limits.block_size
        for index, key in enumerate(event.keys):
            path += event.tokens[index * size : (index + 1) * size]
            require(self._paths.setdefault(key, path) == path, "5.3", "an event has one key for two prefixes")
        texts = (
            np.array(each.tokens, "<i4").tobytes()
            for each in self.requests.values()
            if not (each.spec.cache_salt or each.spec.adapter)
        )
        what = f"an event has the {len(path) // 4} tokens of a prefix that no request without salt and adapter has"
        require(any(text.startswith(path) for text in texts), "5.3", what)

    def _check_published(self, request: Followed, computed: int) -> None:
        """Check that events name a prefix that a request finds on the device."""
        if request.spec.cache_salt or request.spec.adapter or request.spec.images:
            return
        path = np.array(request.tokens[:computed], "<i4").tobytes()
        published = any(self._paths[key] == path for key in self._known)
        what = f"{request.name} begins after {computed} tokens of a prefix that is cached"
        require(published, "5.3", f"{what}, but no event says that it is stored, so no router would send it here")

    def _check_phases(self, request: Followed, delta: Delta) -> None:
        """Check that the phases of a request, if any, add up to its time."""
        if delta.phases is not None:
            self._check_sum(request, delta.phases)
            if delta.finish_reason is not None:
                for phase in Phase:
                    self.seconds[phase.name.lower()] += delta.phases[phase]

    def _check_sum(self, request: Followed, phases: Sequence[float]) -> None:
        total, found = self._clock.now - request.added_at, sum(phases)
        whole = len(phases) == len(Phase) and min(phases) >= 0 and abs(found - total) < 1e-6
        require(whole, "8", f"{request.name}: expected phases of {total} s, got {phases}")
        impossible = [phase.name for phase in {*Phase} - self._phases_of(request) if phases[phase]]
        require(not impossible, "8", f"{request.name} cannot be in phase {impossible}: {phases}")
        computed = phases[Phase.COMPUTING] or not request.first_delivered
        require(computed, "8", f"{request.name} has tokens, but no time of {Phase.COMPUTING.name}: {phases}")

    def phases(self, name: str, found: Sequence[float] | None) -> None:
        """Check the phases so far of a request that has not ended."""
        if found is not None:
            self._check_sum(self.requests[name], found)

    def _fetch(self, fetch: operations.Fetch) -> None:
        request, size, job = self._await_kv(fetch, "6.1", "6.2"), self.limits.block_size, fetch.job
        spec, what = request.spec, f"operation {fetch.operation} for {request.name}"
        require(spec.prefill_at and fetch.peer == spec.prefill_at, "6.1", f"{what} fetches KV from {fetch.peer!r}")
        request.fetches += 1
        request.held = job.held_blocks * size
        once = request.fetches == 1 and len(request.tokens) == len(spec.prompt)
        require(once, "6.3", f"{what} fetches a prompt that was fetched before, or after the first token")
        tokens = job.token_ids.tolist()
        require(tokens and tokens == request.tokens[: len(tokens)], "6.3", f"{what} fetches the KV of other tokens")
        for name in ("cache_salt", "priority", "tenant", "traceparent", "adapter", "images"):
            found, right = getattr(job, name), getattr(spec, name)
            require(found == right, "6.3", f"{what}: expected {name} {right!r}, got {found!r}")
        count = len(wanted_blocks(job, self.limits.groups, size))
        require(count == len(fetch.blocks), "6.1", f"{what} leases {len(fetch.blocks)} blocks, expected {count}")

    def _marks(self, request: Followed, entry: int, group: int, end: int) -> list[int]:
        """Return the expected content of a block up to position `end`."""
        size = self.limits.block_size
        return [_mark(request, position, group) for position in range(entry * size, min((entry + 1) * size, end))]

    def _await_kv(self, load: operations.Load | operations.Fetch, early: str, rule: str) -> Followed:
        """Record a load or fetch into the blocks of a slot; using a block that is not filled breaks `rule`."""
        blocks = load.blocks.tolist()
        request = self.requests.get(load.request_id)
        if request is None or not request.waits:
            broken(early, f"operation {load.operation} is for {load.request_id!r}, which is not waiting")
        require(
            load.slot not in self.occupancies, "1.4", f"{request.name} loads into slot {load.slot}, which is in use"
        )
        others = {block for other in self.requests.values() for block in _loaded(other.loading)}
        for name, taken in (
            ("that a step in flight touches", self.touched()),
            ("of running requests", self.tables),
            ("that another operation holds", self.operating() | others),
        ):
            require(not taken & set(blocks), "3.2", f"operation {load.operation} writes blocks {name}")
        for block in blocks:
            self._content[block] = [None] * self.limits.block_size
        self._stale_blocks.update(dict.fromkeys(blocks, rule))
        request.loading = load
        return request

    def _job(self, lease: str, what: str) -> Followed:
        request = self._jobs.get(lease)
        if request is None or request.is_over:
            broken("6.1", f"lease {lease!r} {what}, but it {'is unknown' if request is None else 'is over'}")
        return request

    def _send(self, send: operations.Send) -> None:
        """Check that each block that the other worker lacks is sent once, in order, with the right content."""
        request, size = self._job(send.lease, "is sent blocks"), self.limits.block_size
        job, what = request.spec.prefill_job, f"operation {send.operation} for lease {send.lease!r}"
        assert job is not None
        wanted = job.num_tokens
        require(send.first == request.sent, "6.2", f"{what} starts at block {send.first}, expected {request.sent}")
        require(len(send.blocks) or send.tokens is not None, "6.2", f"{what} is empty")
        places = wanted_blocks(job, self.limits.groups, size)
        for block, (entry, group) in zip(send.blocks.tolist(), places[send.first - job.held_blocks :], strict=False):
            right = self._marks(request, entry, group, wanted)
            settled = self._content[block][: len(right)] == right
            require(settled, "6.2", f"{what} sends block {entry} before it is settled")
        request.sent += len(send.blocks)
        self.counts["sent_blocks"] += len(send.blocks)
        if send.tokens is not None:
            whole = send.tokens == wanted and request.sent == job.held_blocks + len(places)
            parts = f"{request.sent} blocks and {send.tokens} of {wanted} tokens"
            require(whole, "6.2", f"{what} is the last one, with {parts}")
            request.is_over = True

    def completed(self, completion: operations.Completion, delta: Delta | None = None) -> None:
        """Apply a completion, to which the scheduler returned `delta`."""
        if isinstance(completion, operations.GrammarReady):
            self._compiled(completion, delta)
        else:
            require(delta is None, "1.1", f"{completion} returned {delta}")
        match completion:
            case operations.Saved(operation, count):
                del self._operations[operation]
                self.counts["saved_tokens"] += count * self.limits.block_size
            case operations.Found(operation) | operations.Sent(operation):
                del self._operations[operation]
            case operations.Loaded(operation, count):
                load = self._operations.pop(operation)
                assert isinstance(load, operations.Load)
                size, request = self.limits.block_size, self.requests[load.request_id]
                if request.loading is load:
                    lost = len(load.keys) - count
                    self.counts.update(loaded_tokens=count * size, lost_tokens=lost * size)
                full, groups = range(len(request.tokens) // size), range(self.limits.groups.count)
                # A key identifies one KV, by its last position; those before it are of the same text.
                ends = {_mark(request, (at + 1) * size - 1, group): (at, group) for at in full for group in groups}
                for key, block in zip(load.keys[:count], load.blocks.tolist(), strict=False):
                    self._stale_blocks.pop(block, None)
                    place = ends.get(self._named.get(key, 0))
                    end = len(request.tokens)
                    self._content[block] = [None] * size if place is None else [*self._marks(request, *place, end)]
            case operations.Fetched(operation, outcome):
                self._fetched(operation, outcome)
            case _:
                pass

    def _compiled(self, completion: operations.GrammarReady, delta: Delta | None) -> None:
        """Check that a grammar that cannot be used ends its request, and that another one does not."""
        compiled = self._operations.pop(completion.operation)
        assert isinstance(compiled, operations.CompileGrammar)
        named = [each for each in self.requests.values() if each.spec.params.grammar == compiled.grammar]
        waits = [each for each in named if each.compiling == completion.operation]
        # Of requests with one grammar, which one an operation is for shows only when it fails.
        meant = [each for each in named if (each.end is not None if delta is None else each.name == delta.request_id)]
        if waits and meant and completion.error is not None and meant[0].where in ("waits", "ended"):
            waits[0].compiling, meant[0].compiling = meant[0].compiling, waits[0].compiling
            waits = meant[:1]
        for request in waits:
            request.compiling = None
        for request in named if completion.error is None else ():
            request.compiled = True
        if not waits or waits[0].end is not None or completion.error is None:
            require(delta is None, "1.1", f"{completion} returned {delta}")
            return
        what = f"the grammar of {waits[0].name} cannot be used"
        if delta is None:
            broken("1.3", f"{what}, but the request got no delta with its end")
        right = delta.request_id == waits[0].name and delta.finish_reason is FinishReason.ERROR and not delta.token_ids
        require(right and completion.error in (delta.error or ""), "1.3", f"{what}, but it got {delta}")
        waits[0].end = FinishReason.ERROR
        self._check_phases(waits[0], delta)

    def _fetched(self, operation: int, outcome: PrefillOutcome) -> None:
        fetch = self._operations.pop(operation)
        assert isinstance(fetch, operations.Fetch)
        request, size = self.requests[fetch.request_id], self.limits.block_size
        request.prefill = outcome
        if request.loading is fetch and outcome == "transferred":
            self.counts["fetched_tokens"] += fetch.job.num_tokens - fetch.job.held_blocks * size
        places = wanted_blocks(fetch.job, self.limits.groups, size)
        for block, (entry, group) in zip(fetch.blocks.tolist(), places, strict=True):
            if outcome != "transferred":
                self._stale_blocks[block] = "6.3"
                continue
            del self._stale_blocks[block]
            known = self._marks(request, entry, group, fetch.job.num_tokens)
            self._content[block] = [*known, *[None] * (size - len(known))]

    def executed(self, plan: StepPlan, output: StepOutput) -> None:
        counts = signals.read(output.tokens).counts
        for row in self._in_flight[plan.step].rows:
            row.occupancy.length += int(counts[row.occupancy.slot]) if row.samples else 0

    def dropped(self, deltas: Sequence[Delta], effects: operations.Effects, what: str) -> None:
        self.stale += 1
        self._began(effects)
        require(not deltas, "1.5", f"{what} was applied: {list(deltas)}")

    def answered(
        self, plan: StepPlan, output: StepOutput, deltas: Sequence[Delta], effects: operations.Effects
    ) -> None:
        step = self._in_flight.pop(plan.step)
        outcomes = signals.read(output.tokens, output.errors)
        expected: dict[str, _Expected] = {}
        for row in step.rows:
            row.occupancy.in_flight -= 1
            kind, count = outcomes.kinds[row.occupancy.slot], int(outcomes.counts[row.occupancy.slot])
            if self.occupancies.get(row.occupancy.slot) is not row.occupancy or row.occupancy.ended:
                continue
            request, draining = row.occupancy.request, row.occupancy.revoked
            if kind == Outcome.ERROR:
                error = dict(output.errors)[row.occupancy.slot]
                expected[request.name] = _Expected(request, (), FinishReason.ERROR, draining=draining, error=error)
                continue
            if row.start <= request.seen:
                request.seen = max(request.seen, row.start + row.own)
            self._read(row.occupancy, output.prompt_logprobs, output.pooled)
            told: tuple[int, ...] = ()
            if row.samples:
                told, reason = _cut(request, outcomes.tokens[row.occupancy.slot, :count].tolist())
                expected[request.name] = _Expected(request, told, reason, draining=draining)
                accepted = max(count - 1, 0)
                rejected = row.drafts - accepted
                for name, most in (("proposed", row.drafts), ("accepted", accepted)):
                    self.counts.update(f"{name} at {place}" for place in range(most))
                row.occupancy.num_planned -= rejected
                row.occupancy.num_computed -= rejected
                if not row.occupancy.in_flight and output.drafts_ready is not None:
                    row.occupancy.drafts_ready = int(output.drafts_ready[row.occupancy.slot])
            elif not row.occupancy.in_flight:
                row.occupancy.drafts_ready = 0
            request.tokens += told
            self._settle(row, row.own + max(count - 1, 0) if row.samples else row.own)
        for revoked in plan.revocations:
            request = self.occupancies.pop(revoked.slot).request
            request.occupancy = None
            if request.end is None and request.abort_requested:
                expected[request.name] = _Expected(request, (), FinishReason.ABORT, draining=True)
        self._check_deltas(plan, expected, deltas)
        slots = {row.occupancy.request.name: row.occupancy.slot for row in step.rows}
        for delta in deltas:
            if delta.logprobs:
                self._check_scores(delta, slots[delta.request_id], output.logprobs)
        self._began(effects)

    def _read(self, occupancy: Occupancy, rows: PromptLogprobRows | None, pooled: PooledRows | None) -> None:
        """Record the results for the prompt that a step computed."""
        request = occupancy.request
        wanted = request.spec.params.prompt_logprobs
        if rows is not None:
            for index in (rows.slots == occupancy.slot).nonzero()[0].tolist():
                request.read[int(rows.positions[index])] = TokenLogprobs(
                    float(rows.chosen[index]),
                    tuple(rows.top_ids[index, :wanted].tolist()),
                    tuple(rows.top[index, :wanted].tolist()),
                    int(rows.ranks[index]),
                )
        if pooled is not None and request.spec.pooling is not None:
            for index in (pooled.slots == occupancy.slot).nonzero()[0].tolist():
                before = request.pooled if request.spec.pooling.reads_all and pooled.starts[index] else []
                value = pooled.values[index].astype(np.float64)
                request.pooled = [*before, (value, int(pooled.counts[index]))]

    def _check_scores(self, delta: Delta, slot: int, rows: LogprobRows | None) -> None:
        """Check that log-probabilities belong to their tokens."""
        wanted = self.requests[delta.request_id].spec.params.logprobs
        if rows is None or delta.logprobs is None or wanted is None:
            broken("1.1", f"{delta.request_id} got log-probabilities that the runner has not computed")
        at = {int(rows.columns[index]): index for index in (rows.slots == slot).nonzero()[0].tolist()}
        for column, score in enumerate(delta.logprobs):
            index = at[column]
            tops = tuple(rows.top_ids[index, :wanted].tolist()), tuple(rows.top[index, :wanted].tolist())
            right = TokenLogprobs(float(rows.chosen[index]), *tops)
            require(score == right, "1.1", f"token {column} of {delta.request_id}: expected {right}, got {score}")

    def _settle(self, row: _Row, count: int) -> None:
        """Record the settled KV of the positions that a row computed."""
        occupancy, size, groups = row.occupancy, self.limits.block_size, self.limits.groups
        for group, table in enumerate(occupancy.tables):
            for position in range(row.start, min(row.start + count, len(occupancy.request.tokens))):
                self._content[table[position // size]][position % size] = _mark(occupancy.request, position, group)
        if groups.sliding:
            occupancy.begin = max(occupancy.begin, groups.first_kept(row.start + count, size))

    def _check_deltas(self, plan: StepPlan, expected: dict[str, _Expected], deltas: Sequence[Delta]) -> None:
        told: dict[str, Delta] = {}
        for delta in deltas:
            require(delta.request_id not in told, "8", f"step {plan.step} has two deltas for {delta.request_id}")
            told[delta.request_id] = delta
            tokens = delta.token_ids
            require(all(token >= 0 for token in tokens), "1.9", f"{delta.request_id} got {tokens}")
            if delta.request_id not in expected:
                request = self.requests.get(delta.request_id)
                ended = request is not None and request.end is not None
                what = f"step {plan.step} sends {delta.request_id}{', which ended,' if ended else ''} {delta.token_ids}"
                rule = "1.7" if ended and request is not None and request.abort_requested else "1.1"
                require(not delta.token_ids and delta.finish_reason is None, rule, f"{what} {delta.finish_reason}")
        failed = any(each.end is FinishReason.ERROR for each in expected.values())
        for name, each in expected.items():
            self._check_delta(plan, each, told.get(name), beside_error=failed)
            request, occupancy = each.request, each.request.occupancy
            request.end = each.end
            if each.end is not None and occupancy is not None:
                occupancy.ended = True
                if not occupancy.revoked:
                    del self.occupancies[occupancy.slot]
                    request.occupancy = None

    def _check_delta(self, plan: StepPlan, right: _Expected, delta: Delta | None, *, beside_error: bool) -> None:
        request, tokens, reason, draining, _ = right
        given = () if delta is None else delta.token_ids
        what = f"step {plan.step}: expected tokens {tokens} for {request.name}, got {given}"
        lost = "1.9" if tokens and not all(tokens) and 0 not in given else "1.3" if beside_error else "1.1"
        require(given == tokens, lost, f"{what}{' while it drains' if draining else ''}")
        said = None if delta is None else delta.finish_reason
        last = {FinishReason.ABORT: "1.7", FinishReason.ERROR: "1.3"}.get(reason or FinishReason.STOP, "1.1")
        ended = "1.6" if draining and last == "1.1" and reason is not None else last
        require(said is reason, ended, f"step {plan.step}: {request.name} ended with {said}, not {reason}")
        if delta is None:
            return
        if reason is FinishReason.ERROR:
            what = f"{request.name} failed with {right.error!r}, but got the message {delta.error!r}"
            require(right.error in (delta.error or ""), "1.3", what)
        self._check_phases(request, delta)
        wanted = request.spec.params.logprobs
        if tokens and wanted is not None:
            count = None if delta.logprobs is None else len(delta.logprobs)
            require(count == len(tokens), "1.1", f"{request.name} got {count} log-probabilities")
        scores = delta.prompt_logprobs
        if tokens and not request.first_delivered:
            request.first_delivered = True
            read = [request.read.get(place) for place in range(1, len(request.spec.prompt))]
            found = None if scores is None else [*scores]
            what = f"prompt of {request.name}: expected {read}, got {found}"
            require(found == (read if request.scores_prompt else None), "4", what)
            cached = request.held if request.fetches else request.cached
            what = f"{request.name}: expected {cached} cached tokens, got {delta.cached_tokens}"
            require(delta.cached_tokens == cached, "2.1", what)
            pooled = request.vector
            require(
                delta.pooled == pooled, "4", f"{request.name}: expected the vector {pooled!r}, got {delta.pooled!r}"
            )
            known = delta.prefill == request.prefill or (delta.prefill == "held" and not request.fetches)
            require(known, "6.3", f"{request.name}: expected prefill outcome {request.prefill}, got {delta.prefill}")
        else:
            require(scores is None, "4", f"{request.name} got results of its prompt without its first token")

    def counted(self, stats: SchedulerStats, held: SchedulerHoldings) -> None:
        """Compare gauges with the holdings, and the counters that a scheduler has with what was observed."""
        slots, blocks = stats.slots, stats.blocks
        total = self.limits.num_kv_blocks
        for what, found, right in (
            ("waiting", slots.waiting, held.waiting),
            ("running", slots.running, held.running),
            ("loading", slots.loading, held.loading),
            ("draining", slots.draining, held.draining),
            ("used", blocks.used, held.owned),
            ("fenced", blocks.fenced, held.fenced),
            ("cached", blocks.cached, held.cached),
            ("total", blocks.total, total),
        ):
            require(found == right, "3.6", f"its gauge {what} is {found}, expected {right}")
        every = self.requests.values()
        generated = sum(len(each.tokens) - len(each.spec.prompt) - len(each.spec.delivered) for each in every)
        ends = Counter(each.end for each in every if each.end is not None)
        finished = {reason: count for reason, count in stats.outputs.finished.items() if count}
        for name, count, seen in (
            ("generated_tokens", stats.outputs.generated_tokens, generated),
            ("finished", finished, ends),
            ("preemptions", stats.counters.preemptions, self.preemptions),
        ):
            require(not count or count == seen, "3.6", f"its counter {name} is {count}, expected {seen}")

    def active(self, activities: Mapping[str, RequestActivity], held: SchedulerHoldings) -> None:
        """Compare the activities of requests with the holdings, unless the scheduler tracks none."""
        if not activities:
            return
        if activities.keys() != self.unfinished:
            broken("3.6", f"activities of {set(activities)}")
        states = Counter(each.state for each in activities.values())
        for state in ("waiting", "loading", "running"):
            count = getattr(held, state)
            require(states[state] == count, "3.6", f"{states[state]} activities are {state}, but it holds {count}")
        for name, activity in activities.items():
            request, possible = self.requests[name], _STATES[self.requests[name].where]
            if activity.state not in possible:
                broken("3.6", f"the activity of {name} is {activity.state!r}, not {possible}")
            phases, loading = self._phases_of(request), request.loading
            if loading is not None and loading.operation in self._operations:
                phases = {Phase.TRANSFER if isinstance(loading, operations.Fetch) else Phase.STORE}
            if activity.phase not in phases:
                broken("8", f"{name} is {activity.state}, but in phase {activity.phase.name}")

    def _phases_of(self, request: Followed) -> set[Phase]:
        """Return the phases in which a request may be, or have been."""
        computing = request.cached is not None or request.loading is not None or request.abort_requested
        conditional = {
            Phase.COMPUTING: computing,
            Phase.GRAMMAR: request.spec.params.grammar is not None,
            Phase.TRANSFER: bool(request.spec.prefill_at),
            Phase.PREEMPTED: request.revoked,
        }
        return {phase for phase in _PHASES if conditional.get(phase, True)}

    def held(self, held: SchedulerHoldings, names: Iterable[str]) -> None:
        """Compare the scheduler's reported holdings with the audited state."""
        if set(names) != (unfinished := self.unfinished):
            broken("1.7", f"expected unfinished {unfinished}, got {set(names)}")
        loading = [request for request in self.requests.values() if request.loading is not None]
        draining = sum(occupancy.revoked for occupancy in self.occupancies.values())
        slots = len(self.occupancies) + len(loading)
        require(slots <= self.limits.max_num_seqs, "1.4", f"{slots} slots are in use")
        require(held.draining == draining, "1.2", f"expected {draining} draining slots, got {held.draining}")
        running = len(self.live) + len(loading)
        said = held.running + held.loading
        require(said == running, "1.4", f"expected {running} running or loading requests, got {said}")
        loads = [each.loading for each in loading if isinstance(each.loading, operations.Load)]
        arriving = sum(each.operation in self._operations for each in loads)
        right = arriving <= held.loading <= len(loading)
        require(right, "1.4", f"expected {arriving} loading requests, got {held.loading}")
        waiting = sum(request.waits for request in self.requests.values())
        require(held.waiting == waiting, "1.4", f"expected {waiting} waiting requests, got {held.waiting}")
        if not loading:
            owned = len(self.tables)
            require(held.owned == owned, "3.1", f"expected {owned} owned blocks, got {held.owned}")
            fenced = len(self.unowned())
            require(held.fenced >= fenced, "3.2", f"expected {fenced} fenced blocks, got {held.fenced}")
        opened = len(self._operations)
        require(held.operations == opened, "3.6", f"expected {opened} open operations, got {held.operations}")
        if not self._in_flight and not self._operations:
            require(held.fenced == 0, "3.2", f"{held.fenced} blocks are fenced with nothing in flight")
        if not self.unfinished and not self._in_flight and not self._operations:
            require(held.idle, "3.6", f"at idle it holds {held}")
            known = len(self._known)
            require(known <= held.cached, "5.3", f"events leave {known} blocks stored, but it holds {held.cached}")


def _loaded(load: operations.Load | operations.Fetch | None) -> list[int]:
    return [] if load is None else load.blocks.tolist()


def _mark(request: Followed, position: int, group: int) -> int:
    """Return the expected content of the KV at a position for a group of layers."""
    return hash((request.mark(position), group)) if group else request.mark(position)


def _cut(request: Followed, tokens: list[int]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Return the delivered part of sampled tokens, and the finish reason, if any."""
    params = request.spec.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.spec.eos_token_ids)}
    tokens = tokens[: request.limit - len(request.tokens)]
    for index, token in enumerate(tokens):
        if token in ends:
            return tuple(tokens[: index + 1]), FinishReason.STOP
    full = len(request.tokens) + len(tokens) >= request.limit
    return tuple(tokens), FinishReason.LENGTH if full else None
