"""Contract of a vendor's backend: a device and a framework pack under one name.

The core provides the runner, the models and the protocol; a backend reports its availability, creates its `Ops` and
measures the free memory of its device.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from fd_core.backends.device_assignment import DeviceAssignment
from fd_core.backends.memory import cpu_quota
from fd_core.config import EngineConfig
from fd_core.config.envelope import OperatingEnvelope
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.deprecations import accept_old_names
from fd_core.errors import ConfigError
from fd_core.ops.contract import Array, KVCache, KVShape, Ops, StepInput
from fd_core.ops.weights import Adapter, WeightUse

__all__ = [
    "AdaptableModel",
    "Availability",
    "Backend",
    "DraftLayer",
    "HeadedModel",
    "LoadProgress",
    "Model",
    "cache_shape",
    "whole_prompts",
]

LoadProgress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Availability of a backend on this machine, and the reason."""

    available: bool
    reason: str
    """One line for the user, whether the backend is available or not."""
    emulated: bool = False
    """True if it would be emulated on a device other than its own. Such a backend is only selected by name."""


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
        """Formats in which the weights are stored and computed."""

    @property
    def state_size(self) -> int:
        """Width of `states`."""

    @property
    def generates(self) -> bool:
        """True if it has an output projection; false for an embedding model."""

    def kv_shape(self, block_size: int) -> KVShape:
        """Return the size of the KV cache that `forward` needs."""

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute float32 logits [R, V] of the requested rows and write the step's KV."""

    def states(self, step: StepInput, cache: KVCache) -> Array:
        """Run `forward` up to the output projection; return the final hidden states of all tokens, [T, H].

        For steps that need more than the next token of a prompt: log-probabilities of its tokens, or their states.
        """

    def head(self, states: Array) -> Array:
        """Project states of some tokens, [R, H], to float32 logits [R, V]."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """A model that serves LoRA adapters."""

    def with_adapters(self, places: Sequence[Adapter | None]) -> AdaptableModel:
        """Return the same model, sharing its weights, whose `forward` and `states` take steps with adapters.

        Entry i belongs to slot i + 1; None is an empty slot. Raises `MemoryError` if they do not fit.
        """


class DraftLayer(Protocol):
    """A layer that drafts from hidden states of a model, of whose KV cache it has the last layer."""

    @property
    def ids(self) -> Array | None:
        """int32[drafts], token id of each column of `logits`; None if they are the same."""

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute the states [R, H] of the requested rows, and write the layer's KV.

        `step.token_ids` are the tokens after those of the step; `step.states` [T, H] what the layer reads of the model,
        or this function's results for the tokens before.
        """

    def logits(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits [R, drafts]."""


@runtime_checkable
class HeadedModel(Model, Protocol):
    """A model that may have a draft head."""

    @property
    def draft_head(self) -> DraftLayer | None:
        """The head; its KV is one more layer of `kv_shape`."""

    def tapped(self, step: StepInput, cache: KVCache) -> tuple[Array, ...]:
        """Return the result of `states`, followed by arrays [T, H] whose sum the head reads; by none if it reads that
        result."""


def whole_prompts(model: Model) -> bool:
    """Return True for an encoder, which computes each prompt in one step; a model without `causal` is none."""
    return not getattr(model, "causal", True)


def image_tokens(model: Model) -> tuple[int, int, bool]:
    """Return the tokens of the largest image, the patches of each, and whether a step computes all of an image.

    (0, 1, False) for a model without an encoder.
    """
    spec = getattr(getattr(model, "spec", None), "images", None)  # any stage's
    return (0, 1, False) if spec is None else (spec.most_tokens, spec.merge**2, spec.whole)


@runtime_checkable
class GroupedModel(Model, Protocol):
    """A model whose layers can be divided into groups, see `KVShape.groups`."""

    def layer_groups(self, longest: int) -> LayerGroups:
        """Return the groups into which contexts of up to `longest` tokens divide the layers of all stages."""

    def kv_shape(self, block_size: int, groups: LayerGroups = ...) -> KVShape:
        """Return the size of the KV cache that `forward` needs with these groups."""


def cache_shape(
    model: Model,
    block_size: int,
    dtype: str,
    groups: LayerGroups = ONE_GROUP,
) -> KVShape:
    """Return the size of the model's KV cache for blocks of `block_size` tokens; `dtype` is one of `KVShape.dtype`."""
    if isinstance(model, GroupedModel) and groups != ONE_GROUP:
        return replace(model.kv_shape(block_size, groups), dtype=dtype)
    return replace(model.kv_shape(block_size), dtype=dtype)


@accept_old_names
class Backend(abc.ABC):
    """A device and a framework pack. Constructed once in the engine's process."""

    name: ClassVar[str]
    default_pipeline_depth: ClassVar[int] = 2
    default_batched_tokens: ClassVar[int] = 2048
    """Default step token budget: the fewest tokens that saturate the device, because a longer prefill chunk delays the
    requests that decode in the same step."""
    default_num_seqs: ClassVar[int] = 32
    """Default number of slots: a batch beyond which the device decodes hardly more tokens per second."""
    needs_checkpoint: ClassVar[bool] = True
    """True if `load_model` reads a checkpoint; false only for scripted models."""
    updates_weights: ClassVar[bool] = False
    """True if a second model of the same shapes may replace the first while the engine runs."""
    auto_rank: ClassVar[int] = 0
    """`--backend auto` selects the available backend of the highest rank; below 0 it is only selected by name."""

    attention_backends: ClassVar[tuple[str, ...]] = ()
    """Values of `--attention-backend` other than `auto`; empty if the backend has a single implementation of
    attention."""

    emulated: bool = False
    """True if this instance emulates its device on another one. Set by the constructor and shown with every result,
    because a result of emulation is no evidence for the hardware."""

    dtype_reason: str = ""
    """Reason for the dtype that `make_ops` chose under `--dtype auto`; set by `make_ops`, shown to the user."""

    warnings: tuple[str, ...] = ()
    """Reasons why the backend is slow on this machine, each with its remedy; shown at startup."""

    halvings: int = 0
    """Number of times that the engine has halved the default sizes, because the largest step took too much memory."""

    limits: Mapping[str, str] = MappingProxyType({})
    """Capabilities of `fd_core.testing.kit.limits` that the backend cannot support, each with the reason that the
    support table shows. Preempted-slot signalling and the step token budget are mandatory."""

    envelope: ClassVar[OperatingEnvelope] = OperatingEnvelope()
    """Largest sizes that the backend supports, by default what settings and models ask for. With several ranks, the
    sizes are those of the whole model."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @classmethod
    @abc.abstractmethod
    def probe(cls) -> Availability:
        """Return the availability of the backend on this machine, without initialising its device."""

    @classmethod
    def device_assignments(cls, count: int, ranks: int = 1) -> Sequence[DeviceAssignment]:
        """Return the device assignment of each of `count` engines with `ranks` ranks, without initialising a device.

        Backends with several devices use `fd_core.backends.device_assignment`. Raises `ConfigError` if there are too
        few, and by default.
        """
        raise ConfigError(
            f"the {cls.name} backend cannot assign devices to {count} engines",
            field="--data-parallel-size",
            hint="omit it, or start one server per device and `fdcore route` in front of them",
        )

    @classmethod
    def rank_environments(cls, size: int) -> Sequence[Mapping[str, str]]:
        """Return the environment variables that assign a device to each of `size` ranks of one model, one process each.

        Rank 0's process may see all devices: its pack uses the first one. Raises `ConfigError` if there are too few.
        By default none: ranks on the CPU share its cores.
        """
        return [{}] * size

    @classmethod
    def require_division(cls, config: EngineConfig, path: Path | None) -> None:
        """Raise `ConfigError`, with sizes that work, if the model cannot be sharded as configured.

        Called before any rank is started. A backend that overrides `load_model` overrides this as well.
        Raises `ModelError` if the checkpoint cannot be read.
        """
        from fd_core.models.fallback.choice import choose_implementation, require_one_rank
        from fd_core.models.families.spec import require_division
        from fd_core.models.opening import open_checkpoint
        from fd_core.models.registry import spec_of

        if path is not None and cls.needs_checkpoint:
            with open_checkpoint(path) as checkpoint:
                if choose_implementation(checkpoint, config.model_impl) == "transformers":
                    require_one_rank(config.num_ranks)
                else:
                    require_division(
                        spec_of(checkpoint),
                        config.tensor_parallel_size,
                        config.pipeline_parallel_size,
                        expert_parallel=config.enable_expert_parallel,
                    )

    @classmethod  # noqa: B027 - few backends take long to import
    def import_framework(cls) -> None:
        """Import the modules of `make_ops` that are slow to import, without initialising the device; by default none.

        Called in the engine's process while the model is located. Raises `PluginError` if an import fails.
        """

    @abc.abstractmethod
    def make_ops(self) -> Ops:
        """Create the pack for the configured dtype and threads; may initialise the device.

        The process belongs to the engine: handlers of signals, logs and numerics stay as they were. Files and processes
        that the pack needs end with it, except caches that the next one finds again.
        """

    @property
    def default_sizes(self) -> dict[str, int]:
        """Default sizes after `halvings`, as arguments of `fd_core.config.resolve_limits`.

        Sizes are not halved below the defaults of this class.
        """
        sizes = {"default_pipeline_depth": self.default_pipeline_depth}
        for name in ("default_batched_tokens", "default_num_seqs"):
            full: int = getattr(self, name)
            sizes[name] = max(full >> self.halvings, min(full, getattr(Backend, name)))
        return sizes

    def rehearse(self, steps: AbstractContextManager[None]) -> None:  # noqa: B027 - few backends measure
        """Measure the peak activation memory of a step, which `free_memory` then reserves; by default nothing.

        Entering `steps` computes the largest steps that the settings allow, with a KV cache of a few blocks; leaving it
        frees their memory. Called when all weights are loaded, except for a model on several ranks: a rank cannot
        compute before all others can. Called again, with `halvings` increased, if it raises `MemoryError` because the
        steps do not fit, or if `reserved_memory` is a large share of the memory.
        """

    @property
    def reserved_memory(self) -> int:
        """Bytes that `free_memory` reserves for steps, so that it does not return them; by default none."""
        return 0

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Return bytes that weights and KV cache may still take on the device."""

    def describe(self) -> str:
        """Return one line about the device and the kernels in use; contains "emulated" if the device is emulated."""
        return self.name

    @property
    def threads(self) -> int:
        """CPU threads of a rank: `--num-threads`, or its share of the CPUs of the container."""
        cores = len(os.sched_getaffinity(0))
        return self.config.num_threads or max(1, min(cores, cpu_quota() or cores) // self.config.num_ranks)

    def requested_dtype(self, *offered: str) -> str | None:
        """Return the dtype that `--dtype` names, None for `auto`; `ConfigError` if it is not one of `offered`."""
        wanted = self.config.dtype
        if wanted not in ("auto", *offered):
            where = "under emulation " if self.emulated else ""
            raise ConfigError(
                f"the {self.name} backend {where}computes in {' or '.join(offered)}, got {wanted}",
                field="--dtype",
                hint=self.limits.get(wanted, "bfloat16 takes as much memory" if "bfloat16" in offered else None),
            )
        return None if wanted == "auto" else wanted

    def require_kv_dtype(self, ops: Ops) -> None:
        """Raise `ConfigError` if `--kv-cache-dtype` names a dtype that the backend's pack does not support."""
        wanted = self.config.kv_cache_dtype
        if wanted != "auto" and wanted not in ops.kv_dtypes:
            instead = "omit it, or use another --backend, such as cpu"
            raise ConfigError(
                f"the {self.name} backend stores KV in {' or '.join([ops.dtype, *ops.kv_dtypes])}, got {wanted}",
                field="--kv-cache-dtype",
                hint="use int8, which takes about as much memory" if "int8" in ops.kv_dtypes else instead,
            )

    def require_attention_backend(self) -> None:
        """Raise `ConfigError` if `--attention-backend` names an implementation that the backend does not have."""
        wanted = self.config.attention_backend
        if wanted != "auto" and wanted not in self.attention_backends:
            offered = ", ".join(("auto", *self.attention_backends))
            raise ConfigError(
                f"the {self.name} backend expects one of {offered}, got {wanted}",
                field="--attention-backend",
                hint="omit it",
            )

    def load_model(self, path: Path | None, ops: Ops, progress: LoadProgress) -> Model:
        """Load the checkpoint at `path`; the default supports every architecture of the core, and, on packs of torch
        and numpy, models that `transformers` computes."""
        from fd_core.models.fallback.choice import choose_implementation
        from fd_core.models.opening import open_checkpoint
        from fd_core.models.registry import load_model

        if path is None:
            raise ValueError("this backend needs a checkpoint")
        with open_checkpoint(path) as checkpoint:
            load: Callable[..., Model] = partial(load_model, texts_only=self.config.language_model_only)
            if choose_implementation(checkpoint, self.config.model_impl, ops.framework) == "transformers":
                from fd_core.models.fallback.model import load_transformers

                load = load_transformers
            return load(checkpoint, ops, self.config.max_model_len, progress, self.config.quantization)
