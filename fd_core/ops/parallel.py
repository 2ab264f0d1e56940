"""Tensor-parallel ranks: shares of the model, and sums and gathers between them.

Ranks exchange data in memory that each of them maps:

    header   | a flag that the group was abandoned, and for each rank the number of its last exchange
    slots    | two for each rank, for even and odd exchanges

An exchange has a number, the same on all ranks. A rank writes its data into its slot, publishes it, and reads the other
slots once they are published. A slot is reused two exchanges later; by then every rank has begun the exchange in
between, so the slot has no readers. Ranks of one machine map the same memory, and publish a slot by writing their
number: `native/csrc/group.h` is the same in C++. `torch_group` carries slots between ranks that share no memory.
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
from fd_core.ops.polled_timeout import PolledTimeout

_LINE: Final = 64
"""Stride in bytes of words in the header, so that ranks do not share a cache line."""
HEADER_BYTES: Final = 1 << 13
SLOT_BYTES: Final = 1 << 29
"""Size of one slot; memory is allocated on first write."""
_SPINS: Final = 200
_NAP_SECONDS: Final = 2e-5
_STORES_IN_ORDER: Final = platform.machine() in ("x86_64", "AMD64", "i686")
"""Return True if stores are visible to other cores in program order without a fence."""


class RankExchangeError(Exception):
    """An exchange between ranks did not complete; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank and number of ranks; each has a shard of every layer."""

    rank: int = 0
    size: int = 1
    gathers: bool = False
    """True if ranks divide the outputs of every linear and gather its inputs. Each sum is then computed on one rank, as
    without tensor parallelism, and no bit depends on the number of ranks. Else the linears into the residual stream are
    divided by their inputs, and their partial products are summed over ranks."""
    expert_parallel: bool = False
    """True if ranks divide the experts of a block, instead of each expert."""

    def share(self, units: int) -> slice:
        """Return this rank's slice of `units`, divided evenly; the first ranks have one more if necessary."""
        each, more = divmod(units, self.size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))


