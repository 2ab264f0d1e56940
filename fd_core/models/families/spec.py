"""Declarative description of a decoder: tensor names, shapes and geometry, before any weight is read.

Each model family maps a config to `Traits`, its differences from Llama; `decoder_spec` fills in the rest.

Ranks shard heads and inner width, with `Parallel.gathers` also the outputs into the residual stream, and with
`Parallel.expert_parallel` the list of experts instead of their inner width; all other tensors are replicated. Stages
divide the layers. Shards need not be equal: three KV heads on two ranks are two and one. Where there are more ranks
than KV heads, several ranks hold the same KV head and divide the query heads that share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError, ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.ops.contract import (
    TURNED_TOKENS,
    Activation,
    Ops,
    PlainActivation,
    RecurrentRule,
    Rope,
    state_sizes,
)
from fd_core.ops.parallel import Parallel, Stage

_SUPPORTED = ("default", "dynamic", "linear", "llama3", "longrope", "mrope", "su", "yarn")
Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of one kind of layer; equal specs share their tables."""

    inverse_frequencies: tuple[float, ...]
    """Frequency of each pair of elements, radians per position."""
    amplitude: float = 1.0
    """Factor on cosine and sine; YaRN uses it to sharpen attention."""
    interleaved: bool = False
    long: tuple[float, ...] = ()
    """Frequencies if more than `original` positions are served; empty if they are the same."""
    original: int = 0
    coordinates: tuple[int, ...] = ()
    """The coordinate of a token by which each pair rotates; empty if tokens have one. Else tables have
    further rows, for `TURNED_TOKENS` whose coordinates differ, see `rotations`."""
    growth: tuple[int, float] | None = None
    """(step, slope): the queries are multiplied by 1 + slope * log1p(floor((position + 1) / step))."""

    @property
    def unrotated(self) -> RopeSpec:
        """The same shape for layers without position embeddings."""
        return RopeSpec((0.0,) * len(self.inverse_frequencies), interleaved=self.interleaved)


def rope_spec(
    config: ModelConfig, head_dim: int, *, theta: float, interleaved: bool = False, rotary: float | None = None
) -> RopeSpec:
    """Return the frequencies of a config, which has them in `rope_parameters`, or in `rope_scaling`, which prevails.

    `theta` is the family's default base, `rotary` the share of a head that it rotates by default; if None, models
    whose config states a share are refused.
    """
    given = (config.part(field) for field in ("rope_scaling", "rope_parameters"))
    part = next((each for each in given if each is not None and each.values), ModelConfig({}, origin=config.origin))
    field = "original_max_position_embeddings"
    if (original := config.optional_count(field)) is not None:
        part = replace(part, values={**part.values, field: original})
    theta = config.number("rope_theta", theta)
    return scaled_rope_spec(config, part, head_dim, theta=theta, interleaved=interleaved, rotary=rotary)


def scaled_rope_spec(
    config: ModelConfig,
    part: ModelConfig | None,
    head_dim: int,
    *,
    theta: float,
    interleaved: bool = False,
    rotary: float | None = None,
) -> RopeSpec:
    """Return the frequencies for rope parameters such as `{"rope_type": "linear", "factor": 8}`.

    Su et al., "RoFormer" (2021); linear scaling, Llama 3.1's scaling by wavelength, YaRN (Peng et al., 2023), and
    LongRoPE (Ding et al., 2024); words turn by `mrope` as by default. Dynamic scaling changes nothing within
    `max_position_embeddings`, the most that is served, unless the config fixes its `alpha`.
    """
    part = part or ModelConfig({})
    kind = part.text("rope_type", part.text("type", "default"))
    if kind not in _SUPPORTED:
        raise ModelError(
            f"{config.origin}: rope type {kind!r} is not supported", hint=f"one of {', '.join(_SUPPORTED)}"
        )
    theta = part.number("rope_theta", theta)
    share = part.number("partial_rotary_factor", config.number("partial_rotary_factor", rotary or 1.0))
    width = int(head_dim * min(share, 2.0))
    if rotary is None and width != head_dim:
        name = config.name_of("partial_rotary_factor")
        raise ModelError(
            f"{config.origin}: {name} rotates {width} of {head_dim} elements of a head, but this family rotates "
            "whole heads"
        )
    if width % 2 or not 0 < width <= head_dim:
        raise ModelError(f"{config.origin}: rope cannot rotate {width} of {head_dim} elements in pairs")
    if kind == "dynamic" and "alpha" in part.values and width > 2:
        theta *= part.number("alpha") ** (width / (width - 2))
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    amplitude, long, original = 1.0, frequencies[:0], 0
    try:
        if kind == "linear":
            frequencies = frequencies / part.number("factor")
        elif kind == "llama3":
            frequencies = _llama3(frequencies, part, config)
        elif kind == "yarn":
            frequencies, amplitude = _yarn(frequencies, theta, part, config=config)
        elif kind in ("longrope", "su"):
            original = _original_context(part, config)
            amplitude = _long_amplitude(part, config, original)
            long = frequencies / _factors(part, "long_factor", len(frequencies))
            frequencies = frequencies / _factors(part, "short_factor", len(frequencies))
            if np.array_equal(long, frequencies):
                long, original = frequencies[:0], 0
    except (ArithmeticError, ValueError) as error:  # numbers that are too large or too small to compute with
        raise ModelError(f"{config.origin}: rope of type {kind} cannot be computed: {error}") from error
    if not np.isfinite([*frequencies, *long, amplitude]).all():
        raise ModelError(f"{config.origin}: the rope parameters yield frequencies that are not finite")
    return RopeSpec(tuple(frequencies.tolist()), amplitude, interleaved, tuple(long.tolist()), original)


def rope_tables(spec: RopeSpec, max_positions: int, ops: Ops) -> Rope:
    """Compute cosines and sines for positions 0 to max_positions - 1, and rows for `RopeSpec.coordinates`.

    Angles are rounded to float32 as in the code that models are trained with: an exact angle would differ from it
    at long positions.
    """
    longer = spec.long and max_positions > spec.original
    frequencies = np.array(spec.long if longer else spec.inverse_frequencies, np.float32)
    positions = np.arange(max_positions + (TURNED_TOKENS if spec.coordinates else 0), dtype=np.float32)[:, None]
    angles, amplitude = positions * frequencies, np.float32(spec.amplitude)
    if spec.growth is not None:
        step, slope = (np.float32(each) for each in spec.growth)
        amplitude = amplitude * (1 + slope * np.log1p(np.floor((positions + 1) / step)))
    cos, sin = (ops.prepare_vector(turned * amplitude) for turned in (np.cos(angles), np.sin(angles)))
    return Rope(cos, sin, spec.interleaved)


