"""Contract of a drafter, and its inputs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from fd_core.backends.contract import Backend, LoadProgress, Model
from fd_core.config import EngineConfig, Limits, SpeculativeConfig
from fd_core.errors import ConfigError, ModelError
from fd_core.ops.contract import KVShape, Ops
from fd_core.types import IntArray

FLAG: Final = "--speculative-config"


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Inputs from which a drafter is made, before limits are fixed."""

    num_slots: int
    vocab_size: int
    """Vocabulary of the target, which is the model whose tokens are guessed."""
    block_size: int
    """Tokens in a KV block."""
    cheap_tokens: int
    """Step size in tokens up to which drafts are verified; drafts beyond it would be made in vain."""
    ops: Ops
    """The target's pack: arrays, models and KV caches of a drafter live on the same device."""
    model_path: Path
    """The draft model's checkpoint, for drafters that use one; backends without checkpoints do not look at it."""
    load_model: Callable[[Path], Model]
    """Load a checkpoint onto the target's device. Raises `ConfigError` or `ModelError`."""
    options: Mapping[str, int | float | str] = field(default_factory=dict)
    """The fields of `--speculative-config` that the engine does not read itself."""
    kv_cache_dtype: str = "auto"
    """The dtype of the target's `KVShape`, for a cache of the drafter's own."""

    def whole(self, name: str, default: int) -> int:
        """Return an option that is a whole number of at least 1. Raises `ConfigError` for anything else."""
        value = self.options.get(name, default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1", field=FLAG)
        return value


class SlotError(Exception):
    """A failure that concerns the request in one slot; the runner ends that request and goes on with the others."""

    def __init__(self, slot: int, message: str) -> None:
        super().__init__(message)
        self.slot = slot


class Drafter(abc.ABC):
    """Guesses for all slots of one runner; made and used by one thread at a time.

    For each slot the runner calls `admit` once at the beginning of a residency, then, for each step that yields tokens,
    `extend` with those and `propose`. A residency may end without notice; the next `admit` of the slot says so.

    What `admit` raises ends the request of that slot alone. `extend` and `propose` raise `SlotError` for the same; the
    runner then admits the other slots anew after `extend`, or asks again for their guesses. Anything else that they
    raise is a fault of the engine.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """Options that it reads; others are refused."""
    uses_model: ClassVar[bool] = False
    """True if it reads `DraftContext.model_path`; then the user must name a model."""
    kv_shape: KVShape | None = None
    """Set at construction by a drafter with a KV cache of its own. Memory for as many blocks of this shape as the
    target has is kept free for it, which it takes in `allocate`."""

    @abc.abstractmethod
    def __init__(self, context: DraftContext) -> None:
        """Read the options and load what is needed. Raises `ConfigError` naming `--speculative-config`."""

    def allocate(self, limits: Limits) -> None:  # noqa: B027 - most drafters need no memory of the device
        """Take the memory that `kv_shape` announced; called once, before anything below."""

    @abc.abstractmethod
    def admit(self, slot: int, tokens: IntArray) -> None:
        """A residency begins with the known `tokens` int32[n]; forget what the slot held before."""

    @abc.abstractmethod
    def extend(self, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """The requests in `slots` int32[n], each once, went on: row i of `tokens` int32[n, w] by its first counts[i].

        `counts` is int32[n], at least 1; later entries are undefined.
        """

    @abc.abstractmethod
    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Return (tokens int32[n, limit], counts int32[n]): what may come next in `slots` int32[n], each once.

        The first counts[i] of row i are guesses, ids below the target's `vocab_size`; 0 where there is no good one.
        """


class PerSlotDrafter(Drafter):
    """A drafter that looks at one slot at a time: it has `admit`, `grow` and `guess`."""

    @abc.abstractmethod
    def grow(self, slot: int, tokens: IntArray) -> None:
        """The request in `slot` went on with `tokens` int32[n]."""

    @abc.abstractmethod
    def guess(self, slot: int, limit: int) -> IntArray:
        """Return up to `limit` tokens, int32, that may come next in `slot`."""

    def extend(self, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Grow one slot after the other; what `grow` raises concerns its slot alone."""
        for slot, row, count in zip(slots.tolist(), tokens, counts.tolist(), strict=True):
            with self._concerning(slot):
                self.grow(slot, row[:count])

    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Guess for one slot after the other; what `guess` raises concerns its slot alone."""
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
    """Check that a drafter reads what it was given. Raises `ConfigError`."""
    if drafter.uses_model and config.model is None:
        raise ConfigError(
            f"{config.method} drafts with a model, but none is named",
            field=FLAG,
            hint='give "model": a name, a folder or a .gguf file',
        )
    if config.model is not None and not drafter.uses_model:
        raise ConfigError(f"{config.method} drafts without a model, but {config.model!r} is named", field=FLAG)
    unknown = sorted(set(config.options) - set(drafter.options))
    if unknown:
        raise ConfigError(
            f"{config.method} does not read {', '.join(unknown)}",
            field=FLAG,
            hint=f"it reads {', '.join(drafter.options) or 'no options'}",
        )


def make_drafter(
    drafter: type[Drafter], config: EngineConfig, backend: Backend, ops: Ops, model: Model, progress: LoadProgress
) -> Drafter | None:
    """Make a drafter for the loaded `model`, None without speculation. Raises `ConfigError` or `ModelError`."""
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
            num_slots=config.max_num_seqs,
            vocab_size=model.vocab_size,
            block_size=config.block_size,
            cheap_tokens=speculative.cheap_tokens,
            ops=ops,
            model_path=Path(speculative.model or ""),
            load_model=load,
            options=speculative.options,
            kv_cache_dtype=config.kv_cache_dtype,
        )
    )
