"""A profile: one JSON file with the costs of a step, a request and a copy of KV on one device, and `Costs` from it.

Measured and calculated profiles have the same format, so any simulation can use either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fd_core.config import Limits
from fd_core.config.outputs import write_json
from fd_core.config.paths import read_bounded
from fd_core.errors import ConfigError
from fd_core.types import StepPlan

FORMAT_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20

Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Line = Annotated[str, Meta(min_length=1, max_length=500)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every structure in a file: unknown fields are rejected."""


class CostCurve(_Strict, frozen=True, kw_only=True):
    """Seconds by a count: linear between points, extrapolated with the last slope. It never falls."""

    counts: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e12)], ...], Meta(min_length=1, max_length=256)]
    """Ascending."""
    seconds: tuple[Seconds, ...]
    """One for each count, never falling."""

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.seconds):
            raise ValueError(f"expected {len(self.counts)} seconds, one per count, got {len(self.seconds)}")
        for name, values, strictly in (("counts", self.counts, True), ("seconds", self.seconds, False)):
            if any(b < a or (strictly and a == b) for a, b in pairwise(values)):
                raise ValueError(f"{name} decrease, but costs must not decrease with the count")


class StepTerms(_Strict, frozen=True, kw_only=True):
    """Device time of a step: the sum of these terms, in seconds."""

    constant: Seconds
    by_tokens: CostCurve
    """By tokens computed: reading weights, then multiplying them, and collectives."""
    by_sampled_rows: CostCurve
    """By rows that sample: the output projection and sampling."""
    per_row: Seconds
    per_context_token: Seconds
    """For each position whose keys and values a row reads: for a decoding row, its context."""
    per_query_key: Seconds
    """For each pair of a token computed and a position that it attends to."""
    per_draft: Seconds
    """For each verified draft, in addition to its token: proposing it."""
    per_shared_position: Seconds = 0.0
    """Savings for each position that another row of the step reads as well, because a prefix is shared."""
    per_image_token: Seconds = 0.0
    """For each token of an image that begins in the step: encoding it."""


class RequestTerms(_Strict, frozen=True, kw_only=True):
    """Processor time outside steps, in seconds."""

    turn: Seconds
    """Plan and commit of one step."""
    turn_per_row: Seconds
    receive: Seconds
    """Reading a request and handing it to the engine."""
    receive_per_token: Seconds
    """For each token of its prompt: reading text, tokenizing it, and hashing its blocks."""
    delivery: Seconds
    """From a commit to the client's socket."""


class KVLink(_Strict, frozen=True, kw_only=True):
    """Cost of moving KV blocks in one direction."""

    latency: Seconds
    bandwidth: Annotated[float, Meta(gt=0, le=1e15)]
    """Bytes a second."""
    source: Line
    """Method of the measurement, or inputs of the calculation."""

    def seconds(self, size: float) -> float:
        """Return the seconds that `size` bytes take."""
        return self.latency + size / self.bandwidth


class ProfiledModel(_Strict, frozen=True, kw_only=True):
    """The measured model, or the one whose sizes the calculation used."""

    name: Line
    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: Line
    kv_dtype: Line
    weights_bytes: Positive
    kv_bytes_per_token: Positive
    """Keys and values of one token in all layers, on all ranks."""


class FitError(_Strict, frozen=True, kw_only=True):
    """Errors of the terms on held-out steps, as shares of the step's measured time."""

    kind: Literal["decode", "prefill", "mixed", "drafts"]
    steps: Positive
    """Distinct steps that were compared, each by its usual time."""
    mean: Annotated[float, Meta(ge=0)]
    p99: Annotated[float, Meta(ge=0)]


