"""The backend `gpu_cuda`: torch on an NVIDIA GPU."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fd_core.backends.contract import Availability, Backend, LoadProgress, Model
from fd_core.backends.places import EnginePlace
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError, PluginError
from fd_core.ops.contract import Ops

from fd_gpu_cuda.memory import KeptMemory, calculated, measured
from fd_gpu_cuda.probe import cuda_of_ranks, cuda_of_torch, cuda_places, device_problem, flash_infer, missing

if TYPE_CHECKING:
    from fd_gpu_cuda.device import Cuda
    from fd_gpu_cuda.providers import Providers


logger = logging.getLogger(__name__)
_HINT = "pip install 'fd-gpu-cuda[torch]' from an index that has torch built for CUDA, such as the default one"


class CudaBackend(Backend):
    """torch on a CUDA device, or on one for each rank; in bfloat16 where the device has it."""

    name: ClassVar[str] = "gpu_cuda"
    auto_rank: ClassVar[int] = 100
    attention_backends: ClassVar[tuple[str, ...]] = ("triton", "flashinfer", "torch")

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._cuda: Cuda | None = None
        self._model: Model | None = None
        self._ops: Ops | None = None
        self._providers: Providers | None = None
        self._kept: KeptMemory | None = None

    @classmethod
    def probe(cls) -> Availability:
        """Available where the driver has a device and torch is built for CUDA; imports neither torch nor Triton."""
        count, problem = device_problem()
        if problem:  # first, because nobody installs gigabytes for a device that is not there
            return Availability(False, problem)
        if absent := missing("torch", "triton"):
            return Availability(False, f"{' and '.join(absent)} not installed; {_HINT}")
        version, cuda = cuda_of_torch()
        if cuda is None:
            return Availability(False, f"torch {version} is built without CUDA; {_HINT}")
        return Availability(True, f"torch {version} for CUDA {cuda}; the driver has {count} device(s); {flash_infer()}")

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Give each engine a device for each rank."""
        return cuda_places(count, ranks)

    @classmethod
    def rank_environments(cls, size: int) -> Sequence[Mapping[str, str]]:
        """Show each rank a device of its own."""
        return cuda_of_ranks(size)

    @classmethod
    def import_framework(cls) -> None:
        """Import torch and the pack on it."""
        try:
            importlib.import_module("fd_gpu_cuda.ops")
        except ImportError as error:
            raise PluginError(f"the {cls.name} backend needs torch: {error}", field="--backend", hint=_HINT) from error

    def make_ops(self) -> Ops:
        """Create the pack on the first visible device; initialises CUDA."""
        wanted = self.dtype_asked_for("float32", "bfloat16", "float16")
        self.import_framework()
        from fd_gpu_cuda.adapters import AdapterRoom
        from fd_gpu_cuda.compilations import Compilations, use_cache_folder
        from fd_gpu_cuda.device import Cuda
        from fd_gpu_cuda.ops import CudaOps
        from fd_gpu_cuda.providers import Providers, operations_on, wanted_providers

        try:
            use_cache_folder()
            compilations = Compilations()
            compilations.watch()
            self._cuda = Cuda()
            dtype = wanted or self._fastest_dtype(self._cuda)
            self._providers = Providers(
                operations_on(self._cuda, dtype, self.config.kv_cache_dtype),
                wanted_providers(self.config.attention_backend),
            )
        except (ImportError, RuntimeError) as error:
            raise PluginError(
                f"the {self.name} backend cannot use the device: {error}", field="--backend", hint=_HINT
            ) from error
        ops = CudaOps(dtype, self._cuda, self._providers.kernels)
        ops.compilations = compilations
        ops.adapter_room = AdapterRoom.of(self.config)
        return ops

    def load_model(self, path: Path | None, ops: Ops, progress: LoadProgress) -> Model:
        """Load the model, and remember it: its size decides how much memory a step takes."""
        model = super().load_model(path, ops, progress)
        # A draft model is loaded later, and is the smaller one.
        if self._model is None:
            self._model, self._ops = model, ops
        if self._providers is not None:
            self._try_providers(self._providers, model, ops)
        return model

    def _try_providers(self, providers: Providers, model: Model, ops: Ops) -> None:
        """Compare what is in use with torch's own operations, on a model that was just loaded."""
        from fd_core.models.decoder import DecoderModel

        from fd_gpu_cuda.ops import CudaOps
        from fd_gpu_cuda.trial import ModelTrial

        if isinstance(model, DecoderModel) and isinstance(ops, CudaOps):
            config = self.config
            trial = ModelTrial(model, ops, providers.composed, config.block_size, config.kv_cache_dtype)
            ops.use(providers.settle(trial))

    def rehearse(self, steps: AbstractContextManager[None]) -> None:
        """Measure on the device."""
        from fd_gpu_cuda.device import out_of_memory
        from fd_gpu_cuda.ops import CudaOps

        if self._cuda is None or not isinstance(self._ops, CudaOps):
            return
        try:
            self._kept = measured(self._cuda, self._ops, steps)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise ConfigError(
                f"the largest step does not fit beside the weights: {error}",
                field="--max-num-batched-tokens",
                hint="lower it or --max-num-seqs",
            ) from error
        logger.info("%s", self._kept)

    def free_memory(self) -> int:
        """Return what the device has left for KV beside the largest step and the graphs."""
        if self._cuda is None:
            return 0
        kept = self._kept or calculated(self.config, self._model, self.default_batched_tokens)
        return max(self._cuda.free_bytes() - kept.total, 0)

    def describe(self) -> str:
        """Name the device and the kernels."""
        device = "CUDA device" if self._cuda is None else self._cuda.name
        parts = [device]
        if self._providers is not None:
            parts.append(self._providers.describe())
            parts += ["decodes as CUDA graphs"] * self._providers.kernels.capturable
        return ", ".join([*parts, *([] if self._kept is None else [str(self._kept)])])

    def _fastest_dtype(self, cuda: Cuda) -> str:
        if cuda.has_bfloat16:
            self.dtype_reason = "the device multiplies bfloat16 matrices itself"
            return "bfloat16"
        if cuda.has_float16:
            self.dtype_reason = "the device multiplies float16 matrices itself, and no bfloat16"
            return "float16"
        self.dtype_reason = "the device multiplies neither bfloat16 nor float16 matrices itself"
        return "float32"
