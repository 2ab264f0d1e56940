"""Axes of token matrices: size, rows and revocations of a step, the steps before it, and other instances."""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final

import numpy as np

from fd_core.ops.contract import Array
from fd_core.runner.observing import MAX_QUEUED
from fd_core.signals import PREEMPTED_TOKEN_ID
from fd_core.testing.axes.covering import Axis, Case, around, int_of
from fd_core.testing.axes.interleaving import interleaved
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.hooks.purity import count_from, counts_of
from fd_core.testing.kit.growth import require_no_stall
from fd_core.testing.kit.law import broken
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, SampledRows
from fd_core.types import IntArray

_RANGES: Final = {
    "random": (0, 140_003),
    "zero": (0, 1),
    "small": (0, 4),
    "15-bits": (2**15 - 2, 2**15 + 2),
    "below-16-bits": (2**16 - 4, 2**16),
    "16-bits": (2**16 - 2, 2**16 + 2),
    "24-bits": (2**24 - 2, 2**24 + 4),
    "31-bits": (2**31 - 9, 2**31),
}
AXES: Final = (
    Axis(
        "slots",
        (6, 1, 2, *around(32, 64, 128, 256), 1000, *around(1024), 2048, 4099),
        ("Postprocess.limits", "Postprocess.token_matrix.slots"),
        rare=({"slots": 2**15 + 1, "rows": "all"}, {"slots": 2**16, "k": 16, "rows": "all-but-one", "revoked": "rest"}),
    ),
    Axis("k", (3, 0, 1, 2, *range(4, 17)), ("Postprocess.limits",)),
    Axis("rows", ("half", "none", "one", "two-thirds", "all-but-one", "all"), ("Postprocess.token_matrix.sampled",)),
    Axis("revoked", ("half", "none", "one", "rest-but-one", "rest", "random"), ("Postprocess.token_matrix.revoked",)),
    Axis("order", ("random", "kept", "ascending", "descending"), ("Postprocess.token_matrix.slots",)),
    Axis("accepted", ("random", "none", "all", "all-but-one", "in-turn"), ("Postprocess.token_matrix.accepted",)),
    Axis(
        "tokens",
        tuple(_RANGES),
        ("Postprocess.token_matrix.sampled",),
    ),
    Axis("rejected", ("random", "empty", "released", "lowest"), ("Postprocess.token_matrix.sampled",)),
    Axis(
        "steps",
        (3, 1, 2, 17, 33),
        ("Postprocess.limits",),
        rare=(
            {"steps": 300, "slots": 257, "before": "shrinking"},
            {"steps": 300, "slots": 257, "before": "growing", "rows": "all", "memory": "reused"},
            {"steps": 9000, "slots": 3, "k": 1, "before": "shrinking", "order": "kept", "revoked": "one"},
        ),
    ),
    Axis("before", ("other", "kept", "shrinking", "growing")),
    Axis("memory", ("new", "reused", "strided")),
    Axis("held", ("arrays", "copies")),
    Axis("tables", ("kept", "overwritten")),
    Axis("instances", ("one", "in-turn", "successive", "threads")),
    Axis("counted", (0, 2**15, 2**16, 2**24, 2**31, 2**32, 2**63)),
)
"""`before` is how the number of rows changes from step to step, `counted` how many steps were counted before. In the
longest case one slot is revoked and then idle for any number of steps. Of a matrix that is in flight, the runner holds
`copies` for the host, which may share its memory. `overwritten` are arrays that a step changed: scratch memory survives
that, state of earlier steps does not."""
EXCUSED: Final[Mapping[str, str]] = {
    "Postprocess.ops": "the pack of the backend under test, of which there is one per framework",
}
"""Fields of the contract that no axis varies, with the reason."""

_HELD: Final = 16 + MAX_QUEUED + 1
"""Further steps after which a matrix is compared: up to 16 in flight, those in an observer's queue, and one."""
_LEVELS: Final = 300
"""Most steps of different sizes."""
_MAX_ARRAYS: Final = 2
"""Arrays that may remain after the second half of the steps."""
_PERIOD: Final = 61
"""Steps after which the same rows follow, a prime number."""
_MAX_CELLS: Final = 1e6
"""Cells of all matrices of a case."""
_MAX_BLOCKS_PER_STEP: Final = 0.02
"""Most objects that may remain after the second half of many steps, created by other threads."""
_REJECTED: Final = {"empty": (-1, 0), "released": (PREEMPTED_TOKEN_ID, PREEMPTED_TOKEN_ID + 1), "lowest": (-(2**31), 9)}