def rotations(spec: RopeSpec, places: Indices) -> tuple[Floats, Floats]:
    """Return cosines and sines [n, pairs] for tokens with `places` int[coordinates, n].

    Wang et al., "Qwen2-VL" (2024).
    """
    frequencies = np.array(spec.inverse_frequencies, np.float32)
    angles = places[np.array(spec.coordinates)].T.astype(np.float32) * frequencies
    amplitude = np.float32(spec.amplitude)
    return np.cos(angles) * amplitude, np.sin(angles) * amplitude


def _llama3(frequencies: Doubles, part: ModelConfig, config: ModelConfig) -> Doubles:
    """Divide low frequencies by the factor, keep high ones, and interpolate in between."""
    original = _original_context(part, config)
    low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"{config.origin}: rope's low_freq_factor must be below its high_freq_factor")
    turns = original * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(frequencies * (share + (1.0 - share) / part.number("factor")))


def _yarn(frequencies: Doubles, theta: float, part: ModelConfig, config: ModelConfig) -> tuple[Doubles, float]:
    """Interpolate frequencies with less than one rotation over the original context, keep the high ones."""
    factor = part.number("factor")
    original = _original_context(part, config)
    pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(part.number("beta_fast", 32.0))
    high = pair_that_turns(part.number("beta_slow", 1.0))
    if part.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    interpolated = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled = np.asarray(frequencies * (1.0 - interpolated + interpolated / factor))
    amplitude = part.optional_number("attention_factor")
    if amplitude is None:
        numerator, denominator = part.optional_number("mscale"), part.optional_number("mscale_all_dim")
        both = numerator is not None and denominator is not None
        amplitude = _mscale(factor, numerator or 1.0) / _mscale(factor, denominator or 1.0) if both else _mscale(factor)
    return scaled, amplitude


def _original_context(part: ModelConfig, config: ModelConfig) -> int:
    """Return the context before it was extended."""
    return part.count("original_max_position_embeddings", config.optional_count("max_position_embeddings"))


def _factors(part: ModelConfig, field: str, count: int) -> Doubles:
    """Return the divisor of each frequency."""
    found = part.values.get(field)
    if not isinstance(found, list | tuple) or len(found) != count:
        raise ModelError(f"{part.origin}: {part.prefix}{field} must be a list of {count} numbers")
    return np.asarray([ModelConfig({field: each}, part.prefix, part.origin).number(field) for each in found])


def _long_amplitude(part: ModelConfig, config: ModelConfig, original: int) -> float:
    given = part.optional_number("attention_factor")
    factor = part.optional_number("factor") or config.count("max_position_embeddings") / original
    if given is not None or factor <= 1:
        return given or 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


_MAX_HEAD_DIM: Final = 65_536

_Stored = TypeVar("_Stored")
TensorShape = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor in the checkpoint."""


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A norm weight or table in float32."""

    name: str
    """Empty for ones that no tensor holds."""
    shape: tuple[int, ...]
    stack: tuple[int, int] | None = None
    """Index in a tensor [n, ...] of several, and n."""
    transposed: bool = False
    """True if the tensor has the axes in the opposite order."""

    def tensors(self) -> Iterator[TensorShape]:
        """Yield the tensors of the checkpoint that it is read from."""
        if self.name:
            shape = self.shape[::-1] if self.transposed else self.shape
            yield self.name, shape if self.stack is None else (self.stack[1], *shape)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Weights `names[i].weight` [outs[i], ins] stacked into one linear, with `names[i].bias` [outs[i]] if `bias`.

    With one name for several parts, that tensor holds them one after another.
    """

    names: tuple[str, ...]
    outs: tuple[int, ...]
    ins: int
    bias: bool = False
    stack: tuple[int, int] | None = None
    """Index in a tensor [n, out, in] of several linears, and n."""
    transposed: bool = False
    """True if that tensor is [n, in, out], or [in, out] of no stack, and its name has no `.weight`;
    biases are in `names[i]_bias` [n, out]."""
    alternating: bool = False
    """True if the rows of the parts alternate in the one tensor that holds them."""
    counts: tuple[int, ...] = ()
    """Number of parts under each name, if they are neither one nor all."""
    groups: int = 1
    """Equal groups of the rows of each tensor, each of which has the same share of its parts."""

    def tensor(self, name: str) -> str:
        """Return the name of the tensor for one of `names`."""
        return name if self.transposed else f"{name}.weight"

    def bias_tensor(self, name: str) -> str:
        """Return the name of its bias."""
        return f"{name}_bias" if self.transposed else f"{name}.bias"

    @property
    def stored(self) -> tuple[tuple[str, int], ...]:
        """Name and outputs of each stored linear."""
        return tuple((name, sum(parts)) for name, parts in zip(self.names, self.held, strict=True))

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Outputs of the parts under each name."""
        each = (1,) * len(self.outs) if len(self.names) == len(self.outs) else (len(self.outs),)
        ends = list(accumulate(self.counts or each, initial=0))
        return tuple(self.outs[begin:end] for begin, end in pairwise(ends))

    def tensors(self) -> Iterator[TensorShape]:
        """Yield the tensors of the checkpoint that it is read from."""
        for name, out in self.stored:
            shape = (self.ins, out) if self.transposed else (out, self.ins)
            yield self.tensor(name), shape if self.stack is None else (self.stack[1], *shape)
            if self.bias:
                yield self.bias_tensor(name), (out,) if self.stack is None else (self.stack[1], out)


