"""Data-parallel engines of one client: placement, loss of an engine, and rejected configurations."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest

from fd_core.backends import device_assignment as places
from fd_core.backends.contract import Backend
from fd_core.backends.device_assignment import assignments_on_cores, assignments_on_devices
from fd_core.engine.clients.client import ActiveRequest, DeltaStream
from fd_core.engine.clients.data_parallel import DataParallelClient
from fd_core.engine.clients.launch import open_client
from fd_core.engine.process.messages import (
    ChangeAdapters,
    Control,
    Controlled,
    QueryActivities,
    Sleep,
    StepEvents,
    Submit,
)
from fd_core.errors import BadRequest, ConfigError, EngineDead
from fd_core.scheduling.contract import RequestActivity
from fd_core.types import AdapterInfo, Delta, FinishReason, Phase
from fd_core.types.kv_events import BEGINNING, Cleared, Stored
from tests.engine.clients.test_process import CONFIG, until
from tests.engine.faults import Faults
from tests.engine.helpers import golden, random_specs
from tests.engine.stepping import greedy
from tests.engine.test_ranks import rank_of
from tests.engine.test_streams import Client
from tests.kv.following import ids

two_processors = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two processors")


def joined(count: int = 2, **info: Any) -> tuple[DataParallelClient, list[Client]]:
    """Return a client of scripted engines."""
    engines = [Client() for _ in range(count)]
    for engine in engines:
        engine._engine_ready(msgspec.structs.replace(engine.info, **info))
    return DataParallelClient(engines), engines


def placed(engines: list[Client]) -> list[list[str]]:
    """Return the requests sent to each engine."""
    return [[sent.spec.request_id for sent in engine.sent if isinstance(sent, Submit)] for engine in engines]


def answer(engine: Client, name: str) -> None:
    engine.receive(engine.info.epoch, Delta(name, (7,), FinishReason.LENGTH))


def at_rest(client: DataParallelClient) -> bool:
    total = client._router.snapshot()
    return total.total.requests == total.total.prefill_tokens == total.faults == 0


# Placement ----------------------------------------------------------------------------------------------------


def test_requests_without_common_prefix_are_balanced() -> None:
    client, engines = joined()
    for index in range(8):
        client.submit(greedy(f"r{index}", [index] * 40, 9))
    assert [len(names) for names in placed(engines)] == [4, 4]


def test_requests_of_all_engines_are_listed_with_their_activity() -> None:
    async def listed() -> list[ActiveRequest]:
        client, engines = joined()
        for index in range(3):
            client.submit(greedy(f"r{index}", [index] * (40 + index), 9))
        engines[0].receive(engines[0].info.epoch, Delta(placed(engines)[0][0], (7, 7)))
        listing = asyncio.create_task(client.requests())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for engine, names in zip(engines, placed(engines), strict=True):
            assert engine.sent[-1] == QueryActivities()
            engine._reported({name: RequestActivity("waiting", Phase.SLOT) for name in names})
        return await listing

    found = asyncio.run(listed())
    assert [(each.request_id, each.prompt_tokens) for each in found] == [("r0", 40), ("r1", 41), ("r2", 42)]
    assert sorted(each.generated_tokens for each in found) == [0, 0, 2]
    assert {each.activity for each in found} == {RequestActivity("waiting", Phase.SLOT)}


def test_prompt_is_routed_to_engine_that_served_its_prefix() -> None:
    client, engines = joined()
    prompt = range(96)
    client.submit(greedy("first", prompt, 9))
    owner = next(index for index, names in enumerate(placed(engines)) if names)
    answer(engines[owner], "first")
    for index in range(6):
        client.submit(greedy(f"r{index}", [*prompt, index], 9))
        answer(engines[owner], f"r{index}")
    assert len(placed(engines)[owner]) == 7
    assert at_rest(client)


def test_long_shared_prefix_does_not_leave_engines_idle() -> None:
    client, engines = joined()
    for index in range(16):
        client.submit(greedy(f"r{index}", [*range(384), index], 9))
    most, least = sorted((len(names) for names in placed(engines)), reverse=True)
    assert most - least <= engines[0].info.max_num_seqs // 2 + 1


def test_adapter_and_salt_separate_prefix_routing() -> None:
    client, engines = joined()
    spec = greedy("first", range(96), 9)
    client.submit(spec)
    owner = next(index for index, names in enumerate(placed(engines)) if names)
    for index, change in enumerate(({"adapter": "a"}, {"cache_salt": "s"})):
        # The first request still runs on that engine, so only a common prefix would outweigh the load.
        client.submit(msgspec.structs.replace(spec, request_id=f"r{index}", **change))
        answer(engines[1 - owner], f"r{index}")
    assert placed(engines)[1 - owner] == ["r0", "r1"]


def test_reported_prefix_cache_overrides_routing_history() -> None:
    """The engine that served the prefix may have evicted it since."""
    client, engines = joined(kv_events=True)
    prompt, size = range(96), engines[0].info.block_size
    client.submit(greedy("first", prompt, 9))
    owner = next(index for index, names in enumerate(placed(engines)) if names)
    answer(engines[owner], "first")
    other = engines[1 - owner]
    keys = tuple(bytes([index]) for index in range(96 // size))
    other._dispatch(StepEvents([], kv=(Stored(BEGINNING, keys, ids(prompt)),), epoch=other.info.epoch))
    for index in range(3):
        client.submit(greedy(f"r{index}", [*prompt, index], 9))
        answer(other, f"r{index}")
    assert placed([other]) == [["r0", "r1", "r2"]]
    assert client.kv_log is not None and client.kv_log.engines == 2
    assert {event.engine for event in client.kv_log.read(0)[1]} == {1 - owner}
    other.die()
    other.start_epoch(2)
    client.submit(greedy("last", prompt, 9))
    assert client._router.snapshot().workers[1 - owner].held_blocks == 0
    assert client.kv_log.read(1)[1] == (Cleared(engine=1 - owner),)


def test_restarted_engine_keeps_requests_but_no_prefixes() -> None:
    client, engines = joined()
    client.submit(greedy("first", range(96), 9))
    owner = next(index for index, names in enumerate(placed(engines)) if names)
    answer(engines[owner], "first")
    client.submit(greedy("second", range(96), 9))
    assert client._router.snapshot().index_blocks == 6
    engines[owner].die()
    engines[owner].start_epoch(2)
    client.submit(greedy("third", range(100, 196), 9))
    assert client._router.snapshot().index_blocks == 0
    assert placed(engines)[1 - owner] == ["third"]


def test_load_is_released_on_disconnect_and_engine_loss() -> None:
    async def main() -> None:
        client, engines = joined()
        streams = [client.submit(greedy(f"r{index}", range(40), 9)) for index in range(4)]
        for engine in engines:
            engine.receive(1, *(Delta(name, (7,)) for name in placed([engine])[0]))
        await streams[0].aclose()
        engines[0]._fail_all("it is gone")
        engines[1]._fail_all("it is gone")
        assert at_rest(client)

    asyncio.run(main())


# Engines that are missing ---------------------------------------------------------------------------------------


def test_requests_are_routed_around_a_missing_engine() -> None:
    client, engines = joined(3)
    engines[1].die()
    for index in range(6):
        client.submit(greedy(f"r{index}", [index] * 40, 9))
    assert [len(names) for names in placed(engines)] == [3, 0, 3]
    assert (client.alive, client.healthy, client.restarts) == (True, True, True)
    assert client.missing == "engine 1 of 3 is not running"
    engines[1]._fail_all("it was not restarted")
    assert (client.alive, client.healthy, client.restarts) == (True, False, False)


def test_requests_are_rejected_when_all_engines_are_down() -> None:
    client, engines = joined()
    for engine in engines:
        engine._fail_all("gone")
    for ask in (lambda: client.submit(greedy("r", [1], 9)), lambda: client.abort(["r"]), client.abort_all):
        with pytest.raises(EngineDead, match="engine 0 and engine 1 of 2 are not running"):
            ask()


def test_request_ids_and_aborts_span_all_engines() -> None:
    client, _ = joined()
    for index in range(4):
        client.submit(greedy(f"r{index}", [index] * 40, 9))
    for index in range(4):
        with pytest.raises(BadRequest, match="already running"):
            client.submit(greedy(f"r{index}", [index], 9))
    assert client.active_requests == 4
    assert sorted(client.abort(["r2", "r1", "unknown"])) == ["r1", "r2"]
    assert sorted(client.abort_all()) == ["r0", "r1", "r2", "r3"]


def test_running_statistics_are_summed_over_engines() -> None:
    client, engines = joined()
    info = engines[0].info
    engines[1].die()
    engines[1].start_epoch(3)
    assert client.info.max_num_seqs == 2 * info.max_num_seqs
    assert client.info.num_kv_blocks == client.stats.scheduler.blocks.total == 2 * info.num_kv_blocks
    assert client.info.epoch == 3


# Adapters -------------------------------------------------------------------------------------------------------


class Adaptable(Client):
    """Scripted engine that loads and unloads adapters on request, or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        super().__init__()

    def _send(self, message: Any) -> None:
        super()._send(message)
        if isinstance(message, Control) and isinstance(order := message.order, ChangeAdapters):
            held = {each.name: each for each in self.info.adapters}
            if self.refuses:
                error = "it is too large"
            else:
                error = None
                held.pop(order.name, None)
                if order.path is not None:
                    held[order.name] = AdapterInfo(order.name, "digest", order.path, 8)
            info = msgspec.structs.replace(self.info, adapters=tuple(held.values()))
            self._controlled(Controlled(message.ticket, info, error))


