"""Captures on the CPU: queued operations are recorded once and replayed without Python, like a CUDA graph.

A replay repeats the operations over the memory that they had, so decisions and values read by Python are
fixed. Rejected here is all that a device would reject, or would read wrongly later: reading values, memory and numbers
made on the host, shapes that depend on values, random numbers, copies concurrent with the steps, and memory that is
freed before a replay. Triton's kernels are not checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from fd_core.ops.contract import Array
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["CaptureRefused", "Recorded", "RecordedGroup", "record", "require_no_capture"]

_HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
_HOST_MEMORY = ("pin_memory", "tensor", "as_tensor", "new_tensor", "frombuffer")
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "scalar_tensor", "empty_strided")
_LEFT_AS_IT_IS = ("empty", "new_empty")
"""Operations whose result is uninitialised."""

_recordings = threading.local()


class CaptureRefused(AssertionError):
    """The captured work would fail on a device, or compute something else when it is replayed."""


def require_no_capture(what: str) -> None:
    """Refuse `what` while this thread captures."""
    if getattr(_recordings, "current", None) is not None:
        raise CaptureRefused(f"{what} in a capture")


class _Outside:
    """Memory allocated outside the capture: it is read in place, and must exist at each replay."""

    def __init__(self, tensor: Array) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Array:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise CaptureRefused(f"a replay reads {self._layout[1]} of {self._dtype} that was given back")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class _Noting(TorchDispatchMode):
    """Records memory that is read and memory that is allocated, and holds both, so that no address is reused."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch, which otherwise imports its compiler, seconds, to leave this class alone."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Any] = {}
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            key, storage = _storage(tensor)
            if key not in self.made:
                self.read[key] = storage
        result = func(*args, **(kwargs or {}))
        self.made |= {key: storage for key, storage in map(_storage, _tensors(result)) if key not in self.read}
        return result


class _Calls(TorchFunctionMode):
    """Rejects invalid calls before they become operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS:
            raise CaptureRefused(f"{name} looks at values on the host in a capture")
        if name in _HOST_MEMORY:
            raise CaptureRefused(f"{name} makes memory on the host in a capture")
        if name in _FACTORIES and "device" not in (kwargs or {}):
            raise CaptureRefused(f"{name} without a device makes memory on the host in a capture")
        if name == "to" and "cpu" in args:
            raise CaptureRefused("to looks at values on the host in a capture")
        return func(*args, **(kwargs or {}))


class Recorded(_Noting):
    """Captured operations."""

    def __init__(self, known: _Noting) -> None:
        super().__init__()
        self._known = {*known.read, *known.made}
        self._nodes: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(func, args)
        used = {_storage(tensor)[0] for tensor in _tensors((args, kwargs))}
        if any(key not in self.made and key not in self._known for key in used):
            raise CaptureRefused(f"{func} reads memory that was made for this call alone")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        fresh = [tensor for tensor in _tensors(result) if _storage(tensor)[0] not in used]
        if (fresh or func._schema.is_mutable) and func._schema.name.removeprefix("aten::") not in _LEFT_AS_IT_IS:
            self._note(func, args, kwargs or {}, used, fresh)
        return result

    def note(self, work: Callable[[], None]) -> None:
        """Record work other than operations of torch."""
        self._nodes.append(work)

    def replay(self) -> None:
        """Replay the captured operations."""
        for node in self._nodes:
            node()

    def _note(self, func: Any, args: Any, kwargs: Any, used: set[int], fresh: list[Array]) -> None:
        held = _changed((args, kwargs), torch.Tensor, self._held)

        def again() -> None:
            args, kwargs = _changed(held, _Outside, _Outside.tensor)
            found = _tensors(func(*args, **kwargs))
            renewed = [tensor for tensor in found if _storage(tensor)[0] not in used]
            for old, new in zip(fresh, renewed, strict=True):
                if old.shape != new.shape:
                    raise CaptureRefused(f"{func} made {list(old.shape)} when captured, and {list(new.shape)} later")
                old.copy_(new)

        self._nodes.append(again)

    def _held(self, tensor: Array) -> Any:
        return tensor if _storage(tensor)[0] in self.made else _Outside(tensor)


class RecordedGroup:
    """A process group whose collectives may be captured, as NCCL's may."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)

        def call(*arguments: Any) -> Any:
            recording = getattr(_recordings, "current", None)
            if recording is None:
                return method(*arguments)
            recording.note(lambda: method(*arguments).wait())
            with _disable_current_modes():  # otherwise gloo's own operations would be recorded, too
                work = method(*arguments)
                work.wait()
            return work

        return call


def record(compute: Callable[[], None]) -> Recorded:
    """Compute once, as before a capture, and once more while it is captured."""
    with _Noting() as known:
        compute()
    recorded = Recorded(known)
    _recordings.current = recorded
    try:
        with _Calls(), recorded:
            compute()
    finally:
        _recordings.current = None
    recorded.read.clear()  # which others own
    return recorded


def _refuse(func: Any, args: Any) -> None:
    name = str(func)
    if name.startswith("aten.lift"):
        raise CaptureRefused("numbers of the host become a tensor in a capture")
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise CaptureRefused(f"{name} draws random numbers in a capture")
    if torch.Tag.data_dependent_output in func.tags:
        raise CaptureRefused(f"{name} looks at values on the host in a capture")
    indexed_by_integers = name.startswith("aten.index.Tensor") and all(
        index is None or index.dtype != torch.bool for index in args[1]
    )
    if torch.Tag.dynamic_output_shape in func.tags and not indexed_by_integers:
        raise CaptureRefused(f"the shape of what {name} makes depends on values")


def _tensors(tree: Any) -> list[Array]:
    """Return the tensors of arguments or results; torch's functions for trees take longer than the operations."""
    found: list[Array] = []
    _changed(tree, torch.Tensor, found.append)
    return found


def _changed(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return arguments in which `change` is applied to each value of a kind."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple | list):
        return [_changed(each, kind, change) for each in tree]
    if isinstance(tree, dict):
        return {name: _changed(each, kind, change) for name, each in tree.items()}
    return tree


def _storage(tensor: Array) -> tuple[int, Any]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage
