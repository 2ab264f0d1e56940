"""Tensor-parallel ranks in separate processes: identical texts, recovery from a lost rank, and errors that name the
rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.backends.null import NullBackend
from fd_core.config import EngineConfig
from fd_core.engine.building import builder
from fd_core.engine.building.builder import load_engine
from fd_core.engine.clients.process import ProcessClient
from fd_core.engine.ranks import leading
from fd_core.engine.ranks.messages import step_digest
from fd_core.errors import BadRequest, ConfigError, EngineDead, ModelError, PluginError
from fd_core.launching.spawn import SpawnLauncher
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.drafting import speculation
from fd_core.types import StepOutput
from tests.engine.clients.test_process import until
from tests.engine.faults import Faults
from tests.engine.helpers import Texts, golden, null_engine, random_specs, run
from tests.engine.knowing import OracleDrafter
from tests.engine.stepping import greedy
from tests.engine.test_restarts import opened, read, run_test
from tests.models.loading.tiny_gguf import LLAMA, write_gguf
from tests.process_state import lives

SPECS = random_specs(32, seed=41, max_prompt=40, max_tokens=60)
LONG = greedy("long", range(20), 300)
pytestmark = pytest.mark.slow

TWO: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("settings", [{**TWO}, {"output_transport": "zmq"}], ids=str)
def test_running_engine_holds_no_files_to_clean_up(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = null_engine(**settings)
    try:
        assert list(tmp_path.iterdir()) == []
        assert run(engine, SPECS[:4]).tokens == golden(SPECS[:4])
    finally:
        engine.close()


@pytest.mark.parametrize("k", [0, 3])
def test_ranks_generate_golden_texts_under_pressure(k: int) -> None:
    """Rank 0 drafts, and all ranks verify."""
    # Too few blocks, so requests are preempted, stored and loaded.
    engine = null_engine(num_kv_blocks=26, pipeline_depth=2, speculative=speculation(k), **TWO)
    try:
        if k:
            engine.probe().runner.drafter = OracleDrafter(8, SPECS, wrong=0.3, seed=1)
        assert run(engine, SPECS[:12]).tokens == golden(SPECS[:12])
        stats = engine.stats().scheduler
        assert stats.counters.preemptions > 0
        assert (stats.drafts.accepted > 0) == (k > 0)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"backend": "reference"}, marks=pytest.mark.soak),
        {"backend": "cpu", "dtype": "float32", "quantization": "int8"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_real_model_on_ranks_generates_golden_texts(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine query heads on three KV heads, like SmolLM2; some requests resume from KV that all ranks offloaded."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 258}
    path = write_checkpoint("llama", tmp_path / "model", **sizes)
    values: dict[str, Any] = {"model": "tiny", **settings, "max_num_seqs": 4, "block_size": 4}
    limits: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 80, "max_num_batched_tokens": 32}
    specs = [greedy(f"r{i}", range(3 + i, 13 + 2 * i), 40) for i in range(6)]
    texts = []
    for size, transport in ((1, "shared_memory"), (2, "shared_memory"), (2, "gloo")):
        config = EngineConfig(**values, **limits, tensor_parallel_size=size, rank_transport=transport)
        engine = load_engine(config, path, progress=lambda *_: None)
        try:
            texts.append(run(engine, specs).tokens)
            stats = engine.stats()
            assert stats.kv is not None and stats.scheduler.counters.preemptions > 0
            assert engine.probe().runner.cache.shape.num_kv_heads == 3  # of all ranks
        finally:
            engine.close()
    assert texts[0] == texts[1] == texts[2]
    warned = "texts may differ from those of another number of ranks" in caplog.text
    assert warned == (settings["backend"] == "reference")


def test_ranks_that_divide_experts_generate_golden_texts(tmp_path: Path) -> None:
    path = write_checkpoint("qwen3-moe", tmp_path / "model", num_experts=5, hidden_size=128, moe_intermediate_size=64)
    values: dict[str, Any] = {"model": "tiny", "backend": "cpu", "quantization": "int4", "num_kv_blocks": 24}
    specs = [greedy(f"r{i}", range(3 + i, 13 + 2 * i), 20) for i in range(4)]
    texts = []
    for size, divided in ((1, False), (2, False), (2, True)):
        config = EngineConfig(**values, tensor_parallel_size=size, enable_expert_parallel=divided, max_num_seqs=4)
        with contextlib.closing(load_engine(config, path, progress=lambda *_: None)) as engine:
            texts.append((run(engine, specs).tokens, {*engine.info.weights}))
    assert texts[0] == texts[1] == texts[2]


def test_adapters_change_on_all_ranks_between_steps(tmp_path: Path) -> None:
    """Requests with both adapters and with none share each batch; one adapter is unloaded while in use."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 258}
    path = write_checkpoint("llama", tmp_path / "model", **sizes)
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(path, tmp_path / name, seed=seed, rank=1 + seed)
    values: dict[str, Any] = {"backend": "reference", "block_size": 4, "num_kv_blocks": 60, "max_model_len": 80}
    values |= {"lora_modules": (f"one={tmp_path / 'one'}",), "lora_folder": str(tmp_path), "max_num_seqs": 4}
    values |= {"structured_output": False}
    texts = []
    for size in (1, 2):
        config = EngineConfig(model="tiny", **values, tensor_parallel_size=size)
        engine = load_engine(config, path, progress=lambda *_: None)
        try:
            one = engine.info.adapters[0].digest
            long = [greedy(f"long-{adapter}", range(5, 15), 50, adapter=adapter) for adapter in ("", one)]
            for spec in long:
                engine.submit(spec)
            record = Texts()
            for _ in range(5):
                record.take(engine.step())
            two = engine.load_adapter("two", tmp_path / "two").digest
            engine.unload_adapter("one")
            record.take(engine.submit(greedy("two", range(5, 15), 30, adapter=two)))
            while engine.has_work:
                record.take(engine.step())
            engine.step()  # frees the adapter that is no longer in use
            runner = engine.probe().runner
            assert [adapter.digest for adapter in runner.adapters.held] == [two]
            texts.append(record.tokens)
        finally:
            engine.close()
    assert texts[0] == texts[1]
    assert len({tuple(text[:30]) for text in texts[0].values()}) == 3, "the adapters change too little"


