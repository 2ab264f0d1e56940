"""Drives a model's forward pass over a paged cache whose blocks lie scattered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import Model, cache_shape
from fd_core.ops.contract import Ops, StepInput
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.types import IntArray

BLOCK_SIZE = 4


@dataclass
class Row:
    """One request: its tokens, how many of them are computed, and the logits of computed positions."""

    tokens: list[int]
    prompt_len: int
    computed: int = 0
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class PagedDriver:
    """Continuous batching in its plainest form: every row computes what it can, at most `chunk` tokens."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        prompts: list[list[int]],
        longest: int,
        seed: int = 0,
        kv_dtype: str = "auto",
        places: list[int] | None = None,
        last_only: bool = False,
    ) -> None:
        """`places`: the place of each row's adapter, for a model with adapters.

        `last_only`: compute logits of each row's last position in a step, as an engine does, not of every position.
        """
        self.last_only = last_only
        self.ops = ops
        self.places = places
        self.forward = ops.compile(model.forward) if places is None else ops.compile_adapted(model.forward)
        self.rows = [Row(list(prompt), len(prompt)) for prompt in prompts]
        width = -(-longest // BLOCK_SIZE)
        num_blocks = width * len(prompts) + 3
        shuffled = np.random.default_rng(seed).permutation(num_blocks)[: width * len(prompts)]
        self.tables = shuffled.reshape(len(prompts), width).astype(np.int32)
        self.cache = ops.allocate_kv(cache_shape(model, BLOCK_SIZE, kv_dtype), num_blocks)

    def step(self, work: list[tuple[int, int]]) -> None:
        """Compute (row, number of tokens) pairs; keeps their logits."""
        counts = np.array([count for _, count in work], np.int32)
        starts = np.array([self.rows[row].computed for row, _ in work], np.int32)
        query_start = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        row_of = np.repeat([row for row, _ in work], counts)
        positions = (np.arange(len(row_of)) - np.repeat(query_start[:-1] - starts, counts)).astype(np.int32)
        tokens = np.array(
            [self.rows[row].tokens[place] for row, place in zip(row_of, positions, strict=True)], np.int32
        )
        slots = self.tables[row_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        contexts = starts + counts
        ends = query_start[1:]
        wanted = ends - 1 if self.last_only else np.arange(len(tokens), dtype=np.int32)
        device = self.ops.from_host
        step = StepInput(
            token_ids=device(tokens),
            positions=device(positions),
            kv_slots=device(slots.astype(np.int32)),
            query_start=device(query_start),
            context_len=device(contexts),
            # Entries beyond the context have no meaning, so they point nowhere.
            block_tables=device(self._tables([row for row, _ in work], contexts)),
            logits_rows=device(wanted),
            max_query=int(counts.max()),
            max_context=int(contexts.max()),
            **({} if self.places is None else adapter_rows(np.array(self.places, np.int32)[row_of], self.ops)),
        )
        logits = self.ops.to_host(self.forward(step, self.cache)).copy()
        for index, (row, count) in enumerate(work):
            self.rows[row].logits.extend(logits[(query_start[index] <= wanted) & (wanted < ends[index])])
            self.rows[row].computed += count

    def generate(self, count: int, chunk: int | None = None) -> None:
        """Generate `count` greedy tokens in every row."""
        while work := self._work(count, chunk):
            self.step(work)
            for row, _ in work:
                state = self.rows[row]
                if state.computed == len(state.tokens):
                    state.tokens.append(int(state.logits[-1].argmax()))

    def _work(self, count: int, chunk: int | None) -> list[tuple[int, int]]:
        return [
            (index, min(len(row.tokens) - row.computed, chunk or len(row.tokens)))
            for index, row in enumerate(self.rows)
            if len(row.generated) < count
        ]

    def _tables(self, rows: list[int], contexts: IntArray) -> IntArray:
        tables = self.tables[rows]
        used = -(-contexts // BLOCK_SIZE)
        visible: IntArray = np.where(np.arange(tables.shape[1]) < used[:, None], tables, np.int32(2**20))
        return visible
