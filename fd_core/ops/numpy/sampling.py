"""Sampling, logit adjustments and draft verification in numpy; specified by `Ops`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import PenaltyInput, SampleInput
from fd_core.ops.philox import uniform
from fd_core.types import IntArray

WEIGHT_ONE = 2.0**32
"""Weight of the most likely token; weights are integers held in float64, so that their sums are exact."""

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def rows_at_a_time(vocabulary: int, *, on_host: bool = True) -> int:
    """Return the number of rows to penalize at a time, to fit a CPU cache or bound the memory."""
    return max((2**16 if on_host else 2**23) // vocabulary, 1)


class NumpySampling:
    """The part of a numpy pack that works on logits and token ids."""

    def sample(self, logits: Floats, rows: SampleInput) -> tuple[IntArray, Floats]:
        """Choose a token for each row."""
        likeliest: IntArray = logits.argmax(axis=1).astype(np.int32)  # argmax returns the first NaN, if any
        peaks: Floats = logits[np.arange(len(logits)), likeliest]
        if rows.all_greedy:
            return likeliest, peaks
        with np.errstate(invalid="ignore"):  # a row without a finite peak
            cumulative = self.weights(logits, rows, peaks).cumsum(axis=1)
            threshold = uniform(rows.seeds, rows.positions).astype(np.float64) * cumulative[:, -1]
            drawn = (cumulative <= threshold[:, None]).sum(axis=1)
        chosen: IntArray = np.where(rows.temperature == 0.0, likeliest, drawn).astype(np.int32)
        return chosen, peaks

    def weights(self, logits: Floats, rows: SampleInput, peaks: Floats) -> Doubles:
        """Return the weight [R, V] of each token, 0 for those that top_k, top_p or min_p drop.

        `peaks` float32[R] are the largest logits. A greedy row gets weights as for temperature 1.
        """
        temperature = np.where(rows.temperature == 0.0, 1.0, rows.temperature).astype(np.float64)
        scores = logits.astype(np.float64)
        scores -= peaks[:, None]
        weights: Doubles = np.rint(WEIGHT_ONE * np.exp(scores / temperature[:, None]))
        return _filtered(logits, weights, rows) if rows.any_filter else weights

    def add_at(self, x: npt.NDArray[Any], rows: IntArray, ids: IntArray, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Add values to single cells, in place."""
        np.add.at(x, (rows, ids), values)
        return x

    def write_rows(self, x: IntArray, rows: IntArray, values: IntArray) -> IntArray:
        """Overwrite rows, in place."""
        x[rows] = values
        return x

    def penalize(self, logits: Floats, penalties: PenaltyInput) -> Floats:
        """Apply repetition, presence and frequency penalties, in place."""
        group = rows_at_a_time(logits.shape[1])
        for begin in range(0, len(penalties.rows), group):
            _penalize(logits, penalties, slice(begin, begin + group))
        return logits

    def mask_logits(self, logits: Floats, rows: IntArray, bits: IntArray) -> Floats:
        """Forbid tokens by packed bits, in place."""
        words = np.ascontiguousarray(bits, "<i4")
        for row, packed in zip(rows.tolist(), words, strict=True):
            allowed = np.unpackbits(packed.view(np.uint8), count=logits.shape[1], bitorder="little")
            np.copyto(logits[row], -np.inf, where=allowed == 0)
        return logits

    def logprobs(self, logits: Floats, tokens: IntArray, top_n: int) -> tuple[Floats, IntArray, Floats]:
        """Return log-probabilities of the chosen tokens, and the most likely tokens with theirs."""
        chosen, top = np.empty(len(logits), np.float32), np.empty((len(logits), top_n), np.float32)
        top_ids, group = np.empty((len(logits), top_n), np.int32), rows_at_a_time(logits.shape[1])
        for begin in range(0, len(logits), group):
            part = slice(begin, begin + group)
            top_ids[part] = _likeliest(logits[part], top_n)
            with np.errstate(invalid="ignore"):  # a row without a finite peak
                logarithms = logits[part] - logits[part].max(axis=1, keepdims=True)
                logarithms -= np.log(np.exp(logarithms).sum(axis=1, keepdims=True))
            chosen[part] = np.take_along_axis(logarithms, tokens[part, None].astype(np.int64), axis=1)[:, 0]
            top[part] = np.take_along_axis(logarithms, top_ids[part].astype(np.int64), axis=1)
        return chosen, top_ids, top

    def ranks(self, logits: Floats, tokens: IntArray) -> IntArray:
        """Count the tokens that are more likely, and as likely with a lower id."""
        own = np.take_along_axis(logits, tokens[:, None].astype(np.int64), axis=1)
        before = (logits == own) & (np.arange(logits.shape[1]) < tokens[:, None])
        ranks: IntArray = (1 + ((logits > own) | before).sum(axis=1)).astype(np.int32)
        return ranks

    def verify(self, sampled: IntArray, drafts: IntArray, num_drafts: IntArray) -> IntArray:
        """Count the drafts that equal what was sampled in their place, up to the first that does not."""
        k = drafts.shape[1]
        right = (sampled[:, :k] == drafts) & (np.arange(k) < num_drafts[:, None])
        accepted: IntArray = np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)
        return accepted


