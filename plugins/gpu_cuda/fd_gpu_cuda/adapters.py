"""Adapters on the device: matrices of their own size, and for each linear a table in which its kernels find them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from fd_core.config import EngineConfig
from fd_core.ops.contract import Array, Lora
from fd_core.ops.torch.ops import TorchOps
from fd_core.ops.weights import LowRank

from fd_gpu_cuda.device import out_of_memory
from fd_gpu_cuda.kernel_table import Kernels

_MOST_PARTS = 3
"""Queries, keys and values."""
_RANK_ALIGN = 16


class AdapterRoom(NamedTuple):
    """How many adapters tables have room for, and of which rank; a table for more is another table."""

    places: int = 8
    rank: int = 64

    @classmethod
    def of(cls, config: EngineConfig) -> AdapterRoom | None:
        """Return what the settings allow; None where no adapters are configured."""
        if config.lora_modules or config.lora_folder is not None:
            return cls(config.max_loras, config.max_lora_rank)
        return None


class LowRankPart(NamedTuple):
    """What an adapter adds to one part of a linear."""

    down: Array
    """[rank, in]"""
    up: Array
    """[rank, out], scaled."""


@dataclass(frozen=True, slots=True)
class DeviceLora:
    """What one adapter adds to a linear; None for parts that it leaves alone."""

    parts: tuple[LowRankPart | None, ...]
    inputs: int
    outs: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The largest rank of a part."""
        return max((len(part.down) for part in self.parts if part is not None), default=0)


@dataclass(eq=False, slots=True)
class LoraTable:
    """Where the matrices of one linear lie, by place: what stays where it is while adapters come and go.

    Graphs read it, so it is written between steps alone, in the order of the stream.
    """

    entries: Array
    """int64[places, parts, 3], for the places 1 and up: addresses of down and up, and the rank, 0 for none."""
    inputs: int
    outs: tuple[int, ...]
    width: int
    """Ranks that there is room for, a multiple of 16."""
    held: list[DeviceLora | None] = field(default_factory=list)
    """Keeps the memory that entries name."""

    @property
    def form(self) -> tuple[Any, ...]:
        """What kernels are compiled for."""
        return self.inputs, self.outs, self.width

    @property
    def sums_dtype(self) -> torch.dtype:
        """In what sums over inputs are kept."""
        return torch.float32

    def fits(self, deltas: Sequence[DeviceLora | None]) -> bool:
        """Say whether there is room for these adapters."""
        return len(deltas) <= len(self.entries) and max(_ranks(deltas), default=0) <= self.width


def _ranks(deltas: Sequence[DeviceLora | None]) -> list[int]:
    return [delta.rank for delta in deltas if delta is not None]


class AdaptedOps(TorchOps):
    """What adapters add to linears, over a table of kernels."""

    _kernels: Kernels
    adapter_room: AdapterRoom | None = None
    """None where no adapters are configured."""
    tables_made = 0
    """What was captured before the last one was made may read others."""

    @property
    def adds_by_kernel(self) -> bool:
        """Whether a kernel adds what adapters make."""
        return self._kernels.lora is not None

    def prepare_lora(self, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool = False) -> Any:
        """Bring each part to the device as it is. Raises `MemoryError` where they do not fit."""
        if self._kernels.lora is None:
            with _memory_error():
                return super().prepare_lora(parts, outs, gated=gated)

        def placed(matrix: np.ndarray) -> Array:
            return torch.from_numpy(np.array(matrix, np.float32, order="C")).to(self.device, self.torch_dtype)

        with _memory_error():
            there = [None if part is None else LowRankPart(placed(part.down), placed(part.up.T)) for part in parts]
        inputs = next(part.down.shape[1] for part in parts if part is not None)
        return DeviceLora(tuple(there), inputs, tuple(outs))

    def place_loras(
        self, deltas: Sequence[Any | None], inputs: int, outs: Sequence[int], before: Any | None = None
    ) -> Any | None:
        """Write the table of a linear, even if no adapter changes it: a graph has to be right for others, too.

        Raises `MemoryError` where another table is needed and does not fit.
        """
        if self._kernels.lora is None:
            return super().place_loras(deltas, inputs, outs, before)
        table = before
        if not isinstance(table, LoraTable) or not table.fits(deltas):
            table = self._new_table(deltas, inputs, tuple(outs))
        entries = np.zeros(tuple(table.entries.shape), np.int64)
        for place, delta in enumerate(deltas):
            for part, each in enumerate(() if delta is None else delta.parts):
                if each is not None:
                    entries[place, part] = each.down.data_ptr(), each.up.data_ptr(), len(each.down)
        table.entries.copy_(self.from_host(entries))
        table.held = list(deltas)
        return table

    def lora(self, y: Array, x: Array, lora: Lora) -> Array:
        """Add to y in place, in two launches."""
        kernel, places = self._kernels.lora, lora.step.lora_places
        if kernel is None:
            return super().lora(y, x, lora)
        table = lora.deltas
        if not isinstance(table, LoraTable):  # deltas that nobody has placed
            some = next((delta for delta in table if delta is not None), None)
            table = None if some is None else self.place_loras(table, some.inputs, some.outs)
        if table is not None and places is not None:
            kernel(y, x if x.stride(1) == 1 else x.contiguous(), table, places)
        return y

    def _new_table(self, deltas: Sequence[DeviceLora | None], inputs: int, outs: tuple[int, ...]) -> LoraTable:
        if len(outs) > _MOST_PARTS:
            raise ValueError(f"a linear of {len(outs)} parts takes no adapters here; {_MOST_PARTS} are the most")
        room = self.adapter_room or AdapterRoom()
        count, rank = max(room.places, len(deltas)), max(room.rank, *_ranks(deltas), 1)
        with _memory_error():
            entries = torch.zeros((count, len(outs), 3), dtype=torch.int64, device=self.device)
        table = LoraTable(entries, inputs, outs, -(-rank // _RANK_ALIGN) * _RANK_ALIGN)
        if self._kernels.lora is not None:
            # Of no tokens: it compiles here, where no request waits.
            x, y = (
                torch.empty((0, width), dtype=self.torch_dtype, device=self.device) for width in (inputs, sum(outs))
            )
            self._kernels.lora(y, x, table, entries.new_empty(0, dtype=torch.int32))
        self.tables_made += 1
        return table


@contextmanager
def _memory_error() -> Iterator[None]:
    """Raise `MemoryError`, which ends the loading of an adapter, where the device has no memory left."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise MemoryError("the device has no room for its matrices") from error
