"""ONNX Runtime on the host's CPUs: the models of the core, traced into graphs."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from fd_core.backends.contract import Availability
from fd_core.backends.cpu import ProcessorBackend
from fd_core.backends.probing import import_pack, missing
from fd_core.ops.contract import Ops


class OnnxBackend(ProcessorBackend):
    """ONNX Runtime on its CPU provider, float32."""

    name: ClassVar[str] = "cpu+onnx"
    kernels = "ONNX Runtime"
    auto_rank: ClassVar[int] = 5
    provider: ClassVar[tuple[str, str]] = ("CPUExecutionProvider", "cpu")
    """ONNX Runtime's names of the execution provider and of the device whose memory it uses. A subclass for another
    device overrides `device_assignments`."""
    hint: ClassVar[str] = "pip install 'fd-core[onnx]'; where onnxruntime-gpu is installed, pip install onnx"
    """Installation hint for the backend's dependencies."""
    limits = MappingProxyType({"bfloat16": "ONNX Runtime's standard operators have float32 only on a CPU"})

    @classmethod
    def probe(cls) -> Availability:
        """Return available if onnx and any build of ONNX Runtime are installed; imports neither."""
        if absent := missing("onnx", "onnxruntime"):
            return Availability(False, f"{' and '.join(absent)} not installed; {cls.hint}")
        return Availability(True, "ONNX Runtime is installed")

    @classmethod
    def import_framework(cls) -> None:
        import_pack(cls.name, "fd_core.ops.onnx_graph.pack", needs="onnx and ONNX Runtime", hint=cls.hint)

    def make_ops(self) -> Ops:
        self.requested_dtype("float32")
        self.import_framework()
        from fd_core.ops.onnx_graph.pack import OnnxOps
        from fd_core.ops.onnx_graph.session import Provider

        self.dtype_reason = self.limits["bfloat16"]
        return OnnxOps(Provider(*self.provider, self.threads))
