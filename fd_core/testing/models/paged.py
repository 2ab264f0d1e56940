"""Drives a model's forward pass over a paged cache with scattered blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import GroupedModel, Model, cache_shape, image_tokens, whole_prompts
from fd_core.config.layer_groups import ONE_GROUP
from fd_core.ops.contract import GroupTables, Ops, StepInput
from fd_core.ops.weights import ITEM_BYTES
from fd_core.runner.inputs.images import SlotImages
from fd_core.runner.inputs.inputs import Spans, adapter_rows, uploaded
from fd_core.testing.models.arrays import on_device, step_input
from fd_core.types import Image, IntArray

BLOCK_SIZE = 4
"""Tokens in a block, unless the state of a recurrent layer needs a larger one."""
_DRAFTS: Final = 3
"""Tokens that follow such a state in its block."""


@dataclass
class Row:
    """One request: tokens, number of computed tokens, and logits of computed positions."""

    tokens: list[int]
    prompt_len: int
    computed: int = 0
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class PagedDriver:
    """Minimal continuous batching: every row computes its pending tokens, at most `chunk` of them."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        prompts: list[list[int]],
        longest: int,
        kv_dtype: str = "auto",
        places: list[int] | None = None,
        last_only: bool = False,
        states: bool = False,
        stage_before: PagedDriver | None = None,
        images: Sequence[tuple[Image, ...]] = (),
    ) -> None:
        """A model without an output projection yields states in place of logits.

        `places`: adapter slot of each row, for a model with adapters.

        `last_only`: compute logits of each row's last position in a step, as an engine does, not of every position.
        `states`: compute the states of all tokens first, as an engine does for scores of prompts. `stage_before`:
        driver of the pipeline stage before the model's. `images`: those of each row's prompt.
        """
        self.last_only = last_only
        self.ops = ops
        self.places = places
        self.stage_before = stage_before
        self.whole = whole_prompts(model)
        self.images = SlotImages(ops, model, 0) if images else None
        self.undivided = images if images and image_tokens(model)[2] else [()] * len(prompts)
        if self.images is not None:
            for row, parts in enumerate(images):
                self.images.admit(row, parts, 0, len(prompts[row]))
        bare = not model.generates  # its states are compared
        compiled = ops.compile_adapted if places is not None else ops.compile_states if states or bare else ops.compile
        compute = self.forward = compiled(model.states if states or bare else model.forward)
        if states and not bare:
            self.forward = lambda step, cache: model.head(ops.gather_rows(compute(step, cache), step.logits_rows))
        self.rows = [Row(list(prompt), len(prompt)) for prompt in prompts]
        groups = model.layer_groups(longest) if isinstance(model, GroupedModel) else ONE_GROUP
        token = cache_shape(model, 1, kv_dtype, groups)
        self.block_size = -(-max(BLOCK_SIZE, token.least_block_size(ITEM_BYTES[ops.dtype], _DRAFTS)) // 4) * 4
        width = -(-longest // self.block_size)
        shape = groups.count, len(prompts), width
        shuffled = np.random.default_rng(0).permutation(math.prod(shape) + 3)[:-3]
        self.tables = shuffled.reshape(shape).astype(np.int32)
        self.cache = ops.allocate_kv(cache_shape(model, self.block_size, kv_dtype, groups), math.prod(shape) + 3)

    def step(self, work: list[tuple[int, int]]) -> None:
        """Compute (row, number of tokens) pairs; stores their logits."""
        rows, counts = [row for row, _ in work], [count for _, count in work]
        spans = [(count, self.rows[row].computed + count) for row, count in work]
        slots = [step_input(spans, self.block_size, tables[rows]).kv_slots for tables in self.tables]
        host = step_input(spans, self.block_size, self.tables[0, rows])
        row_of = np.repeat(rows, counts)
        tokens = [self.rows[row].tokens[place] for row, place in zip(row_of, host.positions, strict=True)]
        wanted = host.logits_rows if self.last_only else np.arange(len(tokens), dtype=np.int32)
        # Entries beyond the context are undefined, so they are out of range.
        used = -(-host.context_len // BLOCK_SIZE)
        visible = np.where(np.arange(self.tables.shape[2]) < used[:, None], self.tables[:, rows], np.int32(2**20))
        step = replace(
            host,
            token_ids=np.array(tokens, np.int32),
            block_tables=np.ascontiguousarray(visible[0]),
            logits_rows=wanted,
        )
        grouped = GroupTables(np.stack(slots), np.ascontiguousarray(visible)) if len(slots) > 1 else None
        step = replace(step, uniform=host.max_query == 1, grouped=grouped)
        logits = self.output(step, row_of)
        for index, (row, count) in enumerate(work):
            start, end = host.query_start[index : index + 2]
            self.rows[row].logits.extend(logits[(start <= wanted) & (wanted < end)])
            self.rows[row].computed += count

    def output(self, host: StepInput, row_of: IntArray) -> npt.NDArray[np.float32]:
        """Return the logits of a step, or the states of a stage before the last."""
        if self.images is not None:
            counts, ends, begins = np.diff(host.query_start), host.context_len, host.query_start[:-1]
            spans = Spans(row_of[begins], ends - counts, counts, host.logits_rows)
            host = self.images.placed(spans, begins, host)
        step = on_device(self.ops, host)
        step = replace(step, grouped=None if host.grouped is None else on_device(self.ops, host.grouped))
        step = replace(step, kinds=uploaded(tuple(host.kinds), self.ops))
        if self.places is not None:
            step = replace(step, **adapter_rows(np.array(self.places, np.int32)[row_of], self.ops))
        if self.stage_before is not None:
            states = self.stage_before.output(host, row_of)
            step = replace(step, states=self.ops.states_from_host(states))
        if self.images is not None:
            step = self.images.embedded(spans, begins, step)
        output: npt.NDArray[np.float32] = self.ops.to_host(self.forward(step, self.cache)).copy()
        return output

    def generate(self, count: int, chunk: int | None = None) -> None:
        """Generate `count` greedy tokens in every row; an encoder computes its prompts, whole."""
        if self.whole:
            count, chunk = 1, None
        while self.advance(count, chunk):
            pass

    def _chunk(self, index: int, count: int) -> int:
        """Return a longer chunk where one of `count` tokens would divide an image that a step has to compute."""
        start = self.rows[index].computed
        inside = [image.end for image in self.undivided[index] if image.start < start + count < image.end]
        return max(inside, default=start + count) - start

    def advance(self, count: int, chunk: int | None = None) -> bool:
        """Compute a step of all rows that lack some of `count` greedy tokens; return False if there are none."""
        work = [
            (index, self._chunk(index, min(len(row.tokens) - row.computed, chunk or len(row.tokens))))
            for index, row in enumerate(self.rows)
            if len(row.generated) < count
        ]
        if work:
            self.step(work)
        for row, _ in work:
            state = self.rows[row]
            if state.computed == len(state.tokens):
                state.tokens.append(int(state.logits[-1].argmax()))
        return bool(work)
