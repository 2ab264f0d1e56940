"""Operations without a kernel, composed of torch operations: correct, and slow.

`composed_parts` names those of a model, and which of them keep its decodes out of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from fd_core.models.families.spec import DecoderSpec
from fd_core.ops.contract import FLOAT_BYTES, MAX_JOURNAL, Array, Heads, HostStep, Recurrent, StepInput
from torch.nn import functional

from fd_gpu_cuda.kernel_table import Kernels
from fd_gpu_cuda.kv_cache import CudaLayer


class ComposedPart(NamedTuple):
    """A part of a model without a kernel."""

    name: str
    captured: bool
    """False if it needs lengths on the host, so that decodes are not replayed."""


def composed_parts(spec: DecoderSpec, kernels: Kernels, block_size: int, longest: int) -> tuple[ComposedPart, ...]:
    """Return the parts of a model that are composed for contexts of up to `longest` tokens."""
    chunks = {each.window or 0 for each in spec.attention if each.chunked and (each.window or 0) < longest}
    parts = {
        ComposedPart("recurrent layers", captured=False): bool(spec.recurrent) and kernels.recur is None,
        ComposedPart("attention in both directions", captured=False): not spec.causal,
        ComposedPart("encoders of images", captured=True): spec.images is not None,
        ComposedPart("attention within chunks", not any(each % block_size for each in chunks)): bool(chunks),
    }
    return tuple(part for part, needed in parts.items() if needed)


def rows_of_chunks(step: StepInput, heads: Heads, block_size: int) -> tuple[Heads, StepInput]:
    """Return a uniform step as rows of one token each, whose contexts begin with its chunk.

    A chunk must be a multiple of `block_size`.
    """
    width = step.max_query
    count = len(step.context_len) * width
    index = torch.arange(count + 1, dtype=torch.int32, device=step.context_len.device)
    context = step.context_len.repeat_interleave(width) - (width - 1) + index[:-1] % width
    first = heads.first_key(context - 1)
    tables = step.block_tables.repeat_interleave(width, 0)
    entries = first[:, None] // block_size + torch.arange(tables.shape[1], dtype=torch.int32, device=index.device)
    tables = tables.gather(1, entries.clamp(max=tables.shape[1] - 1).long())
    rows = replace(step, query_start=index, context_len=context - first, block_tables=tables, max_query=1, host=None)
    return replace(heads, window=None, chunked=False), rows


class DeviceStates:
    """States of one recurrent layer in the bytes of its keys and values, in canonical order; see `Recurrent`."""

    def __init__(self, layer: CudaLayer, recurrent: Recurrent) -> None:
        blocks = len(layer.keys) // layer.block_size

        def part(array: Array) -> Array:
            return array.view(torch.uint8).view(blocks, layer.block_size * layer.keys.shape[1], -1)

        sides = (layer.keys, layer.key_scales), (layer.values, layer.value_scales)
        self._sides = [[part(x), *([] if scales is None else [part(scales[..., None])])] for x, scales in sides]
        self.state, self.journal = recurrent.sizes
        room = sum(each[0].numel() for side in self._sides for each in side) // FLOAT_BYTES - self.state
        self.drafts = min(MAX_JOURNAL, room // self.journal)
        """Tokens that the journal holds."""
        self._bytes = (self.state + self.drafts * self.journal) * FLOAT_BYTES

    def read(self, blocks: Array) -> tuple[Array, Array, Array]:
        """Return, of blocks int64[n], the consumed tokens int32[n], the states, and the journals [n, drafts, ...]."""
        values = self._of(blocks)[:, : self._bytes].contiguous().view(torch.float32)
        journals = values[:, self.state :].unflatten(1, (self.drafts, self.journal))
        return values[:, 0].contiguous().view(torch.int32), values[:, 1 : self.state], journals

    def write(self, blocks: Array, consumed: Array, states: Array, journals: Array) -> None:
        """Write them to distinct blocks; journals [n, up to drafts, ...]."""
        head = consumed.view(torch.float32)[:, None]
        content = torch.cat((head, states, journals.flatten(1)), 1).view(torch.uint8)
        whole, begin = self._of(blocks), 0
        whole[:, : content.shape[1]] = content
        for side in self._sides:
            widths = [each.shape[2] for each in side]
            end = begin + side[0].shape[1] * sum(widths)
            pieces = whole[:, begin:end].unflatten(1, (-1, sum(widths))).split(widths, 2)
            for each, piece in zip(side, pieces, strict=True):
                each.index_copy_(0, blocks, piece)
            begin = end

    def _of(self, blocks: Array) -> Array:
        return torch.cat(
            [torch.cat([each.index_select(0, blocks) for each in side], 2).flatten(1) for side in self._sides], 1
        )


def recur(
    x: Array, recurrent: Recurrent, layer: CudaLayer, step: StepInput, from_host: Callable[[npt.NDArray[Any]], Array]
) -> Array:
    """Compute `Ops.recur`, token by token, for all rows at once.

    With metadata on the host, nothing waits for the device.
    """

    def upload(values: npt.NDArray[Any]) -> Array:
        return from_host(values.astype(np.int64))

    device = step.query_start, step.context_len, step.block_tables
    host = step.host or HostStep(*(each.cpu().numpy() for each in device))
    states, wide, size = DeviceStates(layer, recurrent), x.float(), layer.block_size
    inputs = _journaled(wide, recurrent)
    counts = np.diff(host.query_start).astype(np.int64)
    ends = host.context_len.astype(np.int64)
    starts, rows = ends - counts, np.arange(len(ends))
    consumed, state, journals = states.read(upload(host.block_tables[rows, np.maximum(starts - 1, 0) // size]))
    begun = upload(starts) > 0
    missing = torch.where(begun, upload(starts) - consumed, 0)
    valid = (missing >= 0) & (missing <= states.drafts)
    state = torch.where(begun[:, None], state, 0.0)
    for place in range(states.drafts):
        _, found = _step(recurrent, state, torch.where(begun[:, None], journals[:, place], 0.0))
        state = torch.where(((place < missing) & valid)[:, None], found, state)
    # A row that does not follow its state gets outputs that are not finite.
    state = torch.where(valid[:, None], state, torch.nan)
    outputs = wide.new_empty(len(x), recurrent.outputs)
    settled = np.maximum(starts + 1, ends - states.drafts)
    for place in range(int(counts.max(initial=0))):
        live = np.flatnonzero(counts > place)
        given, index, at = upload(host.query_start[live] + place), upload(live), starts[live] + place + 1
        y, found = _step(recurrent, state.index_select(0, index), inputs.index_select(0, given))
        outputs.index_copy_(0, given, y)
        state.index_copy_(0, index, found)
        done = (at == settled[live]) | ((at % size == 0) & (at < settled[live]))
        row, at = live[done], at[done]
        if len(row):
            # The last state goes to the entries of all later tokens as well.
            spans = np.where(at == settled[row], (ends[row] - 1) // size - (at - 1) // size, 0) + 1
            entry = np.arange(spans.sum()) - np.repeat(spans.cumsum() - spans, spans)
            row, at = np.repeat(row, spans), np.repeat(at, spans)
            later = host.query_start[row, None] + place + 1 + np.arange(states.drafts)
            later = np.minimum(later, host.query_start[row + 1, None] - 1)
            states.write(
                upload(host.block_tables[row, (at - 1) // size + entry]),
                upload(at).int(),
                state.index_select(0, upload(row)),
                inputs[upload(later)],
            )
    return _finished(outputs, wide, recurrent).to(x.dtype)


def _journaled(x: Array, recurrent: Recurrent) -> Array:
    """Return the inputs of the convolution, and the scalars of each head: [T, journal]."""
    if recurrent.rule == "gate":
        b, _, c = x.chunk(3, dim=1)
        return b * c
    first, end = recurrent.outputs if recurrent.rule == "scan" else 0, recurrent.channels + recurrent.outputs
    return torch.cat((x[:, first : first + recurrent.channels], x[:, end:]), dim=1)


def _step(recurrent: Recurrent, state: Array, token: Array) -> tuple[Array, Array]:
    """Consume a token of each row: states [n, ...], journal's form [n, journal] -> outputs [n, outputs], states."""
    taps, channels = recurrent.conv.shape
    before = state[:, : (taps - 1) * channels].unflatten(1, (taps - 1, channels))
    window = torch.cat((before, token[:, None, :channels]), dim=1)
    y = (window * recurrent.conv).sum(1)
    if recurrent.conv_bias is not None:
        y = y + recurrent.conv_bias
    if recurrent.rule == "gate":
        return y, window[:, 1:].flatten(1)
    matrices = state[:, (taps - 1) * channels :].unflatten(1, (recurrent.value_heads, recurrent.key_dim, -1))
    scalars = token[:, channels:].unflatten(1, (-1, recurrent.value_heads))
    y, matrices = (_delta if recurrent.rule == "delta" else _scan)(recurrent, functional.silu(y), scalars, matrices)
    return y, torch.cat((window[:, 1:].flatten(1), matrices.flatten(1)), dim=1)


