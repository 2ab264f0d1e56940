"""The backends `gpu_cuda+paddle` and `gpu_cuda+onnx`: the core's packs for other frameworks on an NVIDIA GPU."""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Final

from fd_core.backends import paddle
from fd_core.backends.contract import Availability
from fd_core.backends.onnx import OnnxBackend
from fd_core.backends.paddle import PaddleBackend
from fd_core.backends.probing import ask_apart

from fd_gpu_cuda.probe import OnCuda, device_problem

PROVIDER: Final = "CUDAExecutionProvider"
_ONNX_HINT: Final = "pip install 'fd-gpu-cuda[onnx]' without onnxruntime beside it"
# The runtime lists CUDA even where there is none, and silently falls back to the processor: only a session knows.
_QUESTION: Final = f"""
import onnxruntime
from onnx import TensorProto, helper
value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", value[:1], value[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[{PROVIDER!r}])
answer = [onnxruntime.__version__, session.get_providers()[0]]
"""


class CudaPaddleBackend(OnCuda, PaddleBackend):
    """Paddle on one CUDA device, kernel by kernel."""

    name: ClassVar[str] = "gpu_cuda+paddle"
    device: ClassVar[str] = "gpu"
    title: ClassVar[str] = "CUDA device"
    paddle_hint: ClassVar[str] = (
        "pip install 'fd-core[paddle-gpu]' with the index of Paddle's own builds for your CUDA, "
        "which www.paddlepaddle.org.cn/en/install/quick names"
    )
    longest_sort: ClassVar[int | None] = None
    auto_rank: ClassVar[int] = 50

    @classmethod
    def probe(cls) -> Availability:
        """Available where a current Paddle for CUDA sees a device; it is asked only if the driver has one."""
        _, problem = device_problem()
        if problem:
            return Availability(False, problem)
        if paddle.paddle_installed():
            found = paddle.paddle_devices()
            # Builds from source call themselves 0.0.0.
            if (0, 0) < tuple(int(part) for part in found.version.split(".")[:2] if part.isdigit()) < (3, 3):
                return Availability(False, f"Paddle {found.version} is too old; {cls.paddle_hint}")
            if not found.built_for_cuda:
                return Availability(False, f"Paddle {found.version} is built for processors only; {cls.paddle_hint}")
        return super().probe()


@cache
def provider_problem() -> tuple[str, str]:
    """Ask in a process of its own which provider a session really gets; returns version, and "" if it is CUDA's."""
    slow = "ONNX Runtime did not start a session within {seconds}"
    answer, problem = ask_apart(_QUESTION, slow=slow, failed="ONNX Runtime cannot start a session")
    if problem:
        return "", problem
    version, taken = answer
    return version, "" if taken == PROVIDER else f"ONNX Runtime {version} falls back to {taken}; {_ONNX_HINT}"


class CudaOnnxBackend(OnCuda, OnnxBackend):
    """The core's traced models on CUDA, float32."""

    name: ClassVar[str] = "gpu_cuda+onnx"
    auto_rank: ClassVar[int] = -1
    """Never taken by itself while its KV travels between host and device in each step."""
    provider: ClassVar[tuple[str, str]] = (PROVIDER, "cuda")
    hint: ClassVar[str] = _ONNX_HINT

    @classmethod
    def probe(cls) -> Availability:
        """Available where a session of ONNX Runtime gets CUDA."""
        _, problem = device_problem()
        if problem:
            return Availability(False, problem)
        if not (installed := super().probe()).available:
            return installed
        version, problem = provider_problem()
        return Availability(False, problem) if problem else Availability(True, f"ONNX Runtime {version} on CUDA")

    def describe(self) -> str:
        """Name the provider, and what its pack leaves to the host."""
        return "CUDA device, ONNX Runtime; KV in host memory, copied each step"
