"""Recorded conversations as requests: the prompt of each turn is the whole conversation so far."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cache import PrefixCache, tokens_of


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests in their order: turn k+1 begins with all messages of turn k."""

    name: str
    turns: tuple[tuple[Mapping[str, str], ...], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the replay of each recorded session, and its number of copies."""

    copies: int = 4
    max_turns: int = 12
    max_chars: int = 120_000
    seed: int = 0


def conversations(sessions: Mapping[str, Sequence[Mapping[str, str]]], limits: Limits) -> list[Conversation]:
    """Return every session `copies` times, in an order drawn from the seed.

    Copies have the first message in common, which holds the instructions of a project, up to a mark at its end.
    """
    played = []
    for name, messages in sessions.items():
        for copy in range(limits.copies):
            user = f"{name[:8]}-{copy}"
            turns = split(_marked(messages, user), limits.max_turns, limits.max_chars)
            if turns:
                played.append(Conversation(user, turns))
    random.Random(limits.seed).shuffle(played)
    return played


def _marked(messages: Sequence[Mapping[str, str]], user: str) -> list[Mapping[str, str]]:
    first = {**messages[0], "content": f"{messages[0]['content']}\n[conversation {user}]"}
    return [first, *messages[1:]]


def split(
    messages: Sequence[Mapping[str, str]], max_turns: int, max_chars: int
) -> tuple[tuple[Mapping[str, str], ...], ...]:
    """Return one request for each user message: all messages up to it. Those beyond a limit are left out."""
    turns: list[tuple[Mapping[str, str], ...]] = []
    size = 0
    for at, message in enumerate(messages):
        size += len(message["content"])
        if size > max_chars or len(turns) == max_turns:
            break
        if message["role"] == "user":
            turns.append(tuple(messages[: at + 1]))
    return tuple(turns)


@dataclass(frozen=True, slots=True)
class Size:
    """Totals of a trace."""

    conversations: int
    requests: int
    prompt_tokens: int
    longest_tokens: int
    possible_hit_rate: float
    """Hits of one worker without evictions."""


def size_of(played: Sequence[Conversation], text_of: Any) -> Size:
    """Return the totals of a trace; `text_of` renders the messages of a request like the workers."""
    cache = PrefixCache(10**9)
    longest_tokens = 0
    for turn in range(max(len(one.turns) for one in played)):
        for one in played:
            if turn < len(one.turns):
                text = text_of(one.turns[turn])
                longest_tokens = max(longest_tokens, tokens_of(text))
                cache.compute(text)
    seen = cache.seen
    return Size(len(played), seen.requests, seen.prompt_tokens, longest_tokens, seen.cached_tokens / seen.prompt_tokens)