def _delta(of: Recurrent, qkv: Array, scalars: Array, matrices: Array) -> tuple[Array, Array]:
    width = of.key_heads * of.key_dim
    q, k, v = qkv.split([width, width, of.outputs], dim=1)
    q, k = (_shared(_unit(each.unflatten(1, (of.key_heads, -1))), of) for each in (q, k))
    matrices = matrices * _decays(of, _softplus(scalars[:, 1] + of.time_bias))
    change = v.unflatten(1, (of.value_heads, -1)) - (k * matrices).sum(2)
    matrices = matrices + k * (scalars[:, 0].sigmoid()[..., None] * change)[:, :, None]
    return (q * of.key_dim**-0.5 * matrices).sum(2).flatten(1), matrices


def _scan(of: Recurrent, vkq: Array, scalars: Array, matrices: Array) -> tuple[Array, Array]:
    width = of.key_heads * of.key_dim
    v, k, q = vkq.split([of.outputs, width, width], dim=1)
    v = v.unflatten(1, (of.value_heads, -1))
    k, q = (_shared(each.unflatten(1, (of.key_heads, -1)), of) for each in (k, q))
    time = _softplus(scalars[:, 0] + of.time_bias).clamp(*of.time_limits)
    matrices = matrices * _decays(of, time) + k * (time[..., None] * v)[:, :, None]
    y = (q * matrices).sum(2)
    return (y if of.skip is None else y + of.skip[:, None] * v).flatten(1), matrices


