"""Recurrent layers in Triton: two launches with a convolution alone, three with a matrix per head, for any step.

The first kernel convolves all tokens, in parallel. The second one keeps some columns of a head's matrix in registers,
and loops over the tokens of its row, those that the journal repeats first. The last one normalizes and gates the
outputs, and writes what later steps need of the inputs. So no program reads what another one of its launch writes, and
the bits of a token depend neither on the step nor on the chunk.

States are read and written in place, in the layout of `Recurrent`. Padding precedes the tokens of a row, in the spare
block, and is skipped, so decodes may be replayed, with drafts as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import MAX_JOURNAL, Array, Recurrent, StepInput

from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2
from fd_gpu_cuda.kernels.norms import weight_and_eps
from fd_gpu_cuda.kv_cache import CudaLayer

_CHANNELS = 1024
"""Channels of a program of a convolution."""
_COLUMNS = 8
_CELLS = 1024
"""Limits of the part of a matrix in one program, which is one warp: sums over its rows need no barrier."""
_NORMED = 1024
"""Outputs that a program normalizes, unless those of one norm are more."""
_STEP_ARGUMENTS = ["table_stride", "rows", "width", "spare"]
_UNALIGNED = ["query_start_at", "context_at", "kv_slots_at", "tables_at"]


def recur(x: Array, recurrent: Recurrent, layer: CudaLayer, step: StepInput) -> Array:
    """Compute `Ops.recur`; does not synchronize. Raises `RuntimeError` if heads are no multiple of 4 bytes."""
    of, tokens, rows = recurrent, len(x), len(step.context_len)
    out = torch.empty((tokens, of.outputs), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    words = [layer.keys.view(torch.float32), layer.values.view(torch.float32), layer.key_scales, layer.value_scales]
    scaled = int(layer.quantized)
    head = words[0].shape[2] + scaled
    side = layer.block_size * words[0].shape[1] * head
    (taps, channels), (state, journal), heads = of.conv.shape, of.sizes, of.value_heads
    drafts = min(MAX_JOURNAL, (2 * side - state) // journal)
    layout = {"side": side, "head": head, "state": state, "journal": journal, "drafts": drafts, "taps": taps}
    layout |= {"channels": channels, "outputs": of.outputs, "rule": of.rule, "block_size": layer.block_size}
    x = x if x.stride(1) == 1 else x.contiguous()
    width = step.max_query if step.uniform else 0
    # The last block of the cache is that of padding.
    spare = len(layer.keys) - layer.block_size
    places = step.query_start, step.context_len, step.kv_slots, step.block_tables, step.block_tables.stride(0)
    numbers = rows, width, spare
    z_width = channels + 2 * heads
    missing = torch.empty(rows, dtype=torch.int32, device=x.device)
    inputs = x, x.stride(0)
    if of.rule == "gate":
        z, y = out, None
    else:
        z = torch.empty((rows * drafts + tokens, z_width), dtype=torch.float32, device=x.device)
        y = torch.empty((tokens, of.outputs), dtype=torch.float32, device=x.device)
    parts = cdiv(channels, _CHANNELS) + bool(heads)
    _convolve[(rows + tokens, parts)](
        *inputs, of.conv, of.conv_bias, of.decay, of.time_bias, z, missing, *words, *places, *of.time_limits, *numbers,
        z_width=z_width, heads=heads, h=next_power_of_2(heads or 1), n=_CHANNELS, **layout,
    )  # fmt: skip
    if y is not None:
        keys, values = of.key_heads * of.key_dim, of.outputs
        firsts = (0, keys, 2 * keys) if of.rule == "delta" else (values + keys, values, 0)
        sizes = {"key_dim": of.key_dim, "value_dim": of.value_dim, "heads": heads, "shared": heads // of.key_heads}
        d = next_power_of_2(of.key_dim)
        n = min(max(_CELLS // (d * (1 + scaled)), 1), _COLUMNS)  # addresses of scaled words take registers
        _walk_rows[(rows, heads, cdiv(of.value_dim, n))](
            z, missing, y, of.skip, *words, *places, *numbers, of.key_dim**-0.5,
            z_width=z_width, first_query=firsts[0], first_key=firsts[1], first_value=firsts[2],
            d=d, n=n, num_warps=1, **sizes, **layout,
        )  # fmt: skip
    groups = heads if of.rule == "delta" else of.key_heads
    normed = of.outputs // groups if groups else 1
    d = next_power_of_2(normed)
    g = max(min(_NORMED // d, next_power_of_2(groups or 1)), 1)
    weight, eps = weight_and_eps(of.norm)
    programs = rows + (0 if y is None else tokens)
    _norm_and_keep[(programs, max(parts, cdiv(groups, g)))](
        *inputs, y, out, weight, eps, missing, *words, *places, *numbers,
        parts=parts, groups=groups, normed=normed, norm_stride=normed if of.rule == "scan" else 0,
        g=g, d=d, n=_CHANNELS, num_warps=4 if d <= 2 * _NORMED else 8, **layout,
    )  # fmt: skip
    return out


@triton.jit
def _words_of(
    keys_at, values_at, key_scales_at, value_scales_at, block, index, side: tl.constexpr, head: tl.constexpr
):  # fmt: skip
    """Return pointers to the words of a block: of its keys, and then of its values, each head with its scale."""
    in_keys = index < side
    word = tl.where(in_keys, index, index - side)
    place = block * side + word
    if key_scales_at is not None:
        scale = block * (side // head) + word // head
        place = scale * (head - 1) + word % head
    at = tl.where(in_keys, keys_at + place, values_at + place)
    if key_scales_at is not None:
        scales = tl.where(in_keys, key_scales_at + scale, value_scales_at + scale)
        at = tl.where(word % head == head - 1, scales, at)
    return at


@triton.jit
def _tokens_of(row, query_start_at, context_at, kv_slots_at, spare):
    """Return a row's first token after padding, the end of its tokens, and the position of that token."""
    begin = tl.load(query_start_at + row)
    end = tl.load(query_start_at + row + 1)
    while tl.load(kv_slots_at + begin, mask=begin < end, other=-1) >= spare:
        begin += 1
    return begin, end, tl.load(context_at + row) - (end - begin)


