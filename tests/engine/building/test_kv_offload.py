"""KV offload in a running engine: the loop never blocks on tiers or stores, and engines share stored KV."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fd_core.config import EngineConfig
from fd_core.effects.port import JoinedEffectPort
from fd_core.engine.building import kv_offload
from fd_core.engine.building.builder import _EngineBuilder
from fd_core.engine.core import Engine
from fd_core.kv.stores.contract import FailureReason, StoreError
from fd_core.kv.stores.memory import MemoryStore
from fd_core.plugins import installed_plugins
from fd_core.testing.models.checkpoints import LONG_CASE, write_checkpoint
from tests.engine.helpers import golden, null_engine, run
from tests.engine.stepping import greedy
from tests.speed import slowdown

PROMPTS = [greedy(f"r{index}", range(index, index + 100), 20) for index in range(8)]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_bytes(b"of sixteen bytes")
    file.chmod(0o600)
    return str(file)


def longest_step(engine: Engine) -> float:
    """Run to the end; return how long the longest step took, in seconds."""
    longest = 0.0
    while engine.has_work:
        began = time.monotonic()
        engine.step()
        longest = max(longest, time.monotonic() - began)
    return longest


@pytest.mark.law("5.1")
def test_loop_with_runnable_step_does_not_block_on_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(_port: JoinedEffectPort, seconds: float) -> None:
        pytest.fail(f"a step is runnable, but the loop blocks for up to {seconds} s")

    monkeypatch.setattr(JoinedEffectPort, "wait", waited)
    engine = null_engine()
    assert not engine.submit(PROMPTS[0])
    longest_step(engine)
    engine.close()


@pytest.mark.parametrize("stalled", ["longest_prefix", "get", "put"])
@pytest.mark.law("5.1")
@pytest.mark.timing
def test_stalled_store_does_not_delay_planning(stalled: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store stalls for its full timeout, at least 0.6 s; no loop iteration takes more than a fraction of that."""
    released = threading.Event()
    own = getattr(MemoryStore, stalled)

    def stall(self, *arguments):
        released.wait(arguments[-1])
        return own(self, *arguments)

    engine = null_engine(kv_store="memory:", kv_store_secret_file=secret, kv_store_timeout=2.4, host_kv_memory=1)
    run(engine, [greedy("first", range(100), 3)])
    engine.probe().scheduler.probe().pool.forget_prefixes()
    wait_for(lambda: engine.stats().kv.written_blocks)
    monkeypatch.setattr(MemoryStore, stalled, stall)
    for spec in PROMPTS:
        engine.submit(spec)
    try:
        assert longest_step(engine) < 0.5 * slowdown()
    finally:
        released.set()
        engine.close()


def test_stored_kv_is_loaded_by_another_engine(tmp_path: Path, secret: str) -> None:
    settings = {"kv_store": f"disk:{tmp_path / 'kv'}", "kv_store_secret_file": secret}
    first = null_engine(**settings)
    assert run(first, PROMPTS[:1]).tokens == golden(PROMPTS[:1])
    first.close()
    second = null_engine(**settings)
    assert run(second, PROMPTS[:1]).tokens == golden(PROMPTS[:1])
    stats = second.stats()
    second.close()
    assert (
        stats.scheduler.offload.loads,
        stats.scheduler.offload.loaded_tokens,
        stats.scheduler.offload.lost_tokens,
    ) == (1, 96, 0)
    assert stats.kv is not None
    assert (stats.kv.loaded_blocks_store, stats.kv.loaded_blocks_host) == (6, 0)
    assert stats.scheduler.counters.prefix_hits == 96


def test_unread_decisions_do_not_accumulate(tmp_path: Path, secret: str) -> None:
    settings = {"kv_store": f"disk:{tmp_path / 'kv'}", "kv_store_secret_file": secret}
    for _ in range(2):
        engine = null_engine(**settings)
        run(engine, PROMPTS)
        assert engine.probe().scheduler.probe().operations.take() == ((), ())
        engine.close()
    counters = engine.stats().scheduler.offload
    assert counters.loads + counters.declined > 0


@pytest.mark.law("5.3")
def test_block_hash_covers_everything_that_determines_its_kv(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def checkpoint(path: Path) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(digest=f"weights of {path}", tokenizer=SimpleNamespace(digest="same"))

    def name(path: str, numerics: str, block_size: int = 16, salt: str = "") -> bytes:
        config = EngineConfig(model="x", kv_store="memory:", kv_store_secret_file=secret, block_size=block_size)
        identity = kv_offload.kv_identity(Path(path), numerics)
        hasher = kv_offload.open_kv_storage(config, installed_plugins(), lambda: identity, 0).hasher
        assert hasher is not None
        return hasher.root(salt)

    monkeypatch.setattr(kv_offload, "open_checkpoint", checkpoint)
    names = [name("a", "f32"), name("b", "f32"), name("a", "bf16"), name("a", "f32", 32), name("a", "f32", 16, "salt")]
    assert len(set(names)) == 5
    assert name("a", "f32") == names[0]


@pytest.mark.law("5.3")
def test_block_hash_depends_on_weight_format(tmp_path: Path) -> None:
    """This holds even on a backend that computes in the same dtype for every weight format."""
    model = write_checkpoint(LONG_CASE, tmp_path)

    def name(quantization: str) -> str:
        config = EngineConfig(model=str(model), backend="reference", quantization=quantization)
        return _EngineBuilder(config, model, 1, lambda *_: None)._identity

    names = {quantization: name(quantization) for quantization in ("auto", "int8", "int4")}
    assert len(set(names.values())) == 3


def test_prefill_cost_is_measured_before_first_request() -> None:
    engine = null_engine()
    engine.submit(greedy("r", range(40), 2))
    engine.step()
    assert (engine.stats().scheduler.pace.prefill_token or 0) > 0
    engine.close()


def test_block_lost_by_store_while_idle_is_saved_on_next_use(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = MemoryStore.put
    idle, woken = threading.Event(), threading.Event()

    def full(self, values, timeout):
        assert idle.wait(60)
        raise StoreError(FailureReason.FULL, "no room")

    monkeypatch.setattr(MemoryStore, "put", full)
    engine = null_engine(kv_store="memory:", kv_store_secret_file=secret, host_kv_memory=1, wake=woken.set)
    run(engine, PROMPTS[:1])
    assert not engine.has_work
    woken.clear()
    idle.set()
    assert woken.wait(60)
    assert not engine.has_work
    monkeypatch.setattr(MemoryStore, "put", put)
    run(engine, [greedy("again", PROMPTS[0].prompt, 20)])
    wait_for(lambda: engine.stats().kv.written_blocks)
    engine.close()


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
