"""The reference backend: numpy in float32, slow and plain, the oracle for every other one."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar

from fd_core.backends.contract import Availability, Backend
from fd_core.backends.memory import available_memory
from fd_core.backends.places import EnginePlace, places_on_cores
from fd_core.ops.contract import Ops


class ReferenceBackend(Backend):
    """numpy, float32."""

    name: ClassVar[str] = "reference"
    default_pipeline_depth: ClassVar[int] = 1
    auto_rank: ClassVar[int] = 0
    limits = MappingProxyType({"bfloat16": "the oracle computes in float32"})

    @classmethod
    def probe(cls) -> Availability:
        """Available wherever the core is."""
        return Availability(True, "numpy is always there; slow")

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Divide the processors."""
        return places_on_cores(count, ranks)

    def make_ops(self) -> Ops:
        """The numpy pack; refuses any dtype but float32."""
        from fd_core.ops.numpy.ops import NumpyOps

        self.dtype_asked_for("float32")
        self.dtype_reason = self.limits["bfloat16"]
        return NumpyOps()

    def free_memory(self) -> int:
        """Return half of the memory that the system can give without swapping."""
        return available_memory() // 2

    def describe(self) -> str:
        """Name the pack."""
        return "CPU, numpy"
