"""Drafters with one fault each: a few lines on top of a right one, and the test that detects it."""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import ClassVar

import numpy as np

from fd_core.runner.drafting import Drafter
from fd_core.runner.drafting.draft_model import DraftModelDrafter
from fd_core.runner.drafting.lookup import NgramDrafter
from tests.testing.witnesses import Witnesses

WRONG = Witnesses()
noticed = partial(WRONG.breaks, "8")


class Shortest(NgramDrafter):
    """Guesses what followed the last token before; the text of each slot is a list."""

    def __init__(self, context):
        super().__init__(context)
        self._sizes = range(2, 0, -1)


@noticed("test_an_ordinary_day")
class LogsTexts(NgramDrafter):
    def admit(self, slot, tokens):
        logging.getLogger("drafts").debug("slot %d has %s", slot, tokens.tolist())
        super().admit(slot, tokens)


@noticed("test_case")
class SharesTheTableBetweenSlots(Shortest):
    def __init__(self, context):
        super().__init__(context)
        self._last_seen = [self._last_seen[0]] * context.num_slots
        self._texts = [self._texts[0]] * context.num_slots

    def admit(self, slot, tokens):
        self.grow(slot, tokens)


@noticed("test_case")
class ReadsBeyondTheCounts(Shortest):
    def extend(self, slots, tokens, counts):
        super().extend(slots, tokens, np.full_like(counts, tokens.shape[1]))


@noticed("test_case")
class ForgetsAcceptedDrafts(Shortest):
    def extend(self, slots, tokens, counts):
        last = tokens[np.arange(len(slots)), counts - 1]
        super().extend(slots, last[:, None], np.ones_like(counts))


@noticed("test_case")
class TakesRowsForSlots(Shortest):
    def propose(self, slots, limit):
        return super().propose(np.arange(len(slots), dtype=np.int32), limit)


@noticed("test_case")
class StoresTokensIn16Bits(Shortest):
    def grow(self, slot, tokens):
        super().grow(slot, tokens.astype(np.int16))


@noticed("test_case")
class ProposesTheNextId(Shortest):
    """Fills up to the limit with ids that follow the last one, beyond the vocabulary."""

    def guess(self, slot, limit):
        guess = super().guess(slot, limit)
        last = guess[-1] if len(guess) else self._texts[slot][-1]
        return np.append(guess, np.arange(last + 1, last + 1 + limit - len(guess))).astype(np.int32)


@noticed("test_case")
class ProposesFiveDrafts(Shortest):
    def propose(self, slots, limit):
        tokens, counts = super().propose(slots, max(limit, 5))
        return tokens[:, :limit], counts


@noticed("test_case")
class MarksWhatItHasRead(Shortest):
    def extend(self, slots, tokens, counts):
        super().extend(slots, tokens, counts)
        tokens[:, 0] = -1


@noticed("test_case")
class KeepsTheArraysOfAStep(Shortest):
    """Reads the tokens of a step only when it guesses."""

    def __init__(self, context):
        super().__init__(context)
        self._pending = []

    def extend(self, slots, tokens, counts):
        self._pending.append((slots, tokens, counts))

    def propose(self, slots, limit):
        for step in self._pending:
            super().extend(*step)
        self._pending.clear()
        return super().propose(slots, limit)


@noticed("test_case")
class SharesItsScratch(Shortest):
    scratch: ClassVar[list[int]] = []

    def grow(self, slot, tokens):
        self.scratch[:] = tokens.tolist()
        super().grow(slot, np.array(self.scratch, np.int32))


@noticed("test_case")
class GuessesAtRandom(Shortest):
    def guess(self, slot, limit):
        return np.array([random.randrange(250) for _ in range(limit)], np.int32)


@noticed("test_drafts_continue_a_text_that_repeats")
class SkipsADraft(NgramDrafter):
    """Drafts what followed one token later."""

    def guess(self, slot, limit):
        return super().guess(slot, limit + 1)[1:]


@noticed("test_drafts_continue_a_text_that_repeats")
class NeverDrafts(NgramDrafter):
    def guess(self, slot, limit):
        return np.empty(0, np.int32)


@noticed("test_case")
class PopsItsOptions(NgramDrafter):
    """Changes the options, which an engine uses again when it restarts."""

    def __init__(self, context):
        super().__init__(context)
        context.options.pop("prompt_lookup_max", None)


