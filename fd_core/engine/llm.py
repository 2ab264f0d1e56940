"""Offline use: a model as a Python object, without server or event loop."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.config import EngineConfig
from fd_core.config.constraints import make_settings
from fd_core.engine.building.assets import find_assets
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.process.messages import EngineInfo, EngineStats
from fd_core.engine.vectors import check_dimensions, pooling_request, vector_of
from fd_core.errors import BadRequest
from fd_core.types import Delta, FinishReason, Pooling, RequestSpec, SamplingParams, TokenLogprobs
from fd_core.types.checks import check_ids, check_sampling

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """The result of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token if `SamplingParams.prompt_logprobs` requested them; None for the first."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    token_times: list[float] = field(default_factory=list)
    """Seconds from the start of `generate` to the step that delivered each token."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token; NaN if there was none."""
        return self.token_times[0] if self.token_times else float("nan")


class LLM:
    """A loaded model.

    Keyword arguments are the fields of `fd_core.config.EngineConfig`; `lora_modules` may be a mapping of names to
    folders as well. Not safe for several threads.

    Examples:
        >>> llm = LLM("smollm2")
        >>> llm.generate("The capital of France is", SamplingParams(max_tokens=5, temperature=0))[0].text
    """

    def __init__(self, model: str, **settings: Any) -> None:
        if isinstance(modules := settings.get("lora_modules"), Mapping):
            settings["lora_modules"] = tuple(f"{name}={folder}" for name, folder in modules.items())
        assets = find_assets(make_settings(EngineConfig, {"model": model, **settings}))
        self.tokenizer = assets.tokenizer
        self._engine: Engine = load_engine(assets.config, assets.path, progress=lambda *_: None)
        self._requests = 0

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine."""
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters of the engine."""
        return self._engine.stats()

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend."""
        defaults = self.info.generation
        return SamplingParams(max_tokens=defaults.max_new_tokens or SamplingParams().max_tokens, **defaults.sampling())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_delta: Callable[[int, Delta], None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all at once, in the order given.

        A prompt is text or token ids. `params` applies to every prompt or is one for each; without a seed, the index of
        the prompt is its seed. `on_delta(index, delta)` is called as tokens arrive. `adapter` names one of
        `lora_modules` for every prompt, or one or None for each. Raises `BadRequest` for a
        prompt that can never run and for a sampling parameter out of range. A step that fails raises: there is no
        second engine here to resume on.
        """
        if not self.info.generates:
            raise BadRequest(
                f"{self.info.model} has no output projection and cannot generate text; use embed", field="model"
            )
        items = _as_list(prompts)
        given = [params or self.default_params()] * len(items) if not isinstance(params, Sequence) else list(params)
        if len(given) != len(items):
            raise BadRequest(f"got {len(items)} prompts but {len(given)} sampling parameters", field="params")
        for parameters in given:
            check_sampling(parameters, self.info.vocab_size)
        digests = self._digests(adapter, len(items))
        prefix = secrets.token_hex(4)
        index_of = {f"{prefix}-{self._requests + index}": index for index in range(len(items))}
        self._requests += len(items)
        results = [Completion() for _ in items]
        start = time.perf_counter()

        def take(deltas: list[Delta]) -> None:
            now = time.perf_counter() - start
            for delta in deltas:
                index = index_of.get(delta.request_id)
                if index is None:
                    continue
                if delta.error is not None:
                    raise BadRequest(f"prompt {index}: {delta.error}", field="prompts")
                result = results[index]
                result.token_ids += delta.token_ids
                result.token_times += [now] * len(delta.token_ids)
                result.finish_reason = delta.finish_reason or result.finish_reason
                result.cached_tokens += delta.cached_tokens or 0
                if delta.logprobs is not None:
                    result.logprobs = (result.logprobs or []) + list(delta.logprobs)
                if delta.prompt_logprobs is not None:
                    result.prompt_logprobs = [None, *delta.prompt_logprobs]
                if on_delta is not None:
                    on_delta(index, delta)

        requests = (
            RequestSpec(
                request_id=request_id,
                prompt=self._tokens(item),
                params=parameters,
                eos_token_ids=self.info.eos_token_ids,
                adapter=digest,
            )
            for request_id, item, parameters, digest in zip(index_of, items, given, digests, strict=True)
        )
        self._run(requests, take)
        for result in results:
            result.text = self.tokenizer.decode(result.token_ids)
        return results

    def _digests(self, adapter: str | Sequence[str | None] | None, count: int) -> list[str]:
        """Return the digest of each prompt's adapter, empty for none."""
        names = [adapter] * count if adapter is None or isinstance(adapter, str) else [*adapter]
        if len(names) != count:
            raise BadRequest(f"got {count} prompts but {len(names)} adapters", field="adapter")
        known = {info.name: info.digest for info in self.info.adapters}
        for name in names:
            if name is not None and name not in known:
                there = ", ".join(known) or "none"
                raise BadRequest(f"unknown adapter {name!r}; loaded: {there}", field="adapter")
        return ["" if name is None else known[name] for name in names]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return an embedding of each prompt, text or token ids: float32[n, H], or [n, dimensions] if cut.

        Pooling and length are those of the checkpoint, see `EngineInfo.vectors`, and of the setting `pooling`;
        `adapter` is as in `generate`. Raises `BadRequest` for a prompt that can never run, for an unknown adapter
        and for `dimensions` out of range.
        """
        check_dimensions(dimensions, self.info.state_size)
        vectors = [vector_of(pooled, self.info.vectors, dimensions) for pooled in self._pooled(prompts, adapter)]
        return np.array(vectors, np.float32).reshape(len(vectors), dimensions or self.info.state_size)

    def _pooled(
        self, prompts: Prompt | Sequence[Prompt], adapter: str | Sequence[str | None] | None = None
    ) -> list[bytes]:
        items = _as_list(prompts)
        digests = self._digests(adapter, len(items))
        pooling, prefix = Pooling(self.info.vectors.pooling), secrets.token_hex(4)
        found: dict[str, bytes] = {}

        def take(deltas: list[Delta]) -> None:
            for delta in deltas:
                if delta.error is not None:
                    raise BadRequest(f"prompt {delta.request_id.rpartition('-')[2]}: {delta.error}", field="prompts")
                if delta.pooled is not None:
                    found[delta.request_id] = delta.pooled

        requests = (
            pooling_request(f"{prefix}-{index}", self._tokens(item), pooling, adapter=digest)
            for index, (item, digest) in enumerate(zip(items, digests, strict=True))
        )
        self._run(requests, take)
        return [found[f"{prefix}-{index}"] for index in range(len(items))]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of a prompt. Raises `BadRequest` for ids that the model has no embedding row for."""
        if isinstance(prompt, str):
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            try:
                ids = tuple(each if isinstance(each, bool) else operator.index(each) for each in prompt)
            except TypeError as error:
                raise BadRequest("prompts: expected text or a list of integers", field="prompts") from error
        check_ids(ids, self.info.vocab_size, "prompts", text_of=self.tokenizer.token_text)
        return ids

    def _run(self, requests: Iterable[RequestSpec], take: Callable[[list[Delta]], None]) -> None:
        """Compute requests until all have ended. An early exit, such as Ctrl-C, aborts them: none is left running."""
        try:
            for request in requests:
                take(self._engine.submit(request))
            while self._engine.has_work:
                take(self._engine.step())
        except BaseException:
            self._engine.abort_all()
            raise

    def close(self) -> None:
        """Stop the engine's threads."""
        self._engine.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    texts = [item for item in prompts if not isinstance(item, int)]
    if ids and texts:
        raise BadRequest("prompts mixes token ids and prompts", field="prompts")
    return [ids] if ids else texts
