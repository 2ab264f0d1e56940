"""Triton compilations: warm-up steps that compile all kernels of serving, and counters.

Counters show the cost of a start and requests that waited for a compiler. Triton calls one hook before it creates a
kernel and another one after it: in `JITFunction` in releases 3.2 and 3.3, in `triton.knobs` from 3.4 on, which also
reports if the kernel was read from its cache folder.

A kernel is compiled for each combination of constants, which depend on the number of tokens of a step and of its rows,
and on the number and kind of sampled rows. Tiles are powers of two, so steps of each power of two cover all of them;
one token more covers the next range.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fd_core.config import Limits
from fd_core.config.paths import find_cache_dir
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.warm_up import WarmUpRow, WarmUpStep
from fd_core.types import SamplingParams

logger = logging.getLogger(__name__)

_READ_SECONDS = 0.05
"""Threshold in seconds: a faster kernel was read from the cache. A heuristic for releases before 3.4."""


def use_cache_folder() -> Path:
    """Set Triton's cache folder to that of this project, unless the user set one."""
    folder = find_cache_dir() / "triton"
    return Path(os.environ.setdefault("TRITON_CACHE_DIR", str(folder)))


@dataclass(slots=True)
class Compilations:
    """Kernels created in this process since `watch`."""

    compiled: int = 0
    read: int = 0
    """Found in the cache folder."""
    seconds: float = 0.0
    at_start: CompilationStats | None = None
    """Compilations made before requests were served; None until then."""

    def watch(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start counting; existing hooks are still called."""
        now = threading.local()

        def before(**_: Any) -> None:
            now.begun, now.read = clock(), None

        def listen(*, cache_hit: bool, **_: Any) -> None:
            now.read = cache_hit

        def after(*, fn: Any, **_: Any) -> None:
            seconds = clock() - now.begun
            self._made(fn.name, seconds, read=seconds < _READ_SECONDS if now.read is None else now.read)

        ours: tuple[Callable[..., None], ...] = (before, after, listen)
        for (place, name), hook in zip(_hooks(), ours, strict=False):
            setattr(place, name, _both(getattr(place, name), hook))

    def stats(self) -> CompilationStats:
        """Return the counters."""
        made, start = self.compiled + self.read, self.at_start
        if start is None:
            return CompilationStats(start=made, start_seconds=self.seconds)
        return CompilationStats(
            start=start.start,
            serving=made - start.start,
            start_seconds=start.start_seconds,
            serving_seconds=self.seconds - start.start_seconds,
        )

    def begin_serving(self) -> None:
        """Log the cost of the start; from now on, compilations delay requests."""
        self.at_start = self.stats()
        logger.debug(
            "compiled %d kernels and found %d in %s, which took %.1f s",
            self.compiled,
            self.read,
            os.environ.get("TRITON_CACHE_DIR", "Triton's cache"),
            self.seconds,
        )

    def _made(self, kernel: str, seconds: float, *, read: bool) -> None:
        self.seconds += seconds
        if read:
            self.read += 1
        else:
            self.compiled += 1
        if self.at_start is not None:
            logger.warning(
                "the kernel %s was compiled while requests were served, which delayed them by %.2f s (%d so far); "
                "the warm-up should have compiled it",
                kernel,
                seconds,
                self.stats().serving,
            )


def _hooks() -> list[tuple[Any, str]]:
    """Return objects and names of Triton's hooks: before and after a kernel is created, and for its origin."""
    import triton

    if hasattr(triton, "knobs"):
        asked, compiling = triton.knobs.runtime, triton.knobs.compilation
        return [(asked, "jit_cache_hook"), (asked, "jit_post_compile_hook"), (compiling, "listener")]
    from triton.runtime.jit import JITFunction

    return [(JITFunction, "cache_hook"), (JITFunction, "compiled_hook")]


def _both(first: Any, second: Callable[..., None]) -> Callable[..., Any]:
    """Return a hook that calls both; returns the result of the first one: True prevents the compilation."""

    def hook(*arguments: Any, **facts: Any) -> Any:
        answer = first(*arguments, **facts) if first is not None else None
        if not answer:
            second(*arguments, **facts)
        return answer

    return hook


_GREEDY = SamplingParams(temperature=0.0)
_RANDOM = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01)
_OTHERS = (
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=0.0, prompt_logprobs=0),
    SamplingParams(temperature=0.0, prompt_logprobs=20),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.0, allowed_token_ids=(0,)),
)
"""Rare options, each with separate kernels. A bias occurs twice in a step."""


def warm_up_steps(limits: Limits, *, drafts: bool) -> Sequence[WarmUpStep]:
    """Return the steps in decreasing order of likelihood; `drafts` is True if steps may have drafts."""
    return [*_prompts(limits), *_decodes(limits, limits.max_drafts if drafts else 0), *_wishes(limits)]


def _prompts(limits: Limits) -> Iterator[WarmUpStep]:
    """Return one prompt of each size, many short prompts, and a prompt with decodes."""
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    for power in _powers(most):
        for tokens in sorted({power, min(power + 1, most)}):
            yield (WarmUpRow(tokens),)
    for tokens in (2, 17, 65):
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens // tokens)
        yield (WarmUpRow(tokens),) * rows
    decodes = min(limits.max_num_seqs - 1, 8)
    yield (WarmUpRow(min(most, limits.max_num_batched_tokens - decodes)), *(WarmUpRow(),) * decodes)


def _decodes(limits: Limits, most_drafts: int) -> Iterator[WarmUpStep]:
    """Return decodes of each size and sampling mode, with the maximum of drafts and with fewer."""
    for rows in sorted({*_powers(limits.max_num_seqs), limits.max_num_seqs}):
        for params in (_GREEDY, _RANDOM, _FILTERED):
            yield (WarmUpRow(params=params),) * rows
        for drafts in sorted({1, most_drafts}) if most_drafts else ():
            fitting = min(rows, limits.max_num_batched_tokens // (1 + drafts))
            for params in (_GREEDY, _RANDOM, _FILTERED):
                yield (WarmUpRow(4, drafts, params),) * fitting


def _wishes(limits: Limits) -> Iterator[WarmUpStep]:
    """Return steps with rare options: of one request, and of some of several."""
    for params in _OTHERS:
        tokens = 3 if params.prompt_logprobs is not None else 1
        asking = WarmUpRow(tokens, params=params)
        yield (asking,)
        yield (asking, asking, *(replace(asking, params=_GREEDY),) * 2)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
