"""Contract of a framework pack: with it, every model runs on the pack.

Models are written once over `Ops`. It has two layers: about a dozen primitives that a pack implements, and the
fusions that models call, about five a layer, each with a default composed of the primitives. A pack or a device may
override a fusion with one kernel; the conformance checks compare an override with its composition.

Shapes use: T tokens of the step, N rows (requests) of the step, R rows whose logits are wanted, H hidden size,
nh query heads, nkv KV heads, d head dimension, V vocabulary size. Activations are [T, ...] in the pack's own arrays;
their dtype is the pack's business, logits are always float32.

What `project_residual` and `moe_residual` return is the residual stream, in a form of the pack's own: a sum may wait
in it for the norm that reads it next, so that one kernel computes both. Fusions and `rms_norm` take it where they take
activations, and `settle` makes activations of it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.errors import ConfigError
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.parallel import Parallel, RankGroup, Stage
from fd_core.ops.warm_up import WarmUpStep
from fd_core.ops.weights import LowRank, RawTensor, Weight
from fd_core.types import IntArray

__all__ = [
    "SCALE_BYTES",
    "Activation",
    "Array",
    "Experts",
    "Forward",
    "Heads",
    "HostCopies",
    "HostStep",
    "KVCache",
    "KVShape",
    "Lora",
    "Norm",
    "Ops",
    "PenaltyInput",
    "Rope",
    "SampleInput",
    "StepInput",
]

Array = Any
"""An array of the pack's framework."""
Activation = Literal["silu", "gelu_tanh", "gelu"]
SCALE_BYTES: Final = 4
"""Bytes of the float32 scale behind the elements of a quantized key or value."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of a paged KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a KV block."""
    dtype: str = "auto"
    """`auto` for the pack's own dtype; `int8` for 8 bits, with a scale for each token, KV head, and key or value."""
    first_kv_head: int = 0
    """Index of the first of these among the model's KV heads: ranks hold a share of them."""
    first_layer: int = 0
    """Index of the first of these among the model's layers: stages hold some of them."""

    @property
    def quantized(self) -> bool:
        """True if keys and values have scales; see `Ops.write_kv`."""
        return self.dtype == "int8"

    @property
    def stored_head(self) -> int:
        """Elements that a key or a value takes in canonical order, its scale included."""
        return self.head_dim + SCALE_BYTES if self.quantized else self.head_dim

    def bytes_per_block(self, itemsize: int) -> int:
        """Bytes that one block takes over all layers, keys and values; `itemsize` is that of the pack's dtype."""
        head_bytes = self.stored_head * (1 if self.quantized else itemsize)
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * head_bytes


class KVCache(abc.ABC):
    """Paged keys and values of all layers. The memory layout belongs to the pack.

    `export_blocks` and `import_blocks` may be called from another thread, one call at a time, while steps are computed:
    no step reads or writes the blocks that are being copied, and a copy must not touch any other. They should let other
    threads run meanwhile. What they raise ends that copy only.
    """

    shape: KVShape
    num_blocks: int
    spare_block: int | None = None
    """A block beyond those that requests may hold, for what pads a step; None where no step is padded."""

    @abc.abstractmethod
    def layer(self, index: int) -> Any:
        """Return the pack's own handle of one layer, passed back to `write_kv` and `paged_attention`."""

    @abc.abstractmethod
    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host in canonical order [len(blocks), layers, 2, block_size, nkv, d].

        float32, float16, or uint16 holding bfloat16 bits. Index 0 of axis 2 holds keys after rope, 1 values. The array
        is the caller's: it shares no memory with the cache. Of a quantized cache it is int8 [..., nkv, d + 4]: the last
        four bytes of each key and value are its scale's, a little-endian float32.
        """

    @abc.abstractmethod
    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write what `export_blocks` returned into other blocks, bit for bit; `data` may be read-only."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: x / sqrt(mean(x^2) + eps) * weight. Gemma's `1 + w` is folded into `weight` at load."""

    weight: Array
    """[H] or [d], prepared by `Ops.prepare_vector`."""
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding tables, prepared by `Ops.prepare_vector`, float32."""

    cos: Array
    """[max_positions, rotary / 2]"""
    sin: Array
    """[max_positions, rotary / 2]"""
    interleaved: bool = False
    """False pairs element i with i + rotary/2 (Llama); True pairs 2i with 2i+1 (ERNIE)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    q_norm: Norm | None = None
    """Norm over d of each query head, before rope."""
    k_norm: Norm | None = None
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None sees all."""
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts block."""

    router: Array
    """[experts, H] prepared by `prepare_vector`; routing is a softmax over all experts, computed in float32."""
    gate_up: Array
    """Prepared by `prepare_experts(..., gated=True)`."""
    down: Array
    top_k: int
    normalize: bool
    """Divide the chosen weights by their sum."""
    correction_bias: Array | None = None
    """[experts] float32 added to the scores for the choice only, not for the weights (ERNIE-4.5)."""
    norm_floor: float = 0.0
    """Smallest divisor when normalizing (ERNIE-4.5 uses 1e-12)."""
    shared_gate_up: Array | None = None
    """Experts that every token passes, as one gated linear."""
    shared_down: Array | None = None


