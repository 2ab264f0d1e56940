"""Sampling, logit adjustments and draft verification in Paddle, without waiting for the device; see `Ops`.

Paddle promotes no integers and knows no empty scatter, hence the casts and the looks at shapes. Sums are int64: a
weight is an integer, and devices without sums of float64 are common. Only the exponential is float64, by element.
"""

from __future__ import annotations

import math

from fd_core.ops.contract import Array, PenaltyInput, SampleInput
from fd_core.ops.numpy.sampling import WEIGHT_ONE
from fd_core.ops.paddle.framework import paddle
from fd_core.ops.philox import random_bits

_CACHED_CELLS = 2**16
"""Logits that are penalized at a time on a processor: intermediate results then stay in its cache."""
_DEVICE_CELLS = 2**23
"""The same elsewhere, where it only limits the memory that is taken meanwhile."""


_SHARE_ONE = 2.0**40
"""Of the most likely token when probabilities are summed: what each loses below it is less than 1e-6 of all of them."""
_INFINITY = 0x7F800000
"""The bits of float32's infinity: as many numbers lie above 0."""


class PaddleSampling:
    """The part of a Paddle pack that works on logits and token ids."""

    longest_sort: int | None
    """Entries that the device sorts at once; None for any number."""

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Choose a token for each row."""
        likeliest = paddle.argmax(logits, axis=1)
        peaks = logits.max(axis=1)
        if rows.all_greedy:
            return likeliest.astype("int32"), peaks
        greedy = rows.temperature == 0.0
        temperature = paddle.where(greedy, paddle.ones_like(rows.temperature), rows.temperature).astype("float64")
        scores = (logits.astype("float64") - peaks.astype("float64").unsqueeze(1)) / temperature.unsqueeze(1)
        weights = paddle.round(paddle.exp(scores) * WEIGHT_ONE).astype("int64")
        if rows.any_filter:
            filtered = _filtered_by_sorting if self.longest_sort is None else _filtered_by_search
            weights = filtered(logits, weights, rows)
        cumulative = paddle.cumsum(weights, axis=1)
        uniform = random_bits(rows.seeds, rows.positions.astype("int64")).astype("float64") * 2.0**-24
        threshold = (uniform * cumulative[:, -1].astype("float64")).astype("int64")  # an integer exceeds both or none
        drawn = (cumulative <= threshold.unsqueeze(1)).astype("int64").sum(axis=1)
        drawn = drawn.clip(max=logits.shape[1] - 1)  # of a row that is not finite
        return paddle.where(greedy, likeliest, drawn).astype("int32"), peaks

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Add values to single cells, in place."""
        return paddle.index_put_(x, (rows, ids), values, accumulate=True) if rows.shape[0] else x

    def write_rows(self, x: Array, rows: Array, values: Array) -> Array:
        """Overwrite rows, in place."""
        return paddle.scatter_(x, rows, values) if rows.shape[0] else x

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Apply repetition, presence and frequency penalties, in place."""
        if penalties.rows.shape[0] == 0:
            return logits
        counts = paddle.index_select(penalties.counts, penalties.counts_rows)
        counts = self.add_at(
            counts, penalties.draft_rows, penalties.draft_ids, paddle.full_like(penalties.draft_ids, 2)
        )
        columns = (
            penalties.repetition.unsqueeze(1),
            penalties.presence.astype("float64").unsqueeze(1),
            penalties.frequency.astype("float64").unsqueeze(1),
        )
        group = max((_CACHED_CELLS if logits.place.is_cpu_place() else _DEVICE_CELLS) // logits.shape[1], 1)
        for begin in range(0, counts.shape[0], group):
            part = slice(begin, begin + group)
            _penalize(logits, penalties.rows[part], counts[part], *(column[part] for column in columns))
        return logits

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        """Forbid tokens by packed bits, in place."""
        vocab = logits.shape[1]
        # Bit j of a word is set where the rest of a division by 2^(j + 1) is 2^j or more: XPU shifts no integers.
        powers = paddle.cumprod(paddle.full_like(paddle.arange(32, dtype="int64", device=logits.place), 2), dim=0)
        group = max((_CACHED_CELLS if logits.place.is_cpu_place() else _DEVICE_CELLS) // vocab, 1)
        for begin in range(0, rows.shape[0], group):
            part = slice(begin, begin + group)
            words = bits[part].astype("int64").unsqueeze(2)
            words = paddle.where(words < 0, words + 2**32, words)
            allowed = (words % powers * 2 >= powers).flatten(1)[:, :vocab]
            values = paddle.index_select(logits, rows[part])
            values = paddle.where(allowed, values, paddle.full_like(values, -math.inf))
            paddle.scatter_(logits, rows[part], values)
        return logits

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the chosen tokens, and the most likely tokens with theirs."""
        # Paddle's `logsumexp` adds up in float32, one after the other: over 140,000 tokens it is off by 4e-4.
        peaks = logits.max(axis=1, keepdim=True)
        shares = (paddle.exp(logits - peaks) * _SHARE_ONE).astype("int64")
        total = shares.sum(axis=1, keepdim=True).astype("float32") / _SHARE_ONE
        logarithms = logits - peaks - paddle.log(total)
        chosen = paddle.take_along_axis(logarithms, tokens.astype("int64").unsqueeze(1), axis=1)[:, 0]
        top_ids = _likeliest(logits, top_n, self.longest_sort)
        return chosen, top_ids.astype("int32"), paddle.take_along_axis(logarithms, top_ids, axis=1)

    def ranks(self, logits: Array, tokens: Array) -> Array:
        """Count the tokens that are more likely, and as likely with a lower id."""
        own = paddle.take_along_axis(logits, tokens.astype("int64").unsqueeze(1), axis=1)
        ids = paddle.arange(logits.shape[1], dtype="int32", device=logits.place)
        before = paddle.logical_and(logits == own, ids < tokens.unsqueeze(1))
        return paddle.logical_or(logits > own, before).astype("int32").sum(axis=1).astype("int32") + 1

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        """Count the drafts that equal what was sampled in their place, up to the first that does not."""
        k = drafts.shape[1]
        places = paddle.arange(k, dtype="int32", device=drafts.place)
        right = (sampled[:, :k] == drafts) & (places < num_drafts.unsqueeze(1))
        return paddle.cumprod(right.astype("int32"), dim=1).sum(axis=1).astype("int32")


