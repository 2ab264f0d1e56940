"""Ranks that compute one model together: which share each has, and sums and gathers between them.

What ranks exchange lies in memory that each of them maps:

    header   | a word that says whether the group was abandoned, and for each rank the number of its last exchange
    slots    | two for each rank, for even and odd exchanges

An exchange has a number, the same on all ranks. A rank writes what it has into its own slot, shows it to the others,
and reads their slots once they have shown theirs. A slot is written again two exchanges later; by then every rank has
begun the exchange between, so nobody reads it any more. Ranks of one machine map the same memory, and show a slot by
writing their number: `native/csrc/group.h` is the same in C++. `torch_group` carries slots between ranks that share no
memory.
"""

from __future__ import annotations

import abc
import math
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError
from fd_core.ops.patience import Patience

_LINE: Final = 64
"""Bytes between two words of the header, so that ranks do not share a cache line."""
HEADER_BYTES: Final = 1 << 13
SLOT_BYTES: Final = 1 << 29
"""Of one slot; memory is taken when it is first written."""
_SPINS: Final = 200
_NAP_SECONDS: Final = 2e-5
_STORES_IN_ORDER: Final = platform.machine() in ("x86_64", "AMD64", "i686")
"""Return True if other cores see what this one writes in the order in which it was written, without a fence."""


class RanksApart(Exception):
    """An exchange between ranks did not come to its end; the text says why."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank and number of ranks; each holds a share of every layer."""

    rank: int = 0
    size: int = 1
    gathers: bool = False
    """True if ranks divide the outputs of every linear and gather its inputs. Each sum is then taken on one rank, as
    one rank alone takes it, and no bit depends on the number of ranks. Else the linears that lead back are divided by
    their inputs, and ranks add up their products."""

    def share(self, units: int) -> slice:
        """Return which of `units` are this rank's: all ranks have as many, the first ones one more if need be."""
        each, more = divmod(units, self.size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))


