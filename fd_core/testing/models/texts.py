"""Requests, plans, and checked collection of an engine's deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args, get_type_hints

import numpy as np

from fd_core.engine.core import Engine
from fd_core.types import Delta, FinishReason, Pooling, RequestSpec, SamplingParams, StepPlan, TokenLogprobs

POOLINGS: Final[tuple[Any, ...]] = get_args(get_type_hints(Pooling)["kind"])
"""Kinds of vectors of a prompt."""


class Texts:
    """Collects an engine's deltas and checks the format of every stream."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.vectors: dict[str, bytes] = {}
        self.prompt_scores: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.errors: dict[str, str] = {}
        self.deltas = 0
        """Number of deltas."""

    def take(self, deltas: Iterable[Delta]) -> None:
        """Append deltas; none may follow an end or contain a negative id."""
        for delta in deltas:
            self.deltas += 1
            assert delta.request_id not in self.ends, "a delta after the end"
            assert all(token >= 0 for token in delta.token_ids)
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
            assert all(token >= 0 for score in delta.logprobs or () for token in score.top_ids), (
                "a negative id reached the log-probabilities"
            )
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.scores.setdefault(delta.request_id, []).extend(delta.logprobs or ())
            if delta.pooled is not None:
                self.vectors[delta.request_id] = delta.pooled
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.prompt_scores, "log-probabilities of a prompt were delivered twice"
                self.prompt_scores[delta.request_id] = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta.finish_reason
            if delta.error is not None:
                self.errors[delta.request_id] = delta.error


def run(engine: Engine, specs: Sequence[RequestSpec], max_steps: int = 20_000) -> Texts:
    """Submit requests together and step until all have ended."""
    texts = Texts()
    for spec in specs:
        texts.take(engine.submit(spec))
    for _ in range(max_steps):
        if not engine.has_work:
            break
        texts.take(engine.step())
        engine.check_integrity()
    assert not engine.has_work, "the engine did not become idle"
    return texts


def greedy(name: str, prompt: Iterable[int], max_tokens: int, **changes: object) -> RequestSpec:
    """Return a request that generates exactly `max_tokens`, unless `stop_token_ids` end it."""
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    fields = ("adapter", "cache_salt", "prefill_at", "priority", "tenant")
    spec = {field: changes.pop(field) for field in fields if field in changes}
    return RequestSpec(
        request_id=name,
        prompt=tuple(prompt),
        params=SamplingParams(**(params | changes)),  # type: ignore[arg-type]  # fields by name
        **spec,  # type: ignore[arg-type]  # fields by name
    )


def plan_of(step: int, rows: Sequence[tuple[int, int, int, int, int, bool]], **parts: Any) -> StepPlan:
    """Return a plan of rows (slot, gen, start, tokens including drafts, drafts, samples)."""
    slots, gens, starts, tokens, drafts, samples = np.array(rows, np.int32).reshape(-1, 6).T.copy()
    return StepPlan(1, step, slots, gens, starts, tokens, drafts, samples.astype(np.bool_), **parts)
