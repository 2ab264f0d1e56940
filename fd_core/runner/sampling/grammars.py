"""Grammars of the slots: their allowed next tokens, as drafts and as masks over rows of logits.

Masks are computed on a thread during the forward pass, because the drafts are known before it begins.

    drafts --begin--> masks (thread)  |  forward (device)  --> mask_logits --> sample --> extend --> next drafts
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.runner.inputs.inputs import Rows
from fd_core.structured.compiler import GrammarCompiler, GrammarError
from fd_core.structured.matcher import TokenMatcher, mask_words
from fd_core.types import GRAMMAR_FAULT, Admission, IntArray
from fd_core.types.metrics import counter

PAST: Final = 0.9
"""Weight of earlier steps in the share of steps that force or draft tokens."""


class MaskStats(msgspec.Struct, kw_only=True):
    """Cost and savings of grammars in the steps of one runner; monotonic."""

    masks: Annotated[int, counter("grammar_masks", "Masks computed, one per token sampled under a grammar.")] = 0
    mask_seconds: Annotated[
        float, counter("grammar_mask_seconds", "Time spent computing masks, in parallel with the device.")
    ] = 0.0
    wait_seconds: Annotated[
        float, counter("grammar_mask_wait_seconds", "Time that steps waited for masks after their forward pass.")
    ] = 0.0
    forced_drafted: Annotated[
        int, counter("forced_drafted_tokens", "Tokens forced by grammars that were verified as drafts.")
    ] = 0
    forced_accepted: Annotated[
        int, counter("forced_accepted_tokens", "Tokens forced by grammars that were accepted as drafts.")
    ] = 0


@dataclass(frozen=True, slots=True)
class Masks:
    """Allowed tokens of some rows of logits, see `Ops.mask_logits`."""

    rows: IntArray
    """int32[n]"""
    bits: IntArray
    """int32[n, words]"""


class SlotGrammars:
    """Matchers of the slots whose request has a grammar or reasons first; owned by one runner."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        """`compiler` is None if structured output is disabled."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self.matchers: dict[int, TokenMatcher] = {}
        """By slot; while it is empty, all methods below but `admit` are no-ops."""
        self._forced: dict[int, int] = {}
        """Leading drafts of a slot that its grammar forces."""
        self._forcing: dict[int, float] = {}
        """Share of recent steps after which the grammar of a slot forced tokens."""
        self._accepted: dict[int, int] = {}
        """Forced drafts that were accepted since `take_accepted`, by slot; without slots that had none."""
        self._thread: ThreadPoolExecutor | None = None
        self.stats = MaskStats()

    def failure_reason(self, slot: int) -> str | None:
        """Return the reason why the grammar of a slot may allow no token; None for a slot without a grammar."""
        matcher = self.matchers.get(slot)
        return None if matcher is None else matcher.error or "the grammar allows no further token"

    def admit(self, admission: Admission) -> None:
        """Start a request, whose text begins after the prompt. Raises `GrammarError` if its grammar is invalid."""
        slot, params = admission.slot, admission.params
        self.matchers.pop(slot, None)
        self._forced.pop(slot, None)
        self._forcing.pop(slot, None)
        if params.grammar is None and params.reasoning is None:
            return
        grammar = None
        if params.grammar is not None:
            if self._compiler is None:
                raise GrammarError("structured output is disabled")
            grammar = self._compiler.compiled(params.grammar)
        ends = params.stop_token_ids if params.ignore_eos else (*admission.eos_token_ids, *params.stop_token_ids)
        matcher = TokenMatcher(grammar, ends, self._vocab_size, reasoning=params.reasoning)
        matcher.consume(admission.token_ids[admission.prompt_len :].tolist())
        self.matchers[slot] = matcher

    def extend(
        self, slots: IntArray, tokens: IntArray, verified: IntArray, accepted: IntArray
    ) -> Iterator[tuple[int, str]]:
        """Advance by the delivered tokens: the first 1 + accepted[i] of row i of int32[N, 1 + k].

        `verified` int32[N] are the drafts of each row. Yields slots whose tokens violate their grammar, with the
        reason.
        """
        for row, slot in enumerate(slots.tolist()):
            matcher = self.matchers.get(slot)
            if matcher is None:
                continue
            forced = min(self._forced.pop(slot, 0), int(verified[row])) if verified[row] else 0
            self.stats.forced_drafted += forced
            if kept := min(forced, int(accepted[row])):
                self.stats.forced_accepted += kept
                self._accepted[slot] = kept
            try:
                matcher.consume(tokens[row, : accepted[row] + 1].tolist())
            except GrammarError as error:
                yield slot, f"{GRAMMAR_FAULT}was left: {error}"

    def take_accepted(self, count: int) -> IntArray | None:
        """Return int32[count] forced drafts accepted by slot since the last call; None if there were none."""
        if not self._accepted:
            return None
        accepted = np.zeros(count, np.int32)
        accepted[list(self._accepted)] = list(self._accepted.values())
        self._accepted.clear()
        return accepted

    def shape_drafts(self, slots: IntArray, drafts: IntArray, counts: IntArray, ahead: IntArray) -> None:
        """Adapt drafts int32[n, k] and counts int32[n] of `slots` to their grammars, in place.

        Forced tokens replace drafts; drafts are cut before the first one that the grammar forbids. They follow `ahead`
        int32[n] tokens that are still on the device.
        """
        for row, (slot, skipped) in enumerate(zip(slots.tolist(), ahead.tolist(), strict=True)):
            matcher = self.matchers.get(slot)
            if matcher is None:
                continue
            forced = matcher.forced(drafts.shape[1] + skipped)
            self._forcing[slot] = PAST * self._forcing.get(slot, 0.0) + (1 - PAST) * bool(forced)
            forced = forced[skipped:]
            self._forced[slot] = len(forced)
            if forced:
                drafts[row, : len(forced)] = forced
                counts[row] = len(forced)
            else:
                counts[row] = matcher.allowed(drafts[row, : counts[row]].tolist())

    def forcing(self, slots: IntArray) -> float:
        """Return the expected number of `slots` int32[n] for which a step forces further tokens."""
        return sum(self._forcing.get(slot, 0.0) for slot in slots.tolist())

    def among(self, slots: IntArray) -> IntArray:
        """Return those of `slots` int32[n] that have a matcher."""
        chosen: IntArray = slots[[slot in self.matchers for slot in slots.tolist()]]
        return chosen

    def begin(self, rows: Rows, tokens: IntArray) -> Callable[[], Masks] | None:
        """Start computing a step's masks, None if it needs none; calling the result blocks on them. `tokens` must not
        change meanwhile."""
        firsts = np.cumsum(rows.drafts + 1) - (rows.drafts + 1)
        wanted: list[tuple[TokenMatcher, list[int], int]] = []
        for slot, first, count in zip(
            rows.slots[rows.sampling].tolist(), firsts.tolist(), rows.drafts.tolist(), strict=True
        ):
            matcher = self.matchers.get(slot)
            if matcher is not None:
                place = int(rows.positions[first])
                wanted.append((matcher, tokens[slot, place : place + count].tolist(), first))
        if not wanted:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="fdcore-masks")
        masks = self._thread.submit(self._compute, wanted)

        def wait() -> Masks:
            began = time.perf_counter()
            result = masks.result()
            self.stats.wait_seconds += time.perf_counter() - began
            return result

        return wait

    def _compute(self, wanted: Sequence[tuple[TokenMatcher, list[int], int]]) -> Masks:
        began = time.perf_counter()
        total = sum(len(drafts) + 1 for _, drafts, _ in wanted)
        bits = np.zeros((total, mask_words(self._vocab_size)), np.int32)
        rows = np.empty(total, np.int32)
        masked: npt.NDArray[np.bool_] = np.zeros(total, np.bool_)
        place = 0
        for matcher, drafts, first in wanted:
            part = slice(place, place + len(drafts) + 1)
            rows[part] = np.arange(first, first + len(drafts) + 1)
            masked[part] = matcher.write_masks(drafts, bits[part])
            place = part.stop
        self.stats.masks += int(masked.sum())
        self.stats.mask_seconds += time.perf_counter() - began
        return Masks(rows, bits) if masked.all() else Masks(rows[masked], bits[masked])
