"""A profile, one JSON file that says what a step, a request and a copy of KV cost on one device, and times by it.

Measured and calculated profiles have the same form, so whatever is simulated with one can be simulated with the other.
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
from fd_core.errors import ConfigError
from fd_core.simulation.workloads.files import write_whole
from fd_core.types import StepPlan

FORMAT_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20

Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Line = Annotated[str, Meta(min_length=1, max_length=500)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything in a file: what is not known is refused."""


class CostCurve(_Strict, frozen=True, kw_only=True):
    """Seconds by a count: straight between points, on beyond the last with the slope before it. It never falls."""

    counts: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e12)], ...], Meta(min_length=1, max_length=256)]
    """Rising."""
    seconds: tuple[Seconds, ...]
    """One for each count, never falling."""

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.seconds):
            raise ValueError(f"there are {len(self.counts)} counts, but {len(self.seconds)} seconds")
        for name, values, strictly in (("counts", self.counts, True), ("seconds", self.seconds, False)):
            if any(b < a or (strictly and a == b) for a, b in pairwise(values)):
                raise ValueError(f"{name} fall: more of anything never costs less")


class StepTerms(_Strict, frozen=True, kw_only=True):
    """What a step costs the device: the sum of these terms, in seconds."""

    constant: Seconds
    by_tokens: CostCurve
    """By tokens computed: reading weights, then multiplying them, and collectives."""
    by_sampled_rows: CostCurve
    """By rows that sample: the output projection and the choice of a token."""
    per_row: Seconds
    per_context_token: Seconds
    """For each position whose keys and values a row reads: of a row that decodes, its context."""
    per_query_key: Seconds
    """For each pair of a token computed and a position that it attends to."""
    per_draft: Seconds
    """For each draft that is verified, beside its token: guessing it."""
    per_shared_position: Seconds = 0.0
    """What is saved for each position that another row of the step reads as well, since a prefix is shared."""


class RequestTerms(_Strict, frozen=True, kw_only=True):
    """What the processor does beside steps, in seconds."""

    turn: Seconds
    """Plan and commit of one step."""
    turn_per_row: Seconds
    receive: Seconds
    """Reading a request and handing it to the engine."""
    receive_per_token: Seconds
    """For each token of its prompt: reading text, finding its tokens, and keys of its blocks."""
    delivery: Seconds
    """From a commit to the client's socket."""


class KVLink(_Strict, frozen=True, kw_only=True):
    """How KV blocks travel one way."""

    latency: Seconds
    bandwidth: Annotated[float, Meta(gt=0, le=1e15)]
    """Bytes a second."""
    source: Line
    """Measured how, or calculated from what."""

    def seconds(self, size: float) -> float:
        """Return how long `size` bytes take."""
        return self.latency + size / self.bandwidth


class ProfiledModel(_Strict, frozen=True, kw_only=True):
    """The model that was measured, or whose sizes were calculated with."""

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
    """How far the terms are from steps that were not fitted, as shares of the step's measured time."""

    kind: Literal["decode", "prefill", "mixed", "drafts"]
    steps: Positive
    """Different steps that were compared, each by what it usually takes."""
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
    """What a reader has to know: factors and sources of a calculation, terms that were assumed."""
    model: ProfiledModel
    limits: Limits
    """What the engine runs with unless it is told otherwise."""
    step: StepTerms
    request: RequestTerms
    host_copy: KVLink
    store_read: KVLink
    store_write: KVLink
    transfer: KVLink
    error: tuple[FitError, ...] = ()
    """Of steps that were held out; none for a calculation, of which nobody knows the error."""
    spread: Annotated[float, Meta(ge=0)] | None = None
    """How far repetitions of the same step were apart, as a share: half of them are within."""

    def __post_init__(self) -> None:
        if self.origin == "calculated" and self.error:
            raise ValueError("a calculated profile cannot have an error that was measured")
        for name, least in _LEAST_LIMITS.items():
            if getattr(self.limits, name) < least:
                raise ValueError(f"limits: {name} is {getattr(self.limits, name)}, but at least {least} is needed")

    @property
    def label(self) -> str:
        """Name and origin, to be shown with every result."""
        said = "calculated, never measured" if self.origin == "calculated" else "measured"
        return f"{self.name} ({said})"

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
    """Return the error of a profile that cannot be used."""
    return ConfigError(what, field="PROFILE", hint=hint)


