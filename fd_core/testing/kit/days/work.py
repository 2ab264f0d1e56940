"""The requests of a day: conversations, agents, documents, reasoning, batches and embeddings of several tenants.

Lengths are those of public traces in their order of magnitude: prompts of tens to a hundred thousand tokens, answers of
tens to thousands, conversations of one to forty turns, each of whose prompts begins with the one before and its answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np

from fd_core.types import Pooling, Reasoning, RequestSpec, SamplingParams

HOUR: Final = 3600.0
"""Seconds."""


_SHOWN: Final = 5
"""Pairs of tokens of a prompt that no log shows."""


class DayTurn(NamedTuple):
    """A request of a conversation."""

    pause: float
    """Seconds after the answer before, or of the day before the first one."""
    spec: RequestSpec
    answer: tuple[int, ...]
    """Tokens of the model, at most `max_tokens`; the prompt of the next turn continues it."""
    leaves_after: int | None = None
    """Tokens after which the client closes its connection."""


class Talk(NamedTuple):
    """Turns of one user, each after the answer to the one before."""

    habit: str
    session: str
    """Named by the client, or empty."""
    turns: Sequence[DayTurn]
    shared: int = 0
    """Tokens of the system prompt, which other conversations have as well."""


@dataclass(frozen=True)
class _Habit:
    share: float
    """Part of all conversations."""
    shared: tuple[int, int]
    """Tokens of the system prompt of all, and number of different ones."""
    turns: tuple[int, int]
    asked: tuple[int, int]
    """Tokens of a first message."""
    later: tuple[int, int]
    """Tokens of each later one, such as results of tools."""
    answered: tuple[int, int]
    pause: tuple[float, float]
    """Seconds between turns."""
    tenant: str = "a"
    priority: int = 0
    at_once: int = 1
    """Conversations that begin together."""


_HABITS: Final = {
    "chat": _Habit(0.40, (800, 3), (1, 12), (8, 400), (5, 400), (20, 800), (5.0, 120.0)),
    "agent": _Habit(0.15, (3000, 2), (5, 40), (30, 500), (20, 4000), (15, 300), (0.1, 5.0), tenant="b"),
    "document": _Habit(0.05, (200, 1), (1, 5), (8000, 100_000), (10, 60), (50, 600), (10.0, 200.0), tenant="c"),
    "reasoning": _Habit(0.10, (60, 1), (1, 3), (50, 1000), (10, 200), (1000, 8000), (20.0, 200.0)),
    "code": _Habit(0.15, (0, 1), (1, 6), (500, 6000), (1, 30), (2, 60), (0.3, 3.0), tenant="b"),
    "batch": _Habit(0.10, (400, 1), (1, 1), (50, 2000), (1, 1), (5, 200), (0.0, 0.0), "d", 10, at_once=64),
    "embedding": _Habit(0.05, (0, 1), (1, 1), (20, 500), (1, 1), (1, 1), (0.0, 0.0), tenant="c", at_once=16),
}
_GRAMMAR: Final = 'start: "{" /[a-z ]*/ "}"'


def talks(
    number: int, *, hours: int = 8, vocab_size: int = 32_000, longest: int = 131_072, seed: int = 0
) -> list[Talk]:
    """Return conversations in the order of their begin; equal arguments give equal ones.

    No prompt and answer together exceed `longest` tokens; `number` is that of all conversations.
    """
    made = each_talk(number, hours=hours, vocab_size=vocab_size, longest=longest, seed=seed)
    return sorted(made, key=lambda talk: talk.turns[0].pause)


def shown_parts(prompts: Iterable[Sequence[int]]) -> list[bytes]:
    """Return parts of some prompts as a log would show them, of those that differ."""
    found = set[tuple[int, int]]()
    for prompt in prompts:
        pairs = (pair for pair in pairwise(prompt) if min(pair) > 10_000 and pair[0] != pair[1])
        found.update(islice(pairs, _SHOWN))
        if len(found) > 40 * _SHOWN:
            break
    return [f"{one}{between}{other}".encode() for one, other in found for between in (", ", " ")]


def each_talk(
    number: int, *, hours: int, vocab_size: int = 32_000, longest: int = 131_072, seed: int = 0
) -> Iterator[Talk]:
    """Yield these conversations by habit; a thousand of them take about a GiB at once."""
    rng = random.Random(seed)  # noqa: S311
    for name, habit in _HABITS.items():
        shared = [_tokens(rng, habit.shared[0], vocab_size) for _ in range(habit.shared[1])]
        count = max(1, round(number * habit.share))
        begin = 0.0
        for at in range(count):
            if at % habit.at_once == 0:
                begin = rng.uniform(0.0, hours * HOUR)
            who = f"{name}-{at}"
            system = shared[min(int(rng.expovariate(1.5)), len(shared) - 1)]
            turns = [*_turns(rng, name, who, system, begin, vocab_size, longest)]
            if turns:
                yield Talk(name, who if at % 3 == 0 else "", turns, len(system))


def _turns(
    rng: random.Random, name: str, who: str, system: tuple[int, ...], begin: float, vocab_size: int, longest: int
) -> Iterator[DayTurn]:
    habit = _HABITS[name]
    prompt = system
    for number in range(round(_between(rng, habit.turns))):
        message = round(_between(rng, habit.later if number else habit.asked))
        answered = round(_between(rng, habit.answered))
        message = min(message, longest - len(prompt) - answered)
        if message < 1:
            return
        prompt += _tokens(rng, message, vocab_size)
        spec = RequestSpec(
            request_id=f"{who}.{number}",
            prompt=prompt,
            params=_params(rng, name, answered),
            eos_token_ids=(2,) if name != "code" else (2, 3),
            priority=habit.priority,
            tenant=habit.tenant,
            cache_salt=habit.tenant if name == "document" else "",
            pooling=Pooling("mean") if name == "embedding" else None,
            adapter="ad" * 32 if name == "agent" and who.endswith("0") else "",
        )
        answer = _tokens(rng, answered, vocab_size)
        leaves = rng.randrange(answered) if rng.random() < (0.3 if name == "code" else 0.03) else None
        yield DayTurn(_between(rng, habit.pause) if number else begin, spec, answer, leaves)
        prompt += answer


def _params(rng: random.Random, name: str, answered: int) -> SamplingParams:
    """Return what clients of this habit ask for; their limit of tokens is the answer's length, or a round number."""
    params = SamplingParams(
        max_tokens=answered if rng.random() < 0.3 else 1 << (answered - 1).bit_length(), seed=rng.getrandbits(64)
    )
    changes: dict[str, object] = {"temperature": rng.choice([0.6, 0.7, 1.0]), "top_p": rng.choice([0.9, 0.95, 1.0])}
    match name:
        case "chat":
            changes |= rng.choice(
                [{}, {}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"top_k": 40}, {"min_p": 0.05}]
            )
        case "agent":
            changes = {"temperature": 0.0, "grammar": rng.choice([None, _GRAMMAR])}
        case "reasoning":
            changes |= {
                "reasoning": Reasoning(end=(7,), max_tokens=rng.choice([None, 4096])),
                "repetition_penalty": 1.05,
            }
        case "code":
            changes = {"temperature": 0.0, "stop_token_ids": (13,), "bad_words_token_ids": rng.choice([(), ((5, 6),)])}
        case "batch":
            changes = {
                "temperature": 0.0,
                "logprobs": 5,
                "prompt_logprobs": rng.choice([None, 1]),
                "allowed_token_ids": rng.choice([None, (20, 30)]),
                "ignore_eos": True,
                "min_tokens": 1,
            }
        case "document":
            changes |= {"logit_bias": rng.choice([None, {9: -100.0}])}
        case _:
            pass
    return msgspec.structs.replace(params, **changes)


def _between(rng: random.Random, limits: tuple[float, float]) -> float:
    """Return a number whose logarithm is uniform: most are small, some are very large."""
    low, high = limits
    return low if high <= low else math.exp(rng.uniform(math.log(low), math.log(high)))


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """Return token ids from 16 on, of which the first are frequent, as words are."""
    draws = np.random.default_rng(rng.getrandbits(64)).random(count)
    return tuple((16 + (vocab_size - 16) * draws**3).astype(np.int64).tolist())
