"""Sampling parameters of the slots, and sampling of tokens from logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Ops, PenaltyInput, SampleInput
from fd_core.runner.sampling.grammars import Masks
from fd_core.types import Admission, IntArray

Counting = tuple[Array, Array, Array]
"""Rows of counts, rows of the counted tokens, and twos: int32[n] each."""

_FEWEST_ROWS = 8


class Penalties:
    """Penalty parameters by slot, and one row of token counts per slot whose request has penalties.

    A row needs 4 bytes per token of the vocabulary. Rows are allocated on demand, doubling each time, and a slot keeps
    its row until its next request is admitted.
    """

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._repetition = np.ones(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._row_of = np.full(num_slots, -1, np.int32)
        """Row of counts of each slot; -1 for a request without penalties."""
        self._free: list[int] = []
        self.num_rows = 0
        """Rows of counts; while it is 0, no request has had penalties and all methods below but `admit` are no-ops."""
        self._counts: Array = None
        """int32[num_rows, V] as `PenaltyInput.counts`."""

    def admit(self, admission: Admission) -> None:
        """Count the tokens of a new request; discard those of the previous one."""
        slot, params = admission.slot, admission.params
        if self._row_of[slot] >= 0:
            self._free.append(int(self._row_of[slot]))
            self._row_of[slot] = -1
        if not params.penalized:
            return
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        prompt, generated = np.split(admission.token_ids, [admission.prompt_len])
        counts = 2 * np.bincount(generated, minlength=self._vocab_size).astype(np.int32)
        counts[prompt] |= 1
        row = self._take_row()
        self._row_of[slot] = row
        self._counts = self._ops.write_rows(self._counts, *self._ops.upload([np.array([row], np.int32), counts[None]]))

    def extend(self, slots: IntArray, tokens: IntArray, accepted: IntArray) -> None:
        """Count the delivered tokens: the first 1 + accepted[i] of row i of int32[N, 1 + k]."""
        rows = self._row_of[slots]
        kept = (np.arange(tokens.shape[1]) <= accepted[:, None]) & (rows >= 0)[:, None]
        ids = tokens[kept]
        if len(ids):
            rows = np.repeat(rows, kept.sum(axis=1))
            self._add(*self._ops.upload([rows, ids, np.full(len(ids), 2, np.int32)]))

    def counting(self, slots: IntArray) -> Counting | None:
        """Return the host arguments of `count` for one token per slot of `slots`; None if no slot has penalties."""
        penalized = (self._row_of[slots] >= 0).nonzero()[0].astype(np.int32)
        if not len(penalized):
            return None
        return self._row_of[slots[penalized]], penalized, np.full(len(penalized), 2, np.int32)

    def count(self, counting: Counting, tokens: Array) -> None:
        """Count tokens int32[N] on the device, one per slot of `counting`."""
        rows, penalized, twos = counting
        self._add(rows, self._ops.gather_rows(tokens, penalized), twos)

    def gather(self, slots: IntArray, positions: IntArray, columns: IntArray, tokens: IntArray) -> PenaltyInput | None:
        """Return the host arguments of `apply`, except counts, for R rows of logits; None if no row has penalties.

        See `Sampler.gather` for the arguments. The token in column c of a slot follows c drafts, which stand in
        `tokens` before its position.
        """
        rows = (self._row_of[slots] >= 0).nonzero()[0].astype(np.int32)
        if not len(rows):
            return None
        slots, columns = slots[rows], columns[rows]
        draft_rows = np.repeat(np.arange(len(rows), dtype=np.int32), columns)
        offsets = np.arange(len(draft_rows)) - (np.cumsum(columns) - columns)[draft_rows]
        places = (positions[rows] - columns)[draft_rows] + offsets
        return PenaltyInput(
            rows=rows,
            counts=None,
            counts_rows=self._row_of[slots],
            draft_rows=draft_rows,
            draft_ids=tokens[slots[draft_rows], places],
            repetition=self._repetition[slots],
            presence=self._presence[slots],
            frequency=self._frequency[slots],
        )

    def apply(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Apply penalties to the logits of their rows; `penalties` is the uploaded result of `gather`."""
        return self._ops.penalize(logits, replace(penalties, counts=self._counts))

    def _add(self, rows: Array, ids: Array, twos: Array) -> None:
        self._counts = self._ops.add_at(self._counts, rows, ids, twos)

    def _take_row(self) -> int:
        """Return a free row of counts with undefined content."""
        if not self._free:
            old, new = self.num_rows, min(max(2 * self.num_rows, _FEWEST_ROWS), len(self._row_of))
            if old:
                self._counts = self._ops.gather_rows(
                    self._counts, self._ops.from_host(np.arange(new, dtype=np.int32) % old)
                )
            else:
                self._counts = self._ops.from_host(np.zeros((new, self._vocab_size), np.int32))
            self._free = list(range(new - 1, old - 1, -1))
            self.num_rows = new
        return self._free.pop()


