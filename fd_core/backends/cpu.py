"""CPU backends: native kernels where a compiler is available, else torch, and numpy, the reference."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from fd_core.backends.contract import Availability, Backend, LoadProgress, Model
from fd_core.backends.device_assignment import DeviceAssignment, assignments_on_cores
from fd_core.backends.memory import available_memory
from fd_core.backends.probing import import_pack, missing
from fd_core.ops.contract import Ops

_log = logging.getLogger(__name__)


class ProcessorBackend(Backend):
    """Backend on the CPUs of this machine, which its engines divide."""

    default_pipeline_depth: ClassVar[int] = 1
    kernels: str
    """Description of the processor, for `describe`."""

    def free_memory(self) -> int:
        """Return a quarter of the memory that is available without swapping, divided among the ranks."""
        return available_memory() // (4 * self.config.num_ranks)

    def describe(self) -> str:
        return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}, {self.kernels}"

    @classmethod
    def device_assignments(cls, count: int, ranks: int = 1) -> Sequence[DeviceAssignment]:
        return assignments_on_cores(count, ranks)


class CpuBackend(ProcessorBackend):
    """The host's CPUs; by default bfloat16 with native kernels, and float32 by torch without them."""

    name: ClassVar[str] = "cpu"
    updates_weights: ClassVar[bool] = True
    kernels = "torch"
    default_batched_tokens: ClassVar[int] = 512
    auto_rank: ClassVar[int] = 10

    @classmethod
    def probe(cls) -> Availability:
        """Return available if native kernels can be had or torch is installed; does not import it."""
        if not missing("torch"):
            return Availability(True, "torch is installed")
        with contextlib.suppress(ImportError):  # such as fcntl outside Unix
            from fd_core.ops.native import build

            if build.obtainable():
                return Availability(True, "native kernels can be compiled")
        return Availability(
            False, "neither torch nor a C++ compiler is installed; pip install 'fd-core[cpu]', or install g++"
        )

    @classmethod
    def import_framework(cls) -> None:
        importlib.import_module("fd_core.ops.native.pack")

    def make_ops(self) -> Ops:
        """Return the native pack if it can be built and the dtype allows it, else the eager torch pack."""
        # The native pack accumulates in float32, so it takes bfloat16. Eager torch rounds every intermediate result to
        # the dtype, which can change the output, so it uses float32.
        wanted = self.requested_dtype("float32", "bfloat16")
        if self.config.native_kernels:
            from fd_core.ops.native import load_native_ops

            native = load_native_ops(wanted, self.threads)
            if native is not None:
                self.kernels = native.describe()
                self.emulated = "emulated" in native.instruction_set
                self.dtype_reason = native.dtype_reason
                return native
        import_pack("cpu", "fd_core.ops.torch.ops", needs="torch", hint="pip install 'fd-core[cpu]'")
        from fd_core.ops.torch.ops import TorchInt8Ops, TorchOps, multiplies_bytes_exactly

        self._limit_torch()
        self.dtype_reason = "torch's own kernels round every intermediate result, which bfloat16 would show"
        if multiplies_bytes_exactly():
            self.kernels = "torch eager, int8 weights by oneDNN"
            return TorchInt8Ops(wanted or "float32")
        self.kernels = "torch eager"
        return TorchOps(wanted or "float32")

    def load_model(self, path: Path | None, ops: Ops, progress: LoadProgress) -> Model:
        """Load a checkpoint as every backend does; `transformers` computes its models with torch."""
        model = super().load_model(path, ops, progress)
        if not getattr(model, "compiles", True):
            self._limit_torch()
        return model

    def _limit_torch(self) -> None:
        import torch

        torch.set_num_threads(self.threads)


class ReferenceBackend(ProcessorBackend):
    """numpy, float32."""

    name: ClassVar[str] = "reference"
    updates_weights: ClassVar[bool] = True
    auto_rank: ClassVar[int] = 0
    limits = MappingProxyType({"bfloat16": "the oracle computes in float32"})

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "numpy is always there; slow")

    def make_ops(self) -> Ops:
        from fd_core.ops.numpy.ops import NumpyOps

        self.requested_dtype("float32")
        if self.config.backend == "auto":
            _log.warning("the slow numpy backend computes, because %s", CpuBackend.probe().reason)
        self.dtype_reason = self.limits["bfloat16"]
        return NumpyOps()

    def free_memory(self) -> int:
        return available_memory() // 2

    def describe(self) -> str:
        return "CPU, numpy"
