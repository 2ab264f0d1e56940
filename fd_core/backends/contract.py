"""Contract of a vendor's backend: a device and a framework pack under one name.

The runner, the models and the protocol are the core's; a backend says whether it can run here, hands out its `Ops`
and knows how much memory its device has left.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from fd_core.backends.memory import cpu_quota
from fd_core.backends.places import EnginePlace
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from fd_core.ops.contract import Array, KVCache, KVShape, Ops, StepInput
from fd_core.ops.weights import Adapter, WeightUse

__all__ = ["AdaptableModel", "Availability", "Backend", "LoadProgress", "Model", "cache_shape"]

LoadProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Availability of a backend on this machine, and the reason."""

    available: bool
    reason: str
    """One line for the user, whether the backend is available or not."""
    emulated: bool = False
    """It would run on another device than the one it is for. Such a backend runs only when asked for by name."""


class Model(Protocol):
    """Interface of a model to the runner; `fd_core.models` provides it for real checkpoints."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was built for, tokens."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""

    @property
    def architecture(self) -> str:
        """Name for summaries."""

    @property
    def num_parameters(self) -> int:
        """Number of weights."""

    @property
    def weights(self) -> tuple[WeightUse, ...]:
        """In which forms the weights are stored and computed."""

    @property
    def state_size(self) -> int:
        """Width of `states`."""

    @property
    def generates(self) -> bool:
        """True if it has an output projection; false for a model that only makes vectors."""

    def kv_shape(self, block_size: int) -> KVShape:
        """Return the size of the KV cache that `forward` needs."""

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute float32 logits [R, V] of the rows asked for and write the step's KV."""

    def states(self, step: StepInput, cache: KVCache) -> Array:
        """Do what `forward` does up to its output projection, for all tokens: return what that takes, [T, H].

        For steps that need more of a prompt than what comes next: log-probabilities of its tokens, or their states.
        """

    def head(self, states: Array) -> Array:
        """Project states of some tokens, [R, H], to float32 logits [R, V]."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """A model that serves LoRA adapters."""

    def with_adapters(self, places: Sequence[Adapter | None]) -> AdaptableModel:
        """Return the same model, sharing its weights, whose `forward` and `states` take steps with adapters.

        Entry i belongs to place i + 1; None is an empty place. Raises `MemoryError` if they do not fit.
        """


def cache_shape(model: Model, block_size: int, dtype: str) -> KVShape:
    """Return the size of the model's KV cache for blocks of `block_size` tokens; `dtype` is one of `KVShape.dtype`."""
    return replace(model.kv_shape(block_size), dtype=dtype)