def _shared(x: Array, of: Recurrent) -> Array:
    """Return the keys of each head of values: [n, key heads, d] -> [n, value heads, d, 1]."""
    return x.repeat_interleave(of.value_heads // of.key_heads, dim=1)[..., None]


def _decays(of: Recurrent, time: Array) -> Array:
    rates: Array = of.decay
    return (-rates.exp() * time).exp()[..., None, None]


def _unit(x: Array) -> Array:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _softplus(x: Array) -> Array:
    return torch.logaddexp(x, x.new_zeros(()))


def _finished(y: Array, x: Array, recurrent: Recurrent) -> Array:
    """Normalize and gate the outputs."""
    if recurrent.rule == "gate":
        return y * x[:, recurrent.channels : 2 * recurrent.channels]
    first = 0 if recurrent.rule == "scan" else recurrent.channels
    gates = functional.silu(x[:, first : first + recurrent.outputs])
    if recurrent.rule == "scan":
        return _normed(y * gates, recurrent.key_heads, recurrent)
    return _normed(y, recurrent.value_heads, recurrent) * gates


def _normed(y: Array, groups: int, recurrent: Recurrent) -> Array:
    norm = recurrent.norm
    if norm is None:
        return y
    parts = y.unflatten(1, (groups, -1))
    inverse = torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.eps)
    return (parts * inverse * norm.weight.view(-1, parts.shape[-1])).flatten(1)
