"""KV outside the device, as the scheduler sees it: who waits for what, and which blocks an operation holds.

Pure, as the scheduler is: operations leave as effects, what became of them comes back as completions
(`fd_core.kv.effects`). A block that an operation reads or writes is pinned from the effect to its completion, so nobody
else gets it, whatever happens to the request meanwhile.

    waiting --ask--> Lookup --found--> load or recompute --load--> Load --loaded--> running
    running --save--> Save --saved--> pins gone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from fd_core.kv.blocks import BlockPool
from fd_core.kv.effects import Cancel, Effect, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.metrics import counter
from fd_core.scheduling.requests import Request
from fd_core.scheduling.tradeoff import Choice, Tradeoff
from fd_core.types import IntArray, frozen

__all__ = ["Arrival", "KeepKV", "Storage", "StorageCounters"]

_MAX_REMEMBERED = 1 << 20
"""Keys remembered as stored; older ones may be stored a second time."""


class StorageCounters(msgspec.Struct, kw_only=True):
    """What happened since the start; only grows."""

    loads: Annotated[int, counter("kv_loads", "Requests that waited for KV from the host tier or the store.")] = 0
    loaded_tokens: Annotated[int, counter("kv_restored_tokens", "Tokens not computed because their KV was loaded.")] = 0
    lost_tokens: Annotated[
        int, counter("kv_lost_tokens", "Tokens computed because the load of their KV failed or brought less.")
    ] = 0
    declined: Annotated[
        int, counter("kv_declined_loads", "Loads not begun because computing was estimated to be faster.")
    ] = 0
    declined_tokens: Annotated[
        int, counter("kv_declined_tokens", "Tokens computed because computing was estimated to beat loading their KV.")
    ] = 0
    saved_tokens: Annotated[
        int, counter("kv_saved_tokens", "Tokens whose KV was copied from the device to the host tier.")
    ] = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A load came to its end: the request in `slot` may compute."""

    slot: int
    request: Request
    tokens: int
    """Leading tokens whose KV is in the request's blocks, all of them less than it knows."""
    cached: int
    """How many of them nobody had to compute for it."""


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Whose KV is kept outside the device."""

    preempted: bool = True
    """That of requests that are taken back for want of blocks."""
    finished: bool = False
    """That of requests that are done, for prompts that begin alike."""
    persist: bool = False
    """Whether a store keeps it beyond the host tier."""


@dataclass(frozen=True, slots=True)
class _Loading:
    request: Request
    slot: int
    keys: tuple[bytes, ...]
    blocks: IntArray
    first: int


class Storage:
    """Operations in flight; owned by one scheduler."""

    def __init__(self, pool: BlockPool, block_size: int, keep: KeepKV) -> None:
        self.keep = keep
        self.tradeoff = Tradeoff()
        self.counters = StorageCounters()
        self._pool = pool
        self._block_size = block_size
        self._effects: list[Effect] = []
        self._choices: list[Choice] = []
        self._operations = 0
        self._lookups: dict[int, tuple[Request, tuple[bytes, ...]]] = {}
        self._loads: dict[int, _Loading] = {}
        self._saves: dict[int, tuple[tuple[bytes, ...], IntArray]] = {}
        self._stored: dict[bytes, None] = {}
        """Keys believed to be in the store, oldest first."""

    @property
    def busy(self) -> bool:
        """Whether an operation holds blocks or a request."""
        return bool(self._loads or self._saves or self._lookups)

    @property
    def num_saving(self) -> int:
        """Saves whose blocks are still being read."""
        return len(self._saves)

    def take_effects(self) -> list[Effect]:
        """Return the effects decided since the last call; the caller performs them in order."""
        effects, self._effects = self._effects, []
        return effects

    def take_choices(self) -> list[Choice]:
        """Return the decisions made since the last call, for a trace."""
        choices, self._choices = self._choices, []
        return choices

    # Lookups ----------------------------------------------------------------------------------------------

    def ask(self, request: Request, keys: list[bytes]) -> None:
        """Ask how much of a waiting request's prefix is held outside the device; it waits for the answer.

        Nothing is asked while the device holds it all: see `ask_after_all`. Who was taken back asks at once, since its
        blocks are wanted.
        """
        request.held = request.held_on_host = 0
        request.asked = False
        if request.preemptions or len(self._pool.match(keys)) < len(keys):
            self.ask_after_all(request, keys)

    def ask_after_all(self, request: Request, keys: list[bytes]) -> bool:
        """Ask for a waiting request whose prefix is not on the device; False if it was asked since it waits."""
        if request.asked:
            return False
        request.asked = True
        request.lookup = self._next()
        named = tuple(keys)
        self._lookups[request.lookup] = (request, named)
        self._effects.append(Lookup(request.lookup, named))
        return True

    def found(self, answer: Found) -> None:
        """A lookup was answered."""
        request, keys = self._lookups.pop(answer.operation)
        for key in keys[answer.total :]:
            self._stored.pop(key, None)
        if request.lookup == answer.operation:
            request.lookup = None
            request.held_on_host, request.held = answer.host, answer.total

    def forget(self, request: Request) -> None:
        """A waiting request left; nobody needs the answer to its lookup."""
        if request.lookup is not None:
            self._effects.append(Cancel(request.lookup))
            request.lookup = None

    # Loads ------------------------------------------------------------------------------------------------

    def worth_loading(self, request: Request, first: int, count: int) -> int:
        """Return how many of `count` prefix blocks to load behind the `first` ones that the device has; 0 for none."""
        upto = min(request.held, count)
        if upto <= first:
            return 0
        host = max(min(request.held_on_host, upto) - first, 0)
        choice = self.tradeoff.choose(request.spec.request_id, host, upto - first - host, self._block_size)
        self._choices.append(choice)
        if not choice.load:
            self.counters.declined += 1
            self.counters.declined_tokens += choice.tokens
            return 0
        return upto - first

    def load(self, request: Request, slot: int, keys: list[bytes], blocks: IntArray, first: int) -> None:
        """Bring `keys` into `blocks`, which `slot` owns from entry `first` of its table on."""
        request.load = self._next()
        loading = _Loading(request, slot, tuple(keys), frozen(blocks.copy()), first)
        self._pool.pin(loading.blocks)
        self._loads[request.load] = loading
        self._effects.append(Load(request.load, loading.keys, loading.blocks, slot, request.spec.request_id))
        self.counters.loads += 1

    def abandon(self, request: Request) -> None:
        """A loading request was aborted; its blocks stay pinned until the load is over."""
        if request.load is not None:
            self._effects.append(Cancel(request.load))
            request.load = None

    def loaded(self, answer: Loaded) -> Arrival | None:
        """A load is over; return whose it was, None if the request left meanwhile."""
        loading = self._loads.pop(answer.operation)
        self._pool.unpin(loading.blocks)
        request = loading.request
        if request.load != answer.operation:
            return None
        request.load = None
        request.held = request.held_on_host = 0
        count = min(answer.blocks, len(loading.keys))
        self.counters.loaded_tokens += count * self._block_size
        self.counters.lost_tokens += (len(loading.keys) - count) * self._block_size
        self.not_stored(loading.keys[count:])  # damaged or gone, perhaps: whoever computes them stores them again
        tokens = (loading.first + count) * self._block_size
        return Arrival(loading.slot, request, tokens, tokens)

    # Saves ------------------------------------------------------------------------------------------------

    def save(self, keys: list[bytes], blocks: IntArray) -> None:
        """Keep settled `blocks` under `keys`; called while they still have an owner."""
        chosen = [index for index, key in enumerate(keys) if not (self.keep.persist and key in self._stored)]
        if not chosen:
            return
        named = tuple(keys[index] for index in chosen)
        copied = frozen(blocks[chosen])
        self._pool.pin(copied)
        operation = self._next()
        self._saves[operation] = (named, copied)
        self._effects.append(Save(operation, named, copied, self.keep.persist))
        if self.keep.persist:
            self._stored.update(dict.fromkeys(named))
            while len(self._stored) > _MAX_REMEMBERED:
                del self._stored[next(iter(self._stored))]

    def not_stored(self, keys: Iterable[bytes]) -> None:
        """Blocks that were saved did not get to the store: they are to be saved again when they are used again."""
        for key in keys:
            self._stored.pop(key, None)

    def saved(self, answer: Saved) -> None:
        """A save no longer reads its blocks."""
        keys, blocks = self._saves.pop(answer.operation)
        self._pool.unpin(blocks)
        self.counters.saved_tokens += min(answer.blocks, len(keys)) * self._block_size
        for key in keys[answer.blocks :]:
            self._stored.pop(key, None)

    def _next(self) -> int:
        self._operations += 1
        return self._operations
