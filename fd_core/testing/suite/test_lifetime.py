"""Lifetime: description of a backend, crash and restart, and freed memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import statistics
import sys
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import thread as executors
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.engine.clients.launch import open_client
from fd_core.engine.clients.process import ProcessClient
from fd_core.engine.core import Engine
from fd_core.engine.process.messages import Sleep
from fd_core.errors import ConfigError, FdError
from fd_core.models.build import weight_bytes
from fd_core.ops.contract import KVShape, Ops
from fd_core.ops.weights import ITEM_BYTES
from fd_core.plugins import BACKEND, installed_plugins
from fd_core.runner.warm_up import decode_plan, prefill_plan
from fd_core.testing.kit.growth import require_no_stall, traced
from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.limits import ABILITIES
from fd_core.testing.kit.privacy import audited, created_paths, kept_out_of_logs
from fd_core.testing.kit.processes import resource_snapshot
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import Values, activations, packed_weight, raw
from fd_core.testing.models.checkpoints import LONGEST_CASE, STEP_CASE, write_checkpoint
from fd_core.testing.models.texts import greedy, run
from fd_core.types import FinishReason, SamplingParams

_MAX_ENGINES: Final = 1024
"""Largest `--data-parallel-size`."""
_MAX_RANKS, _MAX_PLACED = 16, 128
"""Largest number of ranks, and of those of all engines."""
_SIZES: Final = {
    **{f"{rows} requests": (rows, 3, 0) for rows in range(2, 22)},
    **{f"a context of {tokens}": (1, tokens, tokens - 1) for tokens in (2**power + 1 for power in range(9, 18))},
}
"""Numbers of requests, of their tokens, and of those that are computed before."""
_PROMPT: Final = (251, 239, 241)
"""Tokens that follow each other by chance in no log."""
_FEW_CALLS: Final = 1000
_STALL_SECONDS: Final = 0.02
_THREAD_SECONDS: Final = 5.0
"""Time for a thread to end after its engine."""
_ENGINES: Final = 4
"""In each of which the first step of a size takes long if that is not by chance."""
_REHEARSED: Final = 2**26
"""Bytes that the steps of a rehearsal take."""
_COMPILING: Final = {"compile", "ctypes.dlopen", "import", "open", "os.posix_spawn", "subprocess.Popen"}
"""Audit events of compilers."""


def test_settings_of_the_process_are_kept(target: Target) -> None:
    """A pack is made in the process of an engine, whose signals, logs and numerics belong to others."""
    assert not target.changes, f"when its pack is made, {target.changes}"


def test_limits_are_known_and_have_reasons(target: Target) -> None:
    assert set(target.limits) <= set(ABILITIES), "a limit must be an ability of fd_core.testing.kit.limits"
    assert all(len(reason) > 5 for reason in target.limits.values())


def test_probe_reports_availability_and_device(target: Target) -> None:
    probed = installed_plugins().offered(BACKEND)[target.name].probe()
    assert probed.available
    about = target.backend.describe()
    for line in (probed.reason, about):
        assert line.strip() == line
        assert len(line.splitlines()) == 1
    assert ("emulated" in about) == target.emulated, "the description of an emulated device must contain 'emulated'"
    assert target.backend.free_memory() > 0


def test_default_sizes_hold_a_whole_context(target: Target) -> None:
    """Sizes that a user leaves out follow from the free memory."""
    sizes = ("max_num_seqs", "num_kv_blocks", "max_num_batched_tokens", "max_model_len", "pipeline_depth")
    left_out: dict[str, Any] = dict.fromkeys(sizes)
    with target.engine(**left_out) as engine:
        assert engine.info.max_model_len == engine.info.model_max_len, "the free memory is too small for a tiny model"
        assert run(engine, [greedy("a", range(5), 4)]).ends == {"a": FinishReason.LENGTH}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_computes_in_the_dtype_asked_for(target: Target, require: Callable[..., None], dtype: str) -> None:
    """float16 is optional: its absence needs no declared limit."""
    if dtype != "float16":
        require(dtype)
    config = target.config().__class__(model="kit", backend=target.name, dtype=dtype, num_threads=1)
    try:
        found = target.cls(config).make_ops().dtype
        assert found == dtype, (
            f"with --dtype {dtype} it computes in {found}; refuse what it lacks, see `requested_dtype`"
        )
    except ConfigError as refused:
        assert (dtype, refused.field) == ("float16", "--dtype"), refused


@pytest.mark.timing
@pytest.mark.fd_alone
def test_it_computes_on_the_thread_asked_for(target: Target) -> None:
    """Multiply large matrices with `--num-threads 1`: ranks and engines of a machine divide its processors."""
    if target.ops.framework == "numpy":
        lacks("BLAS has the threads of the process")
    ops = target.cls(target.config(num_threads=1)).make_ops()
    x, weight = activations(ops, Values(1)(256, 2048)), ops.prepare_linear([raw(Values(2)(2048, 2048))])
    shares = []
    for _ in range(4):  # the first one may start threads, which end
        before = time.process_time(), time.thread_time()
        ops.fetch([ops.linear(x, weight) for _ in range(4)])
        whole, own = time.process_time() - before[0], time.thread_time() - before[1]
        shares.append((whole - own) / max(own, 0.02))
    assert min(shares) < 0.5, f"with --num-threads 1, other threads compute {min(shares):.1f} times as long as its own"


def test_engines_share_no_device(target: Target) -> None:
    """Check every number of engines, of each number of ranks, up to the first one that is too large.

    The ranks of an engine are placed by its process, whose environment is that of its assignment.
    """
    for ranks in range(1, _MAX_RANKS + 1):
        for count in range(1, (_MAX_ENGINES if ranks == 1 else _MAX_PLACED // ranks) + 1):
            try:
                found = target.cls.device_assignments(count, ranks)
                several = ranks > 1 and any(target.cls.rank_environments(ranks))
            except ConfigError:  # too few devices
                break
            assert len(found) == len({each.name for each in found}) == count, (
                f"expected {count} assignments, got {found}"
            )
            require_separate([each.environment for each in found], [core for each in found for core in each.cores])
            placed = Counter[frozenset[tuple[str, str]]]()
            for each in found if several else ():
                with mock.patch.dict(os.environ, each.environment):
                    environments = target.cls.rank_environments(ranks)
                placed.update(frozenset({**each.environment, **own}.items()) for own in environments)
            same = [dict(own) for own, times in placed.items() if times > 1]
            assert not same, f"of {count} engines with {ranks} ranks, several ranks are placed at {same[0]}"


def test_ranks_share_no_device(target: Target) -> None:
    for size in range(2, _MAX_RANKS + 1):
        try:
            found = target.cls.rank_environments(size)
        except ConfigError:  # too few devices
            return
        assert len(found) == size, f"expected {size} environments, got {found}"
        require_separate([own for own in found if own])  # the first rank may see all devices


def require_separate(environments: Sequence[Mapping[str, str]], cores: Sequence[int] = ()) -> None:
    """Raise `AssertionError` if two processes have a device or a core in common, or if nothing separates them."""
    chosen = [dict(own) for own in environments]
    for name, value in {**chosen[0]}.items() if len(chosen) > 1 else ():
        if all(own.get(name) == value for own in chosen):
            chosen = [{key: own[key] for key in own if key != name} for own in chosen]  # such as a number of threads
    used = [("core", str(core)) for core in cores]
    used += [(name, one) for own in chosen for name, value in own.items() for one in value.split(",")]
    shared = sorted(each for each, times in Counter(used).items() if times > 1)
    assert not shared, f"{len(environments)} processes share a device: {shared}"
    assert used or not any(environments), f"processes have the same devices: {environments}"


def test_rehearsal_frees_what_it_computed(target: Target) -> None:
    """Compare the free memory with that of an instance without a rehearsal: what steps took is reserved, not free."""
    (backend, ops), (other, _) = ((each, each.make_ops()) for each in (target.cls(target.config()) for _ in range(2)))
    events = list[str]()

    @contextmanager
    def steps() -> Iterator[None]:
        events.append("computed")
        taken = ops.from_host(np.ones(_REHEARSED // 4, np.float32))
        yield
        del taken
        events.append("freed")

    rehearsal = steps()
    backend.rehearse(rehearsal)
    assert events in ([], ["computed", "freed"]), f"`rehearse` enters its argument and leaves it, got {events}"
    reserved = backend.reserved_memory
    assert reserved >= (_REHEARSED // 2 if events else 0), (
        f"`reserved_memory` is {reserved:,} after steps that took {_REHEARSED * bool(events):,}"
    )
    sums = [[each.free_memory() + each.reserved_memory for each in (backend, other)] for _ in range(3)]
    lost = min(mine - without for mine, without in sums) if reserved else 0
    assert lost <= reserved // 2, f"`free_memory` still has {lost:,} of {reserved:,} bytes that are reserved for steps"


@pytest.mark.parametrize("slots", [1, 8, 257])
def test_warm_up_steps_can_be_computed(target: Target, slots: int) -> None:
    """A step whose requests differ in drafts would be skipped, and requests pay for what it leaves cold."""
    limits = Limits(
        max_num_seqs=slots,
        max_num_batched_tokens=2048,
        max_model_len=512,
        block_size=32,
        num_kv_blocks=16 * slots,
        vocab_size=97,
        max_drafts=3,
    )
    for step, rows in enumerate(target.ops.warm_up_steps(limits)):
        drafts = {row.drafts for row in rows}
        assert len(drafts) <= 1, f"step {step}: expected equal numbers of drafts, got {sorted(drafts)}"
        assert all(row.tokens > 0 and row.drafts >= 0 for row in rows), f"step {step}: got {rows}"


@pytest.mark.timing
@pytest.mark.fd_alone
def test_no_step_after_the_warm_up_waits_or_stalls(target: Target) -> None:
    """Compute steps of new sizes and contexts, each several times: only the first one may compile, if it is reported.

    Later ones neither sleep nor use files, and no log or file shows their tokens. A busy machine delays some first
    steps, but not those of half of all sizes, nor those of the same size in each of several engines.
    """
    stalls, sizes = dict[str, _Stall](), _SIZES
    for _ in range(_ENGINES):
        found = _stalls_of(target, sizes)
        stalls |= found
        sizes = {size: sizes[size] for size in found if not found[size].events}
        if not sizes or 2 * len(found) >= len(_SIZES):
            break
    bad = {size: stall for size, stall in stalls.items() if stall.events or size in sizes}
    if bad:
        seconds = statistics.median(stall.seconds for stall in bad.values())
        events = ", ".join(sorted({name for stall in bad.values() for name in stall.events}) or ["no file or code"])
        raise AssertionError(
            f"after the warm-up, the first steps of {len(bad)} of {len(_SIZES)} sizes, {', '.join(bad)}, take "
            f"{max(seconds, 0):.3f} s more than the next ones, and use {events}; compute them in "
            "`Ops.warm_up_steps`, or count them in `Ops.compilation_stats`"
        )


class _Stall(NamedTuple):
    """Additional time and events of the first steps of a size, compared with the next ones."""

    seconds: float
    events: Counter[str]


def _stalls_of(target: Target, sizes: Mapping[str, tuple[int, int, int]]) -> dict[str, _Stall]:
    """Return the sizes whose first steps take longer, or use more, than the next ones in a new engine."""
    stalls, longest = {}, target.cls.envelope.limits().get("max_model_len")
    room: dict[str, Any] = {"max_num_seqs": 24, "num_kv_blocks": 4200, "block_size": 32, "max_num_batched_tokens": 128}
    room["max_model_len"] = longest and min(longest, 2**17 + 2)
    with kept_out_of_logs(ids=_PROMPT), target.engine(case=LONGEST_CASE, **room) as engine:
        _steps_of(engine, 1, 3, 0)  # imports
        if "kv_transfer" not in target.limits:  # the system provides memory when it is used first, which takes a while
            cache, blocks = engine.probe().runner.cache, np.arange(room["num_kv_blocks"], dtype=np.int32)
            cache.import_blocks(blocks, cache.export_blocks(blocks))
        for size, given in sizes.items():
            if given[1] >= engine.info.max_model_len:
                continue
            before = engine.stats().compilations
            first = _steps_of(engine, *given)
            is_reported = before != engine.stats().compilations
            with require_no_stall("a step", "1"):
                later = [_steps_of(engine, *given) for _ in range(2)]
            slowest = max(each.seconds for each in later)
            more = first.events - later[0].events - later[1].events
            if first.calls > 2 * max(each.calls for each in later) + _FEW_CALLS:
                more[f"{first.calls} calls of functions, not {later[0].calls}"] = 1
            if not is_reported and (more or first.seconds > max(2 * slowest, slowest + _STALL_SECONDS)):
                stalls[size] = _Stall(first.seconds - slowest, more)
    return stalls


class _TimedSteps(NamedTuple):
    seconds: float
    calls: int
    """Functions of Python that were called, as a compiler in Python does on a busy machine as well."""
    events: Counter[str]
    """Files, libraries, processes and code that are opened, loaded, started and compiled."""


def _steps_of(engine: Engine, rows: int, context: int, computed: int) -> _TimedSteps:
    """Compute the rest of some prompts that are computed to some length, and a decode of each."""
    runner, blocks = engine.probe().runner, engine.probe().runner.limits.blocks_per_seq
    lengths, table = np.full(rows, context, np.int32), np.arange(blocks, dtype=np.int32)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    prefill = prefill_plan(0, 1, lengths, [params] * rows, [table] * rows, computed)
    ids = np.resize(np.array(_PROMPT, np.int32), context)
    admissions = tuple(replace(each, token_ids=ids) for each in prefill.admissions)
    decode = decode_plan(1, prefill.slots, prefill.gens, starts=lengths)
    events, calls = Counter[str](), itertools.count()

    def count(_: Any, event: str, __: Any) -> None:
        if event == "call":
            next(calls)

    with audited(lambda name, _: events.update([name] if name in _COMPILING else [])):
        before, start = sys.getprofile(), time.perf_counter()
        sys.setprofile(count)
        try:
            for plan in (replace(prefill, admissions=admissions), decode):
                runner.announce(plan)
                runner.execute(plan)
        finally:
            sys.setprofile(before)
        return _TimedSteps(time.perf_counter() - start, next(calls), events)


@pytest.mark.fd_thorough
@pytest.mark.law("4")
def test_a_text_survives_a_crash_in_the_middle(target: Target, golden: Golden, require: Callable[..., None]) -> None:
    """Kill the engine's process while two requests run; another one must resume them."""
    require("own_process")
    specs = [greedy("a", range(9), 380), greedy("b", range(5, 15), 300)]
    config = target.config(max_model_len=400, num_kv_blocks=220, pipeline_depth=2)

    async def main() -> dict[str, list[int]]:
        client = await open_client(config, target.checkpoint(), where="process")
        assert isinstance(client, ProcessClient)
        killed: list[int] = []
        texts: dict[str, list[int]] = {spec.request_id: [] for spec in specs}

        async def read(name: str, stream: object) -> None:
            async for delta in stream:  # type: ignore[attr-defined]  # an async iterator of deltas
                texts[name] += delta.token_ids
                if len(texts["a"]) > 2 and not killed and client.pid is not None:
                    killed.append(client.pid)
                    os.kill(client.pid, signal.SIGKILL)

        try:
            await asyncio.gather(*(read(spec.request_id, client.submit(spec)) for spec in specs))
            assert client.info.epoch == 2
        finally:
            await client.close()
        return texts

    golden.check(specs, asyncio.run(asyncio.wait_for(main(), 180)))


