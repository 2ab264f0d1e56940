"""Drafts from a smaller model of the same vocabulary (Leviathan et al., 2023; Chen et al., 2023)."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import cache_shape
from fd_core.config import Limits
from fd_core.errors import ConfigError
from fd_core.ops.contract import Array, KVShape, Ops, SampleInput
from fd_core.runner.drafting.contract import FLAG, DraftContext, Drafter
from fd_core.runner.inputs.inputs import Spans, build_inputs
from fd_core.types import IntArray


class SlotBlocks:
    """Block tables that grow on demand. The drafter is not notified of idle slots, so blocks are evicted from the least
    recently used slot.

    A missing draft costs only speed, so no blocks are reserved. None are fenced, because a single drafter reads and
    writes the cache, one forward pass after the other.
    """

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, max_tokens: int) -> None:
        """Share `num_blocks` among slots of up to `max_tokens` tokens."""
        self._block_size = block_size
        self.tables = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        """Leading tokens of each slot whose KV is in its blocks."""
        self._held = np.zeros(num_slots, np.int32)
        self._last_use = np.zeros(num_slots, np.int64)
        self._turn = 0
        self._free = list(range(num_blocks))

    def release(self, slot: int) -> None:
        """Free the blocks of a slot; its computed tokens become 0."""
        self._free.extend(self.tables[slot, : self._held[slot]].tolist())
        self._held[slot] = self.computed[slot] = 0

    def begin_turn(self, slots: IntArray) -> None:
        """Mark `slots` int32[n] as used; their blocks are not evicted until the next turn."""
        self._turn += 1
        self._last_use[slots] = self._turn

    def reserve(self, slot: int, tokens: int) -> bool:
        """Allocate blocks for the first `tokens` tokens of a slot of this turn; return False, without a change, if
        there are too few."""
        missing = -(-tokens // self._block_size) - int(self._held[slot])
        while missing > len(self._free):
            resting = np.flatnonzero((self._held > 0) & (self._last_use < self._turn))
            if not len(resting):
                return False
            self.release(int(resting[self._last_use[resting].argmin()]))
        if missing > 0:
            held = int(self._held[slot])
            self.tables[slot, held : held + missing] = [self._free.pop() for _ in range(missing)]
            self._held[slot] = held + missing
        return True


class DraftModelDrafter(Drafter):
    """Greedy continuation by a draft model, for all slots at once: one forward pass per draft token.

    The first forward of a turn also computes the pending tokens: those delivered since, and prompts, in chunks of at
    most the step token budget. A slot proposes once it has caught up. Keys and values of rejected drafts are
    overwritten by the next tokens, because a slot counts as computed only up to the first token that is not the one
    computed there.
    """

    name = "draft_model"
    uses_model = True
    kv_shape: KVShape

    def __init__(self, context: DraftContext) -> None:
        model = context.load_model(context.model_path)
        if model.vocab_size != context.vocab_size:
            raise ConfigError(
                f"expected a draft model with a vocabulary of {context.vocab_size} tokens, got {model.vocab_size}",
                field=FLAG,
                hint="use a draft model with the target's tokenizer",
            )
        self.kv_shape = cache_shape(model, context.block_size, context.kv_cache_dtype)
        if self.kv_shape.state:
            raise ConfigError(
                f"{model.architecture} has recurrent layers, which a draft model cannot have",
                field=FLAG,
                hint="use a model without them, or ngram",
            )
        self._model = model
        self._ops = context.ops
        self._cheap_tokens = context.cheap_tokens

    def allocate(self, limits: Limits) -> None:
        self._budget = limits.max_num_batched_tokens
        self._longest = min(limits.max_model_len, self._model.max_positions)
        self._cache = self._ops.allocate_kv(self.kv_shape, limits.num_kv_blocks)
        self._forward = self._ops.compile(self._model.forward)
        self._tokens = np.zeros((limits.max_num_seqs, limits.max_model_len), np.int32)
        """Known tokens, followed by the drafts of the last turn."""
        self._length = np.zeros(limits.max_num_seqs, np.int32)
        self._blocks = SlotBlocks(limits.max_num_seqs, limits.num_kv_blocks, limits.block_size, limits.max_model_len)

    def admit(self, slot: int, tokens: IntArray) -> None:
        """Discard the previous request; the model computes the tokens when drafts are first needed."""
        self._blocks.release(slot)
        self._length[slot] = len(tokens)
        self._tokens[slot, : len(tokens)] = tokens

    def extend(self, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Append the tokens; keys and values count as computed up to the first token that differs from the drafts."""
        begin, columns = self._length[slots], np.arange(tokens.shape[1])
        places = begin[:, None] + columns
        given = (columns < counts[:, None]) & (places < self._tokens.shape[1])
        rows, taken = np.nonzero(given)
        slot_of, place_of = slots[rows], places[given]
        same = np.zeros(given.shape, np.bool_)
        same[given] = self._tokens[slot_of, place_of] == tokens[rows, taken]
        agreed = begin + np.cumprod(same, axis=1).sum(axis=1)
        computed = self._blocks.computed
        computed[slots] = np.minimum(computed[slots], agreed)
        self._tokens[slot_of, place_of] = tokens[rows, taken]
        self._length[slots] += given.sum(axis=1).astype(np.int32)

    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Catch up, then draft token by token for every slot that has caught up."""
        tokens, counts = np.zeros((len(slots), limit), np.int32), np.zeros(len(slots), np.int32)
        length, computed = self._length[slots], self._blocks.computed
        # The last token is always computed: its logits yield the first draft.
        computed[slots] = np.minimum(computed[slots], length - 1)
        wanted = np.minimum(useful_drafts(len(slots), self._cheap_tokens, limit), self._longest - length)
        rows, chunks = self._choose(slots, wanted)
        if not len(rows):
            return tokens, counts
        slots, wanted = slots[rows], wanted[rows]
        ready, logits = self._catch_up(slots, chunks)
        if len(ready):
            rows, slots, wanted = rows[ready], slots[ready], wanted[ready]
            counts[rows] = wanted
            tokens[rows] = self._draft(slots, wanted, logits, limit=limit)
        return tokens, counts

    def _choose(self, slots: IntArray, wanted: IntArray) -> tuple[npt.NDArray[np.intp], IntArray]:
        """Return the rows to compute and their token counts, those with the fewest missing tokens first.

        Slots that have caught up miss at most the tokens of the last step, which fit the same budget, so a prompt never
        delays them.
        """
        blocks, left = self._blocks, self._budget
        blocks.begin_turn(slots)
        rows: list[int] = []
        chunks: list[int] = []
        missing = self._length[slots] - blocks.computed[slots]
        for row in np.argsort(missing, kind="stable").tolist():
            slot = int(slots[row])
            if wanted[row] < 1 or left < 1 or not blocks.reserve(slot, int(self._length[slot] + wanted[row]) - 1):
                continue
            rows.append(row)
            chunks.append(min(int(missing[row]), left))
            left -= chunks[-1]
        return np.array(rows, np.intp), np.array(chunks, np.int32)

    def _catch_up(self, slots: IntArray, chunks: IntArray) -> tuple[npt.NDArray[np.intp], Array]:
        """Compute the next `chunks` int32[n] tokens; return the rows that are up to date, and their logits."""
        starts = self._blocks.computed[slots]
        ready = np.flatnonzero(starts + chunks == self._length[slots])
        last = (np.cumsum(chunks)[ready] - 1).astype(np.int32)
        inputs = build_inputs(Spans(slots, starts, chunks, logits_rows=last), *self._known, self._ops)
        logits = self._forward(inputs, self._cache)
        self._blocks.computed[slots] = starts + chunks
        return ready, logits

    def _draft(self, slots: IntArray, wanted: IntArray, logits: Array, limit: int) -> IntArray:
        """Return drafts int32[n, limit], wanted[i] in row i, after the texts with the given last logits.

        Each forward reads the tokens of the previous one on the device, so the host synchronizes only once.
        """
        ops, length = self._ops, self._length[slots]
        live: npt.NDArray[np.intp] = np.arange(len(slots))
        chosen, _ = ops.sample(logits, greedy(ops, len(live)))
        parts = [(live, chosen)]
        for step in range(1, int(wanted.max())):
            left = np.flatnonzero(wanted[live] > step)
            if len(left) < len(live):
                live, chosen = live[left], ops.gather_rows(chosen, ops.from_host(left.astype(np.int32)))
            one = np.ones(len(live), np.int32)
            spans = Spans(slots[live], length[live] + (step - 1), one, logits_rows=np.arange(len(live), dtype=np.int32))
            inputs = dataclasses.replace(build_inputs(spans, *self._known, ops), token_ids=chosen)
            chosen, _ = ops.sample(self._forward(inputs, self._cache), greedy(ops, len(live)))
            parts.append((live, chosen))
        drafts = np.zeros((len(slots), limit), np.int32)
        fetched = ops.fetch([picked for _, picked in parts])
        for column, ((rows, _), picked) in enumerate(zip(parts, fetched, strict=True)):
            drafts[rows, column] = picked
            self._tokens[slots[rows], length[rows] + column] = drafts[rows, column]
        self._blocks.computed[slots] = length + wanted - 1
        return drafts

    @property
    def _known(self) -> tuple[IntArray, IntArray, int]:
        """Tokens, block tables and block size: arguments of `build_inputs`."""
        return self._tokens, self._blocks.tables[None], self._cache.shape.block_size


def useful_drafts(count: int, cheap_tokens: int, limit: int) -> int:
    """Return the drafts of each of `count` slots if all share the tokens that a step can verify."""
    return min(limit, -(-max(cheap_tokens - count, 0) // max(count, 1)))


def greedy(ops: Ops, rows: int) -> SampleInput:
    """Return the input for greedy sampling of `rows` rows."""
    whole, seeds, shares = (ops.from_host(np.zeros(rows, kind)) for kind in (np.int32, np.uint64, np.float32))
    columns = {"temperature": shares, "top_k": whole, "top_p": shares, "min_p": shares}
    return SampleInput(**columns, seeds=seeds, positions=whole, all_greedy=True, any_filter=False)
