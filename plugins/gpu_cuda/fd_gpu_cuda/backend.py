"""Backends and postprocessor of NVIDIA GPUs; devices are probed without initialising CUDA."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fd_core.backends import paddle
from fd_core.backends.contract import Availability, Backend, LoadProgress, Model
from fd_core.backends.device_assignment import DeviceAssignment, assignments_on_devices, rank_devices
from fd_core.backends.onnx import OnnxBackend
from fd_core.backends.paddle import PaddleBackend
from fd_core.backends.probing import import_pack, missing, run_isolated
from fd_core.config import EngineConfig, Limits, requested_sizes
from fd_core.errors import PluginError
from fd_core.ops.contract import Array, Ops
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.sampling.prompt_scores import SCORED_CELLS

if TYPE_CHECKING:
    from fd_gpu_cuda.device import Cuda
    from fd_gpu_cuda.ops import CudaOps
    from fd_gpu_cuda.providers import Providers


_NVML = "libnvidia-ml.so.1"
_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|None)", re.MULTILINE)
_VERSION_LINE = re.compile(r"^__version__\b[^=]*=\s*'([^']*)'", re.MULTILINE)


def cuda_of_torch() -> tuple[str, str | None]:
    """Return torch's version and its CUDA version, None for a build without CUDA; imports nothing.

    torch must be installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", None
    version, cuda = _VERSION_LINE.search(text), _CUDA_LINE.search(text)
    return version[1] if version else "", cuda[1] if cuda else None


def flash_infer() -> str:
    """Return a note on FlashInfer, which, if selected, computes attention of steps with prompts; imports nothing."""
    if missing("flashinfer"):
        return "FlashInfer not installed"
    try:
        return f"FlashInfer {importlib.metadata.version('flashinfer-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "FlashInfer of an unknown version"


def compiler_problem() -> str:
    """Return what Triton lacks to build the launchers of its kernels, and the remedy; "" if nothing."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does on Debian
    headers = Path(sysconfig.get_paths(scheme)["include"])
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        problem = f"the C compiler CC={named!r} is not found; unset CC or set it to one command"
    elif named is None and not (shutil.which("gcc") or shutil.which("clang")):
        problem = "no C compiler; install gcc, or set CC"
    elif not (headers / "Python.h").exists():
        problem = f"no Python.h in {headers}; install the headers, such as python3.{sys.version_info.minor}-dev"
    else:
        return ""
    return f"Triton cannot build kernels, and torch computes slowly in their place: {problem}"


def device_problem() -> tuple[int, str]:
    """Return the number of devices of the driver, and the reason if this process can use none, else ""."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0, f"no NVIDIA driver is installed: {_NVML} is not found"
    # NVML talks to the driver and creates nothing on a device.
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    status = nvml.nvmlInit_v2()
    if status:
        return 0, f"the NVIDIA driver failed: {_text(nvml, status)}"
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    if status:
        return 0, f"the NVIDIA driver cannot list devices: {_text(nvml, status)}"
    return count.value, "" if count.value else "the NVIDIA driver found no device"


class OnCuda(Backend):
    """A backend on the CUDA devices that the driver has."""

    @classmethod
    def device_assignments(cls, count: int, ranks: int = 1) -> Sequence[DeviceAssignment]:
        """Assign each engine one device per rank."""
        return assignments_on_devices("CUDA_VISIBLE_DEVICES", device_problem()[0], count, ranks)


def _text(nvml: ctypes.CDLL, status: int) -> str:
    text: bytes = nvml.nvmlErrorString(status)
    return text.decode(errors="replace")