@dataclass(frozen=True, slots=True)
class HostStep:
    """Metadata of a step on the host, for packs that plan their kernels there; the arrays are those of `StepInput`."""

    query_start: IntArray
    """int32[N + 1]"""
    context_len: IntArray
    """int32[N]"""
    block_tables: IntArray
    """int32[N, max_blocks]"""


@dataclass(frozen=True, slots=True)
class StepInput:
    """The flattened batch of one forward pass, in the pack's own integer arrays (int32).

    Row i owns tokens query_start[i] to query_start[i+1]; they are consecutive positions of one request, the last of
    which is context_len[i] - 1.
    """

    token_ids: Array
    """[T]"""
    positions: Array
    """[T]"""
    kv_slots: Array
    """[T], block * block_size + offset where the token's key and value are written."""
    query_start: Array
    """[N + 1]"""
    context_len: Array
    """[N], tokens that the row's last token sees, itself included."""
    block_tables: Array
    """[N, max_blocks]; entries beyond the context have no meaning."""
    logits_rows: Array
    """[R], indices into T."""
    max_query: int
    """Largest number of tokens of one row; 1 means pure decode."""
    max_context: int
    uniform: bool = False
    """Every row has exactly `max_query` tokens, and the step is a decode or padded like one: see `Ops.padded`. Then the
    token j of row i is the one at i * max_query + j, and its position context_len[i] - max_query + j."""
    host: HostStep | None = None
    """The same metadata on the host; None where the step was not built there."""
    lora_places: Array | None = None
    """[T], the place of each token's adapter, 0 for none. None where no token of the step has an adapter."""
    lora_groups: Sequence[tuple[int, Array]] = ()
    """The same by adapter: each place that tokens have, and those tokens, indices into T."""
    states: Array | None = None
    """[T, H], what the stage before made of the tokens, see `Ops.states_from_host`; None where the model is not cut."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Terms that adapters add to one linear in a step: up(down(x)) of the adapter that a token has.

    Hu et al., "LoRA" (2021).
    """

    deltas: Any
    """Result of `Ops.place_loras`; its argument is accepted as well."""
    step: StepInput
    """Its `lora_places` and `lora_groups` are read."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """Inputs for sampling R rows, in the pack's own arrays; every row is one position of one request."""

    temperature: Array
    """float32[R], 0 for greedy."""
    top_k: Array
    """int32[R], 0 keeps all."""
    top_p: Array
    """float32[R]"""
    min_p: Array
    """float32[R]"""
    seeds: Array
    """uint64[R] (int64 bits where the framework has no uint64)."""
    positions: Array
    """int32[R], position of the token being chosen; with the seed it selects the random number."""
    all_greedy: bool
    """No row needs a random number or a filter."""
    any_filter: bool
    """Some row uses top_k, top_p or min_p."""