class RankRendezvous(msgspec.Struct, frozen=True):
    """Rendezvous address of ranks without shared memory, published by rank 0."""

    host: str
    port: int
    token: str
    """Separates groups that use one address by mistake; not a secret."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage: each has some of the layers, and steps pass through all of them in order."""

    index: int = 0
    """0 for the one with the embedding."""
    count: int = 1

    @property
    def first(self) -> bool:
        """True if its input is tokens; others get the output of the previous stage."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """True if its output is logits."""
        return self.index == self.count - 1


def group_memory(size: int) -> int:
    """Return the descriptor of a new file for the slots of `size` ranks, zeroed; the caller closes it."""
    descriptor = os.memfd_create("fdcore-ranks")
    os.ftruncate(descriptor, HEADER_BYTES + 2 * size * SLOT_BYTES)
    return descriptor


class RankGroup(abc.ABC):
    """One rank's endpoint of the exchanges between all ranks. Used from one thread, except `abandon` and `abandoned`.

    Every rank must call the same methods in the same order, with arrays of the same shape. Results have the same bits
    on all ranks: sums are computed in the order of ranks, element by element. So the result of a row does not depend on
    the batch.
    """

    shares_memory: ClassVar[bool]
    """True if all ranks map the same memory, so that native code may exchange data directly."""
    host = "127.0.0.1"
    """Address under which the other ranks reach the machine of rank 0."""

    def __init__(self, parallel: Parallel, descriptor: int, timeout: float) -> None:
        """`descriptor` is the result of `group_memory`; `timeout` is the timeout for other ranks in seconds."""
        self.parallel = parallel
        self.timeout = timeout
        self._memory = mmap.mmap(descriptor, HEADER_BYTES + 2 * parallel.size * SLOT_BYTES)
        whole = np.frombuffer(self._memory, np.uint8)
        self.address = int(whole.ctypes.data)
        """Of the mapped memory."""
        words = whole[:HEADER_BYTES].view(np.uint64)[:: _LINE // 8]
        self._abandoned, self._numbers = words[:1], words[1 : 1 + parallel.size]
        self._slots = whole[HEADER_BYTES:].reshape(parallel.size, 2, SLOT_BYTES)

    def abandon(self) -> None:
        """Make the exchanges of all ranks fail with `RankExchangeError`. Callable from any thread."""
        self._abandoned[0] = 1

    @property
    def abandoned(self) -> bool:
        """True if a rank has abandoned the group or is lost."""
        return bool(self._abandoned[0])

    def require_order(self) -> None:  # noqa: B027 - most need no fence
        """Raise `ConfigError` if exchanges are unsafe on this CPU; packs call it after joining."""

    def all_reduce(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the sum over all ranks of x [n, ...]."""
        total = np.zeros_like(x)
        for rows in self._pieces(x):
            for part in self._exchange(x[rows], self.timeout):
                total[rows] += part
        return total

    def all_gather(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return x [n, ...] of all ranks, concatenated along the last axis in the order of ranks."""
        pieces = [np.concatenate(list(self._exchange(x[rows], self.timeout)), axis=-1) for rows in self._pieces(x)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def own_slot(self, exchanges: int, count: int) -> npt.NDArray[np.float32]:
        """Return `count` floats of the slot that this rank uses in the last of the next `exchanges`."""
        rank = self.parallel.rank
        place = (int(self._numbers[rank]) + exchanges) % 2
        return self._slots[rank, place, : 4 * count].view(np.float32)

    def meet(self, number: int, count: int) -> int:
        """Exchange the first `count` bytes of slots, for native code that accesses them directly.

        Returns 0, or 1 + the rank that timed out.
        """
        self._show(number, count)
        for rank in range(self.parallel.size):
            if not self._awaited(rank, number, self.timeout):
                return 1 + rank
        return 0

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for a collective operation of all ranks' devices.

        Raises `RankExchangeError` on timeout, with the rank that does not respond.
        """
        seconds = 0.75 * self.timeout  # and as long again for the exchange: in total below the watchdog's timeout
        if self._waited(done, seconds):
            return
        if not self.abandoned:
            # All live ranks time out at the same time, and exchange here.
            for _ in self._exchange(np.zeros(1, np.uint8), seconds):
                pass
            raise RankExchangeError(f"the ranks' devices did not complete a step within {seconds:g} s")
        self.refuse(0)

    def refuse(self, rank: int) -> NoReturn:
        """Raise `RankExchangeError` for a rank that timed out."""
        if self.abandoned:
            raise RankExchangeError("the other ranks are lost")
        raise RankExchangeError(f"rank {rank} did not respond within {self.timeout:g} s during a step")

    @abc.abstractmethod
    def _show(self, number: int, count: int) -> None:
        """Begin an exchange: publish the first `count` bytes of this rank's slot."""

    @abc.abstractmethod
    def _awaited(self, rank: int, number: int, seconds: float) -> bool:
        """Wait until a rank has published its slot. Returns False on timeout, or if the group is abandoned."""

    def _pieces(self, x: npt.NDArray[Any]) -> list[slice]:
        """Return the slices of rows of `x` to exchange at a time."""
        count = max(1, len(x) * SLOT_BYTES // max(x.nbytes, 1))
        return [slice(begin, begin + count) for begin in range(0, max(len(x), 1), count)]

    def _exchange(self, x: npt.NDArray[Any], seconds: float) -> Iterator[npt.NDArray[Any]]:
        """Yield the array of each rank, as views that are valid until the next exchange."""
        number = int(self._numbers[self.parallel.rank]) + 1
        place = number % 2
        np.copyto(self._slots[self.parallel.rank, place, : x.nbytes].view(x.dtype).reshape(x.shape), x)
        self._show(number, x.nbytes)
        for rank in range(self.parallel.size):
            if not self._awaited(rank, number, seconds):
                self.refuse(rank)
            yield self._slots[rank, place, : x.nbytes].view(x.dtype).reshape(x.shape)

    def _waited(self, done: Callable[[], bool], seconds: float, nap: float = _NAP_SECONDS) -> bool:
        """Poll until `done` returns True. Returns False on timeout, or if the group is abandoned."""
        spins, timeout = 0, PolledTimeout(seconds)
        while not done():
            if self._abandoned[0]:
                return False
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            if timeout.expired():
                return False
            time.sleep(nap)
        return True


class SharedMemoryGroup(RankGroup):
    """Ranks of one machine, which map the same memory."""

    shares_memory = True
    fence: Callable[[], object] | None = None
    """Memory fence of the native kernels. Without it, exchanges rely on a CPU that preserves the order of stores."""

    def require_order(self) -> None:
        """Raise `ConfigError` if the CPU needs a fence and there is none."""
        if self.fence is None and not _STORES_IN_ORDER:
            raise ConfigError(
                f"shared memory between ranks on {platform.machine()} requires native kernels",
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

    def pass_on(self, x: npt.NDArray[np.float32]) -> None:
        """Publish an array for the previous rank, which calls `take`; block until it has read the one before the last.

        A group of pipeline stages has no other exchanges.
        """
        rank = self.parallel.rank
        number = int(self._numbers[rank]) + 1
        self._wait_for(rank - 1, number - 2)
        np.copyto(self._slots[rank, number % 2, : x.nbytes].view(x.dtype).reshape(x.shape), x)
        self._show(number, x.nbytes)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Block on the next array of the following rank and return it, float32 of a given shape."""
        rank = self.parallel.rank
        number = int(self._numbers[rank]) + 1
        self._wait_for(rank + 1, number)
        values = self._slots[rank + 1, number % 2, : 4 * math.prod(shape)].view(np.float32).reshape(shape).copy()
        if rank == 0:  # else its number is published with the next array
            self._show(number, 0)
        return values

    def _wait_for(self, rank: int, number: int) -> None:
        if not self._awaited(rank, number, self.timeout):
            self.refuse(rank)