def _likeliest(logits: Floats, count: int) -> npt.NDArray[np.int64]:
    """Return the ids [R, count] of the largest logits, in falling order; the lower id first on a tie, NaN last."""
    negative = -logits
    found = np.empty((len(logits), count), np.int64)
    if count:
        last = np.partition(negative, count - 1, axis=1)[:, count - 1]  # sorting all would take ten times as long
        for row, values, least in zip(found, negative, last, strict=True):
            ids = (values <= least).nonzero()[0]
            ids = ids if len(ids) >= count else np.arange(len(values))  # a NaN is among them
            row[:] = ids[np.argsort(values[ids], kind="stable")[:count]]
    return found


def _penalize(logits: Floats, penalties: PenaltyInput, part: slice) -> None:
    counts = penalties.counts[penalties.counts_rows[part]]
    first, last = np.searchsorted(penalties.draft_rows, (part.start, part.start + len(counts)))
    np.add.at(counts, (penalties.draft_rows[first:last] - part.start, penalties.draft_ids[first:last]), 2)
    repetition, presence, frequency = (
        array[part, None] for array in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    # A penalty p yields the smaller one of logit / p and logit * p, or the larger one if p < 1. Written without
    # branches, because occurrences and signs are unpredictable.
    seen = counts != 0
    divisor = seen * repetition + ~seen * np.float32(1)
    values = logits[penalties.rows[part]]
    divided, multiplied = values / divisor, values * divisor
    values = np.where(repetition >= 1, np.minimum(divided, multiplied), np.maximum(divided, multiplied))
    generated = counts >> 1
    values -= (_double(presence) * (generated > 0) + _double(frequency) * generated).astype(np.float32)
    logits[penalties.rows[part]] = values


def _filtered(logits: Floats, weights: Doubles, rows: SampleInput) -> Doubles:
    """Return the weights [R, V] with 0 for the tokens that top_k, top_p or min_p drop."""
    order = np.argsort(-logits, axis=1, kind="stable")
    ranks = np.arange(logits.shape[1])
    kept: Doubles = np.take_along_axis(weights, order, axis=1)
    limits = np.where(rows.top_k > 0, rows.top_k, np.int32(logits.shape[1]))
    kept *= ranks < np.asarray(limits)[:, None]
    before = kept.cumsum(axis=1) - kept
    mass = kept.sum(axis=1) * _double(rows.top_p)
    kept *= (before < mass[:, None]) | (ranks == 0)
    kept *= kept >= (_double(rows.min_p) * WEIGHT_ONE)[:, None]
    result = np.zeros_like(weights)
    np.put_along_axis(result, order, kept, axis=1)
    return result


def _double(values: Any) -> Doubles:
    return np.asarray(values, np.float64)