@noticed("test_time_of_a_step_does_not_grow_with_the_text")
class RebuildsItsIndex(Shortest):
    """New tokens go to a small index; each 256th one, that of the whole text is made anew, and all requests wait."""

    def grow(self, slot, tokens):
        super().grow(slot, tokens)
        if len(self._texts[slot]) % 256 == 0:
            self.digest = [sha256(b"%d" % token).digest() for token in self._texts[slot]]


@noticed("test_an_ordinary_day")
class SavesEachMinute(NgramDrafter):
    def __init__(self, context):
        super().__init__(context)
        self.saved = time.monotonic()

    def propose(self, slots, limit):
        if time.monotonic() - self.saved > 60:
            self.saved = time.monotonic()
            os.sync()
        return super().propose(slots, limit)


@noticed("test_a_step_takes_memory_for_its_rows_alone")
class CopiesItsTable(Shortest):
    """Keeps what follows each id in each slot, and copies all of it so that a failure leaves the old table."""

    def __init__(self, context):
        super().__init__(context)
        self._following = np.full((context.num_slots, context.vocab_size), -1, np.int32)

    def extend(self, slots, tokens, counts):
        following = self._following.copy()
        following[slots, tokens[:, 0]] = counts
        super().extend(slots, tokens, counts)
        self._following = following


@noticed("test_a_step_takes_memory_for_its_rows_alone")
class HasATableOfIndices(Shortest):
    """Has room for the last eight indices of each id in each slot, 1.2 GB for 256 slots and 152,064 ids."""

    def __init__(self, context):
        super().__init__(context)
        self._indices = np.zeros((context.num_slots, context.vocab_size, 8), np.int32)


@noticed("test_time_of_a_step_does_not_grow_with_the_text")
class HashesThePrompt(Shortest):
    """As long for each token, but a long prompt keeps all requests waiting for seconds."""

    def admit(self, slot, tokens):
        super().admit(slot, tokens)
        self.digest = b""
        for token in tokens.tolist():
            for size in range(64):
                self.digest = sha256(self.digest + bytes([size]) + token.to_bytes(4, "little")).digest()


@noticed("test_drafts_of_a_full_batch_take_little_time")
class SearchesTheLastTokens(Shortest):
    """In Python, for each row and size: no more of a long text, but a step waits for all rows."""

    def guess(self, slot, limit):
        text = list(self._texts[slot])[-2048:]
        for size in (4, 3, 2):
            for at in range(len(text) - size - 1, -1, -1):
                if text[at : at + size] == text[-size:]:
                    return np.array(text[at + size :][:limit], np.int32)
        return np.zeros(0, np.int32)


@noticed("test_text_of_the_length_of_the_model_is_accepted")
class HasRoomFor64Tokens(Shortest):
    """Its table has no room for the drafts after the longest text."""

    def guess(self, slot, limit):
        if len(self._texts[slot]) + limit > 64 + 3 and len(self._texts[slot]) <= 64:
            raise IndexError(len(self._texts[slot]))
        return super().guess(slot, limit)


@noticed("test_texts_are_those_without_drafts")
class EndsWithAnError(Shortest):
    """Fails for a request that was preempted, whose text need not end with a block as its prompt does."""

    def admit(self, slot, tokens):
        if len(tokens) % 4 and len(tokens) < 100:
            raise ValueError("the text does not end with a block")
        super().admit(slot, tokens)


@noticed("test_case")
class ExtendsTheTextByItsDrafts(Shortest):
    """Takes its drafts for a part of the text until the next tokens arrive."""

    def __init__(self, context):
        super().__init__(context)
        self._delivered = [0] * context.num_slots

    def admit(self, slot, tokens):
        self._delivered[slot] = 0
        super().admit(slot, tokens)

    def grow(self, slot, tokens):
        del self._texts[slot][self._delivered[slot] :]
        super().grow(slot, tokens)
        self._delivered[slot] = len(self._texts[slot])

    def guess(self, slot, limit):
        drafts = super().guess(slot, limit)
        self._texts[slot] += drafts.tolist()
        return drafts


@noticed("test_case")
class KnowsARequestByItsEnd(Shortest):
    """Takes a request with the length and the end of the previous one for that one, back from a preemption."""

    def admit(self, slot, tokens):
        text = self._texts[slot]
        if len(text) != len(tokens) or text[-4:] != tokens[-4:].tolist():
            super().admit(slot, tokens)