def test_adapter_is_loaded_into_all_engines_or_none() -> None:
    async def main() -> None:
        engines = [Adaptable(), Adaptable()]
        client = DataParallelClient(engines)
        await client.change_adapters("style", "/style")
        assert [[each.name for each in engine.info.adapters] for engine in engines] == [["style"], ["style"]]
        engines[1].refuses = True
        with pytest.raises(BadRequest, match="too large"):
            await client.change_adapters("tone", "/tone")
        with pytest.raises(BadRequest, match="too large"):
            await client.change_adapters("style", None)
        assert [[each.path for each in engine.info.adapters] for engine in engines] == [["/style"], ["/style"]]
        engines[0].die()
        with pytest.raises(EngineDead, match="engine 0 of 2"):
            await client.change_adapters("style", None)

    asyncio.run(main())


def test_error_of_one_engine_names_those_that_carried_out_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def done(_: object) -> None:
            pass

        async def refused(_: object) -> None:
            raise BadRequest("no such folder")

        engines = [Adaptable(), Adaptable(), Adaptable()]
        for engine, act in zip(engines, (done, refused, done), strict=True):
            monkeypatch.setattr(engine, "control", act)
        with pytest.raises(BadRequest, match="no such folder; engine 1 failed, but 0, 2 carried it out"):
            await DataParallelClient(engines).control(Sleep(1))
        for engine in engines:
            monkeypatch.setattr(engine, "control", refused)
        with pytest.raises(BadRequest, match=r"^no such folder$"):
            await DataParallelClient(engines).control(Sleep(1))

    asyncio.run(main())


