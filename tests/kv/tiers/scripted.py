"""Scripted cache and store that detect forbidden accesses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from fd_core.effects.operations import Found, Loaded, LoadPaceMeasured, NotStored, Saved
from fd_core.effects.port import CompletionQueue
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import FailureReason, KVStore, StoreError, StoreStats
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import StoreLocation
from fd_core.kv.tiers.offload import KVOffload, SealedStore
from fd_core.ops.contract import KVCache, KVShape

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
BLOCK_BYTES = SHAPE.bytes_per_block(4)
SECRET = bytes(range(32))


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(length))


def content(key: bytes) -> np.ndarray:
    """Return the KV of a key, float32[1, 2, 4, 1, 2]."""
    raw = np.frombuffer(hashlib.blake2b(key, digest_size=32).digest() * 2, np.uint8)
    return raw[: BLOCK_BYTES // 4].astype(np.float32).reshape(1, 2, 4, 1, 2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedCache(KVCache):
    """Blocks may be accessed only while lent; `between` runs in the middle of every copy."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.shape = SHAPE
        self.num_blocks = num_blocks
        self.data = np.zeros((num_blocks, 1, 2, 4, 1, 2), np.float32)
        self.readable: set[int] = set()
        self.writable: set[int] = set()
        self.broken_rules: list[str] = []
        self.between: Callable[[], None] = lambda: None
        self.fails: type[Exception] | None = None
        self.exported = 0

    def layer(self, index: int) -> None:
        return None

    def _check(self, blocks, lent: set[int], what: str) -> None:
        if not set(map(int, blocks)) <= lent:
            self.broken_rules.append(f"{what} of a returned block")

    def export_blocks(self, blocks):
        self._check(blocks, self.readable, "read")
        if self.fails:
            raise self.fails
        copied = np.empty((len(blocks), *self.data.shape[1:]), np.float32)
        copied[:, :, 0] = self.data[blocks][:, :, 0]
        self.between()
        self._check(blocks, self.readable, "late read")
        copied[:, :, 1] = self.data[blocks][:, :, 1]
        self.exported += len(blocks)
        return copied

    def import_blocks(self, blocks, data) -> None:
        self._check(blocks, self.writable, "write")
        if self.fails:
            raise self.fails
        self.data[blocks, :, 0] = data[:, :, 0]
        self.between()
        self._check(blocks, self.writable, "late write")
        self.data[blocks, :, 1] = data[:, :, 1]

    def fill(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self.data[block] = content(key)


FAULTS = (
    *FailureReason,
    ValueError,
    MemoryError,
    "absent",
    "flipped",
    "truncated",
    "swapped",
    "short list",
    "no list",
    "text",
    "huge number",
)


class ScriptedStore(KVStore):
    """Dict with faults: `fault(method)` runs at the start of every call, `within` inside it."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__(StoreLocation("scripted", "scripted://user:hidden@host"))
        self.values: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.fault: Callable[[str], object] = lambda method: None
        self.within: Callable[[str, float], None] = lambda method, timeout: None

    def _begin(self, method: str, timeout: float) -> object:
        assert timeout > 0
        self.calls.append(method)
        fault = self.fault(method)
        self.within(method, timeout)
        if isinstance(fault, FailureReason):
            raise StoreError(fault, "secret words of the store")
        if isinstance(fault, type):
            raise fault("secret words of the store")
        return fault

    def open(self, timeout):
        return "scripted"

    def get(self, keys, limit, timeout):
        fault = self._begin("get", timeout)
        values = [self.values.get(key) for key in keys]
        values = [value if value is None or len(value) <= limit else None for value in values]
        last = values[-1]
        match fault:
            case "absent":
                values[-1] = None
            case "flipped" if last:
                values[-1] = last[:-1] + bytes([last[-1] ^ 1])
            case "truncated" if last:
                values[-1] = last[:-1]
            case "swapped":
                values.reverse()
            case "short list":
                values.pop()
            case "no list":
                return None
            case "text":
                return ["text" for _ in keys]
        return values

    def put(self, values, timeout):
        fault = self._begin("put", timeout)
        if fault == "huge number":
            return 10**6
        for key, parts in values:
            self.values[key] = b"".join(bytes(part) for part in parts)
        return len(values)

    def longest_prefix(self, keys, limit, timeout):
        fault = self._begin("longest_prefix", timeout)
        if fault in ("huge number", "text", "no list"):
            return {"huge number": 10**6, "text": "many", "no list": None}[fault]
        return next((i for i, key in enumerate(keys) if key not in self.values), len(keys))

    def delete(self, keys, timeout):
        self._begin("delete", timeout)
        return sum(self.values.pop(key, None) is not None for key in keys)

    def stats(self, timeout):
        return StoreStats()

    def close(self):
        pass

    def seed(self, keys: Sequence[bytes], envelope: Envelope) -> None:
        for key in keys:
            self.values[key] = b"".join(bytes(part) for part in envelope.seal(key, content(key).tobytes()))


@contextmanager
def no_threads():
    """Do not start thread loops created inside: the test runs their jobs one by one."""
    with mock.patch.object(ThreadLoop, "start", lambda self: None):
        yield


class Rig:
    """KV offload whose thread jobs the test runs in any order."""

    def __init__(self, *, host_blocks: int = 4, store: bool = True, threads: bool = False, **options) -> None:
        self.clock = Clock()
        self.cache = ScriptedCache()
        self.envelope = Envelope(SECRET)
        self.store = ScriptedStore() if store else None
        options.setdefault("clock", self.clock)
        self.news: list[NotStored | LoadPaceMeasured] = []
        """Completions without an operation."""
        if threads:
            self.offload = self._open(host_blocks, options)
        else:
            with no_threads():
                self.offload = self._open(host_blocks, options)

    def _open(self, host_blocks: int, options) -> KVOffload:
        return KVOffload(
            CompletionQueue(),
            self.cache,
            BlockFormat.of(SHAPE, "float32"),
            host_bytes=host_blocks * BLOCK_BYTES,
            store=SealedStore(self.store, self.envelope) if self.store else None,
            **options,
        )

    @property
    def loops(self) -> tuple[ThreadLoop, ...]:
        return self.offload.loops

    def completed(self) -> list[Found | Loaded | Saved]:
        """Return completions of operations since the last call; others go to `news`."""
        answers = []
        for completion in self.offload.completions():
            (self.news if isinstance(completion, NotStored | LoadPaceMeasured) else answers).append(completion)
        return answers

    def run(self) -> None:
        """Run all jobs."""
        while any(loop.run_one() for loop in self.loops):
            pass
