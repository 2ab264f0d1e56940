"""Sampling, logit adjustments and draft verification in Paddle, without waiting for the device; see `Ops`.

Paddle promotes no integers and knows no empty scatter, hence the casts and the looks at shapes.
"""

from __future__ import annotations

from fd_core.ops.contract import Array, SampleInput
from fd_core.ops.numpy_sampling import WEIGHT_ONE
from fd_core.ops.paddle_library import paddle
from fd_core.ops.philox import random_bits
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID

__all__ = ["PaddleSampling"]


class PaddleSampling:
    """The part of a Paddle pack that works on logits and token ids."""

    def sample(self, logits: Array, rows: SampleInput) -> Array:
        """Choose a token for each row."""
        likeliest = paddle.argmax(logits, axis=1)
        if rows.all_greedy:
            return likeliest.astype("int32")
        greedy = rows.temperature == 0.0
        temperature = paddle.where(greedy, paddle.ones_like(rows.temperature), rows.temperature).astype("float64")
        scores = logits.astype("float64")
        scores = (scores - scores.max(axis=1, keepdim=True)) / temperature.unsqueeze(1)
        weights = paddle.round(paddle.exp(scores) * WEIGHT_ONE)
        if rows.any_filter:
            weights = _filtered(logits, weights, rows)
        cumulative = paddle.cumsum(weights, axis=1)
        uniform = random_bits(rows.seeds, rows.positions.astype("int64")).astype("float64") * 2.0**-24
        drawn = (cumulative <= (uniform * cumulative[:, -1]).unsqueeze(1)).astype("int64").sum(axis=1)
        return paddle.where(greedy, likeliest, drawn).astype("int32")

    def add_at(self, logits: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Add values to single logits."""
        if rows.shape[0] == 0:
            return logits
        return paddle.scatter_nd_add(logits, paddle.stack([rows, ids], axis=1), values)

    def repetition_at(self, logits: Array, rows: Array, ids: Array, penalties: Array) -> Array:
        """Apply repetition penalties to single logits."""
        if rows.shape[0] == 0:
            return logits
        places = rows.astype("int64") * logits.shape[1] + ids.astype("int64")
        flat = logits.flatten()
        chosen = paddle.index_select(flat, places)
        changed = paddle.where(chosen > 0, chosen / penalties, chosen * penalties)
        return paddle.scatter(flat, places, changed).reshape(logits.shape)

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the chosen tokens, and the most likely tokens with theirs."""
        logarithms = logits - paddle.logsumexp(logits, axis=1, keepdim=True)
        chosen = paddle.take_along_axis(logarithms, tokens.astype("int64").unsqueeze(1), axis=1)[:, 0]
        top_ids = _by_logit(logits)[:, :top_n]
        return chosen, top_ids.astype("int32"), paddle.take_along_axis(logarithms, top_ids, axis=1)

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        """Count the drafts that equal what was sampled in their place, up to the first that does not."""
        k = drafts.shape[1]
        places = paddle.arange(k, dtype="int32", device=drafts.place)
        right = (sampled[:, :k] == drafts) & (places < num_drafts.unsqueeze(1))
        return paddle.cumprod(right.astype("int32"), dim=1).sum(axis=1).astype("int32")

    def postprocess(self, sampled: Array, accepted: Array, slots: Array, taken_back: Array, max_num_seqs: int) -> Array:
        """Build the token matrix of the step."""
        rows, width = sampled.shape
        matrix = paddle.full([max_num_seqs, width], EMPTY_TOKEN_ID, "int32", device=sampled.place)
        if rows:
            delivered = paddle.arange(width, dtype="int32", device=sampled.place) <= accepted.unsqueeze(1)
            empty = paddle.full_like(sampled, EMPTY_TOKEN_ID)
            matrix = paddle.scatter(matrix, slots, paddle.where(delivered, sampled, empty))
        if taken_back.shape[0]:
            released = paddle.full_like(taken_back, PREEMPTED_TOKEN_ID)
            matrix = paddle.scatter(matrix.flatten(), taken_back * width, released).reshape(matrix.shape)
        return matrix


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
