"""Measures an engine in this process and the speed of KV transfers, and makes a profile of the measurements.

Steps are submitted to the engine's device as plans, without a scheduler, so that any context costs one admission. All
steps are run once unmeasured, then in rounds, each in another order, until the time is used up. The result is the
lower quartile of each step: interference only ever adds time. The overhead outside steps is that of the engine's
own loop with a few requests.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import numpy as np

import fd_core
from fd_core.config import EngineConfig, Limits
from fd_core.config.paths import find_cache_dir
from fd_core.engine.core import Engine
from fd_core.engine.process.messages import EngineMessage, Submit
from fd_core.engine.process.service import EngineService
from fd_core.errors import ConfigError, FdError
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.runner.batch import PersistentBatch
from fd_core.simulation.costs import fitting
from fd_core.simulation.costs.calculating import ASSUMED_REQUEST, ASSUMED_STORE_READ, ASSUMED_STORE_WRITE
from fd_core.simulation.costs.profile import CostProfile, KVLink, ProfiledModel, RequestTerms, step_features
from fd_core.types import Image, IntArray, RequestSpec, SamplingParams, StepPlan

_ROUNDS: Final = 15
MOST_SPREAD: Final = 0.2
"""Above it the figures reflect interference more than the steps."""
_SEED: Final = 17
_LOOP_STEPS: Final = 16
_LOOP_ROUNDS: Final = 4
_ASSUMED_TRANSFER: Final = KVLink(
    latency=500e-6, bandwidth=3e9, source="assumed: the tcp connector between workers of one machine, 3 GB/s"
)

ASSUMED_SERVING: Final = "Reading a request over HTTP and delivery are assumed but for the tokens of its text."
ASSUMED_LINKS: Final = "Store and transfers between workers are assumed."
"""Notes of a profile until the values are measured."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the measurement, the number of done parts and their total."""


class MachineTooNoisy(FdError):
    """Repetitions of the same step differ too much for a meaningful fit."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Settings of a calibration."""

    name: str
    machine: str
    seconds: float = 25.0
    """Time for the rounds of steps; at least five rounds are run however long they take."""
    most_spread: float = MOST_SPREAD
    date: str = ""
    """In ISO form."""
    ranks: int = 1
    """Processes that compute steps together."""


def calibrate(
    engine: Engine,
    encode: Callable[[str], Sequence[int]],
    how: Calibration,
    progress: Progress,
    image: Image | None = None,
) -> CostProfile:
    """Measure an idle engine and return its profile; `encode` tokenizes a text, `image` is one as the model takes it.

    The engine's prefix cache must be empty, and is useless afterwards. Raises `MachineTooNoisy`.
    """
    probe = engine.probe()
    limits = probe.runner.limits
    if probe.runner.drafter is None:  # tokens forced by grammars are not drafts that a simulation plans
        limits = msgspec.structs.replace(limits, max_drafts=0)
    cases = fitting.cases_of(limits, np.random.default_rng(_SEED))
    request = _loop_times(engine, encode, progress)
    bench = StepBench(engine, cases)
    spread = bench.measure(how.seconds, progress)
    if spread > how.most_spread:
        raise MachineTooNoisy(
            f"the time of the same step varied by {spread:.0%}, which exceeds the limit of "
            f"{how.most_spread:.0%} for a meaningful profile",
            hint="stop other work on this machine and try again",
        )
    fitted = [step for case, step in bench.steps() if not case.held_out and not case.shared]
    judged = [step for case, step in bench.steps() if case.held_out]
    terms = msgspec.structs.replace(
        fitting.fit_steps(fitted),
        per_shared_position=bench.shared_saving(),
        per_image_token=0.0 if image is None else _image_cost(engine, image),
    )
    info, shape = engine.info, probe.runner.cache.shape
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CostProfile(
        name=how.name,
        origin="measured",
        device=info.device,
        spare_processors=max(0, processors - how.ranks * bench.processors()),
        versions=_versions(),
        when=how.date,
        notes=(f"Measured on {how.machine}.", ASSUMED_SERVING, ASSUMED_LINKS),
        model=ProfiledModel(
            name=info.model,
            layers=shape.num_layers,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype="+".join([info.dtype, *sorted({use.computed for use in info.weights} - {info.dtype})]),
            kv_dtype=info.kv_dtype,
            weights_bytes=max(1, sum(use.nbytes for use in info.weights)),
            kv_bytes_per_token=max(
                1, info.kv_cache_bytes * limits.groups.count // (limits.num_kv_blocks * limits.block_size)
            ),
        ),
        limits=limits,
        step=terms,
        request=request,
        host_copy=_host_copy(engine),
        store_read=ASSUMED_STORE_READ,
        store_write=ASSUMED_STORE_WRITE,
        transfer=_ASSUMED_TRANSFER,
        error=fitting.errors_of(terms, judged),
        spread=spread,
    )