def _penalize(logits: Array, rows: Array, counts: Array, repetition: Array, presence: Array, frequency: Array) -> None:
    """Penalize some rows, of which `counts` [n, V] are the counts with drafts."""
    values = paddle.index_select(logits, rows)
    changed = paddle.where(values > 0, values / repetition, values * repetition)
    values = paddle.where(counts != 0, changed, values)
    generated = counts // 2
    added = generated.astype("float64") * frequency + (generated > 0).astype("float64") * presence
    paddle.scatter_(logits, rows, values - added.astype("float32"))


def _filtered_by_sorting(logits: Array, weights: Array, rows: SampleInput) -> Array:
    """Return the weights int64[R, V] with 0 for the tokens that top_k, top_p or min_p leave out."""
    order = _by_logit(logits)
    ranks = paddle.arange(logits.shape[1], dtype="int64", device=logits.place)
    kept = paddle.take_along_axis(weights, order, axis=1)
    kept = kept * (ranks < _limits(logits, rows)).astype("int64")
    before = paddle.cumsum(kept, axis=1) - kept
    kept = kept * ((before < _mass(kept, rows)) | (ranks == 0)).astype("int64")
    return paddle.put_along_axis(paddle.zeros_like(weights), order, _without_unlikely(kept, rows), axis=1)


def _filtered_by_search(logits: Array, weights: Array, rows: SampleInput) -> Array:
    """Compute the same for a device that sorts no vocabulary."""
    ids = paddle.arange(logits.shape[1], dtype="int64", device=logits.place)
    first = ids == paddle.argmax(logits, axis=1).unsqueeze(1)
    kept = weights * _leading(logits, paddle.ones_like(weights), _limits(logits, rows)).astype("int64")
    kept = kept * (_leading(logits, kept, _mass(kept, rows)) | first).astype("int64")
    return _without_unlikely(kept, rows)


def _limits(logits: Array, rows: SampleInput) -> Array:
    """Return int64[R, 1], how many tokens top_k keeps."""
    vocab = paddle.full_like(rows.top_k, logits.shape[1])
    return paddle.where(rows.top_k > 0, rows.top_k, vocab).astype("int64").unsqueeze(1)


def _mass(kept: Array, rows: SampleInput) -> Array:
    """Return int64[R, 1]: top_p keeps a token if the weights before it sum to less."""
    return paddle.ceil(kept.sum(axis=1).astype("float64") * rows.top_p.astype("float64")).astype("int64").unsqueeze(1)


def _without_unlikely(kept: Array, rows: SampleInput) -> Array:
    """Return the weights with 0 for the tokens that min_p leaves out."""
    least = paddle.ceil(rows.min_p.astype("float64") * WEIGHT_ONE).astype("int64")
    return kept * (kept >= least.unsqueeze(1)).astype("int64")


def _leading(logits: Array, weights: Array, limits: Array) -> Array:
    """Return bool[R, V]: the tokens before which the weights int64[R, V] sum to less than `limits` int64[R, 1].

    Before a token are those with a larger logit, and of the same logit those with a lower id.
    """
    # The least number above which the logits weigh less than the limit is found bit by bit among all of float32.
    below = paddle.full_like(limits, -_INFINITY - 1)
    for bit in reversed(range(32)):
        place = below + 2**bit
        above = ((logits > _number_at(place)).astype("int64") * weights).sum(axis=1, keepdim=True)
        below = paddle.where(above < limits, below, place)
    number = _number_at(below + 1)
    greater, equal = logits > number, logits == number
    tied = equal.astype("int64") * weights
    before = (greater.astype("int64") * weights).sum(axis=1, keepdim=True) + paddle.cumsum(tied, axis=1) - tied
    return greater | (equal & (before < limits))


def _number_at(places: Array) -> Array:
    """Return the float32 numbers at places int64 in the order of all of them; 0 is at place 0."""
    negative = places < 0
    numbers = paddle.where(negative, -places, places).clip(max=_INFINITY).astype("int32").view("float32")
    return paddle.where(negative, -numbers, numbers)


def _by_logit(logits: Array) -> Array:
    """Return the token ids int64[R, V] by falling logit, the lower id first on a tie."""
    return paddle.argsort(logits, axis=1, descending=True, stable=True)


def _likeliest(logits: Array, count: int, longest_sort: int | None) -> Array:
    """Return the first `count` of them; part by part where the device does not sort them all."""
    vocab = logits.shape[1]
    if longest_sort is None or vocab <= longest_sort:
        return _by_logit(logits)[:, :count]
    begins = range(0, vocab, longest_sort)
    parts = [_by_logit(logits[:, begin : begin + longest_sort])[:, :count] + begin for begin in begins]
    ids = paddle.concat(parts, axis=1)
    best = _likeliest(paddle.take_along_axis(logits, ids, axis=1), count, longest_sort)
    return paddle.take_along_axis(ids, best, axis=1)