class Backend(abc.ABC):
    """A device and a framework pack. Constructed once in the engine's process."""

    name: ClassVar[str]
    default_pipeline_depth: ClassVar[int] = 2
    default_batched_tokens: ClassVar[int] = 2048
    """Step token budget where none is asked for: the fewest tokens that keep the device busy, for requests that decode
    wait for a step as long as its prompts take."""
    needs_checkpoint: ClassVar[bool] = True
    """True if `load_model` reads a checkpoint; false only for scripted models."""
    auto_rank: ClassVar[int] = 0
    """`--backend auto` takes the available backend of the highest rank; below 0 it is never taken by itself."""

    attention_backends: ClassVar[tuple[str, ...]] = ()
    """Values of `--attention-backend` besides `auto`; empty where there is one way to compute attention."""

    emulated: bool = False
    """True if this instance computes on another device than the one it is for. Set by the constructor and shown with
    every result, because an emulated result says nothing about the device."""

    dtype_reason: str = ""
    """Why `make_ops` chose its dtype where `--dtype auto` left the choice to it; set there, shown to the user."""

    limits: Mapping[str, str] = MappingProxyType({})
    """Abilities of `fd_core.testing.kit.limits` that the backend lacks by its nature, each with the reason that
    the support table shows. Preempted-slot signalling and the step token budget may not be among them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @classmethod
    @abc.abstractmethod
    def probe(cls) -> Availability:
        """Say whether the backend can run here, without initialising its device."""

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Return where each of `count` engines of this machine computes with its `ranks`, initialising no device.

        Backends that know it use `fd_core.backends.places`. Raises `ConfigError` if there are not enough places, and by
        default.
        """
        raise ConfigError(
            f"the {cls.name} backend does not say which device each of {count} engines would have",
            field="--data-parallel-size",
            hint="leave it out, or start one server for each device and `fdcore route` in front of them",
        )

    @classmethod
    def rank_environments(cls, size: int) -> Sequence[Mapping[str, str]]:
        """Return variables that show each of `size` ranks of one model its device, where each is a process of its own.

        Rank 0's process may see all devices: its pack takes the first one. Raises `ConfigError` if there are too few.
        By default nothing: what computes on processors shares them.
        """
        return [{}] * size

    @classmethod
    def require_division(cls, config: EngineConfig, path: Path | None) -> None:
        """Raise `ConfigError`, with sizes that work, if the model cannot be divided as the settings ask.

        Called before any rank is started. A backend with models of its own overrides it as it does `load_model`.
        Raises `ModelError` if the checkpoint cannot be read.
        """
        from fd_core.models.loading.checkpoint import open_checkpoint
        from fd_core.models.registry import spec_of
        from fd_core.models.spec import require_division

        if path is not None and cls.needs_checkpoint:
            with open_checkpoint(path) as checkpoint:
                require_division(spec_of(checkpoint), config.tensor_parallel_size, config.pipeline_parallel_size)

    @classmethod  # noqa: B027 - few backends take long to import
    def import_framework(cls) -> None:
        """Import what `make_ops` takes long to import, without initialising the device; by default nothing.

        Called in the engine's process while the model is looked for. Raises `PluginError` if it cannot be imported.
        """

    @abc.abstractmethod
    def make_ops(self) -> Ops:
        """Create the pack for the configured dtype and threads; may initialise the device."""

    def rehearse(self, steps: AbstractContextManager[None]) -> None:  # noqa: B027 - few backends measure
        """Measure memory that steps take besides weights and KV, for `free_memory` to leave out; by default nothing.

        Entering `steps` computes the largest steps that the settings allow, with a KV cache of a few blocks; leaving it
        gives back what they hold. Called once, when all weights are loaded, but for a model on several ranks: a rank
        cannot compute before all others can.
        """

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Return bytes that weights and KV cache may still take on the device."""

    def describe(self) -> str:
        """Return one line about the device and the kernels in use; it says "emulated" where the device is emulated."""
        return self.name

    @property
    def threads(self) -> int:
        """Threads of a rank on the processor: `--num-threads`, or its share of what the container may use."""
        cores = len(os.sched_getaffinity(0))
        return self.config.num_threads or max(1, min(cores, cpu_quota() or cores) // self.config.num_ranks)

    def dtype_asked_for(self, *offered: str) -> str | None:
        """Return the dtype that `--dtype` names, None for `auto`; `ConfigError` if it is not one of `offered`."""
        wanted = self.config.dtype
        if wanted not in ("auto", *offered):
            where = "where it is emulated " if self.emulated else ""
            raise ConfigError(
                f"the {self.name} backend {where}computes in {' or '.join(offered)}, not {wanted}",
                field="--dtype",
                hint=self.limits.get(wanted, "bfloat16 takes as much memory" if "bfloat16" in offered else None),
            )
        return None if wanted == "auto" else wanted

    def require_kv_dtype(self, ops: Ops) -> None:
        """Raise `ConfigError` where `--kv-cache-dtype` names a type that the backend's pack does not compute with."""
        wanted = self.config.kv_cache_dtype
        if wanted != "auto" and wanted not in ops.kv_dtypes:
            raise ConfigError(
                f"the {self.name} backend keeps KV in {ops.dtype}, not in {wanted}",
                field="--kv-cache-dtype",
                hint="leave it out, or use another --backend, such as cpu",
            )

    def require_attention_backend(self) -> None:
        """Raise `ConfigError` where `--attention-backend` names what the backend does not have."""
        wanted = self.config.attention_backend
        if wanted != "auto" and wanted not in self.attention_backends:
            ways = f"by {' or '.join(self.attention_backends)}" if self.attention_backends else "in one way"
            raise ConfigError(
                f"the {self.name} backend computes attention {ways}, not by {wanted}",
                field="--attention-backend",
                hint="leave it out",
            )

    def load_model(self, path: Path | None, ops: Ops, progress: LoadProgress) -> Model:
        """Load the checkpoint at `path`; the default serves every architecture that the core knows."""
        from fd_core.models.loading.checkpoint import open_checkpoint
        from fd_core.models.registry import load_model

        if path is None:
            raise ValueError("this backend needs a checkpoint")
        checkpoint = open_checkpoint(path)
        try:
            return load_model(checkpoint, ops, self.config.max_model_len, progress, self.config.quantization)
        finally:
            checkpoint.close()
