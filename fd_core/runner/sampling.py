"""Sampling parameters of the slots, and the way from logits to tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Ops, SampleInput
from fd_core.runner.bans import Bans
from fd_core.runner.penalties import Penalties
from fd_core.runner.slot_grammars import Masks
from fd_core.types import Admission, IntArray

__all__ = ["Sampled", "Sampler"]

_FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen from R rows of logits, still on the device."""

    tokens: Array
    """int32[R]"""
    peaks: Array
    """float32[R], not finite where no token could be chosen; see `Ops.sample`."""
    scored: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """[r] on the host: rows whose request asked for log-probabilities."""
    scores: tuple[Array, ...] = ()
    """What `Ops.logprobs` returned for the unchanged logits of those rows; empty if there are none."""


@dataclass(slots=True)
class _Extras:
    """What only some requests need: single logits to be changed."""

    free_from: int
    """Position of the first token that may end the text, after `min_tokens` others."""
    stops: IntArray
    """Tokens that may not come before."""
    bias_ids: IntArray
    bias: npt.NDArray[np.float32]
    bans: Bans


class Sampler:
    """Columns over slots; a row's result depends on its own request only."""

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._logprobs = np.full(num_slots, -1, np.int32)
        """Alternatives wanted; -1 for a request that wants no log-probabilities."""
        self._penalties = Penalties(ops, num_slots, vocab_size)
        self._extras: dict[int, _Extras] = {}
        self._allowed: dict[int, IntArray] = {}
        """Bits of the tokens that may be chosen, as `Ops.mask_logits` takes them."""
        self._known: tuple[bytes, SampleInput] | None = None
        """What `Ops.sample` was told last and of which slots: most steps sample for those of the step before."""

    def admit(self, admission: Admission) -> None:
        """Remember the parameters of a new residency. Raises `ValueError` for token ids outside the vocabulary."""
        slot, params = admission.slot, admission.params
        self._known = None
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = params.seed
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._penalties.admit(admission)
        self._extras.pop(slot, None)
        if params.logit_bias or params.min_tokens or params.bad_words_token_ids:
            bias = params.logit_bias or {}
            ends = {*params.stop_token_ids, *admission.eos_token_ids}
            self._require_known("logit_bias", bias)
            self._require_known("bad_words_token_ids", chain.from_iterable(params.bad_words_token_ids))
            self._extras[slot] = _Extras(
                free_from=admission.prompt_len + params.min_tokens,
                # What is not in the vocabulary is never sampled and need not be forbidden.
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

    def extend(self, slots: IntArray, tokens: IntArray, accepted: IntArray) -> None:
        """Take note of delivered tokens: int32[N, 1 + k], of which row i keeps the first 1 + accepted[i]."""
        self._penalties.extend(slots, tokens, accepted)

    def sample(
        self,
        logits: Array,
        slots: IntArray,
        positions: IntArray,
        columns: IntArray,
        tokens: IntArray,
        masks: Masks | None = None,
    ) -> Sampled:
        """Choose a token for each row.

        `logits` float32[R, V] of the pack may be overwritten; `slots` int32[R]; `positions` int32[R] is the position
        of the token being chosen, which is how many tokens come before it; `tokens` int32[num_slots, *] holds those,
        drafts included; `columns` int32[R] is where the choice stands in the token matrix. `masks` say what rows may
        yield, whatever else changes their logits; log-probabilities are those of the model, without masks.
        """
        ops = self._ops
        wanted = (self._logprobs[slots] >= 0).nonzero()[0]
        raw = ops.gather_rows(logits, ops.from_host(wanted.astype(np.int32))) if len(wanted) else None
        logits = self._penalties.apply(logits, slots, positions, columns, tokens)
        if self._extras:
            logits = self._adjust(logits, slots, positions, tokens)
        if self._allowed:
            logits = self._mask(logits, slots)
        if masks is not None and len(masks.rows):
            logits = ops.mask_logits(logits, ops.from_host(masks.rows), ops.from_host(masks.bits))
        chosen, peaks = ops.sample(logits, self._rows(slots, positions))
        if raw is None:
            return Sampled(chosen, peaks)
        rows = ops.gather_rows(chosen, ops.from_host(wanted.astype(np.int32)))
        top_n = int(self._logprobs[slots[wanted]].max())
        return Sampled(chosen, peaks, wanted, ops.logprobs(raw, rows, top_n))

    def _rows(self, slots: IntArray, positions: IntArray) -> SampleInput:
        ops, key = self._ops, slots.tobytes()
        if self._known is not None and self._known[0] == key:
            return replace(self._known[1], positions=ops.from_host(positions))
        temperature, top_k = self._temperature[slots], self._top_k[slots]
        top_p, min_p = self._top_p[slots], self._min_p[slots]
        random = temperature > 0
        rows = SampleInput(
            temperature=ops.from_host(temperature),
            top_k=ops.from_host(top_k),
            top_p=ops.from_host(top_p),
            min_p=ops.from_host(min_p),
            seeds=ops.from_host(self._seeds[slots]),
            positions=ops.from_host(positions),
            all_greedy=not random.any(),
            any_filter=bool((random & ((top_k > 0) | (top_p < 1) | (min_p > 0))).any()),
        )
        self._known = key, rows
        return rows

    def _adjust(self, logits: Array, slots: IntArray, positions: IntArray, tokens: IntArray) -> Array:
        """Apply logit_bias, min_tokens and banned sequences."""
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
        if not rows:
            return logits
        host = self._ops.from_host
        return self._ops.add_at(logits, *(host(np.concatenate(parts)) for parts in (rows, ids, values)))

    def _mask(self, logits: Array, slots: IntArray) -> Array:
        """Apply allowed_token_ids."""
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._allowed]
        if not rows:
            return logits
        bits = np.stack([self._allowed[slot] for slot in slots[rows].tolist()])
        return self._ops.mask_logits(logits, self._ops.from_host(np.array(rows, np.int32)), self._ops.from_host(bits))

    def _require_known(self, field: str, tokens: Iterable[int]) -> None:
        """Raise `ValueError` for a token outside the vocabulary: on the device it would write beyond its row."""
        for token in tokens:
            if token not in range(self._vocab_size):
                raise ValueError(f"{field} names token {token} of a vocabulary of {self._vocab_size}")
