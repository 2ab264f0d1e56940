"""Recurrent layers on arrays of the host: the plain loop over tokens, see `Recurrent`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import FLOAT_BYTES, MAX_JOURNAL, HostStep, Norm, Recurrent
from fd_core.types import IntArray

Floats = npt.NDArray[np.float32]
_NORM_EPS: Final = np.float32(1e-6)
"""Of the norms of queries and keys."""


class StateBlocks:
    """States of one layer in the bytes of its keys and values, uint8[blocks, bytes] each."""

    def __init__(self, sides: Sequence[npt.NDArray[np.uint8]], recurrent: Recurrent) -> None:
        self._sides = sides
        self._widths = [side.shape[1] for side in sides]
        self.state, self.journal = recurrent.sizes
        room = sum(self._widths) // FLOAT_BYTES - self.state
        self.drafts = min(MAX_JOURNAL, room // self.journal)
        """Tokens that the journal holds."""

    def read(self, block: int) -> tuple[int, Floats, Floats]:
        """Copy the number of consumed tokens, the state and the journal [drafts, ...] of a block."""
        stored = np.concatenate([side[block] for side in self._sides])
        values = stored[: (self.state + self.drafts * self.journal) * FLOAT_BYTES].view(np.float32)
        return int(values[:1].view(np.int32)[0]), values[1 : self.state], values[self.state :].reshape(-1, self.journal)

    def write(self, blocks: IntArray, consumed: int, state: Floats, journal: Floats) -> None:
        """Write them to equal blocks."""
        head = np.array([consumed], np.int32).view(np.float32)
        stored, begin = np.concatenate([head, state, journal.ravel()]).view(np.uint8), 0
        for side, width in zip(self._sides, self._widths, strict=True):
            part = stored[begin : begin + width]
            side[blocks, : len(part)] = part
            begin += width


def recur(x: Floats, recurrent: Recurrent, blocks: StateBlocks, step: HostStep, block_size: int) -> Floats:
    """Compute `Ops.recur` in float32; `recurrent` has arrays of numpy."""
    inputs, outputs = _journaled(x, recurrent), np.empty((len(x), recurrent.outputs), np.float32)
    for row, (begin, end) in enumerate(zip(step.query_start.tolist(), step.query_start[1:].tolist(), strict=False)):
        upto = int(step.context_len[row])
        start, table = upto - (end - begin), step.block_tables[row]
        if start:
            consumed, state, journal = blocks.read(table[(start - 1) // block_size])
            if not 0 <= start - consumed <= blocks.drafts:
                outputs[begin:end] = np.nan
                continue
        else:
            consumed, state, journal = 0, np.zeros(blocks.state - 1, np.float32), inputs[:0]
        tokens = np.concatenate([journal[: start - consumed], inputs[begin:end]])
        settled = max(start + 1, upto - blocks.drafts)
        places = {
            each: table[[each // block_size - 1]]
            for each in range(-(-(start + 1) // block_size) * block_size, settled, block_size)
        }
        places[settled] = table[(settled - 1) // block_size : (upto - 1) // block_size + 1]
        walk = _Walk(recurrent, state)
        for index, token in enumerate(tokens):
            y, position = walk.step(token), consumed + index
            if position >= start:
                outputs[begin + position - start] = y
            if position + 1 in places:
                rest = tokens[index + 1 :] if position + 1 == settled else tokens[:0]
                blocks.write(places[position + 1], position + 1, walk.state, rest)
    return _finished(outputs, x, recurrent)


def _journaled(x: Floats, recurrent: Recurrent) -> Floats:
    """Return the inputs of the convolution, and the scalars of each head: [T, journal]."""
    if recurrent.rule == "gate":
        b, _, c = np.split(x, 3, axis=1)
        return b * c
    first, end = recurrent.outputs if recurrent.rule == "scan" else 0, recurrent.channels + recurrent.outputs
    return np.concatenate([x[:, first : first + recurrent.channels], x[:, end:]], axis=1)


def _finished(y: Floats, x: Floats, recurrent: Recurrent) -> Floats:
    """Normalize and gate the outputs."""
    if recurrent.rule == "gate":
        return y * x[:, recurrent.channels : 2 * recurrent.channels]
    first = 0 if recurrent.rule == "scan" else recurrent.channels
    gates = _silu(x[:, first : first + recurrent.outputs])
    if recurrent.rule == "scan":
        return _normed(y * gates, recurrent.key_heads, recurrent.norm)
    return _normed(y, recurrent.value_heads, recurrent.norm) * gates


def _normed(y: Floats, groups: int, norm: Norm | None) -> Floats:
    """Normalize equal parts of the outputs."""
    if norm is None:
        return y
    parts = y.reshape(len(y), groups, -1)
    mean_square = np.square(parts).mean(axis=-1, keepdims=True)
    weight = np.asarray(norm.weight).reshape(-1, parts.shape[-1])
    return np.reshape(parts / np.sqrt(mean_square + np.float32(norm.eps)) * weight, y.shape)


class _Walk:
    """One row's state, token by token."""

    def __init__(self, recurrent: Recurrent, state: Floats) -> None:
        self._of = recurrent
        self.state = state
        """[(taps - 1) * channels + matrices], changed in place."""
        taps, channels = recurrent.conv.shape
        self._before = state[: (taps - 1) * channels].reshape(taps - 1, channels)
        self._matrices = state[(taps - 1) * channels :].reshape(-1, recurrent.key_dim or 1, recurrent.value_dim or 1)

    def step(self, token: Floats) -> Floats:
        """Consume one token of the journal's form; return its outputs before `_finished`."""
        of, new = self._of, token[: self._of.channels]
        y = of.conv[-1] * new
        for weights, before in zip(of.conv, self._before, strict=False):
            y = y + weights * before
        if of.conv_bias is not None:
            y = y + of.conv_bias
        self._before[:-1] = self._before[1:].copy()
        self._before[-1:] = new
        if of.rule == "gate":
            return np.asarray(y)
        scalars = token[of.channels :].reshape(-1, of.value_heads)
        return self._delta(_silu(y), *scalars) if of.rule == "delta" else self._scan(_silu(y), scalars[0])

    def _delta(self, qkv: Floats, b: Floats, a: Floats) -> Floats:
        of, matrices = self._of, self._matrices
        rates, time_bias = np.exp(np.asarray(of.decay)), np.asarray(of.time_bias)
        q, k, v = np.split(qkv, [of.key_heads * of.key_dim, 2 * of.key_heads * of.key_dim])
        shared = of.value_heads // of.key_heads
        q, k = (np.repeat(_unit(each.reshape(of.key_heads, -1)), shared, axis=0) for each in (q, k))
        matrices *= np.exp(-rates * _softplus(a + time_bias))[:, None, None]
        beta = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * b))
        change = beta[:, None] * (v.reshape(of.value_heads, -1) - np.einsum("hk,hkv->hv", k, matrices))
        matrices += k[:, :, None] * change[:, None]
        y: Floats = np.einsum("hk,hkv->hv", q * np.float32(of.key_dim**-0.5), matrices).ravel()
        return y

    def _scan(self, vkq: Floats, a: Floats) -> Floats:
        of, matrices = self._of, self._matrices
        rates, time_bias = np.exp(np.asarray(of.decay)), np.asarray(of.time_bias)
        v, k, q = np.split(vkq, [of.outputs, of.outputs + of.key_heads * of.key_dim])
        v, shared = v.reshape(of.value_heads, -1), of.value_heads // of.key_heads
        k, q = (np.repeat(each.reshape(of.key_heads, -1), shared, axis=0) for each in (k, q))
        time = np.clip(_softplus(a + time_bias), *np.array(of.time_limits, np.float32))
        matrices *= np.exp(-rates * time)[:, None, None]
        matrices += k[:, :, None] * (time[:, None] * v)[:, None]
        skipped = 0 if of.skip is None else np.asarray(of.skip)[:, None] * v
        y: Floats = np.ravel(np.einsum("hk,hkv->hv", q, matrices) + skipped)
        return y


def _unit(x: Floats) -> Floats:
    unit: Floats = x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + _NORM_EPS)
    return unit


def _silu(x: Floats) -> Floats:
    activated: Floats = x * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x)))
    return activated


def _softplus(x: Floats) -> Floats:
    positive: Floats = np.logaddexp(np.float32(0), x)
    return positive
