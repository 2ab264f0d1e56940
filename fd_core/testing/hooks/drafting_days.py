"""An ordinary day of a drafter: conversations, agents and edits of code in hundreds of slots of one engine."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from fd_core.runner.drafting import Drafter
from fd_core.signals import PREEMPTED_TOKEN_ID
from fd_core.testing.hooks.drafted import DrafterUnderTest
from fd_core.testing.hooks.purity import moving_clocks
from fd_core.testing.kit.days.account import DayAccount, account_of, require_as_good
from fd_core.testing.kit.days.work import shown_parts, talks
from fd_core.testing.kit.growth import require_no_stall
from fd_core.testing.kit.law import require
from fd_core.types import IntArray

_SLOTS: Final = 256
_VOCABULARY: Final = 152_064
_CONTEXT: Final = 32_768
_K: Final = 4
_HOURS: Final = 6
_STEP: Final = 24.0
"""Seconds of the day that a step takes, so that it has each minute and hour."""
_STARTED: Final = 12
"""Requests that start in a step at most."""
_PREEMPTED: Final = 0.003
"""Part of the slots whose text moves to another one in a step."""
_COMPARED: Final = 40
"""Of so many rows, the drafts of one are compared with those of a new drafter."""
_QUOTED: Final = {"code": 0.9, "agent": 0.6, "document": 0.6}
"""Part of an answer that repeats the text before it, by habit; a quarter of others."""


@dataclass(slots=True)
class _Request:
    text: list[int]
    answer: Sequence[int]
    leaves_after: int
    done: int = 0

    @property
    def ended(self) -> bool:
        return self.done >= min(len(self.answer), self.leaves_after)


def _answers(rng: random.Random, habit: str, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return an answer of the same length that quotes the prompt and itself, as users' texts do."""
    made, text = list[int](), list(prompt)
    while len(made) < len(answer):
        count = rng.randrange(4, 60)
        if rng.random() < _QUOTED.get(habit, 0.25):
            begin = rng.randrange(len(text))
            span = text[begin : begin + count]
        else:
            span = list(answer[len(made) : len(made) + min(count, 12)])
        made += span
        text += span
    return made[: len(answer)]


