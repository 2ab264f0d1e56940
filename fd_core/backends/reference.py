"""The reference backend: numpy in float32, slow and plain, the oracle for every other one."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from fd_core.backends.contract import Availability
from fd_core.backends.cpu import ProcessorBackend
from fd_core.backends.memory import available_memory
from fd_core.ops.contract import Ops


class ReferenceBackend(ProcessorBackend):
    """numpy, float32."""

    name: ClassVar[str] = "reference"
    auto_rank: ClassVar[int] = 0
    limits = MappingProxyType({"bfloat16": "the oracle computes in float32"})

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "numpy is always there; slow")

    def make_ops(self) -> Ops:
        from fd_core.ops.numpy.ops import NumpyOps

        self.dtype_asked_for("float32")
        self.dtype_reason = self.limits["bfloat16"]
        return NumpyOps()

    def free_memory(self) -> int:
        return available_memory() // 2

    def describe(self) -> str:
        return "CPU, numpy"
