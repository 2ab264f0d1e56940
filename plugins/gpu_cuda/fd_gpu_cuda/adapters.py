"""Adapters on the device: matrices of their own size, and for each linear a table in which its kernels find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from fd_core.config import EngineConfig
from fd_core.ops.contract import Array

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


@dataclass(frozen=True, slots=True)
class DeviceLora:
    """What one adapter adds to a linear."""

    parts: tuple[tuple[Array, Array] | None, ...]
    """Down [rank, in] and up [rank, out], which is scaled; None for parts that it leaves alone."""
    inputs: int
    outs: tuple[int, ...]


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

    @classmethod
    def empty(
        cls,
        deltas: Sequence[DeviceLora | None],
        inputs: int,
        outs: tuple[int, ...],
        room: AdapterRoom,
        device: torch.device,
    ) -> LoraTable:
        """Return a table without adapters in which these, and as many as `room` says, have a place."""
        if len(outs) > _MOST_PARTS:
            raise ValueError(f"a linear of {len(outs)} parts takes no adapters here; {_MOST_PARTS} are the most")
        count, rank = max(room.places, len(deltas)), max(room.rank, _most_rank(deltas), 1)
        entries = torch.zeros((count, len(outs), 3), dtype=torch.int64, device=device)
        return cls(entries, inputs, outs, -(-rank // _RANK_ALIGN) * _RANK_ALIGN)

    def fits(self, deltas: Sequence[DeviceLora | None]) -> bool:
        """Say whether there is room for these adapters."""
        return len(deltas) <= len(self.entries) and _most_rank(deltas) <= self.width


def _most_rank(deltas: Sequence[DeviceLora | None]) -> int:
    parts = (part for delta in deltas if delta is not None for part in delta.parts if part is not None)
    return max((len(down) for down, _ in parts), default=0)