# Processes ------------------------------------------------------------------------------------------------------


@two_processors
def test_texts_survive_the_death_of_one_engine(faults: Faults) -> None:
    specs = random_specs(6, seed=11, max_prompt=30, max_tokens=150)
    faults.arm("hold", "hold", position=50)  # one in each engine

    async def main() -> None:
        async def read(stream: DeltaStream) -> list[int]:
            return [token async for delta in stream for token in delta.token_ids]

        client: Any = await open_client(msgspec.structs.replace(CONFIG, backend="faulty"), None, engines=2)
        try:
            first, second = client.engines
            cores = [os.sched_getaffinity(engine.pid) for engine in client.engines]
            assert len(cores[0]) == len(cores[1])
            assert not cores[0] & cores[1]
            streams = [client.submit(spec) for spec in specs]
            assert first.active_requests and second.active_requests
            await until(lambda: faults.count == 2)
            os.kill(second.pid, signal.SIGKILL)
            faults.release(2)
            texts = await asyncio.gather(*(read(stream) for stream in streams))
            assert dict(zip((spec.request_id for spec in specs), texts, strict=True)) == golden(specs)
            await until(lambda: client.missing == "")
            assert (first.info.epoch, second.info.epoch, client.info.epoch) == (1, 2, 2)
            assert client.requests_requeued == second.requests_requeued > 0
            await until(lambda: client.stats.scheduler.blocks.used == 0)
            assert at_rest(client)
        finally:
            await client.close()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(bounded())


