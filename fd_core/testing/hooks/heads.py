"""A scripted model with a scripted draft head, and what a runner does for a drafter that reads its hidden states.

The head's "KV" of a position is a running hash of the states and following tokens up to there, as is the scripted
model's of tokens. So a position that is skipped, computed with another token or written to another block changes every
later draft of the slot. By this hash, half of the drafts are the model's most likely tokens, and the others are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.backends import null
from fd_core.backends.null import NullBackend, NullCache, NullModel, next_hashes, running_hashes
from fd_core.ops.contract import KVCache, KVShape, StepInput
from fd_core.runner.drafting import Drafter, HiddenStates
from fd_core.runner.inputs.inputs import Spans, following_tokens, gather_inputs
from fd_core.testing.hooks.drafted import DrafterUnderTest, null_ops
from fd_core.testing.kit.law import broken, require
from fd_core.types import IntArray

_EVERY: Final = 5
"""Of so many steps, one is compared with a new drafter."""


class HeadedCache(NullCache):
    """The scripted cache, and one with the head's layer over the same blocks."""

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        super().__init__(shape, num_blocks)
        self._head = NullCache(shape, num_blocks)

    def layer(self, index: int) -> Any:
        """Return the hashes of a layer."""
        return self._head.layer(0) if index else super().layer(0)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Return those of both layers."""
        return np.concatenate([super().export_blocks(blocks), self._head.export_blocks(blocks)], axis=1)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        super().import_blocks(blocks, data[:, :1])
        self._head.import_blocks(blocks, data[:, 1:])


class ScriptedHead:
    """The head; its states are hashes, uint64[R, 1], and its logits the scripted model's for them."""

    def __init__(self, model: NullModel, ids: IntArray | None) -> None:
        self._model = model
        self.ids = ids
        self.computed = 0
        """Tokens of all calls."""
        self.written = np.zeros(0, np.int32)
        """Places in the cache that calls wrote since this was cleared."""

    def forward(self, step: StepInput, cache: KVCache) -> Any:
        """Extend the hashes by the states and following tokens of a step."""
        self.computed += len(step.token_ids)
        states: Any = step.states
        mixed: Any = next_hashes(states[:, 0], step.token_ids)  # the model's states of the following tokens
        hashes, begins = cache.layer(1).reshape(-1), step.query_start[:-1]
        last, size = step.positions[begins] - 1, cache.shape.block_size
        before = hashes[step.block_tables[np.arange(len(begins)), last // size] * size + last % size]
        before[last < 0] = 0
        bounds = step.query_start.tolist()
        rows = zip(before, bounds, bounds[1:], strict=False)  # there is a bound more
        result = np.concatenate([running_hashes(each, mixed[row:end]) for each, row, end in rows])
        hashes[step.kv_slots] = result
        self.written = np.append(self.written, step.kv_slots)
        return np.where(result & np.uint64(1 << 40), result, mixed)[:, None][step.logits_rows]

    def logits(self, states: Any) -> Any:
        """Return the scripted model's logits, of the tokens that the head knows."""
        logits = self._model.head(states)
        return logits if self.ids is None else logits[:, self.ids]


class HeadedNull(NullModel):
    """The scripted model with the head, which reads its states, and may know some of the tokens in another order."""

    def __init__(self, vocab_size: int = 257, *, some_tokens: bool = False) -> None:
        super().__init__(vocab_size)
        known = np.arange(vocab_size - 1, 7, -1, dtype=np.int32)
        self.draft_head = ScriptedHead(self, known if some_tokens else None)

    def kv_shape(self, block_size: int) -> KVShape:
        """One layer more."""
        return replace(super().kv_shape(block_size), num_layers=2)

    def tapped(self, step: StepInput, cache: KVCache) -> tuple[Any, ...]:
        """Return the states, which the head reads."""
        return (self.states(step, cache),)


Model = TypeVar("Model", bound=NullModel)


@contextmanager
def loaded(model: Model) -> Iterator[Model]:
    """Let engines that start meanwhile load this scripted model."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(model, HeadedNull):
            patch.setattr(null, "NullCache", HeadedCache)
        patch.setattr(NullBackend, "load_model", lambda *_: model)
        yield model


class PlayedRunner:
    """The runner of a few slots, which shows a drafter texts that the kit chooses."""

    def __init__(
        self, subject: DrafterUnderTest, slots: int, k: int, longest: int, size: int = 4, **settings: Any
    ) -> None:
        ops, blocks = null_ops(), -(-longest // size)
        self._model, self._k, self._size = HeadedNull(**settings), k, size
        self._cache = HeadedCache(self._model.kv_shape(size), slots * blocks)
        self._tables = np.arange(slots * blocks, dtype=np.int32).reshape(1, slots, blocks)
        self._tokens, self._lengths = np.zeros((slots, longest), np.int32), np.zeros(slots, np.int32)
        self.drafter = subject.new(slots, k, self._model.vocab_size, longest, size, ops=ops)

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """Start a request, whose prompt is not computed yet."""
        self._tokens[slot, : len(prompt)], self._lengths[slot] = prompt, len(prompt)
        self.drafter.admit(slot, np.array(prompt, np.int32))

    def step(self, slots: IntArray, starts: IntArray, token: int) -> list[list[int]]:
        """Compute the texts of some slots from `starts` on, append a token to each, and return their drafts."""
        self._model.draft_head.written = np.zeros(0, np.int32)
        counts = self._lengths[slots] - starts
        rows = (np.cumsum(counts) - 1).astype(np.int32)
        spans = Spans(slots, starts, counts, logits_rows=rows)
        inputs = gather_inputs(spans, self._tokens, self._tables, self._size)
        states = self._model.states(inputs, self._cache)
        self._tokens[slots, self._lengths[slots]] = token
        self._lengths[slots] += 1
        step = replace(inputs, token_ids=following_tokens(spans, self._tokens), states=states)
        room = np.full(len(slots), self._tables.shape[2] * self._size, np.int32)
        lengths = self._lengths[slots]
        self.drafter.read(
            HiddenStates(step, self._cache, self._model.draft_head, slots, lengths, room, self._tokens, self._tables)
        )
        self.drafter.extend(slots, np.full((len(slots), 1 + self._k), token, np.int32), np.ones(len(slots), np.int32))
        tokens, found = self.drafter.propose(slots, self._k)
        return [row[:count].tolist() for row, count in zip(tokens, found, strict=True)]


class WatchedDrafter:
    """A drafter in a runner: its drafts are compared with those of a new one that reads the whole text at once."""

    def __init__(self, subject: DrafterUnderTest, runner: Any, head: ScriptedHead) -> None:
        self._limits, self._subject, self._head = runner.limits, subject, head
        limits = runner.limits
        sizes = limits.vocab_size, limits.max_model_len, limits.block_size
        self._drafter: Drafter = subject.new(limits.max_num_seqs, limits.max_drafts, *sizes, ops=runner.ops)
        self._steps = 0
        self._given: HiddenStates | None = None
        self.counts = np.zeros(2, np.int64)
        """Drafts that were compared, and those that new drafters had."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def read(self, given: HiddenStates) -> None:
        """Pass a step on; fail unless the head computes each of its tokens once."""
        before, self._given = self._head.computed, given
        self._drafter.read(given)
        self._head.written = self._head.written[:0]
        found, expected = self._head.computed - before, len(given.step.token_ids)
        require(found == expected, "8", f"a step of {expected} tokens lets the head compute {found}")

    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Return the drafts, compared."""
        before = self._head.computed
        tokens, counts = self._drafter.propose(slots.copy(), limit)
        found, most = self._head.computed - before, len(slots) * limit
        require(found <= most, "8", f"{len(slots)} rows with up to {limit} drafts let the head compute {found} tokens")
        self._require_own_blocks()
        require(tokens.shape == (len(slots), limit), "8", f"drafts have the shape {tokens.shape}")
        require(bool(((counts >= 0) & (counts <= limit)).all()), "8", f"the counts of drafts are {counts.tolist()}")
        drafts = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
        unknown = [token for each in drafts for token in each if not 0 <= token < self._limits.vocab_size]
        require(not unknown, "1.9", f"the drafts {unknown} are no ids below {self._limits.vocab_size}")
        self._steps += 1
        if self._steps % _EVERY == 0:
            self._compare(slots[-2:], drafts[-2:], limit)
            again, _ = self._drafter.propose(slots[::-1].copy(), limit)
            same = [row[: len(each)].tolist() for row, each in zip(again[::-1], drafts, strict=True)]
            require(same == drafts, "8", f"drafts are {drafts}, and in a second call {same}")
        return tokens, counts

    def _require_own_blocks(self) -> None:
        given, size = self._given, self._limits.block_size
        if given is None:
            broken("8", "drafts without a step")
        ends = zip(given.slots, given.room // size, strict=True)
        held = np.concatenate([given.tables[0, slot, :count] for slot, count in ends])
        others = np.setdiff1d(self._head.written // size, held)
        require(not len(others), "8", f"drafts are written to the blocks {others.tolist()}, which no slot of them has")

    def _compare(self, slots: IntArray, drafts: list[list[int]], limit: int) -> None:
        given = self._given
        assert given is not None
        for slot, found in zip(slots.tolist(), drafts, strict=True):
            length = int(given.lengths[given.slots == slot][0])
            text = given.tokens[slot, :length].tolist()
            model: Any = {"vocab_size": self._limits.vocab_size, "some_tokens": self._head.ids is not None}
            limits = self._limits.max_model_len, self._limits.block_size
            fresh = PlayedRunner(self._subject, 1, limit, *limits, **model)
            fresh.start(0, text[:-1])
            (expected,) = fresh.step(np.zeros(1, np.int32), np.zeros(1, np.int32), text[-1])
            both = min(len(found), len(expected))
            self.counts += len(found), len(expected)
            if found[:both] != expected[:both] or (found and not expected):
                broken("8", f"slot {slot} has the drafts {found}; a new drafter with the same text has {expected}")
