"""What the scheduler wants done with KV outside a step, and what became of it.

Effects are values: the scheduler returns them, the engine's loop hands them to `fd_core.kv.tiers`, which performs them
on threads of its own, and brings the completions back before the next plan. Nothing here waits for anything.

An operation is a number chosen by the scheduler. A `Lookup` is answered by one `Found`, a `Load` by one `Loaded`, a
`Save` by one `Saved`, in any order, each within its deadline. `Cancel` hurries the answer, it does not replace it:
blocks of an operation belong to it until its completion arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from fd_core.types import IntArray

__all__ = ["Cancel", "Completion", "Effect", "Found", "Load", "Loaded", "Lookup", "Save", "Saved"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many of the leading `keys` are held outside the device?"""

    operation: int
    keys: tuple[bytes, ...]
    """Block keys of one prefix, in order."""


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the KV named by `keys` into device `blocks`, int32[len(keys)], which belong to the operation meanwhile."""

    operation: int
    keys: tuple[bytes, ...]
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Save:
    """Copy settled device `blocks`, int32[len(keys)], to the host tier under `keys`; nobody writes them meanwhile."""

    operation: int
    keys: tuple[bytes, ...]
    blocks: IntArray
    persist: bool
    """Whether the store gets them too, written behind."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for an operation any more; unknown and completed ones are ignored."""

    operation: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a `Lookup`."""

    operation: int
    host: int
    """Leading keys that the host tier holds."""
    total: int
    """Leading keys that host tier and store hold together, at least `host`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answer to a `Load`: whatever was not loaded is as it was or worthless."""

    operation: int
    blocks: int
    """Leading blocks that hold exactly the KV of their keys."""
    from_host: int = 0
    """How many of them came from the host tier."""
    seconds: float = 0.0
    """From the effect to the last copy."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Answer to a `Save`: its device blocks are not read any more."""

    operation: int
    blocks: int
    """Leading blocks that were copied to the host."""


Effect = Lookup | Load | Save | Cancel
Completion = Found | Loaded | Saved
