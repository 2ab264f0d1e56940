"""Correct variants of the reference backend, and the plugin that registers them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fd_core.backends.cpu import ReferenceBackend
from fd_core.hookspecs import CONTRACT_VERSION, Entry, hookimpl
from fd_core.ops.contract import DESCRIBED_BY, Ops
from fd_core.ops.numpy.kv_8bit import dequantize_kv
from fd_core.ops.numpy.ops import NumpyKVCache, NumpyLinear, NumpyOps

FD_CONTRACT = CONTRACT_VERSION
_ROUNDED = ("embedding", "rms_norm", "linear", "gate", "rope", "paged_attention", "moe", "add")
"""Operations whose results are activations."""


def _rounded(name: str) -> Callable[..., Any]:
    right = getattr(NumpyOps, name)

    def method(self: Any, *arguments: Any, **more: Any) -> Any:
        with np.errstate(over="ignore"):
            return right(self, *arguments, **more).astype(np.float16).astype(np.float32)

    return method


class Float16KVCache(NumpyKVCache):
    def __init__(self, shape, num_blocks):
        super().__init__(shape, num_blocks)
        if shape.dtype == "auto":
            self._data = self._data.astype(np.float16)


class Float16Ops(NumpyOps):
    """Weights, activations and KV in float16; sums in float32."""

    dtype = "float16"
    vars().update({name: getattr(NumpyOps, name) for name in DESCRIBED_BY})
    table_formats = frozenset()
    vars().update({name: _rounded(name) for name in _ROUNDED})

    def prepare_embedding(self, weight):
        return weight.to_float32().astype(np.float16).astype(np.float32)

    def prepare_linear(self, parts, biases=None, *, gated=False):
        right = super().prepare_linear(parts, biases, gated=gated)
        return NumpyLinear(right.weight.astype(np.float16).astype(np.float32), right.bias)

    def allocate_kv(self, shape, num_blocks):
        return Float16KVCache(shape, num_blocks)

    def logits_of(self, x, head, softcap):
        logits = NumpyOps.linear(self, x, head)
        return logits if softcap is None else np.tanh(logits / np.float32(softcap)) * np.float32(softcap)


class BlockedSumsOps(NumpyOps):
    """Sums blocks of 7 elements, from the last one, and a context in chunks of 5 tokens."""

    weight_formats, kv_dtypes = NumpyOps.weight_formats, NumpyOps.kv_dtypes
    encodes = chunks = latents = False
    sinks = True

    def linear(self, x, weight):
        y = np.zeros((len(x), len(weight.weight)), np.float32)
        for begin in reversed(range(0, x.shape[1], 7)):
            y += x[:, begin : begin + 7] @ weight.weight[:, begin : begin + 7].T
        return y if weight.bias is None else y + weight.bias

    def paged_attention(self, q, layer, heads, step):
        output = np.empty((len(q), heads.num_heads * heads.head_dim), np.float32)
        for row, context in enumerate(step.context_len.tolist()):
            first, end = int(step.query_start[row]), int(step.query_start[row + 1])
            held = layer[:, step.block_tables[row, : -(-context // layer.shape[2])]]
            held = held.reshape(2, -1, heads.num_kv_heads, layer.shape[-1])[:, :context]
            # Blocks before the window may be those of others, whose NaN no weight of 0 hides.
            unseen = np.arange(context)[:, None, None] < heads.first_key(context - (end - first))
            k, v = (np.where(unseen, np.float32(0), each) for each in dequantize_kv(held))
            output[first:end] = _online_attention(q[first:end], k, v, heads)
        return output


def _online_attention(q: Any, k: Any, v: Any, heads: Any) -> Any:
    """Rescale running sums after each chunk of the context, see Milakov and Gimelshein (2018)."""
    count, context = len(q), len(k)
    grouped = q.reshape(count, heads.num_kv_heads, -1, heads.head_dim)
    place = np.arange(context - count, context)[:, None]
    peak = np.full((*grouped.shape[1:3], count, 1), -1e30, np.float32)
    total, sums = np.zeros_like(peak), np.zeros((*peak.shape[:3], heads.head_dim), np.float32)
    if heads.sinks is not None:
        peak, total = peak * 0 + heads.sinks.reshape(heads.num_kv_heads, -1, 1, 1), total + 1
    for begin in range(0, context, 5):
        part = slice(begin, begin + 5)
        scores = np.einsum("qhgd,lhd->hgql", grouped, k[part]) * np.float32(heads.scale)
        if heads.softcap is not None:
            scores = np.tanh(scores / np.float32(heads.softcap)) * np.float32(heads.softcap)
        distance = place - np.arange(context)[part]
        hidden = (distance < 0) | (distance >= (heads.window or context + 1))
        scores[..., hidden] = -np.inf
        new = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights, kept = np.exp(scores - new), np.exp(peak - new)
        total = total * kept + weights.sum(axis=-1, keepdims=True)
        values = np.einsum("hgql,lhd->hgqd", weights, v[part])
        sums, peak = sums * kept + values, new
    return (sums / total).transpose(2, 0, 1, 3).reshape(count, -1)


class SlowOps(NumpyOps):
    """Ten times slower: each layer takes milliseconds."""

    def linear(self, x, weight):
        threading.Event().wait(0.001)  # as a driver blocks
        return super().linear(x, weight)


class SeparateMemoryOps(NumpyOps):
    """A device with memory of its own: arrays are copied there and back."""

    on_host, queues = False, True

    def from_host(self, array):
        return np.array(array)

    to_host = from_host


def _delegated(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **more: getattr(self.inner, name)(*arguments, **more)


class DelegatingOps(Ops):
    """Has another pack instead of inheriting from it."""

    name, framework, dtype, on_host = "delegating", "numpy", "float32", True
    weight_formats, dequantizes_weights, kv_dtypes = NumpyOps.weight_formats, True, NumpyOps.kv_dtypes

    def __init__(self):
        self.inner = NumpyOps()

    vars().update({name: _delegated(name) for name in Ops.__abstractmethods__})

    def join(self, group):
        self.inner.join(group)
        self.parallel = self.inner.parallel

    def cut(self, stage):
        self.inner.cut(stage)
        self.stage = stage

    all_reduce, all_gather = _delegated("all_reduce"), _delegated("all_gather")


def _backend(name: str, pack: type[Ops], *dtypes: str, limits: dict[str, str] | None = None) -> type:
    """Return a backend whose pack computes in one of `dtypes`, the first by default."""

    def make_ops(self: Any) -> Ops:
        self.requested_dtype(*dtypes)
        return pack()

    absent = {"bfloat16": "it computes in another precision", **(limits or {})}
    body = {"name": name, "make_ops": make_ops, "limits": absent, "__module__": __name__}
    return type(pack.__name__.removesuffix("Ops") + "Backend", (ReferenceBackend,), body)


NO_FLOAT32 = {"float32": "its device computes in half precision only"}
BACKENDS = {
    backend.name: backend
    for backend in (
        _backend("right_float16", Float16Ops, "float16", limits=NO_FLOAT32),
        _backend("right_blocked_sums", BlockedSumsOps, "float32"),
        _backend("right_slow", SlowOps, "float32"),
        _backend("right_separate_memory", SeparateMemoryOps, "float32"),
        _backend("right_delegating", DelegatingOps, "float32"),
    )
}
globals().update({backend.__name__: backend for backend in BACKENDS.values()})


@hookimpl
def fd_register_backends() -> list[Entry]:
    return [Entry(name, f"{__name__}:{backend.__name__}", "a correct variant") for name, backend in BACKENDS.items()]