GRAPH_BYTES = 256 * 2**20
"""Calculated for captured graphs, workspaces of libraries and compiled kernels."""
NCCL_BYTES = 512 * 2**20
"""Calculated for the buffers of NCCL where several ranks compute one model."""
_BYTES_PER_HIDDEN = 96
"""Activation bytes of a token per element of the hidden state: the residual, a norm in float32, queries, keys and
values, and gate and up, which are about five times as wide."""
_BYTES_PER_LOGIT = 48
"""Bytes per logit: float32, plus weights and running sums in float64 and the order as int64 for filtered sampling."""


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Bytes reserved from KV."""

    steps: int
    """For the largest step, and the libraries and graphs that existed at the measurement."""
    graphs: int
    """For graphs not captured at the measurement, extrapolated from one of them."""
    how: str
    """`measured` or `calculated`."""

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.steps + self.graphs

    def __str__(self) -> str:
        return f"{self.total / 2**20:,.0f} MiB {self.how} for steps and graphs"


def measured(cuda: Cuda, ops: CudaOps, steps: AbstractContextManager[None]) -> ReservedMemory:
    """Measure the driver memory that a rehearsal uses, including its small KV cache.

    Memory that the process retains afterwards, such as kernels and connections, is unavailable for KV anyway.
    """
    cuda.release_unused()
    before = cuda.free_on_driver()
    with ops.rehearsing(), steps:
        taken = before - cuda.free_on_driver()
        graphs = ops.graph_bytes_to_come
    cuda.release_unused()
    kept = before - cuda.free_on_driver()
    return ReservedMemory(max(taken - kept, 0), graphs, "measured")


def calculated(config: EngineConfig, model: Model | None, default_sizes: Mapping[str, int]) -> ReservedMemory:
    """Estimate it from sizes, without the device."""
    graphs = GRAPH_BYTES + (NCCL_BYTES if config.tensor_parallel_size > 1 else 0)
    if model is None:
        return ReservedMemory(0, graphs, "calculated")
    width = 1 + (0 if config.speculative is None else config.speculative.num_speculative_tokens)
    sizes = requested_sizes(config, **default_sizes)
    budget = sizes["max_num_batched_tokens"]
    table: Any = getattr(getattr(model, "decoder", None), "embedding", None)
    steps = step_bytes(
        tokens=budget,
        # In addition to the sampled rows, logits of prompts with log-probabilities.
        rows=min(sizes["max_num_seqs"] * width, budget) + max(SCORED_CELLS // model.vocab_size, 1),
        hidden=model.vocab_size // 8 if table is None else int(table.shape[1]),
        vocabulary=model.vocab_size,
    )
    return ReservedMemory(steps, graphs, "calculated")


def step_bytes(*, tokens: int, rows: int, hidden: int, vocabulary: int) -> int:
    """Return the activation bytes of the largest step: `tokens` computed, logits of `rows` of them."""
    return tokens * hidden * _BYTES_PER_HIDDEN + rows * vocabulary * _BYTES_PER_LOGIT


logger = logging.getLogger(__name__)
_HINT = "pip install 'fd-gpu-cuda[torch]' from an index that has torch built for CUDA, such as the default one"


class CudaBackend(OnCuda):
    """torch on a CUDA device per rank; in bfloat16 if the device supports it."""

    name: ClassVar[str] = "gpu_cuda"
    auto_rank: ClassVar[int] = 100
    default_num_seqs: ClassVar[int] = 256
    default_batched_tokens: ClassVar[int] = 8192
    attention_backends: ClassVar[tuple[str, ...]] = ("triton", "flashinfer", "torch")

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._cuda: Cuda | None = None
        self._model: Model | None = None
        self._ops: Ops | None = None
        self._providers: Providers | None = None
        self._kept: ReservedMemory | None = None

    @classmethod
    def probe(cls) -> Availability:
        """Return available if the driver has a device and torch is built for CUDA; imports neither torch nor Triton."""
        count, problem = device_problem()
        if problem:  # first, so that a missing device is reported before missing packages
            return Availability(False, problem)
        if absent := missing("torch", "triton"):
            return Availability(False, f"{' and '.join(absent)} not installed; {_HINT}")
        version, cuda = cuda_of_torch()
        if cuda is None:
            return Availability(False, f"torch {version} is built without CUDA; {_HINT}")
        found = f"torch {version} for CUDA {cuda}; the driver has {count} device(s); {flash_infer()}"
        return Availability(True, "; ".join(filter(None, [found, compiler_problem()])))

    @classmethod
    def rank_environments(cls, size: int) -> Sequence[Mapping[str, str]]:
        return rank_devices("CUDA_VISIBLE_DEVICES", device_problem()[0], size)

    @classmethod
    def import_framework(cls) -> None:
        import_pack(cls.name, "fd_gpu_cuda.ops", needs="torch", hint=_HINT)

    def make_ops(self) -> Ops:
        """Create the pack on the first visible device; initialises CUDA."""
        wanted = self.requested_dtype("float32", "bfloat16", "float16")
        self.import_framework()
        from fd_gpu_cuda.compilations import Compilations, use_cache_folder
        from fd_gpu_cuda.device import Cuda
        from fd_gpu_cuda.kernel_table import AdapterCapacity
        from fd_gpu_cuda.ops import CudaOps
        from fd_gpu_cuda.providers import Providers, operations_on, wanted_providers

        try:
            use_cache_folder()
            compilations = Compilations()
            compilations.watch()
            self._cuda = Cuda()
            dtype = wanted or self._fastest_dtype(self._cuda)
            self._providers = Providers(
                operations_on(self._cuda, dtype, self.config.kv_cache_dtype, self.config.tensor_parallel_size),
                wanted_providers(self.config.attention_backend),
            )
        except (ImportError, RuntimeError) as error:
            raise PluginError(
                f"the {self.name} backend cannot use the device: {error}", field="--backend", hint=_HINT
            ) from error
        ops = CudaOps(dtype, self._cuda, self._providers.kernels)
        ops.compilations = compilations
        ops.adapter_capacity = AdapterCapacity.of(self.config)
        return ops

    def load_model(self, path: Path | None, ops: Ops, progress: LoadProgress) -> Model:
        """Load and store the model, whose size determines the memory of a step."""
        model = super().load_model(path, ops, progress)
        # A draft model is loaded later, and is smaller.
        if self._model is None:
            self._model, self._ops = model, ops
        if self._providers is not None:
            self._try_providers(self._providers, model, ops)
        if model is self._model:
            self._note_composed(model, ops)
        return model

    def _note_composed(self, model: Model, ops: Ops) -> None:
        """Report the parts of the model that are composed of torch operations, and therefore slow."""
        from fd_core.models.decoder import DecoderModel

        from fd_gpu_cuda.composed import composed_parts
        from fd_gpu_cuda.ops import CudaOps

        if isinstance(model, DecoderModel) and isinstance(ops, CudaOps):
            ops.composed = composed_parts(model.spec, ops.kernels, self.config.block_tokens, model.max_positions)
            if ops.composed:
                logger.warning("slow, because composed of torch operations: %s", self._composed_names(ops))

    @staticmethod
    def _composed_names(ops: CudaOps) -> str:
        return ", ".join(f"{part.name}{'' if part.captured else ' (without CUDA graphs)'}" for part in ops.composed)

    def _try_providers(self, providers: Providers, model: Model, ops: Ops) -> None:
        """Compare the kernels in use with torch's operations, on the loaded model."""
        from fd_core.models.decoder import DecoderModel

        from fd_gpu_cuda.ops import CudaOps
        from fd_gpu_cuda.providers import ModelTrial

        if isinstance(model, DecoderModel) and isinstance(ops, CudaOps):
            config = self.config
            trial = ModelTrial(model, ops, providers.composed, config.block_tokens, config.kv_cache_dtype)
            ops.use(providers.settle(trial))
            if model.images is not None:
                model.images.ops.use(providers.kernels)
            if providers.rejected and (problem := compiler_problem()):
                self.warnings = (problem,)
                logger.warning("%s", problem)

    def rehearse(self, steps: AbstractContextManager[None]) -> None:
        from fd_gpu_cuda.device import out_of_memory
        from fd_gpu_cuda.ops import CudaOps

        if self._cuda is None or not isinstance(self._ops, CudaOps):
            return
        try:
            self._kept = measured(self._cuda, self._ops, steps)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise MemoryError(str(error)) from error
        logger.debug("%s", self._kept)

    @property
    def reserved_memory(self) -> int:
        return (self._kept or calculated(self.config, self._model, self.default_sizes)).total

    def free_memory(self) -> int:
        """Return the device memory that is available for KV after the largest step and the graphs."""
        if self._cuda is None:
            return 0
        return max(self._cuda.free_bytes() - self.reserved_memory, 0)

    def describe(self) -> str:
        device = "CUDA device" if self._cuda is None else self._cuda.name
        parts = [device]
        if self._providers is not None:
            parts.append(self._providers.describe())
        ops: Any = self._ops
        if ops is not None:
            parts += ["decodes as CUDA graphs"] * ops.captures
            parts += [f"composed of torch operations: {self._composed_names(ops)}"] * bool(ops.composed)
        return ", ".join([*parts, *([] if self._kept is None else [str(self._kept)])])

    def _fastest_dtype(self, cuda: Cuda) -> str:
        if cuda.has_bfloat16:
            self.dtype_reason = "the device has bfloat16 tensor cores"
            return "bfloat16"
        if cuda.has_float16:
            self.dtype_reason = "the device has float16 tensor cores, but no bfloat16"
            return "float16"
        self.dtype_reason = "the device has neither bfloat16 nor float16 tensor cores"
        return "float32"


