"""A device and tiers that keep, for each position of each KV block, a hash of the tokens up to there.

The device samples texts that are known before. A block that is written too early, or a wrong prefix, shows at the next
request with it, at the sizes of servers: nothing is computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.effects import operations
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from fd_core.testing.kit.law import broken, require
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.tiers import wanted_blocks
from fd_core.types import (
    Admission,
    Delta,
    FinishReason,
    LogprobRows,
    PooledRows,
    PrefillJob,
    PromptLogprobRows,
    RequestSpec,
    StepOutput,
    StepPlan,
)

TOKEN_SECONDS: Final = 2.5e-5
"""Simulated time of a token of a step; operations outside steps take a time for each block, or one for each."""
_BLOCK_SECONDS: Final = 2e-4
_SECONDS: Final[Mapping[type, float]] = {operations.Lookup: 0.002, operations.CompileGrammar: 0.05}
_FILLER: Final = 16
"""Token that the model samples after the end of a text."""
_POWERS: Final = np.cumprod(np.full(1 << 17, 0x9E3779B97F4A7C15, np.uint64))


class DayRequest(NamedTuple):
    """A request whose text is known."""

    spec: RequestSpec
    text: tuple[int, ...]
    reason: FinishReason
    tokens: npt.NDArray[np.int32]
    """Those of the prompt and the text."""
    hashes: npt.NDArray[np.uint64]
    """Hash of all tokens up to each position, and of the owner of their KV."""
    fails: bool
    """True if the step of its second token fails."""

    def check(self, delta: Delta, at: int) -> None:
        """Fail unless a client gets the tokens from `at` on, and their results."""
        spec, params, name = self.spec, self.spec.params, delta.request_id
        right = self.text[at : at + len(delta.token_ids)]
        require(delta.token_ids == right, "4", f"{name}: expected the tokens {right} at {at}, got {delta.token_ids}")
        if params.logprobs is not None:
            _check_likely(name, delta.token_ids, delta.logprobs, params.logprobs)
        if params.prompt_logprobs is not None and not at:
            _check_likely(f"the prompt of {name}", spec.prompt[1:], delta.prompt_logprobs, params.prompt_logprobs)
        if spec.pooling is not None:
            vector = _pooled(self.tokens[: len(spec.prompt)]) / np.float32(len(spec.prompt))
            require(delta.pooled == vector.astype("<f4").tobytes(), "4", f"{name} gets another vector")


def request_of(spec: RequestSpec, answer: Sequence[int], *, fails: bool = False) -> DayRequest:
    """Return a request with its text: the `answer`, its end, and anything after it if nothing ends it before."""
    params = spec.params
    most, ends = params.max_tokens, params.stop_token_ids or (() if params.ignore_eos else spec.eos_token_ids)
    text = tuple(answer[:most])
    if len(text) < most:
        text += (ends[len(text) % len(ends)],) if ends else (_FILLER,) * (most - len(text))
    reason = FinishReason.STOP if ends and text[-1] in ends else FinishReason.LENGTH
    tokens = np.array((*spec.prompt, *text), np.int32)
    owner = int.from_bytes(f"{spec.cache_salt}{spec.adapter}".encode()[:8].rjust(8), "little") * len(spec.cache_salt)
    hashes = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _POWERS[: len(tokens)]) + np.uint64(owner % 2**64)
    return DayRequest(spec, text, reason, tokens, hashes, fails)


def job_of(spec: RequestSpec) -> RequestSpec:
    """Return the job of a prefill worker for a request."""
    job = PrefillJob(np.array(spec.prompt, "<i4").tobytes(), lease=spec.request_id, tenant=spec.tenant)
    return msgspec.structs.replace(greedy(spec.request_id, spec.prompt, 1), prefill_job=job, tenant=spec.tenant)


class HashingDevice:
    """Slots, block tables and the content of the cache."""

    def __init__(self, limits: Limits, known: Mapping[str, DayRequest]) -> None:
        """`known` are all requests by id."""
        self.limits, self.known, self._size = limits, known, limits.block_size
        self.content = np.zeros((limits.num_kv_blocks, limits.block_size), np.uint64)
        self.weights = np.uint64(0)
        """Number of changes of the weights, on which KV depends."""
        self.figures = Counter[str]()
        self._cells = self.content.reshape(-1)
        self._tables = np.full((limits.max_num_seqs, limits.blocks_per_seq + 1), -1, np.int64)
        self._gens = np.zeros(limits.max_num_seqs, np.int32)
        self._lengths = np.zeros(limits.max_num_seqs, np.int64)
        self._computed = np.zeros(limits.max_num_seqs, np.int64)
        """Tokens of each slot that have KV: not all while a prompt, or a preempted text, is computed in parts."""
        self._owners: list[DayRequest | None] = [None] * limits.max_num_seqs

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute a step."""
        limits, rows, total = self.limits, _Rows(self.limits), plan.total_tokens
        require(total <= limits.max_num_batched_tokens, "2", f"step {plan.step} computes {total:,} tokens")
        self.figures["tokens computed"] += total
        for admission in plan.admissions:
            self._admit(admission)
        for grant in plan.grants:
            self._tables[grant.slot, grant.offset : grant.offset + len(grant.blocks)] = grant.blocks
        for admission in plan.admissions:
            self._check(admission.slot, admission.computed, "begins with cached KV that")
        for revoked in plan.revocations:
            rows.tokens[revoked.slot, 0] = PREEMPTED_TOKEN_ID
            self._owners[revoked.slot] = None
        columns = plan.slots, plan.gens, plan.starts, plan.num_tokens, plan.num_drafts, plan.samples
        for slot, gen, start, count, drafts, samples in zip(*(each.tolist() for each in columns), strict=True):
            request = self._owners[slot]
            if request is None or gen != self._gens[slot]:
                broken("1.2", f"step {plan.step} computes slot {slot} of gen {gen}, which has no request")
            if samples:
                self._sample(request, slot, count - drafts, drafts, rows)
            else:
                self._write(request, slot, start, start + count, rows)
        return rows.output(plan, self._gens.copy())

    def _admit(self, admission: Admission) -> None:
        slot, request, length = admission.slot, self.known[admission.request_id], len(admission.token_ids)
        same = np.array_equal(admission.token_ids, request.tokens[:length])
        require(same, "1.4", f"{admission.request_id} was admitted with other tokens than it has")
        require(admission.computed < length, "3.3", f"{admission.request_id} was admitted without a token to compute")
        same = (admission.params, admission.adapter) == (request.spec.params, request.spec.adapter)
        require(same, "4", f"{admission.request_id} was admitted with other parameters")
        self._owners[slot], self._gens[slot], self._lengths[slot] = request, admission.gen, length
        self._tables[slot], self._computed[slot] = -1, admission.computed

    def _sample(self, request: DayRequest, slot: int, own: int, drafts: int, rows: _Rows) -> None:
        length = int(self._lengths[slot])
        done, accepted = length - len(request.spec.prompt), 0
        self._write(request, slot, length - own, length, rows)
        if request.fails and done:
            rows.errors.append((slot, "its logits are not finite"))
            return
        while accepted < drafts and (length + accepted) * 2654435761 % 97 < 60:
            accepted += 1
        self.figures["drafts rejected"] += drafts - accepted
        if drafts:
            self._cells[self._places(request, slot, length, length + drafts)] = 0
            self._write(request, slot, length, length + accepted, rows)
        for column, at in enumerate(range(done, done + accepted + 1)):
            token = request.text[at] if at < len(request.text) else _FILLER
            rows.sampled(request, slot, column, token)
        self._lengths[slot] = length + accepted + 1

    def _write(self, request: DayRequest, slot: int, start: int, end: int, rows: _Rows) -> None:
        self._computed[slot] = end
        if end == start + 1 < len(request.hashes) and (block := self._tables[slot, start // self._size]) >= 0:
            self.content[block, start % self._size] = request.hashes[start] + self.weights  # as below, but faster
        else:
            end = min(end, len(request.hashes))
            self._cells[self._places(request, slot, start, end)] = request.hashes[start:end] + self.weights
        if start < len(request.spec.prompt):
            rows.computed(request, slot, start, end)

    def _places(self, request: DayRequest, slot: int, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        blocks = self._tables[slot, positions // self._size]
        require(bool((blocks >= 0).all()), "3.1", f"{request.spec.request_id} has no blocks up to position {end:,}")
        return blocks * self._size + positions % self._size

    def _check(self, slot: int, end: int, what: str) -> None:
        request = self._owners[slot]
        assert request is not None
        self.check_cells(request, 0, self._cells[self._places(request, slot, 0, end)], what)

    def check_cells(self, request: DayRequest, start: int, cells: npt.NDArray[np.uint64], what: str) -> None:
        """Fail unless cells hold the KV of a request from position `start` on."""
        wrong = np.flatnonzero(cells != request.hashes[start : start + len(cells)] + self.weights)
        if len(wrong):
            broken("3.5", f"{request.spec.request_id} {what} is of other tokens, from position {wrong[0]:,} on")

    def check_running(self, names: Container[str]) -> None:
        """Check all KV of these requests, as far as they run."""
        for slot, request in enumerate(self._owners):
            if request is not None and request.spec.request_id in names:
                self._check(slot, min(int(self._computed[slot]), len(request.hashes)), "reads KV that")


class _Rows:
    """Results of a step; log-probabilities are those of `_likely`."""

    def __init__(self, limits: Limits) -> None:
        self.tokens = np.full((limits.max_num_seqs, 1 + limits.max_drafts), EMPTY_TOKEN_ID, np.int32)
        self.errors: list[tuple[int, str]] = []
        self._ready = np.full(limits.max_num_seqs, limits.max_drafts, np.int32) if limits.max_drafts else None
        self._chosen: list[tuple[int, int, int]] = []
        self._prompts: list[tuple[int, int, int]] = []
        self._pooled: list[tuple[int, int, int, npt.NDArray[np.int32]]] = []

    def sampled(self, request: DayRequest, slot: int, column: int, token: int) -> None:
        self.tokens[slot, column] = token
        if request.spec.params.logprobs is not None:
            self._chosen.append((slot, column, token))

    def computed(self, request: DayRequest, slot: int, start: int, end: int) -> None:
        spec = request.spec
        if spec.pooling is not None:
            self._pooled.append((slot, start, end - start, request.tokens[start:end]))
        if spec.params.prompt_logprobs is not None:
            positions = range(start + 1, min(end, len(spec.prompt) - 1) + 1)
            self._prompts += [(slot, at, spec.prompt[at]) for at in positions]

    def output(self, plan: StepPlan, gens: npt.NDArray[np.int32]) -> StepOutput:
        found = dict[str, Any]()
        if self._chosen:
            slots, columns, tokens = np.array(self._chosen, np.int32).T
            found["logprobs"] = LogprobRows(slots, columns, *_likely(tokens))
        if self._prompts:
            slots, positions, tokens = np.array(self._prompts, np.int32).T
            ranks = np.full(len(slots), 3, np.int32)
            found["prompt_logprobs"] = PromptLogprobRows(slots, positions, *_likely(tokens), ranks)
        if self._pooled:
            slots, starts, counts = (np.array([each[at] for each in self._pooled], np.int32) for at in range(3))
            found["pooled"] = PooledRows(slots, starts, counts, tuple(_pooled(each[3]) for each in self._pooled))
        given = plan.epoch, plan.step, self.tokens, gens
        return StepOutput(*given, drafts_ready=self._ready, errors=tuple(self.errors), **found)


def _likely(tokens: npt.NDArray[np.int32]) -> tuple[Any, Any, Any]:
    chosen = -(tokens % 64).astype(np.float32) / 8
    others = np.arange(8, dtype=np.int32)
    return chosen, tokens[:, None] + others, chosen[:, None] - others.astype(np.float32)


def _check_likely(name: str, tokens: Sequence[int], got: Any, top: int) -> None:
    require(got is not None and len(got) == len(tokens), "4", f"{name} has no log-probability for each token")
    chosen, ids, likely = (each.tolist() for each in _likely(np.array(tokens, np.int32)))
    for at, each in enumerate(got):
        right = chosen[at], tuple(ids[at][:top]), tuple(likely[at][:top])
        require((each.logprob, each.top_ids, each.top) == right, "4", f"{name}: expected {right} at {at}, got {each}")


def _pooled(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return np.array([(tokens % 7).sum(), len(tokens)], np.float32)


class TimedTiers:
    """KV outside the device, other workers and a compiler: operations end in simulated time."""

    def __init__(self, device: HashingDevice, room: int) -> None:
        """`room` is that of the store, in blocks."""
        self.figures = Counter[str]()
        self.load_seconds = _BLOCK_SECONDS
        """Time to load a block."""
        self.begun = Counter[type]()
        """Effects by kind."""
        self.awaited = set[str]()
        """Requests whose KV was loaded, or fetched."""
        self._device, self._room, self._numbers = device, room, itertools.count()
        self._values: OrderedDict[bytes, npt.NDArray[np.uint64]] = OrderedDict()
        self._due: list[tuple[float, int, operations.Effect]] = []

    def begin(self, now: float, effects: Iterable[operations.Effect]) -> None:
        for effect in effects:
            kind = type(effect)
            self.begun[kind] += 1
            if isinstance(effect, operations.Load | operations.Fetch):
                self.awaited.add(effect.request_id)
            blocks = len(getattr(effect, "blocks", getattr(effect, "keys", ())))
            self.figures[f"blocks to {kind.__name__.lower()}"] += blocks
            computed = effect.job.num_tokens if isinstance(effect, operations.Fetch) else 0
            each = self.load_seconds if kind is operations.Load else _BLOCK_SECONDS
            due = now + TOKEN_SECONDS * computed + _SECONDS.get(kind, each * blocks)
            heapq.heappush(self._due, (due, next(self._numbers), effect))

    @property
    def next(self) -> float:
        """Return the time of the next end, or infinity."""
        return self._due[0][0] if self._due else float("inf")

    def ended(self, now: float) -> Iterator[operations.Completion]:
        while self.next <= now:
            if (completion := self._end(heapq.heappop(self._due)[2])) is not None:
                yield completion

    def _end(self, effect: operations.Effect) -> operations.Completion | None:
        cells, values = self._device.content, self._values
        match effect:
            case operations.Lookup(number, keys=keys):
                found = sum(1 for _ in itertools.takewhile(values.__contains__, keys))
                return operations.Found(number, found // 2, found)
            case operations.Save(number, keys=keys, blocks=blocks):
                for key, block in zip(keys, blocks.tolist(), strict=True):
                    values[key] = cells[block].copy()
                    values.move_to_end(key)
                while len(values) > self._room:
                    values.popitem(last=False)
                return operations.Saved(number, len(keys), host=len(keys))
            case operations.Load(number, keys=keys, blocks=blocks):
                cells[blocks] = 0
                held = [*itertools.takewhile(values.__contains__, keys)]
                for key, block in zip(held, blocks.tolist(), strict=False):
                    cells[block] = values[key]
                    values.move_to_end(key)
                return operations.Loaded(number, len(held), len(held) // 2)
            case operations.Fetch(number):
                cells[effect.blocks] = 0
                if effect.job.num_tokens % 7 == 0:
                    return operations.Fetched(number, "lost", reason="the peer has left")
                for request, block, span in self._wanted(effect.request_id, effect.job, 0, effect.blocks):
                    cells[block, : len(span)] = request.hashes[span.start : span.stop] + self._device.weights
                return operations.Fetched(number, "transferred")
            case operations.Send(number):
                job = self._device.known[effect.lease].spec.prefill_job
                assert job is not None
                for request, block, span in self._wanted(effect.lease, job, effect.first, effect.blocks):
                    self._device.check_cells(request, span.start, cells[block, : len(span)], "sends KV that")
                return operations.Sent(number)
            case operations.CompileGrammar(number):
                return operations.GrammarReady(number)
        return None

    def _wanted(
        self, name: str, job: PrefillJob, first: int, blocks: npt.NDArray[np.int32]
    ) -> Iterator[tuple[DayRequest, int, range]]:
        """Yield the blocks of a prompt from the `first` wanted one on, and the positions in them."""
        size, limits = self._device.limits.block_size, self._device.limits
        entries = [entry for entry, _ in wanted_blocks(job, limits.groups, size)][first:]
        for entry, block in zip(entries, blocks.tolist(), strict=False):
            span = range(entry * size, min((entry + 1) * size, job.num_tokens))
            yield self._device.known[name], block, span
