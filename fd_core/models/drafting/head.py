"""EAGLE-3 draft heads: one decoder layer that reads hidden states of a target model (Li et al., 2025).

The layer is computed with the target, in the same steps and over the same KV blocks, as one more layer of its cache. At
position i it reads the hidden states of token i and the embedding of token i + 1, and yields the state from which
token i + 2 is drafted. Names of tensors are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from fd_core.errors import ConfigError, ModelError
from fd_core.models.build import Reader, check_tensors
from fd_core.models.decoder import DecoderModel, Mlp
from fd_core.models.families.spec import DecoderSpec, LinearShare, MlpSpec, NormSpec, VectorSpec
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import config_of, describe
from fd_core.ops.contract import Array, Heads, KVCache, Norm, Ops, StepInput

_FLAG: Final = "--speculative-config"
_LLAMA: Final = "LlamaForCausalLM"
_HIDDEN_NORM: Final = "model.layers.0.hidden_norm"
_OWN: Final = (r"^fc\.weight$", "^d2t$", "^t2d$", r"\.hidden_norm\.weight$")


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights of a head on one pack."""

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
    activation: str
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
        inner = ops.mlp_inputs(x, self.mlp.norm, self.mlp.gate_up, self.activation)  # type: ignore[arg-type]  # checked
        return ops.gather_rows(ops.settle(ops.project_residual(inner, self.mlp.down, x)), step.logits_rows)

    def logits(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits of the draft vocabulary [R, V]."""
        return self.ops.logits_of(self.ops.rms_norm(states, self.norm), self.head, None)


def with_draft_head(model: object, path: Path) -> DecoderModel:
    """Return the same model with the head of the checkpoint at `path`. Raises `ConfigError` or `ModelError`."""
    if not isinstance(model, DecoderModel) or not model.causal:
        raise ConfigError(
            "drafts from hidden states need a decoder that fd_core computes",
            field=_FLAG,
            hint="use ngram, suffix or draft_model",
        )
    try:
        with open_checkpoint(path) as checkpoint:
            checkpoint.rename(_usual_name)
            return replace(model, draft_head=_load(model, checkpoint))
    except (ConfigError, ModelError) as error:
        raise type(error)(f"draft head: {error.message}", field=_FLAG, hint=error.hint) from error


def tapped_layers(config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers before which its residual stream is read, in ascending order."""
    part = config.part("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    if part is not None and name in part.values:  # of layers after which it is read
        layers = tuple(each + 1 for each in part.indices(name))
    else:
        layers = config.indices(name) or (2, num_layers // 2, num_layers - 3)
    if len({*layers}) < len(layers) or not all(0 <= each <= num_layers for each in layers):
        raise ModelError(f"{config.origin}: {name} is {[*layers]}, but the target has {num_layers} layers")
    return tuple(sorted(layers))


def _usual_name(name: str) -> str:
    """Return the name of a tensor as in a decoder of one layer."""
    name = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return f"model.layers.0.{name.removeprefix(prefix)}"
    return f"model.{name}" if name in ("norm.weight", "embed_tokens.weight") else name


def _load(model: DecoderModel, checkpoint: Checkpoint) -> DraftHead:
    ops, target, given = model.ops, model.spec, config_of(checkpoint)
    vocab = given.count("draft_vocab_size", given.count("vocab_size"))
    fields = {"architectures": [_LLAMA], "vocab_size": vocab, "num_hidden_layers": 1, "tie_word_embeddings": False}
    described = describe(replace(given, values={**given.values, **fields}))
    spec = _of_head(described, checkpoint)
    hidden, first = target.embedding.shape[1], target.attention[0]
    attention, mlp = spec.attention[0], spec.layers[0].feed_forward
    if spec.embedding.shape[1] != hidden or not isinstance(mlp, MlpSpec) or attention.norm is None:
        raise ModelError(f"its hidden size is {spec.embedding.shape[1]}, but the target's is {hidden}")
    sizes, found = ((each.num_kv_heads, each.head_dim) for each in (first, attention))
    if first.latent is not None or target.recurrent or sizes != found:
        kind = "of another kind" if first.latent is not None or target.recurrent else f"{sizes[0]} x {sizes[1]}"
        raise ConfigError(
            f"its KV heads are {found[0]} x {found[1]} elements and share blocks with the target's, which are {kind}",
            hint="use a head with the target's KV heads, or ngram, suffix or draft_model",
        )
    check_tensors(spec, checkpoint)
    layers = tapped_layers(given, len(target.layers))
    wide = (hidden, len(layers) * hidden)
    if checkpoint.shape("fc.weight") != wide:
        raise ModelError(f"fc.weight has shape {checkpoint.shape('fc.weight')}, expected {wide}")
    reader = Reader(spec, checkpoint, ops, model.max_positions, progress=None, quantization="auto")
    fc, qkv = checkpoint.read("fc.weight"), reader.weights(attention.qkv, LinearShare())

    def part(index: int) -> slice:
        return slice(index * hidden, (index + 1) * hidden)

    biases = reader.biases(attention.qkv, LinearShare())
    own = spec.embedding.name in checkpoint.names()
    return DraftHead(
        ops=ops,
        taps={layer: ops.prepare_linear([fc.take_columns(part(index))]) for index, layer in enumerate(layers)},
        table=reader.table(tied=False) if own else model.decoder.embedding,
        table_scale=1.0 if own else model.decoder.embedding_scale,
        embedding_norm=reader.norm(attention.norm),
        hidden_norm=reader.norm(NormSpec(VectorSpec(f"{_HIDDEN_NORM}.weight", (hidden,)))),
        qkv=(
            ops.prepare_linear([each.take_columns(part(0)) for each in qkv], biases),
            ops.prepare_linear([each.take_columns(part(1)) for each in qkv]),
        ),
        heads=reader.heads(attention),
        output=reader.linear(attention.output, LinearShare(), adds=True),
        mlp=reader.mlp(mlp),
        activation=spec.activation,
        norm=reader.norm(spec.final_norm or attention.norm),
        head=ops.prepare_linear([reader.read_weight("lm_head.weight")]),
        ids=_token_ids(checkpoint, vocab, model),
        adds_normed=given.flag("norm_before_residual"),
    )


def _of_head(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """Return the spec of the head's tensors: the first linear has two inputs, and the embedding may be the target's."""
    (layer,), (attention,), table = spec.layers, spec.attention, spec.embedding
    attention = replace(attention, qkv=replace(attention.qkv, ins=2 * table.shape[1]))
    layer = replace(layer, attention=attention)
    if table.name not in checkpoint.names():
        table = VectorSpec("", table.shape)
    else:
        table = VectorSpec(table.name, checkpoint.shape(table.name))
    return replace(spec, architecture="EAGLE-3 head", embedding=table, layers=(layer,), ignored=(*spec.ignored, *_OWN))


def _token_ids(checkpoint: Checkpoint, vocab: int, model: DecoderModel) -> Array | None:
    """Return the token ids of the draft vocabulary, which files hold as offsets; None if it is the target's."""
    if "d2t" not in checkpoint.names():
        if vocab != model.vocab_size:
            raise ModelError(f"it drafts {vocab} tokens of {model.vocab_size}, but has no tensor d2t")
        return None
    ids = checkpoint.read_integers("d2t").reshape(-1) + np.arange(vocab)
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        raise ModelError(f"d2t names token {int(ids.max())}, but the target has {model.vocab_size} tokens")
    return model.ops.from_host(ids.astype(np.int32))
