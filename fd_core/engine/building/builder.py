"""Builds an engine from its settings, component by component."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import msgspec

from fd_core.backends.contract import cache_shape, image_tokens, whole_prompts
from fd_core.config import EngineConfig, Limits, resolve_limits
from fd_core.config.layer_groups import ONE_GROUP
from fd_core.disagg.prefill.sender import Sender
from fd_core.effects.port import CompletionQueue, JoinedEffectPort, LockedKVCache
from fd_core.engine.building.encoders import encoder_settings
from fd_core.engine.building.kv_offload import (
    KVStorage,
    kv_identity,
    open_kv_storage,
    open_kv_transfer,
    require_role,
    start_kv_offload,
)
from fd_core.engine.clients.client import StartProgress
from fd_core.engine.computing import Computing
from fd_core.engine.core import AdmissionSink, Engine
from fd_core.engine.device import make_device
from fd_core.engine.loaded_adapters import EngineAdapters
from fd_core.engine.process.messages import EngineInfo
from fd_core.engine.ranks.leading import LeadingRunner, RankProcesses, joined_shape, require_ranks
from fd_core.engine.ranks.messages import RankLoaded
from fd_core.engine.ranks.stages import LastStageRunner
from fd_core.engine.tracing.format import TraceHeader
from fd_core.engine.tracing.writer import TraceWriter, require_trace_file
from fd_core.errors import ConfigError, PluginError
from fd_core.models.classifier import read_classifier
from fd_core.models.loading.vector_settings import VectorSettings, read_vector_settings
from fd_core.models.opening import open_checkpoint
from fd_core.ops.contract import KVShape
from fd_core.ops.weights import ITEM_BYTES, WeightUse, summed_uses
from fd_core.plugins import CONNECTOR, OBSERVER, SCHEDULER, SCHEDULING_POLICY, VICTIMS, installed_plugins
from fd_core.runner.observing import ObserverThread
from fd_core.runner.runner import Runner
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.running.drafts import make_draft_control
from fd_core.structured.compiler import GrammarCompiler, GrammarError
from fd_core.structured.workers.port import GrammarPort

_log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    path: Path | None,
    *,
    epoch: int = 1,
    first_step: int = 0,
    progress: StartProgress,
    wake: Callable[[], None] = lambda: None,
    admitted: AdmissionSink = lambda _: None,
) -> Engine:
    """Choose the backend, load the model at `path`, size the KV cache, warm up.

    `path` is None only for backends that need no checkpoint. `wake` is called, on any thread, when a step would make
    progress on something not submitted; `admitted` is called with the ids of requests that enter a slot, before a step
    computes them; `first_step` numbers the first one. Raises `ConfigError`, `ModelError` or `PluginError`.
    """
    config = encoder_settings(config, path)
    builder = _EngineBuilder(config, path, epoch, progress=progress, first_step=first_step)
    try:
        return builder.build(wake, admitted)
    except BaseException:
        builder.give_up()
        raise


class _EngineBuilder:
    """Components of one engine, each built on first use."""

    def __init__(
        self, config: EngineConfig, path: Path | None, epoch: int, progress: StartProgress, first_step: int = 0
    ) -> None:
        """Check the settings and look up the plugins that they name before anything is loaded."""
        if config.trace is not None:
            require_trace_file(Path(config.trace))
        require_role(config)
        self._config = config
        self._path = path
        self._epoch, self._first_step = epoch, first_step
        self._progress = progress
        self._kv_events = bool(config.kv_events) and config.enable_prefix_caching
        self._plugins = installed_plugins()
        self._scheduler_class = _fitting(self._plugins.load(SCHEDULER, config.scheduler), config)
        self._policy = self._plugins.load(SCHEDULING_POLICY, config.scheduling_policy)()
        self._victims = self._plugins.load(VICTIMS, config.victim_policy)()
        self._plugins.load(CONNECTOR, config.kv_connector)  # an unknown name is an error in any role
        require_ranks(config)
        self._ranks = None
        if config.num_ranks > 1:
            backend = self._plugins.choose_backend(config.backend)
            environments = backend.cls.rank_environments(config.num_ranks)
            if config.distributed_executor_backend == "ray" and any(environments):
                raise ConfigError(
                    f"ranks of the {backend.name} backend cannot be placed by Ray yet",
                    field="--distributed-executor-backend",
                    hint="use mp, which assigns each rank a device of this machine",
                )
            backend.cls.require_division(config, path)
            self._ranks = RankProcesses(config, path, environments)
        try:
            group = None if self._ranks is None else self._ranks.group
            self._computing = Computing(config, path, progress, group, self._ranks)
            self._scheduler_class.envelope.require(self._computing.requested, f"the scheduler {config.scheduler}")
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """End the processes of other ranks."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks.close()

    def build(self, wake: Callable[[], None], admitted: AdmissionSink) -> Engine:
        """Build all components, those that start threads last."""
        if self._ranks is not None:
            self._ranks.wake = wake
        adapters, compiler = self._adapters, self._computing.compiler
        scheduler, runner = self._scheduler(), self._runner
        if adapters.held:
            runner.adapters.replace(adapters.held)
        elif self._config.lora_folder is not None:
            runner.adapters.prepare()
        prefill_token = runner.warm_up(lambda done, total: self._progress("warmup", done, total))
        if compiler is not None:
            # Takes half a second, and only grammars need it.
            threading.Thread(target=_make_vocabulary, args=(compiler,), name="fdcore-vocabulary", daemon=True).start()
        trace = self._trace()
        cache, queue = LockedKVCache(runner), CompletionQueue(wake)
        transfer = open_kv_transfer(
            self._config, self._plugins, self._limits, cache, self._computing.ops.dtype, lambda: self._identity, queue
        )
        offload = start_kv_offload(self._storage, self._config, cache, dtype=self._computing.ops.dtype, queue=queue)
        grammars = None if compiler is None else GrammarPort(queue, compiler)
        return Engine(
            self._info(transfer.port if isinstance(transfer, Sender) else None),
            scheduler,
            make_device(runner, self._limits.pipeline_depth, self._config.output_transport),
            outside=JoinedEffectPort(queue, offload, transfer, compiler=grammars),
            adapters=adapters,
            watchdog_seconds=self._config.watchdog_seconds,
            prefill_token=prefill_token,
            computing=self._computing,
            admitted=admitted,
            trace=trace,
            observer=self._observer_thread(),
        )

    @cached_property
    def _adapters(self) -> EngineAdapters:
        """Adapters, read and checked against the model before any of its weights are loaded."""
        return EngineAdapters(self._config, self._path, restarted=self._epoch > 1)

    @cached_property
    def _runner(self) -> Runner:
        limits = self._limits
        if self._ranks is None:
            return self._computing.runner(limits)
        self._ranks.allocate(limits)
        lead = LastStageRunner if limits.num_stages > 1 else LeadingRunner
        shares = [rank.kv_share for rank in self._loaded]
        return self._computing.runner(limits, partial(lead, self._ranks, shares))

    @cached_property
    def _loaded(self) -> list[RankLoaded]:
        """State of each rank after its weights are loaded, rank 0 first."""
        own = self._computing.loaded()
        return [own] if self._ranks is None else [own, *self._ranks.loaded()]

    @property
    def _weights(self) -> tuple[WeightUse, ...]:
        """Compute formats of the model's weights. Each stage and ranks with different experts report their own, other
        ranks all."""
        config = self._config
        count = config.num_ranks if config.enable_expert_parallel else config.pipeline_parallel_size
        return summed_uses([rank.weights for rank in self._loaded[:count]])

    @cached_property
    def _kv_shape(self) -> KVShape:
        """KV of all ranks."""
        groups = self._computing.layer_groups
        shape = cache_shape(
            self._computing.model, self._computing.config.block_tokens, self._config.kv_cache_dtype, groups
        )
        shares = [rank.kv_share for rank in self._loaded]
        return joined_shape(shape, shares, -2 if self._config.pipeline_parallel_size == 1 else 1)

    @cached_property
    def _identity(self) -> str:
        ops = self._computing.ops
        forms = "+".join(sorted({use.computed for use in self._weights}))
        # Stages divide the layers of a group, which decides their order in a block.
        stages = 1 if self._computing.layer_groups == ONE_GROUP else self._config.pipeline_parallel_size
        # The states of recurrent layers are stored as each rank has them.
        ranks = f"/{self._config.tensor_parallel_size} ranks" if self._kv_shape.state else ""
        return kv_identity(self._path, f"{ops.name}/{ops.dtype}/{forms}/{self._kv_shape}/{stages}{ranks}")

    @cached_property
    def _storage(self) -> KVStorage:
        block_bytes = self._kv_shape.bytes_per_block(ITEM_BYTES[self._computing.ops.dtype])
        return open_kv_storage(self._computing.config, self._plugins, lambda: self._identity, block_bytes)

    @cached_property
    def _vectors(self) -> VectorSettings:
        """Pooling of embeddings, from the settings or the checkpoint."""
        model = self._computing.model
        encodes = whole_prompts(model)
        stated = None
        if self._config.pooling == "auto" and self._path is not None and self._computing.backend.needs_checkpoint:
            with open_checkpoint(self._path) as checkpoint:
                stated = checkpoint.pooling
        # Without any statement the mean of an encoder counts, as in sentence-transformers.
        found = read_vector_settings(self._path, model.state_size, stated or ("mean" if encodes else "last"))
        if (classifier := read_classifier(self._path)) is not None:
            whole = classifier.pooling if classifier.pooling != "all" else found.pooling
            pairs = encodes and classifier.pooling != "all" and len(classifier.labels) == 1
            second = getattr(model, "ids_of_type", 0) if pairs else None
            return msgspec.structs.replace(found, pooling=whole, classifier=classifier, second_text=second)
        if self._config.pooling == "auto":
            return found
        return msgspec.structs.replace(found, pooling=self._config.pooling)

    @cached_property
    def _limits(self) -> Limits:
        model, longest = self._computing.model, self._scheduler_class.envelope.max_model_len
        tightest = min(self._loaded, key=lambda rank: rank.free_memory / rank.bytes_per_block)
        ops, backend = self._computing.ops, self._computing.backend
        backend.halvings = max(rank.halvings for rank in self._loaded)
        if whole_prompts(model) and "whole_prompts" in self._scheduler_class.lacks:
            raise ConfigError(
                f"the scheduler {self._config.scheduler} divides prompts, but {self._config.model} is an encoder",
                field="--scheduler",
                hint="use --scheduler continuous",
            )
        reserved = self._adapters.reserved_bytes(ITEM_BYTES[ops.dtype], ops.parallel)
        return resolve_limits(
            self._computing.config,
            model_max_len=min(self._computing.max_positions, longest or self._computing.max_positions),
            vocab_size=model.vocab_size,
            bytes_per_block=tightest.bytes_per_block,
            free_bytes=tightest.free_memory - reserved,
            whole_prompts=whole_prompts(model),
            groups=self._computing.layer_groups,
            image_tokens=image_tokens(model),
            **backend.default_sizes,
        )

    def _scheduler(self) -> Scheduler:
        limits, storage = self._limits, self._storage
        return self._scheduler_class(
            SchedulerSetup(
                limits=limits,
                policy=self._policy,
                victims=self._victims,
                hasher=storage.hasher,
                drafts=make_draft_control(limits, self._config.speculative),
                keep_kv=storage.keep,
                paired=self._config.role != "mixed",
                kv_events=self._kv_events,
                epoch=self._epoch,
                clock=time.monotonic,
                first_step=self._first_step,
            )
        )

    def _trace(self) -> TraceWriter | None:
        config = self._config
        if config.trace is None:
            return None
        header = TraceHeader(
            model=config.model,
            backend=self._computing.choice.name,
            device=self._device_line,
            epoch=self._epoch,
            started=time.time(),
            speculation=None if config.speculative is None else config.speculative.method,
            limits=self._limits,
        )
        return TraceWriter(Path(config.trace), header, config.trace_limit)

    def _observer_thread(self) -> ObserverThread | None:
        """Start the configured observer. Raises `PluginError` if it cannot be made."""
        name = self._config.observer
        if name is None:
            return None
        cls = self._plugins.load(OBSERVER, name)
        try:
            return ObserverThread(cls(), self._limits.max_num_seqs)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise PluginError(f"creating the observer {name} failed: {cause}", field="--observer") from error

    @cached_property
    def _device_line(self) -> str:
        """The backend's line about its device, which contains "emulated" if it is."""
        backend, size = self._computing.backend, self._config.num_ranks
        parts = "ranks" if self._config.pipeline_parallel_size == 1 else "stages"
        line = backend.describe() if size == 1 else f"{size} {parts} of {backend.describe()}"
        return f"emulated: {line}" if backend.emulated and "emulated" not in line.lower() else line

    def _info(self, kv_port: int | None) -> EngineInfo:
        config, limits, storage, computing = self._config, self._limits, self._storage, self._computing
        model, ops, backend = computing.model, computing.ops, computing.backend
        return EngineInfo(
            model=config.model,
            architecture=model.architecture,
            num_parameters=model.num_parameters,
            backend=computing.choice.name,
            backend_reason=computing.choice.reason,
            scheduler=config.scheduler,
            postprocess=None if config.postprocess == ops.framework else config.postprocess,
            device=self._device_line,
            warnings=backend.warnings,
            dtype=ops.dtype,
            dtype_reason=backend.dtype_reason if config.dtype == "auto" else "requested",
            weights=self._weights,
            weight_formats=tuple(sorted(ops.weight_formats)),
            kv_dtype=ops.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            vocab_size=limits.vocab_size,
            state_size=self._vectors.layers[-1].outs if self._vectors.layers else model.state_size,
            vectors=self._vectors,
            generates=model.generates,
            eos_token_ids=model.eos_token_ids,
            generation=config.override_generation_config,
            max_model_len=limits.max_model_len,
            model_max_len=model.max_positions,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            size_reasons=computing.size_reasons,
            block_size=limits.block_size,
            num_kv_blocks=limits.num_kv_blocks,
            groups=limits.groups,
            kv_cache_bytes=limits.num_kv_blocks * sum(rank.bytes_per_block for rank in self._loaded),
            pipeline_depth=limits.pipeline_depth,
            host_kv_bytes=0 if storage.keep is None else config.host_kv_memory,
            kv_store=storage.summary,
            kv_store_answers=storage.reachable,
            role=config.role,
            kv_port=kv_port,
            kv_connector=config.kv_connector if config.role == "decode" else None,
            emulated=backend.emulated,
            kv_events=self._kv_events,
            structured_output=config.structured_output,
            adapters=self._adapters.infos,
            lora_folder=config.lora_folder,
            weights_folder=config.weights_folder,
            epoch=self._epoch,
        )


def _make_vocabulary(compiler: GrammarCompiler) -> None:
    """Build the vocabulary before the first grammar needs it; a model without one serves everything else."""
    try:
        compiler.warm_up()
    except GrammarError as error:
        _log.warning("structured output is not available: %s", error)


def _fitting(scheduler: type[Scheduler], config: EngineConfig) -> type[Scheduler]:
    """Return a scheduler that supports the settings. Raises `ConfigError` for one that does not."""
    asked = {
        "pairs": ("--role", config.role, config.role != "mixed"),
        "storage": ("--kv-store", config.kv_store, config.kv_store is not None),
    }
    for lack, reason in scheduler.lacks.items():
        flag, value, wanted = asked.get(lack, ("", None, False))
        if wanted:
            raise ConfigError(
                f"{flag} is {value}, but the scheduler {config.scheduler} does not support it: {reason}",
                field=flag,
                hint="remove it, or use --scheduler continuous",
            )
    return scheduler