def read_profile(path: Path) -> CostProfile:
    """Read a file that `write_profile` wrote. Raises `ConfigError` that names the file and what is wrong in it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise wrong_profile(f"the profile {path} cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise wrong_profile(f"{path} is larger than {_MAX_BYTES:,} bytes, so it is no profile")
    return parse_profile(content, str(path))


def parse_profile(content: bytes, where: str) -> CostProfile:
    """Return the profile that a file's content holds. Raises `ConfigError` that names `where` and what is wrong."""
    try:
        profile = msgspec.json.decode(content, type=CostProfile)
    except msgspec.MsgspecError as error:
        hint = "`fdcore calibrate MODEL` writes one"
        raise wrong_profile(f"{where} is not a profile of costs: {error}", hint) from error
    unknown = [key for key in msgspec.json.decode(content)["limits"] if key not in Limits.__struct_fields__]
    if unknown:
        raise wrong_profile(f"{where} is not a profile of costs: limits has no field {unknown[0]!r:.60}")
    if profile.fdcore_profile != FORMAT_VERSION:
        what = f"has version {profile.fdcore_profile} of the format, but version {FORMAT_VERSION} is known here"
        raise wrong_profile(f"{where} {what}", "calibrate again")
    return profile


def write_profile(profile: CostProfile, path: Path) -> None:
    """Write a profile at once or not at all. Raises `ConfigError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", field="-o") from error
    write_whole(path, msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n", "-o")


_ONES = np.ones(4096)


def step_features(plan: StepPlan) -> tuple[int, int, int, int, float, int]:
    """Return tokens, sampling rows, rows, positions read, pairs of a token and a position it attends to, drafts."""
    lengths, starts = plan.num_tokens.astype(np.float64), plan.starts.astype(np.float64)
    rows = len(lengths)
    # Sums as products with ones take a third of the time that reductions take; they are exact below 2**53.
    ones = _ONES[:rows] if rows <= len(_ONES) else np.ones(rows)
    tokens = int(lengths.dot(ones))
    read = int(starts.dot(ones)) + tokens
    sampled = int(np.count_nonzero(plan.samples))
    if tokens == rows:  # no row has drafts or a chunk
        return tokens, sampled, rows, read, read, 0
    pairs = float(lengths.dot(starts) + (lengths.dot(lengths) + tokens) / 2)
    return tokens, sampled, rows, read, pairs, int(plan.num_drafts.astype(np.float64).dot(ones))


class Costs:
    """Times of one worker in seconds, each computed from the terms of one profile."""

    def __init__(self, profile: CostProfile, *, block_size: int | None = None) -> None:
        """`block_size`: tokens in a KV block, where they are not the profile's."""
        step, self._profile = profile.step, profile
        self._by_tokens, self._by_sampled = curve_function(step.by_tokens), curve_function(step.by_sampled_rows)
        self._per = (step.per_row, step.per_context_token, step.per_query_key, step.per_draft)
        self._block_bytes = profile.model.kv_bytes_per_token * (block_size or profile.limits.block_size)

    def step(self, plan: StepPlan) -> float:
        """Return how long the device computes a plan: nothing for one without a token, which holds only revocations."""
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
        """Return how much less a step takes if `positions` of what its rows read were read by another row before.

        Rows that begin with the same prefix have its blocks in common, and find them in the device's caches.
        """
        return self._profile.step.per_shared_position * positions

    def turn(self, plan: StepPlan) -> float:
        """Return how long the engine's loop takes for a plan and its answer while the device need not wait for it.

        With one plan in flight the device waits for the loop; with two the loop's time is hidden behind the device.
        """
        return self._profile.request.turn + self._profile.request.turn_per_row * len(plan.slots)

    def request(self, tokens: int) -> float:
        """Return how long a server takes with a request of `tokens` tokens before its engine has it."""
        return self._profile.request.receive + self._profile.request.receive_per_token * tokens

    def delivery(self) -> float:
        """Return how long a token takes from the engine to the client, without the network."""
        return self._profile.request.delivery

    def host_copy(self, blocks: int) -> float:
        """Return how long copying KV blocks between device and host takes."""
        return self._profile.host_copy.seconds(blocks * self._block_bytes)

    def store_read(self, blocks: int) -> float:
        """Return how long reading KV blocks from the store takes, the question included."""
        return self._profile.store_read.seconds(blocks * self._block_bytes)

    def store_write(self, blocks: int) -> float:
        """Return how long writing KV blocks to the store takes."""
        return self._profile.store_write.seconds(blocks * self._block_bytes)

    def transfer(self, blocks: int) -> float:
        """Return how long a prefill worker takes to hand KV blocks to a decode worker."""
        return self._profile.transfer.seconds(blocks * self._block_bytes)


def curve_function(curve: CostCurve) -> Callable[[float], float]:
    """Return a curve as a function: by bisection, which takes less time than arrays do."""
    counts, seconds = (0.0, *curve.counts), (curve.seconds[0], *curve.seconds)
    if curve.counts[0] == 0:
        counts, seconds = curve.counts, curve.seconds
    slopes = [(d - c) / (b - a) for a, b, c, d in zip(counts, counts[1:], seconds, seconds[1:], strict=False)] or [0.0]
    slopes = [*slopes, slopes[-1]][: len(counts)]

    def look_up(count: float) -> float:
        at = bisect_right(counts, count) - 1
        return seconds[at] + slopes[at] * (count - counts[at])

    return look_up
