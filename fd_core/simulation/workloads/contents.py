"""What conversations hold: drawn from distributions, or taken from a file that was read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fd_core.simulation.workloads.conversations import Piece, UserTurn
from fd_core.simulation.workloads.draws import Draws, chances, stir
from fd_core.simulation.workloads.files import number_rows
from fd_core.simulation.workloads.settings import WorkloadSettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MARK_TOKENS = 8
"""Where a repeated conversation parts from the first: behind its first text, as if a name stood there."""


class Contents(Protocol):
    """A source of conversations."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever reads the results has to know of it."""
        ...

    @property
    def requests(self) -> int | None:
        """How many it has; None if it never ends."""
        ...

    @property
    def times(self) -> Floats | None:
        """When each conversation begins, in seconds, ascending; None leaves that to the arrivals."""
        ...

    def conversations(self, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield the turns of each conversation."""
        ...

    def of_user(self, user: int, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield the turns of each conversation of a user of a closed loop, who pauses before each of them."""
        ...


def clients_of(settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[str, int]]:
    """Yield the tenant and the priority of each conversation."""
    tenants, priorities = settings.tenants or (("", 1.0),), settings.priorities
    whose = draws.indices("tenants", chances([weight for _, weight in tenants]))
    ranks = draws.indices("priorities", chances([weight for _, weight in priorities]))
    levels = [int(name) for name, _ in priorities]
    for tenant, rank in zip(whose, ranks, strict=False):
        yield tenants[tenant][0], levels[rank]


def _limits(settings: WorkloadSettings, draws: Draws) -> Iterator[int | None]:
    if settings.max_tokens is None:
        return itertools.repeat(None)
    return draws.tokens("max_tokens", settings.max_tokens, 1 << 24)


def _patience(settings: WorkloadSettings, draws: Draws) -> Iterator[float | None]:
    if not settings.leave:
        return itertools.repeat(None)
    leaves = draws.indices("leave", chances([settings.leave, 1 - settings.leave]))
    waits = draws.seconds("patience", settings.patience)
    return (None if stays else wait for stays, wait in zip(leaves, waits, strict=False))


class MadeContents:
    """Conversations whose lengths, turns and pauses are drawn."""

    requests: None = None
    times: None = None

    def __init__(self, settings: WorkloadSettings) -> None:
        """Raises `ConfigError` if the file of lengths cannot be used."""
        self._pairs = None if settings.lengths is None else number_rows(settings.lengths, 2, settings.longest)
        self.notes: tuple[str, ...] = ()

    def conversations(self, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield conversations without end."""
        lengths = self._lengths(settings, draws)
        added = None if settings.adds is None else draws.tokens("adds", settings.adds, settings.longest)
        turns = draws.tokens("turns", settings.turns, 10_000)
        think = draws.seconds("think", settings.think)
        seeds, closed = draws.seeds("texts"), settings.arrivals == "closed"
        limits, patience = _limits(settings, draws), _patience(settings, draws)
        for prefix, count in zip(self._prefixes(settings, draws), turns, strict=False):
            prompt, output = next(lengths)
            adds = (*prefix, Piece(next(seeds), prompt))
            answer = Piece(next(seeds), output)
            first = UserTurn(adds, answer, next(think) if closed else 0.0, next(limits), next(patience))
            if count == 1:
                yield (first,)
                continue
            said = [first]
            for _ in range(count - 1):
                prompt, output = next(lengths)
                adds = (Piece(next(seeds), prompt if added is None else next(added)),)
                answer = Piece(next(seeds), output)
                said.append(UserTurn(adds, answer, next(think), next(limits), next(patience)))
            yield tuple(said)

    def of_user(self, user: int, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield the conversations of a user, without end and the same whatever other users do."""
        return self.conversations(settings, draws.of(user))

    def _lengths(self, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[int, int]]:
        if self._pairs is None:
            prompts = draws.tokens("prompt", settings.prompt, settings.longest)
            return zip(prompts, draws.tokens("output", settings.output, settings.longest), strict=False)
        pairs = [(max(round(prompt), 1), max(round(output), 1)) for prompt, output in self._pairs.tolist()]
        return (pairs[at] for at in draws.indices("lengths", chances(np.ones(len(pairs)))))

    def _prefixes(self, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[Piece, ...]]:
        if settings.prefixes is None:
            return itertools.repeat(())
        count, tokens = settings.prefixes
        popularity = chances(np.arange(1.0, count + 1) ** -settings.popularity)
        seeds = stir(stir(draws.seed) + np.arange(count, dtype=np.uint64)).tolist()
        pieces = [(Piece(seed, tokens),) for seed in seeds]
        return (pieces[at] for at in draws.indices("prefixes", popularity))


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """Requests of a trace as columns, each a conversation of its own: 24 bytes for a request, and 8 for a hash id."""

    notes: tuple[str, ...]
    times: Floats
    """Ascending, the first 0."""
    prompts: Ints
    outputs: Ints
    blocks: npt.NDArray[np.uint64]
    """Seeds of the blocks of all prompts, one behind the other; equal hash ids have equal seeds."""
    ends: Ints
    """Behind the last block of each request; empty if there are none."""
    block: int
    """Tokens of a block."""

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.times)

    def conversations(self, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield conversations of one turn."""
        limits, patience = _limits(settings, draws), _patience(settings, draws)
        own = draws.seeds("texts")
        for at in range(len(self.times)):
            prompt, output = int(self.prompts[at]), int(self.outputs[at])
            seeds = self.blocks[self.ends[at - 1] if at else 0 : self.ends[at]].tolist() if len(self.ends) else ()
            adds = []
            for seed in seeds:
                if prompt > 0:
                    adds.append(Piece(seed, min(self.block, prompt)))
                    prompt -= self.block
            if prompt > 0:
                adds.append(Piece(next(own), prompt))
            yield (UserTurn(tuple(adds), Piece(next(own), output), 0.0, next(limits), next(patience)),)

    def of_user(self, user: int, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield nothing that was recorded: it has times of its own."""
        raise NotImplementedError("a trace with times is no closed loop")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What was added to a conversation, and what was answered."""

    adds: tuple[Piece, ...]
    answer: Piece


@dataclass(frozen=True, slots=True)
class TextContents:
    """Recorded conversations with texts and without times."""

    notes: tuple[str, ...]
    told: Sequence[tuple[RecordedTurn, ...]]
    repeat: int = 1
    times: None = None

    @property
    def requests(self) -> int:
        """How many requests all conversations have together."""
        return self.repeat * sum(map(len, self.told))

    def conversations(self, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield conversations in the order of the file."""
        return self._turns(range(self.repeat * len(self.told)), settings, draws)

    def of_user(self, user: int, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        """Yield every so many-th conversation."""
        return self._turns(range(user, self.repeat * len(self.told), settings.users), settings, draws.of(user))

    def _turns(self, which: range, settings: WorkloadSettings, draws: Draws) -> Iterator[tuple[UserTurn, ...]]:
        think, closed = draws.seconds("think", settings.think), settings.arrivals == "closed"
        limits, patience = _limits(settings, draws), _patience(settings, draws)
        for number in which:
            copy, at = divmod(number, len(self.told))
            turns: list[UserTurn] = []
            for turn in self.told[at]:
                adds, pause = turn.adds, next(think) if turns or closed else 0.0
                if copy and not turns:
                    adds = (adds[0], Piece(int(stir(copy)[0]), _MARK_TOKENS), *adds[1:])
                turns.append(UserTurn(adds, turn.answer, pause, next(limits), next(patience)))
            yield tuple(turns)