def steps_of(case: Case) -> list[SampledRows]:
    """Return the steps of a case, up to `_PERIOD` or one of each size and `_PERIOD` of the last one."""
    slots, k, steps = (int_of(case, name) for name in ("slots", "k", "steps"))
    rng = np.random.default_rng(zlib.crc32(str(sorted(case.items())).encode()))
    period = min(steps, _LEVELS if case["before"] in ("shrinking", "growing") else _PERIOD)
    kept = rng.permutation(slots)
    found = []
    for step in range(period + _PERIOD * (steps > period > _PERIOD)):
        order = {"kept": kept, "ascending": np.sort(kept), "descending": np.sort(kept)[::-1]}.get(
            str(case["order"]), rng.permutation(slots)
        )
        rows, revoked = _counts(case, slots, step, period, rng=rng)
        found.append(_rows(case, order.astype(np.int32), rows, revoked, k=k, rng=rng))
    return found


def _counts(case: Case, slots: int, step: int, period: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return how many slots have rows, and how many of the others are revoked."""
    last = {"none": 0, "one": 1, "half": slots // 2, "two-thirds": -(-slots * 2 // 3), "all-but-one": slots - 1}.get(
        str(case["rows"]), slots
    )
    to_go = max(0, period - 1 - step)
    rows = {
        "other": last if to_go == 0 or period == _PERIOD else int(rng.integers(0, slots + 1)),
        "kept": last,
        "shrinking": min(slots, last + to_go),
        "growing": max(0, last - to_go),
    }[str(case["before"])]
    rest = slots - rows
    revoked = {"none": 0, "one": 1, "half": rest // 2, "rest-but-one": max(0, rest - 1), "rest": rest}
    return rows, min(rest, revoked.get(str(case["revoked"]), int(rng.integers(0, rest + 1))))


def _rows(case: Case, order: IntArray, rows: int, revoked: int, k: int, rng: np.random.Generator) -> SampledRows:
    number = np.arange(rows)
    accepted = {
        "none": np.zeros(rows),
        "all": np.full(rows, k),
        "all-but-one": np.full(rows, max(0, k - 1)),
        "in-turn": number % (1 + k),
    }.get(str(case["accepted"]), rng.integers(0, k + 1, rows))
    tokens = rng.integers(*_RANGES[str(case["tokens"])], (rows, 1 + k))
    dropped = rng.integers(*_REJECTED.get(str(case["rejected"]), (-(2**31), 2**31)), (rows, 1 + k))
    sampled = np.where(np.arange(1 + k) <= accepted[:, None], tokens, dropped)
    return SampledRows(
        sampled.astype(np.int32),
        accepted.astype(np.int32),
        order[:rows].copy(),
        revoked=order[rows : rows + revoked].copy(),
    )


def allowed(case: Case) -> bool:
    """Return True if there is such a step, and it is computed in less than a second."""
    slots, k, steps = (int_of(case, name) for name in ("slots", "k", "steps"))
    several = 1 if case["instances"] == "one" else 3
    lines = 20 if case["instances"] == "threads" else 1
    some = lines == 1 and case["tables"] == "kept"
    return slots * (2 + k) * steps * several * lines < _MAX_CELLS and (some or steps <= 33)


class _Instance:
    """A postprocessor with the smallest limits for its steps, of which it repeats the last `_PERIOD`, and the matrices
    that were not compared yet."""

    def __init__(self, target: PostprocessTarget, case: Case) -> None:
        self._steps = steps_of(case)
        computed = max(int((1 + rows.accepted).sum()) for rows in self._steps)
        self.matrices = Matrices(
            target,
            int_of(case, "slots"),
            int_of(case, "k"),
            str(case["memory"]),
            max_num_batched_tokens=max(computed, 1 + int_of(case, "k")),
            vocab_size=_RANGES[str(case["tokens"])][1],
        )
        self._expected = [self.matrices.expected(rows) for rows in self._steps]
        self._held: deque[tuple[Any, int]] = deque()
        self._copied = case["held"] == "copies"
        self._overwrites, self._class = case["tables"] == "overwritten", object
        self._done = 0
        self._many = int_of(case, "steps") > _LEVELS
        self._given: dict[int, tuple[Array, ...]] = {}
        self._compared: list[weakref.ref[Any]] = []

    def step(self, other: Callable[[], None] | None = None) -> None:
        """Compute the next step; `other` runs in another thread at each line of the postprocessor."""
        begun = max(0, len(self._steps) - _PERIOD)
        number = min(self._done, begun) + max(0, self._done - begun) % (len(self._steps) - begun)
        self._done += 1
        first = number not in self._given
        # Uploads would take most of the time of thousands of steps.
        given = self.matrices.upload(self._steps[number]) if first else self._given[number]
        compute = partial(self.matrices.compute, given)
        package = type(self.matrices.postprocess).__module__.partition(".")[0]
        tables = self.matrices.tables() if self._overwrites and self._done > 1 else []
        matrix = compute() if other is None else interleaved(compute, other, package)
        self.matrices.overwrite_changed(tables)
        self._class = type(matrix)
        self._held.append((self.matrices.copied(matrix) if self._copied else matrix, number))
        del matrix
        if first:
            self.matrices.require_unchanged(given, self._steps[number])
        if self._many:
            self._given[number] = given
        if len(self._held) > _HELD:
            self._compare()

    def end(self) -> None:
        while self._held:
            self._compare()

    def count_arrays(self) -> int:
        """Return the number of arrays: those that the interpreter tracks, and matrices referenced after they were
        compared."""
        gc.collect()
        kept = {id(matrix) for each in self._compared if (matrix := each()) is not None}
        return len(kept) + sum(type(each) is self._class for each in gc.get_objects())

    def _compare(self) -> None:
        matrix, number = self._held.popleft()
        if self._copied:
            matrix = matrix.wait()[0]
        self.matrices.compare(matrix, self._steps[number], self._expected[number])
        with suppress(TypeError):  # arrays of some frameworks have no weak references
            reference = weakref.ref(matrix)
            del matrix
            if self._many and reference() is not None:
                self._compared.append(reference)


def check_matrices(target: PostprocessTarget, case: Case) -> None:
    """Compute the steps of a case and compare every matrix. Raises `InvariantViolated`."""
    smaller = {**case, "slots": max(1, int_of(case, "slots") - 1), "k": max(0, int_of(case, "k") - 1)}
    same = {**case, "tokens": "small" if case["tokens"] == "random" else "random"}
    if case["instances"] == "successive":
        for each in (smaller, same):
            _finish(_Instance(target, each), 2)
    ours = _Instance(target, case)
    others = {"in-turn": (same, smaller), "threads": (same,)}.get(str(case["instances"]), ())
    more = [_Instance(target, each) for each in others]
    arrays, blocks, steps = 0, 0, int_of(case, "steps")
    half = min(steps, max(2 * _HELD, steps // 2))
    for part in (range(half), range(half, steps)):
        if part.start:
            arrays, blocks = ours.count_arrays(), sys.getallocatedblocks()
        with require_no_stall("a step", "1") if steps >= _LEVELS else nullcontext():
            for step in part:
                if step == 1 and case["counted"]:
                    numbers = {path: value for path, (*_, value) in counts_of(ours.matrices.postprocess).items()}
                if step == 2 and case["counted"]:
                    count_from(ours.matrices.postprocess, numbers, int_of(case, "counted"))
                if case["instances"] == "threads":
                    ours.step(more[0].step)
                    continue
                for instance in (ours, *more):
                    instance.step()
    if since := steps - half:
        arrays, blocks = ours.count_arrays() - arrays, sys.getallocatedblocks() - blocks
        if since > _LEVELS and blocks > since * _MAX_BLOCKS_PER_STEP:
            broken("1", f"{blocks} objects remain after {since} steps; a step must retain none")
        if arrays > _MAX_ARRAYS:
            broken("1", f"{arrays} arrays of {since} steps are still referenced; a step must retain none")
    for instance in (ours, *more):
        instance.end()


def _finish(instance: _Instance, steps: int) -> None:
    for _ in range(steps):
        instance.step()
    instance.end()


def _sizes(case: Case) -> Mapping[str, int]:
    return {"max_num_seqs": int_of(case, "slots"), "max_drafts": int_of(case, "k")}


MATRICES: Final[Part[PostprocessTarget]] = Part(
    "matrix",
    AXES,
    check_matrices,
    allowed,
    mixed=True,
    edges={"max_num_seqs": Edge("slots"), "max_drafts": Edge("k")},
    sizes=_sizes,
)
