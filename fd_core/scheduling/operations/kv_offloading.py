"""KV storage outside the device, from the scheduler's side: wait reasons of requests, and saved and loaded blocks.

waiting --ask--> Lookup --found--> load or recompute --load--> Load --loaded--> running
running --save--> Save --saved--> the host tier stores it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.effects import operations as effects
from fd_core.kv.blocks import BlockPool
from fd_core.kv.prefix import block_keys, ordered_blocks
from fd_core.scheduling.operations.registry import Operations
from fd_core.scheduling.requests import Request
from fd_core.types import IntArray
from fd_core.types.metrics import counter, gauge

_DOUBT = 0.9
"""Share of the estimated load time that remains after each decline."""
_MAX_STORED_KEYS = 1 << 20
"""Keys remembered as stored; blocks whose keys were forgotten may be stored a second time."""


class Pace(msgspec.Struct, frozen=True):
    """Measured costs in seconds; None while nothing was measured."""

    prefill_token: Annotated[
        float | None, gauge("kv_pace_prefill_token_seconds", "Measured time to compute one prompt token, in seconds.")
    ] = None
    host_block: Annotated[
        float | None,
        gauge("kv_pace_host_block_seconds", "Measured time to load one KV block from the host tier, in seconds."),
    ] = None
    store_block: Annotated[
        float | None,
        gauge("kv_pace_store_block_seconds", "Measured time to load one KV block from the store, in seconds."),
    ] = None
    store_latency: float = 0.0
    """Time until the first block of the store arrives."""


class LoadOrRecompute:
    """Decides per request by estimates; each decision not to load shrinks the load estimate, so loading is retried."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._trust = 1.0

    def prefill_measured(self, pace: effects.PrefillPaceMeasured) -> None:
        """Update the cost of computing."""
        self.pace = msgspec.structs.replace(self.pace, prefill_token=pace.token)

    def load_measured(self, pace: effects.LoadPaceMeasured) -> None:
        """Update the cost of loading."""
        latency = pace.store_latency or 0.0
        self.pace = Pace(self.pace.prefill_token, pace.host_block, pace.store_block, store_latency=latency)

    def decide(self, request_id: str, host_blocks: int, store_blocks: int, tokens: int) -> effects.LoadDecision:
        """Compare loading `host_blocks` and `store_blocks` with recomputing their `tokens`."""
        recompute = None if self.pace.prefill_token is None else self.pace.prefill_token * tokens
        load = self._load_seconds(host_blocks, store_blocks)
        worth = load is None or recompute is None or load * self._trust < recompute
        self._trust = 1.0 if worth else self._trust * _DOUBT
        return effects.LoadDecision(request_id, worth, host_blocks, store_blocks, tokens, load, recompute)

    def _load_seconds(self, host_blocks: int, store_blocks: int) -> float | None:
        total = 0.0
        for blocks, each in ((host_blocks, self.pace.host_block), (store_blocks, self.pace.store_block)):
            if blocks and each is None:
                return None
            total += blocks * (each or 0.0)
        return total + (self.pace.store_latency if store_blocks else 0.0)


class OffloadCounters(msgspec.Struct, kw_only=True):
    """Counters since the start; monotonic."""

    loads: Annotated[int, counter("kv_loads", "Requests that waited for KV from the host tier or the store.")] = 0
    loaded_tokens: Annotated[int, counter("kv_restored_tokens", "Tokens not computed because their KV was loaded.")] = 0
    lost_tokens: Annotated[
        int, counter("kv_lost_tokens", "Tokens recomputed because the load of their KV failed or was incomplete.")
    ] = 0
    declined: Annotated[
        int, counter("kv_declined_loads", "Loads skipped because recomputing was estimated to be faster.")
    ] = 0
    declined_tokens: Annotated[
        int,
        counter(
            "kv_declined_tokens", "Tokens recomputed because that was estimated to be faster than loading their KV."
        ),
    ] = 0
    saved_tokens: Annotated[
        int, counter("kv_saved_tokens", "Tokens whose KV was copied from the device to the host tier.")
    ] = 0


