"""The decoder: a single forward pass over `Ops` for all architectures, which differ in weights and geometry.

An encoder is the same with attention in both directions. Its KV cache is only scratch memory of one layer: a text is
computed in one step.

`forward` only calls methods of `Ops`: no operator on an array, no branch on the value of one. So it also runs over
symbolic arrays, from which a pack builds a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.models.families.spec import (
    DecoderSpec,
    Indices,
    LinearShare,
    LinearSpec,
    adaptable_shares,
    head_shares,
    parts_of,
    rotations,
    stage_layers,
    state_sizes_of,
)
from fd_core.models.layer_groups import divide_layers, places_of
from fd_core.ops.contract import Array, Experts, Heads, KVCache, KVShape, Latent, Lora, Norm, Ops, Recurrent, StepInput
from fd_core.ops.parallel import Parallel, Stage
from fd_core.ops.weights import Adapter, LowRank, WeightUse

AdapterWeights = tuple[tuple[Any | None, ...], ...]
"""For each layer, the result of `Ops.prepare_lora` for each of its adaptable linears; None for an unchanged linear."""
_GATED = 2
"""Parts of gate and up."""
_RANK_ALIGN = 16
"""Alignment to which a pack may round up LoRA ranks."""


class LayerLoras(NamedTuple):
    """Low-rank terms of each of `LayerSpec.adaptable`, see `Ops.place_loras`; None if no adapter changes it."""

    qkv: Any | None = None
    output: Any | None = None
    gate_up: Any | None = None
    down: Any | None = None


def prepare_adapter(spec: DecoderSpec, adapter: Adapter, ops: Ops) -> AdapterWeights:
    """Prepare an adapter for `spec`: of each linear, the part for this rank's shard.

    Where products are summed over ranks, each rank adds the term of its inputs to its partial product.
    """

    def prepared(linear: LinearSpec, share: LinearShare, *, adds: bool, gated: bool) -> Any | None:
        rows = share.rows or (slice(None),) * len(linear.outs)
        stored = [adapter.deltas.get(name) for name in linear.names]
        if adds and spec.centred:
            stored = [each and LowRank(each.down, each.up - each.up.mean(axis=0)) for each in stored]
        if all(part is None for part in stored):
            return None
        parts = parts_of(linear, stored, lambda whole, of: None if whole is None else LowRank(whole.down, whole.up[of]))
        columns = slice(None) if share.columns is None else share.columns
        pairs = zip(parts, rows, strict=True)
        mine = [None if each is None else LowRank(each.down[:, columns], each.up[of]) for each, of in pairs]
        return ops.prepare_lora(mine, _outs(linear, share), gated=gated and len(linear.outs) == _GATED)

    with ops.replaceable_weights():
        return tuple(
            tuple(
                prepared(linear, share, adds=index % 2 == 1, gated=index == LayerLoras._fields.index("gate_up"))
                for index, (linear, share) in enumerate(
                    zip(layer.adaptable, adaptable_shares(layer, ops.parallel), strict=True)
                )
            )
            for layer in spec.layers
        )


def _ins(linear: LinearSpec, share: LinearShare) -> int:
    """Return the number of inputs in a rank's shard of a linear."""
    return linear.ins if share.columns is None else len(range(linear.ins)[share.columns])


def _outs(linear: LinearSpec, share: LinearShare) -> list[int]:
    """Return the number of output columns of each part in a rank's shard of a linear."""
    if share.rows is None:
        return list(linear.outs)
    return [len(range(out)[rows]) for out, rows in zip(linear.outs, share.rows, strict=True)]


def layer_loras(
    spec: DecoderSpec, places: Sequence[AdapterWeights | None], ops: Ops, before: Sequence[LayerLoras] | None
) -> tuple[LayerLoras, ...]:
    """Return the terms of the adapters in slots 1 and up for each layer; `before` are the current terms."""
    loras = []
    for index, layer in enumerate(spec.layers):
        placed: list[Any | None] = []
        for linear, share in zip(layer.adaptable, adaptable_shares(layer, ops.parallel), strict=True):
            deltas = [None if weights is None else weights[index][len(placed)] for weights in places]
            last = None if before is None else before[index][len(placed)]
            placed.append(ops.place_loras(deltas, _ins(linear, share), _outs(linear, share), last))
        loras.append(LayerLoras(*placed))
    return tuple(loras)


