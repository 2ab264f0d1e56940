"""How fast KV blocks travel on this machine: between workers by the tcp connector, and to and from a disk store."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from fd_core.config.paths import find_cache_dir
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.simulation.costs.calibrating import usual
from fd_core.simulation.costs.profile import KVLink

_ROUNDS: Final = 24
_LEAST_ROUNDS: Final = 3
_MOST_BYTES: Final = 64 * 2**20
_TIMEOUT: Final = 30.0
_SMALL: Final = 8
"""The small values are so many times as small as a block."""


def transfer_link(block_bytes: int) -> KVLink:
    """Seal blocks, send them over a loopback connection, receive and open them, one after the other."""
    import zmq

    envelope, key = Envelope(secrets.token_bytes(32)), b"calibrate"
    with zmq.Context() as context, context.socket(zmq.PAIR) as near, context.socket(zmq.PAIR) as far:
        near.connect(f"tcp://127.0.0.1:{far.bind_to_random_port('tcp://127.0.0.1')}")

        def move(block: bytes) -> None:
            near.send_multipart(envelope.seal(key, block), copy=False)
            frames = far.recv_multipart(copy=False)
            envelope.open(key, b"".join(frame.buffer for frame in frames), len(block))

        return _link(move, block_bytes, "measured: blocks sealed, sent over a loopback connection, received and opened")


def disk_links(block_bytes: int) -> tuple[KVLink, KVLink]:
    """Return how a disk store in the cache folder is read and written; what is read was written just before."""
    folder = Path(tempfile.mkdtemp(prefix="calibrate-", dir=_made(find_cache_dir())))
    envelope, keys = Envelope(secrets.token_bytes(32)), [secrets.token_bytes(32) for _ in range(2 * _ROUNDS)]
    try:
        store = DiskStore(parse_location(f"disk:{folder}"))
        store.open(_TIMEOUT)
        written = iter(keys)

        def write(block: bytes) -> None:
            key = next(written)
            store.put([(key, envelope.seal(key, block))], _TIMEOUT)

        source = "measured: the disk store in the cache folder, sealed"
        writes = _link(write, block_bytes, f"{source} and not forced to the disk")
        read = iter(keys)

        def load(block: bytes) -> None:
            key = next(read)
            (value,) = store.get([key], 2 * len(block), _TIMEOUT)
            if value is not None:
                envelope.open(key, value, len(block))

        reads = _link(load, block_bytes, f"{source}, what was written just before")
        store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return reads, writes


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _link(move: Callable[[bytes], None], block_bytes: int, source: str) -> KVLink:
    """Time blocks and parts of blocks; what does not grow with their size is the latency."""
    small, whole = (np.random.default_rng(7).bytes(size) for size in (max(1, block_bytes // _SMALL), block_bytes))
    times: dict[int, list[float]] = {len(small): [], len(whole): []}
    for _ in range(min(_ROUNDS, max(_LEAST_ROUNDS, _MOST_BYTES // block_bytes))):
        for block in (small, whole):
            begun = time.perf_counter()
            move(block)
            times[len(block)].append(time.perf_counter() - begun)
    little, much = (usual(each) for each in times.values()) if len(times) == 2 else (0.0, usual(times[len(whole)]))
    slope = max(0.0, much - little) / max(1, len(whole) - len(small))
    return KVLink(latency=max(0.0, much - slope * len(whole)), bandwidth=1 / slope if slope else 1e12, source=source)