def parts_of(
    linear: LinearSpec, stored: Sequence[_Stored], cut: Callable[[_Stored, slice | Indices], _Stored]
) -> list[_Stored]:
    """Return the parts of a linear from what is stored under its names, by cutting rows of what holds several parts."""
    parts = list[_Stored]()
    for whole, outs in zip(stored, linear.held, strict=True):
        if len(outs) == 1:
            parts.append(whole)
        elif linear.alternating:
            parts += [cut(whole, slice(part, None, len(outs))) for part in range(len(outs))]
        elif linear.groups > 1:
            rows = np.arange(sum(outs)).reshape(linear.groups, -1)
            ends = [end // linear.groups for end in accumulate(outs, initial=0)]
            parts += [cut(whole, rows[:, begin:end].ravel()) for begin, end in pairwise(ends)]
        else:
            parts += [cut(whole, slice(begin, end)) for begin, end in pairwise(accumulate(outs, initial=0))]
    return parts


@dataclass(frozen=True, slots=True)
class _Parts:
    """A composite part of a model."""

    def tensors(self) -> Iterator[TensorShape]:
        """Yield the checkpoint tensors, in the order of the fields."""
        for part in _leaves(self):
            yield from part.tensors()

    def linears(self) -> Iterator[LinearSpec]:
        """Yield the linear layers, in the same order."""
        return (part for part in _leaves(self) if isinstance(part, LinearSpec))


def _leaves(part: object) -> Iterator[VectorSpec | LinearSpec]:
    if isinstance(part, VectorSpec | LinearSpec):
        yield part
    elif isinstance(part, _Parts | tuple):
        for each in part if isinstance(part, tuple) else (getattr(part, field.name) for field in fields(part)):
            yield from _leaves(each)


@dataclass(frozen=True, slots=True)
class NormSpec(_Parts):
    """One norm; a bias belongs to a layer norm."""

    weight: VectorSpec
    bias: VectorSpec | None = None


@dataclass(frozen=True, slots=True)
class LatentSpec(_Parts):
    """Parts of latent attention besides those of all; its `qkv` yields queries, the latent value, the rotated key."""

    norm: VectorSpec
    up: LinearSpec
    """From latent values to the keys and values of all heads."""
    key: int
    """Elements of a head's query that are not rotated."""
    value: int
    """Elements of a head's output."""
    rank: int
    """Width of latent values."""
    q_norm: VectorSpec | None = None
    q_up: LinearSpec | None = None
    """Second linear of the queries, if they have two."""
    eps: float = 1e-6
    """Of both norms, whatever the config has for others."""

    def query_share(self, heads: slice, head_dim: int) -> slice:
        """Return the rows of the last linear of the queries for some heads."""
        return times(heads, head_dim - self.rank + self.key)


@dataclass(frozen=True, slots=True)
class AttentionSpec(_Parts):
    """One attention block."""

    norm: NormSpec | None
    qkv: LinearSpec
    output: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    norms_rotated: bool
    """True if queries and keys are normalized after rope."""
    joint_norms: bool
    """True if all heads of the queries, and all of the keys, are normalized together."""
    window: int | None
    chunked: bool
    """True if `window` is the size of chunks."""
    causal: bool
    softcap: float | None
    post_norm: NormSpec | None
    stream_norm: NormSpec | None
    """Of the residual stream, after the output is added to it."""
    sinks: VectorSpec | None
    """See `Heads.sinks`."""
    latent: LatentSpec | None = None
    gated: bool = False
    """True if `qkv` has another part after the queries, whose sigmoid multiplies the outputs of the heads."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec(_Parts):
    """One block with a recurrence in place of attention, see `Recurrent`."""

    norm: NormSpec | None
    inputs: LinearSpec
    """Its parts: B, C, x of a `gate`; q, k, v, z, b, a of `delta`; z, v, k, q, a of `scan`."""
    output: LinearSpec
    rule: RecurrentRule
    conv: VectorSpec
    """[channels, 1, taps], the oldest tap first."""
    conv_bias: VectorSpec | None = None
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decay: VectorSpec | None = None
    """[value heads], logarithms of the rates."""
    time_bias: VectorSpec | None = None
    """[value heads]"""
    head_norm: VectorSpec | None = None
    """[value_dim], or [value heads * value_dim] of `scan`."""
    head_eps: float = 1e-6
    skip: VectorSpec | None = None
    """[value heads]"""
    time_limits: tuple[float, float] = (0.0, math.inf)
    post_norm: NormSpec | None = None
    stream_norm: NormSpec | None = None

    @property
    def window(self) -> int:
        """Tokens that a token reads: the state after the token before it is stored with that one."""
        return 2

    @property
    def chunked(self) -> bool:
        """See `AttentionSpec`."""
        return False


@dataclass(frozen=True, slots=True)
class MlpSpec(_Parts):
    """One dense feed-forward block."""

    norm: NormSpec | None
    gate_up: LinearSpec
    """Gate and up, or up alone."""
    down: LinearSpec
    post_norm: NormSpec | None = None
    stream_norm: NormSpec | None = None

    @property
    def gated(self) -> bool:
        """True if an activated gate multiplies up."""
        return len(self.gate_up.outs) > 1

    @property
    def downs(self) -> tuple[LinearSpec, ...]:
        """Linears whose inputs are the inner width."""
        return (self.down,)


@dataclass(frozen=True, slots=True)
class MoeSpec(_Parts):
    """One mixture-of-experts block; the parts of `experts` and `shared` are gate with up, or up alone, and down."""

    norm: NormSpec
    router: VectorSpec
    experts: tuple[tuple[LinearSpec, LinearSpec], ...]
    top_k: int
    normalize: bool
    norm_floor: float = 0.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weighs_inputs: bool = False
    correction_bias: VectorSpec | None = None
    shared: tuple[LinearSpec, LinearSpec] | None = None
    router_bias: VectorSpec | None = None
    shared_gate: VectorSpec | None = None
    """[1, hidden], whose sigmoid multiplies the output of the shared experts."""
    groups: int = 1
    top_groups: int = 1
    weight_scale: float = 1.0
    images: MoeSpec | None = None
    """The block for the tokens of `ImageSpec.kind_ids`, if they have other experts: with the same norm, and the same
    shared experts, which it does not name."""

    @property
    def gated(self) -> bool:
        """True if an activated gate multiplies up."""
        return len(self.experts[0][0].outs) > 1

    @property
    def kinds(self) -> tuple[MoeSpec, ...]:
        """This block, and that for images."""
        return (self,) if self.images is None else (self, self.images)

    @property
    def shared_downs(self) -> tuple[LinearSpec, ...]:
        """The linear whose inputs are the inner width of the shared experts, if there are any."""
        return () if self.shared is None else self.shared[1:]

    @property
    def downs(self) -> tuple[LinearSpec, ...]:
        """Linears whose inputs are the inner widths of one expert, of each kind, and of the shared experts."""
        return (*(each.experts[0][1] for each in self.kinds), *self.shared_downs)

    def held(self, parallel: Parallel) -> slice:
        """Return the experts of which a rank has a share. Raises `ConfigError` if there are fewer than ranks."""
        count = self.router.shape[0]
        if not parallel.expert_parallel:
            return slice(0, count)
        if count < parallel.size:
            raise ConfigError(
                f"cannot divide {count} experts among {parallel.size} ranks", field="--enable-expert-parallel"
            )
        return parallel.share(count)


@dataclass(frozen=True, slots=True)
class LayerSpec(_Parts):
    """Attention, or a recurrence in its place, then feed-forward."""

    attention: AttentionSpec | RecurrentSpec
    feed_forward: MlpSpec | MoeSpec | None

    @property
    def downs(self) -> tuple[LinearSpec, ...]:
        """Linears of the feed-forward block whose inputs are its inner widths."""
        return () if self.feed_forward is None else self.feed_forward.downs

    @property
    def adaptable(self) -> tuple[LinearSpec, ...]:
        """The linears that adapters may change: those of attention first; experts have none."""
        block, first = self.feed_forward, self.attention
        more = (block.gate_up, block.down) if isinstance(block, MlpSpec) else ()
        return (first.inputs if isinstance(first, RecurrentSpec) else first.qkv, first.output, *more)


@dataclass(frozen=True, slots=True)
class MtpSpec(_Parts):
    """A layer for multi-token prediction, which a checkpoint holds in addition to those of the model."""

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    inputs: LinearSpec
    """From the normalized embedding of the next token, followed by the normalized hidden states."""
    layer: LayerSpec
    norm: NormSpec
    """Of the output, before the model's output projection."""
    normed: bool = True
    """True if hidden states are those after the final norm, and after `norm` for further tokens."""


@dataclass(frozen=True, slots=True)
class DecoderSpec(_Parts):
    """A whole decoder."""

    architecture: str
    embedding: VectorSpec
    embedding_scale: float
    types: VectorSpec | None
    """[types, H], added to the embedding: a token id counts as one of type id // vocabulary."""
    positions: VectorSpec | None
    """[rows, H], added to the embedding by position."""
    first_position: int
    """Row of position 0."""
    embedding_norm: NormSpec | None
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    causal: bool
    """False for an encoder, whose tokens attend to later ones, and which has no output projection."""
    head: VectorSpec | None
    """Output projection; None if it is the embedding."""
    head_bias: VectorSpec | None
    head_scale: float
    """Factor on the logits, before `softcap`."""
    activation: Activation | PlainActivation
    parallel: bool
    """True if both blocks of a layer read the same input, and the stream gets the sum of their outputs."""
    centred: bool
    """True if norms subtract the mean, which is folded into what the stream is made of; an encoder has real layer
    norms."""
    layer_norm: bool
    eps: float
    norm_offset: float
    softcap: float | None
    max_positions: int
    ignored: tuple[str, ...]
    """Regular expressions of tensors that a checkpoint may hold and the model does not use."""
    images: ImageSpec | None = None
    """The encoder of images, if the model takes any."""

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The attention blocks."""
        return tuple(each.attention for each in self.layers if isinstance(each.attention, AttentionSpec))

    @property
    def recurrent(self) -> tuple[RecurrentSpec, ...]:
        """The blocks with a recurrence in place of attention."""
        return tuple(each.attention for each in self.layers if isinstance(each.attention, RecurrentSpec))

    @property
    def num_ids(self) -> int:
        """Token ids that the model takes, of all types."""
        return self.embedding.shape[0] * (1 if self.types is None else self.types.shape[0])

    def adaptable(self) -> dict[str, tuple[int, int]]:
        """Return the linears that adapters may change: name to (out, in).

        They change none after a norm with a bias, which becomes one of the linear.
        """
        linears = []
        for layer in self.layers:
            block = layer.feed_forward
            norms = (layer.attention.norm, None, None if block is None else block.norm, None)
            pairs = [*zip(layer.adaptable, norms, strict=False)]  # experts have no adaptable linears
            if isinstance(layer.attention, AttentionSpec) and layer.attention.gated:
                pairs = pairs[1:]  # the gate is computed separately
            linears += [linear for linear, norm in pairs if norm is None or norm.bias is None]
        return {name: (out, each.ins) for each in linears for name, out in each.stored}

    def sizes(self) -> dict[str, int]:
        """Return the largest sizes over all layers, under the names of `OperatingEnvelope`."""
        attention = self.attention
        experts = [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoeSpec)]
        return {
            "vocab_size": self.num_ids,
            "hidden": self.embedding.shape[1],
            "inner": max((down.ins for each in self.layers for down in each.downs), default=0),
            "head_dim": max(each.head_dim for each in attention),
            "group": max(-(-each.num_heads // each.num_kv_heads) for each in attention),
            "experts": max((len(each.experts) for each in experts), default=0),
            "top_k": max((each.top_k for each in experts), default=0),
        }


@dataclass(frozen=True, slots=True)
class MergerSpec(_Parts):
    """From states of patches, of which neighbours are merged, to states of tokens in the width of the decoder."""

    layers: tuple[LinearSpec, ...]
    """With an activation between them."""
    norm: NormSpec | None = None
    """Of merged states, before them; an RMS norm if it has no bias."""
    patch_norm: NormSpec | None = None
    """Of the states of patches."""
    eps: float = 1e-6
    """Of both norms."""
    frames: int = 1
    """Frames of a video whose states, laid side by side, are the inputs of the first linear; an image is each."""
    then: tuple[MergerSpec, ...] = ()
    """Further ones in turn, each over the results of the one before."""


@dataclass(frozen=True, slots=True)
class ImageSpec(_Parts):
    """An encoder of images, and what brings its states to the width of the decoder."""

    patch: VectorSpec
    """[H, channels, size, size], from the pixels of a patch; or [H, channels, frames, size, size], which are the same.
    """
    patch_bias: VectorSpec | None
    tower: DecoderSpec
    """Layers over the patches of a tile; it has no embedding."""
    most_patches: int
    """Most patches of a tile."""
    merge: int
    """Side of the square of patches whose states become one token, one after another."""
    merger: MergerSpec
    activation: PlainActivation = "gelu"
    """Between the linears of a merger."""
    deep: tuple[MergerSpec, ...] = ()
    """Mergers of the states after the layers in `deep_layers`; the decoder adds their tokens to its stream after its
    first layer, its second, and so on (Meng et al., "DeepStack", 2024)."""
    deep_layers: tuple[int, ...] = ()
    side: int = 0
    """Rows, and columns, of the grid of patches that the table of positions describes."""
    positions: VectorSpec | None = None
    """[side * side, H], a table that is interpolated bilinearly for grids of other sizes, if the tower has none."""
    corners: bool = False
    """True if the corners of grids of all sizes have the same positions; False if their edges have."""
    window: int = 0
    """Side, in patches, of the squares within which the layers in `windowed` attend."""
    windowed: tuple[int, ...] = ()
    first: VectorSpec | None = None
    """[H], a state before those of the patches, which becomes no token; its position is the first of the tower's."""
    newline: VectorSpec | None = None
    """[H of the decoder], a token after each row of the tokens of an image, whose tiles are joined."""
    largest: int = 0
    """Most tokens of such an image."""
    mean_norm: NormSpec | None = None
    """RMS norm of the mean of merged states, before the linears; None if they are laid side by side."""
    kind_ids: tuple[int, ...] = ()
    """Ids of the tokens that the experts of `MoeSpec.images` compute, if there are any: those of images, and around
    them."""
    patch_side: int = 0
    """Side of a patch in pixels, if `patch` is the weight [H, pixels] of a linear."""
    whole: bool = False
    """True if the tokens of an image attend to each other in both directions, so that one step computes all of them."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of an image."""
        return self.largest or self.most_patches // self.merge**2

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.patch_side or self.patch.shape[-1]


def tower_spec(config: ModelConfig, traits: Traits, patches: int) -> DecoderSpec:
    """Return the layers of an encoder of images, from its part of a config, for tiles of up to so many patches."""
    values = {"vocab_size": 1, **config.values, "max_position_embeddings": patches}
    spec = decoder_spec("images", replace(config, values=values), traits)
    return replace(spec, embedding=VectorSpec("", (1, spec.embedding.shape[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTraits:
    """Sizes of latent attention."""

    rank: int
    """Width of latent values."""
    key: int
    """Elements of a head that are not rotated."""
    rotated: int
    value: int
    query_rank: int | None
    """Outputs of the first linear of the queries, if they have two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Differences between an architecture and the plain decoder of Llama."""

    rope: Callable[[int], RopeSpec]
    """For each layer."""
    window: Callable[[int], int | None] = lambda layer: None
    """For each layer: the size of the attention window in tokens, including the token itself; None for all."""
    chunked: bool = False
    """True if these are sizes of chunks, of which a token attends to its own."""
    moe: Callable[[int, str, NormSpec], MoeSpec | None] = lambda layer, prefix, norm: None
    """For each layer, the prefix of its tensors and its norm: the experts; None for a dense layer."""
    recurrent: Callable[[int, str, NormSpec | None], RecurrentSpec | None] = lambda layer, prefix, norm: None
    """Likewise: the recurrence of a layer that has one in place of attention."""
    stored: tuple[tuple[int, int | None], ...] | None = None
    """For each layer, the index under which its attention is stored, and that of its feed-forward, or None without
    one; None if both have the layer's, and the config the number of layers."""
    gated_attention: bool = False
    """True if each head of the queries is followed by a gate of its output."""
    scale: float | None = None
    """Of attention scores; head_dim ** -0.5 if None."""
    latent: LatentTraits | None = None
    """Sizes, if all heads share one latent vector per token; the names of its linears are DeepSeek's."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    """Of the output projection."""
    head_norms: Literal["", "before rope", "after rope", "joint", "rotated"] = ""
    """Place of the norms of query and key heads, if there are any; `joint` is one norm of all heads before rope,
    `rotated` norms without weights after rope, in layers that have one."""
    norms: Literal["before", "after", "around", "stream"] = "before"
    """Place of the norms of attention and feed-forward: their input, their output before it is added, or both; or the
    residual stream after it is added, which an encoder may have instead of a final norm."""
    causal: bool = True
    """False for an encoder."""
    types: str = ""
    """Table of token types, `type_vocab_size` of them; empty without one."""
    positions: str = ""
    """Table of positions; empty without one."""
    first_position: int = 0
    """Row of the first position."""
    embedding_norm: str = ""
    """Norm of the sum of these tables; empty without one."""
    unnormed: tuple[int, ...] = ()
    """Layers whose attention reads its input without a norm."""
    layer_norm: bool = False
    """True if norms subtract the mean."""
    norm_bias: bool = False
    """True if they add a bias."""
    norm_offset: float = 0.0
    """Added to every norm weight."""
    eps: str | float = "rms_norm_eps"
    """Of norms, or the field of the config."""
    parallel: bool = False
    """True if attention and feed-forward read the same input, with one norm."""
    gated: bool = True
    """False for feed-forward blocks of up and down alone."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that differ from Llama's: Llama's, such as `mlp.up_proj` of a layer, or `model.layers`, to the stored
    one."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Linears of a layer that are stored as one: `qkv` or `gate_up` to the name."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on the output of attention and feed-forward before it is added."""
    head_scale: float = 1.0
    """Factor on the logits."""
    activation: str = "hidden_act"
    """Field of the config that names the activation, or the activation."""
    inner: str | int = "intermediate_size"
    """Inner width of dense layers, or the field of the config."""
    sinks: bool = False
    """True if attention has `Heads.sinks`."""
    attention_softcap: float | None = None
    softcap: float | None = None
    """Of the logits."""
    ignored: tuple[str, ...] = ()


def head_dim_of(config: ModelConfig) -> int:
    """Return the size of a head: the config's, or the hidden size split evenly."""
    found = config.optional_count("head_dim") or config.count("hidden_size") // config.count("num_attention_heads")
    if found > _MAX_HEAD_DIM:
        raise ModelError(f"{config.origin}: the head size {found} exceeds the limit {_MAX_HEAD_DIM}")
    return found


def gate_up_down(
    prefix: str,
    hidden: int,
    intermediate: int,
    bias: bool = False,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    **stacking: Any,
) -> tuple[LinearSpec, LinearSpec]:
    """Return the two linears of a gated feed-forward block, by default under Hugging Face's names.

    `stacking` are the fields `stack`, `transposed` and `alternating` of both.
    """
    *ups, down = (f"{prefix}.{name}" for name in names)
    return (
        LinearSpec(tuple(ups), (intermediate, intermediate), hidden, bias=bias, **stacking),
        LinearSpec((down,), (hidden,), intermediate, bias=bias, **stacking),
    )


def separate_experts(
    prefix: str, count: int, hidden: int, intermediate: int, **options: Any
) -> tuple[tuple[LinearSpec, LinearSpec], ...]:
    """Return the linears of experts that are stored one by one; `options` are those of `gate_up_down`."""
    return tuple(gate_up_down(f"{prefix}.{index}", hidden, intermediate, **options) for index in range(count))


def decoder_spec(
    architecture: str, config: ModelConfig, traits: Traits, most_tensors: int | None = None
) -> DecoderSpec:
    """Return a complete decoder spec with Hugging Face's tensor names; `ModelError` if it needs over `most_tensors`.

    A factor on every addition to the residual stream is a factor on its start: norms do not see it, except for their
    epsilon.
    """
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    num_layers = config.count("num_hidden_layers") if traits.stored is None else len(traits.stored)
    tied = config.flag("tie_word_embeddings") or architecture.endswith("Model") or not traits.causal
    names = traits.names
    layers, count = [], 0
    for index in range(num_layers):
        layers.append(_layer(config, traits, index))
        if most_tensors is not None:
            count += len(dict(layers[-1].tensors()))
            if count > most_tensors:
                raise ModelError(f"{config.origin}: {num_layers} layers need more tensors than the files have")
    known = *get_args(PlainActivation), *get_args(Activation)
    activation = next((each for each in known if each == traits.activation), None)
    activation = activation or config.activation(traits.activation)
    if activation not in get_args(Activation) and any(_is_gated(layer) for layer in layers):
        raise ModelError(f"{config.origin}: a gated feed-forward block cannot use the activation {activation}")
    eps = traits.eps
    if isinstance(eps, str):
        eps = config.number(eps, 1e-6 if eps == "rms_norm_eps" else 1e-5)
    positions = config.count("max_position_embeddings")
    unused = traits.first_position + traits.causal  # a text has a prompt and an output
    if positions <= unused:
        name = config.name_of("max_position_embeddings")
        raise ModelError(f"{config.origin}: {name} must exceed {unused}; it is {positions}")

    def table(name: str, rows: int) -> VectorSpec:
        return VectorSpec(f"{names.get(name, name)}.weight", (rows, hidden))

    return DecoderSpec(
        architecture=architecture,
        embedding=table("model.embed_tokens", vocab),
        embedding_scale=traits.embedding_scale / traits.residual_scale,
        types=table(traits.types, config.count("type_vocab_size", 2)) if traits.types else None,
        positions=table(traits.positions, positions) if traits.positions else None,
        first_position=traits.first_position,
        embedding_norm=_norm(traits.embedding_norm, hidden, traits) if traits.embedding_norm else None,
        layers=tuple(layers),
        final_norm=None if traits.norms == "stream" else _norm(names.get("model.norm", "model.norm"), hidden, traits),
        causal=traits.causal,
        head=None if tied else VectorSpec("lm_head.weight", (vocab, hidden)),
        head_bias=VectorSpec("lm_head.bias", (vocab,)) if traits.head_bias else None,
        head_scale=traits.head_scale,
        activation=activation,
        parallel=traits.parallel,
        centred=traits.layer_norm and traits.causal,
        layer_norm=traits.layer_norm,
        eps=eps / traits.residual_scale**2,
        norm_offset=traits.norm_offset,
        softcap=traits.softcap,
        # A text of an encoder may take all positions: the token that ends its request is never computed.
        max_positions=positions if traits.causal else positions - traits.first_position + 1,
        ignored=(r"\.rotary_emb\.inv_freq$", *((r"^lm_head\.weight$",) if tied else ()), *traits.ignored),
    )


def mtp_spec(
    config: ModelConfig, traits: Traits, layer: int, names: tuple[str, str, str, str], **options: bool
) -> MtpSpec:
    """Return a layer for multi-token prediction, which `traits` describe as `layer`, see `MtpSpec`.

    `names` are those of the norms of embedding and hidden states, of the linear that joins them, and of the last norm;
    `options` are `normed`, and `bias` of the linear.
    """
    hidden = config.count("hidden_size")
    embedding_norm, hidden_norm, norm = (_norm(name, hidden, traits) for name in (*names[:2], names[3]))
    inputs = LinearSpec((names[2],), (hidden,), 2 * hidden, bias=options.pop("bias", False))
    return MtpSpec(embedding_norm, hidden_norm, inputs, _layer(config, traits, layer), norm, **options)


def _is_gated(layer: LayerSpec) -> bool:
    block = layer.feed_forward
    return block is not None and block.gated


def _norm(name: str, width: int, traits: Traits) -> NormSpec:
    bias = VectorSpec(f"{name}.bias", (width,)) if traits.norm_bias else None
    return NormSpec(VectorSpec(f"{name}.weight", (width,)), bias)


def _layer(config: ModelConfig, traits: Traits, layer: int) -> LayerSpec:
    stored, stored_second = (layer, layer) if traits.stored is None else traits.stored[layer]
    prefix = f"{traits.names.get('model.layers', 'model.layers')}.{stored}"
    hidden = config.count("hidden_size")

    def named(name: str) -> str:
        return f"{prefix}.{traits.names.get(name, name)}"

    def norm(name: str) -> NormSpec:
        return _norm(named(name), hidden, traits)

    before, after = traits.norms in ("before", "around"), traits.norms in ("after", "around")
    stream = traits.norms == "stream"
    first = norm("input_layernorm") if before and layer not in traits.unnormed else None
    places = tuple(norm("post_attention_layernorm") if each else None for each in (after, stream))
    attention = traits.recurrent(layer, prefix, first) or _attention(config, traits, layer, named, first, places)
    if stored_second is None:
        return LayerSpec(attention, None)
    prefix, second = f"{prefix.removesuffix(str(stored))}{stored_second}", first
    if not traits.parallel:
        name = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        second = norm(name) if before else None
    moe = None if second is None else traits.moe(layer, prefix, second)
    if moe is not None:
        if moe.top_k > len(moe.experts):
            raise ModelError(f"{config.origin}: each token uses {moe.top_k} experts, but there are {len(moe.experts)}")
        size, rest = divmod(len(moe.experts), moe.groups)
        if moe.groups > 1 and (rest or size < 2 or moe.top_groups > moe.groups or moe.top_k > size * moe.top_groups):
            raise ModelError(
                f"{config.origin}: each token uses {moe.top_k} experts of {moe.top_groups} groups, but "
                f"{len(moe.experts)} experts in {moe.groups} groups do not have them"
            )
        return LayerSpec(attention, moe)
    inner = traits.inner if isinstance(traits.inner, int) else config.count(traits.inner)
    parts = ("mlp.gate_proj", "mlp.up_proj") if traits.gated else ("mlp.up_proj",)
    names = (traits.fused["gate_up"],) if "gate_up" in traits.fused else parts
    gate_up = LinearSpec(tuple(map(named, names)), (inner,) * len(parts), hidden, bias=traits.mlp_bias)
    down = LinearSpec((named("mlp.down_proj"),), (hidden,), inner, bias=traits.mlp_bias)
    places = tuple(norm("post_feedforward_layernorm") if each else None for each in (after, stream))
    return LayerSpec(attention, MlpSpec(second, gate_up, down, *places))


def _attention(
    config: ModelConfig,
    traits: Traits,
    layer: int,
    named: Callable[[str], str],
    norm: NormSpec | None,
    places: tuple[NormSpec | None, ...],
) -> AttentionSpec:
    if traits.latent is not None:
        return _latent_attention(config, traits, layer, named, norm, traits.latent)
    hidden, d = config.count("hidden_size"), head_dim_of(config)
    nh = config.count("num_attention_heads")
    nkv = config.count("num_key_value_heads", nh)
    if nh % nkv:
        raise ModelError(f"{config.origin}: {nh} query heads are not a multiple of {nkv} key and value heads")
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    names = (traits.fused["qkv"],) if "qkv" in traits.fused else parts
    joint, unweighted, rope = traits.head_norms == "joint", traits.head_norms == "rotated", traits.rope(layer)
    q_norm, k_norm = (
        NormSpec(VectorSpec("" if unweighted else f"{named(f'self_attn.{each}_norm')}.weight", (width,)))
        if traits.head_norms and (any(rope.inverse_frequencies) or not unweighted)
        else None
        for each, width in (("q", nh * d if joint else d), ("k", nkv * d if joint else d))
    )
    gated = traits.gated_attention
    qkv = LinearSpec(tuple(map(named, names)), (nh * d, nkv * d, nkv * d), hidden, bias=traits.qkv_bias)
    if gated:
        qkv = replace(qkv, outs=(nh * d, *qkv.outs), counts=(2, 1, 1), groups=nh)
    return AttentionSpec(
        norm=norm,
        qkv=qkv,
        gated=gated,
        output=LinearSpec((named("self_attn.o_proj"),), (hidden,), nh * d, bias=traits.output_bias),
        num_heads=nh,
        num_kv_heads=nkv,
        head_dim=d,
        scale=d**-0.5 if traits.scale is None else traits.scale,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        norms_rotated=traits.head_norms in ("after rope", "rotated"),
        joint_norms=joint,
        window=traits.window(layer),
        chunked=traits.chunked and traits.window(layer) is not None,
        causal=traits.causal,
        softcap=traits.attention_softcap,
        post_norm=places[0],
        stream_norm=places[1],
        sinks=VectorSpec(named("self_attn.sinks"), (nh,)) if traits.sinks else None,
    )


def _latent_attention(
    config: ModelConfig,
    traits: Traits,
    layer: int,
    named: Callable[[str], str],
    norm: NormSpec | None,
    sizes: LatentTraits,
) -> AttentionSpec:
    hidden, nh = config.count("hidden_size"), config.count("num_attention_heads")
    d, wide = sizes.rank + sizes.rotated, nh * (sizes.key + sizes.rotated)
    if sizes.query_rank is None and traits.qkv_bias:
        raise ModelError(f"{config.origin}: biases of latent attention are supported only with a q_lora_rank")

    def linear(name: str, out: int, ins: int) -> LinearSpec:
        return LinearSpec((named(f"self_attn.{name}"),), (out,), ins)

    def vector(name: str, width: int | None) -> VectorSpec | None:
        return None if width is None else VectorSpec(f"{named(f'self_attn.{name}')}.weight", (width,))

    rank = sizes.query_rank
    names = ("self_attn.q_proj" if rank is None else "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    return AttentionSpec(
        norm=norm,
        qkv=LinearSpec(tuple(map(named, names)), (wide if rank is None else rank, d), hidden, bias=traits.qkv_bias),
        output=LinearSpec((named("self_attn.o_proj"),), (hidden,), nh * sizes.value, bias=traits.output_bias),
        num_heads=nh,
        num_kv_heads=1,
        head_dim=d,
        scale=(sizes.key + sizes.rotated) ** -0.5 if traits.scale is None else traits.scale,
        rope=traits.rope(layer),
        q_norm=None,
        k_norm=None,
        norms_rotated=False,
        joint_norms=False,
        window=None,
        chunked=False,
        causal=True,
        softcap=None,
        post_norm=None,
        stream_norm=None,
        sinks=None,
        latent=LatentSpec(
            norm=VectorSpec(f"{named('self_attn.kv_a_layernorm')}.weight", (sizes.rank,)),
            up=linear("kv_b_proj", nh * (sizes.key + sizes.value), sizes.rank),
            key=sizes.key,
            value=sizes.value,
            rank=sizes.rank,
            q_norm=vector("q_a_layernorm", rank),
            q_up=None if rank is None else linear("q_b_proj", wide, rank),
        ),
    )


_GRAIN: Final = 32
"""Values of a row that share a scale of quantized activations: sharding at group boundaries changes no value."""


@dataclass(frozen=True, slots=True)
class LinearShare:
    """A rank's shard of a linear: rows of the weight for each of its parts, or columns; None for all."""

    rows: tuple[slice, ...] | None = None
    columns: slice | None = None
    """Set if the partial products of ranks are summed."""


def times(share: slice, size: int) -> slice:
    """Return the slice of elements for a slice of units with `size` elements each."""
    return slice(share.start * size, share.stop * size)


def head_shares(spec: AttentionSpec, parallel: Parallel) -> tuple[slice, slice]:
    """Return the query heads and the KV heads of a rank. Raises `ConfigError` if there are fewer than ranks."""
    query, kv, size = spec.num_heads, spec.num_kv_heads, parallel.size
    group = query // kv
    if size <= kv:
        share = parallel.share(kv)
        return times(share, group), share
    copies = size // kv
    if size % kv or group % copies:
        raise ConfigError(
            f"cannot divide {query} query heads and {kv} KV heads among {size} ranks",
            field="--tensor-parallel-size",
        )
    each = group // copies
    return slice(parallel.rank * each, (parallel.rank + 1) * each), slice(
        parallel.rank // copies, parallel.rank // copies + 1
    )


def attention_shares(spec: AttentionSpec | RecurrentSpec, parallel: Parallel) -> tuple[LinearShare, LinearShare]:
    """Return a rank's shards of q/k/v, or the inputs of a recurrence, and of the output projection."""
    if isinstance(spec, RecurrentSpec):
        shares = recurrent_shares(spec, parallel)
        return LinearShare(rows=shares), _leading_back(spec.output, recurrent_outputs(spec, parallel), parallel)
    heads, kv_heads = head_shares(spec, parallel)
    if spec.latent is not None:
        first, second = spec.qkv.outs
        rows = spec.latent.query_share(heads, spec.head_dim) if spec.latent.q_up is None else slice(0, first)
        outputs = times(heads, spec.latent.value)
        return LinearShare(rows=(rows, slice(0, second))), _leading_back(spec.output, outputs, parallel)
    queries, kv = (times(each, spec.head_dim) for each in (heads, kv_heads))
    return LinearShare(rows=(queries,) * (1 + spec.gated) + (kv, kv)), _leading_back(spec.output, queries, parallel)


def recurrent_shares(spec: RecurrentSpec, parallel: Parallel) -> tuple[slice, ...]:
    """Return a rank's rows of each part of `inputs`. Raises `ConfigError` if ranks would have different sizes."""
    if spec.rule == "gate":
        share = width_share(spec.inputs.outs[0], parallel)
        uneven = (share.stop - share.start) * parallel.size != spec.inputs.outs[0]
        shares: tuple[slice, ...] = (share,) * 3
    else:
        uneven = spec.key_heads % parallel.size > 0
        if not uneven:
            share = parallel.share(spec.key_heads)
            heads = times(share, spec.value_heads // spec.key_heads)
            keys, values = times(share, spec.key_dim), times(heads, spec.value_dim)
            shares = (keys, keys, values, values, heads, heads)
            if spec.rule == "scan":
                shares = (values, values, keys, keys, heads)
    if uneven:
        raise ConfigError(
            f"cannot divide a recurrent layer evenly among {parallel.size} ranks", field="--tensor-parallel-size"
        )
    return shares


def recurrent_outputs(spec: RecurrentSpec, parallel: Parallel) -> slice:
    """Return a rank's outputs of a recurrence."""
    return recurrent_shares(spec, parallel)[2 if spec.rule == "delta" else 0]


def conv_channels(spec: RecurrentSpec, parallel: Parallel) -> Indices:
    """Return a rank's channels of the convolution."""
    parts = {"gate": slice(0, 1), "delta": slice(0, 3), "scan": slice(1, 4)}[spec.rule]
    shares, outs = recurrent_shares(spec, parallel)[parts], spec.inputs.outs[parts]
    begins = accumulate(outs, initial=0)
    return np.concatenate(
        [begin + np.arange(share.start, share.stop) for begin, share in zip(begins, shares, strict=False)]
    )


def state_sizes_of(spec: RecurrentSpec, parallel: Parallel) -> tuple[int, int]:
    """Return `state_sizes` of a rank."""
    channels, taps = len(conv_channels(spec, parallel)), spec.conv.shape[-1]
    heads, matrix = spec.value_heads // parallel.size, spec.key_dim * spec.value_dim
    return state_sizes(spec.rule, channels, taps, heads, matrix)


def feed_forward_shares(gate_up: LinearSpec, down: LinearSpec, parallel: Parallel) -> tuple[LinearShare, LinearShare]:
    """Return a rank's shards of the two linears of a feed-forward block."""
    inner = width_share(down.ins, parallel)
    return LinearShare(rows=(inner,) * len(gate_up.outs)), _leading_back(down, inner, parallel)


def expert_shares(gate_up: LinearSpec, down: LinearSpec, parallel: Parallel) -> tuple[LinearShare, LinearShare]:
    """Return a rank's shards of the two linears of an expert that it holds."""
    if parallel.expert_parallel:
        return LinearShare(), LinearShare()
    return feed_forward_shares(gate_up, down, parallel)


def _leading_back(linear: LinearSpec, held: slice, parallel: Parallel) -> LinearShare:
    """Return a rank's shard of a linear into the residual stream; the rank has `held` of its inputs."""
    if parallel.gathers:
        return LinearShare(rows=tuple(width_share(out, parallel) for out in linear.outs))
    return LinearShare(columns=held)


def adaptable_shares(layer: LayerSpec, parallel: Parallel) -> tuple[LinearShare, ...]:
    """Return a rank's shard of each of `layer.adaptable`."""
    block = layer.feed_forward
    more = feed_forward_shares(block.gate_up, block.down, parallel) if isinstance(block, MlpSpec) else ()
    return (*attention_shares(layer.attention, parallel), *more)


def width_share(width: int, parallel: Parallel) -> slice:
    """Return a rank's slice of the width of a feed-forward block. Raises `ConfigError` if it is too narrow."""
    if width < parallel.size:
        raise ConfigError(
            f"cannot divide a feed-forward block of width {width} among {parallel.size} ranks",
            field="--tensor-parallel-size",
        )
    grain = _GRAIN
    while width % grain or width // grain < parallel.size:
        grain //= 2
    return times(parallel.share(width // grain), grain)


def vocabulary_share(size: int, parallel: Parallel) -> slice | None:
    """Return the tokens whose logits a rank computes; None for all."""
    return parallel.share(size) if parallel.size > 1 and size % parallel.size == 0 else None


def stage_layers(spec: DecoderSpec, stage: Stage) -> slice:
    """Return the layers of a stage. Raises `ConfigError` if there are fewer layers than stages.

    Stages are balanced by the bytes of their weights; the last one also has the output projection.
    """
    count = len(spec.layers)
    if stage.count > count:
        raise ConfigError(
            f"cannot divide {count} layers into {stage.count} stages",
            field="--pipeline-parallel-size",
            hint=f"use at most {count}",
        )
    sizes = [sum(map(math.prod, dict(layer.tensors()).values())) for layer in spec.layers]
    reached = list(accumulate(sizes, initial=0))
    each = (reached[-1] + math.prod(spec.embedding.shape)) / stage.count
    ends = [0]
    for index in range(1, stage.count):
        nearest = min(range(count + 1), key=lambda end: abs(reached[end] - index * each))
        ends.append(min(max(nearest, ends[-1] + 1), count - stage.count + index))
    ends.append(count)
    return slice(ends[stage.index], ends[stage.index + 1])


def require_division(spec: DecoderSpec, ranks: int, stages: int, *, expert_parallel: bool = False) -> None:
    """Raise `ConfigError`, with sizes that work, if a model cannot be divided among the ranks or stages."""
    stage_layers(spec, Stage(0, stages))
    if expert_parallel and not any(isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers):
        raise ConfigError(
            f"{spec.architecture} has no experts to divide among ranks",
            field="--enable-expert-parallel",
            hint="omit it",
        )
    parallel = Parallel(0, ranks, expert_parallel=expert_parallel)
    refused = _refusal(spec, parallel)
    if refused is not None:
        others = [replace(parallel, size=size) for size in range(2, spec.attention[0].num_heads + 1)]
        sizes = [each.size for each in others if _refusal(spec, each) is None]
        refused.hint = f"use {_listed(sizes)}" if sizes else "omit it"
        raise refused


def _refusal(spec: DecoderSpec, parallel: Parallel) -> ConfigError | None:
    try:
        for layer in spec.layers:
            block = layer.feed_forward
            downs = layer.downs
            attention_shares(layer.attention, parallel)
            if spec.recurrent and spec.attention[0].num_kv_heads % parallel.size:
                raise ConfigError(
                    f"cannot divide {spec.attention[0].num_kv_heads} KV heads evenly among {parallel.size} ranks, "
                    "which a model with recurrent layers needs",
                    field="--tensor-parallel-size",
                )
            if parallel.expert_parallel and isinstance(block, MoeSpec):
                for each in block.kinds:
                    each.held(parallel)
                downs = block.shared_downs
            for down in downs:
                width_share(down.ins, parallel)
    except ConfigError as error:
        return error
    return None


def _listed(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
