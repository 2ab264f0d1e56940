"""Flight: steps computed before an earlier one is read, without shared state."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest

from fd_core.ops.contract import Array
from fd_core.plugins import POSTPROCESS, installed_plugins
from fd_core.testing.hooks.purity import imported_again, moving_clocks, require_freed, unchanged_threads
from fd_core.testing.kit.days.account import account_of, require_as_good
from fd_core.testing.kit.days.work import talks
from fd_core.testing.kit.growth import (
    count_bytecodes,
    count_bytes,
    count_elements,
    cpu_seconds,
    require_bounded,
    require_no_stall,
)
from fd_core.testing.kit.law import require
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, SampledRows, random_rows

_FEW, _MANY = 64, 1024
"""Numbers of slots whose costs are compared."""
_COMPILED_SECONDS, _COMPILED = 0.02, 8
"""Time by which a first step may exceed the next one, except for so many numbers of rows, such as powers of two."""
_LARGE: Final[Mapping[str, Any]] = {
    "max_model_len": 32_768,
    "block_size": 16,
    "num_kv_blocks": 1_000_000,
    "vocab_size": 152_064,
}
"""Other limits of a large engine, on which no step depends."""
_STEP_MS = 5
"""Milliseconds of the host for a step, during which the device may wait."""
_TIMES, _MORE_MS = 8, 0.4
"""The core's, which have the names of frameworks, take 0.02; others may take so many times as long, and more."""
_MOST_HELD = 2**24
"""Bytes that a postprocessor may allocate before its first step."""
_MOST = 64
"""Most bytes and elements of a step, as multiples of those of its matrix."""
_SERVERS: Final = {"defaults": (256, 3, 2), "large": (600, 8, 6)}
"""Slots, drafts and steps in flight of the engines of a day."""
_ANSWER: Final = 400
_STEP: Final = 24.0
"""Seconds of the day that a step takes, so that it has each minute and hour."""
_SLACK: Final = 4.0
"""Memory of a day as a multiple of what the core's takes."""


@pytest.mark.law("1")
def test_it_is_made_on_one_thread_and_computes_on_another(target: PostprocessTarget) -> None:
    matrices, rows = Matrices(target, 4, 2), random_rows(np.random.default_rng(3), 4, 2, rows=2, revoked=1)
    matrices.check(rows)
    with ThreadPoolExecutor(1) as runner:
        begun = runner.submit(matrices.begin, rows)
    require(begun.exception() is None, "1", f"it fails on the runner's thread: {begun.exception()!r}")
    matrices.compare(begun.result(), rows)


@pytest.mark.law("8")
@pytest.mark.fd_alone
def test_threads_are_left_to_the_backend(target: PostprocessTarget) -> None:
    with unchanged_threads():
        imported_again(target.make)
        Matrices(target, 4, 2).check(random_rows(np.random.default_rng(3), 4, 2, rows=2, revoked=1))


@pytest.mark.law("1")
@pytest.mark.fd_alone
def test_nothing_remains_of_many_different_steps(target: PostprocessTarget) -> None:
    """Every step has other rows and revocations; there may be a function for each of a few numbers of rows."""
    matrices, rng = Matrices(target, _MANY, 2), np.random.default_rng(5)
    counts = np.linspace(0, _MANY, 17, dtype=int).tolist()

    def use(number: int) -> None:
        rows = counts[number % len(counts)]
        matrices.begin(random_rows(rng, _MANY, 2, rows=rows, revoked=int(rng.integers(0, _MANY + 1 - rows))))

    require_bounded(use, 100, "different steps", "1")


@pytest.mark.law("1")
def test_it_is_freed_with_its_runner(target: PostprocessTarget) -> None:
    """A pack that is kept, by a postprocessor or alone, keeps the weights and the KV cache after a restart."""

    def used() -> object:
        own = replace(target, ops=copy(target.ops))
        matrices = Matrices(own, 4, 2)
        matrices.check(random_rows(np.random.default_rng(3), 4, 2, rows=2, revoked=1))
        return matrices.postprocess, own.ops

    require_freed(used, "1")


