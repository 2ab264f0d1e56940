"""Demand of clients: conversations of one turn or several, whose texts are generated from seeds."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.simulation.workloads.files import number_rows
from fd_core.simulation.workloads.settings import GOLDEN, Draws, Floats, WorkloadSettings, chances, stir, stir_states
from fd_core.types import IntArray

_FIRST_TOKEN = 16
"""Smaller tokens never occur in a text: the end of an answer is one of them."""
_STATES = np.arange(1, 4097, dtype=np.uint64) * GOLDEN
"""Increments of a seed for the first positions."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some tokens of a text. Equal pieces have equal tokens, so texts that begin with equal pieces share a prefix."""

    seed: int
    """64 bits that decide the tokens."""
    tokens: int
    image: bool = False
    """True for an image, whose tokens an encoder computes."""


class UserTurn(msgspec.Struct, frozen=True, gc=False):
    """A request: the client's addition to the conversation, and the length of the model's answer."""

    adds: tuple[Piece, ...]
    """Appended to the whole history, answers included."""
    answer: Piece
    """The model ends its answer after these tokens, unless `max_tokens` ends it before."""
    think: float = 0.0
    """Seconds from the end of the previous answer to this request; unused in the first turn, see `Conversation.at`."""
    max_tokens: int | None = None
    """Limit that the client sends; None leaves it to the model's length limit."""
    patience: float | None = None
    """Seconds after which a client without the whole answer disconnects; None waits for ever."""
    fresh: bool = False
    """Drop the history: the prompt is `adds` alone. Users of a closed loop start over this way."""


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The requests of one client in turn. One that fails or is left ends them, up to the next `fresh` one."""

    name: str
    """Unique in a workload; also the session key for routers."""
    at: float
    """Seconds from the start of the run to the first request."""
    turns: Sequence[UserTurn]
    """Some are generated lazily, in this order."""
    tenant: str = ""
    priority: int = 0


def tokens_of(piece: Piece, vocab_size: int) -> IntArray:
    """Return the tokens of a piece, int32[piece.tokens], each in [16, vocab_size)."""
    return tokens_from(piece, 0, piece.tokens, vocab_size=vocab_size)


def tokens_from(piece: Piece, first: int, count: int, vocab_size: int) -> IntArray:
    """Return `count` tokens of a piece from position `first` on, int32[count], as if it were long enough."""
    if first + count <= len(_STATES):
        states = _STATES[first : first + count]
    else:
        states = np.arange(first + 1, first + count + 1, dtype=np.uint64) * GOLDEN
    return to_tokens(stir_states(states + np.uint64(piece.seed & (2**64 - 1))), vocab_size)


def stirred(seeds: npt.NDArray[np.uint64], places: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a number for each seed and position, by the mixing function of SplitMix64."""
    return stir_states(seeds + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def to_tokens(numbers: npt.NDArray[np.uint64], vocab_size: int) -> IntArray:
    """Return a token of a text for each number."""
    spread = np.uint64(vocab_size - _FIRST_TOKEN)
    return (_FIRST_TOKEN + ((numbers >> np.uint64(33)) * spread >> np.uint64(31))).astype(np.int32)


Ints = npt.NDArray[np.int64]

_MARK_TOKENS = 8
"""Length of the mark that distinguishes a repeated conversation, after its first text, as if a name stood there."""


class Contents(abc.ABC):
    """A source of conversations."""

    notes: tuple[str, ...]
    """Notes for the reader of the results."""
    times: Floats | None
    """Start time of each conversation, in seconds, ascending; None leaves that to the arrivals."""

    @property
    def requests(self) -> int | None:
        """Number of requests; None if it is infinite."""
        return None

    @abc.abstractmethod
    def conversations(
        self, settings: WorkloadSettings, draws: Draws, user: int | None = None
    ) -> Iterator[tuple[UserTurn, ...]]:
        """Yield the turns of each conversation, in the order of the file if there is one.

        `user`: a user of a closed loop, whose conversations alone are yielded, independent of other users.
        Contents with `times` are never replayed in a closed loop and ignore it.
        """


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


class MadeContents(Contents):
    """Conversations whose lengths, turns and pauses are drawn."""

    def __init__(self, settings: WorkloadSettings) -> None:
        """Raises `ConfigError` if the file of lengths cannot be used."""
        self._pairs = None if settings.lengths is None else number_rows(settings.lengths, 2, settings.longest)
        self.notes, self.times = (), None

    def conversations(
        self, settings: WorkloadSettings, draws: Draws, user: int | None = None
    ) -> Iterator[tuple[UserTurn, ...]]:
        """Yield conversations without end."""
        draws = draws if user is None else draws.of(user)
        lengths = self._lengths(settings, draws)
        added = None if settings.adds is None else draws.tokens("adds", settings.adds, settings.longest)
        turns = draws.tokens("turns", settings.turns, 10_000)
        think = draws.seconds("think", settings.think)
        seeds, closed = draws.seeds("texts"), settings.arrivals == "closed"
        limits, patience = _limits(settings, draws), _patience(settings, draws)
        num_images, image_tokens = settings.images or (0, 0)
        images = (Piece(seed, image_tokens, image=True) for seed in draws.seeds("images"))
        for prefix, count in zip(self._prefixes(settings, draws), turns, strict=False):
            conversation: list[UserTurn] = []
            for turn in range(count):
                prompt, output = next(lengths)
                new = Piece(next(seeds), next(added) if turn and added is not None else prompt)
                answer, pause = Piece(next(seeds), output), next(think) if turn or closed else 0.0
                adds = (*(() if turn else prefix), *itertools.islice(images, num_images), new)
                conversation.append(UserTurn(adds, answer, pause, next(limits), next(patience)))
            yield tuple(conversation)

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
class RecordedRequests(Contents):
    """Requests of a trace as columns, each a separate conversation: 24 bytes for a request, and 8 for a hash ID."""

    notes: tuple[str, ...]
    times: Floats
    """Ascending, the first 0."""
    prompts: Ints
    outputs: Ints
    blocks: npt.NDArray[np.uint64]
    """Seeds of the blocks of all prompts, concatenated; equal hash IDs have equal seeds."""
    ends: Ints
    """End index of the blocks of each request; empty if there are none."""
    block: int
    """Tokens of a block."""
    images: Mapping[int, Sequence[int]]
    """Tokens of the images of a request, by its index; they precede its last text."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.times)

    def conversations(
        self, settings: WorkloadSettings, draws: Draws, user: int | None = None
    ) -> Iterator[tuple[UserTurn, ...]]:
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
            adds[-1:-1] = [Piece(next(own), tokens, image=True) for tokens in self.images.get(at, ())]
            yield (UserTurn(tuple(adds), Piece(next(own), output), 0.0, next(limits), next(patience)),)


@dataclass(frozen=True, slots=True)
class TextContents(Contents):
    """Recorded conversations with texts and without times."""

    notes: tuple[str, ...]
    texts: Sequence[tuple[UserTurn, ...]]
    """Texts alone: pauses, limits and patience are drawn."""
    repeat: int = 1
    times: None = None

    @property
    def requests(self) -> int:
        """Number of requests of all conversations together."""
        return self.repeat * sum(map(len, self.texts))

    def conversations(
        self, settings: WorkloadSettings, draws: Draws, user: int | None = None
    ) -> Iterator[tuple[UserTurn, ...]]:
        """Yield conversations in the order of the file; one in `settings.users` for a user."""
        which = range(self.repeat * len(self.texts))
        if user is not None:
            which, draws = which[user :: settings.users], draws.of(user)
        think, closed = draws.seconds("think", settings.think), settings.arrivals == "closed"
        limits, patience = _limits(settings, draws), _patience(settings, draws)
        for number in which:
            copy, at = divmod(number, len(self.texts))
            turns: list[UserTurn] = []
            for turn in self.texts[at]:
                adds, pause = turn.adds, next(think) if turns or closed else 0.0
                if copy and not turns:
                    adds = (adds[0], Piece(int(stir(copy)[0]), _MARK_TOKENS), *adds[1:])
                turns.append(UserTurn(adds, turn.answer, pause, max_tokens=next(limits), patience=next(patience)))
            yield tuple(turns)
