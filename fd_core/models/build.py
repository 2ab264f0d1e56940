"""Build a decoder from a spec and a checkpoint: check everything, then read tensor by tensor."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from types import EllipsisType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.decoder import Attention, Decoder, DecoderModel, Layer, Mlp, Moe, MtpLayer, Recurrence
from fd_core.models.families.spec import (
    AttentionSpec,
    DecoderSpec,
    ImageSpec,
    Indices,
    LatentSpec,
    LayerSpec,
    LinearShare,
    LinearSpec,
    MergerSpec,
    MlpSpec,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RecurrentSpec,
    RopeSpec,
    VectorSpec,
    attention_shares,
    conv_channels,
    expert_shares,
    feed_forward_shares,
    head_shares,
    parts_of,
    recurrent_outputs,
    recurrent_shares,
    rope_tables,
    stage_layers,
    vocabulary_share,
)
from fd_core.models.image_encoder import ImageEncoder, Merger, Tower
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.config import ModelConfig
from fd_core.models.quantization import head_format, quantized
from fd_core.ops.contract import Array, Experts, Heads, Latent, Norm, Ops, PlainActivation, Recurrent, Rope
from fd_core.ops.parallel import Parallel, Stage
from fd_core.ops.weights import ITEM_BYTES, PackedTensor, RawTensor, Weight, WeightUse, summed_uses

Change = Callable[[Weight], Weight]
"""Change of a weight when it is read."""
Floats = npt.NDArray[np.float32]
ProgressSink = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of the files."""


def check_tensors(spec: DecoderSpec, checkpoint: Checkpoint) -> int:
    """Return the number of parameters; `ModelError` for missing, misshapen or unexpected tensors, or uneven KV."""
    expected = _stored(spec, checkpoint, spec.architecture)
    ignored = re.compile("|".join(spec.ignored))
    unexpected = sorted(name for name in checkpoint.names() if name not in expected and not ignored.search(name))
    if unexpected:
        what = f"tensor {unexpected[0]!r} is not expected"
        raise _mismatch(checkpoint, spec.architecture, what, names=unexpected)
    if len({*map(_kv_sizes, spec.attention)}) > 1:
        raise ModelError("layers whose keys and values differ in size are not supported")
    if not spec.attention:
        raise ModelError("models without attention layers are not supported")
    return sum(math.prod(shape) for shape in expected.values())


