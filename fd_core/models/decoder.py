"""The one decoder: every architecture is this sentence over `Ops`, with its own weights and geometry.

`forward` calls nothing but methods of `Ops`: no operator on an array, no branch on a value of one. So it also runs
over symbolic arrays, when a pack builds a graph from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fd_core.models.adapter_weights import AdapterWeights, LayerLoras, layer_loras, prepare_adapter
from fd_core.models.sharding import head_shares, stage_layers
from fd_core.models.spec import DecoderSpec
from fd_core.ops.contract import Activation, Array, Experts, Heads, KVCache, KVShape, Lora, Norm, Ops, StepInput
from fd_core.ops.weights import Adapter, WeightUse


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one attention block."""

    norm: Norm
    qkv: Array
    heads: Heads
    output: Array
    post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of one dense feed-forward block."""

    norm: Norm
    gate_up: Array
    down: Array
    post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Moe:
    """Weights of one mixture-of-experts block."""

    norm: Norm
    experts: Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then feed-forward."""

    attention: Attention
    feed_forward: Mlp | Moe


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a decoder, or those of a stage."""

    embedding: Array | None
    """None on stages behind the first."""
    embedding_scale: float
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Array | None
    """None on stages before the last."""
    activation: Activation
    softcap: float | None
    """Softcap of the logits; None for none."""
    head_split: bool = False
    """Whether `head` yields a rank's share of the logits."""


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
    adapters: Mapping[str, AdapterWeights] = field(default_factory=dict)
    """By digest."""
    loras: tuple[LayerLoras, ...] | None = None
    """What adapters add to each layer, for steps in which tokens have some; None computes none."""

    def with_adapters(self, places: Sequence[Adapter | None]) -> DecoderModel:
        """Return the same model with adapters in the places 1 and up; it shares the weights, and those of adapters."""
        wanted = {each.digest: each for each in places if each is not None}
        weights = {
            digest: self.adapters.get(digest) or prepare_adapter(self.spec, each, self.ops)
            for digest, each in wanted.items()
        }
        held = [None if each is None else weights[each.digest] for each in places]
        return replace(self, adapters=weights, loras=layer_loras(self.spec, held, self.ops, self.loras))

    def kv_shape(self, block_size: int) -> KVShape:
        """Return the size of the KV cache that `forward` needs, for blocks of `block_size` tokens."""
        heads = self.decoder.layers[0].attention.heads
        _, kv = head_shares(self.spec.layers[0].attention, self.ops.parallel)
        layers = stage_layers(self.spec, self.ops.stage)
        return KVShape(
            layers.stop - layers.start,
            heads.num_kv_heads,
            heads.head_dim,
            block_size,
            first_kv_head=kv.start,
            first_layer=layers.start,
        )

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute float32 logits [R, V] of the rows asked for and write the step's keys and values.

        A stage before the last returns what the next one takes as `StepInput.states`.
        """
        x, decoder = self._layers(step, cache), self.decoder
        if not self.ops.stage.last:
            return self.ops.settle(x)
        return self.ops.logits(
            x, decoder.final_norm, decoder.head, step.logits_rows, decoder.softcap, split=decoder.head_split
        )

    def states(self, step: StepInput, cache: KVCache) -> Array:
        """Compute the normalized hidden states [T, H] of all tokens and write the step's keys and values."""
        return self.ops.rms_norm(self._layers(step, cache), self.decoder.final_norm)

    def head(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits [R, V]."""
        logits = self.ops.logits_of(states, self.decoder.head, self.decoder.softcap)
        return self.ops.all_gather(logits) if self.decoder.head_split else logits

    def _layers(self, step: StepInput, cache: KVCache) -> Array:
        ops, decoder = self.ops, self.decoder
        x = step.states
        if ops.stage.first:
            x = ops.embedding(decoder.embedding, step.token_ids, decoder.embedding_scale)
        for index, layer in enumerate(decoder.layers):
            attention, kv = layer.attention, cache.layer(index)
            loras = LayerLoras() if self.loras is None else self.loras[index]
            heads, lora = attention.heads, _of_step(loras.qkv, step)
            q = ops.attention_inputs(x, attention.norm, attention.qkv, heads, kv, step, lora)
            a = ops.attention(q, heads, kv, step)
            x = ops.project_residual(a, attention.output, x, attention.post_norm, _of_step(loras.output, step))
            x = self._feed_forward(x, layer.feed_forward, loras, step)
        return x

    def _feed_forward(self, x: Array, block: Mlp | Moe, loras: LayerLoras, step: StepInput) -> Array:
        ops, activation = self.ops, self.decoder.activation
        if isinstance(block, Moe):
            return ops.moe_residual(x, block.norm, block.experts, activation)
        inner = ops.mlp_inputs(x, block.norm, block.gate_up, activation, _of_step(loras.gate_up, step))
        return ops.project_residual(inner, block.down, x, block.post_norm, _of_step(loras.down, step))


def _of_step(deltas: Any | None, step: StepInput) -> Lora | None:
    return None if deltas is None else Lora(deltas, step)
