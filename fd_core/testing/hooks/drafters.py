"""The cases that every drafter has to pass.

A draft never changes a text, so a wrong drafter costs only speed, unless it raises, leaks, or proposes the text of
another request. A drafter whose time grows with the text makes speculation slower than none.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, Final

import numpy as np
import pytest

from fd_core.config import SpeculativeConfig
from fd_core.errors import ConfigError
from fd_core.plugins import DRAFTER, installed_plugins
from fd_core.runner.drafting import Drafter, check_drafter
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.drafted import (
    DRAFTED,
    DrafterChoice,
    DrafterUnderTest,
    null_ops,
    small_engine,
)
from fd_core.testing.hooks.drafting_days import require_good_day
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import count_bytes, require_bounded, require_no_stall
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import OPEN, Requirement
from fd_core.testing.models.texts import greedy, run
from fd_core.testing.schedulers.scripts import whole_texts
from fd_core.testing.stores.values import draws

_SHORT: Final = 1024
_LONG: Final = 1 << 16
"""Lengths of texts between which the time of a step may grow by `_SLACK`."""
_ROWS: Final = 64
_LENGTH: Final = 2048
_STEP_SECONDS: Final = 0.02
"""CPU time of a step of so many rows with texts of so many tokens: a fast device decodes them in that time."""
_ADMISSION_SECONDS: Final = 0.5
"""CPU time of the admission of a text of `_LONG` tokens, for which all requests wait; those of the core take 0.15."""
_MANY_SLOTS: Final = 128
_MANY_IDS: Final = 33_000
_TOKEN_BYTES: Final = 1024
"""Twice those of the core's drafters in a text without repetitions."""
_SLACK: Final = 3.0
_EXTENDED: Final = 544
_FEW_STEPS: Final = 192
"""Steps after a text, so that its index is made anew twice if each 256th one does that; fewer if they take long."""
_REPEATED: Final = 64
"""Tokens of a text that repeats its beginning, of which the last ones are to be drafted."""
_CALLS: Final = 66_000
"""A few more than 2^16."""
_HISTORY: Final = 120
"""Steps of a request, after which a counter of failures or successes is at its limit."""
_VALUES: Final = ("word", "", -1, 0, 0.5, 1.5, 1, 2, 3, 8, 33, 1000)
"""Values of an option, of which a drafter may refuse some."""
_DAY: Final = {"rows of forward passes": 1.3, "rejected drafts": 15.0, "peak": 4.0, "grown": 4.0}
"""Figures and memory of a day as multiples of the core's."""
_SECONDS: Final = 10.0
"""CPU time after which a slow drafter has done enough."""


