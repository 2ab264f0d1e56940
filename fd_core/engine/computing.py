"""Components that one rank computes with: backend, pack, model, drafter, grammar compiler, and the runner."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np

from fd_core.backends.contract import Backend, GroupedModel, Model, cache_shape, image_tokens, whole_prompts
from fd_core.config import EngineConfig, Limits, requested_sizes, resolve_limits
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.engine.clients.client import StartProgress
from fd_core.engine.ranks.leading import RankProcesses
from fd_core.engine.ranks.messages import ChangeModel, RankLoaded
from fd_core.errors import BadRequest, ConfigError, EngineDead, ModelError
from fd_core.models.fallback.choice import choose_implementation
from fd_core.models.loading.vector_settings import read_vector_settings
from fd_core.models.opening import open_checkpoint
from fd_core.models.quantization import require_formats
from fd_core.models.registry import CLASSIFICATION, spec_of, with_draft_head, with_mtp_layer
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.ops.weights import ITEM_BYTES
from fd_core.plugins import DRAFTER, POSTPROCESS, SCHEDULER, installed_plugins
from fd_core.runner.drafting import Drafter, make_drafter
from fd_core.runner.postprocess.contract import require_fit
from fd_core.runner.runner import Runner
from fd_core.runner.warm_up import decode_plan, prefill_plan
from fd_core.structured.compiler import GrammarCompiler, grammar_vocabulary
from fd_core.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from fd_core.types import SamplingParams, StepPlan

_BLOCKS: Final = 16
"""KV blocks of a rehearsal; all block tables point to them, so the results are meaningless."""
_COSTLY: Final = SamplingParams(
    temperature=0.8, top_k=1000, top_p=0.9, min_p=0.01, seed=1, presence_penalty=0.1, repetition_penalty=1.1, logprobs=1
)

_log = logging.getLogger(__name__)
_STEP_SHARE: Final = 0.25
"""Share of the memory after weights up to which steps of default sizes may use it; the rest is for KV."""
_ENOUGH: Final = 2**60
"""Memory in bytes that is enough for every slot to have all the blocks that it can use."""


@contextmanager
def rehearsed(make: Callable[[Limits], Runner], limits: Limits, *, adapters: bool = False) -> Iterator[None]:
    """Compute the largest steps with a small cache on entering, and free their memory on leaving.

    They are: the end of the longest prompt, as long as a step can be, with log-probabilities requested; a prompt in
    every slot, all of which sample with filters, penalties and log-probabilities; a decode of all slots; the same with
    drafts. Backends that capture their forward do so at the decodes, and beforehand for tokens with adapters if there
    may be `adapters`.
    """
    runner = make(msgspec.structs.replace(limits, num_kv_blocks=min(_BLOCKS, limits.num_kv_blocks)))
    if adapters:
        runner.adapters.prepare()
    for plan in _plans(runner):
        runner.execute(plan)
    try:
        yield
    finally:
        runner.close()
        del runner
        gc.collect()


def _plans(runner: Runner) -> Iterator[StepPlan]:
    limits, batch = runner.limits, runner.batch
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len - 1
    table = np.arange(limits.blocks_per_seq, dtype=np.int32) % limits.num_kv_blocks
    costly = SamplingParams() if limits.whole_prompts else _COSTLY
    scored = costly if limits.whole_prompts else msgspec.structs.replace(costly, prompt_logprobs=1)
    end, computed = np.full(1, longest, np.int32), max(longest - budget, 0)
    yield prefill_plan(0, 1, end, params=[scored], tables=[table], computed=computed)
    rows = min(limits.max_num_seqs, budget)
    lengths = np.full(rows, max(1, min(budget // rows, longest // 2)), np.int32)
    yield prefill_plan(1, 2, lengths, params=[costly] * rows, tables=[table] * rows)
    if limits.whole_prompts:
        return
    slots = np.arange(rows, dtype=np.int32)
    yield decode_plan(2, slots, batch.gen[slots], starts=batch.length[slots] - 1)
    if drafts := limits.max_drafts:
        some = slots[: max(1, budget // (1 + drafts))]
        batch.guess(some, np.zeros((len(some), drafts), np.int32), np.full(len(some), drafts, np.int32))
        yield decode_plan(3, some, batch.gen[some], starts=batch.length[some] - 1, drafts=drafts)


class Computing:
    """Components of one rank's runner, each built on first use."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path | None,
        progress: StartProgress,
        group: RankGroup | None = None,
        ranks: RankProcesses | None = None,
    ) -> None:
        """Check the settings before anything is loaded; `group` is None for a model on one rank, `ranks` are the others
        for rank 0.
        """
        self._config = config
        self._ranks = ranks
        self._other: tuple[Path, Model, str] | None = None
        """Loaded weights that may replace those of `model`: folder, model, digest."""
        self.digest = ""
        """Digest of the weights; empty until they are updated or released."""
        self._path = path
        self._progress = progress
        self._plugins = installed_plugins()
        self.choice = self._plugins.choose_backend(config.backend)
        self.backend: Backend = self.choice.cls(config)
        self.backend.require_attention_backend()
        self._owner = f"the {self.choice.name} backend"
        self.requested = requested_sizes(config, **self.backend.default_sizes)
        self.backend.envelope.require(self.requested, self._owner)
        progress("prepare", 0, 1)
        self.ops = self.backend.make_ops()
        progress("prepare", 1, 1)
        if group is not None:
            if config.pipeline_parallel_size > 1:
                self.ops.cut(Stage(group.parallel.size - 1 - group.parallel.rank, group.parallel.size))
                group.require_order()
            else:
                group.parallel = replace(group.parallel, expert_parallel=config.enable_expert_parallel)
                self.ops.join(group)
                if group.parallel.rank == 0 and not self.ops.parallel.gathers:
                    _log.warning(
                        "the %s pack sums partial results of ranks: if two tokens are almost equally likely, texts "
                        "may differ from those of another number of ranks",
                        self.ops.name,
                    )
        require_formats(config.quantization, self.ops, self.choice.name)
        self.backend.require_kv_dtype(self.ops)
        default = self._plugins.default_postprocessor(self.choice.name, self.ops.framework)
        postprocess = config.postprocess or default
        self._postprocess = self._plugins.load(POSTPROCESS, postprocess)
        require_fit(self._postprocess, postprocess, self.ops.framework, backend=self.choice.name)
        self._postprocess.envelope.require(self.requested, f"the postprocessor {postprocess}")

    @cached_property
    def model(self) -> Model:
        """The model, with its weights; one beyond the backend's envelope raises `ModelError` before they are read."""
        if self._path is not None and self.backend.needs_checkpoint and self.backend.envelope.limits():
            with open_checkpoint(self._path) as checkpoint:
                if choose_implementation(checkpoint, self._config.model_impl, self.ops.framework) == "fd_core":
                    self.backend.envelope.require(spec_of(checkpoint).sizes(), self._owner)
        return self._load(self._path)

    def _load(self, path: Path | None) -> Model:
        with self.ops.replaceable_weights():
            model = self.backend.load_model(path, self.ops, lambda done, total: self._progress("load", done, total))
            speculative = self._config.speculative
            if speculative is None or not self._reads_states:
                return model
            if speculative.model is None:
                return with_mtp_layer(model, path or Path(), self._config.quantization)
            return with_draft_head(model, Path(speculative.model))

    @property
    def _reads_states(self) -> bool:
        """True if the drafter reads hidden states, by a head that is loaded with the model."""
        speculative = self._config.speculative
        if speculative is None or not speculative.num_speculative_tokens:
            return False
        return self._plugins.load(DRAFTER, speculative.method).reads_states

    def update(self, path: str, runner: Runner) -> None:
        """Replace the weights on all ranks; nothing changes on `BadRequest`, `ModelError` and `MemoryError`."""
        self._require_changeable("weights cannot be updated")
        classifies = str(self._shapes["architecture"]).endswith(CLASSIFICATION)
        if classifies or read_vector_settings(self._path, cast("int", self._shapes["state_size"])).layers:
            what = "a classifier" if classifies else "a model with Dense modules"
            raise BadRequest(f"the weights of {what} cannot be updated yet; restart the server instead")
        try:
            self._change(ChangeModel("load", path), runner)
        except (ModelError, MemoryError):
            self._change(ChangeModel("discard"), runner)
            raise
        self._change(ChangeModel("adopt"), runner)

    def sleep(self, weights: bool, runner: Runner) -> None:
        """Release the memory of the KV cache, and of `weights`, on all ranks. Raises `BadRequest`."""
        self._require_changeable("memory cannot be released")
        self._change(ChangeModel("release", weights=weights), runner)

    def wake_up(self, weights: bool, runner: Runner) -> None:
        """Restore what `sleep` released. Raises `ModelError` or `MemoryError`; then nothing changes."""
        try:
            self._change(ChangeModel("restore"), runner)
        except (ModelError, MemoryError):
            self._change(ChangeModel("release", weights=weights), runner)
            raise

    def _change(self, order: ChangeModel, runner: Runner) -> None:
        own = partial(self.change_own, order, runner)
        if self._ranks is None:
            own()
        else:
            self._ranks.change_model(order, own)

    def change_own(self, order: ChangeModel, runner: Runner) -> str:
        """Perform one part of a change on this rank; return the digest of weights that it loads.

        Raises `ModelError` or `MemoryError` if it can neither load nor restore, and `EngineDead` if it may be left with
        a part of the new weights.
        """
        digest = ""
        match order.part:
            case "load":
                digest = self._load_other(Path(order.path))
            case "discard":
                self._other = None
            case "adopt" if self._other is not None:
                (self._path, self.model, self.digest), self._other = self._other, None
                try:
                    if not runner.released:
                        runner.replace_model(self.model)
                except Exception as error:
                    raise EngineDead(f"the new weights could not be used: {type(error).__name__}: {error}") from error
            case "release":
                if order.weights and "model" in self.__dict__:
                    with contextlib.suppress(ModelError):  # files that are missing are an error of `restore`
                        self.digest = self.digest or self._digest_of(self._path)
                    _ = self._shapes
                    del self.model
                runner.release()
            case "restore":
                if "model" not in self.__dict__ and (digest := self._digest_of(self._path)) != self.digest:
                    raise ModelError(f"{self._path} was changed during the sleep; update the weights instead")
                runner.restore(self.model)
        gc.collect()
        return digest

    def _load_other(self, path: Path) -> str:
        try:
            model = self._load(path)
        except (ConfigError, MemoryError) as error:
            raise ModelError(f"{path}: {error or 'not enough memory for a second copy of the weights'}") from error
        for name, found in self._shapes_of(model).items():
            if found != self._shapes[name]:
                raise ModelError(f"{path}: {name} is {found}, but the served model has {self._shapes[name]}")
        self._other = path, model, self._digest_of(path)
        return self._other[2]

    def _digest_of(self, path: Path | None) -> str:
        if path is None or not self.backend.needs_checkpoint:
            return str(path)
        with open_checkpoint(path) as checkpoint:
            return checkpoint.digest

    @cached_property
    def _shapes(self) -> dict[str, object]:
        return self._shapes_of(self.model)

    def _shapes_of(self, model: Model) -> dict[str, object]:
        """Return everything in which a model must equal the one that it replaces."""
        names = ("architecture", "vocab_size", "num_parameters", "state_size", "max_positions")
        return {name: getattr(model, name) for name in names} | {"KV": model.kv_shape(self.config.block_tokens)}

    def _require_changeable(self, refusal: str) -> None:
        if not self.backend.updates_weights:
            raise BadRequest(f"{refusal} on {self._owner} yet; restart the server instead")

    @cached_property
    def config(self) -> EngineConfig:
        """The settings, with the size of KV blocks that hold the states of recurrent layers, if there are any."""
        config, drafts = self._config, self.requested["max_drafts"]
        shape = cache_shape(self.model, 1, config.kv_cache_dtype)
        least, size = shape.least_block_size(ITEM_BYTES[self.ops.dtype], drafts), config.block_tokens
        if least <= size:
            return config
        if config.block_size is not None:
            raise ConfigError(
                f"block_size={size} is less than {least}, the tokens whose KV in one layer takes the memory of a "
                f"recurrent layer's state with {drafts} drafts",
                field="--block-size",
                hint=f"use at least {least}, or omit it",
            )
        size = -(-least // size) * size
        _log.info("KV blocks have %d tokens, because they also hold the states of recurrent layers", size)
        return msgspec.structs.replace(config, block_size=size)

    @property
    def max_positions(self) -> int:
        """Longest context of the model and of the envelopes of backend and postprocessor."""
        limits = (self.backend.envelope.max_model_len, self._postprocess.envelope.max_model_len)
        return min([self.model.max_positions, *(limit for limit in limits if limit is not None)])

    @cached_property
    def drafter(self) -> Drafter | None:
        """Drafter that proposes tokens ahead; None if there is none."""
        if self._config.speculative is None:
            return None
        chosen = self._plugins.load(DRAFTER, self._config.speculative.method)
        model = self.model
        return make_drafter(
            chosen, self.config, self.backend, self.ops, model, lambda *parts: self._progress("load", *parts)
        )

    @cached_property
    def compiler(self) -> GrammarCompiler | None:
        """Compiler of grammars; None if structured output is disabled."""
        if not self._config.structured_output:
            return None
        path, vocab_size, ends = self._path, self.model.vocab_size, self.model.eos_token_ids
        return GrammarCompiler(lambda: grammar_vocabulary(_tokenizer(path), vocab_size, ends))

    @cached_property
    def layer_groups(self) -> LayerGroups:
        """Groups into which the layers of all ranks are divided, so that KV outside of windows is freed.

        There is one group if a drafter shares the blocks, or the scheduler does not support several.
        """
        config, model = self._config, self.model
        scheduler = self._plugins.load(SCHEDULER, config.scheduler)
        shared = self.drafter is not None and self.drafter.kv_shape is not None
        if shared or self._reads_states or not scheduler.groups_layers:
            return ONE_GROUP
        longest = self.max_positions if config.max_model_len is None else config.max_model_len
        return model.layer_groups(longest) if isinstance(model, GroupedModel) else ONE_GROUP

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of a KV block, including the drafter's share."""
        item_bytes = ITEM_BYTES[self.ops.dtype]
        shape = cache_shape(self.model, self.config.block_tokens, self._config.kv_cache_dtype, self.layer_groups)
        size = shape.bytes_per_block(item_bytes)
        if self.drafter is not None and self.drafter.kv_shape is not None:
            size += self.drafter.kv_shape.bytes_per_block(item_bytes)
        return size

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        """Compute the largest steps, to measure their memory."""
        limits = resolve_limits(
            msgspec.structs.replace(self.config, num_kv_blocks=None, kv_cache_memory=None),
            model_max_len=self.max_positions,
            vocab_size=self.model.vocab_size,
            bytes_per_block=1,
            free_bytes=_ENOUGH,
            whole_prompts=whole_prompts(self.model),
            groups=self.layer_groups,
            image_tokens=image_tokens(self.model),
            **self.backend.default_sizes | {"default_pipeline_depth": 1},
        )
        adapters = bool(self._config.lora_modules) or self._config.lora_folder is not None
        with rehearsed(partial(self.runner, grammars=False), limits, adapters=adapters):
            yield

    def loaded(self) -> RankLoaded:
        """Load the weights, including those of a draft model, and return the device memory that is left."""
        bytes_per_block = self.bytes_per_block
        self._fit_steps()
        shape = cache_shape(self.model, self.config.block_tokens, self._config.kv_cache_dtype, self.layer_groups)
        share = (shape.first_kv_head, shape.first_kv_head + shape.num_kv_heads)
        if self._config.pipeline_parallel_size > 1:
            share = (shape.first_layer, shape.first_layer + shape.num_layers)
        return RankLoaded(
            self.backend.free_memory(),
            bytes_per_block,
            share,
            weights=self.model.weights,
            halvings=self.backend.halvings,
        )

    def _fit_steps(self) -> None:
        """Rehearse the largest steps, and halve default sizes until the steps leave enough memory for KV.

        Raises `ConfigError` if the steps of the smallest default sizes, or of those in the settings, do not fit.
        """
        backend = self.backend
        while True:
            failure = ""
            try:
                if self._config.num_ranks == 1:
                    backend.rehearse(self._rehearsal())
                reserved = backend.reserved_memory
                if reserved <= _STEP_SHARE * (reserved + backend.free_memory()):
                    return
            except MemoryError as error:
                failure = str(error) or "out of memory"
            before = self.requested
            backend.halvings += 1
            self.requested = requested_sizes(self._config, **backend.default_sizes)
            if self.requested == before:
                backend.halvings -= 1
                break
            self.__dict__.pop("drafter", None)  # made for more slots
            gc.collect()
        if failure:
            raise ConfigError(
                f"the largest step does not fit in memory with the weights: {failure}",
                field="--max-num-batched-tokens",
                hint="lower it or --max-num-seqs",
            )

    @property
    def size_reasons(self) -> dict[str, str]:
        """Reasons for `max_num_seqs` and `max_num_batched_tokens` where the settings have none."""
        reasons = {}
        for name, default in (
            ("max_num_seqs", "default_num_seqs"),
            ("max_num_batched_tokens", "default_batched_tokens"),
        ):
            if getattr(self._config, name) is None:
                full = getattr(self.backend, default)
                reasons[name] = f"default of {self.choice.name}"
                if self.backend.default_sizes[default] < full:
                    reasons[name] += f" is {full:,}, lowered to leave memory for KV"
        return reasons

    def runner(self, limits: Limits, make: Callable[..., Runner] = Runner, *, grammars: bool = True) -> Runner:
        """Allocate the KV cache and return the runner."""
        return make(
            self.ops,
            self.model,
            limits,
            self._postprocess,
            self.drafter,
            self.compiler if grammars else None,
            self._config.kv_cache_dtype,
        )


def _tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint; bytes for a model without one. Raises `ValueError` if there is none."""
    if path is None:
        return byte_tokenizer()
    try:
        with open_checkpoint(path) as checkpoint:
            return load_tokenizer(checkpoint)
    except ModelError as error:
        raise ValueError(f"the model's tokenizer is unreadable: {error}") from error
