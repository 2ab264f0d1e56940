"""Requests and events of one engine, step by step, and the comparison of everything it delivers with a judge."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.engine.core import Engine
from fd_core.engine.process.messages import ControlOrder, UpdateWeights
from fd_core.errors import FdError
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.contract import KVCache
from fd_core.scheduling.requests import Request
from fd_core.testing.hooks.purity import moving_clocks
from fd_core.testing.kit.judging import Judge
from fd_core.testing.kit.privacy import kept_out_of_logs
from fd_core.testing.kit.target import Target
from fd_core.testing.models.checkpoints import FORMER_STEP_CASE, STEP_CASE, rewrite_weights
from fd_core.testing.models.drafting import speculation
from fd_core.testing.models.stepper import parts_of
from fd_core.testing.models.texts import Texts
from fd_core.types import NO_CHOICE, FinishReason, IntArray, RequestSpec, SamplingParams, TokenLogprobs

_MOST_STEPS: Final = 20_000
_MOST_IDLE: Final = 1000
"""Consecutive steps that compute nothing while requests wait, 5 ms each."""
_IDLE_SECONDS: Final = 3600
"""Time that passes, by the clocks of the machine, before requests that follow others."""
_ORDERED_AT: Final = 4
"""Step before which orders are given."""
_SPARE_BLOCKS: Final = 4
"""Blocks that are copied while steps use the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events between the steps of an engine, in addition to its requests."""

    arrivals: int = 0
    """Steps between two requests; 0 submits all at once."""
    delivered: int = 0
    """Tokens of each text that an earlier engine delivered."""
    abort: int | None = None
    """Step after which the second and the last request are aborted."""
    poison: int | None = None
    """Token whose embedding is NaN, in the prompt of an additional request; earlier ones left NaN in every block."""
    copies: bool = False
    """Copy spare blocks of the cache on a thread."""
    in_thread: bool = False
    """Run the neighbour on a thread instead of in turns."""
    built_last: bool = False
    """Load the engine after its neighbour."""
    first_number: int = 0
    """Number of the first step, and gen of the first request of each slot."""
    eager: bool = False
    """Admit requests without reserving blocks for their output: much more preemption."""
    forgets_prefixes: bool = False
    """Evict cached prefixes at each preemption, so that KV returns from the host only."""
    orders: Sequence[ControlOrder] = ()
    """Orders of an operator, all given after a few steps of the requests, each time."""
    updated: bool = False
    """Load the engine with other weights, which an order replaces before the first step."""
    again: bool = False
    """Submit the requests a second time under the same names, in reversed order, when all have ended."""
    reloaded: tuple[str, str, Path] | None = None
    """Name of the adapter that is unloaded when all requests have ended, and name and folder of the one that replaces
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One engine on a target with requests and events, and possibly another one next to it."""

    target: Target
    judge: Judge
    settings: Mapping[str, Any]
    adapters: Sequence[tuple[str, Path]]
    """Names and folders of adapters that are loaded after those of the settings, one by one."""
    drafts: int
    wrong_drafts: float
    specs: Sequence[RequestSpec]
    full: Sequence[RequestSpec]
    """Requests that fill the engine, submitted when all others have ended."""
    events: Events
    stored: str = ""
    """Suffix of the case of the checkpoint, see `write_checkpoint`."""
    drafter: bool = False
    """A draft model drafts: the model itself, or one with other weights if drafts may be wrong."""
    agrees: bool = False
    """A draft model with the right weights drafts exactly the texts."""
    neighbour: Scenario | None = None
    """The other engine and its requests."""

    def check(self) -> None:
        """Run it and compare texts, scores, vectors and ends. Raises `AssertionError`."""
        scenarios = [self] if self.neighbour is None else [self, self.neighbour]
        order = -1 if self.events.built_last else 1
        with ExitStack() as stack:
            engines = [stack.enter_context(each.loaded()) for each in scenarios[::order]][::order]
            move = stack.enter_context(moving_clocks(self.target.cls))
            for spec in self._poisoned(self.specs[0]):  # logs may name them, without their tokens
                stack.enter_context(kept_out_of_logs(ids=spec.prompt[-3:] if len(spec.prompt) > 2 else ()))
            steps = [each.drive(engine, move) for each, engine in zip(scenarios, engines, strict=True)]
            run: Callable[..., None] = _in_threads if self.events.in_thread else _in_turns
            run(*steps)

    @contextmanager
    def loaded(self) -> Iterator[Engine]:
        """Yield its engine."""
        spare = _SPARE_BLOCKS if self.events.copies else 0
        settings = {**self.settings, "num_kv_blocks": self.settings["num_kv_blocks"] + spare}
        first = self.events.first_number
        former = self.judge.case.replace(STEP_CASE, FORMER_STEP_CASE)
        case = former if self.events.updated else self.judge.case + self.stored
        draft = f"{former}@BF16" if self.wrong_drafts else case  # a folder that no case rewrites
        if self.drafter and (path := self.target.checkpoint(draft)) is not None:
            settings["speculative"] = speculation(self.drafts, path)
        if self.events.updated and (path := self.target.checkpoint(case)) is not None:
            rewrite_weights(path, case)
        with self.target.engine(
            self.drafts,
            self.judge.whole(),
            self.wrong_drafts,
            case=case,
            epoch=first or 1,
            first_step=first,
            **settings,
        ) as engine:
            probe = parts_of(engine)
            probe.slots.gen[:] = first
            if self.events.eager:
                probe.control.growth = lambda *_: 0  # type: ignore[method-assign]  # patched for the case
            if self.events.forgets_prefixes:
                release = probe.running_batch.release

                def forgetting(slot: int) -> Request:
                    request = release(slot)
                    probe.pool.forget_prefixes()
                    return request

                probe.running_batch.release = forgetting  # type: ignore[method-assign]  # patched for the case
            for name, path in self.adapters:
                engine.load_adapter(name, path)
            if self.events.updated:
                self._update(engine, former)
            if self.events.poison is not None and "kv_transfer" not in self.target.limits:
                fill_with_nan(engine.probe().runner.cache)
            before = engine.stats().compilations
            yield engine
            for _ in range(2):
                after = engine.stats().compilations
                check_compilations(before, after)
                before = after

    def _update(self, engine: Engine, former: str) -> None:
        """Replace the weights by equal ones, from the same folder or, if requests are repeated, from another."""
        failures: list[FdError | None] = []
        folder = self.target.checkpoint(self.judge.case if self.events.again else former)
        if folder is not None and not self.events.again:
            rewrite_weights(folder, self.judge.case)
        for path in (Path("absent"), folder or Path("scripted")):
            engine.control(UpdateWeights(str(path)), failures.append)
            engine.begin_steps()
        assert failures[1:] == [None], f"the weights were not updated: {failures}"

    def drive(self, engine: Engine, move: Callable[[float], None]) -> Generator[None]:
        """Run the requests with all events, then those that fill the engine; yields after each step.

        `move` sets the clocks ahead, as the engine is idle in between.
        """
        specs = self.specs
        resumed = [self._resumed(spec) for spec in specs]
        poisoned = self._poisoned(specs[0])
        queue = [*resumed[:1], *poisoned, *resumed[1:]]
        victims = {specs[1 % len(specs)].request_id, specs[-1].request_id} if self.events.abort is not None else set()
        texts = Texts()
        with copying(engine) if self.events.copies else ExitStack():
            yield from self._steps(engine, queue, texts, victims, self.events.orders)
        for spec in poisoned:
            self._check_poisoned(spec, texts)
        if self.agrees and self.drafter and not self.wrong_drafts:
            drafts = engine.stats().scheduler.drafts
            fits = 0 < drafts.proposed <= drafts.accepted / 0.9  # rounding may decide a few
            assert fits, f"a draft model with the right weights: of {drafts.proposed} drafts {drafts.accepted} fit"
        for spec in resumed:
            self._check(spec, texts, may_be_aborted=spec.request_id in victims)
        move(_IDLE_SECONDS)
        if self.events.again:
            texts = Texts()
            yield from self._steps(engine, resumed[::-1], texts, set(), self.events.orders)
            for spec in resumed:
                self._check(spec, texts)
        if self.events.reloaded is not None:
            before, after, folder = self.events.reloaded
            engine.unload_adapter(before)
            engine.begin_steps()  # which releases it
            engine.load_adapter(after, folder)
        texts = Texts()
        yield from self._steps(engine, self.full, texts, set())
        for spec in self.full:
            self._check(spec, texts)

    def _steps(
        self,
        engine: Engine,
        specs: Sequence[RequestSpec],
        texts: Texts,
        victims: set[str],
        orders: Sequence[ControlOrder] = (),
    ) -> Generator[None]:
        waiting, idle = list(specs), 0
        ended: list[FdError | None] = []
        for step in range(_MOST_STEPS):
            if step == _ORDERED_AT:
                for order in orders:
                    engine.control(order, ended.append)
            if step == self.events.abort and victims:
                for spec in waiting:  # an unknown request cannot be aborted
                    if spec.request_id in victims:
                        texts.take(engine.submit(spec))
                waiting = [spec for spec in waiting if spec.request_id not in victims]
                texts.take(engine.abort(sorted(victims)))
            while waiting and (not self.events.arrivals or not step % self.events.arrivals):
                texts.take(engine.submit(waiting.pop(0)))
                if self.events.arrivals:
                    break
            if not engine.has_work and not waiting:
                assert not any(ended), f"an order failed: {next(filter(None, ended))}"
                return
            if engine.has_work:
                before = texts.deltas
                texts.take(engine.step())
                idle = idle + 1 if texts.deltas == before and not engine.num_in_flight else 0
                if idle > _MOST_IDLE:
                    break
                if not self.events.copies:  # their blocks have no owner
                    engine.check_integrity()
            yield
        unfinished = [spec.request_id for spec in specs if spec.request_id not in texts.ends]
        raise AssertionError(f"{unfinished[:5]} did not end in {step + 1} steps, of which the last {idle} were idle")

    def _resumed(self, spec: RequestSpec) -> RequestSpec:
        """Return a request that continues after the first tokens of its text."""
        count = self.events.delivered
        if spec.pooling is not None or len(self.judge.texts[spec.request_id]) <= count:
            return spec
        return msgspec.structs.replace(spec, delivered=tuple(self.judge.texts[spec.request_id][:count]))

    def _poisoned(self, like: RequestSpec) -> list[RequestSpec]:
        """Return a request whose logits are not finite: inside the model, or by a penalty without a checkpoint."""
        if self.events.poison is None:
            return []
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
        prompt = list(like.prompt)[: self.settings["max_model_len"] - 1]
        if self.target.cls.needs_checkpoint:
            prompt[max(len(prompt) // 2, len(prompt) - 3)] = self.events.poison  # within any window
        else:
            params = msgspec.structs.replace(params, repetition_penalty=1e-60)
        return [RequestSpec(request_id="poisoned", prompt=tuple(prompt), params=params)]

    def _check_poisoned(self, spec: RequestSpec, texts: Texts) -> None:
        end, name = texts.ends.get(spec.request_id), spec.request_id
        assert end is FinishReason.ERROR, f"{name}: expected an error because its logits are NaN, got {end}"
        assert texts.tokens[name] == [], f"{name}: expected no token, got {texts.tokens[name]}"
        message = texts.errors[name]
        assert message.startswith(NO_CHOICE), f"{name}: expected the error {NO_CHOICE!r}, got {message!r}"

    def _check(self, spec: RequestSpec, texts: Texts, may_be_aborted: bool = False) -> None:
        """Compare the text of one request, its end and all of its scores and vectors."""
        name, begin = spec.request_id, len(spec.delivered)
        text, right = texts.tokens.get(name, []), self.judge.texts[name]
        whole = [*spec.delivered, *text]
        end, expected = texts.ends.get(name), self.judge.right.ends[name]
        # An error drops the tokens of its own step, which can be several.
        self.judge.check({name: whole[: len(right)] if expected is FinishReason.ERROR else whole})
        if may_be_aborted and end is FinishReason.ABORT:
            return
        if expected is FinishReason.ERROR:
            assert end is expected, f"{name}: expected an error, {self.judge.right.errors[name]!r}, got {end}"
        elif whole == right[: len(whole)]:
            found = (len(whole), end)
            assert found == (len(right), expected), f"{name}: expected {len(right), expected}, got {found}"
        self._check_scores(spec, texts, right=right, begin=begin)
        self._check_prompt(spec, texts)

    def _check_scores(self, spec: RequestSpec, texts: Texts, right: Sequence[int], begin: int) -> None:
        name = spec.request_id
        scores, text = texts.scores.get(name, []), texts.tokens.get(name, [])
        expected = 0 if spec.params.logprobs is None or spec.pooling is not None else len(text)
        assert len(scores) == expected, f"{name}: expected log-probabilities of {expected} tokens, got {len(scores)}"
        for at, score in enumerate(scores, begin):
            if text[: at + 1 - begin] != right[begin : at + 1]:
                break
            self.judge.check_scores(name, at, score.logprob, top_ids=score.top_ids, top=score.top)

    def _check_prompt(self, spec: RequestSpec, texts: Texts) -> None:
        name, right = spec.request_id, self.judge.right
        if not spec.delivered:
            self._check_prompt_scores(name, texts.prompt_scores.get(name), right.prompt_scores.get(name))
        if name in right.vectors:
            assert name in texts.vectors, f"{name}: its vector is missing"
            found, expected = (np.frombuffer(each.vectors[name], "<f4") for each in (texts, right))
            assert found.shape == expected.shape, f"{name}: expected a vector {expected.shape}, got {found.shape}"
            error = np.abs(found.astype(np.float64) - expected)
            worst = int(np.nan_to_num(error, nan=np.inf).argmax())
            share = 1e-4 if self.target.exact else 0.5 if self.target.precision == "packed" else 0.1
            limit = share * max(float(np.abs(expected).max()), 1.0)
            assert error[worst] <= limit, (
                f"{name}: element {worst} of its vector: expected {expected[worst]:.6g}, got {found[worst]:.6g}"
            )

    def _check_prompt_scores(
        self, name: str, found: Sequence[TokenLogprobs] | None, right: Sequence[TokenLogprobs] | None
    ) -> None:
        counts = tuple(-1 if each is None else len(each) for each in (found, right))
        assert counts[0] == counts[1], f"{name}: expected scores of {counts[1]} prompt tokens, got {counts[0]}"
        margin = self.judge.score_margin
        for place, (ours, best) in enumerate(zip(found or (), right or (), strict=True), 1):
            values, expected = (np.array([each.logprob, *each.top]) for each in (ours, best))
            where = f"prompt token {place} of {name}"
            assert values.shape == expected.shape and (np.abs(values - expected) <= margin).all(), (
                f"{where}: expected {expected.round(4).tolist()}, got {values.round(4).tolist()}"
            )
            gaps = np.diff(best.top)
            if self.target.exact and gaps.max(initial=-1.0) < -2 * margin:
                assert ours.top_ids[:-1] == best.top_ids[:-1], f"{where}: alternatives in a wrong order"
                assert abs((ours.rank or 0) - (best.rank or 0)) <= 1, f"{where}: expected rank {best.rank}, {ours.rank}"


def check_compilations(before: CompilationStats | None, after: CompilationStats | None) -> None:
    """Compare two reports of a loaded engine: nothing decreases, and the start has ended. Raises `AssertionError`."""
    what = f"expected compilations since the start, which ended with the warm-up: {before}, then {after}"
    assert isinstance(before, CompilationStats | None) and type(after) is type(before), what
    if before is not None and after is not None:
        counts = zip(*map(msgspec.structs.astuple, (before, after)), strict=True)
        assert all(0 <= one <= two for one, two in counts), what
        assert (after.start, after.start_seconds) == (before.start, before.start_seconds), what


def _in_turns(*engines: Generator[None]) -> None:
    """Alternate between engines step by step."""
    running = list(engines)
    while running:
        running = [each for each in running if next(each, each) is not each]


def _in_threads(mine: Generator[None], theirs: Generator[None]) -> None:
    """Run two engines at the same time, with frequent switches between their threads."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(deque[None], theirs, 0)
            deque[None](mine, 0)
    finally:
        sys.setswitchinterval(before)
    other.result()


