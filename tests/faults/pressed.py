"""An engine in want of blocks with a KV store that may be in any trouble, and what must hold whatever the store does.

The null backend's text depends on every block of KV being right, so a golden text proves that nothing wrong was used.
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
from tests.faults.places import Place

__all__ = ["SOON", "SPECS", "Pressed", "nothing_left_behind", "one_value_each", "until"]

SPECS = random_specs(10, seed=7, max_prompt=120, max_tokens=40)
SOON = 0.4
"""`kv_store_timeout` where a store does not answer: a request waits for no longer."""
BLOCK_BYTES = 128
HOST_BLOCKS = 8
"""So few that most of what is loaded comes from the store."""
_BOUNDS: dict[type[Effect], float] = {Lookup: 1 / 4, Load: 1.0, Save: 1.0}
"""What an operation may take, in shares of `kv_store_timeout`."""
_LATE_SECONDS = 0.75
"""What is added to every bound, besides twice what the machine itself was late."""
_BEAT_SECONDS = 0.005
_START_SECONDS = 3.0
_CLOSE_SECONDS = 5.0
_CALM_SECONDS = 20.0


class _Heart:
    """How late the machine is: a thread that wakes up all the time, and sums up by how much it overslept."""

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
    """Seconds since it was made, less what a busy machine is to blame for."""

    def __init__(self) -> None:
        self._began, self._late = time.monotonic(), _HEART.late

    @property
    def fair_seconds(self) -> float:
        return time.monotonic() - self._began - 2 * (_HEART.late - self._late)


class Pressed:
    """One engine and its watch: each step is short, and no operation holds a request or blocks beyond its bound."""

    def __init__(
        self, location: str, secret: Path, *, always_loads: bool = True, waits: float = 10.0, **settings: object
    ) -> None:
        """`waits` is how long a request may wait for its KV."""
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
        offload = self.engine._outside._offload  # type: ignore[attr-defined]  # a back door into both ports
        assert isinstance(offload, KVOffload)
        self._probe, self._offload = self.engine.probe().scheduler.probe(), offload
        # Back doors: whoever fits is admitted, so that blocks run out; and what computing costs is not learnt, so that
        # whatever can be loaded is.
        self._probe.control.growth = lambda *_: 0  # type: ignore[method-assign]
        if always_loads:
            self.engine._prefill_pace.observe = lambda *_: None  # type: ignore[method-assign]
            self._probe.offloading.load_or_recompute.pace = Pace()  # what is unknown is tried
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
        """Run `specs` to their golden ends; `busy` is called when some of them run.

        Prompts of one `salt` have the same keys; what the device still held of them is forgotten first.
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
        """Wait until nothing is on its way to the store; return the numbers, all gauges being as at first."""
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
        """Run and have everything written."""
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
        """Run until blocks are both written to the store and loaded from it again."""
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
        assert step.fair_seconds < _LATE_SECONDS, "a step waited for something"
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
    place: Place, secret: Path, count: int, rng: np.random.Generator, **settings: object
) -> tuple[Pressed, list[RequestSpec], dict[bytes, bytes]]:
    """Return an engine that has written one value for each of `count` prompts and keeps none; prompts and values."""
    specs = [greedy(f"r{n}", rng.integers(0, 256, 17), 1) for n in range(count)]
    texts = {spec.request_id: scripted(spec) for spec in specs}
    engine = Pressed(place.location, secret, host_kv_memory=0, **settings)
    engine.golden = lambda _: texts
    engine.round(specs=specs)
    engine.calm()
    values = place.values()
    assert len(values) == count
    return engine, specs, values


def until(true: Callable[[], object], seconds: float) -> None:
    """Wait until it is so."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it did not become so in time"
        time.sleep(0.01)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Neither threads of the tiers nor open files."""
    files, threads = _open_files(), set(threading.enumerate())
    yield
    until(lambda: not [one for one in set(threading.enumerate()) - threads if one.name.startswith("fdcore")], 3.0)
    until(lambda: _open_files() <= files, 3.0)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
