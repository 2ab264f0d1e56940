"""Follows a scheduler from outside, by its plans, effects and deltas alone, and names the rule that a call breaks.

The auditor knows who is in which slot and gen, every block table, which step in flight touches which block, which
operation holds which block, and what every position of the cache holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fd_core import signals
from fd_core.config import Limits
from fd_core.effects import operations
from fd_core.scheduling.contract import SchedulerHoldings
from fd_core.signals import Outcome
from fd_core.testing.kit.law import broken, require
from fd_core.testing.schedulers.tiers import Operation
from fd_core.types import (
    Admission,
    BlockGrant,
    Delta,
    FinishReason,
    LogprobRows,
    PrefillOutcome,
    PromptLogprobRows,
    RequestSpec,
    StepOutput,
    StepPlan,
)

WHERES: Final = ("waits", "loads", "runs", "drains", "ended")
_PATIENCE: Final = 4
"""Plans for each slot that a decode may be left out of."""


@dataclass(slots=True)
class Stay:
    """A request in a slot: what an outsider can know of it."""

    request: Followed
    slot: int
    gen: int
    table: list[int]
    num_planned: int
    """Tokens that exist once every step in flight is answered, if all drafts in flight are accepted."""
    num_computed: int
    """Positions whose KV exists or is in flight, under the same assumption."""
    length: int
    """Tokens that the runner has."""
    revoked: bool = False
    ended: bool = False
    in_flight: int = 0
    drafts_ready: int | None = 0
    """Drafts that the runner holds; None while a step of this stay is in flight."""
    left_out: int = 0
    """Plans in a row that left its decode out."""

    def __str__(self) -> str:
        return f"slot {self.slot} gen {self.gen} ({self.request.name})"

    @property
    def remaining(self) -> int:
        """Tokens that wait for a step: one is a decode."""
        return self.num_planned - self.num_computed


@dataclass(slots=True)
class Followed:
    """A request: what its client knows, and where it is."""

    spec: RequestSpec
    limit: int
    tokens: list[int]
    marks: list[int] = field(default_factory=list)
    """For each position, what its KV depends on as one number: salt and all tokens up to there."""
    stay: Stay | None = None
    loading: operations.Load | operations.Fetch | None = None
    abort_wanted: bool = False
    end: FinishReason | None = None
    told_first: bool = False
    cached: int | None = None
    """Tokens that it began with when it was admitted first."""
    fetches: int = 0
    """Number of times that another worker was requested to compute the prompt."""
    prefill: PrefillOutcome | None = None
    """Outcome of that computation."""
    sent: int = 0
    """Leading blocks of a prefill job that were offered to the worker that decodes, or that it has."""
    is_over: bool = False
    """True if that worker was notified of the end of the job, either way."""
    seen: int = 0
    """Leading positions that it computed itself."""
    read: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    """Runner's results for positions of the prompt: log-probability and alternatives."""

    @property
    def scores_prompt(self) -> bool:
        """True if the log-probabilities of its prompt are returned with its first token."""
        return self.spec.params.prompt_logprobs is not None and not self.spec.delivered

    @property
    def needs_every_position(self) -> bool:
        """True if each position of the prompt has a result that is still due, be its KV known or not."""
        mean = self.spec.pooling is not None and self.spec.pooling.kind == "mean"
        return not self.told_first and (self.scores_prompt or mean)

    @property
    def name(self) -> str:
        return self.spec.request_id

    @property
    def where(self) -> str:
        """One of `WHERES`. A request that drains may have ended already."""
        if self.stay is not None:
            return "drains" if self.stay.revoked else "runs"
        if self.end is not None:
            return "ended"
        return "waits" if self.loading is None else "loads"

    @property
    def waits(self) -> bool:
        return self.where == "waits"

    def mark(self, position: int) -> int:
        """Return what KV has to be at a position."""
        while len(self.marks) <= position:
            before = self.marks[-1] if self.marks else hash(("salt", self.spec.cache_salt))
            self.marks.append(hash((before, self.tokens[len(self.marks)])))
        return self.marks[position]


class _Row(NamedTuple):
    """A row of a step in flight, where the runner really computed it."""

    stay: Stay
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
    """Output of a step that is due to a request."""

    request: Followed
    tokens: tuple[int, ...] = ()
    end: FinishReason | None = None
    draining: bool = False