def _stored(spec: DecoderSpec | MtpSpec, checkpoint: Checkpoint, kind: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a spec; `ModelError` for a missing or misshapen one."""
    expected, names = dict(spec.tensors()), set(checkpoint.names())
    missing = [name for name in expected if name not in names]
    if missing:
        shape = expected[missing[0]]
        raise _mismatch(checkpoint, kind, f"tensor {missing[0]!r} of shape {shape} is missing", names=missing)
    misshapen = [name for name, shape in expected.items() if checkpoint.shape(name) != shape]
    if misshapen:
        name = misshapen[0]
        what = f"tensor {name!r} has shape {checkpoint.shape(name)}, expected {expected[name]} from the config"
        raise _mismatch(checkpoint, kind, what, names=misshapen)
    return expected


def _kv_sizes(spec: AttentionSpec) -> tuple[int, int, int]:
    return spec.num_kv_heads, spec.head_dim, 0 if spec.latent is None else spec.latent.rank


def _mismatch(checkpoint: Checkpoint, kind: str, what: str, names: Sequence[str]) -> ModelError:
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return ModelError(f"{checkpoint.path} is not a complete {kind}: {what}{more}")


def build_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    ops: Ops,
    max_positions: int,
    progress: ProgressSink | None,
    quantization: str = "auto",
) -> tuple[Decoder, tuple[WeightUse, ...]]:
    """Read and prepare the weights of a spec, or of the stage of `ops`; return the formats that they are computed
    in."""
    of_stage = tuple(_held(layer, ops.parallel) for layer in spec.layers[stage_layers(spec, ops.stage)])
    reader = Reader(replace(spec, layers=of_stage, images=None), checkpoint, ops, max_positions, progress, quantization)
    tokens = vocabulary_share(spec.embedding.shape[0], ops.parallel)
    tied = spec.head is None and spec.causal and tokens is None and ops.stage.last
    table = reader.table(tied=tied) if ops.stage.first and spec.embedding.name else None
    head = reader.head(table if tied else None, tokens) if ops.stage.last else None
    layers = [reader.layer(each) for each in of_stage]
    final_norm = reader.optional_norm(spec.final_norm)
    decoder = Decoder(
        table,
        spec.embedding_scale / reader.table_scale,
        tuple(layers),
        final_norm,
        head,
        spec.activation,
        spec.softcap,
        spec.parallel,
        tokens is not None,
        positions=reader.positions() if ops.stage.first else None,
        embedding_norm=reader.optional_norm(spec.embedding_norm),
    )
    return decoder, summed_uses([reader.uses])


def build_mtp(
    spec: MtpSpec, model: DecoderModel, checkpoint: Checkpoint, quantization: str
) -> tuple[MtpLayer, tuple[WeightUse, ...]]:
    """Read and prepare the layer for multi-token prediction of a model; return it and the formats of its weights.

    Raises `ModelError` if its tensors differ.
    """
    _stored(spec, checkpoint, f"{model.architecture} with a layer for multi-token prediction")
    layer = _held(spec.layer, model.ops.parallel)
    of_layer = replace(model.spec, layers=(layer,), images=None)
    reader = Reader(of_layer, checkpoint, model.ops, model.max_positions, progress=None, quantization=quantization)
    (joined,), hidden = reader.weights(spec.inputs, LinearShare()), spec.inputs.ins // 2
    parts, prepare = [joined.take_columns(slice(at, at + hidden)) for at in (0, hidden)], model.ops.prepare_linear
    made = MtpLayer(
        model=model,
        taps={} if spec.normed else {len(model.spec.layers): None},
        embedding_norm=reader.norm(spec.embedding_norm),
        hidden_norm=reader.norm(spec.hidden_norm),
        inputs=(prepare([parts[0]], reader.biases(spec.inputs, LinearShare())), prepare([parts[1]])),
        layer=reader.layer(layer),
        norm=reader.norm(spec.norm),
        normed=spec.normed,
    )
    return made, summed_uses([reader.uses])


def build_images(spec: ImageSpec, checkpoint: Checkpoint, ops: Ops) -> ImageEncoder:
    """Read and prepare the encoder of images, in the pack's dtype.

    Raises `ModelError` for settings of pixels that cannot be used.
    """
    tower, most = spec.tower, spec.most_patches
    ops = copy.copy(ops)
    ops.stage = Stage()  # the first stage computes all of its layers
    reader = Reader(tower, checkpoint, ops, most, None, "auto")
    decoder, weights = build_decoder(tower, checkpoint, ops, most, None)
    settings = ModelConfig(checkpoint.processor_config, origin=str(checkpoint.path / "preprocessor_config.json"))
    if not math.isclose(settings.number("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise ModelError(f"{settings.origin}: rescale_factor must be 1/255")
    mean, std = (settings.channels(name, 0.5) for name in ("image_mean", "image_std"))
    patch = reader.values(spec.patch)
    columns = (patch.sum(axis=2) if patch.ndim == 5 else patch).reshape(len(patch), -1)
    bias = None if spec.patch_bias is None else [RawTensor("F32", reader.values(spec.patch_bias))]
    deep = dict(zip(spec.deep_layers, spec.deep, strict=True))
    towers = []
    for (windowed, _), group in groupby(
        range(len(tower.layers)), lambda layer: (layer in spec.windowed, sum(each < layer for each in deep))
    ):
        begin, *_, end = *(own := [*group]), own[-1] + 1
        last = end == len(tower.layers)
        norm = decoder.final_norm if last else None
        part = DecoderModel(
            ops,
            replace(tower, layers=tower.layers[begin:end], final_norm=tower.final_norm if last else None),
            replace(decoder, layers=decoder.layers[begin:end], final_norm=norm),
            architecture=tower.architecture,
            vocab_size=1,
            max_positions=most,
            eos_token_ids=(),
            num_parameters=0,
            weights=weights,
            state_size=tower.embedding.shape[1],
            generates=False,
        )
        merger = spec.merger if last else deep.get(end - 1)
        towers.append(Tower(part, windowed, None if merger is None else _merger(merger, reader)))
    return ImageEncoder(
        ops,
        spec,
        tuple(towers),
        ops.prepare_linear([RawTensor("F32", columns)], bias),
        mean,
        std,
        None if spec.positions is None else reader.values(spec.positions).reshape(spec.side, spec.side, -1),
        None if spec.first is None else reader.values(spec.first).copy(),
        None if spec.newline is None else reader.values(spec.newline),
        _mean_norm(spec, reader),
    )


def _merger(spec: MergerSpec, reader: Reader) -> Merger:
    linears: list[Array] = []
    for linear in spec.layers:
        weights, biases = reader.weights(linear, LinearShare()), reader.biases(linear, LinearShare())
        if spec.frames > 1 and not linears:
            first = weights[0].to_float32()
            weights = [RawTensor("F32", first.reshape(len(first), spec.frames, -1).sum(axis=1))]
        linears.append(reader.ops.prepare_linear(weights, biases))
    norm, patch_norm = (
        None if each is None else replace(reader.norm(each), eps=spec.eps) for each in (spec.norm, spec.patch_norm)
    )
    if norm is not None and spec.norm is not None and spec.norm.bias is None:
        norm = replace(norm, bias=None)
    return Merger(tuple(linears), norm, patch_norm, tuple(_merger(each, reader) for each in spec.then))


def _mean_norm(spec: ImageSpec, reader: Reader) -> Norm | None:
    """Return the norm of the sum of merged states, which is that of their mean with a smaller epsilon."""
    if spec.mean_norm is None:
        return None
    return reader.norm_of(reader.values(spec.mean_norm.weight) + 1, spec.tower.eps * spec.merge**4)


def _held(layer: LayerSpec, parallel: Parallel) -> LayerSpec:
    """Return a layer with the experts of which a rank has a share."""
    block = layer.feed_forward
    if not isinstance(block, MoeSpec):
        return layer
    own, *images = (replace(each, experts=each.experts[each.held(parallel)]) for each in block.kinds)
    return replace(layer, feed_forward=replace(own, images=images[0]) if images else own)


def weight_bytes(ops: Ops, weight: Weight, *, table: bool = False) -> int:
    """Return the bytes that a pack takes for a weight, or for a table of tokens."""
    elements = math.prod(weight.shape)
    if not isinstance(weight, PackedTensor) or (ops.dequantizes_weights and not table):
        return elements * ITEM_BYTES[ops.dtype]
    spread = weight.bits > 4 and not ops.stores_tightly
    return weight.nbytes + (elements * (8 - weight.stored_bits) // 8 if spread else 0)


@dataclass
class Reader:
    """Reads one tensor at a time, so that at most one layer's weights exist twice."""

    spec: DecoderSpec
    checkpoint: Checkpoint
    ops: Ops
    max_positions: int
    progress: ProgressSink | None
    quantization: str
    done: int = 0
    ropes: dict[RopeSpec, Rope] = field(default_factory=dict)
    uses: list[WeightUse] = field(default_factory=list)
    table_format: str | None = None
    """Format of a packed embedding."""

    @cached_property
    def total(self) -> int:
        """Elements of all tensors."""
        return sum(map(math.prod, dict(self.spec.tensors()).values()))

    @cached_property
    def expert_names(self) -> Collection[str]:
        """Tensors of experts."""
        blocks = [layer.feed_forward for layer in self.spec.layers]
        kinds = [each for block in blocks if isinstance(block, MoeSpec) for each in block.kinds]
        pairs = [pair for each in kinds for pair in each.experts]
        return {linear.tensor(name) for pair in pairs for linear in pair for name in linear.names}

    def read(self, name: str, change: Change | None = None) -> Weight:
        """Read a tensor and report progress in bytes of the files, in proportion to its elements."""
        tensor: Weight = self.checkpoint.read(name)
        tensor = tensor if change is None else change(tensor)
        self._report(tensor)
        return tensor

    def read_weight(self, name: str, change: Change | None = None) -> Weight:
        """Read the weight of a linear layer in its compute format, and report progress."""
        weight = self._computed(name, self.quantization, change)
        self.count(name, weight)
        self._report(weight)
        return weight

    def _computed(self, name: str, form: str, change: Change | None = None) -> Weight:
        """Return a weight in a format, or with `auto` in its stored format if the pack supports it."""
        if form != "auto":
            return quantized(self.checkpoint, name, form, change)
        weight = self.checkpoint.read_weight(name, self.ops.weight_formats)
        return weight if change is None else change(weight)

    def _report(self, weight: Weight) -> None:
        self.checkpoint.release()
        self.done += math.prod(weight.shape)
        if self.progress is not None:
            whole = self.checkpoint.total_bytes
            self.progress(whole * self.done // self.total, whole)

    def count(self, name: str, weight: Weight, *, table: bool = False) -> None:
        """Record the stored and the computed format of a weight; of ranks that divide experts, 0 records the others."""
        if self.ops.parallel.expert_parallel and self.ops.parallel.rank and name not in self.expert_names:
            return
        form = weight.format if isinstance(weight, PackedTensor) else self.ops.dtype
        nbytes = weight_bytes(self.ops, weight, table=table)
        self.uses.append(WeightUse(self.checkpoint.stored_format(name), form, table, math.prod(weight.shape), nbytes))

    def table(self, *, tied: bool) -> Array:
        """Read the embedding; `tied` if the output projection may share it."""
        embedding = self.checkpoint.read_weight(self.spec.embedding.name, self.table_formats(tied=tied))
        self._report(embedding)
        if self.table_scale != 1.0:
            embedding = _scaled(embedding, self.table_scale)
        if self.spec.types is not None:
            values = embedding.to_float32()
            embedding = RawTensor("F32", np.concatenate([values + each for each in self.values(self.spec.types)]))
        self.count(self.spec.embedding.name, embedding, table=True)
        self.table_format = embedding.format if isinstance(embedding, PackedTensor) else None
        return self.ops.prepare_embedding(embedding)

    def table_formats(self, *, tied: bool) -> Collection[str]:
        """Return the formats in which a table stays packed."""
        if self.spec.types is not None or math.frexp(self.table_scale)[0] != 0.5:
            return ()  # values change, or would be rounded differently
        formats = {*self.ops.table_formats}
        if self.quantization != "auto":  # the projection has other values, even in the same format
            return formats - {head_format(self.quantization)}
        # A tied projection that is dequantized shares the dequantized table.
        return formats & {*self.ops.weight_formats} if tied else formats

    def positions(self) -> Array | None:
        """Read the table of positions, from the first one on."""
        if self.spec.positions is None:
            return None
        values = self.values(self.spec.positions)[self.spec.first_position :]
        return self.ops.prepare_embedding(RawTensor("F32", np.ascontiguousarray(values)))

    @property
    def table_scale(self) -> float:
        """Factor on the table, which is that on the logits if it is the output projection as well."""
        return self.spec.head_scale if self.spec.head is None else 1.0

    def head(self, table: Array | None, tokens: slice | None) -> Array:
        """Read the output projection, tied to the embedding `table` if there is one; with `tokens`, their rows only.

        An encoder yields one logit, 0 or NaN: the token that ends a request for a vector, and whether it is finite.
        """
        spec, head, form = self.spec, self.spec.head, head_format(self.quantization)
        if not spec.causal:
            return self.ops.prepare_linear([RawTensor("F32", np.zeros((1, spec.embedding.shape[1]), np.float32))])
        bias = None if spec.head_bias is None else self.values(spec.head_bias)
        final = spec.final_norm
        shift = None if final is None or final.bias is None else self.values(final.bias)
        change = None if spec.head_scale == 1.0 else partial(_scaled, factor=spec.head_scale)
        tied = table is not None
        name = spec.embedding.name if head is None else head.name
        weight = self._computed(name, form, change)
        # A pack may use one format for lookup and another for multiplication.
        packed = weight.format if isinstance(weight, PackedTensor) else None
        if not tied or packed != self.table_format or (packed and self.ops.dequantizes_weights):
            self.count(name, weight)
        if head is not None:
            self._report(weight)
        if shift is not None:
            bias = _through(weight, shift, bias)
        rows = tokens or slice(None)
        biases = None if bias is None else [RawTensor("F32", bias[rows])]
        if tied:
            return self.ops.tied_head(table, weight, *(biases or ()))
        return self.ops.prepare_linear([weight.take_rows(rows)], biases)

    def layer(self, spec: LayerSpec) -> Layer:
        """Read a layer."""
        first, block = spec.attention, spec.feed_forward
        attention = self.recurrence(first) if isinstance(first, RecurrentSpec) else self.attention(first)
        return Layer(attention, None if block is None else self.feed_forward_of(block))

    def attention(self, spec: AttentionSpec) -> Attention:
        """Read an attention block."""
        queries, _ = head_shares(spec, self.ops.parallel)
        qkv, output = attention_shares(spec, self.ops.parallel)
        first, gate = None, None
        if spec.gated:
            weights, biases = self.weights(spec.qkv, qkv), self.biases(spec.qkv, qkv)
            first, gate = (
                self.ops.prepare_linear([weights[i] for i in of], None if biases is None else [biases[i] for i in of])
                for of in ((0, 2, 3), (1,))
            )
        return Attention(
            norm=self.optional_norm(spec.norm),
            qkv=self.linear(spec.qkv, qkv, after=spec.norm) if first is None else first,
            gate=gate,
            heads=self.heads(spec),
            output=self.linear(spec.output, output, adds=True),
            post_norm=self.optional_norm(spec.post_norm),
            stream_norm=self.optional_norm(spec.stream_norm),
            latent=None if spec.latent is None else self.latent(spec.latent, queries, spec.head_dim),
        )

    def heads(self, spec: AttentionSpec) -> Heads:
        """Return this rank's share of the heads, with their norms."""
        queries, kv = head_shares(spec, self.ops.parallel)
        each_kv = max(spec.num_kv_heads, self.ops.parallel.size)  # of all ranks, which may hold the same ones
        return Heads(
            num_heads=queries.stop - queries.start,
            num_kv_heads=kv.stop - kv.start,
            head_dim=spec.head_dim,
            scale=spec.scale,
            rope=self.rope(replace(spec.rope, growth=None)),
            query_rope=None if spec.rope.growth is None else self.rope(spec.rope),
            q_norm=self.head_norm(spec.q_norm, queries, spec),
            k_norm=self.head_norm(spec.k_norm, kv, spec),
            norms_rotated=spec.norms_rotated,
            joint_widths=(spec.num_heads * spec.head_dim, each_kv * spec.head_dim) if spec.joint_norms else None,
            # A window as long as the longest sequence masks nothing.
            window=None if spec.window is None or spec.window >= self.max_positions else spec.window,
            chunked=spec.chunked,
            causal=spec.causal,
            softcap=spec.softcap,
            latent=0 if spec.latent is None else spec.latent.rank,
            sinks=None if spec.sinks is None else self.ops.prepare_vector(self.values(spec.sinks)[queries]),
        )

    def recurrence(self, spec: RecurrentSpec) -> Recurrence:
        """Read a block with a recurrence in place of attention."""
        inputs, output = attention_shares(spec, self.ops.parallel)
        heads, channels = recurrent_shares(spec, self.ops.parallel)[-1], conv_channels(spec, self.ops.parallel)
        normed = recurrent_outputs(spec, self.ops.parallel) if spec.rule == "scan" else slice(None)

        def vector(stored: VectorSpec | None, of: Any = slice(None)) -> Array | None:
            return None if stored is None else self.ops.prepare_vector(self.values(stored)[of])

        conv = self.values(spec.conv).reshape(-1, spec.conv.shape[-1])[channels]
        recurrent = Recurrent(
            rule=spec.rule,
            conv=self.ops.prepare_vector(np.ascontiguousarray(conv.T)),
            conv_bias=vector(spec.conv_bias, channels),
            key_heads=spec.key_heads // self.ops.parallel.size,
            value_heads=spec.value_heads // self.ops.parallel.size,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            decay=vector(spec.decay, heads),
            time_bias=vector(spec.time_bias, heads),
            norm=None if spec.head_norm is None else Norm(vector(spec.head_norm, normed), spec.head_eps),
            skip=vector(spec.skip, heads),
            time_limits=spec.time_limits,
        )
        return Recurrence(
            norm=self.optional_norm(spec.norm),
            inputs=self.linear(spec.inputs, inputs, after=spec.norm),
            recurrent=recurrent,
            output=self.linear(spec.output, output, adds=True),
            post_norm=self.optional_norm(spec.post_norm),
            stream_norm=self.optional_norm(spec.stream_norm),
        )

    def latent(self, spec: LatentSpec, heads: slice, head_dim: int) -> Latent:
        """Read what latent attention has for some heads. `up` is dequantized, because it is applied from both sides."""
        rows = LinearShare(rows=(spec.query_share(heads, head_dim),))
        read = self.read(spec.up.tensor(spec.up.names[0]))
        self.count(spec.up.names[0] + ".weight", read)
        each = read.to_float32().reshape(-1, spec.key + spec.value, spec.rank)[heads]
        return Latent(
            self.norm_of(self.values(spec.norm), spec.eps),
            None if spec.q_norm is None else self.norm_of(self.values(spec.q_norm), spec.eps),
            q_up=None if spec.q_up is None else self.linear(spec.q_up, rows),
            absorb=self.ops.prepare_heads(np.ascontiguousarray(each[:, : spec.key].transpose(0, 2, 1))),
            expand=self.ops.prepare_heads(np.ascontiguousarray(each[:, spec.key :])),
        )

    def feed_forward_of(self, spec: MlpSpec | MoeSpec) -> Mlp | Moe:
        """Read a feed-forward block of either kind."""
        return self.mlp(spec) if isinstance(spec, MlpSpec) else self.moe(spec)

    def mlp(self, spec: MlpSpec) -> Mlp:
        """Read a dense feed-forward block."""
        gate_up, down = self.feed_forward(spec.gate_up, spec.down, after=spec.norm)
        norm, post_norm, stream_norm = (
            self.optional_norm(each) for each in (spec.norm, spec.post_norm, spec.stream_norm)
        )
        return Mlp(norm, gate_up, down, post_norm, stream_norm, gated=spec.gated)

    def feed_forward(self, gate_up: LinearSpec, down: LinearSpec, after: NormSpec | None = None) -> tuple[Array, Array]:
        """Read the linears of a feed-forward block."""
        rows, columns = feed_forward_shares(gate_up, down, self.ops.parallel)
        gated = len(gate_up.outs) > 1
        return self.linear(gate_up, rows, gated=gated, after=after), self.linear(down, columns, adds=True)

    def moe(self, spec: MoeSpec) -> Moe:
        """Read a block of experts."""
        shared = (None, None) if spec.shared is None else self.feed_forward(*spec.shared)
        return Moe(self.norm(spec.norm), *(self.routed(each, shared) for each in spec.kinds))

    def routed(self, spec: MoeSpec, shared: tuple[Array | None, Array | None]) -> Experts:
        """Read the experts of a block for one kind of tokens."""
        bias, gate = spec.correction_bias, spec.shared_gate
        rows, columns = expert_shares(*spec.experts[0], self.ops.parallel)
        ups, downs = ([pair[i] for pair in spec.experts] for i in range(2))
        return Experts(
            router=self.ops.prepare_vector(self.values(spec.router)),
            router_bias=None if spec.router_bias is None else self.ops.prepare_vector(self.values(spec.router_bias)),
            gate_up=self.experts(ups, rows, gated=spec.gated),
            down=self.experts(downs, columns, gated=False),
            ungated=None if spec.gated else cast(PlainActivation, self.spec.activation),
            top_k=spec.top_k,
            normalize=spec.normalize,
            correction_bias=None if bias is None else self.ops.prepare_vector(self.values(bias).reshape(-1)),
            norm_floor=spec.norm_floor,
            scoring=spec.scoring,
            weighs_inputs=spec.weighs_inputs,
            groups=spec.groups,
            top_groups=spec.top_groups,
            weight_scale=spec.weight_scale,
            shared_gate_up=shared[0],
            shared_down=shared[1],
            shared_gate=None if gate is None else self.ops.prepare_vector(self.values(gate).reshape(-1)),
            first=spec.held(self.ops.parallel).start,
        )

    def experts(self, specs: Sequence[LinearSpec], share: LinearShare, *, gated: bool) -> Any:
        """Read one of the linears of all experts."""
        weights = [self.weights(each, share) for each in specs]
        biases = [each for each in (self.biases(spec, share) for spec in specs) if each is not None]
        return self.ops.prepare_experts(weights, *([biases] if biases else ()), gated=gated)

    def rope(self, spec: RopeSpec) -> Rope:
        """Return the tables, computed once for all layers that share them."""
        if spec not in self.ropes:
            self.ropes[spec] = rope_tables(spec, self.max_positions, self.ops)
        return self.ropes[spec]

    def norm(self, spec: NormSpec) -> Norm:
        """Read a norm, its offset folded into the weight; its bias belongs to the linear that follows, or is added."""
        norm = self.norm_of(self.values(spec.weight))
        if self.spec.causal or not self.spec.layer_norm:
            return norm
        bias = np.zeros(spec.weight.shape, np.float32) if spec.bias is None else self.values(spec.bias)
        return replace(norm, bias=self.ops.prepare_vector(bias))

    def norm_of(self, weight: Floats, eps: float | None = None) -> Norm:
        """Prepare a norm."""
        return Norm(self.ops.prepare_vector(weight + np.float32(self.spec.norm_offset)), eps or self.spec.eps)

    def head_norm(self, spec: NormSpec | None, heads: slice, attention: AttentionSpec) -> Norm | None:
        """Read a norm of queries or keys: of one head, or of this rank's share of all heads."""
        if spec is None or not attention.joint_norms:
            return self.optional_norm(spec)
        return self.norm_of(self.values(spec.weight).reshape(-1, attention.head_dim)[heads])

    def optional_norm(self, spec: NormSpec | None) -> Norm | None:
        """Read a norm, if there is one."""
        return None if spec is None else self.norm(spec)

    def linear(
        self,
        spec: LinearSpec,
        share: LinearShare,
        *,
        gated: bool = False,
        after: NormSpec | None = None,
        adds: bool = False,
    ) -> Array:
        """Read this rank's share of a linear. Parts of a sum over ranks have their bias from rank 0 alone.

        It follows the norm `after`, whose bias becomes one of the linear. If it `adds` to a centred stream, its outputs
        have the mean 0.
        """
        centred = adds and self.spec.centred
        weights = self.weights(spec, share, centred=centred)
        biases = self.biases(spec, share, centred=centred)
        if after is not None and after.bias is not None and self.spec.causal:
            shift = self.values(after.bias)
            own = [None] * len(weights) if biases is None else [each.to_float32() for each in biases]
            pairs = zip(weights, own, strict=True)
            biases = [RawTensor("F32", _through(weight, shift, bias)) for weight, bias in pairs]
        return self.ops.prepare_linear(weights, biases, gated=gated)

    def biases(self, spec: LinearSpec, share: LinearShare, *, centred: bool = False) -> list[RawTensor] | None:
        """Read the biases of the parts of a linear."""
        if not spec.bias or (share.columns is not None and self.ops.parallel.rank != 0):
            return None
        read = [self.read(spec.bias_tensor(name), _change(spec, centred=centred)).expanded() for name in spec.names]
        return _shared(parts_of(spec, read, _cut), share.rows)

    def weights(self, spec: LinearSpec, share: LinearShare, *, centred: bool = False) -> list[Weight]:
        """Read the weights of the parts of a linear."""
        change = _change(spec, centred=centred)
        weights = parts_of(spec, [self.read_weight(spec.tensor(name), change) for name in spec.names], _cut)
        if self.ops.parallel.size == 1:
            return weights
        if share.columns is not None:
            return [weight.take_columns(share.columns) for weight in weights]
        return _shared(weights, share.rows)

    def values(self, spec: VectorSpec) -> Floats:
        """Read a norm weight or a table."""
        if not spec.name:
            return np.ones(spec.shape, np.float32)
        values = self.read(spec.name).to_float32()
        values = values if spec.stack is None else values[spec.stack[0]]
        return np.ascontiguousarray(values.T) if spec.transposed else values


def _cut(weight: Any, rows: slice | Indices) -> Any:
    return weight.take_rows(rows)


def _shared(parts: Sequence[Any], rows: Sequence[slice] | None) -> list[Any]:
    """Return a rank's rows of each part."""
    return list(parts) if rows is None else [each.take_rows(mine) for each, mine in zip(parts, rows, strict=True)]


def _change(spec: LinearSpec, *, centred: bool) -> Change | None:
    """Return the change of each tensor of a linear; `centred` ones are in no stack."""
    if spec.stack is not None or spec.transposed:
        return partial(_picked, index=spec.stack[0] if spec.stack else ..., transposed=spec.transposed)
    return _centred if centred else None


def _picked(stacked: Weight, index: int | EllipsisType, *, transposed: bool) -> RawTensor:
    """Return one weight [out, in] of [n, out, in], or of [n, in, out] if `transposed`; or one bias."""
    raw = stacked.expanded()
    return RawTensor(raw.dtype, raw.data[index].T if transposed else raw.data[index])


def _centred(tensor: Weight) -> RawTensor:
    """Subtract the mean over the outputs of a weight [out, in] or a bias [out].

    If all that is added to the residual stream has the mean 0, a layer norm of the stream is an RMS norm (Ashkboos et
    al., "SliceGPT", 2024).
    """
    values = tensor.to_float32()
    return RawTensor("F32", values - values.mean(axis=0, dtype=np.float64).astype(np.float32))


def _scaled(weight: Weight, factor: float) -> Weight:
    if isinstance(weight, RawTensor):
        return RawTensor("F32", weight.to_float32() * np.float32(factor))
    minima = None if weight.minima is None else weight.minima * np.float32(factor)
    return replace(weight, scales=weight.scales * np.float32(factor), minima=minima, units=None)


def _through(weight: Weight, shift: Floats, bias: Floats | None) -> Floats:
    """Return the bias of a linear whose inputs lack `shift`."""
    product = weight.to_float32().astype(np.float64) @ shift
    return (product if bias is None else product + bias).astype(np.float32)