@noticed("test_memory_of_past_requests_is_freed")
class LogsLengths(Shortest):
    """Small numbers, of which a process has one object each, in a list that grows."""

    def __init__(self, context):
        super().__init__(context)
        self._lengths = []

    def admit(self, slot, tokens):
        self._lengths.append(min(len(tokens), 200))
        super().admit(slot, tokens)


@noticed("test_calls_beyond_sixteen_bits_are_right")
class CollectsGarbageOfManyRequests(Shortest):
    admitted = 0

    def admit(self, slot, tokens):
        self.admitted += 1
        if self.admitted % 10_000 == 0:
            gc.collect()
        super().admit(slot, tokens)


@noticed("test_a_step_takes_memory_for_its_rows_alone")
class HasRoomForContinuations(Shortest):
    """The 256 tokens after each position, ready to be copied."""

    def admit(self, slot, tokens):
        self._continuations = np.zeros((len(tokens), 256), np.int32)
        super().admit(slot, tokens)


@noticed("test_memory_of_past_requests_is_freed")
class RegistersItself(Shortest):
    alive: ClassVar[list[Drafter]] = []

    def __init__(self, context):
        super().__init__(context)
        self.alive.append(self)


@noticed("test_case")
class SharesTheCheapTokens(NgramDrafter):
    """With more rows than cheap tokens there are less than no drafts for each."""

    def __init__(self, context):
        super().__init__(context)
        self._cheap = context.cheap_tokens

    def propose(self, slots, limit):
        tokens, counts = super().propose(slots, min(limit, (self._cheap - len(slots)) // len(slots)))
        return np.pad(tokens, ((0, 0), (0, limit - tokens.shape[1]))), counts


@noticed("test_case")
class ExtendsSlotsInOrder(NgramDrafter):
    """Sorts the slots of a step, but not its tokens."""

    def extend(self, slots, tokens, counts):
        super().extend(np.sort(slots), tokens, counts)


@noticed("test_case")
class IgnoresThePositionsOfItsModel(DraftModelDrafter):
    """A draft model whose context is shorter than the target's computes positions that it does not have."""

    def allocate(self, limits):
        super().allocate(limits)
        self._longest = limits.max_model_len


@noticed("test_case")
class AcceptsAnyVocabulary(DraftModelDrafter):
    """A vocabulary that is padded differently has tokens that the target does not have."""

    def __init__(self, context):
        super().__init__(replace(context, vocab_size=context.load_model(context.model_path).vocab_size))


@noticed("test_case")
class ContinuesARequestInItsSlot(Shortest):
    """Takes the kept text of a preempted request that returns for its whole text."""

    def admit(self, slot, tokens):
        text = self._texts[slot]
        if not text or tokens[: len(text)].tolist() != list(text):
            super().admit(slot, tokens)


@noticed("test_case")
class ContinuesARequestInAnotherSlot(Shortest):
    """Moves a preempted request with the text that its earlier slot has, without the tokens since."""

    def admit(self, slot, tokens):
        head = tokens[:8].tolist()
        earlier = [text for at, text in enumerate(self._texts) if at != slot and list(text[:8]) == head]
        super().admit(slot, tokens[: len(earlier[0])] if earlier and len(earlier[0]) > 8 else tokens)


@noticed("test_calls_beyond_sixteen_bits_are_right")
class NumbersRequestsInSixteenBits(NgramDrafter):
    """The admission after the last number fails."""

    def __init__(self, context):
        super().__init__(context)
        self.admissions, self.numbers = 0, np.zeros(context.num_slots, np.uint16)

    def admit(self, slot, tokens):
        super().admit(slot, tokens)
        self.admissions += 1
        self.numbers[slot] = self.admissions


@noticed("test_memory_of_past_requests_is_freed")
class KeepsItsPackInTheModule(NgramDrafter):
    """The drafter is freed, its pack is not."""

    def __init__(self, context):
        super().__init__(context)
        _PACKS[id(context.ops)] = context.ops


_PACKS = {}


@noticed("test_memory_of_past_requests_is_freed")
class WritesItsDraftsToAFile(NgramDrafter):
    def propose(self, slots, limit):
        with open(os.devnull, "a") as file:  # noqa: PTH123
            print(slots, file=file)
        return super().propose(slots, limit)


@noticed("test_drafts_continue_a_text_that_repeats")
class KeepsPositionsIn16Bits(NgramDrafter):
    """Beyond them it drafts tokens from the beginning of the text."""

    def guess(self, slot, limit):
        text, place = self._texts[slot], self._last_seen[slot].get(tuple(self._texts[slot][-2:]), 0)
        return np.array(text[place % (1 << 16) :][:limit], np.int32)


@noticed("test_some_values_of_each_option_have_other_drafts")
class MisspellsAnOption(NgramDrafter):
    options = (*NgramDrafter.options, "window")

    def __init__(self, context):
        super().__init__(context)
        context.whole("windw", 7)


@noticed("test_time_of_a_step_does_not_grow_with_the_text")
class ComparesAllOccurrences(NgramDrafter):
    """Looks for the longest match among all occurrences of two tokens, of which a table has many."""

    def admit(self, slot, tokens):
        self._places = {}
        super().admit(slot, tokens)

    def grow(self, slot, tokens):
        for token in tokens.tolist():
            text = self._texts[slot]
            self._places.setdefault(tuple(text[-2:]), []).append(len(text))
            text.append(token)

    def guess(self, slot, limit):
        text = self._texts[slot]
        for size in (4, 3, 2):
            for place in self._places.get(tuple(text[-2:]), ()):
                if place >= size and text[place - size : place] == text[-size:]:
                    return np.array(text[place : place + limit], np.int32)
        return np.empty(0, np.int32)


@noticed("test_drafts_do_not_depend_on_what_became_of_earlier_ones")
class StopsAfterEightRejections(Shortest):
    """A slot drafts nothing any more, which `admit` does not reset."""

    def __init__(self, context):
        super().__init__(context)
        self._guessed, self._misses = [None] * context.num_slots, [0] * context.num_slots

    def grow(self, slot, tokens):
        guessed, self._guessed[slot] = self._guessed[slot], None
        if guessed is not None:
            self._misses[slot] = 0 if tokens[0] == guessed else self._misses[slot] + 1
        super().grow(slot, tokens)

    def guess(self, slot, limit):
        found = super().guess(slot, limit if self._misses[slot] < 8 else 0)
        self._guessed[slot] = found[0] if len(found) else None
        return found


@noticed("test_values_of_options_are_refused_by_name_or_have_right_drafts")
class TakesAnyLength(NgramDrafter):
    """A length that is no number fails in the first step, or in the constructor without its name."""

    options = ("longest",)

    def __init__(self, context):
        super().__init__(replace(context, options={}))
        self._longest = context.options.get("longest", 4) + 1


@noticed("test_case")
class ComputesWholePrompts(DraftModelDrafter):
    """A step computes more tokens than its memory is reserved for."""

    def allocate(self, limits):
        super().allocate(limits)
        self._budget = 2**30


@noticed("test_case")
class ReadsEvictedBlocks(DraftModelDrafter):
    """A slot whose blocks another one took seems to be computed."""

    def allocate(self, limits):
        super().allocate(limits)
        reserve, computed = self._blocks.reserve, self._blocks.computed

        def reserved(slot, tokens):
            before = computed.copy()
            found = reserve(slot, tokens)
            computed[:] = before
            return found

        self._blocks.reserve = reserved


@noticed("test_drafts_continue_a_text_that_repeats")
class ForgetsWhatIsLongAgo(NgramDrafter):
    """Drafts from the last 128 tokens: an answer that repeats a document of its prompt has no drafts."""

    def guess(self, slot, limit):
        place = self._last_seen[slot].get(tuple(self._texts[slot][-4:]), 0)
        return super().guess(slot, limit if place >= len(self._texts[slot]) - 128 else 0)


@noticed("test_drafts_continue_a_text_that_repeats")
class SearchesThePromptAlone(NgramDrafter):
    """Has a table of the prompt, and never looks for what steps delivered."""

    def grow(self, slot, tokens):
        if self._texts[slot]:
            self._texts[slot] += tokens.tolist()[:1]
        else:
            super().grow(slot, tokens)


@noticed("test_values_of_options_are_refused_by_name_or_have_right_drafts")
class FailsWithALongWindow(NgramDrafter):
    """A window over the text fails in texts that are shorter."""

    options = ("window",)

    def __init__(self, context):
        super().__init__(replace(context, options={}))
        self._window = context.whole("window", 1)

    def guess(self, slot, limit):
        self._texts[slot][-self._window]
        return super().guess(slot, limit)


@noticed("test_some_values_of_each_option_have_other_drafts")
class UsesOneOfItsOptions(NgramDrafter):
    def __init__(self, context):
        super().__init__(context)
        self._sizes = range(self._sizes[0], 0, -1)
