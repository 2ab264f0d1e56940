"""Sampling, logit adjustments and draft verification in torch, without synchronizing with the device; see `Ops`."""

from __future__ import annotations

import torch

from fd_core.ops.contract import Array, PenaltyInput, SampleInput
from fd_core.ops.numpy.sampling import WEIGHT_ONE, rows_at_a_time
from fd_core.ops.philox import random_bits


class TorchSampling:
    """The part of a torch pack that works on logits and token ids."""

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Choose a token for each row."""
        likeliest = logits.argmax(dim=1)  # argmax returns a NaN, if any
        peaks = logits.gather(1, likeliest[:, None])[:, 0]
        if rows.all_greedy:
            return likeliest.int(), peaks
        greedy = rows.temperature == 0.0
        temperature = torch.where(greedy, 1.0, rows.temperature).double()
        scores = logits.double().sub_(peaks[:, None]).div_(temperature[:, None])
        weights = scores.exp_().mul_(WEIGHT_ONE).round_()
        if rows.any_filter:
            weights = _filtered(logits, weights, rows)
        cumulative = weights.cumsum(dim=1)
        uniform = random_bits(rows.seeds, rows.positions.long()).double() * 2.0**-24
        drawn = (cumulative <= (uniform * cumulative[:, -1])[:, None]).sum(dim=1)
        return torch.where(greedy, likeliest, drawn).int(), peaks

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Add values to single cells, in place."""
        return x.index_put_((rows.long(), ids.long()), values, accumulate=True)

    def write_rows(self, x: Array, rows: Array, values: Array) -> Array:
        """Overwrite rows, in place."""
        return x.index_copy_(0, rows.long(), values.to(x.dtype))

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Apply repetition, presence and frequency penalties, in place."""
        counts = penalties.counts.index_select(0, penalties.counts_rows.long())
        drafts = penalties.draft_rows.long(), penalties.draft_ids.long()
        counts.index_put_(drafts, counts.new_full((len(drafts[0]),), 2), accumulate=True)
        columns = penalties.repetition, penalties.presence.double(), penalties.frequency.double()
        group = rows_at_a_time(logits.shape[1], on_host=logits.device.type == "cpu")
        for begin in range(0, len(counts), group):
            part = slice(begin, begin + group)
            _penalize(logits, penalties.rows[part].long(), counts[part], *(column[part, None] for column in columns))
        return logits

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        """Forbid tokens by packed bits, in place."""
        vocab = logits.shape[1]
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        group = rows_at_a_time(vocab, on_host=logits.device.type == "cpu")
        for begin in range(0, len(rows), group):
            part = slice(begin, begin + group)
            forbidden = (bits[part, :, None] >> places & 1).eq(0).flatten(1)[:, :vocab]
            chosen = rows[part].long()
            logits.index_copy_(0, chosen, logits.index_select(0, chosen).masked_fill_(forbidden, -torch.inf))
        return logits

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the chosen tokens, and the most likely tokens with theirs."""
        normalizer = logits.logsumexp(dim=1, keepdim=True)
        chosen = (logits.gather(1, tokens.long()[:, None]) - normalizer)[:, 0]
        if not top_n:  # sort keys of a vocabulary need several times the memory of its logits
            return chosen, tokens.new_empty((len(logits), 0), dtype=torch.int32), logits[:, :0]
        top_ids = _sort_keys(logits).topk(top_n, dim=1).values.neg().bitwise_and(0xFFFFFFFF)
        return chosen, top_ids.int(), logits.gather(1, top_ids) - normalizer

    def ranks(self, logits: Array, tokens: Array) -> Array:
        """Count the tokens that are more likely, and as likely with a lower id."""
        own = logits.gather(1, tokens.long()[:, None])
        before = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) < tokens[:, None]
        # Summed as int64, which is the default, the bits cost five times as much.
        return before.logical_and_(logits == own).logical_or_(logits > own).sum(dim=1, dtype=torch.int32) + 1

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        """Count the drafts that equal what was sampled in their place, up to the first that does not."""
        k = drafts.shape[1]
        right = (sampled[:, :k] == drafts) & (torch.arange(k, device=drafts.device) < num_drafts[:, None])
        return right.int().cumprod(dim=1).sum(dim=1).int()


def _penalize(logits: Array, rows: Array, counts: Array, repetition: Array, presence: Array, frequency: Array) -> None:
    """Penalize some rows, of which `counts` [n, V] are the counts with drafts."""
    values = logits.index_select(0, rows)
    changed = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(counts != 0, changed, values)
    generated = counts >> 1
    added = generated * frequency + (generated > 0) * presence
    logits.index_copy_(0, rows, values.sub_(added.float()))


def _filtered(logits: Array, weights: Array, rows: SampleInput) -> Array:
    """Return the weights [R, V] with 0 for the tokens that top_k, top_p or min_p drop."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(logits.shape[1], device=logits.device)
    kept = weights.gather(1, order)
    kept *= ranks < torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])[:, None]
    before = kept.cumsum(dim=1) - kept
    mass = kept.sum(dim=1) * rows.top_p.double()
    kept *= (before < mass[:, None]) | (ranks == 0)
    kept *= kept >= (rows.min_p.double() * WEIGHT_ONE)[:, None]
    return torch.zeros_like(weights).scatter_(1, order, kept)


def _sort_keys(logits: Array) -> Array:
    """Return int64[R, V], larger for a larger logit and, among equal ones, for a lower id; the low word is -id."""
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - torch.arange(logits.shape[1], device=logits.device)
