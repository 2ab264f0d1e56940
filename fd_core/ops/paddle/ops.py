"""The Paddle pack: eager, for every device that Paddle has; float32 on the processor, bfloat16 as well elsewhere.

The vendors of XPU, MetaX and others compute with Paddle: a backend of theirs is this class with the name of a device,
and overrides where the hardware has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Activation, Array, Experts, Heads, KVCache, KVShape, Norm, Ops, Rope, StepInput
from fd_core.ops.paddle.attention import PaddleAttentionPlan, PaddleKVCache, PaddleLayer, words_of
from fd_core.ops.paddle.framework import paddle, tensor_of
from fd_core.ops.paddle.sampling import PaddleSampling
from fd_core.ops.weights import RawTensor, Weight

functional = paddle.nn.functional

_DTYPES = {"float32": paddle.float32, "bfloat16": paddle.bfloat16}


@dataclass(frozen=True, slots=True)
class PaddleLinear:
    """A prepared linear: weight [out, in] and bias [out] in the pack's dtype."""

    weight: Array
    bias: Array | None


class PaddleOps(PaddleSampling, Ops):
    """Operations on Paddle tensors of one device; the device becomes the process's.

    `device` is Paddle's name, such as `cpu`, `gpu`, `xpu` or that of a custom device, `metax_gpu`. Asking Paddle for a
    GPU that is not there ends the process, so look before. Nothing but `to_host`, the experts' sizes and, once a
    step, the attention plan waits for the device. `longest_sort` is how many entries the device sorts at once, None for
    any number; where there is a limit, filters search for their thresholds instead of sorting the vocabulary.
    """

    name = "paddle"
    framework = "paddle"

    def __init__(self, dtype: str = "float32", device: str = "cpu", longest_sort: int | None = None) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        if dtype != "float32" and device == "cpu":
            raise ValueError(f"Paddle multiplies no {dtype} matrices on the processor; use float32")
        self.dtype = dtype
        self.device = device
        self.longest_sort = longest_sort
        self.place = paddle.set_device(device)
        self.paddle_dtype = _DTYPES[dtype]
        self._planned: tuple[StepInput, PaddleAttentionPlan] | None = None

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Copy a numpy array; uint64 becomes int64 with the same bits."""
        return tensor_of(array.view(np.int64) if array.dtype == np.uint64 else array, self.place)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Copy a tensor; bfloat16 becomes float32."""
        values: npt.NDArray[Any] = (array.astype("float32") if array.dtype == paddle.bfloat16 else array).numpy()
        return values

    def prepare_vector(self, values: npt.NDArray[np.float32]) -> Array:
        """Copy to float32."""
        return self.from_host(np.asarray(values, np.float32))

    def prepare_embedding(self, weight: RawTensor) -> Array:
        """Copy to the pack's dtype."""
        return self._stack([weight])

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        """Stack the parts in the order given."""
        return PaddleLinear(self._stack(parts), None if biases is None else self._stack(biases))

    def tied_head(self, embedding: Array, weight: Weight) -> Any:
        """Share the embedding; a pack with another form of linear weights overrides this as well."""
        return PaddleLinear(embedding, None)

    def _stack(self, parts: Sequence[Weight]) -> Array:
        tensors = [self.from_host(part.to_float32()).astype(self.paddle_dtype) for part in parts]
        return tensors[0] if len(tensors) == 1 else paddle.concat(tensors)

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        """Allocate zeros in the pack's dtype."""
        return PaddleKVCache(shape, num_blocks, self.paddle_dtype, self.place)

    def embedding(self, table: Array, token_ids: Array, scale: float = 1.0) -> Array:
        """Look up rows. Like the models that have one, rounds the scale to the pack's dtype."""
        x = functional.embedding(token_ids, table)
        return x if scale == 1.0 else x * paddle.full([], scale, self.paddle_dtype, device=self.place)

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """Divide the last axis by its root mean square, in float32."""
        wide = x.astype("float32")
        inverse = paddle.rsqrt(wide.square().mean(axis=-1, keepdim=True) + norm.eps)
        return (wide * inverse * norm.weight).astype(x.dtype)

    def linear(self, x: Array, weight: Any) -> Array:
        """Multiply by the transposed weight and add the bias."""
        y = paddle.matmul(x, weight.weight, transpose_y=True)
        return y if weight.bias is None else y + weight.bias

    def gate(self, gate_up: Array, activation: Activation) -> Array:
        """Activate the first half and multiply."""
        if activation == "silu":
            return functional.swiglu(gate_up)
        gate, up = paddle.chunk(gate_up, 2, axis=-1)
        return functional.gelu(gate, approximate=activation == "gelu_tanh") * up

    def split_heads(self, qkv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        """Cut queries, keys and values apart."""
        split = qkv.reshape([qkv.shape[0], -1, heads.head_dim])
        q, k, v = paddle.split(split, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], axis=1)
        return q, k, v

    def rope(self, x: Array, rope: Rope, positions: Array) -> Array:
        """Rotate pairs of elements, in float32."""
        cos = paddle.index_select(rope.cos, positions).unsqueeze(1)
        sin = paddle.index_select(rope.sin, positions).unsqueeze(1)
        rotary = 2 * cos.shape[-1]
        wide = x[..., :rotary].astype("float32")
        if rope.interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = paddle.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(wide.shape)
        else:
            a, b = paddle.chunk(wide, 2, axis=-1)
            turned = paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turned = turned.astype(x.dtype)
        return turned if rotary == x.shape[-1] else paddle.concat([turned, x[..., rotary:]], axis=-1)

    def write_kv(self, layer: PaddleLayer, k: Array, v: Array, kv_slots: Array) -> None:
        """Scatter keys and values to their slots, as words: not every device scatters bfloat16."""
        paddle.scatter_(layer.key_words, kv_slots, words_of(k))
        paddle.scatter_(layer.value_words, kv_slots, words_of(v))

    def paged_attention(self, q: Array, layer: PaddleLayer, heads: Heads, step: StepInput) -> Array:
        """Attend over gathered keys and values; what the step's metadata decides is computed once for all layers."""
        if self._planned is None or self._planned[0] is not step:
            self._planned = (step, PaddleAttentionPlan(step, layer.block_size, self.place))
        return self._planned[1].attend(q, layer, heads)

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        """Run each expert on the tokens that chose it."""
        most = len(x) if self.longest_sort is None else self.longest_sort // experts.top_k
        if len(x) > most:
            parts = [x[begin : begin + most] for begin in range(0, len(x), most)]
            return paddle.concat([self.moe(part, experts, activation) for part in parts])
        chosen, weights = _route(x, experts)
        # Places of the [T, top_k] choices, grouped by expert; reading the group sizes waits for the device.
        places = paddle.argsort(chosen.flatten(), stable=True)
        tokens = places // experts.top_k
        inputs = paddle.index_select(x, tokens)
        shares = paddle.index_select(weights.flatten(), places).unsqueeze(1).astype(x.dtype)
        ends = paddle.bincount(chosen.flatten(), minlength=len(experts.gate_up)).numpy().cumsum().tolist()
        output = paddle.zeros_like(x)
        for expert, (start, end) in enumerate(pairwise([0, *ends])):
            if start < end:
                inner = self.gated_linear(inputs[start:end], experts.gate_up[expert], activation)
                y = self.linear(inner, experts.down[expert]) * shares[start:end]
                paddle.index_add_(output, tokens[start:end], 0, y)
        return self.add_shared(output, x, experts, activation)

    def add(self, x: Array, y: Array) -> Array:
        """Add."""
        return x + y

    def gather_rows(self, x: Array, rows: Array) -> Array:
        """Index the first axis."""
        return paddle.index_select(x, rows)

    def logits_of(self, x: Array, head: Any, softcap: float | None) -> Array:
        """Project to the vocabulary."""
        logits = self.linear(x, head).astype("float32")
        return logits if softcap is None else paddle.tanh(logits / softcap) * softcap


def _route(x: Array, experts: Experts) -> tuple[Array, Array]:
    """Return the chosen experts of each token int64[T, top_k] and their weights float32[T, top_k]."""
    scores = functional.softmax(paddle.matmul(x.astype("float32"), experts.router, transpose_y=True), axis=-1)
    ranked = scores if experts.correction_bias is None else scores + experts.correction_bias
    chosen = paddle.argsort(ranked, axis=-1, descending=True, stable=True)[:, : experts.top_k]
    weights = paddle.take_along_axis(scores, chosen, axis=1)
    if experts.normalize:
        weights = weights / weights.sum(axis=-1, keepdim=True).clip(min=experts.norm_floor)
    return chosen, weights