class OffloadSelection(msgspec.Struct, frozen=True):
    """Selection of the requests whose KV is stored outside the device."""

    preempted: bool = True
    """Requests that are preempted because blocks run out."""
    finished: bool = False
    """Requests that end, for later prompts with the same prefix."""
    persist: bool = False
    """True if a KV store persists the KV beyond the host tier."""
    shared: bool = True
    """True if lookups may find KV that this scheduler never saved, which needs a store."""

    @property
    def anything(self) -> bool:
        """Return True if any KV is stored outside the device."""
        return self.preempted or self.finished


@dataclass(slots=True)
class KVOffloading:
    """Decides what is saved, looked up and loaded; owned by one scheduler."""

    pool: BlockPool
    operations: Operations
    block_size: int
    keep: OffloadSelection
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    load_or_recompute: LoadOrRecompute = field(default_factory=LoadOrRecompute)
    groups: LayerGroups = ONE_GROUP
    stores: bool = field(init=False)
    """True if any KV may be stored outside the device now."""
    _whole_saves: dict[int, int] = field(default_factory=dict)
    """Leading table entries of each save that skipped no block which is stored already."""
    _sliding_lookups: set[int] = field(default_factory=set)
    """Lookups of the blocks of sliding groups, after those of the other groups were found."""
    _stored_keys: dict[bytes, None] = field(default_factory=dict)
    """Keys believed to be in the store, oldest first."""

    def __post_init__(self) -> None:
        self.stores = self.keep.shared

    def begin_wait(self, request: Request, keys: Sequence[bytes]) -> int | None:
        """Return the operation that a request waits for to learn its stored blocks, if there is one.

        The device itself may have the whole prefix: then no lookup is issued, see `start_lookup`. A preempted request
        waits for the save of its KV, whose completion reports what the host tier stores, instead of a lookup.
        """
        request.lookup_issued = False
        if request.save is not None:
            request.lookup_issued = True
            return request.save
        if request.stored:
            request.lookup_issued = True
            return None
        if request.preemptions or len(self.pool.match(keys)) < len(keys):
            return self.start_lookup(request, keys)
        return None

    def start_lookup(self, request: Request, keys: Sequence[bytes]) -> int | None:
        """Look up how much of a waiting request's prefix is stored; None if done since it began to wait.

        After the blocks that lookup found, those of sliding groups are looked up.
        """
        if request.lookup_issued or not (self.stores and self.keep.anything and keys and self.groups.whole):
            return None
        request.lookup_issued, groups = True, self.groups
        if request.stored:
            upto = request.stored * self.block_size
            named = block_keys(request.chain, groups, range(0), groups.read_after(0, upto, self.block_size))
            self._sliding_lookups.add(self.operations.next)
        else:
            named = block_keys(keys, groups, range(len(keys)), range(0))
        request.lookup = self.operations.begin(effects.Lookup(self.operations.next, named), request)
        return request.lookup

    def found(self, answer: effects.Found) -> None:
        """Apply the result of a lookup.

        A prefix that the other groups hold is of use only with the blocks of sliding groups at its end, which are
        looked up next.
        """
        lookup, request = self.operations.end(answer.operation, effects.Lookup)
        self.not_stored(lookup.keys[answer.total :])
        second = answer.operation in self._sliding_lookups
        self._sliding_lookups.discard(answer.operation)
        if request is None:
            return
        request.lookup, whole = None, self.groups.whole
        if not second:
            request.stored_on_host, request.stored = answer.host // whole, answer.total // whole
            request.lookup_issued = not (self.groups.sliding and request.stored)
        elif answer.total < len(lookup.keys):
            request.stored = request.stored_on_host = 0

    def cancel(self, request: Request) -> None:
        """Cancel the operations that an aborted request waits for."""
        self.operations.cancel(request.lookup)
        self.operations.cancel(request.load)
        request.lookup = request.load = None

    def worth_loading(self, request: Request, first: int, count: int) -> int:
        """Return how many of `count` table entries to load after the `first` ones that the device has; 0 for none."""
        upto, groups, size = min(request.stored, count), self.groups, self.block_size
        if upto <= first or (groups.sliding and upto < request.stored):
            return 0
        host = max(min(request.stored_on_host, upto) - first, 0)
        sliding = groups.sliding * len(groups.read_after(first, upto * size, size))
        blocks = groups.whole * (upto - first) + sliding
        host = blocks if host == upto - first else groups.whole * host
        decision = self.load_or_recompute.decide(request.spec.request_id, host, blocks - host, (upto - first) * size)
        self.operations.decisions.append(decision)
        if not decision.load:
            self.counters.declined += 1
            self.counters.declined_tokens += decision.num_tokens
            return 0
        return upto - first

    def load(self, request: Request, slot: int, tables: IntArray, entries: range) -> None:
        """Load table entries of a request into the blocks of `slot`, whose `tables` are int32[groups, n].

        Those of sliding groups that are read afterwards go to the first of the entries, see `SlotTable.arrive`.
        """
        groups, size = self.groups, self.block_size
        sliding = groups.read_after(entries.start, entries.stop * size, size)
        keys = block_keys(request.chain, groups, entries, sliding)
        blocks = ordered_blocks(tables, groups, entries, range(entries.start, entries.start + len(sliding)))
        load = effects.Load(self.operations.next, keys, blocks, slot=slot, request_id=request.spec.request_id)
        request.load = self.operations.begin(load, request, blocks)
        request.load_entries = entries
        self.counters.loads += 1

    def loaded(self, answer: effects.Loaded) -> tuple[Request, int, int] | None:
        """Finish a load; return its request, tokens in place and those not prefilled for it; None if it left."""
        load, request = self.operations.end(answer.operation, effects.Load)
        if request is None:
            return None
        request.load = None
        request.stored = request.stored_on_host = 0
        count, entries = min(answer.blocks, len(load.keys)), request.load_entries
        loaded = len(entries) if count == len(load.keys) else 0 if self.groups.sliding else count
        self.counters.loaded_tokens += loaded * self.block_size
        self.counters.lost_tokens += (len(entries) - loaded) * self.block_size
        self.not_stored(load.keys[count:])  # possibly damaged or evicted: stored again once they are computed
        tokens = (entries.start + loaded) * self.block_size
        return request, tokens, tokens

    def save(self, request: Request, tables: IntArray, count: int) -> int | None:
        """Save the leading `count` settled entries of `tables`, int32[groups, n], while their blocks have an owner.

        Returns the operation; None if the store has all of them. Of sliding groups, the blocks that are read after
        those entries are saved.
        """
        groups, size = self.groups, self.block_size
        sliding = groups.read_after(0, count * size, size)
        keys = block_keys(request.chain, groups, range(count), sliding)
        blocks = ordered_blocks(tables, groups, range(count), sliding)
        # Without groups that keep every block, no lookup finds what is skipped.
        skips = self.keep.persist and groups.whole > 0
        chosen = [index for index, key in enumerate(keys) if not (skips and key in self._stored_keys)]
        if not chosen:
            return None
        self.stores = True
        named = tuple(keys[index] for index in chosen)
        copied = blocks[chosen]
        if self.keep.persist:
            self._stored_keys.update(dict.fromkeys(named))
            while len(self._stored_keys) > _MAX_STORED_KEYS:
                del self._stored_keys[next(iter(self._stored_keys))]
        save = effects.Save(self.operations.next, named, copied, persist=self.keep.persist)
        number = self.operations.begin(save, request, copied)
        if len(named) == len(keys):
            self._whole_saves[number] = count
        return number

    def saved(self, answer: effects.Saved) -> None:
        """Finish a save: it no longer reads its blocks."""
        save, request = self.operations.end(answer.operation, effects.Save)
        count = min(answer.blocks, len(save.keys))
        self.counters.saved_tokens += count * self.block_size // self.groups.count
        self.not_stored(save.keys[count:])
        entries = self._whole_saves.pop(answer.operation, None)
        if request is not None and request.save == answer.operation:
            request.save = None
            if entries is None:
                request.lookup_issued = False  # skipped blocks may be in either tier: needs a lookup
            else:
                host = min(answer.host, count)
                stored = entries if host == len(save.keys) else 0 if self.groups.sliding else host
                request.stored = request.stored_on_host = stored

    def not_stored(self, keys: Iterable[bytes]) -> None:
        """Record that blocks were not stored, or were evicted: they are saved when they are used again."""
        for key in keys:
            self._stored_keys.pop(key, None)
