"""A pack whose calls are watched while a case of the kit runs on it."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Heads, KVCache, Ops, Rope, StepInput
from fd_core.ops.weights import ITEM_BYTES

_WATCHED: Final = {
    name
    for cls in (Ops, KVCache)
    for name, value in vars(cls).items()
    if callable(value) and not name.startswith("_") and name not in ("join", "cut", "configure", "replaceable_weights")
}
_FALL_BACK: Final = re.compile(r"fall(?:s|ing|en)?[ _-]?back", re.IGNORECASE)
_ATTENTION: Final = ("attention", "paged_attention")
"""Operations that read the keys and values of all contexts."""


class CallCost(NamedTuple):
    """The call of an operation that moves the most bytes."""

    seconds: float
    moved: int
    calls: tuple[str, ...] | None
    """Calls of the framework; None if they were not recorded."""


class WatchedOps:
    """A pack, or its KV cache: where the results of its operations are, which one raises, and what each costs.

    Compositions of the contract call the operations of this object, so that what they consist of is watched as well.
    """

    def __init__(
        self,
        ops: Ops,
        began: Callable[[str], None] = lambda _: None,
        read_output: Callable[[], str] = str,
        timed: Sequence[str] = (),
        traced: Collection[str] | None = None,
    ) -> None:
        self.fell_back: dict[str, str] = {}
        """By operation that was called, evidence that the host computed it; empty if there is none."""
        self.raised = ""
        """The operation that raised the last exception."""
        self.costs: dict[str, CallCost] = {}
        """Of the operations `timed`; each of their calls is repeated, so the results of a case may be wrong."""
        self.results: list[tuple[str, list[npt.NDArray[Any]]]] = []
        """Of all calls, in order, if they are traced; operations `traced` are traced as one call."""
        self._ops, self._began, self._read_output = ops, began, read_output
        self._timed, self._traced = timed, traced
        self._running = ""
        self._kept: list[Any] = []
        self._prepared: dict[int, int] = {}
        self._caches: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name not in _WATCHED:
            return found
        is_composed = hasattr(Ops, name) and getattr(type(self._ops), name) is getattr(Ops, name)
        is_composed = is_composed and name not in (self._traced or ())
        return partial(self._call, name, partial(getattr(Ops, name), self) if is_composed else found)

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if name != self._running:
            self._running = name
            self._began(name)
        is_first = name not in self.fell_back
        if is_first:
            self._read_output()
        try:
            with warnings.catch_warnings(record=True) if is_first else nullcontext() as warned:
                if is_first:
                    warnings.simplefilter("always")
                result = call(*arguments, **named)
        except Exception:
            self.raised = self.raised or name
            raise
        arrays = _arrays(result) if not name.startswith(("to_host", "fetch", "export", "allocate", "layer")) else []
        if is_first:
            words = [*(str(each.message) for each in warned or ()), *self._read_output().splitlines()]
            self.fell_back[name] = elsewhere(self._ops, arrays) or next(filter(_FALL_BACK.search, words), "")
        if name in self._timed:
            self._time(name, partial(call, *arguments, **named), [*arguments, *named.values(), result])
        if name.startswith(("prepare_", "tied_")):
            self._kept.append(result)
            self._prepared[id(result)] = _elements(arguments) * ITEM_BYTES[self._ops.dtype]
        elif self._traced is not None and name != "project_residual" and name != "moe_residual":
            self.results.append((name, [np.array(self._ops.to_host(each)) for each in arrays]))
        return _WatchedCache(result, self) if name == "allocate_kv" else result

    def watch(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of a KV cache."""
        result = self._call(name, call, *arguments)
        if name == "layer":
            self._kept.append(result)
            self._caches.add(id(result))
        return result

    def _time(self, name: str, call: Callable[[], Any], values: Sequence[Any]) -> None:
        moved = sum(self._bytes(value) for value in values) if name != "embedding" else 2 * self._bytes(values[-1])
        if name in _ATTENTION:
            moved += self._context_bytes(values)
        if name in self.costs and self.costs[name].moved >= moved:
            return
        names = None
        if find_spec(calls := f"fd_core.ops.{self._ops.framework}.calls"):
            with import_module(calls).recorded_calls() as recorded:
                call()
            names = tuple(recorded)
        self.costs[name] = CallCost(shortest(self._ops, call), moved, names)

    def _bytes(self, value: Any) -> int:
        """Return the bytes of arrays and weights in an argument or result, without a cache or tables of rope."""
        if id(value) in self._caches or isinstance(value, Rope):
            return 0
        if id(value) in self._prepared:
            return self._prepared[id(value)]
        if isinstance(value, (list, tuple)):
            return sum(map(self._bytes, value))
        if is_dataclass(value):
            return sum(self._bytes(getattr(value, each.name)) for each in fields(value))
        size = getattr(value, "nbytes", 0)
        return size if isinstance(size, int) else 0

    def _context_bytes(self, values: Sequence[Any]) -> int:
        [heads] = [value for value in values if isinstance(value, Heads)]
        [step] = [value for value in values if isinstance(value, StepInput)]
        tokens = int(np.sum(self._ops.to_host(step.context_len)))
        return 2 * tokens * heads.num_kv_heads * heads.head_dim * ITEM_BYTES[self._ops.dtype]


class _WatchedCache:
    """The KV cache of a pack that is watched."""

    def __init__(self, cache: KVCache, ops: WatchedOps) -> None:
        self._cache, self._ops = cache, ops

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        return partial(self._ops.watch, name, found) if name in _WATCHED else found


def _arrays(result: Any) -> list[Array]:
    results = result if isinstance(result, (list, tuple)) else [result]
    return [each for each in results if hasattr(each, "shape") and hasattr(each, "dtype")]


def _elements(value: Any) -> int:
    """Return the number of elements of weights in an argument."""
    if isinstance(value, (list, tuple)):
        return sum(map(_elements, value))
    shape = getattr(value, "shape", ())
    return math.prod(shape) if shape else 0


def shortest(ops: Ops, call: Callable[[], Any]) -> float:
    """Return the minimum seconds of a few calls, including synchronization."""
    best, begun = float("inf"), time.perf_counter()
    for _ in range(5):
        started = time.perf_counter()
        call()
        # Work is executed in order, so a copy of four bytes completes after all earlier work.
        ops.to_host(ops.from_host(np.zeros(1, np.int32)))
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() - begun > 0.5:
            break
    return best


def elsewhere(ops: Ops, arrays: Sequence[Array]) -> str:
    """Return a message about an array on another device than the pack's arrays; empty if there is none."""
    home = ops.from_host(np.zeros(1, np.float32))
    for array in arrays:
        if isinstance(array, np.ndarray) and not isinstance(home, np.ndarray):
            return "it returned a numpy array"
        if _place(array) != _place(home):
            return f"expected a result on {_place(home)}, got {_place(array)}"
    return ""


def _place(array: Array) -> str:
    for name in ("device", "place"):
        if (place := getattr(array, name, None)) is not None:
            return str(place)
    return ""
