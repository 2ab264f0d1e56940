"""Attention of models of `transformers` over paged KV, through its attention interface.

The interface names an attention function in the config; see "Attention Interface" in its documentation. Two names are
registered: `PROBE` records the calls of a forward pass, `NAME` computes them. The nth call of a forward is layer n of
the model. No mask is built for `NAME`, because `transformers` has no mask function of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from fd_core.errors import ModelError
from fd_core.models.fallback.arrays import as_array, as_tensor
from fd_core.models.layer_groups import places_of
from fd_core.ops.contract import Array, Heads, KVCache, Ops, Rope, StepInput

NAME: Final = "fd_core"
PROBE: Final = "fd_core_probe"
_REFUSED: Final = {
    "s_aux": "attention sinks",
    "position_bias": "biases of positions, such as ALiBi",
    "head_mask": "masks of heads",
}
"""Arguments of attention functions that paged attention lacks."""
_LONGEST: Final = 1 << 20
"""Context for which masks are examined."""


class Unsupported(ModelError):
    """A model does something that paged attention does not compute."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """A causal mask, in the place of one of `transformers`."""

    window: int | None
    """As in `Heads`."""


def _describe_mask(*_: Any, mask_function: Any, **__: Any) -> _Mask:
    """Return the mask of a function from batch, head, query and key to whether a query attends to a key."""
    zero, keys = torch.tensor(0), torch.arange(_LONGEST)
    window = int(mask_function(zero, zero, torch.tensor(_LONGEST - 1), keys).sum())
    for query in (0, _LONGEST // 3, _LONGEST // 2, _LONGEST - 1):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(mask_function(zero, zero, torch.tensor(query), keys), expected):
            raise Unsupported("its attention is not causal, or neither full nor over a sliding window")
    return _Mask(None if window == _LONGEST else window)


@dataclass(frozen=True, slots=True)
class _Call:
    heads: Heads
    value_dim: int


class AttentionCalls:
    """Attention calls of a model's forward, in order. One forward at a time."""

    def __init__(self, model: Any, ops: Ops) -> None:
        """Become the attention of all modules of a model."""
        self._ops = ops
        self.recorded: list[_Call] = []
        self._next = 0
        self._steps: list[StepInput] = []
        """With the places of each group of layers; none between forwards."""
        self._cache: KVCache | None = None
        for module in model.modules():
            module.fd_attention = self

    @property
    def heads(self) -> Heads:
        """The geometry of all calls. Raises `Unsupported` if they differ in keys and values, or there are none."""
        if not self.recorded:
            raise Unsupported("none of its layers uses the attention interface")
        if len(sizes := {(call.heads.num_kv_heads, call.heads.head_dim) for call in self.recorded}) > 1:
            raise Unsupported(f"its layers differ in (KV heads, head size): {sorted(sizes)}")
        return self.recorded[0].heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of all calls."""
        return tuple(call.heads.window for call in self.recorded)

    def record(self, module: Any, query: Array, key: Array, value: Array, mask: Any, **more: Any) -> Array:
        """Record a call, and return an output of zeros. Raises `Unsupported`."""
        if beyond := [what for name, what in _REFUSED.items() if more.get(name) is not None]:
            raise Unsupported(f"it uses {', '.join(beyond)}")
        if key.shape[2] != query.shape[2]:
            raise Unsupported("its queries attend to other tokens than its keys: cross-attention")
        if False in (more.get("is_causal"), getattr(module, "is_causal", None)):
            raise Unsupported("its attention is bidirectional")
        if not isinstance(mask, _Mask | None):
            raise Unsupported("it builds its own attention masks")
        _, num_heads, _, key_dim = query.shape
        head_dim = max(key_dim, value.shape[3])
        scale, none = more.get("scaling"), self._ops.prepare_vector(np.zeros((1, head_dim // 2), np.float32))
        heads = Heads(
            num_heads,
            key.shape[1],
            head_dim,
            scale=key_dim**-0.5 if scale is None else float(scale),
            rope=Rope(none, none),
            window=more.get("sliding_window") if mask is None else mask.window,
            softcap=more.get("softcap"),
        )
        self.recorded.append(_Call(heads, value.shape[3]))
        return query.new_zeros(1, query.shape[2], num_heads, value.shape[3])

    def begin(self, step: StepInput, cache: KVCache) -> None:
        """Compute the calls of the next forward with a step."""
        self._steps = [step.of_group(group) for group in range(cache.shape.groups.count)]
        self._cache, self._next = cache, 0

    def end(self) -> None:
        """Check that the forward made all calls."""
        self._steps, self._cache = [], None
        if self._next != len(self.recorded):
            raise RuntimeError(f"the model called attention {self._next} times, expected {len(self.recorded)}")

    def compute(self, query: Array, key: Array, value: Array) -> Array:
        """Write keys and values [1, nkv, T, d], and attend: queries [1, nh, T, d] to [1, T, nh, d]."""
        if self._cache is None or self._next == len(self.recorded):
            raise RuntimeError("the model called attention more often than before")
        group, index = places_of(self.windows, self._cache.shape.groups)[self._next]
        call, layer, step, ops = self.recorded[self._next], self._cache.layer(index), self._steps[group], self._ops
        self._next += 1
        q, k, v = (self._flat(each, call.heads.head_dim) for each in (query, key, value))
        ops.write_kv(layer, k, v, step.kv_slots)
        output = as_tensor(ops.attention(q, call.heads, layer, step), query.dtype)
        return output.unflatten(1, (call.heads.num_heads, -1))[None, :, :, : call.value_dim]

    def _flat(self, x: Array, head_dim: int) -> Array:
        """Return [1, heads, T, d] as the pack's [T, heads, head_dim], with zeros after the d elements."""
        x = x if x.shape[3] == head_dim else functional.pad(x, (0, head_dim - x.shape[3]))
        return as_array(x[0].transpose(0, 1).contiguous(), self._ops)


def _record(
    module: Any, query: Array, key: Array, value: Array, attention_mask: Any, **more: Any
) -> tuple[Array, None]:
    return module.fd_attention.record(module, query, key, value, attention_mask, **more), None


def _compute(module: Any, query: Array, key: Array, value: Array, *_: Any, **__: Any) -> tuple[Array, None]:
    return module.fd_attention.compute(query, key, value), None


AttentionInterface.register(PROBE, _record)
AttentionInterface.register(NAME, _compute)
AttentionMaskInterface.register(PROBE, _describe_mask)
