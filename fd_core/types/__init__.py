"""Frozen values that cross boundaries between scheduler, runner, engine and clients.

Integer arrays inside these values are numpy arrays with `writeable=False`; copy an array to change it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

__all__ = [
    "GRAMMAR_FAULT",
    "NOT_FINITE",
    "NO_CHOICE",
    "PHASE_NAMES",
    "PHASE_TITLES",
    "Admission",
    "BlockGrant",
    "Delta",
    "FinishReason",
    "Image",
    "IntArray",
    "LogprobRows",
    "Phase",
    "PooledRows",
    "Pooling",
    "PrefillJob",
    "PrefillOutcome",
    "PromptLogprobRows",
    "Reasoning",
    "RequestSpec",
    "Revocation",
    "SamplingParams",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
    "frozen",
]

IntArray = npt.NDArray[np.int32]


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `array` marked read-only, so that a shared value cannot change."""
    array.setflags(write=False)
    return array


# Ranges of sampling parameters: decoders reject values outside, and the HTTP API publishes the same ranges.
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10.0)]
LogitBias = Annotated[float, Meta(ge=-100.0, le=100.0)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text that begins with reasoning, which ends after the first occurrence of some token ids."""

    end: tuple[int, ...]
    """At least one id. A grammar begins exactly after them."""
    max_tokens: Count | None = None
    """Reasoning tokens after which the end is forced; None forces nothing."""


_MASK_64: Final = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping parameters of a request.

    `seed` and the position of a token determine every random choice, so a request's text depends only on the
    model, the prompt, these parameters and the seed. The fields' ranges are enforced where values are decoded;
    `fd_core.types.checks.check_sampling` checks values that were constructed in Python.
    """

    max_tokens: TokenCount = 16
    min_tokens: Count = 0
    temperature: Temperature = 1.0
    """0 means greedy: the most likely token, the lower id on a tie."""
    top_p: TopP = 1.0
    """0 keeps the most likely token."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: MinP = 0.0
    seed: int = 0
    """Unsigned 64-bit key of the counter-based generator."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: dict[int, LogitBias] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """Tokens that may be generated, each once; None allows all. A text only ends early if an end token is among them.
    """
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Non-empty sequences of tokens that the text never contains; the end of the prompt does not count."""
    logprobs: NumLogprobs | None = None
    """Number of most likely tokens reported with the chosen one; 0 reports the chosen one only, None nothing."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for the tokens of the prompt, from the second on; delivered with the first token of the text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    """Grammar that the text must match, in llguidance's syntax, see `fd_core.structured.grammar`; None for any text.
    An end-of-sequence or stop token is allowed exactly where the text matches as a whole."""
    reasoning: Reasoning | None = None
    """Set for a text that begins with reasoning, to which the grammar does not apply."""

    @property
    def greedy(self) -> bool:
        """Return True if no random number is needed."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Return True if logits depend on earlier tokens through penalties."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def choice_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of choice `index` of a prompt: its own for the first, then outputs of SplitMix64."""
    if index == 0:
        return seed & _MASK_64
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)


class Pooling(msgspec.Struct, frozen=True):
    """Parameters of a request for one vector of its prompt instead of generated text."""

    kind: Literal["last", "cls", "mean", "all", "tokens"]
    """`last`, `cls`, `mean` and `all`: the final hidden state of the last token, of the first, the mean of all, or that
    of each in order, normalized as the output projection takes them. `tokens`: the log-probabilities of `token_ids`
    after the prompt."""
    token_ids: tuple[int, ...] = ()

    @property
    def reads_all(self) -> bool:
        """True if tokens before the last one contribute."""
        return self.kind in ("cls", "mean", "all")


class Image(msgspec.Struct, frozen=True):
    """A part of a prompt that an encoder of images computes: an image, or a tile of one that its processor divides."""

    start: int
    """Position of its first token in the prompt; all of its tokens have the model's placeholder id."""
    num_tokens: int
    digest: bytes
    """16 bytes that name everything below, and the processor's settings: images with the same one have the same states.
    """
    size: tuple[int, int]
    """Height and width in pixels."""
    pixels: bytes
    """uint8[height, width, 3], resized as the model's processor does and not yet normalized."""
    layout: tuple[int, ...] = ()
    """Further numbers for the encoder, such as the size of the original."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens


MAX_JOB_PIXELS: Final = 64 * 2**20
"""Bytes of pixels in a prefill job, which is one message; prompts with more are computed by the decode worker."""


class PrefillJob(msgspec.Struct, frozen=True):
    """A prompt that a prefill worker computes for a decode worker: one value from one scheduler to the other."""

    tokens: bytes
    """int32[n], little-endian: the tokens whose KV is wanted, at least one."""
    held_blocks: int = 0
    """Leading blocks of tokens whose KV the decode worker holds; it is not wanted."""
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    traceparent: str = ""
    """Span of the request, see W3C Trace Context; empty if it is not traced."""
    lease: str = ""
    """Name of the decode worker's lease on its blocks, 32 hexadecimal digits; empty until that worker sets it."""
    adapter: str = ""
    """Digest of the LoRA adapter that computes it; empty for the model itself."""
    images: tuple[Image, ...] = ()
    """As in `RequestSpec`; the last one may end with the tokens. They have at most `MAX_JOB_PIXELS` bytes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is wanted."""
        return len(self.tokens) // np.dtype(np.int32).itemsize

    @property
    def token_ids(self) -> IntArray:
        """int32[n], read-only: the tokens, which are not copied."""
        return np.frombuffer(self.tokens, "<i4").astype(np.int32, copy=False)


class PrefillTrace(msgspec.Struct, frozen=True):
    """A finished traced prefill job."""

    traceparent: str
    ended: float
    """Time of the end, in seconds since 1970."""
    seconds: float
    """From the lease to its end."""
    num_tokens: int
    """Tokens whose KV was wanted."""
    end: str
    """Outcome of the lease, see `fd_core.disagg.lease.End`."""


PrefillOutcome = Literal["transferred", "held", "refused", "lost", "expired", "damaged", "aborted"]
"""Outcome of a prefill on another worker. `held`: nothing was requested, because the decode worker had the prefix;
`lost`: the prefill worker disconnected or was unreachable; `damaged`: the received KV differed from the KV sent.
Unless the KV was `transferred` or `held`, the decode worker computes the prompt itself."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request for one generation."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    params: SamplingParams
    images: tuple[Image, ...] = ()
    """In the order of their tokens, none of which belongs to two."""
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Lower runs first under the `priority` policy."""
    tenant: str = ""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    delivered: tuple[int, ...] = ()
    """Tokens of the text that earlier epochs of the engine delivered; this one continues after them. Limits, penalties
    and random numbers count from the prompt, as if the engine had never died."""
    prefill_at: str = ""
    """`host:port` of the prefill worker that computes the prompt; empty computes it here."""
    traceparent: str = ""
    """Span of the request, for the worker at `prefill_at`; empty if it is not traced."""
    pooling: Pooling | None = None
    """Set for a request that ends with its prefill; the one token that it samples is dropped."""
    prefill_job: PrefillJob | None = None
    """Set for a request that only computes a prompt for a decode worker; the one token that it samples is dropped."""
    adapter: str = ""
    """Digest of the LoRA adapter that computes it; empty for the model itself."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter that an engine serves."""

    name: str
    digest: str
    """Value of `RequestSpec.adapter`: hex SHA-256 of its config and weights."""
    path: str
    rank: int


GRAMMAR_FAULT: Final = "its grammar "
"""Prefix of errors of requests whose grammar cannot be used, or was violated."""
NO_CHOICE: Final = "no token can be chosen: "
"""Prefix of errors of requests that forbid every token, or whose logits are NaN."""
NOT_FINITE: Final = "one of its logits is NaN or inf"
"""Suffix of such an error if the request forbids nothing."""


class FinishReason(enum.StrEnum):
    """Finish reason of a request, with OpenAI's value if there is one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters a slot: the data that the runner needs while the request holds it."""

    slot: int
    gen: int
    token_ids: IntArray
    """int32[n]: prompt and, after a preemption, the tokens delivered so far."""
    prompt_len: int
    """Number of `token_ids` that are the client's prompt."""
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    computed: int
    """Tokens at the front whose KV is already in the granted blocks."""
    request_id: str = ""
    """Id of the request, for traces; the runner does not use it."""
    pooling: Pooling | None = None
    adapter: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Blocks appended to a slot's block table from entry `offset` on."""

    slot: int
    offset: int
    blocks: IntArray
    group: int = 0
    """Group of layers whose table it is, see `Limits.groups`.

    The table of a sliding group begins at the first block that the request's next token reads; its blocks are given up
    when no later token reads them.
    """


@dataclass(frozen=True, slots=True)
class Revocation:
    """Preemption or abort of a slot; exactly one -9 acknowledges it."""

    slot: int
    gen: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one step. Rows are slots with work; row arrays have length `n`.

    The runner applies, in this order: admissions, grants, revocations, rows. A preempted or aborted slot has no row.
    """

    epoch: int
    step: int
    slots: IntArray
    """int32[n], each slot at most once."""
    gens: IntArray
    """int32[n], the generation each row belongs to."""
    starts: IntArray
    """int32[n], position of the first token computed. For a row that samples while an earlier step with drafts is in
    flight this is the largest it can be; the runner counts back from the tokens it has."""
    num_tokens: IntArray
    """int32[n], tokens computed: a prefill chunk, or one plus the row's drafts."""
    num_drafts: IntArray
    """int32[n], drafts among them; the runner uses fewer if it has fewer."""
    samples: npt.NDArray[np.bool_]
    """bool[n], True if the row yields a token; False for an unfinished prefill chunk."""
    admissions: tuple[Admission, ...] = ()
    grants: tuple[BlockGrant, ...] = ()
    revocations: tuple[Revocation, ...] = ()

    @property
    def total_tokens(self) -> int:
        """Tokens charged against the step token budget."""
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of a step, one row for each sampled token of a request with log-probabilities."""

    slots: IntArray
    """int32[r]"""
    columns: IntArray
    """int32[r], column of the token matrix."""
    chosen: npt.NDArray[np.float32]
    """float32[r]"""
    top_ids: IntArray
    """int32[r, m], most likely first; a request reads as many as it requested."""
    top: npt.NDArray[np.float32]
    """float32[r, m]"""


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Log-probabilities of prompt tokens that a step computed for requests with prompt log-probabilities."""

    slots: IntArray
    """int32[r]"""
    positions: IntArray
    """int32[r], position of the token in its prompt, at least 1."""
    chosen: npt.NDArray[np.float32]
    """float32[r]"""
    top_ids: IntArray
    """int32[r, m], the most likely tokens there, most likely first; a request reads as many as it requested."""
    top: npt.NDArray[np.float32]
    """float32[r, m]"""
    ranks: IntArray
    """int32[r], 1 for a token that is the most likely one."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Vectors of a step, for pooling requests."""

    slots: IntArray
    """int32[n]"""
    starts: IntArray
    """int32[n], position of the first token that was computed."""
    counts: IntArray
    """int32[n], tokens that went into the vector."""
    values: tuple[npt.NDArray[np.float32], ...]
    """n vectors; for a mean the sum of this step's tokens, for all tokens their states one after another."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one plan."""

    epoch: int
    step: int
    tokens: IntArray
    """int32[max_num_seqs, 1 + k]; read only by `fd_core.signals`."""
    gens: IntArray
    """int32[max_num_seqs], the generation each slot holds in the runner's own batch."""
    drafts_ready: IntArray | None = None
    """int32[max_num_seqs], drafts that the runner holds for each slot's next step; None without speculation."""
    logprobs: LogprobRows | None = None
    errors: tuple[tuple[int, str], ...] = ()
    """(slot, message) for rows that failed; the other rows are valid."""
    prompt_logprobs: PromptLogprobRows | None = None
    pooled: PooledRows | None = None
    forced: IntArray | None = None
    """int32[max_num_seqs], accepted drafts of each slot that its grammar forced; None if there were none."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one delivered token and of the most likely alternatives."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    rank: int | None = None
    """Rank of the token among all, 1 for the most likely; set for prompts only."""


class Phase(enum.IntEnum):
    """Activity or wait reason of a request."""

    COMPUTING = 0
    """A step computes tokens of it, or will once the steps before it have outputs."""
    SLOT = 1
    """All slots are occupied."""
    BLOCKS = 2
    """There are too few free KV blocks."""
    BUDGET = 3
    """Other requests use up the step token budget."""
    SCHEDULER = 4
    """The scheduler has not considered it yet, or holds it back by a rule of its policy."""
    PREFIX = 5
    """Another request computes a prefix of it."""
    GRAMMAR = 6
    """Its grammar is being compiled."""
    STORE = 7
    """KV outside the device is being looked up or loaded."""
    TRANSFER = 8
    """A prefill worker computes its prompt and sends the KV."""
    PREEMPTED = 9
    """It was preempted and waits to be resumed."""


PHASE_NAMES: Final = tuple(phase.name.lower() for phase in Phase)
"""By the number of the phase."""
PHASE_TITLES: Final = {
    "computing": "computing",
    "slot": "a slot",
    "blocks": "KV blocks",
    "budget": "the step token budget",
    "scheduler": "the scheduler's rule",
    "prefix": "a prefix in progress",
    "grammar": "its grammar",
    "store": "KV of a store",
    "transfer": "a prefill worker",
    "preempted": "resumption",
}
"""By the name of the phase: what a request waits for."""


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Output of one step for one request.

    A step creates one for each request; as none is part of a cycle, the garbage collector does not track them.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in the request's last delta and only there."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token id if requested."""
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache; set in the first delta."""
    error: str | None = None
    """Set with finish reason `error`."""
    prefill: PrefillOutcome | None = None
    """Outcome of a prefill that another worker was to compute; set in the first delta."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt but the first, if requested; set in the first delta."""
    pooled: bytes | None = None
    """The vector of a pooling request, float32, little-endian."""
    phases: tuple[float, ...] | None = None
    """Seconds since the request reached the engine, by phase (`Phase`);
    set in the first delta with tokens and in the last one, unless the scheduler does not measure."""
