"""Contract of a framework pack, which suffices to run every model.

Models are written once over `Ops`. It has two layers: about a dozen primitives that a pack implements, and the
fusions that models call, about five a layer, each with a default composed of the primitives. A pack or a device may
override a fusion with one kernel; the conformance checks compare an override with its composition.

Shapes use: T tokens of the step, N rows (requests) of the step, R rows with logits, H hidden size, nh query heads, nkv
KV heads, d head dimension, V vocabulary size. Activations are [T, ...] in the pack's arrays and dtype; logits are
always float32.

An array keeps its values until it is passed to an operation whose docstring allows writing into it. Results are in new
memory, unless the docstring allows that they share it with an argument. The same arguments give the same bits, whatever
was computed before.

`project_residual` and `moe_residual` return the residual stream in a pack-specific form: it may defer a sum to the next
norm, so that one kernel computes both. Fusions and `rms_norm` accept it in place of activations, and `settle` converts
it to activations.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.deprecations import accept_old_names
from fd_core.errors import ConfigError
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.parallel import Parallel, RankGroup, Stage
from fd_core.ops.warm_up import WarmUpStep
from fd_core.ops.weights import LowRank, RawTensor, Weight
from fd_core.types import IntArray

__all__ = [
    "CLAMP",
    "DESCRIBED_BY",
    "KV_TYPES",
    "SCALE_BYTES",
    "Activation",
    "Array",
    "Experts",
    "Forward",
    "GroupTables",
    "Heads",
    "HostCopies",
    "HostStep",
    "KVCache",
    "KVShape",
    "Latent",
    "Lora",
    "Norm",
    "Ops",
    "PenaltyInput",
    "PlainActivation",
    "Recurrent",
    "RecurrentRule",
    "Rope",
    "SampleInput",
    "StepInput",
    "state_sizes",
]

Array = Any
"""An array of the pack's framework."""
Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]
"""Of a gate; `clamped_swiglu` changes up as well, see `Ops.gate`."""
CLAMP: Final = 7.0
"""Limit of gate and up in `clamped_swiglu`."""
PlainActivation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2"]
"""Of a feed-forward block without a gate: `quick_gelu` is x / (1 + exp(-1.702 x)), `relu2` the square of relu."""
RecurrentRule = Literal["gate", "delta", "scan"]
SCALE_BYTES: Final = 4
"""Bytes of the float32 scale after the elements of a quantized key or value."""
KV_TYPES: Final[Mapping[str, npt.DTypeLike]] = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
"""Types of exported blocks with 8 bits an element, by `KVShape.dtype`; uint8 holds the bits of FP8."""
FLOAT_BYTES: Final = 4
MAX_JOURNAL: Final = 16
"""Limit of tokens whose inputs are stored with a recurrent state, of those that fit into its block."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of a paged KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a KV block."""
    dtype: str = "auto"
    """`auto` for the pack's dtype; `int8` for 8 bits, with a scale per token, KV head, and key or value; `fp8` for
    float8_e4m3fn without scales."""
    first_kv_head: int = 0
    """Index of the first of these heads among the model's KV heads, which ranks divide."""
    first_layer: int = 0
    """Index of the first of these layers among the model's layers, which stages divide."""
    groups: LayerGroups = ONE_GROUP
    """Groups of `num_layers` layers each, which share the blocks; layers of any group are numbered from 0."""
    latent: int = 0
    """Width of the values if they are the last elements of the keys as well, so that a token has one vector in a layer:
    see `Ops.latents`. 0 if values are stored separately."""
    state: int = 0
    """float32 elements of the state of a recurrent layer, see `Recurrent`, which a block of its group holds in place of
    keys and values; 0 without recurrent layers."""
    journal: int = 0
    """float32 elements of each token whose state is not computed yet."""

    @property
    def quantized(self) -> bool:
        """True if keys and values have scales; see `Ops.write_kv`."""
        return self.dtype == "int8"

    @property
    def stored_head(self) -> int:
        """Elements of a key or a value in canonical order, including its scale; of a latent vector, including both."""
        scales = SCALE_BYTES * (2 if self.latent else 1)
        return self.head_dim + scales if self.quantized else self.head_dim

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Sizes of a block in canonical order, see `KVCache.export_blocks`."""
        sides = 1 if self.latent else 2
        return (self.num_layers, sides, self.block_size, self.num_kv_heads, self.stored_head)

    def least_block_size(self, itemsize: int, max_drafts: int) -> int:
        """Return the fewest tokens of a block that holds a recurrent state with as many drafts."""
        token = replace(self, num_layers=1, block_size=1).bytes_per_block(itemsize)
        return -(-(self.state + max_drafts * self.journal) * FLOAT_BYTES // token)

    def bytes_per_block(self, itemsize: int) -> int:
        """Bytes of one block over all layers, keys and values; `itemsize` is that of the pack's dtype."""
        return math.prod(self.block_sizes) * (1 if self.dtype in KV_TYPES else itemsize)


class KVCache(abc.ABC):
    """Paged keys and values of all layers. The memory layout belongs to the pack.

    `export_blocks` and `import_blocks` may be called from another thread, one call at a time, while steps are computed:
    no step reads or writes the blocks that are being copied, and a copy must not access any other. They should release
    the GIL. An exception fails only that copy.
    """

    shape: KVShape
    num_blocks: int
    spare_block: int | None = None
    """A block in addition to those of requests, for padding; None if steps are not padded."""

    @abc.abstractmethod
    def layer(self, index: int) -> Any:
        """Return the pack's handle of one layer, passed to `write_kv` and `paged_attention`."""

    @abc.abstractmethod
    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host in canonical order [len(blocks), layers, 2, block_size, nkv, d].

        float32, float16, or uint16 holding bfloat16 bits. Index 0 of axis 2 holds keys after rope, 1 values. The array
        is the caller's: it shares no memory with the cache, and is contiguous. For a quantized cache it is int8 [...,
        nkv, d + 4]: the last four bytes of each key and value are its scale, a little-endian float32. FP8 is uint8 that
        holds its bits. A latent cache has one vector instead of two on axis 2, the rotated part of the key and then the
        value, each with its scale.
        """

    @abc.abstractmethod
    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write the result of `export_blocks` into other blocks, bit for bit.

        `data` may be read-only, and a slice of heads or layers that is not contiguous.
        """


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: x / sqrt(mean(x^2) + eps) * weight. Gemma's `1 + w` is folded into `weight` at load."""

    weight: Array
    """[H] or [d], prepared by `Ops.prepare_vector`."""
    eps: float
    bias: Array | None = None
    """[H], prepared likewise, for a layer norm: it subtracts the mean of x first and adds the bias last. Encoders have
    such norms, in any place but those of heads; see `Ops.normalize`."""