@pytest.mark.fd_thorough
def test_engines_in_two_processes_share_nothing(target: Target, golden: Golden, require: Callable[..., None]) -> None:
    """Run different requests in two engine processes at the same time."""
    require("own_process")
    config = target.config(max_model_len=128, num_kv_blocks=128, pipeline_depth=2)
    specs = [[greedy(f"r{2 * index + side}", range(side, 9 + index), 60) for index in range(4)] for side in range(2)]

    async def main() -> dict[str, list[int]]:
        clients = [await open_client(config, target.checkpoint(), where="process") for _ in specs]

        async def read(client: Any, spec: Any) -> tuple[str, list[int]]:
            return spec.request_id, [token async for delta in client.submit(spec) for token in delta.token_ids]

        try:
            texts = (read(client, spec) for client, mine in zip(clients, specs, strict=True) for spec in mine)
            return dict(await asyncio.gather(*texts))
        finally:
            for client in clients:
                await client.close()

    golden.check([spec for mine in specs for spec in mine], asyncio.run(asyncio.wait_for(main(), 180)))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_closed_or_sleeping_engine_frees_its_cache_and_weights(
    target: Target, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Serve a request with an adapter, sleep unless the level is 0, and close the engine."""
    if level and not target.cls.updates_weights:
        lacks("an engine on this backend does not sleep")
    load, models, arrays = target.cls.load_model, list[Callable[[], object]](), list[tuple[Callable[[], object], int]]()

    def load_model(*arguments: Any) -> Any:
        model = load(*arguments)
        models.append(weakref.ref(model))
        arrays.extend((memory_of(each), each.nbytes) for each in arrays_of(model, target.ops))
        return model

    def held() -> int:
        return sum(size for memory, size in arrays if memory() is not None)

    monkeypatch.setattr(target.cls, "load_model", load_model)
    failures: list[FdError | None] = []
    path, spec = target.checkpoint(STEP_CASE), greedy("a", range(5), 4)
    with target.engine(case=STEP_CASE, max_loras=1, max_lora_rank=8) as engine:
        if path is not None:
            adapter = engine.load_adapter("held", write_adapter(path, checkpoints / "held", seed=1))
            spec = msgspec.structs.replace(spec, adapter=adapter.digest)
        run(engine, [spec])
        cache, whole = weakref.ref(engine.probe().runner.cache), held()
        kv = [memory_of(each) for each in arrays_of(cache(), target.ops)]
        if level:
            engine.control(Sleep(level), failures.append)
            engine.begin_steps()
            assert failures == [None]
            gc.collect()
            assert cache() is None and all(each() is None for each in kv), "the cache is held, or an array of it"
            assert level == 1 or all(model() is None for model in models), "the weights are held"
            assert level == 1 or held() <= whole // 2, f"{held():,} of {whole:,} bytes of weights are held"
    del engine
    gc.collect()
    assert cache() is None and all(each() is None for each in [*kv, *models]), "a closed engine is held"


def test_nothing_outlives_a_closed_engine(target: Target) -> None:
    """The interpreter waits for threads that are not daemons, so the process of an engine would never end.

    Files and processes that the second one leaves are no caches, and each restart would leave more.
    """
    before = {*threading.enumerate()}
    for _ in range(2):
        processes = resource_snapshot().processes
        with created_paths() as made, target.engine() as engine:
            run(engine, [greedy("a", range(5), 4)])
        del engine
        gc.collect()
    files = [str(path) for path in made if path.exists()]
    assert not files, f"a closed engine leaves {files}, and each one others: remove them, or find them again by name"
    started = {*resource_snapshot().processes} - {*processes}
    assert not started, f"a closed engine leaves {len(started)} processes"
    pools = {*vars(executors)["_threads_queues"]}  # which the interpreter itself ends
    left = [each for each in {*threading.enumerate()} - before - pools if not each.daemon]
    for each in left:
        each.join(_THREAD_SECONDS)
    names = sorted(each.name for each in left if each.is_alive())
    assert not names, f"after the engine is closed its process does not end because of {names}: make them daemons"


def memory_of(array: Any) -> Callable[[], object]:
    """Return a reference to the memory of an array, which others may share, that yields None once it is freed."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    if not hasattr(array, "untyped_storage"):
        return weakref.ref(array)
    storage = sys.modules["torch.multiprocessing.reductions"].StorageWeakRef(array.untyped_storage())
    return lambda: None if storage.expired() else storage


def arrays_of(model: object, ops: object) -> Iterator[Any]:
    """Yield the arrays that a model holds, except through its pack."""
    seen, left = set[int](), [model]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, type(ops))):
            continue
        seen.add(id(each))
        if hasattr(each, "nbytes") and hasattr(each, "__setitem__"):
            yield each
        else:
            left += gc.get_referents(each)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_cache_takes_the_memory_of_its_shape(
    ops: Ops, require: Callable[..., None], head_dim: int, kv_dtype: str
) -> None:
    """An engine divides the free memory by `KVShape.bytes_per_block`, which padded heads would exceed."""
    require("primitives", "kv_transfer")
    if kv_dtype not in ("auto", *ops.kv_dtypes):
        lacks(f"it has no {kv_dtype} cache")
    shape, count = KVShape(2, 2, head_dim, block_size=16, dtype=kv_dtype), 512
    cache = ops.allocate_kv(shape, count)
    taken = sum(dict(map(storage_of, arrays_of(cache, ops))).values())
    right = count * shape.bytes_per_block(ITEM_BYTES[ops.dtype])
    assert taken <= 1.1 * right + 2**16, f"{count} blocks of {right:,} bytes take {taken:,}"