class CostProfile(_Strict, frozen=True, kw_only=True):
    """Costs of one model on one device."""

    fdcore_profile: Annotated[int, Meta(ge=1)] = FORMAT_VERSION
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    origin: Literal["measured", "calculated"]
    device: Line
    ranks: Positive = 1
    spare_processors: Annotated[int, Meta(ge=0)] = 1
    """Processors that steps leave to the server; without one, serving delays steps."""
    versions: dict[str, str] = {}
    when: str = ""
    """Date of the measurement, in ISO form."""
    notes: tuple[Line, ...] = ()
    """Notes for the reader: factors and sources of a calculation, assumed terms."""
    model: ProfiledModel
    limits: Limits
    """Default limits of the engine."""
    step: StepTerms
    request: RequestTerms
    host_copy: KVLink
    store_read: KVLink
    store_write: KVLink
    transfer: KVLink
    error: tuple[FitError, ...] = ()
    """Errors on held-out steps; empty for a calculation, whose error is unknown."""
    spread: Annotated[float, Meta(ge=0)] | None = None
    """Spread of repetitions of the same step, as a share: half of them are within."""

    def __post_init__(self) -> None:
        if self.origin == "calculated" and self.error:
            raise ValueError("a calculated profile cannot have an error that was measured")
        for name, least in _LEAST_LIMITS.items():
            if getattr(self.limits, name) < least:
                raise ValueError(f"limits: {name} is {getattr(self.limits, name)}, but at least {least} is needed")

    @property
    def label(self) -> str:
        """Name and origin, to be shown with every result."""
        origin = "calculated, never measured" if self.origin == "calculated" else "measured"
        return f"{self.name} ({origin})"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of KV in a block, on all ranks."""
        return self.model.kv_bytes_per_token * self.limits.block_size


_LEAST_LIMITS: Final = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_kv_blocks"), 1),
    "vocab_size": 2,
    "max_drafts": 0,
    "pipeline_depth": 1,
    "num_stages": 1,
}


def wrong_profile(what: str, hint: str | None = None) -> ConfigError:
    """Return the error of an unusable profile."""
    return ConfigError(what, field="PROFILE", hint=hint)


def read_profile(path: Path) -> CostProfile:
    """Read a file that `write_profile` wrote. Raises `ConfigError` that names the file and the error in it."""
    return parse_profile(read_bounded(path, _MAX_BYTES, "PROFILE"), str(path))


def parse_profile(content: bytes, where: str) -> CostProfile:
    """Return the profile in a file's content. Raises `ConfigError` that names `where` and the error."""
    try:
        profile = msgspec.json.decode(content, type=CostProfile)
    except msgspec.MsgspecError as error:
        hint = "`fdcore calibrate MODEL` writes one"
        raise wrong_profile(f"{where} is not a profile of costs: {error}", hint) from error
    unknown = [key for key in msgspec.json.decode(content)["limits"] if key not in Limits.__struct_fields__]
    if unknown:
        raise wrong_profile(f"{where} is not a profile of costs: limits has no field {unknown[0]!r:.60}")
    if profile.fdcore_profile != FORMAT_VERSION:
        what = f"has format version {profile.fdcore_profile}, expected {FORMAT_VERSION}"
        raise wrong_profile(f"{where} {what}", "calibrate again")
    return profile