PROVIDER: Final = "CUDAExecutionProvider"
_ONNX_HINT: Final = "pip install 'fd-gpu-cuda[onnx]' without onnxruntime"
# The runtime lists CUDA even without a device, and silently falls back to the CPU: only a session shows it.
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
        """Return available if a current Paddle for CUDA has a device; probed only if the driver has one."""
        _, problem = device_problem()
        if problem:
            return Availability(False, problem)
        if paddle.paddle_installed():
            found = paddle.paddle_devices()
            # Builds from source have version 0.0.0.
            if (0, 0) < tuple(int(part) for part in found.version.split(".")[:2] if part.isdigit()) < (3, 3):
                return Availability(False, f"Paddle {found.version} is too old; {cls.paddle_hint}")
            if not found.built_for_cuda:
                return Availability(False, f"Paddle {found.version} is a CPU-only build; {cls.paddle_hint}")
        return super().probe()


@cache
def provider_problem() -> tuple[str, str]:
    """Find the actual provider of a session in a subprocess; return version, and "" if it is CUDA."""
    slow = "ONNX Runtime did not start a session within {seconds}"
    answer, problem = run_isolated(_QUESTION, slow=slow, failed="ONNX Runtime cannot start a session")
    if problem:
        return "", problem
    version, taken = answer
    return version, "" if taken == PROVIDER else f"ONNX Runtime {version} falls back to {taken}; {_ONNX_HINT}"


