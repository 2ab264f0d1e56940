"""All calls of the plugin into torch.cuda, which tests replace with the CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from fd_core.ops.contract import Array, HostCopies
from fd_core.ops.parallel import Parallel, RankExchangeError, RankGroup


class CopyLane:
    """Stream for copies, with its own memory; waiting for it releases the GIL."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # such as the zeros of a cache
        self._done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        """Allocate pinned host memory."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Allocate device memory of this stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(*shape, dtype=dtype, device=self._device)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Return a context that queues work on this stream."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._done.record(self._stream)

    def wait(self) -> None:
        """Wait for the queued work, if any."""
        self._done.synchronize()


Replay = Callable[[], None]
"""Replays a captured computation on the memory of its capture."""


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that the device is out of memory.

    torch has an exception class for its allocations. Failures of the driver for graphs, and of Triton for kernels, only
    have a message.
    """
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def sum_in_float32() -> None:
    """Make cuBLAS multiply with full precision and accumulate in float32, overriding torch and the environment.

    By default it may accumulate partial sums in 16 bits: they are rounded again, and float16 overflows. Where
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is set, as in some images, it would multiply 11 of the 24 bits of a float32.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class QueuedCopies(HostCopies):
    """Copies followed by a recorded event."""

    def __init__(self, hosts: Sequence[Array], done: Callable[[], bool], wait: Callable[[], None]) -> None:
        super().__init__([host.numpy() for host in hosts])
        self._done = done
        self._wait = wait

    def ready(self) -> bool:
        return self._done()

    def wait(self) -> list[npt.NDArray[Any]]:
        self._wait()
        return super().wait()


class Cuda:
    """One CUDA device. Constructing it initialises CUDA."""

    ranks: RankGroup | None = None
    """Group of ranks, if collectives run on the device."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        sum_in_float32()
        self._captures = torch.cuda.Stream(self.device)
        self._pool: Any = None
        self._connection: Any = None

    @property
    def name(self) -> str:
        """Driver's name of the device."""
        name: str = torch.cuda.get_device_name(self.device)
        return name

    @property
    def has_bfloat16(self) -> bool:
        """True if the device has bfloat16 tensor cores: Ampere (compute capability 8.0) and later."""
        return torch.cuda.get_device_capability(self.device) >= (8, 0)

    @property
    def has_float16(self) -> bool:
        """True if the device computes in float16: compute capability 5.3 and later, including Volta and Turing."""
        return torch.cuda.get_device_capability(self.device) >= (5, 3)

    @property
    def multiplies_fp8(self) -> bool:
        """True if the device has FP8 tensor cores: Ada (compute capability 8.9) and later."""
        return torch.cuda.get_device_capability(self.device) >= (8, 9)

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors of the device."""
        count: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        return count

    @property
    def shared_memory_per_block(self) -> int:
        """Maximum shared memory of a block in bytes (opt-in)."""
        from triton.runtime import driver  # in torch since release 2.7

        count: int = driver.active.utils.get_device_properties(self.device.index)["max_shared_mem"]
        return count

    def pinned(self, count: int) -> Array:
        """Return pinned host memory uint8[count]."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Array) -> Array:
        """Queue a copy of a pinned tensor, whose memory torch holds until the copy is complete."""
        return host.to(self.device, non_blocking=True)

    def download(self, arrays: Sequence[Array]) -> HostCopies:
        """Queue copies to the host on the current stream."""
        hosts = [torch.empty(array.shape, dtype=array.dtype, pin_memory=True) for array in arrays]
        for host, array in zip(hosts, arrays, strict=True):
            host.copy_(array, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return QueuedCopies(hosts, done.query, lambda: self.wait_for(done))

    def mark(self) -> Callable[[], None]:
        """Record an event on the current stream; return a function that waits for it."""
        here = torch.cuda.Event()
        here.record(torch.cuda.current_stream(self.device))
        return lambda: self.wait_for(here)

    def wait(self) -> None:
        """Wait for the current stream, as `wait_for` does."""
        self.wait_for(torch.cuda.current_stream(self.device))

    def wait_for(self, work: Any) -> None:
        """Wait for a stream or an event. Raises `RankExchangeError` if another rank blocks it, or is lost."""
        if self.ranks is None:
            work.synchronize()
            return
        try:
            self.ranks.wait_until(work.query)
        except RankExchangeError:
            _abort(self._connection)  # or the device would wait forever
            raise

    def connect(self, store: Any, parallel: Parallel, seconds: float) -> Any:
        """Return the process group of the ranks' devices, once all ranks have joined.

        Its collectives may be captured.
        """
        # Ranks monitor each other; torch's watchdog would abort the process without a message.
        os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        self._connection = ProcessGroupNCCL(store, parallel.rank, parallel.size, options)
        return self._connection

    def copy_lane(self) -> CopyLane:
        """Return another stream for copies in parallel with steps, ordered after the work queued so far."""
        return CopyLane(self.device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context for captures, in which no other work is queued and garbage collection is disabled.

        Garbage may be device memory or a graph, which must not be freed during a capture.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()

    def capture(self, compute: Callable[[], None]) -> Replay:
        """Capture a computation that writes its result to existing memory; return its replay.

        All graphs are captured on one stream, for which libraries set up their workspaces once, and share one pool of
        memory for intermediate results.
        """
        compute()  # outside the capture, because kernels are compiled and libraries set up on their first call
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = self._captures
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # Other threads may copy KV meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # the first error matters, not that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph.replay

    def release_unused(self) -> None:
        """Free unused memory to the driver, including that of graphs; called when no graph is left."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self._pool = None  # torch drops a pool with its last graph

    def free_on_driver(self) -> int:
        """Return the driver's free bytes, without torch's cache."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def free_bytes(self) -> int:
        """Return unused bytes: free in the driver, and in torch's cache."""
        unused: int = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return self.free_on_driver() + unused


def _abort(connection: Any) -> None:
    """Abort the collectives of a process group; torch 2.6 has another name for it."""
    (connection.abort if hasattr(connection, "abort") else connection._abort)()


ALIGNMENT: Final = 16
"""Alignment of arrays in bytes, for kernels with 16-byte loads."""


def upload_packed(cuda: Cuda, arrays: Sequence[npt.NDArray[Any]]) -> list[Array]:
    """Queue one copy of all arrays; returns tensors that share its memory. uint64 becomes int64 with the same bits.

    The memory is free once none of the tensors is left.
    """
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    pinned = cuda.pinned(max(end, ALIGNMENT))
    packed = pinned.numpy()
    for begin, array in zip(begins, arrays, strict=True):
        if array.size:
            packed[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    device = cuda.upload(pinned)
    whole = {dtype: device.view(_torch_dtype(dtype)) for dtype in {array.dtype for array in arrays}}
    return [
        whole[array.dtype].as_strided(array.shape, _strides(array.shape), begin // array.itemsize)
        for begin, array in zip(begins, arrays, strict=True)
    ]


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name of a dtype; int64 for uint64, which torch barely supports."""
    return torch.int64 if dtype == np.uint64 else torch.from_numpy(np.empty(0, dtype)).dtype


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order."""
    if len(shape) == 1:
        return (1,)
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