def test_adapter_failing_on_one_rank_is_loaded_on_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint("llama", tmp_path / "model", vocab_size=258)
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(path, tmp_path / name, seed=seed, rank=2)
    # A rank without memory for a second adapter.
    script = (
        "from fd_core.engine.ranks import child\n"
        "from fd_core.runner.runner import RunnerAdapters\n"
        "replace = RunnerAdapters.replace\n"
        "def full(self, adapters):\n"
        "    adapters = list(adapters)\n"
        "    if len(adapters) > 1: raise MemoryError('no room')\n"
        "    replace(self, adapters)\n"
        "RunnerAdapters.replace = full\n"
        "child.main()"
    )
    scripted_ranks(script, tmp_path, monkeypatch)
    config = EngineConfig(
        model="tiny", backend="reference", num_kv_blocks=60, max_model_len=80, lora_folder=str(tmp_path), **TWO
    )
    engine = load_engine(config, path, progress=lambda *_: None)
    try:
        one = engine.load_adapter("one", tmp_path / "one")
        with pytest.raises(BadRequest, match="not enough memory for the adapter: rank 1: no room"):
            engine.load_adapter("two", tmp_path / "two")
        assert engine.info.adapters == (one,)
        assert [adapter.digest for adapter in engine.probe().runner.adapters.held] == [one.digest]
        run(engine, [greedy("after", range(9), 20, adapter=one.digest)])
        engine.unload_adapter("one")
        engine.step()
        engine.load_adapter("two", tmp_path / "two")
    finally:
        engine.close()


