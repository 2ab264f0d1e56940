"""Images of the prompts in slots, and the states that an encoder computes from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fd_core.backends.contract import cache_shape
from fd_core.errors import ConfigError
from fd_core.ops.contract import TURNED_TOKENS, Array, Ops, StepInput
from fd_core.runner.inputs.inputs import Spans, build_inputs
from fd_core.types import Image, IntArray, StepPlan

_BLOCK: Final = 16
_KEPT_TOKENS: Final = 8192
"""Tokens of images whose states are kept for later prompts, and for the next chunk of theirs."""


def places_of(images: tuple[Image, ...], length: int) -> IntArray:
    """Return int32[3, length]: time, row and column of the tokens of a prompt (Wang et al., "Qwen2-VL", 2024).

    A word advances all three. The tokens of an image share a time, and the next word follows its longer side.
    """
    places, at, now = np.zeros((3, length), np.int32), 0, 0
    for image in images:
        rows, columns = image.layout
        places[:, at : image.start] = now + np.arange(image.start - at)
        now += image.start - at
        places[:, image.start : image.end] = now
        places[1:, image.start : image.end] += np.indices((rows, columns), np.int32).reshape(2, -1)
        at, now = image.end, now + max(rows, columns)
    places[:, at:] = now + np.arange(length - at)
    return places


class SlotImages:
    """Encodes an image in the first step that reads one of its tokens.

    States are kept by digest, those used last; so an image in a later prompt, or after a preemption, is often not
    encoded again.
    """

    def __init__(self, ops: Ops, model: Any, most_tokens: int) -> None:
        """`model` has an `ImageEncoder` in `images`, `embed` and `turn`; a step has up to `most_tokens` tokens.

        Raises `ConfigError` if a model whose rope has sections cannot turn as many.
        """
        if model.spec.attention[0].rope.coordinates and most_tokens > TURNED_TOKENS:
            raise ConfigError(
                f"{model.architecture} computes at most {TURNED_TOKENS} tokens in a step, got {most_tokens}",
                field="--max-num-batched-tokens",
                hint=f"use at most {TURNED_TOKENS}",
            )
        self._ops = ops
        self._model = model
        self._encoder = encoder = model.images
        blocks = 2 * -(-encoder.spec.most_patches // _BLOCK)  # windows may fill their last block in part
        self._cache = ops.allocate_kv(cache_shape(encoder.towers[0].model, _BLOCK, "auto"), blocks)
        self._towers = [(ops.compile_states(tower.model.states), tower) for tower in encoder.towers]
        self._places: dict[int, IntArray] = {}
        """By slot, the coordinates of the tokens of its prompt, if rope has several."""
        self._whole: dict[int, tuple[Image, ...]] = {}
        """By slot, the images whose tokens attend to all of their image, until they are computed."""
        self._pending: dict[int, list[Image]] = {}
        """By slot, the images that are not computed."""
        self._kept: OrderedDict[bytes, tuple[Array, ...]] = OrderedDict()
        self._kinds = np.isin(np.arange(model.vocab_size), encoder.spec.kind_ids) if encoder.spec.kind_ids else None
        """For each token id, whether the experts of images compute it; None if the model has no such."""

    def begin(self, plan: StepPlan) -> None:
        """Drop the images of the requests that a plan revokes, and take those of the ones that it admits."""
        for revocation in plan.revocations:
            self._drop(revocation.slot)
        for admission in plan.admissions:
            self.admit(admission.slot, admission.images, admission.computed, admission.prompt_len)

    def _drop(self, slot: int) -> None:
        for kept in (self._pending, self._places, self._whole):
            kept.pop(slot, None)

    def admit(self, slot: int, images: tuple[Image, ...], computed: int, length: int) -> None:
        """Begin a prompt of `length` tokens, of which `computed` are in the KV cache."""
        self._drop(slot)
        if images and self._model.spec.attention[0].rope.coordinates:
            self._places[slot] = places_of(images, length)
        if pending := [image for image in images if image.end > computed]:
            self._pending[slot] = pending
            if self._encoder.spec.whole:
                self._whole[slot] = tuple(pending)

    def embedded(self, spans: Spans, begins: IntArray, step: StepInput) -> StepInput:
        """Return a step that begins with the states of its images, if it has any; encodes those that are missing.

        `begins` int32[n] is where the tokens of each span begin in the step.
        """
        if not self._pending:
            return step
        added: list[Array] = []
        columns = spans.slots.tolist(), spans.starts.tolist(), spans.counts.tolist(), begins.tolist()
        for slot, start, count, begin in zip(*columns, strict=True):
            images = self._pending.get(slot)
            if images is None:
                continue
            for image in images:
                first, last = max(image.start, start), min(image.end, start + count)
                if first >= last:
                    continue
                levels, places = self._encoded(image), np.arange(first, last, dtype=np.int32)
                if not added:
                    added = self._before(step, len(levels))
                rows = self._ops.from_host(places - start + begin)
                for index, states in enumerate(levels):
                    if last - first < image.num_tokens:
                        states = self._ops.gather_rows(states, self._ops.from_host(places - image.start))
                    added[index] = self._ops.write_rows(added[index], rows, states)
            images[:] = [image for image in images if image.end > start + count]
            if not images:
                del self._pending[slot]
        return replace(step, states=added[0], added=tuple(added[1:])) if added else step

    def _before(self, step: StepInput, levels: int) -> list[Array]:
        """Return [T, H] for each level of states: the embeddings of tokens, and zeros."""
        x = self._ops.settle(self._model.embed(step))
        zeros = np.zeros((levels - 1, *x.shape), np.float32)
        return [x, *(self._ops.states_from_host(each) for each in zeros)]

    def placed(self, spans: Spans, begins: IntArray, step: StepInput) -> StepInput:
        """Return a step, still on the host, with the positions by which rope turns its tokens.

        A token whose coordinates differ gets a row of its own in the rope tables, after those of positions. Tokens of
        an image that attend to all of it get its end, and tokens that differ in their experts are divided by them.
        """
        if self._kinds is not None:
            found = self._kinds[step.token_ids]
            if found.any():
                kinds = ((kind, (found == kind).nonzero()[0].astype(np.int32)) for kind in (0, 1))
                step = replace(step, kinds=tuple(each for each in kinds if len(each[1])))
        if self._whole:
            step = self._ended(spans, begins, step)
        if not self._places:
            return step
        positions, rows = step.positions.copy(), list[IntArray]()
        after, used = self._model.max_positions, 0
        columns = spans.slots.tolist(), spans.starts.tolist(), spans.counts.tolist(), begins.tolist()
        for slot, start, count, begin in zip(*columns, strict=True):
            places = self._places.get(slot)
            if places is None:
                continue
            own = places[:, start : start + count]
            late = np.arange(max(start, places.shape[1]), start + count) - places.shape[1]
            turned = np.concatenate([own[0], places[0, -1] + 1 + late])
            several = (own != own[0]).any(axis=0).nonzero()[0]
            turned[several] = after + used + np.arange(len(several))
            positions[begin : begin + count] = turned
            rows.append(own[:, several])
            used += len(several)
        if used:
            self._model.turn(np.concatenate(rows, axis=1), after)
        return replace(step, positions=positions)

    def _ended(self, spans: Spans, begins: IntArray, step: StepInput) -> StepInput:
        ends, found = step.positions + 1, False
        columns = spans.slots.tolist(), spans.starts.tolist(), spans.counts.tolist(), begins.tolist()
        for slot, start, count, begin in zip(*columns, strict=True):
            images = self._whole.get(slot, ())
            for image in images:
                if start <= image.start < start + count:
                    first, found = begin + image.start - start, True
                    ends[first : first + image.num_tokens] = image.end
            if images and images[-1].end <= start + count:
                del self._whole[slot]
        return replace(step, ends=ends) if found else step

    def encode(self, image: Image) -> tuple[Array, ...]:
        """Return the states [tokens, H] of an image, and those that are added after the first layers."""
        levels = zip(*map(self._encode_tile, self._encoder.tiles(image)), strict=True)
        return tuple(self._encoder.joined([*level], image) for level in levels)

    def _encode_tile(self, image: Image) -> tuple[Array, ...]:
        _, windows = self._encoder.order(image)
        whole = self._rows(windows.sum(keepdims=True, dtype=np.int32))
        divided = self._rows(windows) if len(windows) > 1 else whole
        states, levels = self._encoder.patches(image), list[Array]()
        for compute, tower in self._towers:
            states = compute(replace(divided if tower.windowed else whole, states=states), self._cache)
            if tower.merger is not None:
                levels.append(self._encoder.tokens(states, image, tower.merger))
        return levels[-1], *levels[:-1]

    def _rows(self, counts: IntArray) -> StepInput:
        """Return a step of rows with so many patches, each of which attends to its row."""
        rows, ends = np.arange(len(counts), dtype=np.int32), np.cumsum(-(-counts // _BLOCK), dtype=np.int32)
        tables = (ends - -(-counts // _BLOCK))[:, None] + np.arange(-(-counts.max() // _BLOCK), dtype=np.int32)
        spans = Spans(rows, np.zeros_like(rows), counts, np.empty(0, np.int32))
        step = build_inputs(spans, np.zeros((len(rows), counts.max()), np.int32), tables[None], _BLOCK, self._ops)
        return replace(step, positions=self._ops.from_host(np.arange(counts.sum(), dtype=np.int32)))

    def _encoded(self, image: Image) -> tuple[Array, ...]:
        states = self._kept.get(image.digest)
        if states is None:
            states = self._kept[image.digest] = self.encode(image)
        self._kept.move_to_end(image.digest)
        while len(self._kept) > 1 and sum(sum(map(len, each)) for each in self._kept.values()) > _KEPT_TOKENS:
            self._kept.popitem(last=False)
        return states