class DrafterSuite(DrafterChoice):
    """Derive a class `Test...` from it and name the drafter."""

    private: Requirement = OPEN
    """Its drafts depend on nothing but the text of their slot; closed for one that learns from other requests."""
    repeats: Requirement = OPEN
    """It drafts what followed before in a text that repeats itself, however long ago, or what its model generates."""
    tunable: Requirement = OPEN
    """Each of its options changes drafts; closed for one whose options change only its time or memory."""

    def subject(self) -> DrafterUnderTest:
        """Return the drafter with its options."""
        return DrafterUnderTest(self.drafter_class(), self.options, private=self.private.reason is None)

    @pytest.mark.law("1.9", "8")
    @pytest.mark.fd_cases(DRAFTED)
    def test_case(self, case: KitCase) -> None:
        case.check(self.subject(), "pytest", option="--fd-case")

    @pytest.mark.law("8")
    def test_drafts_continue_a_text_that_repeats(self) -> None:
        """Repeat the beginning of texts of drawn lengths, in slots beside others; steps deliver the end of it."""
        self.repeats.require()
        draw = draws(1)
        if self.drafter_class().uses_model:
            text = [*range(5, 35), *whole_texts([greedy("text", range(5, 35), 874)])[0]]
            for length in (40, len(text) - 16):
                self._require_continued(draw, text[:length], text[length : length + 16], 257)
            return
        for bits in zip(range(1, 17, 2), draw.sample(range(2, 18, 2), 8), strict=True):
            period, before = (int(2 ** draw.uniform(each, each + 1)) for each in bits)
            before = min(before, 152_064 - period)
            vocab = draw.choice([size for size in (257, 32_003, 152_064) if size >= before + period])
            ids = draw.sample(range(vocab), before + period)
            text = [*ids[:before], *np.resize(ids[before:], period + _REPEATED).tolist()]
            self._require_continued(draw, text[:-16], text[-16:], vocab)

    def _require_continued(self, draw: Random, text: Sequence[int], following: Sequence[int], vocab_size: int) -> None:
        slot, k, admitted = draw.randrange(3), draw.randrange(1, 17), len(text) - draw.randrange(_REPEATED - 16)
        admitted = max(1, admitted) if len(text) > _REPEATED else len(text)
        drafter = self.subject().new(3, k, vocab_size=vocab_size, max_model_len=len(text) + 32)
        for each in draw.sample(range(3), 3):
            drafter.admit(each, np.array(text[:admitted] if each == slot else text[: 9 + each], np.int32))
        while admitted < len(text):
            count = min(draw.randrange(1, k + 2), len(text) - admitted)
            delivered = np.array([text[admitted : admitted + count]], np.int32)
            drafter.extend(np.array([slot], np.int32), delivered, np.array([count], np.int32))
            admitted += count
        rows = draw.sample(range(3), 3)
        tokens, counts = drafter.propose(np.array(rows, np.int32), k)
        found = tokens[rows.index(slot), : int(counts[rows.index(slot)])].tolist()
        what = f"after {len(text):,} tokens with ids up to {max(text):,}, expected {following} or the first of them"
        require(found and found == following[: len(found)], "8", f"{what}, drafted {found}")

    @pytest.mark.law("8")
    def test_text_of_the_length_of_the_model_is_accepted(self) -> None:
        drafter = self.subject().new(2, 4, max_model_len=64)
        drafter.admit(0, np.array([1, 2] * 31 + [1], np.int32))
        drafter.extend(np.zeros(1, np.int32), np.full((1, 5), 2, np.int32), np.ones(1, np.int32))
        tokens, counts = drafter.propose(np.zeros(1, np.int32), 4)
        require(tokens.shape == (1, 4) and 0 <= counts[0] <= 4, "8", f"{counts[0]} drafts of the shape {tokens.shape}")

    @pytest.mark.law("8")
    @pytest.mark.parametrize("accepted", ["none", "all", "some"])
    def test_drafts_do_not_depend_on_what_became_of_earlier_ones(self, accepted: str) -> None:
        """Start a request in a slot whose request before it got many steps, and in another one."""
        self.private.require()
        drafter, slot, text = self.subject().new(2, 4), np.zeros(1, np.int32), [5, 6, 7, 8, 9] * 8
        drafter.admit(0, np.array(text, np.int32))
        for number in range(_HISTORY):
            tokens, counts = drafter.propose(slot, 4)
            drafts, after = tokens[0, : counts[0]].tolist(), text[number % 5]
            taken = {"none": 0, "all": len(drafts), "some": number % (len(drafts) + 1)}[accepted]
            if taken == 0 and drafts and drafts[0] == after:
                after = 11 + number % 7
            delivered = [*drafts[:taken], after]
            given = np.full((1, 5), -7, np.int32)
            given[0, : len(delivered)] = delivered
            drafter.extend(slot, given, np.array([len(delivered)], np.int32))
        fresh = self.subject().new(2, 4)
        for each in range(2):
            found, expected = (_first_drafts(one, each, text) for one in (drafter, fresh))
            what = f"after {_HISTORY} steps of which {accepted} of the drafts were accepted, a request in slot {each}"
            require(found == expected, "8", f"{what} has the drafts {found}, with a new drafter {expected}")

    @pytest.mark.law("8")
    def test_values_of_options_are_refused_by_name_or_have_right_drafts(self) -> None:
        for name in self.drafter_class().options:
            for value in _VALUES:
                subject = replace(self.subject(), options={**self.options, name: value})
                try:
                    subject.new(2, 4)
                except ConfigError as refused:
                    # Two options may contradict each other: then one of them is named.
                    named = any(each in str(refused) for each in self.drafter_class().options)
                    require(named, "8", f"{name}={value!r} is refused without its name: {refused}")
                    continue
                except Exception as error:  # noqa: BLE001 - a plugin may raise anything
                    broken("8", f"{name}={value!r} raises {type(error).__name__}, no ConfigError: {error}")
                try:
                    DRAFTED.check(subject, DRAFTED.case("steps=2").values)
                except Exception as error:  # noqa: BLE001 - likewise
                    broken("8", f"with {name}={value!r}, which it accepts: {type(error).__name__}: {error}")

    @pytest.mark.law("8")
    def test_some_values_of_each_option_have_other_drafts(self) -> None:
        """Draft in drawn texts with every value that is accepted: a value without effect cannot help its user."""
        for name in self.drafter_class().options:
            self.tunable.require()
            others = {key: value for key, value in self.options.items() if key != name}
            found = set[tuple[int, ...]]()
            for options in (others, self.options, *({**others, name: value} for value in _VALUES)):
                with suppress(ConfigError):
                    found.add(_drafts_of_texts(replace(self.subject(), options=options)))
            require(len(found) > 1, "8", f"{name} never changes a draft; add a value to `options`, or close `tunable`")

    @pytest.mark.law("8")
    def test_memory_of_past_requests_is_freed(self) -> None:
        drafter = self.subject().new(4, 4, max_model_len=256)
        texts, slots = np.random.default_rng(1).integers(0, 257, (4, 200)), np.arange(4, dtype=np.int32)
        for slot in slots.tolist():
            drafter.admit(slot, texts[slot].astype(np.int32))

        def use(number: int) -> None:
            # All texts differ, and have the same repetitions.
            drafter.admit(number % 4, ((texts[number % 4] + number // 4) % 257).astype(np.int32))
            drafter.extend(slots, np.full((4, 5), number % 257, np.int32), np.full(4, 1 + number % 5, np.int32))
            drafter.propose(slots, 4)

        require_bounded(use, 100, "requests")

        require_freed(lambda: (self.subject().new(4, 4, ops=(ops := null_ops())), ops))

    @pytest.mark.law("8")
    def test_a_step_takes_memory_for_its_rows_alone(self) -> None:
        """Compare the steps of one row among few slots and ids with those among many: an upper bound of copies.

        A new drafter has no large table of each id in each slot, nor one of pairs of ids. A text takes some hundreds of
        bytes for each token, with those of its slot in a new drafter, as of a draft model's KV cache.
        """

        def peaks(slots: int, vocab_size: int) -> tuple[int, int]:
            tracemalloc.start()
            try:
                drafter = self.subject().new(slots, 4, vocab_size=vocab_size, max_model_len=64)
                new = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            slot, one = np.zeros(1, np.int32), np.ones(1, np.int32)
            drafter.admit(0, np.array([5, 6, 7, 5, 6], np.int32))
            drafter.propose(slot, 4)
            given = np.array([[7, 5]], np.int32), 2 * one
            return new, count_bytes(lambda: (drafter.extend(slot, *given), drafter.propose(slot, 4)))

        peaks(1, 257)  # imports
        (_, few), (without_ids, _), (new, many) = peaks(1, 257), peaks(_MANY_SLOTS, 257), peaks(_MANY_SLOTS, _MANY_IDS)
        sizes = f"{_MANY_SLOTS} slots and {_MANY_IDS:,} token ids"
        what = f"a step of one row takes {few:,} bytes of memory with one slot, and {many:,} with {sizes}"
        # A draft model has logits of its row, in a few copies.
        require(many < few + 64 * _MANY_IDS, "8", what)
        held = [_held_by(self.subject(), length) for length in (8, _SHORT, 9 * _SHORT)]
        each = (held[2] - held[1]) / (8 * _SHORT)
        text = f"each token of a text takes {each:,.0f} bytes of memory, expected at most {_TOKEN_BYTES:,}"
        require(each <= _TOKEN_BYTES, "8", f"{text}: a batch has millions")
        what = f"a new drafter takes {new:,} bytes of memory with {sizes}, {without_ids:,} with 257 ids"
        # A draft model may have logits of each slot.
        require(new < without_ids + (64 + 8 * _MANY_SLOTS) * _MANY_IDS, "8", what)

    @pytest.mark.law("8")
    def test_calls_beyond_sixteen_bits_are_right(self) -> None:
        """Start one request again and again, each time with a step, of which none may stall."""
        drafter, slot, one = self.subject().new(1, 1), np.zeros(1, np.int32), np.ones(1, np.int32)
        text, right, began = np.array([5, 6, 5], np.int32), list[list[int]](), time.thread_time()
        with require_no_stall("a step", "8"):
            for number in range(_CALLS):
                drafter.admit(0, text)
                drafter.extend(slot, text[None, 1:2], one)
                tokens, counts = drafter.propose(slot, 1)
                found = tokens[0, : counts[0]].tolist()
                right = right or [found]
                require(found == right[0], "8", f"request {number} has the drafts {found}, others have {right[0]}")
                if time.thread_time() - began > _SECONDS:
                    break

    @pytest.mark.fd_alone
    @pytest.mark.fd_thorough
    @pytest.mark.law("8")
    def test_an_ordinary_day(self) -> None:
        core = installed_plugins().load(DRAFTER, "draft_model" if self.drafter_class().uses_model else "ngram")
        slack = dict(_DAY) if self.repeats.reason is None else {**_DAY, "rows of forward passes": 2.0}
        require_good_day(self.subject(), core, slack)

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("8")
    @pytest.mark.parametrize("text", ["constant", "random", "frequent"])
    def test_time_of_a_step_does_not_grow_with_the_text(self, text: str) -> None:
        for _ in range(3):
            short, long = (_seconds(self.subject(), text, length) for length in (_SHORT, _LONG))
            step, admission = (many / few for few, many in zip(short, long, strict=True))
            if step < _SLACK and admission < _SLACK * _LONG / _SHORT and long[1] < _ADMISSION_SECONDS:
                return
        times = f"a step takes {step:.0f}, an admission {admission:.0f} times as long as after {_SHORT:,}"
        seconds = (
            f"an admission takes {long[1]:.1f} s, expected less than {_ADMISSION_SECONDS}: all requests wait for it"
        )
        broken("8", f"after {_LONG:,} tokens {times}; {seconds}")

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("8")
    def test_drafts_of_a_full_batch_take_little_time(self) -> None:
        """Extend texts in which hardly anything occurs twice, and draft for each: every request waits for all of it."""
        drafter = self.subject().new(_ROWS, 4, max_model_len=_LENGTH + 64)
        texts = np.random.default_rng(1).integers(0, 257, (_ROWS, _LENGTH + 8)).astype(np.int32)
        slots, times = np.arange(_ROWS, dtype=np.int32), list[float]()
        for slot in slots.tolist():
            drafter.admit(slot, texts[slot, :_LENGTH])
        for number in range(8):
            began = time.thread_time()
            drafter.extend(slots, texts[:, _LENGTH + number, None].copy(), np.ones(_ROWS, np.int32))
            drafter.propose(slots, 4)
            times.append(time.thread_time() - began)
        what = f"a step of {_ROWS} rows with {_LENGTH:,} tokens takes {1000 * min(times):.0f} ms of the processor"
        require(min(times) < _STEP_SECONDS, "8", f"{what}, expected less than {1000 * _STEP_SECONDS:.0f}")

    @pytest.mark.law("1.1", "1.9", "4")
    @pytest.mark.parametrize(("k", "depth"), [(1, 1), (4, 2), (16, 1)])
    def test_texts_are_those_without_drafts(self, k: int, depth: int) -> None:
        """Serve with preemptions, and compare with a run without drafts."""
        specs = [greedy(f"r{number}", [7, 8, 9, number] * (2 + number), 40) for number in range(8)]
        with small_engine(0, num_kv_blocks=400) as plain:
            right = run(plain, specs).tokens
        with small_engine(k, num_kv_blocks=30, pipeline_depth=depth) as engine:
            runner = engine.probe().runner
            runner.drafter = self._for(runner)
            found = run(engine, specs).tokens
            preemptions = engine.stats().scheduler.counters.preemptions
        assert preemptions > 0
        require(found == right, "4", f"{[name for name in right if found[name] != right[name]]} have other texts")

    def _for(self, runner: Any) -> Drafter:
        cls = self.drafter_class()
        model = "draft" if cls.uses_model else None
        check_drafter(cls, SpeculativeConfig(method=cls.name, model=model, options=dict(self.options)))
        limits = runner.limits
        return self.subject().new(
            limits.max_num_seqs, limits.max_drafts, limits.vocab_size, limits.max_model_len, limits.block_size
        )


def _drafts_of_texts(subject: DrafterUnderTest) -> tuple[int, ...]:
    """Return the drafts after each token of texts of few to many ids, of words that repeat in a random order."""
    draw, found, slot = draws(1), list[int](), np.zeros(1, np.int32)
    for ids in (2, 3, 8, 40):
        words = [draw.choices(range(ids), k=draw.randrange(1, 12)) for _ in range(6)]
        text = [token for word in draw.choices(words, k=24) for token in word]
        drafter = subject.new(1, 16)
        drafter.admit(0, np.array(text[:24], np.int32))
        for token in text[24:]:
            tokens, counts = drafter.propose(slot, 16)
            found += [-1, *tokens[0, : counts[0]].tolist()]
            drafter.extend(slot, np.array([[token]], np.int32), np.ones(1, np.int32))
    return tuple(found)


def _held_by(subject: DrafterUnderTest, length: int) -> int:
    """Return the bytes of a drafter for one text of random tokens, for whose length it is made."""
    text = np.random.default_rng(1).integers(0, _MANY_IDS, length).astype(np.int32)
    tracemalloc.start()
    try:
        drafter = subject.new(1, 4, vocab_size=_MANY_IDS, max_model_len=length + 64)
        drafter.admit(0, text)
        drafter.propose(np.zeros(1, np.int32), 4)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _first_drafts(drafter: Drafter, slot: int, text: Sequence[int]) -> list[int]:
    drafter.admit(slot, np.array(text, np.int32))
    tokens, counts = drafter.propose(np.array([slot], np.int32), 4)
    drafts: list[int] = tokens[0, : counts[0]].tolist()
    return drafts


def _seconds(subject: DrafterUnderTest, text: str, length: int) -> tuple[float, float]:
    """Return the mean CPU time of a step of a text after a length of it, and that of its admission.

    A `frequent` text has one n-gram again and again, each time after others, as a table has its separators.
    """
    drafter = subject.new(1, 4, max_model_len=length + 1024)
    rows = np.random.default_rng(1).integers(0, 257, (length, 5))
    rows[:, 2:] = [1, 2, 3]
    period = {"constant": [7], "random": rows[:, :2].ravel(), "frequent": rows.ravel()}
    whole = np.resize(np.array(period[text], np.int32), length + _EXTENDED)
    tokens, following = whole[:length], whole[length:, None]
    slot, counts = np.zeros(1, np.int32), np.ones(1, np.int32)
    began = time.thread_time()
    drafter.admit(0, tokens)
    admission = max(time.thread_time() - began, 1e-5)
    drafter.propose(slot, 4)
    began, steps = time.thread_time(), 0
    for token in following:
        drafter.extend(slot, token[None].copy(), counts)
        drafter.propose(slot, 4)
        steps += 1
        if steps >= _FEW_STEPS and time.thread_time() - began > 1.0:
            break
    return (time.thread_time() - began) / steps, admission
