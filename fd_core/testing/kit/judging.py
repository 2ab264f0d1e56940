"""Expected texts: a request's output from the oracle, and the deviations that rounding allows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.contract import SampleInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.philox import uniform
from fd_core.runner.sampling.sampler import Sampler
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import Floats
from fd_core.testing.models.checkpoints import ENGINE_CASE
from fd_core.testing.models.paged import PagedDriver
from fd_core.testing.models.texts import Texts, run
from fd_core.types import Admission, IntArray, RequestSpec, TokenLogprobs

MARGIN: Final[Mapping[str, float]] = {"float32": 0.0, "float16": 0.1, "bfloat16": 0.5, "packed": 1.5}
"""Maximum lead of the oracle's best logit at which a text may deviate, by `Target.precision`.

The logits of the kit's models have a standard deviation of about 4; bfloat16 moves them by about a hundredth of that,
float16 by an eighth of that of bfloat16, activations of 8 bits by a fortieth, and a token routed to another expert
by more.
"""
KV_MARGIN: Final[Mapping[str, float]] = {"auto": 0.0, "int8": 0.1, "fp8": 0.5}
"""By how much a key or value between two steps moves a logit, though both packs store KV in that dtype."""

_ALONE: Final[Mapping[str, Any]] = {
    "max_num_seqs": 1,
    "num_kv_blocks": 200,
    "max_num_batched_tokens": 1024,
    "max_model_len": 400,
    "structured_output": True,
}
_JUDGES: dict[tuple[str, tuple[str, ...], str], Judge] = {}
SCORE_MARGIN: Final[Mapping[str, float]] = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "packed": 1.5}
"""Largest error of a log-probability by `Target.precision`."""
_FLOAT32_MARGIN: Final = 1e-3
"""Maximum lead of the oracle's greedy token in float32 at which the order of a sum decides."""
_TRIALS: Final = 24
"""Number of random roundings that are tried to explain a sampled token."""


def _logits_of(
    target: Target, case: str, spec: RequestSpec, text: Sequence[int], adapter: Path | None = None
) -> list[Floats]:
    """Return the oracle's logits for each delivered token, given the delivered tokens before it."""
    tokens = [*spec.prompt, *text]
    path, ops = target.oracle.checkpoint(case), NumpyOps()
    assert path is not None
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, ops, len(tokens), quantization=target.quantization)
        if adapter is not None:
            model = model.with_adapters([read_adapter(adapter, spec_of(checkpoint).adaptable(), sys.maxsize)])
    places = None if adapter is None else [1]
    driver = PagedDriver(model, ops, [tokens], longest=len(tokens), kv_dtype=target.kv_dtype, places=places)
    driver.step([(0, len(tokens) - 1)])
    return driver.rows[0].logits[len(spec.prompt) - 1 :]


class _RecordingOps(NumpyOps):
    """The oracle's pack, which stores the logits that it sampled from last."""

    seen: Floats
    rows: SampleInput

    def sample(self, logits: Floats, rows: SampleInput) -> tuple[IntArray, Floats]:
        self.seen, self.rows = logits, rows
        return super().sample(logits, rows)

    def may_draw(self, token: int, margin: float) -> bool:
        """Return True if a token may be sampled from logits that each differ by at most `margin` from those of the row.

        A token is sampled if the random number is between the cumulative weights without and with it. Each bound is
        minimal if all weights up to there are decreased and all others increased, and maximal vice versa.
        """
        rows = self.rows
        weights = self.weights(self.seen, rows, self.seen.max(axis=1))[0]
        spread = np.exp(margin / float(rows.temperature[0]))
        upto = float(weights[: token + 1].sum())
        before, total = upto - float(weights[token]), float(weights.sum())
        least = before / (before + (total - before) * spread**2)
        most = upto * spread**2 / (upto * spread**2 + total - upto)
        return weights[token] > 0 and bool(least <= uniform(rows.seeds, rows.positions)[0] <= most)