_FORBIDDEN = np.float32(-np.inf)
_NO_PENALTIES = 1.0, 0.0, 0.0


class Bans:
    """Banned sequences of one request. The next banned tokens depend only on the generated text."""

    def __init__(self, sequences: Iterable[tuple[int, ...]], begin: int) -> None:
        """`begin` is the position after the prompt, where the generated text begins."""
        self._begin = begin
        self._always: list[int] = []
        self.after_token: dict[int, list[tuple[list[int], int]]] = {}
        """By the second to last token: the sequence without its last token, and that token."""
        for *before, last in sequences:
            if before:
                self.after_token.setdefault(before[-1], []).append((before, last))
            else:
                self._always.append(last)

    def at(self, position: int, tokens: IntArray) -> IntArray:
        """Return the tokens int32[n] that are banned at `position`, given the preceding `tokens`."""
        banned = self._always
        if self.after_token and position > self._begin:
            banned = banned + [
                last
                for before, last in self.after_token.get(int(tokens[position - 1]), ())
                if position - len(before) >= self._begin
                and tokens[position - len(before) : position].tolist() == before
            ]
        return np.array(banned, np.int32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens sampled from R rows of logits, on the device."""

    tokens: Array
    """int32[R]"""
    peaks: Array
    """float32[R], not finite if no token could be sampled; see `Ops.sample`."""
    scored: list[int]
    """Rows that return log-probabilities."""
    scores: tuple[Array, ...] = ()
    """Result of `Ops.logprobs` for the unchanged logits of those rows; empty if there are none."""


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """Inputs for sampling R rows, except logits: gathered on the host, then uploaded."""

    key: bytes
    """The slots, if the next step of the same slots can reuse the inputs; empty if rows follow drafts."""
    rows: SampleInput
    penalties: PenaltyInput | None
    counting: Counting | None
    """Token counts for penalties; None also if rows follow drafts, some of which may be rejected."""
    added: tuple[Array, Array, Array] | None
    """Rows, tokens and addends of their logits: arguments of `Ops.add_at`."""
    allowed: tuple[Array, Array] | None
    """Rows and bits: arguments of `Ops.mask_logits`."""
    scored: Array | None
    """int32[r], rows that return log-probabilities."""
    scored_rows: list[int]
    """The same, for the host."""
    top_n: int
    """Number of alternatives of those rows."""


@dataclass(slots=True)
class _Extras:
    """Adjustments of single logits, which only some requests have."""

    free_from: int
    """Position of the first token that may end the text, after `min_tokens`."""
    stops: IntArray
    """Tokens that are forbidden before `free_from`."""
    bias_ids: IntArray
    bias: npt.NDArray[np.float32]
    bans: Bans


class Sampler:
    """Sampling parameters by slot; a row's result depends only on its request."""

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._logprobs = np.full(num_slots, -1, np.int32)
        """Number of alternatives; -1 for a request without log-probabilities."""
        self.penalties = Penalties(ops, num_slots, vocab_size)
        self._extras: dict[int, _Extras] = {}
        self._allowed: dict[int, IntArray] = {}
        """Bits of the allowed tokens, as `Ops.mask_logits` expects them."""
        self._known: SamplingWork | None = None
        """Latest inputs on the device: most steps sample for the slots of the previous step."""

    def emptied(self) -> Sampler:
        """Return a sampler of the same size without requests."""
        return Sampler(self._ops, len(self._temperature), self._vocab_size)

    def admit(self, admission: Admission) -> None:
        """Store the parameters of a new request. Raises `ValueError` for token ids outside the vocabulary."""
        slot, params = admission.slot, admission.params
        self._known = None
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = params.seed
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        if penalties != _NO_PENALTIES or self.penalties.num_rows:
            self.penalties.admit(admission)
        self._extras.pop(slot, None)
        if params.logit_bias or params.min_tokens or params.bad_words_token_ids:
            bias = params.logit_bias or {}
            ends = {*params.stop_token_ids, *admission.eos_token_ids}
            self._require_known("logit_bias", bias)
            self._require_known("bad_words_token_ids", chain.from_iterable(params.bad_words_token_ids))
            self._extras[slot] = _Extras(
                free_from=admission.prompt_len + params.min_tokens,
                # Ids outside the vocabulary are never sampled and need not be banned.
                stops=np.array([token for token in ends if token in range(self._vocab_size)], np.int32),
                bias_ids=np.array(list(bias), np.int32),
                bias=np.array(list(bias.values()), np.float32),
                bans=Bans(params.bad_words_token_ids, admission.prompt_len),
            )

        self._allowed.pop(slot, None)
        if params.allowed_token_ids is not None:
            self._require_known("allowed_token_ids", params.allowed_token_ids)
            allowed = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
            allowed[list(params.allowed_token_ids)] = True
            self._allowed[slot] = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)

    def reads_text(self, slots: IntArray) -> bool:
        """Return True if sampling for one of `slots` depends on tokens of its text, other than through counts."""
        readers = [slot for slot, extras in self._extras.items() if extras.bans.after_token]
        return bool(readers) and bool(np.isin(readers, slots).any())

    def gather(self, slots: IntArray, positions: IntArray, columns: IntArray, tokens: IntArray) -> SamplingWork:
        """Return the inputs of `sample` for R rows, at least one; on the host, or reused from the device.

        `slots` int32[R]; `positions` int32[R] is the position of the sampled token, equal to the number of tokens
        before it; `tokens` int32[num_slots, *] holds those, including drafts; `columns` int32[R] is the column in the
        token matrix.
        """
        added = self._added(slots, positions, tokens) if self._extras else None
        known, key = self._known, slots.tobytes()
        if known is not None and known.key == key:
            return replace(known, rows=replace(known.rows, positions=positions), added=added)
        temperature, top_k = self._temperature[slots], self._top_k[slots]
        top_p, min_p = self._top_p[slots], self._min_p[slots]
        random = temperature > 0
        drafted = bool(columns.any())
        penalties = counting = None
        if self.penalties.num_rows:
            penalties = self.penalties.gather(slots, positions, columns, tokens=tokens)
            counting = None if drafted else self.penalties.counting(slots)
        wanted = self._logprobs[slots]
        scored = (wanted >= 0).nonzero()[0]
        all_greedy = not np.count_nonzero(random)
        return SamplingWork(
            key=b"" if drafted else key,
            rows=SampleInput(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seeds=self._seeds[slots],
                positions=positions,
                all_greedy=all_greedy,
                any_filter=not all_greedy and bool((random & ((top_k > 0) | (top_p < 1) | (min_p > 0))).any()),
            ),
            penalties=penalties,
            counting=counting,
            added=added,
            allowed=self._bits(slots) if self._allowed else None,
            scored=scored.astype(np.int32) if len(scored) else None,
            scored_rows=scored.tolist(),
            top_n=int(wanted.max()),
        )

    def sample(self, logits: Array, work: SamplingWork, masks: Masks | None = None) -> Sampled:
        """Sample a token per row, and count those that do not follow drafts.

        `logits` float32[R, V] of the pack may be overwritten; `work` is the uploaded result of `gather`. `masks`
        override all other changes of logits; log-probabilities are the model's, without masks.
        """
        ops = self._ops
        if work.key:
            self._known = work
        raw = None if work.scored is None else ops.gather_rows(logits, work.scored)
        if work.penalties is not None:
            logits = self.penalties.apply(logits, work.penalties)
        if work.added is not None:
            logits = ops.add_at(logits, *work.added)
        if work.allowed is not None:
            logits = ops.mask_logits(logits, *work.allowed)
        if masks is not None and len(masks.rows):
            logits = ops.mask_logits(logits, *ops.upload([masks.rows, masks.bits]))
        chosen, peaks = ops.sample(logits, work.rows)
        if work.counting is not None:
            self.penalties.count(work.counting, chosen)
        if raw is None:
            return Sampled(chosen, peaks, work.scored_rows)
        return Sampled(
            chosen, peaks, work.scored_rows, scores=ops.logprobs(raw, ops.gather_rows(chosen, work.scored), work.top_n)
        )

    def _added(
        self, slots: IntArray, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray, npt.NDArray[np.float32]] | None:
        """Return the addends of logit_bias, min_tokens and banned sequences."""
        rows: list[IntArray] = []
        ids: list[IntArray] = []
        values: list[npt.NDArray[np.float32]] = []

        def add(row: int, tokens: IntArray, added: npt.NDArray[np.float32]) -> None:
            rows.append(np.full(len(tokens), row, np.int32))
            ids.append(tokens)
            values.append(added)

        for row, slot in enumerate(slots.tolist()):
            extras = self._extras.get(slot)
            if extras is None:
                continue
            if len(extras.bias_ids):
                add(row, extras.bias_ids, extras.bias)
            forbidden = extras.bans.at(int(positions[row]), tokens[slot])
            if positions[row] < extras.free_from:
                forbidden = np.concatenate((forbidden, extras.stops))
            if len(forbidden):
                add(row, forbidden, np.full(len(forbidden), _FORBIDDEN))
        return (np.concatenate(rows), np.concatenate(ids), np.concatenate(values)) if rows else None

    def _bits(self, slots: IntArray) -> tuple[IntArray, IntArray] | None:
        """Return the masks of allowed_token_ids."""
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._allowed]
        if not rows:
            return None
        return np.array(rows, np.int32), np.stack([self._allowed[slot] for slot in slots[rows].tolist()])

    def _require_known(self, field: str, tokens: Iterable[int]) -> None:
        """Raise `ValueError` for a token outside the vocabulary, which would write out of bounds on the device."""
        for token in tokens:
            if token not in range(self._vocab_size):
                raise ValueError(f"{field} has token {token}, which exceeds the vocabulary of {self._vocab_size}")
