"""The native pack: numpy arrays, with the fusions that models call as kernels in C++.

Each call is one operation of a program (see `program`). Called with arrays it runs at once; called with symbols it is
recorded, and `compile` replays the whole forward with one call per step. The residual stream is always float32, as are
intermediate results of the kernels between a product and its rounding to the pack's dtype.

Packed weights of linear layers and experts stay packed; their activations are rounded to 8 bits, with a scale per 32
values. AMX tiles, if available, compute products of many rows; VNNI those of few, or all; else AVX-512, AVX2 or plain
C++. All yield the same integers.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError
from fd_core.ops.contract import (
    Activation,
    Array,
    Experts,
    Forward,
    Heads,
    KVCache,
    KVShape,
    Latent,
    Lora,
    Norm,
    PenaltyInput,
    PlainActivation,
    Recurrent,
    RecurrentRule,
    SampleInput,
    StepInput,
)
from fd_core.ops.native.library import (
    AttentionShape,
    LoraDelta,
    LoraTable,
    MaskRows,
    MoeGeometry,
    PenaltyRows,
    RecurrentShape,
    SampleRows,
    invoke,
)
from fd_core.ops.native.memory import (
    Arena,
    NativeHeads,
    NativeKVCache,
    NativeLinear,
    NativeLora,
    pack,
    pack_lora,
    with_bias,
)
from fd_core.ops.native.program import (
    NO_STEP,
    ROW_ALIGN,
    CaptureError,
    Eager,
    ProgramRecorder,
    ProgramSymbol,
    Runtime,
    address,
    narrowed,
    symbolic_step,
    widened,
)
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import RankGroup
from fd_core.ops.philox import uniform
from fd_core.ops.weights import FP8, WEIGHT_FORMATS, LowRank, PackedTensor, RawTensor, Weight

logger = logging.getLogger(__name__)

_ACTIVATIONS: dict[Activation | PlainActivation | None, int] = {
    None: -1,
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
    "quick_gelu": 5,
    "clamped_swiglu": 6,
}
_NO_NORM = (None, 0.0)


class NativeOps(NumpyOps):
    """Operations on numpy arrays, computed by the library of `build.load`.

    Arrays are float32, also those of the dtype bfloat16, whose values are rounded between operations. Linears and
    attention also take the bits of bfloat16 (uint16), and return such then.
    """

    name = "native"
    weight_formats = WEIGHT_FORMATS - {FP8}
    table_formats = weight_formats
    stores_tightly = True
    dequantizes_weights = False
    kv_dtypes = ("int8",)
    encodes = True
    chunks = True
    any_experts = True
    latents = True
    biased_experts = True
    ungated_experts = True
    expert_parallel = True
    sinks = True
    recurs = True
    # No kernel is compiled, and a long prefill needs little memory compared with weights; the longest takes seconds.
    warm_up_tokens = 64

    def __init__(self, library: ctypes.CDLL, dtype: str = "bfloat16", threads: int = 1) -> None:
        self.dtype = dtype
        self.runtime = Runtime(library, dtype, threads)
        self._arena = Arena(library)

    @property
    def instruction_set(self) -> str:
        """Instruction set of the kernels, such as `avx512_bf16`."""
        name: str = self.runtime.library.fd_instruction_set().decode()
        return name

    @property
    def packed_products(self) -> str:
        """Instructions that multiply packed weights, such as `avx512_vnni`."""
        name: str = self.runtime.library.fd_packed_products().decode()
        return name

    @property
    def dtype_reason(self) -> str:
        """Reason for the default `bfloat16`, and a hint for more speed."""
        if self.instruction_set.startswith(("avx512_bf16", "amx")):
            return f"the CPU has bfloat16 instructions ({self.instruction_set})"
        reason = f"the CPU lacks bfloat16 instructions ({self.instruction_set}), but halving memory reads is faster"
        if "vnni" in self.packed_products:
            reason += "; --quantization int8 halves the time"
        return reason

    def join(self, group: RankGroup) -> None:
        """Become one of several ranks; fusions exchange rows internally, without a copy."""
        self.runtime.join(group)
        super().join(group)
        self.parallel = replace(group.parallel, gathers=True)

    def describe(self) -> str:
        """Return a line with the instruction sets of the kernels."""
        return f"native kernels ({self.instruction_set}, {self.dtype}; packed weights: {self.packed_products})"

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> NativeLinear:
        """Pack the parts into the kernels' layout.

        Packed parts stay in 4, 6 or 8 bits, in a common format that holds all of them exactly: 6 or 8 bits if they
        differ, and the finest group. They are dequantized if one is not packed, or a group is not 16, a multiple of 32
        or a row.
        """
        return pack(self.runtime, self._arena, parts, biases=biases, gated=gated, squeeze=True)

    @contextmanager
    def replaceable_weights(self) -> Iterator[None]:
        """Prepare weights in a separate arena."""
        model, self._arena = self._arena, Arena(self.runtime.library)
        try:
            yield
        finally:
            self._arena = model

    def prepare_lora(self, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool = False) -> NativeLora:
        """Pack without blocks of zeros."""
        return pack_lora(self.runtime, self._arena, parts, outs=outs, gated=gated)

    def prepare_embedding(self, weight: Weight) -> NativeLinear:
        """Prepare a table as the linear that it is as a projection."""
        return self.prepare_linear([weight])

    def tied_head(self, embedding: NativeLinear, weight: Weight, bias: RawTensor | None = None) -> NativeLinear:
        """Share the embedding unless the projection is of another format."""
        if (weight.format if isinstance(weight, PackedTensor) else None) != embedding.format:
            return self.prepare_linear([weight], None if bias is None else [bias])
        return with_bias(self.runtime, embedding, bias)

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        # States are in whole units of up to this number of tokens, or of elements.
        unit = 4 if shape.quantized else 1 if self.runtime.wide else 2
        for name, size in (("block_size", shape.block_size), ("head_dim", shape.head_dim)):
            if shape.state and size % unit:
                raise ConfigError(
                    f"{name}={size} is not a multiple of {unit}, which the {self.name} pack needs for the states of "
                    "recurrent layers",
                    field="--block-size" if name == "block_size" else "--backend",
                    hint=f"use a multiple of {unit}" if name == "block_size" else "use --no-native-kernels",
                )
        return NativeKVCache(self.runtime, shape, num_blocks)

    def embedding(self, table: NativeLinear, token_ids: Array, scale: float = 1.0, *, centred: bool = False) -> Array:
        """Look up rows as a float32 residual stream."""
        # The reference models round the scale to the pack's dtype.
        factor = scale if self.runtime.wide else float(widened(narrowed(np.array([scale], np.float32)))[0])
        with self._call(token_ids, replace(NO_STEP, token_ids=token_ids)) as call:
            buffer, x = call.output(token_ids, table.inputs, True)
            call.keep(table)
            call.add("embedding", table.handle, factor, centred, buffer)
        return x

    def add_positions(self, x: Array, table: NativeLinear, positions: Array) -> Array:
        """Add to the residual stream, in place while recording."""
        with self._call(x, replace(NO_STEP, positions=positions)) as call:
            buffer, y = call.inout(x, table.inputs)
            call.keep(table)
            call.add("positions", table.handle, buffer)
        return y

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """Normalize; while recording, only the residual stream."""
        return self.layer_norm(x, norm) if isinstance(x, ProgramSymbol) else super().rms_norm(x, norm)

    def layer_norm(self, x: Array, norm: Norm) -> Array:
        """Normalize the residual stream, with either kind of norm."""
        width = len(norm.weight)
        with self._call(x) as call:
            source = call.input(x, width, True)
            buffer, y = call.output(x, width, True)
            call.add("norm", source, *_norm(call, norm), call.pointer(norm.bias), width, buffer)
        return y

    def linear(self, x: Array, weight: NativeLinear) -> Array:
        return self._product(x, weight)

    def stream_linear(self, x: Array, weight: NativeLinear) -> Array:
        return self._product(x, weight, of_stream=True)

    def _product(
        self,
        x: Array,
        weight: NativeLinear,
        activation: Activation | PlainActivation | None = None,
        *,
        norm: Norm | None = None,
        lora: Lora | None = None,
        of_stream: bool = False,
        wide: bool = False,
        width: int | None = None,
    ) -> Array:
        """Multiply activations, or the residual stream or its norm, and apply the activation."""
        with self._call(x, None if lora is None else lora.step) as call:
            call.keep(weight)
            source = call.input(x, weight.inputs, of_stream or self.runtime.wide)
            buffer, y = call.output(x, width or weight.width, wide or self.runtime.wide)
            kind, table = _ACTIVATIONS[activation], _lora_table(call, lora)
            call.add("linear", source, *_norm(call, norm), weight.handle, kind, table, buffer)
        return y

    def gate_up(self, x: Array, weight: NativeLinear) -> Array:
        """Multiply by gate and up, and restore the order of the interleaved vectors."""
        lanes = self.runtime.lanes
        vectors = -(-weight.width // lanes)
        y = self._product(x, weight, width=2 * vectors * lanes)
        sorted_ = y.reshape(len(y), vectors, 2, lanes).swapaxes(1, 2).reshape(len(y), 2, vectors * lanes)
        return sorted_[:, :, : weight.width].reshape(len(y), 2 * weight.width)

    def gated_linear(self, x: Array, weight: NativeLinear, activation: Activation) -> Array:
        """Multiply by interleaved gate and up, and combine them."""
        return self._product(x, weight, activation)

    def activate(self, x: Array, activation: PlainActivation) -> Array:
        width = x.width if isinstance(x, ProgramSymbol) else math.prod(x.shape[1:])
        with self._call(x) as call:
            source = call.input(x, width, self.runtime.wide)
            buffer, y = call.output(x, width, self.runtime.wide)
            call.add("activate", source, _ACTIVATIONS[activation], width, buffer)
        return y if isinstance(y, ProgramSymbol) else y.reshape(x.shape)

    def lora(self, y: Array, x: Array, lora: Lora) -> Array:
        """Add part by part; the fusions that models call do it in their kernels."""
        _refuse_symbols("lora", x)
        for place, rows in lora.step.lora_groups:
            delta = lora.deltas[place - 1]
            if delta is None:
                continue
            down, end, rank = self.linear(x[rows], delta.down), 0, delta.up.inputs
            for start, out in zip(delta.starts, delta.outs, strict=True):
                if start >= 0:
                    of_part = down[:, start : start + rank]
                    gated = delta.up.width < sum(delta.outs)
                    more = self.gate_up(of_part, delta.up) if gated else self.linear(of_part, delta.up)
                    y[rows, end : end + out] += more[:, end : end + out]
                end += out
        return y

    def write_kv(self, layer: Any, k: Array, v: Array, kv_slots: Array) -> None:
        _refuse_symbols("write_kv", k)
        keys, values = (
            np.ascontiguousarray(widened(each) if each.dtype == np.uint16 else each, np.float32) for each in (k, v)
        )
        slots, shape = np.ascontiguousarray(kv_slots, np.int32), layer.cache.shape
        k_count, v_count = (len(slots) * shape.num_kv_heads * width for width in _widths(shape))
        where = (address("k", keys, k_count, dtype=np.float32), address("v", values, v_count, dtype=np.float32))
        target = (layer.cache.handle, layer.index)
        invoke(self.runtime.library, "fd_kv_write", *target, *where, slots.ctypes.data, len(slots), what="write_kv")

    def paged_attention(self, q: Array, layer: Any, heads: Heads, step: StepInput) -> Array:
        """Attend over the blocks in place."""
        with self._call(q, step) as call:
            source = call.input(q, heads.num_heads * heads.head_dim, self.runtime.wide)
            buffer, y = call.output(q, heads.num_heads * (heads.latent or heads.head_dim), self.runtime.wide)
            geometry = ctypes.byref(_geometry(call, heads, step))
            call.add("attention", geometry, layer.cache.handle, layer.index, source, buffer)
        return y

    def prepare_heads(self, weight: npt.NDArray[np.float32]) -> NativeHeads:
        parts = [self.prepare_linear([RawTensor("F32", np.ascontiguousarray(head))]) for head in weight]
        handles = (ctypes.c_void_p * len(parts))(*[part.handle for part in parts])
        return NativeHeads(handles, parts[0].width, parts[0].inputs, self._arena)

    def absorb(self, q: Array, weight: NativeHeads, heads: Heads) -> Array:
        y = self._each_head(q, weight, heads.head_dim - heads.latent)
        return y if isinstance(y, ProgramSymbol) else y.reshape(len(y), heads.num_heads, heads.head_dim)

    def expand(self, x: Array, weight: NativeHeads, heads: Heads) -> Array:
        return self._each_head(x, weight)

    def _each_head(self, x: Array, weight: NativeHeads, kept: int = 0) -> Array:
        with self._call(x) as call:
            count = len(weight.handles)
            source = call.input(x, count * (weight.inputs + kept), self.runtime.wide)
            buffer, y = call.output(x, count * (weight.width + kept), self.runtime.wide)
            call.keep(weight)
            call.add("heads", source, weight.handles, count, kept, buffer)
        return y

    def recur(self, x: Array, recurrent: Recurrent, layer: Any, step: StepInput) -> Array:
        norm, of = recurrent.norm, recurrent
        with self._call(x, step) as call:
            source = call.input(x, recurrent.inputs, True)
            buffer, y = call.output(x, recurrent.outputs, self.runtime.wide)
            heads = recurrent.key_heads, recurrent.value_heads, recurrent.key_dim, recurrent.value_dim
            shape = RecurrentShape(
                get_args(RecurrentRule).index(recurrent.rule),
                *recurrent.conv.shape,
                *heads,
                call.table(step),
                0.0 if norm is None else norm.eps,
                *recurrent.time_limits,
                *(
                    call.pointer(each)
                    for each in (of.conv, of.conv_bias, of.decay, of.time_bias, None if norm is None else norm.weight)
                ),
                call.pointer(recurrent.skip),
            )
            call.add("recur", ctypes.byref(shape), layer.cache.handle, layer.index, source, buffer)
        return y

    def gate_heads(self, x: Array, gate: Array) -> Array:
        width = x.width if isinstance(x, ProgramSymbol) else math.prod(x.shape[1:])
        with self._call(x) as call:
            source, gates = call.input(x, width, self.runtime.wide), call.input(gate, width, True)
            buffer, y = call.output(x, width, self.runtime.wide)
            call.add("gate_heads", source, gates, width, buffer)
        return y

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        _refuse_symbols("moe", x)
        return self._moe(x, None, experts, activation, np.zeros_like(x))

    def logits_of(self, x: Array, head: NativeLinear, softcap: float | None) -> Array:
        """Project float32 states as the fusion of a forward projects them, with the same bits."""
        rows = np.arange(len(x), dtype=np.int32)
        with self._call(x, replace(NO_STEP, logits_rows=rows)) as call:
            call.keep(head)
            source = call.input(x, head.inputs, True)
            buffer, y = call.output(x, head.width, True)
            call.add("logits", source, *_norm(call, None), head.handle, softcap or 0.0, None, buffer)
        return y

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        count, vocabulary = logits.shape
        logits = _with_whole_rows(logits)
        tokens, peaks = np.empty(count, np.int32), np.empty(count, np.float32)
        numbers = None
        if not rows.all_greedy:
            numbers = uniform(rows.seeds, rows.positions)
        parameters = SampleRows(
            count,
            vocabulary,
            logits.ctypes.data,
            logits.strides[0] // logits.itemsize,
            address("temperature", rows.temperature, count, dtype=np.float32),
            address("top_k", rows.top_k, count),
            address("top_p", rows.top_p, count, dtype=np.float32),
            address("min_p", rows.min_p, count, dtype=np.float32),
            None if numbers is None else numbers.ctypes.data,
            tokens.ctypes.data,
            peaks.ctypes.data,
        )
        self._choose("sample", parameters)
        return tokens, peaks

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        logits = _with_whole_rows(logits)
        count, drafts, vocabulary = len(penalties.rows), len(penalties.draft_rows), logits.shape[1]
        counts = len(penalties.counts)
        parameters = PenaltyRows(
            count,
            drafts,
            vocabulary,
            len(logits),
            counts,
            logits.ctypes.data,
            logits.strides[0] // logits.itemsize,
            address("rows", penalties.rows, count),
            address("counts", penalties.counts, counts * vocabulary),
            address("counts_rows", penalties.counts_rows, count),
            address("draft_rows", penalties.draft_rows, drafts),
            address("draft_ids", penalties.draft_ids, drafts),
            address("repetition", penalties.repetition, count, dtype=np.float32),
            address("presence", penalties.presence, count, dtype=np.float32),
            address("frequency", penalties.frequency, count, dtype=np.float32),
        )
        self._choose("penalize", parameters)
        return logits

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        logits = _with_whole_rows(logits)
        count, vocabulary = len(rows), logits.shape[1]
        if tuple(bits.shape) != (count, -(-vocabulary // 32)):
            raise ValueError(f"bits {tuple(bits.shape)} do not match {count} rows of {vocabulary} tokens")
        given = count, vocabulary, len(logits), logits.ctypes.data, logits.strides[0] // logits.itemsize
        parameters = MaskRows(*given, address("rows", rows, count), address("bits", bits, bits.size))
        self._choose("mask_logits", parameters)
        return logits

    def _choose(self, what: str, parameters: ctypes.Structure) -> None:
        invoke(self.runtime.library, f"fd_{what}", ctypes.byref(parameters), self.runtime.team, what=what)

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
        if heads.joint_widths is not None and self.runtime.group is not None:
            return super().attention_inputs(x, norm, qkv, heads, layer, step, lora)
        queries = heads.query_rope or heads.rope
        with self._call(x, step) as call:
            call.keep(qkv)
            source = call.input(x, qkv.inputs, True)
            buffer, q = call.output(x, heads.num_heads * heads.head_dim, self.runtime.wide)
            call.add(
                "attention_inputs",
                source,
                *_norm(call, norm),
                qkv.handle,
                ctypes.byref(_geometry(call, heads, step)),
                *_norm(call, heads.q_norm),
                *_norm(call, heads.k_norm),
                *(call.pointer(each) for rope in (heads.rope, queries) for each in (rope.cos, rope.sin)),
                len(heads.rope.cos),
                layer.cache.handle,
                layer.index,
                _lora_table(call, lora),
                buffer,
            )
        return q if isinstance(q, ProgramSymbol) else q.reshape(len(q), heads.num_heads, heads.head_dim)

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
        with self._call(x, step) as call:
            call.keep(qkv, latent)
            source = call.input(x, qkv.inputs, True)
            projected, _rows = call.output(x, qkv.width, True)
            call.add("linear", source, *_norm(call, norm), qkv.handle, -1, _lora_table(call, lora), projected)
            asked = projected
            if latent.q_up is not None:
                asked, _queries = call.output(x, latent.q_up.width, self.runtime.wide)
                call.add("linear", projected, *_norm(call, latent.q_norm), latent.q_up.handle, -1, None, asked)
            buffer, q = call.output(x, heads.num_heads * heads.head_dim, self.runtime.wide)
            call.add("heads", asked, latent.absorb.handles, heads.num_heads, heads.head_dim - heads.latent, buffer)
            call.add(
                "write_latent",
                projected,
                qkv.width - heads.head_dim,
                *_norm(call, latent.norm),
                ctypes.byref(_geometry(call, heads, step)),
                *(call.pointer(each) for each in (heads.rope.cos, heads.rope.sin)),
                len(heads.rope.cos),
                layer.cache.handle,
                layer.index,
                buffer,
            )
        return q if isinstance(q, ProgramSymbol) else q.reshape(len(q), heads.num_heads, heads.head_dim)

    def recurrence(
        self,
        x: Array,
        norm: Norm | None,
        inputs: NativeLinear,
        recurrent: Recurrent,
        layer: Any,
        step: StepInput,
        lora: Lora | None = None,
    ) -> Array:
        projected = self._product(x, inputs, norm=norm, lora=lora, of_stream=True, wide=True)
        return self.recur(projected, recurrent, layer, step)

    def gated_attention(self, a: Array, x: Array, norm: Norm | None, gate: NativeLinear) -> Array:
        return self.gate_heads(a, self._product(x, gate, norm=norm, of_stream=True, wide=True))

    def project_residual(
        self, x: Array, weight: NativeLinear, residual: Array, post_norm: Norm | None = None, lora: Lora | None = None
    ) -> Array:
        """Add a projection to the residual stream, in place while recording."""
        with self._call(x, None if lora is None else lora.step) as call:
            call.keep(weight)
            group, starts = self.runtime.group_handle, self.runtime.starts(weight.width)
            if starts is None:
                source = call.input(x, weight.inputs, self.runtime.wide)
            else:
                held = x.width if isinstance(x, ProgramSymbol) else math.prod(x.shape[1:])
                part = call.input(x, held, self.runtime.wide)
                source, _whole = call.output(x, weight.inputs, self.runtime.wide)
                call.add("gather", group, self.runtime.starts(held), part, source)
            buffer, y = call.inout(residual, weight.width if starts is None else starts[-1])
            table = _lora_table(call, lora)
            call.add("project_residual", weight.handle, *_norm(call, post_norm), group, starts, source, table, buffer)
        return y

    def mlp_inputs(
        self, x: Array, norm: Norm | None, gate_up: NativeLinear, activation: Activation, lora: Lora | None = None
    ) -> Array:
        return self._product(x, gate_up, activation, norm=norm, lora=lora, of_stream=True)

    def plain_mlp_inputs(
        self, x: Array, norm: Norm | None, up: NativeLinear, activation: PlainActivation, lora: Lora | None = None
    ) -> Array:
        return self._product(x, up, activation, norm=norm, lora=lora, of_stream=True)

    def moe_residual(self, x: Array, norm: Norm, experts: Experts, activation: Activation) -> Array:
        return self._moe(x, norm, experts, kind=activation, residual=x, ranked=True)

    def logits(
        self, x: Array, norm: Norm, head: Array, rows: Array, softcap: float | None = None, *, split: bool = False
    ) -> Array:
        if not isinstance(x, ProgramSymbol):
            return super().logits(x, norm, head, rows, softcap, split=split)
        recorder = x.recorder
        recorder.keep(head)
        source = recorder.input(x, head.inputs, True)
        # Over shared memory, ranks write their parts into each other's logits; else the caller concatenates them.
        inside = split and self._group is not None and self._group.shares_memory
        buffer, y = recorder.output(x, head.width * (self.parallel.size if inside else 1), True, rows_of="logits")
        group = self.runtime.group_handle if inside else None
        recorder.add("logits", source, *_norm(recorder, norm), head.handle, softcap or 0.0, group, buffer)
        recorder.yields_logits = True
        recorder.logits_from_ranks, recorder.logits_in_parts = inside, split and not inside
        return y

    def _moe(
        self, x: Array, norm: Norm | None, experts: Experts, kind: Activation, residual: Array, *, ranked: bool = False
    ) -> Array:
        width = experts.gate_up[0].inputs
        count, divided = len(experts.router), ranked and self.parallel.expert_parallel
        handles = ctypes.c_void_p * count
        before, after = (None,) * experts.first, (None,) * (count - experts.first - len(experts.gate_up))
        gate_up, down = (
            handles(*before, *[e.handle for e in each], *after) for each in (experts.gate_up, experts.down)
        )
        sigmoid, weighs_inputs = experts.scoring == "sigmoid", experts.weighs_inputs
        routing = experts.top_k, experts.normalize, sigmoid, weighs_inputs, experts.groups, experts.top_groups
        geometry = MoeGeometry(count, *routing, experts.norm_floor, experts.weight_scale)
        shared = (experts.shared_gate_up, experts.shared_down)
        own = experts.down[0].width
        if divided:  # each rank adds up some columns
            columns = self.parallel.share(own)
            own = columns.stop - columns.start if experts.shared_down is None else experts.shared_down.width
        gated = [None if divided else experts.gate_up[0], experts.shared_gate_up]
        widths = [*(None if part is None else part.width for part in gated), own]
        widths.append(len(experts.gate_up) if divided else None)
        with self._call(x) as call:
            call.keep(experts)
            source = call.input(x, width, True if norm is not None else self.runtime.wide)
            buffer, y = call.inout(residual, width)
            call.add(
                "moe_residual",
                source,
                *_norm(call, norm),
                width,
                ctypes.byref(geometry),
                call.pointer(experts.router),
                call.pointer(experts.router_bias),
                call.pointer(experts.correction_bias),
                call.pointer(experts.shared_gate),
                gate_up,
                down,
                *[None if part is None else part.handle for part in shared],
                _ACTIVATIONS[experts.ungated or kind],
                self.runtime.group_handle if ranked else None,
                *[self.runtime.starts(each) if ranked and each is not None else None for each in widths],
                buffer,
            )
        return y

    def _call(self, x: Array, step: StepInput | None = None) -> AbstractContextManager[ProgramRecorder | Eager]:
        """Return the program for an operation on `x`: the one being recorded, or a new one."""
        return nullcontext(x.recorder) if isinstance(x, ProgramSymbol) else Eager(self.runtime, step)

    def compile(self, forward: Forward) -> Forward:
        """Return a forward that is recorded on its first call and then replayed."""
        return ProgramForward(self.runtime, forward)

    def compile_states(self, states: Forward) -> Forward:
        """Record the states likewise; encoders compute nothing else."""
        return self.compile(states)

    def compile_adapted(self, forward: Forward, cache: KVCache | None = None, before: Forward | None = None) -> Forward:
        """Record a forward whose operations apply the adapters of a step's rows."""
        return self.compile(forward)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A program, its output buffers and its input: the states of the previous stage, if any."""

    program: ProgramRecorder
    results: tuple[ProgramSymbol, ...]
    several: bool
    """True if the forward returns a tuple."""
    states: int | None


class ProgramForward:
    """Replays a model's forward as one program per KV cache; steps that begin with states have another.

    Those with further states of images, or tokens of several kinds, run operation by operation, as few steps have them.
    """

    def __init__(self, runtime: Runtime, forward: Forward) -> None:
        self._runtime = runtime
        self._forward = forward
        self._programs: weakref.WeakKeyDictionary[KVCache, dict[bool, _Recorded]] = weakref.WeakKeyDictionary()
        """By cache, and whether a step begins with states."""
        self._eager = False

    def __call__(self, step: StepInput, cache: KVCache) -> Array:
        """Return float32 logits [R, V], states [T, H] of a stage before the last, or a tuple of matrices [T, *]."""
        if self._eager or step.added or step.kinds:
            return self._forward(step, cache)
        programs, continued = self._programs.setdefault(cache, {}), step.states is not None
        if continued not in programs:
            try:
                programs[continued] = self._record(step, cache)
            except CaptureError as error:
                logger.warning("this model runs operation by operation, which is slower: %s", error)
                self._eager = True
                return self._forward(step, cache)
        recorded = programs[continued]
        program, result, tokens = recorded.program, recorded.results[0], len(step.token_ids)
        values = self._result(program, len(step.logits_rows) if program.yields_logits else tokens, result.width)
        program.bind(result.buffer, values)
        more = [self._runtime.matrix(tokens, each.width, each.wide) for each in recorded.results[1:]]
        for each, matrix in zip(recorded.results[1:], more, strict=True):
            program.bind(each.buffer, matrix)
        if recorded.states is not None:
            # The residual stream is updated in place, so a stage's output may be its input buffer.
            states: Array = step.states
            begin = values if recorded.states == result.buffer else self._runtime.matrix(tokens, states.shape[1], True)
            begin[:] = states
            program.bind(recorded.states, begin)
        program.run(step, tokens)
        if recorded.several:
            return values, *(each if each.dtype == np.float32 else widened(each) for each in more)
        group = self._runtime.group
        if group is None or not program.logits_in_parts:
            return values
        return group.all_gather(values)

    def _result(self, program: ProgramRecorder, rows: int, width: int) -> Array:
        """Return the output buffer of logits; those that ranks write for each other are in the slot of the last
        exchange."""
        group = self._runtime.group
        if group is None or not program.logits_from_ranks:
            return self._runtime.matrix(rows, width, True)
        padded = -(-width // ROW_ALIGN) * ROW_ALIGN
        return group.own_slot(program.exchanges, rows * padded).reshape(rows, padded)[:, :width]

    def program(self, cache: KVCache) -> ProgramRecorder:
        """Return the program of a cache that was run before; for timing."""
        return self._programs[cache][False].program

    def _record(self, step: StepInput, cache: KVCache) -> _Recorded:
        recorder = ProgramRecorder(self._runtime)
        symbols, states = symbolic_step(recorder), None
        if step.states is not None:
            states, x = recorder.output(None, step.states.shape[1], True)
            symbols = replace(symbols, states=x)
        result = self._forward(symbols, cache)
        results = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(each, ProgramSymbol) for each in results):
            raise CaptureError("the forward does not return results of operations")
        return _Recorded(recorder, results, isinstance(result, tuple), states)


def _norm(call: ProgramRecorder | Eager, norm: Norm | None) -> tuple[int | None, float]:
    return _NO_NORM if norm is None else (call.pointer(norm.weight), norm.eps)


def _lora_table(call: ProgramRecorder | Eager, lora: Lora | None) -> Any:
    """Return the adapters' terms of a linear in the kernels' layout; the program holds a reference."""
    if lora is None:
        return None
    deltas, ends = (LoraDelta * len(lora.deltas))(), (0,)
    for entry, delta in zip(deltas, lora.deltas, strict=True):
        if delta is not None:
            entry.down, entry.up = delta.down.handle, delta.up.handle
            entry.starts[: len(delta.starts)] = delta.starts
            ends = tuple(int(end) // call.runtime.lanes for end in np.cumsum(delta.outs)[:-1])
    # The last part has no end.
    table = LoraTable(len(deltas), (*ends, *[2**31 - 1] * 3)[:3], deltas)
    call.keep(lora.deltas, deltas, table)
    return ctypes.byref(table)


def _geometry(call: ProgramRecorder | Eager, heads: Heads, step: StepInput) -> AttentionShape:
    return AttentionShape(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.window or 0,
        heads.chunked,
        heads.rope.cos.shape[1],
        heads.rope.interleaved,
        heads.causal,
        heads.norms_rotated,
        heads.joint_widths is not None,
        call.table(step),
        heads.latent,
        heads.scale,
        heads.softcap or 0.0,
        call.pointer(heads.sinks),
    )


def _with_whole_rows(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return logits whose rows are contiguous, as kernels change them."""
    return logits if logits.strides[1] == logits.itemsize else np.ascontiguousarray(logits)


def _widths(shape: KVShape) -> tuple[int, int]:
    """Return the elements of a key and a value of one head, as they are written."""
    return shape.head_dim - shape.latent, shape.latent or shape.head_dim


def _refuse_symbols(operation: str, array: Array) -> None:
    if isinstance(array, ProgramSymbol):
        raise CaptureError(f"the forward calls {operation} outside its fusion, which only eager packs support")