@dataclass(frozen=True, slots=True)
class PenaltyInput:
    """Inputs for penalties on n rows of logits, in the pack's own arrays; every row is one position of one request."""

    rows: Array
    """int32[n], rows of the logits, each at most once."""
    counts: Array
    """int32[C, V], what each residency has seen: twice the times that a token was generated, and 1 more if it is in the
    prompt. One number serves all penalties: a token was seen where it is not 0, and generated half of it times."""
    counts_rows: Array
    """int32[n], the row of `counts` that belongs to each row of logits."""
    draft_rows: Array
    """int32[m], indices into the n rows, not falling: rows that follow drafts, once for each draft before them."""
    draft_ids: Array
    """int32[m], those drafts; each counts as generated once more for its row, and is not in `counts`."""
    repetition: Array
    """float32[n], above 0; 1 for none."""
    presence: Array
    """float32[n], 0 for none."""
    frequency: Array
    """float32[n], 0 for none."""


Forward = Callable[[StepInput, KVCache], Array]


class HostCopies:
    """Arrays on their way to the host. These are there; a pack that queues has a class of its own."""

    def __init__(self, arrays: list[npt.NDArray[Any]]) -> None:
        self._arrays = arrays

    def ready(self) -> bool:
        """Say, without waiting, whether they are there."""
        return True

    def wait(self) -> list[npt.NDArray[Any]]:
        """Return them, waiting for the device until they are there; the same each time."""
        return self._arrays


