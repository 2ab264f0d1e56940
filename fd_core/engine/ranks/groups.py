"""Groups in which ranks exchange results: over shared memory of this machine, or over the network."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fd_core.errors import ConfigError
from fd_core.ops.parallel import Parallel, RankGroup, RankRendezvous, SharedMemoryGroup, group_memory

if TYPE_CHECKING:
    from fd_core.ops.torch.group import TorchGroup


def opened_group(
    size: int, seconds: float, transport: str, host: str = "127.0.0.1"
) -> tuple[RankGroup, int | RankRendezvous]:
    """Return rank 0's end of a new group, and the address for the other ranks; see `EngineConfig.rank_transport`.

    A descriptor is the caller's to close once the other ranks have opened its memory; `host` is where ranks meet
    if they do not share memory. Raises `ConfigError`, or `OSError`.
    """
    if transport == "gloo":
        group = _torch_group().open(size, seconds, host)
        return group, group.rendezvous
    memory = group_memory(size)
    return SharedMemoryGroup(Parallel(0, size), memory, seconds), memory


def joined_group(parallel: Parallel, address: str | RankRendezvous, seconds: float) -> RankGroup:
    """Return another rank's end of a group that rank 0 has opened; the other ranks must join within `seconds`.

    `address` may be the path of their memory. Raises `ConfigError`, `OSError`, or `RuntimeError` if no rank is at the
    meeting.
    """
    if isinstance(address, RankRendezvous):
        return _torch_group().join(parallel, address, seconds)
    descriptor = os.open(address, os.O_RDWR)
    try:
        return SharedMemoryGroup(parallel, descriptor, seconds)
    finally:
        os.close(descriptor)


def _torch_group() -> type[TorchGroup]:
    try:
        from fd_core.ops.torch.group import TorchGroup
    except ImportError as error:
        raise ConfigError(
            f"gloo between ranks requires torch, which cannot be imported: {error}",
            field="--rank-transport",
            hint="remove it, or run pip install 'fd-core[cpu]'",
        ) from error
    return TorchGroup
