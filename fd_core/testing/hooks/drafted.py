"""Axes of drafters: the texts in their slots, the drafts that are accepted, and slots that are used again."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from fd_core.backends.null import NullBackend, NullModel
from fd_core.config import EngineConfig, Limits, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from fd_core.ops.contract import KVCache, Ops, StepInput
from fd_core.plugins import DRAFTER, installed_plugins
from fd_core.runner.drafting import DraftContext, Drafter
from fd_core.testing.axes.covering import Axis, Case, around, int_of
from fd_core.testing.axes.interleaving import interleaved
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import constructed
from fd_core.types import IntArray

_MANY: Final = 10**6
"""Cheap tokens that are never used up."""


class _DraftModel(NullModel):
    """The scripted model with a given maximum of positions, and of tokens in a step."""

    def __init__(self, vocab_size: int, max_positions: int, most_tokens: int) -> None:
        super().__init__(vocab_size, max_positions)
        self._most_tokens = most_tokens

    def states(self, step: StepInput, cache: KVCache) -> Any:
        count, most = len(step.token_ids), self._most_tokens
        require(count <= most, "2", f"a forward of the draft model computes {count} tokens, of a budget of {most}")
        last = int(step.positions.max(initial=0))
        require(last < self.max_positions, "8", f"a draft model of {self.max_positions} positions computes {last}")
        return super().states(step, cache)


def null_ops() -> Ops:
    """Return a new pack of the scripted model."""
    return NullBackend(EngineConfig(model="null")).make_ops()


@dataclass(frozen=True, slots=True)
class DrafterUnderTest:
    """A drafter, and the requirements on it."""

    cls: type[Drafter]
    options: Mapping[str, int | float | str]
    private: bool = True
    """True if drafts depend on nothing but the text of their slot."""

    def new(
        self,
        slots: int,
        k: int,
        vocab_size: int = 257,
        max_model_len: int = 1024,
        block_size: int = 4,
        cheap_tokens: int = _MANY,
        model: str = "alike",
        room: str = "all",
        ops: Ops | None = None,
    ) -> Drafter:
        """Return a new drafter; the draft model, if it uses one, is the scripted one, or one of other sizes."""
        blocks, few_tokens = -(-max_model_len // block_size), max(1 + k, slots // 2, _FEW_TOKENS)
        limits = Limits(
            max_num_seqs=slots,
            max_num_batched_tokens=few_tokens if room == "few tokens" else slots * (1 + k + max_model_len),
            max_model_len=max_model_len,
            block_size=block_size,
            num_kv_blocks=max(blocks, slots * blocks // 12) if room == "few blocks" else slots * blocks,
            vocab_size=vocab_size,
            max_drafts=k,
        )
        drafter = self.cls(
            DraftContext(
                num_slots=slots,
                vocab_size=vocab_size,
                block_size=block_size,
                cheap_tokens=cheap_tokens,
                ops=ops or null_ops(),
                model_path=Path("draft"),
                load_model=lambda _: _DraftModel(
                    vocab_size + 64 * (model == "wider"),
                    16 if model == "shorter" else max_model_len,
                    limits.max_num_batched_tokens,
                ),
                options=MappingProxyType(dict(self.options)),
            )
        )
        drafter.allocate(limits)
        return drafter


class DrafterChoice:
    """The drafter that a suite tests."""

    drafter: str
    """Value of `method` in `--speculative-config`."""
    options: ClassVar[Mapping[str, int | float | str]] = {}
    """Options in `--speculative-config`."""

    def drafter_class(self) -> type[Drafter]:
        """Return the class of the drafter; override for a class that no plugin registers."""
        return installed_plugins().load(DRAFTER, self.drafter)

    def subject(self) -> DrafterUnderTest:
        """Return the drafter with its options."""
        return DrafterUnderTest(self.drafter_class(), self.options)

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(DRAFTER, self.drafter_class(), lambda: self.subject().new(2, 4))


@contextmanager
def small_engine(k: int, **settings: Any) -> Iterator[Engine]:
    """Start an engine with the scripted model, with up to k drafts for a row."""
    small = {"max_num_seqs": 6, "block_size": 4, "max_model_len": 100, "max_num_batched_tokens": 128}
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=k, cheap_tokens=1000) if k else None
    values = {"model": "null", "backend": "null", "num_kv_blocks": 200, **small, **settings}
    engine = load_engine(EngineConfig(**values, speculative=drafts), None, progress=lambda *_: None)
    try:
        yield engine
    finally:
        engine.close()


_EVENTS: Final = ("reused", "shorter", "moved", "alike", "returned", "exchanged")
AXES: Final = (
    Axis("slots", (3, 1, 2, *around(32), 257), ("DraftContext.num_slots", "Drafter.admit.slot")),
    Axis("k", (3, 1, 2, 4, 5, 8, 15, 16), ("Drafter.propose.limit",)),
    Axis("vocab", (257, 3, 32_767, 32_768, 65_535, 65_537, 152_064), ("DraftContext.vocab_size",)),
    Axis("block_size", (4, 1, 16, 128), ("DraftContext.block_size",)),
    Axis("cheap_tokens", (_MANY, 64, 1), ("DraftContext.cheap_tokens",)),
    Axis("prompt", (9, 1, 2, 3, *around(32), 300), ("Drafter.admit.tokens",), ({"prompt": 33_000, "slots": 2},)),
    Axis("text", ("periodic", "random", "constant", "reversed", "largest")),
    Axis("accepted", ("random", "none", "all", "one"), ("Drafter.extend.tokens", "Drafter.extend.counts")),
    Axis("steps", (6, 1, 2, 40)),
    Axis("rows", ("all", "some", "one"), ("Drafter.extend.slots", "Drafter.propose.slots")),
    Axis(
        "events",
        ("none", *_EVENTS),
        ("Drafter.admit.slot",),
        # What is left of an earlier text shows in texts that have other tokens, in some of many steps.
        rare=tuple({"events": event, "text": "random", "steps": 40} for event in _EVENTS),
    ),
    Axis("instances", ("one", "in-turn", "threads")),
    Axis(
        "room",
        ("all",),
        ("Drafter.allocate.limits",),
        rare=(
            {"room": "few blocks", "slots": 33, "rows": "some", "steps": 40},
            {"room": "few blocks", "slots": 32, "block_size": 16, "prompt": 31, "events": "reused", "steps": 40},
            {"room": "few tokens", "prompt": 65, "events": "reused", "steps": 40},
            {"room": "few tokens", "slots": 33, "prompt": 300, "events": "moved", "steps": 6},
        ),
    ),
    Axis("model", ("alike", "shorter"), ("DraftContext.load_model",), rare=({"model": "wider"},)),
)
"""`events` are admissions to a slot in use: of another text, of the beginning of its text, of another slot's text, of
one of the same length that begins and ends as its text, of its own text, with or without a token that it got while it
drained, and those of two preempted requests in each other's slots. The `room` is enough for all slots, or of fewer KV
blocks than these need, or fewer tokens in a step than their prompts have. A draft model of a `shorter` context or a
`wider` vocabulary is refused, or drafts within its context and that vocabulary."""
EXCUSED: Final[Mapping[str, str]] = {
    "Drafter.context": "its fields are varied",
    "Drafter.read.given": "`fd_core.testing.hooks.readers` drives drafters that read hidden states",
    "DraftContext.ops": "the pack of the scripted model; the engine's tests use others",
    "DraftContext.model_path": "backends without checkpoints ignore it",
    "DraftContext.options": "the suite's `options`",
    "DraftContext.kv_cache_dtype": "the scripted model has one",
}
"""Fields of the contract that no axis varies, with the reason."""
_FEW_TOKENS: Final = 24
"""Limit of the tokens in a step that prompts exceed."""
_LONGEST: Final = 1024
_MOST_DRAFTS: Final = 16
_MAX_LOGITS: Final = 3e6
"""Logits of a step of the scripted model."""
_MAX_TOKENS: Final = 40_000
"""Tokens of all texts of a case, each time that a new drafter reads them."""


class _DraftSlots:
    """A drafter, the text of each slot, and the last drafts."""

    def __init__(self, subject: DrafterUnderTest, case: Case, seed: int = 0) -> None:
        slots, self._k, vocab = (int_of(case, name) for name in ("slots", "k", "vocab"))
        longest = max(_LONGEST, 2 * int_of(case, "prompt"))
        self._subject, self._case, self._room = subject, case, str(case["room"])
        self._ample = case["cheap_tokens"] == _MANY and self._room == "all"
        """True if each slot can have all its drafts in each step."""
        self._vocab, self._longest, self._block_size = vocab, longest, int_of(case, "block_size")
        self._rng = np.random.default_rng(zlib.crc32(f"{sorted(case.items())} {seed}".encode()))
        self.drafter = self._new(slots)
        self.texts = [self._text(slot) for slot in range(slots)]
        self._drafts: list[list[int]] = [[] for _ in range(slots)]
        self._counts = np.zeros(2, np.int64)
        """Drafts that were compared, and those that new drafters had."""
        for slot in self._rng.permutation(slots).tolist():
            self.admit(slot, self.texts[slot])

    def _new(self, slots: int) -> Drafter:
        cheap = int_of(self._case, "cheap_tokens")
        sizes, room = (self._k, self._vocab, self._longest, self._block_size), "all" if slots == 1 else self._room
        return self._subject.new(slots, *sizes, cheap_tokens=cheap, model=str(self._case["model"]), room=room)

    def _text(self, slot: int) -> list[int]:
        length, vocab, kind = int_of(self._case, "prompt"), int_of(self._case, "vocab"), self._case["text"]
        if kind == "constant":
            return [slot % vocab] * length
        if kind == "random":
            return [int(each) for each in self._rng.integers(0, vocab, length)]
        period = [int(each) for each in self._rng.integers(0, vocab, 3 + slot % 5)]
        if kind == "largest":
            period = [vocab - 1 - each % 2 for each in period]
        whole = (period * (length // len(period) + 1))[:length]
        return whole[::-1] if kind == "reversed" else whole

    def admit(self, slot: int, text: Sequence[int]) -> None:
        self.texts[slot], self._drafts[slot] = list(text), []
        given = np.array(text, np.int32)
        self.drafter.admit(slot, given)
        _require_unchanged("tokens", given, np.array(text, np.int32))

    def step(self, number: int) -> None:
        """Deliver tokens to some slots, and check their drafts."""
        count = {"all": len(self.texts), "one": 1}.get(str(self._case["rows"]), -(-len(self.texts) // 2))
        slots = self._rng.permutation(len(self.texts)).astype(np.int32)
        if self._case["events"] != "none" and number % 3 == 1:
            self._event(number, int(slots[0]))
        slots = slots[:count]
        self._extend(slots)
        self._propose(slots)

    def _event(self, number: int, slot: int) -> None:
        held, other = self.texts[slot], (slot + 1) % len(self.texts)
        head = max(8, len(held) // 4)
        count = max(0, len(held) - 4 - head)
        middle = np.resize([held[-1], held[-3:][0], number % self._vocab], count).tolist()
        text = {
            "alike": [*held[:head], *middle, *held[head + count :]],
            "reused": self._text(slot + number),
            "shorter": held[: -(-len(held) // 2)],
            "moved": self.texts[other],
            "returned": held + held[:1] * (number % 2),
            "exchanged": self.texts[other] + held[:2],
        }[str(self._case["events"])]
        self.admit(slot, text)
        if self._case["events"] == "exchanged" and other != slot:
            self.admit(other, held + held[:1])

    def _extend(self, slots: IntArray) -> None:
        """Accept the first drafts of each slot and deliver one more token; what follows in the rows is garbage."""
        tokens = self._rng.integers(-8, 2**31, (len(slots), 1 + self._k)).astype(np.int32)
        counts = np.ones(len(slots), np.int32)
        for row, slot in enumerate(slots.tolist()):
            drafts, text = self._drafts[slot], self.texts[slot]
            most = {"none": 0, "all": len(drafts), "one": min(1, len(drafts))}
            taken = most.get(str(self._case["accepted"]), int(self._rng.integers(0, len(drafts) + 1)))
            own = int(self._rng.integers(0, self._vocab)) if self._case["text"] == "random" else text[-3:][0]
            delivered = [*drafts[:taken], own]
            counts[row] = len(delivered)
            tokens[row, : len(delivered)] = delivered
            text += delivered
        given = [each.copy() for each in (slots, tokens, counts)]
        self.drafter.extend(*given)
        for name, array, before in zip(("slots", "tokens", "counts"), given, (slots, tokens, counts), strict=True):
            _require_unchanged(name, array, before)
            array.fill(-7)  # a step's output is overwritten by later ones

    def _propose(self, slots: IntArray) -> None:
        given = slots.copy()
        tokens, counts = self.drafter.propose(given, self._k)
        _require_unchanged("slots", given, slots)
        vocab = int_of(self._case, "vocab")
        require(np.shape(tokens) == (len(slots), self._k), "8", f"drafts have the shape {np.shape(tokens)}")
        require(np.shape(counts) == (len(slots),), "8", f"counts have the shape {np.shape(counts)}")
        require(tokens.dtype == counts.dtype == np.int32, "8", f"drafts are {tokens.dtype}, counts {counts.dtype}")
        for row, slot in enumerate(slots.tolist()):
            count = int(counts[row])
            require(0 <= count <= self._k, "8", f"slot {slot} has {count} drafts, at most {self._k} are allowed")
            self._drafts[slot] = drafts = tokens[row, :count].tolist()
            unknown = [token for token in drafts if not 0 <= token < vocab]
            require(not unknown, "1.9", f"slot {slot} has the drafts {unknown}, which are no ids below {vocab}")
        if self._subject.private:
            for slot in slots[:2].tolist():
                self._require_same(slot)
            self._propose_again(slots[::-1][:3].copy())

    def _propose_again(self, slots: IntArray) -> None:
        """Fail unless some of the slots, in another order, get the same drafts, as after an error in another one."""
        tokens, counts = self.drafter.propose(slots, self._k)
        for row, slot in enumerate(slots.tolist()):
            expected, found = self._drafts[slot], tokens[row, : int(counts[row])].tolist()
            if not self._ample:  # fewer slots may have more drafts
                expected, found = expected[: len(found)], found[: len(expected)]
            require(found == expected, "8", f"slot {slot} has the drafts {expected}, and in a second call {found}")

    def _require_same(self, slot: int) -> None:
        """Fail unless a new drafter, which knows only the text of a slot, has the same drafts, or fewer, or more."""
        with another_world(1, self._subject.cls):  # it has no clock
            fresh = self._new(1)
            fresh.admit(0, np.array(self.texts[slot], np.int32))
            tokens, counts = fresh.propose(np.zeros(1, np.int32), self._k)
        expected, found = tokens[0, : int(counts[0])].tolist(), self._drafts[slot]
        both = min(len(expected), len(found))
        self._counts += len(found), len(expected)
        if expected[:both] != found[:both] or (found and not expected):
            broken("8", f"slot {slot} has the drafts {found}; a new drafter with the same text has {expected}")

    def end(self) -> None:
        """Fail if most of the drafts are missing: a drafter may have fewer, but not because it lost the text."""
        found, expected = self._counts.tolist()
        require(
            4 * found >= expected or not self._ample,
            "8",
            f"{found} drafts, where new drafters with the same texts have {expected}",
        )


def _require_unchanged(name: str, found: IntArray, before: IntArray) -> None:
    require(np.array_equal(found, before), "8", f"the argument {name} was changed")


def check_drafter(subject: DrafterUnderTest, case: Case) -> None:
    """Drive a drafter as the runner does, and check its drafts after each step. Raises `InvariantViolated`."""
    try:
        ours = _DraftSlots(subject, case)
    except ConfigError as refused:
        require(case["model"] != "alike", "8", f"the draft model was refused: {refused}")
        return
    others = [_DraftSlots(subject, case, 1)] if case["instances"] != "one" else []
    package = subject.cls.__module__.partition(".")[0]
    for number in range(int_of(case, "steps")):
        if case["instances"] == "threads":
            interleaved(partial(ours.step, number), partial(_step_if_short, others[0], number), package)
            continue
        for each in (ours, *others):
            each.step(number)
    for each in (ours, *others):
        each.end()


def _step_if_short(slots: _DraftSlots, number: int) -> None:
    if max(map(len, slots.texts)) < _LONGEST - 2 * _MOST_DRAFTS:
        slots.step(number)


def _allowed(case: Case) -> bool:
    slots, steps, k = (int_of(case, name) for name in ("slots", "steps", "k"))
    length = int_of(case, "prompt") + steps * (1 + k)
    several = {"one": 1, "in-turn": 2}.get(str(case["instances"]), 60)
    tokens, logits = several * (2 * steps + slots) * length, several * steps * slots * int_of(case, "vocab")
    return tokens < _MAX_TOKENS and length < _LONGEST and logits < _MAX_LOGITS


DRAFTED: Final[Part[DrafterUnderTest]] = Part("drafts", AXES, check_drafter, _allowed, mixed=True)
