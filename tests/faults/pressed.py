"""An engine that is short of blocks, with a KV store that may have any fault, and the invariants that must hold.

The null backend's text depends on every block of KV, so a golden text proves that no wrong block was used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from fd_core.effects.operations import Effect, Load, Lookup, Save
from fd_core.kv.tiers.offload import KVOffload
from fd_core.kv.tiers.stats import TierStats
from fd_core.scheduling.operations.kv_offloading import OffloadCounters, Pace
from fd_core.scheduling.running.slots import SlotStats
from fd_core.types import FinishReason, RequestSpec
from tests.engine.helpers import Texts, golden, null_engine, random_specs
from tests.engine.stepping import greedy, scripted
from tests.faults.raw_stores import RawStore

__all__ = ["SOON", "SPECS", "Pressed", "no_leaks", "one_value_each", "until"]

SPECS = random_specs(10, seed=7, max_prompt=120, max_tokens=40)
SOON = 0.4
"""`kv_store_timeout` for a store that does not answer: no request waits longer."""
BLOCK_BYTES = 128
HOST_BLOCKS = 8
"""Small enough that most loads come from the store."""
_BOUNDS: dict[type[Effect], float] = {Lookup: 1 / 4, Load: 1.0, Save: 1.0}
"""Limits on the duration of operations, in multiples of `kv_store_timeout`."""
_LATE_SECONDS = 0.75
"""Seconds added to every bound, in addition to twice the delay of the machine."""
_BEAT_SECONDS = 0.005
_START_SECONDS = 3.0
_CLOSE_SECONDS = 5.0
_CALM_SECONDS = 20.0


class _Heart:
    """Delay of the machine: a thread that wakes up at short intervals and adds up by how much it overslept."""

    def __init__(self) -> None:
        self.late = 0.0
        threading.Thread(target=self._beat, name="tests-heart", daemon=True).start()

    def _beat(self) -> None:
        while True:
            due = time.monotonic() + _BEAT_SECONDS
            time.sleep(_BEAT_SECONDS)
            self.late += time.monotonic() - due


_HEART = _Heart()


class Stopwatch:
    """Seconds since its creation, less the delay of a busy machine."""

    def __init__(self) -> None:
        self._began, self._late = time.monotonic(), _HEART.late

    @property
    def fair_seconds(self) -> float:
        return time.monotonic() - self._began - 2 * (_HEART.late - self._late)


class Pressed:
    """One engine under supervision: each step is short, and no operation holds a request or blocks beyond its bound."""

    def __init__(
        self, location: str, secret: Path, *, always_loads: bool = True, waits: float = 10.0, **settings: object
    ) -> None:
        """`waits` limits how long a request may wait for its KV, in seconds."""
        self.golden: Callable[[list[RequestSpec]], dict[str, list[int]]] = golden
        values: dict[str, object] = {
            "num_kv_blocks": 26,
            "host_kv_memory": HOST_BLOCKS * BLOCK_BYTES,
            "kv_store": location,
            "kv_store_secret_file": str(secret),
            "kv_store_timeout": waits,
        }
        self._waits = waits
        started = Stopwatch()
        self.engine = null_engine(**(values | settings))
        assert started.fair_seconds < _START_SECONDS, "the engine waited for its store to start"
        offload = self.engine._outside._offload  # type: ignore[attr-defined]  # for both ports
        assert isinstance(offload, KVOffload)
        self._probe, self._offload = self.engine.probe().scheduler.probe(), offload
        # Admission control is off, so that blocks run out; the cost of computing is not measured, so that everything
        # that can be loaded is loaded.
        self._probe.control.growth = lambda *_: 0  # type: ignore[method-assign]
        if always_loads:
            self.engine._prefill_pace.observe = lambda *_: None  # type: ignore[method-assign]
            self._probe.offloading.load_or_recompute.pace = Pace()  # an unknown pace is tried
        self._since: dict[int, tuple[type[Effect], Stopwatch]] = {}
        self._rounds = 0
        self._wants_blocks = False
        perform = offload.perform
        offload.perform = lambda effects: (self._began(effects), perform(effects))[1]  # type: ignore[assignment]

    @property
    def offload_counters(self) -> OffloadCounters:
        return self.engine.stats().scheduler.offload

    @property
    def tiers(self) -> TierStats:
        return self._offload.stats()

    def round(
        self, salt: str = "", specs: Sequence[RequestSpec] = SPECS, busy: Callable[[], object] | None = None
    ) -> None:
        """Run `specs` to their golden ends; `busy` is called while some of them run.

        Prompts with the same `salt` have the same keys; the device's copies are evicted first.
        """
        self._rounds += 1
        self._probe.pool.forget_prefixes()
        name = f"{self._rounds}-"
        texts = Texts()
        for spec in specs:
            renamed = msgspec.structs.replace(spec, request_id=name + spec.request_id, cache_salt=salt)
            texts.take(self.engine.submit(renamed))
        while self.engine.has_work:
            self._step(texts)
            if busy is not None and texts.tokens:
                busy()
                busy = None
        assert {key.removeprefix(name): tokens for key, tokens in texts.tokens.items()} == self.golden(list(specs))
        assert not {FinishReason.ERROR, FinishReason.ABORT} & set(texts.ends.values())
        self._wants_blocks |= specs is SPECS

    def calm(self) -> TierStats:
        """Wait until no write is pending; return the statistics, with all gauges back at their initial values."""
        writer = self._offload._writer
        until(lambda: not self.tiers.pending_write_bytes and not writer._forgotten, _CALM_SECONDS)
        stats, tiers = self.engine.stats().scheduler, self.tiers
        assert stats.slots == SlotStats(running=0, loading=0, draining=0, waiting=0)
        assert (stats.blocks.used, stats.blocks.fenced, stats.outputs.stale_outputs) == (0, 0, 0)
        assert tiers.host_bytes <= tiers.host_limit_bytes
        assert (tiers.copy_errors, tiers.open_operations) == (0, 0)
        assert not (self._probe.operations.open or self._probe.operations.effects)
        return tiers

    def warm(self, salt: str = "") -> TierStats:
        """Run once and wait until everything is written."""
        before = self.tiers.written_blocks
        self.round(salt)
        tiers = self.calm()
        assert tiers.written_blocks > before
        return tiers

    def loads(self, salt: str = "", seconds: float = 12.0) -> None:
        """Run until blocks of an earlier engine are loaded; a busy machine may need several attempts."""
        ends = time.monotonic() + seconds
        while not self.tiers.loaded_blocks_store:
            assert time.monotonic() < ends, f"nothing is loaded: {self.tiers}"
            self.round(salt)

    def recover(self, seconds: float = 20.0) -> None:
        """Run until blocks are again written to the store and loaded from it."""
        ends = time.monotonic() + seconds
        while True:
            before = self.tiers
            salt = f"again {self._rounds}"
            self.round(salt)
            written = self.calm()
            self.round(salt)
            after = self.calm()
            if (
                written.written_blocks > before.written_blocks
                and after.loaded_blocks_store > written.loaded_blocks_store
            ):
                assert (after.breaker, after.write_breaker) == ("closed", "closed")
                return
            assert time.monotonic() < ends, f"the store is not used again: {after}"
            time.sleep(0.1)

    def close(self) -> None:
        closing = Stopwatch()
        self.engine.close()
        assert closing.fair_seconds < _CLOSE_SECONDS
        assert not self.tiers.pending_write_bytes
        assert not self._wants_blocks or self.engine.stats().scheduler.counters.preemptions, "there was no pressure"

    def _step(self, texts: Texts) -> None:
        step = Stopwatch()
        texts.take(self.engine.step())
        assert step.fair_seconds < _LATE_SECONDS, "a step blocked"
        self.engine.check_integrity()
        still = self._probe.operations.open
        self._since = {number: since for number, since in self._since.items() if number in still}
        for kind, since in self._since.values():
            bound = _BOUNDS[kind] * self._waits + _LATE_SECONDS
            assert since.fair_seconds < bound, f"a {kind.__name__} holds on beyond its bound"

    def _began(self, effects: Sequence[Effect]) -> None:
        now = Stopwatch()
        self._since |= {effect.operation: (type(effect), now) for effect in effects if type(effect) in _BOUNDS}


def one_value_each(
    raw_store: RawStore, secret: Path, count: int, rng: np.random.Generator, **settings: object
) -> tuple[Pressed, list[RequestSpec], dict[bytes, bytes]]:
    """Return an engine that has written one value for each of `count` prompts and keeps none; prompts and values."""
    specs = [greedy(f"r{n}", rng.integers(0, 256, 17), 1) for n in range(count)]
    texts = {spec.request_id: scripted(spec) for spec in specs}
    engine = Pressed(raw_store.location, secret, host_kv_memory=0, **settings)
    engine.golden = lambda _: texts
    engine.round(specs=specs)
    engine.calm()
    values = raw_store.values()
    assert len(values) == count
    return engine, specs, values


def until(true: Callable[[], object], seconds: float) -> None:
    """Wait until the condition holds."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "timed out"
        time.sleep(0.01)


@contextmanager
def no_leaks() -> Iterator[None]:
    """Check that neither threads of the tiers nor open files remain."""
    files, threads = _open_files(), set(threading.enumerate())
    yield
    until(lambda: not [one for one in set(threading.enumerate()) - threads if one.name.startswith("fdcore")], 3.0)
    until(lambda: _open_files() <= files, 3.0)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