TURNED_TOKENS: Final = 16_384
"""Tokens of a step that may have rows of their own in the tables of a `Rope`, after those of positions."""


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
    """A token attends to itself and the `window - 1` tokens before it; None for all."""
    softcap: float | None = None
    norms_rotated: bool = False
    """True if both norms follow rope."""
    joint_widths: tuple[int, int] | None = None
    """Elements of the query heads and of the key heads of all ranks, if each kind is normalized together, before rope,
    with weights [heads, d]."""
    causal: bool = True
    """False if a token attends likewise to the tokens after it, up to the end of its row: see `Ops.encodes`."""
    chunked: bool = False
    """True if `window` is the size of chunks instead, of which a token attends to its own: see `Ops.chunks`."""
    query_rope: Rope | None = None
    """Tables of the queries, of the same shape, if they are not those of the keys."""
    latent: int = 0
    """Width of the values if they are the last elements of the keys, which have one head: see `Latent`. `rope` rotates
    the elements before them."""
    sinks: Array | None = None
    """[num_heads] prepared by `Ops.prepare_vector`: for each query head the score of one more key, to which every token
    attends, without scale and softcap; its value is 0. See `Ops.sinks`."""

    def first_key(self, position: Any) -> Any:
        """Return the first position that a token at `position` attends to; before 0 if a window begins there.

        Integers, or arrays of any framework.
        """
        if self.window is None:
            return position * 0
        return position - (position % self.window if self.chunked else self.window - 1)


@dataclass(frozen=True, slots=True)
class Latent:
    """Projections of an attention block that stores latent values, besides those of any block.

    All heads share the stored vector, the rotated part of a key followed by the latent value. The projections from
    latent values to those of heads are applied to queries and outputs instead (DeepSeek-AI, "DeepSeek-V2", 2024).
    """

    norm: Norm
    """Over the latent value."""
    q_norm: Norm | None
    """Over the result of the first linear of the queries, if they have two."""
    q_up: Array | None
    """The second one, prepared by `prepare_linear`."""
    absorb: Array
    """[nh, latent, n] prepared by `prepare_heads`, from a head's query without its rotated part."""
    expand: Array
    """[nh, v, latent] prepared likewise, to a head's output."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrence in place of attention: a causal convolution of each channel, and with heads a matrix for each.

    `gate`: the inputs are B, C, x; the outputs are C times the convolution of B times x (LFM2).

    `delta`: the inputs are q, k, v, z, b, a of all heads. The channels of q, k, v are convolved and activated with
    SiLU; queries and keys are normalized, and heads of values share those of keys. For a matrix S of a head, with
    g = -exp(decay) * softplus(a + time_bias),

        S = exp(g) * S;  S = S + k (sigmoid(b) * (v - k S));  y = q S / sqrt(key_dim)

    and the outputs are silu(z) times the norm of y (Yang et al., "Gated Delta Networks", 2024). All in float32.

    `scan`: the inputs are z, v, k, q, a, and v, k, q are convolved and activated, but not normalized. With the time
    t = softplus(a + time_bias) within `time_limits`,

        S = exp(-exp(decay) * t) * S;  S = S + k (t * v);  y = q S + skip * v

    and the outputs are the norm of y * silu(z), over the heads of values of each head of keys together (Mamba 2: Dao
    and Gu, "Transformers are SSMs", 2024).

    A block of a recurrent layer's group holds, in the bytes of its layer's keys and then values, float32: the number of
    tokens that the state has consumed, as an integer; the last taps - 1 inputs of the convolution; the matrices [value
    heads, key_dim, value_dim]; and a journal, the inputs of tokens after that number, as many as fit, at most
    `MAX_JOURNAL`. Drafts among them may be rejected, so a row's step replays those before its first token. Entry e of a
    block table is at first the state of its last token, or an earlier one with a journal up to it.
    """

    rule: RecurrentRule
    conv: Array
    """[taps, channels] prepared by `prepare_vector`, the oldest first; in the order of the inputs."""
    conv_bias: Array | None = None
    """[channels]"""
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decay: Array | None = None
    """[value heads] prepared by `prepare_vector`."""
    time_bias: Array | None = None
    """[value heads] likewise."""
    norm: Norm | None = None
    """Of a head's output; of `scan`, with weights for all heads."""
    skip: Array | None = None
    """[value heads] likewise."""
    time_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def channels(self) -> int:
        """Channels that are convolved."""
        return int(self.conv.shape[1])

    @property
    def outputs(self) -> int:
        """Width of the outputs."""
        return self.value_heads * self.value_dim or self.channels

    @property
    def inputs(self) -> int:
        """Width of the inputs."""
        return 3 * self.channels if self.rule == "gate" else self.sizes[1] + self.outputs

    @property
    def sizes(self) -> tuple[int, int]:
        """See `state_sizes`."""
        taps, channels = self.conv.shape
        return state_sizes(self.rule, int(channels), int(taps), self.value_heads, self.key_dim * self.value_dim)


