"""Contract of a drafter, and its inputs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from fd_core.backends.contract import Backend, DraftLayer, LoadProgress, Model
from fd_core.config import EngineConfig, Limits, SpeculativeConfig
from fd_core.errors import ConfigError, ModelError
from fd_core.ops.contract import KVCache, KVShape, Ops, StepInput
from fd_core.types import IntArray

FLAG: Final = "--speculative-config"


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Inputs of a drafter's constructor, before limits are fixed."""

    num_slots: int
    vocab_size: int
    """Vocabulary size of the target model."""
    block_size: int
    """Tokens in a KV block."""
    cheap_tokens: int
    """Step size in tokens up to which drafts are verified; drafts beyond it would be wasted."""
    ops: Ops
    """The target's pack: arrays, models and KV caches of a drafter are on the same device."""
    model_path: Path
    """The draft model's checkpoint, for drafters that use one; backends without checkpoints ignore it."""
    load_model: Callable[[Path], Model]
    """Load a checkpoint onto the target's device. Raises `ConfigError` or `ModelError`."""
    options: Mapping[str, int | float | str] = field(default_factory=dict)
    """The fields of `--speculative-config` that the engine does not read itself."""
    kv_cache_dtype: str = "auto"
    """Dtype of the target's `KVShape`, for a drafter with a separate cache."""

    def whole(self, name: str, default: int, most: int | None = None) -> int:
        """Return an option that is an integer of at least 1, and at most `most`. Raises `ConfigError` otherwise."""
        value = self.options.get(name, default)
        if type(value) is not int or value < 1 or (most is not None and value > most):
            wanted = "of at least 1" if most is None else f"from 1 to {most}"
            raise ConfigError(f"expected an integer {wanted} for {name}, got {value!r}", field=FLAG)
        return value


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A step of the target, for a drafter that reads its hidden states."""

    step: StepInput
    """The step with the tokens that follow its own, so that the last one of a slot is the last token of its text.
    `states` are the sums of what the head reads; `logits_rows` the last tokens that the target computed of `slots`."""
    cache: KVCache
    """The target's, which has a layer for the head."""
    head: DraftLayer
    slots: IntArray
    """int32[N], slots that sampled."""
    lengths: IntArray
    """int32[N], tokens of their texts; the target has computed all but the last one."""
    room: IntArray
    """int32[N], tokens for which the slot has KV blocks."""
    tokens: IntArray
    """int32[num_slots, *], texts of all slots."""
    tables: IntArray
    """int32[1, num_slots, blocks], block tables of all slots."""


class SlotError(Exception):
    """Failure of the request in one slot; the runner fails that request and continues with the others."""

    def __init__(self, slot: int, message: str) -> None:
        super().__init__(message)
        self.slot = slot


