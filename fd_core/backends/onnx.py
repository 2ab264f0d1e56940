"""ONNX Runtime on the host's processors: the models of the core, traced into graphs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar

from fd_core.backends.contract import Availability, Backend
from fd_core.backends.memory import available_memory
from fd_core.backends.places import EnginePlace, places_on_cores
from fd_core.errors import PluginError
from fd_core.ops.contract import Ops


class OnnxBackend(Backend):
    """ONNX Runtime on its CPU provider, float32."""

    name: ClassVar[str] = "cpu+onnx"
    default_pipeline_depth: ClassVar[int] = 1
    auto_rank: ClassVar[int] = 5
    provider: ClassVar[tuple[str, str]] = ("CPUExecutionProvider", "cpu")
    """ONNX Runtime's names of the execution provider and of the device whose memory it computes on."""
    hint: ClassVar[str] = "pip install 'fd-core[onnx]'; where onnxruntime-gpu is installed, pip install onnx"
    """How to install what the backend needs."""
    limits = MappingProxyType({"bfloat16": "ONNX Runtime's standard operators have float32 only on a CPU"})

    @classmethod
    def probe(cls) -> Availability:
        """Available where onnx and any build of ONNX Runtime are installed; neither is imported for the answer."""
        missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            return Availability(False, f"{' and '.join(missing)} not installed; {cls.hint}")
        return Availability(True, "ONNX Runtime is installed")

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Divide the processors; a provider for another device says itself how that is divided."""
        return places_on_cores(count, ranks) if cls.provider[1] == "cpu" else super().places(count, ranks)

    @classmethod
    def import_framework(cls) -> None:
        """Import onnx and ONNX Runtime."""
        try:
            importlib.import_module("fd_core.ops.onnx_graph.pack")
        except ImportError as error:
            raise PluginError(
                f"the {cls.name} backend needs onnx and ONNX Runtime: {error}", field="--backend", hint=cls.hint
            ) from error

    def make_ops(self) -> Ops:
        """The onnx pack; refuses any dtype but float32."""
        self.dtype_asked_for("float32")
        self.import_framework()
        from fd_core.ops.onnx_graph.pack import OnnxOps
        from fd_core.ops.onnx_graph.session import Provider

        self.dtype_reason = self.limits["bfloat16"]
        return OnnxOps(Provider(*self.provider, self.threads))

    def free_memory(self) -> int:
        """Return a quarter of the memory that the system can give without swapping."""
        return available_memory() // 4

    def describe(self) -> str:
        """Name the processor count and the pack."""
        return f"CPU, {self.threads} threads, ONNX Runtime"