def storage_of(array: Any) -> tuple[int, int]:
    """Return the identity and the bytes of the memory of an array."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    try:
        storage = array.untyped_storage()
    except (AttributeError, NotImplementedError):  # not of torch, or in a layout of oneDNN
        return id(array), array.nbytes
    return storage.data_ptr(), storage.nbytes()


@pytest.mark.parametrize("form", [None, "int8", "int4", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_take_the_memory_of_their_form(ops: Ops, require: Callable[..., None], form: str | None) -> None:
    """Users choose a format by what the engine reports, and KV takes the rest. Memory of native code is not seen."""
    require("primitives")
    if form is not None and form not in ops.weight_formats:
        lacks(f"it has no {form} weights")
    size = 1024
    values = Values(1)(size, size, scale=size**-0.5)
    weight = raw(values) if form is None else packed_weight(form, size, size, None, size**-0.5, "usual", 1)
    prepared = ops.prepare_linear([weight])
    del values
    taken, right = sum(dict(map(storage_of, arrays_of(prepared, ops))).values()), weight_bytes(ops, weight)
    what = f"{form or ops.dtype} weights of {right:,} bytes take {taken:,}"
    assert taken <= 1.2 * right + 2**16, f"{what}: `dequantizes_weights` and `stores_tightly` describe what is stored"
    with traced():  # the first one may have allocated a buffer that all use
        prepared = ops.prepare_linear([weight])
        del prepared
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    assert held <= 0.1 * right + 2**16, f"{held:,} bytes of the host are held for weights of {right:,} that are gone"


def test_a_model_is_quantized_as_configured(target: Target, checkpoints: Path) -> None:
    if not target.cls.needs_checkpoint:
        lacks("it has no weights")
    path = write_checkpoint("llama", checkpoints / "to_quantize", hidden_size=128, intermediate_size=128)
    for form in {"int8", "int4"} & {*target.ops.weight_formats}:
        backend = target.cls(target.config(quantization=form, max_model_len=64))
        model = backend.load_model(path, backend.make_ops(), lambda *_: None)
        assert form in {use.computed for use in model.weights}, f"--quantization {form} has no effect"