class CudaOnnxBackend(OnCuda, OnnxBackend):
    """The core's traced models on CUDA, float32."""

    name: ClassVar[str] = "gpu_cuda+onnx"
    auto_rank: ClassVar[int] = -1
    """Never selected automatically, because it copies its KV between host and device in each step."""
    provider: ClassVar[tuple[str, str]] = (PROVIDER, "cuda")
    hint: ClassVar[str] = _ONNX_HINT

    @classmethod
    def probe(cls) -> Availability:
        """Return available if a session of ONNX Runtime gets CUDA."""
        _, problem = device_problem()
        if problem:
            return Availability(False, problem)
        if not (installed := super().probe()).available:
            return installed
        version, problem = provider_problem()
        return Availability(False, problem) if problem else Availability(True, f"ONNX Runtime {version} on CUDA")

    def describe(self) -> str:
        """Return the provider, and the part that runs on the host."""
        return "CUDA device, ONNX Runtime; KV in host memory, copied each step"


class CudaPostprocess(Postprocess):
    """Postprocessor of the backend `gpu_cuda`, whose pack writes the matrix in one launch."""

    serves: ClassVar[tuple[str, ...]] = ("gpu_cuda",)

    def __init__(self, ops: Ops, limits: Limits) -> None:
        # torch is needed to compute, not to register the postprocessor.
        from fd_gpu_cuda.ops import CudaOps

        super().__init__(ops, limits)
        if not isinstance(ops, CudaOps):
            raise TypeError(f"{type(ops).__name__} is not the pack of gpu_cuda")
        self._pack = ops

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        return self._pack.token_matrix(sampled, accepted, slots, revoked, self.limits.max_num_seqs)
