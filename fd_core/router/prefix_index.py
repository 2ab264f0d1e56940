"""Which workers hold a block: for each block one number, in which each worker has a bit.

Each engine of a worker that has several is a worker here.

So a prompt is compared with what a thousand workers hold in a few operations a block, and not once for each worker.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from fd_core.kv.prefix import PrefixHasher
from fd_core.router.selection import Numbers, Places
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray

_FEW: Final = 8
"""So many bits are looked at one by one."""


class Holders:
    """The blocks of every worker."""

    def __init__(self, places: Places) -> None:
        """`places` are of the bits; whoever gives one on discards the blocks of its worker before."""
        self._places = places
        self._of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._of)

    def bit(self, worker: Hashable) -> int:
        """Return the number in which only this worker has its bit."""
        return 1 << self._places.of(worker)

    def add(self, bit: int, keys: Iterable[bytes]) -> None:
        """The worker with this `bit` holds blocks that it did not hold."""
        of = self._of
        for key in keys:
            others = of.get(key)
            # One number for all blocks that this worker alone holds, which are most.
            of[key] = bit if others is None else others | bit

    def discard(self, bit: int, keys: Iterable[bytes]) -> None:
        """The worker with this `bit` holds blocks no longer; those that it did not hold change nothing."""
        of = self._of
        for key in keys:
            holders = of.get(key, 0)
            if holders == bit:
                del of[key]
            elif holders & bit:
                of[key] = holders ^ bit

    def leading(self, keys: Sequence[bytes]) -> Numbers:
        """Return how many leading blocks each worker holds, by place, given that none holds one without those before.

        Looks at the logarithm of the blocks for each place where workers part.
        """
        found: list[tuple[int, int]] = []
        first = self._of.get(keys[0], 0) if keys else 0
        open_ = [(1, len(keys), first)] if first else []
        while open_:
            least, most, here = open_.pop()
            if least == most:
                found.append((least, here))
                continue
            middle = (least + most + 1) // 2
            on = here & self._of.get(keys[middle - 1], 0)
            if on:
                open_.append((middle, most, on))
            if on != here:
                open_.append((least, middle - 1, here ^ on))
        return self._by_place(found)

    def unbroken(self, keys: Iterable[bytes]) -> Numbers:
        """Return the same where workers may hold blocks without those before them; looks at one block after the other.

        Takes no more of `keys` than one behind the last that somebody holds.
        """
        here, found, count = -1, [], 0
        for key in keys if self._of else ():
            on = here & self._of.get(key, 0)
            if count and on != here:
                found.append((count, here ^ on))
            here = on
            if not here:
                break
            count += 1
        return self._by_place([*found, (count, here)] if count else [])

    def _by_place(self, found: Iterable[tuple[int, int]]) -> Numbers:
        """Return the count of each place from counts and the places that have them."""
        places = len(self._places)
        counts = np.zeros(places, np.int64)
        for count, here in found:
            if here.bit_count() <= _FEW:
                while here:
                    first = here & -here
                    counts[first.bit_length() - 1] = count
                    here ^= first
            else:
                bits = np.frombuffer(here.to_bytes(places // 8 + 1, "little"), np.uint8)
                counts[np.unpackbits(bits, bitorder="little", count=places).view(bool)] = count
        return counts


def block_hasher(block_size: int) -> PrefixHasher:
    """Return the hasher that names prompt blocks in a router. It has no secret: the names never leave the router."""
    return PrefixHasher(block_size=block_size, identity="router")


def block_keys(hasher: PrefixHasher, tokens: IntArray, salt: str = "", adapter: str = "") -> tuple[bytes, ...]:
    """Return the keys of the full blocks of `tokens`, int32 of shape [n]; keys of other salts or adapters differ."""
    chain: list[bytes] = []
    hasher.extend(chain, hasher.root(salt, adapter), tokens, len(tokens))
    return tuple(chain)


class PrefixIndex:
    """Prompt blocks that each worker served, and so is believed to hold.

    A block is believed to be held for `duration` seconds, and at most `capacity` blocks of each worker are. Recording
    costs time in proportion to the blocks of the prompt, matching to their logarithm, whatever the index holds. The end
    of a prefix leaves before its beginning, so the index always holds whole paths from the root. The readings of the
    clock that are passed in never go backwards.
    """

    def __init__(self, *, duration: float, capacity: int, places: Places) -> None:
        self._duration = duration
        self._capacity = capacity
        self._held: dict[RouterWorker, OrderedDict[bytes, float]] = {}
        """When each block was last served, the one that was served longest ago first."""
        self._places = places
        self._holders = Holders(places)
        self._served: deque[tuple[float, RouterWorker]] = deque()
        """Who served when: whose blocks expire next."""

    def __len__(self) -> int:
        """Blocks that take memory, of all workers together."""
        return sum(map(len, self._held.values()))

    def record(self, worker: RouterWorker, keys: Sequence[bytes], now: float) -> None:
        """`worker` served a prompt of these blocks."""
        if not keys:
            return
        self.sweep(now)
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = OrderedDict()
        new = []
        for key in reversed(keys[: self._capacity]):  # the first block last, so that it is the last to leave
            if key in held:
                held.move_to_end(key)
            else:
                new.append(key)
            held[key] = now
        bit = self._holders.bit(worker)
        self._holders.add(bit, new)
        self._holders.discard(bit, [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity)])
        if not self._served or self._served[-1] != (now, worker):
            self._served.append((now, worker))

    def match(self, keys: Sequence[bytes], now: float) -> Numbers:
        """Return how many leading blocks each worker is believed to hold, by place."""
        self.sweep(now)
        return self._holders.leading(keys)

    def remove(self, worker: RouterWorker) -> None:
        """Forget all blocks of `worker`: it is gone, or came back empty."""
        held = self._held.pop(worker, None)
        if held is not None:
            self._holders.discard(self._holders.bit(worker), held)

    def sweep(self, now: float) -> None:
        """Forget expired blocks; costs time in proportion to what has expired since the last call."""
        if self._served and now - self._served[-1][0] >= self._duration:  # all of them
            self._served.clear()
            self._held.clear()
            self._holders = Holders(self._places)
        while self._served and now - self._served[0][0] >= self._duration:
            _, worker = self._served.popleft()
            held = self._held.get(worker)
            if held is None:
                continue
            gone = []
            for key, served in held.items():
                if now - served < self._duration:
                    break
                gone.append(key)
            for key in gone:
                del held[key]
            self._holders.discard(self._holders.bit(worker), gone)
            if not held:
                self.remove(worker)

    def blocks(self, worker: RouterWorker) -> int:
        """Return how many blocks the index keeps for `worker`, expired ones included until a sweep."""
        return len(self._held.get(worker, ()))


class PrefixesInFlight:
    """Prompts that workers have been given and that have not ended there: what they are about to hold.

    A radix tree for each worker, kept as counts: how many prompts end at a block, and how many blocks follow it. A
    prompt costs time in proportion to the blocks that no other prompt in flight shares with it, whatever is in flight;
    matching costs the logarithm of its blocks. Nothing of a prompt is remembered after its end.
    """

    def __init__(self, places: Places) -> None:
        self._nodes: dict[RouterWorker, dict[bytes, int]] = {}
        self._holders = Holders(places)

    def __len__(self) -> int:
        """Distinct blocks, of all workers together."""
        return sum(map(len, self._nodes.values()))

    def __contains__(self, worker: RouterWorker) -> bool:
        """Whether `worker` has been given a prompt that has not ended there."""
        return worker in self._nodes

    def begin(self, worker: RouterWorker, keys: tuple[bytes, ...]) -> None:
        """`worker` was given a prompt of these blocks; `end` has to follow."""
        if not keys:
            return
        nodes = self._nodes.setdefault(worker, {})
        new = []
        for key in reversed(keys):
            nodes[key] = count = nodes.get(key, 0) + 1
            if count > 1:  # then all blocks before it are there already
                break
            new.append(key)
        self._holders.add(self._holders.bit(worker), new)

    def end(self, worker: RouterWorker, keys: tuple[bytes, ...]) -> None:
        """`worker` is through with a prompt that began, well or not."""
        if not keys:
            return
        nodes = self._nodes[worker]
        gone = []
        for key in reversed(keys):
            left = nodes[key] - 1
            if left:
                nodes[key] = left
                break
            del nodes[key]
            gone.append(key)
        self._holders.discard(self._holders.bit(worker), gone)
        if not nodes:
            del self._nodes[worker]

    def match(self, keys: Sequence[bytes]) -> Numbers:
        """Return how many leading blocks of a prompt each worker is computing for others, by place."""
        return self._holders.leading(keys)
