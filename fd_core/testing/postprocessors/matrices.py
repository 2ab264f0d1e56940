"""The postprocessor under test, looked up by name, and steps with expected matrices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import FdError, PluginError
from fd_core.ops.contract import Array, HostCopies, Ops
from fd_core.plugins import POSTPROCESS, installed_plugins
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from fd_core.testing.hooks.purity import contents_of
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import constructed
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.small import limits_within, small_limits
from fd_core.types import IntArray

_MAX_NUMBERS: Final = 8
"""Elements of an array that may be counts; larger ones are tables."""
_DEPTH: Final = 3
"""Attributes and elements of other objects through which tables are found."""
_BACKENDS: Final[Mapping[str, str]] = {
    "numpy": "reference",
    "torch": "cpu:native_kernels=false",
    "paddle": "cpu+paddle",
}


@dataclass(frozen=True)
class PostprocessTarget:
    """One postprocessor under a name, with a supported pack."""

    name: str
    make: Callable[[Ops, Limits], Postprocess]
    ops: Ops
    device: str = ""
    """One line about the device."""
    emulated: bool = False
    others: tuple[PostprocessTarget | str, ...] = ()
    """The same one on a backend of each other framework that it serves, or the reason why that is missing."""

    def about(self) -> dict[str, Any]:
        """Return the description for its report card."""
        origin = str(installed_plugins().offered(POSTPROCESS)[self.name].origin)
        envelope = getattr(self.make, "envelope", OperatingEnvelope()).limits()
        return {"distribution": origin, "device": self.device, "emulated": self.emulated, "envelope": envelope}


def find_postprocessor(text: str) -> PostprocessTarget:
    """Return the postprocessor `NAME` or `NAME:FIELD=VALUE,...`, on the backend of `backend=`.

    The default is the CPU backend of its first supported framework. Raises `PluginError` if the postprocessor is
    missing, cannot be constructed or does not support that backend, `ConfigError` for an unknown field.
    """
    name, _, rest = text.partition(":")
    served = installed_plugins().load(POSTPROCESS, name).serves
    settings = dict.fromkeys(filter(None, rest.split(",")))
    named = [each for each in settings if each.startswith("backend=")]
    backend = named[-1].removeprefix("backend=") if named else next((_BACKENDS.get(each, each) for each in served), "")
    if not backend:
        raise PluginError(f"postprocessor {name} serves no framework", hint="name some in `serves` of its class")
    rest = ",".join([f"postprocess={name}", *(each for each in settings if each not in named)])
    target = parse_target(f"{backend}{',' if ':' in backend else ':'}{rest}", Path())
    made = target.postprocess
    constructed(POSTPROCESS, name, lambda: made(target.ops, limits_within(made.envelope)))
    others = () if named else tuple(_found_on(name, _BACKENDS.get(each, each)) for each in served[1:])
    return PostprocessTarget(name, made, target.ops, target.backend.describe(), emulated=target.emulated, others=others)


def _found_on(name: str, backend: str) -> PostprocessTarget | str:
    try:
        return find_postprocessor(f"{name}:backend={backend.replace(':', ',')}")
    except FdError as error:
        return f"{backend}: {error}"


class SampledRows(NamedTuple):
    """Samples of one step, on the host: int32[N, 1 + k], int32[N], int32[N] and int32[M]."""

    sampled: IntArray
    accepted: IntArray
    slots: IntArray
    revoked: IntArray


def random_rows(rng: np.random.Generator, slots: int, k: int, rows: int, revoked: int) -> SampledRows:
    """Return a step of `rows` rows and `revoked` revoked slots in random order, with tokens beyond 2^17."""
    order = rng.permutation(slots).astype(np.int32)
    return SampledRows(
        rng.integers(0, 140_003, (rows, 1 + k)).astype(np.int32),
        rng.integers(0, k + 1, rows).astype(np.int32),
        order[:rows].copy(),
        revoked=order[rows : rows + revoked].copy(),
    )


class Matrices:
    """A postprocessor for a number of slots and drafts, and its matrices."""

    def __init__(self, target: PostprocessTarget, slots: int, k: int, memory: str = "new", **limits: Any) -> None:
        """Create the postprocessor. The `memory` of inputs is "new", "reused" by all steps, with garbage after its
        rows, or "strided": parts of larger arrays, the tokens with strides. `limits` are other fields of `Limits`.
        """
        self._target, self._ops, self._slots, self._k = target, target.ops, slots, k
        sizes = {"max_num_seqs": slots, "max_num_batched_tokens": slots * (1 + k)}
        self.postprocess = target.make(
            target.ops,
            small_limits(**{**sizes, "vocab_size": 2**31 - 1, "max_drafts": k, **limits}),
        )
        shapes = ((slots, 1 + k), *((slots,),) * 3) if memory == "reused" else ()
        self._strided = memory == "strided"
        self._memory = [self._ops.from_host(np.full(shape, 7, np.int32)) for shape in shapes]

    def upload(self, rows: SampledRows) -> tuple[Array, ...]:
        """Return the arrays of a step on the device, in new memory unless it is reused.

        Memory freed since then is filled with 7, so that a read of stale memory is detected.
        """
        if self._memory:
            return tuple(map(self._written, self._memory, rows))
        if self._strided:
            return tuple(map(self._view, rows))
        self._ops.from_host(np.full((self._slots, 1 + self._k), 7, np.int32))
        return tuple(self._ops.from_host(each.copy()) for each in rows)

    def _view(self, values: IntArray) -> Array:
        """Return values as a part of a larger array: tokens as every second element, others without gaps."""
        some = (slice(1, None, 2),) * 2 if values.ndim == 2 else (slice(1, 1 + len(values)),)
        wide = np.full([2 * size + 1 for size in values.shape], -77, np.int32)
        wide[some] = values
        return self._ops.from_host(wide)[some]

    def _written(self, memory: Array, values: IntArray) -> Array:
        view = memory[: len(values)]
        if len(values):
            view[:] = self._ops.from_host(values)
        if len(values) < len(memory):
            memory[len(values) :] = -77
        # A framework whose views are copies is given new memory.
        return view if np.array_equal(self._ops.to_host(view), values) else self._ops.from_host(values.copy())

    def compute(self, given: tuple[Array, ...]) -> Array:
        return self.postprocess.token_matrix(*given)

    def copied(self, matrix: Array) -> HostCopies:
        """Return the copies of a matrix that a runner holds until it reads them."""
        return self._ops.fetch_later([matrix])

    def tables(self) -> list[tuple[Array, bytes]]:
        """Return the arrays, larger than counts, of the postprocessor, its class, its module, and closures in them,
        with their bytes."""
        cls, found, seen = type(self.postprocess), dict[int, Array](), set[int]()
        parts: list[tuple[Any, int]] = [
            (vars(each), 0) for each in (self.postprocess, cls, sys.modules[cls.__module__])
        ]
        for part, depth in parts:
            for value in [*part.values()] if isinstance(part, Mapping) else [*part]:
                if id(value) in seen:  # at this depth or a smaller one
                    continue
                seen.add(id(value))
                if isinstance(getattr(value, "shape", None), tuple | list) and hasattr(value, "__setitem__"):
                    if math.prod(value.shape) > _MAX_NUMBERS:
                        found[id(value)] = value
                elif depth < _DEPTH and not isinstance(value, ModuleType | type | Ops):
                    inner = value if isinstance(value, dict | list | tuple) else contents_of(value) or ()
                    parts.append((inner, depth + 1))
        return [(each, self._host(each).tobytes()) for each in found.values()]

    def overwrite_changed(self, tables: list[tuple[Array, bytes]]) -> None:
        """Write small numbers to those arrays that differ from their bytes."""
        if not tables:
            return  # to make a generator takes longer than most steps
        rng = np.random.default_rng(len(tables))
        for array, before in tables:
            if self._host(array).tobytes() != before:
                numbers = rng.integers(0, 4, tuple(array.shape)).astype(np.int32)
                array[...] = numbers if isinstance(array, np.ndarray) else self._ops.from_host(numbers)

    def _host(self, array: Array) -> npt.NDArray[Any]:
        return array if isinstance(array, np.ndarray) else self._ops.to_host(array)

    def begin(self, rows: SampledRows) -> Array:
        return self.compute(self.upload(rows))

    def check(self, *steps: SampledRows) -> None:
        for rows in steps:
            self.compare(self.begin(rows), rows)

    def require_unchanged(self, given: tuple[Array, ...], rows: SampledRows) -> None:
        """Fail the running test if a step changed its inputs."""
        for name, array, before in zip(("sampled", "accepted", "slots", "revoked"), given, rows, strict=True):
            found = self._ops.to_host(array)
            if not np.array_equal(found, before):
                broken("8", f"{name} changed from {before.tolist()} to {found.tolist()}")

    def compare(self, matrix: Array, rows: SampledRows, expected: IntArray | None = None) -> None:
        """Fail the running test, with the violated rule, unless `matrix` is the expected one."""
        found, right = self._host(matrix), self.expected(rows) if expected is None else expected
        require(found.shape == right.shape, "1", f"expected a matrix {list(right.shape)}, got {list(found.shape)}")
        if found.dtype != np.int32:  # numpy takes long to name a type
            broken("1", f"expected a matrix of int32, got {found.dtype}")
        for slot in np.flatnonzero((found != right).any(axis=1)).tolist():
            ours, theirs = found[slot].tolist(), right[slot].tolist()
            about = f"slot {slot} has {_shown(ours)}"
            if slot in rows.revoked:
                require(ours[0] == theirs[0], "1.2", f"{about}, but it was revoked, so its row must begin with -9")
                broken("1.3", f"{about} in addition to the -9 of its revocation")
            require(PREEMPTED_TOKEN_ID not in ours, "1.2", f"{about}, but it was not revoked")
            require(slot in rows.slots, "1.1", f"{about}, but it has no row in this step")
            broken("1.1", f"{about}, expected {_shown(theirs)}")

    def expected(self, rows: SampledRows) -> IntArray:
        """Return the right matrix of a step."""
        matrix = np.full((self._slots, rows.sampled.shape[1]), EMPTY_TOKEN_ID, np.int32)
        for slot, tokens, accepted in zip(rows.slots, rows.sampled, rows.accepted, strict=True):
            matrix[slot, : 1 + accepted] = tokens[: 1 + accepted]
        matrix[rows.revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix


def _shown(row: list[int]) -> str:
    return str(row if len(row) < 12 else [*row[:10], "..."]).replace("'", "")


def place_of(array: Any) -> str:
    """Return class and device of an array."""
    return f"{type(array).__module__}.{type(array).__name__} on {getattr(array, 'device', getattr(array, 'place', ''))}"