@pytest.mark.law("1")
@pytest.mark.fd_alone
def test_cost_on_the_host_does_not_grow_with_the_rows(target: PostprocessTarget) -> None:
    """Count bytecodes, which are the same for any number of rows, and memory and elements, which are proportional."""
    costs = []
    for slots in (_FEW, _MANY):
        matrices, given = _large_step(target, slots)
        code = min(count_bytecodes(lambda: matrices.compute(given)) for _ in range(3))  # noqa: B023 - called at once
        size = min(count_bytes(lambda: matrices.compute(given)) for _ in range(3))  # noqa: B023
        costs.append((code, size, count_elements(lambda: matrices.compute(given))))  # noqa: B023
    (few, less, read), (many, more, most_read) = costs
    require(many <= 4 * few + 2000, "1", f"a step of {_FEW} slots takes {few} bytecodes, one of {_MANY} takes {many}")
    most = 3 * (_MANY // _FEW) * less + 2**16
    require(more <= most, "1", f"a step of {_FEW} slots takes {less} bytes, one of {_MANY} takes {more}")
    most = 3 * (_MANY // _FEW) * read
    require(most_read <= most, "1", f"a step of {_FEW} slots writes {read} elements, one of {_MANY} writes {most_read}")
    cells, what = _MANY * 3, f"a step of {_MANY} slots, whose matrix has {_MANY * 3:,} cells,"
    require(more <= _MOST * 4 * cells + 2**20, "1", f"{what} takes {more:,} bytes of new memory")
    require(most_read <= _MOST * cells + 2**18, "1", f"{what} writes {most_read:,} elements")
    make = partial(Matrices, target, _MANY, 2, **_LARGE)
    size = max(count_bytes(make), 4 * count_elements(make))
    what = f"a postprocessor of {_MANY} slots and a context of {_LARGE['max_model_len']:,} tokens"
    require(size <= _MOST_HELD, "1", f"{what} takes {size:,} bytes, expected at most {_MOST_HELD:,}")


@pytest.mark.law("1", "1.1", "1.2", "1.3", "8")
@pytest.mark.fd_alone
@pytest.mark.fd_thorough
@pytest.mark.parametrize("server", _SERVERS)
def test_an_ordinary_day_of_a_server(target: PostprocessTarget, server: str) -> None:
    """Compute the steps of conversations that arrive, are preempted and end, and read each one later."""
    framework, plugins = target.ops.framework, installed_plugins()
    offered = framework in plugins.offered(POSTPROCESS)
    of_core = [replace(target, make=plugins.load(POSTPROCESS, framework))] if offered else []
    _lengths_of_answers()
    secrets = [f"{one}{between}{other}".encode() for one, other in pairwise(_ids()) for between in (", ", " ")]
    *core, mine = (
        account_of(partial(_steps_of_a_day, each, *_SERVERS[server]), *secrets) for each in (*of_core, target)
    )
    for each in core:
        require_as_good(mine, each, "a day", "1", _SLACK)


@cache
def _ids() -> list[int]:
    """Return the text of a day, which each request has a part of, and which no log may show."""
    return np.random.default_rng(9).integers(10_000, 152_064, 600).tolist()


@cache
def _lengths_of_answers() -> list[int]:
    turns = [turn for talk in talks(300, longest=4096) for turn in talk.turns]
    return [min(len(turn.answer), turn.leaves_after or _ANSWER, _ANSWER) for turn in turns]


def _steps_of_a_day(
    target: PostprocessTarget, slots: int, k: int, depth: int
) -> Generator[None, None, Mapping[str, float]]:
    """Yield after each hour of an engine that is never full in the morning, and always in the evening."""
    rng, lengths, text = np.random.default_rng(8), _lengths_of_answers(), np.array(_ids(), np.int32)
    matrices = Matrices(target, slots, k, **_LARGE)
    left, prompts = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    flying: deque[tuple[Any, SampledRows]] = deque()
    matrices.check(random_rows(rng, slots, k, rows=1, revoked=1))  # imports
    for hour in range(6):
        arrivals = slots * (0.1, 4, 12, 30, 50, 10)[hour] / 1000
        with require_no_stall("a step of a day", "1"), moving_clocks(target.make) as move:
            for _ in range(200):
                move(_STEP)
                free = np.flatnonzero(left == 0)
                for slot in rng.permutation(free)[: rng.poisson(arrivals)]:
                    left[slot], prompts[slot] = lengths[rng.integers(len(lengths))], rng.integers(0, 3)
                running = np.flatnonzero(left)
                gone = running[rng.random(len(running)) < (0.05, 0.01, 0.002)[min(hour, 2)]]
                left[gone] = 0
                prompts = np.maximum(prompts - 1, 0)
                ready = rng.permutation(np.flatnonzero((left > 0) & (prompts == 0))).astype(np.int32)
                accepted = np.minimum(rng.integers(0, k + 1, len(ready)), left[ready] - 1).astype(np.int32)
                tokens = text[rng.integers(0, len(text) - k, (len(ready), 1)) + np.arange(1 + k)]
                left[ready] -= 1 + accepted
                rows = SampledRows(tokens, accepted, ready, revoked=rng.permutation(gone).astype(np.int32))
                given = matrices.upload(rows)
                matrix = matrices.compute(given)
                matrices.require_unchanged(given, rows)
                flying.append((matrix, rows))
                while len(flying) > rng.integers(0, depth + 1):
                    matrices.compare(*flying.popleft())
        yield
    while flying:
        matrices.compare(*flying.popleft())
    return {}


@pytest.mark.timing
@pytest.mark.fd_alone
@pytest.mark.law("1")
def test_a_step_takes_little_time_of_the_host(target: PostprocessTarget) -> None:
    """The limit is in units of what the core needs for this framework, which cancels the load of the machine."""
    framework, plugins = target.ops.framework, installed_plugins()
    of_core = [plugins.load(POSTPROCESS, framework)] if framework in plugins.offered(POSTPROCESS) else []
    steps = [_large_step(each, _FEW) for each in (target, *(replace(target, make=make) for make in of_core))]
    times = [[1000 * cpu_seconds(partial(made.compute, given)) for made, given in steps] for _ in range(5)]
    took, *right = (min(each) for each in zip(*times, strict=True))
    most = min(_STEP_MS, *(_MORE_MS + _TIMES * each for each in right)) if right else _STEP_MS
    what = f"a step of {_FEW} slots takes {took:.2f} ms of the host"
    require(took < most, "1", f"{what}, expected less than {most:.2f}: do what it prepares in the constructor")


@pytest.mark.timing
@pytest.mark.fd_alone
@pytest.mark.law("1")
def test_few_numbers_of_rows_are_compiled(target: PostprocessTarget) -> None:
    """Compute a step of each number of rows twice: a kernel for each stalls all requests in hundreds of steps."""
    matrices, rng, slow = Matrices(target, _FEW, 2), np.random.default_rng(5), 0
    for rows in rng.permutation(_FEW + 1).tolist():
        given = matrices.upload(random_rows(rng, _FEW, 2, rows=rows, revoked=_FEW - rows))
        first, again = (_processor_seconds(lambda: matrices.compute(given)) for _ in range(2))  # noqa: B023
        slow += first - again > _COMPILED_SECONDS
    what = f"of {_FEW + 1} numbers of rows, {slow} take over {1000 * _COMPILED_SECONDS:.0f} ms more the first time"
    require(slow <= _COMPILED, "1", f"{what}: compile no kernel for each, but one for any number, or a few to pad to")


def _processor_seconds(compute: Callable[[], object]) -> float:
    """Return the time of the processor that a call takes in all threads, and in processes such as compilers."""
    before = time.process_time() + sum(os.times()[2:4])
    compute()
    return time.process_time() + sum(os.times()[2:4]) - before


def _large_step(target: PostprocessTarget, slots: int) -> tuple[Matrices, tuple[Array, ...]]:
    """Return a postprocessor that has computed a step, and the inputs of the step."""
    matrices = Matrices(target, slots, 2, **_LARGE)
    given = matrices.upload(random_rows(np.random.default_rng(slots), slots, 2, rows=slots // 2, revoked=slots // 4))
    matrices.compute(given)
    return matrices, given