def adapters_bytes(spec: DecoderSpec, count: int, rank: int, item_bytes: int, parallel: Parallel) -> int:
    """Return the bytes that `count` adapters of rank `rank` occupy on this shard of the model."""
    elements = 0
    for layer in spec.layers:
        for linear, share in zip(layer.adaptable, adaptable_shares(layer, parallel), strict=True):
            elements += len(linear.outs) * (_ins(linear, share) + sum(_outs(linear, share)))
    return count * -(-rank // _RANK_ALIGN) * _RANK_ALIGN * elements * item_bytes


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one attention block."""

    norm: Norm | None
    qkv: Array
    heads: Heads
    output: Array
    post_norm: Norm | None
    stream_norm: Norm | None
    """Of the residual stream after the output is added."""
    latent: Latent | None = None
    gate: Array | None = None
    """Linear whose sigmoid multiplies the outputs of the heads."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Weights of one block with a recurrence in place of attention."""

    norm: Norm | None
    inputs: Array
    recurrent: Recurrent
    output: Array
    post_norm: Norm | None = None
    stream_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of one dense feed-forward block."""

    norm: Norm | None
    gate_up: Array
    down: Array
    post_norm: Norm | None
    stream_norm: Norm | None
    gated: bool


@dataclass(frozen=True, slots=True)
class Moe:
    """Weights of one mixture-of-experts block."""

    norm: Norm
    experts: Experts
    images: Experts | None = None
    """Those of the tokens of images, see `StepInput.kinds`; None if they are the same."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, or a recurrence in its place, then feed-forward."""

    attention: Attention | Recurrence
    feed_forward: Mlp | Moe | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a decoder, or those of a stage."""

    embedding: Array | None
    """None on stages after the first."""
    embedding_scale: float
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    """None if the last block ends with a norm."""
    head: Array | None
    """None on stages before the last."""
    activation: Any
    """An `Activation`, or a `PlainActivation` if no block has a gate."""
    softcap: float | None
    parallel: bool
    """True if both blocks of a layer read the same input."""
    head_split: bool = False
    """True if `head` yields a rank's share of the logits."""
    positions: Array | None = None
    """Table that is added to the embedding by position."""
    embedding_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights of an EAGLE-3 head: one layer that reads hidden states of a model (Li et al., 2025).

    It is computed with the model, in the same steps and over the same KV blocks, as one more layer of its cache. At
    position i it reads the hidden states of token i and the embedding of token i + 1, and yields the state from which
    token i + 2 is drafted.
    """

    ops: Ops
    taps: Mapping[int, Array]
    """Linears of the target's residual stream before a layer, by its index; their sum is what the head reads."""
    table: Array
    table_scale: float
    embedding_norm: Norm
    hidden_norm: Norm
    qkv: tuple[Array, Array]
    """Parts of the linear for the embedding and for the hidden states."""
    heads: Heads
    output: Array
    mlp: Mlp
    activation: Any
    norm: Norm
    head: Array
    ids: Array | None
    """int32[drafts], token id of each row of `head`; None if they are the same."""
    adds_normed: bool
    """True if the residual stream begins with the normalized hidden states."""

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute the states [R, H] of the requested rows, and write the head's KV.

        `step.token_ids` are the tokens after those of the step; `step.states` [T, H] the sum of `taps`, or this
        function's results for the tokens before.
        """
        ops, hidden = self.ops, step.states
        normed = ops.rms_norm(hidden, self.hidden_norm)
        embedded = ops.rms_norm(ops.embedding(self.table, step.token_ids, self.table_scale), self.embedding_norm)
        projected = ops.add(ops.linear(embedded, self.qkv[0]), ops.linear(normed, self.qkv[1]))
        q, k, v = ops.split_heads(projected, self.heads)
        layer = cache.layer(cache.shape.num_layers - 1)
        ops.write_kv(layer, ops.rope(k, self.heads.rope, step.positions), v, step.kv_slots)
        a = ops.attention(ops.rope(q, self.heads.rope, step.positions), self.heads, layer, step)
        x = ops.project_residual(a, self.output, normed if self.adds_normed else hidden)
        inner = ops.mlp_inputs(x, self.mlp.norm, self.mlp.gate_up, self.activation)
        return ops.gather_rows(ops.settle(ops.project_residual(inner, self.mlp.down, x)), step.logits_rows)

    def logits(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits of the draft vocabulary [R, V]."""
        return self.ops.logits_of(self.ops.rms_norm(states, self.norm), self.head, None)


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A checkpoint's layer for multi-token prediction (DeepSeek-V3, 2024), which drafts as a `DraftHead` does.

    It has the form of the model's own layers, and uses the model's embedding and output projection.
    """

    model: DecoderModel
    """The model without this layer."""
    taps: Mapping[int, None]
    """See `DraftHead`; None for the residual stream itself. Empty if it reads states after the final norm."""
    embedding_norm: Norm
    hidden_norm: Norm
    inputs: tuple[Array, Array]
    """Parts of the linear for the embedding and for the hidden states."""
    layer: Layer
    norm: Norm
    normed: bool
    """True if its states, like those that it reads, are after a norm."""
    ids: None = None

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute the states [R, H] of the requested rows, and write the layer's KV; see `DraftHead.forward`."""
        model, ops = self.model, self.model.ops
        embedded = ops.linear(ops.rms_norm(model.embed(step), self.embedding_norm), self.inputs[0])
        x = ops.add(embedded, ops.linear(ops.rms_norm(step.states, self.hidden_norm), self.inputs[1]))
        x = model.block(x, self.layer, cache.layer(cache.shape.num_layers - 1), step, LayerLoras())
        states = ops.gather_rows(ops.settle(x), step.logits_rows)
        return ops.rms_norm(states, self.norm) if self.normed else states

    def logits(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits [R, V]."""
        return self.model.head(states if self.normed else self.model.ops.rms_norm(states, self.norm))


@dataclass(eq=False)
class DecoderModel:
    """A decoder on one pack; satisfies `fd_core.backends.contract.Model`."""

    ops: Ops
    spec: DecoderSpec
    decoder: Decoder
    architecture: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weights: tuple[WeightUse, ...] = ()
    state_size: int = 0
    generates: bool = True
    state_shift: npt.NDArray[np.float32] | None = None
    """float32[H], bias of the final norm, which `head` adds and `states` lack; None without one."""
    adapters: Mapping[str, AdapterWeights] = field(default_factory=dict)
    """By digest."""
    loras: tuple[LayerLoras, ...] | None = None
    """Low-rank terms of each layer, for steps with adapters; None without."""
    images: Any = None
    """The encoder of images, an `ImageEncoder`; None if the model takes none."""
    draft_head: DraftHead | MtpLayer | None = None
    """Head that drafts from hidden states; its KV is one more layer."""

    @property
    def causal(self) -> bool:
        """False for an encoder."""
        return self.spec.causal

    @property
    def ids_of_type(self) -> int:
        """Number of token ids of one type: an id of type 1 is so much larger; 0 if all are of one type."""
        rows = self.spec.embedding.shape[0]
        return rows if self.spec.num_ids > rows else 0

    def with_adapters(self, places: Sequence[Adapter | None]) -> DecoderModel:
        """Return the same model with adapters in slots 1 and up; weights are shared, including those of adapters."""
        wanted = {each.digest: each for each in places if each is not None}
        weights = {
            digest: self.adapters.get(digest) or prepare_adapter(self.spec, each, self.ops)
            for digest, each in wanted.items()
        }
        held = [None if each is None else weights[each.digest] for each in places]
        return replace(self, adapters=weights, loras=layer_loras(self.spec, held, self.ops, before=self.loras))

    def turn(self, places: Indices, row: int) -> None:
        """Write the rotations of tokens with `places` int[coordinates, n] into the rope tables, from `row` on."""
        rows = self.ops.from_host(np.arange(row, row + places.shape[1], dtype=np.int32))
        attention = [layer.attention for layer in self.decoder.layers if isinstance(layer.attention, Attention)]
        turned = [self.ops.prepare_vector(each) for each in rotations(self.spec.attention[0].rope, places)]
        for rope in {id(each.heads.rope): each.heads.rope for each in attention}.values():
            for table, values in zip((rope.cos, rope.sin), turned, strict=True):
                self.ops.write_rows(table, rows, values)

    def kv_shape(self, block_size: int, groups: LayerGroups = ONE_GROUP) -> KVShape:
        """Return the size of the KV cache that `forward` needs, for blocks of `block_size` tokens."""
        spec, parallel = self.spec.attention[0], self.ops.parallel
        _, kv = head_shares(spec, parallel)
        latent = 0 if spec.latent is None else spec.latent.rank
        state, journal = zip((0, 0), *(state_sizes_of(each, parallel) for each in self.spec.recurrent), strict=True)
        stages = range(self.ops.stage.index + 1)
        *before, own = (1 + max(index for _, index in self._places(groups, stage)) for stage in stages)
        return KVShape(
            num_layers=own + (self.draft_head is not None),
            num_kv_heads=kv.stop - kv.start,
            head_dim=spec.head_dim,
            block_size=block_size,
            first_kv_head=kv.start,
            first_layer=sum(before),
            groups=groups,
            latent=latent,
            state=max(state),
            journal=max(journal),
        )

    def layer_groups(self, longest: int) -> LayerGroups:
        """Return the groups into which contexts of up to `longest` tokens divide the layers of all stages."""
        if not self.spec.causal or (self.spec.images is not None and self.spec.images.whole):
            return ONE_GROUP  # a whole image needs its blocks at once
        return divide_layers([window for stage in self._windows for window in stage], longest, chunked=self._chunked)

    @cached_property
    def _chunked(self) -> bool:
        """True if every window is a chunk, all of one size."""
        windowed = [layer.attention for layer in self.spec.layers if layer.attention.window is not None]
        return len({each.window for each in windowed}) == 1 and all(each.chunked for each in windowed)

    @cached_property
    def _windows(self) -> list[tuple[int | None, ...]]:
        """For each stage, the windows of its layers; None if blocks outside of it are kept."""
        freed = [
            None if at.chunked and not self._chunked else at.window
            for at in (layer.attention for layer in self.spec.layers)
        ]
        count = self.ops.stage.count
        return [tuple(freed[stage_layers(self.spec, Stage(index, count))]) for index in range(count)]

    def _places(self, groups: LayerGroups, stage: int) -> Sequence[tuple[int, int]]:
        """Return the group of each layer of a stage, and its index there; all layers of an encoder share one."""
        windows = self._windows[stage]
        return places_of(windows, groups) if self.spec.causal else [(0, 0)] * len(windows)

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute float32 logits [R, V] of the requested rows and write the step's keys and values.

        A stage before the last returns the `StepInput.states` of the next one.
        """
        x, decoder = self._layers(step, cache), self.decoder
        if not self.ops.stage.last:
            return self.ops.settle(x)
        if decoder.final_norm is None or not self.spec.causal:
            return self.head(self.ops.gather_rows(self.ops.normalize(x, decoder.final_norm), step.logits_rows))
        return self.ops.logits(
            x, decoder.final_norm, decoder.head, step.logits_rows, decoder.softcap, split=decoder.head_split
        )

    def states(self, step: StepInput, cache: KVCache) -> Array:
        """Compute the normalized hidden states [T, H] of all tokens and write the step's keys and values."""
        return self.ops.normalize(self._layers(step, cache), self.decoder.final_norm)

    def tapped(self, step: StepInput, cache: KVCache) -> tuple[Array, ...]:
        """Return the result of `states`, followed by the parts of the hidden states that the draft head reads."""
        taps: list[Array] = []
        states = self.ops.normalize(self._layers(step, cache, taps), self.decoder.final_norm)
        return states, *taps

    def head(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits [R, V]."""
        logits = self.ops.logits_of(states, self.decoder.head, self.decoder.softcap)
        return self.ops.all_gather(logits) if self.decoder.head_split else logits

    def embed(self, step: StepInput) -> Array:
        """Return the residual stream [T, H] before the first layer."""
        ops, decoder = self.ops, self.decoder
        more = {"centred": True} if self.spec.centred else {}
        x = ops.embedding(decoder.embedding, step.token_ids, decoder.embedding_scale, **more)
        if decoder.positions is not None:
            x = ops.add_positions(x, decoder.positions, step.positions)
        return _normed(x, decoder.embedding_norm, ops)

    def _layers(self, step: StepInput, cache: KVCache, taps: list[Array] | None = None) -> Array:
        """Return the residual stream after all layers; append to `taps` what the draft head reads."""
        ops, decoder = self.ops, self.decoder
        tapped = {} if taps is None or self.draft_head is None else self.draft_head.taps
        x = self.embed(step) if step.states is None else step.states
        steps = [step.of_group(group) for group in range(cache.shape.groups.count)]
        places = self._places(cache.shape.groups, self.ops.stage.index)
        for index, (layer, (group, place)) in enumerate(zip(decoder.layers, places, strict=True)):
            if taps is not None and index in tapped:
                taps.append(_tap(x, tapped[index], ops))
            loras = LayerLoras() if self.loras is None else self.loras[index]
            x = self.block(x, layer, cache.layer(place), steps[group], loras)
            if index < len(step.added):
                x = ops.add(ops.settle(x), step.added[index])
        if taps is not None and len(decoder.layers) in tapped:
            taps.append(_tap(x, tapped[len(decoder.layers)], ops))
        return x

    def block(self, x: Array, layer: Layer, kv: Any, step: StepInput, loras: LayerLoras) -> Array:
        """Return the residual stream after a layer, and write its keys and values, or states."""
        ops, decoder, attention, block = self.ops, self.decoder, layer.attention, layer.feed_forward
        a = self._mixed(x, attention, kv, step, _of_step(loras.qkv, step))
        # An operation that adds to the stream may write into it, so parallel blocks read it before.
        early = self._inner(x, block, loras, step) if decoder.parallel and isinstance(block, Mlp) else None
        x = ops.project_residual(a, attention.output, x, attention.post_norm, _of_step(loras.output, step))
        x = _normed(x, attention.stream_norm, ops)
        if isinstance(block, Moe):
            x = self._routed(x, block, step)
        elif block is not None:
            inner = self._inner(x, block, loras, step) if early is None else early
            x = ops.project_residual(inner, block.down, x, block.post_norm, _of_step(loras.down, step))
            x = _normed(x, block.stream_norm, ops)
        return x

    def _mixed(self, x: Array, block: Attention | Recurrence, kv: Any, step: StepInput, lora: Lora | None) -> Array:
        """Return the outputs of attention or of a recurrence, and write keys and values, or states."""
        ops, (given, norm) = self.ops, self._before_fusion(x, block.norm)
        if isinstance(block, Recurrence):
            return ops.recurrence(given, norm, block.inputs, block.recurrent, kv, step, lora)
        if block.latent is not None:
            q = ops.latent_inputs(given, norm, block.qkv, block.latent, block.heads, kv, step, lora)
            return ops.latent_attention(q, block.latent, block.heads, kv, step)
        a = ops.attention(
            ops.attention_inputs(given, norm, block.qkv, block.heads, kv, step, lora), block.heads, kv, step
        )
        return a if block.gate is None else ops.gated_attention(a, given, norm, block.gate)

    def _routed(self, x: Array, block: Moe, step: StepInput) -> Array:
        """Return the residual stream after a block of experts."""
        ops, activation = self.ops, self.decoder.activation
        if block.images is None or not step.kinds:
            return ops.moe_residual(x, block.norm, block.experts, activation)
        x = ops.settle(x)
        for kind, rows in step.kinds:
            experts = block.images if kind else block.experts
            part = ops.moe_residual(ops.gather_rows(x, rows), block.norm, experts, activation)
            x = ops.write_rows(x, rows, ops.settle(part))
        return x

    def _inner(self, x: Array, block: Mlp, loras: LayerLoras, step: StepInput) -> Array:
        """Return the activations inside a feed-forward block."""
        activation, lora, ops = self.decoder.activation, _of_step(loras.gate_up, step), self.ops
        x, norm = self._before_fusion(x, block.norm)
        if not block.gated:
            return ops.plain_mlp_inputs(x, norm, block.gate_up, activation, lora)
        return ops.mlp_inputs(x, norm, block.gate_up, activation, lora)

    def _before_fusion(self, x: Array, norm: Norm | None) -> tuple[Array, Norm | None]:
        """Return activations, or the stream with a norm that fusions compute: a layer norm is computed before them."""
        return (x, norm) if norm is None or norm.bias is None else (self.ops.layer_norm(x, norm), None)


def _normed(x: Array, norm: Norm | None, ops: Ops) -> Array:
    """Normalize the residual stream, if there is a norm."""
    return x if norm is None else ops.normalize(x, norm)


def _tap(x: Array, linear: Array | None, ops: Ops) -> Array:
    """Return what a draft head reads of the residual stream."""
    return ops.settle(x) if linear is None else ops.stream_linear(x, linear)


def _of_step(deltas: Any | None, step: StepInput) -> Lora | None:
    return None if deltas is None else Lora(deltas, step)