def require_alone(config: EngineConfig) -> EngineConfig:
    """Return the settings of a standalone engine to measure. Raises `ConfigError` for features not measured."""
    for name, usual in (("role", "mixed"), ("kv_store", None), ("pipeline_parallel_size", 1), ("lora_modules", ())):
        if getattr(config, name) != usual:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, but its cost is not measured",
                field="--" + name.replace("_", "-"),
                hint="omit it; a simulation accepts it with the profile",
            )
    return config


def _versions() -> dict[str, str]:
    found = {"fd_core": fd_core.__version__, "python": platform.python_version()}
    for module, name in (("numpy", "numpy"), ("torch", "torch"), ("paddle", "paddlepaddle")):
        if module in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found


class StepBench:
    """Runs cases on an engine's device and records their times."""

    def __init__(self, engine: Engine, cases: Sequence[fitting.StepCase]) -> None:
        probe = engine.probe()
        self._device, self._runner, self._patience = probe.device, probe.runner, probe.watchdog_seconds
        self._limits: Limits = self._runner.limits
        self._cases = cases
        self._draw = np.random.default_rng(_SEED)
        self._most_blocks = max(case.blocks(self._limits) for case in cases)
        self._step = 1
        self._times: defaultdict[fitting.StepCase, list[float]] = defaultdict(list)
        self._processor_seconds = 0.0
        self._features: dict[fitting.StepCase, list[tuple[int, int, int, int, float, int]]] = {}

    def measure(self, seconds: float, progress: Progress) -> float:
        """Run rounds; return the median deviation of repetitions from their median, as a share."""
        took = []
        for index, case in enumerate(self._cases):
            progress("steps, unmeasured", index, len(self._cases))
            begun = time.perf_counter()
            self._run(case)
            took.append(time.perf_counter() - begun)
        self._times.clear()
        self._processor_seconds = 0.0
        # Each case gets the same time, so that short steps, which vary more, are repeated more often.
        share = seconds / len(self._cases)
        repeats = np.clip(share / np.array(took), 5, _ROUNDS).astype(int)
        done, total = 0, int(repeats.sum())
        for round_ in range(_ROUNDS):
            due = np.flatnonzero((round_ + 1) * repeats // _ROUNDS > round_ * repeats // _ROUNDS)
            for index in self._draw.permutation(due).tolist():
                progress("steps", done, total)
                self._run(self._cases[index])
                done += 1
        self._runner.batch = PersistentBatch(self._limits)
        return median(_spread(times) for times in self._times.values())

    def steps(self) -> Iterable[tuple[fitting.StepCase, fitting.MeasuredStep]]:
        """Return each case with its usual time."""
        for case, times in self._times.items():
            means = np.mean(self._features[case], axis=0).tolist()
            tokens, sampled, rows, read, pairs, drafts = means
            features = (int(tokens), int(sampled), int(rows), int(read), pairs, int(drafts))
            yield case, fitting.MeasuredStep(case.kind, features, usual(times))

    def processors(self) -> int:
        """Return the number of processors that this process uses while it computes a step; at least one."""
        return max(1, round(self._processor_seconds / sum(map(sum, self._times.values()))))

    def usual(self, case: fitting.StepCase) -> float:
        """Return the usual time of a case, in seconds."""
        return usual(self._times[case])

    def mean(self, case: fitting.StepCase) -> float:
        """Return the mean time of a case, interference included, in seconds."""
        return float(np.mean(self._times[case]))

    def shared_saving(self) -> float:
        """Return the seconds saved for each position that another row reads as well."""
        pair = fitting.shared_pair(self._limits)
        if any(case not in self._times for case in pair) or not pair:
            return 0.0
        shared, alone = map(self.usual, pair)
        return max(0.0, alone - shared) / (pair[0].shared * (len(pair[0].rows) - 1))

    def _run(self, case: fitting.StepCase) -> None:
        limits = self._limits
        first_block = int(self._draw.integers(0, self._most_blocks - case.blocks(limits), endpoint=True))
        plan = fitting.first_plan(case, self._step, first_block, limits.vocab_size, limits.block_size)
        features = []
        if case.repeats == 1:
            features.append(self._timed(case, plan))
        else:
            self._execute(plan)
            for index in range(fitting.LEAD_IN + case.repeats):
                plan = fitting.next_plan(plan, self._runner.batch.length)
                self._guess(case, plan)
                if index < fitting.LEAD_IN:
                    self._execute(plan)
                else:
                    features.append(self._timed(case, plan))
        self._features[case] = features
        self._step = plan.step + 1

    def _timed(self, case: fitting.StepCase, plan: StepPlan) -> tuple[int, int, int, int, float, int]:
        begun, worked = time.perf_counter(), time.process_time()
        self._execute(plan)
        self._times[case].append(time.perf_counter() - begun)
        self._processor_seconds += time.process_time() - worked
        return step_features(plan)

    def _guess(self, case: fitting.StepCase, plan: StepPlan) -> None:
        """Make the runner verify synthetic drafts instead of those that its drafter finds in a synthetic text."""
        counts = np.array([row.drafts for row in case.rows], np.int32)
        if counts.any():
            drafts = self._draw.integers(1, self._limits.vocab_size, (len(counts), int(counts.max())), np.int32)
            self._runner.batch.guess(plan.slots, drafts, counts)

    def _execute(self, plan: StepPlan) -> None:
        self._device.submit(plan)
        self._device.collect(self._patience)


def usual(times: Sequence[float]) -> float:
    """Return the time without interference, from repetitions of which some were disturbed."""
    return float(np.percentile(times, 25))


def _spread(times: Sequence[float]) -> float:
    low, middle, high = np.percentile(times, (25, 50, 75))
    return float((high - low) / 2 / middle)


def _loop_times(engine: Engine, encode: Callable[[str], Sequence[int]], progress: Progress) -> RequestTerms:
    """Time the engine's own loop, and the work before it, with a few requests."""
    limits = engine.probe().runner.limits
    room = limits.groups.longest(limits.num_kv_blocks, limits.block_size) // (2 * (_LOOP_STEPS + 16))
    most = max(1, min(limits.max_num_seqs, room, limits.max_num_batched_tokens // 8))
    service, turns = EngineService(engine, _encoded), defaultdict[int, list[float]](list)
    for index in range(_LOOP_ROUNDS):
        progress("turns of the loop", index, _LOOP_ROUNDS)
        for batch in sorted({1, max(1, most // 4), most}):
            turns[batch] += _turns(engine, service, batch, limits=limits)
    per_row, constant = _line({batch: usual(times) for batch, times in turns.items()})
    text = "The quick brown fox jumps over the lazy dog, and 42 others watch it. " * 40
    encoding = []
    for index in range(5):
        begun = time.perf_counter()
        count = len(encode(f"{index} {text}"))
        encoding.append((time.perf_counter() - begun) / max(count, 1))
    return msgspec.structs.replace(
        ASSUMED_REQUEST, turn=constant, turn_per_row=per_row, receive_per_token=usual(encoding)
    )


def _turns(engine: Engine, service: EngineService, batch: int, limits: Limits) -> list[float]:
    """Return the seconds outside steps of each turn of the loop with a batch, without the turns that admit it."""
    probe, steps = engine.probe(), max(2, min(_LOOP_STEPS, limits.max_model_len - 10))
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    requests = []
    for index in range(batch):
        prompt = tuple((index * 31 + position) % (limits.vocab_size - 1) + 1 for position in range(8))
        requests.append(Submit(RequestSpec(request_id=f"calibrate-{batch}-{index}", prompt=prompt, params=params)))
    deltas = service.take(requests)
    times = []
    while engine.has_work:
        begun = time.perf_counter()
        deltas += engine.begin_steps()
        planned = time.perf_counter()
        output = probe.device.collect(probe.watchdog_seconds) if engine.num_in_flight else None
        answered = time.perf_counter()
        if output is not None:
            deltas += engine.end_step(output)
        service.send(deltas, begun)
        times.append(planned - begun + time.perf_counter() - answered)
        deltas = []
    return times[len(times) // 4 :]


_IMAGE_ROUNDS: Final = 5
_ENCODER: Final = msgspec.msgpack.Encoder()


def _encoded(message: EngineMessage) -> None:
    """Encode a message as a send does."""
    _ENCODER.encode(message)


def _line(values: dict[int, float]) -> tuple[float, float]:
    """Return the slope and intercept, both at least 0, of the straight line nearest to the points."""
    if len(values) < 2:
        return 0.0, next(iter(values.values()))
    slope = max(0.0, float(np.polyfit(list(values), list(values.values()), 1)[0]))
    return slope, max(0.0, float(np.mean([value - slope * count for count, value in values.items()])))


def _image_cost(engine: Engine, image: Image) -> float:
    """Return the seconds of the encoder for each token of an image."""
    runner, times = engine.probe().runner, []
    if runner.images is None:
        return 0.0
    for _ in range(1 + _IMAGE_ROUNDS):
        begun = time.perf_counter()
        runner.ops.to_host(runner.images.encode(image)[0])
        times.append(time.perf_counter() - begun)
    return usual(times[1:]) / image.num_tokens


def _host_copy(engine: Engine) -> KVLink:
    cache = engine.probe().runner.cache
    times: dict[int, list[float]] = {}
    for count in sorted({1, min(32, cache.num_blocks)}):
        blocks: IntArray = np.arange(count, dtype=np.int32)
        data = cache.export_blocks(blocks)
        cache.import_blocks(blocks, data)
        times[data.nbytes] = []
        for _ in range(5):
            begun = time.perf_counter()
            cache.import_blocks(blocks, cache.export_blocks(blocks))
            times[data.nbytes].append((time.perf_counter() - begun) / 2)
    return _link_of(times, "measured: blocks copied to the host and back, half of it")


def _link_of(times: dict[int, list[float]], source: str) -> KVLink:
    """Return the link that fits these times by bytes; the constant part is the latency."""
    slope, latency = _line({size: usual(values) for size, values in times.items()})
    return KVLink(latency=latency, bandwidth=1 / slope if slope else 1e12, source=source)


_LINK_ROUNDS: Final = 24
_MOST_BYTES: Final = 64 * 2**20
_TIMEOUT: Final = 30.0
_SMALL: Final = 8
"""The small values are smaller than a block by this factor."""


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
    """Return the read and write links of a disk store in the cache folder; values are read right after their write."""
    cache = find_cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="calibrate-", dir=cache))
    envelope, keys = Envelope(secrets.token_bytes(32)), [secrets.token_bytes(32) for _ in range(2 * _LINK_ROUNDS)]
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

        reads = _link(load, block_bytes, f"{source}, right after the write")
        store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return reads, writes


def _link(move: Callable[[bytes], None], block_bytes: int, source: str) -> KVLink:
    """Time transfers of blocks and of parts of blocks."""
    small, whole = (np.random.default_rng(7).bytes(size) for size in (max(1, block_bytes // _SMALL), block_bytes))
    times: dict[int, list[float]] = {len(small): [], len(whole): []}
    for _ in range(min(_LINK_ROUNDS, max(3, _MOST_BYTES // block_bytes))):
        for block in (small, whole):
            begun = time.perf_counter()
            move(block)
            times[len(block)].append(time.perf_counter() - begun)
    return _link_of(times, source)