def write_profile(profile: CostProfile, path: Path) -> None:
    """Write a profile atomically. Raises `ConfigError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", field="-o") from error
    write_json(path, profile, "-o")


_ONES = np.ones(4096)


def step_features(plan: StepPlan) -> tuple[int, int, int, int, float, int]:
    """Return tokens, sampling rows, rows, positions read, pairs of a token and a position it attends to, drafts."""
    lengths, starts = plan.num_tokens.astype(np.float64), plan.starts.astype(np.float64)
    rows = len(lengths)
    # Dot products with ones take a third of the time of reductions; they are exact below 2**53.
    ones = _ONES[:rows] if rows <= len(_ONES) else np.ones(rows)
    tokens = int(lengths.dot(ones))
    read = int(starts.dot(ones)) + tokens
    sampled = int(np.count_nonzero(plan.samples))
    if tokens == rows:  # no row has drafts or a chunk
        return tokens, sampled, rows, read, read, 0
    pairs = float(lengths.dot(starts) + (lengths.dot(lengths) + tokens) / 2)
    return tokens, sampled, rows, read, pairs, int(plan.num_drafts.astype(np.float64).dot(ones))


class Costs:
    """Times of one worker in seconds, computed from one profile."""

    def __init__(self, profile: CostProfile, *, block_size: int | None = None) -> None:
        """`block_size`: tokens in a KV block, where it differs from the profile's."""
        step, self._profile = profile.step, profile
        self._by_tokens, self._by_sampled = curve_function(step.by_tokens), curve_function(step.by_sampled_rows)
        self._per = (step.per_row, step.per_context_token, step.per_query_key, step.per_draft)
        self._block_bytes = profile.model.kv_bytes_per_token * (block_size or profile.limits.block_size)

    def step(self, plan: StepPlan) -> float:
        """Return the device time of a plan; 0 for one without tokens, which only holds preemptions."""
        tokens, sampled, rows, read, pairs, drafts = step_features(plan)
        if not tokens:
            return 0.0
        row, position, pair, draft = self._per
        return (
            self._profile.step.constant
            + self._by_tokens(tokens)
            + self._by_sampled(sampled)
            + row * rows
            + position * read
            + pair * pairs
            + draft * drafts
        )

    def shared_read(self, positions: int) -> float:
        """Return the time a step saves if `positions` of those that its rows read were read by another row before.

        Rows with the same prefix share its blocks, and find them in the device's caches.
        """
        return self._profile.step.per_shared_position * positions

    def images(self, tokens: int) -> float:
        """Return the time that a step encodes images of `tokens` tokens."""
        return self._profile.step.per_image_token * tokens

    def turn(self, plan: StepPlan) -> float:
        """Return the loop's time for a plan and its output that the device does not have to wait for.

        With one plan in flight the device waits for the loop; with two the loop's time overlaps with the device's.
        """
        return self._profile.request.turn + self._profile.request.turn_per_row * len(plan.slots)

    def request(self, tokens: int) -> float:
        """Return the server's time for a request of `tokens` tokens before the engine receives it."""
        return self._profile.request.receive + self._profile.request.receive_per_token * tokens

    def delivery(self) -> float:
        """Return the time of a token from the engine to the client, without the network."""
        return self._profile.request.delivery

    def host_copy(self, blocks: int) -> float:
        """Return the time to copy KV blocks between device and host."""
        return self._profile.host_copy.seconds(blocks * self._block_bytes)

    def store_read(self, blocks: int) -> float:
        """Return the time to read KV blocks from the store, lookup included."""
        return self._profile.store_read.seconds(blocks * self._block_bytes)

    def store_write(self, blocks: int) -> float:
        """Return the time to write KV blocks to the store."""
        return self._profile.store_write.seconds(blocks * self._block_bytes)

    def transfer(self, blocks: int) -> float:
        """Return the time to transfer KV blocks from a prefill worker to a decode worker."""
        return self._profile.transfer.seconds(blocks * self._block_bytes)


def curve_function(curve: CostCurve) -> Callable[[float], float]:
    """Return a curve as a function: by bisection, which is faster than arrays here."""
    counts, seconds = (0.0, *curve.counts), (curve.seconds[0], *curve.seconds)
    if curve.counts[0] == 0:
        counts, seconds = curve.counts, curve.seconds
    slopes = [(d - c) / (b - a) for a, b, c, d in zip(counts, counts[1:], seconds, seconds[1:], strict=False)] or [0.0]
    slopes = [*slopes, slopes[-1]][: len(counts)]

    def look_up(count: float) -> float:
        at = bisect_right(counts, count) - 1
        return seconds[at] + slopes[at] * (count - counts[at])

    return look_up