class Ops(abc.ABC):
    """Operations on one framework's arrays."""

    name: str
    """Name of the pack, such as `numpy` or `torch`."""
    framework: str
    """Array library: `numpy`, `torch`, `paddle` or another; the postprocessor of that name is the
    default."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: activations, weights that are not packed, and KV unless its shape says
    otherwise. float16 ends at 65,504: what grows beyond is infinite, which the peaks of its row show, and that request
    fails."""
    kv_dtypes: Collection[str] = frozenset()
    """Other dtypes of `KVShape` that `allocate_kv` takes, and that writing and attention compute with: `int8` or none.
    A pack that replaces one of these three operations of its parent has to say anew what holds."""
    weight_formats: Collection[str] = frozenset()
    """Formats of packed weights that `prepare_linear` takes; the reader expands the others."""
    expands_weights: bool = False
    """True if packed weights take as much memory as others: it keeps what they stand for, in `dtype`."""
    on_host: bool = False
    """True if its arrays are numpy arrays of the host: `from_host` and `to_host` return what they are given, and steps
    are computed from the arrays that the runner gathered."""
    queues: bool = False
    """True if calls return before the device has computed, in order, what they queue: then a step can be launched while
    those before it are in flight. What the pack must wait for it waits for in the call, as in `fetch`."""
    warm_up_tokens: int | None = None
    """Length of the prefill that warms up; None for the longest there can be, which shows that its memory is there and
    compiles what depends on its size. A decode follows, and what `warm_up_steps` says."""
    parallel: Parallel = Parallel()
    """Rank and number of ranks. Weights are prepared for it: linears that make heads or the inner width of a
    feed-forward block have some of their rows; those that lead back have some of their columns, and their bias is rank
    0's alone. So what the latter return is a part of a sum over ranks. With `gathers` all of them have rows."""

    def join(self, group: RankGroup) -> None:
        """Compute as one of several ranks from now on; called before the first weight is prepared.

        A pack that can sets `parallel`, and defines `all_reduce` and `all_gather`; one that overrides
        `project_residual` or `moe_residual` takes the sum there. One that sets `parallel.gathers` overrides both:
        they gather the inputs and the outputs of their last linear. Raises `ConfigError` by default.
        """
        raise ConfigError(
            f"the {self.name} pack computes on one device only",
            field="--tensor-parallel-size",
            hint="leave it out, or use --backend cpu",
        )

    stage: Stage = Stage()
    """Range of the model's layers that are computed."""

    def cut(self, stage: Stage) -> None:
        """Compute one of several stages from now on; called before the first weight is prepared.

        A pack that can sets `stage`, and its forwards take `StepInput.states`. Raises `ConfigError` by default.
        """
        raise ConfigError(
            f"the {self.name} pack computes whole models only",
            field="--pipeline-parallel-size",
            hint="leave it out, or use --backend cpu",
        )

    def configure(self, limits: Limits) -> None:  # noqa: B027 - most packs have nothing to do here
        """Receive the engine's final limits; called before the first KV cache is allocated."""

    def warm_up_steps(self, limits: Limits) -> Sequence[WarmUpStep]:
        """Return what else is computed before the first request, such as all that compiles on its first call.

        Each step is computed as the runner computes one, sampling and all. Those beyond the limits are left out.
        """
        return ()

    def warmed_up(self) -> None:  # noqa: B027 - most packs have nothing to do here
        """Handle the end of the warm-up: from now on requests wait for what is computed."""

    def compilation_stats(self) -> CompilationStats | None:
        """Return which kernels were compiled so far, by this rank; None where nothing compiles. Waits for nothing."""
        return None

    # Arrays -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Return a device array with the values of `array`; may share its memory on a CPU.

        uint64 becomes int64 with the same bits where the framework has no uint64.
        """

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Array]:
        """Do what `from_host` does for several arrays; a pack with a device copies them all at once."""
        return list(arrays) if self.on_host else [self.from_host(array) for array in arrays]

    def states_from_host(self, states: npt.NDArray[np.float32]) -> Array:
        """Return what `to_host` made of a forward's states [T, H] on another stage."""
        return self.from_host(states)

    @abc.abstractmethod
    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Copy or share a device array to numpy; bfloat16 becomes float32."""

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        """Queue copies of arrays to the host, as `to_host` makes them, behind what was queued before.

        They hold what the arrays hold there, whatever is queued behind them.
        """
        return HostCopies(list(arrays) if self.on_host else [self.to_host(array) for array in arrays])

    def fetch(self, arrays: Sequence[Array]) -> list[npt.NDArray[Any]]:
        """Bring arrays over as `to_host` does, waiting for the device once for all of them."""
        return self.fetch_later(arrays).wait()

    # Weights ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def prepare_vector(self, values: npt.NDArray[np.float32]) -> Array:
        """Prepare a norm weight, a router or a table of any shape; kept in float32 whatever `dtype` is."""

    @abc.abstractmethod
    def prepare_embedding(self, weight: RawTensor) -> Array:
        """Prepare a token table [V, H]."""

    @abc.abstractmethod
    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Array:
        """Prepare weights [out_i, in], stacked along `out`, for `linear`; the parts may be of several formats.

        `gated` says that the two parts are gate and up and will be used by `gated_linear` only, so that a pack may
        interleave them.
        """

    def prepare_experts(self, parts: Sequence[Sequence[Weight]], *, gated: bool) -> Any:
        """Prepare the experts' linears, by default one for each; `parts[e]` is what `prepare_linear` takes."""
        return tuple(self.prepare_linear(expert, gated=gated) for expert in parts)

    def replaceable_weights(self) -> AbstractContextManager[None]:
        """Prepare weights in memory that is freed with them: adapters come and go while the model stays."""
        return nullcontext()

    def prepare_lora(self, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool = False) -> Any:
        """Prepare what one adapter adds to a linear that stacks parts of `outs` columns; it may leave parts alone.

        `gated` says that they are gate and up. By default two linears, of which the second has blocks of zeros.
        """
        ranks = [0 if part is None else len(part.down) for part in parts]
        up = np.zeros((sum(outs), sum(ranks)), np.float32)
        for part, row, column, rank in zip(parts, np.cumsum(outs), np.cumsum(ranks), ranks, strict=True):
            if part is not None:
                up[row - len(part.up) : row, column - rank : column] = part.up
        down = [RawTensor("F32", part.down) for part in parts if part is not None]
        return self.prepare_linear(down), self.prepare_linear([RawTensor("F32", up)])

    def place_loras(
        self, deltas: Sequence[Any | None], inputs: int, outs: Sequence[int], before: Any | None = None
    ) -> Any | None:
        """Return what `Lora.deltas` is for one linear; None for nothing to add.

        Called whenever adapters come or go, and before the first where some may come: then `deltas` is empty. It has
        what `prepare_lora` returned for the places 1 and up, None where an adapter leaves the linear alone. The linear
        takes `inputs` values, and its parts have `outs` columns. `before` is what was returned for it the last time,
        which a pack that replays steps writes into: what was captured goes on being right.
        """
        return deltas if any(delta is not None for delta in deltas) else None

    def tied_head(self, embedding: Array, weight: Weight) -> Array:
        """Return the output projection of a model that ties it to its embedding."""
        return self.prepare_linear([weight])

    # Memory -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        """Allocate a KV cache; raises `MemoryError` if it does not fit."""

    # Primitives -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def embedding(self, table: Array, token_ids: Array, scale: float = 1.0) -> Array:
        """Look up token ids: [T] -> [T, H], multiplied by `scale`."""

    @abc.abstractmethod
    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """Normalize the last axis, of activations or of the residual stream."""

    @abc.abstractmethod
    def linear(self, x: Array, weight: Array) -> Array:
        """[T, in] -> [T, out], with the bias that was prepared with the weight."""

    @abc.abstractmethod
    def gate(self, gate_up: Array, activation: Activation) -> Array:
        """[T, 2 I] -> [T, I]: activation(gate) * up, where gate is the first half of what `gate_up` returns."""

    @abc.abstractmethod
    def split_heads(self, qkv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        """[T, (nh + 2 nkv) d] -> q [T, nh, d], k [T, nkv, d], v [T, nkv, d]."""

    @abc.abstractmethod
    def rope(self, x: Array, rope: Rope, positions: Array) -> Array:
        """Rotate [T, heads, d] by position."""

    @abc.abstractmethod
    def write_kv(self, layer: Any, k: Array, v: Array, kv_slots: Array) -> None:
        """Write keys and values of the step into the cache in place.

        A quantized cache keeps rint(x / scale) of each element, at most 127 in size, ties to even, and the scale: the
        largest magnitude of that token's key or value in that head, divided by 127 in float32. A head of zeros has
        scale 0. So what is kept of a token depends on nothing but that token, however a prompt is cut.
        """

    @abc.abstractmethod
    def paged_attention(self, q: Array, layer: Any, heads: Heads, step: StepInput) -> Array:
        """Causal attention of q [T, nh, d] over each row's blocks; returns [T, nh * d]. Softmax in float32."""

    @abc.abstractmethod
    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        """[T, H] -> [T, H]: route each token to its experts and add their weighted outputs."""

    @abc.abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """Elementwise sum of two activations."""

    @abc.abstractmethod
    def gather_rows(self, x: Array, rows: Array) -> Array:
        """Take rows of any array by index: [T, ...], int32[R] -> [R, ...]."""

    @abc.abstractmethod
    def logits_of(self, x: Array, head: Array, softcap: float | None) -> Array:
        """[R, H] -> float32 [R, V]."""

    @abc.abstractmethod
    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Choose a token for each row: float32[R, V] -> tokens int32[R], peaks float32[R].

        Order: divide by temperature, keep top_k, then top_p of what is left, then min_p; then the first token in
        vocabulary order whose cumulative probability exceeds u times the kept mass, u = uniform(seed, position).
        Greedy rows take the largest logit, the lowest id on a tie.

        All packs choose the same token, because everything after one exponential is exact: a token's weight is
        rint(2^32 * exp((logit - largest logit) / temperature)), computed in float64, so that sums of weights are
        integers below 2^53, the same in any order. With tokens ordered by logit, the lower id first on a tie:
        top_k keeps the first k; top_p keeps a token if the weights before it sum to less than top_p times the sum of
        what top_k kept, and the first one always; min_p keeps weights of at least min_p * 2^32.

        A peak is the largest logit of a row, or NaN if one of its logits is NaN. Where it is not finite no choice is
        right, and the runner ends the row's request with an error; the token is any of the vocabulary.
        """

    @abc.abstractmethod
    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Add values to single cells: x[rows[i], ids[i]] += values[i] for every i, repeated places included.

        [R, V], int32[n], int32[n], [n] -> [R, V], all float32 (logits) or, but for places, all int32 (counts of
        tokens); may write into `x`. It serves logit_bias and, with -inf, tokens that are not allowed, and it counts
        what was sampled.
        """

    @abc.abstractmethod
    def write_rows(self, x: Array, rows: Array, values: Array) -> Array:
        """Overwrite rows: x[rows[i]] = values[i]. [R, V], int32[n], [n, V] -> [R, V], all int32 or all activations.

        No row occurs twice; may write into `x`.
        """

    @abc.abstractmethod
    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Apply repetition, presence and frequency penalties: float32[R, V] -> float32[R, V].

        May write into `logits`. A positive logit of a token that was seen is divided by the repetition penalty, another
        is multiplied. Then presence + frequency * count is subtracted from the logit of a token that was generated. The
        sum is computed in float64, where a product of a float32 and a count is exact, and rounded to float32 once, so
        that all packs agree to the last bit.
        """

    @abc.abstractmethod
    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        """Forbid tokens by packed bits: float32[R, V], int32[n], int32[n, ceil(V / 32)] -> float32[R, V].

        Bit j % 32 of bits[i, j // 32], counted from the lowest, says whether token j may be drawn in row rows[i]; the
        logits of all others become -inf, whatever they were. Bits beyond the vocabulary mean nothing, rows that are not
        named stay as they are, and no row occurs twice. May write into `logits`.
        """

    @abc.abstractmethod
    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the chosen and of the most likely tokens.

        float32[R, V], int32[R] -> chosen float32[R], top ids int32[R, top_n], top float32[R, top_n], most likely
        first, the lower id first on a tie. Leaves `logits` as they are.
        """

    @abc.abstractmethod
    def ranks(self, logits: Array, tokens: Array) -> Array:
        """Return the places of tokens among all, 1 for the most likely: float32[R, V], int32[R] -> int32[R].

        On a tie the lower id comes first. Leaves `logits` as they are.
        """

    @abc.abstractmethod
    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        """Count the accepted drafts: the longest prefix that equals what was sampled in its place.

        sampled int32[N, 1 + k], drafts int32[N, k], num_drafts int32[N] -> int32[N]. Column j of `sampled` was chosen
        after draft j - 1, so a row with `a` accepted drafts delivers its first 1 + a sampled tokens.
        """

    # Sums over ranks --------------------------------------------------------------------------------------

    def all_reduce(self, x: Array) -> Array:
        """Return the sum of what all ranks hold, the same bits on each; may be captured in a graph."""
        return x

    def all_gather(self, x: Array) -> Array:
        """Return what all ranks hold, joined along the last axis in the order of ranks: float32 [R, V]."""
        return x

    # Compositions that primitives and models share --------------------------------------------------------

    def gate_up(self, x: Array, weight: Array) -> Array:
        """[T, in] -> [T, 2 I], gate first, of a weight prepared as gated; a pack that interleaves them sorts them."""
        return self.linear(x, weight)

    def gated_linear(self, x: Array, weight: Array, activation: Activation) -> Array:
        """[T, in] -> [T, out]: activation(gate(x)) * up(x)."""
        return self.gate(self.gate_up(x, weight), activation)

    def lora(self, y: Array, x: Array, lora: Lora) -> Array:
        """Add what the adapters of a step's tokens make of x: [T, out], [T, in] -> [T, out]. May write into `y`.

        Each adapter multiplies its own tokens and no others, so none of its numbers reaches the token of another,
        whatever they are. Gate and up stand one behind the other in `y`, as `gate_up` returns them.
        """
        for place, rows in lora.step.lora_groups:
            delta = lora.deltas[place - 1]
            if delta is not None:
                down, up = delta
                more = self.linear(self.linear(self.gather_rows(x, rows), down), up)
                y = self.write_rows(y, rows, self.add(self.gather_rows(y, rows), more))
        return y

    # Fusions: what models call ----------------------------------------------------------------------------

    def attention_inputs(
        self, x: Array, norm: Norm, qkv: Array, heads: Heads, layer: Any, step: StepInput, lora: Lora | None = None
    ) -> Array:
        """Norm, q/k/v projection, head norms, rope, KV write: [T, H] -> q [T, nh, d]."""
        normed = self.rms_norm(x, norm)
        projected = self.linear(normed, qkv)
        if lora is not None:
            projected = self.lora(projected, normed, lora)
        q, k, v = self.split_heads(projected, heads)
        if heads.q_norm is not None:
            q = self.rms_norm(q, heads.q_norm)
        if heads.k_norm is not None:
            k = self.rms_norm(k, heads.k_norm)
        q = self.rope(q, heads.rope, step.positions)
        k = self.rope(k, heads.rope, step.positions)
        self.write_kv(layer, k, v, step.kv_slots)
        return q

    def attention(self, q: Array, heads: Heads, layer: Any, step: StepInput) -> Array:
        """Paged attention: q [T, nh, d] -> [T, nh * d]."""
        return self.paged_attention(q, layer, heads, step)

    def project_residual(
        self, x: Array, weight: Array, residual: Array, post_norm: Norm | None = None, lora: Lora | None = None
    ) -> Array:
        """residual + post_norm(all_reduce(linear(x))): [T, in], [T, H] -> [T, H]. May write into `residual`.

        Returns the residual stream; a pack that lets the sum wait in it overrides `settle` as well.
        """
        y = self.linear(x, weight)
        if lora is not None:
            y = self.lora(y, x, lora)
        y = self.all_reduce(y)
        if post_norm is not None:
            y = self.rms_norm(y, post_norm)
        return self.add(residual, y)

    def mlp_inputs(
        self, x: Array, norm: Norm, gate_up: Array, activation: Activation, lora: Lora | None = None
    ) -> Array:
        """Norm, gate and up projection, gated activation: [T, H] -> [T, I]."""
        normed = self.rms_norm(x, norm)
        if lora is None:
            return self.gated_linear(normed, gate_up, activation)
        return self.gate(self.lora(self.gate_up(normed, gate_up), normed, lora), activation)

    def add_shared(self, y: Array, x: Array, experts: Experts, activation: Activation) -> Array:
        """Return y [T, H] plus what the experts that every token passes make of x; may write into `y`."""
        if experts.shared_gate_up is not None:
            y += self.linear(self.gated_linear(x, experts.shared_gate_up, activation), experts.shared_down)
        return y

    def moe_residual(self, x: Array, norm: Norm, experts: Experts, activation: Activation) -> Array:
        """x + all_reduce(moe(norm(x))): [T, H] -> [T, H], the residual stream. May write into `x`."""
        return self.add(x, self.all_reduce(self.moe(self.rms_norm(x, norm), experts, activation)))

    def settle(self, x: Array) -> Array:
        """Return the residual stream, or activations, as activations [T, H]; may write into `x`, which stays valid."""
        return x

    def logits(
        self, x: Array, norm: Norm, head: Array, rows: Array, softcap: float | None = None, *, split: bool = False
    ) -> Array:
        """Final norm and output projection of the wanted rows: [T, H] -> float32 [R, V].

        `split` says that `head` is this rank's share of the vocabulary, V / size tokens; what ranks have is joined.
        """
        logits = self.logits_of(self.rms_norm(self.gather_rows(x, rows), norm), head, softcap)
        return self.all_gather(logits) if split else logits

    # Whole steps ------------------------------------------------------------------------------------------

    def padded(self, rows: int, width: int) -> tuple[int, int] | None:
        """Return the shape that a step is padded to: rows, and tokens of each row; None to compute it as it is.

        The alignment of a pack that replays graphs of fixed shapes. It is asked for each step, whose `rows` rows have
        up to `width` tokens each; the shape is no smaller. Padding writes nothing but the cache's `spare_block`. The
        step is charged to the step token budget as it is padded, so a pack never asks for more tokens than
        `max_num_batched_tokens`.
        """
        return None

    def compile(self, forward: Forward) -> Forward:
        """Return a faster equivalent of a model's forward, such as a captured graph; by default itself.

        What it returns is good until it is called again.
        """
        return forward

    def compile_states(self, states: Forward) -> Forward:
        """Do the same for what returns the states of all tokens; it computes chunks of prompts, which need it less."""
        return states

    def compile_adapted(self, forward: Forward, cache: KVCache | None = None, before: Forward | None = None) -> Forward:
        """Do the same for steps in which tokens have adapters; called between steps, whenever adapters come or go.

        `cache` is what all these steps use, where the forward yields logits, so that a pack may capture at once.
        `before` is what was returned the last time.
        """
        return forward