class Drafter(abc.ABC):
    """Drafts for all slots of one runner, for any number of requests; created and used by one thread at a time.

    For each slot the runner calls `admit` once when a request starts there, then, for each step that yields tokens,
    `extend` with those and `propose`. A request may end without notice, until the next `admit` of the slot.

    An exception in `admit` fails only the request of that slot. `extend` and `propose` raise `SlotError` for the same
    effect; the runner then admits the other slots again after `extend`, or repeats `propose` for them. Any other
    exception is an engine error.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """Supported options; others are rejected."""
    uses_model: ClassVar[bool] = False
    """True if it reads `DraftContext.model_path`; then the user must name a model."""
    reads_states: ClassVar[bool] = False
    """True if the engine loads a head with the target: the one at `DraftContext.model_path`, or without `uses_model`
    the layer for multi-token prediction of the target's checkpoint. Its KV is a layer of the target's cache: it is
    saved, restored, shared and sent with the target's, and `read` writes it in every step. Of several ranks, each
    computes its share of the head, so the number of its forwards may depend only on what it is given."""
    kv_shape: KVShape | None = None
    """Set at construction by a drafter with a separate KV cache. Memory for as many blocks of this shape as the target
    has is reserved, and allocated in `allocate`."""

    @abc.abstractmethod
    def __init__(self, context: DraftContext) -> None:
        """Read the options and load the models. Raises `ConfigError` with the field `--speculative-config`."""

    def allocate(self, limits: Limits) -> None:  # noqa: B027 - most drafters need no memory of the device
        """Allocate the memory of `kv_shape`; called once, before the methods below.

        A forward of a draft model computes at most `limits.max_num_batched_tokens` tokens. The blocks may be too few
        for all slots at once.
        """

    @abc.abstractmethod
    def admit(self, slot: int, tokens: IntArray) -> None:
        """Start a request with the known `tokens` int32[n]; discard the slot's previous state."""

    def read(self, given: HiddenStates) -> None:  # noqa: B027 - only for drafters that read hidden states
        """Compute the head for all tokens of a step; called before `extend`, also for steps that yield no tokens.

        The KV of a token must be written here, as later steps do not compute it again. Positions after the texts may be
        written up to `room`; the next step overwrites them.
        """

    @abc.abstractmethod
    def extend(self, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Append the first counts[i] of row i of `tokens` int32[n, w] to the request in slots[i], each slot at most
        once.

        `counts` is int32[n], at least 1; later entries are undefined.
        """

    @abc.abstractmethod
    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Return drafts for `slots` int32[n], each at most once: tokens int32[n, limit] and counts int32[n].

        The first counts[i] of row i are draft tokens, ids below the target's `vocab_size`; counts[i] is 0 without a
        draft. May be called again for some of the slots in any order, and then returns the same drafts.
        """


class PerSlotDrafter(Drafter):
    """Base class of a drafter for one slot at a time, with `admit`, `grow` and `guess`."""

    @abc.abstractmethod
    def grow(self, slot: int, tokens: IntArray) -> None:
        """Append `tokens` int32[n] to the request in `slot`."""

    @abc.abstractmethod
    def guess(self, slot: int, limit: int) -> IntArray:
        """Return up to `limit` draft tokens, int32, for `slot`."""

    def extend(self, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Grow one slot after the other; an exception in `grow` fails only its slot."""
        for slot, row, count in zip(slots.tolist(), tokens, counts.tolist(), strict=True):
            with self._concerning(slot):
                self.grow(slot, row[:count])

    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Guess for one slot after the other; an exception in `guess` fails only its slot."""
        tokens, counts = np.zeros((len(slots), limit), np.int32), np.zeros(len(slots), np.int32)
        for row, slot in enumerate(slots.tolist()):
            with self._concerning(slot):
                guess = self.guess(slot, limit)
                counts[row] = len(guess)
                tokens[row, : len(guess)] = guess
        return tokens, counts

    @contextmanager
    def _concerning(self, slot: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise SlotError(slot, f"the drafter {self.name} failed: {type(error).__name__}: {error}") from error


def check_drafter(drafter: type[Drafter], config: SpeculativeConfig) -> None:
    """Check that a drafter supports the model and options of its config. Raises `ConfigError`."""
    if drafter.uses_model and config.model is None:
        raise ConfigError(
            f"{config.method} needs a draft model",
            field=FLAG,
            hint='add "model": a name, a folder or a .gguf file',
        )
    if config.model is not None and not drafter.uses_model:
        raise ConfigError(f"{config.method} uses no draft model, got {config.model!r}", field=FLAG)
    unknown = sorted(set(config.options) - set(drafter.options))
    if unknown:
        raise ConfigError(
            f"{config.method} does not support {', '.join(unknown)}",
            field=FLAG,
            hint=f"it supports {', '.join(drafter.options) or 'no options'}",
        )


def make_drafter(
    drafter: type[Drafter], config: EngineConfig, backend: Backend, ops: Ops, model: Model, progress: LoadProgress
) -> Drafter | None:
    """Create a drafter for the loaded `model`, None without speculation. Raises `ConfigError` or `ModelError`."""
    speculative = config.speculative
    if speculative is None or not speculative.num_speculative_tokens:
        return None

    def load(path: Path) -> Model:
        try:
            return backend.load_model(path, ops, progress)
        except (ConfigError, ModelError) as error:
            raise type(error)(f"draft model: {error.message}", field=FLAG, hint=error.hint) from error

    check_drafter(drafter, speculative)
    return drafter(
        DraftContext(
            num_slots=config.max_num_seqs or backend.default_sizes["default_num_seqs"],
            vocab_size=model.vocab_size,
            block_size=config.block_tokens,
            cheap_tokens=speculative.cheap_tokens,
            ops=ops,
            model_path=Path(speculative.model or ""),
            load_model=load,
            options=speculative.options,
            kv_cache_dtype=config.kv_cache_dtype,
        )
    )