@triton.jit
def _entry(tables_at, table_stride, row, position, block_size: tl.constexpr):
    """Return the block of a row's position."""
    return tl.load(tables_at + row.to(tl.int64) * table_stride + position // block_size).to(tl.int64)


@triton.jit
def _input(x_at, x_stride, token, column, shift, mask, channels: tl.constexpr, rule: tl.constexpr):
    """Return the inputs of a token in the journal's form, of which these columns are `shift` columns later in x."""
    line = x_at + token.to(tl.int64) * x_stride + shift
    found = tl.load(line + column, mask=mask, other=0.0).to(tl.float32)
    if rule == "gate":
        found *= tl.load(line + 2 * channels + column, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def _input_at(
    x_at, x_stride, keys_at, values_at, key_scales_at, value_scales_at, block, position, begin, start, missing,
    column, shift, mask,
    side: tl.constexpr, head: tl.constexpr, state: tl.constexpr, journal: tl.constexpr, taps: tl.constexpr,
    channels: tl.constexpr, rule: tl.constexpr,
):  # fmt: skip
    """Return the inputs at a position of a row: of this step, or from the journal or the state before it."""
    if position >= start:
        found = _input(x_at, x_stride, begin + position - start, column, shift, mask, channels, rule)
    elif start > 0:
        back = position - start + tl.maximum(missing, 0)
        word = tl.where(back >= 0, state + back * journal, 1 + (back + taps - 1) * channels)
        at = _words_of(keys_at, values_at, key_scales_at, value_scales_at, block, word + column, side, head)
        found = tl.load(at, mask=mask, other=0.0)
    else:
        found = column * 0.0
    return found


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), accurate also if exp(x) vanishes next to 1."""
    e = tl.exp(-tl.abs(x))
    more = 1.0 + e
    return tl.where(x > 0.0, x, 0.0) + tl.where(more == 1.0, e, tl.log(more) * (e / (more - 1.0)))


@kernel(do_not_specialize=_STEP_ARGUMENTS, do_not_specialize_on_alignment=_UNALIGNED)
def _convolve(
    x_at, x_stride, weights_at, bias_at, decay_at, time_bias_at, z_at, missing_at,
    keys_at, values_at, key_scales_at, value_scales_at,
    query_start_at, context_at, kv_slots_at, tables_at, table_stride, least_time, most_time, rows, width, spare,
    z_width: tl.constexpr, heads: tl.constexpr, h: tl.constexpr, n: tl.constexpr,
    side: tl.constexpr, head: tl.constexpr, state: tl.constexpr, journal: tl.constexpr, drafts: tl.constexpr,
    taps: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr, rule: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens that a row replays, or one token of the step; the last tile has the scalars of heads."""
    shift: tl.constexpr = outputs if rule == "scan" else 0
    token = tl.program_id(0) - rows
    tile = tl.program_id(1)
    row = tl.program_id(0)
    if token >= 0:
        if width > 0:
            row = token // width
        else:
            row = 0
            after = rows
            while after - row > 1:
                middle = (row + after) // 2
                if tl.load(query_start_at + middle) <= token:
                    row = middle
                else:
                    after = middle
    begin, _, start = _tokens_of(row, query_start_at, context_at, kv_slots_at, spare)
    block = row.to(tl.int64) * 0
    missing = 0
    if start > 0:
        block = _entry(tables_at, table_stride, row, start - 1, block_size)
        first = _words_of(keys_at, values_at, key_scales_at, value_scales_at, block, block * 0, side, head)
        missing = start - tl.load(first).to(tl.int32, bitcast=True)
        if (missing < 0) | (missing > drafts):
            missing = -1
    place = row.to(tl.int64) * drafts
    position = start - missing
    upto = start
    if token < 0:
        if tile == 0:
            tl.store(missing_at + row, missing)
        if rule == "gate":
            upto = position
    else:
        position = start + token - begin
        upto = position + 1
        place = token.to(tl.int64)
        if rule != "gate":
            place += rows.to(tl.int64) * drafts
        if position < start:  # padding
            upto = position
    while position < upto:
        if tile * n < channels:
            column = tile * n + tl.arange(0, n)
            mask = column < channels
            y = tl.zeros((n,), tl.float32)
            if bias_at is not None:
                y = tl.load(bias_at + column, mask=mask, other=0.0)
            for tap in tl.static_range(taps):
                each = _input_at(
                    x_at, x_stride, keys_at, values_at, key_scales_at, value_scales_at,
                    block, position + (tap - taps + 1), begin, start, missing, column, shift, mask,
                    side, head, state, journal, taps, channels, rule,
                )  # fmt: skip
                y += tl.load(weights_at + tap * channels + column, mask=mask, other=0.0) * each
            if rule == "gate":
                line = x_at + token.to(tl.int64) * x_stride
                y *= tl.load(line + channels + column, mask=mask, other=0.0).to(tl.float32)
                y = tl.where(missing < 0, float("nan"), y)
            else:
                y = y / (1.0 + tl.exp(-y))
            tl.store(z_at + place * z_width + column, y.to(z_at.dtype.element_ty), mask=mask)
        else:
            lane = tl.arange(0, h)
            real = lane < heads
            scalar = channels + lane
            if rule == "delta":
                b = _input_at(
                    x_at, x_stride, keys_at, values_at, key_scales_at, value_scales_at,
                    block, position, begin, start, missing, scalar, outputs, real,
                    side, head, state, journal, taps, channels, rule,
                )  # fmt: skip
                scalar += heads
            a = _input_at(
                x_at, x_stride, keys_at, values_at, key_scales_at, value_scales_at,
                block, position, begin, start, missing, scalar, outputs, real,
                side, head, state, journal, taps, channels, rule,
            )  # fmt: skip
            time = _softplus(a + tl.load(time_bias_at + lane, mask=real, other=0.0))
            time = tl.where(time < least_time, least_time, tl.where(time > most_time, most_time, time))  # NaN remains
            share = time
            if rule == "delta":
                share = 1.0 / (1.0 + tl.exp(-b))
            kept = tl.exp(-tl.exp(tl.load(decay_at + lane, mask=real, other=0.0)) * time)
            at = z_at + place * z_width + channels + lane
            tl.store(at, share, mask=real)
            tl.store(at + heads, kept, mask=real)
        position += 1
        place += 1


@triton.jit
def _token_at(
    z_at, line, own, of_query, of_key, of_value, real_key, real,
    z_width: tl.constexpr, channels: tl.constexpr, heads: tl.constexpr,
):  # fmt: skip
    """Return a convolved token's query, key and value of a head, and the two scalars of the head."""
    z = z_at + line * z_width
    q = tl.load(z + of_query, mask=real_key, other=0.0)
    k = tl.load(z + of_key, mask=real_key, other=0.0)
    v = tl.load(z + of_value, mask=real, other=0.0)
    return q, k, v, tl.load(z + channels + own), tl.load(z + channels + heads + own)


@kernel(do_not_specialize=_STEP_ARGUMENTS, do_not_specialize_on_alignment=_UNALIGNED)
def _walk_rows(
    z_at, missing_at, y_at, skip_at,
    keys_at, values_at, key_scales_at, value_scales_at,
    query_start_at, context_at, kv_slots_at, tables_at, table_stride, rows, width, spare, scale,
    z_width: tl.constexpr, first_query: tl.constexpr, first_key: tl.constexpr, first_value: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr, heads: tl.constexpr, shared: tl.constexpr,
    d: tl.constexpr, n: tl.constexpr,
    side: tl.constexpr, head: tl.constexpr, state: tl.constexpr, journal: tl.constexpr, drafts: tl.constexpr,
    taps: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr, rule: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Update some columns of the matrix of a head with the tokens of a row, and multiply the queries by them."""
    row = tl.program_id(0)
    own = tl.program_id(1)
    column = tl.program_id(2) * n + tl.arange(0, n)
    key = tl.arange(0, d)
    real_key, real = key < key_dim, column < value_dim
    y_line = y_at + own * value_dim + column
    begin, end, start = _tokens_of(row, query_start_at, context_at, kv_slots_at, spare)
    missing = tl.load(missing_at + row)
    first = tl.load(query_start_at + row)
    for place in range(begin - first):
        at = y_line + (first + place).to(tl.int64) * outputs
        tl.store(at, tl.zeros((n,), tl.float32), mask=real)
    if missing < 0:
        for place in range(end - begin):
            at = y_line + (begin + place).to(tl.int64) * outputs
            tl.store(at, tl.full((n,), float("nan"), tl.float32), mask=real)
    elif begin < end:
        cell = 1 + (taps - 1) * channels + (own * key_dim + key[:, None]) * value_dim + column[None, :]
        real_cell = real_key[:, None] & real[None, :]
        matrix = tl.zeros((d, n), tl.float32)
        if start > 0:
            block = _entry(tables_at, table_stride, row, start - 1, block_size)
            at = _words_of(keys_at, values_at, key_scales_at, value_scales_at, block, cell, side, head)
            matrix = tl.load(at, mask=real_cell, other=0.0)
            tl.debug_barrier()
        upto = start + end - begin
        settled = tl.maximum(start + 1, upto - drafts)
        of_query = first_query + own // shared * key_dim + key
        of_key = first_key + own // shared * key_dim + key
        of_value = first_value + own * value_dim + column
        replayed = row.to(tl.int64) * drafts + missing
        own_line = rows.to(tl.int64) * drafts + begin
        next_q, next_k, next_v, next_share, next_kept = _token_at(
            z_at, tl.where(missing > 0, replayed - missing, own_line), own, of_query, of_key, of_value, real_key, real,
            z_width, channels, heads,
        )  # fmt: skip
        for position in range(start - missing, upto):
            q, k, v, share, kept = next_q, next_k, next_v, next_share, next_kept
            # One token ahead, so that the matrix does not wait for it.
            ahead = tl.minimum(position + 1, upto - 1) - start
            next_q, next_k, next_v, next_share, next_kept = _token_at(
                z_at, tl.where(ahead < 0, replayed, own_line) + ahead, own, of_query, of_key, of_value, real_key, real,
                z_width, channels, heads,
            )  # fmt: skip
            matrix *= kept
            if rule == "delta":
                q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
                k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                change = share * (v - tl.sum(k[:, None] * matrix, 0))
            else:
                change = share * v
            matrix += k[:, None] * change[None, :]
            y = tl.sum(q[:, None] * matrix, 0)
            if skip_at is not None:
                y += tl.load(skip_at + own) * v
            at_end = position + 1
            if position >= start:
                token = begin + position - start
                tl.store(y_line + token.to(tl.int64) * outputs, y, mask=real)
                if (at_end == settled) | ((at_end % block_size == 0) & (at_end < settled)):
                    # The last state goes to the entries of all later tokens as well.
                    last = tl.where(at_end == settled, upto, at_end) - 1
                    for entry in range((at_end - 1) // block_size, last // block_size + 1):
                        block = _entry(tables_at, table_stride, row, entry * block_size, block_size)
                        at = _words_of(keys_at, values_at, key_scales_at, value_scales_at, block, cell, side, head)
                        tl.store(at, matrix, mask=real_cell)


@kernel(do_not_specialize=_STEP_ARGUMENTS, do_not_specialize_on_alignment=_UNALIGNED)
def _norm_and_keep(
    x_at, x_stride, y_at, out_at, norm_at, eps, missing_at,
    keys_at, values_at, key_scales_at, value_scales_at,
    query_start_at, context_at, kv_slots_at, tables_at, table_stride, rows, width, spare,
    parts: tl.constexpr, groups: tl.constexpr, normed: tl.constexpr, norm_stride: tl.constexpr, g: tl.constexpr,
    d: tl.constexpr, n: tl.constexpr,
    side: tl.constexpr, head: tl.constexpr, state: tl.constexpr, journal: tl.constexpr, drafts: tl.constexpr,
    taps: tl.constexpr, channels: tl.constexpr, outputs: tl.constexpr, rule: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Write the inputs that follow the states of a row, or normalize and gate some outputs of a token."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    if row >= rows:
        if rule != "gate":
            token = (row - rows).to(tl.int64)
            group = part * g + tl.arange(0, g)[:, None]
            column = tl.arange(0, d)[None, :]
            mask = (group < groups) & (column < normed)
            place = group * normed + column
            y = tl.load(y_at + token * outputs + place, mask=mask, other=0.0)
            first: tl.constexpr = channels if rule == "delta" else 0
            gates = tl.load(x_at + token * x_stride + first + place, mask=mask, other=0.0).to(tl.float32)
            if rule == "scan":
                y *= gates / (1.0 + tl.exp(-gates))
            if norm_at is not None:
                y *= tl.rsqrt(tl.sum(y * y, 1) / normed + eps)[:, None]
                y *= tl.load(norm_at + group * norm_stride + column, mask=mask, other=0.0)
            if rule == "delta":
                y *= gates / (1.0 + tl.exp(-gates))
            tl.store(out_at + token * outputs + place, y.to(out_at.dtype.element_ty), mask=mask)
    else:
        begin, end, start = _tokens_of(row, query_start_at, context_at, kv_slots_at, spare)
        missing = tl.load(missing_at + row)
        if (missing >= 0) & (begin < end) & (part < parts):
            convolved = part * n < channels
            column = tl.where(convolved, part * n, channels) + tl.arange(0, n)
            mask = column < tl.where(convolved, channels, journal)
            kept_before = column < channels
            shift = tl.where(convolved, outputs if rule == "scan" else 0, outputs)
            block = row.to(tl.int64) * 0
            if start > 0:
                block = _entry(tables_at, table_stride, row, start - 1, block_size)
            upto = start + end - begin
            last = (upto - 1) // block_size
            at_end = tl.maximum(start + 1, upto - drafts)
            kept = upto - at_end
            # The latest state first: only the earliest one may replace that which was read.
            while at_end > start:
                entry = (at_end - 1) // block_size
                for tap in tl.static_range(taps - 1):
                    value = _input_at(
                        x_at, x_stride, keys_at, values_at, key_scales_at, value_scales_at,
                        block, at_end + (tap - taps + 1), begin, start, missing, column, shift, kept_before,
                        side, head, state, journal, taps, channels, rule,
                    )  # fmt: skip
                    tl.debug_barrier()
                    for each in range(entry, last + 1):
                        to = _entry(tables_at, table_stride, row, each * block_size, block_size)
                        word = 1 + tap * channels + column
                        at = _words_of(keys_at, values_at, key_scales_at, value_scales_at, to, word, side, head)
                        tl.store(at, value, mask=kept_before)
                for each in range(entry, last + 1):
                    to = _entry(tables_at, table_stride, row, each * block_size, block_size)
                    for draft in range(kept):
                        token = begin + at_end - start + draft
                        value = _input(x_at, x_stride, token, column, shift, mask, channels, rule)
                        word = state + draft * journal + column
                        at = _words_of(keys_at, values_at, key_scales_at, value_scales_at, to, word, side, head)
                        tl.store(at, value, mask=mask)
                    if part == 0:
                        at = _words_of(keys_at, values_at, key_scales_at, value_scales_at, to, to * 0, side, head)
                        tl.store(at, at_end.to(tl.float32, bitcast=True))
                kept = 0
                at_end = (at_end - 1) // block_size * block_size
                last = at_end // block_size - 1
