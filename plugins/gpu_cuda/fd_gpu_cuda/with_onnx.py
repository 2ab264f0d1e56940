"""The backend `gpu_cuda+onnx`: ONNX Runtime on an NVIDIA GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Final

from fd_core.backends.contract import Availability
from fd_core.backends.onnx import OnnxBackend
from fd_core.backends.places import EnginePlace

from fd_gpu_cuda.probe import cuda_places, device_problem, missing

PROVIDER: Final = "CUDAExecutionProvider"
_HINT: Final = "pip install 'fd-gpu-cuda[onnx]' without onnxruntime beside it"
_MARK: Final = "fd_core onnx provider:"
# The runtime lists CUDA even where there is none, and silently falls back to the processor: only a session knows.
_QUESTION: Final = f"""
import json
import onnxruntime
from onnx import TensorProto, helper
value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", value[:1], value[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[{PROVIDER!r}])
print({_MARK!r}, json.dumps([onnxruntime.__version__, session.get_providers()[0]]))
"""
_PATIENCE: Final = 60.0


@cache
def provider_problem() -> tuple[str, str]:
    """Ask in a process of its own which provider a session really gets; returns version, and "" if it is CUDA's."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", _QUESTION]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return "", f"ONNX Runtime did not start a session within {_PATIENCE:.0f} s"
    for line in answer.stdout.splitlines():
        if line.startswith(_MARK):
            version, taken = json.loads(line.removeprefix(_MARK))
            problem = "" if taken == PROVIDER else f"ONNX Runtime {version} falls back to {taken}; {_HINT}"
            return version, problem
    errors = answer.stderr.strip().splitlines()
    return "", f"ONNX Runtime cannot start a session: {errors[-1] if errors else f'exit status {answer.returncode}'}"


class CudaOnnxBackend(OnnxBackend):
    """The core's traced models on CUDA, float32."""

    name: ClassVar[str] = "gpu_cuda+onnx"
    auto_rank: ClassVar[int] = -1
    """Never taken by itself while its KV travels between host and device in each step."""
    provider: ClassVar[tuple[str, str]] = (PROVIDER, "cuda")
    hint: ClassVar[str] = _HINT

    @classmethod
    def probe(cls) -> Availability:
        """Available where a session of ONNX Runtime gets CUDA."""
        _, problem = device_problem()
        if problem:
            return Availability(False, problem)
        if absent := missing("onnx", "onnxruntime"):
            return Availability(False, f"{' and '.join(absent)} not installed; {_HINT}")
        version, problem = provider_problem()
        return Availability(False, problem) if problem else Availability(True, f"ONNX Runtime {version} on CUDA")

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Give each engine a device for each rank."""
        return cuda_places(count, ranks)

    def describe(self) -> str:
        """Name the provider, and what its pack leaves to the host."""
        return "CUDA device, ONNX Runtime; KV in host memory, copied each step"
