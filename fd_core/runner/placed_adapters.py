"""The adapters of a runner: which place each has on the device, and the forward pass that adds them."""

from __future__ import annotations

from collections.abc import Iterable

from fd_core.backends.contract import AdaptableModel, Model
from fd_core.errors import ModelError
from fd_core.ops.contract import Forward, KVCache, Ops
from fd_core.ops.weights import Adapter


class RunnerAdapters:
    """Places of adapters, 1 and up; an adapter keeps its place for as long as it is there."""

    def __init__(self, ops: Ops, model: Model, cache: KVCache) -> None:
        self._ops = ops
        self._cache = cache
        self._model = model
        self.places: list[Adapter | None] = []
        """What is at each place, from 1 on."""
        self._forwards: tuple[Forward, Forward] | None = None

    @property
    def held(self) -> list[Adapter]:
        """The adapters that are there."""
        return [adapter for adapter in self.places if adapter is not None]

    def prepare(self) -> None:
        """Set up what adapters may need before the first is held, if the model takes any. Raises as `replace`."""
        if isinstance(self._model, AdaptableModel):
            self.replace(())

    def replace(self, adapters: Iterable[Adapter]) -> None:
        """Hold these adapters alone; no request uses one that goes. `ModelError` and `MemoryError` change nothing."""
        wanted = {adapter.digest: adapter for adapter in adapters}
        places = [wanted.pop(held.digest, None) if held is not None else None for held in self.places]
        for adapter in wanted.values():
            if None in places:
                places[places.index(None)] = adapter
            else:
                places.append(adapter)
        if not isinstance(self._model, AdaptableModel):
            raise ModelError(f"{self._model.architecture} on this backend takes no adapters", field="lora_modules")
        model = self._model.with_adapters(places)
        before = None if self._forwards is None else self._forwards[0]
        forward = self._ops.compile_adapted(model.forward, self._cache, before)
        self._forwards = forward, self._ops.compile_adapted(model.states)
        self._model = model
        self.places = places

    def place(self, digest: str) -> int:
        """Return the place of an adapter; `RuntimeError` if it is not held."""
        for index, adapter in enumerate(self.places, start=1):
            if adapter is not None and adapter.digest == digest:
                return index
        raise RuntimeError(f"the runner does not hold the adapter {digest[:12]}")

    @property
    def forwards(self) -> tuple[Forward, Forward]:
        """The model's `forward` and `states` for steps with adapters."""
        if self._forwards is None:
            raise RuntimeError("the runner holds no adapters")
        return self._forwards