class Judge:
    """The oracle's texts of some requests of one checkpoint, and the allowed deviations.

    For sizes at which two candidates may be within rounding of each other.

    A deviating text is judged token by token, each given the delivered tokens before it: a greedy token may be below
    the best by a margin, a sampled one must be reproducible by the oracle from logits that differ by at most rounding.
    """

    def __init__(
        self,
        target: Target,
        case: str,
        specs: Sequence[RequestSpec],
        adapters: Mapping[str, Path] | None = None,
        slack: float = 1.0,
        **settings: Any,
    ) -> None:
        """`adapters` are folders by digest; `settings` are those of the oracle's engine.

        `slack` multiplies the margins of lower precision, for a checkpoint with larger activations.
        """
        self._slack = slack
        self.target, self.case, self._adapters = target, case, adapters or {}
        self.specs = {spec.request_id: spec for spec in specs}
        with target.oracle.engine(case=case, **settings) as engine:
            self.right: Texts = run(engine, specs)
        self.texts: dict[str, list[int]] = self.right.tokens
        self.scores: dict[str, list[TokenLogprobs]] = self.right.scores

    @staticmethod
    def of(target: Target, name: str, case: str, specs: Sequence[RequestSpec], **settings: Any) -> Judge:
        """Return the judge of a test; the oracle's texts are computed once in a process."""
        key = name, target.right, target.ops.dtype
        if key not in _JUDGES:
            _JUDGES[key] = Judge(target, case, specs, **settings)
        _JUDGES[key].target = target
        return _JUDGES[key]

    def whole(self) -> list[list[int]]:
        """Return prompts with their expected texts, for the oracle drafter."""
        return [[*spec.prompt, *self.texts[name]] for name, spec in self.specs.items()]

    @property
    def margin(self) -> float:
        """Maximum lead of the oracle's best logit over a greedy token of the target."""
        precision, steps = self.target.precision, KV_MARGIN[self.target.kv_dtype]
        if precision == "float32":
            return steps
        # Rounded activations also move more keys and values by a step. The margin of packed weights
        # is wide already.
        slack = max(1.0, self._slack / 2) if precision == "packed" else self._slack
        return slack * (MARGIN[precision] + steps)

    @property
    def score_margin(self) -> float:
        """Maximum error of a log-probability."""
        return max(SCORE_MARGIN[self.target.precision], self.margin)

    def check(self, delivered: Mapping[str, Sequence[int]]) -> None:
        """Compare the tokens of some requests delivered so far."""
        for name, text in delivered.items():
            spec, right = self.specs[name], self.texts[name]
            if list(text) == right[: len(text)]:
                continue
            parted = next(at for at, token in enumerate(text) if at >= len(right) or token != right[at])
            where = f"{name} deviates from the expected text at token {parted} of {len(text)}"
            assert self.target.oracle.cls.needs_checkpoint, f"{where}: {text[parted]} for {right[parted:][:1]}"
            logits = _logits_of(self.target, self.case, spec, text=text, adapter=self._adapters.get(spec.adapter))
            for at in range(parted, len(text)):
                self._check_token(spec, list(text), at, logits=logits[at], where=where)

    def check_scores(self, name: str, at: int, chosen: float, top_ids: Sequence[int], top: Sequence[float]) -> None:
        """Compare the log-probabilities of token `at`, before which the text equals the oracle's."""
        right, margin = self.scores[name][at], self.score_margin
        where = f"token {at} of {name}"
        assert abs(chosen - right.logprob) <= margin, f"{where}: expected {right.logprob}, got {chosen}"
        assert all(before >= after for before, after in pairwise(top)), f"{where}: not sorted: {top}"
        assert len(set(top_ids)) == len(top_ids) == len(right.top), f"{where}: alternatives {list(top_ids)}"
        errors = np.abs(np.array(top) - np.array(right.top))
        assert (errors <= margin).all(), f"{where}: expected {list(right.top)}, got {list(top)}"
        if self.target.exact and np.diff(right.top).max(initial=-1) < -2 * margin:
            assert list(top_ids)[:-1] == list(right.top_ids)[:-1], f"{where}: wrong order"

    def _check_token(self, spec: RequestSpec, text: list[int], at: int, logits: Floats, where: str) -> None:
        ops = _RecordingOps()
        sampler = Sampler(ops, 1, len(logits))
        tokens = np.array([*spec.prompt, *text[:at]], np.int32)
        sampler.admit(Admission(0, 0, tokens, len(spec.prompt), spec.params, spec.eos_token_ids, 0))
        zero, place = np.zeros(1, np.int32), np.array([len(tokens)], np.int32)
        rng = np.random.default_rng(at)
        for trial in range(_TRIALS):
            noise = rng.uniform(-_FLOAT32_MARGIN, _FLOAT32_MARGIN, len(logits)).astype(np.float32) if trial else 0
            sampled = sampler.sample((logits + noise)[None], sampler.gather(zero, place, zero, tokens=tokens[None]))
            if int(sampled.tokens[0]) == text[at]:
                return
            if spec.params.temperature == 0.0:
                lead = float(ops.seen.max() - ops.seen[0, text[at]])
                allowed = max(self.margin, _FLOAT32_MARGIN)
                assert lead <= allowed, f"{where}: at token {at} the best one leads {text[at]} by {lead:.3g}"
                return
            if not trial and ops.may_draw(text[at], _FLOAT32_MARGIN):
                return  # the other trials vary the filtered tokens
        raise AssertionError(f"{where}: rounding cannot explain token {text[at]} at {at}")


class Golden:
    """Texts of one target's oracle for the small engine of most tests, each computed alone."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def _judge(self, specs: Sequence[RequestSpec]) -> Judge:
        return Judge.of(self.target, msgspec.json.encode(specs).hex(), ENGINE_CASE, specs, **_ALONE)

    def whole(self, specs: Iterable[RequestSpec]) -> list[list[int]]:
        """Return prompts with their expected texts, for the oracle drafter."""
        return self._judge([*specs]).whole()

    def check(self, specs: Iterable[RequestSpec], delivered: Mapping[str, Sequence[int]]) -> None:
        """Compare complete texts with the expected ones."""
        judge = self._judge([*specs])
        judge.check({name: delivered[name] for name in judge.specs})
        for name, right in judge.texts.items():
            assert len(delivered[name]) == len(right), f"{name}: wrong length"
