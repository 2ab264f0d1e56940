"""Ranks in processes of their own: the same texts, whatever becomes of one of them, and its own words for it."""

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
from fd_core.testing.stepping.drafting import speculation
from fd_core.types import StepOutput
from tests.engine.clients.test_process import until
from tests.engine.helpers import Texts, golden, null_engine, random_specs, run
from tests.engine.knowing import KnowingDrafter
from tests.engine.stepping import greedy
from tests.engine.test_restarts import opened, read, run_test
from tests.models.loading.tiny_gguf import LLAMA, write_gguf
from tests.process_state import lives

SPECS = random_specs(32, seed=41, max_prompt=40, max_tokens=60)
LONG = greedy("long", range(20), 300)
pytestmark = pytest.mark.slow

TWO: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("settings", [{**TWO}, {"output_transport": "zmq"}], ids=str)
def test_an_engine_that_serves_has_no_files_that_its_end_would_leave(
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
def test_ranks_make_the_texts_of_one_under_pressure(k: int) -> None:
    """Drafts are rank 0's, and all ranks verify them."""
    # So few blocks that requests are preempted, stored and loaded.
    engine = null_engine(num_kv_blocks=26, pipeline_depth=2, speculative=speculation(k), **TWO)
    try:
        if k:
            engine.probe().runner.drafter = KnowingDrafter(8, SPECS, wrong=0.3, seed=1)
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
def test_a_real_model_on_ranks_makes_the_texts_of_one(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine query heads on three KV heads, as SmolLM2 has; some requests come back from KV that all ranks kept."""
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


def test_adapters_come_and_go_on_all_ranks_between_steps(tmp_path: Path) -> None:
    """Requests of both adapters and of none share each batch; one adapter goes while a request uses it."""
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
            told = Texts()
            for _ in range(5):
                told.take(engine.step())
            two = engine.load_adapter("two", tmp_path / "two").digest
            engine.unload_adapter("one")
            told.take(engine.submit(greedy("two", range(5, 15), 30, adapter=two)))
            while engine.has_work:
                told.take(engine.step())
            engine.step()  # the adapter that nobody uses any more goes
            runner = engine.probe().runner
            assert [adapter.digest for adapter in runner.adapters.held] == [two]
            texts.append(told.tokens)
        finally:
            engine.close()
    assert texts[0] == texts[1]
    assert len({tuple(text[:30]) for text in texts[0].values()}) == 3, "the adapters change too little"


def test_an_adapter_that_one_rank_cannot_hold_is_refused_and_held_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint("llama", tmp_path / "model", vocab_size=258)
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(path, tmp_path / name, seed=seed, rank=2)
    # A rank that has no room for a second adapter.
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
    played_by(script, tmp_path, monkeypatch)
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


def test_a_killed_rank_costs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of 32 streams."""
    expected = golden(SPECS)

    async def main() -> None:
        async with opened(backend="null", max_num_seqs=32, num_kv_blocks=200, **TWO) as client:
            assert isinstance(client, ProcessClient)
            dead: list[int] = []

            def kill(count: int) -> None:
                if count > 8 and not dead:
                    dead.append(count)
                    os.kill(rank_of(client), signal.SIGKILL)

            told = await asyncio.gather(*(read(client, spec, kill) for spec in SPECS))
            assert {spec.request_id: each.tokens for spec, each in zip(SPECS, told, strict=True)} == expected
            assert client.info.epoch == 2 and client.requests_requeued > 0
            assert client.rank_failures == {"1": 1}
        assert "engine of epoch 1 is gone: rank 1 was ended by SIGKILL" in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (signal.SIGKILL, "rank 1 was ended by SIGKILL"),
        pytest.param(signal.SIGSTOP, "rank 1 did not answer", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_is_lost_while_nothing_runs_is_missed_and_named(
    sent: signal.Signals, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with opened(backend="null", watchdog_seconds=3.0, **TWO) as client:
            assert isinstance(client, ProcessClient)
            lost = rank_of(client)
            os.kill(lost, sent)
            await until(lambda: not client.alive, 20.0)
            await until(lambda: client.alive, 30.0)
            assert client.info.epoch == 2
            assert client.rank_failures == {"1": 1}
            await until(lambda: not lives(lost))
        assert words in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


def test_the_end_of_a_rank_wakes_the_engine() -> None:
    """It need not be looked for."""
    woken = threading.Event()
    engine = null_engine(wake=woken.set, **TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        woken.clear()
        os.kill(runner.ranks.pids[0], signal.SIGKILL)
        assert woken.wait(10.0)
        with pytest.raises(EngineDead, match="rank 1 was ended by SIGKILL"):
            engine.step()
    finally:
        engine.close()


def test_ranks_that_are_idle_answer_when_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come between steps as well, and their answers are not taken for those of steps."""
    monkeypatch.setattr(leading, "_IDLE_SECONDS", 0.0)
    engine = null_engine(**TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        assert run(engine, SPECS[:3]).tokens == golden(SPECS[:3])
        for _ in range(400):
            engine.step()
            if not runner.ranks._unheard:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the rank does not answer")
        assert run(engine, SPECS[3:5]).tokens == golden(SPECS[3:5])
    finally:
        engine.close()


def test_a_rank_that_is_slow_is_waited_for() -> None:
    """It is stopped again and again, each time for less than it may be silent."""

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

            told, _ = await asyncio.gather(read(client, LONG, lambda _: None), slow())
            assert told.tokens == golden([LONG])["long"]
            assert client.info.epoch == 1

    run_test(main)


def test_a_rank_that_stands_still_is_named_within_the_watchdogs_time(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with opened(backend="null", watchdog_seconds=6.0, **TWO) as client:
            assert isinstance(client, ProcessClient)
            stopped: list[int] = []

            def stop(count: int) -> None:
                if not stopped:
                    stopped.append(rank_of(client))
                    os.kill(stopped[0], signal.SIGSTOP)

            told = await read(client, LONG, stop)
            assert told.tokens == golden([LONG])["long"]
            assert client.info.epoch == 2
            await until(lambda: not lives(stopped[0]))
        assert "rank 1 did not answer within 3 s" in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


def rank_of(client: ProcessClient) -> int:
    """Return the process id of rank 1."""
    return int(Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()[0])


def played_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a script in the place of other ranks."""
    (folder / "fd_played.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(leading, "CHILD", ("-m", "fd_played"))


PLAYED = """
import os
import threading
import time
import msgspec, zmq
from fd_core.engine.process.messages import Fault
from fd_core.engine.ranks.messages import LOOK, RankDoor, RankLoaded, RankReady, StepDigest, decode_order
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(msgspec.json.decode(os.environ["FD_RANK_DOOR"], type=RankDoor).steps)
socket.recv()
say = lambda message: socket.send(msgspec.msgpack.encode(message))
{script}
socket.recv()
"""


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("say(Fault('it has no memory left: the model'))", EngineDead, "rank 1: it has no memory left: the model"),
        ("say(Fault('a tensor is missing', 'model', None, 3))", ModelError, "rank 1: a tensor is missing"),
        ("raise SystemExit(7)", EngineDead, "rank 1 ended with exit code 7"),
        (
            "say(RankLoaded(0, 1, (0, 1))); socket.recv(); say(RankReady())",
            ConfigError,
            "num_kv_blocks|KV block",  # free memory is the least of all ranks
        ),
        (
            "say(RankLoaded(2**30, 1, (0, 1))); socket.recv(); say(RankReady()); socket.recv(); say(RankReady())\n"
            "while (frame := socket.recv()) == LOOK: say(RankReady())\n"
            "say(StepDigest(decode_order(frame).plan.step, b'else'))",
            EngineDead,
            "rank 1 made something else of step",
        ),
    ],
)
def test_the_error_is_the_ranks_own(
    script: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played_by(PLAYED.format(script=script), tmp_path, monkeypatch)
    with pytest.raises(error, match=words), contextlib.closing(null_engine(**TWO)) as engine:
        run(engine, SPECS[:1])


def test_ranks_are_compared_by_what_they_executed_and_by_what_they_sampled() -> None:
    def digest(frame: bytes, token: int) -> bytes:
        return step_digest(frame, StepOutput(1, 4, np.full((2, 1), token, np.int32), np.zeros(2, np.int32)))

    assert digest(b"plan", 7) == digest(b"plan", 7)
    assert len({digest(b"plan", 7), digest(b"plan", 8), digest(b"else", 7)}) == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 gave no sign for 1 s while it loaded"),
        ("raise SystemExit(7)", "rank 1 ended with exit code 7"),
        (
            "import time\n"
            "from fd_core.engine.ranks import child\n"
            "child.Computing.loaded = lambda self: time.sleep(1000)\n"
            "child.main()",
            "rank 1 came no further for 0.5 s while it loaded",
        ),
    ],
)
def test_a_rank_that_does_not_come_to_the_end_of_its_start_is_named(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played_by(script, tmp_path, monkeypatch)
    pids: list[int] = []
    start = SpawnLauncher.start

    def noted(launcher: SpawnLauncher, specs: Any) -> Any:
        started = start(launcher, specs)
        pids.extend(process.pid for process in started)
        return started

    monkeypatch.setattr(SpawnLauncher, "start", noted)
    stopped = "no sign" in words
    monkeypatch.setattr(leading, "_LOAD_SECONDS", 60.0 if stopped else 0.5)
    with pytest.raises(EngineDead, match=words) as error:
        null_engine(watchdog_seconds=1.0 if stopped else 60.0, **TWO).close()
    assert error.value.field == "rank 1"
    assert len(pids) == 1 and not lives(pids[0]), "the rank was left behind"


@pytest.mark.soak
def test_a_rank_that_is_slow_to_load_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says that it goes on, and comes further now and then."""
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
    played_by(script, tmp_path, monkeypatch)
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
def test_a_model_that_cannot_be_divided_is_refused_before_a_rank_is_started(
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
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni is one process"),
    ],
)
def test_settings_that_contradict_ranks_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=words):
        null_engine(**settings)


def test_ranks_of_devices_are_refused_where_ray_would_place_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NullBackend, "rank_environments", lambda size: [{"DEVICE": str(rank)} for rank in range(size)])
    with pytest.raises(ConfigError, match="ranks of the null backend are not placed by Ray yet"):
        null_engine(distributed_executor_backend="ray", **TWO)


def test_a_rank_is_shown_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_blocks_of_all_ranks_are_copied_as_one() -> None:
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


def test_what_a_rank_copies_too_late_is_taken_for_nothing_else() -> None:
    engine = null_engine(**TWO)
    try:
        runner = engine.probe().runner
        assert isinstance(runner, leading.LeadingRunner)
        runner.ranks._seconds = 0.5  # a back door: those of the watchdog are no time to wait for here
        of_rank_1 = leading.JoinedKVCache(runner.cache, runner.ranks, [(0, 1), (1, 2)])
        (rank,) = runner.ranks.pids
        os.kill(rank, signal.SIGSTOP)
        while " T " not in Path(f"/proc/{rank}/stat").read_text():
            time.sleep(0.001)
        going_on = threading.Timer(8.0, os.kill, (rank, signal.SIGCONT))
        going_on.start()  # whoever waits without end gets an answer
        with pytest.raises(EngineDead, match="rank 1 did not answer"):
            of_rank_1.export_blocks(np.array([2], np.int32))
        going_on.cancel()
        os.kill(rank, signal.SIGCONT)
        with pytest.raises(EngineDead):
            of_rank_1.export_blocks(np.array([9], np.int32))
        with pytest.raises(EngineDead, match=r"rank 1 did not answer within 0.5 s"):
            runner.check()
    finally:
        engine.close()
