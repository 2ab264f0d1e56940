"""Sampling, logit adjustments and draft verification in Paddle, without waiting for the device; see `Ops`.

Paddle promotes no integers and knows no empty scatter, hence the casts and the looks at shapes.
"""

from __future__ import annotations

from fd_core.ops.contract import Array, PenaltyInput, SampleInput
from fd_core.ops.numpy_sampling import WEIGHT_ONE
from fd_core.ops.paddle_library import paddle
from fd_core.ops.philox import random_bits

__all__ = ["PaddleSampling"]


_CACHED_CELLS = 2**16
"""Logits that are penalized at a time on a processor: intermediate results then stay in its cache."""
_DEVICE_CELLS = 2**23
"""The same elsewhere, where it only limits the memory that is taken meanwhile."""


class PaddleSampling:
    """The part of a Paddle pack that works on logits and token ids."""

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Choose a token for each row."""
        likeliest = paddle.argmax(logits, axis=1)
        peaks = logits.max(axis=1)
        if rows.all_greedy:
            return likeliest.astype("int32"), peaks
        greedy = rows.temperature == 0.0
        temperature = paddle.where(greedy, paddle.ones_like(rows.temperature), rows.temperature).astype("float64")
        scores = (logits.astype("float64") - peaks.astype("float64").unsqueeze(1)) / temperature.unsqueeze(1)
        weights = paddle.round(paddle.exp(scores) * WEIGHT_ONE)
        if rows.any_filter:
            weights = _filtered(logits, weights, rows)
        cumulative = paddle.cumsum(weights, axis=1)
        uniform = random_bits(rows.seeds, rows.positions.astype("int64")).astype("float64") * 2.0**-24
        drawn = (cumulative <= (uniform * cumulative[:, -1]).unsqueeze(1)).astype("int64").sum(axis=1)
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

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the chosen tokens, and the most likely tokens with theirs."""
        # Paddle's `logsumexp` adds up in float32, one after the other: over 140,000 tokens it is off by 4e-4.
        peaks = logits.max(axis=1, keepdim=True)
        total = paddle.exp(logits - peaks).sum(axis=1, keepdim=True, dtype="float64")
        logarithms = logits - peaks - paddle.log(total).astype("float32")
        chosen = paddle.take_along_axis(logarithms, tokens.astype("int64").unsqueeze(1), axis=1)[:, 0]
        top_ids = _by_logit(logits)[:, :top_n]
        return chosen, top_ids.astype("int32"), paddle.take_along_axis(logarithms, top_ids, axis=1)

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


def _filtered(logits: Array, weights: Array, rows: SampleInput) -> Array:
    """Return the weights [R, V] with 0 for the tokens that top_k, top_p or min_p leave out."""
    vocab = logits.shape[1]
    order = _by_logit(logits)
    ranks = paddle.arange(vocab, dtype="int32", device=logits.place)
    kept = paddle.take_along_axis(weights, order, axis=1)
    limits = paddle.where(rows.top_k > 0, rows.top_k, paddle.full_like(rows.top_k, vocab))
    kept = kept * (ranks < limits.unsqueeze(1)).astype("float64")
    before = paddle.cumsum(kept, axis=1) - kept
    mass = kept.sum(axis=1) * rows.top_p.astype("float64")
    kept = kept * ((before < mass.unsqueeze(1)) | (ranks == 0)).astype("float64")
    kept = kept * (kept >= (rows.min_p.astype("float64") * WEIGHT_ONE).unsqueeze(1)).astype("float64")
    return paddle.put_along_axis(paddle.zeros_like(weights), order, kept, axis=1)


def _by_logit(logits: Array) -> Array:
    """Return the token ids int64[R, V] by falling logit, the lower id first on a tie."""
    return paddle.argsort(logits, axis=1, descending=True, stable=True)