def state_sizes(rule: RecurrentRule, channels: int, taps: int, heads: int, matrix: int) -> tuple[int, int]:
    """Return the float32 elements of a recurrent state without its journal, and of each token of the journal."""
    scalars = {"gate": 0, "delta": 2, "scan": 1}
    return 1 + (taps - 1) * channels + heads * matrix, channels + scalars[rule] * heads


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts block."""

    router: Array
    """[experts, H] prepared by `prepare_vector`; a token's product with it, in float32, yields the scores of all."""
    gate_up: Array
    """Prepared by `prepare_experts(..., gated=True)`; up alone, with `gated=False`, if they are `ungated`."""
    down: Array
    top_k: int
    normalize: bool
    """Divide the chosen weights by their sum."""
    correction_bias: Array | None = None
    """[experts] float32 added to the scores for the choice only, not for the weights (ERNIE-4.5)."""
    norm_floor: float = 0.0
    """Smallest divisor when normalizing (ERNIE-4.5 uses 1e-12)."""
    ungated: PlainActivation | None = None
    """Activation of all experts if they have no gate (Nemotron-H), instead of that of the layer: see
    `Ops.ungated_experts`."""
    shared_gate_up: Array | None = None
    """Shared experts, as one linear."""
    shared_down: Array | None = None
    shared_gate: Array | None = None
    """[H] prepared by `prepare_vector`: the sigmoid of its product with a token multiplies the output of the shared
    experts (Qwen2-MoE)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the products; the largest `top_k` scores are chosen and are the weights: see `Ops.any_experts`."""
    weighs_inputs: bool = False
    """True if a weight multiplies the input of the expert instead of its output (Llama 4)."""
    groups: int = 1
    """Equal groups of consecutive experts; those of a token are in its `top_groups` best groups (DeepSeek-V2).

    A group is as good as its best score, or as the sum of its two best corrected ones if there is a correction
    (DeepSeek-V3); the lower index is better on a tie."""
    top_groups: int = 1
    """As many as `groups` for experts of all groups."""
    weight_scale: float = 1.0
    """Factor on the weights, normalized or not."""
    router_bias: Array | None = None
    """[experts] prepared by `prepare_vector`, added to the products that are scored: see `Ops.biased_experts`."""
    first: int = 0
    """Index of the first expert of `gate_up` and `down`, which hold those of this rank: see `Ops.expert_parallel`."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """Host copy of a step's metadata, for packs that plan their kernels there; the arrays are those of `StepInput`."""

    query_start: IntArray
    """int32[N + 1]"""
    context_len: IntArray
    """int32[N]"""
    block_tables: IntArray
    """int32[N, max_blocks]; int32[groups, N, max_blocks] if the step is `grouped`."""

    def within(self, heads: Heads, block_size: int) -> HostStep:
        """Return the step as if contexts began with the first block that a layer with these heads reads."""
        if heads.window is None:
            return self
        first = np.maximum(heads.first_key(self.context_len - np.diff(self.query_start)), 0) // block_size
        context = self.context_len - first * block_size
        entries = first[:, None] + np.arange(-(-int(context.max(initial=0)) // block_size))
        tables = np.take_along_axis(self.block_tables, np.minimum(entries, self.block_tables.shape[1] - 1), axis=1)
        return HostStep(self.query_start, context, tables)


@dataclass(frozen=True, slots=True)
class GroupTables:
    """KV places of each group of layers of a cache with several groups, in the pack's integer arrays (int32)."""

    kv_slots: Array
    """[groups, T]"""
    block_tables: Array
    """[groups, N, max_blocks]; blocks outside the window of a row's first token may be those of other requests."""


@accept_old_names
@dataclass(frozen=True, slots=True)
class StepInput:
    """The flattened batch of one forward pass, in the pack's integer arrays (int32).

    Row i owns tokens query_start[i] to query_start[i+1]; they are consecutive positions of one request, the last of
    which is context_len[i] - 1.
    """

    token_ids: Array
    """[T]"""
    positions: Array
    """[T], rows of tables such as those of `Rope`. Of images, and of tokens after them, they are not the places in the
    text."""
    kv_slots: Array
    """[T], block * block_size + offset where the token's key and value are written."""
    query_start: Array
    """[N + 1]"""
    context_len: Array
    """[N], tokens that the row's last token attends to, including itself."""
    block_tables: Array
    """[N, max_blocks]; entries beyond the context are undefined."""
    logits_rows: Array
    """[R], indices into T."""
    max_query: int
    """Largest number of tokens of one row; 1 means pure decode."""
    max_context: int
    uniform: bool = False
    """Every row has exactly `max_query` tokens, and the step is a decode or padded like one: see `Ops.padded`. Then
    token j of row i is at index i * max_query + j and place context_len[i] - max_query + j."""
    host: HostStep | None = None
    """The same metadata on the host; None if the step was not built there."""
    lora_slots: Array | None = None
    """[T], the adapter slot of each token, 0 for none. None if no token of the step has an adapter."""
    lora_groups: Sequence[tuple[int, Array]] = ()
    """The same by adapter: each slot in use, and its tokens, indices into T."""
    states: Array | None = None
    """[T, H], the residual stream before the first layer, which may write into it: the output of the previous stage,
    see `Ops.states_from_host`, or embeddings with states of images. None if the tokens are to be looked up."""
    added: Sequence[Array] = ()
    """[T, H] each, added to the residual stream after layer 0, 1 and so on: further states of images, or zeros."""
    kinds: Sequence[tuple[int, Array]] = ()
    """Kinds of tokens, 0 for texts and 1 for images, and the tokens of each, indices into T, for layers whose experts
    differ by kind; empty if all are of texts."""
    ends: Array | None = None
    """[T], the end of the positions that each token attends to where `Heads` are causal: the tokens of an image may
    attend to all of it. They do not decrease within a row. None if a token attends up to itself."""
    grouped: GroupTables | None = None
    """Places of every group of layers; None for a cache with a single group."""
    group: int = 0
    """Group of layers whose places are `kv_slots` and `block_tables`."""

    def of_group(self, group: int) -> StepInput:
        """Return the same step with the KV places of another group."""
        if self.grouped is None:
            return self
        slots, tables = self.grouped.kv_slots[group], self.grouped.block_tables[group]
        host = None if self.host is None else replace(self.host, block_tables=self.host.block_tables[group])
        return replace(self, kv_slots=slots, block_tables=tables, group=group, host=host, grouped=None)


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank terms of one linear in a step: up(down(x)) of each token's adapter.

    Hu et al., "LoRA" (2021).
    """

    deltas: Any
    """Result of `Ops.place_loras`; its argument is accepted as well."""
    step: StepInput
    """The step; only `lora_slots` and `lora_groups` are read."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """Inputs for sampling R rows, in the pack's arrays; every row is one position of one request."""

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
    """int32[R], position of the sampled token; with the seed it selects the random number."""
    all_greedy: bool
    """True if no row needs a random number or a filter."""
    any_filter: bool
    """True if some row uses top_k, top_p or min_p."""


@dataclass(frozen=True, slots=True)
class PenaltyInput:
    """Inputs for penalties on n rows of logits, in the pack's arrays; every row is one position of one request."""

    rows: Array
    """int32[n], rows of the logits, each at most once."""
    counts: Array
    """int32[C, V], occurrences per request: twice the number of times that a token was generated, plus 1 if it is in
    the prompt. One number serves all penalties: a token occurred if it is not 0, and was generated half of it times,
    rounded down."""
    counts_rows: Array
    """int32[n], the row of `counts` that belongs to each row of logits."""
    draft_rows: Array
    """int32[m], indices into the n rows, not decreasing: rows that follow drafts, once per draft before them."""
    draft_ids: Array
    """int32[m], those drafts; each counts as one more generated token of its row, and is not in `counts`."""
    repetition: Array
    """float32[n], above 0; 1 for none."""
    presence: Array
    """float32[n], 0 for none."""
    frequency: Array
    """float32[n], 0 for none."""


Forward = Callable[[StepInput, KVCache], Array]

_ATTENTION: Final = ("paged_attention", "attention", "latent_attention")
_EXPERTS: Final = ("moe", "moe_residual")
DESCRIBED_BY: Final[Mapping[str, Collection[str]]] = {
    "kv_dtypes": ("allocate_kv", "write_kv", *_ATTENTION),
    "weight_formats": ("prepare_linear", "linear"),
    "table_formats": ("prepare_embedding", "embedding"),
    "encodes": _ATTENTION,
    "chunks": _ATTENTION,
    "sinks": _ATTENTION,
    "latents": ("allocate_kv", "write_kv", *_ATTENTION, "prepare_heads", "absorb", "expand", "latent_inputs"),
    "any_experts": _EXPERTS,
    "biased_experts": ("prepare_experts", *_EXPERTS),
    "ungated_experts": ("prepare_experts", *_EXPERTS),
    "expert_parallel": ("prepare_experts", *_EXPERTS),
    "recurs": ("allocate_kv", "recur", "gate_heads"),
}
"""Attributes of `Ops`, each with the operations of which it declares what they compute."""


class HostCopies:
    """Copies of arrays to the host, in this class already complete; a pack that queues overrides it."""

    def __init__(self, arrays: list[npt.NDArray[Any]]) -> None:
        self._arrays = arrays

    def ready(self) -> bool:
        """Return True if the copies are complete; does not block."""
        return True

    def wait(self) -> list[npt.NDArray[Any]]:
        """Block until the copies are complete and return the arrays; the same each time."""
        return self._arrays


@accept_old_names
class Ops(abc.ABC):
    """Operations on one framework's arrays.

    A pack that overrides operations of another one redefines the attributes that describe them, see `DESCRIBED_BY`: it
    may compute less.
    """

    name: str
    """Name of the pack, such as `numpy` or `torch`."""
    framework: str
    """Array library: `numpy`, `torch`, `paddle` or another; the postprocessor of that name is the
    default."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: dtype of activations, unpacked weights, and KV unless its shape overrides it.
    float16 overflows at 65,504: larger values are infinite, which the peaks of the row show, and that request fails."""
    kv_dtypes: Collection[str] = frozenset()
    """Other dtypes of `KVShape` that `allocate_kv`, `write_kv` and attention support: some of `int8` and `fp8`."""
    weight_formats: Collection[str] = frozenset()
    """Formats of packed weights that `prepare_linear` supports; the reader dequantizes the others."""
    table_formats: Collection[str] = frozenset()
    """Formats of packed tables that `prepare_embedding` supports; the reader dequantizes the others: all for the packs
    of CUDA, Paddle and ONNX."""
    dequantizes_weights: bool = False
    """True if packed weights save no memory because the pack stores them dequantized, in `dtype`."""
    stores_tightly: bool = False
    """True if packed values are stored in `PackedTensor.stored_bits`, else in 4 if they have 4 bits, and in 8."""
    on_host: bool = False
    """True if its arrays are numpy arrays on the host: `from_host` and `to_host` return their arguments, and steps read
    the arrays that the runner gathered."""
    queues: bool = False
    """True if calls queue work on the device, in order, and return before it is complete: then a step can be launched
    while earlier ones are in flight. Calls that need a result block, as `fetch` does. The logits of a step may be read
    later than the results of the step before, but before the next forward pass."""
    warm_up_tokens: int | None = None
    """Length of the warm-up prefill; None for the longest possible one, which proves that its memory suffices and
    compiles kernels that depend on the size. A decode follows, and the steps of `warm_up_steps`."""
    encodes: bool = False
    """True if it computes encoders: attention in both directions, `StepInput.ends`, and layer norms; and forwards of
    steps with `StepInput.kinds`."""
    chunks: bool = False
    """True if it computes attention within chunks."""
    any_experts: bool = False
    """True if `moe` computes sigmoid scores, groups of experts, factors on weights, and weights of inputs."""
    latents: bool = False
    """True if it computes latent attention: `prepare_heads`, `absorb`, `expand`, and caches and heads with a `latent`
    width."""
    biased_experts: bool = False
    """True if `moe` computes biases of the router and of experts, and `clamped_swiglu`."""
    ungated_experts: bool = False
    """True if `moe` computes experts without a gate."""
    expert_parallel: bool = False
    """True if it computes `Parallel.expert_parallel`: `moe` adds the outputs of the experts that this rank holds, and
    its part of the shared ones."""
    sinks: bool = False
    """True if it computes `Heads.sinks`."""
    recurs: bool = False
    """True if it computes `recur` and `gate_heads`."""
    parallel: Parallel = Parallel()
    """Rank and number of ranks. Weights are sharded: linears that produce heads or the inner width of a feed-forward
    block by rows; those into the residual stream by columns, with their bias on rank 0 only. So the latter return
    partial sums over ranks. With `gathers` all of them are sharded by rows. With `expert_parallel` experts are whole,
    each on one rank; shared experts are sharded."""

    def join(self, group: RankGroup) -> None:
        """Become one of several ranks; called before the first weight is prepared.

        A pack that supports it sets `parallel`, and implements `all_reduce` and `all_gather`; one that overrides
        `project_residual` or `moe_residual` sums there. One that sets `parallel.gathers` overrides both to gather the
        inputs and outputs of their last linear. Raises `ConfigError` by default.
        """
        raise ConfigError(
            f"the {self.name} pack does not support several ranks",
            field="--tensor-parallel-size",
            hint="leave it out, or use --backend cpu",
        )

    stage: Stage = Stage()
    """Range of the model's layers that are computed."""

    def cut(self, stage: Stage) -> None:
        """Become one of several pipeline stages; called before the first weight is prepared.

        A pack that supports it sets `stage`, and its forwards read `StepInput.states`. Raises `ConfigError` by default.
        """
        raise ConfigError(
            f"the {self.name} pack does not support pipeline stages",
            field="--pipeline-parallel-size",
            hint="leave it out, or use --backend cpu",
        )

    def configure(self, limits: Limits) -> None:  # noqa: B027 - most packs have nothing to do here
        """Receive the engine's final limits; called before the first KV cache is allocated."""

    def warm_up_steps(self, limits: Limits) -> Sequence[WarmUpStep]:
        """Return further warm-up steps, such as those that trigger compilations.

        The runner executes each step like a real one, including sampling. Steps beyond the limits are skipped; the
        requests of a step have equally many drafts.
        """
        return ()

    def warmed_up(self) -> None:  # noqa: B027 - most packs have nothing to do here
        """Handle the end of the warm-up: from now on, one-time costs delay requests."""

    def compilation_stats(self) -> CompilationStats | None:
        """Return the kernels compiled so far by this rank; None if the pack compiles none. Does not block."""
        return None

    # Arrays -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Return a device array with the values of `array`; may share its memory on a CPU.

        uint64 becomes int64 with the same bits where the framework has no uint64.
        """

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Array]:
        """Apply `from_host` to several arrays; a pack with a device uploads them in one transfer."""
        return list(arrays) if self.on_host else [self.from_host(array) for array in arrays]

    def states_from_host(self, states: npt.NDArray[np.float32]) -> Array:
        """Upload a forward's states [T, H] that `to_host` copied on another stage."""
        return self.from_host(states)

    @abc.abstractmethod
    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Copy or share a device array to numpy; bfloat16 becomes float32."""

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        """Queue copies of arrays to the host, as by `to_host`, after the work queued before.

        They hold the values at that point of the queue, unaffected by later work; a pack that does not queue may share
        them, as `to_host` may.
        """
        return HostCopies(list(arrays) if self.on_host else [self.to_host(array) for array in arrays])

    def fetch(self, arrays: Sequence[Array]) -> list[npt.NDArray[Any]]:
        """Copy arrays as `to_host` does, with one synchronization for all of them."""
        return self.fetch_later(arrays).wait()

    # Weights ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def prepare_vector(self, values: npt.NDArray[np.float32]) -> Array:
        """Prepare a norm weight, a router or a table of any shape; always in float32."""

    @abc.abstractmethod
    def prepare_embedding(self, weight: Weight) -> Array:
        """Prepare a token table [V, H], packed only if its format is in `table_formats`.

        Rows of a packed table are dequantized at lookup, then rounded to the pack's dtype.
        """

    @abc.abstractmethod
    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Array:
        """Prepare weights [out_i, in], stacked along `out`, for `linear`; the parts may be of several formats.

        Nothing else keeps their values, which are most of the memory of a process.

        With `gated`, the two parts are gate and up, used only by `gated_linear`, so that a pack may
        interleave them.
        """

    def prepare_experts(
        self, parts: Sequence[Sequence[Weight]], biases: Sequence[Sequence[RawTensor]] | None = None, *, gated: bool
    ) -> Any:
        """Prepare the experts' linears, by default one per expert; `parts[e]` are arguments of `prepare_linear`.

        Only a pack with `biased_experts` gets `biases`.
        """
        given = [None] * len(parts) if biases is None else biases
        return tuple(self.prepare_linear(*expert, gated=gated) for expert in zip(parts, given, strict=True))

    def replaceable_weights(self) -> AbstractContextManager[None]:
        """Prepare weights in memory that is freed with them, for adapters that are loaded and unloaded."""
        return nullcontext()

    def prepare_lora(self, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool = False) -> Any:
        """Prepare one adapter's term of a linear that stacks parts of `outs` columns; parts may be unchanged.

        With `gated`, the parts are gate and up. By default two linears, the second one block-diagonal.
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
        """Return `Lora.deltas` of one linear; None if there is no term.

        Called when adapters change, and with empty `deltas` before the first one. `deltas` are the results of
        `prepare_lora` for slots 1 and up, None if an adapter does not change the linear. The linear has `inputs`
        inputs, and its parts have `outs` columns. `before` is the previous result for it, which a pack that replays
        captured steps updates in place, so that captures stay valid.
        """
        return deltas if any(delta is not None for delta in deltas) else None

    def tied_head(self, embedding: Array, weight: Weight, bias: RawTensor | None = None) -> Array:
        """Return the output projection of a model that ties it to its embedding, with a bias [V] of its own.

        `weight` has the values of the table, unless it is of another format.
        """
        return self.prepare_linear([weight], None if bias is None else [bias])

    # Memory -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        """Allocate a KV cache; raises `MemoryError` if it does not fit.

        An engine that sleeps drops the cache, and what was compiled, to free the memory: the pack holds no array of it.
        """

    # Primitives -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def embedding(self, table: Array, token_ids: Array, scale: float = 1.0, *, centred: bool = False) -> Array:
        """Look up token ids: [T] -> [T, H], multiplied by `scale`, and then, if `centred`, less the mean of each row.

        Only models with layer norms pass `centred`.
        """

    @abc.abstractmethod
    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """Normalize the last axis, of activations or of the residual stream."""

    def layer_norm(self, x: Array, norm: Norm) -> Array:
        """Normalize the last axis with a norm that has a bias.

        Only encoders need it. Raises `ConfigError` by default.
        """
        raise ConfigError(f"the operations of {self.name} do not compute encoders", field="--backend")

    @abc.abstractmethod
    def linear(self, x: Array, weight: Array) -> Array:
        """[T, in] -> [T, out], with the bias that was prepared with the weight."""

    @abc.abstractmethod
    def gate(self, gate_up: Array, activation: Activation) -> Array:
        """[T, 2 I] -> [T, I]: activation(gate) * up, where gate is the first half of the result of `gate_up`.

        For `clamped_swiglu`, quick_gelu(min(gate, 7)) * (clamp(up, -7, 7) + 1). Only experts have it.
        """

    def activate(self, x: Array, activation: PlainActivation) -> Array:
        """Apply an activation to each element: [T, I] -> [T, I]. NaN stays NaN, also with `relu`.

        Only feed-forward blocks without a gate need it. Raises `ConfigError` by default.
        """
        raise ConfigError(
            f"the {self.name} pack does not compute feed-forward blocks without a gate",
            field="--backend",
            hint="use --backend cpu",
        )

    @abc.abstractmethod
    def split_heads(self, qkv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        """[T, (nh + 2 nkv) d] -> q [T, nh, d], k [T, nkv, d], v [T, nkv, d]; they may share memory with `qkv`.

        Of latent heads, see `latent_inputs`: -> the queries' columns [T, ...], k [T, 1, d - latent], v [T, 1, latent].
        """

    def joint_norm(self, x: Array, norm: Norm, width: int) -> Array:
        """Normalize all heads of a token together: [T, heads, d], weights [heads, d], `width` elements on all ranks.

        Only models with such norms need it. Raises `ConfigError` by default.
        """
        raise ConfigError(f"the operations of {self.name} do not normalize all heads together", field="--backend")

    @abc.abstractmethod
    def rope(self, x: Array, rope: Rope, positions: Array) -> Array:
        """Rotate [T, heads, d] by position."""

    @abc.abstractmethod
    def write_kv(self, layer: Any, k: Array, v: Array, kv_slots: Array) -> None:
        """Write keys and values of the step into the cache in place.

        A quantized cache stores rint(x / scale) of each element, clipped to ±127, ties to even, and the scale: the
        largest magnitude of that token's key or value in that head, divided by 127 in float32. A head of zeros has
        scale 0. So the stored values of a token depend only on that token, for any chunking of the prompt.

        A cache of FP8 stores the nearest number of float8_e4m3fn, ties to even, and at most 448 in magnitude. Elements
        that are not finite become NaN.

        In a latent cache, `k` is the rotated part of the key [T, 1, d - latent] and `v` the value [T, 1, latent].
        """

    @abc.abstractmethod
    def paged_attention(self, q: Array, layer: Any, heads: Heads, step: StepInput) -> Array:
        """Attention of q [T, nh, d] over each row's blocks; returns [T, nh * d], or [T, nh * latent] of a latent cache.
        Causal unless `heads` are not.

        Softmax in float32, of scores of any finite size. Blocks before the window of a row's first token may hold data
        of other requests, also NaN, like the rest of its last block.
        """

    @abc.abstractmethod
    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        """[T, H] -> [T, H]: route each token to its experts and add their weighted outputs.

        A token that is NaN reaches no other token, and the softmax takes scores of any finite size. The cost grows with
        the experts that tokens use, not with all experts.
        """

    @abc.abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """Elementwise sum of two activations."""

    @abc.abstractmethod
    def gather_rows(self, x: Array, rows: Array) -> Array:
        """Gather rows of any array by index: [T, ...], int32[R] -> [R, ...]."""

    @abc.abstractmethod
    def logits_of(self, x: Array, head: Array, softcap: float | None) -> Array:
        """[R, H] -> float32 [R, V]."""

    @abc.abstractmethod
    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Sample a token per row: float32[R, V] -> tokens int32[R], peaks float32[R].

        Order: divide by temperature, keep top_k, then top_p of the rest, then min_p; then the first token in
        vocabulary order whose cumulative probability exceeds u times the kept mass, u = uniform(seed, position).
        Greedy rows take the largest logit, the lowest id on a tie.

        All packs sample the same token, because everything after one exponential is exact: a token's weight is
        rint(2^32 * exp((logit - largest logit) / temperature)), computed in float64, so that sums of weights are
        integers below 2^53, the same in any order. With tokens ordered by logit, the lower id first on a tie: top_k
        keeps the first k; top_p keeps a token if the weights before it sum to less than top_p times the sum after
        top_k, and the first one always; min_p keeps weights of at least min_p * 2^32.

        A peak is the largest logit of a row, or NaN if one of its logits is NaN. If it is not finite, the runner fails
        the row's request; the token is then any valid id. No log or file shows the tokens of such a step either.
        """

    @abc.abstractmethod
    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Add values to single cells: x[rows[i], ids[i]] += values[i] for every i, including repeated cells.

        [R, V], int32[n], int32[n], [n] -> [R, V], all float32 (logits) or all int32 (counts of tokens), indices
        excepted; may write into `x`. It applies logit_bias, bans tokens with -inf, and counts sampled tokens.
        """

    @abc.abstractmethod
    def write_rows(self, x: Array, rows: Array, values: Array) -> Array:
        """Overwrite rows: x[rows[i]] = values[i]. [R, V], int32[n], [n, V] -> [R, V], all int32 or all activations.

        No row occurs twice; may write into `x`.
        """

    @abc.abstractmethod
    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Apply repetition, presence and frequency penalties: float32[R, V] -> float32[R, V].

        May write into `logits`. A positive logit of a token that occurred is divided by the repetition penalty, a
        negative one is multiplied. Then presence + frequency * count is subtracted from the logit of a generated token.
        The sum is computed in float64, where a product of a float32 and a count is exact, and rounded to float32 once,
        so that all packs agree bit for bit.
        """

    @abc.abstractmethod
    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        """Forbid tokens by packed bits: float32[R, V], int32[n], int32[n, ceil(V / 32)] -> float32[R, V].

        Bit j % 32 of bits[i, j // 32], from the lowest, is 1 if row rows[i] may sample token j; the logits of all other
        tokens become -inf, even if NaN. Bits beyond the vocabulary are ignored, other rows are unchanged, and no row
        occurs twice. May write into `logits`.
        """

    @abc.abstractmethod
    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the sampled and of the most likely tokens.

        float32[R, V], int32[R] -> chosen float32[R], top ids int32[R, top_n], top float32[R, top_n], most likely first,
        the lower id first on a tie. Does not modify `logits`.
        """

    @abc.abstractmethod
    def ranks(self, logits: Array, tokens: Array) -> Array:
        """Return the ranks of tokens by probability, 1 for the most likely: float32[R, V], int32[R] -> int32[R].

        On a tie the lower id is first. Does not modify `logits`.
        """

    @abc.abstractmethod
    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        """Count the accepted drafts: the longest prefix equal to the sampled tokens.

        sampled int32[N, 1 + k], drafts int32[N, k], num_drafts int32[N] -> int32[N]. Column j of `sampled` was sampled
        after draft j - 1, so a row with `a` accepted drafts delivers its first 1 + a sampled tokens.
        """

    # Latent attention: see `latents` ---------------------------------------------------------------------

    def prepare_heads(self, weight: npt.NDArray[np.float32]) -> Array:
        """Prepare a matrix of each head [nh, out, in] for `absorb` or `expand`, in the pack's dtype."""
        raise NotImplementedError

    def absorb(self, q: Array, weight: Array, heads: Heads) -> Array:
        """Bring queries [T, nh * (n + r)] to the form of keys: [T, nh, r + latent], where r is d - latent.

        Of each head, the first n elements are multiplied by its matrix [latent, n]; the last r go before the product.
        """
        raise NotImplementedError

    def expand(self, x: Array, weight: Array, heads: Heads) -> Array:
        """Multiply each head of [T, nh * latent] by its matrix [v, latent]: -> [T, nh * v]."""
        raise NotImplementedError

    # Recurrent layers: see `recurs` ----------------------------------------------------------------------

    def recur(self, x: Array, recurrent: Recurrent, layer: Any, step: StepInput) -> Array:
        """Compute the outputs of a recurrence [T, outputs] for its inputs [T, ...], and write the states of the rows.

        May write into `x`.

        A row at position 0 begins with zeros; any other one with the state in the table entry of the token before it.
        After the step, the state is that of the row's first token or a later one, with a journal of those after it. It
        is written to all table entries of these tokens, and that at the end of an earlier block to the entry of that
        block. No other entry is written, and the outputs of a row whose state does not lead up to it are NaN.
        """
        raise NotImplementedError

    def gate_heads(self, x: Array, gate: Array) -> Array:
        """Multiply outputs of heads [T, nh * d] by the sigmoid of a gate; may write into `x`, may write into `gate`."""
        raise NotImplementedError

    # Sums over ranks --------------------------------------------------------------------------------------

    def all_reduce(self, x: Array) -> Array:
        """Return the sum over all ranks, with the same bits on each; may be captured in a graph."""
        return x

    def all_gather(self, x: Array) -> Array:
        """Return the arrays of all ranks, concatenated along the last axis in the order of ranks: float32 [R, V]."""
        return x

    # Compositions that primitives and models share --------------------------------------------------------

    def add_positions(self, x: Array, table: Array, positions: Array) -> Array:
        """Add rows of a table of positions: [T, H] + table[positions] -> [T, H]. May write into `x`."""
        return self.add(x, self.embedding(table, positions))

    def normalize(self, x: Array, norm: Norm | None) -> Array:
        """Normalize activations or the residual stream, with a norm of either kind.

        Without one, settle them; the result may share memory with `x`.
        """
        if norm is None:
            return self.settle(x)
        return self.rms_norm(x, norm) if norm.bias is None else self.layer_norm(x, norm)

    def gate_up(self, x: Array, weight: Array) -> Array:
        """[T, in] -> [T, 2 I], gate first, of a weight prepared as gated; a pack that interleaves them restores the
        order."""
        return self.linear(x, weight)

    def gated_linear(self, x: Array, weight: Array, activation: Activation) -> Array:
        """[T, in] -> [T, out]: activation(gate(x)) * up(x)."""
        return self.gate(self.gate_up(x, weight), activation)

    def lora(self, y: Array, x: Array, lora: Lora) -> Array:
        """Add the low-rank terms of x for the adapters of a step's tokens: [T, out], [T, in] -> [T, out]. May write
        into `y`.

        Each adapter multiplies only the tokens that use it, so not even its NaN reaches other tokens. In `y`, up
        follows gate, as in the result of `gate_up`.
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
        self,
        x: Array,
        norm: Norm | None,
        qkv: Array,
        heads: Heads,
        layer: Any,
        step: StepInput,
        lora: Lora | None = None,
    ) -> Array:
        """Norm, q/k/v projection, norms of heads and rope in any order, KV write: [T, H] -> q [T, nh, d].

        A pack whose kernel lacks a form of norms calls this method for it.
        """
        normed = self.normalize(x, norm)
        projected = self.linear(normed, qkv)
        if lora is not None:
            projected = self.lora(projected, normed, lora)
        q, k, v = self.split_heads(projected, heads)
        q_width, k_width = heads.joint_widths or (None, None)
        q = self._placed(q, heads.q_norm, q_width, replace(heads, rope=heads.query_rope or heads.rope), step)
        k = self._placed(k, heads.k_norm, k_width, heads, step)
        self.write_kv(layer, k, v, step.kv_slots)
        return q

    def latent_inputs(
        self,
        x: Array,
        norm: Norm | None,
        qkv: Array,
        latent: Latent,
        heads: Heads,
        layer: Any,
        step: StepInput,
        lora: Lora | None = None,
    ) -> Array:
        """Norm, projections, their norms, rope, KV write of latent attention: [T, H] -> q [T, nh, d].

        `qkv` stacks the linears of the queries, of the value and of the rotated part of the key, in this order.
        """
        normed = self.normalize(x, norm)
        projected = self.linear(normed, qkv)
        if lora is not None:
            projected = self.lora(projected, normed, lora)
        q, k, v = self.split_heads(projected, heads)
        if latent.q_norm is not None:
            q = self.linear(self.rms_norm(q, latent.q_norm), latent.q_up)
        q = self.rope(self.absorb(q, latent.absorb, heads), heads.rope, step.positions)
        self.write_kv(layer, self.rope(k, heads.rope, step.positions), self.rms_norm(v, latent.norm), step.kv_slots)
        return q

    def _placed(self, x: Array, norm: Norm | None, width: int | None, heads: Heads, step: StepInput) -> Array:
        """Normalize and rotate queries or keys [T, heads, d]."""
        if norm is not None and not heads.norms_rotated:
            x = self.rms_norm(x, norm) if width is None else self.joint_norm(x, norm, width)
        x = self.rope(x, heads.rope, step.positions)
        return self.rms_norm(x, norm) if norm is not None and heads.norms_rotated else x

    def attention(self, q: Array, heads: Heads, layer: Any, step: StepInput) -> Array:
        """Paged attention: q [T, nh, d] -> [T, nh * d]."""
        return self.paged_attention(q, layer, heads, step)

    def recurrence(
        self,
        x: Array,
        norm: Norm | None,
        inputs: Array,
        recurrent: Recurrent,
        layer: Any,
        step: StepInput,
        lora: Lora | None = None,
    ) -> Array:
        """Norm, projection to the inputs of a recurrence, and its outputs: [T, H] -> [T, outputs]."""
        normed = self.normalize(x, norm)
        projected = self.linear(normed, inputs)
        if lora is not None:
            projected = self.lora(projected, normed, lora)
        return self.recur(projected, recurrent, layer, step)

    def gated_attention(self, a: Array, x: Array, norm: Norm | None, gate: Array) -> Array:
        """Multiply outputs of attention [T, nh * d] by the sigmoid of a linear of the norm of its inputs x [T, H].

        May write into `a`.
        """
        return self.gate_heads(a, self.linear(self.normalize(x, norm), gate))

    def latent_attention(self, q: Array, latent: Latent, heads: Heads, layer: Any, step: StepInput) -> Array:
        """Paged attention and the outputs of its heads: q [T, nh, d] -> [T, nh * v]."""
        return self.expand(self.attention(q, heads, layer, step), latent.expand, heads)

    def project_residual(
        self, x: Array, weight: Array, residual: Array, post_norm: Norm | None = None, lora: Lora | None = None
    ) -> Array:
        """residual + post_norm(all_reduce(linear(x))): [T, in], [T, H] -> [T, H]. May write into `residual`.

        Returns the residual stream; a pack that defers the sum overrides `settle` as well.
        """
        y = self.linear(x, weight)
        if lora is not None:
            y = self.lora(y, x, lora)
        y = self.all_reduce(y)
        if post_norm is not None:
            y = self.rms_norm(y, post_norm)
        return self.add(residual, y)

    def mlp_inputs(
        self, x: Array, norm: Norm | None, gate_up: Array, activation: Activation, lora: Lora | None = None
    ) -> Array:
        """Norm, gate and up projection, gated activation: [T, H] -> [T, I]."""
        normed = self.normalize(x, norm)
        if lora is None:
            return self.gated_linear(normed, gate_up, activation)
        return self.gate(self.lora(self.gate_up(normed, gate_up), normed, lora), activation)

    def plain_mlp_inputs(
        self, x: Array, norm: Norm | None, up: Array, activation: PlainActivation, lora: Lora | None = None
    ) -> Array:
        """Norm, up projection, activation: [T, H] -> [T, I]."""
        normed = self.normalize(x, norm)
        projected = self.linear(normed, up)
        return self.activate(projected if lora is None else self.lora(projected, normed, lora), activation)

    def add_shared(self, y: Array, x: Array, experts: Experts, activation: Activation) -> Array:
        """Return y [T, H] plus the output of the shared experts for x; may write into `y`."""
        shared = self.shared(x, experts, activation)
        if shared is not None:
            y += shared
        return y

    def shared(self, x: Array, experts: Experts, activation: Activation) -> Array | None:
        """Return the output of the shared experts for x, or None without any."""
        if experts.shared_gate_up is None:
            return None
        y = self.expert(x, experts.shared_gate_up, experts.shared_down, experts, activation)
        return y if experts.shared_gate is None else self.weigh(y, x, experts.shared_gate)

    def expert(self, x: Array, gate_up: Array, down: Array, experts: Experts, activation: Activation) -> Array:
        """Return the output of one expert, or of the shared ones: [T, H] -> [T, H]."""
        if experts.ungated is None:
            return self.linear(self.gated_linear(x, gate_up, activation), down)
        return self.linear(self.activate(self.linear(x, gate_up), experts.ungated), down)

    def weigh(self, y: Array, x: Array, gate: Array) -> Array:
        """Multiply y [T, H] by sigmoid(x @ gate), for x [T, H] and a vector [H], computed in float32.

        Only shared experts with a gate need it. Raises `ConfigError` by default.
        """
        raise ConfigError(f"the operations of {self.name} have no gate for shared experts", field="--backend")

    def moe_residual(self, x: Array, norm: Norm, experts: Experts, activation: Activation) -> Array:
        """x + all_reduce(moe(norm(x))): [T, H] -> [T, H], the residual stream. May write into `x`."""
        return self.add(x, self.all_reduce(self.moe(self.rms_norm(x, norm), experts, activation)))

    def settle(self, x: Array) -> Array:
        """Convert the residual stream, or activations, to activations [T, H]; may write into `x`, which remains
        valid."""
        return x

    def logits(
        self, x: Array, norm: Norm, head: Array, rows: Array, softcap: float | None = None, *, split: bool = False
    ) -> Array:
        """Final norm and output projection of the requested rows: [T, H] -> float32 [R, V].

        With `split`, `head` is this rank's shard of the vocabulary, V / size tokens, and the logits are gathered.
        """
        logits = self.logits_of(self.rms_norm(self.gather_rows(x, rows), norm), head, softcap)
        return self.all_gather(logits) if split else logits

    def stream_linear(self, x: Array, weight: Array) -> Array:
        """Linear of the residual stream, which stays as it is: [T, H] -> [T, out]. Drafters read hidden states so."""
        return self.linear(self.settle(x), weight)

    # Whole steps ------------------------------------------------------------------------------------------

    def padded(self, rows: int, width: int) -> tuple[int, int] | None:
        """Return the padded shape of a step: rows, and tokens per row; None for no padding.

        For packs that replay graphs of fixed shapes. Called for each step, whose `rows` rows have up to `width` tokens
        each; the shape is no smaller. Padding only writes the cache's `spare_block`. The padded size counts towards the
        step token budget, so a pack never returns more tokens than `max_num_batched_tokens`.
        """
        return None

    def compile(self, forward: Forward) -> Forward:
        """Return a faster equivalent of a model's forward, such as a captured graph; by default the forward.

        Its result is valid until the next call.
        """
        return forward

    def compile_states(self, states: Forward) -> Forward:
        """Compile the function that returns the states of all tokens, or a tuple of arrays with a row for each.

        It runs on prompt chunks, which benefit less, and on every step if a drafter reads hidden states.
        """
        return states

    def compile_adapted(self, forward: Forward, cache: KVCache | None = None, before: Forward | None = None) -> Forward:
        """Compile a forward for steps with adapters; called between steps, when adapters change.

        `cache` is the cache of all these steps if the forward yields logits, so that a pack may capture at once.
        `before` is the previous result.
        """
        return forward