def test_killed_rank_loses_no_token(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """The rank is killed in the middle of 32 streams."""
    expected = golden(SPECS)
    faults.arm("hold", position=44)

    async def main() -> None:
        async with opened(max_num_seqs=32, num_kv_blocks=200, **TWO) as client:
            assert isinstance(client, ProcessClient)
            reading = asyncio.gather(*(read(client, spec) for spec in SPECS))
            await until(lambda: faults.count == 1)
            os.kill(rank_of(client), signal.SIGKILL)
            faults.release()
            record = await reading
            assert {spec.request_id: each.tokens for spec, each in zip(SPECS, record, strict=True)} == expected
            assert client.info.epoch == 2 and client.requests_requeued > 0
            assert client.rank_failures == {"1": 1}
        assert "engine of epoch 1 died: rank 1 was ended by SIGKILL" in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (signal.SIGKILL, "rank 1 was ended by SIGKILL"),
        pytest.param(signal.SIGSTOP, "rank 1 did not respond", marks=pytest.mark.soak),
    ],
)
def test_rank_lost_while_idle_is_detected_and_named(
    sent: signal.Signals, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with opened(backend="null", watchdog_seconds=3.0, **TWO) as client:
            assert isinstance(client, ProcessClient)
            lost = rank_of(client)
            os.kill(lost, sent)
            await until(lambda: client.info.epoch == 2)
            assert client.alive
            assert client.rank_failures == {"1": 1}
            await until(lambda: not lives(lost))
        assert words in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


def test_rank_exit_wakes_the_engine() -> None:
    """No poll is needed."""
    woken = threading.Event()
    engine = null_engine(wake=woken.set, **TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        woken.clear()
        os.kill(runner.ranks.pids[0], signal.SIGKILL)
        assert woken.wait(60.0)
        with pytest.raises(EngineDead, match="rank 1 was ended by SIGKILL"):
            engine.step()
    finally:
        engine.close()


def test_idle_ranks_answer_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are also sent between steps, and their replies are not mistaken for those of steps."""
    monkeypatch.setattr(leading, "_IDLE_SECONDS", 0.0)
    engine = null_engine(**TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        assert run(engine, SPECS[:3]).tokens == golden(SPECS[:3])
        for _ in range(400):
            engine.step()
            if not runner.ranks._unchecked:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the rank does not answer")
        assert run(engine, SPECS[3:5]).tokens == golden(SPECS[3:5])
    finally:
        engine.close()


def test_slow_rank_is_tolerated() -> None:
    """It is suspended repeatedly, each time for less than the timeout."""

    async def main() -> None:
        async with opened(backend="null", watchdog_seconds=20.0, **TWO) as client:
            assert isinstance(client, ProcessClient)
            rank = rank_of(client)

            async def slow() -> None:
                for _ in range(8):
                    os.kill(rank, signal.SIGSTOP)
                    await asyncio.sleep(0.1)
                    os.kill(rank, signal.SIGCONT)
                    await asyncio.sleep(0.02)

            record, _ = await asyncio.gather(read(client, LONG, lambda _: None), slow())
            assert record.tokens == golden([LONG])["long"]
            assert client.info.epoch == 1

    run_test(main)


def test_suspended_rank_is_named_within_watchdog_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with opened(backend="null", watchdog_seconds=6.0, **TWO) as client:
            assert isinstance(client, ProcessClient)
            stopped = rank_of(client)
            os.kill(stopped, signal.SIGSTOP)
            record = await read(client, LONG)
            assert record.tokens == golden([LONG])["long"]
            assert client.info.epoch == 2
            await until(lambda: not lives(stopped))
        assert "rank 1 did not respond within 3 s" in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


def rank_of(client: ProcessClient) -> int:
    """Return the process id of rank 1."""
    return int(Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()[0])


def scripted_ranks(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in place of the other ranks."""
    (folder / "fd_played.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(leading, "CHILD", ("-m", "fd_played"))


PLAYED = """
import os
import threading
import time
import msgspec, zmq
from fd_core.engine.process.messages import Fault
from fd_core.engine.ranks.messages import LIVENESS_CHECK, RankEndpoint, RankLoaded, RankReady, StepDigest, decode_order
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(msgspec.json.decode(os.environ["FD_RANK_ENDPOINT"], type=RankEndpoint).steps)
socket.recv()
send = lambda message: socket.send(msgspec.msgpack.encode(message))
{script}
socket.recv()
"""


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("send(Fault('it ran out of memory: the model'))", EngineDead, "rank 1: it ran out of memory: the model"),
        ("send(Fault('a tensor is missing', 'model', None, 3))", ModelError, "rank 1: a tensor is missing"),
        ("raise SystemExit(7)", EngineDead, "rank 1 ended with exit code 7"),
        (
            "send(RankLoaded(0, 1, (0, 1))); socket.recv(); send(RankReady())",
            ConfigError,
            "num_kv_blocks|KV block",  # free memory is the least of all ranks
        ),
        (
            "send(RankLoaded(2**30, 1, (0, 1))); socket.recv(); send(RankReady()); socket.recv(); send(RankReady())\n"
            "while (frame := socket.recv()) == LIVENESS_CHECK: send(RankReady())\n"
            "send(StepDigest(decode_order(frame).plan.step, b'else'))",
            EngineDead,
            "rank 1 computed a different result of step",
        ),
    ],
)
def test_error_of_rank_is_reported_verbatim(
    script: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted_ranks(PLAYED.format(script=script), tmp_path, monkeypatch)
    with pytest.raises(error, match=words), contextlib.closing(null_engine(**TWO)) as engine:
        run(engine, SPECS[:1])


def test_error_of_rank_keeps_its_kind_while_another_is_awaited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = (
        "if 'steps-1' in os.environ['FD_RANK_ENDPOINT']:\n    socket.recv()\n"
        "send(Fault('a tensor is missing', 'model', None, 3))\nraise SystemExit(1)"
    )
    scripted_ranks(PLAYED.format(script=script), tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"rank [23]: a tensor is missing"):
        null_engine(tensor_parallel_size=4).close()


def test_rank_digest_covers_plan_and_sampled_tokens() -> None:
    def digest(frame: bytes, token: int) -> bytes:
        return step_digest(frame, StepOutput(1, 4, np.full((2, 1), token, np.int32), np.zeros(2, np.int32)))

    assert digest(b"plan", 7) == digest(b"plan", 7)
    assert len({digest(b"plan", 7), digest(b"plan", 8), digest(b"else", 7)}) == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 did not respond for 1 s while it loaded"),
        ("raise SystemExit(7)", "rank 1 ended with exit code 7"),
        (
            "import time\n"
            "from fd_core.engine.ranks import child\n"
            "child.Computing.loaded = lambda self: time.sleep(1000)\n"
            "child.main()",
            "rank 1 made no progress for 0.5 s while it loaded",
        ),
    ],
)
def test_rank_that_hangs_during_start_is_named(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted_ranks(script, tmp_path, monkeypatch)
    pids: list[int] = []
    start = SpawnLauncher.start

    def noted(launcher: SpawnLauncher, specs: Any) -> Any:
        started = start(launcher, specs)
        pids.extend(process.pid for process in started)
        return started

    monkeypatch.setattr(SpawnLauncher, "start", noted)
    if "no progress" in words:
        monkeypatch.setattr(leading, "_LOAD_SECONDS", 0.5)
    with pytest.raises(EngineDead, match=words) as error:
        null_engine(watchdog_seconds=1.0 if "did not respond" in words else 60.0, **TWO).close()
    assert error.value.field == "rank 1"
    assert len(pids) == 1 and not lives(pids[0]), "the rank process still exists"


@pytest.mark.soak
def test_rank_that_loads_slowly_is_tolerated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It sends heartbeats, and reports progress now and then."""
    script = (
        "import time\n"
        "from fd_core.engine.ranks import child\n"
        "loaded = child.Computing.loaded\n"
        "def slow(self):\n"
        "    for done in range(6):\n"
        "        time.sleep(2)\n"
        "        self._progress('load', done, 6)\n"
        "    return loaded(self)\n"
        "child.Computing.loaded = slow\n"
        "child.main()"
    )
    scripted_ranks(script, tmp_path, monkeypatch)
    monkeypatch.setattr(leading, "_LOAD_SECONDS", 8.0)
    with contextlib.closing(null_engine(watchdog_seconds=8.0, **TWO)) as engine:
        assert run(engine, SPECS[:3]).tokens == golden(SPECS[:3])


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
        ({"pipeline_parallel_size": 4}, "cannot divide 2 layers into 4 stages", "use at most 2"),
        (
            {"tensor_parallel_size": 3},
            "cannot divide 4 query heads and 2 KV heads among 3 ranks",
            "use 2 or 4",
        ),
        ({"tensor_parallel_size": 4}, "block of width 3 among 4 ranks", "use 2"),
    ],
)
def test_indivisible_model_is_rejected_before_starting_ranks(
    form: str, settings: dict[str, Any], words: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "RankProcesses", lambda *_: pytest.fail("ranks were started"))
    width = 3 if "width" in words else 64
    if form == "gguf":
        path = write_gguf(tmp_path / "m.gguf", values=LLAMA | {"block_count": 2, "feed_forward_length": width})
    else:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": width}
        path = write_checkpoint("llama", tmp_path / "model", num_hidden_layers=2, **sizes)
    with pytest.raises(ConfigError, match=words) as refused:
        load_engine(EngineConfig(model="tiny", backend="reference", **settings), path, progress=lambda *_: None)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni runs one process"),
        (
            {"enable_expert_parallel": True, "pipeline_parallel_size": 2},
            "tensor-parallel ranks, but there is one",
        ),
    ],
)
def test_settings_incompatible_with_ranks_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=words):
        null_engine(**settings)


def test_ray_placement_of_unsupported_backend_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NullBackend, "rank_environments", lambda size: [{"DEVICE": str(rank)} for rank in range(size)])
    with pytest.raises(ConfigError, match="ranks of the null backend cannot be placed by Ray yet"):
        null_engine(distributed_executor_backend="ray", **TWO)


def test_rank_sees_only_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [{"FD_TEST_DEVICE": str(rank)} for rank in range(2)]
    monkeypatch.setattr(NullBackend, "rank_environments", lambda size: shown)
    engine = null_engine(**TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        (pid,) = runner.ranks.pids
        assert b"FD_TEST_DEVICE=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        engine.close()


def test_kv_copy_covers_blocks_of_all_ranks() -> None:
    engine = null_engine(**TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        joined, ranks = runner.cache, runner.ranks
        data = np.arange(3 * 2 * 16, dtype=np.float32).reshape(3, 1, 2, 16, 1, 1)
        joined.import_blocks(np.array([4, 2, 9], np.int32), data)
        np.testing.assert_array_equal(joined.export_blocks(np.array([9, 4], np.int32)), data[[2, 0]])
        of_rank_1 = leading.JoinedKVCache(joined, ranks, [(0, 1), (1, 2)])
        both = of_rank_1.export_blocks(np.array([2], np.int32))
        np.testing.assert_array_equal(both[..., 1:, :], data[1:2])
    finally:
        engine.close()


def test_late_copy_of_rank_is_not_matched_to_another() -> None:
    engine = null_engine(**TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        runner.ranks._seconds = 0.5  # override: the watchdog timeouts are too long for a test
        of_rank_1 = leading.JoinedKVCache(runner.cache, runner.ranks, [(0, 1), (1, 2)])
        (rank,) = runner.ranks.pids
        os.kill(rank, signal.SIGSTOP)
        while " T " not in Path(f"/proc/{rank}/stat").read_text():
            time.sleep(0.001)
        going_on = threading.Timer(8.0, os.kill, (rank, signal.SIGCONT))
        going_on.start()  # an unbounded wait must end as well
        with pytest.raises(EngineDead, match="rank 1 did not respond"):
            of_rank_1.export_blocks(np.array([2], np.int32))
        going_on.cancel()
        os.kill(rank, signal.SIGCONT)
        with pytest.raises(EngineDead):
            of_rank_1.export_blocks(np.array([9], np.int32))
        with pytest.raises(EngineDead, match=r"rank 1 did not respond within 0.5 s"):
            runner.check()
    finally:
        engine.close()