def fill_with_nan(cache: KVCache) -> None:
    """Leave NaN in every block, as requests whose KV is NaN do when they end."""
    blocks = np.arange(cache.num_blocks, dtype=np.int32)
    data = cache.export_blocks(blocks)
    data.view(np.uint8)[...] = 0xFF  # in every dtype, also of scales
    cache.import_blocks(blocks, data)


@contextmanager
def copying(engine: Engine) -> Iterator[None]:
    """Import and export blocks that no step uses, on another thread, and compare them."""
    pool, cache = parts_of(engine).pool, engine.probe().runner.cache
    blocks = pool.allocate(_SPARE_BLOCKS)
    assert blocks is not None, "the pool has no spare blocks"
    ended = threading.Event()

    def run() -> None:
        for seed in range(_MOST_STEPS):
            _copy_once(cache, blocks, seed)
            if ended.is_set():
                return

    with ThreadPoolExecutor(1) as threads:
        copies = threads.submit(run)
        try:
            yield
        finally:
            ended.set()
    pool.release(blocks, -1)
    copies.result()


def _copy_once(cache: KVCache, blocks: IntArray, seed: int) -> None:
    held = cache.export_blocks(blocks)
    data = np.random.default_rng(seed).integers(0, 120, held.shape).astype(held.dtype)
    cache.import_blocks(blocks, data)
    for order in (blocks, blocks[::-1].copy()):
        found = cache.export_blocks(order)
        places = [blocks.tolist().index(block) for block in order.tolist()]
        differ = np.argwhere(found != data[places])
        assert not len(differ), f"block {order[differ[0][0]]} differs from what was imported, at {differ[0].tolist()}"