class RankMeeting(msgspec.Struct, frozen=True):
    """Address where ranks that share no memory meet, as published by rank 0."""

    host: str
    port: int
    token: str
    """Keeps groups apart that come to one place by mistake; no secret."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of the model that computes: each has some of the layers, and steps pass one after the other."""

    index: int = 0
    """0 for the one that looks tokens up."""
    count: int = 1

    @property
    def first(self) -> bool:
        """True if it begins with tokens; the others begin with the output of the stage before."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """True if it ends with logits."""
        return self.index == self.count - 1


def group_memory(size: int) -> int:
    """Return the descriptor of a new file for the slots of `size` ranks, zeroed; the caller closes it."""
    descriptor = os.memfd_create("fdcore-ranks")
    os.ftruncate(descriptor, HEADER_BYTES + 2 * size * SLOT_BYTES)
    return descriptor


class RankGroup(abc.ABC):
    """One rank's end of the exchanges between all ranks. Used from one thread, but for `abandon` and `abandoned`.

    Every rank must call the same methods in the same order, with arrays of the same shape. What they return has the
    same bits on all ranks: sums are taken in the order of ranks, element by element. So what becomes of a row does not
    depend on the rows beside it.
    """

    shares_memory: ClassVar[bool]
    """True if all ranks map the same memory, so that code that knows its layout may exchange by itself."""
    host = "127.0.0.1"
    """Address under which the other ranks reach the machine of rank 0."""

    def __init__(self, parallel: Parallel, descriptor: int, patience: float) -> None:
        """`descriptor` is of `group_memory`; others are awaited for `patience` seconds."""
        self.parallel = parallel
        self.patience = patience
        self._memory = mmap.mmap(descriptor, HEADER_BYTES + 2 * parallel.size * SLOT_BYTES)
        whole = np.frombuffer(self._memory, np.uint8)
        self.address = int(whole.ctypes.data)
        """Of the mapped memory."""
        words = whole[:HEADER_BYTES].view(np.uint64)[:: _LINE // 8]
        self._abandoned, self._numbers = words[:1], words[1 : 1 + parallel.size]
        self._slots = whole[HEADER_BYTES:].reshape(parallel.size, 2, SLOT_BYTES)

    def abandon(self) -> None:
        """Have the exchanges of all ranks end with `RanksApart`. Any thread."""
        self._abandoned[0] = 1

    @property
    def abandoned(self) -> bool:
        """True if a rank has abandoned the group or is lost."""
        return bool(self._abandoned[0])

    def require_order(self) -> None:  # noqa: B027 - most need nothing
        """Raise `ConfigError` where exchanges would not be sound; packs ask once they have joined."""

    def all_reduce(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the sum of what all ranks hold, [n, ...] each."""
        total = np.zeros_like(x)
        for rows in self._pieces(x):
            for part in self._exchange(x[rows], self.patience):
                total[rows] += part
        return total

    def all_gather(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what all ranks hold, [n, ...] each, joined along the last axis in the order of ranks."""
        pieces = [np.concatenate(list(self._exchange(x[rows], self.patience)), axis=-1) for rows in self._pieces(x)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def own_slot(self, exchanges: int, count: int) -> npt.NDArray[np.float32]:
        """Return `count` numbers of the slot that this rank uses in the last of the next `exchanges`."""
        rank = self.parallel.rank
        place = (int(self._numbers[rank]) + exchanges) % 2
        return self._slots[rank, place, : 4 * count].view(np.float32)

    def meet(self, number: int, count: int) -> int:
        """Exchange the first `count` bytes of slots, for code that writes and reads them by itself.

        Returns 0, or 1 and the rank that did not come.
        """
        self._show(number, count)
        for rank in range(self.parallel.size):
            if not self._awaited(rank, number, self.patience):
                return 1 + rank
        return 0

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for what all ranks compute together on devices of their own.

        Raises `RanksApart` if it is not done in time, and names the rank that does not answer.
        """
        seconds = 0.75 * self.patience  # and as long again for the answers: less than the watchdog's time
        if self._waited(done, seconds):
            return
        if not self.abandoned:
            # All that still run wait in vain at the same time, and meet here.
            for _ in self._exchange(np.zeros(1, np.uint8), seconds):
                pass
            raise RanksApart(f"the ranks' devices did not come to the end of a step within {seconds:g} s")
        self.refuse(0)

    def refuse(self, rank: int) -> NoReturn:
        """Say that a rank was waited for in vain."""
        if self.abandoned:
            raise RanksApart("the other ranks are gone")
        raise RanksApart(f"rank {rank} was not heard of for {self.patience:g} s in the middle of a step")

    @abc.abstractmethod
    def _show(self, number: int, count: int) -> None:
        """Begin an exchange: let the others read the first `count` bytes of this rank's slot."""

    @abc.abstractmethod
    def _awaited(self, rank: int, number: int, seconds: float) -> bool:
        """Wait until a rank has shown its slot. Returns False if it does not, or the group is abandoned."""

    def _pieces(self, x: npt.NDArray[Any]) -> list[slice]:
        """Return which rows of `x` are exchanged at a time."""
        count = max(1, len(x) * SLOT_BYTES // max(x.nbytes, 1))
        return [slice(begin, begin + count) for begin in range(0, max(len(x), 1), count)]

    def _exchange(self, x: npt.NDArray[Any], seconds: float) -> Iterator[npt.NDArray[Any]]:
        """Yield what each rank holds, as views that are good until the next exchange."""
        number = int(self._numbers[self.parallel.rank]) + 1
        place = number % 2
        np.copyto(self._slots[self.parallel.rank, place, : x.nbytes].view(x.dtype).reshape(x.shape), x)
        self._show(number, x.nbytes)
        for rank in range(self.parallel.size):
            if not self._awaited(rank, number, seconds):
                self.refuse(rank)
            yield self._slots[rank, place, : x.nbytes].view(x.dtype).reshape(x.shape)

    def _waited(self, done: Callable[[], bool], seconds: float, nap: float = _NAP_SECONDS) -> bool:
        """Look until something is done. Returns False if it is not, or the group is abandoned."""
        spins, patience = 0, Patience(seconds)
        while not done():
            if self._abandoned[0]:
                return False
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            if patience.is_over():
                return False
            time.sleep(nap)
        return True


class SharedMemoryGroup(RankGroup):
    """Ranks of one machine, which map the same memory."""

    shares_memory = True
    fence: Callable[[], object] | None = None
    """Keeps what was written or read before it from what comes after; native kernels have one. Without it, exchanges
    rely on a processor that keeps the order of stores."""

    def require_order(self) -> None:
        """Raise `ConfigError` on a processor that needs a fence, where there is none."""
        if self.fence is None and not _STORES_IN_ORDER:
            raise ConfigError(
                f"ranks share memory on {platform.machine()} with native kernels only",
                field="--tensor-parallel-size",
                hint="install a C++ compiler, or use --rank-transport gloo",
            )

    def _show(self, number: int, count: int) -> None:
        if self.fence is not None:
            self.fence()
        self._numbers[self.parallel.rank] = number

    def _awaited(self, rank: int, number: int, seconds: float) -> bool:
        came = self._waited(lambda: int(self._numbers[rank]) >= number, seconds)
        if self.fence is not None:
            self.fence()
        return came

    def hand_on(self, x: npt.NDArray[np.float32]) -> None:
        """Leave an array for the rank before this one, which calls `take`; wait until that has the last but one.

        A group whose ranks are stages exchanges nothing else.
        """
        rank = self.parallel.rank
        number = int(self._numbers[rank]) + 1
        self._wait_for(rank - 1, number - 2)
        np.copyto(self._slots[rank, number % 2, : x.nbytes].view(x.dtype).reshape(x.shape), x)
        self._show(number, x.nbytes)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return what the rank behind this one left next, a float32 array of a shape, and wait for it."""
        rank = self.parallel.rank
        number = int(self._numbers[rank]) + 1
        self._wait_for(rank + 1, number)
        values = self._slots[rank + 1, number % 2, : 4 * math.prod(shape)].view(np.float32).reshape(shape).copy()
        if rank == 0:  # else the number says so once the next array is left
            self._show(number, 0)
        return values

    def _wait_for(self, rank: int, number: int) -> None:
        if not self._awaited(rank, number, self.patience):
            self.refuse(rank)