class Auditor:
    """Raises `LawBroken` as soon as a call shows that a rule was broken."""

    def __init__(self, limits: Limits, epoch: int) -> None:
        self.limits = limits
        self.requests: dict[str, Followed] = {}
        """Every request so far, by id."""
        self.stays: dict[int, Stay] = {}
        """By slot; draining ones too."""
        self.stale = 0
        """Outputs and rows that had to be dropped."""
        self.preemptions = 0
        self._epoch = epoch
        self._step = 0
        self._gens = dict.fromkeys(range(limits.max_num_seqs), 0)
        self._in_flight: dict[int, _InFlight] = {}
        self._content: list[list[int | None]] = [[None] * limits.block_size for _ in range(limits.num_kv_blocks)]
        """By block and offset: what the settled KV there depends on; None where it is not settled."""
        self._left_behind: dict[int, str] = {}
        """Blocks that hold no KV because a load or a transfer has not brought it, and the rule that whoever uses them
        breaks."""
        self._operations: dict[int, Operation] = {}
        self._jobs: dict[str, Followed] = {}
        """Requests that compute prompts for other workers, by lease."""
        self._to_cancel: set[int] = set()
        """Fetches that nobody waits for any more and that the other worker was not told of."""
        self._named: dict[bytes, int] = {}

    @property
    def live(self) -> list[Stay]:
        return [stay for stay in self.stays.values() if not stay.revoked]

    @property
    def unfinished(self) -> set[str]:
        return {name for name, request in self.requests.items() if request.end is None}

    @property
    def tables(self) -> set[int]:
        return {block for stay in self.live for block in stay.table}

    def touched(self) -> set[int]:
        return {block for step in self._in_flight.values() for block in step.touched}

    def operating(self, *kinds: type) -> set[int]:
        """Return the blocks that open operations hold, of some kinds or of any."""
        open_ones = [each for each in self._operations.values() if isinstance(each, kinds or object)]
        holders = [each for each in open_ones if not isinstance(each, operations.Lookup)]
        return {block for each in holders for block in each.blocks.tolist()}

    def added(self, spec: RequestSpec, effects: operations.Effects) -> None:
        limit = min(len(spec.prompt) + spec.params.max_tokens, self.limits.max_model_len)
        request = self.requests[spec.request_id] = Followed(spec, limit, [*spec.prompt, *spec.delivered])
        if (job := spec.prefill_job) is not None:
            request.sent = job.held_blocks
            self._jobs[job.lease] = request
        self._began(effects)

    def aborted(self, name: str, delta: Delta | None) -> None:
        """The scheduler was asked to end a request, known or not."""
        request = self.requests.get(name)
        at_once = request is not None and request.end is None and not request.abort_wanted and request.stay is None
        if request is None or not at_once:
            state = "unknown" if request is None else "aborted or ended already"
            held = request is not None and request.end is None and request.stay is not None
            rule, why = ("1.2", "holds its slot") if held else ("1.7", f"is {state}")
            require(delta is None, rule, f"abort of {name}, which {why}, returned {delta}")
            if request is not None:
                request.abort_wanted = True
            return
        if delta is None and request.loading is not None and request.loading.operation not in self._operations:
            request.abort_wanted = True  # its KV has come, so it may count as running: the next plan revokes it
            return
        what = f"{name} was aborted while it {'waited' if request.loading is None else 'loaded'}"
        require(delta is not None, "1.7", f"{what}, and was not told the end at once")
        assert delta is not None
        require(delta.request_id == name, "1.7", f"{what}, and {delta.request_id} was told something")
        require(delta.finish_reason is FinishReason.ABORT, "1.7", f"{what}, and was told {delta.finish_reason}")
        require(not delta.token_ids, "1.1", f"{what}, and was told tokens: {delta.token_ids}")
        if isinstance(request.loading, operations.Fetch):
            self._to_cancel.add(request.loading.operation)
        request.abort_wanted, request.end, request.loading = True, FinishReason.ABORT, None

    def planned(self, plan: StepPlan | None, effects: operations.Effects) -> None:
        """The scheduler decided a step, or that a step could do nothing."""
        wanted = [stay for stay in self.live if stay.request.abort_wanted]
        revoked = {(each.slot, each.gen) for each in plan.revocations} if plan is not None else set()
        for stay in wanted:
            more = "" if plan is not None else ": there is no plan, though one of revocations alone is a step"
            rule = "1.7" if plan is not None else "1.3"
            require((stay.slot, stay.gen) in revoked, rule, f"{stay} was aborted, and the next plan keeps it{more}")
        if plan is not None:
            self._take_in(plan)
        self._began(effects)
        late = [name for name, each in self.requests.items() if each.abort_wanted and each.where in ("waits", "loads")]
        require(not late, "1.7", f"{late} were aborted, and the next plan did not take them back")
        left = self._to_cancel & self._operations.keys()
        require(not left, "6.1", f"who waited for the fetches {left} was aborted, and their leases are not ended")
        for lease, job in self._jobs.items():
            require(job.end is None or job.is_over, "6.1", f"{job.name} ended, and lease {lease} is not given up")

    def _take_in(self, plan: StepPlan) -> None:
        count = len(plan.slots)
        require(plan.epoch == self._epoch, "1.5", f"the plan has epoch {plan.epoch}, not {self._epoch}")
        require(plan.step == self._step, "1.5", f"the plan has step {plan.step} where {self._step} comes next")
        self._step += 1
        columns = (plan.slots, plan.gens, plan.starts, plan.num_tokens, plan.num_drafts, plan.samples)
        require(all(len(column) == count for column in columns), "8", "the columns of the plan differ in length")
        require(not any(column.flags.writeable for column in columns), "8", "arrays of the plan can be written")
        total, budget = int(plan.num_tokens.sum()), self.limits.max_num_batched_tokens
        require(total <= budget, "2", f"step {plan.step} computes {total} tokens; the budget is {budget}")
        require(len(set(plan.slots.tolist())) == count, "8", f"step {plan.step} has two rows of one slot")
        useful = count or plan.admissions or plan.revocations or plan.grants
        require(useful, "8", f"step {plan.step} does nothing at all")
        before = {
            stay.slot: (stay, stay.remaining, stay.num_computed)
            for stay in self.live
            if not stay.in_flight and stay.num_planned < stay.request.limit and not stay.request.abort_wanted
        }
        entering = {(each.slot, each.gen) for each in plan.admissions}
        leaving = {(each.slot, each.gen) for each in plan.revocations}
        # Blocks of whoever is revoked may be granted in the same plan, and who enters may have to leave at once.
        for revoked in plan.revocations:
            if (revoked.slot, revoked.gen) not in entering:
                self._revoke(revoked.slot, revoked.gen)
        touched = self.touched()
        for admission in plan.admissions:
            self._admit(admission, plan, touched, stays=(admission.slot, admission.gen) not in leaving)
        for slot, gen in entering & leaving:
            self._revoke(slot, gen)
        admitted = {admission.slot for admission in plan.admissions}
        for grant in plan.grants:
            if grant.slot not in admitted or grant.offset:
                self._grant(grant, touched)
        step = self._in_flight[plan.step] = _InFlight()
        for row in range(len(plan.slots)):
            self._check_row(plan, row, step)
        self._check_left_out(plan, before)

    def _admit(self, admission: Admission, plan: StepPlan, touched: set[int], *, stays: bool) -> None:
        name, slot = admission.request_id, admission.slot
        request = self.requests.get(name)
        require(0 <= slot < self.limits.max_num_seqs, "1.4", f"there is no slot {slot}")
        there = self.stays.get(slot)
        if there is not None:
            state = "drains" if there.revoked else "runs"
            broken("1.4", f"slot {slot} was given to {name} while {there.request.name} {state} there")
        loads = [each for each in self.requests.values() if each.loading is not None and each.loading.slot == slot]
        require(all(each is request for each in loads), "1.4", f"slot {slot} was given to {name} while another loads")
        if request is None:
            broken("1.1", f"{name!r} was admitted, but never added")
        require(request.end is None, "1.7", f"{name} was admitted after its end")
        require(request.stay is None, "1.4", f"{name} was admitted to slot {slot} while it is in {request.stay}")
        gen = self._gens[slot]
        require(admission.gen > gen, "1.5", f"slot {slot} was given gen {admission.gen} after gen {gen}")
        self._gens[slot] = admission.gen
        told, known = admission.token_ids.tolist(), request.tokens
        require(told == known, "1.4", f"{name} was admitted with {len(told)} tokens that are not its {len(known)} ones")
        require(admission.prompt_len == len(request.spec.prompt), "1.4", f"{name} was admitted with a wrong prompt_len")
        require(admission.params == request.spec.params, "4", f"{name} was admitted with other sampling parameters")
        require(admission.eos_token_ids == request.spec.eos_token_ids, "4", f"{name} was admitted with other EOS ids")
        computed = admission.computed
        require(0 <= computed < len(told), "3.5", f"{name} was admitted with {computed} of {len(told)} tokens computed")
        if request.needs_every_position:
            begins = f"{name} begins with {computed} positions, of which it computed {request.seen}"
            require(computed <= request.seen, "4", f"{begins}, though every position of its prompt is asked for")
        request.cached = computed if request.cached is None else request.cached
        loaded, request.loading = request.loading, None
        stay = Stay(request, slot, admission.gen, [], len(told), computed, len(told))
        first = [grant for grant in plan.grants if grant.slot == slot and grant.offset == 0]
        for grant in first:
            self._grant(grant, touched, stay, [] if loaded is None else loaded.blocks.tolist())
        self.stays[slot], request.stay = stay, stay
        if not stays:
            return
        size = self.limits.block_size
        require(stay.num_computed <= len(stay.table) * size, "3.5", f"{stay} has no blocks for what it begins with")
        for position in range(stay.num_computed):
            block = stay.table[position // size]
            if self._content[block][position % size] != request.mark(position):
                broken(
                    self._left_behind.get(block, "5.3" if request.spec.cache_salt else "3.5"),
                    f"{stay} begins with position {position} of block {block}, which holds no settled KV of its text "
                    f"under its salt",
                )

    def _grant(self, grant: BlockGrant, touched: set[int], stay: Stay | None = None, own: Sequence[int] = ()) -> None:
        """Blocks join a table; those of a known prefix may have other owners, all others may not."""
        shared = 0 if stay is None else stay.num_computed // self.limits.block_size
        stay = self.stays.get(grant.slot) if stay is None else stay
        if stay is None or stay.revoked:
            broken("3.1", f"slot {grant.slot} was granted blocks, but nobody runs there")
        require(grant.offset == len(stay.table), "3.1", f"{stay} was granted blocks from entry {grant.offset} on")
        tables = self.tables | {block for other in self.requests.values() for block in _loaded(other.loading)}
        for index, block in enumerate(grant.blocks.tolist()):
            require(0 <= block < self.limits.num_kv_blocks, "3.1", f"{stay} was granted block {block}")
            twice = "3.3" if grant.offset == 0 and shared else "3.1"
            require(block not in stay.table, twice, f"{stay} was granted block {block} twice")
            stay.table.append(block)
            if grant.offset == 0 and index < shared:
                coming = self.operating(operations.Load, operations.Fetch) - set(own)
                require(block not in coming, "3.2", f"{stay} shares block {block}, whose KV is on its way")
                continue
            require(block not in tables, "3.1", f"{stay} was granted block {block}, which another request owns")
            if block in own:
                continue
            require(block not in touched, "3.2", f"{stay} was granted block {block}, which a step in flight touches")
            held = self.operating()
            require(block not in held, "3.2", f"{stay} was granted block {block}, which an operation holds")
            self._content[block] = [None] * self.limits.block_size
            self._left_behind.pop(block, None)

    def _revoke(self, slot: int, gen: int) -> None:
        stay = self.stays.get(slot)
        if stay is None or stay.gen != gen:
            broken("1.2", f"slot {slot} gen {gen} was revoked, but nobody is there under that gen")
        require(not stay.revoked, "1.2", f"{stay} was revoked twice")
        stay.revoked = True
        self.preemptions += not stay.request.abort_wanted

    def _check_row(self, plan: StepPlan, row: int, step: _InFlight) -> None:
        slot, gen, count = int(plan.slots[row]), int(plan.gens[row]), int(plan.num_tokens[row])
        start, drafts, samples = int(plan.starts[row]), int(plan.num_drafts[row]), bool(plan.samples[row])
        stay, size = self.stays.get(slot), self.limits.block_size
        if stay is None or stay.gen != gen:
            broken("1.5", f"step {plan.step} computes slot {slot} gen {gen}, but nobody is there under that gen")
        require(not stay.revoked, "1.2", f"step {plan.step} computes {stay}, which was revoked")
        where = f"step {plan.step}: {stay}"
        own = count - drafts
        require(own >= 1 and drafts >= 0, "2.1", f"{where} computes {count} tokens with {drafts} drafts")
        require(samples or not drafts, "2.1", f"{where} has drafts in a chunk that yields no token")
        most = self.limits.max_drafts if stay.drafts_ready is None else stay.drafts_ready
        require(drafts <= most, "2.1", f"{where} is charged for {drafts} drafts; the runner has at most {most}")
        require(start == stay.num_computed, "1.1", f"{where} computes from {start} on instead of {stay.num_computed}")
        end, known = start + own, stay.num_planned
        require(end <= known, "2.1", f"{where} is charged up to position {end}; there are {known} tokens")
        require(samples == (end == known), "1.1", f"{where} {'samples' if samples else 'samples nothing'} at {end}")
        require(start + count <= len(stay.table) * size, "3.1", f"{where} computes positions that have no block")
        real = stay.length - own if samples else start
        blocks = stay.table[: -(-(start + count) // size)]
        written = set(blocks[real // size :])
        others = {block for other in self.live if other is not stay for block in other.table}
        require(not written & others, "3.1", f"{where} writes blocks {written & others}, which others own too")
        held = self.operating()
        require(not written & held, "3.2", f"{where} writes blocks {written & held}, which an operation holds")
        step.touched.update(blocks)
        step.rows.append(_Row(stay, real, own, drafts, samples))
        for position in range(real, start + count):
            self._content[stay.table[position // size]][position % size] = None
        stay.num_computed += count
        stay.num_planned += samples + drafts
        stay.in_flight += 1
        stay.drafts_ready = None

    def _check_left_out(self, plan: StepPlan, before: dict[int, tuple[Stay, int, int]]) -> None:
        """Whoever could compute more than the plan says was left out for want of budget, and for nothing else."""
        left = self.limits.max_num_batched_tokens - int(plan.num_tokens.sum())
        for stay, remaining, computed in before.values():
            room = len(stay.table) * self.limits.block_size - computed
            if stay.revoked or room < 1:
                continue
            done = stay.num_computed - computed
            if done:
                stay.left_out = 0
            if done >= min(remaining, room):
                continue
            what = f"step {plan.step} computes {done} of {remaining} tokens of {stay}"
            if remaining == 1:
                drafts = int(plan.num_drafts.sum())
                require(not drafts, "2.2", f"{what}, and {drafts} drafts")
                stay.left_out += 1
                patience = _PATIENCE * self.limits.max_num_seqs + 8
                require(stay.left_out <= patience, "2.2", f"{stay} was left out of {stay.left_out} plans in a row")
            refund = "2.3" if plan.revocations else "2.1"
            require(not left, refund, f"{what}, although {left} tokens of the budget are left")

    def _began(self, effects: operations.Effects) -> None:
        for effect in effects.operations:
            match effect:
                case operations.Save():
                    for key, block in zip(effect.keys, effect.blocks.tolist(), strict=True):
                        content, what = self._content[block][-1], f"operation {effect.operation} saves"
                        if content is None or None in self._content[block]:
                            broken("3.5", f"{what} block {block}, which is not settled")
                        named = self._named.setdefault(key, content)
                        require(named == content, "5.3", f"{what} two contents under one key")
                case operations.Load():
                    self._await_kv(effect, "5.2", "5.4")
                case operations.Fetch():
                    self._fetch(effect)
                case operations.Send():
                    self._send(effect)
                case operations.GiveUp(lease):
                    self._job(lease, "is given up").is_over = True
                case operations.Cancel(operation):
                    self._to_cancel.discard(operation)
            if isinstance(effect, Operation):
                self._operations[effect.operation] = effect

    def _fetch(self, fetch: operations.Fetch) -> None:
        request, size, job = self._await_kv(fetch, "6.1", "6.2"), self.limits.block_size, fetch.job
        spec, what = request.spec, f"operation {fetch.operation} for {request.name}"
        require(spec.prefill_at and fetch.peer == spec.prefill_at, "6.1", f"{what} asks {fetch.peer!r} for KV")
        request.fetches += 1
        once = request.fetches == 1 and len(request.tokens) == len(spec.prompt)
        require(once, "6.3", f"{what} fetches a prompt that was fetched before, or whose text has begun")
        tokens = job.token_ids.tolist()
        require(tokens and tokens == request.tokens[: len(tokens)], "6.3", f"{what} asks for the KV of other tokens")
        same = (job.cache_salt, job.priority, job.tenant) == (spec.cache_salt, spec.priority, spec.tenant)
        require(same, "6.3", f"{what} asks under another salt, priority or tenant")
        count = -(-len(tokens) // size) - job.held_blocks
        require(count == len(fetch.blocks), "6.1", f"{what} leases {len(fetch.blocks)} blocks for the KV of {count}")

    def _await_kv(self, load: operations.Load | operations.Fetch, early: str, rule: str) -> Followed:
        """KV is on its way into the blocks of a slot; whoever uses what does not come breaks `rule`."""
        blocks = load.blocks.tolist()
        request = self.requests.get(load.request_id)
        if request is None or not request.waits:
            broken(early, f"operation {load.operation} is for {load.request_id!r}, which does not wait")
        require(load.slot not in self.stays, "1.4", f"{request.name} loads into slot {load.slot}, which is in use")
        others = {block for other in self.requests.values() for block in _loaded(other.loading)}
        for name, taken in (
            ("that a step in flight touches", self.touched()),
            ("of running requests", self.tables),
            ("that another operation holds", self.operating() | others),
        ):
            require(not taken & set(blocks), "3.2", f"operation {load.operation} writes blocks {name}")
        for block in blocks:
            self._content[block] = [None] * self.limits.block_size
        self._left_behind.update(dict.fromkeys(blocks, rule))
        request.loading = load
        return request

    def _job(self, lease: str, what: str) -> Followed:
        request = self._jobs.get(lease)
        if request is None or request.is_over:
            broken("6.1", f"lease {lease!r} {what}, but it {'is not known' if request is None else 'is over'}")
        return request

    def _send(self, send: operations.Send) -> None:
        """Each block behind those that the other worker has is offered once, in order, and holds its part."""
        request, size = self._job(send.lease, "is sent blocks"), self.limits.block_size
        job, what = request.spec.prefill_job, f"operation {send.operation} for lease {send.lease!r}"
        assert job is not None
        wanted = job.num_tokens
        require(send.first == request.sent, "6.2", f"{what} sends from block {send.first} on, {request.sent} were sent")
        require(len(send.blocks) or send.tokens is not None, "6.2", f"{what} sends nothing")
        for place, block in enumerate(send.blocks.tolist(), send.first):
            right = [request.mark(position) for position in range(place * size, min((place + 1) * size, wanted))]
            settled = self._content[block][: len(right)] == right
            require(settled, "6.2", f"{what} sends block {place} before it is settled")
        request.sent += len(send.blocks)
        if send.tokens is not None:
            whole = send.tokens == wanted and request.sent == -(-wanted // size)
            parts = f"{request.sent} blocks and {send.tokens} of {wanted} tokens"
            require(whole, "6.2", f"{what} is the last, with {parts}")
            request.is_over = True

    def completed(self, completion: operations.Completion) -> None:
        match completion:
            case operations.Found(operation) | operations.Saved(operation) | operations.Sent(operation):
                del self._operations[operation]
            case operations.Loaded(operation, count):
                load = self._operations.pop(operation)
                assert isinstance(load, operations.Load)
                size, request = self.limits.block_size, self.requests[load.request_id]
                first = {key: index for index, key in enumerate(load.keys)}
                for key, block in zip(load.keys[:count], load.blocks.tolist(), strict=False):
                    self._left_behind.pop(block, None)
                    # The key stands for one KV; the positions before the last one are of the same text.
                    ends = range(first[key] * size + size - 1, len(request.tokens), size)
                    known = self._named.get(key)
                    at = next((last - size + 1 for last in ends if request.mark(last) == known), None)
                    self._content[block] = [None] * size if at is None else [request.mark(at + i) for i in range(size)]
            case operations.Fetched(operation, outcome):
                self._fetched(operation, outcome)
            case _:
                pass

    def _fetched(self, operation: int, outcome: PrefillOutcome) -> None:
        fetch = self._operations.pop(operation)
        assert isinstance(fetch, operations.Fetch)
        request, size = self.requests[fetch.request_id], self.limits.block_size
        request.prefill = outcome
        for place, block in enumerate(fetch.blocks.tolist(), fetch.job.held_blocks):
            if outcome != "transferred":
                self._left_behind[block] = "6.3"
                continue
            del self._left_behind[block]
            known = [request.mark(at) for at in range(place * size, min((place + 1) * size, fetch.job.num_tokens))]
            self._content[block] = [*known, *[None] * (size - len(known))]

    def executed(self, plan: StepPlan, output: StepOutput) -> None:
        counts = signals.read(output.tokens).counts
        for row in self._in_flight[plan.step].rows:
            row.stay.length += int(counts[row.stay.slot]) if row.samples else 0

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
            row.stay.in_flight -= 1
            kind, count = outcomes.kinds[row.stay.slot], int(outcomes.counts[row.stay.slot])
            if self.stays.get(row.stay.slot) is not row.stay or row.stay.ended:
                continue
            request, draining = row.stay.request, row.stay.revoked
            if kind == Outcome.ERROR:
                expected[request.name] = _Expected(request, (), FinishReason.ERROR, draining)
                continue
            if row.start <= request.seen:
                request.seen = max(request.seen, row.start + row.own)
            self._read(row.stay, output.prompt_logprobs)
            told: tuple[int, ...] = ()
            if row.samples:
                told, reason = _cut(request, outcomes.tokens[row.stay.slot, :count].tolist())
                expected[request.name] = _Expected(request, told, reason, draining)
                rejected = row.drafts - max(count - 1, 0)
                row.stay.num_planned -= rejected
                row.stay.num_computed -= rejected
                if not row.stay.in_flight and output.drafts_ready is not None:
                    row.stay.drafts_ready = int(output.drafts_ready[row.stay.slot])
            elif not row.stay.in_flight:
                row.stay.drafts_ready = 0
            request.tokens += told
            self._settle(row, row.own + max(count - 1, 0) if row.samples else row.own)
        for revoked in plan.revocations:
            request = self.stays.pop(revoked.slot).request
            request.stay = None
            if request.end is None and request.abort_wanted:
                expected[request.name] = _Expected(request, (), FinishReason.ABORT, True)
        self._check_deltas(plan, expected, deltas)
        slots = {row.stay.request.name: row.stay.slot for row in step.rows}
        for delta in deltas:
            if delta.logprobs:
                self._check_scores(delta, slots[delta.request_id], output.logprobs)
        self._began(effects)

    def _read(self, stay: Stay, rows: PromptLogprobRows | None) -> None:
        wanted = stay.request.spec.params.prompt_logprobs
        if rows is not None:
            for index in (rows.slots == stay.slot).nonzero()[0].tolist():
                alternatives = tuple(rows.top_ids[index, :wanted].tolist())
                stay.request.read[int(rows.positions[index])] = float(rows.chosen[index]), alternatives

    def _check_scores(self, delta: Delta, slot: int, rows: LogprobRows | None) -> None:
        """The log-probabilities are those of the tokens beside which they stand."""
        wanted = self.requests[delta.request_id].spec.params.logprobs
        if rows is None or delta.logprobs is None or wanted is None:
            broken("1.1", f"{delta.request_id} was told log-probabilities that the runner has not computed")
        at = {int(rows.columns[index]): index for index in (rows.slots == slot).nonzero()[0].tolist()}
        for column, score in enumerate(delta.logprobs):
            right = (float(rows.chosen[at[column]]), tuple(rows.top_ids[at[column], :wanted].tolist()))
            told = (score.logprob, score.top_ids)
            require(told == right, "1.1", f"token {column} of {delta.request_id} was told {told} instead of {right}")

    def _settle(self, row: _Row, count: int) -> None:
        """The KV of positions that a row computed is what it will be."""
        request, size = row.stay.request, self.limits.block_size
        for position in range(row.start, min(row.start + count, len(request.tokens))):
            self._content[row.stay.table[position // size]][position % size] = request.mark(position)

    def _check_deltas(self, plan: StepPlan, expected: dict[str, _Expected], deltas: Sequence[Delta]) -> None:
        told: dict[str, Delta] = {}
        for delta in deltas:
            require(delta.request_id not in told, "8", f"step {plan.step} tells {delta.request_id} two deltas")
            told[delta.request_id] = delta
            tokens = delta.token_ids
            require(all(token >= 0 for token in tokens), "1.9", f"{delta.request_id} was told {tokens}")
            if delta.request_id not in expected:
                request = self.requests.get(delta.request_id)
                ended = request is not None and request.end is not None
                what = f"step {plan.step} tells {delta.request_id}{', which ended,' if ended else ''} {delta.token_ids}"
                rule = "1.7" if ended and request is not None and request.abort_wanted else "1.1"
                require(not delta.token_ids and delta.finish_reason is None, rule, f"{what} {delta.finish_reason}")
        failed = any(each.end is FinishReason.ERROR for each in expected.values())
        for name, each in expected.items():
            self._check_delta(plan, each, told.get(name), beside_error=failed)
            request, stay = each.request, each.request.stay
            request.end = each.end
            if each.end is not None and stay is not None:
                stay.ended = True
                if not stay.revoked:
                    del self.stays[stay.slot]
                    request.stay = None

    def _check_delta(self, plan: StepPlan, right: _Expected, delta: Delta | None, *, beside_error: bool) -> None:
        request, tokens, reason, draining = right
        given = () if delta is None else delta.token_ids
        what = f"step {plan.step} gave {request.name} {tokens}, and it was told {given}"
        lost = "1.9" if tokens and not all(tokens) and 0 not in given else "1.3" if beside_error else "1.1"
        require(given == tokens, lost, f"{what}{' while it drains' if draining else ''}")
        said = None if delta is None else delta.finish_reason
        last = {FinishReason.ABORT: "1.7", FinishReason.ERROR: "1.3"}.get(reason or FinishReason.STOP, "1.1")
        ended = "1.6" if draining and last == "1.1" and reason is not None else last
        require(said is reason, ended, f"step {plan.step} ends {request.name} with {reason}, and it was told {said}")
        if delta is None:
            return
        require(reason is not FinishReason.ERROR or delta.error, "1.3", f"{request.name} failed, and is not told why")
        wanted = request.spec.params.logprobs
        if tokens and wanted is not None:
            count = None if delta.logprobs is None else len(delta.logprobs)
            require(count == len(tokens), "1.1", f"{request.name} was told {count} log-probabilities")
        scores = delta.prompt_logprobs
        if tokens and not request.told_first:
            request.told_first = True
            read = [request.read.get(place) for place in range(1, len(request.spec.prompt))]
            found = None if scores is None else [(score.logprob, score.top_ids) for score in scores]
            what = f"of the prompt of {request.name} there is told {found} instead of {read}"
            require(found == (read if request.scores_prompt else None), "4", what)
            cached = f"{request.name} began with {request.cached} tokens, and was told {delta.cached_tokens}"
            counted = request.fetches and delta.cached_tokens is not None
            require(counted or delta.cached_tokens == request.cached, "2.1", cached)
            known = delta.prefill == request.prefill or (delta.prefill == "held" and not request.fetches)
            require(known, "6.3", f"{request.name} was told {delta.prefill} of a prefill that was {request.prefill}")
        else:
            require(scores is None, "4", f"{request.name} is told of its prompt without its first token")

    def held(self, held: SchedulerHoldings, names: Iterable[str]) -> None:
        """Compare what the scheduler says that it holds with what it can hold."""
        require(set(names) == self.unfinished, "1.7", f"unfinished are {self.unfinished}, it says {set(names)}")
        loading = [request for request in self.requests.values() if request.loading is not None]
        draining = sum(stay.revoked for stay in self.stays.values())
        slots = len(self.stays) + len(loading)
        require(slots <= self.limits.max_num_seqs, "1.4", f"{slots} slots are in use")
        require(held.draining == draining, "1.2", f"{draining} slots drain, it says {held.draining}")
        running = len(self.live) + len(loading)
        said = held.running + held.loading
        require(said == running, "1.4", f"{running} requests run or load, it says {said}")
        waiting = sum(request.waits for request in self.requests.values())
        require(held.waiting == waiting, "1.4", f"{waiting} requests wait, it says {held.waiting}")
        if not loading:
            owned = len(self.tables)
            require(held.owned == owned, "3.1", f"{owned} blocks are in tables, it says that {held.owned} are owned")
        if not self._in_flight and not self._operations:
            require(held.fenced == 0, "3.2", f"{held.fenced} blocks are fenced though nothing is in flight")
        if not self.unfinished and not self._in_flight and not self._operations:
            require(held.idle, "3.6", f"at idle it holds {held}")


def _loaded(load: operations.Load | operations.Fetch | None) -> list[int]:
    return [] if load is None else load.blocks.tolist()


def _cut(request: Followed, tokens: list[int]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Return what a client is told of sampled tokens, and why its text ends with them."""
    params = request.spec.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.spec.eos_token_ids)}
    tokens = tokens[: request.limit - len(request.tokens)]
    for index, token in enumerate(tokens):
        if token in ends:
            return tuple(tokens[: index + 1]), FinishReason.STOP
    full = len(request.tokens) + len(tokens) >= request.limit
    return tuple(tokens), FinishReason.LENGTH if full else None
