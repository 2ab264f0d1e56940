"""Drafters on the null pack, and the greedy text of a scripted model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fd_core.backends.null import NullBackend, NullModel, running_hashes
from fd_core.config import EngineConfig, Limits
from fd_core.runner.drafting import DraftContext, Drafter
from fd_core.runner.drafting.draft_model import DraftModelDrafter

LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 48,
    "block_size": 4,
    "num_kv_blocks": 64,
    "vocab_size": 257,
    "max_drafts": 5,
}


class Watched(NullModel):
    """Records how many tokens each forward computed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.computed: list[int] = []

    def forward(self, step: Any, cache: Any) -> Any:
        self.computed.append(len(step.token_ids))
        return super().forward(step, cache)


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def make(
    kind: type[Drafter], model: NullModel | None = None, cheap_tokens: int = 1000, **settings: int | str
) -> Drafter:
    """Return a drafter ready for use; `settings` are limits, or options of the drafter."""
    own = {name: settings.pop(name) for name in list(settings) if name in LIMITS}
    limits = Limits(**(LIMITS | own))  # type: ignore[arg-type]  # names are checked by the struct
    context = DraftContext(
        num_slots=limits.max_num_seqs,
        vocab_size=limits.vocab_size,
        block_size=limits.block_size,
        cheap_tokens=cheap_tokens,
        ops=NullBackend(EngineConfig(model="null")).make_ops(),
        model_path=Path("draft"),
        load_model=lambda path: model or NullModel(),
        options=settings,
    )
    drafter = kind(context)
    drafter.allocate(limits)
    return drafter


def draft_model(model: NullModel | None = None, **settings: int) -> DraftModelDrafter:
    drafter = make(DraftModelDrafter, model, **settings)
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def propose(drafter: Drafter, slots: Sequence[int], limit: int) -> list[list[int]]:
    tokens, counts = drafter.propose(ids(slots), limit)
    assert tokens.shape == (len(slots), limit)
    assert (counts <= limit).all()
    return [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]


def extend(drafter: Drafter, more: dict[int, list[int]]) -> None:
    """Deliver tokens to slots; the rest of their matrix rows is -1, as in a step's output."""
    tokens = np.full((len(more), max(map(len, more.values()))), -1, np.int32)
    for row, given in enumerate(more.values()):
        tokens[row, : len(given)] = given
    drafter.extend(ids(list(more)), tokens, ids([len(given) for given in more.values()]))


def greedy(text: Sequence[int], count: int) -> list[int]:
    """Return the scripted model's continuation of a text, without any cache."""
    model, state = NullModel(), running_hashes(np.uint64(0), ids(text))[-1]
    generated: list[int] = []
    for _ in range(count):
        generated.append(int(np.argmax(model.head(np.array([[state]]))[0])))
        state = running_hashes(state, ids(generated[-1:]))[-1]
    return generated