@two_processors
def test_dead_rank_ends_only_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of two ranks each, which share a processor here only because it is a test."""
    monkeypatch.setattr(places, "_require_enough", lambda *_, **__: None)
    specs = random_specs(6, seed=12, max_prompt=30, max_tokens=150)

    async def main() -> None:
        client: Any = await open_client(msgspec.structs.replace(CONFIG, tensor_parallel_size=2), None, engines=2)
        try:
            first, second = client.engines
            ranks = [rank_of(engine) for engine in client.engines]
            for engine, rank in zip(client.engines, ranks, strict=True):
                assert os.sched_getaffinity(rank) == os.sched_getaffinity(engine.pid)
            assert not os.sched_getaffinity(ranks[0]) & os.sched_getaffinity(ranks[1])
            streams = [client.submit(spec) for spec in specs]
            assert first.active_requests
            assert second.active_requests
            os.kill(ranks[1], signal.SIGKILL)
            texts = [[token async for delta in stream for token in delta.token_ids] for stream in streams]
            assert dict(zip((spec.request_id for spec in specs), texts, strict=True)) == golden(specs)
            await until(lambda: second.info.epoch == 2)
            assert (first.info.epoch, client.missing) == (1, "")
        finally:
            await client.close()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(bounded())


@two_processors
def test_failed_start_of_one_engine_stops_the_others() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="hold 128 tokens"):
            await open_client(msgspec.structs.replace(CONFIG, num_kv_blocks=8), None, engines=2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"role": "decode"}, "--role"),
        ({"trace": "steps.trace"}, "--trace"),
    ],
)
def test_single_engine_settings_are_rejected(settings: dict[str, Any], named: str) -> None:
    config = msgspec.structs.replace(CONFIG, **settings)
    with pytest.raises(ConfigError, match=f"{named} cannot be combined with several engines"):
        asyncio.run(open_client(config, None, engines=2))


def test_data_parallel_engines_must_be_processes() -> None:
    with pytest.raises(ConfigError, match="separate processes"):
        asyncio.run(open_client(CONFIG, None, where="inproc", engines=2))


# CPU and device assignment --------------------------------------------------------------------------------------


@pytest.fixture
def six_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets with three logical processors each; 0 and 3 are hyper-threads of the first core, and so on."""
    socket_and_core = {0: (0, 0), 3: (0, 0), 1: (0, 1), 4: (0, 1), 2: (1, 0), 5: (1, 0)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(socket_and_core))
    monkeypatch.setattr(places, "_position", socket_and_core.__getitem__)


@pytest.mark.usefixtures("six_processors")
def test_processors_are_divided_by_core_and_socket() -> None:
    assert [each.cores for each in assignments_on_cores(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [each.cores for each in assignments_on_cores(2)] == [(0, 1, 3), (2, 4, 5)]
    assert [each.cores for each in assignments_on_cores(4)] == [(0,), (3,), (1,), (4,)]


@pytest.mark.usefixtures("six_processors")
def test_more_engines_than_processors_are_rejected() -> None:
    with pytest.raises(ConfigError, match="7 engines need one processor each, found 6") as refused:
        assignments_on_cores(7)
    assert refused.value.hint == "use at most 6"
    with pytest.raises(ConfigError, match="2 engines of 4 ranks need 8 processors, one per rank, found 6") as refused:
        assignments_on_cores(2, 4)
    assert refused.value.hint == "omit it, or use fewer ranks"
    with pytest.raises(ConfigError, match="4 engines of 2 ranks need 8 processors") as refused:
        assignments_on_cores(4, 2)
    assert refused.value.hint == "use at most 3, or fewer ranks"
    assert [each.cores for each in assignments_on_cores(3, 2)] == [(0, 3), (1, 4), (2, 5)]


def test_each_rank_gets_its_own_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHIPS", raising=False)
    assert [each.environment for each in assignments_on_devices("CHIPS", 3, 2)] == [
        {"CHIPS": "0"},
        {"CHIPS": "1"},
    ]
    monkeypatch.setenv("CHIPS", "4, GPU-7")
    assert [each.environment for each in assignments_on_devices("CHIPS", 8, 2)] == [
        {"CHIPS": "4"},
        {"CHIPS": "GPU-7"},
    ]
    with pytest.raises(ConfigError, match="3 engines need one device each, found 2"):
        assignments_on_devices("CHIPS", 8, 3)
    monkeypatch.delenv("CHIPS")
    assert [each.environment for each in assignments_on_devices("CHIPS", 5, 2, 2)] == [
        {"CHIPS": "0,1"},
        {"CHIPS": "2,3"},
    ]
    with pytest.raises(ConfigError, match="2 engines of 3 ranks need 6 devices, one per rank, found 5"):
        assignments_on_devices("CHIPS", 5, 2, 3)


def test_backend_without_device_assignment_is_rejected() -> None:
    class Chip(Backend):
        name = "chip"

    with pytest.raises(ConfigError, match="the chip backend cannot assign devices to 2 engines"):
        Chip.device_assignments(2)