class DraftingDay:
    """Requests of a day in slots of one drafter."""

    def __init__(self, subject: DrafterUnderTest, number: int) -> None:
        self._subject = subject
        rng = random.Random(4)  # noqa: S311
        self._requests = list[tuple[list[int], list[int], int]]()
        for talk in talks(number, vocab_size=_VOCABULARY, longest=_CONTEXT - 64):
            for turn in talk.turns[-2:]:  # the others have the same texts
                answer = _answers(rng, talk.habit, turn.spec.prompt, turn.answer[:300])
                leaves = len(answer) if turn.leaves_after is None else turn.leaves_after
                self._requests.append((list(turn.spec.prompt), answer, leaves))
        rng.shuffle(self._requests)

    def secrets(self) -> list[bytes]:
        """Return parts of prompts, which no log shows."""
        return shown_parts(prompt for prompt, *_ in self._requests)

    def live(self) -> Generator[None, None, Mapping[str, float]]:
        """Serve all requests; yields after each hour."""
        rng, drafter = random.Random(5), self._new(_SLOTS)  # noqa: S311
        running, free, waiting = dict[int, _Request](), [*range(_SLOTS)], self._requests[::-1]
        rows = rejected = 0
        for hour in range(_HOURS):
            left, shown = len(self._requests) * (_HOURS - 1 - hour) // _HOURS, list[tuple[list[int], list[int]]]()
            with require_no_stall("a step of a day", "8"), moving_clocks(self._subject.cls) as move:
                while len(waiting) > left or (hour == _HOURS - 1 and running):
                    move(_STEP)
                    self._admit(drafter, rng, running=running, free=free, waiting=waiting)
                    slots = [slot for slot in rng.sample(sorted(running), len(running)) if rng.random() < 0.95]
                    if slots:
                        tokens, counts = drafter.propose(np.array(slots, np.int32), _K)
                        if (rows + len(slots)) // _COMPARED > rows // _COMPARED:
                            shown.append(([*running[slots[0]].text], tokens[0, : int(counts[0])].tolist()))
                        rows += len(slots)
                        rejected += self._deliver(drafter, running, slots, drafts=tokens, counts=counts)
                    for slot in [slot for slot, request in running.items() if request.ended]:
                        free.append(slot)
                        del running[slot]
            for text, drafts in shown if self._subject.private else ():
                self._compare(text, drafts)
            yield
        return {"rows of forward passes": rows, "rejected drafts": rejected}

    def _admit(
        self,
        drafter: Drafter,
        rng: random.Random,
        running: dict[int, _Request],
        free: list[int],
        waiting: list[tuple[list[int], list[int], int]],
    ) -> None:
        """Start some requests in free slots, and move some texts to others, as preemption does."""
        for _ in range(min(len(free), len(waiting), rng.randrange(_STARTED + 1))):
            slot, (prompt, answer, leaves) = free.pop(rng.randrange(len(free))), waiting.pop()
            running[slot] = _Request([*prompt, answer[0]], answer, leaves, 1)
            drafter.admit(slot, np.array(running[slot].text, np.int32))
        for slot in [slot for slot in running if free and rng.random() < _PREEMPTED]:
            other = free.pop(rng.randrange(len(free)))
            free.append(slot)
            running[other] = running.pop(slot)
            drafter.admit(other, np.array(running[other].text, np.int32))

    def _new(self, slots: int) -> Drafter:
        return self._subject.new(slots, _K, vocab_size=_VOCABULARY, max_model_len=_CONTEXT, block_size=16)

    def _deliver(
        self,
        drafter: Drafter,
        running: Mapping[int, _Request],
        slots: Sequence[int],
        drafts: IntArray,
        counts: IntArray,
    ) -> int:
        """Accept drafts that are the next tokens, and extend the texts; return the number of the others."""
        tokens, lengths, rejected = np.full((len(slots), 1 + _K), -7, np.int32), np.ones(len(slots), np.int32), 0
        for row, slot in enumerate(slots):
            request = running[slot]
            guessed = drafts[row, : int(counts[row])].tolist()
            right = request.answer[request.done : request.done + 1 + _K]
            taken = next((at for at, one in enumerate(guessed) if right[at : at + 1] != [one]), int(counts[row]))
            taken = min(taken, max(len(right) - 1, 0))
            rejected += int(counts[row]) - taken
            given = right[: 1 + taken] or [0]
            tokens[row, : len(given)], lengths[row] = given, len(given)
            request.done += len(given)
            request.text += given
        drafter.extend(np.array(slots, np.int32), tokens, lengths)
        tokens.fill(PREEMPTED_TOKEN_ID)
        return rejected

    def _compare(self, text: Sequence[int], drafts: Sequence[int]) -> None:
        """Compare the drafts after a text with those of a new drafter; one of both may have more."""
        fresh = self._new(1)
        fresh.admit(0, np.array(text, np.int32))
        tokens, counts = fresh.propose(np.zeros(1, np.int32), _K)
        right = tokens[0, : int(counts[0])].tolist()
        both = min(len(drafts), len(right))
        same = drafts[:both] == right[:both] and (right or not drafts)
        require(bool(same), "8", f"after {len(text):,} tokens a slot has the drafts {drafts}, a new drafter {right}")


@cache
def _account_of_core(core: type[Drafter], number: int) -> DayAccount:
    return account_of(DraftingDay(DrafterUnderTest(core, {}), number).live)


def require_good_day(subject: DrafterUnderTest, core: type[Drafter], slack: Mapping[str, float]) -> None:
    """Live a day with a drafter and with one of the core, and compare their accounts."""
    number = 6 if subject.cls.uses_model else 24
    right = _account_of_core(core, number)  # first, as it also fills caches of the process
    mine = DraftingDay(subject, number)
    require_as_good(account_of(mine.live, *mine.secrets()), right, "a day", "8", slack)
