"""The null model on an asynchronous pack: nothing is computed before the host waits for it.

Reading a device array before that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import numpy as np

from fd_core.backends.null import NullCache, NullModel
from fd_core.ops.contract import Array, Forward, HostCopies, KVCache, KVShape, StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.types import IntArray

__all__ = ["NullPack", "QueuedModel", "QueuedPack", "QueuedPostprocess"]


class NullPack(NumpyOps):
    """Numpy pack with the cache of the null model."""

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        return NullCache(shape, num_blocks)


class Later:
    """Array that the device may not have computed yet."""

    def __init__(self, pack: QueuedPack) -> None:
        self._pack = pack
        self.value: Any = None

    def reshape(self, *shape: int) -> Later:
        return self._pack.queue(lambda array: array.reshape(*shape), self)

    def __getitem__(self, key: Any) -> Later:
        return self._pack.queue(lambda array: array[key], self)

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("the host reads an array that is still on the device")

    __array__ = __len__ = __iter__ = __bool__ = __int__ = _refuse


class _Copies(HostCopies):
    def __init__(self, pack: QueuedPack, arrays: list[Later]) -> None:
        self._pack, self._later, self._end = pack, arrays, pack.queued

    def ready(self) -> bool:
        """Each poll lets the device compute some more."""
        self._pack.compute(min(self._pack.computed + 7, self._end))
        return self._pack.computed >= self._end

    def wait(self) -> list[Any]:
        self._pack.compute(self._end)
        return [each.value for each in self._later]


class QueuedPack(NullPack):
    """Queues the runner's calls in order, and computes them with the numpy pack."""

    on_host = False
    queues = True

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self.computed = 0

    @property
    def queued(self) -> int:
        return len(self._calls)

    def compute(self, end: int) -> None:
        """Compute the first `end` calls."""
        while self.computed < end:
            self._calls[self.computed]()
            self.computed += 1

    def queue(self, function: Callable[..., Any], *arguments: Any) -> Later:
        return self._queue(1, function, *arguments)[0]

    def _queue(self, results: int, function: Callable[..., Any], *arguments: Any) -> tuple[Later, ...]:
        found = tuple(Later(self) for _ in range(results))

        def call() -> None:
            values = function(*map(_known, arguments))
            for each, value in zip(found, values if results > 1 else (values,), strict=True):
                each.value = value

        self._calls.append(call)
        return found

    def from_host(self, array: Any) -> Array:
        return self.upload([array])[0]

    def upload(self, arrays: Sequence[Any]) -> list[Array]:
        copies = [each if isinstance(each, Later) else np.array(each) for each in arrays]
        return [self.queue(lambda value: value, each) for each in copies]

    def to_host(self, array: Any) -> Any:
        return self.fetch([array])[0]

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        return _Copies(self, [self.queue(np.array, each) for each in arrays])

    def gather_rows(self, x: Any, rows: Any) -> Any:
        return self.queue(super().gather_rows, x, rows)

    def write_rows(self, x: Any, rows: Any, values: Any) -> Any:
        return self.queue(super().write_rows, x, rows, values)

    def add_at(self, x: Any, rows: Any, ids: Any, values: Any) -> Any:
        return self.queue(super().add_at, x, rows, ids, values)

    def mask_logits(self, logits: Any, rows: Any, bits: Any) -> Any:
        return self.queue(super().mask_logits, logits, rows, bits)

    def penalize(self, logits: Any, penalties: Any) -> Any:
        return self.queue(super().penalize, logits, penalties)

    def sample(self, logits: Any, rows: Any) -> Any:
        return self._queue(2, super().sample, logits, rows)

    def logprobs(self, logits: Any, tokens: Any, top_n: int) -> Any:
        return self._queue(3, super().logprobs, logits, tokens, top_n)

    def ranks(self, logits: Any, tokens: Any) -> Any:
        return self.queue(super().ranks, logits, tokens)

    def verify(self, sampled: Any, drafts: Any, num_drafts: Any) -> Any:
        return self.queue(super().verify, sampled, drafts, num_drafts)

    def compile(self, forward: Forward) -> Forward:
        return lambda step, cache: self.queue(lambda known: forward(known, cache), step)

    compile_states = compile


class QueuedModel(NullModel):
    """Some texts have abnormal logits; with `pack`, states are computed asynchronously."""

    def __init__(self, vocab_size: int, pack: QueuedPack | None = None, strange: int = 0) -> None:
        super().__init__(vocab_size)
        self._pack, self._strange = pack, strange

    def head(self, states: Any) -> Any:
        if isinstance(states, Later):
            assert self._pack is not None
            return self._pack.queue(self.head, states)
        logits = super().head(states)
        if self._strange:
            logits[states[:, 0] % np.uint64(self._strange) == 0, 3] = np.nan
        return logits

    def states(self, step: StepInput, cache: KVCache) -> Any:
        with np.errstate(over="ignore"):
            return super().states(step, cache)


class QueuedPostprocess(NumpyPostprocess):
    """Numpy postprocessor, queued where the pack queues."""

    def token_matrix(self, sampled: Any, accepted: Any, slots: Any, revoked: Any) -> IntArray:
        if not isinstance(self.ops, QueuedPack):
            return super().token_matrix(sampled, accepted, slots, revoked)
        matrix: IntArray = self.ops.queue(super().token_matrix, sampled, accepted, slots, revoked)  # type: ignore[assignment]
        return matrix


def _known(value: Any) -> Any:
    """Return a value with computed arrays in place of pending ones."""
    if isinstance(value, Later):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _known(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, tuple):
        return tuple(map(_known, value))
    return value
