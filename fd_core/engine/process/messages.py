"""Messages between an engine and its clients; encoded with msgspec, never pickled."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import EngineConfig
from fd_core.config.generation import GenerationDefaults
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.errors import ConfigError, EngineDead, FdError, ModelError, PluginError
from fd_core.kv.tiers.stats import TierStats
from fd_core.models.loading.vector_settings import VectorSettings
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.weights import WeightUse
from fd_core.runner.observing import ObserverStats
from fd_core.runner.sampling.grammars import MaskStats
from fd_core.scheduling.contract import RequestActivity, SchedulerStats
from fd_core.structured.compiler import CompilerStats
from fd_core.types import AdapterInfo, Delta, PrefillTrace, RequestSpec, StepOutput
from fd_core.types.kv_events import KVEvent
from fd_core.types.metrics import gauge


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine, sent once when it is ready."""

    model: str
    architecture: str
    num_parameters: int
    backend: str
    backend_reason: str
    scheduler: str = "continuous"
    postprocess: str | None = None
    """None for the default of the backend's framework."""
    device: str
    """A line about the device; it contains the word "emulated" if it is."""
    warnings: tuple[str, ...] = ()
    """Reasons why the backend is slow on this machine, each with its remedy."""
    dtype: str
    dtype_reason: str = ""
    """Why this dtype was chosen; empty if the backend gives no reason."""
    weights: tuple[WeightUse, ...] = ()
    """Formats in which weights are stored and computed, the most parameters first."""
    weight_formats: tuple[str, ...] = ()
    """Packed formats that the backend supports."""
    kv_dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults = GenerationDefaults()
    """Sampling parameters of requests that leave them out."""
    max_model_len: int
    model_max_len: int = 0
    """Context length that the model was trained for, in tokens; 0 if unknown."""
    max_num_seqs: int
    max_num_batched_tokens: int
    size_reasons: dict[str, str] = {}
    """Reasons for the two sizes above where the settings have none, by name."""
    block_size: int
    num_kv_blocks: int
    groups: LayerGroups = ONE_GROUP
    """Groups of layers that share the blocks."""
    kv_cache_bytes: int
    pipeline_depth: int
    host_kv_bytes: int = 0
    kv_store: str | None = None
    """A line about the KV store, without secrets."""
    kv_store_answers: bool = True
    """True if the store was reachable when the engine started."""
    role: str = "mixed"
    """`mixed`, `prefill` or `decode`."""
    kv_port: int | None = None
    """Port of a prefill worker for the transfers of decode workers."""
    kv_connector: str | None = None
    """Connector that carries KV to a decode worker."""
    emulated: bool = False
    """True if the backend computes on another device than its target; results do not apply to that one."""
    kv_events: bool = False
    """True if it publishes the prefixes in its device cache."""
    state_size: int = 0
    """Elements of an embedding."""
    vectors: VectorSettings = VectorSettings()
    generates: bool = True
    """True if it generates text; false for a checkpoint without an output projection."""
    structured_output: bool = True
    """True if it supports grammars."""
    adapters: tuple[AdapterInfo, ...] = ()
    lora_folder: str | None = None
    """Folder from which more may be loaded; None for none."""
    paused: bool = False
    """True if requests wait for `ResumeGeneration`."""
    sleep_level: int = 0
    """Level of `Sleep`; 0 while awake."""
    weight_version: str = "0"
    """Name of the weights that compute; `UpdateWeights` changes it."""
    weights_folder: str | None = None
    """Folder from which weights may be loaded at run time; None for none."""
    epoch: int = 1

    @property
    def stopped(self) -> bool:
        """True if no request is computed until `ResumeGeneration` or `WakeUp`."""
        return self.paused or self.sleep_level > 0


class LeaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """KV transfers between workers; counters only grow within an epoch."""

    open: Annotated[int, gauge("kv_leases_open", "KV leases between prefill and decode workers in progress.")] = 0
    receiver: ReceiverStats | None = None
    sender: SenderStats | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine, by owner; counters only grow within an epoch."""

    scheduler: SchedulerStats = msgspec.field(default_factory=SchedulerStats)
    kv: TierStats | None = None
    """KV outside the device; None if none is kept there."""
    leases: LeaseStats | None = None
    """KV transfers between workers; None for a worker that prefills and decodes."""
    observer: ObserverStats | None = None
    grammars: CompilerStats | None = None
    """None if structured output is disabled."""
    masks: MaskStats | None = None
    compilations: CompilationStats | None = None
    """None for a pack in which nothing compiles."""


class StepEvents(msgspec.Struct, frozen=True, tag="step"):
    """All events of one step for the clients, in one message."""

    deltas: list[Delta]
    stats: EngineStats | None = None
    epoch: int = 1
    admitted: tuple[str, ...] = ()
    """Requests that entered a slot; sent before the step that computes them, which may be the engine's last."""
    kv: tuple[KVEvent, ...] = ()
    """Prefixes added to and evicted from the device cache, if a client needs them."""
    prefills: tuple[PrefillTrace, ...] = ()
    """Finished traced jobs of decode workers."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready."""

    info: EngineInfo


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The engine is starting: phases and units are those of `fd_core.engine.clients.client.StartProgress`."""

    phase: str
    done: int
    total: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The engine, or one of its ranks, cannot start or continue."""

    message: str
    field: str | None = None
    hint: str | None = None
    exit_code: int = 1

    @classmethod
    def of(cls, error: FdError) -> Fault:
        """Return the message that represents an error; `error` restores it."""
        return cls(error.message, error.field, error.hint, error.exit_code)

    def error(self, prefix: str = "") -> FdError:
        """Return the error: that of loading, or `EngineDead`."""
        kinds: dict[int, type[FdError]] = {kind.exit_code: kind for kind in (ConfigError, ModelError, PluginError)}
        return kinds.get(self.exit_code, EngineDead)(prefix + self.message, field=self.field, hint=self.hint)


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load a model and serve: the first message to an engine's process, which has imported its framework by then."""

    config: EngineConfig
    path: str | None
    epoch: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a request."""

    spec: RequestSpec


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests; unknown ids are ignored."""

    request_ids: tuple[str, ...] = ()
    everything: bool = False


class QueryActivities(msgspec.Struct, frozen=True, tag="query-activities"):
    """Send the activities of all requests."""


class Activities(msgspec.Struct, frozen=True, tag="activities"):
    """The response to `QueryActivities`, between two steps."""

    by_id: dict[str, RequestActivity]


class ChangeAdapters(msgspec.Struct, frozen=True, tag="change-adapters"):
    """Load a LoRA adapter, or unload the one of that name."""

    name: str
    path: str | None
    """None unloads."""


class PauseGeneration(msgspec.Struct, frozen=True, tag="pause"):
    """Preempt every running request and admit none; all of them wait until `ResumeGeneration`."""


class ResumeGeneration(msgspec.Struct, frozen=True, tag="resume"):
    """Admit requests again."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset-prefix-cache"):
    """Forget the prefixes in the device cache."""


class UpdateWeights(msgspec.Struct, frozen=True, tag="update-weights"):
    """Replace the weights by those of another checkpoint of the same shapes, between two steps."""

    path: str
    version: str | None = None
    """Name of the weights in answers; None counts the updates."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Pause, and release the memory of the KV cache, at level 2 also that of the weights, until `WakeUp`."""

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class WakeUp(msgspec.Struct, frozen=True, tag="wake-up"):
    """Restore what `Sleep` released, and continue."""


ControlOrder = ChangeAdapters | PauseGeneration | ResumeGeneration | ResetPrefixCache | UpdateWeights | Sleep | WakeUp
"""Changes of a running engine that an operator may order."""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """An order for the engine."""

    ticket: int
    """Returned in the response."""
    order: ControlOrder


class Controlled(msgspec.Struct, frozen=True, tag="controlled"):
    """The response to `Control`, once the order is carried out or has failed."""

    ticket: int
    info: EngineInfo
    """Properties of the engine from now on."""
    error: str | None = None
    field: str | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop once all requests have ended, or at once if `drain` is false."""

    drain: bool = True


ClientMessage = Start | Submit | Abort | QueryActivities | Control | Shutdown
EngineMessage = StepEvents | Activities | Controlled | Ready | Progress | Fault


class _Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    reason: str
    field: str | None


def encode_array(array: npt.NDArray[Any]) -> tuple[tuple[int, ...], str, bytes]:
    """Serve as msgspec's `enc_hook` for messages with arrays: return shape, type character and values in C order."""
    return array.shape, array.dtype.char, array.tobytes()


def decode_array(_: type, packed: tuple[tuple[int, ...], str, bytes]) -> npt.NDArray[Any]:
    """Serve as msgspec's `dec_hook`: return the array from which `encode_array` made `packed`."""
    shape, dtype, values = packed
    return np.frombuffer(values, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_DECODER: msgspec.msgpack.Decoder[StepOutput | _Failure] = msgspec.msgpack.Decoder(
    StepOutput | _Failure, dec_hook=decode_array
)


def encode_output(output: StepOutput | EngineDead) -> bytes:
    """Return the frame of an output, or of the reason why there is none."""
    return _ENCODER.encode(_Failure(output.message, output.field) if isinstance(output, EngineDead) else output)


def decode_output(frame: bytes) -> StepOutput | EngineDead:
    """Return the argument of `encode_output`. Raises `msgspec.DecodeError` or `ValueError` for anything else."""
    read = _DECODER.decode(frame)
    return EngineDead(read.reason, field=read.field) if isinstance(read, _Failure) else read
